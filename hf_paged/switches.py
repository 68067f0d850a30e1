"""Objects that calls switch for their duration, also where calls of several threads overlap."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from . import forks

T = TypeVar("T")


class Switches(Generic[T]):
    """Objects that calls have switched, each with what `save` returned and the threads of its calls, which may overlap:
    the first call saves, each switches, the last restores."""

    def __init__(
        self, save: Callable[[T], Any], switch: Callable[[T, Any], None], restore: Callable[[T, Any], None]
    ) -> None:
        self._lock = forks.lock()
        self._save, self._switch, self._restore = save, switch, restore
        self.held: dict[int, tuple[T, Any, list[int]]] = {}
        forks.in_child(self)

    @contextlib.contextmanager
    def switched(self, items: Iterable[T]) -> Iterator[None]:
        """Within it, `items` are switched. Must be entered and left within `interrupts.held`."""
        with contextlib.ExitStack() as stack:
            for item in items:
                self._enter(item)
                stack.callback(self._leave, item)
            yield

    def _enter(self, item: T) -> None:
        with self._lock:
            if id(item) not in self.held:
                self.held[id(item)] = item, self._save(item), []
            _, saved, threads = self.held[id(item)]
            threads.append(threading.get_ident())
            self._switch(item, saved)

    def _leave(self, item: T) -> None:
        with self._lock:
            threads = self.held[id(item)][2]
            threads.remove(threading.get_ident())
            self._end(item, threads)

    def after_fork(self, freed: set[Any]) -> None:
        """In a child process: ends the calls of other threads, which do not exist there."""
        for item, _, threads in list(self.held.values()):
            threads[:] = [thread for thread in threads if thread == threading.get_ident()]
            self._end(item, threads)

    def _end(self, item: T, threads: list[int]) -> None:
        if not threads:
            _, saved, _ = self.held.pop(id(item))
            self._restore(item, saved)
