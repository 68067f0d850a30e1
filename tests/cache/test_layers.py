"""What a layer's `update` refuses, and what it keeps of a forward with gradients in an engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from transformers import AutoModelForCausalLM, DynamicCache, FalconH1ForCausalLM, cache_utils

import hf_paged
from hf_paged import PagedCache, compat
from tests.cache.test_paged_cache import CONFIGS, tokens
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
