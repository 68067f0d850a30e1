"""`PagedCache` alone against the `DynamicCache` that it replaces, on real models and on bare
tensors."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
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

import hf_paged
from hf_paged import OutOfBlocksError, PagedCache
from hf_paged.cache import kv_blocks
from hf_paged.cache.block_pool import BlockTable
from hf_paged.cache.group_memory import GroupMemory
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.cache.layer_group import LayerGroup
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


@pytest.fixture
def model(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def caches(config: PreTrainedConfig) -> tuple[DynamicCache, PagedCache]:
    return DynamicCache(config=config), PagedCache(config, {"block_size": 8})


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    return model(ids, past_key_values=cache).logits


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_forward_by_forward(model: Any, config: PreTrainedConfig) -> None:
    plain, paged = caches(config)
    for step, length in enumerate([9, 1, 1, 5, 1, 20, 1, 1]):
        ids = tokens(2, length, step)
        assert_same(logits(model, ids, plain), logits(model, ids, paged))
        assert plain.get_seq_length() == paged.get_seq_length()
        assert plain.get_mask_sizes(3, 0) == paged.get_mask_sizes(3, 0)
        for stock, ours in zip(plain.layers, paged.layers):
            assert isinstance(ours, type(stock))
            assert_same(stock.keys, ours.keys + 0)
            assert_same(stock.values, ours.values + 0)
        paged.check_integrity()
    assert paged.counters.in_place > 0


@pytest.mark.parametrize(
    "operation",
    [
        lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])),
        lambda cache: cache.batch_repeat_interleave(3),
        lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
        lambda cache: cache.reset(),
    ],
    ids=["reorder", "repeat", "select", "select_mask", "reset"],
)
@pytest.mark.parametrize("length", [5, 8, 23])
def test_operations_on_rows(
    model: Any, config: PreTrainedConfig, operation: Any, length: int
) -> None:
    plain, paged = caches(config)
    for cache in (plain, paged):
        logits(model, tokens(3, length), cache)
        operation(cache)
    if paged.is_empty:
        plain = DynamicCache(config=config)  # the stock `reset` of 5.17 keeps the length
    rows = 3 if paged.is_empty else len(paged.layers[0].group.tables)
    for step in range(3):
        ids = tokens(rows, 1 + step, 10 + step)
        assert_same(logits(model, ids, plain), logits(model, ids, paged))
        paged.check_integrity()


@pytest.mark.parametrize("remove", [1, 3, 8])
def test_crop(model: Any, config: PreTrainedConfig, remove: int) -> None:
    plain, paged = caches(config)
    for cache in (plain, paged):
        cache.activate_past_recording()
        logits(model, tokens(2, 9), cache)
        cache.crop(0)
        logits(model, tokens(2, 9, 1), cache)
        cache.crop(-remove)
    assert plain.get_seq_length() == paged.get_seq_length() == 18 - remove
    ids = tokens(2, 4, 2)
    assert_same(logits(model, ids, plain), logits(model, ids, paged))
    paged.check_integrity()


def test_crop_of_a_full_window_that_was_not_recorded_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["window"]).eval()
    for cache in caches(CONFIGS["window"]):
        logits(model, tokens(1, 20), cache)
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-2)


def test_a_deep_copy_shares_blocks_and_goes_its_own_way(
    model: Any, config: PreTrainedConfig
) -> None:
    plain, paged = caches(config)
    for cache in (plain, paged):
        logits(model, tokens(2, 10), cache)
    used = paged.stats().used_blocks
    twins = copy.deepcopy(plain), copy.deepcopy(paged)
    assert paged.stats().used_blocks == used, "a copy takes blocks"
    for step, (a, b) in enumerate([(plain, paged), twins, (plain, paged), twins]):
        ids = tokens(2, 3, 5 + step)
        assert_same(logits(model, ids, a), logits(model, ids, b))
    paged.check_integrity()
    del twins, a, b
    paged.reset()
    paged.check_integrity()
    assert paged.stats().used_blocks == 0


def test_pickle(model: Any, config: PreTrainedConfig) -> None:
    plain, paged = caches(config)
    for cache in (plain, paged):
        logits(model, tokens(2, 13), cache)
        cache.batch_repeat_interleave(2)
    data = pickle.dumps(paged)
    again = pickle.loads(data)
    again.check_integrity()
    assert again.stats().used_blocks == paged.stats().used_blocks, "sharing is lost"
    ids = tokens(4, 2, 1)
    assert_same(logits(model, ids, plain), logits(model, ids, again))


def test_keys_are_a_snapshot() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["window"]).eval()
    cache = PagedCache(CONFIGS["window"], {"block_size": 8})
    logits(model, tokens(2, 12), cache)
    before, numbers = cache.layers[0].keys, cache.layers[0].keys + 0
    for step in range(30):
        logits(model, tokens(2, 1, step), cache)
    assert torch.equal(before + 0, numbers)


def test_a_window_gives_blocks_back() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["window"]).eval()
    cache = PagedCache(CONFIGS["window"], {"block_size": 8})
    logits(model, tokens(1, 100), cache)
    assert cache.stats().used_blocks <= 3
    for step in range(40):
        logits(model, tokens(1, 1, step), cache)
        assert cache.stats().used_blocks <= 3, "11 tokens of window need at most 3 blocks of 8"


def test_blocks_go_back_when_a_cache_is_collected(model: Any, config: PreTrainedConfig) -> None:
    first = PagedCache(config, {"block_size": 8})
    second = PagedCache(config, memory=first.memory)
    logits(model, tokens(2, 20), first)
    logits(model, tokens(2, 20), second)
    used = first.stats().used_blocks
    del second
    assert first.stats().used_blocks == used // 2
    first.check_integrity()


def test_out_of_blocks_names_the_numbers_and_leaves_the_pool_whole(
    model: Any, config: PreTrainedConfig
) -> None:
    cache = PagedCache(config, {"block_size": 8, "num_blocks": 4})
    logits(model, tokens(2, 9), cache)
    with pytest.raises(
        OutOfBlocksError, match=r"needs 2 blocks of 8 tokens, 0 of 4 are free: raise `num_blocks`"
    ):
        for step in range(12):
            logits(model, tokens(2, 1, step), cache)
    cache.check_integrity()
    cache.reset()
    logits(model, tokens(2, 9), cache)


def test_another_batch_size_is_refused() -> None:
    cache = PagedCache()
    states = torch.zeros(2, 1, 3, 4)
    cache.update(states, states, 0)
    with pytest.raises(ValueError, match="holds 2 rows, but got keys of 3 rows"):
        cache.update(torch.zeros(3, 1, 1, 4), torch.zeros(3, 1, 1, 4), 0)


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


def test_assigning_keys_is_refused() -> None:
    cache = PagedCache()
    cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), 0)
    with pytest.raises(AttributeError, match="cannot be assigned"):
        cache.layers[0].keys = torch.zeros(1)


def test_layers_may_differ_in_heads_dims_and_dtype() -> None:
    cache = PagedCache(paged_config={"block_size": 8})
    shapes = [((2, 4), (2, 4)), ((1, 16), (1, 4)), ((2, 4), (4, 8))]
    expected = []
    for (key_heads, key_dim), (value_heads, value_dim) in shapes:
        keys = [torch.randn(2, key_heads, n, key_dim) for n in (11, 1)]
        values = [torch.randn(2, value_heads, n, value_dim) for n in (11, 1)]
        expected.append((keys, values))
    for step in (0, 1):
        for index, (keys, values) in enumerate(expected):
            cache.update(keys[step], values[step], index)
    for layer, (keys, values) in zip(cache.layers, expected):
        assert torch.equal(layer.keys + 0, torch.cat(keys, 2))
        assert torch.equal(layer.values + 0, torch.cat(values, 2))


def test_gradients_reach_the_new_states() -> None:
    cache = PagedCache(paged_config={"block_size": 8})
    cache.update(torch.randn(1, 1, 9, 4), torch.randn(1, 1, 9, 4), 0)
    keys = torch.randn(1, 1, 2, 4, requires_grad=True)
    values = torch.randn(1, 1, 2, 4, requires_grad=True)
    all_keys, all_values = cache.update(keys, values, 0)
    (all_keys.sum() + 2 * all_values.sum()).backward()
    assert torch.equal(keys.grad, torch.ones_like(keys)) and torch.equal(
        values.grad, 2 * torch.ones_like(values)
    )


def test_growth_keeps_what_is_stored() -> None:
    cache = PagedCache(paged_config={"block_size": 8})
    chunks = [torch.randn(3, 2, n, 4) for n in (5, 100, 1, 300, 17)]
    for chunk in chunks:
        keys, values = cache.update(chunk, -chunk, 0)
    assert torch.equal(keys + 0, torch.cat(chunks, 2)) and torch.equal(
        values + 0, -torch.cat(chunks, 2)
    )


def test_keys_of_another_dtype_are_held_in_the_wider_one(
    model: Any, config: PreTrainedConfig
) -> None:
    plain, paged = caches(config)
    results = []
    for cache in (plain, paged):
        logits(model, tokens(2, 13), cache)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(logits(model, tokens(2, 1, 1), cache).float())
        assert cache.layers[0].keys.dtype == torch.float32
    torch.testing.assert_close(*results, rtol=0.05, atol=0.3)


def test_a_model_of_another_shape_is_refused() -> None:
    cache = PagedCache(paged_config={"block_size": 8})
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    with pytest.raises(
        ValueError,
        match=r"stores \(heads, dim, device\) \(2, 4, .*\), but the new keys or values have \(1, 4",
    ):
        cache.update(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), 0)
    assert torch.equal(cache.layers[0].keys + 0, torch.ones(1, 2, 3, 4))


def test_a_call_of_another_dtype_leaves_a_held_cache_alone(model: Any) -> None:
    options = dict(
        max_new_tokens=4, cache_implementation="paged", eos_token_id=None, pad_token_id=0
    )
    held = model.generate(tokens(2, 13), return_dict_in_generate=True, **options).past_key_values
    before = held.layers[0].keys.clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.generate(tokens(1, 5), **options)
    assert torch.equal(held.layers[0].keys.clone(), before)


def test_reset_forgets_the_padding(model: Any, config: PreTrainedConfig) -> None:
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[0, :6] = 0
    options = dict(
        max_new_tokens=4, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True
    )
    out = model.generate(
        tokens(3, 13), attention_mask=mask, cache_implementation="paged", **options
    )
    paged, plain = out.past_key_values, DynamicCache(config=config)
    paged.reset()
    for step, length in enumerate((13, 1, 1)):
        ids = tokens(3, length, 7 + step)
        assert_same(logits(model, ids, plain), logits(model, ids, paged))


def test_keys_shown_while_the_past_is_recorded_are_those_that_are_there() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["window"]).eval()
    cache = PagedCache(CONFIGS["window"], {"block_size": 8})
    logits(model, tokens(2, 40), cache)
    cache.activate_past_recording()
    logits(model, tokens(2, 2, 1), cache)
    keys = cache.layers[0].keys
    assert keys.shape == keys.clone().shape
    assert 10 <= keys.shape[2] < 42
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.check_integrity()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_gradients_of_a_first_forward_on_eager_attention(name: str) -> None:
    gradients = []
    for cls in (DynamicCache, PagedCache):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager")
        model(tokens(2, 10), past_key_values=cls(config=model.config)).logits.pow(
            2
        ).sum().backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_cache_that_ran_out_at_once_is_as_new(name: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    cache = PagedCache(CONFIGS[name], {"block_size": 8, "num_blocks": 4})
    with pytest.raises(OutOfBlocksError):
        logits(model, tokens(8, 20), cache)
    assert cache.stats().used_blocks == 0
    logits(model, tokens(1, 10), cache)
    cache.check_integrity()


@pytest.mark.parametrize("name", ["full", "window"])
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (GroupMemory, "ensure_free"),
        (BlockTable, "append"),
        (LayerGroup, "_make_step"),
        (KVBlocks, "store"),
    ],
    ids=["ensure_free", "append", "make_step", "store"],
)
def test_a_cache_whose_first_step_failed_is_as_new(
    owner: Any, method: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {rows: torch.randn(rows, 2, 20, 4) for rows in (2, 3)}
    cache = PagedCache(CONFIGS[name], {"block_size": 8})

    def fail(*args: Any) -> None:
        raise RuntimeError("of torch")

    cache.expect_padding((0, 2), 20)
    for rows, paddings in ((2, (0, 2)), (3, (0, 0, 0))):  # the same step again, another batch
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, fail)
            with pytest.raises(RuntimeError, match="of torch"):
                cache.update(states[2], states[2], 0)
        assert cache.is_empty and not cache.rows.sequences
        assert cache.stats().used_blocks == 0
        cache.check_integrity()
        for index in range(3):
            cache.update(states[rows], states[rows], index)
        assert [group.paddings for group in cache.groups.values()] == [paddings]
        last = slice(-10, None)
        assert torch.equal(cache.layers[0].keys.clone()[:, :, last], states[rows][:, :, last])
        cache.reset()


@pytest.mark.parametrize("name", ["full", "window"])
def test_a_step_whose_copies_of_shared_blocks_fail_can_be_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PagedCache(CONFIGS[name], {"block_size": 8})
    states, more = torch.randn(1, 2, 5, 4), torch.randn(3, 2, 1, 4)
    cache.update(states, states, 0)
    cache.reorder_cache(torch.tensor([0, 0, 0]))

    def fail(*args: Any) -> None:
        raise RuntimeError("of torch")

    with monkeypatch.context() as patch:
        patch.setattr(GroupMemory, "copy_blocks", fail)
        with pytest.raises(RuntimeError, match="of torch"):
            cache.update(more, more, 0)
    cache.check_integrity()
    cache.update(more, more, 0)
    expected = torch.cat((states.expand(3, -1, -1, -1), more), dim=2)
    assert torch.equal(cache.layers[0].keys.clone(), expected)
    assert cache.stats().used_blocks == 3
    cache.check_integrity()


def test_a_crop_into_freed_blocks_changes_nothing() -> None:
    """Each row was given back up to another position: the second could not be cropped."""
    cache = PagedCache(CONFIGS["window"], {"block_size": 8})
    cache.expect_padding((0, 5), 40)
    states = torch.randn(2, 2, 40, 4)
    for index in range(3):
        cache.update(states, states, index)
    cache.activate_past_recording()
    tables = [(list(table.block_ids), table.num_tokens) for table in cache.layers[0].group.tables]
    with pytest.raises(ValueError, match="truncate to 21 tokens: the blocks of the first 24"):
        cache.crop(-14)
    group = cache.layers[0].group
    assert tables == [(table.block_ids, table.num_tokens) for table in group.tables]
    assert cache.get_seq_length() == group.length == 40
    cache.crop(-4)
    assert cache.get_seq_length() == group.length == 36
    cache.check_integrity()


def test_rows_out_of_range_fork_nothing(model: Any, config: PreTrainedConfig) -> None:
    cache = PagedCache(config, {"block_size": 8})
    logits(model, tokens(2, 10), cache)
    with pytest.raises(IndexError):
        cache.batch_select_indices(torch.tensor([1, 0, 99]))
    cache.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False], ids=["config", "no_config"])
def test_blocks_go_back_without_the_garbage_collector(known: bool) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["full"]).eval()
    gc.collect()
    gc.disable()
    try:
        cache = PagedCache(CONFIGS["full"] if known else None, {"block_size": 8})
        logits(model, tokens(1, 20), cache)
        memory = cache.memory
        del cache
        assert memory.num_used == 0
        alive = weakref.ref(memory)
        del memory
        assert alive() is None
    finally:
        gc.enable()


def test_memory_fraction_bounds_one_call_and_not_the_next() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["full"]).eval()
    block_bytes = 8 * 3 * 2 * 2 * 8 * 4  # tokens, layers, K and V, heads, dim, float32
    fraction = 10.5 * block_bytes / psutil.virtual_memory().available
    cache = PagedCache(CONFIGS["full"], {"block_size": 8, "memory_fraction": fraction})
    with pytest.raises(
        OutOfBlocksError,
        match=r"needs 15 blocks of 8 tokens, \d+ of \d+ are free: raise `memory_fr",
    ):
        logits(model, tokens(3, 40), cache)
    assert cache.stats().used_blocks == 0
    logits(model, tokens(1, 40), cache)
    assert cache.stats().used_bytes == 5 * block_bytes
    cache.check_integrity()


def test_padding_is_expected_of_layers_with_the_tokens_that_were_padded() -> None:
    keys = {length: torch.randn(2, 2, length, 4) for length in (5, 9)}
    cache = PagedCache(paged_config={"block_size": 8})
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
    with pytest.raises(
        ValueError,
        match=r"starts with 9 tokens while another one of its group holds 5, .* first \(0, 2\)",
    ):
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


@pytest.mark.parametrize("length", [0, 1])
def test_crop_forgets_the_padding_that_it_removes(length: int) -> None:
    cache, chunks = (
        PagedCache(paged_config={"block_size": 8}),
        [torch.randn(2, 2, n, 4) for n in (5, 6)],
    )
    cache.expect_padding((3, 0), 5)
    cache.update(chunks[0], chunks[0], 0)
    cache.crop(length - 5)
    keys, _ = cache.update(chunks[1], chunks[1], 0)
    assert torch.equal((keys + 0)[:, :, length:], chunks[1])
    assert torch.equal(cache.layers[0].keys[:, :, length:], chunks[1])


def test_a_step_too_large_for_the_memory_does_not_end_smaller_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_blocks(monkeypatch, 60)
    cache = PagedCache(paged_config={"block_size": 8})
    for rows, length in ((1, 5), (9, 90), (2, 90)):
        states = torch.ones(rows, 1, length, 4)
        for index in (0, 1):
            if rows == 9:
                with pytest.raises(
                    OutOfBlocksError, match="more blocks of 8 tokens, but memory ran out"
                ):
                    cache.update(states, states, index)
            else:
                cache.update(states, states, index)
        cache.check_integrity()
        cache.reset()


@pytest.mark.slow
def test_a_call_too_large_for_the_memory_does_not_end_smaller_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["full"]).eval()
    options = dict(
        max_new_tokens=4, eos_token_id=None, pad_token_id=0, cache_config={"block_size": 8}
    )
    plain = model.generate(tokens(2, 30), **options | {"cache_config": None})
    options["cache_implementation"] = "paged"
    limit_blocks(monkeypatch, 60)
    with pytest.raises(OutOfBlocksError, match="but memory ran out"):
        model.generate(tokens(8, 120), **options)
    assert torch.equal(model.generate(tokens(2, 30), **options), plain)
    hf_paged.check_integrity(model)


def limit_blocks(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A layer finds no memory for more blocks."""
    right = kv_blocks._empty

    def empty(shape: tuple[int, ...], *args: Any) -> torch.Tensor:
        if shape[0] > most:
            raise RuntimeError("can't allocate memory")
        return right(shape, *args)

    monkeypatch.setattr(kv_blocks, "_empty", empty)


def test_blocks_that_grew_are_not_kept_by_handles_of_the_last_packed_step() -> None:
    cache, states = PagedCache(paged_config={"block_size": 8}), torch.randn(1, 2, 3, 4)
    cache.update(states, states, 0)
    cache.reset()
    (group,) = cache.groups.values()
    (block,) = group.blocks.take(1)
    slots = torch.arange(3)[None] + 8 * block
    step = StepMetadata.rectangle(
        torch.tensor([[block]], dtype=torch.int32), [3], 8, query_len=3, slots=slots
    )
    storage = group.blocks.storage
    for _ in range(2):
        cache.begin([step])
        keys, _ = cache.update(states, states, 0)
        assert keys.blocks is storage.layers[0].keys and torch.equal(
            keys.blocks[block, :, :3], states[0]
        )
        cache.begin([None])
        old = weakref.ref(storage.layers[0].keys)
        storage.grow(storage.layers[0].keys.shape[0] + 1, most=1 << 20)
        assert old() is None


def test_a_method_that_a_model_binds_to_a_cache_does_not_keep_it(
    config: PreTrainedConfig, model: Any
) -> None:
    def length(self: PagedCache, layer_idx: int = 0) -> int:
        return 1000 + DynamicCache.get_seq_length(self, layer_idx)

    cache = PagedCache(config, {"block_size": 8})
    model(tokens(1, 5), past_key_values=cache)
    cache.get_seq_length = length.__get__(cache)  # as RecurrentGemma of transformers 5.17 does
    copied = copy.deepcopy(cache)
    model(tokens(1, 3), past_key_values=copied, position_ids=torch.arange(5, 8)[None])
    assert (cache.get_seq_length(), copied.get_seq_length()) == (1005, 1008)
    memory, gone = cache.memory, weakref.ref(cache)
    gc.disable()
    try:
        del cache, copied
        assert gone() is None and memory.stats().used_blocks == 0
    finally:
        gc.enable()
