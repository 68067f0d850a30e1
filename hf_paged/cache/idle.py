"""Decides when to free idle pools (`idle_release_seconds`), in one thread for all pools.
`PagedMemory.release` frees a pool."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref

from .. import forks
from ..threads import make, try_start
from ..topics import Topic
from . import budget
from .memory import PagedMemory

logger = logging.getLogger(__name__)

MIN_WAIT = 1.0  # minimum seconds between attempts to free a pool that is in use or locked
_MAX_WAIT = 3600.0  # seconds; less than the longest wait that any system supports

# Use `with _lock`, not `with _condition`: a condition's `__enter__` is Python code, in which a
# signal may leave the lock acquired.
_lock = forks.rlock()
_condition = threading.Condition(_lock)
# the `time.monotonic` at which to free each pool
_deadlines = weakref.WeakKeyDictionary[PagedMemory, float]()
_is_running = False  # whether the thread exists, or is starting; it runs while there are deadlines


def begin_use(memory: PagedMemory) -> None:
    """Marks the pool as in use by a call, or by an engine with unfinished requests."""
    memory.note_use()
    with _lock:
        _deadlines.pop(memory, None)


def end_use(memory: PagedMemory) -> None:
    """Marks the end of a call, or of an engine's last request. Unless the pool is used again, it is
    freed after `idle_release_seconds` (0: at once; `None`: only under `hf_paged.budget`), but not
    while a caller's cache holds blocks."""
    memory.note_use()
    seconds = memory.config.idle_release_seconds
    # clocks differ between processes, so an engine's leading process frees the pools of all its
    # processes; if `generate` runs over several processes, none leads, and their pools are kept
    keeps_pool = memory.processes is not None and not memory.processes.leads
    if seconds is None or keeps_pool or (seconds == 0 and memory.release()):
        with _lock:
            _deadlines.pop(memory, None)
    else:
        _schedule(memory, seconds or MIN_WAIT)
    budget.enforce()


def _schedule(memory: PagedMemory, seconds: float) -> None:
    """Schedules the release of a pool in `seconds`; starts the thread unless it is running."""
    global _is_running
    with _lock:
        earliest = min(_deadlines.values(), default=float("inf"))
        _deadlines[memory] = deadline = time.monotonic() + seconds
        was_running, _is_running = _is_running, True
        if deadline < earliest:  # otherwise the thread wakes early enough
            _condition.notify_all()
    if was_running:
        return
    thread = make(_free_due_pools, "hf_paged idle pools", on_error=_note_thread_end)
    try:
        try_start(thread)
    finally:
        if thread.ident is None:  # it never ran
            with _lock:  # so that the next `end_use` tries again
                _is_running = False


def _free_due_pools() -> None:
    """Frees pools at their deadlines, until no deadlines are left. Runs in the thread."""
    global _is_running
    while True:
        with _lock:
            due_pools = _pop_due()
            if not due_pools and not _deadlines:
                _is_running = False
                _condition.notify_all()
                return
            if not due_pools:
                delay = min(_deadlines.values(), default=0.0) - time.monotonic()
                _condition.wait(min(max(delay, 0.0), _MAX_WAIT))
        for ref in due_pools:
            try:
                _release(ref)
            except Exception:
                logger.warning(Topic.MEMORY("an idle pool could not be released"), exc_info=True)


def _note_thread_end(error: BaseException) -> None:
    """Called in the thread when an error ends it. The next `end_use` starts another thread."""
    global _is_running
    with _lock:
        _is_running = False
        _condition.notify_all()
    logger.warning(Topic.MEMORY("the thread that frees idle pools ended"), exc_info=error)


def _pop_due() -> list[weakref.ref[PagedMemory]]:
    """Removes the pools past their deadline from `_deadlines`, and returns weak references to
    them."""
    now = time.monotonic()
    due_pools = [memory for memory, deadline in _deadlines.items() if deadline <= now]
    for memory in due_pools:
        del _deadlines[memory]
    return [weakref.ref(memory) for memory in due_pools]


def _release(ref: weakref.ref[PagedMemory]) -> None:
    """Frees a pool or, if it is in use or locked, schedules the next attempt."""
    memory = ref()
    # if another thread holds the lock, it is about to use the memory or to free it
    if memory is None or budget.release(memory):
        return
    seconds = memory.config.idle_release_seconds
    with _lock:
        if seconds is not None and memory not in _deadlines:
            _schedule(memory, max(seconds, MIN_WAIT))


def _stop() -> None:
    """Stops the thread before the interpreter shuts down; afterwards, freeing memory is unsafe."""
    with _lock:
        _deadlines.clear()
        _condition.notify_all()
        _condition.wait_for(lambda: not _is_running, timeout=5)


def _reset_in_child() -> None:
    """Resets the state in a forked child, where the thread does not exist. `forks` frees the
    lock."""
    global _condition, _is_running
    _is_running = False
    _condition = threading.Condition(_lock)
    _deadlines.clear()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
