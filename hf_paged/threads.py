"""Starts threads where the system may refuse them, under a limit of processes or of memory; and the
lock under which threads run a model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from torch import nn

from . import forks

START_SECONDS = 5.0


class _Started(threading.Event):
    """`Thread.start` waits for this without a limit, although a thread that lacks memory ends
    before it sets it."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(START_SECONDS)


def start(run: Callable[[], object], name: str, daemon: bool = True) -> threading.Thread | None:
    """Starts a thread that calls `run`, within `START_SECONDS`. Returns `None` if there can be no
    thread: the caller goes on without it. A thread that merely begins later calls `run` all the
    same."""
    thread = threading.Thread(target=run, name=name, daemon=daemon)
    started = thread._started = _Started()  # type: ignore[attr-defined]
    try:
        thread.start()
    except (RuntimeError, MemoryError):  # at the limit, or at interpreter shutdown
        return None
    return thread if started.is_set() else None


_step_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def step_lock(model: nn.Module) -> threading.RLock:
    """Returns the model's lock, held from scheduling to the end of a forward and while the model's
    state is read: all callers share its adapters."""
    return _step_locks.setdefault(model, forks.rlock())
