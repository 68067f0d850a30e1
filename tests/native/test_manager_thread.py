"""The thread of a manager: how it begins, pauses, survives errors, and dies."""

from __future__ import annotations

import asyncio
import functools
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import ContinuousBatchingConfig, PreTrainedTokenizerFast

from hf_paged import threads
from hf_paged.native import manager_thread
from tests.batching.test_interrupted_calls import interrupts
from tests.native.conftest import WAIT
from tests.native.test_continuous_batching import (
    CONFIG,
    LONG,
    PROMPTS,
    ask,
    assert_served,
    plain,
    wait_until,
)
from tests.support import models


def fail(*args: Any) -> Any:
    raise ZeroDivisionError("on purpose")


def die(*args: Any) -> Any:
    raise SystemExit("boom")


# -- how it begins -------------------------------------------------------------------------------


def delay_threads(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Threads begin only once the returned function is called, which waits for their end."""
    may_begin, ended = threading.Event(), threading.Semaphore(0)
    begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def begin_late(thread: threading.Thread) -> None:
        assert may_begin.wait(WAIT)
        begin(thread)
        ended.release()

    def let_begin() -> None:
        may_begin.set()
        assert ended.acquire(timeout=WAIT / 3), "a thread that begins too late goes on"

    patch.setattr(threads, "START_SECONDS", 0.05)
    patch.setattr(threading.Thread, "_bootstrap_inner", begin_late)
    return let_begin


@pytest.mark.parametrize("when", ["before the next run", "within it", "within a later one"])
def test_a_thread_that_begins_after_its_start_failed_touches_no_run(
    when: str, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    manager = model.init_continuous_batching(CONFIG)
    with monkeypatch.context() as patch:
        let_begin = delay_threads(patch)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            manager.start()
    if when == "before the next run":
        let_begin()
        assert not manager.is_running() and not model.training
    manager.start()
    assert_served(manager, 1)
    if when == "within a later one":
        manager.stop()
        manager.start()
    if when != "before the next run":
        thread = manager._thread.thread
        let_begin()
        assert manager.is_running() and manager._thread.thread is thread
        assert_served(manager, 1)
    manager.stop()
    assert not manager.is_running()


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (threading.Thread, "start", RuntimeError("can't start new thread")),
        (manager_thread, "try_start", MemoryError("on purpose")),
    ],
    ids=["no thread", "no memory"],
)
def test_a_manager_whose_thread_does_not_start_can_stop_and_start(
    owner: Any,
    name: str,
    error: Exception,
    is_stopped: bool,
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
) -> None:
    def raise_it(thread: Any) -> Any:
        raise error

    manager = model.init_continuous_batching(CONFIG)
    with monkeypatch.context() as patch, pytest.raises(type(error), match=str(error)):
        patch.setattr(owner, name, raise_it)
        manager.start()
    assert not manager.is_running()
    if is_stopped:
        manager.stop(block=True, timeout=WAIT)
    manager.start()
    assert_served(manager, 1)
    manager.stop(block=True, timeout=WAIT)
    assert not manager.is_running()


def test_callers_learn_of_an_error_where_the_thread_begins(model: Any) -> None:
    """Before the first line of its function, which thus can catch nothing."""
    manager = model.init_continuous_batching(CONFIG)
    name = manager.add_request(PROMPTS[0])
    code = manager_thread.ManagerThread._run.__code__

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is code:
            raise MemoryError("injected")

    threading.settrace(trace)
    try:
        manager.start()
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    output = manager.get_result(name)
    assert output is not None and output.error is not None and "injected" in output.error
    manager.join()
    with pytest.raises(RuntimeError, match="its thread died: MemoryError"):
        manager.add_request(PROMPTS[1])


def test_a_manager_whose_thread_vanished_takes_no_requests(
    monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    """One that lacks memory ends without a word. The manager can be started again."""
    manager = model.init_continuous_batching(CONFIG, ContinuousBatchingConfig(max_queue_size=1))
    manager.add_request(PROMPTS[0])
    monkeypatch.setattr(manager_thread, "MAX_QUEUE_SECONDS", 0.05)
    with pytest.raises(queue.Full, match="`max_queue_size`"):
        manager.add_request(PROMPTS[0])
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(manager_thread.ManagerThread, "_run", lambda self, token: None)
        manager.start()
        manager.join()
    with pytest.raises(RuntimeError, match="takes no more requests: its thread is not running"):
        manager.add_request(PROMPTS[1])
    manager.start()
    manager.add_request(PROMPTS[1])
    manager.stop()
    assert len(list(manager)) == 2


# -- how callers wait ----------------------------------------------------------------------------


def test_a_signal_that_wakes_a_reader_leaves_it_the_lock(
    sigint: None, monkeypatch: pytest.MonkeyPatch, manager: Any
) -> None:
    """It comes when the wait has just released the lock, which the reader's `with` is to
    release."""
    changed, signals = manager._thread.changed, [signal.SIGINT]
    release = changed._release_save

    def release_and_signal() -> Any:
        saved = release()
        if signals and threading.current_thread() is threading.main_thread():
            signal.raise_signal(signals.pop())
        return saved

    monkeypatch.setattr(changed, "_release_save", release_and_signal)
    with pytest.raises(KeyboardInterrupt):
        manager.get_result(timeout=60)
    assert_served(manager, 1)


@pytest.mark.slow
def test_all_who_wait_wake_when_the_thread_dies(
    monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    manager = model.init_continuous_batching(LONG)
    manager.start()
    name = manager.add_request(PROMPTS[0])

    async def handle() -> str:
        done = asyncio.get_running_loop().create_future()
        manager.register_result_handler("handled", done.set_result)
        manager.add_request(PROMPTS[1], request_id="handled")
        return str((await done).error)

    waits: dict[str, Callable[[], Any]] = {
        "reader": lambda: [output.error for output in manager.request_id_iter(name)],
        "other": lambda: manager.get_result("never added", WAIT),
        "joined": lambda: manager.join(),
        "handler": lambda: asyncio.run(handle()),
    }
    told: dict[str, Any] = {}
    waiting = [
        threading.Thread(target=lambda who=who: told.update({who: waits[who]()})) for who in waits
    ]
    for thread in waiting:
        thread.start()
    wait_until(lambda: "handled" in manager._thread.pending)
    with monkeypatch.context() as patch:
        patch.setattr(manager.engine, "step", die)
        for thread in waiting:
            thread.join(WAIT)
    died = "the engine's thread died: SystemExit('boom')"
    assert told == {"reader": [died], "other": None, "joined": None, "handler": died}
    assert str(manager.fatal_error) == "boom" and not manager.is_running()
    assert manager.background_thread_status.fatal_error is manager.fatal_error
    with pytest.raises(RuntimeError, match="its thread died") as raised:
        manager.add_request(PROMPTS[0])
    assert raised.value.__cause__ is manager.fatal_error
    manager.stop()
    manager.engine.check_integrity()
    manager.start()
    assert_served(manager)
    assert manager.fatal_error is None
    manager.stop()
    monkeypatch.setattr("hf_paged.PagedEngine.step", die)
    with pytest.raises(RuntimeError, match="thread died") as raised:
        model.generate_batch(PROMPTS, CONFIG)
    assert str(raised.value.__cause__) == "boom"


# -- how it survives -----------------------------------------------------------------------------


@pytest.mark.slow_cases(but=["a token is appended"])
@pytest.mark.parametrize("place", ["a token is appended", "the schedule", "the whole step"])
def test_the_thread_survives_what_a_step_raises(
    place: str, monkeypatch: pytest.MonkeyPatch, manager: Any
) -> None:
    """All requests end, with their tokens or with the error, and later ones are served, by the same
    thread."""
    assert_served(manager, 1)
    loop = manager.engine._core.loop
    owners = {
        "a token is appended": (loop.ledger, "append"),
        "the schedule": (loop.scheduler, "_continue_running"),
        "the whole step": (manager.engine, "step"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*owners[place], fail)
        for name in manager.add_requests(PROMPTS):
            output = manager.get_result(name, WAIT)
            assert output is not None and "on purpose" in output.error
    assert_served(manager)
    assert manager.is_running() and manager.fatal_error is None
    manager.engine.check_integrity()
    assert manager.engine.stats().used_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["deliver", "_convert_outputs"])
def test_requests_that_an_error_of_the_thread_loses_get_it(
    method: str, monkeypatch: pytest.MonkeyPatch, manager: Any
) -> None:
    """It falls before the engine has them, while the thread tells of a refused one, or after the
    engine has ended them."""

    def fail_once(self: Any, outputs: Any) -> Any:
        if method == "deliver" or any(output.finished for output in outputs):
            monkeypatch.undo()
            raise MemoryError("on purpose")
        return original(self, outputs)

    original = getattr(manager_thread.ManagerThread, method)
    with manager.pause():
        manager.add_request([models.VOCAB_SIZE], request_id="refused")
        names = manager.add_requests(PROMPTS)
        monkeypatch.setattr(manager_thread.ManagerThread, method, fail_once)
    results = [manager.get_result(name, WAIT) for name in names]
    assert [result and result.error for result in results] == ["on purpose"] * len(PROMPTS)
    assert all(result.lifespan[0] > 0 for result in results)  # they were not refused
    assert_served(manager)
    manager.engine.check_integrity()


@pytest.mark.slow
def test_an_output_that_cannot_be_made_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, manager: Any, model: Any
) -> None:
    """For an error in our code, or a panic of the tokenizer's Rust, which is no `Exception`."""
    add = manager_thread.PendingRequest.add
    monkeypatch.setattr(
        manager_thread.PendingRequest,
        "add",
        lambda self, output: fail() if self.output_ids == ["bad"] else add(self, output),
    )
    for name in ("bad", "good"):
        manager.add_request(PROMPTS[0], request_id=name)
    assert manager.get_result("bad", WAIT).error == "on purpose"
    assert manager.get_result("good", WAIT).generated_tokens == plain(model, PROMPTS[0])
    expected = [plain(model, prompt) for prompt in PROMPTS]
    bad = next(token for token in expected[0] if all(token not in row for row in expected[1:]))
    vocabulary = {f"w{token}": token for token in range(models.VOCAB_SIZE) if token != bad}
    words = Tokenizer(WordLevel(vocabulary | {"aaa": bad}))
    words.decoder = decoders.Strip("a", 2, 2)  # it panics if it would strip more than there is
    # as `transformers serve` does
    manager.engine.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    outputs = [manager.get_result(name, WAIT) for name in manager.add_requests(PROMPTS)]
    assert "cannot decode the new tokens: PanicException" in outputs[0].error
    assert [output.generated_tokens for output in outputs[1:]] == expected[1:]
    assert manager.is_running() and manager.fatal_error is None
    manager.engine.check_integrity()


@pytest.mark.slow
def test_running_requests_wait_for_few_new_ones(
    monkeypatch: pytest.MonkeyPatch, manager: Any, model: Any
) -> None:
    """Many requests at once are added between several steps; one that is cancelled before is not
    added."""
    monkeypatch.setattr(manager_thread, "MAX_NEW_REQUESTS", 3)
    calls: list[str] = []
    for name in ("add_request", "step"):
        method = getattr(manager.engine, name)

        def note(*args: Any, _name: str = name, _method: Any = method, **options: Any) -> Any:
            calls.append(_name)
            return _method(*args, **options)

        monkeypatch.setattr(manager.engine, name, note)
    with manager.pause():
        names = manager.add_requests(PROMPTS * 3)
        manager.cancel_request(names[-1])
    outputs = [manager.get_result(name, WAIT) for name in names]
    turn = ["add_request"] * 3 + ["step"]
    assert calls[:8] == turn * 2 and calls.count("add_request") == 8
    assert "cancelled" in outputs.pop().error
    for prompt, output in zip(PROMPTS * 3, outputs):
        assert output.generated_tokens == plain(model, prompt)


# -- pauses --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_step_in_a_pause_and_no_prefix_of_other_weights_after_it() -> None:
    model: Any = models.build("llama")
    prompt = models.token_ids(1, 40)[0].tolist()
    with model.continuous_batching_context_manager(CONFIG) as manager:
        first, again = ask(manager, prompt), ask(manager, prompt)
        assert manager.engine.stats().num_prefix_hit_tokens >= 32
        running = manager.add_request(prompt, max_new_tokens=1000)
        wait_until(lambda: manager.engine.has_unfinished)
        with manager.pause():
            with manager.pause():
                assert manager.engine.has_unfinished  # in the middle of a request
            before = manager.engine.stats()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            time.sleep(0.1)
            assert manager.engine.stats().num_steps == before.num_steps
            with pytest.raises(RuntimeError, match="leave the `pause` context"):
                manager.stop()
        changed = ask(manager, prompt)
        manager.cancel_request(running)
        assert manager.get_result(running, WAIT).is_finished()
        # of the running one, which began before
        hits = manager.engine.stats().num_prefix_hit_tokens - before.num_prefix_hit_tokens
        assert hits <= 40
    assert first.generated_tokens == again.generated_tokens != changed.generated_tokens
    assert changed.generated_tokens == plain(model, prompt)


@pytest.mark.slow
def test_a_training_step_in_a_pause() -> None:
    """Steps run in eval mode. At the end the mode is the one that a caller set, else that of the
    start."""
    model: Any = models.build("gpt2", attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5)
    expected = plain(model, PROMPTS[0])
    with model.continuous_batching_context_manager(CONFIG) as manager:
        with manager.pause():
            model.train()
        assert ask(manager).generated_tokens == expected
        assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.modules())
    with model.continuous_batching_context_manager(CONFIG) as manager:
        assert ask(manager).generated_tokens == expected
        with manager.pause():
            model.transformer.train()
    assert [name for name, module in model.named_children() if module.training] == ["transformer"]


@pytest.mark.slow
@pytest.mark.parametrize("is_hard", [False, True])
def test_a_manager_does_not_end_in_a_pause(is_hard: bool) -> None:
    model: Any = models.build("llama", attn_implementation="paged|eager")
    manager = model.init_continuous_batching(LONG)
    manager.start()
    name = manager.add_request(PROMPTS[0])
    with manager.pause():
        stopping = threading.Thread(target=lambda: manager.stop(hard_stop=is_hard))
        stopping.start()
        stopping.join(0.2)
        assert stopping.is_alive() and manager.is_running()
        # still one that a caller's forward can use
        assert model.config._attn_implementation == "eager"
        with manager.pause():
            pass
        for block in (False, True):
            with pytest.raises(RuntimeError, match="leave the `pause` context"):
                manager.stop(block, WAIT)
    stopping.join(WAIT)
    assert not stopping.is_alive() and not manager.is_running()
    output = manager.get_result(name, WAIT)
    assert (output.error is not None) == is_hard
    assert (len(output.generated_tokens) == 1500) != is_hard
    assert model.config._attn_implementation == "paged|eager"


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["it dies", "it is stopped"])
def test_a_pause_that_cannot_be_raises(
    ends: str, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    manager = model.init_continuous_batching(LONG)

    def pause() -> None:
        with manager.pause():
            pytest.fail("there is nothing to pause")

    with pytest.raises(RuntimeError, match="call `start` first"):
        pause()  # never started
    is_stepping, may_step, errors = threading.Event(), threading.Event(), list[Any]()

    def wait(then: Callable[[], Any]) -> Any:
        is_stepping.set()
        assert may_step.wait(WAIT)
        return then()

    def pause_and_note() -> None:
        try:
            pause()
        except BaseException as error:
            errors.append(error)

    then = die if ends == "it dies" else manager.engine.step
    monkeypatch.setattr(manager.engine, "step", functools.partial(wait, then))
    manager.start()
    manager.add_request(PROMPTS[0])
    assert is_stepping.wait(WAIT)
    pausing = threading.Thread(target=pause_and_note)
    pausing.start()
    wait_until(lambda: manager._thread.pauses)  # it waits for the step in progress
    if ends == "it is stopped":
        manager.stop(block=False, hard_stop=True)
    may_step.set()
    pausing.join(WAIT)
    manager.stop()
    (error,) = errors
    assert type(error) is RuntimeError and "before it could pause" in str(error)
    assert error.__cause__ is manager.fatal_error
    assert (manager.fatal_error is not None) == (ends == "it dies")


def test_an_interrupt_as_a_manager_pauses_leaves_nothing_paused(manager: Any) -> None:
    def pause() -> None:
        with manager.pause():
            pass

    assert_served(manager, 1)
    for interrupt in interrupts(pause, 40):
        interrupt.run(pause)
        assert not manager._thread.pauses, f"{vars(interrupt)}"
    assert_served(manager, 1)
