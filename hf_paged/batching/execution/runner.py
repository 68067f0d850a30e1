"""The base of runners, which compute scheduled tokens: how a step is divided among forwards, which
of them begin prompts with inputs beside token ids, how logits are put in order again."""

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

Part = tuple[list[int], Tensor]
"""Places of rows in a step, and their logits."""

Whole = tuple[Prompts, dict[int, int]]
"""Prompts that the model's own forward computes as a whole, with the place in the step of each row
that is wanted."""


class Runner:
    """Computes scheduled tokens."""

    model: PreTrainedModel
    memory: PagedMemory
    is_packed: bool = False  # whether rows of all kinds may share a forward, without padding
    recorder: Recorder | None = None  # replays steps, for which it needs the model's state
    takes_drafts: bool = False  # whether it computes a sequence's `draft` after its last token
    has_states: bool = False  # whether a failed step cannot be repeated
    num_captured_steps: int = 0  # steps that were replays
    num_forwards: int = 0  # those that have begun; no replay runs the model's own code
    encoder_blocks: BlockManager | None = None  # blocks of the encoders' keys and values
    counters: ReadCounters  # how its forwards read keys and values
    # around forwards that are no replays
    products: AbstractContextManager[Any] = NOTHING

    def choose_products(self, modules: list[nn.Module]) -> None:
        """Chooses the products of forwards that are no replays, for a model with these modules."""
        if is_installed("tape"):
            tape: TapeRoom = room("tape", "half-precision products")
            self.products = tape.own_products(modules)

    def begin(self, state: ModelState | None) -> None:
        """Starts work on a model in this state; `None`: its state is unknown."""
        return None

    def run(
        self,
        plan: StepPlan,
        context: ForwardContext | None = None,
    ) -> Tensor:
        """Computes the tokens of a step, within `torch.no_grad` and `context`. Returns logits `(n,
        vocab_size)` in the model's dtype, as many as the plan says, in its order."""
        raise NotImplementedError

    def run_ahead(
        self,
        sequences: list[Sequence],
        token_ids: Tensor,
        context: ForwardContext | None = None,
    ) -> Tensor | None:
        """Returns logits `(n, vocab_size)` after one more token of each sequence, given as `(n,)`
        int64 on the device; `None` if the step needs the tokens on the host."""
        return None

    def pack(self) -> None:
        """Starts work on a model for which this runner's layout was chosen; undoes `unpack`."""
        return None

    def unpack(self, reason: str | None = None) -> str | None:
        """After a packed step that failed for `reason` ([`NotPackable`]), or if the model's
        structure now rules packed forwards out: computes none any more. Returns why; `None` if it
        goes on as before."""
        return None

    def ordered(self) -> AbstractContextManager[None]:
        """Around a step: orders its device work after the previous step's, also across streams."""
        return NOTHING if self.recorder is None else self.recorder.in_order()

    def go_idle(self) -> None:
        """Releases what is held for steps; nothing is in flight any more."""
        return None

    def run_wholes(self, plan: StepPlan) -> tuple[list[Part], list[int]]:
        """Runs prompts that the model's own forward computes as a whole, those of equal `merges` in
        one, or each in one of its own if that fails, so that errors stay with their prompts: they
        become a [`PromptsError`]. Those behind cached tokens run alone. Returns places with their
        logits, and the step's other places."""
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
        rows = []
        for (prompts, _), places in wholes.items():
            kind: Hashable = None if num_cached(places, plan) else prompts.merges
            if kind is None:
                kind = object()
            rows.append((kind, len(prompts.paddings), prompts.length, (prompts, places)))
        parts: list[Part] = []
        for together in self.divide(rows):
            parts += self._run_or_fail(together, plan)
        return parts, others

    def divide(self, rows: Iterable[tuple[Hashable, int, int, Member]]) -> list[list[Member]]:
        """Divides rows among forwards of at most `max_num_batched_tokens` tokens, padding included,
        the longest first. Each member of a forward is given with its kind, of which there is one in
        a forward, and with the number and the length of its rows."""
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

    def _run_or_fail(self, wholes: list[Whole], plan: StepPlan) -> list[Part]:
        (prompts, _), *others = wholes
        try:
            return [self._run_prompts(wholes, plan)]
        except Exception as error:
            if is_interrupt(error):
                raise
            if not others:
                raise PromptsError(prompts, error) from error
            logger.debug("prompts of several requests fail in one forward: %s", error)
        return [part for whole in wholes for part in self._run_or_fail([whole], plan)]

    def _run_prompts(self, wholes: list[Whole], plan: StepPlan) -> Part:
        """Runs one forward of all rows of these prompts, those included that are not wanted."""
        raise NotImplementedError


def in_order(parts: Items[Part], num_logits: Items[int]) -> Tensor:
    """Merges parts into `(n, vocab)`, sorted by place; place `i` has `num_logits[i]` rows."""
    places, logits = parts[0]
    if len(parts) == 1 and places == sorted(places):
        return logits
    by_place: dict[int, Tensor] = {}
    for places, logits in parts:
        counts = [num_logits[place] for place in places]
        by_place.update(zip(places, logits.split(counts)))
    return torch.cat([by_place[place] for place in sorted(by_place)])


def num_cached(rows: dict[int, int], plan: StepPlan) -> int:
    """Tokens in front of those that a forward over whole prompts computes: 0 for several rows."""
    return min(plan.starts[place] for place in rows.values())
