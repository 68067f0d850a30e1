"""The base of runners, which compute scheduled tokens: how a step is divided among forwards, the
forwards of prompts with inputs beside token ids, the order of the logits. Which tokens are computed
is up to the scheduler."""

from __future__ import annotations

import logging
import operator
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...cache.block_manager import BlockManager
from ...cache.memory import PagedMemory
from ...interrupts import is_interrupt
from ...model.state import ModelState
from ...plan import StepPlan
from ...rooms import TapeRoom, is_installed, room
from ...seams import ForwardContext, Recorder
from ...step import ReadCounters
from ...switches import NOTHING
from ..request import Sequence
from .prompts import Prompts, PromptsError

logger = logging.getLogger(__name__)

Member = TypeVar("Member")

LogitsPart = tuple[list[int], Tensor]
"""Indices of rows in a step, and their logits."""

WholePrompts = tuple[Prompts, dict[int, int]]
"""Prompts that the model's own forward computes as a whole; for each of their rows that the step
computes, its index in the step."""


class Runner:
    """Computes scheduled tokens."""

    model: PreTrainedModel
    memory: PagedMemory
    is_packed: bool = False  # whether rows of all kinds may share a forward, without padding
    recorder: Recorder | None = None  # replays steps, for which it needs the model's state
    takes_drafts: bool = False  # whether it computes a sequence's `draft` after its last token
    # whether a failed step leaves states behind, so that its rows are recomputed
    has_states: bool = False
    num_captured_steps: int = 0  # steps that were replays
    num_forwards: int = 0  # forwards that have begun, without replays, which run no model code
    encoder_blocks: BlockManager | None = None  # blocks of the encoders' keys and values
    counters: ReadCounters  # how its forwards read keys and values
    # a context around forwards that are no replays
    products: AbstractContextManager[Any] = NOTHING

    def choose_products(self, modules: list[nn.Module]) -> None:
        """Chooses the products of forwards that are no replays, for a model with these modules."""
        if is_installed("tape"):
            tape: TapeRoom = room("tape", "half-precision products")
            self.products = tape.kernel_products(modules)

    def begin(self, state: ModelState | None) -> None:
        """Starts work on a model in this state; `None`: its state is unknown."""
        return None

    def run(
        self,
        plan: StepPlan,
        context: ForwardContext | None = None,
    ) -> Tensor:
        """Computes the tokens of a step, within `torch.no_grad` and `context`. Returns logits `(n,
        vocab_size)` in the model's dtype, with as many rows as the plan says, in its order."""
        raise NotImplementedError

    def run_ahead(
        self,
        sequences: list[Sequence],
        token_ids: Tensor,
        context: ForwardContext | None = None,
    ) -> Tensor | None:
        """Returns logits `(n, vocab_size)` after one more token of each sequence, `token_ids`
        `(n,)` int64 on the device; `None` if the step needs the tokens on the host."""
        return None

    def pack(self) -> None:
        """Starts work on a model for which this runner's layout was chosen; undoes `unpack`."""
        return None

    def unpack(self, reason: str | None = None) -> str | None:
        """Stops packing rows after a packed step that failed for `reason` ([`NotPackable`]), or if
        the model's structure now rules packed forwards out. Returns why; `None` if it goes on as
        before."""
        return None

    def ordered(self) -> AbstractContextManager[None]:
        """Around a step: orders its device work after the previous step's, also across streams."""
        return NOTHING if self.recorder is None else self.recorder.in_order()

    def go_idle(self) -> None:
        """Releases the objects held for steps; no step is in flight any more."""
        return None

    def run_whole_prompts(self, plan: StepPlan) -> tuple[list[LogitsPart], list[int]]:
        """Runs prompts that the model's own forward computes as a whole: prompts of equal
        `merge_key` in one forward or, if that fails, each in its own, so that errors stay with
        their prompts, as a [`PromptsError`]. Prompts after cached tokens run alone. Returns indices
        with their logits, and the step's other indices."""
        prompt_rows: dict[tuple[Prompts, int], dict[int, int]] = {}
        others: list[int] = []
        for index, (sequence, num_computed) in enumerate(zip(plan.sequences, plan.starts)):
            prompts, row = sequence.request.inputs or (None, 0)
            if prompts is None or num_computed > sequence.request.num_text:
                others.append(index)
                continue
            # a second request with the same row needs another forward
            turn = 0
            while row in prompt_rows.get((prompts, turn), ()):
                turn += 1
            prompt_rows.setdefault((prompts, turn), {})[row] = index
        rows = []
        for (prompts, _), index_by_row in prompt_rows.items():
            kind: Hashable = None if num_cached(index_by_row, plan) else prompts.merge_key
            if kind is None:
                kind = object()
            rows.append((kind, len(prompts.paddings), prompts.length, (prompts, index_by_row)))
        parts: list[LogitsPart] = []
        for groups in self.divide(rows):
            parts += self._run_or_fail(groups, plan)
        return parts, others

    def divide(self, rows: Iterable[tuple[Hashable, int, int, Member]]) -> list[list[Member]]:
        """Divides rows among forwards of at most `max_num_batched_tokens` tokens, padding included,
        the longest first. `rows`: for each member its kind (a forward has members of one kind), and
        the number and length of its rows."""
        max_tokens = self.memory.config.max_num_batched_tokens
        forwards: list[list[Member]] = []
        last: dict[Hashable, tuple[list[Member], int, int]] = {}  # by kind
        by_length = operator.itemgetter(2)
        for kind, num_rows, length, member in sorted(rows, key=by_length, reverse=True):
            members, num_earlier, width = last.get(kind, ([], 0, length))
            if not members or (num_earlier + num_rows) * width > max_tokens:
                members, num_earlier, width = [], 0, length
                forwards.append(members)
            members.append(member)
            last[kind] = (members, num_earlier + num_rows, width)
        return forwards

    def _run_or_fail(self, groups: list[WholePrompts], plan: StepPlan) -> list[LogitsPart]:
        (prompts, _), *others = groups
        try:
            return [self._run_prompts(groups, plan)]
        except Exception as error:
            if is_interrupt(error):
                raise
            if not others:
                raise PromptsError(prompts, error) from error
            logger.debug("a forward for prompts of several requests failed: %s", error)
        return [part for group in groups for part in self._run_or_fail([group], plan)]

    def _run_prompts(self, groups: list[WholePrompts], plan: StepPlan) -> LogitsPart:
        """Runs one forward of all rows of these prompts, also of rows that the step does not
        compute."""
        raise NotImplementedError


def in_order(parts: Items[LogitsPart], num_logits: Items[int]) -> Tensor:
    """Merges parts into `(n, vocab)`, sorted by index; index `i` has `num_logits[i]` rows."""
    indices, logits = parts[0]
    if len(parts) == 1 and indices == sorted(indices):
        return logits
    by_index: dict[int, Tensor] = {}
    for indices, logits in parts:
        counts = [num_logits[index] for index in indices]
        by_index.update(zip(indices, logits.split(counts)))
    return torch.cat([by_index[index] for index in sorted(by_index)])


def num_cached(index_by_row: dict[int, int], plan: StepPlan) -> int:
    """Returns how many cached tokens a forward over whole prompts begins after; 0 if it has several
    rows."""
    return min(plan.starts[index] for index in index_by_row.values())
