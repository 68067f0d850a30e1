"""Triton attention of many queries a row over paged K/V: prompts, chunks, speculated trees and shared prefixes.

The packed queries of all rows are cut into tiles of `BLOCK_M`, the query heads of a K/V head side by side in them, so
that chunks of a few tokens fill a tile too. The grid has room for the most tiles that these tokens can need; which
row a tile belongs to, its program reads from `cu_query_lens` on the device, so that no step waits for lengths. Tiles of
keys that every query of a tile sees go without masks (FlashAttention-2, arXiv 2307.08691, sec. 3.1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .common import DTYPES, device_guard, num_multiprocessors, split_dim
from .merge import merge
from .prefill_configs import PrefillConfig, prefill_config
from .prefill_kernel import prefill_kernel

MAX_DIM = 576
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
MIN_SPLIT = 512
"""Keys that a split of a row's keys has at least: fewer cost more to merge than they gain."""


def supports(
    query: Tensor, key_blocks: Tensor, value_blocks: Tensor, scale: float, sinks: Tensor | None = None
) -> str | None:
    """What keeps `prefill_attention` from taking these arguments, in words; `None` if nothing does."""
    tensors = [tensor for tensor in (query, key_blocks, value_blocks, sinks) if tensor is not None]
    if any(tensor.dtype not in DTYPES for tensor in tensors):
        return f"dtypes {sorted({str(tensor.dtype) for tensor in tensors})}: the kernels know {DTYPES}"
    if any(torch.promote_types(query.dtype, blocks.dtype) != query.dtype for blocks in (key_blocks, value_blocks)):
        return f"blocks of a wider dtype than the queries' {query.dtype}"
    if any(tensor.device != query.device for tensor in tensors):
        return f"tensors on other devices than the query's {query.device}"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "a gradient is wanted: the kernels compute none"
    if max(key_blocks.shape[3], value_blocks.shape[3]) > MAX_DIM or value_blocks.shape[3] > 512:
        return f"head dims {key_blocks.shape[3]} and {value_blocks.shape[3]}: at most {MAX_DIM} and 512"
    if key_blocks.shape[2] not in BLOCK_SIZES:
        return f"block size {key_blocks.shape[2]}: a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}"
    if key_blocks.shape[1] != value_blocks.shape[1] or query.shape[1] % key_blocks.shape[1]:
        return f"{query.shape[1]} query heads over {key_blocks.shape[1]} K and {value_blocks.shape[1]} V heads"
    if key_blocks.stride(3) != 1 or value_blocks.stride(3) != 1:
        return "blocks whose head dimension is not contiguous"
    if scale <= 0:
        return f"a scale of {scale}: it must be positive"
    return None


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
        num_queries: int,
        num_rows: int,
        max_query_len: int,
        has_mask: bool = False,
        config: PrefillConfig | None = None,
    ) -> Launch:
        """For `num_queries` queries of `num_rows` rows; arguments else as in `prefill_attention`."""
        kv_heads, key_dim = key_blocks.shape[1], key_blocks.shape[3]
        group = query.shape[1] // kv_heads
        value_dim, rows = value_blocks.shape[3], max_query_len * group
        config = config or prefill_config(key_dim, value_dim, query.dtype, rows, has_mask, query.device)
        tiles = triton.cdiv(num_queries * group, config.block_m) + num_rows
        return cls((tiles, kv_heads), group, split_dim(key_dim), config)

    def num_splits(self, longest: int, device: torch.device) -> int:
        """Parts to cut each row's keys into so that programs cover the chip about once; rows hold `longest` at most."""
        programs = max(1, self.grid[0] * self.grid[1])
        return max(1, min(num_multiprocessors(device) // programs, longest // MIN_SPLIT))

    def run(
        self,
        query: Tensor,
        key_blocks: Tensor,
        value_blocks: Tensor,
        partials: Tensor,
        lse: Tensor | None,
        cu_query_lens: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        *,
        scale: float,
        causal: bool,
        starts: Tensor | None = None,
        window: int | None = None,
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
        value_dim = value_blocks.shape[3]
        query = query if query.stride(2) == 1 else query.contiguous()
        bias_strides = (0, 0, 0)
        if bias is not None:
            bias_strides = bias.expand(partials.shape[1], partials.shape[2], bias.shape[-1]).stride()
        with device_guard(query):
            prefill_kernel[(*self.grid, partials.shape[0])](
                query, key_blocks, value_blocks, partials, lse, cu_query_lens, seq_lens, starts, block_tables,
                query_index, sinks, alibi_slopes, bias, tree_mask, cu_query_lens.shape[0] - 1, window, scale, softcap,
                *query.stride()[:2], *key_blocks.stride()[:3], *value_blocks.stride()[:3],
                *partials.stride()[:3], *((0, 0) if lse is None else lse.stride()[:2]), block_tables.stride(0),
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
    *,
    cu_query_lens: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    max_query_len: int,
    scale: float,
    starts: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
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
    included, for the arguments that `supports` has nothing against. Sums in float32; nothing is read on the host.

    Positions are table coordinates; slots at or past a row's `seq_len`, or before its start, are never read. A query
    that sees nothing returns zeros.

    Args:
        query (`torch.Tensor` of shape `(num_tokens, heads, head_dim)`): All rows' queries, one row after the other.
        key_blocks, value_blocks (`torch.Tensor` of shape `(num_blocks, kv_heads, block_size, dim)`)
        cu_query_lens (`torch.Tensor` of shape `(rows + 1,)`, int32): Row `i` has queries `[i]` to `[i + 1]`.
        seq_lens (`torch.Tensor` of shape `(rows,)`, int32): Tokens of each row, its queries' own included if `causal`.
        block_tables (`torch.Tensor` of shape `(rows, max_blocks)`, int32): What is past a row's last block is not read.
        max_query_len (`int`): No row has more queries; chooses the tiles' size only.
        starts (`torch.Tensor` of shape `(rows,)`, int32, *optional*): First position that each row may see.
        causal (`bool`): Whether a query sees keys up to its own position only, else all of its row.
        window (`int`, *optional*): With `causal`, a query at position `p` sees keys in `(p - window, p]`.
        softcap, sinks: As in `reference.paged_attention`.
        alibi_slopes (`torch.Tensor` of shape `(heads,)`, *optional*):
            Adds `slope * (key position - query position)` to the scores (ALiBi, arXiv 2108.12409, sec. 3).
        bias (`torch.Tensor` that broadcasts to `(num_tokens, heads, max seq_len)`, *optional*): Added to the scores.
        tree_mask (`torch.Tensor` of shape `(num_tokens, >= max_query_len)`, bool, *optional*):
            Which of its row's queries' tokens each query sees, itself included: a speculated tree with every token's
            ancestors (SpecInfer, arXiv 2305.09781, sec. 4.2). Its position is then that of the last ancestor's child,
            and a window, no shorter than the tree is deep, counts from there.
        num_splits (`int`, *optional*): Parts that each row's keys are cut into; chosen by the size of the chip if
            not given.
        return_lse (`bool`): Also the logarithm of each query's sum of exponentials.
        config (`PrefillConfig`, *optional*): Instead of the one for this chip.

    Returns:
        `torch.Tensor` of shape `(num_tokens, heads, value_dim)`, in the query's dtype; with `return_lse` also one of
        shape `(num_tokens, heads)`, float32, natural logarithm, the sink included, `-inf` for what sees nothing.
    """
    has_mask = bias is not None or tree_mask is not None
    sizes = (query.shape[0], block_tables.shape[0], max_query_len)
    launch = Launch.choose(query, key_blocks, value_blocks, *sizes, has_mask, config)
    if num_splits is None:
        num_splits = launch.num_splits(block_tables.shape[1] * key_blocks.shape[2], query.device)
    shape = (num_splits, *query.shape[:2], value_blocks.shape[3])
    partials = query.new_empty(shape, dtype=query.dtype if num_splits == 1 else torch.float32)
    lse = query.new_empty(shape[:3], dtype=torch.float32) if return_lse or num_splits > 1 else None
    launch.run(
        query, key_blocks, value_blocks, partials, lse, cu_query_lens, seq_lens, block_tables,
        scale=scale, causal=causal, starts=starts, window=window if causal else None, softcap=softcap, sinks=sinks,
        alibi_slopes=alibi_slopes, bias=bias, tree_mask=tree_mask if causal else None,
    )  # fmt: skip
    if num_splits == 1:
        return (partials[0], lse[0]) if lse is not None else partials[0]
    assert lse is not None
    out = query.new_empty(shape[1:])
    out_lse = torch.empty_like(lse[0]) if return_lse else None
    merge(partials, lse, out, out_lse=out_lse)
    return (out, out_lse) if return_lse else out
