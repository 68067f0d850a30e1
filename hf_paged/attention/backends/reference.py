"""`AttentionCall`, and paged attention in plain PyTorch, with which tests compare every backend.
Any device, any dtype; slow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...cache.handles import PagedTensor
from ...cache.kv_blocks import KVBlocks
from ...kernels import quantized
from ...step import StepMetadata, row_groups


class AttentionCall(NamedTuple):
    """The attention of one layer in a step, the argument of every backend. The tokens of all rows
    are packed, row after row."""

    query: Tensor  # (T, heads, head_dim); head h reads K/V head h // (heads // kv_heads)
    blocks: KVBlocks  # keys and values of the layer
    step: StepMetadata
    scale: float  # factor of q @ k
    # scores become tanh(scores / softcap) * softcap before bias and mask
    softcap: float | None = None
    # (heads,): an additional logit per head, which takes probability and adds no value
    sinks: Tensor | None = None
    bias: Tensor | None = None
    """A tensor that is added to the scores; may hold `-inf`. Broadcasts to `(n, heads, query_len,
    >= max seq_len)`, with the last axis in each row's table coordinates (`step.py`). If rows have
    different numbers of queries, the bias must be the same for all rows and queries."""
    fresh: tuple[Tensor, ...] | None = None
    """Keys and values `(T, kv_heads, dim)` of the step's tokens, if available."""

    @property
    def is_plain(self) -> bool:
        """Whether this is softmax(q k scale) v under the step's mask, without other features."""
        return self.softcap is None and self.sinks is None and self.bias is None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Queries, keys and values, and sinks and bias if given."""
        tensors = (
            self.query,
            self.blocks.keys,
            self.blocks.values,
            self.sinks,
            self.bias,
        )
        return tuple(tensor for tensor in tensors if tensor is not None)

    @property
    def needs_grad(self) -> bool:
        """Whether autograd requires a gradient of the result."""
        if not torch.is_grad_enabled():
            return False
        return any(tensor.requires_grad for tensor in self.tensors)

    def of_heads(self, heads: slice, query: Tensor, bias: Tensor | None) -> AttentionCall:
        """Returns the call for some query heads, with these queries and this bias."""
        sinks = self.sinks
        if sinks is not None:
            sinks = sinks[heads]
        return self._replace(query=query, bias=bias, sinks=sinks)

    def by_groups(self, attend: Callable[[AttentionCall], Tensor]) -> Tensor:
        """Runs `attend` on groups of rows with the same number of queries; returns the concatenated
        results."""
        if self.step.query_len is not None:
            return attend(self)
        outputs = []
        for tokens, step in self.step.plan(row_groups):
            fresh = self.fresh
            if fresh:
                fresh = tuple(states[tokens] for states in fresh)
            call = self._replace(query=self.query[tokens], step=step, fresh=fresh)
            outputs.append(attend(call))
        return torch.cat(outputs)


def paired_blocks(key: PagedTensor, value: PagedTensor) -> KVBlocks:
    """Returns the blocks of keys and values: the layer's `KVBlocks`, or new ones if the model
    combines keys and values of different layers, or if the pool grew after the model got one of the
    handles."""
    layer = key.layer
    keys = key.blocks
    values = value.blocks
    if keys is layer.keys and values is layer.values:
        return layer
    num_blocks = min(len(keys), len(values))
    tensors = keys[:num_blocks], values[:num_blocks]
    return KVBlocks(tensors, *tensors)


def attend(call: AttentionCall) -> Tensor:
    """Computes the attention of each row's queries over the K/V in its block table (PagedAttention,
    arXiv 2309.06180, section 4.1), summed in float32 (float64 for float64 inputs): `(T, heads,
    value_dim)`, contiguous, in the query's dtype. Never reads a slot that no query of its row sees,
    which may hold NaN; a query that sees no keys gets zeros."""
    step = call.step
    bias = call.bias
    keys = call.blocks.keys
    values = call.blocks.values
    heads = call.query.shape[1]
    block_size = step.block_size
    device = call.query.device
    dtype = call.query.dtype
    compute_dtype = torch.promote_types(dtype, torch.float32)
    outputs = [call.query.new_empty(0, heads, values.shape[3])]
    for row in range(step.num_rows):
        query = call.query[step.query_start[row] : step.query_start[row + 1]]
        query_len = len(query)
        ranges = [step.visible(row, i) for i in range(query_len)]
        bounds = torch.tensor(ranges, device=device).view(-1, 2)
        positions = torch.arange(step.seq_lens[row], device=device)
        is_visible = (positions >= bounds[:, :1]) & (positions < bounds[:, 1:])
        is_read = is_visible.any(0)
        positions = positions[is_read]
        blocks = step.block_tables[row].long()[positions // block_size]
        index = blocks, slice(None), positions % block_size
        # [1, kv_heads, positions, dim]
        key = quantized.read(keys, index, compute_dtype).transpose(0, 1)[None]
        value = quantized.read(values, index, compute_dtype).transpose(0, 1)[None]
        # [heads or 1, query_len, positions]
        mask = torch.zeros(1, query_len, len(positions), dtype=compute_dtype, device=device)
        if bias is not None:
            length = max(bias.shape[-1], step.seq_lens[row])
            row_bias = bias.expand(step.num_rows, heads, query_len, length)[row]
            mask = row_bias[..., positions].to(compute_dtype)
        mask = mask.masked_fill(~is_visible[:, is_read], -math.inf)
        row_call = call._replace(query=query.transpose(0, 1)[None])
        outputs.append(attend_densely(row_call, key, value, mask, False)[0])
    return torch.cat(outputs)


def attend_densely(
    call: AttentionCall,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sees_keys: bool,
) -> Tensor:
    """Computes attention with the scale, softcap, sinks and queries `[rows, heads, queries, dim]`
    of `call` over keys and values `[rows, kv_heads, keys, dim]`, summed in at least float32.
    Returns `[rows, queries, heads, value_dim]`. `mask` is added to the scores `[rows, heads,
    queries, keys]`. `sees_keys`: whether every query sees a key; if not, a query from which the
    mask hides all keys gets zeros."""
    query = call.query
    _, heads, num_queries, _ = query.shape
    _, kv_heads, num_keys, _ = key.shape
    by_group = (kv_heads, heads // kv_heads)
    by_query = (heads // kv_heads, num_queries)
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    # [rows, kv_heads, group * queries, dim]
    packed_query = query.unflatten(1, by_group).flatten(2, 3).to(compute_dtype)
    scores = torch.matmul(packed_query, key.to(compute_dtype).transpose(-1, -2)) * call.scale
    scores = scores.unflatten(2, by_query).flatten(1, 2)  # [rows, heads, queries, keys]
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is not None:
        scores = scores + mask.to(compute_dtype)
    if call.sinks is not None:  # adds a column without a value
        column = call.sinks.to(compute_dtype)[:, None, None]
        column = column.expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    if sees_keys:
        weights = scores.softmax(dim=-1)
    else:
        # zeros for queries that see no keys, whose softmax would be NaN
        is_blind = (scores == -math.inf).all(dim=-1, keepdim=True)
        weights = scores.masked_fill(is_blind, 0.0).softmax(dim=-1).masked_fill(is_blind, 0.0)
    # [rows, kv_heads, group * queries, keys]
    weights = weights[..., :num_keys].unflatten(1, by_group).flatten(2, 3)
    result = torch.matmul(weights, value.to(compute_dtype))
    result = result.unflatten(2, by_query).flatten(1, 2)
    return result.to(query.dtype).transpose(1, 2)
