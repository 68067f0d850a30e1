"""Triton attention over paged K/V: one kernel with two grids that do not depend on lengths, so that
a captured graph stays valid as rows grow. Decodes: tiles of query rows by splits of rows, balanced
on the device (Flash-Decoding, Dao et al. 2023; FlashInfer, arXiv 2501.01005, section 3.3). Prompts,
chunks and shared prefixes: tiles of the packed queries of all rows, with the query heads of a K/V
head side by side (FlashAttention-2, arXiv 2307.08691, section 3.1)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
from torch import Tensor

from ...step import Cascade, StepMetadata
from .. import quantized
from . import MAX_BATCH
from .attention_kernel import attention_kernel
from .configs import (
    LaunchConfig,
    as_uint8,
    chip,
    dot_dtype,
    find_config,
    num_multiprocessors,
    reads_shared,
    split_dim,
    strides,
)
from .launch import launch
from .merge import merge

MIN_DECODE_SPLIT, MIN_PREFILL_SPLIT = 256, 512
"""Least tokens per split of a row, except its last: merging smaller splits costs more than they
save."""


def decode_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    step: StepMetadata,
    *,
    bias: Tensor | None = None,
    return_lse: bool = False,
    config: LaunchConfig | None = None,
    **features: Any,
) -> Any:
    """Computes attention of `query_len` queries per row, at most `MAX_QUERIES`. Arguments and
    result are those of `prefill_attention`; `bias`, added to the scores, broadcasts to `(rows,
    heads, query_len, max seq_len)`. Raises `IndexError` if it is shorter than the longest row. With
    `return_lse`, also returns the log-sum-exp of the scores, `(T, heads)` float32, including the
    sink."""
    num_tokens, heads, key_dim = query.shape
    _, kv_heads, block_size, value_dim = value_blocks.shape
    num_rows, query_len = step.num_rows, step.query_len
    assert query_len is not None
    out = query.new_empty(num_tokens, heads, value_dim)
    lse = query.new_empty(num_tokens, heads, dtype=torch.float32) if return_lse else None
    if out.numel() == 0:
        return (out, lse) if return_lse else out
    rows = heads // kv_heads * query_len
    stored = query.dtype if quantized.is_quantized(key_blocks) else key_blocks.dtype
    # 16 columns feed 2 of 4 warps
    value_tiles = split_dim(value_dim, smallest=32)
    key_tiles = split_dim(key_dim)
    # If values are the first elements of the keys, like latents, one load gets both.
    keys, values = (
        (x.data_ptr(), x.storage_offset(), x.stride(), x.dtype) for x in (key_blocks, value_blocks)
    )
    fits = (
        key_dim >= value_dim
        and value_tiles[0] == key_tiles[0]
        and value_tiles[1] in (0, key_tiles[1])
    )
    value_is_key = keys == values and fits
    config = config or find_config(
        "decode", key_dim, value_dim, stored, rows, query.device, value_is_key
    )
    block_m = min(config.block_m, max(16, triton.next_power_of_2(rows)))
    programs = kv_heads * triton.cdiv(rows, block_m)
    target = num_multiprocessors(query.device) * config.programs_per_sm
    longest = step.block_tables.shape[1] * block_size
    if step.causal and step.window is not None:
        longest = min(longest, step.window + query_len + config.tile)
    is_split = longest > MIN_DECODE_SPLIT and programs < target
    items = num_rows
    parts: dict[str, Any] = {}
    if is_split:
        # One more item per row than its share of programs. BLOCK_ROWS has few sizes, since each is
        # compiled separately.
        items = min(
            num_rows + target // programs, num_rows * triton.cdiv(longest, MIN_DECODE_SPLIT)
        )
        parts = dict(
            part_out=query.new_empty(items, query_len, heads, value_dim, dtype=torch.float32),
            part_lse=query.new_empty(items, query_len, heads, dtype=torch.float32),
            row_items=query.new_empty(num_rows, 2, dtype=torch.int32),
            BLOCK_ROWS=next(size for size in (32, 256, 2048, MAX_BATCH) if size >= num_rows),
        )
    _launch(
        (programs, items),
        query,
        key_blocks,
        value_blocks,
        step,
        out,
        lse,
        config,
        value_tiles,
        **features,
        **_bias_arguments(bias, heads, query_len, step),
        **parts,
        starts=step.on_device.starts,
        target=target,
        query_len=query_len,
        BY_LENGTH=True,
        ONE_QUERY=query_len == 1,
        SPLIT=is_split,
        MIN_SPLIT=MIN_DECODE_SPLIT,
        BLOCK_M=block_m,
        VALUE_IS_KEY=value_is_key,
    )
    if is_split:
        most = triton.cdiv(target, programs)
        merge(
            parts["part_out"],
            parts["part_lse"],
            out,
            out_lse=lse,
            row_items=parts["row_items"],
            max_parts=most,
        )
    return (out, lse) if return_lse else out


def prefill_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    step: StepMetadata,
    *,
    bias: Tensor | None = None,
    query_index: Tensor | None = None,
    num_splits: int | None = None,
    config: LaunchConfig | None = None,
    is_merged: bool = True,
    **features: Any,
) -> Any:
    """Computes attention of each row's last `query_len` tokens over the K/V in its block table,
    including those of this step. Slots outside of a row's start and `seq_len` are never read. A
    query that sees no keys gets zeros.

    Args:
        query: `(T, heads, head_dim)`, row after row; the blocks: `(num_blocks, kv_heads,
            block_size, dim)`.
        features: `scale`, `softcap`, `sinks` as in `AttentionCall`.
        bias: Added to the scores; broadcasts to `(rows, heads, 1, max seq_len)`, shared by all
            queries of a row.
        query_index: `(T,)` int32: query `i` is `query[query_index[i]]`.
        num_splits: Parts into which each row's keys are split; by default chosen by the size of the
            chip.
        is_merged: If False, returns the parts, `(splits, T, heads, value_dim)`, and the log-sum-exp
            of their scores, the first including the sink, `(splits, T, heads)`, both float32.

    Returns `(T, heads, value_dim)`, contiguous, in the query's dtype.
    """
    kv_heads, block_size, key_dim = key_blocks.shape[1:]
    heads = query.shape[1]
    value_dim = value_blocks.shape[3]
    group = query.shape[1] // kv_heads
    rows = group * step.max_query_len
    if config is None:
        config = find_config("prefill", key_dim, value_dim, query.dtype, rows, query.device)
        # A bias is loaded element by element, since its rows may have any alignment; codes are
        # converted in registers, from which the tensor cores of such chips read. In both cases
        # large tiles would spill.
        converts = quantized.is_quantized(key_blocks) and not reads_shared(chip(query.device))
        if bias is not None or converts:
            most = 2048 // triton.next_power_of_2(key_dim)
            config = dataclasses.replace(config, tile=max(16, min(config.tile // 2, most)))
    tiles = triton.cdiv(step.num_tokens * group, config.block_m) + step.num_rows
    if num_splits is None:  # so that programs fill the chip about once
        programs = max(1, tiles * kv_heads)
        longest = step.block_tables.shape[1] * block_size
        num_splits = max(
            1, min(num_multiprocessors(query.device) // programs, longest // MIN_PREFILL_SPLIT)
        )
    is_whole = is_merged and num_splits == 1
    shape = (num_splits, step.num_tokens, heads, value_dim)
    parts = query.new_empty(shape, dtype=query.dtype if is_whole else torch.float32)
    lse = None if is_whole else query.new_empty(shape[:3], dtype=torch.float32)
    if parts.numel():
        _, starts, query_start, _ = step.on_device
        _launch(
            (tiles, kv_heads, num_splits),
            query,
            key_blocks,
            value_blocks,
            step,
            parts,
            lse,
            config,
            (max(16, triton.next_power_of_2(value_dim)), 0),
            **features,
            **_bias_arguments(bias, heads, None, step),
            starts=starts if any(step.starts) else None,
            query_start=query_start,
            query_index=query_index,
            SPLIT=num_splits > 1,
            BLOCK_M=config.block_m,
        )
    if not is_merged:
        return parts, lse
    if lse is None:
        return parts[0]
    out = query.new_empty(shape[1:])
    merge(parts, lse, out)
    return out


def cascade_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    cascade: Cascade,
    *,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
    **features: Any,
) -> Any:
    """Computes `decode_attention` of a step with one query per row, up to rounding: the results of
    the tails, which include the sinks, are rounded to the query's dtype before the merge."""
    tensors = (query, key_blocks, value_blocks)
    index = cascade.query_index
    out, lse = decode_attention(*tensors, cascade.tails, sinks=sinks, return_lse=True, **features)
    parts, parts_lse = prefill_attention(
        *tensors,
        cascade.prefixes,
        query_index=index,
        num_splits=num_splits,
        is_merged=False,
        **features,
    )
    merge(parts, parts_lse, out, tail_lse=lse, index=index)
    return out


def _launch(
    grid: tuple[int, ...],
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    step: StepMetadata,
    out: Tensor,
    lse: Tensor | None,
    config: LaunchConfig,
    value_tiles: tuple[int, int],
    **arguments: Any,
) -> None:
    heads, key_dim = query.shape[1:]
    kv_heads, block_size, value_dim = value_blocks.shape[1:]
    query = query if query.stride(2) == 1 else query.contiguous()
    key_tiles = split_dim(key_dim)
    is_plain = arguments.get("softcap") is None and arguments.get("bias") is None
    dtypes = [query.dtype]
    if quantized.is_quantized(key_blocks):
        scales = [quantized.scales(x) for x in (key_blocks, value_blocks)]
        arguments |= dict(
            zip(("key_scales", "value_scales"), scales), STORED=quantized.NUMBERS[key_blocks.dtype]
        )
        key_blocks, value_blocks = (as_uint8(x) for x in (key_blocks, value_blocks))
    else:
        dtypes += [key_blocks.dtype, value_blocks.dtype]
    written = out, lse, *(arguments.get(name) for name in ("part_out", "part_lse", "row_items"))
    launch(
        attention_kernel,
        grid,
        query,
        key_blocks,
        value_blocks,
        out,
        lse,
        step.on_device.seq_lens,
        step.block_tables,
        step.num_rows,
        step.num_tokens,
        step.window if step.causal else None,
        step.block_tables.stride(0),
        *strides(query)[:2],
        *key_blocks.stride()[:3],
        *value_blocks.stride()[:3],
        HEADS=heads,
        GROUP=heads // kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        CAUSAL=step.causal,
        FOLDED=arguments["scale"] > 0 and is_plain,
        SAME_STRIDES=key_blocks.stride() == value_blocks.stride(),
        DOT_DTYPE=dot_dtype(*dtypes),
        TILE=config.tile,
        KEY_MAIN=key_tiles[0],
        KEY_REST=key_tiles[1],
        VALUE_MAIN=value_tiles[0],
        VALUE_REST=value_tiles[1],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        writes=written,
        **arguments,
    )


def _bias_arguments(
    bias: Tensor | None, heads: int, query_len: int | None, step: StepMetadata
) -> dict[str, Any]:
    """Returns the kernel's arguments for a bias: its strides by row, packed token, head and key,
    and its number of keys."""
    if bias is None:
        return {}
    keys = bias.shape[-1] if bias.shape[-1] > 1 else step.block_tables.shape[1] * step.block_size
    if keys < max(step.seq_lens, default=0):
        raise IndexError(f"the bias covers {keys} positions, seq_lens are {step.seq_lens}")
    row, head, token, key = bias.expand(step.num_rows, heads, query_len or 1, keys).stride()
    token = 0 if query_len is None else token
    row -= (query_len or 0) * token
    return dict(
        bias=bias, bias_row=row, bias_token=token, bias_head=head, bias_key=key, bias_len=keys
    )
