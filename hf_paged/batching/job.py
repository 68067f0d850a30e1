"""What is decoded together: a decoding and the sequences that its rows are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .request import Request


class Job:
    """
    A decoding with the sequences that its rows are: one request of an engine, or all prompts of a `generate` call,
    whose rows advance together so that processors see the whole batch.

    Args:
        decoding: transformers' decoding loop between two forwards (`SampleDecoding`, `BeamDecoding`).
        rows (`list[tuple[Request, int]]`): For each row of the decoding, its request and which sequence of it.
        keep_blocks (`bool`): Keep the blocks of rows that have ended, for a cache that is returned.
    """

    def __init__(self, decoding: Any, rows: list[tuple[Request, int]], keep_blocks: bool = False) -> None:
        self.decoding, self.rows, self.keep_blocks = decoding, rows, keep_blocks
        self.held: dict[int, Tensor] = {}  # logits of rows that wait for the others
        self.kept: dict[int, Any] = {}  # by row: blocks of what has ended, and how many tokens they hold
        self.parts: list[Job] = []  # after a split, one a row
        self.new_tokens: dict[int, int] = {}  # of the last step, by row
        self.error: Exception | None = None
        self.is_added = self.is_closed = False
        self.state: Any = None  # the owner's

    @property
    def requests(self) -> list[Request]:
        """The requests of its rows, in order."""
        return list(dict.fromkeys(request for request, _ in self.rows))

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.is_closed or (bool(self.parts) and all(part.is_done for part in self.parts))
