"""What a layer's `update` refuses, and what it keeps of a forward with gradients in an engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from transformers import AutoModelForCausalLM, DynamicCache, FalconH1ForCausalLM

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
