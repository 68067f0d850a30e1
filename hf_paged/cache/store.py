"""Chooses the function that writes new keys and values into blocks, and writes them in plain
PyTorch. The kernels are in `kernels`."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..kernels import cpp, quantized, uses_triton
from ..kernels.cpp import attention as cpp_attention
from ..kernels.triton import DTYPES
from ..kernels.triton.launch import LaunchFailedError

StoreKey: TypeAlias = tuple[Any, ...]
Store: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]


def store_key(keys: Tensor, values: Tensor) -> StoreKey:
    """Returns a key that is equal for K/V that fit the same blocks and the same store function."""
    return (
        keys.shape,
        keys.stride(),
        keys.dtype,
        keys.device,
        values.shape,
        values.stride(),
        values.dtype,
    )


def choose_store(
    keys: Tensor,
    values: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    slots: Tensor,
) -> Store:
    """Returns a function that writes K/V `(batch, heads, n, dim)` of any strides into blocks
    `(num_blocks, heads, block_size, dim)`, in their dtype or quantized, for arguments with an equal
    `store_key`. `slots` `(batch, n)` int64: `block_id * block_size + offset` of each token, each
    slot at most once; negative for tokens that are not stored."""
    chosen: Callable[..., None] = store_portable
    fits = keys.size(1) == values.size(1)
    if uses_triton(key_blocks):
        tensors = (keys, values, key_blocks, value_blocks)
        supported = (*DTYPES, *quantized.LARGEST)
        device = key_blocks.device
        if fits and all(x.dtype in supported and x.device == device for x in tensors):
            chosen = _store_triton
    elif fits and cpp.is_available():
        dtypes = (keys.dtype, values.dtype)
        stored_dtypes = (key_blocks.dtype, value_blocks.dtype)
        if quantized.is_quantized(key_blocks):  # the kernel converts K/V
            stored_dtypes = dtypes
        with contextlib.suppress(TypeError):  # the kernel does not support such tensors
            stored_keys = keys.to(stored_dtypes[0])
            stored_values = values.to(stored_dtypes[1])
            store: Store = cpp_attention.Store(
                stored_keys, stored_values, key_blocks, value_blocks, slots
            )
            if dtypes == stored_dtypes:
                return store
            key_dtype, value_dtype = stored_dtypes
            return lambda keys, values, slots: store(
                keys.to(key_dtype), values.to(value_dtype), slots
            )

    return lambda keys, values, slots: chosen(keys, values, key_blocks, value_blocks, slots)


def _store_triton(*tensors: Tensor) -> None:
    from ..kernels.triton import store as triton  # needs Triton

    try:
        triton.store(*tensors)
    except LaunchFailedError:
        store_portable(*tensors)


def store_portable(
    keys: Tensor,
    values: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    slots: Tensor,
) -> None:
    """Writes K/V as `choose_store` describes, in plain PyTorch on any device."""
    block_size = key_blocks.shape[2]
    index, tokens = _targets(slots, block_size, key_blocks.device)
    for blocks, states in ((key_blocks, keys), (value_blocks, values)):
        packed = states.transpose(1, 2).flatten(0, 1)  # [batch * n, heads, dim]
        if tokens is not None:
            packed = packed[tokens]
        quantized.write(blocks, index, packed)


# the arguments and the result of `_targets` for the last store: layers share a step's slots
_last = threading.local()


def _targets(
    slots: Tensor,
    block_size: int,
    device: torch.device,
) -> tuple[Any, Tensor | None]:
    """Returns the index of the stored tokens in blocks, and the numbers of these tokens (`None`:
    all). Synchronizes with the device."""
    version = None if slots.is_inference() else slots._version
    key = (block_size, device, version)
    if getattr(_last, "key", None) != key or _last.slots() is not slots:
        packed = slots.to(device).flatten()
        tokens = None
        if bool((packed < 0).any()):
            tokens = (packed >= 0).nonzero().squeeze(1)
            packed = packed[tokens]
        index = (packed // block_size, slice(None), packed % block_size)
        # assigned together: an error must not leave a key with the targets of other slots
        _last.slots, _last.key, _last.targets = weakref.ref(slots), key, (index, tokens)
    targets: tuple[Any, Tensor | None] = _last.targets
    return targets
