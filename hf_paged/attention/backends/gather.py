"""Portable fast attention over block tables: gather a few rows at a time, then one dense attention on exact lengths.

Nothing is padded, so no slot outside a row's visible range is ever read. Plain PyTorch: any device, differentiable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...step import StepMetadata
from ..call import AttentionCall
from .parts import Hidden, Part, Slice, gather, plan_parts

PACK_QUERIES = 64
"""Queries of a row below which the query heads of a group are packed beside the queries (M = group * query_len). From
here on CPU SDPA lays K and V out for the matrix units itself, with `enable_gqa` once for a whole group, and skips what
causal hides. With fewer queries it does neither, and packing is up to 3.5 times as fast in half precision."""

APART_QUERIES = 32
"""Queries of a row from which the heads of a group run one after the other where all scores are held at once."""


def unsupported_reason(call: AttentionCall) -> None:
    """`None`: it takes every call whose lengths the host knows."""


def attend(call: AttentionCall) -> Tensor:
    """
    `reference.attend`, fast. Plain bfloat16 and float16 calls round where PyTorch's own SDPA rounds. Rows that begin in
    this step are attended to in the step's own states where these are at hand.
    """
    parts = [_attend_fresh(part) if part.step.begins else _attend_gathered(part) for part in call.by_groups()]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows(states: Tensor, step: StepMetadata) -> Tensor:
    """`(T, heads, dim)` of rows with equally many queries as `(n, heads, query_len, dim)`, a view."""
    query_len = step.query_len
    assert query_len is not None
    return states.unflatten(0, (step.num_rows, query_len)).transpose(1, 2)


def _attend_fresh(call: AttentionCall) -> Tensor:
    """`attend` for rows that begin in this step."""
    if call.fresh is None or not call.is_plain:
        return _attend_gathered(call)
    query, key, value = (_rows(x, call.step).to(call.query.dtype) for x in (call.query, *call.fresh))
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=call.scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).flatten(0, 1)


def _attend_gathered(call: AttentionCall) -> Tensor:
    """`attend` for rows with equally many queries."""
    step, softcap, sinks, bias = call.step, call.softcap, call.sinks, call.bias
    key_blocks, value_blocks = call.blocks.keys, call.blocks.values
    query = _rows(call.query, step)
    batch, heads, query_len, _ = query.shape
    kv_heads, value_dim = value_blocks.shape[1], value_blocks.shape[3]
    group = heads // kv_heads
    plan = plan_parts(step, key_blocks, value_blocks)
    reuse = not call.needs_grad
    if bias is not None:
        keys = bias.shape[-1] if bias.shape[-1] > 1 else max(step.seq_lens, default=0)
        bias = bias.expand(batch, heads, query_len, keys)

    def attend(part: Part) -> Tensor:
        first, last = part.heads[0] * group, part.heads[1] * group
        key, value = gather(part, key_blocks, value_blocks, reuse=reuse)
        key, value = key.to(query.dtype), value.to(query.dtype)
        extra = None
        if not call.is_plain:
            extra = _Extra(softcap, None if sinks is None else sinks[first:last], _bias(bias, part, first, last))
        return _attend(query[part.rows, first:last, part.first_query :], key, value, part, call.scale, extra)

    if plan.complete and len(plan.parts) == 1:
        return attend(plan.parts[0]).flatten(0, 1).contiguous()
    shape = (batch, query_len, heads, value_dim)
    out = query.new_empty(shape) if plan.complete else query.new_zeros(shape)
    for part in plan.parts:
        heads_of_part = slice(part.heads[0] * group, part.heads[1] * group)
        out[part.rows, part.first_query :, heads_of_part] = attend(part)
    return out.flatten(0, 1)


@dataclass(frozen=True)
class _Extra:
    """What SDPA does not know, for the heads of a part."""

    softcap: float | None
    sinks: Tensor | None  # [heads]
    bias: Tensor | None  # [rows, heads, queries, length]


def _bias(bias: Tensor | None, part: Part, first: int, last: int) -> Tensor | None:
    """The rows, heads, queries and keys of a part of `[batch, heads, query_len, keys]`."""
    if bias is None:
        return None
    rows = range(bias.shape[0])[part.rows] if isinstance(part.rows, slice) else part.rows.tolist()
    return torch.stack(
        [bias[row, first:last, part.first_query :, low : low + part.length] for row, low in zip(rows, part.lows)]
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float, extra: _Extra | None) -> Tensor:
    """`[rows, queries, heads, value_dim]` from `[rows, heads, queries, dim]` over `[rows, kv_heads, length, dim]`."""
    rows, heads, queries, dim = query.shape
    group = heads // key.shape[1]
    holds_scores = extra is not None or not query.is_cpu or dim != value.shape[3]
    apart = group if holds_scores and queries >= APART_QUERIES else 1
    slices, hidden = part.slices, part.hidden
    if part.causal and extra is None and queries >= PACK_QUERIES:
        slices, hidden = (Slice(0, queries, 0, part.length),), None
    is_causal = part.causal and hidden is None
    if len(slices) == apart == 1:
        return _attend_slice(query, key, value, hidden, is_causal, scale, extra)
    out = query.new_empty(rows, queries, heads, value.shape[3])
    for some in slices:
        chosen, seen = slice(some.first, some.last), slice(some.low, some.high)
        for member in range(apart):
            one = slice(member, None, apart)
            less = extra
            if extra is not None:
                less = _Extra(
                    extra.softcap,
                    None if extra.sinks is None else extra.sinks[one],
                    None if extra.bias is None else extra.bias[:, one, chosen, seen],
                )
            states = query[:, one, chosen], key[:, :, seen], value[:, :, seen]
            out[:, chosen, one] = _attend_slice(*states, hidden, is_causal, scale, less)
    return out


def _attend_slice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Hidden | None,
    is_causal: bool,
    scale: float,
    extra: _Extra | None,
) -> Tensor:
    """`_attend` of neighbouring queries over the keys that they see."""
    queries, kv_heads, keys = query.shape[2], key.shape[1], key.shape[2]
    group = query.shape[1] // kv_heads
    if extra is not None:
        return _attend_explicitly(query, key, value, hidden, scale, extra)
    if queries >= PACK_QUERIES or (group == 1 and queries > 1):
        mask = None if hidden is None else hidden.corner(queries, keys, query.dtype)
        result = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=group > 1
        )
        return result.transpose(1, 2)
    packed = query.unflatten(1, (kv_heads, group)).flatten(2, 3)  # [rows, kv_heads, M, dim]
    if packed.shape[2] == 1 and query.dtype != torch.float32 and query.is_cpu:
        # With one query row a half-precision SDPA of the CPU is two to three times slower than this.
        weights = torch.matmul(packed, key.transpose(-1, -2)).mul_(scale).softmax(-1, dtype=torch.float32)
        result = torch.matmul(weights.to(value.dtype), value)
    else:
        mask = None if hidden is None else hidden.corner(queries, keys, query.dtype, heads=group)
        result = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    if queries == 1:
        return result.flatten(1, 2).unsqueeze(1)
    return result.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend_explicitly(
    query: Tensor, key: Tensor, value: Tensor, hidden: Hidden | None, scale: float, extra: _Extra
) -> Tensor:
    """`_attend_slice` with softcap, sinks and bias, in float32."""
    queries, keys, kv_heads = query.shape[2], key.shape[2], key.shape[1]
    compute = torch.promote_types(query.dtype, torch.float32)
    packed = query.unflatten(1, (kv_heads, -1)).flatten(2, 3).to(compute)  # [rows, kv_heads, M, dim]
    scores = torch.matmul(packed, key.to(compute).transpose(-1, -2)) * scale
    scores = scores.unflatten(2, (-1, queries)).flatten(1, 2)  # [rows, heads, queries, keys]
    if extra.softcap is not None:
        scores = torch.tanh(scores / extra.softcap) * extra.softcap
    if extra.bias is not None:
        scores = scores + extra.bias.to(compute)
    if hidden is not None:
        scores = scores + hidden.corner(queries, keys, compute)
    # The largest logit, sink included; 0 where all are -inf, so that such a row becomes zeros and not NaN.
    top = scores.amax(dim=-1, keepdim=True)
    sink = None
    if extra.sinks is not None:
        sink = extra.sinks.to(compute)[:, None, None]
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    weights = weights.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [rows, kv_heads, M, keys]
    result = torch.matmul(weights, value.to(compute)).unflatten(2, (-1, queries)).flatten(1, 2)
    return (result / total.masked_fill(total == 0, 1.0)).to(query.dtype).transpose(1, 2)
