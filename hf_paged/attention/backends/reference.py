"""Paged attention in plain PyTorch: the maths every backend is compared with. Any device, any dtype; slow."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import AttentionCall


def attend(call: AttentionCall) -> Tensor:
    """
    Attention of each row's queries over the K/V that its block table names (PagedAttention, arXiv 2309.06180,
    sec. 4.1), computed in float32 (float64 for float64 inputs).

    A slot that no query of its row sees is never read into the sum, whatever it holds; a query that sees nothing
    returns zeros.

    Returns:
        `torch.Tensor` of shape `(T, heads, value_dim)`, contiguous, in the query's dtype.
    """
    step, sinks, bias = call.step, call.sinks, call.bias
    keys, values = call.blocks.keys, call.blocks.values
    heads, kv_heads = call.query.shape[1], keys.shape[1]
    device, compute = call.query.device, torch.promote_types(call.query.dtype, torch.float32)
    rows = [call.query.new_empty(0, heads, values.shape[3], dtype=compute)]
    for row in range(step.num_rows):
        query = call.query[step.query_start[row] : step.query_start[row + 1]].to(compute)
        ranges = [step.visible(row, i) for i in range(query.shape[0])]
        ranges = [r if r[0] < r[1] else (0, 0) for r in ranges]
        low, high = min((r[0] for r in ranges if r[1]), default=0), max((r[1] for r in ranges), default=0)
        positions = torch.arange(low, high, device=device)
        blocks = step.block_tables[row].long()[positions // step.block_size]
        offsets = positions % step.block_size
        # [kv_heads, 1, high - low, dim]: one axis for the query heads of a group
        key = keys[blocks, :, offsets].transpose(0, 1).unsqueeze(1).to(compute)
        value = values[blocks, :, offsets].transpose(0, 1).unsqueeze(1).to(compute)
        grouped = query.transpose(0, 1).unflatten(0, (kv_heads, -1))  # [kv_heads, group, query_len, head_dim]
        scores = grouped @ key.transpose(-1, -2) * call.scale  # [kv_heads, group, query_len, high - low]
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if bias is not None:
            full = bias.expand(step.num_rows, heads, query.shape[0], bias.shape[-1])[row]
            full = full if bias.shape[-1] == 1 else full[..., low:high]
            scores = scores + full.to(compute).unflatten(0, (kv_heads, -1))
        bounds = torch.tensor(ranges, device=device).view(-1, 2)
        visible = (positions >= bounds[:, :1]) & (positions < bounds[:, 1:])
        scores = scores.masked_fill(~visible, float("-inf"))
        # The sink, or -inf for none, is one more column without a value; a row of -inf only softmaxes to NaN: zeros.
        sink = torch.full((heads,), float("-inf"), device=device) if sinks is None else sinks
        sink = sink.to(compute).view(kv_heads, -1, 1, 1).expand(-1, -1, query.shape[0], -1)
        scores = torch.cat([scores, sink], dim=-1)
        blind = (scores == float("-inf")).all(dim=-1, keepdim=True)
        weights = scores.masked_fill(blind, 0.0).softmax(dim=-1)[..., :-1].masked_fill(blind, 0.0)
        rows.append((weights @ value).flatten(0, 1).transpose(0, 1))  # [query_len, heads, value_dim]
    return torch.cat(rows).to(call.query.dtype)
