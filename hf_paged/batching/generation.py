"""One unit of work: a decoding, the sequences that its rows are, and what is kept of them between two steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.block_manager import SequenceBlocks
from .request import Request


class KeptBlocks(NamedTuple):
    """The blocks of a row that has ended."""

    blocks: SequenceBlocks
    num_tokens: int


class Generation:
    """
    A decoding with the sequences that its rows are: all prompts of a `generate` call, whose rows advance together so
    that processors see the whole batch, or one request of an engine ([`RequestState`]).

    Args:
        decoding: transformers' decoding loop between two forwards (`SampleDecoding`, `BeamDecoding`).
        rows (`list[tuple[Request, int]]`): For each row of the decoding, its request and which sequence of it.
        keep_blocks (`bool`): Keep the blocks of rows that have ended, for a cache that is returned.

    Attributes:
        kept (`dict[int, KeptBlocks]`): By row, with `keep_blocks`.
        parts (`list[Generation]`): After `split`, one a row.
        new_tokens (`dict[int, int]`): Of the last step, by row; empty for beams.
        error (`Exception`, *optional*): What ended it early.
        is_closed (`bool`): Its rows need no step any more.
    """

    def __init__(self, decoding: Any, rows: list[tuple[Request, int]], keep_blocks: bool = False) -> None:
        self.decoding, self.rows, self.keep_blocks = decoding, rows, keep_blocks
        self._logits: dict[int, Tensor] = {}  # of rows that wait for the others
        self.kept: dict[int, KeptBlocks] = {}
        self.parts: list[Generation] = []
        self.new_tokens: dict[int, int] = {}
        self.error: Exception | None = None
        self.is_closed = False

    @property
    def requests(self) -> list[Request]:
        """The requests of its rows, in order."""
        return list(dict.fromkeys(request for request, _ in self.rows))

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.is_closed or (bool(self.parts) and all(part.is_done for part in self.parts))

    @property
    def can_split(self) -> bool:
        """Whether it has several requests, whose rows need not wait for one another."""
        return len(self.requests) > 1 and not self.parts and self.decoding.can_split

    def split(self) -> None:
        """From here on each row advances by itself, as one of `parts`; blocks and logits go over to these."""
        for row, decoding in enumerate(self.decoding.split()):
            part = Generation(decoding, [self.rows[row]], self.keep_blocks)
            part.is_closed = decoding.is_done
            if row in self.kept:
                part.kept[0] = self.kept[row]
            if row in self._logits and not part.is_closed:
                part._logits[0] = self._logits[row]
            self.parts.append(part)
        self.kept, self._logits = {}, {}

    def add_logits(self, logits: Tensor, places: dict[int, int]) -> Tensor | None:
        """
        Takes the logits `(n, vocab)` of some rows, of row `r` at `places[r]`. Returns those of all open rows, in
        order, once it has them; until then it keeps copies.
        """
        rows = self.decoding.open_rows
        if not self._logits and len(places) == len(rows):
            return _rows_of(logits, [places[row] for row in rows])
        for row, place in places.items():
            self._logits.setdefault(row, logits[place].clone())
        return self.take_logits()

    def take_logits(self) -> Tensor | None:
        """The logits of all open rows, in order, if they are here; they are handed out once."""
        rows = self.decoding.open_rows
        if not rows or len(self._logits) < len(rows):
            return None
        logits = torch.stack([self._logits[row] for row in rows])
        self._logits = {}
        return logits

    def close(self) -> None:
        """Its rows need no step any more."""
        self._logits, self.is_closed = {}, True


def _rows_of(logits: Tensor, places: list[int]) -> Tensor:
    """A view where the places follow one another."""
    first, count = places[0], len(places)
    if places == list(range(first, first + count)):
        return logits[first : first + count]
    return logits[torch.tensor(places, device=logits.device)]
