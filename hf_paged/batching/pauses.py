"""Which threads have paused an engine, and waiting for them to resume. What a pause protects is up
to the thread."""

from __future__ import annotations

import threading

from ..threads import wait


class Pauses:
    """The engine takes no step while a thread pauses it. The caller holds `lock`, the engine's."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._threads: list[int] = []  # ids, one for each pause
        self._ended = threading.Condition(lock)

    def begin(self) -> None:
        self._threads.append(threading.get_ident())

    def end(self) -> None:
        """Ends one pause, preferably this thread's. Raises `RuntimeError` if there is none."""
        if not self._threads:
            raise RuntimeError("the engine is not paused: every `resume` needs a `pause` before it")
        thread = threading.get_ident()
        if thread not in self._threads:
            thread = self._threads[-1]
        self._threads.remove(thread)
        self._ended.notify_all()

    def wait(self) -> None:
        """Waits until all pauses have ended. Raises `RuntimeError` in a thread that has paused."""
        if threading.get_ident() in self._threads:
            raise RuntimeError(
                "the engine was paused by this thread, which would wait for itself: call `resume`,"
                " or leave the context of `pause` or `weights_update`, before its next step"
            )
        while self._threads:
            wait(self._ended, self._lock, 0.05)

    def after_fork(self) -> None:
        """In a forked child: drops the pauses of other threads, which do not exist there."""
        self._ended = threading.Condition(self._lock)
        thread = threading.get_ident()
        self._threads = [paused for paused in self._threads if paused == thread]
