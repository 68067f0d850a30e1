"""transformers' continuous-batching API on `PagedEngine`: its results, and how its threads end."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    ContinuousMixin,
    RequestStatus,
)

import hf_paged
from hf_paged.native import manager_thread
from hf_paged.native.manager_config import IGNORED_FIELDS, MAPPED_FIELDS, make_paged_config
from tests.batching.test_engine_faults import OUTSIDE, failing
from tests.support import models
from tests.support.missing import forbidden
from tests.test_faults import OnPurpose

GREEDY = GenerationConfig(max_new_tokens=8, do_sample=False)
LONG = GenerationConfig(max_new_tokens=1500, do_sample=False)
PROMPTS = [models.token_ids(1, length, seed=length)[0].tolist() for length in (5, 21, 13)]
WAIT = 30.0  # seconds: a longer wait is a hang


@pytest.fixture(autouse=True)
def native_names() -> Iterator[None]:
    hf_paged.install(continuous_batching={"block_size": models.BLOCK_SIZE})
    try:
        yield
    finally:
        hf_paged.uninstall()
        hf_paged.install()
    assert not threads(), "a thread was left behind"


@pytest.fixture
def model() -> Any:
    """The shared one, which a test must not change."""
    return models.get("llama")


@pytest.fixture
def manager(model: Any) -> Iterator[Any]:
    """One that runs until the test ends."""
    with model.continuous_batching_context_manager(GREEDY) as running:
        yield running


def threads() -> list[threading.Thread]:
    gc.collect()  # managers that are gone
    deadline = time.monotonic() + WAIT
    while found := [each for each in threading.enumerate() if each.name.startswith("hf_paged-")]:
        if time.monotonic() > deadline:
            return found
        time.sleep(0.01)
    return []


def plain(model: Any, prompt: list[int], config: GenerationConfig, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    tokens: list[int] = model.generate(ids, generation_config=copy.deepcopy(config), **options)[
        0
    ].tolist()
    return tokens[0 if model.config.is_encoder_decoder else len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "gpt2"])
def test_greedy_batches_are_plain(name: str) -> None:
    model = models.get(name)
    outputs = model.generate_batch(PROMPTS, GREEDY)
    assert list(outputs) == ["req_0", "req_1", "req_2"]
    for prompt, output in zip(PROMPTS, outputs.values()):
        assert (
            output.status == RequestStatus.FINISHED
            and output.error is None
            and output.is_finished()
        )
        assert output.prompt_ids == prompt and output.generated_tokens == plain(
            model, prompt, GREEDY
        )
        assert (
            output.created_time <= output.lifespan[0] <= output.lifespan[1] <= time.perf_counter()
        )


@pytest.mark.slow
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_sampled_batches_are_the_rows_of_one_plain_call(num_sequences: int, model: Any) -> None:
    config = GenerationConfig(
        max_new_tokens=24, do_sample=True, temperature=1.5, num_return_sequences=num_sequences
    )
    inputs = models.padded_prompt("llama", (13, 4, 9))
    torch.manual_seed(3)
    config.eos_token_id = model.generate(**inputs, generation_config=config)[0, 13 + 5].item()
    prompts = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"])
    ]
    torch.manual_seed(3)
    expected = model.generate(**inputs, generation_config=config)[:, 13:].tolist()
    torch.manual_seed(3)
    outputs = model.generate_batch(prompts, config)
    assert len(outputs) == len(expected) == 3 * num_sequences
    ended = 0
    for row, output in zip(expected, outputs.values()):
        assert row[: len(output.generated_tokens)] == output.generated_tokens
        assert set(row[len(output.generated_tokens) :]) <= {models.PAD}
        ended += output.generated_tokens[-1] == config.eos_token_id
    assert ended, "no row ended early"
    assert config.cache_implementation is None  # the caller's config is unchanged


@pytest.mark.slow
def test_a_seed_gives_each_request_the_draws_of_generate(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=8, do_sample=True)
    outputs = model.generate_batch(PROMPTS, config, ContinuousBatchingConfig(seed=7))
    for number, (prompt, output) in enumerate(zip(PROMPTS, outputs.values())):
        torch.manual_seed(7 + number)
        assert output.generated_tokens == plain(model, prompt, config)


@pytest.mark.slow
def test_more_prompts_than_run_at_once_draw_one_by_one(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=4, do_sample=True)
    outputs = model.generate_batch(
        PROMPTS, config, ContinuousBatchingConfig(max_requests_per_batch=2)
    )
    assert [len(output.generated_tokens) for output in outputs.values()] == [4, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 4, "do_sample": False}, {"do_sample": True, "seed": 0}]
)
def test_returned_sequences(options: dict[str, Any], model: Any) -> None:
    options = dict(options)
    cb_config = ContinuousBatchingConfig(seed=options.pop("seed", None))
    config = GenerationConfig(max_new_tokens=6, **{"do_sample": False, **options})
    outputs = model.generate_batch(PROMPTS[:2], config, cb_config, num_return_sequences=3)
    assert list(outputs)[:4] == ["req_0__child#0", "req_0__child#1", "req_0", "req_1__child#0"]
    found = [output.generated_tokens for output in outputs.values()]
    for number, prompt in enumerate(PROMPTS[:2]):
        own = found[3 * number : 3 * number + 3]
        if not options:
            assert own == [plain(model, prompt, GREEDY, max_new_tokens=6)] * 3
            continue
        torch.manual_seed(number)
        config.num_return_sequences = 3
        expected = model.generate(torch.tensor([prompt]), generation_config=config)[
            :, len(prompt) :
        ].tolist()
        assert own == expected


@pytest.mark.slow
def test_each_request_has_its_own_options(model: Any) -> None:
    with model.continuous_batching_context_manager(GREEDY) as manager:
        assert isinstance(manager, ContinuousBatchingManager)
        first = manager.add_request(PROMPTS[0], max_new_tokens=3)
        token = plain(model, PROMPTS[1], GREEDY)[2]
        second = manager.add_request(PROMPTS[1], eos_token_id=[token, -1])
        third = manager.add_request(PROMPTS[2], repetition_penalty=1.7, request_id="mine")
        unending = manager.add_request(PROMPTS[1], eos_token_id=-1)
        assert third == "mine"
        found = {name: manager.get_result(name, WAIT) for name in (third, first, second, unending)}
    assert found[first].generated_tokens == plain(model, PROMPTS[0], GREEDY, max_new_tokens=3)
    assert found[second].generated_tokens == plain(model, PROMPTS[1], GREEDY)[:3]
    assert found[third].generated_tokens == plain(model, PROMPTS[2], GREEDY, repetition_penalty=1.7)
    assert found[unending].generated_tokens == plain(model, PROMPTS[1], GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("place", ["model", "config", "keyword"])
def test_outputs_that_only_generate_returns_are_ignored(place: str, do_sample: bool) -> None:
    model: Any = models.build("llama")
    config = GenerationConfig(max_new_tokens=8, do_sample=do_sample)
    torch.manual_seed(3)
    expected = model.generate_batch(PROMPTS, config)
    outputs = dict.fromkeys(("return_dict_in_generate", "output_scores"), True)
    keywords = outputs if place == "keyword" else {}
    if place != "keyword":
        vars(model.generation_config if place == "model" else config).update(outputs)
    torch.manual_seed(3)
    found = model.generate_batch(PROMPTS, config, **keywords)
    for name, output in found.items():
        assert output.error is None
        assert output.generated_tokens == expected[name].generated_tokens


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True])
def test_stop_strings_with_a_tokenizer(do_sample: bool, model: Any) -> None:
    tokenizer = models.tokenizer()
    config = GenerationConfig(max_new_tokens=12, do_sample=do_sample)
    torch.manual_seed(7)
    stop = tokenizer.decode(plain(model, PROMPTS[0], config)[3])
    given: dict[str, Any] = {"stop_strings": [stop], "tokenizer": tokenizer}
    outputs = model.generate_batch(PROMPTS, config, ContinuousBatchingConfig(seed=7), **given)
    for number, (prompt, output) in enumerate(zip(PROMPTS, outputs.values())):
        torch.manual_seed(7 + number)
        assert output.generated_tokens == plain(model, prompt, config, **given)
    assert len(outputs["req_0"].generated_tokens) < 12
    torch.manual_seed(7)
    # requests, not rows of one padded call
    outputs = model.generate_batch(PROMPTS[:1] * 2, config, **given)
    assert [stop in tokenizer.decode(each.generated_tokens[:-1]) for each in outputs.values()] == [
        False
    ] * 2
    assert all(each.error is None for each in outputs.values())


@pytest.mark.slow
def test_running_requests_wait_for_few_new_ones(
    monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    """Many requests at once are added between several steps; one that is cancelled before is not
    added."""
    monkeypatch.setattr(manager_thread, "MAX_NEW_REQUESTS", 3)
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        calls: list[str] = []
        add, step = manager.engine.add_request, manager.engine.step
        monkeypatch.setattr(
            manager.engine, "add_request", lambda *a, **k: calls.append("add") or add(*a, **k)
        )
        monkeypatch.setattr(manager.engine, "step", lambda: calls.append("step") or step())
        with manager.pause():
            names = manager.add_requests(PROMPTS * 3)
            manager.cancel_request(names[-1])
        outputs = {name: manager.get_result(name, WAIT) for name in names}
    assert [calls[i : i + 4] for i in (0, 4)] == [["add"] * 3 + ["step"]] * 2 and calls.count(
        "add"
    ) == 8
    assert (
        outputs[names[-1]].status == RequestStatus.FAILED
        and "cancelled" in outputs[names[-1]].error
    )
    for name, prompt in zip(names[:-1], PROMPTS * 3):
        assert outputs[name].generated_tokens == plain(model, prompt, GREEDY)


@pytest.mark.slow
def test_without_a_limit_a_request_goes_to_the_models_last_position() -> None:
    model: Any = models.build("llama", max_position_embeddings=48)
    outputs = model.generate_batch([PROMPTS[0]], GenerationConfig(do_sample=False))
    assert len(outputs["req_0"].generated_tokens) == 48 - len(PROMPTS[0])


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True])
def test_logprobs_are_of_the_processed_scores(do_sample: bool, model: Any) -> None:
    options: dict[str, Any] = (
        {"temperature": 0.7, "top_k": 20} if do_sample else {"repetition_penalty": 1.3}
    )
    config = GenerationConfig(max_new_tokens=6, do_sample=do_sample, **options)
    outputs = model.generate_batch(
        PROMPTS, config, ContinuousBatchingConfig(return_logprobs=True, seed=1)
    )
    for number, (prompt, output) in enumerate(zip(PROMPTS, outputs.values())):
        torch.manual_seed(1 + number)
        ids = torch.tensor([prompt])
        told = model.generate(
            ids, generation_config=config, output_scores=True, return_dict_in_generate=True
        )
        assert told.sequences[0, len(prompt) :].tolist() == output.generated_tokens
        expected = model.compute_transition_scores(
            told.sequences, told.scores, normalize_logits=True
        )[0]
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_streams_and_timestamps(model: Any) -> None:
    with model.continuous_batching_context_manager(GREEDY) as manager:
        name = manager.add_request(
            PROMPTS[0], max_new_tokens=4, streaming=True, record_timestamps=True
        )
        chunks = list(manager.request_id_iter(name))
        quiet = manager.add_request(PROMPTS[0], max_new_tokens=4)
        assert [len(output.generated_tokens) for output in manager.request_id_iter(quiet)] == [4]
    assert [len(chunk.generated_tokens) for chunk in chunks] == [1, 2, 3, 4]
    assert [chunk.status.name for chunk in chunks] == ["DECODING"] * 3 + ["FINISHED"]
    times = chunks[-1].timestamps
    assert len(times) == 4 and times == sorted(times) and chunks[0].created_time < times[0]


@pytest.mark.slow
def test_iteration_gives_all_and_ends_with_the_manager(model: Any) -> None:
    manager = model.init_continuous_batching(GREEDY)
    names = manager.add_requests(PROMPTS)  # before the start
    assert not manager.is_running() and manager.get_result(timeout=0.0) is None
    manager.start()
    manager.stop()
    assert sorted(output.request_id for output in manager) == names
    manager.start()  # again
    name = manager.add_request(PROMPTS[0])
    assert manager.get_result(name, WAIT).generated_tokens == plain(model, PROMPTS[0], GREEDY)
    manager.stop()


@pytest.mark.slow
def test_handlers_get_their_requests_outputs(model: Any) -> None:
    manager = model.init_continuous_batching(GREEDY)
    manager.start()

    async def collect() -> list[int]:
        counts: list[int] = []
        done = asyncio.get_running_loop().create_future()

        def told(output: Any) -> None:
            counts.append(len(output.generated_tokens))
            if output.is_finished():
                done.set_result(None)

        name = manager.add_request(PROMPTS[0], max_new_tokens=3, streaming=True)
        while len(manager._thread.outputs.get(name, ())) < 3:  # earlier outputs are not lost
            await asyncio.sleep(0.01)
        manager.register_result_handler(name, told)
        await asyncio.wait_for(done, WAIT)
        return counts

    assert asyncio.run(collect()) == [1, 2, 3]
    assert not manager._thread.handlers and manager.get_result(timeout=0.0) is None
    manager.stop()


@pytest.mark.slow
@pytest.mark.parametrize("handled", ["gone", "gone__child#0"])
def test_a_request_of_a_closed_loop_is_cancelled(handled: str, model: Any) -> None:
    """Also where the handler is of one of its further sequences."""
    config = GenerationConfig(max_new_tokens=1500, do_sample=True, num_return_sequences=2)
    manager = model.init_continuous_batching(config)
    manager.start()

    async def leave() -> None:
        manager.register_result_handler(handled, print)
        manager.add_request(PROMPTS[0], request_id="gone", streaming=True)

    asyncio.run(leave())
    deadline = time.monotonic() + WAIT
    while manager._thread.pending and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not manager._thread.pending and manager.is_running()
    assert manager.engine.stats().num_generated_tokens < 2 * 1500
    manager.engine.check_integrity()
    manager.stop()


@pytest.mark.slow
def test_a_handler_that_the_event_loop_refuses_cancels_its_request_alone(
    caplog: pytest.LogCaptureFixture, manager: Any, model: Any
) -> None:
    """An event loop in debug mode refuses coroutine functions in `call_soon_threadsafe`."""

    async def refused(output: Any) -> None:
        raise AssertionError

    async def ask(manager: Any) -> Any:
        manager.register_result_handler("refused", refused)
        with manager.pause():  # so that one step has both
            manager.add_request(PROMPTS[0], request_id="refused")
            manager.add_request(PROMPTS[0], request_id="other")
        return await asyncio.to_thread(manager.get_result, "other", WAIT)

    other = asyncio.run(ask(manager), debug=True)
    assert other is not None and other.generated_tokens == plain(model, PROMPTS[0], GREEDY)
    assert "rejected a result handler" in caplog.text
    assert not manager._thread.handlers and not manager._thread.pending


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_request_that_cannot_be_served_ends_alone(model: Any) -> None:
    wrong: list[Any] = [[], [models.VOCAB_SIZE], "text", None]
    outputs = model.generate_batch([PROMPTS[0], *wrong, PROMPTS[1]], GREEDY)
    found = list(outputs.values())
    assert [found[0].generated_tokens, found[-1].generated_tokens] == [
        plain(model, p, GREEDY) for p in PROMPTS[:2]
    ]
    for output in found[1:-1]:
        assert (
            output.status == RequestStatus.FAILED and output.error and not output.generated_tokens
        )
    with model.continuous_batching_context_manager(GREEDY) as manager:
        unknown = manager.add_request(PROMPTS[0], temprature=0.5)
        assert "did you mean `temperature`" in manager.get_result(unknown, WAIT).error
        large = manager.add_request(PROMPTS[0], max_new_tokens=0)
        assert "max_new_tokens" in manager.get_result(large, WAIT).error
    with pytest.raises(ValueError, match="temprature"):
        model.generate_batch(PROMPTS, GREEDY, temprature=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_request_that_never_fits_ends_alone(do_sample: bool, model: Any) -> None:
    config = ContinuousBatchingConfig(num_blocks=4, page_size=8)
    options = GenerationConfig(max_new_tokens=8, do_sample=do_sample)
    outputs = model.generate_batch([PROMPTS[0], PROMPTS[1] * 4], options, config)
    assert outputs["req_0"].error is None and len(outputs["req_0"].generated_tokens) == 8
    if not do_sample:
        assert outputs["req_0"].generated_tokens == plain(model, PROMPTS[0], GREEDY)
    assert "num_blocks" in outputs["req_1"].error


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_prompt_longer_than_the_table_of_positions_ends_alone(do_sample: bool) -> None:
    model: Any = models.get("gpt2")
    too_long = models.token_ids(1, model.config.n_positions + 1)[0].tolist()
    options = GenerationConfig(max_new_tokens=4, do_sample=do_sample)
    outputs = model.generate_batch([PROMPTS[0], too_long, PROMPTS[2]], options)
    assert [len(output.generated_tokens) for output in outputs.values()] == [4, 0, 4]
    assert [output.error is None for output in outputs.values()] == [True, False, True]
    assert "positions" in outputs["req_1"].error


@pytest.mark.slow
def test_few_blocks_preempt(model: Any) -> None:
    config = ContinuousBatchingConfig(num_blocks=6, page_size=8, cpu_offload_space=1.0)
    for sample in (False, True):
        options = GenerationConfig(max_new_tokens=16, do_sample=sample)
        torch.manual_seed(0)
        outputs = model.generate_batch(PROMPTS * 2, options, config)
        assert all(output.error is None for output in outputs.values())
        if not sample:
            for prompt, output in zip(PROMPTS * 2, outputs.values()):
                assert output.generated_tokens == plain(model, prompt, options)


@pytest.mark.slow
def test_ids_in_use_and_managers_that_have_stopped_are_refused(model: Any) -> None:
    manager = model.init_continuous_batching(LONG)
    manager.start()
    manager.add_request(PROMPTS[0], request_id="a")
    with pytest.raises(ValueError, match="'a' is in use"):
        manager.add_request(PROMPTS[0], request_id="a")
    manager.stop(hard_stop=True)
    assert "stopped" in manager.get_result("a").error and manager.get_result("a") is None
    with pytest.raises(RuntimeError, match="stopped"):
        manager.add_request(PROMPTS[0])
    with pytest.raises(RuntimeError, match="not running"), manager.pause():
        pass


@pytest.mark.slow
def test_a_full_queue_raises(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr(manager_thread, "MAX_QUEUE_SECONDS", 0.05)
    manager = model.init_continuous_batching(GREEDY, ContinuousBatchingConfig(max_queue_size=2))
    manager.add_requests(PROMPTS[:2])
    with pytest.raises(queue.Full, match="`max_queue_size`"):
        manager.add_request(PROMPTS[2])
    manager.start()
    manager.add_request(PROMPTS[2])
    manager.stop()
    assert len(list(manager)) == 3


def test_callers_learn_of_an_error_where_the_thread_begins(model: Any) -> None:
    """Before the first line of its function, which thus can catch nothing."""
    manager = model.init_continuous_batching(GREEDY)
    name = manager.add_request(PROMPTS[0])
    code = manager_thread.ManagerThread._run.__code__

    def fail(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is code:
            raise MemoryError("injected")

    threading.settrace(fail)
    try:
        manager.start()
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    output = manager.get_result(name)
    assert output is not None and output.error is not None and "injected" in output.error
    manager.join()
    with pytest.raises(RuntimeError, match="its thread died: MemoryError"):
        manager.add_request(PROMPTS[1])
    manager.start()
    manager.add_request(PROMPTS[1])
    manager.stop()
    assert len(list(manager)) == 1


def test_a_manager_whose_thread_vanished_takes_no_requests(
    monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    """One that lacks memory ends without a word. The manager can be started again."""
    manager = model.init_continuous_batching(GREEDY, ContinuousBatchingConfig(max_queue_size=1))
    manager.add_request(PROMPTS[0])  # fills the queue
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


def test_a_signal_that_wakes_a_reader_leaves_it_the_lock(sigint: None) -> None:
    """It comes when the wait has just released the lock, which the reader's `with` is to
    release."""
    manager = models.get("llama").init_continuous_batching(GREEDY)
    manager.start()
    changed, signals = manager._thread.changed, [signal.SIGINT]
    release = changed._release_save

    def release_and_signal() -> Any:
        saved = release()
        if signals and threading.current_thread() is threading.main_thread():
            signal.raise_signal(signals.pop())
        return saved

    changed._release_save = release_and_signal
    with pytest.raises(KeyboardInterrupt):
        manager.get_result(timeout=60)
    manager.add_request(PROMPTS[0])
    manager.stop()
    assert len(list(manager)) == 1


@pytest.mark.slow
def test_all_who_wait_wake_when_the_thread_dies(
    monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    manager = model.init_continuous_batching(LONG)
    manager.start()
    name = manager.add_request(PROMPTS[0])
    handled = []

    async def handler() -> None:
        done = asyncio.get_running_loop().create_future()
        manager.register_result_handler("handled", done.set_result)
        manager.add_request(PROMPTS[1], request_id="handled")
        handled.append((await done).error)

    waits: list[Callable[[], Any]] = [
        lambda: list(manager.request_id_iter(name)),
        lambda: manager.get_result("never added", WAIT),
        lambda: manager.join(),
        lambda: asyncio.run(handler()),
    ]
    found: dict[int, Any] = {}
    waiting = [
        threading.Thread(target=lambda i=i: found.update({i: waits[i]()}))
        for i in range(len(waits))
    ]
    for thread in waiting:
        thread.start()
    deadline = time.monotonic() + WAIT
    while "handled" not in manager._thread.pending and time.monotonic() < deadline:
        time.sleep(0.01)

    def die() -> Any:
        raise SystemExit("boom")

    monkeypatch.setattr(manager.engine, "step", die)
    for thread in waiting:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in waiting)
    died = "the engine's thread died: SystemExit('boom')"
    assert (
        [output.error for output in found[0]] == [died] and found[1] is None and handled == [died]
    )
    assert str(manager.fatal_error) == "boom" and not manager.is_running()
    assert manager.background_thread_status.fatal_error is manager.fatal_error
    with pytest.raises(RuntimeError, match="its thread died") as raised:
        manager.add_request(PROMPTS[0])
    assert raised.value.__cause__ is manager.fatal_error
    manager.stop()
    monkeypatch.undo()
    manager.engine.check_integrity()
    manager.start()
    manager.add_request(PROMPTS[0], max_new_tokens=3, request_id="after")
    assert len(manager.get_result("after", WAIT).generated_tokens) == 3
    assert manager.fatal_error is None
    manager.stop()


@pytest.mark.slow
def test_a_manager_whose_thread_cannot_start_can_be_stopped(
    monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    def fail(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    manager = model.init_continuous_batching(GREEDY)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
        patch.setattr(threading.Thread, "start", fail)
        manager.start()
    manager.stop()
    assert not manager.is_running()
    manager.start()
    name = manager.add_request(PROMPTS[0])
    assert manager.get_result(name, WAIT).generated_tokens == plain(model, PROMPTS[0], GREEDY)
    manager.stop()


@pytest.mark.slow_cases(but=["a token is appended"])
@pytest.mark.parametrize("place", OUTSIDE)
def test_the_thread_survives_what_a_step_raises(
    place: str, monkeypatch: pytest.MonkeyPatch, manager: Any, model: Any
) -> None:
    """All requests end, with their tokens or with the error, and later ones are served, by the same
    thread."""
    manager.get_result(manager.add_request(PROMPTS[0]), WAIT)
    with monkeypatch.context() as patch:
        failing(patch, manager.engine, place, 10**6)
        for name, prompt in zip(manager.add_requests(PROMPTS), PROMPTS):
            output = manager.get_result(name, WAIT)
            assert output is not None, "a caller waits for ever"
            if output.error is None:
                assert output.generated_tokens == plain(model, prompt, GREEDY)
            else:
                assert output.status == RequestStatus.FAILED and "on purpose" in output.error
    for name, prompt in zip(manager.add_requests(PROMPTS), PROMPTS):
        assert manager.get_result(name, WAIT).generated_tokens == plain(model, prompt, GREEDY)
    assert manager.is_running() and manager.fatal_error is None
    manager.engine.check_integrity()
    assert manager.engine.stats().used_blocks == 0


@pytest.mark.slow
def test_the_thread_survives_an_engine_whose_steps_all_raise(
    monkeypatch: pytest.MonkeyPatch, manager: Any, model: Any
) -> None:
    def fail() -> Any:
        raise ZeroDivisionError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(manager.engine, "step", fail)
        errors = [manager.get_result(name, WAIT).error for name in manager.add_requests(PROMPTS)]
        assert errors == ["boom"] * len(PROMPTS)
    (name,) = manager.add_requests(PROMPTS[:1])
    assert manager.get_result(name, WAIT).generated_tokens == plain(model, PROMPTS[0], GREEDY)
    manager.engine.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deliver", "_convert_outputs"])
def test_requests_that_an_error_of_the_thread_loses_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch, manager: Any, model: Any
) -> None:
    """It falls before the engine has them, while the thread tells of a refused one, or after the
    engine has ended them."""

    def fail_once(self: Any, outputs: Any) -> Any:
        if name == "deliver" or any(output.finished for output in outputs):
            monkeypatch.undo()
            raise MemoryError("on purpose")
        return original(self, outputs)

    original = getattr(manager_thread.ManagerThread, name)
    with manager.pause():
        manager.add_request([models.VOCAB_SIZE], request_id="refused")
        names = manager.add_requests(PROMPTS)
        monkeypatch.setattr(manager_thread.ManagerThread, name, fail_once)
    results = [manager.get_result(name, WAIT) for name in names]
    assert [result and result.error for result in results] == ["on purpose"] * len(PROMPTS)
    assert all(result.lifespan[0] > 0 for result in results)  # they were not refused
    for name, prompt in zip(manager.add_requests(PROMPTS), PROMPTS):
        expected = plain(model, prompt, GREEDY)
        assert manager.get_result(name, WAIT).generated_tokens == expected
    manager.engine.check_integrity()


@pytest.mark.slow
def test_an_output_that_cannot_be_made_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, manager: Any, model: Any
) -> None:
    add = manager_thread.PendingRequest.add

    def fail_one(self: Any, output: Any) -> Any:
        if self.output_ids == ["bad"]:
            raise OnPurpose("on purpose")
        return add(self, output)

    monkeypatch.setattr(manager_thread.PendingRequest, "add", fail_one)
    for name in ("bad", "good"):
        manager.add_request(PROMPTS[0], request_id=name)
    assert manager.get_result("bad", WAIT).error == "on purpose"
    assert manager.get_result("good", WAIT).generated_tokens == plain(model, PROMPTS[0], GREEDY)


@pytest.mark.slow
def test_the_thread_survives_a_tokenizer_that_panics(manager: Any, model: Any) -> None:
    """A panic in Rust is no `Exception`."""
    expected = [plain(model, prompt, GREEDY) for prompt in PROMPTS]
    bad = next(token for token in expected[0] if all(token not in other for other in expected[1:]))
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
def test_the_thread_survives_a_tiers_folder_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = models.build("llama")
    path, prompts = (
        tmp_path / "tier",
        [models.token_ids(1, 60, seed=seed)[0].tolist() for seed in (1, 2)],
    )
    tiers = {"block_size": models.BLOCK_SIZE, "num_blocks": 12, "prefix_tiers": str(path)}
    config = GenerationConfig(max_new_tokens=8, do_sample=False, cache_config=tiers)
    expected = [plain(model, prompt, GREEDY) for prompt in prompts]
    with model.continuous_batching_context_manager(config) as manager:
        for turn in range(3):
            with forbidden(path) if turn else contextlib.nullcontext():
                names = [
                    manager.add_request(prompt, request_id=f"{turn} {seed}")
                    for seed, prompt in enumerate(prompts)
                ]
                outputs = [manager.get_result(name, WAIT) for name in names]
            assert [output.generated_tokens for output in outputs] == expected
        assert manager.is_running() and manager.fatal_error is None
        manager.engine.check_integrity()
    assert "the disk tier of prefix blocks" in caplog.text and str(path) in caplog.text


@pytest.mark.slow
def test_a_batch_raises_what_ended_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(self: Any) -> Any:
        raise SystemExit("boom")

    monkeypatch.setattr(hf_paged.PagedEngine, "step", die)
    with pytest.raises(RuntimeError, match="thread died") as raised:
        models.get("llama").generate_batch(PROMPTS, GREEDY)
    assert str(raised.value.__cause__) == "boom"


@pytest.mark.slow
def test_requests_take_the_engines_options_and_report_its_result(model: Any) -> None:
    results: list[Any] = []
    with model.continuous_batching_context_manager(GREEDY) as manager:
        for salt in ("one", "two"):
            options = {"cache_salt": salt, "return_logprobs": True, "top_logprobs": 2}
            name = manager.add_request(
                PROMPTS[1], request_options=options, on_result=results.append
            )
            output = manager.get_result(name, WAIT)
            assert output is not None and output.generated_tokens == results[-1].token_ids
        assert manager.engine.stats().num_prefix_hit_tokens == 0
        name = manager.add_request(
            PROMPTS[0], request_options={"top_logprobs": 2}, on_result=results.append
        )
        output = manager.get_result(name, WAIT)
        assert output is not None and str(results[-1].error) == output.error
    assert [len(result.sequences[0].top_logprobs) for result in results[:2]] == [8, 8]
    assert results[0].token_ids == plain(model, PROMPTS[1], GREEDY)


@pytest.mark.slow
def test_requests_end_though_their_callback_raises(
    caplog: pytest.LogCaptureFixture, model: Any
) -> None:
    """... those that finish, are refused, or are cut off by the manager's end, and the others
    beside them."""

    def fail(result: Any) -> None:
        raise OnPurpose

    with model.continuous_batching_context_manager(GREEDY) as manager:
        names = [
            manager.add_request(prompt, on_result=fail) for prompt in (PROMPTS[0], [], PROMPTS[1])
        ]
        names.append(manager.add_request(PROMPTS[2]))
        outputs = [manager.get_result(name, WAIT) for name in names]
        assert "the prompt is empty" in outputs.pop(1).error
        assert [output.generated_tokens for output in outputs] == [
            plain(model, each, GREEDY) for each in PROMPTS
        ]
        cut_off = manager.add_request(PROMPTS[0], max_new_tokens=1500, on_result=fail)
        manager.stop(hard_stop=True)
        assert manager.get_result(cut_off, WAIT).error and manager.fatal_error is None
        assert not manager.engine.stats().used_blocks
    assert caplog.text.count("`on_result` raised") == 4


@pytest.mark.slow
def test_a_cancelled_request_tells_so(model: Any) -> None:
    with model.continuous_batching_context_manager(LONG) as manager:
        manager.cancel_request("unknown")
        name = manager.add_request(PROMPTS[0], streaming=True)
        chunks = []
        for chunk in manager.request_id_iter(name):
            chunks.append(chunk)
            if len(chunks) == 3:
                manager.cancel_request(name)
        assert chunks[-1].status == RequestStatus.FAILED and "cancelled" in chunks[-1].error
        tokens = chunks[-1].generated_tokens
        assert 3 <= len(tokens) < 1500 and tokens == plain(
            model, PROMPTS[0], GREEDY, max_new_tokens=len(tokens)
        )
        assert manager.engine.stats().used_blocks == 0


def test_cancelling_an_ended_request_spares_a_later_one_of_its_id(model: Any) -> None:
    with model.continuous_batching_context_manager(GREEDY) as manager:
        manager.get_result(manager.add_request(PROMPTS[0], request_id="a"), WAIT)
        with manager.pause():
            manager.cancel_request("a")
            manager.add_request(PROMPTS[0], request_id="a")
        output = manager.get_result("a", WAIT)
    assert output.error is None
    assert output.generated_tokens == plain(model, PROMPTS[0], GREEDY)


def test_cancelling_a_request_in_its_last_step_spares_a_later_one_of_its_id(
    monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    with model.continuous_batching_context_manager(GREEDY) as manager:
        step, take_requests = manager.engine.step, manager._thread._take_requests
        calls: list[str] = []

        def cancel_after_last_step() -> Any:
            outputs = step()
            if not calls and any(output.result is not None for output in outputs):
                calls.append("cancel")
                manager.cancel_request("a")
            return outputs

        def add_again() -> None:
            if calls == ["cancel"]:
                calls.append("add")
                manager.add_request(PROMPTS[0], request_id="a")
            take_requests()

        monkeypatch.setattr(manager.engine, "step", cancel_after_last_step)
        monkeypatch.setattr(manager._thread, "_take_requests", add_again)
        manager.add_request(PROMPTS[0], request_id="a")
        outputs = [manager.get_result("a", WAIT) for _ in range(2)]
    assert calls == ["cancel", "add"] and [output.error for output in outputs] == [None, None]
    assert outputs[1].generated_tokens == plain(model, PROMPTS[0], GREEDY)


@pytest.mark.slow
def test_a_child_cannot_be_cancelled_alone(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=1500, do_sample=True, num_return_sequences=2)
    with model.continuous_batching_context_manager(config) as manager:
        name = manager.add_request(PROMPTS[0], request_id="a")
        with pytest.raises(ValueError, match="cancel the whole request, 'a'"):
            manager.cancel_request("a__child#0")
        with pytest.raises(ValueError, match="'a__child#0' is in use"):
            manager.add_request(PROMPTS[0], request_id="a__child#0")
        manager.cancel_request(name)
        assert "cancelled" in manager.get_result("a__child#0", WAIT).error
    assert not manager._thread.pending


@pytest.mark.slow
def test_ids_that_no_request_has(model: Any) -> None:
    with model.continuous_batching_context_manager(GREEDY) as manager:
        name = manager.add_request(PROMPTS[0])
        assert manager.get_result(name).generated_tokens
        for unknown in (name, "never added"):
            with pytest.raises(ValueError, match=f"no unfinished request has the id '{unknown}'"):
                manager.get_result(unknown)
            assert manager.get_result(unknown, timeout=0.01) is None

        async def register() -> None:
            manager.register_result_handler("never added", print)

        asyncio.run(register())
    assert not manager._thread.handlers


# -- the model -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_step_in_a_pause_and_no_prefix_of_other_weights_after_it() -> None:
    model: Any = models.build("llama")
    prompt = models.token_ids(1, 40)[0].tolist()
    with model.continuous_batching_context_manager(GREEDY) as manager:
        first = manager.get_result(manager.add_request(prompt), WAIT)
        again = manager.get_result(manager.add_request(prompt), WAIT)
        assert manager.engine.stats().num_prefix_hit_tokens >= 32
        running = manager.add_request(prompt, max_new_tokens=1000)
        time.sleep(0.1)
        with manager.pause(), manager.pause():
            assert manager.engine.has_unfinished  # in the middle of a request
            steps = manager.engine.stats().num_steps
            hits = manager.engine.stats().num_prefix_hit_tokens
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            time.sleep(0.1)
            assert manager.engine.stats().num_steps == steps
            with pytest.raises(RuntimeError, match="leave the `pause` context"):
                manager.stop()
        changed = manager.get_result(manager.add_request(prompt), WAIT)
        manager.cancel_request(running)
        assert manager.get_result(running, WAIT).is_finished()
        # of the running one, which began before
        assert manager.engine.stats().num_prefix_hit_tokens - hits <= 40
    assert first.generated_tokens == again.generated_tokens != changed.generated_tokens
    assert changed.generated_tokens == plain(model, prompt, GREEDY)


@pytest.mark.slow
def test_a_training_step_in_a_pause() -> None:
    """Steps run in eval mode. At the end the mode is the one that a caller set, else that of the
    start."""
    model: Any = models.build("gpt2", attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5)
    expected = plain(model, PROMPTS[0], GREEDY)
    with model.continuous_batching_context_manager(GREEDY) as manager:
        with manager.pause():
            model.train()
        assert (
            manager.get_result(manager.add_request(PROMPTS[0]), WAIT).generated_tokens == expected
        )
        assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.modules())
    with model.continuous_batching_context_manager(GREEDY) as manager:
        assert (
            manager.get_result(manager.add_request(PROMPTS[0]), WAIT).generated_tokens == expected
        )
        with manager.pause():
            model.transformer.train()
    assert [name for name, module in model.named_children() if module.training] == ["transformer"]


@pytest.mark.slow
def test_pausing_threads_wait_for_one_another(model: Any) -> None:
    with model.continuous_batching_context_manager(LONG) as manager:
        name = manager.add_request(PROMPTS[0])
        inside, leave = threading.Barrier(4), [threading.Event() for _ in range(3)]

        def hold(number: int) -> None:
            with manager.pause():
                inside.wait(WAIT)
                leave[number].wait(WAIT)

        holders = [threading.Thread(target=hold, args=(number,)) for number in range(3)]
        for holder in holders:
            holder.start()
        inside.wait(WAIT)
        steps = manager.engine.stats().num_steps
        for number in range(3):
            time.sleep(0.05)
            assert manager.engine.stats().num_steps == steps
            leave[number].set()
            holders[number].join(WAIT)
        assert len(manager.get_result(name, WAIT).generated_tokens) == 1500


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
    assert (output.error is not None) == is_hard and (
        len(output.generated_tokens) == 1500
    ) != is_hard
    assert model.config._attn_implementation == "paged|eager"


@pytest.mark.slow
def test_a_pause_that_cannot_be_raises(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    manager = model.init_continuous_batching(LONG)

    def pause() -> None:
        with manager.pause():
            pytest.fail("there is nothing to pause")

    with pytest.raises(RuntimeError, match="call `start` first"):
        pause()  # never started
    step, may_step, is_stepping = manager.engine.step, threading.Event(), threading.Event()

    def wait(then: Any) -> Any:
        is_stepping.set()
        assert may_step.wait(WAIT)
        return then()

    def die() -> Any:
        raise SystemExit("boom")

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    found: list[BaseException] = []

    def waits() -> None:
        try:
            pause()
        except BaseException as raised:
            found.append(raised)

    for then in (die, step):
        may_step.clear()
        is_stepping.clear()
        monkeypatch.setattr(manager.engine, "step", functools.partial(wait, then))
        manager.start()
        manager.add_request(PROMPTS[0])
        assert is_stepping.wait(WAIT)
        found.clear()
        pausing = threading.Thread(target=waits)
        pausing.start()
        while not manager._thread.pauses:  # it waits for the step in progress
            time.sleep(0.01)
        if then is step:
            with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
                # as this call does, until Ctrl-C
                patch.setattr(manager._thread, "_wait_for", interrupt)
                pause()
            assert [*manager._thread.pauses.values()] == [pausing.ident]
            manager.stop(block=False, hard_stop=True)
        may_step.set()
        pausing.join(WAIT)
        manager.stop()
        assert [type(error) for error in found] == [
            RuntimeError
        ] and "before it could pause" in str(found[0])
        assert found[0].__cause__ is manager.fatal_error
        assert (manager.fatal_error is not None) == (then is die)
    with pytest.raises(RuntimeError, match="call `start` first"):
        pause()  # it has ended


@pytest.mark.slow
def test_the_model_is_left_as_it_was() -> None:
    model: Any = models.build("llama")
    model.train()
    model.config._attn_implementation = "paged|sdpa"  # transformers' own, which needs its own loop
    outputs = model.generate_batch(PROMPTS, GREEDY)
    sampled = model.generate_batch(PROMPTS, GREEDY, do_sample=True)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "paged|sdpa"
    model.config._attn_implementation = "sdpa"
    assert [o.generated_tokens for o in outputs.values()] == [
        plain(model, prompt, GREEDY) for prompt in PROMPTS
    ]
    assert all(len(output.generated_tokens) == 8 for output in sampled.values())
    hf_paged.check_integrity(model)


@pytest.mark.slow
def test_the_last_manager_puts_the_model_back() -> None:
    model: Any = models.build("llama")
    model.train()
    first, second = model.init_continuous_batching(LONG), model.init_continuous_batching(LONG)
    for manager in (first, second):
        manager.start()
        manager.add_request(PROMPTS[0], max_new_tokens=1)
        assert manager.get_result(timeout=WAIT).is_finished()
    first.stop()
    assert not any(module.training for module in model.modules())
    second.stop()
    assert all(module.training for module in model.modules())


@pytest.mark.slow
def test_a_manager_is_kept_for_the_next_session() -> None:
    model: Any = models.build("llama")
    prompt = models.token_ids(1, 40)[0].tolist()
    first = model.generate_batch([prompt], GREEDY, persistent_manager=True)
    manager = model.init_continuous_batching()
    assert manager is model.init_continuous_batching(GREEDY) and not manager.is_running()
    again = model.generate_batch([prompt], GREEDY, persistent_manager=True)
    assert manager.engine.stats().num_prefix_hit_tokens >= 32
    assert first["req_0"].generated_tokens == again["req_1"].generated_tokens
    other = model.generate_batch([prompt], GREEDY, max_new_tokens=3, persistent_manager=True)
    assert len(other["req_2"].generated_tokens) == 3
    twin = copy.deepcopy(model)
    assert twin.init_continuous_batching(GREEDY) is not manager
    assert (
        model.init_continuous_batching(GREEDY, ContinuousBatchingConfig(max_batch_tokens=64))
        is not manager
    )
    small_pool = GenerationConfig(cache_config={"num_blocks": 64})
    smaller = model.init_continuous_batching(small_pool)
    assert smaller is not manager and smaller.paged_config.num_blocks == 64
    model.destroy_cached_continuous_batching_manager()
    assert manager.engine.memory.stats().used_bytes == 0
    held, kept = weakref.ref(model), weakref.ref(manager)
    model.generate_batch([prompt], GREEDY, persistent_manager=True)
    del model, manager, smaller
    gc.collect()
    assert held() is None and kept() is None


@pytest.mark.slow
def test_sessions_at_the_same_time_share_no_kept_manager() -> None:
    model: Any = models.build("llama")
    expected = [plain(model, prompt, GREEDY) for prompt in PROMPTS]
    model.generate_batch(PROMPTS, GREEDY, persistent_manager=True)
    found: list[Any] = []

    def run(is_kept: bool) -> None:
        for _ in range(10):
            try:
                outputs = model.generate_batch(PROMPTS, GREEDY, persistent_manager=is_kept)
                found.append([output.generated_tokens for output in outputs.values()])
            except Exception as error:
                found.append(error)

    callers = [threading.Thread(target=run, args=(is_kept,)) for is_kept in (True, True, False)]
    for each in callers:
        each.start()
    for each in callers:
        each.join(WAIT)
    assert found == [expected] * 30
    model.generate_batch(PROMPTS, GREEDY, persistent_manager=True)
    kept = model.init_continuous_batching()
    with model.continuous_batching_context_manager(GREEDY) as running:
        assert running is kept and model.init_continuous_batching() is not kept
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.slow
def test_paged_calls_of_generate_are_ours(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr(ContinuousMixin, "generate_batch", None)
    inputs = models.padded_prompt("llama")
    expected = model.generate(**inputs, max_new_tokens=5)
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=5, cache_implementation="paged"), expected
    )
    config = GenerationConfig(max_new_tokens=5, cache_implementation="paged")
    monkeypatch.undo()
    output = model.generate_batch([PROMPTS[0]], config)["req_0"]
    assert output.generated_tokens == plain(model, PROMPTS[0], GREEDY, max_new_tokens=5)


@pytest.mark.slow
def test_uninstall_gives_the_names_back_and_leaves_no_kept_manager() -> None:
    model: Any = models.build("llama")
    model.generate_batch(PROMPTS, GREEDY, persistent_manager=True)
    assert type(model.init_continuous_batching(GREEDY)) is not ContinuousBatchingManager
    hf_paged.uninstall()
    assert type(model.init_continuous_batching(GREEDY)) is ContinuousBatchingManager
    hf_paged.install()  # without the names
    assert type(model.init_continuous_batching(GREEDY)) is ContinuousBatchingManager


# -- how threads end -----------------------------------------------------------------------------


@pytest.mark.slow
def test_managers_that_are_collected_leave_nothing(model: Any) -> None:
    manager = model.init_continuous_batching(LONG)
    manager.start()
    manager.add_requests(PROMPTS)
    engine = weakref.ref(manager.engine)
    del manager
    assert not threads()
    gc.collect()
    assert engine() is None


@pytest.mark.slow
def test_leaving_the_context_by_an_error_does_not_wait_for_requests(model: Any) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        model.continuous_batching_context_manager(LONG) as manager,
    ):
        manager.add_requests(PROMPTS * 10)
        raise ZeroDivisionError
    assert not manager.is_running()
    assert len([output for output in manager if output.error]) == 30
    assert manager.engine.memory.stats().used_bytes == 0


RUN = """
import os, signal, sys, threading, time
import hf_paged
from transformers import GenerationConfig
from tests.support import models
hf_paged.install(continuous_batching=True)
model = models.build("llama", max_position_embeddings=100_000)
config = GenerationConfig(max_new_tokens=50_000, do_sample=False)
prompt = list(range(5, 25))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    script = RUN + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_the_interpreter_ends_with_a_running_manager() -> None:
    ended = run(
        """
        manager = model.init_continuous_batching(config)
        manager.start()
        manager.add_request(prompt)
        time.sleep(0.5)
        print("the last line")
        """
    )
    assert ended.returncode == 0 and ended.stdout.endswith("the last line\n"), ended.stderr


@pytest.mark.slow
def test_an_interrupt_ends_a_batch() -> None:
    ended = run("""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            model.generate_batch([prompt] * 3, config)
        except KeyboardInterrupt:
            print([each.name for each in threading.enumerate() if each.name.startswith("hf_paged-")])
        del config.do_sample
        config.do_sample = True
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            model.generate_batch([prompt] * 3, config)
        except KeyboardInterrupt:
            hf_paged.check_integrity(model)
            print("whole")
        """)
    assert ended.returncode == 0 and ended.stdout == "[]\nwhole\n", ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_has_no_thread_and_can_start_one() -> None:
    ended = run("""
        manager = model.init_continuous_batching(config)
        manager.start()
        name = manager.add_request(prompt)
        time.sleep(0.5)
        child = os.fork()
        if not child:
            assert not manager.is_running() and manager.get_result() is None
            manager.stop()
            manager.start()
            assert len(manager.get_result(manager.add_request(prompt, max_new_tokens=5)).generated_tokens) == 5
            manager.stop()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert manager.is_running()
        manager.cancel_request(name)
        assert manager.get_result(name).error
        manager.stop()
        print("whole")
        """)
    assert ended.returncode == 0 and ended.stdout == "whole\n", ended.stderr


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_field_of_the_config_is_mapped_or_left() -> None:
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    assert known <= {*MAPPED_FIELDS, *IGNORED_FIELDS}
    assert not set(MAPPED_FIELDS) & set(IGNORED_FIELDS)


@pytest.mark.slow
def test_the_guide_has_the_tables() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "integrations.md").read_text()
    for name, meaning in (MAPPED_FIELDS | IGNORED_FIELDS).items():
        assert f"| `{name}` | {meaning} |" in guide


@pytest.mark.slow
def test_what_fields_of_the_config_mean() -> None:
    base = {"block_size": 32}
    assert make_paged_config(ContinuousBatchingConfig(), base) == hf_paged.PagedConfig(
        block_size=32
    )
    assert make_paged_config(ContinuousBatchingConfig()) == hf_paged.PagedConfig(
        block_size=models.BLOCK_SIZE
    )
    given = ContinuousBatchingConfig(
        num_blocks=40,
        max_batch_tokens=512,
        max_memory_percent=0.5,
        max_requests_per_batch=9,
        allow_block_sharing=False,
        use_cuda_graph=False,
        scheduler_type="prefill_first",
        cpu_offload_space=2.0,
        q_padding_interval_size=64,
        default_compile_level=2,
    )
    assert make_paged_config(given, base) == hf_paged.PagedConfig(
        block_size=256,  # what transformers' blocks are by default
        num_blocks=40,
        max_num_batched_tokens=512,
        memory_fraction=0.5,
        max_num_seqs=9,
        prefix_caching=False,
        capture=False,
        max_chunk_tokens=512,
        preemption="swap",
    )
    assert make_paged_config(ContinuousBatchingConfig(use_cuda_graph=(False, True)), base).capture
    for wrong, message in (
        ({"scheduler_type": "mine"}, "'fifo' or 'prefill_first'"),
        ({"max_memory_percent": 90}, "memory_fraction"),
        ({"max_requests_per_batch": 0}, "max_num_seqs"),
    ):
        with pytest.raises(ValueError, match=message):
            make_paged_config(ContinuousBatchingConfig(**wrong), base)


@pytest.mark.slow
def test_a_field_that_is_not_known_is_refused() -> None:
    class Newer(ContinuousBatchingConfig):
        pass

    Newer.__dataclass_fields__ = {**ContinuousBatchingConfig.__dataclass_fields__}  # type: ignore[attr-defined]
    newer = copy.copy(ContinuousBatchingConfig.__dataclass_fields__["seed"])
    newer.name = "reads_minds"
    Newer.__dataclass_fields__["reads_minds"] = newer  # type: ignore[attr-defined]
    config = Newer()
    config.reads_minds = None  # type: ignore[attr-defined]
    make_paged_config(config)
    config.reads_minds = 1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="reads_minds"):
        make_paged_config(config)
