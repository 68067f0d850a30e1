"""Calls to the C++ kernel that attends to K/V blocks. Arguments that are the same in many steps are
packed once. Unsupported calls raise errors."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from ...step import StepMetadata
from .. import quantized
from .build import batch_invariant, best_path, kernel, observer

FLOAT_DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # ids in C++

# struct AttentionCall: fields of the call and its bias, of the step, of the choice of instructions,
# and of the layer
_CALL = struct.Struct("4Q")
_BIAS = struct.Struct("6q")
_STEP = struct.Struct("5Q7q")
_PATH = struct.Struct("2q")
_LAYER = struct.Struct("2Q20q2d")
_NO_BIAS = _BIAS.pack(0, 0, 0, 0, 0, 0)


def describe(tensor: Tensor) -> str:
    return (
        f"{tensor.dtype} on {tensor.device}, of shape {tuple(tensor.shape)} and strides"
        f" {tensor.stride()}"
    )


def _layout(tensor: Tensor | None) -> object:
    """Returns the properties of a tensor that must be the same in all steps of a packed call."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


class _PackedStep(NamedTuple):
    """The fields of `AttentionCall` that describe a step. They are the same for all layers."""

    packed: bytes
    tensors: dict[int, Tensor]  # by byte offset of their address in `packed`
    num_tokens: int
    block_size: int


def _pack_step(step: StepMetadata) -> _PackedStep:
    """Checks and packs a step. Raises `ValueError` for tensors that the kernel does not take."""
    tables = step.block_tables
    lengths = step.on_device
    is_uniform = step.query_len is not None  # then the kernel needs no `query_start`
    tensors = {
        "block_tables": tables,
        "seq_lens": lengths.seq_lens,
        "starts": lengths.starts,
        "query_start": None if is_uniform else lengths.query_start,
        "origins": lengths.origins,
    }
    addresses = []
    by_offset = {}
    for name, tensor in tensors.items():
        if tensor is None:
            addresses.append(0)
            continue
        dims = 2 if name == "block_tables" else 1
        size = step.num_rows
        if name == "query_start":
            size += 1
        fits = tensor.dim() == dims
        if fits:
            # the stride of a dimension of at most one element is arbitrary
            fits = tensor.stride(-1) == 1 or tensor.size(-1) <= 1
        if (
            not fits
            or tensor.size(0) != size
            or not tensor.is_cpu
            or tensor.dtype is not torch.int32
        ):
            raise ValueError(
                f"{name} is {describe(tensor)} for {step.num_rows} rows: the kernel takes int32 on"
                f" the CPU, of {dims} dimension(s), the first of size {size}, the last contiguous"
            )
        by_offset[8 * len(addresses)] = tensor
        addresses.append(tensor.data_ptr())
    packed = _STEP.pack(
        *addresses,
        step.num_rows,
        step.query_len or 0,
        tables.stride(0),
        tables.size(1),
        step.causal,
        -1 if step.window is None else step.window,
        torch.get_num_threads(),
    )
    return _PackedStep(packed, by_offset, step.num_tokens, step.block_size)


def scales_offset(blocks: Tensor) -> int:
    """Returns the offset in bytes from a head's block to its scales; 0 for unquantized blocks."""
    if not quantized.is_quantized(blocks):
        return 0
    scales = quantized.scales(blocks)
    return scales.data_ptr() - blocks.data_ptr()


class Attention:
    """Attention over the blocks of a layer, for steps whose queries have the same shape and
    strides. The constructor checks and packs the layer's arguments. An object holds the addresses
    of the blocks, not the tensors, so the blocks must outlive it."""

    def __init__(
        self,
        query: Tensor,
        key_blocks: Tensor,
        value_blocks: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Checks and packs the arguments.

        Args:
            query: `(T, heads, key_dim)`.
            key_blocks, value_blocks: `(num_blocks, kv_heads, block_size, dim)`, in the query's
                dtype or quantized.
            scale, softcap, sinks: As in `attention.backends.reference.AttentionCall`.

        Raises `TypeError` for unsupported dtypes, devices, strides and numbers of dimensions, and
        `ValueError` for shapes that do not fit.
        """
        tensors = (query, key_blocks, value_blocks)
        dtype_number = quantized.DTYPE_NUMBERS.get(key_blocks.dtype, 0)
        dtype = key_blocks.dtype if dtype_number else query.dtype
        is_supported = (
            query.dtype in FLOAT_DTYPE_NUMBERS
            and key_blocks.dtype == dtype
            and value_blocks.dtype == dtype
        )
        if not is_supported or not all(x.is_cpu for x in tensors):
            queries, keys, values = (f"{x.dtype} on {x.device}" for x in tensors)
            # no sizes in this error and the next: each distinct message is logged as a warning
            raise TypeError(
                "the C++ kernel takes queries in float32, bfloat16 or float16 on the CPU, with keys"
                f" and values in the same dtype or quantized: queries are {queries}, keys {keys},"
                f" values {values}"
            )
        dims = [x.dim() for x in tensors]
        are_contiguous = [x.stride(-1) == 1 for x in tensors]
        if dims != [3, 4, 4] or not all(are_contiguous):
            raise TypeError(
                "the C++ kernel takes queries, keys and values of 3, 4 and 4 dimensions, the last"
                f" one contiguous: they have {dims} dimensions, and the last one is contiguous:"
                f" {are_contiguous}"
            )
        key_shape = key_blocks.shape
        value_shape = value_blocks.shape
        if (
            key_shape[:3] != value_shape[:3]
            or not key_shape[1]
            or not key_shape[2]
            or query.size(1) % key_shape[1]
            or query.size(2) != key_shape[3]
        ):
            raise ValueError(
                f"queries of shape {tuple(query.shape)} do not fit key blocks of shape"
                f" {tuple(key_shape)} and value blocks of shape {tuple(value_shape)}: queries are"
                " (tokens, heads, dim), blocks (num_blocks, kv_heads, block_size, dim)"
            )
        if sinks is not None:
            is_float = sinks.dtype in FLOAT_DTYPE_NUMBERS
            is_supported = sinks.is_cpu and is_float and sinks.stride() == (1,)
            if not is_supported or sinks.shape != query.shape[1:2]:
                error_type = ValueError if is_supported else TypeError
                raise error_type(
                    f"sinks are {describe(sinks)}: the C++ kernel takes contiguous floats on the"
                    f" CPU, one for each of {query.size(1)} heads"
                )
        self._layouts = _layout(query), _layout(sinks)
        num_tokens, heads, key_dim = query.shape
        self._num_blocks, kv_heads, block_size, value_dim = value_shape
        self._out_shape = num_tokens, heads, value_dim
        self._step_shape = num_tokens, block_size
        self._kernel = kernel("attention")
        token_stride, head_stride, _ = query.stride()
        sinks_dtype = 0 if sinks is None else FLOAT_DTYPE_NUMBERS[sinks.dtype]
        self._packed = _LAYER.pack(
            key_blocks.data_ptr(),
            value_blocks.data_ptr(),
            FLOAT_DTYPE_NUMBERS[query.dtype],
            sinks_dtype,
            heads,
            kv_heads,
            key_dim,
            value_dim,
            block_size,
            self._num_blocks,
            num_tokens,
            head_stride,
            token_stride,
            *key_blocks.stride()[:3],
            *value_blocks.stride()[:3],
            dtype_number,
            scales_offset(key_blocks),
            scales_offset(value_blocks),
            scale,
            softcap or 0.0,
        )

    def __call__(
        self,
        query: Tensor,
        step: StepMetadata,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Returns `(T, heads, value_dim)` in the query's dtype, contiguous. `query` and `sinks`
        must have the shapes, strides and dtypes of the constructor's. `bias` broadcasts to `(rows,
        heads, query_len, >= max seq_len)`, where `query_len` is 1 if rows differ in their number of
        queries. Raises `TypeError`, `ValueError` or `IndexError` for arguments that do not fit,
        `RuntimeError` for a bias that does not broadcast, and `MemoryError`. Never reads outside a
        tensor."""
        if (_layout(query), _layout(sinks)) != self._layouts:
            described_sinks = None if sinks is None else describe(sinks)
            raise ValueError(
                f"queries are {describe(query)}, sinks {described_sinks}: the call was packed for"
                f" {self._layouts}"
            )
        packed_step = step.plan(_pack_step)
        step_shape = packed_step.num_tokens, packed_step.block_size
        if step_shape != self._step_shape:
            raise ValueError(
                f"the step has (queries, tokens per block) {step_shape}, but the call was packed"
                f" for {self._step_shape}"
            )
        num_keys = 0
        bias_address = 0
        packed_bias = _NO_BIAS
        if bias is not None:
            if bias.dtype not in FLOAT_DTYPE_NUMBERS or not bias.is_cpu:
                raise TypeError(
                    f"the bias is {bias.dtype} on {bias.device}: the kernel takes floats on the CPU"
                )
            heads = query.shape[1]
            # if rows differ in their number of queries, all queries of a row share one bias
            bias = bias.expand(step.num_rows, heads, step.query_len or 1, -1)
            num_keys = bias.shape[-1]
            if num_keys == 1:
                num_keys = 1 << 62  # all keys share one bias
            strides = (
                0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride())
            )
            bias_address = bias.data_ptr()
            packed_bias = _BIAS.pack(FLOAT_DTYPE_NUMBERS[bias.dtype], *strides, num_keys)
        out = query.new_empty(self._out_shape)
        sinks_address = 0 if sinks is None else sinks.data_ptr()
        addresses = _CALL.pack(query.data_ptr(), out.data_ptr(), sinks_address, bias_address)
        call_fields = addresses + packed_bias
        path = _PATH.pack(best_path(), batch_invariant.get())
        call = call_fields + packed_step.packed + path + self._packed
        error = self._kernel(call)
        if error:
            raise self._exception(error, step, num_keys)
        observe = observer.get()
        if observe is not None:
            inputs = {0: query, 16: sinks, 24: bias}
            for offset, tensor in packed_step.tensors.items():
                inputs[len(call_fields) + offset] = tensor
            reads = {offset: tensor for offset, tensor in inputs.items() if tensor is not None}
            observe("attention", call, reads, {8: out})
        return out

    def _exception(self, error: int, step: StepMetadata, bias_len: int) -> Exception:
        """Returns the exception for the kernel's error number."""
        seq_lens = step.on_device.seq_lens.tolist()
        starts = step.on_device.starts.tolist()
        tables = (
            f"block tables of shape {tuple(step.block_tables.shape)} with {step.block_size} tokens"
            " per block"
        )
        return {
            1: IndexError(f"{tables} have too few blocks for seq_lens {seq_lens}"),
            2: IndexError(
                f"a block id in block_tables is outside the pool of {self._num_blocks} blocks"
            ),
            3: IndexError(f"the bias covers {bias_len} positions, but seq_lens are {seq_lens}"),
            4: ValueError(
                "a tensor has no memory, sizes do not match, or the dtype of the codes is unknown"
            ),
            5: IndexError(f"a row starts before position 0: starts are {starts}"),
            6: MemoryError("not enough memory for the buffers of the attention kernel"),
        }[error]
