"""Which threads have paused an engine, and waiting for them to resume. What a pause protects is up
to the thread."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import weakref
from typing import Any

from ..interrupts import ensure_done
from ..threads import wait


class Pause(contextlib.AbstractContextManager["Pause", None]):
    """One pause of an engine, until `close`. As a context it lasts no longer than this object: an
    interrupt may keep `__exit__` from beginning."""

    def __init__(self, pauses: Pauses) -> None:
        self._pauses = pauses
        # the id of its thread; empty once it has ended, by one call of C that no interrupt splits
        self.thread: list[int] = []
        self.key = object()
        # of C, too: takes it from `kept`, and returns it
        self._enter = functools.partial(pauses.kept.pop, self.key, None)

    __enter__: Any = property(operator.attrgetter("_enter"))

    def __exit__(self, *error: object) -> None:
        ensure_done(self.close)

    def close(self) -> None:
        """Ends it, unless it has ended."""
        try:
            with self._pauses.lock:
                self.thread.clear()
                self._pauses.notify()
        finally:
            self.thread.clear()  # an interrupt came as it waited for the lock
            self._pauses.kept.pop(self.key, None)


class Pauses:
    """The engine takes no step while a thread pauses it, and `lock`, the engine's, guards this."""

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        self.kept: dict[object, Pause] = {}  # those that are no contexts, by their keys
        self._pauses: list[weakref.ref[Pause]] = []
        self._ended = threading.Condition(lock)

    def begin(self, is_kept: bool = False) -> Pause:
        """Waits for the step in progress. `is_kept`: it lasts until `resume` if it is no context,
        even if the caller drops it."""
        pause = Pause(self)
        try:
            with self.lock:
                if is_kept:
                    self.kept[pause.key] = pause
                self._pauses.append(weakref.ref(pause))
                pause.thread.append(threading.get_ident())
            return pause
        except BaseException:
            pause.thread.clear()
            self.kept.pop(pause.key, None)
            raise

    def end(self) -> None:
        """Ends one pause, preferably this thread's. Raises `RuntimeError` if there is none."""
        with self.lock:
            pauses = self._open()
            if not pauses:
                raise RuntimeError(
                    "the engine is not paused: every `resume` needs a `pause` before it"
                )
            thread = threading.get_ident()
            mine = [pause for pause in pauses if thread in pause.thread]
            (mine or pauses)[-1].close()

    def notify(self) -> None:
        self._ended.notify_all()

    def wait(self) -> None:
        """Waits, with the lock held, until all pauses have ended. Raises `RuntimeError` in a thread
        that has paused."""
        if not self._pauses:
            return
        thread = threading.get_ident()
        if any(thread in pause.thread for pause in self._open()):
            raise RuntimeError(
                "the engine was paused by this thread, which would wait for itself: call `resume`,"
                " or leave the context of `pause` or `weights_update`, before its next step"
            )
        while self._open():
            wait(self._ended, self.lock, 0.05)

    def _open(self) -> list[Pause]:
        """Returns those that have not ended, and forgets the others."""
        living = [pause for ref in self._pauses if (pause := ref()) is not None]
        pauses = [pause for pause in living if pause.thread]
        self._pauses = [weakref.ref(pause) for pause in pauses]
        return pauses

    def after_fork(self) -> None:
        """In a forked child: drops the pauses of other threads, which do not exist there."""
        self._ended = threading.Condition(self.lock)
        thread = threading.get_ident()
        pauses = [pause for pause in self._open() if thread in pause.thread]
        self._pauses = [weakref.ref(pause) for pause in pauses]
