"""A packed step on the Triton kernels: one launch for all decodes, one for all chunks, cascades where they pay off."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...cache.packed import PackedStep
from ...kernels.triton import decode, prefill
from ...kernels.triton.cascade import Cascade, cascade_attention, find_cascade
from ...step import StepMetadata


class KernelPlan:
    """
    A step's lengths and tables on the device, made once for all layers.

    Args:
        step ([`PackedStep`]): Whose tables it reads.
        window (`int`, *optional*): Of the mask.
        device (`torch.device`): Of the blocks.
    """

    def __init__(self, step: PackedStep, window: int | None, device: torch.device) -> None:
        self.num_decodes, self.num_tokens, self.window = step.num_decodes, step.num_tokens, window
        self.max_query_len = max((chunk.query_len for chunk in step.chunks), default=0)
        self._tables: Sequence[list[int]] = step.block_ids
        self._cascades: dict[Hashable, Cascade | None] = {}
        if step.lengths is None:
            seq_lens, starts = self._copy(step, device)
        else:  # decodes only, which are in place already: nothing is copied
            seq_lens, starts = step.lengths
        self.decodes = StepMetadata(
            block_tables=step.tables.to(device),
            seq_lens=seq_lens,
            starts=starts,
            seq_lens_host=step.seq_lens,
            starts_host=(0,) * len(step.seq_lens),
            query_len=1,
            block_size=step.block_size,
            window=window,
        )

    def _copy(self, step: PackedStep, device: torch.device) -> tuple[Tensor, Tensor]:
        """The step's lengths and the chunks' tables to the device; returns lengths and starts of the decodes."""
        rows, width = len(step.chunks), max((len(chunk.block_ids) for chunk in step.chunks), default=0)
        buffer = array("i", step.seq_lens)
        buffer.extend([0] * self.num_decodes)
        buffer.append(0)
        for chunk in step.chunks:
            buffer.append(buffer[-1] + chunk.query_len)
        buffer.extend(chunk.seq_len for chunk in step.chunks)
        for chunk in step.chunks:
            buffer.extend(chunk.block_ids)
            buffer.extend([0] * (width - len(chunk.block_ids)))
        # one buffer, so that the device gets one copy
        on_device = torch.frombuffer(buffer, dtype=torch.int32).to(device, non_blocking=True)
        lengths = (self.num_decodes, self.num_decodes, rows + 1, rows, rows * width)
        seq_lens, starts, self.cu_query_lens, self.seq_lens, tables = on_device.split(lengths)
        self.tables = tables.view(rows, width)
        return seq_lens, starts

    def cascade(self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> Cascade | None:
        """The decodes' cascade for a layer with heads like these."""
        if not self._tables:
            return None
        shape = (query.shape[1], *key_blocks.shape[1:], value_blocks.shape[3], query.dtype, key_blocks.dtype)
        if shape not in self._cascades:
            self._cascades[shape] = find_cascade(query, key_blocks, value_blocks, self._tables, self.decodes)
        return self._cascades[shape]


def supports(
    query: Tensor, key_blocks: Tensor, value_blocks: Tensor, plan: KernelPlan, scale: float, sinks: Tensor | None
) -> str | None:
    """What keeps `packed_attention` from taking these arguments, in words; `None` if nothing does."""
    obstacle = None
    if plan.num_decodes:
        obstacle = decode.supports(query[:, :, :1], key_blocks, value_blocks, plan.decodes, sinks)
    if plan.num_decodes < plan.num_tokens and obstacle is None:
        obstacle = prefill.supports(query[0].transpose(0, 1), key_blocks, value_blocks, scale, sinks)
    return obstacle


def packed_attention(
    query: Tensor, key_blocks: Tensor, value_blocks: Tensor, plan: KernelPlan, **features: Any
) -> Tensor:
    """
    Attention of every sequence's new tokens over its own blocks.

    Args:
        query (`torch.Tensor` of shape `(1, heads, num_tokens, head_dim)`)
        key_blocks, value_blocks (`torch.Tensor` of shape `(num_blocks, kv_heads, block_size, dim)`)
        features: `scale`, `softcap` and `sinks` as in `reference.paged_attention`.

    Returns:
        `torch.Tensor` of shape `(1, num_tokens, heads, value_dim)`, in the query's dtype.
    """
    queries = query[0].transpose(0, 1)  # [num_tokens, heads, head_dim]
    parts = []
    if plan.num_decodes:
        rows = queries[: plan.num_decodes].unsqueeze(2)  # [num_decodes, heads, 1, head_dim]
        cascade = plan.cascade(rows, key_blocks, value_blocks)
        if cascade is not None:
            part = cascade_attention(rows, key_blocks, value_blocks, cascade, **features)
        else:
            part = decode.paged_attention(rows, key_blocks, value_blocks, plan.decodes, **features)
        parts.append(part[:, 0])
    if plan.num_decodes < plan.num_tokens:
        part = prefill.prefill_attention(
            queries[plan.num_decodes :],
            key_blocks,
            value_blocks,
            cu_query_lens=plan.cu_query_lens,
            seq_lens=plan.seq_lens,
            block_tables=plan.tables,
            max_query_len=plan.max_query_len,
            window=plan.window,
            **features,
        )
        parts.append(part)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)
