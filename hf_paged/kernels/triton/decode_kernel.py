"""Device code of `decode.py`: rows split over programs by their lengths, and split results merged."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LN_2, LOG2_E, dot, soften, tile_blocks


@triton.jit
def _first_seen(start, seq_len, window, QUERY_LEN: tl.constexpr):
    # What the first query sees bounds what any does.
    if window is not None:
        start = tl.maximum(start, seq_len - QUERY_LEN + 1 - window)
    return tl.maximum(start, 0)


@triton.jit
def _find_item(
    seq_lens, starts, item, rows, programs, target, window,
    QUERY_LEN: tl.constexpr, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Row of an item, its split, the row's splits and first item, tokens of a split. The row is past `rows` if none is.

    Every row has a split, so that rows without tokens get their zeros; splits are so long that, with `programs`
    of each, there are about `target`.
    """
    i = tl.arange(0, BLOCK_ROWS)
    ends = tl.load(seq_lens + i, mask=i < rows, other=0)
    firsts = _first_seen(tl.load(starts + i, mask=i < rows, other=0), ends, window, QUERY_LEN)
    tokens = tl.maximum(ends - firsts // TILE * TILE, 0)
    size = tl.cdiv(tl.sum(tokens.to(tl.int64), axis=0) * programs, target)
    size = tl.cdiv(tl.maximum(size, MIN_SPLIT), TILE).to(tl.int32) * TILE
    splits = tl.where(i < rows, tl.maximum(tl.cdiv(tokens, size), 1), 0)
    # Past the last row the running sum stays what it is, so that items past the last count all of BLOCK_ROWS.
    row = tl.sum((tl.cumsum(splits, axis=0) <= item).to(tl.int32), axis=0)
    first = tl.sum(tl.where(i < row, splits, 0), axis=0)
    return row, item - first, tl.sum(tl.where(i == row, splits, 0), axis=0), first, size


@triton.jit
def _load(pointers, is_seen, is_real, MASK_DIMS: tl.constexpr):
    if MASK_DIMS:
        return tl.load(pointers, mask=is_seen & is_real, other=0.0)
    else:
        return tl.load(pointers, mask=is_seen, other=0.0)


@triton.jit
def _store_rows(out, at, d, rows, is_row, VALUE_DIM: tl.constexpr):
    mask = is_row[:, None] & (d < VALUE_DIM)[None, :]
    tl.store(out + at[:, None] * VALUE_DIM + d[None, :], rows.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "target", "window", "table_row", "bias_len"])
def decode_kernel(
    query, key_blocks, value_blocks, out, lse, part_out, part_lse, row_items,
    block_tables, seq_lens, starts, sinks, alibi_slopes, bias,
    rows, target, window, scale, softcap, table_row, query_row, query_head, query_token,
    key_block, key_head, key_token, value_block, value_head, value_token,
    bias_row, bias_head, bias_query, bias_key, bias_len,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY_LEN: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr, SAME_STRIDES: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr, DOT_DTYPE: tl.constexpr, MIN_SPLIT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, M_TILES: tl.constexpr, TILE: tl.constexpr, KEY_MAIN: tl.constexpr, KEY_REST: tl.constexpr,
    VALUE_MAIN: tl.constexpr, VALUE_REST: tl.constexpr,
):  # fmt: skip
    kv_head, item = tl.program_id(0) // M_TILES, tl.program_id(1)
    row, split, num_splits = item, 0, 1
    if SPLIT:
        row, split, num_splits, first_item, size = _find_item(
            seq_lens, starts, item, rows, tl.num_programs(0), target, window, QUERY_LEN, TILE, MIN_SPLIT, BLOCK_ROWS
        )
        if row >= rows:
            return
        if (tl.program_id(0) == 0) & (split == 0):
            tl.store(row_items + 2 * row, first_item)
            tl.store(row_items + 2 * row + 1, num_splits)
    seq_len = tl.load(seq_lens + row)
    first = _first_seen(tl.load(starts + row), seq_len, window, QUERY_LEN)
    begin, end = first // TILE * TILE, seq_len  # tiles start at multiples of TILE, so that they align with blocks
    if SPLIT:
        begin += split * size
        end = tl.minimum(end, begin + size)

    m = tl.program_id(0) % M_TILES * BLOCK_M + tl.arange(0, BLOCK_M)  # head within the group, then query
    is_row = m < GROUP * QUERY_LEN
    head, token = kv_head * GROUP + m // QUERY_LEN, m % QUERY_LEN
    position = seq_len - QUERY_LEN + token
    row = row.to(tl.int64)
    q_rows = query + row * query_row + (head.to(tl.int64) * query_head + token.to(tl.int64) * query_token)[:, None]
    d = tl.arange(0, KEY_MAIN)[None, :]
    q = _load(q_rows + d, is_row[:, None], d < KEY_DIM, True).to(DOT_DTYPE)  # [BLOCK_M, KEY_MAIN]
    if KEY_REST > 0:
        d_rest = KEY_MAIN + tl.arange(0, KEY_REST)[None, :]
        q_rest = _load(q_rows + d_rest, is_row[:, None], d_rest < KEY_DIM, True).to(DOT_DTYPE)
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head, mask=is_row, other=0.0).to(tl.float32)
    if bias is not None:
        bias_rows = bias + row * bias_row + (head.to(tl.int64) * bias_head + token.to(tl.int64) * bias_query)[:, None]

    # Scores count in powers of two; with a bias in natural units, where a bias of its dtype's minimum absorbs the
    # score and stays finite, as it does in the masks that models build.
    UNIT: tl.constexpr = 1.0 if bias is None else LOG2_E
    IN_UNITS: tl.constexpr = LOG2_E if bias is None else 1.0
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        if split == 0:
            top = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * IN_UNITS
            total = tl.where(top == float("-inf"), 0.0, 1.0)
    v = tl.arange(0, VALUE_MAIN)[None, :]
    acc = tl.zeros([BLOCK_M, VALUE_MAIN], tl.float32)
    if VALUE_REST > 0:
        v_rest = VALUE_MAIN + tl.arange(0, VALUE_REST)[None, :]
        acc_rest = tl.zeros([BLOCK_M, VALUE_REST], tl.float32)

    block_table = block_tables + row * table_row
    keys, values = key_blocks + kv_head.to(tl.int64) * key_head, value_blocks + kv_head.to(tl.int64) * value_head
    for tile in range(begin, end, TILE):
        t = tile + tl.arange(0, TILE)
        # Slots that the row does not see are not read. Their zeros take part in the products, where NaN times a weight
        # of zero would be NaN. One masked loop rather than a bare one and its ends: the loads of a bare loop would
        # start when those of the ends have arrived.
        is_seen = (t >= first) & (t < end)
        blocks = tile_blocks(block_table, tile, end, BLOCK_SIZE, TILE)
        offsets = (t % BLOCK_SIZE).to(tl.int64)
        key_rows = (blocks * key_block + offsets * key_token)[:, None]
        k = _load(keys + key_rows + d, is_seen[:, None], d < KEY_DIM, KEY_MAIN > KEY_DIM).to(DOT_DTYPE)
        scores = dot(q, tl.trans(k), None)  # [BLOCK_M, TILE]
        if KEY_REST > 0:
            padded: tl.constexpr = KEY_MAIN + KEY_REST > KEY_DIM
            k_rest = _load(keys + key_rows + d_rest, is_seen[:, None], d_rest < KEY_DIM, padded).to(DOT_DTYPE)
            scores = dot(q_rest, tl.trans(k_rest), scores)
        if softcap is not None:
            scores = soften(scores * scale, softcap) * IN_UNITS
        else:
            scores = scores * (scale * IN_UNITS)
        if alibi_slopes is not None:
            scores += (slopes * IN_UNITS)[:, None] * (t[None, :] - position[:, None]).to(tl.float32)
        if bias is not None:
            mask = is_row[:, None] & (is_seen & (t < bias_len))[None, :]
            scores += tl.load(bias_rows + t.to(tl.int64)[None, :] * bias_key, mask=mask, other=0.0).to(tl.float32)
        sees = is_seen[None, :]
        if CAUSAL and QUERY_LEN > 1:
            sees = sees & (t[None, :] <= position[:, None])
            if window is not None:
                sees = sees & (t[None, :] > position[:, None] - window)
        scores = tl.where(sees, scores, float("-inf"))

        # The running softmax of FlashAttention (arXiv 2205.14135, sec. 3.1).
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2((scores - anchor[:, None]) * UNIT)
        shrink = tl.exp2((top - anchor) * UNIT)
        total = total * shrink + tl.sum(weights, axis=1)
        top = new_top
        weights = weights.to(DOT_DTYPE)
        if VALUE_IS_KEY:
            acc = dot(weights, k, acc * shrink[:, None])
            if VALUE_REST > 0:
                acc_rest = dot(weights, k_rest, acc_rest * shrink[:, None])
        else:
            if SAME_STRIDES:
                value_rows = key_rows
            else:
                value_rows = (blocks * value_block + offsets * value_token)[:, None]
            x = _load(values + value_rows + v, is_seen[:, None], v < VALUE_DIM, VALUE_MAIN > VALUE_DIM)
            acc = dot(weights, x.to(DOT_DTYPE), acc * shrink[:, None])
            if VALUE_REST > 0:
                x = _load(values + value_rows + v_rest, is_seen[:, None], v_rest < VALUE_DIM, True)
                acc_rest = dot(weights, x.to(DOT_DTYPE), acc_rest * shrink[:, None])

    has_seen = total > 0.0
    part = tl.where(has_seen, top * UNIT + tl.log2(tl.where(has_seen, total, 1.0)), float("-inf"))
    inverse = tl.where(has_seen, 1.0 / tl.where(has_seen, total, 1.0), 0.0)[:, None]
    inner = (token * HEADS + head).to(tl.int64)  # row of `(query_len, heads)`
    if num_splits == 1:
        at = row * (QUERY_LEN * HEADS) + inner
        if lse is not None:
            tl.store(lse + at, part * LN_2, mask=is_row)
        _store_rows(out, at, tl.arange(0, VALUE_MAIN), acc * inverse, is_row, VALUE_DIM)
        if VALUE_REST > 0:
            _store_rows(out, at, VALUE_MAIN + tl.arange(0, VALUE_REST), acc_rest * inverse, is_row, VALUE_DIM)
    if SPLIT:
        if num_splits > 1:
            at = item.to(tl.int64) * (QUERY_LEN * HEADS) + inner
            tl.store(part_lse + at, part, mask=is_row)
            _store_rows(part_out, at, tl.arange(0, VALUE_MAIN), acc * inverse, is_row, VALUE_DIM)
            if VALUE_REST > 0:
                _store_rows(part_out, at, VALUE_MAIN + tl.arange(0, VALUE_REST), acc_rest * inverse, is_row, VALUE_DIM)


@triton.jit
def combine_kernel(
    part_out, part_lse, row_items, out, lse,
    INNER: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    # One head of one query of a row: its parts by their shares of the sum of exponentials.
    row, inner = tl.program_id(1).to(tl.int64), tl.program_id(0)
    first, num_splits = tl.load(row_items + 2 * row).to(tl.int64), tl.load(row_items + 2 * row + 1)
    if num_splits <= 1:
        return
    i = tl.arange(0, BLOCK_SPLITS)
    parts = tl.load(part_lse + (first + i) * INNER + inner, mask=i < num_splits, other=float("-inf"))
    top = tl.max(parts, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(parts - top), axis=0)
    d = tl.arange(0, BLOCK_DIM)
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    for begin in range(0, num_splits, STEP):
        s = begin + tl.arange(0, STEP)
        parts_at = (first + s) * INNER + inner
        weights = tl.exp2(tl.load(part_lse + parts_at, mask=s < num_splits, other=float("-inf")) - top)
        mask = (s < num_splits)[:, None] & (d < VALUE_DIM)[None, :]
        values = tl.load(part_out + parts_at[:, None] * VALUE_DIM + d[None, :], mask=mask, other=0.0)
        acc += tl.sum(values * weights[:, None], axis=0)
    at = row * INNER + inner
    tl.store(
        out + at * VALUE_DIM + d, (acc / tl.where(total > 0.0, total, 1.0)).to(out.dtype.element_ty), d < VALUE_DIM
    )
    if lse is not None:
        part = tl.where(total > 0.0, (top + tl.log2(tl.where(total > 0.0, total, 1.0))) * LN_2, float("-inf"))
        tl.store(lse + at, part)
