"""What computes scheduled tokens."""

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
    takes_drafts: bool = False  # whether it computes what a sequence's `draft` holds behind its last token
    can_run_ahead: bool = False  # whether the device computes a replay while the host does something else
    has_states: bool = False  # whether a step that failed cannot be taken again
    num_captured_steps: int = 0  # that were replays
    encoder_blocks: BlockManager | None = None  # what holds the keys and values of encoders
    counters: ReadCounters  # of how its forwards read keys and values
    products: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # around forwards that run as modules

    def begin(self, state: ModelState | None) -> None:
        """Work begins on a model in this state; `None`: its state is unknown."""
        return None

    def run(self, items: list[tuple[Sequence, int]], variant: Hashable = None) -> Tensor:
        """Computes the last `query_len` of the first `num_computed_tokens` tokens of each sequence, for which its
        tables have room; `variant` tells the adapters of this forward from others. Of one with a draft its last token,
        and the draft behind it. Returns logits `(n, vocab_size)` in the model's dtype: after the last token of each
        sequence that is then computed as far as it goes, in order, and after each token of its draft."""

    def run_ahead(self, sequences: list[Sequence], token_ids: Tensor, variant: Hashable = None) -> Tensor | None:
        """Logits `(n, vocab_size)` after one more token of each sequence, `(n,)` int64 on the device; `None` if that
        cannot be done before the host has it."""
        return None

    def ordered(self) -> contextlib.AbstractContextManager[None]:
        """Around a step: its work on the device comes after that of the step before, also on other streams."""
        return contextlib.nullcontext()

    def rest(self) -> None:
        """Nothing is in flight any more."""
        return None


def rows_of_logits(items: Items[tuple[Sequence, int]]) -> list[range]:
    """Of each item the rows of logits that a step of all returns: one for its last token and one for each of its draft,
    none where it is not computed as far as it goes."""
    found, start = [], 0
    for sequence, _ in items:
        is_answered = sequence.num_computed_tokens == len(sequence.token_ids)
        end = start + 1 + len(sequence.draft) if is_answered else start
        found.append(range(start, end))
        start = end
    return found


def in_order(parts: Items[tuple[list[Any], Tensor]]) -> Tensor:
    """`(n, vocab)`: the rows of all parts, each of which names their places, by place."""
    places, logits = parts[0]
    if len(parts) == 1 and places == sorted(places):
        return logits
    rows = {place: row for places, logits in parts for place, row in zip(places, logits)}
    return torch.stack([rows[place] for place in sorted(rows)]) if rows else logits
