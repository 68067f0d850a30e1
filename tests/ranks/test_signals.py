"""Signals are deferred while several processes compute together."""

from __future__ import annotations

import signal
import threading
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from hf_paged.ranks import signals as rank_signals
from hf_paged.ranks.signals import DeferringLock, deferring_signals

pytestmark = pytest.mark.usefixtures("sigint")


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


def test_a_signal_waits_until_the_outermost_lock_is_released() -> None:
    (outer, outer_lock), (inner, inner_lock), seen = make(), make(), list[str]()
    with pytest.raises(KeyboardInterrupt):
        with outer:
            with inner, outer:
                signal.raise_signal(signal.SIGINT)
                seen.append("inside")
            seen.append("outside of the inner one")
    assert seen == ["inside", "outside of the inner one"]
    assert is_free(outer_lock) and is_free(inner_lock)


def test_an_error_goes_through_and_a_signal_comes_after_it() -> None:
    lock, inner = make()
    with pytest.raises(KeyboardInterrupt) as caught:
        with lock:
            signal.raise_signal(signal.SIGINT)
            raise ValueError
    assert isinstance(caught.value.__context__, ValueError)
    assert is_free(inner)


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


class Nowhere(Exception):
    pass


@pytest.mark.parametrize(
    "name", ["SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGCHLD", "SIGXCPU"]
)
def test_a_handler_that_raises_waits_for_the_end_of_bookkeeping(name: str) -> None:
    def handle(signum: int, frame: FrameType | None) -> None:
        raise Nowhere

    reached: list[str] = []
    before = signal.signal(getattr(signal, name), handle)
    try:
        with pytest.raises(Nowhere), deferring_signals():
            signal.raise_signal(getattr(signal, name))
            with deferring_signals():
                reached.append("inner")
            reached.append("outer")
        assert reached == ["inner", "outer"]
        assert signal.getsignal(getattr(signal, name)) is handle
    finally:
        signal.signal(getattr(signal, name), before)


@pytest.mark.parametrize("num_raised", [1, 2])
def test_a_handler_that_raises_before_the_next_is_put_back_leaves_none_out(
    num_raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`signal.signal` calls the handlers of signals that have arrived before it sets one."""

    def put(signum: int, handler: Any) -> Any:
        if handler is handle:
            restored.append(signum)
            if 1 < len(restored) <= 1 + num_raised:
                raise Nowhere
        return signal.signal(signum, handler)

    def handle(signum: int, frame: FrameType | None) -> None: ...

    numbers, restored = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1), list[int]()
    before = [signal.signal(number, handle) for number in numbers]
    fake = SimpleNamespace(getsignal=signal.getsignal, signal=put)
    monkeypatch.setattr(rank_signals, "_signal", fake)
    try:
        with pytest.raises(Nowhere), deferring_signals():
            pass
        assert [signal.getsignal(number) for number in numbers] == [handle] * len(numbers)
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def test_a_signal_deferred_before_another_handler_raised_is_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def handle(signum: int, frame: FrameType | None) -> None: ...

    def put(signum: int, handler: Any) -> Any:
        if signum == signal.SIGTERM and handler is not handle:
            signal.raise_signal(signal.SIGINT)  # deferred by now
            raise Nowhere  # as the handler of a signal that arrives here
        return signal.signal(signum, handler)

    before = signal.signal(signal.SIGTERM, handle)
    fake = SimpleNamespace(getsignal=signal.getsignal, signal=put)
    monkeypatch.setattr(rank_signals, "_signal", fake)
    try:
        with pytest.raises(KeyboardInterrupt) as caught, deferring_signals():
            pytest.fail("signals are not deferred")
        assert isinstance(caught.value.__context__, Nowhere)
        assert rank_signals._pending == []
    finally:
        signal.signal(signal.SIGTERM, before)


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
