"""Triton kernels for the segmented products of LoRA adapters (SGMV of Punica, arXiv 2310.18547,
section 4): two launches per layer for any number of adapters. `kernels.lora` calls them, and has
the same products in PyTorch."""

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

MAX_RANK = 128  # a tile of this width fits in registers
# columns of `LoraTable.parts`: index of the range, addresses of A, B and bias (0: none), rank
FIELDS = tl.constexpr(5)
TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
ROWS, WIDTH = 16, 64  # tile sizes: an estimate, not a measurement
DEPTH = 32  # depth of a tile; deeper tiles spill registers


class LoraTable(NamedTuple):
    """The parts of one layer as the kernels read them: ranges of rows, and each range's weights."""

    parts: Tensor  # (parts, FIELDS) int64
    # (ranges, 2) int64: rows `[start, end)`; they change between replays of a captured step
    ranges: Tensor
    scaling: Tensor  # (parts,) float32
    dtype: torch.dtype  # of all weights
    rank: int  # width of tiles: a power of two, at least each part's rank
    max_rows: int  # maximum number of rows of a range
    group: Any = None  # as in `LoraWeights`


@triton.jit(do_not_specialize_on_alignment=["parts", "ranges"])
def _shrink_kernel(
    x,
    products,
    parts,
    ranges,
    x_row,
    depth,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TYPE: tl.constexpr,
):
    # Multiplies ROWS rows of a part by the transpose of the part's A: [ROWS, RANK], zero in columns
    # past the part's rank. `x_row` is the stride between rows of `x`.
    part = parts + tl.program_id(0) * FIELDS
    bounds = ranges + tl.load(part) * 2
    rank = tl.load(part + 4)
    first = tl.load(bounds) + tl.program_id(1) * ROWS
    end = tl.load(bounds + 1)
    if first >= end:
        return
    a = tl.load(part + 1).to(tl.pointer_type(TYPE))
    # int64, as `ranges` is
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
    tl.store(products + row * RANK + column, total.to(TYPE), mask=row < end)


@triton.jit(do_not_specialize_on_alignment=["parts", "ranges", "scaling"])
def _expand_kernel(
    out,
    products,
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
    # Multiplies ROWS rows of `products` by the transpose of a part's B, adds the bias, scales it,
    # and adds the result [ROWS, WIDTH] to the layer's output. Rounds where PyTorch's operations
    # would. `out_row` is the stride between rows of `out`.
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
    states = tl.load(products + row * RANK + column[None, :], mask=row < end, other=0.0)
    weight = tl.load(
        b + w * rank + column[:, None], mask=(w < width) & (column[:, None] < rank), other=0.0
    )
    delta = dot(states, weight, tl.zeros([ROWS, WIDTH], dtype=tl.float32))
    if bias != 0:
        delta += tl.load(bias.to(tl.pointer_type(TYPE)) + w, mask=w < width, other=0.0).to(
            tl.float32
        )
    delta = (delta.to(TYPE).to(tl.float32) * tl.load(scaling + tl.program_id(0))).to(TYPE)
    target = out + row * out_row + w
    mask = (row < end) & (w < width)
    base = tl.load(target, mask=mask, other=0.0)
    tl.store(target, (base.to(tl.float32) + delta.to(tl.float32)).to(base.dtype), mask=mask)


def make_table(parts: Sequence[Part], device: torch.device) -> LoraTable | None:
    """Returns the table of `parts`, or `None` if the kernels do not support their weights
    (`supports_weights`)."""
    if not supports_weights([lora for *_, lora in parts], device):
        return None
    ranges = torch.tensor(
        [(start, end) for start, end, _ in parts], dtype=torch.int64, device=device
    )
    max_rows = max(end - start for start, end, _ in parts)
    return make_range_table(
        ranges, max_rows, [(index, lora) for index, (*_, lora) in enumerate(parts)]
    )


def make_range_table(
    ranges: Tensor, max_rows: int, weights: Sequence[tuple[int, LoraWeights]]
) -> LoraTable:
    """Returns the table of `weights`, which the kernels must support. `ranges`: `(n, 2)` int64 on
    the device, `[start, end)` of at most `max_rows` rows each; `weights`: for each part, the index
    of its range, and the weights for the rows of that range."""
    device = ranges.device
    first = weights[0][1]
    part_fields = [
        (range_index, a.data_ptr(), b.data_ptr(), 0 if bias is None else bias.data_ptr(), len(a))
        for range_index, (a, b, bias, *_) in weights
    ]
    parts = torch.tensor(part_fields, dtype=torch.int64, device=device)
    scaling = torch.tensor(
        [lora.scaling for _, lora in weights], dtype=torch.float32, device=device
    )
    rank = max(16, triton.next_power_of_2(max(len(lora.a) for _, lora in weights)))
    return LoraTable(parts, ranges, scaling, first.a.dtype, rank, max_rows, first.group)


def supports_weights(weights: Sequence[LoraWeights], device: torch.device) -> bool:
    """Whether the kernels support these weights together: contiguous on `device`, in one dtype of
    `DTYPES`, with ranks up to `MAX_RANK` and the same process group (or none)."""
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


def supports(out: Tensor, x: Tensor) -> bool:
    """Whether `add_deltas` supports these tensors: dtypes in `DTYPES`, contiguous rows."""
    return out.dtype in DTYPES and x.dtype in DTYPES and x.stride(1) == out.stride(1) == 1


def add_deltas(out: Tensor, x: Tensor, table: LoraTable) -> None:
    """Adds the deltas of a table as `kernels.lora.Deltas.add` does, without waiting for the device.
    Raises `LaunchFailedError`, with `out` unchanged, if a kernel cannot be launched."""
    weight_dtype = TL_DTYPES[table.dtype]
    products = torch.empty(len(x), table.rank, dtype=table.dtype, device=out.device)
    grid = len(table.parts), triton.cdiv(table.max_rows, ROWS)
    launch(
        _shrink_kernel,
        grid,
        x,
        products,
        table.parts,
        table.ranges,
        x.stride(0),
        x.shape[1],
        RANK=table.rank,
        ROWS=ROWS,
        DEPTH=DEPTH,
        TYPE=weight_dtype,
        writes=(products,),
    )
    if table.group is not None:
        dist.all_reduce(products, group=table.group)
    launch(
        _expand_kernel,
        (*grid, triton.cdiv(out.shape[1], WIDTH)),
        out,
        products,
        table.parts,
        table.ranges,
        table.scaling,
        out.stride(0),
        out.shape[1],
        RANK=table.rank,
        ROWS=ROWS,
        WIDTH=WIDTH,
        TYPE=weight_dtype,
        writes=(out,),
    )
