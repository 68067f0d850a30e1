"""Group specs: the tokens that layers keep of a sequence; and a custom kind of group defined
here."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from hf_paged import PagedCache, PagedConfig, PagedEngine, last_route, memory_stats
from hf_paged.cache import stand_ins
from hf_paged.cache.groups import UNBOUNDED, GroupSpec, StateSpec
from tests.support import models
from tests.support.engine_helpers import MODES, assert_drained, lone_run, prompts


def test_equal_specs_are_one_group() -> None:
    assert GroupSpec() == GroupSpec("self", None) != GroupSpec("cross")
    assert len({GroupSpec(), GroupSpec(window=8), GroupSpec("self", 8), StateSpec()}) == 3


@pytest.mark.parametrize(
    ("window", "first", "end", "chunk", "held", "expected"),
    [
        (None, 0, 0, 1, 0, 0),
        (None, 0, 17, 1, 0, 3),
        (None, 8, 17, 1, 1, 2),
        (8, 0, 100, 1, 0, 2),
        (9, 0, 100, 1, 0, 2),
        (10, 0, 100, 1, 0, 3),
        (8, 0, 100, 1, 2, 0),
        (8, 0, 100, 32, 0, 6),
        (8, 0, 9, 32, 0, 2),
    ],
)
def test_blocks_spanned(
    window: int | None, first: int, end: int, chunk: int, held: int, expected: int
) -> None:
    assert GroupSpec(window=window).num_spanned(first, end, chunk, held, 8) == expected


def test_a_state_is_one_slot() -> None:
    spec = StateSpec()
    size = spec.block_size(16)
    assert size == UNBOUNDED and GroupSpec().block_size(16) == 16
    assert spec.num_spanned(0, 100_000, 1, 0, size) == 1 and spec.num_spanned(0, 0, 1, 0, size) == 0


def test_first_visible() -> None:
    assert [GroupSpec(window=4).first_visible(n) for n in (0, 3, 4, 9)] == [0, 0, 1, 6]
    assert GroupSpec().first_visible(9) == 0


# ---------------------------------------------------------------------------- a kind of one's own


@dataclass(frozen=True)
class HalfAttention(GroupSpec):
    """Full attention stored in float16."""

    def storage_dtype(self, dtype: Any) -> Any:
        return torch.float16


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stand_ins.SPECS, DynamicLayer, HalfAttention)


@torch.no_grad()
def cached(model: Any, ids: torch.Tensor) -> PagedCache:
    cache = PagedCache(model.config, {"block_size": 8})
    model(ids, past_key_values=cache)
    return cache


@pytest.mark.usefixtures("half")
def test_a_new_kind_of_group_is_stored_as_it_says() -> None:
    model, ids = models.get("llama"), models.prompt("llama", 2, 21)["input_ids"]
    cache = cached(model, ids)
    (group,) = cache.groups.values()
    blocks = group.blocks.storage.layers[0]
    assert isinstance(group.spec, HalfAttention) and blocks.keys.dtype == torch.float16
    keys = cache.layers[0].keys
    assert keys is not None and keys.dtype == torch.float32
    assert torch.equal(keys.dense(), keys.dense().half().float())  # type: ignore[attr-defined]
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(twin.layers[1].values.dense(), cache.layers[1].values.dense())  # type: ignore[union-attr]
        expected = model(ids[:, -1:], past_key_values=copy.deepcopy(cache)).logits
        assert torch.equal(model(ids[:, -1:], past_key_values=twin).logits, expected)
        twin.check_integrity()


def test_a_new_kind_of_group_needs_half_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for _ in range(2):
        model = models.build("llama")
        model.generate(
            **models.prompt("llama", 2, 21), max_new_tokens=8, do_sample=False, **models.PAGED
        )
        used.append(memory_stats(model).peak_bytes)
        monkeypatch.setitem(stand_ins.SPECS, DynamicLayer, HalfAttention)
    assert used[0] == 2 * used[1] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_new_kind_of_group_runs_everywhere(preemption: str) -> None:
    """Through `generate` and an engine, packed, with beams, preempted: logits are well spread, so
    tokens do not change."""
    model = models.build("llama")
    inputs = models.padded_prompt("llama")
    for mode in ("greedy", "beams"):
        expected = model.generate(**inputs, **MODES[mode])
        assert torch.equal(model.generate(**inputs, **MODES[mode], **models.PAGED), expected)
        route = last_route(model)
        assert route is not None and route.road == "engine" and "packed forwards" in route.reason
    texts = prompts(20, 25, 9, 31)
    with PagedEngine(
        model, PagedConfig(block_size=8, num_blocks=8, preemption=preemption)
    ) as engine:
        results = engine.generate(texts, MODES["greedy"])
        assert engine.stats().num_preemptions > 0
        assert (engine.stats().num_swaps > 0) == (preemption == "swap")
        assert_drained(engine)
    for prompt, result in zip(texts, results):
        assert [result.token_ids] == lone_run(model, prompt, MODES["greedy"])
