"""Device code of `attention_kernel.py`: which rows and keys a program has, its tiles of keys and
values, and the store of its results. The running softmax is in `attention_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # read at import, as Triton does


@triton.jit
def dot(a, b, acc):
    """Computes `a @ b + acc` in float32; float32 products are exact. Converts operands for Triton's
    interpreter, which would multiply the bits of bfloat16."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    elif a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def find_item(
    seq_lens,
    starts,
    item,
    rows,
    programs,
    target,
    window,
    query_len,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Returns an item's row and split, the row's number of splits and first item, and the tokens
    per split. For an unused item the row is at least `rows`. Every row has a split, so that rows
    without tokens get zeros."""
    i = tl.arange(0, BLOCK_ROWS)
    ends = tl.load(seq_lens + i, mask=i < rows, other=0)
    firsts = tl.load(starts + i, mask=i < rows, other=0)
    if window is not None:  # the first query sees the oldest key
        firsts = tl.maximum(firsts, ends - query_len + 1 - window)
    tokens = tl.maximum(ends - firsts // TILE * TILE, 0)
    size = tl.cdiv(tl.sum(tokens.to(tl.int64), axis=0) * programs, target)
    size = tl.cdiv(tl.maximum(size, MIN_SPLIT), TILE).to(tl.int32) * TILE
    splits = tl.where(i < rows, tl.maximum(tl.cdiv(tokens, size), 1), 0)
    # The running sum is constant past the last row, so that unused items get row BLOCK_ROWS.
    row = tl.sum((tl.cumsum(splits, axis=0) <= item).to(tl.int32), axis=0)
    first = tl.sum(tl.where(i < row, splits, 0), axis=0)
    return row, item - first, tl.sum(tl.where(i == row, splits, 0), axis=0), first, size


@triton.jit
def find_row(query_start, tile, rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns a tile's row and its number within the row, which may be past the row's last tile.
    Row `i` begins at tile `query_start[i] * GROUP // BLOCK_M + i`, which gives each row at least
    the tiles that it needs; a tile's row is the last one that begins at or before it. Counting
    takes one load where a binary search takes eight."""
    row = -1
    for first in range(0, rows, 256):
        i = first + tl.arange(0, 256)
        begins = tl.load(query_start + i, mask=i < rows, other=0) * GROUP // BLOCK_M + i
        row += tl.sum(((begins <= tile) & (i < rows)).to(tl.int32), axis=0)
    return row, tile - (tl.load(query_start + row) * GROUP // BLOCK_M + row)


@triton.jit
def load_tile(pointers, is_visible, is_real, MASK_TOKENS: tl.constexpr, MASK_DIMS: tl.constexpr):
    """Loads a tile of keys or values, with zeros where masked. Omits masks that hide no elements,
    since they cost registers and branches."""
    if MASK_TOKENS and MASK_DIMS:
        return tl.load(pointers, mask=is_visible & is_real, other=0.0)
    elif MASK_TOKENS:
        return tl.load(pointers, mask=is_visible, other=0.0)
    elif MASK_DIMS:
        return tl.load(pointers, mask=is_real, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def convert_tile(tile, like, STORED: tl.constexpr):
    """Converts a tile of keys or values to the dtype of `like`. Codes (`quantized.NUMBERS`) convert
    exactly, unscaled: 8-bit floats through the bits of float16, which differ only in the exponent
    bias, since that works on every chip."""
    if STORED == 0:
        return tile.to(like.dtype)
    elif STORED == 1:
        return tile.to(tl.float32).to(like.dtype)
    else:
        bits = tile.to(tl.uint16)
        if STORED == 2:
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
            return (half.to(tl.float32) * 256.0).to(like.dtype)
        else:
            return (bits << 8).to(tl.float16, bitcast=True).to(like.dtype)


@triton.jit
def scale_tile(tile, factors, STORED: tl.constexpr):
    """Scales codes of values in float16; in other dtypes the weights have been scaled instead."""
    if STORED and tile.dtype == tl.float16:
        return (tile.to(tl.float32) * factors[:, None]).to(tl.float16)
    else:
        return tile


@triton.jit
def load_scales(scales, is_visible, MASKED: tl.constexpr):
    return tl.load(scales, mask=is_visible, other=0.0) if MASKED else tl.load(scales)


@triton.jit
def store_rows(
    out,
    lse,
    at,
    acc,
    acc_rest,
    total,
    top,
    factor,
    is_row,
    VALUE_DIM: tl.constexpr,
    VALUE_MAIN: tl.constexpr,
    VALUE_REST: tl.constexpr,
):
    """Writes results to the rows `at` of `(n, VALUE_DIM)`: zeros, and log-sum-exp `-inf`, for rows
    that saw no keys."""
    has_keys = total > 0.0
    total = tl.where(has_keys, total, 1.0)
    inverse = tl.where(has_keys, 1.0 / total, 0.0)[:, None]
    d = tl.arange(0, VALUE_MAIN)[None, :]
    pointers = out + at[:, None] * VALUE_DIM + d
    tl.store(
        pointers, (acc * inverse).to(out.dtype.element_ty), mask=is_row[:, None] & (d < VALUE_DIM)
    )
    if VALUE_REST > 0:
        d = VALUE_MAIN + tl.arange(0, VALUE_REST)[None, :]
        pointers = out + at[:, None] * VALUE_DIM + d
        tl.store(
            pointers,
            (acc_rest * inverse).to(out.dtype.element_ty),
            mask=is_row[:, None] & (d < VALUE_DIM),
        )
    if lse is not None:
        tl.store(
            lse + at,
            tl.where(has_keys, (top * factor + tl.log2(total)) * LN_2, float("-inf")),
            mask=is_row,
        )
