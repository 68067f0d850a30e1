"""Finds the common prefixes of waiting prompts, and where the prompts diverge. Plain Python: no
tensors, no policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from itertools import pairwise

from ..batching.request import Request


class WaitingPrompts:
    """Counts, for each namespace and prefix of full blocks, the waiting prompts that begin with it.
    A prefix leaves out at least the prompt's last token, whose logits are needed. The time of each
    operation depends on the length of one prompt, not on the number of prompts."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # by request, the hashes of its prefixes of one block, of two, ...; stored, since the
        # request may change before `discard`
        self._prefixes: dict[Request, list[int]] = {}
        self._counts: Counter[int] = Counter()  # number of requests, by hash of a prefix
        # hashes of the prefixes at whose ends the prefills of running requests will stop; the
        # scheduler clears the set before each step
        self.awaited_prefixes: set[int] = set()

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, request: Request) -> None:
        """Adds a request whose prompt consists of token ids only."""
        prefixes = [prefix for _, prefix in self._hash_prefixes(request)]
        self._prefixes[request] = prefixes
        self._counts.update(prefixes)

    def discard(self, request: Request) -> None:
        """Removes a request, if it was added."""
        for prefix in self._prefixes.pop(request, ()):
            self._counts[prefix] -= 1
            if not self._counts[prefix]:
                del self._counts[prefix]

    def divergences(self, request: Request) -> list[int]:
        """Returns the numbers of tokens, multiples of the block size, after which other waiting
        prompts diverge from the request's prompt; none if the request was not added."""
        counts = [self._counts[prefix] for prefix in self._prefixes.get(request, ())]
        divergences = []
        for num_blocks, (count, next_count) in enumerate(pairwise([*counts, 1]), 1):
            if next_count < count:
                divergences.append(num_blocks * self._block_size)
        return divergences

    def await_stops(self, request: Request, stops: Collection[int]) -> None:
        """Records that this step computes tokens of a request whose prefill will stop at each of
        `stops`, which are numbers of tokens."""
        prefixes = self._hash_prefixes(request)
        self.awaited_prefixes.update(prefix for end, prefix in prefixes if end in stops)

    def awaits_prefix(self, request: Request) -> bool:
        """Whether this waiting request can begin at a stop that a running request will reach, in
        this step or a later one."""
        return not self.awaited_prefixes.isdisjoint(self._prefixes.get(request, ()))

    def _hash_prefixes(self, request: Request) -> Iterator[tuple[int, int]]:
        """Yields the length of each prefix of full blocks, and its hash. If the hashes of different
        prefixes collide, a request may wait unnecessarily; its results stay correct."""
        token_ids = request.sequences[0].token_ids
        prefix: Hashable = request.namespace
        size = self._block_size
        for end in range(size, request.num_prompt_tokens, size):
            block = tuple(token_ids[end - size : end])
            prefix = hash((prefix, block))
            yield end, prefix
