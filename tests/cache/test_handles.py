"""Handles of a paged cache: reads through views, and writes in place, which are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hf_paged
from hf_paged import PagedCache
from hf_paged.cache.handles import PagedTensor
from tests.support import models

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "set all": lambda x: x.__setitem__(..., 0.0),
    "set some": lambda x: x.__setitem__((0, slice(None), 2), 0.0),
    "set by mask": lambda x: x.__setitem__(torch.ones(x.shape, dtype=torch.bool), 0.0),
    "set to another handle": lambda x: x.__setitem__(..., x),
    "copy_": lambda x: x.copy_(torch.zeros(x.shape)),
    "copy_ of a view": lambda x: x.copy_(x[:]),
    "mul_": lambda x: x.mul_(2),
    "+=": lambda x: x.__iadd__(1),
    "fill_": lambda x: x.fill_(0),
    "zero_": lambda x: x.zero_(),
    "index_copy_": lambda x: x.index_copy_(2, torch.tensor([0]), torch.zeros_like(x[:, :, :1])),
    "index_fill_": lambda x: x.index_fill_(2, torch.tensor([0]), 0.0),
    "scatter_": lambda x: x.scatter_(2, torch.zeros(x.shape, dtype=torch.long), 0.0),
    "masked_fill_": lambda x: x.masked_fill_(torch.ones(x.shape, dtype=torch.bool), 0.0),
    "out": lambda x: torch.add(torch.ones(x.shape), 1, out=x),
    "_foreach_mul_": lambda x: torch._foreach_mul_([torch.ones(1), x], 2),
    "init": lambda x: torch.nn.init.zeros_(x),
    "map_": lambda x: x.map_(torch.zeros(x.shape), lambda a, b: 0.0),
    "apply_": lambda x: x.apply_(lambda a: 0.0),
    "assign data": lambda x: setattr(x, "data", torch.zeros(x.shape)),
    "transpose_": lambda x: x.transpose_(0, 1),
    "item of data": lambda x: x.data.__setitem__(0, 0.0),
    "detach": lambda x: x.detach().mul_(2),
    "select": lambda x: x[0].mul_(2),
    "views of views": lambda x: x.transpose(1, 2)[0][None].unbind(0)[0].chunk(2)[1].fill_(0),
    "flat": lambda x: x.reshape(-1).__setitem__(0, 0.0),
    "contiguous": lambda x: x.contiguous().to(x.dtype).view(-1).zero_(),
    "itself": lambda x: torch.atleast_1d(x.type_as(x)).zero_(),
}


def filled(length: int = 9) -> tuple[PagedCache, Tensor]:
    torch.manual_seed(0)
    cache, states = PagedCache(paged_config={"block_size": 8}), torch.randn(2, 2, length, 4)
    cache.update(states, -states, 0)
    return cache, states


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", sorted(WRITES))
def test_writes_in_place_to_shown_keys_and_values_are_refused(
    name: str, mode: Callable[[], Any]
) -> None:
    cache, states = filled()
    for shown in (cache.layers[0].keys, cache.layers[0].values):
        with mode(), pytest.raises(RuntimeError, match=r"cannot be written to in place.*`update"):
            WRITES[name](shown)
    assert torch.equal(cache.layers[0].keys + 0, states) and torch.equal(
        cache.layers[0].values + 0, -states
    )
    cache.check_integrity()


@pytest.mark.parametrize(
    "name", ["set all", "set some", "copy_", "+=", "out", "apply_", "masked_fill_"]
)
@pytest.mark.parametrize("is_first", [True, False])
def test_writes_in_place_to_what_an_update_returned_are_refused(name: str, is_first: bool) -> None:
    cache, states = filled(4)
    keys, values = cache.update(states, states, 1 if is_first else 0)
    for handle in (keys, values):
        assert isinstance(handle, PagedTensor)
        with pytest.raises(RuntimeError, match="cannot be written to in place"):
            WRITES[name](handle)


@pytest.mark.parametrize("storage", ["blocks", "virtual"])
def test_writes_to_a_returned_cache_are_refused_and_leave_other_rows_alone(storage: str) -> None:
    model = models.get("llama")
    hf_paged.free(model)
    ids = torch.randint(5, 100, (1, 150), generator=torch.Generator().manual_seed(0)).expand(2, -1)
    config = {"block_size": 8, "storage": storage} if storage == "blocks" else {"storage": storage}
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, "pad_token_id": 0}
    output = model.generate(ids, cache_implementation="paged", cache_config=config, **options)
    cache = output.past_key_values
    before = cache.layers[0].keys.clone()
    for name in ("set some", "select", "flat", "out"):
        with pytest.raises(RuntimeError, match="cannot be written to in place"):
            WRITES[name](cache.layers[0].keys)
    assert torch.equal(cache.layers[0].keys.clone(), before)
    again = model.generate(ids, cache_implementation="paged", cache_config=config, **options)
    assert torch.equal(again.sequences, output.sequences)
    hf_paged.check_integrity(model)
    hf_paged.free(model)


def test_arrays_of_shown_keys_are_read_only() -> None:
    cache, states = filled()
    for array in (
        cache.layers[0].keys.numpy(),
        np.asarray(cache.layers[0].keys),
        cache.layers[0].keys[0].numpy(),
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    assert torch.equal(cache.layers[0].keys + 0, states)


def test_native_code_gets_no_address_of_shown_keys() -> None:
    cache, states = filled()
    handles = (
        *cache.update(states[:, :, :1], states[:, :, :1], 0),
        cache.layers[0].keys,
        cache.layers[0].keys[0],
    )
    for handle in handles:
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.utils.dlpack.to_dlpack(handle)
        assert torch.equal(torch.from_dlpack(handle), handle + 0)


def test_shown_keys_cannot_become_leaves() -> None:
    cache, _ = filled()
    keys = cache.layers[0].keys
    for ask in (lambda: keys.requires_grad_(), lambda: setattr(keys, "requires_grad", True)):
        with pytest.raises(RuntimeError, match="not leaves"):
            ask()
    assert not keys.requires_grad_(False).requires_grad


def test_a_graph_of_keys_that_were_written_to_is_refused() -> None:
    cache, states = filled(4)
    cache.reset()
    states = states.requires_grad_() * 1
    cache.update(states, states, 0)
    cache.layers[0].keys.add(0).mul_(2)  # a copy
    cache.layers[0].values.mul_(2)
    for use in (
        lambda: cache.update(states, states, 0),
        lambda: cache.crop(-1),
        lambda: cache.layers[0].keys,
    ):
        with pytest.raises(RuntimeError, match="cannot be written to in place"):
            use()
    cache.reset()
    cache.check_integrity()


def test_changed_copies_are_stored_in_an_empty_cache() -> None:
    cache, states = filled()
    changed = PagedCache(paged_config={"block_size": 8})
    keys = cache.layers[0].keys.clone()
    keys[:, :, 3] *= 2
    changed.update(keys, cache.layers[0].values, 0)
    expected = states.clone()
    expected[:, :, 3] *= 2
    assert torch.equal(changed.layers[0].keys + 0, expected) and torch.equal(
        changed.layers[0].values + 0, -states
    )


def test_views_read_as_tensors() -> None:
    cache, states = filled()
    view, expected = cache.layers[0].keys.transpose(1, 2)[0], states.transpose(1, 2)[0]
    assert repr(view) == repr(expected) and view.tolist() == expected.tolist()
    assert f"{view[0, 0, 0]:.3f}" == f"{expected[0, 0, 0]:.3f}"
    assert torch.equal(copy.deepcopy(view), expected) and torch.equal(
        pickle.loads(pickle.dumps(view)), expected
    )
    assert torch.equal(torch.cat([view, view]), torch.cat([expected, expected]))
    assert torch.equal(view.reshape(-1)[3:7].contiguous() + 0, expected.reshape(-1)[3:7])
    for make in (
        lambda x: x * 2,
        lambda x: x.clone(),
        lambda x: x.double(),
        lambda x: torch.stack([x, x]),
    ):
        assert torch.equal(
            make(view).mul_(3), make(expected).mul_(3)
        )  # results of other functions are ordinary tensors
    target = torch.zeros(expected.shape)
    target.copy_(view)
    target[0] = view[0]
    assert torch.equal(target, expected)
    weight = torch.randn(4, 4, requires_grad=True)
    (view @ weight).sum().backward()
    torch.testing.assert_close(weight.grad, expected.sum((0, 1))[:, None].expand(4, 4))
