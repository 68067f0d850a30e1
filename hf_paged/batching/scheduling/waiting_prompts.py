"""The prefixes that waiting prompts have in common, and where the prompts diverge. Plain Python: no
tensors, no policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from itertools import pairwise

from ..request import Request


class WaitingPrompts:
    """Counts, by namespace, the waiting prompts that begin with the same blocks of tokens; the last
    token, whose logits are needed, does not count. The time of every operation depends on the
    length of one prompt, not on the number of prompts."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        # by request, hashes of its prefixes of one block, of two, ...: kept because the request may
        # change before it is discarded
        self._prefixes: dict[Request, list[int]] = {}
        self._counts: Counter[int] = Counter()  # number of requests by prefix
        # prefixes that a running request computes, stopping at their ends; the scheduler clears the
        # set before each step
        self.awaited: set[int] = set()

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, request: Request) -> None:
        """Adds a request whose prompt has token ids only."""
        prefixes = [prefix for _, prefix in self._blocks(request)]
        self._prefixes[request] = prefixes
        self._counts.update(prefixes)

    def discard(self, request: Request) -> None:
        """Removes a request, if it was added."""
        for prefix in self._prefixes.pop(request, ()):
            self._counts[prefix] -= 1
            if not self._counts[prefix]:
                del self._counts[prefix]

    def divergences(self, request: Request) -> list[int]:
        """Returns the numbers of tokens, in whole blocks, after which other waiting prompts diverge
        from that of this waiting request; none if it was not added."""
        counts = [self._counts[prefix] for prefix in self._prefixes.get(request, ())]
        divergences = []
        for number, (count, next_count) in enumerate(pairwise([*counts, 1]), 1):
            if next_count < count:
                divergences.append(number * self._size)
        return divergences

    def note_running(self, request: Request, stops: Collection[int]) -> None:
        """Notes that this step computes tokens of a running request, whose prefill stops at
        `stops`."""
        self.awaited.update(prefix for end, prefix in self._blocks(request) if end in stops)

    def is_awaited(self, request: Request) -> bool:
        """Whether this waiting request can begin at a stop that a running request reaches in this
        step or a later one."""
        return not self.awaited.isdisjoint(self._prefixes.get(request, ()))

    def _blocks(self, request: Request) -> Iterator[tuple[int, int]]:
        """Yields the number of tokens up to the end of each full block, and their hash. If the
        hashes of two different prompts are equal, one may wait a step in vain."""
        token_ids = request.sequences[0].token_ids
        prefix: Hashable = request.namespace
        for end in range(self._size, request.num_prompt_tokens, self._size):
            block = tuple(token_ids[end - self._size : end])
            prefix = hash((prefix, block))
            yield end, prefix
