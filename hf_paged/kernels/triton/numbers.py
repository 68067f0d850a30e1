"""Functions on float32 that Triton lacks, or that propagate NaN as PyTorch's do."""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tiles import INTERPRETED


@triton.jit
def to_bfloat16(x):
    """Rounds to the nearest bfloat16, returned as float32. Triton's interpreter would truncate."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x != x, x, rounded)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def to_float16(x):
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def tanh(x):
    """Hyperbolic tangent by exponentials, and near 0, where these cancel, by a polynomial (Cephes,
    `tanhf`)."""
    z = x * x
    p = z * -5.70498872745e-3 + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    large = 1.0 - tl.div_rn(2.0, tl.exp(2.0 * tl.minimum(tl.abs(x), 20.0)) + 1.0)
    found = tl.where(z < 0.390625, p * z * x + x, tl.where(x < 0, -large, large))
    return tl.where(x != x, x, found)


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    return x * 0.5 * (1.0 + tl.erf(x * 0.70710678118654752440))


@triton.jit
def gelu_tanh(x):
    return 0.5 * x * (1.0 + tanh(0.79788456080286535588 * (x + 0.044715 * (x * x * x))))


@triton.jit
def relu(x):
    return tl.where(x < 0, 0.0, x)


@triton.jit
def maximum(x, y):
    return tl.where(x != x, x, tl.where(x > y, x, y))


@triton.jit
def minimum(x, y):
    return tl.where(x != x, x, tl.where(x < y, x, y))


@triton.jit
def largest(x):
    """The maximum of each row of `x`, `(rows, 1)`; NaN for rows with a NaN."""
    has_nan = tl.max((x != x).to(tl.int32), axis=1, keep_dims=True)
    found = tl.max(tl.where(x != x, float("-inf"), x), axis=1, keep_dims=True)
    return tl.where(has_nan > 0, float("nan"), found)
