"""Whole calls with `PagedConfig(kv_dtype=...)`, against plain `generate` with a cache that rounds
its input: scales move with their blocks."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_paged
from hf_paged import PagedCache, PagedConfig, PagedEngine, last_route, memory_stats
from hf_paged.cache import kv_blocks
from hf_paged.kernels import cpp, quantized
from hf_paged.rooms import is_installed
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.engine_helpers import (
    MODES,
    assert_drained,
    assert_same_as_lone,
    lone_run,
    prompts,
    tokens_of,
)
from tests.support.latents import build_deepseek
from tests.support.quantized import round_caches, round_states

pytestmark = pytest.mark.skipif(
    not cpp.is_available(), reason="the first forward is attended to unrounded: no compiler"
)

KV_DTYPES = list(quantized.DTYPES)


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Applies `round_caches` until the test ends."""
    return functools.partial(round_caches, monkeypatch)


def paged(kv_dtype: str | None) -> dict[str, Any]:
    config = {"block_size": 8, "kv_dtype": kv_dtype}
    return {"cache_implementation": "paged", "cache_config": config}


def build(name: str) -> Any:
    if name == "deepseek":  # latents
        return build_deepseek()
    # the second kind has attention code of its own, which gets packed rows (`DeferredKV`)
    return models.get(name) if name.islower() else tiny_model(getattr(transformers, name))


MODE_NAMES = ("greedy", "samples", "beams", "penalties")


@pytest.mark.slow_cases(
    "*bart-greedy",
    "cpu-gemma3-samples",
    "cpu-gemma3-penalties",
    "cpu-gpt2-greedy",
    "cpu-gpt2-beams",
    "cpu-t5-greedy",
    "cpu-qwen3_next-beams",
    "cpu-gpt_oss-beams",
)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *itertools.product(["llama", "gemma3", "gpt2"], MODE_NAMES),
        # cross attention, biases, states, sinks
        *itertools.product(["t5", "bart", "qwen3_next", "gpt_oss"], ["greedy", "beams"]),
        *((name, "greedy") for name in ("deepseek", "GPTJForCausalLM", "FalconForCausalLM")),
    ],
)
def test_generate(name: str, mode: str, rounded: Any, device: torch.device) -> None:
    model, inputs = models.put(build(name), device), models.padded_prompt(name, (21, 4, 9))
    inputs, kv_dtype = models.put(inputs, device), KV_DTYPES[MODE_NAMES.index(mode) % 3]
    torch.manual_seed(0)
    found = model.generate(**inputs, **MODES[mode], **paged(kv_dtype))
    route, stats = last_route(model), memory_stats(model)
    assert route is not None and route.latent == (name == "deepseek")
    # rectangles begin with a forward that attends to unrounded states
    is_packed = "packed forwards" in route.reason
    assert is_packed == (name not in ("t5", "bart", "qwen3_next"))
    assert not is_packed or route.num_captured_steps or not is_installed("tape")
    assert stats.kv_dtype == kv_dtype and stats.peak_bytes > 0
    hf_paged.check_integrity(model)
    torch.manual_seed(0)
    unrounded = model.generate(**inputs, **MODES[mode])
    rounded(kv_dtype, shows_fresh=not is_packed)
    torch.manual_seed(0)
    assert torch.equal(found, model.generate(**inputs, **MODES[mode]))
    assert name != "llama" or kv_dtype == "int8" or not torch.equal(found, unrounded), (
        "nothing was rounded"
    )
    hf_paged.free(model)


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_an_engine_preempts_and_finds_prefixes(
    preemption: str, rounded: Any, device: torch.device
) -> None:
    model, texts = models.put(models.get("llama"), device), prompts(20, 25, 9, 31)
    config = PagedConfig(block_size=8, num_blocks=9, preemption=preemption, kv_dtype="fp8_e4m3")
    beams = texts[0][:7]
    with PagedEngine(model, config) as engine:
        found = tokens_of(engine.generate(texts, MODES["greedy"]))
        (result,) = engine.generate([beams], MODES["beams"])
        stats = engine.stats()
        assert stats.num_preemptions > 0 and (stats.num_swaps > 0) == (preemption == "swap")
        assert "fp8_e4m3" in engine._repr_html_() and stats.kv_dtype == "fp8_e4m3"
        assert_drained(engine)
    rounded("fp8_e4m3")
    assert found == [lone_run(model, text, MODES["greedy"]) for text in texts]
    assert_same_as_lone(lone_run(model, beams, MODES["beams"]), result, MODES["beams"], "beams")


@torch.no_grad()
def cached(kv_dtype: str | None) -> tuple[Any, Tensor, PagedCache]:
    model, ids = models.get("llama"), models.prompt("llama", 2, 21)["input_ids"]
    cache = PagedCache(model.config, {"block_size": 8, "kv_dtype": kv_dtype})
    model(ids, past_key_values=cache)
    return model, ids, cache


def states_of(cache: Any) -> list[Tensor]:
    return [x.dense().clone() for layer in cache.layers for x in (layer.keys, layer.values)]


@pytest.mark.parametrize("kv_dtype", [None, *KV_DTYPES])
def test_copies_and_pickles_of_a_cache(kv_dtype: str | None) -> None:
    model, ids, cache = cached(kv_dtype)
    cache.batch_repeat_interleave(2)
    expected, used = states_of(cache), cache.stats().used_blocks
    assert used == 2 * 3 and expected[0].dtype == torch.float32
    step = functools.partial(model, ids[:, -1:].repeat_interleave(2, dim=0))
    logits = step(past_key_values=copy.deepcopy(cache)).logits
    assert cache.stats().copied_blocks > 0
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert twin.stats().used_blocks == used, "sharing is lost, or a copy takes blocks"
        assert all(map(torch.equal, states_of(twin), expected))
        assert torch.equal(step(past_key_values=twin).logits, logits)
        twin.check_integrity()
    cache.reorder_cache(torch.tensor([3, 0, 1]))
    assert all(torch.equal(x, y[[3, 0, 1]]) for x, y in zip(states_of(cache), expected))
    if kv_dtype is not None:
        assert len(pickle.dumps(cache)) < 0.5 * len(pickle.dumps(cached(None)[2]))
    cache.reset()
    cache.check_integrity()
    assert cache.stats().used_blocks == 0


@pytest.mark.parametrize("has_kernels", [True, False])
def test_padding_is_gathered_as_zeros(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_blocks.cpp, "is_available", lambda: has_kernels)
    keys = torch.randn(2, 2, 5, 4)
    cache = PagedCache(paged_config={"block_size": 8, "kv_dtype": "int8"})
    cache.expect_padding((0, 2), 5)
    cache.update(keys, keys, 0)
    dense = cache.layers[0].keys.dense()  # type: ignore[union-attr]
    keys[1, :, :2] = 0
    assert torch.equal(dense, round_states(keys, "int8"))


def test_states_of_another_dtype_share_blocks() -> None:
    """As under autocast: stored codes stay; returned states have the wider dtype."""
    _, _, cache = cached("int8")
    before, zeros = states_of(cache)[0], torch.zeros(2, 2, 1, 16, dtype=torch.float64)
    cache.layers[0].update(zeros, zeros)
    after = cache.layers[0].keys.dense()  # type: ignore[union-attr]
    assert after.dtype == torch.float64 and torch.equal(after[:, :, :-1].float(), before)


def test_other_kv_dtypes_are_other_pools() -> None:
    model, inputs, sizes = models.build("llama"), models.prompt("llama", 2, 21), {}
    for kv_dtype in (None, "int8", None):
        model.generate(**inputs, max_new_tokens=8, do_sample=False, **paged(kv_dtype))
        stats = memory_stats(model)
        assert stats.kv_dtype == kv_dtype
        assert sizes.setdefault(kv_dtype, stats.peak_bytes) == stats.peak_bytes
    assert sizes["int8"] / sizes[None] == (16 + 4) / (4 * 16)
