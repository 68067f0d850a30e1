"""The interface of runners, which compute scheduled tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Items
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...cache.block_manager import BlockManager
from ...model.state import ModelState
from ...plan import StepPlan
from ...rooms import TapeRoom, is_installed, room
from ...seams import ForwardContext, Recorder
from ...step import ReadCounters
from ...switches import NOTHING
from ..request import Sequence


class Runner(Protocol):
    """Computes scheduled tokens."""

    is_packed: bool = False  # whether rows of all kinds may share a forward, without padding
    recorder: Recorder | None = None  # replays steps, for which it needs the model's state
    takes_drafts: bool = False  # whether it computes a sequence's `draft` after its last token
    has_states: bool = False  # whether a failed step cannot be repeated
    num_captured_steps: int = 0  # steps that were replays
    num_forwards: int = 0  # those that have begun; no replay runs the model's own code
    encoder_blocks: BlockManager | None = None  # blocks of the encoders' keys and values
    counters: ReadCounters  # how its forwards read keys and values
    # around forwards that are no replays
    products: contextlib.AbstractContextManager[Any] = NOTHING

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

    def reason_against_packing(self) -> str | None:
        """Why the model's structure rules out the packed forwards that this runner makes; `None` if
        it does not."""
        return None

    def unpack(self, reason: str) -> bool:
        """After a packed step that failed for `reason` ([`NotPackable`]): computes no packed
        forwards any more. Returns whether the step can be repeated so."""
        return False

    def ordered(self) -> contextlib.AbstractContextManager[None]:
        """Around a step: orders its device work after the previous step's, also across streams."""
        return NOTHING

    def rest(self) -> None:
        """Releases what is held for steps; nothing is in flight any more."""
        return None


Part = tuple[list[Any], Tensor]
"""Places of rows in a step, and their logits `(rows, vocab)`."""


def in_order(parts: Items[Part]) -> Tensor:
    """Merges parts into `(n, vocab)`, sorted by place."""
    places, logits = parts[0]
    if len(parts) == 1 and places == sorted(places):
        return logits
    rows = {}
    for places, logits in parts:
        for place, row in zip(places, logits):
            rows[place] = row
    if not rows:
        return parts[0][1]
    return torch.stack([rows[place] for place in sorted(rows)])
