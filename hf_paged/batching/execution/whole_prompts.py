"""Prompts with inputs beside token ids, which the model's own forward computes as a whole."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable

from torch import Tensor
from transformers import PreTrainedModel

from ...cache.paged_cache import PagedCache
from ...cache.sequence_blocks import UNCACHED
from ...model.own_loop import pad_token_id
from ...plan import StepPlan
from .prompts import Prompts, PromptsError

logger = logging.getLogger(__name__)

Wholes = list[tuple[Prompts, dict[int, int]]]
"""Prompts that the model's own forward computes as a whole, with the batch place of each row that
is wanted."""


class WholePrompts:
    """Runs such prompts. `around`: makes the context of each forward."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        around: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._model = model
        self._cache = cache
        self._around = around

    def divide(
        self,
        wholes: Wholes,
        plan: StepPlan,
    ) -> list[Wholes]:
        """Groups prompts into forwards of at most `max_num_batched_tokens`, those behind cached
        tokens alone."""
        groups: list[Wholes] = []
        last: dict[Hashable, Wholes] = {}
        longest_first = sorted(wholes, key=lambda whole: -whole[0].length)
        for prompts, rows in longest_first:
            merges = None
            if not _num_cached(rows, plan):
                merges = prompts.merges
            others = last.get(merges)
            num_rows = len(prompts.paddings)
            for other, _ in others or ():
                num_rows += len(other.paddings)
            max_tokens = self._cache.memory.config.max_num_batched_tokens
            fits = False
            if merges is not None and others is not None:
                fits = num_rows * others[0][0].length <= max_tokens
            if others is None or not fits:
                groups.append([])
                others = last[merges] = groups[-1]
            others.append((prompts, rows))
        return groups

    def run(
        self,
        wholes: Wholes,
        plan: StepPlan,
    ) -> list[tuple[list[int], Tensor]]:
        """Runs one forward, or one for each `Prompts` if that fails, so that errors stay with their
        prompts. Returns places with their logits."""
        if len(wholes) > 1:
            all_rows: dict[int, int] = {}
            num_rows = 0
            for prompts, rows in wholes:
                for row, place in rows.items():
                    all_rows[num_rows + row] = place
                num_rows += len(prompts.paddings)
            try:
                (first, _), *others = wholes
                partners = [prompts for prompts, _ in others]
                together = first.merged(partners, pad_token_id(self._model))
                return [self._run_whole(together, all_rows, plan)]
            except PromptsError as error:
                logger.debug("prompts of several requests fail in one forward: %s", error)
        answers = []
        for prompts, rows in wholes:
            answers.append(self._run_whole(prompts, rows, plan))
        return answers

    def _run_whole(
        self,
        prompts: Prompts,
        rows: dict[int, int],
        plan: StepPlan,
    ) -> tuple[list[int], Tensor]:
        """Computes `rows` of prompts, given with their places in `plan`, by the model's own
        forward; returns places and their logits."""
        blocks = {row: plan.sequences[place].blocks for row, place in rows.items()}
        cache = self._cache.empty_twin(self._cache.memory, self._cache.counters)
        with self._around():
            num_cached = _num_cached(rows, plan)
            logits, ahead = prompts.forward(self._model, cache, blocks, num_cached)
        content = None
        if ahead is not None:
            content = prompts.content(self._model.config)
        for row, place in rows.items():
            # the prefix cache may only share K/V whose key covers all that the token has seen
            is_covered = False
            if ahead is not None and content is not None:
                uncovered = ahead[row] & ~content[row].cpu()
                is_covered = not bool(uncovered.any())
            if not is_covered:
                plan.sequences[place].request.namespace = UNCACHED
        answered = {row: place for row, place in rows.items() if plan.num_logits[place]}
        return list(answered.values()), logits[list(answered)]


def sort_places(plan: StepPlan) -> tuple[Wholes, dict[int, list[int]]]:
    """Returns the prompts of the step that are computed as a whole, and the places of its other
    rows, by their number of position axes."""
    wholes: dict[tuple[Prompts, int], dict[int, int]] = {}
    packed: dict[int, list[int]] = {}
    for place, (sequence, num_cached) in enumerate(zip(plan.sequences, plan.starts)):
        prompts, row = sequence.request.inputs or (None, 0)
        if prompts is not None and num_cached <= sequence.request.num_text:
            # a row that is there twice needs a forward of its own
            turn = 0
            for (other, _), other_rows in wholes.items():
                if other is prompts and row in other_rows:
                    turn += 1
            wholes.setdefault((prompts, turn), {})[row] = place
        else:
            num_axes = 0
            if prompts is not None:
                num_axes = prompts.num_axes(row)
            packed.setdefault(num_axes, []).append(place)
    return [(prompts, rows) for (prompts, _), rows in wholes.items()], packed


def _num_cached(rows: dict[int, int], plan: StepPlan) -> int:
    """Tokens in front of those that a forward over whole prompts computes: 0 for several rows."""
    return min(plan.starts[place] for place in rows.values())
