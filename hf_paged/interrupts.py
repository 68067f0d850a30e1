"""Signals wait until the bookkeeping is done, and locks within which they wait.

Python runs a signal's handler between any two bytecodes of the main thread. Within [`held`] the handler takes note, and
the signal's own is called on leaving; [`let_in`] opens a window for what takes long or is a caller's code. Not held:
exceptions that one thread sets in another (`PyThreadState_SetAsyncExc`), and signals other than `SIGNALS`.
"""

from __future__ import annotations

import _signal  # the functions of `signal` are these in a wrapper of ten times the time
import os
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import Any

import torch
from torch import nn

from . import forks

_NAMES = ("SIGINT", "SIGTERM", "SIGALRM")
SIGNALS: tuple[int, ...] = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))

_handlers: dict[int, Any] | None = None  # those in whose place `_note` is; `None` while nothing is held
_holder = 0  # ident of the thread that holds
_pending: list[int] = []


def _note(signum: int, frame: FrameType | None) -> None:
    if signum not in _pending:
        _pending.append(signum)


def _hold() -> None:
    """Signals are noted from here on. Raises what came before; then they are not."""
    global _handlers, _holder
    # the system's own ways, "ignore" and "default", raise nothing
    handlers = {signum: handler for signum in SIGNALS if callable(handler := _signal.getsignal(signum))}
    try:
        for signum in handlers:
            _signal.signal(signum, _note)
        _handlers, _holder = handlers, threading.get_ident()
    except BaseException:
        _put_back(handlers)
        raise


def _release(raises: bool = True) -> None:
    """Puts the handlers back and raises what was noted."""
    global _handlers
    handlers, _handlers = _handlers, None
    try:
        _put_back(handlers or {})
    finally:  # also if a handler that is back has just raised
        if _pending and raises:
            _raise_pending()


def _put_back(handlers: dict[int, Any]) -> None:
    # a handler that is back may raise after any call and on entering a function: nothing else runs until all are back
    put, ours = _signal.signal, [item for item in handlers.items() if _signal.getsignal(item[0]) is _note]
    ours += [(0, None)] * (len(_NAMES) - len(ours))
    (first, a), (second, b), (third, c) = ours
    try:
        if first:
            put(first, a)
    finally:
        try:
            if second:
                put(second, b)
        finally:
            if third:
                put(third, c)


def _raise_pending() -> None:
    signum = _pending.pop(0)
    handler = _signal.getsignal(signum)
    try:
        if callable(handler):  # not raised again: the file of `signal.set_wakeup_fd` has already told of it
            handler(signum, sys._getframe())
        elif handler == signal.SIG_DFL:  # the system's own way, which a caller's code has set since
            signal.raise_signal(signum)
    finally:  # each has its turn, also if the one before raised
        if _pending:
            _raise_pending()


class held:
    """Within it signals wait; they are raised on leaving the outermost one. Takes one to two microseconds."""

    __slots__ = ("_is_outermost",)

    def __enter__(self) -> None:
        self._is_outermost = _handlers is None and threading.get_ident() == threading.main_thread().ident
        if self._is_outermost:
            _hold()

    def __exit__(self, *error: object) -> None:
        if self._is_outermost:
            _release()


class let_in:
    """
    Within it, inside [`held`], signals are raised as if there were no `held`; on entering, if `waiting`, those that
    waited. Afterwards gradients are on or off as before: torch's own contexts lose that where an interrupt ends them.
    """

    __slots__ = ("_grad", "_waiting", "_was_held")

    def __init__(self, waiting: bool = True) -> None:
        self._waiting = waiting

    def __enter__(self) -> None:
        self._was_held = _handlers is not None and threading.get_ident() == _holder
        if self._was_held:
            self._grad = torch.is_grad_enabled()
            try:
                _release(self._waiting)
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *error: object) -> None:
        if self._was_held:
            try:
                _hold()
            except BaseException:  # one more came first: it is raised, and what follows it is held
                _hold()
                raise
            finally:
                torch.set_grad_enabled(self._grad)


class PatientLock:
    """A reentrant lock within which signals wait (`held`); they are let in while another thread has it."""

    def __init__(self) -> None:
        self.lock = forks.rlock()
        self._holds: dict[int, list[held]] = {}  # by thread; one that waits for a condition has some, too

    def wait_for(self, condition: threading.Condition) -> None:
        """Waits for a moment, or until the condition is notified, and lets signals in."""
        condition.wait(timeout=0.05)
        with let_in():
            pass

    def __enter__(self) -> None:
        hold = held()
        hold.__enter__()
        try:
            while not self.lock.acquire(timeout=0.05):
                with let_in():
                    pass
        except BaseException:
            hold.__exit__()
            raise
        self._holds.setdefault(threading.get_ident(), []).append(hold)

    def __exit__(self, *error: object) -> None:
        hold = self._holds[threading.get_ident()].pop()
        self.lock.release()
        hold.__exit__()


_guard = forks.lock()
_locks: weakref.WeakKeyDictionary[nn.Module, PatientLock] = weakref.WeakKeyDictionary()


def step_lock(model: nn.Module) -> PatientLock:
    """Held from scheduling to a forward's end, and while the model's state is read: all callers share its adapters."""
    with _guard:
        return _locks.setdefault(model, PatientLock())


def _forget() -> None:
    """In a child process: what another thread held there is held by none here."""
    if _handlers is not None and threading.get_ident() != _holder:
        _pending.clear()
        _release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
