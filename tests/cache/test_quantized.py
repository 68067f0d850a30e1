"""Whole calls with `PagedConfig(kv_dtype=...)`, against plain `generate` with a cache that rounds
its input: scales move with their blocks."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_paged
from hf_paged import PagedCache, PagedConfig, PagedEngine, last_route, memory_stats
from hf_paged.cache import reading
from hf_paged.kernels import cpp, quantized
from hf_paged.rooms import is_installed
from tests.attention.test_latent import build as build_deepseek
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.engine_helpers import (
    MODES,
    assert_drained,
    assert_same_as_lone,
    lone_run,
    prompts,
)
from tests.support.quantized import round_caches, round_states

pytestmark = pytest.mark.skipif(
    not cpp.is_available(), reason="the first forward is attended to unrounded: no compiler"
)

KV_DTYPES = list(quantized.DTYPES)


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Applies `round_caches` until the test ends."""
    return functools.partial(round_caches, monkeypatch)


def paged(kv_dtype: str, **options: Any) -> dict[str, Any]:
    return {
        "cache_implementation": "paged",
        "cache_config": {"block_size": 8, "kv_dtype": kv_dtype, **options},
    }


@pytest.mark.parametrize("mode", ["greedy", "samples", "beams", "penalties"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_generate(name: str, mode: str, rounded: Any, device: torch.device) -> None:
    model, inputs = (
        models.put(models.get(name), device),
        models.put(models.padded_prompt(name, (21, 4, 9)), device),
    )
    kv_dtype = KV_DTYPES[["greedy", "samples", "beams", "penalties"].index(mode) % 3]
    torch.manual_seed(0)
    found = model.generate(**inputs, **MODES[mode], **paged(kv_dtype))
    route = last_route(model)
    assert route is not None and "packed forwards" in route.reason
    assert route.num_captured_steps or not is_installed("tape")
    hf_paged.check_integrity(model)
    torch.manual_seed(0)
    unrounded = model.generate(**inputs, **MODES[mode])
    rounded(kv_dtype)
    torch.manual_seed(0)
    assert torch.equal(found, model.generate(**inputs, **MODES[mode]))
    assert name != "llama" or kv_dtype == "int8" or not torch.equal(found, unrounded), (
        "nothing was rounded"
    )
    hf_paged.free(model)


@pytest.mark.parametrize("name", ["GPTJForCausalLM", "FalconForCausalLM"])
def test_attention_code_of_the_models_own(name: str, rounded: Any) -> None:
    """It gets packed rows (`RowTensor`)."""
    model = tiny_model(getattr(transformers, name))
    inputs = models.prompt("llama", 2, 21)
    found = model.generate(**inputs, **MODES["greedy"], **paged("int8"))
    route = last_route(model)
    assert route is not None and "packed forwards" in route.reason
    rounded("int8")
    assert torch.equal(found, model.generate(**inputs, **MODES["greedy"]))


def test_latents(rounded: Any, device: torch.device) -> None:
    model = build_deepseek().to(device)
    inputs = models.put(models.prompt("llama", 2, 37), device)
    found = model.generate(**inputs, max_new_tokens=20, do_sample=False, **paged("int8"))
    route = last_route(model)
    assert route is not None and route.latent and "packed forwards" in route.reason
    rounded("int8")
    assert torch.equal(found, model.generate(**inputs, max_new_tokens=20, do_sample=False))


@pytest.mark.slow_cases("bart-greedy")
@pytest.mark.parametrize("mode", ["greedy", "beams"])
@pytest.mark.parametrize("name", ["t5", "bart", "qwen3_next", "gpt_oss"])
def test_other_families(name: str, mode: str, rounded: Any) -> None:
    """Cross attention, biases, states, sinks; rectangles begin with a forward that attends to
    unrounded states."""
    model, inputs = models.get(name), models.prompt(name, 2, 21)
    found = model.generate(**inputs, **MODES[mode], **paged("fp8_e4m3"))
    rounded("fp8_e4m3", shows_fresh="packed forwards" not in last_route(model).reason)  # type: ignore[union-attr]
    assert torch.equal(found, model.generate(**inputs, **MODES[mode]))
    assert memory_stats(model).kv_dtype == "fp8_e4m3" and memory_stats(model).peak_bytes > 0
    hf_paged.check_integrity(model)
    hf_paged.free(model)


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_an_engine_preempts_and_finds_prefixes(
    preemption: str, rounded: Any, device: torch.device
) -> None:
    model, texts = models.put(models.get("llama"), device), prompts(20, 25, 9, 31)
    config = PagedConfig(block_size=8, num_blocks=9, preemption=preemption, kv_dtype="fp8_e4m3")
    with PagedEngine(model, config) as engine:
        results = engine.generate(texts, MODES["greedy"])
        again = engine.generate([texts[0][:7]], MODES["beams"])
        stats = engine.stats()
        assert stats.num_preemptions > 0 and (stats.num_swaps > 0) == (preemption == "swap")
        assert "fp8_e4m3" in engine._repr_html_() and stats.kv_dtype == "fp8_e4m3"
        assert_drained(engine)
    rounded("fp8_e4m3")
    for prompt, result, mode in zip(
        [*texts, texts[0][:7]], results + again, ["greedy"] * 4 + ["beams"]
    ):
        assert_same_as_lone(lone_run(model, prompt, MODES[mode]), result, MODES[mode], mode)


def test_a_prefix_that_was_kept_gives_the_same_tokens(rounded: Any) -> None:
    model, (prompt,) = models.get("llama"), prompts(300)
    with PagedEngine(model, PagedConfig(block_size=8, kv_dtype="int8")) as engine:
        first, second = (engine.generate([prompt], MODES["greedy"])[0] for _ in range(2))
        assert engine.stats().num_prefix_hit_tokens >= 256
    rounded("int8")
    ids = torch.tensor([prompt])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **MODES["greedy"])[
        0, 300:
    ].tolist()
    assert first.sequences[0].token_ids == second.sequences[0].token_ids == expected


@torch.no_grad()
def cached(kv_dtype: str, name: str = "llama") -> tuple[Any, Tensor, PagedCache]:
    model, ids = models.get(name), models.prompt(name, 2, 21)["input_ids"]
    cache = PagedCache(model.config, {"block_size": 8, "kv_dtype": kv_dtype})
    model(ids, past_key_values=cache)
    return model, ids, cache


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_copies_and_pickles_of_a_cache(kv_dtype: str) -> None:
    model, ids, cache = cached(kv_dtype)
    expected = [x.dense().clone() for layer in cache.layers for x in (layer.keys, layer.values)]  # type: ignore[union-attr]
    assert expected[0].dtype == torch.float32
    step = functools.partial(model, ids[:, -1:])
    logits = step(past_key_values=copy.deepcopy(cache)).logits
    assert memory_stats_of(cache).copied_blocks > 0
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        found = [x.dense() for layer in twin.layers for x in (layer.keys, layer.values)]
        assert all(map(torch.equal, found, expected))
        assert torch.equal(step(past_key_values=twin).logits, logits)
        twin.check_integrity()
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1]))
    found = [x.dense() for layer in cache.layers for x in (layer.keys, layer.values)]  # type: ignore[union-attr]
    assert all(torch.equal(x, y[[1, 0, 0]]) for x, y in zip(found, expected))
    assert len(pickle.dumps(cache)) < 0.5 * len(pickle.dumps(cached_plain()))


def memory_stats_of(cache: PagedCache) -> hf_paged.MemoryStats:
    return cache.stats()


def cached_plain() -> PagedCache:
    model, ids = models.get("llama"), models.prompt("llama", 2, 21)["input_ids"]
    cache = PagedCache(model.config, {"block_size": 8})
    model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("kernels", ["gather", "reference"])
def test_a_cache_in_a_loop_of_the_callers(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backend, with and without the C++ gather: the same logits to rounding."""
    model, ids, cache = cached("int8")
    expected = model(ids[:, :3], past_key_values=copy.deepcopy(cache)).logits
    dense = [layer.keys.dense() for layer in cache.layers]  # type: ignore[union-attr]
    monkeypatch.setenv("HF_PAGED_ATTENTION", kernels)
    monkeypatch.setattr(reading.cpp, "is_available", lambda: False)
    other = copy.deepcopy(cache)
    assert all(torch.equal(a, b.keys.dense()) for a, b in zip(dense, other.layers))  # type: ignore[union-attr]
    torch.testing.assert_close(
        model(ids[:, :3], past_key_values=other).logits, expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("has_kernels", [True, False])
def test_padding_is_gathered_as_zeros(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.cpp, "is_available", lambda: has_kernels)
    keys, cache = (
        torch.randn(2, 2, 5, 4),
        PagedCache(paged_config={"block_size": 8, "kv_dtype": "int8"}),
    )
    cache.expect_padding((0, 2), 5)
    cache.update(keys, keys, 0)
    dense = cache.layers[0].keys.dense()  # type: ignore[union-attr]
    keys[1, :, :2] = 0
    assert torch.equal(dense, round_states(keys, "int8"))


def test_states_of_another_dtype_share_blocks() -> None:
    """As under autocast: stored codes stay; returned states have the wider dtype."""
    _, _, cache = cached("int8")
    before = cache.layers[0].keys.dense().clone()  # type: ignore[union-attr]
    shape = (2, 2, 1, 16)
    cache.layers[0].update(
        torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    )
    after = cache.layers[0].keys.dense()  # type: ignore[union-attr]
    assert after.dtype == torch.float64 and torch.equal(after[:, :, :-1].float(), before)


def test_other_kv_dtypes_are_other_pools() -> None:
    model, inputs = models.build("llama"), models.prompt("llama", 2, 21)
    sizes = {}
    for kv_dtype in (None, "int8", None):
        model.generate(**inputs, max_new_tokens=8, do_sample=False, cache_implementation="paged",
                       cache_config={"kv_dtype": kv_dtype})  # fmt: skip
        stats = memory_stats(model)
        assert stats.kv_dtype == kv_dtype
        assert sizes.setdefault(kv_dtype, stats.peak_bytes) == stats.peak_bytes
    assert sizes["int8"] / sizes[None] == (16 + 4) / (4 * 16)
