"""Defers signals while several processes compute together: an interrupt in one of them, between a
message and the end of its forward, would leave the others waiting for it.

Python runs signal handlers between any two bytecodes of the main thread. Within
[`deferring_signals`] signals are only noted; at its end their handlers are called. Not deferred are
exceptions that one thread sets in another (`PyThreadState_SetAsyncExc`), and signals other than
`SIGNALS`, since every `deferring_signals` looks up the handler of each of these. A model in one
process needs no deferral (`interrupts`).
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

_NO_HANDLERS = (None, signal.SIG_DFL, signal.SIG_IGN)
# the handlers that `_note` replaces; `None` while signals are not deferred
_handlers: dict[int, Any] | None = None
_holder = 0  # ident of the thread that defers signals
_main_thread = threading.main_thread().ident
_pending: list[int] = []


def _note(signum: int, frame: FrameType | None) -> None:
    if signum not in _pending:
        _pending.append(signum)


def _hold() -> None:
    """Starts to defer signals. If a handler raises meanwhile, raises its error and defers none."""
    global _handlers, _holder
    # only Python handlers: "ignore" and "default" raise nothing, and C handlers cannot be restored
    handlers = {}
    for signum in SIGNALS:
        handler = _signal.getsignal(signum)
        if handler not in _NO_HANDLERS:
            handlers[signum] = handler
    try:
        for signum in handlers:
            _signal.signal(signum, _note)
        _handlers = handlers
        _holder = threading.get_ident()
    except BaseException:
        _restore_handlers(handlers)
        raise


def _release(raises: bool = True) -> None:
    """Restores the handlers and, if `raises`, calls those of the noted signals."""
    global _handlers
    handlers, _handlers = _handlers, None
    try:
        _restore_handlers(handlers or {})
    finally:  # also if a restored handler has just raised
        if _pending and raises:
            _raise_pending()


def _restore_handlers(handlers: dict[int, Any]) -> None:
    ours: list[int] = []
    before: list[Any] = []
    for signum, handler in handlers.items():
        if _signal.getsignal(signum) is _note:
            ours.append(signum)
            before.append(handler)
    # A restored handler may raise after any call, on entering a function, and in `signal` before it
    # sets the next handler. So one call of C code restores all, and is repeated after each of two
    # signals.
    try:
        deque(map(_signal.signal, ours, before), 0)
    except BaseException:
        try:
            deque(map(_signal.signal, ours, before), 0)
        except BaseException:
            deque(map(_signal.signal, ours, before), 0)
            raise
        raise


def _raise_pending() -> None:
    signum = _pending.pop(0)
    handler = _signal.getsignal(signum)
    try:
        if callable(handler):
            # called directly: raising the signal would write to `signal.set_wakeup_fd` again
            handler(signum, sys._getframe())
        elif handler == signal.SIG_DFL:  # a caller's code has set it since
            signal.raise_signal(signum)
    finally:  # handle the others even if this handler raised
        if _pending:
            _raise_pending()


class deferring_signals:
    """A context that defers signals until the outermost `deferring_signals` ends."""

    __slots__ = ("_is_outermost",)

    def __enter__(self) -> None:
        self._is_outermost = _handlers is None and threading.get_ident() == _main_thread
        if self._is_outermost:
            _hold()

    def __exit__(self, *error: object) -> None:
        if self._is_outermost:
            _release()

    def handle(self) -> None:
        """Handles the signals that were deferred until now."""
        if self._is_outermost:
            _release()
            _hold()


class PatientLock:
    """A lock that defers signals while it is held, and handles them while it waits for another
    thread."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        # by thread, including threads that wait for a condition
        self._holds: dict[int, list[deferring_signals]] = {}

    def __enter__(self) -> None:
        hold = deferring_signals()
        hold.__enter__()
        try:
            while not self._lock.acquire(timeout=0.05):
                hold.handle()
        except BaseException:
            hold.__exit__()
            raise
        self._holds.setdefault(threading.get_ident(), []).append(hold)

    def __exit__(self, *error: object) -> None:
        hold = self._holds[threading.get_ident()].pop()
        self._lock.release()
        hold.__exit__()


def _forget() -> None:
    """In a child process, whose main thread is the thread that forked: stops deferring signals if
    another thread of the parent deferred them."""
    global _main_thread
    _main_thread = threading.get_ident()
    if _handlers is not None and threading.get_ident() != _holder:
        _pending.clear()
        _release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
