"""Starts threads, and tells the caller if the system's limits on threads or memory prevent that.
Also provides the lock that a thread holds while it runs a model."""

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


class _StartedEvent(threading.Event):
    """The event for which `Thread.start` waits, here only for `START_SECONDS`: a thread that lacks
    memory ends without setting it."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(START_SECONDS)


def make(
    run: Callable[[], object],
    name: str,
    daemon: bool = True,
    on_error: Callable[[BaseException], None] | None = None,
) -> threading.Thread:
    """Makes a thread, not yet started, that calls `run`. If an error ends the thread, the thread
    calls `on_error` with it: `run` itself cannot catch an error that is raised as `run` begins."""
    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread._started = _StartedEvent()  # type: ignore[attr-defined]
    if on_error is not None:

        def report(_: object) -> None:
            error = sys.exc_info()[1]
            assert error is not None
            on_error(error)

        thread._invoke_excepthook = report  # type: ignore[attr-defined]
    return thread


def try_start(thread: threading.Thread) -> Exception | None:
    """Starts a thread from `make`. Returns `None` once it has begun. If it has not begun after
    `START_SECONDS`, or cannot be started, returns the reason as an error. A thread that begins
    later still calls `run`."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:  # at the limit, or at interpreter shutdown
        return error
    started: threading.Event = thread._started  # type: ignore[attr-defined]
    if not started.is_set():
        return TimeoutError(f"the thread did not begin within {START_SECONDS:g} s")
    return None


def start(run: Callable[[], object], name: str, **options: Any) -> threading.Thread | None:
    """Makes and starts a thread, with the options of `make`; returns `None` if `try_start` returns
    an error."""
    thread = make(run, name, **options)
    return thread if try_start(thread) is None else None


def submit(function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Like `asyncio.to_thread`, but submits the function before the caller awaits the result.
    Raises `RuntimeError` if no thread can be started; then the function is never called. If
    asyncio's executor starts a new thread, waits without a time limit until it has begun."""
    run = contextvars.copy_context().run
    is_submitted = False
    submission = threading.Lock()  # held while the function is submitted

    def run_if_submitted() -> T:
        with submission:
            if not is_submitted:  # the executor queues a function before it starts a thread
                raise RuntimeError(NO_THREAD)
        return run(function, *args)

    with submission:
        try:
            future = asyncio.get_running_loop().run_in_executor(None, run_if_submitted)
        except (RuntimeError, MemoryError) as error:
            is_shortage = "thread" in str(error) or isinstance(error, MemoryError)
            if is_interrupt(error) or not is_shortage:
                raise  # an interrupt, or the executor has been shut down
            raise RuntimeError(NO_THREAD) from error
        is_submitted = True
    return future


def wait(condition: threading.Condition, lock: threading.RLock, seconds: float) -> None:
    """Waits for a condition of `lock`, which this thread must hold exactly once, for up to
    `seconds`. After any error the thread holds the lock again, even if an interrupt arrives in
    `Condition.wait` between the release of the lock and the `try` that follows it."""
    try:
        condition.wait(seconds)
    except BaseException:
        if not lock._is_owned():  # type: ignore[attr-defined]
            lock.acquire()
        raise


@restoring
def attempt(lock: threading.RLock, seconds: float = 0.0) -> Iterator[bool]:
    """A context that tries to acquire a reentrant lock for up to `seconds`; its value is whether
    this thread holds the lock. An interrupt at any bytecode leaves the lock as it was. (In plain
    code, an interrupt between `lock.acquire(timeout=...)` and a `try` leaves the lock acquired.)"""
    if lock._is_owned():  # type: ignore[attr-defined]
        yield True
        return
    try:
        yield lock.acquire(timeout=seconds)
    finally:
        try:  # the first statement: an interrupt could arrive at any call before it
            lock.release()
        except RuntimeError:
            pass  # this thread does not hold it


def take_over(lock: threading.RLock, owner_id: int) -> bool:
    """Returns whether this thread holds a reentrant lock that the thread `owner_id` has acquired.
    If that thread has ended, takes the lock over, without waiting."""
    is_owned: bool = lock._is_owned()  # type: ignore[attr-defined]
    if is_owned or owner_id in sys._current_frames():
        return is_owned
    lock._release_save()  # type: ignore[attr-defined]
    return lock.acquire(blocking=False)


_step_locks = weakref.WeakKeyDictionary[nn.Module, threading.RLock]()


def step_lock(model: nn.Module, main_model: nn.Module | None = None) -> threading.RLock:
    """Returns the model's lock. Engines and `generate` calls hold the lock from scheduling to the
    end of the forward, and while they read the model's state, since they all switch the adapters of
    the same model. `main_model`: a model that shares modules with `model`; if it is passed in the
    first call for `model`, both get the same lock."""
    return _step_locks.setdefault(
        model, forks.rlock() if main_model is None else step_lock(main_model)
    )
