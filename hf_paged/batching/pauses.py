"""Which threads have asked that no step be taken."""

from __future__ import annotations

import threading

from ..locks import PatientLock


class Pauses:
    """
    Args:
        lock ([`PatientLock`]): Held by those that call.
    """

    def __init__(self, lock: PatientLock) -> None:
        self._lock, self._resumed = lock, lock.condition()
        self._threads: list[int] = []

    def add(self) -> None:
        """This thread asks for one."""
        self._threads.append(threading.get_ident())

    def remove(self) -> None:
        """One ends, of this thread first. Raises `RuntimeError` if there is none."""
        if not self._threads:
            raise RuntimeError("the engine is not paused: every `resume` needs a `pause` before it")
        mine = threading.get_ident()
        self._threads.remove(mine if mine in self._threads else self._threads[-1])
        self._resumed.notify_all()

    def wait(self) -> None:
        """Until there is none. Raises `RuntimeError` in a thread that has asked for one."""
        if threading.get_ident() in self._threads:
            raise RuntimeError(
                "the engine was paused by this thread, which would wait for itself: call `resume`, or leave the "
                "context of `pause` or `weights_update`, before its next step"
            )
        while self._threads:
            self._lock.wait_for(self._resumed)

    def after_fork(self) -> None:
        """In a child process, where this thread is the only one."""
        self._resumed = self._lock.condition()
        self._threads = [thread for thread in self._threads if thread == threading.get_ident()]
