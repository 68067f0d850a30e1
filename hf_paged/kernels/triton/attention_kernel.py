"""Device code of attention: each program attends from one tile of query rows to the keys that they
see. `attention.py` launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tiles import (
    LOG2_E,
    convert_tile,
    dot,
    find_item,
    find_row,
    load_scales,
    load_tile,
    scale_tile,
    store_rows,
)


@triton.jit
def _attend_tile(
    acc,
    acc_rest,
    total,
    max_score,
    q,
    q_rest,
    keys,
    values,
    block_table,
    first_key,
    low,
    high,
    query_position,
    window,
    scale,
    softcap,
    bias,
    log2_factor,
    key_block,
    key_token,
    value_block,
    value_token,
    bias_key,
    bias_len,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_MAIN: tl.constexpr,
    KEY_REST: tl.constexpr,
    VALUE_MAIN: tl.constexpr,
    VALUE_REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    FOLDED: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    VALUE_IS_KEY: tl.constexpr,
    CODE_DTYPE: tl.constexpr,
    key_scales,
    value_scales,
    MASKED: tl.constexpr,
):
    """Takes one step of FlashAttention's running softmax (arXiv 2205.14135, section 3.1), over the
    `TILE` keys from `first_key` on. Returns the new `acc`, `acc_rest`, `total` and `max_score`."""
    position = first_key + tl.arange(0, TILE)
    # Slots that are not visible are not read: NaN times a weight of zero would be NaN.
    is_visible = (position >= low) & (position < high)
    if BLOCK_SIZE >= TILE:  # tiles start at multiples of TILE, so a tile lies within one block
        block = tl.zeros([TILE], dtype=tl.int64) + tl.load(
            block_table + first_key // BLOCK_SIZE
        ).to(tl.int64)
    else:  # a tile covers several blocks; each block id is loaded once
        block_starts = first_key + tl.arange(0, TILE // BLOCK_SIZE) * BLOCK_SIZE
        blocks = tl.load(
            block_table + block_starts // BLOCK_SIZE, mask=block_starts < high, other=0
        ).to(tl.int64)
        block = tl.reshape(
            tl.broadcast_to(blocks[:, None], [TILE // BLOCK_SIZE, BLOCK_SIZE]), [TILE]
        )
    offset = (position % BLOCK_SIZE).to(tl.int64)
    key_rows = (block * key_block + offset * key_token)[:, None]
    d = tl.arange(0, KEY_MAIN)[None, :]
    k = load_tile(keys + key_rows + d, is_visible[:, None], d < KEY_DIM, MASKED, KEY_MAIN > KEY_DIM)
    k = convert_tile(k, q, CODE_DTYPE)
    scores = dot(q, tl.trans(k), None)  # [M, TILE]
    if KEY_REST > 0:
        d_rest = KEY_MAIN + tl.arange(0, KEY_REST)[None, :]
        padded: tl.constexpr = KEY_MAIN + KEY_REST > KEY_DIM
        k_rest = load_tile(
            keys + key_rows + d_rest, is_visible[:, None], d_rest < KEY_DIM, MASKED, padded
        )
        k_rest = convert_tile(k_rest, q, CODE_DTYPE)
        scores = dot(q_rest, tl.trans(k_rest), scores)

    if CODE_DTYPE:  # codes take 1 byte, so `key_block` is in bytes; a scale takes 4
        scores *= load_scales(key_scales + block * (key_block // 4) + offset, is_visible, MASKED)[
            None, :
        ]
    if not FOLDED:
        scores = scores * scale
    if softcap is not None:
        # tanh, exact for large scores, where exp2 returns inf or 0; `libdevice.tanh` is slower
        scores = (1.0 - 2.0 / (tl.exp2(scores / softcap * (2.0 * LOG2_E)) + 1.0)) * softcap
    if bias is not None:
        bias_rows = bias[:, None] + (position.to(tl.int64) * bias_key)[None, :]
        is_covered = (is_visible & (position < bias_len))[None, :]
        scores += tl.load(bias_rows, mask=is_covered, other=0.0).to(tl.float32)
    if MASKED:
        is_seen = is_visible[None, :]
        if CAUSAL:
            is_seen = is_seen & (position[None, :] <= query_position[:, None])
            if window is not None:
                is_seen = is_seen & (position[None, :] > query_position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))

    new_max_score = tl.maximum(max_score, tl.max(scores, axis=1))
    anchor = new_max_score
    if MASKED:
        anchor = tl.where(new_max_score == float("-inf"), 0.0, new_max_score)
    if bias is not None:  # a bias at the dtype's minimum, times `log2_factor`, would be -inf
        weights = tl.exp2((scores - anchor[:, None]) * log2_factor)
    else:  # one fused multiply-add per score
        weights = tl.exp2(scores * log2_factor - (anchor * log2_factor)[:, None])
    shrink = tl.exp2((max_score - anchor) * log2_factor)
    total = total * shrink + tl.sum(weights, axis=1)
    factors = None
    if CODE_DTYPE:
        factors = load_scales(
            value_scales + block * (value_block // 4) + offset, is_visible, MASKED
        )
        # float16 cannot represent small scaled weights: `scale_tile` scales the values instead
        if q.dtype != tl.float16:
            weights *= factors[None, :]
    weights = weights.to(q.dtype)
    if VALUE_IS_KEY:
        acc = dot(weights, scale_tile(k, factors, CODE_DTYPE), acc * shrink[:, None])
        if VALUE_REST > 0:
            acc_rest = dot(
                weights, scale_tile(k_rest, factors, CODE_DTYPE), acc_rest * shrink[:, None]
            )
    else:
        value_rows = (
            key_rows if SAME_STRIDES else (block * value_block + offset * value_token)[:, None]
        )
        d = tl.arange(0, VALUE_MAIN)[None, :]
        v = load_tile(
            values + value_rows + d,
            is_visible[:, None],
            d < VALUE_DIM,
            MASKED,
            VALUE_MAIN > VALUE_DIM,
        )
        acc = dot(
            weights,
            scale_tile(convert_tile(v, q, CODE_DTYPE), factors, CODE_DTYPE),
            acc * shrink[:, None],
        )
        if VALUE_REST > 0:
            d = VALUE_MAIN + tl.arange(0, VALUE_REST)[None, :]
            v = load_tile(values + value_rows + d, is_visible[:, None], d < VALUE_DIM, MASKED, True)
            acc_rest = dot(
                weights,
                scale_tile(convert_tile(v, q, CODE_DTYPE), factors, CODE_DTYPE),
                acc_rest * shrink[:, None],
            )
    return acc, acc_rest, total, new_max_score


# Not specialized, since each variant would be compiled separately: numbers that change from step to
# step, and the addresses of metadata tensors, which are slices of one buffer. Queries, keys and
# values are specialized for alignment, so that their loads are wide.
@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_tokens",
        "window",
        "table_row",
        "bias_row",
        "bias_token",
        "bias_head",
        "bias_len",
        "target_programs",
        "query_len",
    ],
    do_not_specialize_on_alignment=[
        "seq_lens",
        "block_tables",
        "starts",
        "query_start",
        "query_index",
        "bias",
    ],
)
def attention_kernel(
    query,
    key_blocks,
    value_blocks,
    out,
    lse,
    seq_lens,
    block_tables,
    num_rows,
    num_tokens,
    window,
    table_row,
    query_token,
    query_head,
    key_block,
    key_head,
    key_token,
    value_block,
    value_head,
    value_token,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    FOLDED: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    KEY_MAIN: tl.constexpr,
    KEY_REST: tl.constexpr,
    VALUE_MAIN: tl.constexpr,
    VALUE_REST: tl.constexpr,
    softcap=None,
    sinks=None,
    bias=None,
    bias_row=0,
    bias_token=0,
    bias_head=0,
    bias_key=0,
    bias_len=0,
    starts=None,
    query_start=None,
    query_index=None,
    part_out=None,
    part_lse=None,
    row_items=None,
    target_programs=0,
    query_len=0,
    BY_LENGTH: tl.constexpr = False,
    ONE_QUERY: tl.constexpr = False,
    MIN_SPLIT: tl.constexpr = 0,
    BLOCK_ROWS: tl.constexpr = 1,
    VALUE_IS_KEY: tl.constexpr = False,
    CODE_DTYPE: tl.constexpr = 0,
    key_scales=None,
    value_scales=None,
):
    """Computes attention of one tile of a row's queries over all keys of the row, or over one part
    of these keys.

    With `BY_LENGTH`, the grid is `(tiles * kv_heads, items)`: all rows have `query_len` queries,
    and with `SPLIT` the keys of longer rows are split into more items. Without `BY_LENGTH`, the
    grid is `(tiles, kv_heads, parts)`: `query_start` says which tiles a row has, and the keys of
    every row are split into the same number of parts. `name_x` (`key_block`, `query_head`) is the
    stride of `name` along the axis `x`, in elements."""
    part, num_parts = 0, 1
    if BY_LENGTH:
        if ONE_QUERY:
            query_len = 1
        m_tiles = (query_len * GROUP + BLOCK_M - 1) // BLOCK_M
        kv_head = tl.program_id(0) // m_tiles
        tile = tl.program_id(0) % m_tiles
        item = tl.program_id(1)
        row = item
        if SPLIT:
            row, part, num_parts, first_item, size = find_item(
                seq_lens,
                starts,
                item,
                num_rows,
                tl.num_programs(0),
                target_programs,
                window,
                query_len,
                TILE,
                MIN_SPLIT,
                BLOCK_ROWS,
            )
            if row >= num_rows:
                return
            if (tl.program_id(0) == 0) & (part == 0):
                tl.store(row_items + 2 * row, first_item)
                tl.store(row_items + 2 * row + 1, num_parts)
        first_query = row * query_len
    else:
        # The last tiles see the most keys, so they start first.
        row, tile = find_row(
            query_start, tl.num_programs(0) - 1 - tl.program_id(0), num_rows, GROUP, BLOCK_M
        )
        kv_head = tl.program_id(1)
        first_query = tl.load(query_start + row)
        query_len = tl.load(query_start + row + 1) - first_query
        if tile * BLOCK_M >= query_len * GROUP:
            return

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # query row: query * GROUP + head within the group
    is_row = m < query_len * GROUP
    # int64, since a head's stride may span all tokens
    head = (kv_head * GROUP + m % GROUP).to(tl.int64)
    packed_index = (first_query + m // GROUP).to(tl.int64)
    token = (
        packed_index
        if query_index is None
        else tl.load(query_index + packed_index, mask=is_row, other=0).to(tl.int64)
    )
    q_rows = query + (token * query_token + head * query_head)[:, None]
    d = tl.arange(0, KEY_MAIN)[None, :]
    # [BLOCK_M, KEY_MAIN]
    q = load_tile(q_rows + d, is_row[:, None], d < KEY_DIM, True, True).to(DOT_DTYPE)
    q_rest = None
    if KEY_REST > 0:
        d_rest = KEY_MAIN + tl.arange(0, KEY_REST)[None, :]
        q_rest = load_tile(q_rows + d_rest, is_row[:, None], d_rest < KEY_DIM, True, True).to(
            DOT_DTYPE
        )

    # No query of the tile sees keys outside [low, high). Without `BY_LENGTH`, every query sees all
    # keys in [full_low, full_high).
    seq_len = tl.load(seq_lens + row)
    low = 0 if starts is None else tl.load(starts + row)
    high, full_low, full_high = seq_len, low, seq_len
    context_len = seq_len - query_len
    position = context_len + m // GROUP
    if CAUSAL:
        oldest = context_len
        newest = seq_len - 1
        if not BY_LENGTH:
            oldest = context_len + tile * BLOCK_M // GROUP
            newest = (
                context_len + (tl.minimum(tile * BLOCK_M + BLOCK_M, query_len * GROUP) - 1) // GROUP
            )
            high = newest + 1
            full_high = oldest + 1
        if window is not None:
            low = tl.maximum(low, oldest - window + 1)
            full_low = tl.maximum(full_low, newest - window + 1)
    if SPLIT:
        # tiles start at multiples of TILE, so that they align with blocks
        aligned = low // TILE * TILE
        if not BY_LENGTH:
            part = tl.program_id(2)
            size = tl.cdiv(tl.cdiv(tl.maximum(high - aligned, 0), TILE), tl.num_programs(2)) * TILE
        low = tl.maximum(low, aligned + part * size)
        high = tl.minimum(high, aligned + (part + 1) * size)
        full_high = tl.minimum(full_high, high)

    # The weight of a score is 2 ** (score * log2_factor), which with `FOLDED` includes the scale.
    log2_factor = scale * LOG2_E if FOLDED else LOG2_E
    max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        if part == 0:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
            max_score = sink * (LOG2_E / log2_factor)
            total = tl.where(max_score == float("-inf"), 0.0, 1.0)
    bias_rows = None
    if bias is not None:
        bias_at = row.to(tl.int64) * bias_row + packed_index * bias_token + head * bias_head
        bias_rows = bias + tl.where(is_row, bias_at, 0)
    acc = tl.zeros([BLOCK_M, VALUE_MAIN], tl.float32)
    acc_rest = tl.zeros([BLOCK_M, VALUE_REST if VALUE_REST > 0 else 1], tl.float32)
    keys = key_blocks + kv_head.to(tl.int64) * key_head
    values = value_blocks + kv_head.to(tl.int64) * value_head
    if CODE_DTYPE:
        key_scales += kv_head.to(tl.int64) * (key_head // 4)
        value_scales += kv_head.to(tl.int64) * (value_head // 4)
    block_table = block_tables + row.to(tl.int64) * table_row

    # All queries see all keys of [full_begin, full_end), whose tiles need no masks. A first loop
    # computes the masked tiles at both ends, a second loop the tiles between them. Decodes
    # (`BY_LENGTH`) use a single, masked loop: the loads of a second loop would start only after the
    # loads of the first have arrived.
    begin = low // TILE * TILE
    end = tl.maximum(tl.cdiv(high, TILE) * TILE, begin)
    full_begin, full_end = end, end
    if not BY_LENGTH:
        full_begin = tl.minimum(tl.cdiv(tl.maximum(full_low, low), TILE) * TILE, end)
        full_end = tl.maximum(full_high // TILE * TILE, full_begin)
    num_leading = (full_begin - begin) // TILE
    for is_unmasked in tl.static_range(1 if BY_LENGTH else 2):
        loop_start, loop_end, step = 0, num_leading + (end - full_end) // TILE, 1
        if is_unmasked:
            loop_start, loop_end, step = full_begin, full_end, TILE
        for i in range(loop_start, loop_end, step):
            first_key = i
            if not is_unmasked:
                first_key = begin + i * TILE
                if not BY_LENGTH:
                    trailing_key = full_end + (i - num_leading) * TILE
                    first_key = tl.where(i < num_leading, first_key, trailing_key)
            acc, acc_rest, total, max_score = _attend_tile(
                acc,
                acc_rest,
                total,
                max_score,
                q,
                q_rest,
                keys,
                values,
                block_table,
                first_key,
                low,
                high,
                position,
                window,
                scale,
                softcap,
                bias_rows,
                log2_factor,
                key_block,
                key_token,
                value_block,
                value_token,
                bias_key,
                bias_len,
                KEY_DIM,
                VALUE_DIM,
                KEY_MAIN,
                KEY_REST,
                VALUE_MAIN,
                VALUE_REST,
                BLOCK_SIZE,
                TILE,
                CAUSAL and not ONE_QUERY,
                FOLDED,
                SAME_STRIDES,
                VALUE_IS_KEY,
                CODE_DTYPE,
                key_scales,
                value_scales,
                is_unmasked == 0,
            )

    # The output's row numbers are computed from `m` only here: before the loop, they would occupy
    # registers during it.
    row_offsets = (m // GROUP * HEADS + m % GROUP).to(tl.int64) + kv_head * GROUP
    first_token = first_query.to(tl.int64)
    if SPLIT and not BY_LENGTH:
        first_token += tl.cast(part, tl.int64) * num_tokens
    if not BY_LENGTH or num_parts == 1:
        out_rows = row_offsets + first_token * HEADS
        store_rows(
            out,
            lse,
            out_rows,
            acc,
            acc_rest,
            total,
            max_score,
            log2_factor,
            is_row,
            VALUE_DIM,
            VALUE_MAIN,
            VALUE_REST,
        )
    elif SPLIT:
        part_rows = row_offsets + item.to(tl.int64) * query_len * HEADS
        store_rows(
            part_out,
            part_lse,
            part_rows,
            acc,
            acc_rest,
            total,
            max_score,
            log2_factor,
            is_row,
            VALUE_DIM,
            VALUE_MAIN,
            VALUE_REST,
        )
