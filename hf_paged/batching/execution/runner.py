"""The base of runners, which compute scheduled tokens: divides a step among forwards, runs prompts
with inputs besides token ids, and puts the logits in order. The scheduler chooses the tokens."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...cache.memory import PagedMemory
from ...interrupts import is_interrupt
from ...model.state import ModelState
from ...plan import StepPlan
from ...seams import ForwardContext, Recorder
from ...step import ReadCounters
from ...switches import NOTHING
from ..request import Sequence
from ..scheduling.preemption import Preemption
from .prompts import Prompts, PromptsError

logger = logging.getLogger(__name__)

Member = TypeVar("Member")

LogitsPart = tuple[list[int], Tensor]
"""Indices of rows in a step, and their logits `(n, vocab_size)`."""

WholePrompts = tuple[Prompts, dict[int, int]]
"""Prompts that the model's own forward computes as a whole, and the rows among them that the step
computes: a dict from each row to its index in the step."""


class Runner:
    """Computes scheduled tokens."""

    model: PreTrainedModel
    memory: PagedMemory
    is_packed: bool = False  # whether decodes and prompts may share a forward, without padding
    recorder: Recorder | None = None  # records and replays steps, given the model's state (`begin`)
    supports_drafts: bool = False  # whether it computes `Sequence.draft` after the last token
    # whether a failed step may have advanced states, so that its rows must be recomputed
    has_states: bool = False
    num_captured_steps: int = 0  # forwards that were replaced by replays
    num_forwards: int = 0  # begun forwards of the model's own code, without replays
    counters: ReadCounters  # count how its forwards read keys and values
    # a context for the matrix products of forwards that are not replays (`Executor.attention`)
    product_context: AbstractContextManager[Any] = NOTHING
    _state: ModelState | None = None  # the last argument of `begin`

    # makes the `Preemption` of the loop
    make_preemption: Callable[..., Preemption] = Preemption

    def begin(self, state: ModelState | None) -> None:
        """Starts work on the model in this state; `None`: its state is unknown, and no step is
        replayed. Subclasses extend it."""
        self._state = state

    def run(
        self,
        plan: StepPlan,
        context: ForwardContext | None = None,
    ) -> Tensor:
        """Computes the tokens of a step; called without gradients and within `context`. Returns
        logits `(n, vocab_size)` in the dtype of the model's output: in the plan's order,
        `num_logits` rows for each of its rows."""
        raise NotImplementedError

    def run_ahead(
        self,
        sequences: list[Sequence],
        token_ids: Tensor,
        context: ForwardContext | None = None,
    ) -> Tensor | None:
        """Computes one more token of each sequence, `token_ids` `(n,)` int64 on the device; returns
        logits `(n, vocab_size)`, or `None` if no recorded step can compute them."""
        return None

    def pack(self) -> None:
        """Called when work on the model begins: reverts `unpack`."""

    def unpack(self, reason: str | None) -> str | None:
        """Stops packing rows. `reason`: why a packed step raised [`NotPackable`]; without a reason,
        stops only if the model's current structure rules out packed forwards. Returns the reason;
        `None` if the call changed nothing."""
        return None

    def ordered(self) -> AbstractContextManager[None]:
        """A context for a step: orders its device work after the previous step's, even across
        streams."""
        return NOTHING if self.recorder is None else self.recorder.in_order()

    def go_idle(self) -> None:
        """Releases the objects held for steps; called when no step is in flight."""

    def _count_forward(self) -> None:
        """Must be called at each forward of the model's own code, which may change the model: the
        next replay then checks the model's state."""
        self.num_forwards += 1
        if self._state is not None:
            self._state.mark_unchecked()

    def whole_prompts(self, plan: StepPlan) -> tuple[list[list[WholePrompts]], list[int]]:
        """Returns the prompts that the model's own forward computes as a whole, by forward, and the
        indices in the step of all other rows. Prompts with an equal `merge_key` share forwards;
        those that begin after cached tokens run alone."""
        prompt_rows: dict[tuple[Prompts, int], dict[int, int]] = {}
        other_indices: list[int] = []
        for index, (sequence, num_computed) in enumerate(zip(plan.sequences, plan.starts)):
            prompts, row = sequence.request.inputs or (None, 0)
            if prompts is None or num_computed > sequence.request.media_start:
                other_indices.append(index)
                continue
            # requests with the same row need separate forwards
            repeat = 0
            while row in prompt_rows.get((prompts, repeat), ()):
                repeat += 1
            prompt_rows.setdefault((prompts, repeat), {})[row] = index
        entries = []
        for (prompts, _), index_by_row in prompt_rows.items():
            kind: Hashable = None if count_cached(index_by_row, plan) else prompts.merge_key
            if kind is None:
                kind = object()  # equal to no other kind
            entries.append((kind, len(prompts.paddings), prompts.length, (prompts, index_by_row)))
        return self.divide(entries), other_indices

    def run_whole_prompts(
        self, forwards: list[list[WholePrompts]], plan: StepPlan
    ) -> list[LogitsPart]:
        """Runs these forwards. If one of them fails, each call's prompts get a separate forward, so
        that a [`PromptsError`] ends only the requests of that call."""
        return [part for members in forwards for part in self._run_or_split(members, plan)]

    def divide(self, entries: Iterable[tuple[Hashable, int, int, Member]]) -> list[list[Member]]:
        """Divides members among forwards, the longest first. A forward has members of one kind, and
        at most `max_num_batched_tokens` tokens, including padding, unless one member alone has
        more. `entries`: for each member, its kind, its number of rows, the length of these rows,
        and the member itself."""
        max_tokens = self.memory.config.max_num_batched_tokens
        forwards: list[list[Member]] = []
        last_forwards: dict[Hashable, tuple[list[Member], int, int]] = {}  # by kind
        by_length = operator.itemgetter(2)
        for kind, num_rows, length, member in sorted(entries, key=by_length, reverse=True):
            members, num_earlier, width = last_forwards.get(kind, ([], 0, length))
            if not members or (num_earlier + num_rows) * width > max_tokens:
                members, num_earlier, width = [], 0, length
                forwards.append(members)
            members.append(member)
            last_forwards[kind] = (members, num_earlier + num_rows, width)
        return forwards

    def _run_or_split(self, whole_prompts: list[WholePrompts], plan: StepPlan) -> list[LogitsPart]:
        """Runs one forward for all of `whole_prompts` or, if it fails, one for each entry (the
        prompts of one call). Raises [`PromptsError`] if a forward for one entry fails."""
        (prompts, _), *other_prompts = whole_prompts
        try:
            return [self._run_prompts(whole_prompts, plan)]
        except Exception as error:
            if is_interrupt(error):
                raise
            if not other_prompts:
                raise PromptsError(prompts, error) from error
            logger.debug(
                "a forward of several calls' prompts failed, so each call's prompts are computed"
                " separately: %s",
                error,
            )
        return [part for entry in whole_prompts for part in self._run_or_split([entry], plan)]

    def _run_prompts(self, whole_prompts: list[WholePrompts], plan: StepPlan) -> LogitsPart:
        """Runs one forward of all rows of these prompts, including rows that the step does not
        compute; returns the logits of the step's rows."""
        raise NotImplementedError


def concat_in_order(parts: Items[LogitsPart], num_logits: Items[int]) -> Tensor:
    """Concatenates the logits of all parts in the order of their indices, into `(n, vocab_size)`;
    index `i` has `num_logits[i]` rows."""
    indices, logits = parts[0]
    if len(parts) == 1 and indices == sorted(indices):
        return logits
    by_index: dict[int, Tensor] = {}
    for indices, logits in parts:
        counts = [num_logits[index] for index in indices]
        by_index.update(zip(indices, logits.split(counts)))
    return torch.cat([by_index[index] for index in sorted(by_index)])


def count_cached(index_by_row: dict[int, int], plan: StepPlan) -> int:
    """Returns the number of cached tokens after which a forward of whole prompts begins: the
    minimum over its rows."""
    return min(plan.starts[index] for index in index_by_row.values())
