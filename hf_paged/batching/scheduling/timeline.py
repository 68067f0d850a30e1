"""Who was in the batch when: what a scheduler says of its requests, kept as intervals. Plain Python: no tensors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from enum import Enum
from typing import NamedTuple

from ..request import Request
from .plan import StepPlan

MAX_INTERVALS = 4096  # a request that is never preempted leaves three


class Activity(Enum):
    """What a request does from one step to another. The last three hold no blocks of the pool."""

    PREFILL = "prefill"
    RECOMPUTE = "recompute"  # a prefill of what was computed before
    DECODE = "decode"
    WAITING = "waiting"
    PREEMPTED = "preempted"  # its blocks were given up
    SWAPPED = "swapped out"  # its blocks are in host memory


IN_BATCH = (Activity.PREFILL, Activity.RECOMPUTE, Activity.DECODE)


class Interval(NamedTuple):
    """Steps `[first_step, end_step)` through which a request did one thing."""

    number: int  # of the request, in the order in which they came; ids may be used again
    request_id: Hashable
    activity: Activity
    first_step: int
    end_step: int
    start: float  # seconds since the timeline was made
    end: float
    is_last: bool  # the request ended here


class Timeline:
    """
    What the requests of a scheduler did in which steps.

    Only changes are noted: an interval takes as much memory whether it covers one step or a million, and a step in
    which none comes, goes or begins to decode costs a comparison. The latest `max_intervals` are kept, with one for
    every unfinished request.

    Args:
        max_intervals (`int`): Most intervals that are kept of what is over, about 250 bytes each.

    Attributes:
        num_steps (`int`): Steps scheduled so far.
        num_dropped (`int`): Intervals that are no longer kept.
    """

    def __init__(self, max_intervals: int = MAX_INTERVALS) -> None:
        self.num_steps = self.num_dropped = 0
        self._closed: deque[Interval] = deque(maxlen=max_intervals)
        self._open: dict[Request, Interval] = {}  # what each unfinished request is doing; it ends now
        self._recomputing: set[Request] = set()  # those whose tokens were computed before
        self._admitted: set[Request] = set()  # since the last step
        self._prefilling: set[Request] = set()  # in the last step
        self._num_requests = 0
        self._origin = time.perf_counter()

    # -- told by the scheduler ------------------------------------------------------------------------------------

    def waits(self, request: Request) -> None:
        """The request is new, or has just lost its blocks."""
        found = self._open.get(request)
        if found is None:
            self._begin(request, self._num_requests, Activity.WAITING, self._now())
            self._num_requests += 1
            return
        self._admitted.discard(request)
        self._prefilling.discard(request)
        if request.is_swapped:
            self._change(request, Activity.SWAPPED)
        elif found.activity is not Activity.WAITING:  # it was in a batch
            self._change(request, Activity.PREEMPTED)

    def runs(self, request: Request) -> None:
        """The request has blocks, for the first time or again; it may still lose them before the step."""
        self._admitted.add(request)

    def stepped(self, plan: StepPlan) -> None:
        """The next step computes what is planned."""
        if self._admitted or self._prefilling or plan.chunks:
            self._note_changes({sequence.request for sequence, _ in plan.chunks})
        self.num_steps += 1

    def _note_changes(self, chunked: set[Request]) -> None:
        for request in self._admitted | self._prefilling | chunked:
            before = self._open[request].activity
            if request not in self._admitted and before not in IN_BATCH:
                continue
            if before is Activity.PREEMPTED:
                self._recomputing.add(request)
            if request not in chunked and request.is_computed:
                self._change(request, Activity.DECODE)
                self._prefilling.discard(request)
            else:  # where it has no chunk in this step, the next one is still to come
                self._change(request, Activity.RECOMPUTE if request in self._recomputing else Activity.PREFILL)
                self._prefilling.add(request)
        self._admitted.clear()

    def finished(self, request: Request) -> None:
        """The request needs nothing any more."""
        for requests in (self._prefilling, self._admitted, self._recomputing):
            requests.discard(request)
        if request in self._open:
            self._close(request, is_last=True)

    # -- asked ----------------------------------------------------------------------------------------------------

    def intervals(self) -> list[Interval]:
        """All that is kept, by request in the order in which they came; what still goes on ends now."""
        going_on = [interval._replace(end_step=self.num_steps, end=self._now()) for interval in self._open.values()]
        return sorted([*self._closed, *going_on], key=lambda interval: (interval.number, interval.start))

    def __repr__(self) -> str:
        return f"Timeline({self._num_requests} requests, {len(self._open)} unfinished, {self.num_steps} steps)"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.perf_counter() - self._origin

    def _begin(self, request: Request, number: int, activity: Activity, now: float) -> None:
        step = self.num_steps
        self._open[request] = Interval(number, request.request_id, activity, step, step, now, now, is_last=False)

    def _change(self, request: Request, activity: Activity) -> None:
        if self._open[request].activity is not activity:
            ended = self._close(request)
            self._begin(request, ended.number, activity, ended.end)

    def _close(self, request: Request, is_last: bool = False) -> Interval:
        interval = self._open.pop(request)._replace(end_step=self.num_steps, end=self._now(), is_last=is_last)
        self.num_dropped += len(self._closed) == self._closed.maxlen
        self._closed.append(interval)
        return interval
