"""The interface of runners, which compute scheduled tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from collections.abc import Sequence as Items
from typing import Any, Protocol

import torch
from torch import Tensor

from ...cache.block_manager import BlockManager
from ...model.state import ModelState
from ...step import ReadCounters
from ..request import Sequence


class Runner(Protocol):
    """Computes scheduled tokens."""

    mixes_adapters: bool = False  # whether rows with different adapters may be in one forward
    can_capture: bool = False  # whether steps may be replays of graphs, for which it needs the model's state
    takes_drafts: bool = False  # whether it computes a sequence's `draft` after its last token
    can_run_ahead: bool = False  # whether the device computes a replay while the host does something else
    has_states: bool = False  # whether a failed step cannot be repeated
    num_captured_steps: int = 0  # steps that were replays
    encoder_blocks: BlockManager | None = None  # blocks of the encoders' keys and values
    counters: ReadCounters  # how its forwards read keys and values
    products: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # around forwards that are no replays

    def begin(self, state: ModelState | None) -> None:
        """Starts work on a model in this state; `None`: its state is unknown."""
        return None

    def run(self, items: list[tuple[Sequence, int]], variant: Hashable = None) -> Tensor:
        """Computes `query_len` tokens of each sequence, up to its `num_computed_tokens`; its block tables have room for
        them. With a draft, these are its last token and the draft. `variant` identifies the forward's adapters. Returns
        logits `(n, vocab_size)` in the model's dtype, in order: for each sequence that is then fully computed, after
        its last token and after each token of its draft."""

    def run_ahead(self, sequences: list[Sequence], token_ids: Tensor, variant: Hashable = None) -> Tensor | None:
        """Returns logits `(n, vocab_size)` after one more token of each sequence, given as `(n,)` int64 on the device;
        `None` if the step needs the tokens on the host."""
        return None

    def pack(self) -> None:
        """Starts work on a model for which this runner's layout was chosen; undoes `unpack`."""
        return None

    def unpack(self, reason: str) -> bool:
        """After a packed step that failed for `reason` ([`NotPackable`]): computes no packed forwards any more. Returns
        whether the step can be repeated so."""
        return False

    def ordered(self) -> contextlib.AbstractContextManager[None]:
        """Around a step: orders its device work after the previous step's, also across streams."""
        return contextlib.nullcontext()

    def rest(self) -> None:
        """Releases what is held for steps; nothing is in flight any more."""
        return None


def rows_of_logits(items: Items[tuple[Sequence, int]]) -> list[range]:
    """Returns each item's rows in a step's logits: one for its last token and one for each draft token; empty for a
    sequence that is not fully computed yet."""
    found, start = [], 0
    for sequence, _ in items:
        is_answered = sequence.num_computed_tokens == len(sequence.token_ids)
        end = start + 1 + len(sequence.draft) if is_answered else start
        found.append(range(start, end))
        start = end
    return found


def in_order(parts: Items[tuple[list[Any], Tensor]]) -> Tensor:
    """Merges parts, each the places of its rows and their logits, into `(n, vocab)`, sorted by place."""
    places, logits = parts[0]
    if len(parts) == 1 and places == sorted(places):
        return logits
    rows = {place: row for places, logits in parts for place, row in zip(places, logits)}
    return torch.stack([rows[place] for place in sorted(rows)]) if rows else logits
