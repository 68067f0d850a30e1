"""Which requests a failed forward may be the fault of."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .generation import Generation
from .request import Request


class Suspects:
    """Groups of requests whose common forward failed. Steps compute the first group alone, then the
    next one, and a group that fails again is halved, so that only those end which fail alone."""

    def __init__(self) -> None:
        self._groups: deque[set[Request]] = deque()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def first(self) -> set[Request] | None:
        """Returns the requests to which the next step is limited; `None` if no group is left."""
        while self._groups and not self._groups[0]:
            self._groups.popleft()
        return self._groups[0] if self._groups else None

    def halve(self, generations: list[Generation]) -> None:
        """Makes the next steps compute these generations, whose forward failed, in two halves, one
        after the other."""
        middle = len(generations) // 2
        for half in (generations[middle:], generations[:middle]):
            requests = {
                request
                for generation in half
                for request in generation.requests
                if not request.is_finished
            }
            for group in self._groups:  # the forward was for requests of the first group
                group -= requests
            self._groups.appendleft(requests)

    def clear_computed(self) -> None:
        """After a forward that did not fail: takes those of its requests out that have nothing left
        to compute before they get their next tokens."""
        group = self._groups[0]
        group.difference_update([request for request in group if _has_logits(request)])

    def discard(self, requests: Iterable[Request]) -> None:
        for group in self._groups:
            group.difference_update(requests)

    def clear(self) -> None:
        self._groups.clear()


def _has_logits(request: Request) -> bool:
    return request.is_finished or request.is_computed or request.is_answered
