"""One call of a C++ kernel (`kernels.cpp`, `hash.cpp`): which arguments it takes, how they are laid out for it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .build import library

if TYPE_CHECKING:
    from hf_paged.step import StepMetadata

MAX_QUERIES = 16
"""Queries per row up to which reading the blocks in place beats gathering them once."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ATTENTION = struct.Struct("9Q3q10q3q3q3q4q1q3q2d")  # struct AttentionCall
STORE = struct.Struct("5Q6q6q6q2q")  # struct StoreCall
HASH = struct.Struct("3Q2q")  # struct HashCall
NO_STRIDES: tuple[int, ...] = (0, 0, 0, 0)


def supports(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: StepMetadata,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> bool:
    """Whether `paged_attention` takes these arguments: float32, bfloat16 or float16 on the CPU, at most
    `MAX_QUERIES` queries a row, contiguous head dimensions, as many heads of V as of K, no gradient wanted."""
    dtype = query.dtype
    if not (
        query.is_cpu
        and metadata.query_len <= MAX_QUERIES
        and dtype in DTYPES
        and key_blocks.dtype is dtype
        and value_blocks.dtype is dtype
    ):
        return False
    if not (
        query.stride(3) == 1
        and key_blocks.stride(3) == 1
        and value_blocks.stride(3) == 1
        and key_blocks.size(1) == value_blocks.size(1)
    ):
        return False
    if sinks is not None and (sinks.dtype not in DTYPES or not sinks.is_cpu or sinks.stride(0) != 1):
        return False
    if bias is not None and (bias.dtype not in DTYPES or not bias.is_cpu):
        return False
    if not torch.is_grad_enabled():
        return True
    tensors = (query, key_blocks, value_blocks, sinks, bias)
    return not any(tensor is not None and tensor.requires_grad for tensor in tensors)


def check_attention(query: Tensor, key_blocks: Tensor, value_blocks: Tensor, sinks: Tensor | None) -> None:
    """
    Raises unless `(batch, heads, query_len, head_dim)` queries can be read with these blocks: `TypeError` for dtype and
    device, `ValueError` for shape and strides. What cannot be read from a tensor alone, the kernel checks.
    """
    tensors = {"query": query, "key_blocks": key_blocks, "value_blocks": value_blocks}
    for name, tensor in tensors.items():
        if not tensor.is_cpu or tensor.dtype is not query.dtype or tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name} is {tensor.dtype} on {tensor.device}, query {query.dtype} on {query.device}: the kernel takes "
                f"one of {', '.join(map(str, DTYPES))} for all, on the CPU"
            )
        if tensor.dim() != 4 or tensor.stride(3) != 1:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: the kernel takes 4 dimensions, "
                "the last one contiguous"
            )
    keys, values = key_blocks.shape, value_blocks.shape
    if keys[:3] != values[:3] or not keys[1] or not keys[2] or query.size(1) % keys[1] or query.size(3) != keys[3]:
        raise ValueError(
            f"queries of shape {tuple(query.shape)} do not fit key blocks of shape {tuple(keys)} and value blocks of "
            f"shape {tuple(values)}: (batch, heads, n, dim) goes with (blocks, kv_heads, block_size, dim)"
        )
    if sinks is not None:
        if not sinks.is_cpu or sinks.dtype not in DTYPES:
            raise TypeError(f"sinks are {sinks.dtype} on {sinks.device}: the kernel takes floats on the CPU")
        if sinks.shape != query.shape[1:2] or sinks.stride(0) != 1:
            raise ValueError(f"sinks have shape {tuple(sinks.shape)}, one for each of {query.size(1)} heads is needed")


def check_metadata(metadata: StepMetadata, rows: int) -> None:
    """Raises unless tables and lengths of `rows` rows can be read: errors as of `check_attention`."""
    for name, dims in (("block_tables", 2), ("seq_lens", 1), ("starts", 1)):
        tensor = getattr(metadata, name)
        if not tensor.is_cpu or tensor.dtype is not torch.int32:
            raise TypeError(f"{name} is {tensor.dtype} on {tensor.device}: the kernel takes torch.int32 on the CPU")
        # one row, or none, may have any stride from one to the next
        if tensor.dim() != dims or tensor.size(0) != rows or (tensor.stride(-1) != 1 and tensor.size(-1) > 1):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, there are {rows} rows: the "
                f"kernel takes {dims} dimensions, the last one contiguous"
            )


def check_store(keys: Tensor, values: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> None:
    """Raises unless states `(batch, heads, n, dim)` fit the blocks: errors as of `check_attention`."""
    for name, states, blocks in (("keys", keys, key_blocks), ("values", values, value_blocks)):
        if not (states.is_cpu and blocks.is_cpu) or states.dtype is not blocks.dtype:
            raise TypeError(
                f"{name} are {states.dtype} on {states.device}, their blocks {blocks.dtype} on {blocks.device}: the "
                "kernel takes one dtype, on the CPU"
            )
        if states.dim() != 4 or blocks.dim() != 4 or states.shape[1::2] != blocks.shape[1::2] or not blocks.size(2):
            raise ValueError(
                f"{name} of shape {tuple(states.shape)} do not fit blocks of shape {tuple(blocks.shape)}: (batch, "
                "heads, n, dim) goes with (blocks, heads, block_size, dim)"
            )
        if states.stride(3) != 1 or blocks.stride(3) != 1:
            raise ValueError(
                f"{name} or their blocks have strides {states.stride()}, {blocks.stride()}: the last must be 1"
            )
    if keys.shape[:3] != values.shape[:3] or key_blocks.shape[:3] != value_blocks.shape[:3]:
        raise ValueError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)}, or their blocks {tuple(key_blocks.shape)} and "
            f"{tuple(value_blocks.shape)}, differ in more than the last dimension"
        )


def check_slots(slots: Tensor, rows: int, tokens: int) -> None:
    """Raises unless there is a slot for each of `rows` x `tokens` new states: errors as of `check_attention`."""
    if not slots.is_cpu or slots.dtype is not torch.int64:
        raise TypeError(f"slots are {slots.dtype} on {slots.device}: the kernel takes torch.int64 on the CPU")
    if slots.dim() != 2 or slots.size(0) != rows or slots.size(1) != tokens or (tokens > 1 and slots.stride(1) != 1):
        raise ValueError(
            f"slots have shape {tuple(slots.shape)} and strides {slots.stride()}, ({rows}, {tokens}) new states came: "
            "the kernel takes one for each, the last dimension contiguous"
        )


def paged_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: StepMetadata,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """
    `reference.paged_attention` for the arguments that `supports` accepts; float32 arithmetic for every dtype. Raises
    `TypeError`, `ValueError` or `IndexError` for others; nothing outside of a tensor is read.
    """
    check_attention(query, key_blocks, value_blocks, sinks)
    check_metadata(metadata, query.size(0))
    if metadata.query_len != query.size(2) or metadata.block_size != key_blocks.size(2):
        raise ValueError(
            f"the metadata tells of {metadata.query_len} queries and blocks of {metadata.block_size} tokens, there are "
            f"{query.size(2)} and {key_blocks.size(2)}"
        )
    if bias is not None and (bias.dtype not in DTYPES or not bias.is_cpu):
        raise TypeError(f"the bias is {bias.dtype} on {bias.device}: the kernel takes floats on the CPU")
    batch, heads, query_len, key_dim = query.shape
    num_blocks, kv_heads, block_size, value_dim = value_blocks.shape
    out = query.new_empty(batch, query_len, heads, value_dim)
    tables = metadata.block_tables
    bias_strides, bias_len = NO_STRIDES, 0
    if bias is not None:
        keys = max(bias.shape[-1], max(metadata.seq_lens_host) if bias.shape[-1] == 1 else 0)
        bias = bias.expand(batch, heads, query_len, keys)
        bias_strides, bias_len = bias.stride(), keys
    query_strides, key_strides, value_strides = query.stride(), key_blocks.stride(), value_blocks.stride()
    call = ATTENTION.pack(
        query.data_ptr(),
        key_blocks.data_ptr(),
        value_blocks.data_ptr(),
        out.data_ptr(),
        tables.data_ptr(),
        metadata.seq_lens.data_ptr(),
        metadata.starts.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        DTYPES[query.dtype],
        0 if sinks is None else DTYPES[sinks.dtype],
        0 if bias is None else DTYPES[bias.dtype],
        batch,
        heads,
        kv_heads,
        query_len,
        key_dim,
        value_dim,
        block_size,
        num_blocks,
        tables.stride(0),
        tables.size(1),
        query_strides[0],
        query_strides[1],
        query_strides[2],
        key_strides[0],
        key_strides[1],
        key_strides[2],
        value_strides[0],
        value_strides[1],
        value_strides[2],
        *bias_strides,
        bias_len,
        metadata.causal,
        -1 if metadata.window is None else metadata.window,
        torch.get_num_threads(),
        scale,
        softcap or 0.0,
    )
    kernels = library()
    assert kernels is not None
    error = kernels.hf_paged_attention(call)
    if error:
        raise attention_error(error, metadata, num_blocks, bias_len)
    return out


def attention_error(error: int, metadata: StepMetadata, num_blocks: int, bias_len: int) -> Exception:
    """Why the kernel gives no result: it would have read outside of a tensor, or there was no memory to compute in."""
    if error == 6:
        return MemoryError("not enough memory for the sums of the attention kernel")
    if error == 4:
        return ValueError("a tensor without memory, or sizes that do not fit one another")
    if error == 5:
        return IndexError(f"a row starts before its first token: starts are {metadata.starts.tolist()}")
    if error == 1:
        return IndexError(
            f"block tables of shape {tuple(metadata.block_tables.shape)} and {metadata.block_size} tokens a block do "
            f"not fit seq_lens {metadata.seq_lens.tolist()}"
        )
    if error == 2:
        return IndexError(f"a block id in block_tables is outside the pool of {num_blocks} blocks")
    return IndexError(f"the bias covers {bias_len} positions, seq_lens are {metadata.seq_lens.tolist()}")


def supports_store(keys: Tensor, values: Tensor, key_blocks: Tensor, value_blocks: Tensor, slots: Tensor) -> bool:
    """Whether `store` takes these arguments: plain copies within the CPU, contiguous head dimension."""
    return (
        keys.is_cpu
        and key_blocks.is_cpu
        and keys.dtype is key_blocks.dtype
        and values.dtype is value_blocks.dtype
        and keys.stride(3) == 1
        and values.stride(3) == 1
        and key_blocks.stride(3) == 1
        and value_blocks.stride(3) == 1
        and keys.size(1) == values.size(1)
        and slots.dtype is torch.int64
        and slots.stride(1) == 1
        and not (torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad))
    )


def store(keys: Tensor, values: Tensor, key_blocks: Tensor, value_blocks: Tensor, slots: Tensor) -> None:
    """
    `cache.storage.store` for the arguments that `supports_store` accepts. Raises `TypeError`, `ValueError` or
    `IndexError` for others, before anything is written.
    """
    check_store(keys, values, key_blocks, value_blocks)
    check_slots(slots, keys.size(0), keys.size(2))
    batch, kv_heads, tokens, key_dim = keys.shape
    num_blocks, _, block_size, value_dim = value_blocks.shape
    key_size, value_size = keys.element_size(), values.element_size()
    key_strides, value_strides = keys.stride(), values.stride()
    key_block_strides, value_block_strides = key_blocks.stride(), value_blocks.stride()
    call = STORE.pack(
        keys.data_ptr(),
        values.data_ptr(),
        key_blocks.data_ptr(),
        value_blocks.data_ptr(),
        slots.data_ptr(),
        batch,
        kv_heads,
        tokens,
        block_size,
        num_blocks * block_size,
        slots.stride(0),
        key_strides[0] * key_size,
        key_strides[1] * key_size,
        key_strides[2] * key_size,
        value_strides[0] * value_size,
        value_strides[1] * value_size,
        value_strides[2] * value_size,
        key_block_strides[0] * key_size,
        key_block_strides[1] * key_size,
        key_block_strides[2] * key_size,
        value_block_strides[0] * value_size,
        value_block_strides[1] * value_size,
        value_block_strides[2] * value_size,
        key_dim * key_size,
        value_dim * value_size,
    )
    kernels = library()
    assert kernels is not None
    if error := kernels.hf_paged_store(call):
        raise store_error(error, num_blocks, block_size)


def store_error(error: int, num_blocks: int, block_size: int) -> Exception:
    """What the kernel found that would have written outside of a tensor; it then has written nothing."""
    if error == 2:
        return IndexError(f"a slot is outside the pool of {num_blocks} blocks of {block_size} tokens")
    return ValueError("a tensor without memory, or sizes that do not fit one another")


def hash_memory(starts: Sequence[int], sizes: Sequence[int]) -> bytes:
    """
    16 bytes that tell the spans of `sizes[i]` bytes from address `starts[i]`, their order and their content. Raises
    `ValueError` for a negative size, or a size without an address.
    """
    count = len(starts)
    if len(sizes) != count:
        raise ValueError(f"{count} addresses and {len(sizes)} sizes")
    addresses, num_bytes = (ctypes.c_uint64 * count)(*starts), (ctypes.c_int64 * count)(*sizes)
    out = (ctypes.c_uint64 * 2)()
    pointers = (ctypes.addressof(array) for array in (addresses, num_bytes, out))
    kernels = library()
    assert kernels is not None
    if kernels.hf_paged_hash(HASH.pack(*pointers, count, torch.get_num_threads())):
        raise ValueError(f"a span has a negative size, or no address: sizes are {list(sizes)}")
    return bytes(out)
