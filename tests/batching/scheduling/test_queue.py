"""The queue of waiting requests against a sorted list."""

from __future__ import annotations

import itertools
import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged.batching.request import Request, Sequence, Status
from hf_paged.batching.scheduling.queue import WaitingQueue


def request_of(key: tuple[float, int]) -> Request:
    request = Request(key, [Sequence([1, 2, 3])], max_num_tokens=8)
    request.key = key
    return request


def answered(request: Request) -> Request:
    """As if it was preempted while it waited for a token."""
    request.num_preemptions = 1
    for sequence in request.sequences:
        sequence.num_answered_tokens = sequence.num_tokens
    return request


class QueueMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.queue = WaitingQueue()
        self.queued: list[Request] = []
        self.parked: list[Request] = []
        self.count = itertools.count()

    @rule(priority=st.integers(0, 2), is_answered=st.booleans())
    def push(self, priority: int, is_answered: bool) -> None:
        request = request_of((priority, next(self.count)))
        self.queue.push(answered(request) if is_answered else request)
        (self.parked if is_answered else self.queued).append(request)

    @precondition(lambda self: self.parked)
    @rule(data=st.data(), wakes=st.booleans())
    def append_token(self, data: st.DataObject, wakes: bool) -> None:
        request = data.draw(st.sampled_from(self.parked))
        request.sequences[0].token_ids.append(4)
        self.queue.wake()
        self.parked.remove(request)
        self.queued.append(request)

    @precondition(lambda self: self.queued)
    @rule()
    def pop(self) -> None:
        request = min(self.queued, key=lambda request: request.key)
        assert self.queue.head() is request and self.queue.pop() is request
        request.status = Status.RUNNING
        self.queued.remove(request)

    @precondition(lambda self: self.queued or self.parked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.queued + self.parked))
        request.status = Status.FINISHED
        self.queue.cancelled(request)
        (self.queued if request in self.queued else self.parked).remove(request)

    @invariant()
    def holds_what_waits(self) -> None:
        if not hasattr(self, "queue"):
            return
        waiting = self.queued + self.parked
        assert len(self.queue) == len(waiting)
        assert sorted(request.key for request in self.queue) == sorted(request.key for request in waiting)
        assert self.queue.head() is min(self.queued, key=lambda request: request.key, default=None)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=100, stateful_step_count=30)


def test_cancelled_requests_are_swept_out() -> None:
    queue, draw = WaitingQueue(), random.Random(0)
    requests = [request_of((0, arrival)) for arrival in range(1000)]
    for request in requests:
        queue.push(request)
    gone = draw.sample(requests, 900)
    for request in gone:
        request.status = Status.FINISHED
        queue.cancelled(request)
    assert len(queue) == 100 and len(queue._heap) < 300
    left = [request for request in requests if request.status is Status.WAITING]
    taken = []
    while queue.head() is not None:
        taken.append(queue.pop())
    assert taken == left and len(queue) == 0
