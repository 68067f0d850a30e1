"""Switches objects to another state while calls run, and restores them afterwards. Calls may
overlap, also in several threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from . import forks
from .interrupts import register_for_cleanup

T = TypeVar("T")
Switching = tuple[Callable[[], None], Callable[[], None]]
"""A function that switches an object, and a function that restores the object's earlier state."""


class _Nothing:
    """A context without effect. Each step enters several, so its methods are C functions, which are
    faster than the methods of `contextlib.nullcontext`: `str.format` takes any arguments and
    returns a false value."""

    __enter__ = "".format
    __exit__ = "".format


NOTHING: contextlib.AbstractContextManager[Any] = _Nothing()  # type: ignore[assignment]
"""A context that changes nothing and may be entered any number of times."""


class Switches(Generic[T]):
    """The objects that calls have switched, each with its functions from `switching` and the
    threads of its calls. Calls on one object may overlap: each call switches the object, and the
    last call to end restores the state that the object had before the first call."""

    def __init__(
        self, switching: Callable[[T], Switching], on_all_restored: Callable[[], None] | None = None
    ) -> None:
        """`switching` returns the `Switching` of an object; the function that switches must be
        idempotent. `on_all_restored` is called whenever no object is switched any more."""
        self._lock = forks.lock()
        self._switching = switching
        # by `id`: a switched object, its functions, and a thread id for each of its open calls
        self.entries: dict[int, tuple[T, Switching, list[int]]] = {}
        self._on_all_restored = on_all_restored
        forks.add_listener(self)
        register_for_cleanup(self)

    def switched(self, items: Iterable[T]) -> contextlib.AbstractContextManager[None]:
        """A context in which `items` are switched. It may be entered any number of times, and by
        several threads at once."""
        return _SwitchedContext(self, list(items))

    def enter(self, item: T) -> None:
        with self._lock:
            if id(item) not in self.entries:
                self.entries[id(item)] = item, self._switching(item), []
            _, (switch, _), threads = self.entries[id(item)]
            threads.append(threading.get_ident())
            switch()

    def leave(self, item: T) -> None:
        with self._lock:
            threads = self.entries[id(item)][2]
            threads.remove(threading.get_ident())
            self._restore_if_unused(item, threads)

    def after_fork(self, freed: set[Any]) -> None:
        """In a child process, ends the calls of other threads, which do not exist there."""
        self._end_calls(of_current_thread=False)

    def clean_up_after_error(self) -> None:
        """Ends the calls of this thread."""
        with self._lock:
            self._end_calls(of_current_thread=True)

    def _end_calls(self, of_current_thread: bool) -> None:
        """Ends the calls of this thread, or the calls of all other threads."""
        current_thread = threading.get_ident()
        for item, _, threads in list(self.entries.values()):
            threads[:] = [
                thread for thread in threads if (thread == current_thread) is not of_current_thread
            ]
            self._restore_if_unused(item, threads)

    def _restore_if_unused(self, item: T, threads: list[int]) -> None:
        if not threads:
            _, (_, restore), _ = self.entries.pop(id(item))
            restore()
            if self._on_all_restored is not None and not self.entries:
                self._on_all_restored()


class _SwitchedContext(Generic[T]):
    """The context of `Switches.switched`."""

    def __init__(self, switches: Switches[T], items: list[T]) -> None:
        self._switches = switches
        self._items = items

    def __enter__(self) -> None:
        entered_items = []
        try:
            for item in self._items:
                self._switches.enter(item)
                entered_items.append(item)
        except BaseException:
            self._leave(entered_items)
            raise

    def __exit__(self, *error: object) -> None:
        self._leave(self._items)

    def _leave(self, items: list[T]) -> None:
        last_error: BaseException | None = None
        for item in reversed(items):
            try:
                self._switches.leave(item)
            except BaseException as error:  # the other items must also be restored
                last_error = error
        if last_error is not None:
            raise last_error
