"""A thread that maps pages of rows ahead while steps compute. It ends when idle."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from .. import forks
from ..threads import begin, make

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0

# `with` takes the lock itself: a condition's `__enter__` is Python code, in which a signal leaves
# the lock taken.
_lock = forks.rlock()
_condition = threading.Condition(_lock)
_waiting: deque[tuple[weakref.ref[Any], Sequence[int]]] = deque()
_is_running = False  # whether the thread runs, or is being started


def submit(rows: Any, slots: Sequence[int]) -> None:
    """Makes the thread call `rows.map_ahead(slots)`, unless `rows` has been freed by then."""
    global _is_running
    with _lock:
        _waiting.append((weakref.ref(rows), slots))
        was_running, _is_running = _is_running, True
        _condition.notify()
    if was_running:
        return
    thread = make(_serve, "hf_paged mappings")
    try:
        begin(thread)
    finally:
        if not thread.is_alive():
            with _lock:  # pages are mapped on demand
                _is_running = False
                _waiting.clear()


def _serve() -> None:
    global _is_running
    while True:
        with _lock:
            if not _waiting and not (_condition.wait(IDLE_SECONDS) and _waiting):
                _is_running = False
                _condition.notify_all()
                return
            ref, slots = _waiting.popleft()
        rows = ref()
        try:
            if rows is not None:
                rows.map_ahead(slots)
        except Exception:  # the step that needs the pages reports it
            logger.debug("pages were not mapped ahead", exc_info=True)
        del rows


def _stop() -> None:
    with _lock:
        _waiting.clear()
        _condition.notify_all()
        _condition.wait_for(lambda: not _is_running, timeout=5)


def _forget() -> None:
    """Resets the state in a child process, which has no such thread yet."""
    global _lock, _condition, _is_running
    _lock = forks.rlock()
    _is_running = False
    _condition = threading.Condition(_lock)
    _waiting.clear()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
