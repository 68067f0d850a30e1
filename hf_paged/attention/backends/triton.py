"""`reference.paged_attention` on the Triton kernels: a few queries a row go to the decode kernel, more to prefill's."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.triton import decode, prefill
from ...step import StepMetadata
from . import gather


def supports(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: StepMetadata,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> str | None:
    """What keeps `paged_attention` from taking these arguments, in words; `None` if nothing does."""
    if metadata.query_len <= decode.MAX_QUERIES:
        return decode.supports(query, key_blocks, value_blocks, metadata, sinks, bias)
    if bias is not None:
        return "a bias for more queries than the decode kernel takes"
    return prefill.supports(query, key_blocks, value_blocks, 1.0, sinks)


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
) -> Tensor:
    """Arguments and result of `reference.paged_attention`, for what `supports` has nothing against."""
    batch, heads, query_len, _ = query.shape
    if query_len <= decode.MAX_QUERIES:
        out: Tensor = decode.paged_attention(
            query, key_blocks, value_blocks, metadata, scale=scale, softcap=softcap, sinks=sinks, bias=bias
        )
        return out
    if scale <= 0:  # the prefill kernel folds it into its exponentials
        return gather.paged_attention(
            query, key_blocks, value_blocks, metadata, scale=scale, softcap=softcap, sinks=sinks
        )
    packed = query.transpose(1, 2).reshape(batch * query_len, heads, -1)
    ends = torch.arange(0, (batch + 1) * query_len, query_len, dtype=torch.int32, device=query.device)
    out = prefill.prefill_attention(
        packed,
        key_blocks,
        value_blocks,
        cu_query_lens=ends,
        seq_lens=metadata.seq_lens,
        block_tables=metadata.block_tables,
        max_query_len=query_len,
        scale=scale,
        starts=metadata.starts,
        causal=metadata.causal,
        window=metadata.window if metadata.causal else None,
        softcap=softcap,
        sinks=sinks,
    )
    return out.unflatten(0, (batch, query_len))
