"""Calls and engines on contiguous rows (`storage="virtual"`) give plain `generate`'s tokens."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BloomConfig,
    BloomForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_paged
from hf_paged import PagedCache, PagedEngine, VirtualStorage, compat
from hf_paged.model import registry
from hf_paged.virtual import pages
from hf_paged.virtual import storage as virtual
from tests.support import models
from tests.support.models import VOCAB_SIZE, init_weights
from tests.test_forks import holds_in_child

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")

# tokens of half a page, of heads of 32 numbers in float32, and the block size that fits half
# precision: 64
SIZE = 32
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def build(name: str) -> PreTrainedModel:
    config, cls = {
        "llama": (LlamaConfig(**COMMON, **LAYERS, num_key_value_heads=2), LlamaForCausalLM),
        "mistral": (
            MistralConfig(**COMMON, **LAYERS, num_key_value_heads=2, sliding_window=80),
            MistralForCausalLM,
        ),
        "bloom": (BloomConfig(**COMMON, n_layer=2, n_head=4), BloomForCausalLM),
        "gpt_neo": (
            GPTNeoConfig(
                **COMMON, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
            ),
            GPTNeoForCausalLM,
        ),
    }[name]
    model = cls(config)
    init_weights(model, 0)
    return model.eval()


@pytest.fixture(scope="module")
def built() -> dict[str, PreTrainedModel]:
    return {name: build(name) for name in ("llama", "mistral", "bloom", "gpt_neo")}


@pytest.fixture(params=["cpp", "gather"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the kernels of the device, and as on a host without a compiler."""
    if request.param == "gather":
        monkeypatch.setenv("HF_PAGED_ATTENTION", "gather")
    yield request.param


def prompts(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        4, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def virtual_call(**storage: Any) -> dict[str, Any]:
    return {"cache_implementation": "paged", "cache_config": {"storage": VirtualStorage(**storage)}}


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "do_sample": False},
}


@pytest.mark.slow_cases("*-cpu-*")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "mistral", "bloom", "gpt_neo"])
def test_tokens_are_plain_generates(
    built: dict[str, PreTrainedModel], name: str, mode: str, backend: str, device: torch.device
) -> None:
    if device.type == "cuda":
        pytest.importorskip("cuda.bindings")
    model, ids = models.put(built[name], device), prompts(3, 100).to(device)
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    options = {**MODES[mode], "max_new_tokens": 70, "attention_mask": mask}
    torch.manual_seed(1)
    expected = model.generate(ids, **options)
    for call in (
        virtual_call(),
        {"past_key_values": PagedCache(model.config, {"storage": "virtual"})},
    ):
        torch.manual_seed(1)
        assert torch.equal(model.generate(ids, **options, **call), expected)
    hf_paged.check_integrity(model)


@pytest.mark.slow_cases("gpt_neo")
@pytest.mark.parametrize("name", ["bloom", "gpt_neo"])
def test_code_of_a_models_own_reads_rows_in_place(
    built: dict[str, PreTrainedModel], name: str
) -> None:
    model, ids = built[name], prompts(4, 70)
    cache = PagedCache(model.config, {"storage": "virtual"})
    model.generate(ids, past_key_values=cache, max_new_tokens=70, do_sample=False)
    assert cache.counters.in_place > 0 and cache.counters.gathered == 0


def test_the_route_says_how_a_function_of_the_callers_gets_rows(
    built: dict[str, PreTrainedModel],
) -> None:
    model, ids = copy.deepcopy(built["llama"]), prompts(3, 70)
    AttentionInterface.register(
        "callers", lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs)
    )
    AttentionMaskInterface.register("callers", sdpa_mask)
    try:
        model.set_attn_implementation("callers")
        for call, how in (
            (virtual_call(), "read in place as contiguous rows"),
            (models.PAGED, "gathered"),
        ):
            model.generate(ids, max_new_tokens=20, do_sample=False, **call)
            route = hf_paged.last_route(model)
            assert route is not None and route.road == "hf_loop"
            assert f"; keys and values are {how}: its attention function" in route.reason
            assert bool(route.slowed_by) == (how == "gathered") != route.in_place
    finally:
        compat.forget_attention("callers")


MECHANISMS: dict[str, dict[str, Any]] = {
    "nothing kept": {"keep_mappings": False},
    "ahead": {"blocks_ahead": 3},
    "larger groups": {"page_bytes": 1 << 14},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", MECHANISMS.values(), ids=MECHANISMS)
def test_each_mechanism_gives_the_same_tokens(
    built: dict[str, PreTrainedModel], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_ATTENTION", "gather")
    for name in ("llama", "gpt_neo"):
        model = copy.deepcopy(built[name])
        for rows in (3, 5):
            ids = prompts(rows, 90, seed=rows)
            expected = model.generate(ids, max_new_tokens=150, do_sample=False)
            found = model.generate(
                ids, max_new_tokens=150, do_sample=False, **virtual_call(**options)
            )
            assert torch.equal(found, expected)


def num_mappings(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """Calls of `mmap` in the decode steps of a second, identical call."""
    calls: list[int] = []
    own = pages.MemoryFile.map
    ids = prompts(4, 64)
    model.generate(ids, max_new_tokens=2, do_sample=False, **virtual_call(**options))
    with monkeypatch.context() as patch:
        patch.setattr(
            pages.MemoryFile, "map", lambda self, *args: (calls.append(1), own(self, *args))[1]
        )
        model.generate(ids, max_new_tokens=300, do_sample=False, **virtual_call(**options))
    return len(calls)


@pytest.mark.slow
def test_mapping_ahead_takes_fewer_calls(
    built: dict[str, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_PAGED_ATTENTION", "gather")
    counts = [
        num_mappings(copy.deepcopy(built["llama"]), monkeypatch, blocks_ahead=n) for n in (0, 7)
    ]
    assert 0 < counts[1] < 0.5 * counts[0], counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths", [(150,), (180, 70, 130)], ids=["of one length", "of several lengths"]
)
@pytest.mark.parametrize("name", ["bloom", "llama"])
def test_mappings_of_rows_that_ended_are_taken_over(
    built: dict[str, PreTrainedModel],
    name: str,
    lengths: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """24 requests in turn: deferred reclamation (section 6.1.2) saves most of their mappings."""
    monkeypatch.setenv("HF_PAGED_ATTENTION", "gather")
    calls, own = list[int](), pages.MemoryFile.map
    monkeypatch.setattr(
        pages.MemoryFile, "map", lambda self, *args: (calls.append(1), own(self, *args))[1]
    )
    counts = []
    for keeps in (True, False):
        calls.clear()
        model = copy.deepcopy(built[name])
        for number in range(24):
            ids = prompts(1, lengths[number % len(lengths)], seed=number)
            model.generate(
                ids, max_new_tokens=4, do_sample=False, **virtual_call(keep_mappings=keeps)
            )
        counts.append(len(calls))
    assert 0 < counts[0] <= counts[1] / 2, counts


def test_a_row_that_is_padded_to_a_page_is_read_in_place(built: dict[str, PreTrainedModel]) -> None:
    model, ids = built["gpt_neo"], prompts(2, 200)
    mask = torch.ones_like(ids)
    mask[0, :128] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, **virtual_call()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_an_engine_whose_blocks_run_out(
    built: dict[str, PreTrainedModel], preemption: str, backend: str
) -> None:
    model = built["llama"]
    config = {
        "storage": "virtual",
        "num_blocks": 9,
        "preemption": preemption,
        "max_num_batched_tokens": 64,
    }
    texts = [prompts(1, length, seed)[0].tolist() for seed, length in enumerate((60, 90, 130, 40))]
    expected = [
        model.generate(torch.tensor([text]), max_new_tokens=80, do_sample=False)[0]
        for text in texts
    ]
    with PagedEngine(model, config) as engine:
        results = engine.generate(texts, {"max_new_tokens": 80, "do_sample": False})
        assert engine.stats().num_preemptions > 0
        engine._core.memory.check_integrity()
    for text, result, tokens in zip(texts, results, expected):
        assert text + result.token_ids == tokens.tolist()


def test_prefixes_are_served_and_shared(built: dict[str, PreTrainedModel], backend: str) -> None:
    model, shared = built["llama"], prompts(1, 200)[0].tolist()
    texts = [shared + prompts(1, 9, seed)[0].tolist() for seed in range(3)]
    with PagedEngine(model, {"storage": "virtual"}) as engine:
        for text in texts:
            expected = model.generate(torch.tensor([text]), max_new_tokens=9, do_sample=False)[
                0
            ].tolist()
            (result,) = engine.generate([text], {"max_new_tokens": 9, "do_sample": False})
            assert text + result.token_ids == expected
        assert engine.stats().num_prefix_hit_tokens == 2 * 192


def storages(model: PreTrainedModel) -> list[virtual.MappedStorage]:
    groups = registry._memories[model][1].groups.values()
    return [group.storage for group in groups if isinstance(group.storage, virtual.MappedStorage)]


@pytest.mark.slow
def test_pages_go_back_when_the_pool_is_idle(built: dict[str, PreTrainedModel]) -> None:
    model = copy.deepcopy(built["llama"])
    call = virtual_call()
    call["cache_config"]["idle_release_seconds"] = 0.2
    out = model.generate(prompts(4, 100), max_new_tokens=50, do_sample=False, **call)
    (storage,) = storages(model)
    held = storage.pages
    assert held is not None and storage.physical_bytes > 0
    end = time.monotonic() + 5
    while held.physical_bytes() and time.monotonic() < end:
        time.sleep(0.02)
    assert held.physical_bytes() == 0
    assert torch.equal(
        model.generate(prompts(4, 100), max_new_tokens=50, do_sample=False, **call), out
    )


@pytest.mark.parametrize(("mode", "limit"), [("beams", 0.25), ("samples", 0.20)])
def test_beams_and_samples_share_pages(mode: str, limit: float) -> None:
    """8 beams, or 16 samples, over a prompt of 500, in bfloat16, of the heads of Qwen2.5-0.5B."""
    config = LlamaConfig(
        **COMMON, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    )
    config.intermediate_size = 64
    model = LlamaForCausalLM(config).bfloat16().eval()
    options = {
        "beams": {"num_beams": 8},
        "samples": {"do_sample": True, "num_return_sequences": 16},
    }[mode]
    model.generate(prompts(1, 500), max_new_tokens=32, **options, **virtual_call())
    rows = {"beams": 8, "samples": 16}[mode]
    # tokens, layers, K and V, heads, numbers of two bytes
    contiguous = rows * (500 + 32) * 2 * 2 * 2 * 64 * 2
    (storage,) = storages(model)
    assert 0 < storage.physical_bytes <= limit * contiguous


def test_a_child_goes_on_with_pages_of_its_own(built: dict[str, PreTrainedModel]) -> None:
    model, ids = built["gpt_neo"], prompts(2, 70)
    cache = PagedCache(model.config, {"storage": "virtual"})
    options = {"max_new_tokens": 9, "do_sample": False, "past_key_values": cache}
    first = model.generate(ids, **options)
    expected = model.generate(first, max_new_tokens=20, do_sample=False)
    before = [(layer.keys + 0, layer.values + 0) for layer in cache.layers]

    def goes_on() -> bool:
        torch.set_num_threads(1)
        found = model.generate(first, max_new_tokens=20, do_sample=False, past_key_values=cache)
        cache.check_integrity()
        return torch.equal(found, expected)

    assert holds_in_child(goes_on)
    for layer, (keys, values) in zip(cache.layers, before):
        assert torch.equal(layer.keys + 0, keys) and torch.equal(layer.values + 0, values)
    assert torch.equal(
        model.generate(first, max_new_tokens=20, do_sample=False, past_key_values=cache), expected
    )


def test_copies_and_pickles_go_on_alike(built: dict[str, PreTrainedModel]) -> None:
    model, ids = built["bloom"], prompts(2, 70)
    cache = PagedCache(model.config, {"storage": "virtual"})
    first = model.generate(ids, max_new_tokens=9, do_sample=False, past_key_values=cache)
    expected = model.generate(first, max_new_tokens=20, do_sample=False)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        assert torch.equal(
            model.generate(first, max_new_tokens=20, do_sample=False, past_key_values=twin),
            expected,
        )


def test_what_a_hook_keeps_stays_as_it_was(built: dict[str, PreTrainedModel]) -> None:
    """Keys passed to a model's custom code, in later steps, and after rows were reordered or
    ended."""
    model, ids, kept = built["bloom"], prompts(3, 70), []
    cache = PagedCache(model.config, {"storage": "virtual"})
    update = cache.layers[0].update

    def keep(*args: Any, **kwargs: Any) -> Any:
        found = update(*args, **kwargs)
        kept.append((found[0], found[0].clone()))
        return found

    cache.layers[0].update = keep
    model.generate(ids, max_new_tokens=12, num_beams=3, past_key_values=cache)
    cache.reset()
    model.generate(prompts(3, 70, 5), max_new_tokens=12, past_key_values=cache)
    assert len(kept) > 20 and not any(
        isinstance(x, hf_paged.cache.handles.PagedTensor) for x, _ in kept[5:11]
    )
    assert all(torch.equal(found, expected) for found, expected in kept)


def test_code_that_needs_contiguous_tensors_gets_them() -> None:
    cache = PagedCache(None, {"storage": "virtual", "block_size": 64})
    states = torch.randn(2, 4, 70, 16), torch.randn(2, 4, 70, 16)
    cache.update(*states, 0)
    for step in range(3):
        new = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 1, 16)
        states = tuple(torch.cat(pair, dim=2) for pair in zip(states, new))  # type: ignore[assignment]
        for found, expected in zip(cache.update(*new, 0), states):
            assert torch.equal(found.view(2, -1, 16), expected.reshape(2, -1, 16)), step


def test_elsewhere_the_error_says_what_to_change(
    built: dict[str, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match=r"`kv_dtype` is 'int8': it must be None with `storage` 'virtual'"
    ):
        hf_paged.PagedConfig(storage="virtual", kv_dtype="int8")
    with pytest.raises(
        ValueError, match=r"`page_bytes` is 2,048, and must be a multiple of the 4,096 bytes"
    ):
        PagedEngine(built["llama"], {"storage": VirtualStorage(page_bytes=2048)})
    with pytest.raises(ValueError, match=r'pip install "hf_paged\[cuda\]"'):
        pages.pages_for(torch.device("cuda"))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(
        ValueError,
        match=r"cannot be mapped on cpu under darwin: this needs Linux.*Leave `storage` out",
    ):
        built["llama"].generate(prompts(1, 9), max_new_tokens=2, **virtual_call())
    with pytest.raises(ValueError, match="Leave `storage` out"):
        PagedEngine(built["llama"], {"storage": "virtual"})
