"""`PagedCache` alone, on real models and on bare tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
import threading
import weakref
from collections import deque
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
from hf_paged.cache import free_memory, kv_blocks
from hf_paged.step import StepMetadata

TINY: dict[str, Any] = dict(
    **dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3),
    **dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3),
)
CONFIGS: dict[str, PreTrainedConfig] = {
    "full": LlamaConfig(**TINY),
    "window": MistralConfig(**TINY, sliding_window=11),
}
MIXED = Gemma3TextConfig(
    **TINY, layer_types=["sliding_attention", "full_attention", "full_attention"]
)
BLOCKS = {"block_size": 8}


def build(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def caches(config: PreTrainedConfig) -> tuple[DynamicCache, PagedCache]:
    return DynamicCache(config=config), PagedCache(config, BLOCKS)


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    return model(ids, past_key_values=cache).logits


@pytest.mark.parametrize("is_cropped", [False, True], ids=["", "cropped"])
@pytest.mark.parametrize("length", [5, 8, 23])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_forward_by_forward(config: PreTrainedConfig, length: int, is_cropped: bool) -> None:
    """Against the `DynamicCache` that it replaces."""
    model, (plain, paged) = build(config), caches(config)
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    for cache in (plain, paged):
        if is_cropped:
            cache.activate_past_recording()
        logits(model, tokens(3, length), cache)
        cache.reorder_cache(torch.tensor([1, 1, 0]))
        if is_cropped:
            cache.crop(-3)
    for step, count in enumerate((1, 1, 5, 1, 20, 1)):
        ids = tokens(3, count, 10 + step)
        close(logits(model, ids, plain), logits(model, ids, paged))
        assert plain.get_seq_length() == paged.get_seq_length()
        assert plain.get_mask_sizes(3, 0) == paged.get_mask_sizes(3, 0)
        for stock, ours in zip(plain.layers, paged.layers):
            assert isinstance(ours, type(stock))
            if not is_cropped:
                close(stock.keys, ours.keys + 0)
                close(stock.values, ours.values + 0)
        paged.check_integrity()
    assert paged.counters.in_place > 0


def test_out_of_blocks_names_the_numbers_and_leaves_the_pool_whole() -> None:
    model = build(CONFIGS["full"])
    cache = PagedCache(CONFIGS["full"], {"block_size": 8, "num_blocks": 4})
    logits(model, tokens(2, 9), cache)
    message = "needs 2 blocks of 8 tokens, but only 0 of 4 are free: raise `num"
    with pytest.raises(OutOfBlocksError, match=message):
        for step in range(12):
            logits(model, tokens(2, 1, step), cache)
    cache.check_integrity()
    cache.reset()
    logits(model, tokens(2, 9), cache)


def test_what_does_not_fit_a_cache_is_refused() -> None:
    cache, keys = PagedCache(MIXED, BLOCKS), torch.ones(2, 2, 3, 4)
    cache.update(keys, keys, 0)
    shapes = r"stores \(heads, dim, device\) \(2, 4, .*\), but the new keys or values have \(1, 4"
    for shape, index, message in (
        ((3, 2, 1, 4), 0, "holds 2 rows, but got keys of 3 rows"),
        ((1, 2, 3, 4), 1, "holds 2 rows, but got keys of 1 rows"),  # before the group has any
        ((2, 1, 1, 4), 0, shapes),
    ):
        with pytest.raises(ValueError, match=message):
            cache.update(torch.ones(shape), torch.ones(shape), index)
    cache.update(keys, keys, 1)
    with pytest.raises(AttributeError, match="cannot be assigned"):
        cache.layers[0].keys = keys
    for layer in cache.layers[:2]:
        assert torch.equal(layer.keys + 0, keys)
    message = r"`paged_config` is \{'block_size': 32\}, but `memory` was made with Paged"
    with pytest.raises(ValueError, match=message):
        PagedCache(paged_config={"block_size": 32}, memory=cache.memory)
    with pytest.raises(ValueError, match="`memory` is 'mine': it must be None or a `PagedMemory`"):
        PagedCache(memory="mine")  # type: ignore[arg-type]
    assert PagedCache(memory=cache.memory, paged_config=cache.memory.config).memory is cache.memory


def test_a_window_gives_blocks_back_and_can_be_cropped_only_where_it_is_recorded() -> None:
    model = build(CONFIGS["window"])
    for cache in caches(CONFIGS["window"]):
        logits(model, tokens(2, 40), cache)
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-2)
    for step in range(40):
        assert cache.stats().used_blocks <= 2 * 3, "11 tokens need at most 3 blocks of 8"
        logits(model, tokens(2, 1, step), cache)
    cache.activate_past_recording()
    logits(model, tokens(2, 2, 1), cache)
    keys = cache.layers[0].keys
    assert keys.shape == keys.clone().shape
    assert 10 <= keys.shape[2] < 42
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.check_integrity()


def test_a_crop_into_freed_blocks_changes_nothing() -> None:
    """Each row was given back up to another position: the second could not be cropped."""
    cache = PagedCache(CONFIGS["window"], BLOCKS)
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
    message = r"needs 15 blocks of 8 tokens, but only \d+ of \d+ are free: raise `mem"
    with pytest.raises(OutOfBlocksError, match=message):
        logits(model, tokens(3, 40), cache)
    assert cache.stats().used_blocks == 0
    logits(model, tokens(1, 40), cache)
    assert cache.stats().used_bytes == 5 * block_bytes
    cache.check_integrity()


def test_under_memory_fraction_an_unused_group_gives_its_memory_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block_bytes = 8 * 2 * 2 * 8 * 4  # tokens, K and V, heads, dim, float32
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: 10 * block_bytes)
    cache = PagedCache(MIXED, {"block_size": 8, "memory_fraction": 1.0})
    # 8 blocks of a group of one layer, then 5 of a group of two
    for index, length in enumerate((64, 40)):
        keys = torch.randn(1, 2, length, 8)
        found, _ = cache.update(keys, keys, index)
        assert torch.equal(found + 0, keys)
        cache.reset()
    cache.check_integrity()


def test_padding_is_expected_of_layers_with_the_tokens_that_were_padded() -> None:
    cache, keys = PagedCache(paged_config=BLOCKS), torch.randn(2, 2, 9, 4)
    cache.update(keys, keys, 0)
    cache.reset()
    cache.expect_padding((0, 2), 5)
    for index, length in enumerate((9, 5)):
        cache.update(keys[:, :, :length], keys[:, :, :length], index)
    for index, length in enumerate((9, 5)):
        assert torch.equal(cache.layers[index].keys.clone(), keys[:, :, :length])
    cache.reset()
    cache.expect_padding((0, 2), 5)
    cache.update(keys[:, :, :5], keys[:, :, :5], 0)
    message = r"9 tokens while another layer of its group holds 5, including \[0, 2\] tokens of"
    with pytest.raises(ValueError, match=message):
        cache.update(keys, keys, 1)
    cache.check_integrity()


def test_another_dtype_in_a_second_group_leaves_caches_of_fewer_rows_alone() -> None:
    held = PagedCache(MIXED, BLOCKS)
    other = PagedCache(MIXED, memory=held.memory)
    keys = torch.randn(1, 2, 5, 8)
    for index in (0, 1):
        held.update(keys, keys, index)
    for index in (0, 1):
        other.update(*2 * [torch.zeros(3, 2, 5, 8, dtype=torch.float64)], index)
    for layer in held.layers[:2]:
        assert torch.equal(layer.keys + 0, keys)


def test_padding_that_is_removed_is_forgotten() -> None:
    first, second = (torch.randn(2, 2, n, 4) for n in (5, 6))
    for remove, length in (
        (PagedCache.reset, 0),
        (lambda cache: cache.crop(-5), 0),
        (lambda cache: cache.crop(-4), 1),
    ):
        cache = PagedCache(paged_config=BLOCKS)
        cache.expect_padding((3, 0), 5)
        cache.update(first, first, 0)
        remove(cache)
        keys, _ = cache.update(second, second, 0)
        assert torch.equal((keys + 0)[:, :, length:], second)
        assert torch.equal(cache.layers[0].keys[:, :, length:], second)


def test_a_step_too_large_for_the_memory_does_not_end_smaller_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, right = PagedCache(paged_config=BLOCKS), kv_blocks._empty

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


def test_blocks_that_grew_are_not_kept_by_handles_of_the_last_packed_step() -> None:
    cache, states = PagedCache(paged_config=BLOCKS), torch.randn(1, 2, 3, 4)
    cache.update(states, states, 0)
    cache.reset()
    (group,) = cache.groups.values()
    (block,) = group.group_memory.take(1)
    table, slots = torch.tensor([[block]], dtype=torch.int32), torch.arange(3)[None] + 8 * block
    step = StepMetadata.rectangle(table, [3], 8, query_len=3, slots=slots)
    storage = group.group_memory.storage
    for _ in range(2):
        cache.set_packed_steps([step])
        keys, _ = cache.update(states, states, 0)
        assert torch.equal(keys.blocks[block, :, :3], states[0])
        cache.set_packed_steps([None])
        old = weakref.ref(storage.layers[0].keys)
        storage.grow(storage.layers[0].keys.shape[0] + 1, max_blocks=1 << 20)
        assert old() is None


@pytest.mark.parametrize("config", [CONFIGS["full"], None], ids=["config", "no_config"])
def test_blocks_go_back_without_the_garbage_collector(config: PreTrainedConfig | None) -> None:
    """Even if a model binds a method to the cache, as RecurrentGemma of transformers 5.17 does."""

    def length(self: PagedCache, layer_idx: int = 0) -> int:
        return 1000 + DynamicCache.get_seq_length(self, layer_idx)

    model, cache = build(CONFIGS["full"]), PagedCache(config, BLOCKS)
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
    states, memory = torch.randn(2, 2, 9, 4), PagedCache(paged_config=BLOCKS).memory
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


def test_a_call_of_another_dtype_leaves_a_held_cache_alone() -> None:
    model = build(CONFIGS["full"])
    options = dict(
        max_new_tokens=4, cache_implementation="paged", eos_token_id=None, pad_token_id=0
    )
    held = model.generate(tokens(2, 13), return_dict_in_generate=True, **options).past_key_values
    before = held.layers[0].keys.clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.generate(tokens(1, 5), **options)
    assert torch.equal(held.layers[0].keys.clone(), before)


def test_a_change_that_garbage_collection_ends_waits_for_no_lock() -> None:
    memory, contexts = PagedCache().memory, list[Any]()

    def change() -> None:
        contexts.append(memory.changing())
        contexts[0].__enter__()

    for target in (change, contexts.clear):  # the first thread ends within the context
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    assert memory.lock.acquire(blocking=False) and not memory.is_recovery_due
    memory.lock.release()


class Collecting(deque[Any]):
    """Garbage collection may run anywhere: here, once somebody has looked at the items."""

    garbage: list[PagedCache]

    def __iter__(self) -> Any:
        items = [*super().__iter__()]
        self.garbage.clear()
        gc.collect()
        return iter(items)


def test_the_check_counts_rows_that_are_collected_meanwhile() -> None:
    cache = PagedCache()
    memory, states = cache.memory, torch.randn(1, 2, 20, 8)
    cache.update(states, states, 0)
    other = PagedCache(memory=memory)
    other.update(states, states, 0)
    other.itself = other
    memory.abandoned = Collecting(memory.abandoned)
    memory.abandoned.garbage = [other]
    del other
    memory.check_integrity()
    cache.check_integrity()
    assert not memory.abandoned.garbage


@pytest.mark.parametrize("is_locked", [False, True], ids=["between changes", "in a change"])
@pytest.mark.parametrize("is_checked", [False, True], ids=["updated", "checked"])
def test_blocks_of_a_cache_in_a_cycle_are_free_after_its_collection(
    is_checked: bool, is_locked: bool
) -> None:
    cache = PagedCache(None, {"block_size": 8, "num_blocks": 3})
    memory, states = cache.memory, torch.randn(1, 2, 8, 4)
    cache.update(states, states, 0)
    other = copy.deepcopy(cache)
    other.update(states, states, 0)
    other.itself = other
    del other
    with memory.lock if is_locked else contextlib.nullcontext():
        gc.collect()
    if is_checked:
        cache.check_integrity()
        assert memory.num_used == 1
    for _ in range(2):
        cache.update(states, states, 0)
    cache.check_integrity()
