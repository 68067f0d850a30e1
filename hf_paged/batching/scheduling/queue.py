"""The unfinished requests of a scheduler, running and waiting, each in the order of their keys."""

from __future__ import annotations

import functools
from bisect import insort
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from operator import attrgetter

from ...seams import Adapters
from ..request import Request, Status
from .preemption import Preemption

_by_key = attrgetter("key")


@dataclass(eq=False)
class RequestQueue:
    """Every unfinished request is in `running` or in `waiting`. `preemption` allocates their blocks
    and frees them."""

    preemption: Preemption
    aging: float  # one unit of priority weighs as much as this many arrivals
    # what brings in requests whose adapters take memory in the pool (`Request.adapter_bytes`)
    adapters: Callable[[], Adapters] | None = None
    only: Set[Request] | None = None  # the only requests that steps may compute; `None`: all
    running: list[Request] = field(default_factory=list, init=False)
    # preempted ones may just wait for a token
    waiting: list[Request] = field(default_factory=list, init=False)
    num_rows: int = field(default=0, init=False)  # open rows of running requests
    # running requests with inputs beside token ids
    num_with_inputs: int = field(default=0, init=False)
    _num_arrivals: int = field(default=0, init=False)

    @property
    def first_waiting(self) -> Request | None:
        """The request to admit next."""
        return next(filter(self.may_begin, self.waiting), None)

    def may_begin(self, request: Request) -> bool:
        """Whether a waiting request may be admitted, and has something to compute."""
        return self.may_run(request) and not request.is_answered

    def may_run(self, request: Request) -> bool:
        return self.only is None or request in self.only

    def add(self, request: Request) -> None:
        """Queues a new request."""
        if self.adapters is not None and request.adapter_bytes:
            self.adapters()  # is made now, and may prefetch
        arrival = self._num_arrivals
        request.key = (arrival + request.priority * self.aging, arrival)
        self._num_arrivals += 1
        self.wait(request)

    def wait(self, request: Request) -> None:
        request.status = Status.WAITING
        insort(self.waiting, request, key=_by_key)
        if self.preemption.may_stop(request):
            self.preemption.waiting.add(request)

    def run(self, request: Request) -> None:
        """Makes a waiting request run, whose blocks are there."""
        self.remove(request)
        request.status = Status.RUNNING
        self.num_rows += request.num_open_rows
        self.num_with_inputs += request.inputs is not None
        insort(self.running, request, key=_by_key)

    def remove(self, request: Request) -> None:
        if request.status is not Status.RUNNING:
            self.waiting.remove(request)
            self.preemption.waiting.discard(request)
            return
        self.running.remove(request)
        self.num_rows -= request.num_open_rows
        self.num_with_inputs -= request.inputs is not None
        if self.adapters is not None and request.adapter_bytes:
            self.adapters().release(request)

    def end_row(self, request: Request) -> None:
        """Notes that a row of the request has ended, and others have not."""
        request.num_open_rows -= 1
        if request.status is Status.RUNNING:
            self.num_rows -= 1

    def clear(self) -> None:
        self.running = []
        self.waiting = []
        self.num_rows = 0
        self.num_with_inputs = 0
        self.preemption.forget_waiting()

    def bring_in(self, request: Request, chunk: int, reserve: int, is_alone: bool) -> bool:
        """`Preemption.bring_in`, with what the request's adapter needs."""
        bring_in = functools.partial(self.preemption.bring_in, request, chunk, reserve, is_alone)
        if self.adapters is None or not request.adapter_bytes:
            return bring_in()
        return self.adapters().admit(request, bring_in)
