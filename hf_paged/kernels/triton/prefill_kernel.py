"""Device code of `prefill.py`: tiles of packed queries over the keys that they see."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LN_2, LOG2_E, dot, soften, tile_blocks


@triton.jit
def _find_row(cu_query_lens, tile, rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Row that a tile belongs to, and the tile's number within it, which may be past the row's last.

    Row `i` begins at tile `cu_query_lens[i] * GROUP // BLOCK_M + i`, which leaves each row at least the tiles it needs;
    a tile's row is the last that begins at or before it. Counting takes one load where a binary search takes eight.
    """
    row = -1
    for first in range(0, rows, 256):
        i = first + tl.arange(0, 256)
        begins = tl.load(cu_query_lens + i, mask=i < rows, other=0) * GROUP // BLOCK_M + i
        row += tl.sum(((begins <= tile) & (i < rows)).to(tl.int32), axis=0)
    return row, tile - (tl.load(cu_query_lens + row) * GROUP // BLOCK_M + row)


@triton.jit
def _load(pointers, is_stored, is_real, MASK_TOKENS: tl.constexpr, MASK_DIMS: tl.constexpr):
    """A tile of keys or values, zeros where a mask says so; a mask that hides nothing costs registers and branches."""
    if MASK_TOKENS and MASK_DIMS:
        return tl.load(pointers, mask=is_stored & is_real, other=0.0)
    elif MASK_TOKENS:
        return tl.load(pointers, mask=is_stored, other=0.0)
    elif MASK_DIMS:
        return tl.load(pointers, mask=is_real, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _attend_tile(
    acc, total, top, q, q_rest, keys, values, block_table, first_key, low, high,
    query_position, context_len, window, scale, softcap, slopes, bias, tree_mask, factor,
    key_block, key_token, value_block, value_token, bias_key,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_MAIN: tl.constexpr, KEY_REST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys from `first_key`: the new sums `[M, VALUE_WIDTH]`, sums of weights and largest scores `[M]`."""
    position = first_key + tl.arange(0, TILE)
    is_stored = (position >= low) & (position < high)
    block = tile_blocks(block_table, first_key, high, BLOCK_SIZE, TILE)
    offset = (position % BLOCK_SIZE).to(tl.int64)
    key_rows = keys + (block * key_block + offset * key_token)[None, :]
    value_rows = values + (block * value_block + offset * value_token)[:, None]

    d = tl.arange(0, KEY_MAIN)[:, None]
    k = _load(key_rows + d, is_stored[None, :], d < KEY_DIM, MASKED, KEY_MAIN > KEY_DIM)  # [KEY_MAIN, TILE]
    scores = dot(q, k.to(q.dtype), None)
    if KEY_REST > 0:
        d_rest = KEY_MAIN + tl.arange(0, KEY_REST)[:, None]
        is_real = d_rest < KEY_DIM
        k_rest = _load(key_rows + d_rest, is_stored[None, :], is_real, MASKED, KEY_MAIN + KEY_REST > KEY_DIM)
        scores = dot(q_rest, k_rest.to(q.dtype), scores)

    if softcap is not None:
        scores = soften(scores * scale, softcap)
    elif slopes is not None or bias is not None:
        scores = scores * scale
    if slopes is not None:
        scores += slopes[:, None] * (position[None, :] - query_position[:, None]).to(tl.float32)
    if bias is not None:
        bias_rows = bias[:, None] + (position.to(tl.int64) * bias_key)[None, :]
        scores += _load(bias_rows, is_stored[None, :], True, MASKED, False).to(tl.float32)
    if MASKED:
        sees = is_stored[None, :]
        if CAUSAL:
            if tree_mask is None:
                sees = sees & (position[None, :] <= query_position[:, None])
            else:
                column = position - context_len
                is_new = is_stored & (column >= 0)
                seen = tl.load(tree_mask[:, None] + column[None, :], mask=is_new[None, :], other=1)
                sees = sees & (seen != 0)
            if window is not None:
                sees = sees & (position[None, :] > query_position[:, None] - window)
        scores = tl.where(sees, scores, float("-inf"))

    new_top = tl.maximum(top, tl.max(scores, axis=1))
    anchor = new_top
    if MASKED or bias is not None:
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    if bias is not None:  # a bias may be its dtype's minimum, which times the factor would be -inf
        weights = tl.exp2((scores - anchor[:, None]) * factor)
    else:  # one fused multiply-add a score
        weights = tl.exp2(scores * factor - (anchor * factor)[:, None])
    shrink = tl.exp2((top - anchor) * factor)
    total = total * shrink + tl.sum(weights, axis=1)

    d = tl.arange(0, VALUE_WIDTH)[None, :]
    v = _load(value_rows + d, is_stored[:, None], d < VALUE_DIM, MASKED, VALUE_WIDTH > VALUE_DIM)  # [TILE, VALUE_WIDTH]
    acc = dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None])
    return acc, total, new_top


@triton.jit(
    do_not_specialize=["rows", "window", "table_row", "tree_row", "out_part", "lse_part", "lse_token", "bias_token"]
)
def prefill_kernel(
    query, key_blocks, value_blocks, out, lse, cu_query_lens, seq_lens, starts, block_tables,
    query_index, sinks, alibi_slopes, bias, tree_mask, rows, window, scale, softcap,
    query_token, query_head, key_block, key_head, key_token, value_block, value_head, value_token,
    out_part, out_token, out_head, lse_part, lse_token, table_row, tree_row, bias_token, bias_head, bias_key,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_MAIN: tl.constexpr, KEY_REST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # The last tiles see the most keys: they start first.
    row, tile = _find_row(cu_query_lens, tl.num_programs(0) - 1 - tl.program_id(0), rows, GROUP, BLOCK_M)
    kv_head, part = tl.program_id(1), 0
    first_query = tl.load(cu_query_lens + row)
    query_len = tl.load(cu_query_lens + row + 1) - first_query
    first_m = tile * BLOCK_M
    if first_m >= query_len * GROUP:
        return

    m = first_m + tl.arange(0, BLOCK_M)  # query, then head within the group
    is_row = m < query_len * GROUP
    head = kv_head * GROUP + m % GROUP
    packed = (first_query + m // GROUP).to(tl.int64)
    token = packed
    if query_index is not None:
        token = tl.load(query_index + packed, mask=is_row, other=0).to(tl.int64)
    # A head may be as far from the next as all tokens are long.
    q_rows = query + (token * query_token + head.to(tl.int64) * query_head)[:, None]
    d = tl.arange(0, KEY_MAIN)[None, :]
    q = tl.load(q_rows + d, mask=is_row[:, None] & (d < KEY_DIM), other=0.0)  # [BLOCK_M, KEY_MAIN]
    q_rest = None
    if KEY_REST > 0:
        d_rest = KEY_MAIN + tl.arange(0, KEY_REST)[None, :]
        q_rest = tl.load(q_rows + d_rest, mask=is_row[:, None] & (d_rest < KEY_DIM), other=0.0)

    # Some query of the tile sees keys in [low, high), all of them see those in [full_low, full_high).
    seq_len = tl.load(seq_lens + row)
    low = 0
    if starts is not None:
        low = tl.load(starts + row)
    high, full_low, full_high = seq_len, low, seq_len
    context_len = seq_len - query_len
    position = context_len + m // GROUP
    tree_rows = None
    if CAUSAL:
        oldest = context_len + first_m // GROUP
        newest = context_len + (tl.minimum(first_m + BLOCK_M, query_len * GROUP) - 1) // GROUP
        if tree_mask is None:
            high, full_high = newest + 1, oldest + 1
        else:
            # A token of a tree is as far along as it has ancestors, itself included.
            tree_rows = tree_mask + packed * tree_row
            position = tl.full([BLOCK_M], -1, tl.int32) + context_len
            for column in range(0, query_len):
                position += (tl.load(tree_rows + column, mask=is_row, other=0) != 0).to(tl.int32)
            oldest, newest, full_high = context_len, seq_len - 1, context_len
        if window is not None:
            low = tl.maximum(low, oldest - window + 1)
            full_low = tl.maximum(full_low, newest - window + 1)
    if SPLIT:
        part = tl.program_id(2)
        aligned = low // TILE * TILE
        share = tl.cdiv(tl.cdiv(tl.maximum(high - aligned, 0), TILE), tl.num_programs(2)) * TILE
        low, high = tl.maximum(low, aligned + part * share), tl.minimum(high, aligned + (part + 1) * share)
        full_high = tl.minimum(full_high, high)

    # Scores count in units of `factor` powers of two; where nothing is added to them, the scale is part of it.
    factor = LOG2_E
    if softcap is None and alibi_slopes is None and bias is None:
        factor = scale * LOG2_E
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        if part == 0:
            top = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * (LOG2_E / factor)
            total = tl.where(top == float("-inf"), 0.0, 1.0)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head, mask=is_row, other=0.0).to(tl.float32)
    bias_rows = None
    if bias is not None:
        bias_rows = bias + tl.where(is_row, packed * bias_token + head.to(tl.int64) * bias_head, 0)
    acc = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    keys = key_blocks + kv_head.to(tl.int64) * key_head
    values = value_blocks + kv_head.to(tl.int64) * value_head
    block_table = block_tables + row.to(tl.int64) * table_row

    # The tiles at both ends need masks; those in [full_begin, full_end) are seen whole by all.
    begin = low // TILE * TILE
    end = tl.maximum(tl.cdiv(high, TILE) * TILE, begin)
    full_begin = tl.minimum(tl.cdiv(tl.maximum(full_low, low), TILE) * TILE, end)
    full_end = tl.maximum(full_high // TILE * TILE, full_begin)
    leading = (full_begin - begin) // TILE
    for i in range(0, leading + (end - full_end) // TILE):
        first_key = tl.where(i < leading, begin + i * TILE, full_end + (i - leading) * TILE)
        acc, total, top = _attend_tile(
            acc, total, top, q, q_rest, keys, values, block_table, first_key, low, high,
            position, context_len, window, scale, softcap, slopes, bias_rows, tree_rows, factor,
            key_block, key_token, value_block, value_token, bias_key,
            KEY_DIM, VALUE_DIM, KEY_MAIN, KEY_REST, VALUE_WIDTH, BLOCK_SIZE, TILE, CAUSAL, True,
        )  # fmt: skip
    for first_key in range(full_begin, full_end, TILE):
        acc, total, top = _attend_tile(
            acc, total, top, q, q_rest, keys, values, block_table, first_key, low, high,
            position, context_len, window, scale, softcap, slopes, bias_rows, tree_rows, factor,
            key_block, key_token, value_block, value_token, bias_key,
            KEY_DIM, VALUE_DIM, KEY_MAIN, KEY_REST, VALUE_WIDTH, BLOCK_SIZE, TILE, CAUSAL, False,
        )  # fmt: skip

    has_seen = total > 0.0
    result = acc * tl.where(has_seen, 1.0 / tl.where(has_seen, total, 1.0), 0.0)[:, None]
    d = tl.arange(0, VALUE_WIDTH)[None, :]
    out_rows = out + tl.cast(part, tl.int64) * out_part + (packed * out_token + head.to(tl.int64) * out_head)[:, None]
    tl.store(out_rows + d, result.to(out.dtype.element_ty), mask=is_row[:, None] & (d < VALUE_DIM))
    if lse is not None:
        seen = tl.where(has_seen, (top * factor + tl.log2(tl.where(has_seen, total, 1.0))) * LN_2, float("-inf"))
        tl.store(lse + tl.cast(part, tl.int64) * lse_part + packed * lse_token + head, seen, mask=is_row)
