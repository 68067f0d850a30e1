"""The beginnings that waiting prompts have in common, and where they part. Plain Python: no
tensors, no policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from itertools import pairwise

from ..request import Request


class WaitingPrompts:
    """Counts the waiting prompts that begin with the same blocks of tokens, within their namespace,
    without the last token, whose logits are needed. Every operation takes time in the length of one
    prompt, however many wait."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        # by entered request, hashes of its beginnings of one block, of two, ...: the request may
        # change meanwhile
        self._beginnings: dict[Request, list[int]] = {}
        self._counts: Counter[int] = Counter()  # entered requests, by beginning
        # those that a running request computes, to stop behind them; the scheduler clears it before
        # each step
        self.awaited: set[int] = set()

    def __len__(self) -> int:
        return len(self._beginnings)

    def add(self, request: Request) -> None:
        """Enters a request, whose prompt has token ids only."""
        beginnings = [beginning for _, beginning in self._blocks(request)]
        self._beginnings[request] = beginnings
        self._counts.update(beginnings)

    def discard(self, request: Request) -> None:
        """Removes a request, if it was entered."""
        for beginning in self._beginnings.pop(request, ()):
            self._counts[beginning] -= 1
            if not self._counts[beginning]:
                del self._counts[beginning]

    def partings(self, request: Request) -> list[int]:
        """Returns the numbers of tokens, in whole blocks, after which other waiting prompts part
        from this one, which waits, too; none if it was not entered."""
        counts = [self._counts[beginning] for beginning in self._beginnings.get(request, ())]
        partings = []
        for number, (count, next_count) in enumerate(pairwise([*counts, 1]), 1):
            if next_count < count:
                partings.append(number * self._size)
        return partings

    def begin(self, request: Request, stops: Collection[int]) -> None:
        """Notes that this step computes tokens of a running request, whose prefill stops at
        `stops`."""
        self.awaited.update(beginning for end, beginning in self._blocks(request) if end in stops)

    def is_awaited(self, request: Request) -> bool:
        """Whether another request stops in this step, or later, where this waiting one can begin
        then."""
        return not self.awaited.isdisjoint(self._beginnings.get(request, ()))

    def _blocks(self, request: Request) -> Iterator[tuple[int, int]]:
        """Yields the number of tokens up to the end of each full block, and their hash: of two
        prompts with equal ones, one may wait in vain for a step."""
        token_ids = request.sequences[0].token_ids
        beginning: Hashable = request.namespace
        for end in range(self._size, request.num_prompt_tokens, self._size):
            block = tuple(token_ids[end - self._size : end])
            beginning = hash((beginning, block))
            yield end, beginning
