"""`PagedCache` alone against the `DynamicCache` that it replaces, on real models and on bare
tensors."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
)

from hf_paged import OutOfBlocksError, PagedCache
from hf_paged.cache import kv_blocks
from hf_paged.step import StepMetadata

TINY = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,
)
CONFIGS: dict[str, PreTrainedConfig] = {
    "full": LlamaConfig(**TINY),
    "window": MistralConfig(**TINY, sliding_window=11),
}
MIXED = Gemma3TextConfig(
    **TINY, layer_types=["sliding_attention", "full_attention", "full_attention"]
)


@pytest.fixture(params=sorted(CONFIGS))
def config(request: pytest.FixtureRequest) -> PreTrainedConfig:
    return CONFIGS[request.param]


def build(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def model(config: PreTrainedConfig) -> Any:
    return build(config)


@pytest.fixture
def windowed() -> tuple[Any, PagedCache]:
    """A model with sliding windows, and a cache."""
    return build(CONFIGS["window"]), PagedCache(CONFIGS["window"], {"block_size": 8})


@pytest.fixture
def cache() -> PagedCache:
    """A cache of any layers."""
    return PagedCache(paged_config={"block_size": 8})


def caches(config: PreTrainedConfig) -> tuple[DynamicCache, PagedCache]:
    return DynamicCache(config=config), PagedCache(config, {"block_size": 8})


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    return model(ids, past_key_values=cache).logits


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_cropped", [False, True], ids=["", "cropped"])
@pytest.mark.parametrize("length", [5, 8, 23])
def test_forward_by_forward(
    model: Any, config: PreTrainedConfig, length: int, is_cropped: bool
) -> None:
    plain, paged = caches(config)
    for cache in (plain, paged):
        if is_cropped:
            cache.activate_past_recording()
        logits(model, tokens(3, length), cache)
        cache.reorder_cache(torch.tensor([1, 1, 0]))
        if is_cropped:
            cache.crop(-3)
    for step, count in enumerate((1, 1, 5, 1, 20, 1)):
        ids = tokens(3, count, 10 + step)
        assert_same(logits(model, ids, plain), logits(model, ids, paged))
        assert plain.get_seq_length() == paged.get_seq_length()
        assert plain.get_mask_sizes(3, 0) == paged.get_mask_sizes(3, 0)
        for stock, ours in zip(plain.layers, paged.layers):
            assert isinstance(ours, type(stock))
            if not is_cropped:
                assert_same(stock.keys, ours.keys + 0)
                assert_same(stock.values, ours.values + 0)
        paged.check_integrity()
    assert paged.counters.in_place > 0


def test_crop_of_a_full_window_that_was_not_recorded_is_refused() -> None:
    model = build(CONFIGS["window"])
    for cache in caches(CONFIGS["window"]):
        logits(model, tokens(1, 20), cache)
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-2)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deep copy", "pickle"]
)
def test_a_copy_shares_blocks(how: Callable[[Any], Any], cache: PagedCache) -> None:
    states = torch.randn(2, 2, 13, 4)
    cache.update(states, states, 0)
    cache.batch_repeat_interleave(2)
    used = cache.stats().used_blocks
    twin = how(cache)
    assert twin.stats().used_blocks == used == 4, "sharing is lost, or a copy takes blocks"
    del twin
    cache.reset()
    cache.check_integrity()
    assert cache.stats().used_blocks == 0


def test_a_window_gives_blocks_back(windowed: Any) -> None:
    model, cache = windowed
    logits(model, tokens(1, 100), cache)
    for step in range(40):
        assert cache.stats().used_blocks <= 3, "11 tokens of window need at most 3 blocks of 8"
        logits(model, tokens(1, 1, step), cache)


def test_out_of_blocks_names_the_numbers_and_leaves_the_pool_whole(
    model: Any, config: PreTrainedConfig
) -> None:
    cache = PagedCache(config, {"block_size": 8, "num_blocks": 4})
    logits(model, tokens(2, 9), cache)
    with pytest.raises(
        OutOfBlocksError,
        match="needs 2 blocks of 8 tokens, but only 0 of 4 are free: raise `num",
    ):
        for step in range(12):
            logits(model, tokens(2, 1, step), cache)
    cache.check_integrity()
    cache.reset()
    logits(model, tokens(2, 9), cache)


def test_states_of_another_shape_and_assignments_are_refused(cache: PagedCache) -> None:
    keys = torch.ones(2, 2, 3, 4)
    cache.update(keys, keys, 0)
    for shape, message in (
        ((3, 2, 1, 4), "holds 2 rows, but got keys of 3 rows"),
        (
            (2, 1, 1, 4),
            r"stores \(heads, dim, device\) \(2, 4, .*\), but the new keys or values have \(1, 4",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            cache.update(torch.ones(shape), torch.ones(shape), 0)
    with pytest.raises(AttributeError, match="cannot be assigned"):
        cache.layers[0].keys = keys
    assert torch.equal(cache.layers[0].keys + 0, keys)


def test_knobs_for_a_memory_that_has_its_own_are_refused() -> None:
    memory = PagedCache(paged_config={"block_size": 8}).memory
    with pytest.raises(
        ValueError,
        match=r"`paged_config` is \{'block_size': 32\}, but `memory` was made with Paged",
    ):
        PagedCache(paged_config={"block_size": 32}, memory=memory)
    with pytest.raises(ValueError, match="`memory` is 'mine': it must be None or a `PagedMemory`"):
        PagedCache(memory="mine")  # type: ignore[arg-type]
    assert PagedCache(memory=memory, paged_config=memory.config).memory is memory


def test_a_call_of_another_dtype_leaves_a_held_cache_alone(model: Any) -> None:
    options = dict(
        max_new_tokens=4, cache_implementation="paged", eos_token_id=None, pad_token_id=0
    )
    held = model.generate(tokens(2, 13), return_dict_in_generate=True, **options).past_key_values
    before = held.layers[0].keys.clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.generate(tokens(1, 5), **options)
    assert torch.equal(held.layers[0].keys.clone(), before)


def test_keys_shown_while_the_past_is_recorded_are_those_that_are_there(windowed: Any) -> None:
    model, cache = windowed
    logits(model, tokens(2, 40), cache)
    cache.activate_past_recording()
    logits(model, tokens(2, 2, 1), cache)
    keys = cache.layers[0].keys
    assert keys.shape == keys.clone().shape
    assert 10 <= keys.shape[2] < 42
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.check_integrity()


def test_a_crop_into_freed_blocks_changes_nothing() -> None:
    """Each row was given back up to another position: the second could not be cropped."""
    cache = PagedCache(CONFIGS["window"], {"block_size": 8})
    cache.expect_padding((0, 5), 40)
    states = torch.randn(2, 2, 40, 4)
    for index in range(3):
        cache.update(states, states, index)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="truncate to 21 tokens: the blocks of the first 24"):
        cache.crop(-14)
    assert cache.get_seq_length() == 40
    cache.check_integrity()
    cache.crop(-4)
    assert cache.get_seq_length() == 36
    cache.check_integrity()


def test_memory_fraction_bounds_one_call_and_not_the_next() -> None:
    model = build(CONFIGS["full"])
    block_bytes = 8 * 3 * 2 * 2 * 8 * 4  # tokens, layers, K and V, heads, dim, float32
    fraction = 10.5 * block_bytes / psutil.virtual_memory().available
    cache = PagedCache(CONFIGS["full"], {"block_size": 8, "memory_fraction": fraction})
    with pytest.raises(
        OutOfBlocksError,
        match=r"needs 15 blocks of 8 tokens, but only \d+ of \d+ are free: raise `mem",
    ):
        logits(model, tokens(3, 40), cache)
    assert cache.stats().used_blocks == 0
    logits(model, tokens(1, 40), cache)
    assert cache.stats().used_bytes == 5 * block_bytes
    cache.check_integrity()


def test_padding_is_expected_of_layers_with_the_tokens_that_were_padded(cache: PagedCache) -> None:
    keys = {length: torch.randn(2, 2, length, 4) for length in (5, 9)}
    cache.update(keys[9], keys[9], 0)
    cache.reset()
    cache.expect_padding((0, 2), 5)
    for index, length in enumerate((9, 5)):
        cache.update(keys[length], keys[length], index)
    for index, length in enumerate((9, 5)):
        torch.testing.assert_close(cache.layers[index].keys.clone(), keys[length])
    cache.reset()
    cache.expect_padding((0, 2), 5)
    cache.update(keys[5], keys[5], 0)
    message = r"9 tokens while another layer of its group holds 5, including \[0, 2\] tokens of"
    with pytest.raises(ValueError, match=message):
        cache.update(keys[9], keys[9], 1)
    cache.check_integrity()


def test_a_group_that_was_given_another_batch_size_first_is_as_it_was() -> None:
    cache, keys = PagedCache(MIXED, {"block_size": 8}), torch.randn(2, 2, 5, 8)
    cache.update(keys, keys, 0)
    with pytest.raises(ValueError, match="holds 2 rows, but got keys of 1 rows"):
        cache.update(keys[:1], keys[:1], 1)
    cache.update(keys, keys, 1)
    assert torch.equal(cache.layers[1].keys + 0, keys)


def test_another_dtype_in_a_second_group_leaves_caches_of_fewer_rows_alone() -> None:
    held = PagedCache(MIXED, {"block_size": 8})
    other = PagedCache(MIXED, memory=held.memory)
    keys = torch.randn(1, 2, 5, 8)
    for index in (0, 1):
        held.update(keys, keys, index)
    for index in (0, 1):
        other.update(*2 * [torch.zeros(3, 2, 5, 8, dtype=torch.float64)], index)
    for layer in held.layers[:2]:
        assert torch.equal(layer.keys + 0, keys)


@pytest.mark.parametrize(
    ("remove", "length"),
    [(PagedCache.reset, 0), (lambda x: x.crop(-5), 0), (lambda x: x.crop(-4), 1)],
    ids=["reset", "crop", "crop all but one"],
)
def test_padding_that_is_removed_is_forgotten(
    remove: Callable[[PagedCache], None], length: int, cache: PagedCache
) -> None:
    first, second = (torch.randn(2, 2, n, 4) for n in (5, 6))
    cache.expect_padding((3, 0), 5)
    cache.update(first, first, 0)
    remove(cache)
    keys, _ = cache.update(second, second, 0)
    assert torch.equal((keys + 0)[:, :, length:], second)
    assert torch.equal(cache.layers[0].keys[:, :, length:], second)


def test_a_step_too_large_for_the_memory_does_not_end_smaller_ones(
    cache: PagedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = kv_blocks._empty

    def empty(shape: tuple[int, ...], *args: Any) -> torch.Tensor:
        if shape[0] > 60:
            raise RuntimeError("can't allocate memory")
        return right(shape, *args)

    monkeypatch.setattr(kv_blocks, "_empty", empty)
    refused = pytest.raises(OutOfBlocksError, match="more blocks of 8 tokens, but memory ran out")
    for rows, length in ((1, 5), (9, 90), (2, 90)):
        states = torch.ones(rows, 1, length, 4)
        for index in (0, 1):
            with refused if rows == 9 else contextlib.nullcontext():
                cache.update(states, states, index)
        cache.check_integrity()
        cache.reset()


def test_blocks_that_grew_are_not_kept_by_handles_of_the_last_packed_step(
    cache: PagedCache,
) -> None:
    states = torch.randn(1, 2, 3, 4)
    cache.update(states, states, 0)
    cache.reset()
    (group,) = cache.groups.values()
    (block,) = group.group_memory.take(1)
    table, slots = torch.tensor([[block]], dtype=torch.int32), torch.arange(3)[None] + 8 * block
    step, storage = (
        StepMetadata.rectangle(table, [3], 8, query_len=3, slots=slots),
        group.group_memory.storage,
    )
    for _ in range(2):
        cache.set_packed_steps([step])
        keys, _ = cache.update(states, states, 0)
        assert torch.equal(keys.blocks[block, :, :3], states[0])
        cache.set_packed_steps([None])
        old = weakref.ref(storage.layers[0].keys)
        storage.grow(storage.layers[0].keys.shape[0] + 1, max_blocks=1 << 20)
        assert old() is None


@pytest.mark.parametrize("known", [True, False], ids=["config", "no_config"])
def test_blocks_go_back_without_the_garbage_collector(known: bool) -> None:
    """Even if a model binds a method to the cache, as RecurrentGemma of transformers 5.17 does."""

    def length(self: PagedCache, layer_idx: int = 0) -> int:
        return 1000 + DynamicCache.get_seq_length(self, layer_idx)

    model, cache = (
        build(CONFIGS["full"]),
        PagedCache(CONFIGS["full"] if known else None, {"block_size": 8}),
    )
    logits(model, tokens(1, 5), cache)
    cache.get_seq_length = length.__get__(cache)  # type: ignore[method-assign]
    copied = copy.deepcopy(cache)
    model(tokens(1, 3), past_key_values=copied, position_ids=torch.arange(5, 8)[None])
    assert (cache.get_seq_length(), copied.get_seq_length()) == (1005, 1008)
    memory, gone = cache.memory, weakref.ref(cache)
    gc.disable()
    try:
        del cache, copied
        assert gone() is None and memory.num_used == 0
        alive = weakref.ref(memory)
        del memory
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_memory_kept", [False, True])
def test_caches_in_cycles_are_freed_and_keys_that_outlive_them_stay(
    is_memory_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection clears the weak references in a cycle before it runs finalizers."""
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: raised.append(repr(hook.exc_value)))
    states, memory = torch.randn(2, 2, 9, 4), PagedCache(paged_config={"block_size": 8}).memory
    caches = [PagedCache(memory=memory) for _ in range(3)]
    for number, cache in enumerate(caches):
        cache.update(states + number, -states, 0)
    gc.collect(0)  # so that the rows that follow are younger than the caches
    for cache in caches:
        cache.batch_select_indices(torch.tensor([1, 0]))
        cache.others = caches  # type: ignore[attr-defined]
    keys = [cache.layers[0].keys for cache in caches]
    if not is_memory_kept:
        del memory
    del cache, caches
    gc.collect()
    assert not raised
    if is_memory_kept:
        assert not memory.is_used
        memory.check_integrity()
        PagedCache(memory=memory).update(3 * states, states, 0)
    for number, key in enumerate(keys):
        assert torch.equal(key + 0, (states + number)[[1, 0]])
