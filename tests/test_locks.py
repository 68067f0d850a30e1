"""Locks that defer signals."""

from __future__ import annotations

import signal
import threading

import pytest

from hf_paged.interrupts import PatientLock, let_in, step_lock

pytestmark = pytest.mark.usefixtures("sigint")


def is_free(lock: PatientLock) -> bool:
    found: list[bool] = []

    def ask() -> None:
        found.append(lock.lock.acquire(blocking=False))
        if found[0]:
            lock.lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def test_a_signal_waits_until_the_outermost_lock_is_released() -> None:
    outer, inner, seen = PatientLock(), PatientLock(), []
    with pytest.raises(KeyboardInterrupt):
        with outer:
            with inner, outer:
                signal.raise_signal(signal.SIGINT)
                seen.append("inside")
            seen.append("outside of the inner one")
    assert seen == ["inside", "outside of the inner one"]
    assert is_free(outer) and is_free(inner)


def test_a_signal_that_is_let_in_releases_the_lock() -> None:
    lock = PatientLock()
    with pytest.raises(KeyboardInterrupt):
        with lock, let_in():
            signal.raise_signal(signal.SIGINT)
    assert is_free(lock)


def test_an_error_goes_through_and_a_signal_comes_after_it() -> None:
    lock = PatientLock()
    with pytest.raises(KeyboardInterrupt) as caught:
        with lock:
            signal.raise_signal(signal.SIGINT)
            raise ValueError
    assert isinstance(caught.value.__context__, ValueError)
    assert is_free(lock)


def test_a_signal_reaches_a_thread_that_waits_for_the_lock() -> None:
    lock, has_it, stop = PatientLock(), threading.Event(), threading.Event()

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
        assert not is_free(lock)
    finally:
        stop.set()
        thread.join()
    assert is_free(lock)


def test_threads_that_wait_for_a_condition_each_hold_their_own_signals() -> None:
    lock, inside = PatientLock(), []
    condition, done = threading.Condition(lock.lock), threading.Event()

    def wait() -> None:
        with lock:
            inside.append(threading.get_ident())
            while not done.is_set():
                lock.wait_for(condition)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    try:
        with lock:
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            for thread in threads:
                thread.start()
            while len(inside) < 3:
                # they take the lock while this thread waits, and hold it when this thread leaves
                lock.wait_for(condition)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt), lock:
            signal.raise_signal(signal.SIGINT)
            lock.wait_for(condition)
            pytest.fail("it lets signals in")
    finally:
        done.set()
        for thread in threads:
            thread.join(30)
    assert is_free(lock)


def test_a_model_has_one_lock() -> None:
    import torch

    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    assert step_lock(model) is step_lock(model) is not step_lock(other)
