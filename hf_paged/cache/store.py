"""Chooses the function that writes new keys and values into blocks: a kernel of `kernels`, or the
plain PyTorch version here."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import cpp, quantized, uses_triton
from ..kernels.cpp import blocks as cpp_blocks
from ..kernels.triton import DTYPES
from ..kernels.triton.launch import LaunchFailedError

Store = Callable[..., None]
"""Called with keys, values, slots and, optionally, the `store_signature` (see `choose_store`)."""


def choose_store(
    keys: Tensor,
    values: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    slots: Tensor,
) -> Store:
    """Returns a `Store`, which writes K/V `(batch, heads, n, dim)` of any strides into blocks
    `(num_blocks, heads, block_size, dim)`, converted to the blocks' dtypes or quantized. It may be
    reused for K/V with an equal `store_signature` and any slots of the same shape. `slots` `(batch,
    n)` int64: `block_id * block_size + offset` of each token, without duplicates; negative for
    tokens that are not stored."""
    write: Callable[..., None] = store_portable
    has_equal_heads = keys.size(1) == values.size(1)
    if uses_triton(key_blocks):
        tensors = (keys, values, key_blocks, value_blocks)
        supported_dtypes = (*DTYPES, *quantized.MAX_CODES)
        device = key_blocks.device
        are_supported = all(
            tensor.dtype in supported_dtypes and tensor.device == device for tensor in tensors
        )
        are_supported &= quantized.are_quantized_alike(key_blocks, value_blocks)
        if has_equal_heads and are_supported:
            write = _store_triton
    elif has_equal_heads and cpp.is_available():
        key_dtype = keys.dtype
        value_dtype = values.dtype
        if not quantized.is_quantized(key_blocks):  # else the kernel itself quantizes K/V
            key_dtype = key_blocks.dtype
            value_dtype = value_blocks.dtype
        with contextlib.suppress(TypeError):  # if the kernel does not support such tensors
            store = cpp_blocks.Store(
                keys.to(key_dtype), values.to(value_dtype), key_blocks, value_blocks, slots
            )
            if (keys.dtype, values.dtype) == (key_dtype, value_dtype):
                return store
            return lambda keys, values, slots, _=None: store(
                keys.to(key_dtype), values.to(value_dtype), slots
            )

    return lambda keys, values, slots, _=None: write(keys, values, key_blocks, value_blocks, slots)


def _store_triton(*tensors: Tensor) -> None:
    from ..kernels.triton import store as triton_store  # needs Triton

    try:
        triton_store.store(*tensors)
    except LaunchFailedError:
        store_portable(*tensors)


def store_portable(
    keys: Tensor,
    values: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    slots: Tensor,
) -> None:
    """Writes K/V to slots of blocks (see `choose_store`), in plain PyTorch on any device."""
    block_size = key_blocks.shape[2]
    index, token_indices = _targets(slots, block_size, key_blocks.device)
    for blocks, states in ((key_blocks, keys), (value_blocks, values)):
        tokens = states.transpose(1, 2).flatten(0, 1)  # [batch * n, heads, dim]
        if token_indices is not None:
            tokens = tokens[token_indices]
        quantized.write(blocks, index, tokens)


# `entry`: the result of the thread's last call of `_targets`, its key, and a weak reference to its
# slots. It is kept since all layers of a step have the same slots. The three are one attribute, so
# that an interrupt cannot leave a key beside the targets of other slots.
_last_targets = threading.local()


def _targets(
    slots: Tensor,
    block_size: int,
    device: torch.device,
) -> tuple[Any, Tensor | None]:
    """Returns the index into blocks of the tokens to store, and these tokens' positions in the
    flattened `slots` (`None`: all). Synchronizes with the device if called for new `slots`."""
    version = None if slots.is_inference() else slots._version
    key = (block_size, device, version)
    entry = getattr(_last_targets, "entry", None)
    if entry is not None:
        last_slots, last_key, targets = entry
        if last_key == key and last_slots() is slots:
            return targets
    flat_slots = slots.to(device).flatten()
    token_indices = None
    if (flat_slots < 0).any():
        token_indices = (flat_slots >= 0).nonzero().squeeze(1)
        flat_slots = flat_slots[token_indices]
    index = (flat_slots // block_size, slice(None), flat_slots % block_size)
    targets = (index, token_indices)
    _last_targets.entry = (weakref.ref(slots), key, targets)
    return targets
