"""The queue of requests that wait for their blocks. Plain Python."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ..request import Request, Status


class WaitingQueue:
    """
    Waiting requests by `request.key`, earliest first. Cancelled ones are skipped when they come up, and swept out when
    they are most of the queue, so that every operation takes logarithmic time.

    Requests that were preempted while they waited for a token are parked beside the queue: they have their logits, and
    must not take blocks from others until they have something to compute again.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Request]] = []
        self._num_cancelled = 0
        self._parked: list[Request] = []

    def __len__(self) -> int:
        return len(self._heap) - self._num_cancelled + len(self._parked)

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no order."""
        yield from (request for _, request in self._heap if request.status is Status.WAITING)
        yield from self._parked

    def push(self, request: Request) -> None:
        """Adds a request whose status is `WAITING`."""
        if request.num_preemptions and request.is_answered:
            self._parked.append(request)
        else:
            heapq.heappush(self._heap, (request.key, request))

    def wake(self) -> None:
        """Queues parked requests that got a token."""
        if self._parked:
            parked, self._parked = self._parked, []
            for request in parked:
                self.push(request)

    def head(self) -> Request | None:
        """The request whose turn is next."""
        heap = self._heap
        while heap and heap[0][1].status is not Status.WAITING:
            heapq.heappop(heap)
            self._num_cancelled -= 1
        return heap[0][1] if heap else None

    def pop(self) -> Request:
        """Takes the head out."""
        return heapq.heappop(self._heap)[1]

    def cancelled(self, request: Request) -> None:
        """This waiting request has just been given another status."""
        if request in self._parked:
            self._parked.remove(request)
            return
        self._num_cancelled += 1
        if self._num_cancelled > 64 and 2 * self._num_cancelled > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
            self._num_cancelled = 0
