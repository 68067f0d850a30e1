"""Matrix products of a few rows with weights stored as in `nn.Linear` or `Conv1D`, optionally as
8-bit codes; `linear.cpp` computes them. `tape` decides when to use this kernel."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import FLOAT_DTYPE_NUMBERS
from .build import PATHS, best_path, kernel
from .compiler import cpu_vendor

LINEAR = struct.Struct("Q11q")  # struct LinearCall, followed by `MAX_PIECES` pieces
PIECE = struct.Struct("3Q3q2Q")  # struct LinearPiece
MAX_PIECES = 4
# maximum number of rows for which the kernel is faster than PyTorch, by the names in `build.PATHS`;
# PyTorch computes products of more rows
MAX_ROWS = {"wide": 64, "avx512_bf16": 128, "amx": 256}
# the same for float32, by `compiler.cpu_vendor`, for CPUs on which MKL computes PyTorch's products.
# For other CPUs, on which the kernel was not compared with PyTorch, `max_rows` returns 0.
FLOAT32_MAX_ROWS = {"AuthenticAMD": 64, "GenuineIntel": 4}
CODES_MAX_ROWS = 64  # the same for weights of 8-bit codes
MIN_GROUP = 16  # minimum number of codes that share a scale, as in `linear.cpp`
# the result of `max_rows` where PyTorch converts element by element (not `is_native`)
MAX_ROWS_WITHOUT_NATIVE = 256
# the smallest number of rows, in a dtype that is not native, for which `linear_float32` is faster
# than the kernel
MIN_FLOAT32_ROWS = 129
FLOAT32_ELEMENTS = 1 << 21  # elements of a weight that `linear_float32` converts at a time: 8 MiB
MIN_TILE_WIDTH = 16  # minimum outputs of a weight for AMX, as in `linear.cpp`
HALVES = (torch.bfloat16, torch.float16)


def is_native(dtype: torch.dtype) -> bool:
    """Whether PyTorch computes products of this dtype without converting the operands element by
    element, which takes six times as long as float32. For the dtypes of `HALVES`, that requires
    oneDNN, and AVX-512 or instructions for the dtype."""
    checks = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    check = checks.get(dtype)
    if check is None:
        return True
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and getattr(torch.ops.mkldnn, check)()
    )


def max_rows(dtype: torch.dtype, is_transposed: bool = False, has_codes: bool = False) -> int:
    """Returns the maximum number of rows for which `linear` should compute products of this dtype
    on this CPU, with a weight stored as in `nn.Linear`, or (`is_transposed`) as in `Conv1D`; 0 if
    PyTorch should compute all of them. `has_codes`: the weight is int8, which PyTorch converts to
    the dtype first."""
    if dtype is torch.float32 or has_codes:
        # PyTorch may be set to round the operands, which is faster
        precision = torch.backends.mkldnn.matmul.fp32_precision
        is_exact = dtype is not torch.float32 or precision in ("none", "ieee")
        if is_transposed or not is_exact or not kernel("is_optimized")(b""):
            return 0
        return CODES_MAX_ROWS if has_codes else FLOAT32_MAX_ROWS.get(cpu_vendor(), 0)
    if not is_native(dtype):
        return MAX_ROWS_WITHOUT_NATIVE
    path = list(PATHS)[best_path()]
    return MAX_ROWS[path]


def is_group_supported(depth: int, length: int) -> bool:
    """Whether the kernel supports rows of `depth` codes in groups of `length` codes, each with its
    own scale."""
    is_power_of_two = length >= MIN_GROUP and length & (length - 1) == 0
    return length == depth or (is_power_of_two and depth % length == 0)


@dataclass(frozen=True)
class CodeFormat:
    """How weights are stored as int8 codes."""

    # codes of a row that share a scale and, optionally, a zero; 0: codes without scales
    group: int = 0
    scale_dtype: torch.dtype = torch.float32


def pack(
    x_fields: tuple[int, torch.dtype, int, int, int],
    is_transposed: bool,
    code_format: CodeFormat | None,
    pieces: Sequence[tuple[int, ...]],
    path: int,
) -> bytes:
    """Returns the kernel's struct for the products of `x` with one or more weights. `x_fields`:
    address, dtype, rows, depth and row stride of `x`. `code_format`: set if the weights are int8.
    `pieces`: for each weight, the addresses of weight, bias (or 0) and output, the width, the row
    strides of weight and output, and the addresses of zeros and scales (or 0); at most
    `MAX_PIECES`. `path`: a number in `build.PATHS`."""
    address, dtype, rows, depth, row_stride = x_fields
    group, scale_dtype = 0, torch.float32
    if code_format is not None:
        group, scale_dtype = code_format.group, code_format.scale_dtype
    packed = LINEAR.pack(
        address,
        FLOAT_DTYPE_NUMBERS[dtype],
        rows,
        depth,
        row_stride,
        is_transposed,
        code_format is not None,
        group,
        FLOAT_DTYPE_NUMBERS[scale_dtype],
        path,
        torch.get_num_threads(),
        len(pieces),
    )
    packed_pieces = b"".join(itertools.starmap(PIECE.pack, pieces))
    num_unused = MAX_PIECES - len(pieces)
    padding = bytes(PIECE.size * num_unused)
    return packed + packed_pieces + padding


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    path: int | None = None,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
) -> Tensor:
    """Returns `F.linear` of `x` `(rows, depth)`, `weight` `(width, depth)` and `bias` `(width,)`,
    all on the CPU and of one dtype in `FLOAT_DTYPE_NUMBERS`, as `(rows, width)` in that dtype. An
    int8 weight is multiplied as if converted to float32 or, with `scales`, as if it were
    `(weight - zeros) * scales`: each row of the weight has one scale and, if `zeros` is given, one
    zero for each group of adjacent columns. `scales` are `(width, groups)` of a dtype in
    `FLOAT_DTYPE_NUMBERS`, `zeros` `(width, groups)` int8; `is_group_supported` must accept the
    length of the groups. The last dimensions of `x` and `bias`, and one dimension of `weight`
    (int8: the last), must be contiguous, as must `scales` and `zeros`. A row's result does not
    depend on other rows. `path`: a number in `build.PATHS`, by default the best. Raises `TypeError`
    for other tensors, `ValueError` for shapes that do not fit, and `MemoryError`."""
    has_codes = weight.dtype is torch.int8
    # whether the weight is stored as in `Conv1D`
    is_transposed = weight.dim() == 2 and weight.stride(1) != 1 and not has_codes
    stored_weight = weight.t() if is_transposed else weight
    for tensor in (x, stored_weight) if bias is None else (x, stored_weight, bias):
        is_float = tensor.dtype in FLOAT_DTYPE_NUMBERS and tensor.dtype is x.dtype
        is_supported = is_float or (has_codes and tensor is stored_weight)
        if not (is_supported and tensor.is_cpu) or tensor.stride(-1) != 1:
            raise TypeError(
                f"a tensor is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}: the"
                " C++ kernel takes contiguous rows on the CPU, all in float32, bfloat16 or float16,"
                " except that the weight may be int8"
            )
    are_matrices = x.dim() == weight.dim() == 2
    fits = are_matrices and x.shape[1] == weight.shape[1]
    if fits and bias is not None:
        fits = bias.shape == weight.shape[:1]
    if not fits:
        raise ValueError(
            f"x of shape {tuple(x.shape)} does not fit a weight of shape {tuple(weight.shape)}"
            f" and a bias of shape {None if bias is None else tuple(bias.shape)}: they must be"
            " (rows, depth), (width, depth) and (width,)"
        )
    num_rows, depth = x.shape
    width = weight.shape[0]
    code_format = None
    code_addresses = 0, 0
    if has_codes:
        code_format = CodeFormat()
        if scales is not None:
            code_format = _format(weight, scales, zeros)
            code_addresses = 0 if zeros is None else zeros.data_ptr(), scales.data_ptr()
    out = x.new_empty(num_rows, width)
    bias_address = 0 if bias is None else bias.data_ptr()
    strides = stored_weight.stride(0), out.stride(0)
    piece = weight.data_ptr(), bias_address, out.data_ptr(), width, *strides, *code_addresses
    x_fields = x.data_ptr(), x.dtype, num_rows, depth, x.stride(0)
    if path is None:
        path = best_path()
    error = kernel("linear")(pack(x_fields, is_transposed, code_format, [piece], path))
    if error == 6:
        raise MemoryError("not enough memory for the converted rows of a product")
    if error:
        raise ValueError(f"the C++ kernel returned error {error}")
    return out


def _format(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> CodeFormat:
    """Returns the format of int8 `weight` `(width, depth)`. Raises as `linear` does."""
    width, depth = weight.shape
    groups = scales.shape[-1] if scales.dim() else 0
    length = depth // max(1, groups)
    fits = scales.shape == (width, groups) and length * groups == depth
    if not fits or not is_group_supported(depth, length):
        raise ValueError(
            f"scales of shape {tuple(scales.shape)} do not fit a weight of shape {(width, depth)}:"
            " they must be (width, groups), for groups of all columns or of a power of two of at"
            f" least {MIN_GROUP}"
        )
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(
            f"zeros of shape {tuple(zeros.shape)} do not fit scales of shape {tuple(scales.shape)}:"
            " the shapes must be equal"
        )
    for tensor, dtypes in ((scales, set(FLOAT_DTYPE_NUMBERS)), (zeros, {torch.int8})):
        if tensor is None or (tensor.dtype in dtypes and tensor.is_cpu and tensor.is_contiguous()):
            continue
        raise TypeError(
            f"scales or zeros are {tensor.dtype} on {tensor.device} with strides"
            f" {tensor.stride()}: the C++ kernel takes contiguous ones on the CPU, scales of"
            " float32, bfloat16 or float16, and zeros of int8"
        )
    return CodeFormat(length, scales.dtype)


def linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `F.linear` of `x` `(rows, depth)`, `weight` `(width, depth)` and `bias` `(width,)` in
    the dtype of `x`. PyTorch computes it in float32, so that each sum is rounded once. Converts the
    weight in chunks."""
    x_float32 = x.float()
    width = weight.shape[0]
    out = x.new_empty(x.shape[0], width)
    # limits the elements of a chunk of the weight, and of the chunk's outputs
    max_len = max(1, *weight.shape[1:], len(x))
    chunk_width = max(64, FLOAT32_ELEMENTS // max_len)
    for start in range(0, width, chunk_width):
        chunk = slice(start, start + chunk_width)
        chunk_bias = None
        if bias is not None:
            chunk_bias = bias[chunk].float()
        out[:, chunk] = F.linear(x_float32, weight[chunk].float(), chunk_bias)
    return out
