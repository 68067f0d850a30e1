"""Triton attention of many queries a row over paged K/V: prompts, chunks, speculated trees and shared prefixes.

The packed queries of all rows are cut into tiles of `BLOCK_M`, the query heads of a K/V head side by side in them, so
that chunks of a few tokens fill a tile too. The grid has room for the most tiles that these tokens can need; which
row a tile belongs to, its program reads from `query_start` on the device, so that no step waits for lengths. Tiles of
keys that every query of a tile sees go without masks (FlashAttention-2, arXiv 2307.08691, sec. 3.1).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
from torch import Tensor

from ...step import StepMetadata
from .common import device_guard, num_multiprocessors, split_dim
from .configs import PrefillConfig, prefill_config
from .merge import merge
from .prefill_kernel import prefill_kernel

MIN_SPLIT = 512
"""Keys that a split of a row's keys has at least: fewer cost more to merge than they gain."""


def prefill_parts(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    step: StepMetadata,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    tree_mask: Tensor | None = None,
    query_index: Tensor | None = None,
    num_splits: int | None = None,
    config: PrefillConfig | None = None,
    is_whole: bool = False,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """
    Attention of each row's last `query_len` tokens over parts of the K/V that its block table names, those of this step
    included, to be merged. Sums in float32; nothing is read on the host.

    Slots at or past a row's `seq_len`, or before its start, are never read. A query that sees nothing gets zeros.

    Args:
        query (`torch.Tensor` of shape `(T, heads, head_dim)`): All rows' queries, one row after the other.
        key_blocks, value_blocks (`torch.Tensor` of shape `(num_blocks, kv_heads, block_size, dim)`)
        step ([`StepMetadata`]): Whose longest row chooses the tiles' size.
        scale (`float`): Positive.
        softcap, sinks: As in `AttentionCall`.
        alibi_slopes (`torch.Tensor` of shape `(heads,)`, *optional*):
            Adds `slope * (key position - query position)` to the scores (ALiBi, arXiv 2108.12409, sec. 3).
        bias (`torch.Tensor` that broadcasts to `(T, heads, max seq_len)`, *optional*): Added to the scores.
        tree_mask (`torch.Tensor` of shape `(T, >= max query_len)`, bool, *optional*):
            Which of its row's queries' tokens each query sees, itself included: a speculated tree with every token's
            ancestors (SpecInfer, arXiv 2305.09781, sec. 4.2). Its position is then that of the last ancestor's child,
            and a window, no shorter than the tree is deep, counts from there.
        query_index (`torch.Tensor` of shape `(T,)`, int32, *optional*): Query `i` is `query[query_index[i]]`.
        num_splits (`int`, *optional*): Parts that each row's keys are cut into; chosen by the size of the chip if
            not given.
        config (`PrefillConfig`, *optional*): Instead of the one for this chip.
        is_whole, return_lse (`bool`): Whether one part is the result, and then whether its `lse` is wanted.

    Returns:
        `torch.Tensor` of shape `(splits, T, heads, value_dim)`, float32, a whole in the query's dtype, and the
        logarithms of the sums of exponentials, `(splits, T, heads)`, float32, natural, the sink included, `-inf` for
        what sees nothing.
    """
    kv_heads, block_size, key_dim = key_blocks.shape[1:]
    heads, value_dim, group = query.shape[1], value_blocks.shape[3], query.shape[1] // kv_heads
    rows = group * max((end - start for start, end in itertools.pairwise(step.query_start)), default=0)
    has_mask = bias is not None or tree_mask is not None
    config = config or prefill_config(key_dim, value_dim, query.dtype, rows, has_mask, query.device)
    tiles = triton.cdiv(step.num_tokens * group, config.block_m) + step.num_rows
    if num_splits is None:  # so that programs cover the chip about once
        programs, longest = max(1, tiles * kv_heads), step.block_tables.shape[1] * block_size
        num_splits = max(1, min(num_multiprocessors(query.device) // programs, longest // MIN_SPLIT))
    shape = (num_splits, step.num_tokens, heads, value_dim)
    parts = query.new_empty(shape, dtype=query.dtype if is_whole and num_splits == 1 else torch.float32)
    needs_lse = return_lse or not is_whole or num_splits > 1
    lse = query.new_empty(shape[:3], dtype=torch.float32) if needs_lse else None
    if not parts.numel():
        return parts, lse
    seq_lens, starts, query_start = step.on_device
    assert query_start is not None
    query = query if query.stride(2) == 1 else query.contiguous()
    tree_mask = tree_mask if step.causal else None
    bias_strides = (0, 0, 0) if bias is None else bias.expand(step.num_tokens, heads, bias.shape[-1]).stride()
    key_main, key_rest = split_dim(key_dim)
    with device_guard(query):
        prefill_kernel[(tiles, kv_heads, num_splits)](
            query, key_blocks, value_blocks, parts, lse, query_start, seq_lens,
            starts if any(step.starts) else None, step.block_tables, query_index, sinks, alibi_slopes, bias,
            tree_mask, step.num_rows, step.window if step.causal else None, scale, softcap,
            *query.stride()[:2], *key_blocks.stride()[:3], *value_blocks.stride()[:3],
            *parts.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]), step.block_tables.stride(0),
            0 if tree_mask is None else tree_mask.stride(0), *bias_strides,
            GROUP=group, KEY_DIM=key_dim, VALUE_DIM=value_dim, KEY_MAIN=key_main, KEY_REST=key_rest,
            VALUE_WIDTH=max(16, triton.next_power_of_2(value_dim)), BLOCK_SIZE=block_size,
            CAUSAL=step.causal, SPLIT=num_splits > 1, BLOCK_M=config.block_m, TILE=config.tile,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return parts, lse


def prefill_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    step: StepMetadata,
    *,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """
    `prefill_parts`, merged: `torch.Tensor` of shape `(T, heads, value_dim)`, in the query's dtype; with `return_lse`
    also one of shape `(T, heads)`, float32.
    """
    options.update(is_whole=True, return_lse=return_lse)
    parts, lse = prefill_parts(query, key_blocks, value_blocks, step, **options)
    if len(parts) == 1:
        return parts[0] if lse is None else (parts[0], lse[0])
    assert lse is not None
    out, out_lse = query.new_empty(parts.shape[1:]), torch.empty_like(lse[0]) if return_lse else None
    merge(parts, lse, out, out_lse=out_lse)
    return (out, out_lse) if return_lse else out
