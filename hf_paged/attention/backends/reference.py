"""Paged attention in plain PyTorch, which every backend is compared with. Any device, any dtype; slow."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...cache.storage import KVBlocks
from ...kernels import quantized
from ...step import StepMetadata, row_groups


class AttentionCall(NamedTuple):
    """One layer's attention, the argument of every backend. Tokens of all rows are packed, row after row."""

    query: Tensor  # (T, heads, head_dim); head h reads K/V head h // (heads // kv_heads)
    blocks: KVBlocks  # keys and values of the layer
    step: StepMetadata
    scale: float  # factor on q @ k
    softcap: float | None = None  # scores become tanh(scores / softcap) * softcap before bias and mask
    sinks: Tensor | None = None  # (heads,): one more logit per head that takes probability and adds no value
    bias: Tensor | None = None
    """Added to the scores. Broadcasts to `(n, heads, query_len, >= max seq_len)`, one for all rows and queries if rows
    have different numbers of queries; the last axis is in each row's table coordinates. May hold `-inf`."""
    fresh: tuple[Tensor, ...] | None = None
    """Keys and values `(T, kv_heads, dim)` of the step's tokens, if available."""

    @property
    def is_plain(self) -> bool:
        """Whether it is softmax(q k scale) v under the step's mask and nothing else."""
        return self.softcap is None and self.sinks is None and self.bias is None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Queries, keys, values, and sinks and bias if given."""
        found = (self.query, self.blocks.keys, self.blocks.values, self.sinks, self.bias)
        return tuple(tensor for tensor in found if tensor is not None)

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient is wanted."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    def of_heads(self, heads: slice, query: Tensor, bias: Tensor | None) -> AttentionCall:
        """The call for some query heads, with their queries and bias."""
        return self._replace(query=query, bias=bias, sinks=None if self.sinks is None else self.sinks[heads])

    def by_groups(self) -> list[AttentionCall]:
        """Splits the call into groups of rows with equally many queries, in order."""
        if self.step.query_len is not None:
            return [self]
        return [
            self._replace(query=self.query[at], step=step, fresh=self.fresh and tuple(x[at] for x in self.fresh))
            for at, step in self.step.plan(row_groups)
        ]


def attend(call: AttentionCall) -> Tensor:
    """Attention of each row's queries over the K/V that its block table names (PagedAttention, arXiv 2309.06180, sec.
    4.1), summed in float32 (float64 for float64 inputs): `(T, heads, value_dim)`, contiguous, in the query's dtype. A
    slot that no query of its row sees is never read, whatever it holds; a query that sees nothing gets zeros."""
    step, bias, keys, values = call.step, call.bias, call.blocks.keys, call.blocks.values
    heads, kv_heads = call.query.shape[1], keys.shape[1]
    device, compute = call.query.device, torch.promote_types(call.query.dtype, torch.float32)
    # the sink, or -inf for none, is one more column without a value
    sinks = torch.full((heads,), float("-inf"), device=device) if call.sinks is None else call.sinks
    rows = [call.query.new_empty(0, heads, values.shape[3], dtype=compute)]
    for row in range(step.num_rows):
        query = call.query[step.query_start[row] : step.query_start[row + 1]].to(compute)
        bounds = torch.tensor([step.visible(row, i) for i in range(len(query))], device=device).view(-1, 2)
        positions = torch.arange(step.seq_lens[row], device=device)
        visible = (positions >= bounds[:, :1]) & (positions < bounds[:, 1:])
        positions, visible = positions[visible.any(0)], visible[:, visible.any(0)]
        blocks = step.block_tables[row].long()[positions // step.block_size]
        index = blocks, slice(None), positions % step.block_size
        # [kv_heads, 1, positions, dim]: one axis for the query heads of a group
        key, value = (quantized.read(x, index, compute).transpose(0, 1).unsqueeze(1) for x in (keys, values))
        grouped = query.transpose(0, 1).unflatten(0, (kv_heads, -1))  # [kv_heads, group, query_len, head_dim]
        scores = grouped @ key.transpose(-1, -2) * call.scale  # [kv_heads, group, query_len, positions]
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if bias is not None:
            added = bias.expand(step.num_rows, heads, len(query), bias.shape[-1])[row]
            added = added if bias.shape[-1] == 1 else added[..., positions]
            scores = scores + added.to(compute).unflatten(0, (kv_heads, -1))
        scores = scores.masked_fill(~visible, float("-inf"))
        sink = sinks.to(compute).view(kv_heads, -1, 1, 1).expand(-1, -1, len(query), -1)
        scores = torch.cat([scores, sink], dim=-1)
        blind = (scores == float("-inf")).all(dim=-1, keepdim=True)  # their softmax would be NaN: zeros instead
        weights = scores.masked_fill(blind, 0.0).softmax(dim=-1)[..., :-1].masked_fill(blind, 0.0)
        rows.append((weights @ value).flatten(0, 1).transpose(0, 1))  # [query_len, heads, value_dim]
    return torch.cat(rows).to(call.query.dtype)
