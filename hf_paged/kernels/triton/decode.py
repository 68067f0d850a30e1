"""Triton attention of one or a few queries a row over paged K/V.

The grid is `(kv_heads * tiles of query rows, items)`. An item is a split of a row; which one, each program works out
from the lengths on the device, so that a captured graph stays right as rows grow and no step waits for the device.
Lengths decide how many items a row gets: a long row among short ones is spread over more programs, and there are about
as many programs as the chip runs at once (Flash-Decoding, Dao et al. 2023; the balance is that of FlashInfer's plan,
arXiv 2501.01005, sec. 3.3, without the plan).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...step import StepMetadata
from . import configs
from .common import device_guard, dot_dtype, num_multiprocessors, split_dim
from .decode_kernel import combine_kernel, decode_kernel
from .limits import MAX_BATCH

MIN_SPLIT = 256
"""Tokens that a split has at least, but for the last of a row: shorter ones cost more to merge than they gain."""


def decode_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    step: StepMetadata,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    config: configs.DecodeConfig | None = None,
) -> Any:
    """
    Attention of each row's queries, equally many and at most `MAX_QUERIES`, over the K/V that its block table names.
    Sums in float32.

    Of `step` it uses the device tensors and the static sizes only: the same launch is right for other lengths, as in a
    captured graph, up to `block_tables.shape[1] * block_size` tokens. Rows with `seq_lens` 0 give zeros.

    Args:
        query (`torch.Tensor` of shape `(T, heads, head_dim)`)
        key_blocks, value_blocks (`torch.Tensor` of shape `(num_blocks, kv_heads, block_size, dim)`)
        step ([`StepMetadata`])
        scale, softcap, sinks, bias: As in `AttentionCall`.
        alibi_slopes (`torch.Tensor` of shape `(heads,)`, *optional*):
            Adds `slope * (key position - query position)` to the scores (ALiBi, arXiv 2108.12409, sec. 3).
        return_lse (`bool`): Also the logarithm of each query's sum of exponentials, to merge results over disjoint
            keys.
        config (`DecodeConfig`, *optional*): Instead of the one for this chip.

    Returns:
        `torch.Tensor` of shape `(T, heads, value_dim)`, contiguous, in the query's dtype; with `return_lse` also one of
        shape `(T, heads)`, float32, natural logarithm, the sink's logit included, `-inf` for queries that see nothing.

    Raises:
        IndexError: if the bias is shorter than the longest row, where the host knows the lengths.
    """
    num_tokens, heads, key_dim = query.shape
    _, kv_heads, block_size, value_dim = value_blocks.shape
    batch, query_len = step.num_rows, step.query_len
    assert query_len is not None
    out = query.new_empty(num_tokens, heads, value_dim)
    lse = query.new_empty(num_tokens, heads, dtype=torch.float32) if return_lse else None
    if out.numel() == 0:
        return (out, lse) if return_lse else out
    query = query if query.stride(2) == 1 else query.contiguous()
    seq_lens, starts, _ = step.on_device
    rows = heads // kv_heads * query_len
    config = config or configs.decode_config(key_dim, value_dim, key_blocks.dtype, rows, query.device)
    block_m = min(config.block_m, max(16, triton.next_power_of_2(rows)))
    programs = kv_heads * triton.cdiv(rows, block_m)
    plan = _Plan.make(step, query_len, programs, config)
    if plan.split:
        inner = query_len * heads
        part_out = query.new_empty(plan.items, inner, value_dim, dtype=torch.float32)
        part_lse = query.new_empty(plan.items, inner, dtype=torch.float32)
        row_items = seq_lens.new_empty(batch, 2, dtype=torch.int32)
    else:
        part_out = part_lse = row_items = None
    key_tiles, value_tiles = split_dim(key_dim), split_dim(value_dim, smallest=32)  # 16 columns feed 2 of 4 warps
    with device_guard(query):
        decode_kernel[(programs, plan.items)](
            query, key_blocks, value_blocks, out, lse, part_out, part_lse, row_items,
            step.block_tables, seq_lens, starts, sinks, alibi_slopes, bias,
            batch, plan.target, _window(step), scale, softcap, step.block_tables.stride(0),
            query_len * query.stride(0), query.stride(1), query.stride(0),
            *key_blocks.stride()[:3], *value_blocks.stride()[:3],
            *_bias_arguments(bias, heads, query_len, step),
            HEADS=heads, GROUP=heads // kv_heads, QUERY_LEN=query_len, KEY_DIM=key_dim, VALUE_DIM=value_dim,
            BLOCK_SIZE=block_size, CAUSAL=step.causal, SPLIT=plan.split,
            SAME_STRIDES=key_blocks.stride() == value_blocks.stride(),
            VALUE_IS_KEY=_is_prefix(key_blocks, value_blocks, key_tiles, value_tiles),
            DOT_DTYPE=dot_dtype(query.dtype, key_blocks.dtype, value_blocks.dtype),
            MIN_SPLIT=MIN_SPLIT, BLOCK_ROWS=plan.block_rows,
            BLOCK_M=block_m, M_TILES=programs // kv_heads, TILE=config.tile,
            KEY_MAIN=key_tiles[0], KEY_REST=key_tiles[1], VALUE_MAIN=value_tiles[0], VALUE_REST=value_tiles[1],
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        if plan.split:
            combine_kernel[(inner, batch)](
                part_out, part_lse, row_items, out, lse,
                INNER=inner, VALUE_DIM=value_dim, BLOCK_DIM=triton.next_power_of_2(value_dim), STEP=8,
                BLOCK_SPLITS=triton.next_power_of_2(triton.cdiv(plan.target, programs)),
            )  # fmt: skip
    return (out, lse) if return_lse else out


class _Plan(NamedTuple):
    """What is static of the split: the same for every length that the block tables have room for."""

    split: bool  # whether any row may be split
    items: int  # no fewer than there can be
    target: int  # programs aimed at
    block_rows: int  # the batch, padded coarsely: each size is compiled once

    @classmethod
    def make(cls, step: StepMetadata, query_len: int, programs: int, config: configs.DecodeConfig) -> _Plan:
        batch, width = step.block_tables.shape
        longest = width * step.block_size
        if (window := _window(step)) is not None:
            longest = min(longest, window + query_len + config.tile)
        target = num_multiprocessors(step.block_tables.device) * config.programs_per_sm
        if longest <= MIN_SPLIT or programs >= target:
            return cls(False, batch, target, 1)
        # Splits of a row: at most one more than its share of the programs; see `_find_item`.
        items = min(batch + target // programs, batch * triton.cdiv(longest, MIN_SPLIT))
        return cls(True, items, target, next(size for size in (32, 256, 2048, MAX_BATCH) if size >= batch))


def _window(step: StepMetadata) -> int | None:
    return step.window if step.causal else None


def _is_prefix(
    key_blocks: Tensor, value_blocks: Tensor, key_tiles: tuple[int, int], value_tiles: tuple[int, int]
) -> bool:
    """Whether the values are the first elements of the keys, as latents are, so that one load serves both."""
    return (
        key_blocks.data_ptr() == value_blocks.data_ptr()
        and key_blocks.storage_offset() == value_blocks.storage_offset()
        and key_blocks.stride() == value_blocks.stride()
        and key_blocks.dtype == value_blocks.dtype
        and key_blocks.shape[3] >= value_blocks.shape[3]
        and value_tiles[0] == key_tiles[0]
        and value_tiles[1] in (0, key_tiles[1])
    )


def _bias_arguments(bias: Tensor | None, heads: int, query_len: int, step: StepMetadata) -> tuple[int, ...]:
    """Strides of the bias over `(rows, heads, query_len, keys)`, 0 where it is broadcast, and its keys."""
    if bias is None:
        return 0, 0, 0, 0, 0
    keys = bias.shape[-1] if bias.shape[-1] > 1 else step.block_tables.shape[1] * step.block_size
    if keys < max(step.seq_lens, default=0):
        raise IndexError(f"the bias covers {keys} positions, seq_lens are {step.seq_lens}")
    return *bias.expand(step.num_rows, heads, query_len, keys).stride(), keys
