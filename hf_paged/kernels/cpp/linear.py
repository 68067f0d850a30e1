"""Matrix products of few rows with weights as `nn.Linear` and `Conv1D` store them, by `linear.cpp`.
Tapes decide when to use them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import DTYPES
from .build import PATHS, best_path, kernel

LINEAR = struct.Struct("Q8q")  # struct LinearCall, followed by `MAX_PIECES` pieces
PIECE = struct.Struct("3Q3q")  # struct LinearPiece
MAX_PIECES = 4
# most rows for which reading the weights dominates, by path of `build.PATHS`; for more rows PyTorch
# is used
MAX_ROWS = {"wide": 64, "avx512_bf16": 64, "amx": 256}
# where PyTorch converts element by element: the most rows for these products, and the fewest rows
# for which `widened` is faster
MAX_ROWS_ALONE, MIN_WIDENED_ROWS = 256, 129
WIDENED_ELEMENTS = 1 << 21  # elements of a weight converted at a time: 8 MiB
MIN_TILE_WIDTH = 16  # least width of a weight for AMX (`linear_path`)
HALVES = (torch.bfloat16, torch.float16)


def is_native(dtype: torch.dtype) -> bool:
    """Whether PyTorch computes products of this dtype by oneDNN on this CPU, which requires
    instructions for the dtype or AVX-512. Otherwise PyTorch converts element by element, at a sixth
    of float32's speed."""
    names = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    name = names.get(dtype)
    if name is None:
        return True
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and getattr(torch.ops.mkldnn, name)()
    )


def max_rows(dtype: torch.dtype) -> int:
    """Returns the most rows for which these products are used on this CPU."""
    if not is_native(dtype):
        return MAX_ROWS_ALONE
    path = list(PATHS)[best_path()]
    return MAX_ROWS[path]


def pack(
    head: tuple[int, torch.dtype, int, int, int],
    is_transposed: bool,
    pieces: Sequence[tuple[int, ...]],
    path: int,
) -> bytes:
    """Packs the kernel's struct. `head`: address, dtype, rows, depth and row stride of `x`.
    `pieces`: the addresses of weight, bias (or 0) and output, the width, and the strides of weight
    and output."""
    address, dtype, rows, depth, stride = head
    packed = LINEAR.pack(
        address,
        DTYPES[dtype],
        rows,
        depth,
        stride,
        is_transposed,
        path,
        torch.get_num_threads(),
        len(pieces),
    )
    packed_pieces = b"".join(PIECE.pack(*piece) for piece in pieces)
    num_unused = MAX_PIECES - len(pieces)
    padding = bytes(PIECE.size * num_unused)
    return packed + packed_pieces + padding


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    path: int | None = None,
) -> Tensor:
    """Computes `F.linear` of `x` `(rows, depth)` and `weight` `(width, depth)`, all of one float
    dtype on the CPU: `(rows, width)`. The last dimension must be contiguous; of the weight, either
    may be. A row's result does not depend on other rows. Raises `TypeError` for other tensors,
    `ValueError` for shapes that do not fit."""
    is_transposed = weight.dim() == 2 and weight.stride(1) != 1  # as `Conv1D` stores it
    stored = weight.t() if is_transposed else weight
    for y in (x, stored) if bias is None else (x, stored, bias):
        is_supported = y.is_cpu and y.dtype in DTYPES and y.dtype is x.dtype
        if not is_supported or y.stride(-1) != 1:
            raise TypeError(
                "the C++ kernel takes contiguous rows of float32, bfloat16 or float16, the same for"
                " all, on the CPU"
            )
    are_matrices = x.dim() == weight.dim() == 2
    fits = are_matrices and x.shape[1] == weight.shape[1]
    if fits and bias is not None:
        fits = bias.shape == weight.shape[:1]
    if not fits:
        raise ValueError(
            f"x of shape {tuple(x.shape)} does not fit a weight of shape {tuple(weight.shape)}:"
            " they must be (rows, depth) and (width, depth)"
        )
    num_rows, depth = x.shape
    width = weight.shape[0]
    out = x.new_empty(num_rows, width)
    bias_address = 0 if bias is None else bias.data_ptr()
    strides = stored.stride(0), out.stride(0)
    piece = weight.data_ptr(), bias_address, out.data_ptr(), width, *strides
    head = x.data_ptr(), x.dtype, num_rows, depth, x.stride(0)
    if path is None:
        path = best_path()
    error = kernel("linear")(pack(head, is_transposed, [piece], path))
    if error == 6:
        raise MemoryError("not enough memory for the rows of a product")
    if error:
        raise ValueError(f"error {error}")
    return out


def widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `F.linear` of `(rows, depth)` and `(width, depth)` with PyTorch in float32, rounding
    each sum once."""
    numbers = x.float()
    width = weight.shape[0]
    out = x.new_empty(x.shape[0], width)
    longest = max(1, *weight.shape[1:], len(x))  # bounds the outputs, too
    count = max(64, WIDENED_ELEMENTS // longest)
    for first in range(0, width, count):
        part = slice(first, first + count)
        part_bias = None
        if bias is not None:
            part_bias = bias[part].float()
        out[:, part] = F.linear(numbers, weight[part].float(), part_bias)
    return out
