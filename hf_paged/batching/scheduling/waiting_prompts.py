"""A tree of the waiting requests' prompts, which finds where they part. Plain Python: no tensors,
no policy."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import islice

from ..request import Request


class _Branch:
    """The tokens of one block, after those of its ancestors, that at least two waiting prompts had
    in common."""

    __slots__ = ("children", "count")

    def __init__(self, count: int = 0) -> None:
        self.count = count  # waiting prompts that pass here
        self.children: dict[tuple[int, ...], _Branch | Request] = {}


class WaitingPrompts:
    """Waiting prompts by their blocks of tokens, within their namespace, without the last token,
    whose logits are needed. A prompt has a leaf in the tree at the first block that it shares with
    no other. So every operation takes time in the length of one prompt, however many wait."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._roots: dict[Hashable, _Branch] = {}
        # of the requests in the tree: they may change meanwhile
        self._namespaces: dict[Request, Hashable] = {}
        # ends of prefixes that a running request computes, to stop there; the scheduler clears it
        # before each step
        self.awaited: set[_Branch] = set()

    def __len__(self) -> int:
        return len(self._namespaces)

    def add(self, request: Request) -> None:
        """Enters a request, whose prompt has token ids only."""
        self._namespaces[request] = request.namespace
        branch = self._roots.setdefault(request.namespace, _Branch())
        branch.count += 1
        for end, block in self._blocks(request):
            other = branch.children.setdefault(block, request)
            if other is request:
                return
            if isinstance(other, Request):  # its leaf moves to its next block
                branch.children[block] = child = _Branch(1)
                for _, following in islice(self._blocks(other, end), 1):
                    child.children[following] = other
                other = child
            other.count += 1
            branch = other

    def discard(self, request: Request) -> None:
        """Removes a request, if it was entered."""
        if request not in self._namespaces:
            return
        namespace = self._namespaces.pop(request)
        branch = self._roots[namespace]
        branch.count -= 1
        if not branch.count:
            del self._roots[namespace]
        for _, block in self._blocks(request):
            child = branch.children[block]
            if child is request:
                del branch.children[block]
                return
            assert isinstance(child, _Branch)
            child.count -= 1
            if not child.count:
                del branch.children[block]
                return
            branch = child

    def partings(self, request: Request) -> list[int]:
        """Returns the numbers of tokens, in whole blocks, after which other waiting prompts part
        from this one, which waits, too; none if it was not entered."""
        partings, before, last = [], 1, 0
        for end, branch in self._path(request) if request in self._namespaces else ():
            if branch.count < before:
                partings.append(last)
            before, last = branch.count, end
        return [*partings, last] if before > 1 else partings

    def begin(self, request: Request, stops: Sequence[int]) -> None:
        """Notes that this step computes tokens of a running request, whose prefill stops at
        `stops`."""
        self.awaited.update(branch for end, branch in self._path(request) if end in stops)

    def is_awaited(self, request: Request) -> bool:
        """Whether another request stops in this step, or later, where this waiting one can begin
        then."""
        return request in self._namespaces and any(
            branch in self.awaited for _, branch in self._path(request)
        )

    def _path(self, request: Request) -> Iterator[tuple[int, _Branch]]:
        """Yields the branches along a prompt, each after the number of tokens up to its end."""
        branch = self._roots.get(request.namespace) or _Branch()
        for end, block in self._blocks(request):
            child = branch.children.get(block)
            if not isinstance(child, _Branch):
                return
            yield end, child
            branch = child

    def _blocks(self, request: Request, first: int = 0) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yields the prompt's full blocks of tokens from token `first` on, each after the number of
        tokens up to its end."""
        token_ids = request.sequences[0].token_ids
        for end in range(first + self._size, request.num_prompt_tokens, self._size):
            yield end, tuple(token_ids[end - self._size : end])
