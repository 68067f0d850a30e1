"""What the kernels share: addresses, products and the softcap on the device; what a launch needs on the host."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Set when Triton was imported, as Triton's own choice is."""


# -- on the device ---------------------------------------------------------------------------------------------------


@triton.jit
def dot(a, b, acc):
    """`a @ b + acc` in float32; products of float32 are exact. Triton's interpreter multiplies the bits of bfloat16."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    elif a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def tanh(x):
    # Exact at both ends: exp2 gives inf or 0. `libdevice.tanh` is slower and unknown to the interpreter.
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def soften(scores, softcap):
    return tanh(scores / softcap) * softcap


@triton.jit
def tile_blocks(block_table, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Block of each of `TILE` positions from `start`, a multiple of `TILE`; block 0 at and past `end`. [TILE] int64.

    One load where a tile lies within one block; else one id a block, spread over the block's tokens.
    """
    if BLOCK_SIZE >= TILE:
        ids = tl.load(block_table + start // BLOCK_SIZE).to(tl.int64)
        return tl.zeros([TILE], dtype=tl.int64) + ids
    else:
        position = start + tl.arange(0, TILE)
        return tl.load(block_table + position // BLOCK_SIZE, mask=position < end, other=0).to(tl.int64)


# -- on the host ----------------------------------------------------------------------------------------------------


def dot_dtype(*dtypes: torch.dtype) -> tl.dtype:
    """What operands of these dtypes are converted to for `tl.dot`: one that holds them all."""
    dtype = functools.reduce(torch.promote_types, dtypes)
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(dtype, tl.float32)


def split_dim(dim: int, smallest: int = 16) -> tuple[int, int]:
    """Sizes of the one or two power-of-two tiles that cover `dim` elements; the second is 0 if one is as small.

    80 is 64 + 16 and 576 is 512 + 64; 112 would be 64 + 64 and is 128. No tile is below `smallest`.
    """
    whole = max(smallest, triton.next_power_of_2(dim))
    if dim == whole or whole == smallest:
        return whole, 0
    rest = max(smallest, triton.next_power_of_2(dim - whole // 2))
    return (whole // 2, rest) if rest < whole // 2 else (whole, 0)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a GPU; those of an H200 for tensors that are on none."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).gpu_subslice_count)
    return 132


def device_guard(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's GPU the current one, which is where Triton launches."""
    if tensor.is_cuda:
        return torch.cuda.device_of(tensor)
    if tensor.is_xpu:
        return torch.xpu.device_of(tensor)
    return contextlib.nullcontext()
