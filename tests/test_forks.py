"""Locks held by other threads are free in a child process, and survivors are told which."""

from __future__ import annotations

import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_paged import forks, rooms

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


def holds_in_child(claim: Callable[[], bool]) -> bool:
    """Result of `claim` in a child process."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if claim() else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), "the claim raised"
    return code == 0


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Any], None]]:
    """Another thread holds a lock until the test ends."""
    end = threading.Event()
    threads = []

    def hold(lock: Any) -> None:
        held = threading.Event()

        def target() -> None:
            with lock:
                held.set()
                end.wait(60)

        threads.append(threading.Thread(target=target))
        threads[-1].start()
        assert held.wait(60)

    yield hold
    end.set()
    for thread in threads:
        thread.join(60)


class Survivor:
    freed: set[Any] | None = None

    def after_fork(self, freed: set[Any]) -> None:
        self.freed = freed


@pytest.mark.parametrize("make", [forks.lock, forks.rlock])
def test_a_lock_of_another_thread_is_free_in_the_child(
    make: Callable[[], Any], elsewhere: Callable[[Any], None]
) -> None:
    held, free, survivor = make(), make(), Survivor()
    forks.add_listener(survivor)
    elsewhere(held)
    assert not held.acquire(blocking=False)
    assert holds_in_child(lambda: held.acquire(blocking=False) and free.acquire(blocking=False))
    assert holds_in_child(
        lambda: survivor.freed is not None and held in survivor.freed and free not in survivor.freed
    )
    assert survivor.freed is None, "only the child is told"
    assert not held.acquire(blocking=False), "the parent's lock is as it was"


def test_a_reentrant_lock_of_the_forking_thread_stays_its_own() -> None:
    lock, survivor = forks.rlock(), Survivor()
    forks.add_listener(survivor)
    with lock:
        assert holds_in_child(lambda: lock._is_owned() and lock not in (survivor.freed or ()))


def test_a_lock_that_does_not_ask_for_it_stays_held(elsewhere: Callable[[Any], None]) -> None:
    lock = threading.Lock()
    elsewhere(lock)
    assert holds_in_child(lambda: not lock.acquire(blocking=False))


def test_listeners_are_told_while_they_live_and_if_another_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[bool] = []

    class Told(Survivor):
        def after_fork(self, freed: set[Any]) -> None:
            told.append(True)
            raise ValueError("on purpose")

    first, survivor = Told(), Survivor()
    forks.add_listener(first)
    forks.add_listener(survivor)
    assert holds_in_child(lambda: told == [True] and survivor.freed is not None)
    assert holds_in_child(lambda: "`after_fork` failed" in caplog.text)
    del first
    assert holds_in_child(lambda: not told)


class Waits:
    """Its `value` waits for `end` in the process that made it."""

    def __init__(self) -> None:
        self.begun, self.end, self.process = threading.Event(), threading.Event(), os.getpid()

    @forks.lazy_property
    def value(self) -> int:
        if os.getpid() == self.process:
            self.begun.set()
            self.end.wait(60)
        return 3


def test_a_property_that_another_thread_computes_is_computed_in_the_child() -> None:
    waits = Waits()
    thread = threading.Thread(target=lambda: waits.value)
    thread.start()
    assert waits.begun.wait(60)

    def claim() -> bool:
        signal.alarm(30)
        return waits.value == 3

    assert holds_in_child(claim)
    waits.end.set()
    thread.join(60)
    assert vars(waits)["value"] == 3


def test_a_fork_waits_for_a_room_that_another_thread_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, imported = threading.Event(), list[str]()

    def import_module(name: str) -> None:
        begun.set()
        time.sleep(0.3)
        imported.append(name)

    monkeypatch.setattr(rooms, "is_installed", lambda name: True)
    monkeypatch.setattr(rooms, "importlib", types.SimpleNamespace(import_module=import_module))
    thread = threading.Thread(target=rooms.room.__wrapped__, args=("tools", "a picture"))
    thread.start()
    assert begun.wait(60)
    assert holds_in_child(lambda: bool(imported) and not forks.imports._is_owned())
    thread.join(60)
    with forks.imports:  # by this thread: it does not wait for itself
        assert holds_in_child(forks.imports._is_owned)
    assert not forks.imports._is_owned()


def test_no_cached_property() -> None:
    """Up to Python 3.11 it computes under a lock, shared by all instances, which `forks` does not
    know: `lazy_property` replaces it."""
    for path in Path(forks.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert "@functools.cached_property" not in text, path
        assert "import cached_property" not in text, path
