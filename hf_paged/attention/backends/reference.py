"""Paged attention in plain PyTorch: the maths every backend is compared with. Any device, any dtype; slow."""

from __future__ import annotations

import torch
from torch import Tensor

from ...step import StepMetadata


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
    """
    Attention of each row's queries over the K/V that its block table names (PagedAttention, arXiv 2309.06180,
    sec. 4.1), computed in float32 (float64 for float64 inputs).

    A slot that no query of its row sees is never read into the sum, whatever it holds; a query that sees nothing
    returns zeros.

    Args:
        query (`torch.Tensor` of shape `(batch, heads, query_len, head_dim)`):
            Query head `h` reads K/V head `h // (heads // kv_heads)`.
        key_blocks (`torch.Tensor` of shape `(num_blocks, kv_heads, block_size, head_dim)`)
        value_blocks (`torch.Tensor` of shape `(num_blocks, kv_heads, block_size, value_dim)`)
        metadata (`StepMetadata`): Block tables, lengths and masks of this step.
        scale (`float`): Factor on `q @ k`.
        softcap (`float`, *optional*): Scores become `tanh(scores / softcap) * softcap` before bias and mask.
        sinks (`torch.Tensor` of shape `(heads,)`, *optional*):
            One more logit per head that takes probability and adds no value.
        bias (`torch.Tensor` that broadcasts to `(batch, heads, query_len, >= max seq_len)`, *optional*):
            Added to the scores, its last axis in table coordinates of each row; may hold `-inf`.

    Returns:
        `torch.Tensor` of shape `(batch, query_len, heads, value_dim)`, contiguous, in the query's dtype.
    """
    batch, heads, query_len, _ = query.shape
    kv_heads, value_dim = key_blocks.shape[1], value_blocks.shape[-1]
    compute = torch.promote_types(query.dtype, torch.float32)
    rows = []
    for row in range(batch):
        ranges = [metadata.visible(row, i) for i in range(query_len)]
        ranges = [r if r[0] < r[1] else (0, 0) for r in ranges]
        low = min((r[0] for r in ranges if r[1]), default=0)
        high = max(r[1] for r in ranges)
        positions = torch.arange(low, high, device=query.device)
        blocks = metadata.block_tables[row].long()[positions // metadata.block_size]
        offsets = positions % metadata.block_size
        # [kv_heads, 1, high - low, dim]: one axis for the query heads of a group
        key = key_blocks[blocks, :, offsets].transpose(0, 1).unsqueeze(1).to(compute)
        value = value_blocks[blocks, :, offsets].transpose(0, 1).unsqueeze(1).to(compute)
        grouped = query[row].to(compute).unflatten(0, (kv_heads, -1))  # [kv_heads, group, query_len, head_dim]
        scores = grouped @ key.transpose(-1, -2) * scale  # [kv_heads, group, query_len, high - low]
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            full = bias.expand(batch, heads, query_len, bias.shape[-1])[row]
            full = full if bias.shape[-1] == 1 else full[..., low:high]
            scores = scores + full.to(compute).unflatten(0, (kv_heads, -1))
        bounds = torch.tensor(ranges, device=query.device)
        visible = (positions >= bounds[:, :1]) & (positions < bounds[:, 1:])
        scores = scores.masked_fill(~visible, float("-inf"))
        # The sink, or -inf for none, is one more column without a value; a row of -inf only softmaxes to NaN: zeros.
        sink = torch.full((heads,), float("-inf"), device=query.device) if sinks is None else sinks
        sink = sink.to(compute).view(kv_heads, -1, 1, 1).expand(-1, -1, query_len, -1)
        scores = torch.cat([scores, sink], dim=-1)
        blind = (scores == float("-inf")).all(dim=-1, keepdim=True)
        weights = scores.masked_fill(blind, 0.0).softmax(dim=-1)[..., :-1].masked_fill(blind, 0.0)
        rows.append((weights @ value).flatten(0, 1).transpose(0, 1))  # [query_len, heads, value_dim]
    stacked = torch.stack(rows) if rows else query.new_zeros(0, query_len, heads, value_dim)
    return stacked.to(query.dtype).contiguous()
