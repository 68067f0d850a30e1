"""Prompts with inputs beside token ids, which the model's own forward computes as a whole; which
rows of a step share a forward."""

from __future__ import annotations

import logging
import operator
from collections.abc import Hashable, Iterable
from typing import TypeVar

from transformers import PreTrainedModel

from ...cache.memory import PagedMemory
from ...interrupts import is_interrupt
from ...plan import StepPlan
from .prompts import Prompts, PromptsError
from .runner import Part, Runner

logger = logging.getLogger(__name__)

Member = TypeVar("Member")

Whole = tuple[Prompts, dict[int, int]]
"""Prompts that the model's own forward computes as a whole, with the place in the step of each row
that is wanted."""


class PromptsRunner(Runner):
    """A runner that computes prompts with inputs beside token ids."""

    model: PreTrainedModel
    memory: PagedMemory

    def run_wholes(self, wholes: list[Whole], plan: StepPlan) -> list[Part]:
        """Runs prompts of equal `merges` in one forward, or each in one of its own if that fails,
        so that errors stay with their prompts: they become a [`PromptsError`]. Those behind cached
        tokens run alone. Returns places with their logits."""
        rows = []
        for prompts, places in wholes:
            kind: Hashable = None if num_cached(places, plan) else prompts.merges
            if kind is None:
                kind = object()
            rows.append((kind, len(prompts.paddings), prompts.length, (prompts, places)))
        parts: list[Part] = []
        for together in divide(rows, self.memory.config.max_num_batched_tokens):
            try:
                if len(together) > 1:
                    parts.append(self._run_merged(together, plan))
                    continue
            except Exception as error:
                if is_interrupt(error):
                    raise
                logger.debug("prompts of several requests fail in one forward: %s", error)
            for prompts, places in together:
                try:
                    parts.append(self._run_whole(prompts, places, plan))
                except Exception as error:
                    if is_interrupt(error):
                        raise
                    raise PromptsError(prompts, error) from error
        return parts

    def _run_merged(self, wholes: list[Whole], plan: StepPlan) -> Part:
        """Runs one forward of several prompts."""
        raise NotImplementedError

    def _run_whole(self, prompts: Prompts, rows: dict[int, int], plan: StepPlan) -> Part:
        """Runs the forward of all rows of these prompts, of which `rows` are given with their
        places in `plan`."""
        raise NotImplementedError


def divide(
    rows: Iterable[tuple[Hashable, int, int, Member]],
    max_tokens: int,
) -> list[list[Member]]:
    """Divides rows among forwards of at most `max_tokens` tokens, padding included, the longest
    first. Each member of a forward is given with its kind, of which there is one in a forward, and
    with the number and the length of its rows."""
    forwards: list[list[Member]] = []
    last: dict[Hashable, tuple[list[Member], int, int]] = {}  # by kind
    for kind, num_rows, length, member in sorted(rows, key=operator.itemgetter(2), reverse=True):
        members, num_earlier, width = last.get(kind, ([], 0, length))
        if not members or (num_earlier + num_rows) * width > max_tokens:
            members, num_earlier, width = [], 0, length
            forwards.append(members)
        members.append(member)
        last[kind] = (members, num_earlier + num_rows, width)
    return forwards


def sort_places(plan: StepPlan) -> tuple[list[Whole], list[int]]:
    """Returns the prompts of the step that are computed as a whole, and the places of its other
    rows."""
    wholes: dict[tuple[Prompts, int], dict[int, int]] = {}
    others: list[int] = []
    for place, (sequence, num_computed) in enumerate(zip(plan.sequences, plan.starts)):
        prompts, row = sequence.request.inputs or (None, 0)
        if prompts is None or num_computed > sequence.request.num_text:
            others.append(place)
            continue
        # a row that is there twice needs a forward of its own
        turn = 0
        while row in wholes.get((prompts, turn), ()):
            turn += 1
        wholes.setdefault((prompts, turn), {})[row] = place
    return [(prompts, rows) for (prompts, _), rows in wholes.items()], others


def num_cached(rows: dict[int, int], plan: StepPlan) -> int:
    """Tokens in front of those that a forward over whole prompts computes: 0 for several rows."""
    return min(plan.starts[place] for place in rows.values())
