"""Packs a step on the host: its tokens in one row, with their positions, slots and block tables.
Writes block tables to tensors. Runs no forward."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...plan import StepPlan
from ..decoding.scores import PromptLogprobs
from .prompts import find_media

_BLOCK_IDS = operator.attrgetter("block_ids")


class GroupTokens(NamedTuple):
    """A packed step's slots and block tables in one layer group."""

    slots: list[int]  # by token
    tables: list[list[int]]  # block ids, by row
    seq_lens: list[int]  # tokens in each row's table, including this step's
    origins: list[int]  # position in the sequence of the first token in each row's table
    # first visible position in each row's table; empty if only a window hides leading tokens
    starts: Sequence[int] = ()


class PackedTokens(NamedTuple):
    """The tokens of a packed step, row after row."""

    token_ids: list[int]
    positions: list[int]  # of each token in its sequence
    last: list[int]  # indices of the tokens whose logits are returned
    query_start: list[int]  # index of each row's first token, then the number of tokens
    num_decodes: int  # leading rows with one token each
    groups: list[GroupTokens]
    # ids of rotary factors, by token (`model.rope.LengthRope`); empty without a `LengthRope`, or if
    # all tokens use the factors of short sequences
    rope_factors: list[int]
    # positions by axis (one or several) and token; `None` if every sequence's positions are 0, 1,
    # 2, ... on all axes
    axes: list[list[int]] | None = None
    has_drafts: bool = False  # whether some rows are draft tokens of a row before them


def pack(
    plan: StepPlan,
    block_sizes: list[int],
    rope: Any,
    is_ahead: bool = False,
) -> PackedTokens:
    """Packs the tokens of a step, for layer groups with these block sizes (tokens). `rope`: the
    rotary embeddings if their factors depend on a sequence's length (`model.rope.LengthRope`),
    otherwise `None`. `is_ahead`: whether each row has one token, whose id is known only on the
    device; the packed ids are then 0."""
    # leading rows of one token each, which whole-list operations pack faster than a loop
    num_simple = plan.num_decodes
    if plan.has_drafts or rope is not None:
        num_simple = 0
    positions = list(plan.starts[:num_simple])
    if is_ahead:
        token_ids = [0] * num_simple
    else:
        pairs = zip(plan.sequences, positions)
        token_ids = [sequence.token_ids[position] for sequence, position in pairs]
    last = [row for row in range(num_simple) if plan.num_logits[row]]
    query_start = list(range(num_simple + 1))
    factors: list[int] = []
    num_decodes = num_simple
    for row in range(num_simple, len(plan.sequences)):
        sequence = plan.sequences[row]
        start = plan.starts[row]
        count = plan.counts[row]
        draft = sequence.draft
        end = start + count
        first_index = len(token_ids)
        end_index = first_index + count
        if num_decodes == first_index and (draft or count == 1):  # all earlier rows are decodes
            num_decodes += count
        if is_ahead:
            token_ids += [0] * count
        else:
            token_ids += sequence.token_ids[start : end - len(draft)]
            token_ids += draft
        positions += range(start, end)
        query_start += _row_ends(first_index, count, draft)
        last += range(end_index - plan.num_logits[row], end_index)
        if rope is not None:
            num_prompt_tokens = sequence.request.num_prompt_tokens
            length = max(end, len(sequence.token_ids))
            factors += rope.token_factors(start, end, num_prompt_tokens, length)
    if rope is not None and rope.has_short_factors and not any(factors):
        factors = []
    groups = []
    for group_index, block_size in enumerate(block_sizes):
        groups.append(_pack_group(plan, group_index, block_size, num_simple))
    return PackedTokens(
        token_ids,
        positions,
        last,
        query_start,
        num_decodes,
        groups,
        factors,
        find_media().position_axes(plan, positions) if plan.has_inputs else None,
        plan.has_drafts,
    )


def _row_ends(first: int, count: int, draft: list[int]) -> range:
    """Returns the end indices of the packed rows that hold `count` tokens from index `first` on:
    one row or, with a draft, one row per token."""
    row_len = 1 if draft else count
    return range(first + row_len, first + count + 1, row_len)


def _pack_group(plan: StepPlan, group_index: int, block_size: int, num_simple: int) -> GroupTokens:
    all_tables = [sequence.blocks.tables[group_index] for sequence in plan.sequences]
    simple_tables = all_tables[:num_simple]
    origins = [table.num_dropped * block_size for table in simple_tables]
    tables = list(map(_BLOCK_IDS, simple_tables))
    # the index of each token in its table
    indices = list(map(operator.sub, plan.starts, origins))
    slots = [
        block_ids[index // block_size] * block_size + index % block_size
        for block_ids, index in zip(tables, indices)
    ]
    seq_lens = list(map((1).__add__, indices))
    for row in range(num_simple, len(all_tables)):
        table = all_tables[row]
        count = plan.counts[row]
        origin = table.num_dropped * block_size
        start = plan.starts[row]
        slots += table.slots(start, start + count)
        lengths = _row_ends(start - origin, count, plan.sequences[row].draft)
        seq_lens += lengths
        tables += [table.block_ids] * len(lengths)
        origins += [origin] * len(lengths)
    return GroupTokens(slots, tables, seq_lens, origins)


def recorded_prompts(plan: StepPlan) -> list[tuple[PromptLogprobs, int, range]]:
    """Returns, for each prompt in the step whose log-probabilities are recorded: the recording, the
    position of the prompt's first token in this step, and the range of packed tokens whose logits
    are recorded: the prompt tokens that another prompt token follows."""
    recordings = []
    first = 0
    for sequence, start, num_tokens in zip(plan.sequences, plan.starts, plan.counts):
        recording = sequence.request.prompt_logprobs
        if recording is not None:
            # draft tokens are not part of the sequence
            count = recording.num_recordable(start, start + num_tokens - len(sequence.draft))
            if count:
                tokens = range(first, first + count)
                recordings.append((recording, start, tokens))
        first += num_tokens
    return recordings


def write_changed_rows(
    buffer: Any,
    width: int,
    written_ids: list[list[int]],
    tables: Iterable[list[int]],
    first: int = 0,
) -> None:
    """Writes block tables to the rows of `buffer`, `width` int32 per row, from row `first` on.
    `written_ids` has each row's current ids, and is updated. If a table has only grown, as most do
    from step to step, writes only its new ids; writes nothing for an unchanged table."""
    for row, block_ids in enumerate(tables, first):
        row_ids = written_ids[row]
        if row_ids == block_ids:
            continue
        if row_ids != block_ids[: len(row_ids)]:
            written_ids[row] = row_ids = []
        start = row * width
        new_ids = block_ids[len(row_ids) :]
        begin = start + len(row_ids)
        buffer[begin : begin + len(new_ids)] = array("i", new_ids)
        row_ids += new_ids  # last, since an interrupt may keep the lines above from writing


class TableRows:
    """The block tables of a step's rows in one tensor. Each step writes its changes in place, so a
    step may begin only when nothing uses the previous step's tensor any more."""

    def __init__(self) -> None:
        self._written: list[list[int]] = []
        self._tensor = torch.empty(0, 0, dtype=torch.int32, device="cpu")
        self._buffer = memoryview(b"")  # the tensor's memory

    def tensor(self, tables: list[list[int]]) -> Tensor:
        """Returns the tables as `(len(tables), n)` int32 on the CPU, valid until the next call; `n`
        is at least the length of the longest table. Block ids past a table's end are arbitrary."""
        num_rows = len(tables)
        width = max(map(len, tables), default=0)
        row_capacity, column_capacity = self._tensor.shape
        if num_rows > row_capacity or width > column_capacity:
            row_capacity = max(num_rows, row_capacity)
            # spare columns, since block tables grow by one block at a time
            column_capacity = max(width + width // 2, column_capacity)
            tensor = torch.zeros(row_capacity, column_capacity, dtype=torch.int32, device="cpu")
            written_ids: list[list[int]] = [[] for _ in range(row_capacity)]
            buffer = memoryview(tensor.view(-1).numpy())
            self._written, self._buffer, self._tensor = written_ids, buffer, tensor
        write_changed_rows(self._buffer, column_capacity, self._written, tables)
        return self._tensor[:num_rows]


Bounds = tuple[int, int]
"""A range of packed tokens, `[start, end)`."""
