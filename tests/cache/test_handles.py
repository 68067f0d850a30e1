"""Handles of a paged cache: reads through views, and writes in place, which are refused."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_paged import PagedCache
from hf_paged.cache.handles import PagedTensor

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "set some": lambda x: x.__setitem__((0, slice(None), 2), 0.0),
    "set to another handle": lambda x: x.__setitem__(..., x),
    "mul_": lambda x: x.mul_(2),
    "out": lambda x: torch.add(torch.ones(x.shape), 1, out=x),
    "_foreach_mul_": lambda x: torch._foreach_mul_([torch.ones(1), x], 2),
    "map_": lambda x: x.map_(torch.zeros(x.shape), lambda a, b: 0.0),
    "apply_": lambda x: x.apply_(lambda a: 0.0),
    "assign data": lambda x: setattr(x, "data", torch.zeros(x.shape)),
    "transpose_": lambda x: x.transpose_(0, 1),
}
WRITES_TO_VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "item of data": lambda x: x.data.__setitem__(0, 0.0),
    "detach": lambda x: x.detach().mul_(2),
    "select": lambda x: x[0].mul_(2),
    "views of views": lambda x: x.transpose(1, 2)[0][None].unbind(0)[0].chunk(2)[1].fill_(0),
    "flat": lambda x: x.reshape(-1).__setitem__(0, 0.0),
    "contiguous": lambda x: x.contiguous().to(x.dtype).view(-1).zero_(),
    "itself": lambda x: torch.atleast_1d(x.type_as(x)).zero_(),
}


def filled(length: int = 9, storage: str = "blocks") -> tuple[PagedCache, Tensor]:
    torch.manual_seed(0)
    size, dim = (64, 16) if storage == "virtual" else (8, 4)
    cache = PagedCache(paged_config={"block_size": size, "storage": storage})
    states = torch.randn(2, 2, length, dim)
    cache.update(states, -states, 0)
    return cache, states


@pytest.mark.parametrize("storage", ["blocks", "virtual"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", sorted(WRITES | WRITES_TO_VIEWS))
def test_writes_in_place_to_keys_and_values_are_refused(
    name: str, mode: Callable[[], Any], storage: str
) -> None:
    """To those that layers show, and to those that an update returned."""
    cache, states = filled(storage=storage)
    returned = *cache.update(states, states, 1), *cache.update(states, -states, 0)
    assert all(isinstance(handle, PagedTensor) for handle in returned)
    layer, expected = cache.layers[0], torch.cat((states, states), dim=2)
    for handle in (layer.keys, layer.values, *(returned if name in WRITES else ())):
        with mode(), pytest.raises(RuntimeError, match=r"cannot be written to in place.*`update"):
            (WRITES | WRITES_TO_VIEWS)[name](handle)
    assert torch.equal(layer.keys + 0, expected) and torch.equal(layer.values + 0, -expected)
    cache.check_integrity()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda keys: keys[:, :, 1:],
    "transpose": lambda keys: keys.transpose(1, 2),
    "flat": lambda keys: keys.contiguous().view(-1),
    "converted": lambda keys: keys.contiguous().to(keys.dtype).view(-1),
}


@pytest.mark.parametrize("storage", ["blocks", "virtual"])
@pytest.mark.parametrize("made_in", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("viewed_in", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", sorted(VIEWS))
def test_keys_may_be_viewed_in_another_mode_than_they_were_made_in(
    name: str, viewed_in: Callable[[], Any], made_in: Callable[[], Any], storage: str
) -> None:
    cache, states = filled(storage=storage)
    with made_in():
        keys, _ = cache.update(states[:, :, :1], states[:, :, :1], 0)
        shown = cache.layers[0].keys
    expected = VIEWS[name](torch.cat((states, states[:, :, :1]), dim=2))
    with viewed_in():
        assert torch.equal(VIEWS[name](keys) + 0, expected)
        assert torch.equal(VIEWS[name](shown) + 0, expected)


def test_arrays_of_shown_keys_are_read_only_and_native_code_gets_no_address() -> None:
    cache, states = filled()
    keys = cache.layers[0].keys
    for array in (keys.numpy(), np.asarray(keys), keys[0].numpy()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    assert torch.equal(keys + 0, states)
    for handle in (*cache.update(states[:, :, :1], states[:, :, :1], 0), keys, keys[0]):
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
    (cache, states), (changed, _) = filled(), filled()
    changed.reset()
    keys = cache.layers[0].keys.clone()
    keys[:, :, 3] *= 2
    changed.update(keys, cache.layers[0].values, 0)
    assert torch.equal(changed.layers[0].keys + 0, keys) and not torch.equal(keys, states)
    assert torch.equal(changed.layers[0].values + 0, -states)


def test_a_read_under_fake_tensors_leaves_later_reads_as_they_were() -> None:
    cache, keys = filled()
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(RuntimeError, ValueError):
        cache.layers[0].keys + 0
    new_keys, _ = cache.update(keys[:, :, :1], keys[:, :, :1], 0)
    assert torch.equal(new_keys + 0, torch.cat((keys, keys[:, :, :1]), dim=2))


def test_views_read_as_tensors() -> None:
    cache, states = filled()
    view, expected = cache.layers[0].keys.transpose(1, 2)[0], states.transpose(1, 2)[0]
    assert repr(view) == repr(expected) and view.tolist() == expected.tolist()
    assert f"{view[0, 0, 0]:.3f}" == f"{expected[0, 0, 0]:.3f}"
    for make in (  # results of other functions are ordinary tensors
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: torch.cat([x, x]),
        lambda x: x.reshape(-1)[3:7].contiguous() * 2,
        lambda x: x.clone(),
        lambda x: x.double(),
        lambda x: torch.zeros(x.shape).copy_(x),
    ):
        assert torch.equal(make(view).mul_(3), make(expected).mul_(3))
    weight = torch.randn(4, 4, requires_grad=True)
    (view @ weight).sum().backward()
    torch.testing.assert_close(weight.grad, expected.sum((0, 1))[:, None].expand(4, 4))
