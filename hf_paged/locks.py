"""Locks that are held while a model computes."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import nn

from . import forks, interrupts


class PatientLock:
    """
    A reentrant lock within which signals wait (`interrupts.held`). Where another thread has it, which may take long,
    signals are let in meanwhile.
    """

    def __init__(self) -> None:
        self._lock = forks.rlock()
        self._holds: dict[int, list[interrupts.held]] = {}  # by thread; one that waits for a condition has some, too

    def condition(self) -> threading.Condition:
        """For `wait_for`."""
        return threading.Condition(self._lock)

    def wait_for(self, condition: threading.Condition) -> None:
        """Waits for a moment, or until the condition is notified, and lets signals in."""
        condition.wait(timeout=0.05)
        with interrupts.let_in():
            pass

    def is_among(self, locks: set[Any]) -> bool:
        """Whether it is one of those that `after_fork` is told of."""
        return self._lock in locks

    def __enter__(self) -> None:
        hold = interrupts.held()
        hold.__enter__()
        try:
            while not self._lock.acquire(timeout=0.05):
                with interrupts.let_in():
                    pass
        except BaseException:
            hold.__exit__()
            raise
        self._holds.setdefault(threading.get_ident(), []).append(hold)

    def __exit__(self, *error: object) -> None:
        hold = self._holds[threading.get_ident()].pop()
        self._lock.release()
        hold.__exit__()


_guard = forks.lock()
_locks: weakref.WeakKeyDictionary[nn.Module, PatientLock] = weakref.WeakKeyDictionary()


def step_lock(model: nn.Module) -> PatientLock:
    """
    Held from scheduling to the end of the forward, and while the model's state is read or checked. One forward at a
    time goes through a model, whichever memory it writes to: adapters are the model's.
    """
    with _guard:
        if model not in _locks:
            _locks[model] = PatientLock()
        return _locks[model]
