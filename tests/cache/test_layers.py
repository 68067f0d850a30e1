"""What a layer's `update` refuses, and what it keeps of a forward with gradients in an engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from transformers import AutoModelForCausalLM

import hf_paged
from hf_paged import PagedCache
from tests.cache.test_paged_cache import CONFIGS, tokens


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
