"""After `os.fork`, only the thread that forked goes on in the child: locks that others held are free again there, and
what they were about to change is let go."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_survivors: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> threading.Lock:
    """A lock that a child process finds free. The thread that holds it must not fork."""
    made = threading.Lock()
    _locks.add(made)
    return made


def rlock() -> threading.RLock:
    """A reentrant lock that a child process finds free, unless the thread that forked holds it."""
    made = threading.RLock()
    _locks.add(made)
    return made


def in_child(survivor: Any) -> None:
    """Child processes call `survivor.after_fork(freed)`: what the locks `freed` guard may be half changed by others."""
    _survivors.add(survivor)


def _after_fork() -> None:
    freed = set()
    for lock in list(_locks):
        if lock.acquire(blocking=False):  # free, or this thread's own
            lock.release()
        else:
            lock._at_fork_reinit()  # as the standard library does with its own
            freed.add(lock)
    for survivor in list(_survivors):
        survivor.after_fork(freed)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
