"""The unfinished requests of a scheduler, running and waiting, in the order of their keys; which of
them may have made a forward fail; the errors for lack of blocks. What a step computes is up to the
scheduler."""

from __future__ import annotations

import functools
import sys
from bisect import insort
from collections import deque
from collections.abc import Sequence as Items
from collections.abc import Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from ...cache.block_pool import OutOfBlocksError
from ...rooms import OnDemand
from ...seams import Adapters
from ..request import Request, Status
from .preemption import Preemption

_by_key = attrgetter("key")


class NeverFits(OutOfBlocksError):
    """`request` needs more blocks than there are, although no other request holds any."""

    def __init__(self, request: Request, message: str) -> None:
        super().__init__(message)
        self.request = request

    def __reduce__(self) -> tuple[Any, ...]:
        return OutOfBlocksError, (str(self),)  # without the request, which holds blocks


class Suspects(deque[set[Request]]):
    """Groups of requests whose common forward failed. Steps compute the first group alone, then the
    next one, and a group that fails again is halved, so that only requests end which fail alone."""

    def first(self) -> set[Request] | None:
        """Returns the requests to which the next step is limited; `None` if no group is left."""
        while self and not self[0]:
            self.popleft()
        return self[0] if self else None

    def halve(self, units: Items[list[Request]]) -> None:
        """Makes the next steps compute these units, whose forward failed, in two halves, one after
        the other; the requests of a unit stay together."""
        middle = len(units) // 2
        for half in (units[middle:], units[:middle]):
            requests = {request for unit in half for request in unit if not request.is_finished}
            self.discard(requests)  # the forward was for requests of the first group
            self.appendleft(requests)

    def clear_computed(self) -> None:
        """After a forward that succeeded: removes its requests that have nothing left to compute
        before they get their next tokens."""
        self.discard({request for request in self[0] if _has_logits(request)})

    def discard(self, requests: set[Request]) -> None:
        """Removes requests from their groups."""
        for group in self:
            group -= requests


@dataclass(eq=False)
class RequestQueue:
    """Every unfinished request is in `running` or in `waiting`. `preemption` allocates and frees
    their blocks."""

    preemption: Preemption
    aging: float  # one unit of priority weighs as much as this many arrivals
    # admits requests whose adapters take memory in the pool (`Request.adapter_bytes`)
    adapters: OnDemand[Adapters] = field(default_factory=OnDemand)
    suspects: Suspects = field(default_factory=Suspects)
    # the requests that this step may compute: the first group of suspects; `None`: all
    allowed: Set[Request] | None = None
    running: list[Request] = field(default_factory=list)
    # a preempted request may only wait for a token
    waiting: list[Request] = field(default_factory=list)
    num_rows: int = 0  # open rows of running requests
    _num_arrivals: int = 0

    @property
    def first_waiting(self) -> Request | None:
        """The request to admit next."""
        return next(filter(self.may_begin, self.waiting), None)

    def may_begin(self, request: Request) -> bool:
        """Whether a waiting request may be admitted, and has tokens to compute."""
        return self.may_run(request) and not request.awaits_tokens

    def may_run(self, request: Request) -> bool:
        return self.allowed is None or request in self.allowed

    def add(self, request: Request) -> None:
        """Queues a new request."""
        if request.adapter_bytes:
            self.adapters()  # makes it, so that it can prefetch
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
        """Makes a waiting request run; its blocks are allocated."""
        self.remove(request)
        request.status = Status.RUNNING
        self.num_rows += request.num_open_rows
        insort(self.running, request, key=_by_key)

    def remove(self, request: Request) -> None:
        if request.status is not Status.RUNNING:
            self.waiting.remove(request)
            self.preemption.waiting.discard(request)
            return
        self.running.remove(request)
        self.num_rows -= request.num_open_rows
        if request.adapter_bytes:
            self.adapters().release(request)

    def end_row(self, request: Request) -> None:
        """Counts a row of the request that has ended while others have not."""
        request.num_open_rows -= 1
        if request.status is Status.RUNNING:
            self.num_rows -= 1

    def clear(self) -> None:
        self.running = []
        self.waiting = []
        self.num_rows = 0
        self.preemption.forget_waiting()

    def admit(self, request: Request, chunk: int, reserve: int, is_alone: bool) -> bool:
        """`Preemption.admit`, with the memory that the request's adapter needs. If this raises
        `OutOfBlocksError`, the request holds no blocks and is recomputed."""
        admit = functools.partial(self.preemption.admit, request, chunk, reserve, is_alone)
        try:
            if not request.adapter_bytes:
                return admit()
            return self.adapters().admit(request, admit)
        except OutOfBlocksError:
            self.preemption.reset(request)
            raise

    def out_of_blocks(self, request: Request) -> OutOfBlocksError:
        """Returns the error of a step that could schedule nothing because blocks for `request` are
        missing: `NeverFits` if no other request holds any."""
        blocks = self.preemption.blocks
        total = "any number of"
        if blocks.num_total < sys.maxsize:
            total = f"{blocks.num_free} of {blocks.num_total}"
        shortage = (
            f"nothing can be scheduled: request {request.request_id!r} needs more blocks,"
            f" {len(self.waiting)} requests wait, {len(self.running)} run, {total} blocks are"
            " available. "
        )
        if self.running or blocks.memory.is_used:
            return OutOfBlocksError(
                shortage + "Others hold blocks: free their caches, or raise `num_blocks`"
            )
        if blocks.memory.num_held_by_others:
            return OutOfBlocksError(
                shortage
                + "Other models hold the rest of `hf_paged.budget`: end their requests, or raise it"
            )
        return NeverFits(
            request,
            shortage + "No other request holds blocks: raise `num_blocks`, `memory_fraction` or"
            " `hf_paged.budget`, free memory, or lower `max_new_tokens`, the prompt length or the"
            " number of sequences",
        )


def _has_logits(request: Request) -> bool:
    return request.is_finished or request.is_computed or request.awaits_tokens
