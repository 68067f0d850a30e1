"""The parts of packed steps that serve `MediaPrompts`: forwards of whole prompts, and positions on
several axes."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..batching.execution.runner import LogitsPart, count_cached
from ..cache.paged_cache import PagedCache
from ..cache.sequence_blocks import UNCACHED
from ..model.own_loop import pad_token_id
from ..plan import StepPlan
from .prompts import MediaPrompts


def run_prompts(
    model: PreTrainedModel,
    cache: PagedCache,
    whole_prompts: list[tuple[MediaPrompts, dict[int, int]]],
    plan: StepPlan,
) -> LogitsPart:
    """Implements `rooms.MediaRoom.run_prompts`."""
    index_by_row: dict[int, int] = {}
    num_rows = 0
    for prompts, indices in whole_prompts:
        for row, index in indices.items():
            index_by_row[num_rows + row] = index
        num_rows += len(prompts.paddings)
    prompts, *other_prompts = [prompts for prompts, _ in whole_prompts]
    if other_prompts:
        prompts = prompts.merged(other_prompts, pad_token_id(model))
    sequences = {row: plan.sequences[index] for row, index in index_by_row.items()}
    logits, looks_ahead = prompts.forward(model, cache, sequences, count_cached(index_by_row, plan))
    is_placeholder = prompts.placeholder_mask(model.config)
    # a block's keys in the prefix cache must cover all tokens on which its K/V depend, so rows
    # in which a text token may have attended to later tokens are not cached
    for row, sequence in sequences.items():
        is_text = None if is_placeholder is None else ~is_placeholder[row].cpu()
        if looks_ahead is None or is_text is None or bool((looks_ahead[row] & is_text).any()):
            sequence.request.namespace = UNCACHED
    rows_with_logits = [row for row, index in index_by_row.items() if plan.num_logits[index]]
    return [index_by_row[row] for row in rows_with_logits], logits[rows_with_logits]


def position_axes(plan: StepPlan, positions: list[int]) -> list[list[int]] | None:
    """Implements `rooms.MediaRoom.position_axes`."""
    axes_of_rows: list[list[list[int]]] = []
    for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts):
        prompts, row = sequence.request.inputs or (None, 0)
        row_axes = prompts and prompts.positions(row, start, start + count)
        axes_of_rows.append(row_axes or [])
    num_axes = max(map(len, axes_of_rows))
    if not num_axes:
        return None
    axes: list[list[int]] = [[] for _ in range(num_axes)]
    for row_axes, count in zip(axes_of_rows, plan.counts):
        first = len(axes[0])
        default_axes = [positions[first : first + count]] * num_axes
        for axis, values in zip(axes, row_axes or default_axes):
            axis += values
    return axes
