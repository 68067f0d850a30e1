"""Reads a layer's keys or values from blocks as one dense tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import cpp, quantized
from ..kernels.cpp.attention import gather as cpp_gather
from ..step import StepMetadata
from .kv_blocks import KVBlocks


def read_rows(
    step: StepMetadata,
    layer: KVBlocks,
    blocks: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Returns a layer's keys or values: a view if virtual storage has the rows contiguous, else
    `gather`."""
    lent = None
    if layer.rows is not None:
        lent = layer.rows.lend(step, blocks is layer.values)
    if lent is None:
        return gather(step, blocks, dtype)
    step.counters.in_place += 1
    return lent.to(dtype)


def gather(step: StepMetadata, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Gathers all `step.columns` of every row as one contiguous tensor `(batch, heads,
    len(columns), dim)`, with zeros for padding. `blocks`: keys or values of one layer,
    `(num_blocks, heads, block_size, dim)`."""
    assert step.columns is not None
    step.counters.gathered += 1
    step.counters.gathered_decodes += step.query_len == 1
    heads, size, dim = blocks.shape[1:]
    length = len(step.columns)
    if not (heads and step.num_rows):
        return blocks.new_empty(step.num_rows, heads, length, dim, dtype=dtype)
    if blocks.is_cpu and cpp.is_available():
        planes = [cpp_gather(step, plane) for plane in quantized.planes(blocks)]
        return quantized.join(planes, blocks, dtype)
    if quantized.is_quantized(blocks):
        return _read(step, blocks, dtype)
    stride = blocks.stride(2)  # block and head strides are multiples of it
    step_block = blocks.stride(0) // stride
    step_head = blocks.stride(1) // stride
    rows, hidden = step.plan(_rows, step_block, step_head, heads, blocks.device)
    last_block = (blocks.shape[0] - 1) * step_block
    last_head = (heads - 1) * step_head
    num_rows = max(0, last_block + last_head + size)
    all_rows = blocks.as_strided((num_rows, dim), (stride, 1))
    dense = all_rows.index_select(0, rows)
    if hidden is not None:
        dense.index_fill_(0, hidden, 0)
    dense = dense.view(step.num_rows, heads, length, dim)
    return dense.to(dtype)


def _read(step: StepMetadata, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Does `gather` for quantized blocks in plain PyTorch."""
    size = step.block_size
    slots, hidden = step.plan(_rows, size, 1, 1, blocks.device)
    index = (slots // size, slice(None), slots % size)
    dense = quantized.read(blocks, index, dtype)
    # (batch, length, heads, dim)
    dense = dense.unflatten(0, (step.num_rows, -1))
    if hidden is not None:
        tokens = dense.flatten(0, 1)
        tokens.index_fill_(0, hidden, 0)
    return dense.transpose(1, 2).contiguous()


def _rows(
    step: StepMetadata,
    step_block: int,
    step_head: int,
    heads: int,
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    """Returns the row indices that `gather` reads, and those of its result that are padding; the
    same for all layers with one layout."""
    assert step.columns is not None
    tables = step.block_tables.to(device)
    columns = step.columns
    positions = torch.arange(columns.start, columns.stop, device=device)
    origins = torch.tensor(step.origins, device=device)
    tokens = positions[None, :] - origins[:, None]  # (batch, len(columns))
    hidden = None
    if step.has_padding:
        is_hidden = tokens < 0
        is_hidden = is_hidden[:, None].expand(-1, heads, -1)
        hidden = is_hidden.flatten().nonzero().squeeze(1)
        tokens = tokens.clamp_(min=0)
    if tables.shape[1]:
        size = step.block_size
        block_ids = tables.gather(1, tokens // size).long()
        slots = block_ids * step_block + tokens % size
    else:  # only padding
        slots = torch.zeros_like(tokens)
    end = heads * step_head
    head_offsets = torch.arange(0, end, step_head, device=device)
    rows = slots[:, None] + head_offsets[:, None]
    return rows.flatten(), hidden
