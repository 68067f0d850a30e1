"""Reads a layer's keys or values from blocks as one dense tensor: a view of virtual storage, or
gathered."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import cpp, quantized
from ..kernels.cpp.attention import gather as cpp_gather
from ..step import StepMetadata
from .kv_blocks import KVBlocks


class Units(NamedTuple):
    """Tiles or tokens of some blocks, addressed as rows of a matrix that is a view of a layer's
    blocks."""

    indices: Tensor  # of the rows, head-major
    shape: tuple[int, int]  # of the matrix
    stride: tuple[int, int]

    def read(self, blocks: Tensor, out: Tensor | None = None) -> Tensor:
        """Gathers the rows."""
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

    def units(self, tables: Tensor, heads: slice, positions: Tensor | None) -> Units:
        """Returns the units of some heads: of the blocks `tables` `[rows, n]`, as tiles if the
        strides allow (not if keys and values are interleaved), else as tokens; or, with
        `positions` `[rows, n]`, the tokens there of rows with these block tables."""
        _, _, size, dim = self.shape
        block, head, token, _ = self.stride
        if positions is None and token == dim:
            distance = math.gcd(size * dim, block, head)
            width = distance
        else:
            distance = math.gcd(token, block, head)
            width = dim
        # units from the start of a head
        if positions is None:
            spacing = token * width // dim
            inner = torch.arange(size * dim // width, device=tables.device)
            inner = inner * (spacing // distance)
        else:
            inner = positions % size * (token // distance)
            inner = inner[:, None, :, None]
            tables = tables.gather(1, positions // size)
        first = torch.arange(heads.start, heads.stop, device=tables.device)
        first = first[:, None, None] * (head // distance)
        indices = tables[:, None, :, None] * (block // distance) + first + inner
        axes = zip(self.shape, self.stride)
        last = sum((length - 1) * stride for length, stride in axes) + 1 - width
        return Units(indices.flatten(), (last // distance + 1, width), (distance, 1))


def read_rows(
    step: StepMetadata,
    layer: KVBlocks,
    blocks: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Returns a layer's keys or values: a view if virtual storage maps the rows contiguously, else
    `gather`."""
    view = None
    if layer.rows is not None:
        view = layer.rows.strided_view(step, blocks is layer.values)
    if view is None:
        return gather(step, blocks, dtype)
    step.counters.in_place += 1
    return view.to(dtype)


def gather(step: StepMetadata, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Gathers all `step.columns` of every row into one contiguous tensor `(batch, heads,
    len(columns), dim)`, with zeros for padding. `blocks`: keys or values of one layer,
    `(num_blocks, heads, block_size, dim)`."""
    assert step.columns is not None
    step.counters.gathered += 1
    step.counters.gathered_decodes += step.query_len == 1
    heads = blocks.shape[1]
    shape = (step.num_rows, heads, len(step.columns))
    if not all(shape):
        return blocks.new_empty(*shape, blocks.shape[3], dtype=dtype)
    planes = quantized.planes(blocks)
    if blocks.is_cpu and cpp.is_available():
        pieces = [cpp_gather(step, plane) for plane in planes]
        return quantized.join(pieces, blocks, dtype)
    device = blocks.device
    pieces = []
    for plane in planes:
        units = step.plan(_units, BlockLayout.of(plane), device)
        pieces.append(units.read(plane).view(*shape, -1))
    dense = quantized.join(pieces, blocks, dtype)
    if step.has_padding:
        hidden = step.plan(_positions, device) < 0
        dense.masked_fill_(hidden[:, None, :, None], 0)
    return dense


def _units(step: StepMetadata, layout: BlockLayout, device: torch.device) -> Units:
    """Returns the units of all `step.columns`, equal for all layers with one layout. Padding gets
    those of an arbitrary token."""
    tables = step.block_tables.to(device, torch.long)
    if not tables.shape[1]:  # only padding
        tables = tables.new_zeros(step.num_rows, 1)
    positions = step.plan(_positions, device).clamp(min=0)
    return layout.units(tables, slice(0, layout.shape[1]), positions)


def _positions(step: StepMetadata, device: torch.device) -> Tensor:
    """Returns the position of each column in its row's blocks, `(rows, len(columns))`; negative for
    padding."""
    assert step.columns is not None
    columns = torch.arange(step.columns.start, step.columns.stop, device=device)
    origins = torch.tensor(step.origins, device=device)
    return columns - origins[:, None]
