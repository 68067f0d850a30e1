"""A packed step on the host: its tokens in one row, their slots and block tables; block tables as
tensors. It launches no forward."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...plan import StepPlan
from ..decoding.scores import PromptLogprobs

_BLOCK_IDS = operator.attrgetter("block_ids")


class GroupTokens(NamedTuple):
    """A packed step's slots and block tables in one layer group."""

    slots: list[int]  # by token
    tables: list[list[int]]  # block ids of each row
    seq_lens: list[int]  # tokens in each table, the step's included
    origins: list[int]  # position in its sequence at which each table begins


class PackedTokens(NamedTuple):
    token_ids: list[int]
    positions: list[int]
    last: list[int]  # packed positions whose logits are returned
    query_start: list[int]  # first packed position of each row, then the end of the last
    num_decodes: int  # leading rows with one token each
    groups: list[GroupTokens]
    rope_factors: list[int]  # by token; empty if all tokens use the factors of short sequences
    # positions on each axis; `None` if all sequences' positions count tokens
    axes: list[list[int]] | None = None
    has_drafts: bool = False  # whether some rows are draft tokens of an earlier row


def pack(
    plan: StepPlan,
    block_sizes: list[int],
    rope: Any,
    is_ahead: bool = False,
) -> PackedTokens:
    """Lays out the tokens of a step, for layer groups with blocks of these sizes. `rope`: rotary
    factors that depend on a sequence's length (`model.rope.LengthRope`), or `None`. `is_ahead`:
    whether the tokens, one of each row, are on the device only."""
    # leading rows of one token each, which are laid out column by column
    num_plain = plan.num_decodes
    if plan.has_drafts or rope is not None:
        num_plain = 0
    positions = list(plan.starts[:num_plain])
    if is_ahead:
        token_ids = [0] * num_plain
    else:
        plain = zip(plan.sequences, positions)
        token_ids = [sequence.token_ids[position] for sequence, position in plain]
    last = [row for row in range(num_plain) if plan.num_logits[row]]
    query_start = list(range(num_plain + 1))
    factors: list[int] = []
    num_decodes = num_plain
    for row in range(num_plain, len(plan.sequences)):
        sequence = plan.sequences[row]
        start = plan.starts[row]
        count = plan.counts[row]
        draft = sequence.draft
        end = start + count
        first = len(token_ids)
        stop = first + count
        if num_decodes == first and (draft or count == 1):  # only leading ones
            num_decodes += count
        if is_ahead:
            token_ids += [0] * count
        else:
            token_ids += sequence.token_ids[start : end - len(draft)]
            token_ids += draft
        positions += range(start, end)
        query_start += _row_ends(first, count, draft)
        last += range(stop - plan.num_logits[row], stop)
        if rope is not None:
            num_prompt_tokens = sequence.request.num_prompt_tokens
            length = max(end, len(sequence.token_ids))
            factors += rope.token_factors(start, end, num_prompt_tokens, length)
    if rope is not None and rope.has_short_factors and not any(factors):
        factors = []
    groups = []
    for number, size in enumerate(block_sizes):
        groups.append(_pack_group(plan, number, size, num_plain))
    return PackedTokens(
        token_ids,
        positions,
        last,
        query_start,
        num_decodes,
        groups,
        factors,
        axes_of(plan, positions) if plan.has_inputs else None,
        plan.has_drafts,
    )


def _row_ends(first: int, count: int, draft: list[int]) -> range:
    """Returns where the rows of `count` tokens from `first` on end: one row, or with a draft rows
    of one token each."""
    step = 1 if draft else count
    return range(first + step, first + count + 1, step)


def _pack_group(plan: StepPlan, number: int, size: int, num_plain: int) -> GroupTokens:
    all_tables = [sequence.blocks.tables[number] for sequence in plan.sequences]
    plain = all_tables[:num_plain]
    origins = [table.num_dropped * size for table in plain]
    tables = list(map(_BLOCK_IDS, plain))
    indices = list(map(operator.sub, plan.starts, origins))
    slots = [ids[index // size] * size + index % size for ids, index in zip(tables, indices)]
    seq_lens = list(map((1).__add__, indices))
    for row in range(num_plain, len(all_tables)):
        table = all_tables[row]
        count = plan.counts[row]
        origin = table.num_dropped * size
        first = plan.starts[row] - origin
        slots += table.slots(first, first + count)
        lengths = _row_ends(first, count, plan.sequences[row].draft)
        seq_lens += lengths
        tables += [table.block_ids] * len(lengths)
        origins += [origin] * len(lengths)
    return GroupTokens(slots, tables, seq_lens, origins)


def recorded_prompts(plan: StepPlan) -> list[tuple[PromptLogprobs, int, range]]:
    """Returns, for each prompt whose log-probabilities are recorded: the recording, the position of
    the first token of this step, and the packed tokens that another prompt token follows."""
    recordings = []
    first = 0
    for sequence, start, num_tokens in zip(plan.sequences, plan.starts, plan.counts):
        recording = sequence.request.prompt_logprobs
        if recording is not None:
            # a draft is not among the computed tokens
            count = recording.num_recordable(start, start + num_tokens - len(sequence.draft))
            if count:
                tokens = range(first, first + count)
                recordings.append((recording, start, tokens))
        first += num_tokens
    return recordings


def axes_of(plan: StepPlan, positions: list[int]) -> list[list[int]] | None:
    """Returns `PackedTokens.axes`; all sequences with several axes must have the same number."""
    axes_of_rows: list[list[list[int]]] = []
    for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts):
        row_axes = None
        if sequence.request.inputs is not None:
            prompts, row = sequence.request.inputs
            row_axes = prompts.positions(row, start, start + count)
        axes_of_rows.append(row_axes or [])
    num_axes = max(map(len, axes_of_rows))
    if not num_axes:
        return None
    axes: list[list[int]] = [[] for _ in range(num_axes)]
    for row_axes, count in zip(axes_of_rows, plan.counts):
        first = len(axes[0])
        counted = [positions[first : first + count]] * num_axes
        for axis, values in zip(axes, row_axes or counted):
            axis += values
    return axes


def write_changed(
    ints: Any,
    width: int,
    written: list[list[int]],
    tables: Iterable[list[int]],
    first: int = 0,
) -> None:
    """Writes changed rows of `width` numbers, from row `first` on: only the new block ids if a
    table has only grown since it was `written`, as most do from step to step, else the whole
    row."""
    for row, block_ids in enumerate(tables, first):
        row_ids = written[row]
        if row_ids == block_ids:
            continue
        if row_ids != block_ids[: len(row_ids)]:
            written[row] = row_ids = []
        start = row * width
        added = block_ids[len(row_ids) :]
        begin = start + len(row_ids)
        ints[begin : begin + len(added)] = array("i", added)
        row_ids += added  # after the write, which an interrupt may prevent


class TableRows:
    """Block tables of a step's rows as one tensor. Each step writes only changed rows, in place, so
    no code may still use the previous step's tensor."""

    def __init__(self) -> None:
        self._written: list[list[int]] = []
        self._tensor = torch.empty(0, 0, dtype=torch.int32, device="cpu")
        self._numbers = memoryview(b"")  # the tensor's memory

    def tensor(self, tables: list[list[int]]) -> Tensor:
        """Returns `(len(tables), max_blocks)` int32 on the CPU, valid until the next call."""
        num_rows = len(tables)
        width = max(map(len, tables), default=0)
        row_capacity, column_capacity = self._tensor.shape
        if num_rows > row_capacity or width > column_capacity:
            row_capacity = max(num_rows, row_capacity)
            # spare columns, since block tables grow by one block at a time
            column_capacity = max(width + width // 2, column_capacity)
            tensor = torch.zeros(row_capacity, column_capacity, dtype=torch.int32, device="cpu")
            written: list[list[int]] = [[] for _ in range(row_capacity)]
            numbers = memoryview(tensor.view(-1).numpy())
            self._written, self._numbers, self._tensor = written, numbers, tensor
        write_changed(self._numbers, column_capacity, self._written, tables)
        return self._tensor[:num_rows]


Bounds = tuple[int, int]
"""Packed tokens `[start, end)`."""
