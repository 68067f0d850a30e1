"""Records what each request did over time (`Activity`), as intervals of steps. Holds no tensors;
`pictures.py` plots the intervals."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from enum import Enum
from typing import NamedTuple

from ..batching.request import Request, RequestListener, Status
from ..plan import StepPlan

MAX_INTERVALS = 4096  # of all requests; a request that is never preempted has at most three
MAX_VERIFICATIONS = 4096


class Activity(Enum):
    """What a request did during some steps. While it is waiting, preempted or swapped out, it holds
    no blocks of the pool."""

    PREFILL = "prefill"
    RECOMPUTE = "recompute"  # a prefill after a preemption
    DECODE = "decode"
    WAITING = "waiting"
    PREEMPTED = "preempted"  # its blocks were freed
    SWAPPED = "swapped out"  # its blocks are in host memory


class Interval(NamedTuple):
    """Steps `[first_step, end_step)` in which a request had one activity."""

    number: int  # of the request, in order of arrival: unlike ids, never reused
    request_id: Hashable
    activity: Activity
    first_step: int
    end_step: int
    start: float  # seconds since the timeline was created
    end: float
    is_last: bool  # whether the request ended with this interval


class Verification(NamedTuple):
    """A step that verified a draft of a request."""

    number: int  # of the request, as in `Interval`
    step: int
    start: float  # seconds since the timeline was created
    end: float
    num_draft_tokens: int
    num_accepted_tokens: int


class Timeline(RequestListener):
    """Keeps the latest `max_intervals` closed intervals, about 250 bytes each, the open interval of
    each unfinished request, and the latest `MAX_VERIFICATIONS` verifications of drafts."""

    def __init__(self, max_intervals: int = MAX_INTERVALS) -> None:
        self._closed_intervals: deque[Interval] = deque(maxlen=max_intervals)
        self._open_intervals: dict[Request, Interval] = {}  # one for each unfinished request
        # requests that were in prefill or recompute in the last step
        self._prefilling_requests: set[Request] = set()
        # by swapped-out request: how many of its tokens were computed
        self._num_swapped_tokens: dict[Request, int] = {}
        self._num_requests = 0  # recorded so far
        self._verifications: deque[Verification] = deque(maxlen=MAX_VERIFICATIONS)
        self._step_start = 0.0
        self._origin = time.perf_counter()

    def record_waiting(self, request: Request) -> None:
        self._prefilling_requests.discard(request)
        previous = self._open_intervals.get(request)
        has_run = previous is not None and previous.activity is not Activity.WAITING
        activity = Activity.PREEMPTED if has_run else Activity.WAITING
        if request.is_swapped:
            activity = Activity.SWAPPED
            self._num_swapped_tokens[request] = _num_computed_tokens(request)
        self._set_activity(request, activity)

    def record_step(self, plan: StepPlan) -> None:
        chunks = plan.sequences[plan.num_decodes :]
        if plan.admitted or self._prefilling_requests or chunks:
            chunked_requests = {sequence.request for sequence in chunks}
            counts = dict(zip(plan.sequences, plan.counts))
            for request in self._prefilling_requests | chunked_requests | set(plan.admitted):
                if request.status is not Status.RUNNING:  # preempted in the same step
                    continue
                previous = self._open_intervals[request].activity
                num_swapped = self._num_swapped_tokens.pop(request, 0)
                # whether no token of the request is left to compute after this step
                will_be_computed = all(
                    row.num_to_compute <= counts.get(row, 0) for row in request.open_sequences
                )
                if request not in chunked_requests and will_be_computed:
                    self._set_activity(request, Activity.DECODE)
                    self._prefilling_requests.discard(request)
                else:  # also if this step computes no chunk of the request
                    recomputes = previous in (Activity.PREEMPTED, Activity.RECOMPUTE)
                    # if swapped-out blocks were lost, the request also recomputes tokens
                    recomputes |= _num_computed_tokens(request) < num_swapped
                    activity = Activity.RECOMPUTE if recomputes else Activity.PREFILL
                    self._set_activity(request, activity)
                    self._prefilling_requests.add(request)
        self._step_start = self._now()
        self.num_steps += 1

    def record_verification(
        self, request: Request, num_draft_tokens: int, num_accepted_tokens: int
    ) -> None:
        if request in self._open_intervals:
            number = self._open_intervals[request].number
            step = self.num_steps - 1
            counts = num_draft_tokens, num_accepted_tokens
            self._verifications.append(
                Verification(number, step, self._step_start, self._now(), *counts)
            )

    def record_end(self, request: Request) -> None:
        self._prefilling_requests.discard(request)
        self._num_swapped_tokens.pop(request, None)
        if request in self._open_intervals:
            self._close(request, is_last=True)

    def intervals(self) -> list[Interval]:
        """Returns the kept intervals, by request in order of arrival; open intervals end now."""
        open_intervals = [
            interval._replace(end_step=self.num_steps, end=self._now())
            for interval in self._open_intervals.values()
        ]
        return sorted(
            [*self._closed_intervals, *open_intervals],
            key=lambda interval: (interval.number, interval.start),
        )

    def verifications(self) -> list[Verification]:
        """Returns the kept verifications, oldest first."""
        return list(self._verifications)

    def _now(self) -> float:
        return time.perf_counter() - self._origin

    def _set_activity(self, request: Request, activity: Activity) -> None:
        previous = self._open_intervals.get(request)
        step = self.num_steps
        if previous is None:
            number = self._num_requests
            now = self._now()
            self._num_requests += 1
        elif previous.activity is activity:
            return
        else:
            number = previous.number
            now = self._close(request).end
        self._open_intervals[request] = Interval(
            number, request.request_id, activity, step, step, now, now, is_last=False
        )

    def _close(self, request: Request, is_last: bool = False) -> Interval:
        interval = self._open_intervals.pop(request)._replace(
            end_step=self.num_steps, end=self._now(), is_last=is_last
        )
        self._closed_intervals.append(interval)
        return interval


def _num_computed_tokens(request: Request) -> int:
    return sum(sequence.num_computed_tokens for sequence in request.open_sequences)
