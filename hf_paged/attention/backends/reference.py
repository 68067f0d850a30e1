"""Paged attention in plain PyTorch, which every backend is compared with. Any device, any dtype;
slow."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...cache.storage import KVBlocks
from ...kernels import quantized
from ...step import StepMetadata, row_groups


class AttentionCall(NamedTuple):
    """One layer's attention, the argument of every backend. Tokens of all rows are packed, row
    after row."""

    query: Tensor  # (T, heads, head_dim); head h reads K/V head h // (heads // kv_heads)
    blocks: KVBlocks  # keys and values of the layer
    step: StepMetadata
    scale: float  # factor on q @ k
    # scores become tanh(scores / softcap) * softcap before bias and mask
    softcap: float | None = None
    # (heads,): one more logit per head that takes probability and adds no value
    sinks: Tensor | None = None
    bias: Tensor | None = None
    """Added to the scores. Broadcasts to `(n, heads, query_len, >= max seq_len)`, one for all rows
    and queries if rows have different numbers of queries; the last axis is in each row's table
    coordinates. May hold `-inf`."""
    fresh: tuple[Tensor, ...] | None = None
    """Keys and values `(T, kv_heads, dim)` of the step's tokens, if available."""

    @property
    def is_plain(self) -> bool:
        """Whether it is softmax(q k scale) v under the step's mask and nothing else."""
        return self.softcap is None and self.sinks is None and self.bias is None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Queries, keys, values, and sinks and bias if given."""
        given = (
            self.query,
            self.blocks.keys,
            self.blocks.values,
            self.sinks,
            self.bias,
        )
        return tuple(tensor for tensor in given if tensor is not None)

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient is wanted."""
        if not torch.is_grad_enabled():
            return False
        return any(tensor.requires_grad for tensor in self.tensors)

    def of_heads(self, heads: slice, query: Tensor, bias: Tensor | None) -> AttentionCall:
        """The call for some query heads, with their queries and bias."""
        sinks = self.sinks
        if sinks is not None:
            sinks = sinks[heads]
        return self._replace(query=query, bias=bias, sinks=sinks)

    def by_groups(self) -> list[AttentionCall]:
        """Splits the call into groups of rows with equally many queries, in order."""
        if self.step.query_len is not None:
            return [self]
        calls = []
        groups = self.step.plan(row_groups)
        for at, step in groups:
            fresh = self.fresh
            if fresh:
                fresh = tuple(x[at] for x in fresh)
            query = self.query[at]
            call = self._replace(query=query, step=step, fresh=fresh)
            calls.append(call)
        return calls


def attend(call: AttentionCall) -> Tensor:
    """Attention of each row's queries over the K/V that its block table names (PagedAttention,
    arXiv 2309.06180, sec. 4.1), summed in float32 (float64 for float64 inputs): `(T, heads,
    value_dim)`, contiguous, in the query's dtype. A slot that no query of its row sees is never
    read, whatever it holds; a query that sees nothing gets zeros."""
    step = call.step
    bias = call.bias
    keys = call.blocks.keys
    values = call.blocks.values
    heads = call.query.shape[1]
    kv_heads = keys.shape[1]
    groups = (kv_heads, -1)
    value_dim = values.shape[3]
    block_size = step.block_size
    device = call.query.device
    dtype = call.query.dtype
    compute = torch.promote_types(dtype, torch.float32)
    minus_infinity = float("-inf")
    # the sink, or -inf for none, is one more column without a value
    sinks = call.sinks
    if sinks is None:
        sinks = torch.full((heads,), minus_infinity, device=device)
    no_rows = call.query.new_empty(0, heads, value_dim, dtype=compute)
    rows = [no_rows]
    for row in range(step.num_rows):
        start = step.query_start[row]
        end = step.query_start[row + 1]
        query = call.query[start:end]
        query = query.to(compute)
        query_len = len(query)
        ranges = [step.visible(row, i) for i in range(query_len)]
        bounds = torch.tensor(ranges, device=device)
        bounds = bounds.view(-1, 2)
        firsts = bounds[:, :1]
        ends = bounds[:, 1:]
        seq_len = step.seq_lens[row]
        positions = torch.arange(seq_len, device=device)
        visible = positions >= firsts
        precedes_end = positions < ends
        visible = visible & precedes_end
        seen = visible.any(0)
        positions = positions[seen]
        visible = visible[:, seen]
        table = step.block_tables[row]
        table = table.long()
        blocks = table[positions // block_size]
        offsets = positions % block_size
        index = blocks, slice(None), offsets
        key = quantized.read(keys, index, compute)
        key = key.transpose(0, 1)
        value = quantized.read(values, index, compute)
        value = value.transpose(0, 1)
        # [kv_heads, 1, positions, dim]: one axis for the query heads of a group
        key = key.unsqueeze(1)
        value = value.unsqueeze(1)
        # [kv_heads, group, query_len, head_dim]
        grouped = query.transpose(0, 1)
        grouped = grouped.unflatten(0, groups)
        # [kv_heads, group, query_len, positions]
        transposed = key.transpose(-1, -2)
        scores = grouped @ transposed
        scores = scores * call.scale
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap)
            scores = scores * call.softcap
        if bias is not None:
            length = bias.shape[-1]
            added = bias.expand(step.num_rows, heads, query_len, length)
            added = added[row]
            if length != 1:
                added = added[..., positions]
            added = added.to(compute)
            added = added.unflatten(0, groups)
            scores = scores + added
        scores = scores.masked_fill(~visible, minus_infinity)
        sink = sinks.to(compute)
        sink = sink.view(kv_heads, -1, 1, 1)
        sink = sink.expand(-1, -1, query_len, -1)
        scores = torch.cat([scores, sink], dim=-1)
        # their softmax would be NaN: zeros instead
        blind = scores == minus_infinity
        blind = blind.all(dim=-1, keepdim=True)
        weights = scores.masked_fill(blind, 0.0)
        weights = weights.softmax(dim=-1)
        weights = weights[..., :-1]
        weights = weights.masked_fill(blind, 0.0)
        output = weights @ value
        output = output.flatten(0, 1)
        # [query_len, heads, value_dim]
        output = output.transpose(0, 1)
        rows.append(output)
    outputs = torch.cat(rows)
    return outputs.to(dtype)
