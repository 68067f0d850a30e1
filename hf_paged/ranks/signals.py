"""Defers signals while several processes compute together: an interrupt in one of them, between a
message and the end of its forward, would leave the others waiting for it.

Python may run signal handlers at any call, at any backward jump and at the start of any function
in the main thread. Within [`deferring_signals`] signals are only recorded; at its end their
handlers are called. Exceptions that one thread sets in another (`PyThreadState_SetAsyncExc`) are
not deferred, nor are signals outside `SIGNALS`, a list kept short because every
`deferring_signals` looks up the handler of each signal in it. A model in one process needs no
deferral: `interrupts.py` restores the state that an interrupt leaves changed.
"""

from __future__ import annotations

import _signal  # `signal` wraps the same functions at ten times the cost
import os
import signal
import sys
import threading
from collections import deque
from types import FrameType
from typing import Any

_NAMES = "INT TERM ALRM USR1 USR2 HUP QUIT CHLD XCPU VTALRM PROF BREAK".split()
SIGNALS: tuple[int, ...] = tuple(
    int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}")
)

_NON_PYTHON_HANDLERS = (None, signal.SIG_DFL, signal.SIG_IGN)
# by signal: the handler that `_defer` replaces; `None` while signals are not deferred
_handlers: dict[int, Any] | None = None
_deferring_thread = 0  # ident of the thread that defers signals
_main_thread = threading.main_thread().ident
_pending: list[int] = []  # deferred signals, in order


def _defer(signum: int, frame: FrameType | None) -> None:
    """The handler of signals while they are deferred."""
    if signum not in _pending:
        _pending.append(signum)


def _begin_deferring() -> None:
    """Starts to defer signals. If a handler that is not replaced yet raises an error, stops
    deferring, handles the signals deferred so far and raises the error."""
    global _handlers, _deferring_thread
    # only Python handlers: "ignore" and "default" raise nothing, and C handlers cannot be restored
    handlers = {}
    for signum in SIGNALS:
        handler = _signal.getsignal(signum)
        if handler not in _NON_PYTHON_HANDLERS:
            handlers[signum] = handler
    try:
        for signum in handlers:
            _signal.signal(signum, _defer)
        _handlers = handlers
        _deferring_thread = threading.get_ident()
    except BaseException:
        _end_deferring(handlers)
        raise


def _end_deferring(handlers: dict[int, Any]) -> None:
    """Restores these handlers, and calls the handlers of the deferred signals."""
    global _handlers
    _handlers = None
    try:
        _restore_handlers(handlers)
    finally:  # even if a restored handler has just raised
        if _pending:
            _handle_pending()


def _restore_handlers(handlers: dict[int, Any]) -> None:
    """Restores the handlers of all signals that `_defer` still handles."""
    deferred_signals: list[int] = []
    saved_handlers: list[Any] = []
    for signum, handler in handlers.items():
        if _signal.getsignal(signum) is _defer:
            deferred_signals.append(signum)
            saved_handlers.append(handler)
    # A restored handler may raise after any call, on entering a function, and in `signal` before
    # that sets the next handler. So one call of C code restores all handlers. After an error, this
    # call is repeated, up to two times.
    try:
        deque(map(_signal.signal, deferred_signals, saved_handlers), 0)
    except BaseException:
        try:
            deque(map(_signal.signal, deferred_signals, saved_handlers), 0)
        except BaseException:
            deque(map(_signal.signal, deferred_signals, saved_handlers), 0)
            raise
        raise


def _handle_pending() -> None:
    """Calls the handlers of all deferred signals, in order."""
    signum = _pending.pop(0)
    handler = _signal.getsignal(signum)
    try:
        if callable(handler):
            # called directly: raising the signal would write to the wakeup file descriptor again
            handler(signum, sys._getframe())
        elif handler == signal.SIG_DFL:  # set by the caller's code meanwhile
            signal.raise_signal(signum)
    finally:  # even if this handler raises
        if _pending:
            _handle_pending()


class deferring_signals:
    """A context that defers signals until it ends. Inside another one, or outside the main thread,
    it has no effect."""

    __slots__ = ("_starts_deferral",)

    def __enter__(self) -> None:
        self._starts_deferral = _handlers is None and threading.get_ident() == _main_thread
        if self._starts_deferral:
            _begin_deferring()

    def __exit__(self, *error: object) -> None:
        if self._starts_deferral:
            _end_deferring(_handlers or {})

    def handle(self) -> None:
        """Handles the signals deferred so far, and continues to defer signals."""
        if self._starts_deferral:
            _end_deferring(_handlers or {})
            _begin_deferring()


class DeferringLock:
    """A lock that defers signals while the main thread holds it or waits for it. While the main
    thread waits, it regularly handles the deferred signals."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        # by thread: several threads may be inside while they wait for a condition
        self._contexts: dict[int, list[deferring_signals]] = {}

    def __enter__(self) -> None:
        context = deferring_signals()
        context.__enter__()
        try:
            while not self._lock.acquire(timeout=0.05):
                context.handle()
        except BaseException:
            context.__exit__()
            raise
        self._contexts.setdefault(threading.get_ident(), []).append(context)

    def __exit__(self, *error: object) -> None:
        context = self._contexts[threading.get_ident()].pop()
        self._lock.release()
        context.__exit__()


def _reset_in_child() -> None:
    """Runs in a child process, whose main thread is the one that forked: stops deferring signals if
    another thread of the parent deferred them."""
    global _main_thread
    _main_thread = threading.get_ident()
    if _handlers is not None and threading.get_ident() != _deferring_thread:
        _pending.clear()
        _end_deferring(_handlers)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
