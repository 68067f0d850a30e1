"""Requests that need more blocks than the memory can hold, which shows only when an allocation
fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged import OutOfBlocksError, PagedConfig, PagedEngine
from hf_paged.batching import engine_loop
from hf_paged.cache import free_memory, kv_blocks
from tests.support import models
from tests.support.engine_helpers import (
    Asked,
    assert_drained,
    assert_same_as_lone,
    lone_run,
    prompts,
    run_all,
)

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
SHORT = {**GREEDY, "max_new_tokens": 6}
# of 8 tokens: keys and values of 2 heads of 16 float32 in 2 layers
BLOCK_BYTES = 8 * 2 * 2 * 16 * 4 * 2


@pytest.mark.parametrize("num_blocks", [None, 1000])
def test_one_that_never_fits_fails_soon_and_alone(
    num_blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beams recompute their shared tokens in each attempt: the second attempt without progress ends
    them."""
    # free, whatever the machine
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: 5 * BLOCK_BYTES + 64)
    model, prompt = models.get("llama"), prompts(5)[0]
    config = PagedConfig(block_size=8, num_blocks=num_blocks, memory_fraction=1.0)
    modes = {"long": {"max_new_tokens": 200}, "beams": {"max_new_tokens": 200, "num_beams": 3}}
    with PagedEngine(model, config) as engine:
        for name, mode in modes.items():
            engine.add_request(prompt, {**GREEDY, **mode}, request_id=name)
        engine.add_request(prompt, SHORT, request_id="short")
        results = run_all(engine)
        assert engine.stats().num_steps < 600
        for name in modes:
            error = results[name].error
            assert isinstance(error, OutOfBlocksError) and "memory_fraction" in str(error)
        assert_same_as_lone(lone_run(model, prompt, SHORT), results["short"], GREEDY, "")
        assert_drained(engine)


def test_memory_that_is_refused_while_the_pool_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget: the allocator refuses more than 6 blocks. That is a shortage like others,
    which preempts; the error of a request that needs more names no number of blocks."""
    make = kv_blocks._empty

    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = make(*args, **kwargs)
        if found.nbytes > 6 * 8 * 4 * 16 * 4:
            raise torch.OutOfMemoryError("no more of it")
        return found

    # otherwise storage is reserved at once, and never grows
    monkeypatch.setattr(engine_loop, "UNLIMITED_BLOCKS", 1)
    model, prompt = models.get("llama"), prompts(5)[0]
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        engine.generate([prompt], SHORT)
        monkeypatch.setattr(kv_blocks, "_empty", refuse)
        Asked(engine, prompts(9, 20, 14), {**GREEDY, "max_new_tokens": 20}).check()
        assert engine.stats().num_preemptions > 0
        (result,) = engine.generate([prompt], {**GREEDY, "max_new_tokens": 400})
        assert result.error is not None and "922337203685477" not in str(result.error)
        assert engine.stats().num_steps < 600
        assert_drained(engine)
