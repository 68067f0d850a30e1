"""Locks and objects that survive `os.fork`. Only the forking thread continues in the child process:
locks that other threads held are reset there, and objects drop state that those threads left half
changed."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from typing import Any

from .topics import Topic

logger = logging.getLogger(__name__)

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_survivors: weakref.WeakSet[Any] = weakref.WeakSet()
_shared: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> threading.Lock:
    """Makes a lock that is free in a child process. The thread that holds it must not fork."""
    new_lock = threading.Lock()
    _locks.add(new_lock)
    return new_lock


def rlock() -> threading.RLock:
    """Makes a reentrant lock that is free in a child process, unless the forking thread holds
    it."""
    new_lock = threading.RLock()
    _locks.add(new_lock)
    return new_lock


def in_child(survivor: Any) -> None:
    """Makes child processes call `survivor.after_fork(freed)`. State that the locks `freed` guard
    may be half changed."""
    _survivors.add(survivor)


def around(owner: Any) -> None:
    """Makes forks call `owner.before_fork()`, then `owner.after_in_parent()` or
    `owner.after_in_child()`. In the child these calls precede `after_fork` of other objects, which
    may drop the owner."""
    _shared.add(owner)


def _notify(name: str) -> None:
    for owner in list(_shared):
        try:
            getattr(owner, name)()
        except Exception:  # the other owners must still be notified
            logger.exception(Topic.MEMORY("blocks of a child process may be lost"))


def _after_fork() -> None:
    freed = set()
    for lock in list(_locks):
        if lock.acquire(blocking=False):  # free, or held by this thread
            lock.release()
        else:
            lock._at_fork_reinit()  # as the standard library does
            freed.add(lock)
    _notify("after_in_child")
    for survivor in list(_survivors):
        survivor.after_fork(freed)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=functools.partial(_notify, "before_fork"),
        after_in_parent=functools.partial(_notify, "after_in_parent"),
        after_in_child=_after_fork,
    )
