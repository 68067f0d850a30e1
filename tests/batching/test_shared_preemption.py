"""Preemption of requests with a common prefix: blocks that other requests hold are not copied."""

from __future__ import annotations

import pytest

from hf_paged import PagedConfig, PagedEngine
from hf_paged.batching.scheduling.preemption import CostModel
from tests.support import models
from tests.support.engine_helpers import assert_drained, lone_run, prompts, run_all

GREEDY = {"do_sample": False, "max_new_tokens": 30}


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [True, False])
def test_auto_does_not_swap_what_others_hold(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A swapped-in copy gets separate blocks, so fewer requests fit than before, though copies are
    fast."""
    monkeypatch.setattr(CostModel, "choose", lambda *given: "swap")
    model, (prefix,), ends = (
        models.get("llama"),
        prompts(64, seed=3),
        prompts(*range(5, 13), seed=4),
    )
    texts = [[*prefix, *end] if is_shared else [*end, *prefix[:16]] for end in ends]
    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=30)) as engine:
        # its blocks are indexed
        engine.generate(texts[:1], {"do_sample": False, "max_new_tokens": 1})
        ids = [engine.add_request(text, GREEDY) for text in texts]
        results = run_all(engine)
        stats = engine.stats()
        assert_drained(engine)
    assert [results[name].token_ids for name in ids] == [
        lone_run(model, text, GREEDY)[0] for text in texts
    ]
    assert stats.num_preemptions > 0 and (stats.num_swaps > 0) == (not is_shared)
