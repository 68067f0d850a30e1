"""Signals are deferred while several processes compute together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from hf_paged.ranks import signals as rank_signals
from hf_paged.ranks.signals import DeferringLock, deferring_signals

pytestmark = pytest.mark.usefixtures("sigint")


class Nowhere(Exception):
    pass


def make() -> tuple[DeferringLock, threading.RLock]:
    inner = threading.RLock()
    return DeferringLock(inner), inner


def is_free(lock: threading.RLock) -> bool:
    found: list[bool] = []

    def ask() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
        assert [signal.getsignal(number) for number in numbers] == [handler] * len(numbers)
    finally:
        for number, old in zip(numbers, before):
            signal.signal(number, old)


def ignore(signum: int, frame: FrameType | None) -> None: ...


def leave(signum: int, frame: FrameType | None) -> None:
    raise Nowhere


def test_a_signal_waits_until_the_outermost_lock_is_released() -> None:
    """And comes after an error that goes through."""
    (outer, outer_lock), (inner, inner_lock), seen = make(), make(), list[str]()
    with pytest.raises(KeyboardInterrupt) as caught:
        with outer:
            with inner, outer:
                signal.raise_signal(signal.SIGINT)
                seen.append("inside")
            seen.append("outside of the inner one")
            raise ValueError
    assert isinstance(caught.value.__context__, ValueError)
    assert seen == ["inside", "outside of the inner one"]
    assert is_free(outer_lock) and is_free(inner_lock)


def test_a_signal_reaches_a_thread_that_waits_for_the_lock() -> None:
    lock, inner = make()
    has_it, stop = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has_it.set()
            stop.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has_it.wait(30)
    timer = threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            with lock:
                pytest.fail("another thread has it")
        assert not is_free(inner)
    finally:
        stop.set()
        thread.join()
    assert is_free(inner)


@pytest.mark.parametrize(
    "name", ["SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGCHLD", "SIGXCPU"]
)
def test_a_handler_that_raises_waits_for_the_end_of_bookkeeping(name: str) -> None:
    reached: list[str] = []
    with handling(leave, getattr(signal, name)):
        with pytest.raises(Nowhere), deferring_signals():
            signal.raise_signal(getattr(signal, name))
            with deferring_signals():
                reached.append("inner")
            reached.append("outer")
    assert reached == ["inner", "outer"]


@pytest.mark.parametrize("num_raised", [1, 2])
def test_a_handler_that_raises_before_the_next_is_put_back_leaves_none_out(
    num_raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`signal.signal` calls the handlers of signals that have arrived before it sets one."""
    restored: list[int] = []

    def put(signum: int, handler: Any) -> Any:
        if handler is ignore:
            restored.append(signum)
            if 1 < len(restored) <= 1 + num_raised:
                raise Nowhere
        return signal.signal(signum, handler)

    fake = SimpleNamespace(getsignal=signal.getsignal, signal=put)
    with handling(ignore, signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1):
        monkeypatch.setattr(rank_signals, "_signal", fake)
        with pytest.raises(Nowhere), deferring_signals():
            pass


def test_a_signal_deferred_before_another_handler_raised_is_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def put(signum: int, handler: Any) -> Any:
        if signum == signal.SIGTERM and handler is not ignore:
            signal.raise_signal(signal.SIGINT)  # deferred by now
            raise Nowhere  # as the handler of a signal that arrives here
        return signal.signal(signum, handler)

    fake = SimpleNamespace(getsignal=signal.getsignal, signal=put)
    with handling(ignore, signal.SIGTERM):
        monkeypatch.setattr(rank_signals, "_signal", fake)
        with pytest.raises(KeyboardInterrupt) as caught, deferring_signals():
            pytest.fail("signals are not deferred")
    assert isinstance(caught.value.__context__, Nowhere)
    assert rank_signals._pending == []


def test_an_error_as_deferral_begins_leaves_it_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    context = deferring_signals()
    with monkeypatch.context() as patch:
        fake = SimpleNamespace(get_ident=lambda: idents.pop())
        idents = [threading.get_ident()]  # for `__enter__`; there is none for `_begin_deferring`
        patch.setattr(rank_signals, "threading", fake)
        with pytest.raises(IndexError):
            context.__enter__()
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), deferring_signals():
        signal.raise_signal(signal.SIGINT)
        reached.append("deferred")
    assert reached == ["deferred"]
