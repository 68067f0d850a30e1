"""Triton segmented products of LoRA adapters (SGMV of Punica, arXiv 2310.18547, section 4): two
launches per layer, for any number of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from . import DTYPES
from .attention_tiles import dot
from .launch import launch

if TYPE_CHECKING:  # `..lora` imports this module
    from ..lora import LoraWeights, Part

MAX_RANK = 128  # width of a tile in registers
# of a part: index of its range, addresses of A, B and bias (0: none), rank
FIELDS = tl.constexpr(5)
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
ROWS, WIDTH = 16, 64  # tile sizes: an estimate, not a measurement
DEPTH = 32  # depth of a tile; larger ones spill registers


class Table(NamedTuple):
    """The kernels' description of the parts of one layer."""

    parts: Tensor  # (parts, FIELDS) int64
    # (ranges, 2) int64: rows `[start, end)`; they change between replays of a captured step
    ranges: Tensor
    scaling: Tensor  # (parts,) float32
    dtype: torch.dtype  # of all weights
    rank: int  # width of tiles: a power of two, at least every part's rank
    most: int  # most rows of a range
    group: Any = None  # process group that shards the depth


@triton.jit(do_not_specialize_on_alignment=["parts", "ranges"])
def _shrink_kernel(
    x,
    middle,
    parts,
    ranges,
    x_row,
    depth,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TYPE: tl.constexpr,
):
    # Rows of one part times its A: [ROWS, RANK], zero in columns past the part's rank.
    part = parts + tl.program_id(0) * FIELDS
    bounds = ranges + tl.load(part) * 2
    rank = tl.load(part + 4)
    first = tl.load(bounds) + tl.program_id(1) * ROWS
    end = tl.load(bounds + 1)
    if first >= end:
        return
    a = tl.load(part + 1).to(tl.pointer_type(TYPE))
    # int64, as the table is
    row = (first + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, RANK)[None, :]
    total = tl.zeros([ROWS, RANK], dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        d = start + tl.arange(0, DEPTH)
        states = tl.load(
            x + row * x_row + d[None, :], mask=(row < end) & (d[None, :] < depth), other=0.0
        )
        weight = tl.load(
            a + column * depth + d[:, None], mask=(column < rank) & (d[:, None] < depth), other=0.0
        )
        total = dot(states.to(TYPE), weight, total)
    tl.store(middle + row * RANK + column, total.to(TYPE), mask=row < end)


@triton.jit(do_not_specialize_on_alignment=["parts", "ranges", "scaling"])
def _expand_kernel(
    out,
    middle,
    parts,
    ranges,
    scaling,
    out_row,
    width,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TYPE: tl.constexpr,
):
    # Adds `middle` times a part's B, plus bias, [ROWS, WIDTH], to the base layer's output. Rounds
    # as PyTorch does.
    part = parts + tl.program_id(0) * FIELDS
    bounds = ranges + tl.load(part) * 2
    rank = tl.load(part + 4)
    first = tl.load(bounds) + tl.program_id(1) * ROWS
    end = tl.load(bounds + 1)
    if first >= end:
        return
    b = tl.load(part + 2).to(tl.pointer_type(TYPE))
    bias = tl.load(part + 3)
    row = (first + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, RANK)
    w = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)[None, :]
    states = tl.load(middle + row * RANK + column[None, :], mask=row < end, other=0.0)
    weight = tl.load(
        b + w * rank + column[:, None], mask=(w < width) & (column[:, None] < rank), other=0.0
    )
    delta = dot(states, weight, tl.zeros([ROWS, WIDTH], dtype=tl.float32))
    if bias != 0:
        delta += tl.load(bias.to(tl.pointer_type(TYPE)) + w, mask=w < width, other=0.0).to(
            tl.float32
        )
    delta = (delta.to(TYPE).to(tl.float32) * tl.load(scaling + tl.program_id(0))).to(TYPE)
    place = out + row * out_row + w
    mask = (row < end) & (w < width)
    before = tl.load(place, mask=mask, other=0.0)
    tl.store(place, (before.to(tl.float32) + delta.to(tl.float32)).to(before.dtype), mask=mask)


def make_table(parts: Sequence[Part], device: torch.device) -> Table | None:
    """The table of `parts`; `None` if the kernels do not support their weights
    (`takes_weights`)."""
    if not takes_weights([lora for *_, lora in parts], device):
        return None
    bounds = torch.tensor(
        [(start, end) for start, end, _ in parts], dtype=torch.int64, device=device
    )
    most = max(end - start for start, end, _ in parts)
    return table_over(bounds, most, [(number, lora) for number, (*_, lora) in enumerate(parts)])


def table_over(ranges: Tensor, most: int, weights: Sequence[tuple[int, LoraWeights]]) -> Table:
    """The table of weights, each with the index of its range in `ranges` `(n, 2)` int64 on the
    device, of at most `most` rows each."""
    device = ranges.device
    first = weights[0][1]
    numbers = [
        (number, a.data_ptr(), b.data_ptr(), 0 if bias is None else bias.data_ptr(), len(a))
        for number, (a, b, bias, *_) in weights
    ]
    parts = torch.tensor(numbers, dtype=torch.int64, device=device)
    scaling = torch.tensor(
        [lora.scaling for _, lora in weights], dtype=torch.float32, device=device
    )
    rank = max(16, triton.next_power_of_2(max(len(lora.a) for _, lora in weights)))
    return Table(parts, ranges, scaling, first.a.dtype, rank, most, first.group)


def takes_weights(weights: Sequence[LoraWeights], device: torch.device) -> bool:
    """Whether the kernels support these weights: on `device`, contiguous, of one supported dtype,
    ranks up to `MAX_RANK`, and all or none of one process group."""
    tensors = [tensor for lora in weights for tensor in lora.tensors]
    first = weights[0]
    return (
        first.a.dtype in DTYPES
        and max(len(lora.a) for lora in weights) <= MAX_RANK
        and all(lora.group is first.group for lora in weights)
        and all(
            x.dtype is first.a.dtype and x.is_contiguous() and x.device == device for x in tensors
        )
    )


def takes(out: Tensor, x: Tensor) -> bool:
    return out.dtype in DTYPES and x.dtype in DTYPES and x.stride(1) == out.stride(1) == 1


def add_deltas(out: Tensor, x: Tensor, table: Table) -> None:
    """Runs `kernels.lora.Deltas.add` without waiting for the device."""
    kind = TYPES[table.dtype]
    middle = torch.empty(len(x), table.rank, dtype=table.dtype, device=out.device)
    grid = len(table.parts), triton.cdiv(table.most, ROWS)
    launch(
        _shrink_kernel,
        grid,
        x,
        middle,
        table.parts,
        table.ranges,
        x.stride(0),
        x.shape[1],
        RANK=table.rank,
        ROWS=ROWS,
        DEPTH=DEPTH,
        TYPE=kind,
        writes=(middle,),
    )
    if table.group is not None:
        dist.all_reduce(middle, group=table.group)
    launch(
        _expand_kernel,
        (*grid, triton.cdiv(out.shape[1], WIDTH)),
        out,
        middle,
        table.parts,
        table.ranges,
        table.scaling,
        out.stride(0),
        out.shape[1],
        RANK=table.rank,
        ROWS=ROWS,
        WIDTH=WIDTH,
        TYPE=kind,
        writes=(out,),
    )
