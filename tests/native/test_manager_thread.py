"""The thread of a manager: threads that begin late, pauses that are interrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import GenerationConfig

import hf_paged
from hf_paged import threads
from hf_paged.native import manager_thread
from tests.batching.test_interrupted_calls import interrupts
from tests.support import models

GREEDY = GenerationConfig(max_new_tokens=8, do_sample=False)
PROMPT = models.token_ids(1, 9)[0].tolist()
WAIT = 30.0  # seconds: a longer wait is a hang


@pytest.fixture(autouse=True)
def native_names() -> Iterator[None]:
    hf_paged.install(continuous_batching={"block_size": models.BLOCK_SIZE})
    try:
        yield
    finally:
        hf_paged.uninstall()
        hf_paged.install()


class Late:
    """Threads of managers begin only once they are let, until `undo`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may_begin = threading.Event()
        self.ended = threading.Semaphore(0)
        self.patch = patch
        begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

        def wait(thread: threading.Thread) -> Any:
            assert self.may_begin.wait(WAIT)
            try:
                return begin(thread)
            finally:
                self.ended.release()

        patch.setattr(threads, "START_SECONDS", 0.05)
        patch.setattr(threading.Thread, "_bootstrap_inner", wait)

    def undo(self) -> None:
        self.patch.undo()

    def let(self) -> None:
        self.may_begin.set()
        assert self.ended.acquire(timeout=WAIT / 3), "a thread that begins too late goes on"


def expect(manager: Any) -> None:
    ids = models.token_ids(1, 9)
    expected = manager.model.generate(ids, generation_config=GREEDY)[0, 9:].tolist()
    output = manager.get_result(manager.add_request(PROMPT), WAIT)
    assert output is not None and output.error is None and output.generated_tokens == expected


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_thread_that_begins_after_its_start_failed_touches_no_later_run(
    is_restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = models.get("llama")
    manager = model.init_continuous_batching(GREEDY)
    late = Late(monkeypatch)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        manager.start()
    late.undo()
    manager.start()
    expect(manager)
    if is_restarted:
        manager.stop()
        manager.start()
    thread = manager._thread.thread
    late.let()
    assert manager.is_running() and manager._thread.thread is thread
    expect(manager)
    manager.stop()
    assert not manager.is_running()


def test_a_thread_that_begins_after_its_start_failed_leaves_a_manager_that_can_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = models.get("llama")
    manager = model.init_continuous_batching(GREEDY)
    late = Late(monkeypatch)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        manager.start()
    late.undo()
    late.let()
    assert not manager.is_running() and not model.training
    manager.start()
    expect(manager)
    manager.stop()


def test_an_interrupt_as_a_manager_pauses_leaves_nothing_paused() -> None:
    def pause() -> None:
        with manager.pause():
            pass

    model: Any = models.get("llama")
    manager = model.init_continuous_batching(GREEDY)
    manager.start()
    expect(manager)
    for interrupt in interrupts(pause, 40):
        interrupt.run(pause)
        assert not manager._thread.pauses, f"{vars(interrupt)}"
    expect(manager)
    manager.stop()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_error_as_the_thread_begins_leaves_a_manager_that_can_stop_and_start(
    is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = models.get("llama")
    manager = model.init_continuous_batching(GREEDY)

    def fail(thread: threading.Thread) -> Any:
        raise MemoryError("on purpose")

    monkeypatch.setattr(manager_thread, "start_made", fail)
    with pytest.raises(MemoryError, match="on purpose"):
        manager.start()
    monkeypatch.undo()
    assert not manager.is_running()
    if is_stopped:
        manager.stop(block=True, timeout=WAIT)
    manager.start()
    expect(manager)
    manager.stop(block=True, timeout=WAIT)
    assert not manager.is_running()
