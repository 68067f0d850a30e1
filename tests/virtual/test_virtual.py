"""Calls and engines on contiguous rows (`storage="virtual"`) give plain `generate`'s tokens."""

from __future__ import annotations

import copy
import os
import pickle
import resource
import sys
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BloomForCausalLM,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_paged
from hf_paged import PagedCache, PagedEngine, VirtualStorage, compat
from hf_paged.model import registry
from hf_paged.virtual import pages
from tests.support import engine_helpers, models
from tests.support.engine_helpers import assert_drained, lone_run, tokens_of
from tests.support.models import VOCAB_SIZE, init_weights
from tests.support.models import token_ids as prompts
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


CLASSES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {**LAYERS, "num_key_value_heads": 2}),
    "mistral": (MistralForCausalLM, {**LAYERS, "num_key_value_heads": 2, "sliding_window": 80}),
    "bloom": (BloomForCausalLM, {"n_layer": 2, "n_head": 4}),
    "gpt_neo": (
        GPTNeoForCausalLM,
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
}


def build(name: str) -> PreTrainedModel:
    model_class, options = CLASSES[name]
    model = model_class(model_class.config_class(**COMMON, **options))
    init_weights(model, 0)
    return model.eval()


@pytest.fixture(scope="module")
def built() -> dict[str, PreTrainedModel]:
    return {name: build(name) for name in CLASSES}


@pytest.fixture(params=["cpp", "gather"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernels of the device, and as on a host without a compiler."""
    if request.param == "gather":
        monkeypatch.setenv("HF_PAGED_ATTENTION", "gather")
    return request.param


GREEDY: dict[str, Any] = {"do_sample": False}


def virtual_call(**storage: Any) -> dict[str, Any]:
    return {"cache_implementation": "paged", "cache_config": {"storage": VirtualStorage(**storage)}}


MECHANISMS = [
    virtual_call(),
    virtual_call(keep_mappings=False),  # nothing is kept
    virtual_call(blocks_ahead=3),
    virtual_call(page_bytes=1 << 14),  # larger groups
]
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
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
    mask[0, :64] = mask[1, :37] = 0  # whole pages of padding, and a part
    options = {**MODES[mode], "max_new_tokens": 70, "attention_mask": mask}
    cache = PagedCache(model.config, {"storage": "virtual"})
    found = []
    for call in ({}, {"past_key_values": cache}, *MECHANISMS):
        torch.manual_seed(1)
        found.append(model.generate(ids, **options, **call))
    assert all(torch.equal(tokens, found[0]) for tokens in found)
    hf_paged.check_integrity(model)


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


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an item for each call of `mmap`."""
    monkeypatch.setenv("HF_PAGED_ATTENTION", "gather")
    calls, own = list[int](), pages.MemoryFile.map
    monkeypatch.setattr(
        pages.MemoryFile, "map", lambda self, *args: (calls.append(1), own(self, *args))[1]
    )
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lengths", "new_tokens", "better", "worse"),
    [
        # the second of two calls has pages
        ("llama", (64, 64), 300, {"blocks_ahead": 7}, {"blocks_ahead": 0}),
        # deferred reclamation (section 6.1.2): mappings of rows that ended are taken over
        *(
            (name, lengths * (24 // len(lengths)), 4, {}, {"keep_mappings": False})
            for name in ("bloom", "llama")
            for lengths in ((150,), (180, 70, 130))
        ),
    ],
)
def test_what_saves_mappings(
    built: dict[str, PreTrainedModel],
    name: str,
    lengths: tuple[int, ...],
    new_tokens: int,
    better: dict[str, Any],
    worse: dict[str, Any],
    maps: list[int],
) -> None:
    counts = []
    for storage in (better, worse):
        maps.clear()
        model = copy.deepcopy(built[name])
        for seed, length in enumerate(lengths):
            ids = prompts(1, length, seed)
            model.generate(ids, max_new_tokens=new_tokens, **GREEDY, **virtual_call(**storage))
        counts.append(len(maps))
    assert 0 < counts[0] <= counts[1] / 2, counts


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_an_engine_whose_blocks_run_out(
    built: dict[str, PreTrainedModel], preemption: str, backend: str
) -> None:
    model, options = built["llama"], {**GREEDY, "max_new_tokens": 80}
    config = {"storage": "virtual", "num_blocks": 9, "max_num_batched_tokens": 64}
    texts = engine_helpers.prompts(60, 90, 130, 40)
    with PagedEngine(model, {**config, "preemption": preemption}) as engine:
        results = engine.generate(texts, options)
        assert engine.stats().num_preemptions > 0
        assert_drained(engine)
    assert tokens_of(results) == [lone_run(model, text, options) for text in texts]


@pytest.mark.parametrize(
    ("options", "rows", "limit"),
    [({"num_beams": 8}, 8, 0.25), ({"do_sample": True, "num_return_sequences": 16}, 16, 0.20)],
    ids=["beams", "samples"],
)
def test_beams_and_samples_share_pages(options: dict[str, Any], rows: int, limit: float) -> None:
    """8 beams, or 16 samples, over a prompt of 500, in bfloat16, of the heads of Qwen2.5-0.5B."""
    config = LlamaConfig(**COMMON, **LAYERS, num_key_value_heads=2, head_dim=64)
    model = LlamaForCausalLM(config).bfloat16().eval()
    model.generate(prompts(1, 500), max_new_tokens=32, **options, **virtual_call())
    # tokens, layers, K and V, heads, numbers of two bytes
    contiguous = rows * (500 + 32) * 2 * 2 * 2 * 64 * 2
    (group,) = registry._memories[model][1].groups.values()
    assert 0 < group.storage.physical_bytes <= limit * contiguous


@pytest.mark.slow_cases("gpt_neo")
@pytest.mark.parametrize("name", ["bloom", "gpt_neo"])
def test_children_copies_and_pickles_go_on_alike(
    built: dict[str, PreTrainedModel], name: str
) -> None:
    """The model's own code reads rows in place; in a child, on pages of its own."""
    model, options = built[name], {**GREEDY, "max_new_tokens": 20}
    cache = PagedCache(model.config, {"storage": "virtual"})
    first = model.generate(prompts(2, 70), past_key_values=cache, **options)
    assert cache.counters.in_place > 0 and cache.counters.gathered == 0
    expected = model.generate(first, **options)
    before = [layer.keys + 0 for layer in cache.layers]

    def goes_on(twin: PagedCache) -> bool:
        torch.set_num_threads(1)
        found = model.generate(first, past_key_values=twin, **options)
        twin.check_integrity()
        return torch.equal(found, expected)

    assert holds_in_child(lambda: goes_on(cache))
    assert all(torch.equal(layer.keys + 0, keys) for layer, keys in zip(cache.layers, before))
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        assert goes_on(twin)


def test_code_that_needs_contiguous_tensors_gets_them() -> None:
    cache, states = (
        PagedCache(None, {"storage": "virtual", "block_size": 64}),
        torch.randn(2, 4, 73, 16),
    )
    for start, end in ((0, 70), (70, 71), (71, 72), (72, 73)):
        keys, _ = cache.update(states[:, :, start:end], -states[:, :, start:end], 0)
        assert torch.equal(keys.view(2, -1, 16), states[:, :, :end].reshape(2, -1, 16)), end


@pytest.mark.parametrize(
    ("config", "platform", "message"),
    [
        ({"kv_dtype": "int8"}, "linux", "`kv_dtype` is 'int8': it must be None with `storage` 'vi"),
        (
            {"storage": VirtualStorage(page_bytes=2048)},
            "linux",
            "`page_bytes` is 2,048, but must be a multiple of the 4,096 bytes",
        ),
        (
            {"storage": VirtualStorage(page_bytes=1 << 21)},
            "linux",
            "`page_bytes` of `VirtualStorage` is 2,097,152",
        ),
        ({}, "darwin", "mapped on cpu under darwin: this needs Linux.*Leave `storage` out"),
    ],
)
def test_elsewhere_the_error_says_what_to_change(
    config: dict[str, Any], platform: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    # no block of a single head of keys fills a page of 2 MiB
    model = models.build("llama", num_key_value_heads=1)
    config = {"storage": "virtual", **config}
    with pytest.raises(ValueError, match=message):
        PagedEngine(model, config)
    with pytest.raises(ValueError, match=message):
        model.generate(
            prompts(1, 9), cache_implementation="paged", cache_config=config, max_new_tokens=2
        )


def test_what_a_device_or_a_limit_on_files_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r'pip install "hf_paged\[cuda\]"'):
        pages.pages_for(torch.device("cuda"))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 30, 1 << 30))
    with pytest.raises(ValueError, match=r"limited to 1,073,741,824 bytes \(ulimit -f\)"):
        PagedEngine(models.get("llama"), {"storage": "virtual"})
