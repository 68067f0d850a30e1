"""What a layer's `update` refuses, and what it keeps of a forward with gradients in an engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.autograd import forward_ad
from transformers import AutoModelForCausalLM, DynamicCache, FalconH1ForCausalLM, cache_utils

import hf_paged
from hf_paged import PagedCache, compat
from hf_paged.cache.handles import PagedTensor
from hf_paged.cache.layer_group import LayerGroup
from hf_paged.step import ReadCounters
from tests.cache.test_paged_cache import CONFIGS, tokens
from tests.support import models
from tests.support.architecture_configs import tiny_model


def test_gradients_are_not_kept_in_a_forward_that_enables_them_in_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["full"])).eval()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(tokens(2, 9), **options)
    attention = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(attention, "forward", torch.enable_grad()(attention.forward))
    assert torch.equal(
        model.generate(tokens(2, 9), **options, cache_implementation="paged"), expected
    )
    hf_paged.check_integrity(model)


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.jacfwd, torch.func.jacrev, torch.vmap, None]
)
def test_transforms_of_functions_are_refused(transform: Any) -> None:
    """And forward-mode differentiation."""
    cache, states = PagedCache(paged_config={"block_size": 8}), torch.randn(1, 2, 2, 4, 8)

    def call(x: torch.Tensor) -> torch.Tensor:
        return cache.update(*2 * [x.reshape(2, 2, 4, 8)], 0)[0].sum()

    message = "use a `DynamicCache`"
    if transform is None:
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
            call(forward_ad.make_dual(states, states))
    else:
        with pytest.raises(RuntimeError, match=f"`torch.func`.* {message}"):
            transform(call)(states)
    assert cache.memory.num_used == 0
    call(states)
    cache.check_integrity()


@torch.no_grad()
def test_a_crop_that_a_hybrid_layer_refuses_changes_nothing() -> None:
    model = tiny_model(FalconH1ForCausalLM)
    logits = []
    for kind in (DynamicCache, PagedCache):
        cache = kind(config=model.config)
        inputs = {compat.cache_name(model): cache}
        model(tokens(1, 9), **inputs)
        for count in (0, -2):
            with pytest.raises(RuntimeError, match="does not track past states"):
                cache.crop(count)
        assert cache.get_seq_length() == 9
        logits.append(model(tokens(1, 1), **inputs).logits)
    torch.testing.assert_close(*logits)


def test_rows_of_an_empty_cache_can_be_selected_by_any_mask() -> None:
    for cache in (DynamicCache(config=CONFIGS["full"]), PagedCache(CONFIGS["full"])):
        cache.batch_select_indices(torch.tensor([True, False]))
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize(
    "operation",
    [
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices(torch.tensor([True, False, True])),
    ],
    ids=["repeat", "select"],
)
def test_operations_on_rows_layer_by_layer(operation: Any, has_gradients: bool) -> None:
    model, kept = models.get("llama"), []
    for cache in (DynamicCache(config=model.config), PagedCache(model.config)):
        with torch.set_grad_enabled(has_gradients):
            model(models.token_ids(3, 7), **{compat.cache_name(model): cache})
            for layer in cache.layers:
                operation(layer)
            kept.append(
                [value + 0 for layer in cache.layers for value in (layer.keys, layer.values)]
            )
    assert len(kept[0]) > 2
    torch.testing.assert_close(*kept)


def crop_of_older_versions(layer: Any, tokens_to_remove: int) -> None:
    """`DynamicLayer.crop` as in transformers 5.19: a positive number is the length to keep."""
    num_removed = abs(tokens_to_remove)
    if tokens_to_remove > 0:
        num_removed = max(0, layer.get_seq_length() - tokens_to_remove)
    if num_removed:
        layer.keys, layer.values = (x[:, :, :-num_removed] for x in (layer.keys, layer.values))


@pytest.mark.parametrize("is_older", [False, True], ids=["installed version", "older version"])
def test_a_positive_number_crops_as_in_the_stock_cache(
    is_older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_older:
        monkeypatch.setattr(cache_utils.DynamicLayer, "crop", crop_of_older_versions)
    outcomes = []
    for cache in (DynamicCache(config=CONFIGS["full"]), PagedCache(CONFIGS["full"])):
        for index in range(CONFIGS["full"].num_hidden_layers):
            cache.update(*2 * [torch.ones(1, 2, 9, 16)], index)
        try:
            cache.crop(5)
        except ValueError as error:
            outcomes.append(str(error))
        else:
            outcomes.append(f"{cache.get_seq_length()} tokens")
    assert outcomes[0] == outcomes[1]
    assert not is_older or outcomes[0] == "5 tokens"


def test_row_indices_of_two_dimensions_are_refused_even_if_there_are_none() -> None:
    cache = PagedCache(CONFIGS["full"])
    cache.update(*2 * [torch.ones(2, 2, 3, 16)], 0)
    with pytest.raises(IndexError, match=r"of shape \(2, 0\)"):
        cache.layers[0].reorder_cache(torch.empty(2, 0))
    assert len(cache.layers[0].group.rows.sequences) == 2
    cache.layers[0].reorder_cache([])  # a vector without indices keeps no row
    assert not cache.layers[0].group.rows.sequences


def test_a_row_takes_the_free_slots_of_its_last_block_without_a_change_of_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = []
    make_writable = LayerGroup._make_writable

    def counted(self: LayerGroup, context_len: int, length: int) -> None:
        changes.append(length)
        make_writable(self, context_len, length)

    monkeypatch.setattr(LayerGroup, "_make_writable", counted)
    states = torch.randn(2, 1, 24, 4)
    cache = PagedCache(paged_config={"block_size": 4})
    cache.expect_padding((0, 2), 6)

    def extend(rows: slice = slice(None)) -> None:
        length = cache.get_seq_length()
        new = states[rows, :, length : length + 1]
        cache.update(new, new, 0)

    cache.update(states[:, :, :6], states[:, :, :6], 0)
    for _ in range(10):
        extend()
    # 6 tokens, then one step for each new block of either row: at 8 and 12, and at 2 + 4, ...
    assert changes == [6, 7, 9, 11, 13, 15]
    assert torch.equal(cache.layers[0].values[0], states[0, :, :16])
    assert torch.equal(cache.layers[0].values[1, :, 2:], states[1, :, 2:16])
    changes.clear()
    twin = copy.deepcopy(cache)
    extend()
    assert changes == [17], "blocks that the copy shares must be copied"
    assert torch.equal(twin.layers[0].values[0], states[0, :, :16])
    for each in (cache, twin):
        each.check_integrity()


def test_keys_and_values_that_borrowed_rows_read_are_gathered_at_once() -> None:
    owner = PagedCache(transformers.LlamaConfig(num_hidden_layers=1))
    states = torch.randn(1, 1, 5, 4)
    owner.update(states, states, 0)
    cache = owner.empty_twin(owner.memory, ReadCounters())
    cache.take(owner.rows.sequences, (0,), 5)
    layer = cache.layers[0]
    assert isinstance(layer.values, PagedTensor)
    for _ in range(2):
        assert torch.equal(layer.values + 0, states)
    assert type(layer.keys) is type(layer.values) is torch.Tensor
    assert torch.equal(layer.keys, states)
    assert isinstance(owner.layers[0].values, PagedTensor), "a user's writes would be lost"
