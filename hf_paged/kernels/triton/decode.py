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
from .common import DTYPES, device_guard, dot_dtype, num_multiprocessors, split_dim
from .decode_kernel import combine_kernel, decode_kernel

MAX_QUERIES = 16
"""Queries of a row up to which they are packed beside the heads of a group."""

MIN_SPLIT = 256
"""Tokens that a split has at least, but for the last of a row: shorter ones cost more to merge than they gain."""

MAX_BATCH = 8192
"""Rows of a call; each program reads all their lengths."""

MAX_DIM = 576
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


def supports(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: StepMetadata,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> str | None:
    """What keeps `paged_attention` from taking these arguments, in words; `None` if nothing does."""
    tensors = [tensor for tensor in (query, key_blocks, value_blocks, sinks, bias) if tensor is not None]
    if any(tensor.dtype not in DTYPES for tensor in tensors):
        return f"dtypes {sorted({str(tensor.dtype) for tensor in tensors})}: the kernels know {DTYPES}"
    if any(tensor.device != query.device for tensor in (*tensors, metadata.block_tables, metadata.seq_lens)):
        return f"tensors on other devices than the query's {query.device}"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "a gradient is wanted: the kernels compute none"
    if max(key_blocks.shape[3], value_blocks.shape[3]) > MAX_DIM:
        return f"head dims {key_blocks.shape[3]} and {value_blocks.shape[3]}: at most {MAX_DIM}"
    size = metadata.block_size
    if size not in BLOCK_SIZES:
        return f"block size {size}: a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}"
    if key_blocks.shape[1] != value_blocks.shape[1] or query.shape[1] % key_blocks.shape[1]:
        return f"{query.shape[1]} query heads over {key_blocks.shape[1]} K and {value_blocks.shape[1]} V heads"
    if key_blocks.stride(3) != 1 or value_blocks.stride(3) != 1:
        return "blocks whose head dimension is not contiguous"
    if metadata.query_len > MAX_QUERIES:
        return f"{metadata.query_len} queries a row: at most {MAX_QUERIES}"
    if query.shape[0] > MAX_BATCH:
        return f"{query.shape[0]} rows: at most {MAX_BATCH}"
    return None


def paged_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: StepMetadata,
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
    `reference.paged_attention` for the arguments that `supports` has nothing against. Sums in float32.

    Of `metadata` it uses the device tensors and the static sizes only: the same launch is right for other lengths, as
    in a captured graph, up to `block_tables.shape[1] * block_size` tokens. Rows with `seq_lens` 0 give zeros.

    Args:
        alibi_slopes (`torch.Tensor` of shape `(heads,)`, *optional*):
            Adds `slope * (key position - query position)` to the scores (ALiBi, arXiv 2108.12409, sec. 3).
        return_lse (`bool`): Also the logarithm of each query's sum of exponentials, to merge results over disjoint
            keys.
        config (`DecodeConfig`, *optional*): Instead of the one for this chip.

    Returns:
        `torch.Tensor` of shape `(batch, query_len, heads, value_dim)`, contiguous, in the query's dtype; with
        `return_lse` also one of shape `(batch, query_len, heads)`, float32, natural logarithm, the sink's logit
        included, `-inf` for queries that see nothing.

    Raises:
        IndexError: if the bias is shorter than the longest row, where the host knows the lengths.
    """
    batch, heads, query_len, key_dim = query.shape
    _, kv_heads, block_size, value_dim = value_blocks.shape
    out = query.new_empty(batch, query_len, heads, value_dim)
    lse = query.new_empty(batch, query_len, heads, dtype=torch.float32) if return_lse else None
    if out.numel() == 0:
        return (out, lse) if return_lse else out
    query = query if query.stride(3) == 1 else query.contiguous()
    rows = heads // kv_heads * query_len
    config = config or configs.decode_config(key_dim, value_dim, key_blocks.dtype, rows, query.device)
    block_m = min(config.block_m, max(16, triton.next_power_of_2(rows)))
    programs = kv_heads * triton.cdiv(rows, block_m)
    plan = _Plan.make(metadata, programs, config, query.device)
    if plan.split:
        inner = query_len * heads
        part_out = query.new_empty(plan.items, inner, value_dim, dtype=torch.float32)
        part_lse = query.new_empty(plan.items, inner, dtype=torch.float32)
        row_items = metadata.seq_lens.new_empty(batch, 2, dtype=torch.int32)
    else:
        part_out = part_lse = row_items = None
    key_tiles, value_tiles = split_dim(key_dim), split_dim(value_dim, smallest=32)  # 16 columns feed 2 of 4 warps
    with device_guard(query):
        decode_kernel[(programs, plan.items)](
            query, key_blocks, value_blocks, out, lse, part_out, part_lse, row_items,
            metadata.block_tables, metadata.seq_lens, metadata.starts, sinks, alibi_slopes, bias,
            batch, plan.target, _window(metadata), scale, softcap, metadata.block_tables.stride(0),
            *query.stride()[:3], *key_blocks.stride()[:3], *value_blocks.stride()[:3],
            *_bias_arguments(bias, batch, heads, metadata),
            HEADS=heads, GROUP=heads // kv_heads, QUERY_LEN=query_len, KEY_DIM=key_dim, VALUE_DIM=value_dim,
            BLOCK_SIZE=block_size, CAUSAL=metadata.causal, SPLIT=plan.split,
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
    def make(cls, metadata: StepMetadata, programs: int, config: configs.DecodeConfig, device: torch.device) -> _Plan:
        batch, width = metadata.block_tables.shape
        longest = width * metadata.block_size
        if (window := _window(metadata)) is not None:
            longest = min(longest, window + metadata.query_len + config.tile)
        target = num_multiprocessors(device) * config.programs_per_sm
        if longest <= MIN_SPLIT or programs >= target:
            return cls(False, batch, target, 1)
        # Splits of a row: at most one more than its share of the programs; see `_find_item`.
        items = min(batch + target // programs, batch * triton.cdiv(longest, MIN_SPLIT))
        return cls(True, items, target, next(size for size in (32, 256, 2048, MAX_BATCH) if size >= batch))


def _window(metadata: StepMetadata) -> int | None:
    return metadata.window if metadata.causal else None


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


def _bias_arguments(bias: Tensor | None, batch: int, heads: int, metadata: StepMetadata) -> tuple[int, ...]:
    """Strides of the bias over `(batch, heads, query_len, keys)`, 0 where it is broadcast, and its keys."""
    if bias is None:
        return 0, 0, 0, 0, 0
    keys = bias.shape[-1] if bias.shape[-1] > 1 else metadata.block_tables.shape[1] * metadata.block_size
    if keys < max(metadata.seq_lens_host, default=0):
        raise IndexError(f"the bias covers {keys} positions, seq_lens are {metadata.seq_lens_host}")
    return *bias.expand(batch, heads, metadata.query_len, keys).stride(), keys
