"""Decides which calls wait, and how long, for blocks that other threads' calls or other models
hold. Calls that each hold a part of the memory do not wait for each other forever. Preempts no
requests."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .. import forks
from ..interrupts import register_for_cleanup, restoring
from . import budget

_POLL_SECONDS = 0.01  # between attempts
GRACE = 0.5  # seconds for callers to drop the caches that their finished calls returned
# If no call on the memory makes a step for this many seconds, a waiting call assumes a deadlock:
# user code may make the holders of the blocks wait for this call.
MAX_STALL = 60.0


class Holder:
    """A call that may hold blocks of a memory while it is in `PagedMemory.holders`; made in the
    thread that runs the call."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.thread = threading.get_ident()
        self.is_waiting = False  # for blocks
        forks.add_listener(self)
        register_for_cleanup(self)

    def is_progressing(self, thread: int) -> bool:
        """Whether this is a call of a thread other than `thread` and is not waiting for blocks."""
        return self.thread != thread and not self.is_waiting

    def withdraw(self) -> None:
        """Removes this holder from the memory's holders, if it is among them."""
        if self in self.memory.holders:
            self.memory.holders.remove(self)

    def clean_up_after_error(self) -> None:
        """Withdraws this thread's holder, in case an interrupt has left its call open."""
        if self.thread == threading.get_ident():
            self.withdraw()

    def after_fork(self, freed: set[Any]) -> None:
        """Called in a forked child: withdraws the holder of a thread that does not exist there."""
        if self.thread != threading.get_ident():
            self.withdraw()


class Shortage:
    """Decides whether a call that ran out of blocks tries again. The call tries again while calls
    of other threads progress, since they will free their blocks, and for `GRACE` seconds
    afterwards. Unless it holds all used blocks itself (`is_alone`), it also tries again for `GRACE`
    seconds after its first attempt."""

    def __init__(self, memory: Any, is_alone: bool = False) -> None:
        self._memory = memory
        self._progress_count = -1
        self._last_step_at = 0.0
        self.started_at = time.monotonic()
        self._last_progress_at = -math.inf if is_alone else self.started_at

    def should_retry(self) -> bool:
        """Whether to try again after a failed attempt."""
        now = time.monotonic()
        progress_count = self._memory.progress_count
        thread = threading.get_ident()
        if progress_count != self._progress_count:
            self._progress_count, self._last_step_at = progress_count, now
        holders = list(self._memory.holders)
        others_progress = any(holder.is_progressing(thread) for holder in holders)
        if others_progress and now - self._last_step_at < MAX_STALL:
            self._last_progress_at = now
        return now - self._last_progress_at < GRACE

    @property
    def should_await_other_models(self) -> bool:
        """Whether to try again because other models hold memory: for up to `budget.PATIENCE`
        seconds."""
        is_patient = time.monotonic() - self.started_at < budget.PATIENCE
        return is_patient and bool(self._memory.num_held_by_others)

    def wait(self) -> bool:
        """Returns `should_retry`, after a short sleep if that is true. The caller must hold no
        lock."""
        with claims_waiting(self._memory):
            will_retry = self.should_retry()
            if will_retry:
                time.sleep(_POLL_SECONDS)
            return will_retry


AnyHolder = TypeVar("AnyHolder", bound=Holder)


@restoring
def holding(holder: AnyHolder) -> Iterator[AnyHolder]:
    """A context in which `holder` is among the holders of its memory."""
    try:
        holder.memory.holders.append(holder)
        yield holder
    finally:
        holder.withdraw()


class Claim(Holder):
    """The claim of a call that cannot be preempted: how many blocks it will hold at most."""

    def __init__(self, memory: Any, num_blocks: int) -> None:
        super().__init__(memory)
        self.num_blocks = num_blocks
        self.is_waiting = True

    def fits(self, total: int) -> bool:
        """Whether `total` blocks suffice for this claim and all earlier ones. Always true without
        earlier claims, or if this thread made one: it would wait for itself."""
        claims = claims_on(self.memory)
        earlier_claims = claims[: claims.index(self)]
        is_nested = any(claim.thread == self.thread for claim in earlier_claims)
        if not earlier_claims or is_nested:
            return True
        num_blocks = sum(claim.num_blocks for claim in [*earlier_claims, self])
        return num_blocks <= total

    def wait(self, total: Callable[[], int]) -> None:
        """Waits until the claim `fits` into `total()` blocks, or until no call of another thread
        progresses."""
        shortage = Shortage(self.memory)
        while not self.fits(total()) and shortage.wait():
            pass
        self.is_waiting = False


def claims_on(memory: Any) -> list[Claim]:
    """Returns the claims on a memory, in the order in which they were made."""
    holders = list(memory.holders)
    return [holder for holder in holders if isinstance(holder, Claim)]


@restoring
def claims_waiting(memory: Any) -> Iterator[None]:
    """A context in which the claims of this thread count as waiting: while its calls wait for
    blocks, or while a loop determines whether other calls progress."""
    thread = threading.get_ident()
    claims = [
        claim for claim in claims_on(memory) if claim.thread == thread and not claim.is_waiting
    ]
    try:
        for claim in claims:
            claim.is_waiting = True
        yield
    finally:
        for claim in claims:
            claim.is_waiting = False


@restoring
def claiming(memory: Any, num_blocks: int, total: Callable[[], int]) -> Iterator[None]:
    """A context for a call that cannot be preempted and holds up to `num_blocks` of `total()`
    blocks. First calls `Claim.wait`."""
    with holding(Claim(memory, num_blocks)) as claim:
        claim.wait(total)
        yield
