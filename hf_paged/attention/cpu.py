"""Portable fast attention over block tables: gather a few rows at a time, then one dense attention on exact lengths.

The query heads of a group are packed beside the queries (M = group * query_len), which CPU SDPA needs to be fast.
Nothing is padded, so no slot outside a row's visible range is ever read. Plain PyTorch: any device, differentiable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .gather import Part, gather, plan_parts
from .metadata import AttentionMetadata

PACK_QUERIES = 32
"""Queries per row from which the heads of a group run one by one: M is large enough, and causal needs no mask."""


def paged_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`reference.paged_attention`, fast. Plain bfloat16 and float16 calls round where PyTorch's own SDPA rounds."""
    batch, heads, query_len, _ = query.shape
    kv_heads, value_dim = value_blocks.shape[1], value_blocks.shape[3]
    group = heads // kv_heads
    plan = plan_parts(metadata, key_blocks, value_blocks)
    grads = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key_blocks, value_blocks))
    shape = (batch, query_len, heads, value_dim)
    out = query.new_empty(shape) if plan.complete else query.new_zeros(shape)
    if bias is not None:
        keys = max(bias.shape[-1], max(metadata.seq_lens_host) if bias.shape[-1] == 1 else 0)
        bias = bias.expand(batch, heads, query_len, keys)
    for part in plan.parts:
        rows, kv_count, _ = part.shape
        first, last = part.heads[0] * group, part.heads[1] * group
        queries = query_len - part.first_query
        key, value = gather(part, key_blocks, value_blocks, reuse=not grads)
        if key.dtype != query.dtype:
            key, value = key.to(query.dtype), value.to(query.dtype)
        # [rows, kv_count, group, queries, dim]
        grouped = query[part.rows, first:last, part.first_query :].unflatten(1, (kv_count, group))
        extra = None
        if softcap is not None or sinks is not None or bias is not None:
            extra = _Extra(softcap, sinks, bias, part, group)
        if queries == 1 and extra is None and isinstance(part.rows, slice):
            result = _attend(grouped.squeeze(3), key, value, part, scale, 1, slice(0, group), None)
            out[part.rows, -1, first:last] = result.flatten(1, 2)
            continue
        target = out[part.rows] if isinstance(part.rows, slice) else out.new_empty((rows, *shape[1:]))
        for members in _members(group, queries):
            packed = grouped[:, :, members].flatten(2, 3)  # [rows, kv_count, M, dim]
            result = _attend(packed, key, value, part, scale, queries, members, extra)
            result = result.unflatten(2, (-1, queries)).permute(0, 3, 1, 2, 4)
            view = target[:, part.first_query :, first:last].unflatten(2, (kv_count, group))
            view[:, :, :, members] = result
        if not isinstance(part.rows, slice):
            out[part.rows, part.first_query :, first:last] = target[:, part.first_query :, first:last]
    return out


@dataclass(frozen=True)
class _Extra:
    """What SDPA does not know."""

    softcap: float | None
    sinks: Tensor | None
    bias: Tensor | None
    part: Part
    group: int


def _members(group: int, queries: int) -> list[slice]:
    """Query heads of a group that are packed into one product: all, or each alone where there are many queries."""
    if queries < PACK_QUERIES:
        return [slice(0, group)]
    return [slice(i, i + 1) for i in range(group)]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    scale: float,
    queries: int,
    members: slice,
    extra: _Extra | None,
) -> Tensor:
    """Dense attention of `[rows, kv_heads, M, dim]` over `[rows, kv_heads, length, dim]`, `M` = members x queries."""
    rows_of_query = query.shape[2]
    causal = part.causal and rows_of_query == queries
    mask = part.mask
    if part.causal and not causal:
        mask = torch.ones(queries, part.length, dtype=torch.bool, device=query.device).tril_()
    if mask is not None and rows_of_query != queries:
        mask = mask.repeat(rows_of_query // queries, 1)
    if extra is None:
        if rows_of_query == 1 and query.dtype != torch.float32 and query.is_cpu:
            # With one query row a half-precision SDPA of the CPU is two to three times slower than this.
            weights = torch.matmul(query, key.transpose(-1, -2)).mul_(scale).softmax(-1, dtype=torch.float32)
            return torch.matmul(weights.to(value.dtype), value)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale)
    return _attend_explicitly(query, key, value, mask, causal, scale, members, extra)


def _attend_explicitly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    members: slice,
    extra: _Extra,
) -> Tensor:
    """`_attend` with softcap, sinks and bias, in float32."""
    part, (first, last) = extra.part, extra.part.heads
    compute = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query.to(compute), key.to(compute).transpose(-1, -2)) * scale
    if extra.softcap is not None:
        scores = torch.tanh(scores / extra.softcap) * extra.softcap
    if extra.bias is not None:
        rows = range(extra.bias.shape[0])[part.rows] if isinstance(part.rows, slice) else part.rows.tolist()
        bias = torch.stack(
            [extra.bias[row, :, part.first_query :, low : low + part.length] for row, low in zip(rows, part.lows)]
        )
        bias = bias.unflatten(1, (-1, extra.group))[:, first:last, members].flatten(2, 3)
        scores = scores + bias.to(compute)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril_()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    # The largest logit, sink included; 0 where all are -inf, so that such a row becomes zeros and not NaN.
    top = scores.amax(dim=-1, keepdim=True)
    sink = None
    if extra.sinks is not None:
        sink = extra.sinks.to(compute).view(-1, extra.group)[first:last, members]  # [kv_heads, members]
        sink = sink.repeat_interleave(scores.shape[2] // sink.shape[1], dim=1).unsqueeze(-1)
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    result = torch.matmul(weights, value.to(compute)) / total.masked_fill(total == 0, 1.0)
    return result.to(query.dtype)
