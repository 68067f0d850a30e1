"""Frees idle pools after `idle_release_seconds`, in one thread for all pools. How a pool is freed
is up to `PagedMemory.release`."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref

from .. import forks
from ..threads import attempt, begin, make
from ..topics import Topic
from . import budget
from .memory import PagedMemory

logger = logging.getLogger(__name__)

MIN_WAIT = 1.0  # seconds before the next try to free a pool that a caller's cache still uses
_MAX_WAIT = 3600.0  # seconds: below every system's limit

# Use `with _lock`, not `with _condition`: a condition's `__enter__` is Python code, in which a
# signal may leave the lock acquired.
_lock = forks.rlock()
_condition = threading.Condition(_lock)
# when to free each pool, by `time.monotonic`
_deadlines: weakref.WeakKeyDictionary[PagedMemory, float] = weakref.WeakKeyDictionary()
_is_running = False  # whether the thread runs or is starting; it runs while there are deadlines


def begin_use(memory: PagedMemory) -> None:
    """Marks the pool as used by a call, or by an engine with unfinished requests."""
    memory.last_used = time.monotonic()
    with _lock:
        _deadlines.pop(memory, None)


def end_use(memory: PagedMemory) -> None:
    """Marks the end of a call, or of an engine's last request: unless it is used again, the pool is
    freed after `idle_release_seconds`, with 0 at once. A caller's cache that holds blocks keeps the
    whole pool alive."""
    seconds = memory.config.idle_release_seconds
    # pools of several processes must be freed in step, and their clocks differ
    is_in_step = memory.processes is not None and not memory.processes.leads
    if seconds is None or (seconds == 0 and memory.release()) or is_in_step:
        begin_use(memory)
    else:
        _watch(memory, seconds or MIN_WAIT)
    budget.enforce()


def _watch(memory: PagedMemory, seconds: float) -> None:
    global _is_running
    with _lock:
        first = min(_deadlines.values(), default=float("inf"))
        _deadlines[memory] = deadline = time.monotonic() + seconds
        was_running, _is_running = _is_running, True
        if deadline < first:  # else the thread wakes early enough
            _condition.notify_all()
    if was_running:
        return
    thread = make(_serve, "hf_paged idle pools", on_error=_die)
    try:
        begin(thread)
    finally:
        if not thread.is_alive():
            with _lock:  # the next `end_use` tries again
                _is_running = False


def _serve() -> None:
    global _is_running
    while True:
        with _lock:
            due = _take_due()
            if not due and not _deadlines:
                _is_running = False
                _condition.notify_all()
                return
            if not due:
                delay = min(_deadlines.values(), default=0.0) - time.monotonic()
                _condition.wait(min(max(delay, 0.0), _MAX_WAIT))
        for ref in due:
            try:
                _release(ref)
            except Exception:
                logger.warning(Topic.MEMORY("an idle pool could not be released"), exc_info=True)


def _die(error: BaseException) -> None:
    """Called in the thread when an error ends it: the next `end_use` starts another."""
    global _is_running
    with _lock:
        _is_running = False
        _condition.notify_all()
    logger.warning(Topic.MEMORY("the thread that frees idle pools ended"), exc_info=error)


def _take_due() -> list[weakref.ref[PagedMemory]]:
    """Removes and returns weak references to pools past their deadline."""
    now = time.monotonic()
    due = [memory for memory, deadline in _deadlines.items() if deadline <= now]
    for memory in due:
        del _deadlines[memory]
    return [weakref.ref(memory) for memory in due]


def _release(ref: weakref.ref[PagedMemory]) -> None:
    memory = ref()
    if memory is None:
        return
    with attempt(memory.outer_lock or memory.lock) as is_held:
        # else an engine is about to use the memory
        if is_held and memory.release():
            return
    seconds = memory.config.idle_release_seconds
    with _lock:
        if seconds is not None and memory not in _deadlines:
            _watch(memory, max(seconds, MIN_WAIT))


def _stop() -> None:
    """Stops the thread, so that it frees no memory during interpreter shutdown."""
    with _lock:
        _deadlines.clear()
        _condition.notify_all()
        _condition.wait_for(lambda: not _is_running, timeout=5)


def _forget() -> None:
    """Resets the state in a child process, which has no such thread yet."""
    global _lock, _condition, _is_running
    _lock = forks.rlock()
    _is_running = False
    _condition = threading.Condition(_lock)
    _deadlines.clear()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
