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

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0

_condition = threading.Condition(forks.lock())
_waiting: deque[tuple[weakref.ref[Any], Sequence[int]]] = deque()
_thread: threading.Thread | None = None


def submit(rows: Any, slots: Sequence[int]) -> None:
    """Makes the thread call `rows.map_ahead(slots)`, unless `rows` has been freed by then."""
    global _thread
    with _condition:
        _waiting.append((weakref.ref(rows), slots))
        if _thread is None:
            thread = threading.Thread(target=_serve, name="hf_paged mappings", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # interpreter shutdown; pages are mapped on demand
                _waiting.clear()
                return
            _thread = thread
        else:
            _condition.notify()


def _serve() -> None:
    global _thread
    while True:
        with _condition:
            if not _waiting and not (_condition.wait(IDLE_SECONDS) and _waiting):
                _thread = None
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
    with _condition:
        _waiting.clear()
        _condition.notify_all()
        thread = _thread
    if thread is not None:
        thread.join(timeout=5)


def _forget() -> None:
    """Resets the state in a child process, which has no such thread yet."""
    global _condition, _thread
    _condition, _thread = threading.Condition(forks.lock()), None
    _waiting.clear()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
