"""The kernels' calls of packed steps, packed once: between the products of a model every Python object that is touched
costs several times what it costs in a loop of its own, so a layer's call keeps what the last step's call found out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .build import library
from .calls import (
    ATTENTION,
    DTYPES,
    NO_STRIDES,
    STORE,
    attention_error,
    check_attention,
    check_metadata,
    check_slots,
    check_store,
    store_error,
)

if TYPE_CHECKING:
    from hf_paged.step import StepMetadata


class StoreCall:
    """
    `cache.storage.store` for states of the same shapes and strides in every step. It keeps addresses, not tensors: the
    caller sees to it that blocks and states are what they were.
    """

    __slots__ = ("_blocks", "_num_blocks", "_rest", "_slots")

    def __init__(self, keys: Tensor, values: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> None:
        """
        Arguments as of `cache.storage.store`, those that `supports_store` accepts, with one row. Raises `TypeError` or
        `ValueError` for others.
        """
        check_store(keys, values, key_blocks, value_blocks)
        if keys.size(0) != 1:
            raise ValueError(f"keys of shape {tuple(keys.shape)}: one row is needed")
        self._slots = 1, keys.size(2)
        _, kv_heads, tokens, key_dim = keys.shape
        self._num_blocks, _, block_size, value_dim = value_blocks.shape
        self._blocks = key_blocks.data_ptr(), value_blocks.data_ptr()
        strides = [
            stride * tensor.element_size()
            for tensor in (keys, values, key_blocks, value_blocks)
            for stride in tensor.stride()[:3]
        ]
        sizes = key_dim * keys.element_size(), value_dim * values.element_size()
        self._rest = (1, kv_heads, tokens, block_size, self._num_blocks * block_size, 0, *strides, *sizes)

    def __call__(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Stores `(1, kv_heads, tokens, dim)` states at `slots`, `(1, tokens)` int64."""
        fits = slots.shape == self._slots and slots.dtype is torch.int64 and slots.is_cpu and slots.is_contiguous()
        if not fits:
            check_slots(slots, *self._slots)
        kernels = library()
        assert kernels is not None
        call = STORE.pack(keys.data_ptr(), values.data_ptr(), *self._blocks, slots.data_ptr(), *self._rest)
        if error := kernels.hf_paged_store(call):
            raise store_error(error, self._num_blocks, self._rest[3])


class DecodeFields(NamedTuple):
    """What the kernel is told of a step's block tables: the same for all layers of a group."""

    metadata: StepMetadata  # keeps the tensors
    rows: int
    pointers: tuple[int, int, int]  # of block_tables, seq_lens, starts
    widths: tuple[int, int]  # of a row of block_tables: from one to the next, and its columns
    causal_window_threads: tuple[int, int, int]  # 1; tokens, -1 for no window; of torch

    @classmethod
    def of(cls, metadata: StepMetadata) -> DecodeFields:
        """For tables and lengths `(rows, max_blocks)` and `(rows,)`, int32, on the CPU."""
        rows = metadata.seq_lens.numel()
        check_metadata(metadata, rows)
        tables = metadata.block_tables
        return cls(
            metadata,
            rows,
            (tables.data_ptr(), metadata.seq_lens.data_ptr(), metadata.starts.data_ptr()),
            (tables.stride(0), tables.size(1)),
            (1, -1 if metadata.window is None else metadata.window, torch.get_num_threads()),
        )


class DecodeCall:
    """
    `paged_attention` of `(1, heads, rows, head_dim)` queries, one token of each sequence side by side, for queries of
    the same shape and strides in every step. It keeps addresses of blocks, not tensors.
    """

    __slots__ = ("_blocks", "_out_shape", "_rest", "_strides", "signature")

    def __init__(
        self,
        query: Tensor,
        key_blocks: Tensor,
        value_blocks: Tensor,
        sinks: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> None:
        """
        Args:
            query (`torch.Tensor` of shape `(1, heads, rows, key_dim)`): One that `supports` accepts, row by row.
            key_blocks, value_blocks (`torch.Tensor` of shape `(num_blocks, kv_heads, block_size, dim)`): Alive as long
                as the call is used.
            sinks, scale, softcap: As in `paged_attention`.
        """
        check_attention(query, key_blocks, value_blocks, sinks)
        if query.size(0) != 1:
            raise ValueError(f"queries of shape {tuple(query.shape)}: one row of tokens is needed")
        _, heads, rows, key_dim = query.shape
        num_blocks, kv_heads, block_size, value_dim = value_blocks.shape
        sinks_dtype = 0 if sinks is None else DTYPES[sinks.dtype]
        _, head_stride, row_stride, _ = query.stride()
        self._blocks = key_blocks.data_ptr(), value_blocks.data_ptr()
        self._out_shape = 1, rows, heads, value_dim
        dtype = DTYPES[query.dtype]
        self._rest = (dtype, sinks_dtype, 0, rows, heads, kv_heads, 1, key_dim, value_dim, block_size, num_blocks)
        self._strides = (row_stride, head_stride, 0, *key_blocks.stride()[:3], *value_blocks.stride()[:3])
        self._strides += (*NO_STRIDES, 0)
        self.signature = self.sign(query, sinks, scale, softcap)

    @staticmethod
    def sign(query: Tensor, sinks: Tensor | None, scale: float, softcap: float | None) -> tuple[object, ...]:
        """Equal for calls that one `DecodeCall` serves, on the same blocks. `sinks`: `(heads,)`, float."""
        kind = None if sinks is None else (sinks.dtype, sinks.stride(), sinks.device)
        return query.shape, query.stride(), query.dtype, kind, scale, softcap

    def __call__(self, query: Tensor, fields: DecodeFields, sinks: Tensor | None) -> Tensor:
        """`(1, rows, heads, value_dim)` in the query's dtype, contiguous."""
        if fields.rows != self._out_shape[1]:
            raise ValueError(f"{fields.rows} block tables, but {self._out_shape[1]} queries")
        out = query.new_empty(self._out_shape)
        *_, scale, softcap = self.signature
        call = ATTENTION.pack(
            query.data_ptr(),
            *self._blocks,
            out.data_ptr(),
            *fields.pointers,
            0 if sinks is None else sinks.data_ptr(),
            0,
            *self._rest,
            *fields.widths,
            *self._strides,
            *fields.causal_window_threads,
            scale,
            softcap or 0.0,
        )
        kernels = library()
        assert kernels is not None
        error = kernels.hf_paged_attention(call)
        if error:
            raise attention_error(error, fields.metadata, self._rest[-1], 0)
        return out
