"""Locks that survive `os.fork`: only the forking thread runs on in the child, so locks that other
threads held are reset there, and objects drop what those threads left half changed."""

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
    made = threading.Lock()
    _locks.add(made)
    return made


def rlock() -> threading.RLock:
    """Makes a reentrant lock that is free in a child process, unless the forking thread holds
    it."""
    made = threading.RLock()
    _locks.add(made)
    return made


def in_child(survivor: Any) -> None:
    """Makes child processes call `survivor.after_fork(freed)`; what the locks `freed` guard may be
    half changed."""
    _survivors.add(survivor)


def around(owner: Any) -> None:
    """Makes forks call `owner.before_fork()`, and after it `owner.after_in_parent()` or
    `owner.after_in_child()`: before other objects of the child change, which may drop this one."""
    _shared.add(owner)


def _tell(name: str) -> None:
    for owner in list(_shared):
        try:
            getattr(owner, name)()
        except Exception:  # must not keep the others from theirs
            logger.exception(Topic.MEMORY("blocks of a child process may be lost"))


def _after_fork() -> None:
    freed = set()
    for lock in list(_locks):
        if lock.acquire(blocking=False):  # free, or held by this thread
            lock.release()
        else:
            lock._at_fork_reinit()  # as the standard library does
            freed.add(lock)
    _tell("after_in_child")
    for survivor in list(_survivors):
        survivor.after_fork(freed)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=functools.partial(_tell, "before_fork"),
        after_in_parent=functools.partial(_tell, "after_in_parent"),
        after_in_child=_after_fork,
    )
