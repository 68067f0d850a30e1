"""What each row sees in a step: a cache's step and a mask, in words or numbers, become a `StepMetadata` and a bias,
once for all layers."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ..step import NotPackable, StepMetadata
from .masks import MaskPattern, PagedMask


def packed_step(step: StepMetadata, mask: torch.Tensor | None) -> StepMetadata:
    """
    A packed step under the window of its mask. Raises `NotPackable` unless the mask is causal and nothing else, and
    tokens that the group gave back lie outside its window.
    """
    if not isinstance(mask, PagedMask):
        raise NotPackable(f"the attention mask is {'None' if mask is None else 'a dense tensor'}")
    arguments, pattern = mask.arguments, mask.pattern
    sizes = [arguments.get(name, 0) for name in ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset")]
    if pattern is None or not pattern.causal or pattern.chunk is not None:
        raise NotPackable("the attention mask is more than causal with a window")
    if sizes != [1, step.num_tokens, step.num_tokens, 0, 0]:
        raise NotPackable(f"the attention mask was made for other sizes than 1 x {step.num_tokens} tokens: {sizes}")
    if mask.visible_columns() != ((0,), (step.num_tokens,)):
        raise NotPackable("the attention mask hides tokens")
    if step.window is not None and (pattern.window is None or pattern.window > step.window):
        raise NotPackable(f"the mask's window is {pattern.window}, but the cache keeps {step.window} tokens")
    return dataclasses.replace(step, window=pattern.window)


def rectangle_step(
    step: StepMetadata, query_len: int, attention_mask: torch.Tensor | None, is_causal: bool, device: torch.device
) -> tuple[StepMetadata, torch.Tensor | None] | None:
    """
    Metadata and additive bias (in table coordinates) of a step of rows of equally many queries that say the same as
    `attention_mask`, or `None` if nothing short of a dense mask does.
    """
    columns = step.columns
    assert columns is not None
    if attention_mask is None:
        # without a mask, implementations attend to everything unless several queries are causal among themselves
        if (is_causal and query_len > 1) or step.has_padding:
            return None
        return _build(step, query_len, MaskPattern(causal=False), None, device), None
    if not isinstance(attention_mask, PagedMask):
        mask = attention_mask
        if mask.dim() != 4 or mask.shape[3] != len(columns) or (mask.shape[2] > 1 and step.has_padding):
            return None
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, float("-inf"))
        visible = tuple(max(columns.start, origin) for origin in step.origins), (columns.stop,) * step.num_rows
        metadata = _build(step, query_len, MaskPattern(causal=False), visible, device)
        return metadata, in_table_coordinates(mask.float(), step)
    arguments, pattern = attention_mask.arguments, attention_mask.pattern
    sizes = (arguments["q_length"], arguments["kv_length"], arguments.get("kv_offset", 0))
    if pattern is None or sizes != (query_len, len(columns), columns.start):
        return None
    if pattern.causal and arguments.get("q_offset", 0) != columns.stop - query_len:
        return None
    seen = attention_mask.visible_columns()
    if seen is None or (pattern.chunk is not None and query_len > 1):
        return None
    if pattern.causal and any(end < columns.stop for end in seen[1]):
        return None
    return _build(step, query_len, pattern, seen, device), None


def in_table_coordinates(bias: torch.Tensor, step: StepMetadata) -> torch.Tensor:
    """`bias` `(rows or 1, ..., len(columns))`, the columns of each row counted as its table counts; others hidden."""
    assert step.columns is not None
    shifts = [step.columns.start - origin for origin in step.origins]
    if len(set(shifts)) == 1:
        shift = shifts[0]  # a negative one cuts columns off
        return nn.functional.pad(bias, (shift, 0), value=float("-inf")) if shift else bias
    width = bias.shape[-1] + max(shifts)
    rows = bias.expand(len(shifts), *bias.shape[1:])
    moved = [
        nn.functional.pad(row, (shift, width - row.shape[-1] - shift), value=float("-inf"))
        for row, shift in zip(rows, shifts)
    ]
    return torch.stack(moved)


def _build(
    step: StepMetadata,
    query_len: int,
    pattern: MaskPattern,
    visible: tuple[tuple[int, ...], tuple[int, ...]] | None,
    device: torch.device,
) -> StepMetadata:
    """
    The step under a pattern; `visible`: first and end of the columns that each row's padding mask leaves visible.
    Raises `ValueError` if the mask shows positions that were padding when they were cached and so were not stored.
    """
    columns, num_rows = step.columns, step.num_rows
    assert columns is not None
    firsts, ends = visible or ((columns.start,), (columns.stop,))
    if len(firsts) != num_rows:
        firsts, ends = firsts * num_rows, ends * num_rows
    seq_lens, starts = [], []
    for origin, first, end in zip(step.origins, firsts, ends):
        if max(first, columns.start) < origin and end > first:
            raise ValueError(
                f"the attention mask shows position {first}, but the first {origin} positions of that row were "
                "padding when they were cached and are not stored: pass a mask that hides them, as before"
            )
        if pattern.chunk is not None:
            # chunks count from the row's first real token
            first += max(0, columns.stop - 1 - first) // pattern.chunk * pattern.chunk
        seq_lens.append(max(0, end - origin))
        starts.append(max(0, first - origin, columns.start - origin))
    return StepMetadata.rectangle(
        step.block_tables.to(device),
        seq_lens,
        step.block_size,
        query_len=query_len,
        starts=starts,
        causal=pattern.causal,
        window=pattern.window,
    )
