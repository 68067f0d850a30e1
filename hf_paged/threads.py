"""Starts threads where limits of processes or memory may refuse them, and provides the lock under
which threads run a model. The caller handles a refusal."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from . import forks
from .interrupts import is_interrupt, restoring

T = TypeVar("T")

START_SECONDS = 5.0
NO_THREAD = "can't start new thread: the process is at its limit of threads or memory"


class _Started(threading.Event):
    """The event for which `Thread.start` waits without a limit, although a thread that lacks memory
    ends before it sets the event."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(START_SECONDS)


def make(
    run: Callable[[], object],
    name: str,
    daemon: bool = True,
    on_error: Callable[[BaseException], None] | None = None,
) -> threading.Thread:
    """Makes a thread that calls `run` once it is begun. If an error ends the thread, the thread
    calls `on_error` with it; `run` itself could not catch an error that is raised as it begins."""
    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread._started = _Started()  # type: ignore[attr-defined]
    if on_error is not None:

        def report(_: object) -> None:
            error = sys.exc_info()[1]
            assert error is not None
            on_error(error)

        thread._invoke_excepthook = report  # type: ignore[attr-defined]
    return thread


def begin(thread: threading.Thread) -> Exception | None:
    """Begins a thread from `make` within `START_SECONDS`. Returns the reason if it does not begin,
    so that the caller goes on without it; a thread that only begins later still calls `run`."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:  # at the limit, or at interpreter shutdown
        return error
    started: threading.Event = thread._started  # type: ignore[attr-defined]
    if not started.is_set():
        return TimeoutError(f"the thread has not begun within {START_SECONDS:g} s")
    return None


def start(
    run: Callable[[], object],
    name: str,
    daemon: bool = True,
    on_error: Callable[[BaseException], None] | None = None,
) -> threading.Thread | None:
    """Makes and begins a thread; `None` if it does not begin."""
    thread = make(run, name, daemon, on_error)
    return thread if begin(thread) is None else None


def submit(function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """As `asyncio.to_thread`, begun at once. Raises `RuntimeError` if there can be no thread."""
    run = contextvars.copy_context().run
    try:
        return asyncio.get_running_loop().run_in_executor(None, run, function, *args)
    except (RuntimeError, MemoryError) as error:
        if is_interrupt(error) or not ("thread" in str(error) or isinstance(error, MemoryError)):
            raise  # the executor has been shut down
        raise RuntimeError(NO_THREAD) from error


def wait(condition: threading.Condition, lock: threading.RLock, seconds: float) -> None:
    """Waits for a condition of `lock`, which this thread holds once. It holds the lock again after
    any error, although an interrupt may arrive between `Condition.wait`'s release and its `try`."""
    try:
        condition.wait(seconds)
    except BaseException:
        if not lock._is_owned():  # type: ignore[attr-defined]
            lock.acquire()
        raise


@restoring
def attempt(lock: threading.RLock, seconds: float = 0.0) -> Iterator[bool]:
    """Acquires a reentrant lock unless another thread holds it for so long; yields whether this
    thread holds it. An interrupt at any bytecode leaves the lock as it was, where a call of
    `lock.acquire(timeout=...)` before a `try` could leave it held."""
    if lock._is_owned():  # type: ignore[attr-defined]
        yield True
        return
    try:
        yield lock.acquire(timeout=seconds)
    finally:
        try:  # without a call before it, where an interrupt could arrive
            lock.release()
        except RuntimeError:
            pass  # another thread holds it


_step_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def step_lock(model: nn.Module, whole: nn.Module | None = None) -> threading.RLock:
    """Returns the model's lock. Callers share the model's adapters, so they hold the lock from
    scheduling to the end of a forward, and while they read the model's state. A model that shares
    modules with another (`whole`) gets the other's lock."""
    return _step_locks.setdefault(model, forks.rlock() if whole is None else step_lock(whole))
