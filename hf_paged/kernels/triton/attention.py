"""Triton attention over paged K/V: one kernel, launched over one of two grids. The sizes of the
grids do not depend on the rows' lengths, so that a captured graph stays valid as rows grow.

A query row is one query of one head. The grid of decodes is tiles of query rows by splits of each
row's keys; the device balances the splits (Flash-Decoding, Dao et al. 2023; FlashInfer, arXiv
2501.01005, section 3.3). The grid of prompts, chunks and shared prefixes is tiles of the packed
queries of all rows, with the query heads of a K/V head side by side (FlashAttention-2, arXiv
2307.08691, section 3.1)."""

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
    chip_name,
    dot_dtype,
    find_config,
    num_multiprocessors,
    reads_operands_from_shared_memory,
    split_dim,
    strides,
)
from .launch import launch
from .merge import merge

MIN_DECODE_SPLIT = 256
"""Minimum tokens per split of a row's keys in decodes, except a row's last split: merging smaller
splits would cost more time than they save."""

MIN_PREFILL_SPLIT = 512
"""The same in prefills, for splits of the longest block table."""


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
    """Computes attention of a step with the same `query_len` in every row, at most `MAX_QUERIES`.
    The arguments, result and errors are as in `prefill_attention`, except that `bias` broadcasts to
    `(rows, heads, query_len, >= max seq_len)`. With `return_lse`, also returns the log-sum-exp of
    the scores, `(T, heads)` float32, including the sink."""
    num_tokens, heads, key_dim = query.shape
    _, kv_heads, block_size, value_dim = value_blocks.shape
    num_rows, query_len = step.num_rows, step.query_len
    assert query_len is not None
    out = query.new_empty(num_tokens, heads, value_dim)
    lse = query.new_empty(num_tokens, heads, dtype=torch.float32) if return_lse else None
    if out.numel() == 0:
        return (out, lse) if return_lse else out
    num_query_rows = heads // kv_heads * query_len  # query rows that share a K/V head
    dtype = query.dtype if quantized.is_quantized(key_blocks) else key_blocks.dtype
    # at least 32: tiles of 16 columns would occupy only 2 of 4 warps
    value_tiles = split_dim(value_dim, min_size=32)
    key_tiles = split_dim(key_dim)
    # If the values are the first elements of the keys, as in latents, one load gets both.
    key_memory, value_memory = (
        (x.data_ptr(), x.storage_offset(), x.stride(), x.dtype) for x in (key_blocks, value_blocks)
    )
    tiles_match = (
        key_dim >= value_dim
        and value_tiles[0] == key_tiles[0]
        and value_tiles[1] in (0, key_tiles[1])
    )
    value_is_key = key_memory == value_memory and tiles_match
    config = config or find_config(
        "decode", key_dim, value_dim, dtype, num_query_rows, query.device, value_is_key
    )
    block_m = min(config.block_m, max(16, triton.next_power_of_2(num_query_rows)))
    programs_per_item = kv_heads * triton.cdiv(num_query_rows, block_m)
    target_programs = num_multiprocessors(query.device) * config.programs_per_sm
    max_keys = step.block_tables.shape[1] * block_size
    if step.causal and step.window is not None:
        max_keys = min(max_keys, step.window + query_len + config.tile)
    is_split = max_keys > MIN_DECODE_SPLIT and programs_per_item < target_programs
    num_items = num_rows  # an item is one split of one row
    split_arguments: dict[str, Any] = {}
    if is_split:
        # rounding up adds at most one split per row to the target
        num_items = min(
            num_rows + target_programs // programs_per_item,
            num_rows * triton.cdiv(max_keys, MIN_DECODE_SPLIT),
        )
        split_arguments = dict(
            part_out=query.new_empty(num_items, query_len, heads, value_dim, dtype=torch.float32),
            part_lse=query.new_empty(num_items, query_len, heads, dtype=torch.float32),
            row_items=query.new_empty(num_rows, 2, dtype=torch.int32),
            # few sizes, since each is compiled separately
            BLOCK_ROWS=next(size for size in (32, 256, 2048, MAX_BATCH) if size >= num_rows),
        )
    _launch(
        (programs_per_item, num_items),
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
        **split_arguments,
        starts=step.on_device.starts,
        target_programs=target_programs,
        query_len=query_len,
        BY_LENGTH=True,
        ONE_QUERY=query_len == 1,
        SPLIT=is_split,
        MIN_SPLIT=MIN_DECODE_SPLIT,
        BLOCK_M=block_m,
        VALUE_IS_KEY=value_is_key,
    )
    if is_split:
        merge(
            split_arguments["part_out"],
            split_arguments["part_lse"],
            out,
            out_lse=lse,
            row_items=split_arguments["row_items"],
            max_parts=triton.cdiv(target_programs, programs_per_item),
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
    """Computes attention of each row's queries, which belong to its last tokens, over the K/V in
    the row's block table, including those of this step. Never reads slots before a row's start or
    from its `seq_len` on. A query that sees no keys gets zeros.

    Args:
        query: `(T, heads, key_dim)`, the queries of all rows, row after row.
        key_blocks, value_blocks: `(num_blocks, kv_heads, block_size, dim)`.
        features: `scale`, `softcap`, `sinks` as in `AttentionCall`.
        bias: Added to the scores; broadcasts to `(rows, heads, 1, >= max seq_len)`, shared by all
            queries of a row.
        query_index: `(T,)` int32: query `i` is `query[query_index[i]]`.
        num_splits: The number of parts into which each row's keys are split; by default enough to
            fill the multiprocessors, but at most one per `MIN_PREFILL_SPLIT` tokens of the longest
            block table.
        is_merged: If False, returns the parts, `(splits, T, heads, value_dim)`, and the log-sum-exp
            of their scores, `(splits, T, heads)`, both float32. The first part includes the sink.

    Returns:
        `Tensor`: `(T, heads, value_dim)`, contiguous, in the query's dtype, if `is_merged`.

    Raises:
        IndexError: if `bias` has fewer keys than the longest row.
        LaunchFailedError: if the kernel cannot be launched.
    """
    kv_heads, block_size, key_dim = key_blocks.shape[1:]
    heads = query.shape[1]
    value_dim = value_blocks.shape[3]
    group = heads // kv_heads
    max_query_rows = group * step.max_query_len
    if config is None:
        config = find_config(
            "prefill", key_dim, value_dim, query.dtype, max_query_rows, query.device
        )
        # A bias is loaded element by element, since its rows may have any alignment. Codes are
        # converted in registers, where the tensor cores of most chips then read them. In both cases
        # large tiles would spill registers.
        is_converted = quantized.is_quantized(key_blocks) and not reads_operands_from_shared_memory(
            chip_name(query.device)
        )
        if bias is not None or is_converted:
            max_tile = 2048 // triton.next_power_of_2(key_dim)
            config = dataclasses.replace(config, tile=max(16, min(config.tile // 2, max_tile)))
    # the kernel's `find_row` may leave one tile per row unused
    num_tiles = triton.cdiv(step.num_tokens * group, config.block_m) + step.num_rows
    if num_splits is None:
        num_programs = max(1, num_tiles * kv_heads)
        max_keys = step.block_tables.shape[1] * block_size
        num_splits = max(
            1, min(num_multiprocessors(query.device) // num_programs, max_keys // MIN_PREFILL_SPLIT)
        )
    is_final = is_merged and num_splits == 1
    shape = (num_splits, step.num_tokens, heads, value_dim)
    parts = query.new_empty(shape, dtype=query.dtype if is_final else torch.float32)
    lse = None if is_final else query.new_empty(shape[:3], dtype=torch.float32)
    if parts.numel():
        _, starts, query_start, _ = step.on_device
        _launch(
            (num_tiles, kv_heads, num_splits),
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
    """Computes the `decode_attention` of a step with one query per row, given as a cascade: attends
    to the rows' tails, then to the prefixes that rows share, and merges both. The result differs
    from that of `decode_attention` in rounding: the tails' results, which include the sinks, are
    rounded to the query's dtype before the merge."""
    tensors = (query, key_blocks, value_blocks)
    query_index = cascade.query_index
    out, lse = decode_attention(*tensors, cascade.tails, sinks=sinks, return_lse=True, **features)
    parts, parts_lse = prefill_attention(
        *tensors,
        cascade.prefixes,
        query_index=query_index,
        num_splits=num_splits,
        is_merged=False,
        **features,
    )
    merge(parts, parts_lse, out, tail_lse=lse, index=query_index)
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
    """Launches `attention_kernel`. `value_tiles`: its `VALUE_MAIN` and `VALUE_REST`; `arguments`:
    the other arguments that the step, the tensors and `config` do not determine."""
    heads, key_dim = query.shape[1:]
    kv_heads, block_size, value_dim = value_blocks.shape[1:]
    query = query if query.stride(2) == 1 else query.contiguous()
    key_tiles = split_dim(key_dim)
    changes_scores = arguments.get("softcap") is not None or arguments.get("bias") is not None
    dtypes = [query.dtype]
    if quantized.is_quantized(key_blocks):
        scales = [quantized.scales(x) for x in (key_blocks, value_blocks)]
        arguments |= dict(
            zip(("key_scales", "value_scales"), scales),
            CODE_DTYPE=quantized.DTYPE_NUMBERS[key_blocks.dtype],
        )
        key_blocks, value_blocks = (as_uint8(x) for x in (key_blocks, value_blocks))
    else:
        dtypes += [key_blocks.dtype, value_blocks.dtype]
    outputs = out, lse, *(arguments.get(name) for name in ("part_out", "part_lse", "row_items"))
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
        FOLDED=arguments["scale"] > 0 and not changes_scores,
        SAME_STRIDES=key_blocks.stride() == value_blocks.stride(),
        DOT_DTYPE=dot_dtype(*dtypes),
        TILE=config.tile,
        KEY_MAIN=key_tiles[0],
        KEY_REST=key_tiles[1],
        VALUE_MAIN=value_tiles[0],
        VALUE_REST=value_tiles[1],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        writes=outputs,
        **arguments,
    )


def _bias_arguments(
    bias: Tensor | None, heads: int, query_len: int | None, step: StepMetadata
) -> dict[str, Any]:
    """Returns the kernel's arguments for a bias: the tensor, its strides along rows, packed tokens,
    heads and keys, and its number of keys; no arguments without a bias. Without `query_len`, all
    queries of a row share one bias. Raises `IndexError` if the bias has fewer keys than the longest
    row."""
    if bias is None:
        return {}
    num_keys = bias.shape[-1]
    if num_keys <= 1:
        num_keys = step.block_tables.shape[1] * step.block_size
    if num_keys < max(step.seq_lens, default=0):
        raise IndexError(f"the bias covers {num_keys} positions, but seq_lens are {step.seq_lens}")
    row, head, token, key = bias.expand(step.num_rows, heads, query_len or 1, num_keys).stride()
    token = 0 if query_len is None else token
    # the kernel adds `token` times the index among the tokens of all rows
    row -= (query_len or 0) * token
    return dict(
        bias=bias, bias_row=row, bias_token=token, bias_head=head, bias_key=key, bias_len=num_keys
    )
