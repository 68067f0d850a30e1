"""What each row sees in a step: a cache's step and a mask, in words or numbers, become a `StepMetadata` and a bias,
once for all layers."""

from __future__ import annotations

from array import array

import torch
from torch import nn

from ..cache.handles import Step
from ..cache.packed import NotPackable, PackedStep
from ..step import Lengths, StepMetadata
from .masks import MaskPattern, PagedMask


def packed_step(step: PackedStep, mask: torch.Tensor | None, device: torch.device) -> StepMetadata:
    """A packed step under the window of its mask. Raises `NotPackable` for any other mask."""
    window = _window(step, mask)
    chunks, num_decodes = step.chunks, step.num_decodes
    tables = step.tables
    if chunks:
        width = max(tables.shape[1], *(len(chunk.block_ids) for chunk in chunks))
        ids = array("i")
        for chunk in chunks:
            ids.extend(chunk.block_ids)
            ids.extend([0] * (width - len(chunk.block_ids)))
        tables = torch.frombuffer(ids, dtype=torch.int32).view(len(chunks), width)
        if num_decodes:
            tables = torch.cat([nn.functional.pad(step.tables.cpu(), (0, width - step.tables.shape[1])), tables])
    is_known = step.lengths is None
    return StepMetadata(
        block_tables=tables.to(device),
        query_start=(*range(num_decodes), *(chunk.first for chunk in chunks), step.num_tokens),
        seq_lens=(*step.seq_lens, *(chunk.seq_len for chunk in chunks)),
        starts=(0,) * (num_decodes + len(chunks)) if is_known else (),
        block_size=step.block_size,
        window=window,
        slots=step.slots[0],
        block_ids=step.block_ids,
        lengths=None if step.lengths is None else Lengths(*step.lengths),
    )


def _window(step: PackedStep, mask: torch.Tensor | None) -> int | None:
    """The window of a mask that is causal and nothing else; tokens that the group gave back must lie outside it."""
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
    return pattern.window


def rectangle_step(
    step: Step, query_len: int, attention_mask: torch.Tensor | None, is_causal: bool, device: torch.device
) -> tuple[StepMetadata, torch.Tensor | None] | None:
    """
    Metadata and additive bias (in table coordinates) of a step of rows of equally many queries that say the same as
    `attention_mask`, or `None` if nothing short of a dense mask does.
    """
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
    if mask.dim() != 4 or mask.shape[3] != step.length - step.first or (mask.shape[2] > 1 and any(step.paddings)):
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf"))
    firsts = tuple(max(step.first, padding) for padding in step.paddings)
    columns = firsts, (step.length,) * len(firsts)
    metadata = build_metadata(step, query_len, MaskPattern(causal=False), columns, device)
    return metadata, in_table_coordinates(mask.float(), step)


def in_table_coordinates(bias: torch.Tensor, step: Step) -> torch.Tensor:
    """`bias` `(rows or 1, ..., length - first)`, the columns of each row counted as its table counts; others hidden."""
    shifts = [step.first - padding - dropped for padding, dropped in zip(step.paddings, step.dropped)]
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
    return StepMetadata.rectangle(
        step.block_tables(device),
        seq_lens,
        step.block_size,
        query_len=query_len,
        starts=starts,
        causal=pattern.causal,
        window=pattern.window,
    )
