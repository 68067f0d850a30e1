"""Device functions that `attention_kernel.py` calls: they find a program's row and keys, load and
convert tiles of keys and values, and store results. `attention_kernel.py` computes the running
softmax."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # read at import, as Triton does


@triton.jit
def dot(a, b, acc):
    """Computes `a @ b + acc` in float32, without TF32; `acc` may be `None`. Converts operands to
    float32 for Triton's interpreter, which would otherwise multiply bfloat16 bit patterns as
    integers."""
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
    num_rows,
    programs_per_item,
    target_programs,
    window,
    query_len,
    TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Returns the row of an item (one split of one row's keys), the index of the split within the
    row, the row's number of splits, the row's first item, and the number of tokens per split. All
    rows have splits of this size, which occupy about `target_programs` programs. For an unused
    item, the row is at least `num_rows`. Every row has a split, so that rows without tokens get
    zeros."""
    i = tl.arange(0, BLOCK_ROWS)
    key_ends = tl.load(seq_lens + i, mask=i < num_rows, other=0)
    key_starts = tl.load(starts + i, mask=i < num_rows, other=0)
    if window is not None:  # a row starts at the oldest key of its first query's window
        key_starts = tl.maximum(key_starts, key_ends - query_len + 1 - window)
    num_keys = tl.maximum(key_ends - key_starts // TILE * TILE, 0)
    total_keys = tl.sum(num_keys.to(tl.int64), axis=0)
    split_size = tl.cdiv(total_keys * programs_per_item, target_programs)
    split_size = tl.cdiv(tl.maximum(split_size, MIN_SPLIT), TILE).to(tl.int32) * TILE
    num_splits = tl.where(i < num_rows, tl.maximum(tl.cdiv(num_keys, split_size), 1), 0)
    # The running sum is constant past the last row, so that unused items get row BLOCK_ROWS.
    row = tl.sum((tl.cumsum(num_splits, axis=0) <= item).to(tl.int32), axis=0)
    first_item = tl.sum(tl.where(i < row, num_splits, 0), axis=0)
    row_splits = tl.sum(tl.where(i == row, num_splits, 0), axis=0)
    return row, item - first_item, row_splits, first_item, split_size


@triton.jit
def find_row(query_start, tile, num_rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns a tile's row, and its index within the row, which may be past the row's last tile.
    Row `i` begins at tile `query_start[i] * GROUP // BLOCK_M + i`, which gives each row at least
    the tiles that it needs. A tile belongs to the last row that begins at or before it. The
    function finds this row by counting, with one load per 256 rows. A binary search over 256 rows
    would take eight loads, each waiting for the one before."""
    row = -1
    for first_row in range(0, num_rows, 256):
        i = first_row + tl.arange(0, 256)
        is_row = i < num_rows
        first_tiles = tl.load(query_start + i, mask=is_row, other=0) * GROUP // BLOCK_M + i
        row += tl.sum(((first_tiles <= tile) & is_row).to(tl.int32), axis=0)
    return row, tile - (tl.load(query_start + row) * GROUP // BLOCK_M + row)


@triton.jit
def load_tile(pointers, is_visible, is_dim, MASK_TOKENS: tl.constexpr, MASK_DIMS: tl.constexpr):
    """Loads a tile of keys, values or queries, with zeros where masked. The caller turns off masks
    that hide no elements, since masks cost registers and branches."""
    if MASK_TOKENS and MASK_DIMS:
        return tl.load(pointers, mask=is_visible & is_dim, other=0.0)
    elif MASK_TOKENS:
        return tl.load(pointers, mask=is_visible, other=0.0)
    elif MASK_DIMS:
        return tl.load(pointers, mask=is_dim, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def convert_tile(tile, like, CODE_DTYPE: tl.constexpr):
    """Converts a tile of keys or values to the dtype of `like`. `CODE_DTYPE`: 0, or for codes the
    number in `quantized.DTYPE_NUMBERS`. Codes are converted exactly and not scaled. Shifts the
    bits of an 8-bit float into a float16, since that works on every chip; for E4M3, multiplies by
    256 for the difference in exponent bias."""
    if CODE_DTYPE == 0:
        return tile.to(like.dtype)
    elif CODE_DTYPE == 1:
        return tile.to(tl.float32).to(like.dtype)
    else:
        bits = tile.to(tl.uint16)
        if CODE_DTYPE == 2:
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
            return (half.to(tl.float32) * 256.0).to(like.dtype)
        else:
            tl.static_assert(CODE_DTYPE == 3, "the dtype of the codes is unknown")
            return (bits << 8).to(tl.float16, bitcast=True).to(like.dtype)


@triton.jit
def scale_tile(tile, scales, CODE_DTYPE: tl.constexpr):
    """Multiplies converted float16 codes of values by their scales. For other dtypes, the kernel
    scales the softmax weights instead."""
    if CODE_DTYPE and tile.dtype == tl.float16:
        return (tile.to(tl.float32) * scales[:, None]).to(tl.float16)
    else:
        return tile


@triton.jit
def load_scales(pointers, is_visible, MASKED: tl.constexpr):
    return tl.load(pointers, mask=is_visible, other=0.0) if MASKED else tl.load(pointers)


@triton.jit
def store_rows(
    out,
    lse,
    out_rows,
    acc,
    acc_rest,
    total,
    max_score,
    log2_factor,
    is_row,
    VALUE_DIM: tl.constexpr,
    VALUE_MAIN: tl.constexpr,
    VALUE_REST: tl.constexpr,
):
    """Writes results to the rows `out_rows` of `out` `(n, VALUE_DIM)`, and their log-sum-exp to
    `lse` `(n,)`: zeros and `-inf` for queries that saw no keys. The weight of a score is `2 **
    (score * log2_factor)`; `acc` is divided by `total`."""
    has_keys = total > 0.0
    total = tl.where(has_keys, total, 1.0)
    inverse = tl.where(has_keys, 1.0 / total, 0.0)[:, None]
    d = tl.arange(0, VALUE_MAIN)[None, :]
    pointers = out + out_rows[:, None] * VALUE_DIM + d
    tl.store(
        pointers, (acc * inverse).to(out.dtype.element_ty), mask=is_row[:, None] & (d < VALUE_DIM)
    )
    if VALUE_REST > 0:
        d = VALUE_MAIN + tl.arange(0, VALUE_REST)[None, :]
        pointers = out + out_rows[:, None] * VALUE_DIM + d
        tl.store(
            pointers,
            (acc_rest * inverse).to(out.dtype.element_ty),
            mask=is_row[:, None] & (d < VALUE_DIM),
        )
    if lse is not None:
        tl.store(
            lse + out_rows,
            tl.where(has_keys, (max_score * log2_factor + tl.log2(total)) * LN_2, float("-inf")),
            mask=is_row,
        )
