"""Calls to the C++ kernels that store new K/V in blocks, and gather blocks. Arguments that are the
same in many steps are packed once. Unsupported calls raise errors."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...step import StepMetadata
from .. import quantized
from .attention import FLOAT_DTYPE_NUMBERS, describe, scales_offset
from .build import kernel, observer

# struct StoreCall: fields of the call, then of the layer
_STORE_CALL = struct.Struct("3Q")
_STORE_LAYER = struct.Struct("2Q5q6q6q2q5q")
# struct GatherCall: fields of the call, then of the step
_GATHER_CALL = struct.Struct("2Q6q")
_GATHER_STEP = struct.Struct("3Q7q")

StoreSignature: TypeAlias = tuple[Any, ...]


def store_signature(keys: Tensor, values: Tensor) -> StoreSignature:
    """Returns the shapes, strides, dtypes and device of K/V, which determine the blocks and the
    store function that they need."""
    return (
        keys.shape,
        keys.stride(),
        keys.dtype,
        keys.device,
        values.shape,
        values.stride(),
        values.dtype,
        values.device,
    )


class Store:
    """Stores keys and values in blocks, for steps in which they have the same shapes and strides.
    An object holds the addresses of the blocks, not the tensors, so the blocks must outlive it."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        key_blocks: Tensor,
        value_blocks: Tensor,
        slots: Tensor,
    ) -> None:
        """Checks and packs the arguments.

        Args:
            keys, values: `(batch, kv_heads, n, dim)`.
            key_blocks, value_blocks: `(num_blocks, kv_heads, block_size, dim)`, in the dtype of
                keys and values, or quantized alike.
            slots: `(batch, n)` int64.

        Raises `TypeError` for unsupported dtypes, devices and strides, and `ValueError` for shapes
        that do not fit.
        """
        for states, blocks in ((keys, key_blocks), (values, value_blocks)):
            fits = (
                states.dim() == blocks.dim() == 4
                and states.shape[1::2] == blocks.shape[1::2]
                and blocks.size(2)
            )
            if (
                not fits
                or states.shape[:3] != keys.shape[:3]
                or blocks.shape[:3] != key_blocks.shape[:3]
            ):
                raise ValueError(
                    f"keys of shape {tuple(keys.shape)}, values of shape {tuple(values.shape)}, key"
                    f" blocks of shape {tuple(key_blocks.shape)} and value blocks of shape"
                    f" {tuple(value_blocks.shape)} do not fit: K/V are (batch, heads, n, dim),"
                    " blocks (num_blocks, heads, block_size, dim)"
                )
            if quantized.is_quantized(blocks):
                is_supported = states.dtype in FLOAT_DTYPE_NUMBERS
            else:
                is_supported = states.dtype is blocks.dtype
            is_supported &= all(x.is_cpu and x.stride(3) == 1 for x in (states, blocks))
            if not (is_supported and quantized.are_quantized_alike(key_blocks, value_blocks)):
                raise TypeError(
                    f"new states are {describe(states)}, their blocks {describe(blocks)}: the"
                    " kernel takes tensors on the CPU with a contiguous last dimension, and blocks"
                    " in the dtype of the states or quantized; key and value blocks must be"
                    " quantized alike"
                )
        batch, kv_heads, tokens, key_dim = keys.shape
        self._num_blocks, _, self._block_size, value_dim = value_blocks.shape
        self._signature = store_signature(keys, values)
        self._slots_shape = torch.Size((batch, tokens))
        self._check_slots(slots)
        self._kernel = kernel("store")
        tensors = (keys, values, key_blocks, value_blocks)
        strides = []
        for tensor in tensors:
            element_size = tensor.element_size()
            strides += [stride * element_size for stride in tensor.stride()[:3]]
        self._packed = _STORE_LAYER.pack(
            key_blocks.data_ptr(),
            value_blocks.data_ptr(),
            batch,
            kv_heads,
            tokens,
            self._block_size,
            self._num_blocks * self._block_size,
            *strides,
            key_dim * key_blocks.element_size(),
            value_dim * value_blocks.element_size(),
            quantized.DTYPE_NUMBERS.get(key_blocks.dtype, 0),
            FLOAT_DTYPE_NUMBERS.get(keys.dtype, 0),
            FLOAT_DTYPE_NUMBERS.get(values.dtype, 0),
            scales_offset(key_blocks),
            scales_offset(value_blocks),
        )

    def __call__(
        self,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        signature: StoreSignature | None = None,
    ) -> None:
        """Stores keys and values `(batch, kv_heads, n, dim)` at `slots` `(batch, n)` int64; skips
        negative slots. `signature`: their `store_signature`, if the caller knows it. Raises, with
        nothing stored, `IndexError` for a slot past the pool, and `TypeError` or `ValueError` for
        tensors whose dtypes, shapes or strides differ from the constructor's."""
        if (signature or store_signature(keys, values)) != self._signature:
            raise ValueError(
                f"keys are {describe(keys)}, values {describe(values)}: the call was packed for"
                f" {self._signature}"
            )
        self._check_slots(slots)
        call_fields = _STORE_CALL.pack(keys.data_ptr(), values.data_ptr(), slots.data_ptr())
        call = call_fields + self._packed
        error = self._kernel(call)
        if error == 2:
            raise IndexError(
                f"a slot is outside the pool of {self._num_blocks} blocks of {self._block_size}"
                " tokens"
            )
        if error:
            raise ValueError(
                "a tensor has no memory, sizes do not match, or the dtype of the codes is unknown"
            )
        observe = observer.get()
        if observe is not None:
            reads = {0: keys, 8: values, 16: slots}
            observe("store", call, reads, {})

    def _check_slots(self, slots: Tensor) -> None:
        is_supported = slots.dtype is torch.int64 and slots.is_cpu and slots.is_contiguous()
        if not is_supported or slots.shape != self._slots_shape:
            error_type = ValueError if is_supported else TypeError
            raise error_type(
                f"slots are {describe(slots)}: the kernel takes contiguous torch.int64 on the CPU,"
                f" of shape {tuple(self._slots_shape)}, one for each new token"
            )


class Gather:
    """Gathers a layer's keys or values. The constructor checks and packs the arguments that are the
    same in all steps. An object holds the address of the blocks, not the tensor, so the blocks must
    outlive it."""

    def __init__(self, blocks: Tensor) -> None:
        """`blocks`: `(num_blocks, heads, block_size, dim)` of any dtype on the CPU, with a
        contiguous last dimension. Raises `ValueError` for other tensors."""
        if not blocks.is_cpu or blocks.dim() != 4 or blocks.stride(3) != 1 or not blocks.size(2):
            raise ValueError(
                f"blocks are {describe(blocks)}: the kernel takes tensors on the CPU, of 4"
                " dimensions, the last contiguous"
            )
        self._num_blocks, self._heads, self._block_size, self._dim = blocks.shape
        self._empty = blocks.new_empty(0)
        self._kernel = kernel("gather")
        self._address = blocks.data_ptr()
        element_size = blocks.element_size()
        strides = (stride * element_size for stride in blocks.stride()[:3])
        self._sizes = self._heads, self._num_blocks, *strides, self._dim * element_size

    def __call__(self, step: StepMetadata) -> Tensor:
        """Returns the keys or values at `step.columns` of every row, as contiguous `(rows, heads,
        len(columns), dim)`, with zeros for padding and, in a recorded step, after a row's last
        token. Raises `IndexError` for tables with too few blocks or wrong ids, and `ValueError` for
        other steps that do not fit."""
        packed_step = step.plan(_pack_gather_step)
        if step.block_size != self._block_size:
            raise ValueError(
                f"the step has {step.block_size} tokens per block, but the blocks have"
                f" {self._block_size}"
            )
        num_rows, num_columns = packed_step.shape
        out = self._empty.new_empty(num_rows, self._heads, num_columns, self._dim)
        call = _GATHER_CALL.pack(self._address, out.data_ptr(), *self._sizes) + packed_step.packed
        error = self._kernel(call)
        if error == 4:
            raise ValueError("a tensor has no memory, or sizes do not match")
        if error:
            raise IndexError(
                f"block tables of shape {tuple(step.block_tables.shape)} have too few blocks for"
                f" columns {step.columns}, or ids outside the pool of {self._num_blocks} blocks"
            )
        observe = observer.get()
        if observe is not None:
            # omits the blocks, which the pool keeps alive
            addresses = enumerate(packed_step.tensors)
            reads = {_GATHER_CALL.size + 8 * index: tensor for index, tensor in addresses}
            observe("gather", call, reads, {8: out})
        return out


class _PackedGatherStep(NamedTuple):
    """The fields of `GatherCall` that describe a step. They are the same for all layers."""

    packed: bytes
    tensors: tuple[Tensor, ...]  # their addresses are the first fields of `packed`
    shape: tuple[int, int]  # rows and columns


def _pack_gather_step(step: StepMetadata) -> _PackedGatherStep:
    """Checks and packs a step. Raises `ValueError` for sizes that do not fit."""
    tables = step.block_tables.to("cpu", torch.int32).contiguous()
    columns = step.columns
    tensors: tuple[Tensor, ...]
    if step.lengths is None or step.lengths.origins is None:
        origins = torch.tensor(step.origins, dtype=torch.int32, device="cpu")
        tensors = tables, origins
        lengths_address = 0
    else:
        origins, lengths = step.lengths.origins, step.lengths.seq_lens
        tensors = tables, origins, lengths
        lengths_address = lengths.data_ptr()
    if (
        columns is None
        or tables.dim() != 2
        or len(origins) != len(tables)
        or len(tables) != step.num_rows
    ):
        raise ValueError(
            f"{len(origins)} origins, block tables of shape {tuple(tables.shape)} and columns"
            f" {columns}: the kernel takes a range of columns, and one origin and one table for"
            f" each of {step.num_rows} rows"
        )
    packed = _GATHER_STEP.pack(
        tables.data_ptr(),
        origins.data_ptr(),
        lengths_address,
        step.num_rows,
        columns.start,
        len(columns),
        tables.stride(0),
        tables.size(1),
        step.block_size,
        torch.get_num_threads(),
    )
    return _PackedGatherStep(packed, tensors, (step.num_rows, len(columns)))
