"""Locks and objects that survive `os.fork`. Only the forking thread continues in the child process,
so locks that other threads held are reset there, and objects drop the state that these threads left
half changed."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .topics import Topic
from .weak_sets import members_of

T = TypeVar("T")

logger = logging.getLogger(__name__)

_locks = weakref.WeakSet[Any]()
_listeners = weakref.WeakSet[Any]()

imports = threading.RLock()
"""Held while a call imports a module. A fork waits for this lock: otherwise, if another thread is
importing a module, the child would find that module half-imported."""


def lock() -> threading.Lock:
    """Makes a lock that is free in a child process. A thread must not fork while it holds the
    lock."""
    new_lock = threading.Lock()
    _locks.add(new_lock)
    return new_lock


def rlock() -> threading.RLock:
    """Makes a reentrant lock that is free in a child process, unless the forking thread holds
    it."""
    new_lock = threading.RLock()
    _locks.add(new_lock)
    return new_lock


class lazy_property(Generic[T]):
    """A property that is computed when it is first read from an instance, and is then an attribute
    of that instance. Like `functools.cached_property` since Python 3.12. Before Python 3.12,
    `cached_property` computes under one lock for all instances, which stays held in a child process
    if another thread held it at the fork."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:  # read from the class, as documentation tools do
            return self  # type: ignore[return-value]
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


def add_listener(listener: Any) -> None:
    """Makes each fork call these methods, as far as the listener has them: `before_fork()`, then
    `after_in_parent()` in the parent, or `after_in_child()` and `after_fork(freed)` in the child.
    `freed` is the set of this module's locks that other threads held at the fork: the state that
    they guard may be half changed. No `after_fork` is called before the last `after_in_child`,
    since it may drop listeners, which are referenced weakly."""
    _listeners.add(listener)


def _notify(name: str, *arguments: Any) -> None:
    """Calls the method `name` of each listener that has it, even if others raise."""
    for listener in members_of(_listeners):
        try:
            if hasattr(listener, name):
                getattr(listener, name)(*arguments)
        except Exception:
            consequence = (
                "a child process may lack the content of its blocks, or wait for threads that only"
                " its parent has"
            )
            logger.exception(Topic.MEMORY(f"`{name}` failed: {consequence}"))


def _before_fork() -> None:
    imports.acquire()
    _notify("before_fork")


def _after_in_parent() -> None:
    imports.release()
    _notify("after_in_parent")


def _after_fork() -> None:
    imports.release()
    freed = set()
    for lock in list(_locks):
        if lock.acquire(blocking=False):  # it was free, or this thread holds it
            lock.release()
        else:
            lock._at_fork_reinit()  # as the standard library does
            freed.add(lock)
    _notify("after_in_child")
    _notify("after_fork", freed)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_in_parent,
        after_in_child=_after_fork,
    )
