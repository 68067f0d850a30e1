"""Records which threads have paused an engine, and waits until they resume."""

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
    """One pause of an engine, which lasts until `close`. Unless `Pauses.persistent_pauses` holds
    this object, the pause also ends when the object is garbage-collected, since an interrupt may
    come before `__exit__` begins. A pause that is used as a context leaves `persistent_pauses`."""

    def __init__(self, pauses: Pauses) -> None:
        self._pauses = pauses
        # id of the thread that paused; empty once the pause has ended. A list, since `clear` is a
        # single call of C code, which no interrupt can split
        self.thread_ids: list[int] = []
        self.key = object()
        # removes the pause from `persistent_pauses` and returns it (`None` if it is not there),
        # which is also a single call of C code
        self._enter = functools.partial(pauses.persistent_pauses.pop, self.key, None)

    __enter__: Any = property(operator.attrgetter("_enter"))

    def __exit__(self, *error: object) -> None:
        ensure_done(self.close)

    def close(self) -> None:
        """Ends the pause; does nothing if it has ended."""
        try:
            with self._pauses.lock:
                self.thread_ids.clear()
                self._pauses.end_condition.notify_all()
        finally:
            self.thread_ids.clear()  # if an interrupt came while this waited for the lock
            self._pauses.persistent_pauses.pop(self.key, None)


class Pauses:
    """The pauses of an engine; while there are any, the engine takes no step. `lock` is the lock of
    the engine."""

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        # by key: pauses that are not used as contexts, kept alive until they end
        self.persistent_pauses: dict[object, Pause] = {}
        self._pause_refs: list[weakref.ref[Pause]] = []
        self.end_condition = threading.Condition(lock)  # notified when a pause has ended

    def begin(self, is_persistent: bool = False) -> Pause:
        """Waits for the step in progress, and returns a new pause of this thread. With
        `is_persistent`, a pause that is not used as a context lasts until `end` or `close`, even if
        the caller drops the object."""
        pause = Pause(self)
        try:
            with self.lock:
                if is_persistent:
                    self.persistent_pauses[pause.key] = pause
                self._pause_refs.append(weakref.ref(pause))
                pause.thread_ids.append(threading.get_ident())
            return pause
        except BaseException:
            pause.thread_ids.clear()
            self.persistent_pauses.pop(pause.key, None)
            raise

    def end(self) -> None:
        """Ends one pause, preferably of this thread. Raises `RuntimeError` if there is none."""
        with self.lock:
            pauses = self._open_pauses()
            if not pauses:
                raise RuntimeError(
                    "the engine is not paused: every `resume` needs a `pause` before it"
                )
            thread_id = threading.get_ident()
            thread_pauses = [pause for pause in pauses if thread_id in pause.thread_ids]
            (thread_pauses or pauses)[-1].close()

    def wait(self) -> None:
        """Waits until all pauses have ended. The caller holds the lock. Raises `RuntimeError` in a
        thread that has paused the engine."""
        if not self._pause_refs:
            return
        thread_id = threading.get_ident()
        if any(thread_id in pause.thread_ids for pause in self._open_pauses()):
            raise RuntimeError(
                "the engine was paused by this thread, which would wait for itself: call `resume`,"
                " or leave the context of `pause` or `weights_update`, before this thread takes a"
                " step"
            )
        while self._open_pauses():
            wait(self.end_condition, self.lock, 0.05)

    def _open_pauses(self) -> list[Pause]:
        """Returns the pauses that have not ended, and forgets the others."""
        pauses = [pause for ref in self._pause_refs if (pause := ref()) and pause.thread_ids]
        self._pause_refs = [weakref.ref(pause) for pause in pauses]
        return pauses

    def after_fork(self) -> None:
        """In a forked child: drops the pauses of other threads, which do not exist there."""
        self.end_condition = threading.Condition(self.lock)
        thread_id = threading.get_ident()
        for pause in self._open_pauses():
            if thread_id not in pause.thread_ids:
                pause.thread_ids.clear()
