"""Products of few rows with weights that are read where `nn.Linear` and `Conv1D` keep them, by `linear.cpp`."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from .attention import DTYPES
from .build import PATHS, best_path, kernel

LINEAR = struct.Struct("Q8q")  # struct LinearCall, which `MAX_PIECES` pieces follow
PIECE = struct.Struct("3Q3q")  # struct LinearPiece
MAX_PIECES = 4
# rows up to which reading the weights once decides, by the path of `build.PATHS`: PyTorch serves more
MAX_ROWS = {"wide": 64, "avx512_bf16": 64, "amx": 256}
MIN_TILE_WIDTH = 16  # of a weight that AMX serves: `linear_path`
HALVES = (torch.bfloat16, torch.float16)


def max_rows() -> int:
    """That these products serve on this CPU."""
    return MAX_ROWS[list(PATHS)[best_path()]]


def pack(
    head: tuple[int, torch.dtype, int, int, int], is_transposed: bool, pieces: list[tuple[int, ...]], path: int
) -> bytes:
    """`head`: address, dtype, rows, depth and row stride of `x`. `pieces`: the addresses of weight, bias (or 0) and
    output, the width, and the strides of weight and output."""
    address, dtype, rows, depth, stride = head
    packed = LINEAR.pack(
        address, DTYPES[dtype], rows, depth, stride, is_transposed, path, torch.get_num_threads(), len(pieces)
    )
    return packed + b"".join(PIECE.pack(*piece) for piece in pieces) + bytes(PIECE.size * (MAX_PIECES - len(pieces)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, path: int | None = None) -> Tensor:
    """`F.linear` of `(rows, depth)` and `(width, depth)`, all of one float dtype, on the CPU, the last dimensions
    contiguous: `(rows, width)`. A row's result does not depend on the others. Raises `TypeError` for other tensors."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if any(not y.is_cpu or y.dtype not in DTYPES or y.dtype is not x.dtype or y.stride(-1) != 1 for y in tensors):
        message = "the C++ kernel takes contiguous rows of float32, bfloat16 or float16, the same for all, on the CPU"
        raise TypeError(message)
    fits = x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"{tuple(x.shape)} and {tuple(weight.shape)}: (rows, depth) goes with (width, depth)")
    out = x.new_empty(x.shape[0], weight.shape[0])
    bias_at = 0 if bias is None else bias.data_ptr()
    piece = weight.data_ptr(), bias_at, out.data_ptr(), weight.shape[0], weight.stride(0), out.stride(0)
    head = x.data_ptr(), x.dtype, *x.shape, x.stride(0)
    if error := kernel("linear")(pack(head, False, [piece], best_path() if path is None else path)):
        raise MemoryError("not enough memory for the rows of a product") if error == 6 else ValueError(f"error {error}")
    return out
