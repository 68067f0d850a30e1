"""Triton attention of many queries a row over paged K/V: prompts, chunks, speculated trees and shared prefixes.

The packed queries of all rows are cut into tiles of `BLOCK_M`, the query heads of a K/V head side by side in them, so
that chunks of a few tokens fill a tile too. The grid has room for the most tiles that these tokens can need; which
row a tile belongs to, its program reads from `cu_query_lens` on the device, so that no step waits for lengths. Tiles of
keys that every query of a tile sees go without masks (FlashAttention-2, arXiv 2307.08691, sec. 3.1).
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...step import StepMetadata
from .common import device_guard, num_multiprocessors, split_dim
from .merge import merge
from .prefill_configs import PrefillConfig, prefill_config
from .prefill_kernel import prefill_kernel

MIN_SPLIT = 512
"""Keys that a split of a row's keys has at least: fewer cost more to merge than they gain."""


class Launch(NamedTuple):
    """What a launch needs besides its tensors."""

    grid: tuple[int, int]
    group: int
    key_tiles: tuple[int, int]
    config: PrefillConfig

    @classmethod
    def choose(
        cls,
        query: Tensor,
        key_blocks: Tensor,
        value_blocks: Tensor,
        step: StepMetadata,
        has_mask: bool = False,
        config: PrefillConfig | None = None,
    ) -> Launch:
        """Arguments as in `prefill_attention`; the longest row's queries choose the tiles' size."""
        kv_heads, key_dim = key_blocks.shape[1], key_blocks.shape[3]
        group = query.shape[1] // kv_heads
        value_dim = value_blocks.shape[3]
        rows = group * max((end - start for start, end in itertools.pairwise(step.query_start)), default=0)
        config = config or prefill_config(key_dim, value_dim, query.dtype, rows, has_mask, query.device)
        tiles = triton.cdiv(step.num_tokens * group, config.block_m) + step.num_rows
        return cls((tiles, kv_heads), group, split_dim(key_dim), config)

    def num_splits(self, step: StepMetadata) -> int:
        """Parts to cut each row's keys into so that programs cover the chip about once."""
        programs, longest = max(1, self.grid[0] * self.grid[1]), step.block_tables.shape[1] * step.block_size
        return max(1, min(num_multiprocessors(step.block_tables.device) // programs, longest // MIN_SPLIT))

    def run(
        self,
        query: Tensor,
        key_blocks: Tensor,
        value_blocks: Tensor,
        partials: Tensor,
        lse: Tensor | None,
        step: StepMetadata,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        bias: Tensor | None = None,
        tree_mask: Tensor | None = None,
        query_index: Tensor | None = None,
    ) -> None:
        """
        Fills `partials` `(splits, num_queries, heads, value_dim)` and `lse` `(splits, num_queries, heads)`. Packed
        query `i` is `query[query_index[i]]`, or `query[i]` without an index.
        """
        if not partials.numel():
            return
        value_dim, causal = value_blocks.shape[3], step.causal
        seq_lens, starts, query_start = step.on_device
        assert query_start is not None
        tree_mask = tree_mask if causal else None
        query = query if query.stride(2) == 1 else query.contiguous()
        bias_strides = (0, 0, 0)
        if bias is not None:
            bias_strides = bias.expand(partials.shape[1], partials.shape[2], bias.shape[-1]).stride()
        with device_guard(query):
            prefill_kernel[(*self.grid, partials.shape[0])](
                query, key_blocks, value_blocks, partials, lse, query_start, seq_lens,
                starts if any(step.starts) else None, step.block_tables, query_index, sinks, alibi_slopes, bias,
                tree_mask, step.num_rows, step.window if causal else None, scale, softcap,
                *query.stride()[:2], *key_blocks.stride()[:3], *value_blocks.stride()[:3],
                *partials.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]), step.block_tables.stride(0),
                0 if tree_mask is None else tree_mask.stride(0), *bias_strides,
                GROUP=self.group, KEY_DIM=key_blocks.shape[3], VALUE_DIM=value_dim,
                KEY_MAIN=self.key_tiles[0], KEY_REST=self.key_tiles[1],
                VALUE_WIDTH=max(16, triton.next_power_of_2(value_dim)), BLOCK_SIZE=key_blocks.shape[2],
                CAUSAL=causal, SPLIT=partials.shape[0] > 1, BLOCK_M=self.config.block_m, TILE=self.config.tile,
                num_warps=self.config.num_warps, num_stages=self.config.num_stages,
            )  # fmt: skip


def prefill_attention(
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
    num_splits: int | None = None,
    return_lse: bool = False,
    config: PrefillConfig | None = None,
) -> Any:
    """
    Attention of each row's last `query_len` tokens over the K/V that its block table names, those of this step
    included. Sums in float32; nothing is read on the host.

    Slots at or past a row's `seq_len`, or before its start, are never read. A query that sees nothing returns zeros.

    Args:
        query (`torch.Tensor` of shape `(T, heads, head_dim)`): All rows' queries, one row after the other.
        key_blocks, value_blocks (`torch.Tensor` of shape `(num_blocks, kv_heads, block_size, dim)`)
        step ([`StepMetadata`]): Whose lengths the host knows.
        scale (`float`): Positive.
        softcap, sinks: As in `AttentionCall`.
        alibi_slopes (`torch.Tensor` of shape `(heads,)`, *optional*):
            Adds `slope * (key position - query position)` to the scores (ALiBi, arXiv 2108.12409, sec. 3).
        bias (`torch.Tensor` that broadcasts to `(T, heads, max seq_len)`, *optional*): Added to the scores.
        tree_mask (`torch.Tensor` of shape `(T, >= max query_len)`, bool, *optional*):
            Which of its row's queries' tokens each query sees, itself included: a speculated tree with every token's
            ancestors (SpecInfer, arXiv 2305.09781, sec. 4.2). Its position is then that of the last ancestor's child,
            and a window, no shorter than the tree is deep, counts from there.
        num_splits (`int`, *optional*): Parts that each row's keys are cut into; chosen by the size of the chip if
            not given.
        return_lse (`bool`): Also the logarithm of each query's sum of exponentials.
        config (`PrefillConfig`, *optional*): Instead of the one for this chip.

    Returns:
        `torch.Tensor` of shape `(T, heads, value_dim)`, in the query's dtype; with `return_lse` also one of shape
        `(T, heads)`, float32, natural logarithm, the sink included, `-inf` for what sees nothing.
    """
    launch = Launch.choose(query, key_blocks, value_blocks, step, bias is not None or tree_mask is not None, config)
    if num_splits is None:
        num_splits = launch.num_splits(step)
    shape = (num_splits, *query.shape[:2], value_blocks.shape[3])
    partials = query.new_empty(shape, dtype=query.dtype if num_splits == 1 else torch.float32)
    lse = query.new_empty(shape[:3], dtype=torch.float32) if return_lse or num_splits > 1 else None
    launch.run(
        query, key_blocks, value_blocks, partials, lse, step,
        scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, bias=bias, tree_mask=tree_mask,
    )  # fmt: skip
    if num_splits == 1:
        return (partials[0], lse[0]) if lse is not None else partials[0]
    assert lse is not None
    out = query.new_empty(shape[1:])
    out_lse = torch.empty_like(lse[0]) if return_lse else None
    merge(partials, lse, out, out_lse=out_lse)
    return (out, out_lse) if return_lse else out
