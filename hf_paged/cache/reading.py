"""Reads a layer's keys or values from blocks as one dense tensor: a view of virtual storage, or a
gathered copy."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import quantized
from ..step import StepMetadata
from .kv_blocks import KVBlocks


class GatherIndices(NamedTuple):
    """The rows to gather from a matrix that views a layer's blocks. A matrix row is one token of
    one head or, where a block's tokens of one head are contiguous, a tile: all of these tokens or
    an equal part of them."""

    indices: Tensor  # of matrix rows, ordered by sequence, head and token
    shape: tuple[int, int]  # of the matrix
    stride: tuple[int, int]

    def read(self, blocks: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns a copy of the matrix rows `indices` of `blocks`, `(len(indices), width)`; in
        `out`, if given."""
        matrix = blocks.as_strided(self.shape, self.stride)
        return torch.index_select(matrix, 0, self.indices, out=out)


class BlockLayout(NamedTuple):
    """Memory layout of a layer's keys or values; the last dimension is contiguous."""

    shape: tuple[int, ...]  # blocks, heads, block size, dim
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, blocks: Tensor) -> BlockLayout:
        return cls(blocks.shape, blocks.stride(), blocks.element_size())

    def gather_indices(
        self, tables: Tensor, heads: slice, positions: Tensor | None
    ) -> GatherIndices:
        """Returns the matrix rows of these heads. Without `positions`, they cover all tokens of the
        blocks `tables` `(rows, n)`: as tiles or, if each token's keys and values lie side by side,
        token by token. With `positions` `(rows, n)`, they are the tokens at these positions of
        rows, whose block tables are `tables`."""
        _, _, size, dim = self.shape
        block_stride, head_stride, token_stride, _ = self.stride
        if positions is None and token_stride == dim:
            row_stride = math.gcd(size * dim, block_stride, head_stride)
            width = row_stride
        else:
            row_stride = math.gcd(token_stride, block_stride, head_stride)
            width = dim
        # offsets of tiles or tokens from the start of a head, in matrix rows
        if positions is None:
            tile_stride = token_stride * width // dim
            offsets = torch.arange(size * dim // width, device=tables.device)
            offsets = offsets * (tile_stride // row_stride)
        else:
            offsets = positions % size * (token_stride // row_stride)
            offsets = offsets[:, None, :, None]
            tables = tables.gather(1, positions // size)
        head_starts = torch.arange(heads.start, heads.stop, device=tables.device)
        head_starts = head_starts[:, None, None] * (head_stride // row_stride)
        block_starts = tables[:, None, :, None] * (block_stride // row_stride)
        indices = block_starts + head_starts + offsets
        axes = zip(self.shape, self.stride)
        last_start = sum((length - 1) * stride for length, stride in axes) + 1 - width
        num_matrix_rows = last_start // row_stride + 1
        return GatherIndices(indices.flatten(), (num_matrix_rows, width), (row_stride, 1))


def read_rows(step: StepMetadata, layer: KVBlocks, is_value: bool) -> Tensor:
    """Returns a layer's keys or values `(batch, heads, len(columns), dim)` in the layer's dtype:
    a view if virtual storage maps the rows contiguously and stores them in that dtype, otherwise
    a copy (`gather`)."""
    view = None
    if layer.rows is not None:
        view = layer.rows.strided_view(step, is_value)
    if view is None:
        return gather(step, layer, is_value)
    step.counters.in_place += 1
    return view.to(layer.dtypes[is_value])


def read_pair(step: StepMetadata, layer: KVBlocks) -> tuple[Tensor, Tensor]:
    """Returns the results of `read_rows` for a layer's keys and for its values."""
    return read_rows(step, layer, False), read_rows(step, layer, True)


def gather(step: StepMetadata, layer: KVBlocks, is_value: bool) -> Tensor:
    """Gathers a layer's keys or values at the `step.columns` of every row into one contiguous
    tensor `(batch, heads, len(columns), dim)`, with zeros for padding."""
    columns = step.columns
    assert columns is not None
    step.counters.gathered += 1
    step.counters.gathered_decodes += step.query_len == 1
    blocks, dtype = layer.pair[is_value]
    shape = (step.num_rows, blocks.shape[1], len(columns))
    if not all(shape):
        return blocks.new_empty(*shape, blocks.shape[3], dtype=dtype)
    if layer.gathers is not None:
        pieces = [gather_piece(step) for gather_piece in layer.gathers[is_value]]
        return quantized.dequantize(pieces, blocks, dtype)
    device = blocks.device
    pieces = []
    for tensor in quantized.stored_tensors(blocks):
        indices = step.plan(_indices_of, BlockLayout.of(tensor), device)
        pieces.append(indices.read(tensor).view(*shape, -1))
    dense = quantized.dequantize(pieces, blocks, dtype)
    if step.has_padding:
        is_padding = step.plan(_positions, device) < 0
        dense.masked_fill_(is_padding[:, None, :, None], 0)
    return dense


def _indices_of(step: StepMetadata, layout: BlockLayout, device: torch.device) -> GatherIndices:
    """Returns the indices of all `step.columns`: the same for all layers with this layout. Padding
    gets the index of an arbitrary token."""
    tables = step.block_tables.to(device, torch.long)
    if not tables.shape[1]:  # all columns are padding
        tables = tables.new_zeros(step.num_rows, 1)
    positions = step.plan(_positions, device).clamp(min=0)
    return layout.gather_indices(tables, slice(0, layout.shape[1]), positions)


def _positions(step: StepMetadata, device: torch.device) -> Tensor:
    """Returns the position of each column in the blocks of its row, `(rows, len(columns))`;
    negative for padding."""
    assert step.columns is not None
    columns = torch.arange(step.columns.start, step.columns.stop, device=device)
    origins = torch.tensor(step.origins, device=device)
    return columns - origins[:, None]
