"""The queue of the unfinished requests, running and waiting, in priority order. It tracks which of
them may have caused a failed forward, and creates out-of-blocks errors. The scheduler decides what
a step computes."""

from __future__ import annotations

import sys
from bisect import insort
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from ...cache.block_pool import OutOfBlocksError
from ...rooms import OnDemand
from ...seams import Adapters
from ..request import Request, RequestListener, Status
from .preemption import Preemption

_by_key = attrgetter("sort_key")


class NeverFitsError(OutOfBlocksError):
    """`request` needs more blocks than are available, although no other request, cache or model
    holds any."""

    def __init__(self, request: Request, message: str) -> None:
        super().__init__(message)
        self.request = request

    def __reduce__(self) -> tuple[Any, ...]:
        return OutOfBlocksError, (str(self),)  # pickled without the request, which holds blocks


class Suspects(deque[set[Request]]):
    """Groups of requests that may have made a forward fail. Steps compute only the requests of the
    first group, then of the next; a group that fails again is halved, so that in the end only
    requests that fail alone in a forward get the error."""

    def first(self) -> set[Request] | None:
        """Returns the requests to which the next step is limited; `None` if no group is left."""
        while self and not self[0]:
            self.popleft()
        return self[0] if self else None

    def halve(self, request_lists: list[list[Request]]) -> None:
        """Splits the requests of a failed forward into two groups, which later steps compute one
        after the other. The requests of one list stay in one group."""
        middle = len(request_lists) // 2
        for half in (request_lists[middle:], request_lists[:middle]):
            requests = {
                request
                for request_list in half
                for request in request_list
                if not request.is_finished
            }
            self.discard(requests)  # if the first group failed, it still contains them
            self.appendleft(requests)

    def clear_computed(self) -> None:
        """Called after a successful forward of the first group: removes the requests that are
        finished, or have nothing to compute until they get their next tokens."""
        self.discard(
            {
                request
                for request in self[0]
                if request.is_finished or request.is_computed or request.awaits_tokens
            }
        )

    def discard(self, requests: set[Request]) -> None:
        """Removes the requests from all groups."""
        for group in self:
            group -= requests


@dataclass(eq=False)
class RequestQueue:
    """The unfinished requests: each is either in `running` or in `waiting`, both sorted by
    `Request.sort_key`. `preemption` allocates and frees their blocks."""

    preemption: Preemption
    timeline: RequestListener  # told when requests wait
    # made on demand; admits and releases requests with `adapter_bytes`
    adapters: OnDemand[Adapters]
    suspects: Suspects = field(default_factory=Suspects)
    # the requests that this step may compute: the first group of suspects; `None` for all
    allowed_requests: Set[Request] | None = None
    running: list[Request] = field(default_factory=list)
    # includes preempted requests, even those with nothing to compute until their next tokens
    waiting: list[Request] = field(default_factory=list)
    num_rows: int = 0  # open rows of running requests
    # how many earlier requests a request overtakes if its `priority` is lower by 1
    arrivals_per_priority: float = 256.0
    _num_arrivals: int = 0

    @property
    def first_waiting(self) -> Request | None:
        """The request to admit next; `None` if no waiting request may begin."""
        return next(filter(self.may_begin, self.waiting), None)

    def may_begin(self, request: Request) -> bool:
        """Whether a waiting request may be admitted in this step, and has tokens to compute."""
        return self.may_run(request) and not request.awaits_tokens

    def may_run(self, request: Request) -> bool:
        """Whether this step may compute the request (`allowed_requests`)."""
        return self.allowed_requests is None or request in self.allowed_requests

    def add(self, request: Request) -> None:
        """Queues a new request."""
        if request.adapter_bytes:
            self.adapters()  # makes the loop's `Adapters`; each step then calls its `prefetch`
        arrival = self._num_arrivals
        request.sort_key = (arrival + request.priority * self.arrivals_per_priority, arrival)
        self._num_arrivals += 1
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        request.status = Status.WAITING
        insort(self.waiting, request, key=_by_key)
        self.preemption.note_waiting(request)
        self.timeline.record_waiting(request)

    def start(self, request: Request) -> None:
        """Moves a waiting request to `running`, after `admit` has returned true for it."""
        self.remove(request)
        request.admit()
        self.num_rows += request.num_open_rows
        insort(self.running, request, key=_by_key)

    def remove(self, request: Request) -> None:
        if request.status is not Status.RUNNING:
            self.waiting.remove(request)
            self.preemption.note_removed(request)
            return
        self.running.remove(request)
        self.num_rows -= request.num_open_rows
        if request.adapter_bytes:
            self.adapters().release(request)

    def clear(self) -> None:
        self.suspects.clear()
        self.running = []
        self.waiting = []
        self.num_rows = 0
        self.preemption.forget_waiting()

    def out_of_blocks(self, request: Request) -> OutOfBlocksError:
        """Returns the error of a step that schedules nothing because `request` needs more blocks
        than are free: `NeverFitsError` if no other request, cache or model holds blocks."""
        blocks = self.preemption.blocks
        available = ""
        if blocks.num_total < sys.maxsize:
            available = f" ({blocks.num_free} of {blocks.num_total} available)"
        shortage = (
            f"nothing can be scheduled: request {request.request_id!r} needs more blocks"
            f"{available}. Requests waiting: {len(self.waiting)}, running: {len(self.running)}. "
        )
        if self.running or blocks.memory.is_used:
            return OutOfBlocksError(
                shortage + "Other requests or caches hold blocks: end the requests, free the"
                " caches or raise `num_blocks`"
            )
        if blocks.memory.num_held_by_others:
            return OutOfBlocksError(
                shortage + "Other models hold the rest of `hf_paged.budget`: end their requests, or"
                " raise the budget"
            )
        return NeverFitsError(
            request,
            shortage + "No other request holds blocks: raise `num_blocks`, `memory_fraction` or"
            " `hf_paged.budget`, free memory, or lower `max_new_tokens`, the prompt length or the"
            " number of sequences",
        )
