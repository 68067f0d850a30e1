"""The paged cache as custom attention code of a model sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from hf_paged import PagedCache
from tests.support import models


def num_allocations(least: int, work: Callable[[], Any]) -> int:
    """Number of allocations of at least `least` bytes made by `work`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = work()
    del result
    return sum(event.self_cpu_memory_usage >= least for event in profile.events())


@pytest.mark.parametrize("lengths", [(37, 37, 37), (37, 28, 17)], ids=["even", "padded"])
def test_keys_are_gathered_into_new_memory_once(lengths: tuple[int, ...]) -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama", lengths)
    options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    options["output_attentions"] = True  # not on the engine: the cache returns as it was filled
    cache = model.generate(**inputs, **options, **models.PAGED).past_key_values
    assert isinstance(cache, PagedCache)
    keys = cache.layers[0].keys
    assert keys is not None
    assert num_allocations(4 * keys.numel(), lambda: keys.transpose(2, 3)) == 1
    shown = keys.transpose(2, 3)
    assert shown.shape == (3, 2, 16, 38) and shown.transpose(2, 3).is_contiguous()


@pytest.mark.parametrize("window", [None, 20], ids=["full", "window"])
def test_nothing_is_shown_that_was_there_before(window: int | None) -> None:
    # 0 * NaN is NaN: a model multiplies masked values
    config = LlamaConfig(num_hidden_layers=1)
    if window is not None:
        config.layer_types, config.sliding_window = ["sliding_attention"], window
    cache = PagedCache(config, {"block_size": 8})
    stale, states = torch.full((3, 2, 64, 8), float("nan")), torch.randn(3, 2, 37, 8)
    cache.update(stale, stale, 0)
    cache.reset()
    cache.expect_padding((0, 9, 20), 37)
    cache.update(states, states, 0)
    for step in range(12):
        new = torch.randn(3, 2, 1, 8)
        states = torch.cat([states, new], dim=2)
        keys, values = cache.update(new, new, 0)
        expected = states.clone()
        for row, padding in enumerate((0, 9, 20)):
            expected[row, :, :padding] = 0
        for found in (keys, values):
            assert torch.equal(found.clone(), expected[:, :, -found.shape[2] :]), f"step {step}"
    cache.check_integrity()


def bytes_of(x: torch.Tensor) -> bytearray:
    return bytearray(ctypes.string_at(x.data_ptr(), x.nbytes))


READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "numpy.asarray": lambda x: torch.from_numpy(numpy.asarray(x)),
    "numpy.from_dlpack": lambda x: torch.from_numpy(numpy.from_dlpack(x).copy()),
    "torch.from_dlpack": torch.from_dlpack,
    "tolist": lambda x: torch.tensor(x.tolist()),
    "untyped_storage": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, x.shape),
    "data_ptr": lambda x: torch.frombuffer(bytes_of(x), dtype=x.dtype).view(x.shape),
    "share_memory_": lambda x: x.share_memory_(),
}


@pytest.mark.parametrize("name", READERS)
def test_keys_whose_memory_is_asked_for_are_gathered(name: str) -> None:
    """Some of these crashed the process, or read memory at address 0."""
    cache = PagedCache(paged_config={"block_size": 8})
    states = torch.randn(2, 2, 11, 4)
    cache.update(states, states, 0)
    keys = cache.layers[0].keys
    assert keys is not None and keys.data_ptr()  # a test must not crash the process
    assert torch.equal(READERS[name](keys), states)


@pytest.mark.parametrize("shape", [(2, 0, 5, 4), (0, 2, 5, 4), (2, 2, 5, 0)], ids=str)
def test_none_are_gathered_of_none(shape: tuple[int, ...]) -> None:
    plain, paged = DynamicCache(), PagedCache(paged_config={"block_size": 8})
    for tokens in (5, 1, 3):
        states = torch.zeros(*shape[:2], tokens, shape[3])
        expected, found = plain.update(states, states, 0), paged.update(states, states, 0)
        for mine, theirs in zip(expected, found):
            assert torch.equal(mine, theirs.clone())
    paged.check_integrity()


@pytest.mark.parametrize(
    ("name", "argument"), [("repeat_interleave", 0), ("select_indices", torch.tensor([]).long())]
)
def test_a_cache_without_rows_takes_none(name: str, argument: Any) -> None:
    """It presented foreign memory as the past of the new rows."""
    cache = PagedCache(paged_config={"block_size": 8})
    states = torch.randn(2, 2, 5, 4)
    cache.update(states, states, 0)
    getattr(cache, f"batch_{name}")(argument)
    with pytest.raises(ValueError, match="has dropped all its rows, but got keys of 2 rows"):
        cache.update(states, states, 0)
    cache.crop(-2)
    assert cache.layers[0].keys.clone().shape == (0, 2, 3, 4)  # type: ignore[union-attr]
    cache.reset()
    cache.update(states, states, 0)
    assert torch.equal(cache.layers[0].keys, states)  # type: ignore[arg-type]
