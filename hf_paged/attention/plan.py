"""What each row sees in a step: a mask in words or numbers becomes metadata and a bias, once for all layers."""

from __future__ import annotations

import torch
from torch import nn

from ..cache.handles import Step
from ..step import StepMetadata
from .masks import MaskPattern, PagedMask


def plan_attention(
    step: Step, query_len: int, attention_mask: torch.Tensor | None, is_causal: bool, device: torch.device
) -> tuple[StepMetadata, torch.Tensor | None] | None:
    """
    Metadata and additive bias (in table coordinates) that say the same as `attention_mask`, or `None` if nothing short
    of a dense mask does. Worked out once per step and mask, for all layers.
    """
    memo_key = (id(attention_mask), query_len, is_causal, device)
    found = step.memo.get(memo_key)
    if found is None or found[0] is not attention_mask:
        found = (attention_mask, _plan(step, query_len, attention_mask, is_causal, device))
        step.memo[memo_key] = found
    return found[1]


def _plan(
    step: Step, query_len: int, attention_mask: torch.Tensor | None, is_causal: bool, device: torch.device
) -> tuple[StepMetadata, torch.Tensor | None] | None:
    if attention_mask is None:
        # without a mask, implementations attend to everything unless several queries are causal among themselves
        if (is_causal and query_len > 1) or any(step.paddings):
            return None
        return build_metadata(step, query_len, MaskPattern(causal=False), None, device), None
    if not isinstance(attention_mask, PagedMask):
        return _plan_dense(step, query_len, attention_mask, device)
    arguments, pattern = attention_mask.arguments, attention_mask.pattern
    sizes = (arguments["q_length"], arguments["kv_length"], arguments.get("kv_offset", 0))
    if pattern is None or sizes != (query_len, step.length - step.first, step.first):
        return None
    if pattern.causal and arguments.get("q_offset", 0) != step.length - query_len:
        return None
    columns = attention_mask.visible_columns()
    if columns is None or (pattern.chunk is not None and query_len > 1):
        return None
    if pattern.causal and any(end < step.length for end in columns[1]):
        return None
    metadata = build_metadata(step, query_len, pattern, columns, device)
    return None if metadata is None else (metadata, None)


def _plan_dense(
    step: Step, query_len: int, mask: torch.Tensor, device: torch.device
) -> tuple[StepMetadata, torch.Tensor | None] | None:
    shift = table_shift(step)
    if shift is None or mask.dim() != 4 or mask.shape[-1] != step.length - step.first:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf"))
    metadata = build_metadata(step, query_len, MaskPattern(causal=False), None, device)
    return None if metadata is None else (metadata, in_table_coordinates(mask.float(), shift))


def table_shift(step: Step) -> int | None:
    """Columns to add in front of a dense mask to make it count in table coordinates; `None` if rows differ."""
    if any(step.paddings) or len(set(step.dropped)) != 1:
        return None
    return step.first - step.dropped[0]


def in_table_coordinates(bias: torch.Tensor, shift: int) -> torch.Tensor:
    """`bias` `(..., keys)` with `shift` hidden columns in front."""
    return nn.functional.pad(bias, (shift, 0), value=float("-inf")) if shift else bias


def build_metadata(
    step: Step,
    query_len: int,
    pattern: MaskPattern,
    columns: tuple[tuple[int, ...], tuple[int, ...]] | None,
    device: torch.device,
) -> StepMetadata:
    """
    The metadata of one step and pattern.

    Args:
        columns: First and end of the key positions that each row's padding mask leaves visible, in the padded batch.

    Raises:
        ValueError: if the mask shows positions that were padding when they were cached and so were not stored.
    """
    rows = len(step.host_tables)
    firsts, ends = columns if columns is not None else ((step.first,) * rows, (step.length,) * rows)
    if len(firsts) != rows:
        firsts, ends = firsts * rows, ends * rows
    seq_lens, starts = [], []
    for padding, dropped, first, end in zip(step.paddings, step.dropped, firsts, ends):
        if first < padding and end > first:
            raise ValueError(
                f"the attention mask shows position {first}, but the first {padding} positions of that row were "
                "padding when they were cached and are not stored: pass a mask that hides them, as before"
            )
        if pattern.chunk is not None:
            # chunks count from the row's first real token
            first += max(0, step.length - 1 - first) // pattern.chunk * pattern.chunk
        first, behind = max(first, step.first), padding + dropped
        seq_lens.append(max(0, end - behind))
        starts.append(max(0, first - behind))
    return StepMetadata(
        block_tables=step.block_tables(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens_host=tuple(seq_lens),
        starts_host=tuple(starts),
        query_len=query_len,
        block_size=step.block_size,
        causal=pattern.causal,
        window=pattern.window,
    )
