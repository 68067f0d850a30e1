"""Lays out the tokens of a step one behind the other, with their slots and block tables."""

from __future__ import annotations

import operator
from typing import Any

from ...plan import StepPlan
from ..decoding.scores import PromptLogprobs
from .inputs import GroupTokens, PackedTokens

_BLOCK_IDS = operator.attrgetter("block_ids")


class Packing:
    """Packs the steps of a model whose layer groups have blocks of these sizes. `rope`: rotary
    factors that depend on a sequence's length (`model.rope.LengthRope`), or `None`."""

    def __init__(self, block_sizes: list[int], rope: Any) -> None:
        self._block_sizes = block_sizes
        self.rope = rope

    def pack(
        self,
        plan: StepPlan,
        is_ahead: bool = False,
    ) -> PackedTokens:
        """Lays out a packed step. `is_ahead`: the tokens are on the device only, one of each
        row."""
        # leading rows of one token each, whose columns need no look at each row
        num_plain = plan.num_decodes
        if plan.has_drafts or self.rope is not None:
            num_plain = 0
        num_rows = len(plan.sequences)
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
        for row in range(num_plain, num_rows):
            sequence = plan.sequences[row]
            start = plan.starts[row]
            count = plan.counts[row]
            draft = sequence.draft
            end = start + count
            first = len(token_ids)
            if num_decodes == first and (draft or count == 1):  # only leading ones
                num_decodes += count
            if is_ahead:
                token_ids += [0] * count
            else:
                token_ids += sequence.token_ids[start : end - len(draft)]
                token_ids += draft
            positions += range(start, end)
            if draft:  # rows of one token each
                query_start += range(first + 1, first + count)
            query_start.append(first + count)
            last += range(first + count - plan.num_logits[row], first + count)
            if self.rope is not None:
                factors += self.rope.token_factors(
                    start,
                    end,
                    sequence.request.num_prompt_tokens,
                    max(end, len(sequence.token_ids)),
                )
        if self.rope is not None and self.rope.is_fresh:
            if not any(factors):
                factors = []
        groups = []
        for number in range(len(self._block_sizes)):
            groups.append(self._pack_group(plan, number, num_plain))
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

    def _pack_group(
        self,
        plan: StepPlan,
        number: int,
        num_plain: int,
    ) -> GroupTokens:
        size = self._block_sizes[number]
        held = [sequence.blocks.tables[number] for sequence in plan.sequences]
        plain = held[:num_plain]
        origins = [table.num_dropped * size for table in plain]
        tables = list(map(_BLOCK_IDS, plain))
        indices = list(map(operator.sub, plan.starts, origins))
        slots = [ids[index // size] * size + index % size for ids, index in zip(tables, indices)]
        seq_lens = list(map((1).__add__, indices))
        for row in range(num_plain, len(held)):
            table = held[row]
            count = plan.counts[row]
            origin = table.num_dropped * size
            first = plan.starts[row] - origin
            slots += table.slots(first, first + count)
            if plan.sequences[row].draft:  # rows of one token each
                num_rows = count
                seq_lens += range(first + 1, first + 1 + count)
            else:
                num_rows = 1
                seq_lens.append(first + count)
            tables += [table.block_ids] * num_rows
            origins += [origin] * num_rows
        return GroupTokens(
            slots,
            tables,
            seq_lens,
            origins,
        )


def recorded_prompts(plan: StepPlan) -> list[tuple[PromptLogprobs, int, range]]:
    """Returns, for each prompt whose log-probabilities are recorded: the recording, the position of
    the first token computed now, and the packed tokens that a prompt token follows."""
    recordings = []
    first = 0
    for sequence, start, num_tokens in zip(plan.sequences, plan.starts, plan.counts):
        recording = sequence.request.prompt_logprobs
        if recording is not None:
            # a draft is not among the computed tokens
            count = recording.num_wanted(start, start + num_tokens - len(sequence.draft))
            if count:
                tokens = range(first, first + count)
                recordings.append((recording, start, tokens))
        first += num_tokens
    return recordings


def axes_of(plan: StepPlan, positions: list[int]) -> list[list[int]] | None:
    """Makes `PackedTokens.axes`; sequences with several axes must have equally many."""
    axes_by_start: dict[int, list[list[int]]] = {}  # by the first packed position
    first = 0
    for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts):
        if sequence.request.inputs is not None:
            prompts, row = sequence.request.inputs
            row_axes = prompts.positions(row, start, start + count)
            if row_axes is not None:
                axes_by_start[first] = row_axes
        first += count
    if not axes_by_start:
        return None
    num_axes = max(map(len, axes_by_start.values()))
    axes = [positions.copy() for _ in range(num_axes)]
    for start, row_axes in axes_by_start.items():
        for axis, values in zip(axes, row_axes):
            axis[start : start + len(values)] = values
    return axes
