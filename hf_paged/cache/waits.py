"""Calls of several threads that wait for one another's blocks, such that no two of them each hold
half of a memory."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from .. import forks
from ..interrupts import ends_with_calls, restoring
from . import budget

_POLL = 0.01  # seconds between two tries
GRACE = 0.5  # seconds in which callers of calls that have ended drop the caches that these returned
# Seconds without a step of any call on the memory, after which a call that waits for blocks assumes
# that the calls which hold them wait for it: a caller's code may do that.
MAX_STALL = 60.0


class Holder(Protocol):
    """Calls that hold blocks of a memory (`PagedMemory.holders`)."""

    def is_progressing(self, thread: int) -> bool:
        """Whether a call of another thread than `thread` advances, and does not wait for blocks
        itself."""


class Shortage:
    """Decides whether a call that ran out of blocks tries again: as long as calls of other threads
    go on, which free theirs, and, unless it `is_alone`, for `GRACE` after they have ended."""

    def __init__(self, memory: Any, is_alone: bool = False) -> None:
        self._memory = memory
        self._num_steps = -1
        self._last_step_at = 0.0
        self.since = time.monotonic()
        self._last_progress_at = -math.inf if is_alone else self.since

    def should_retry(self) -> bool:
        """Whether to try again after a try that failed."""
        now = time.monotonic()
        num_steps = self._memory.num_steps
        me = threading.get_ident()
        if num_steps != self._num_steps:
            self._num_steps, self._last_step_at = num_steps, now
        go_on = any(holder.is_progressing(me) for holder in list(self._memory.holders))
        if go_on and now - self._last_step_at < MAX_STALL:
            self._last_progress_at = now
        return now - self._last_progress_at < GRACE

    @property
    def should_await_other_models(self) -> bool:
        """Whether to try again because other models hold the memory, for `PATIENCE`."""
        is_patient = time.monotonic() - self.since < budget.PATIENCE
        return is_patient and bool(self._memory.num_held_by_others)

    def wait(self) -> bool:
        """As `should_retry`, and waits before the next try. Not for use with a lock held."""
        with claims_waiting(self._memory):
            retries = self.should_retry()
            if retries:
                time.sleep(_POLL)
            return retries


class Claim:
    """The most blocks that a call will hold which cannot be preempted."""

    def __init__(self, memory: Any, num_blocks: int) -> None:
        self.memory = memory
        self.num_blocks = num_blocks
        self.thread = threading.get_ident()
        self.is_waiting = True
        forks.in_child(self)
        ends_with_calls(self)

    def is_progressing(self, thread: int) -> bool:
        return self.thread != thread and not self.is_waiting

    def fits(self, total: int) -> bool:
        """Whether `total` blocks are enough for this and all earlier claims, of which none has to
        wait for it."""
        claims = claims_on(self.memory)
        earlier = claims[: claims.index(self)]
        is_nested = any(claim.thread == self.thread for claim in earlier)
        if not earlier or is_nested:
            return True
        num_blocks = sum(claim.num_blocks for claim in [*earlier, self])
        return num_blocks <= total

    def leave(self) -> None:
        if self in self.memory.holders:
            self.memory.holders.remove(self)

    def end_calls(self) -> None:
        if self.thread == threading.get_ident():
            self.leave()

    def after_fork(self, freed: set[Any]) -> None:
        """In a forked child, where calls of other threads do not go on."""
        if self.thread != threading.get_ident():
            self.leave()


def claims_on(memory: Any) -> list[Claim]:
    holders = list(memory.holders)
    return [holder for holder in holders if isinstance(holder, Claim)]


@restoring
def claims_waiting(memory: Any) -> Iterator[None]:
    """While this thread's calls wait for blocks, or a loop tells whether they go on: their claims
    do not."""
    me = threading.get_ident()
    claims = [claim for claim in claims_on(memory) if claim.thread == me and not claim.is_waiting]
    try:
        for claim in claims:
            claim.is_waiting = True
        yield
    finally:
        for claim in claims:
            claim.is_waiting = False


@restoring
def claimed(memory: Any, num_blocks: int, total: Callable[[], int]) -> Iterator[None]:
    """For a call that cannot be preempted, and holds up to `num_blocks` of `total()` blocks: first
    waits until those of all earlier such calls leave room for them, or until it is the only one."""
    claim = Claim(memory, num_blocks)
    try:
        memory.holders.append(claim)
        shortage = Shortage(memory)
        while not claim.fits(total()) and shortage.wait():
            pass
        claim.is_waiting = False
        yield
    finally:
        claim.leave()
