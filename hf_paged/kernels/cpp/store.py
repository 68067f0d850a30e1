"""The store of new keys and values by the C++ kernel (`kernels.cpp`), packed once for many steps."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from .build import kernel

_CALL = struct.Struct("3Q")  # struct StoreCall: this call, then the layer
_LAYER = struct.Struct("2Q6q6q6q2q")


class Store:
    """`cache.storage.store` for states of the same shapes and strides in every step. It keeps addresses, not tensors:
    the caller sees to it that blocks and states are what they were."""

    __slots__ = ("_block_size", "_kernel", "_num_blocks", "_packed", "_slots")

    def __init__(self, keys: Tensor, values: Tensor, key_blocks: Tensor, value_blocks: Tensor, slots: Tensor) -> None:
        """Raises `TypeError` for dtypes, devices and strides that the kernel does not take, `ValueError` for shapes."""
        for name, states, blocks in (("keys", keys, key_blocks), ("values", values, value_blocks)):
            if not (states.is_cpu and blocks.is_cpu) or states.dtype is not blocks.dtype:
                raise TypeError(
                    f"{name} are {states.dtype} on {states.device}, their blocks {blocks.dtype} on {blocks.device}: "
                    "the kernel takes one dtype, on the CPU"
                )
            if states.dim() != 4 or blocks.dim() != 4 or states.shape[1::2] != blocks.shape[1::2] or not blocks.size(2):
                raise ValueError(
                    f"{name} of shape {tuple(states.shape)} do not fit blocks of shape {tuple(blocks.shape)}: (batch, "
                    "heads, n, dim) goes with (blocks, heads, block_size, dim)"
                )
            if states.stride(3) != 1 or blocks.stride(3) != 1:
                raise TypeError(
                    f"{name} or their blocks have strides {states.stride()}, {blocks.stride()}: the last must be 1"
                )
        if keys.shape[:3] != values.shape[:3] or key_blocks.shape[:3] != value_blocks.shape[:3]:
            raise ValueError(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)}, or their blocks {tuple(key_blocks.shape)} "
                f"and {tuple(value_blocks.shape)}, differ in more than the last dimension"
            )
        batch, kv_heads, tokens, key_dim = keys.shape
        self._num_blocks, _, self._block_size, value_dim = value_blocks.shape
        self._slots = (batch, tokens), slots.stride()
        self._check_slots(slots)
        self._kernel = kernel("store")
        tensors = (keys, values, key_blocks, value_blocks)
        strides = [stride * tensor.element_size() for tensor in tensors for stride in tensor.stride()[:3]]
        self._packed = _LAYER.pack(
            *(key_blocks.data_ptr(), value_blocks.data_ptr(), batch, kv_heads, tokens, self._block_size),
            *(self._num_blocks * self._block_size, slots.stride(0), *strides),
            *(key_dim * keys.element_size(), value_dim * values.element_size()),
        )

    def __call__(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Stores states `(batch, kv_heads, n, dim)` at `slots` `(batch, n)`, int64. Raises `IndexError` for a slot
        outside the pool, `TypeError` or `ValueError` for other slots than were given, before anything is written."""
        if (slots.shape, slots.stride()) != self._slots or slots.dtype is not torch.int64 or not slots.is_cpu:
            self._check_slots(slots)
        error = self._kernel(_CALL.pack(keys.data_ptr(), values.data_ptr(), slots.data_ptr()) + self._packed)
        if error == 2:
            raise IndexError(f"a slot is outside the pool of {self._num_blocks} blocks of {self._block_size} tokens")
        if error:
            raise ValueError("a tensor without memory, or sizes that do not fit one another")

    def _check_slots(self, slots: Tensor) -> None:
        (batch, tokens), strides = self._slots
        if not slots.is_cpu or slots.dtype is not torch.int64:
            raise TypeError(f"slots are {slots.dtype} on {slots.device}: the kernel takes torch.int64 on the CPU")
        fits = slots.shape == (batch, tokens)
        if not fits or (tokens > 1 and slots.stride(1) != 1) or (batch > 1 and slots.stride(0) != strides[0]):
            raise (TypeError if fits else ValueError)(
                f"slots have shape {tuple(slots.shape)} and strides {slots.stride()}, ({batch}, {tokens}) new states "
                "came: the kernel takes one for each, the last dimension contiguous"
            )
