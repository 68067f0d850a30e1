"""transformers' continuous-batching API on `PagedEngine`: results, requests, sessions, configs."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    ContinuousMixin,
    RequestStatus,
)

import hf_paged
from hf_paged.native.manager_config import IGNORED_FIELDS, MAPPED_FIELDS, make_paged_config
from tests.native.conftest import GREEDY, WAIT
from tests.support import models
from tests.support.engine_helpers import lone_run
from tests.test_faults import OnPurpose

CONFIG = GenerationConfig(**GREEDY)
LONG = GenerationConfig(max_new_tokens=1500, do_sample=False)
PROMPTS = [models.token_ids(1, length, seed=length)[0].tolist() for length in (5, 21, 13)]


def plain(model: Any, prompt: list[int], seed: int | None = None, **options: Any) -> list[int]:
    return lone_run(model, prompt, {**GREEDY, **options}, seed)[0]


def ask(manager: Any, prompt: list[int] = PROMPTS[0], **options: Any) -> Any:
    return manager.get_result(manager.add_request(prompt, **options), WAIT)


def assert_served(manager: Any, count: int = len(PROMPTS)) -> None:
    prompts = PROMPTS[:count]
    for name, prompt in zip(manager.add_requests(prompts, max_new_tokens=8), prompts):
        output = manager.get_result(name, WAIT)
        assert output is not None and output.error is None, output
        assert output.generated_tokens == plain(manager.model, prompt)


def wait_until(is_true: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT
    while not is_true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gpt2"])
def test_greedy_batches_are_plain(name: str) -> None:
    model = models.get(name)
    outputs = model.generate_batch(PROMPTS, CONFIG)
    assert list(outputs) == ["req_0", "req_1", "req_2"]
    for prompt, output in zip(PROMPTS, outputs.values()):
        assert output.status == RequestStatus.FINISHED and output.is_finished()
        assert output.error is None and output.prompt_ids == prompt
        assert output.generated_tokens == plain(model, prompt)
        started, ended = output.lifespan
        assert output.created_time <= started <= ended <= time.perf_counter()


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
    config.eos_token_id = torch.tensor([config.eos_token_id])  # as after `generate`'s preparation
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
    """Also where not all of them run at once, which without a seed draw one by one."""
    config, few = GenerationConfig(max_new_tokens=8, do_sample=True), {"max_requests_per_batch": 2}
    for limit in ({}, few):
        cb_config = ContinuousBatchingConfig(seed=7, return_logprobs=True, **limit)
        outputs = model.generate_batch(PROMPTS, config, cb_config)
        for number, (prompt, output) in enumerate(zip(PROMPTS, outputs.values())):
            assert output.generated_tokens == plain(model, prompt, 7 + number, do_sample=True)
            assert len(output.logprobs) == 8 and max(output.logprobs) <= 0
    outputs = model.generate_batch(PROMPTS, config, ContinuousBatchingConfig(**few))
    assert [len(output.generated_tokens) for output in outputs.values()] == [8, 8, 8]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, {"num_beams": 4}, {"do_sample": True}])
def test_returned_sequences(mode: dict[str, Any], model: Any) -> None:
    cb_config = ContinuousBatchingConfig(seed=0 if "do_sample" in mode else None)
    options = {**GREEDY, **mode}
    config = GenerationConfig(**options)
    outputs = model.generate_batch(PROMPTS[:2], config, cb_config, num_return_sequences=3)
    assert list(outputs)[:4] == ["req_0__child#0", "req_0__child#1", "req_0", "req_1__child#0"]
    rows = [output.generated_tokens for output in outputs.values()]
    for number, prompt in enumerate(PROMPTS[:2]):
        expected = [plain(model, prompt)] * 3
        if mode:
            expected = lone_run(model, prompt, {**options, "num_return_sequences": 3}, number)
        assert rows[3 * number : 3 * number + 3] == expected


@pytest.mark.slow
def test_each_request_has_its_own_options(manager: Any, model: Any) -> None:
    assert isinstance(manager, ContinuousBatchingManager)
    token = plain(model, PROMPTS[1])[2]
    names = [
        manager.add_request(PROMPTS[0], max_new_tokens=3),
        manager.add_request(PROMPTS[1], eos_token_id=[token, -1]),
        manager.add_request(PROMPTS[1], eos_token_id=-1),
        manager.add_request(PROMPTS[2], repetition_penalty=1.7, request_id="mine"),
    ]
    assert names[-1] == "mine"
    tokens = [manager.get_result(name, WAIT).generated_tokens for name in reversed(names)]
    penalised = plain(model, PROMPTS[2], repetition_penalty=1.7)
    unending = plain(model, PROMPTS[1])
    assert tokens == [penalised, unending, unending[:3], plain(model, PROMPTS[0])[:3]]


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True])
def test_outputs_that_only_generate_returns_are_ignored(do_sample: bool) -> None:
    """Asked for by the model, by the config, or by a keyword."""
    model: Any = models.build("llama")
    outputs = dict.fromkeys(("return_dict_in_generate", "output_scores"), True)
    runs: list[Any] = []
    for place in ("nowhere", "keyword", "config", "model"):
        config = GenerationConfig(max_new_tokens=8, do_sample=do_sample)
        if place in ("config", "model"):
            vars(config if place == "config" else model.generation_config).update(outputs)
        torch.manual_seed(3)
        found = model.generate_batch(PROMPTS, config, **(outputs if place == "keyword" else {}))
        runs.append([(output.error, output.generated_tokens) for output in found.values()])
    assert runs == [runs[0]] * 4 and not any(error for error, _ in runs[0])


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True])
def test_stop_strings_with_a_tokenizer(do_sample: bool, model: Any) -> None:
    tokenizer = models.tokenizer()
    config = GenerationConfig(max_new_tokens=12, do_sample=do_sample)
    options = {"max_new_tokens": 12, "do_sample": do_sample}
    stop = tokenizer.decode(plain(model, PROMPTS[0], 7, **options)[3])
    given: dict[str, Any] = {"stop_strings": [stop], "tokenizer": tokenizer}
    outputs = model.generate_batch(PROMPTS, config, ContinuousBatchingConfig(seed=7), **given)
    for number, (prompt, output) in enumerate(zip(PROMPTS, outputs.values())):
        assert output.generated_tokens == plain(model, prompt, 7 + number, **options, **given)
    assert len(outputs["req_0"].generated_tokens) < 12
    # without a seed, too, requests, not rows of one padded call
    for output in model.generate_batch(PROMPTS[:1] * 2, config, **given).values():
        assert output.error is None
        assert stop not in tokenizer.decode(output.generated_tokens[:-1])


@pytest.mark.slow
def test_without_a_limit_a_request_goes_to_the_models_last_position() -> None:
    model: Any = models.build("llama", max_position_embeddings=48)
    outputs = model.generate_batch([PROMPTS[0]], GenerationConfig(do_sample=False))
    assert len(outputs["req_0"].generated_tokens) == 48 - len(PROMPTS[0])


@pytest.mark.slow
def test_streams_and_timestamps(manager: Any) -> None:
    options = {"max_new_tokens": 4, "record_timestamps": True}
    name = manager.add_request(PROMPTS[0], streaming=True, **options)
    chunks = list(manager.request_id_iter(name))
    assert [len(chunk.generated_tokens) for chunk in chunks] == [1, 2, 3, 4]
    assert [chunk.status.name for chunk in chunks] == ["DECODING"] * 3 + ["FINISHED"]
    times = chunks[-1].timestamps
    assert len(times) == 4 and times == sorted(times) and chunks[0].created_time < times[0]
    (whole,) = manager.request_id_iter(manager.add_request(PROMPTS[0], **options))
    assert whole.generated_tokens == chunks[-1].generated_tokens


@pytest.mark.slow
def test_iteration_gives_all_and_ends_with_the_manager(model: Any) -> None:
    manager = model.init_continuous_batching(CONFIG)
    names = manager.add_requests(PROMPTS)  # before the start
    assert not manager.is_running() and manager.get_result(timeout=0.0) is None
    manager.start()
    manager.stop()
    assert sorted(output.request_id for output in manager) == names
    manager.start()  # again
    assert_served(manager, 1)
    manager.stop()


# -- handlers, cancelled requests ----------------------------------------------------------------


@pytest.mark.slow
def test_handlers_get_their_requests_outputs(manager: Any) -> None:
    async def collect() -> list[int]:
        counts: list[int] = []
        done = asyncio.get_running_loop().create_future()

        def told(output: Any) -> None:
            counts.append(len(output.generated_tokens))
            if output.is_finished():
                done.set_result(None)

        name = manager.add_request(PROMPTS[0], max_new_tokens=3, streaming=True)
        wait_until(lambda: len(manager._thread.outputs.get(name, ())) == 3)  # none is lost
        manager.register_result_handler(name, told)
        await asyncio.wait_for(done, WAIT)
        return counts

    assert asyncio.run(collect()) == [1, 2, 3]
    assert not manager._thread.handlers and manager.get_result(timeout=0.0) is None


@pytest.mark.slow
def test_a_request_of_a_closed_loop_is_cancelled(manager: Any) -> None:
    async def leave() -> None:
        manager.register_result_handler("gone__child#0", print)
        options = {"max_new_tokens": 1500, "do_sample": True, "num_return_sequences": 2}
        manager.add_request(PROMPTS[0], request_id="gone", streaming=True, **options)

    asyncio.run(leave())
    wait_until(lambda: not manager._thread.pending)
    assert manager.is_running()
    assert manager.engine.stats().num_generated_tokens < 2 * 1500
    manager.engine.check_integrity()


@pytest.mark.slow
def test_a_handler_that_the_event_loop_refuses_cancels_its_request_alone(
    caplog: pytest.LogCaptureFixture, manager: Any, model: Any
) -> None:
    """An event loop in debug mode refuses coroutine functions in `call_soon_threadsafe`."""

    async def refused(output: Any) -> None:
        raise AssertionError

    async def both() -> Any:
        manager.register_result_handler("refused", refused)
        with manager.pause():  # so that one step has both
            manager.add_request(PROMPTS[0], request_id="refused")
            manager.add_request(PROMPTS[0], request_id="other")
        return await asyncio.to_thread(manager.get_result, "other", WAIT)

    other = asyncio.run(both(), debug=True)
    assert other is not None and other.generated_tokens == plain(model, PROMPTS[0])
    assert "rejected a result handler" in caplog.text
    assert not manager._thread.handlers and not manager._thread.pending


@pytest.mark.slow
def test_a_cancelled_request_tells_so(manager: Any, model: Any) -> None:
    """With the tokens so far; a sequence of it cannot be cancelled alone."""
    manager.cancel_request("unknown")
    name = manager.add_request(PROMPTS[0], max_new_tokens=1500, streaming=True)
    chunks = []
    for chunk in manager.request_id_iter(name):
        chunks.append(chunk)
        if len(chunks) == 3:
            manager.cancel_request(name)
    assert chunks[-1].status == RequestStatus.FAILED and "cancelled" in chunks[-1].error
    tokens = chunks[-1].generated_tokens
    assert 3 <= len(tokens) < 1500
    assert tokens == plain(model, PROMPTS[0], max_new_tokens=len(tokens))
    assert manager.engine.stats().used_blocks == 0
    options = {"max_new_tokens": 1500, "do_sample": True, "num_return_sequences": 2}
    manager.add_request(PROMPTS[0], request_id="a", **options)
    with pytest.raises(ValueError, match="cancel the whole request, 'a'"):
        manager.cancel_request("a__child#0")
    for used in ("a__child#0", "a"):
        with pytest.raises(ValueError, match=f"'{used}' is in use"):
            manager.add_request(PROMPTS[0], request_id=used)
    manager.cancel_request("a")
    assert "cancelled" in manager.get_result("a__child#0", WAIT).error
    assert "cancelled" in manager.get_result("a", WAIT).error
    assert not manager._thread.pending


def test_cancelling_an_ended_request_spares_a_later_one_of_its_id(
    monkeypatch: pytest.MonkeyPatch, manager: Any, model: Any
) -> None:
    """Whose last output has been read, or which ends in the step in progress."""
    ask(manager, request_id="a")
    with manager.pause():
        manager.cancel_request("a")
        manager.add_request(PROMPTS[0], request_id="a")
    assert manager.get_result("a", WAIT).generated_tokens == plain(model, PROMPTS[0])
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
    assert outputs[1].generated_tokens == plain(model, PROMPTS[0])


@pytest.mark.slow
def test_ids_that_no_request_has(manager: Any) -> None:
    name = manager.add_request(PROMPTS[0])
    assert manager.get_result(name).generated_tokens
    for unknown in (name, "never added"):
        with pytest.raises(ValueError, match=f"no unfinished request has the id '{unknown}'"):
            manager.get_result(unknown)
        assert manager.get_result(unknown, timeout=0.01) is None

    async def register() -> None:
        manager.register_result_handler("never added", print)

    asyncio.run(register())
    manager.stop()
    assert not manager._thread.handlers


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_request_that_cannot_be_served_ends_alone(do_sample: bool) -> None:
    """Also one for which there are too few blocks or positions."""
    model: Any = models.get("gpt2")
    too_long = models.token_ids(1, model.config.n_positions + 1)[0].tolist()
    wrong: list[Any] = [[], [models.VOCAB_SIZE], "text", None, too_long, PROMPTS[1] * 4]
    config = GenerationConfig(max_new_tokens=8, do_sample=do_sample)
    cb_config = ContinuousBatchingConfig(num_blocks=6, page_size=8)
    for bad in (wrong, wrong[4:5], wrong[5:]):  # sampled rows are one call without the former
        outputs = list(
            model.generate_batch([PROMPTS[0], *bad, PROMPTS[2]], config, cb_config).values()
        )
        for output, prompt in ((outputs[0], PROMPTS[0]), (outputs[-1], PROMPTS[2])):
            assert output.error is None and len(output.generated_tokens) == 8
            assert do_sample or output.generated_tokens == plain(model, prompt)
        for output in outputs[1:-1]:
            assert output.status == RequestStatus.FAILED and not output.generated_tokens
        errors = [output.error for output in outputs[1:-1]]
        assert all(errors)
        if too_long in bad:
            assert "positions" in errors[bad.index(too_long)]
        if wrong[5] in bad:
            assert "num_blocks" in errors[-1]


@pytest.mark.slow
def test_options_that_cannot_be_served(manager: Any, model: Any) -> None:
    assert "did you mean `temperature`" in ask(manager, temprature=0.5).error
    assert "max_new_tokens" in ask(manager, max_new_tokens=0).error
    with pytest.raises(ValueError, match="temprature"):
        model.generate_batch(PROMPTS, CONFIG, temprature=0.5)


@pytest.mark.slow
def test_few_blocks_preempt(model: Any) -> None:
    config = ContinuousBatchingConfig(num_blocks=6, page_size=8, cpu_offload_space=1.0)
    for do_sample in (False, True):
        options = {"max_new_tokens": 16, "do_sample": do_sample}
        outputs = model.generate_batch(PROMPTS * 2, GenerationConfig(**options), config)
        for prompt, output in zip(PROMPTS * 2, outputs.values()):
            assert output.error is None
            assert do_sample or output.generated_tokens == plain(model, prompt, **options)


@pytest.mark.slow
def test_requests_take_the_engines_options_and_report_its_result(manager: Any, model: Any) -> None:
    results: list[Any] = []
    for salt in ("one", "two"):
        options = {"cache_salt": salt, "return_logprobs": True, "top_logprobs": 2}
        penalty = {"repetition_penalty": 1.3, "on_result": results.append}
        output = ask(manager, PROMPTS[1], request_options=options, **penalty)
        assert output.generated_tokens == results[-1].token_ids
        assert output.generated_tokens == plain(model, PROMPTS[1], repetition_penalty=1.3)
        (sequence,) = results[-1].sequences
        assert len(sequence.top_logprobs) == 8
        # of the processed scores
        assert output.logprobs == [processed for _, processed in sequence.logprobs]
    assert manager.engine.stats().num_prefix_hit_tokens == 0
    output = ask(manager, request_options={"top_logprobs": 2}, on_result=results.append)
    assert output.error and str(results[-1].error) == output.error


@pytest.mark.slow
def test_requests_end_though_their_callback_raises(
    caplog: pytest.LogCaptureFixture, manager: Any, model: Any
) -> None:
    """... those that finish, are refused, or are cut off by the manager's end, and the others
    beside them."""

    def fail(result: Any) -> None:
        raise OnPurpose

    names = [manager.add_request(prompt, on_result=fail) for prompt in (*PROMPTS[:2], [])]
    names.append(manager.add_request(PROMPTS[2]))
    outputs = [manager.get_result(name, WAIT) for name in names]
    assert "the prompt is empty" in outputs.pop(2).error
    tokens = [output.generated_tokens for output in outputs]
    assert tokens == [plain(model, prompt) for prompt in PROMPTS]
    cut_off = manager.add_request(PROMPTS[0], max_new_tokens=1500, on_result=fail)
    manager.stop(hard_stop=True)
    assert manager.get_result(cut_off, WAIT).error and manager.fatal_error is None
    assert not manager.engine.stats().used_blocks
    assert caplog.text.count("`on_result` raised") == 4


# -- the model, and managers that it keeps -------------------------------------------------------


@pytest.mark.slow
def test_the_model_is_left_as_it_was() -> None:
    """By calls, and by the last of its managers."""
    model: Any = models.build("llama").train()
    model.config._attn_implementation = "paged|sdpa"  # transformers' own, which needs its own loop
    outputs = model.generate_batch(PROMPTS, CONFIG)
    sampled = model.generate_batch(PROMPTS, CONFIG, do_sample=True)
    assert all(len(output.generated_tokens) == 8 for output in sampled.values())
    first, second = model.init_continuous_batching(LONG), model.init_continuous_batching(LONG)
    for manager in (first, second):
        manager.start()
        assert ask(manager, max_new_tokens=1).is_finished()
    first.stop()
    assert not any(module.training for module in model.modules())
    second.stop()
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "paged|sdpa"
    model.config._attn_implementation = "sdpa"
    for prompt, output in zip(PROMPTS, outputs.values()):
        assert output.generated_tokens == plain(model, prompt)
    hf_paged.check_integrity(model)


@pytest.mark.slow
def test_a_manager_is_kept_for_the_next_session() -> None:
    model: Any = models.build("llama")
    prompt = models.token_ids(1, 40)[0].tolist()
    keep = {"persistent_manager": True}
    first = model.generate_batch([prompt], CONFIG, **keep)
    manager = model.init_continuous_batching()
    assert manager is model.init_continuous_batching(CONFIG) and not manager.is_running()
    again = model.generate_batch([prompt], CONFIG, **keep)
    assert manager.engine.stats().num_prefix_hit_tokens >= 32
    assert first["req_0"].generated_tokens == again["req_1"].generated_tokens
    other = model.generate_batch([prompt], CONFIG, max_new_tokens=3, **keep)
    assert len(other["req_2"].generated_tokens) == 3
    assert copy.deepcopy(model).init_continuous_batching(CONFIG) is not manager
    limited = ContinuousBatchingConfig(max_batch_tokens=64)
    assert model.init_continuous_batching(CONFIG, limited) is not manager
    small_pool = GenerationConfig(cache_config={"num_blocks": 64})
    smaller = model.init_continuous_batching(small_pool)
    assert smaller is not manager and smaller.paged_config.num_blocks == 64
    model.destroy_cached_continuous_batching_manager()
    assert manager.engine.memory.stats().used_bytes == 0
    held, kept = weakref.ref(model), weakref.ref(manager)
    model.generate_batch([prompt], CONFIG, **keep)
    del model, manager, smaller
    gc.collect()
    assert held() is None and kept() is None


@pytest.mark.slow
def test_sessions_at_the_same_time_share_no_kept_manager() -> None:
    model: Any = models.build("llama")
    expected = [plain(model, prompt) for prompt in PROMPTS]
    model.generate_batch(PROMPTS, CONFIG, persistent_manager=True)
    runs: list[Any] = []

    def run(is_kept: bool) -> None:
        for _ in range(10):
            outputs = model.generate_batch(PROMPTS, CONFIG, persistent_manager=is_kept)
            runs.append([output.generated_tokens for output in outputs.values()])

    callers = [threading.Thread(target=run, args=(is_kept,)) for is_kept in (True, True, False)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(WAIT)
    assert runs == [expected] * 30
    model.generate_batch(PROMPTS, CONFIG, persistent_manager=True)
    kept = model.init_continuous_batching()
    with model.continuous_batching_context_manager(CONFIG) as running:
        assert running is kept and model.init_continuous_batching() is not kept
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.slow
def test_whose_names_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paged calls of `generate` are ours; `uninstall` gives the names back, without a kept
    manager."""
    model: Any = models.build("llama")
    expected = plain(model, PROMPTS[0])
    config = GenerationConfig(**GREEDY, cache_implementation="paged")
    with monkeypatch.context() as patch:
        patch.setattr(ContinuousMixin, "generate_batch", None)
        assert plain(model, PROMPTS[0], cache_implementation="paged") == expected
    outputs = model.generate_batch(PROMPTS[:1], config, persistent_manager=True)
    assert outputs["req_0"].generated_tokens == expected
    assert type(model.init_continuous_batching(CONFIG)) is not ContinuousBatchingManager
    hf_paged.uninstall()
    assert type(model.init_continuous_batching(CONFIG)) is ContinuousBatchingManager
    hf_paged.install()  # without the names
    assert type(model.init_continuous_batching(CONFIG)) is ContinuousBatchingManager


# -- how managers end ----------------------------------------------------------------------------


@pytest.mark.slow
def test_managers_that_are_collected_leave_nothing(model: Any) -> None:
    manager = model.init_continuous_batching(LONG)
    manager.start()
    manager.add_requests(PROMPTS)
    engine = weakref.ref(manager.engine)
    del manager
    wait_until(lambda: gc.collect() >= 0 and engine() is None)


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
    with pytest.raises(RuntimeError, match="stopped"):
        manager.add_request(PROMPTS[0])


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
INTERRUPT = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
for config.do_sample in (False, True):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        model.generate_batch([prompt] * 3, config)
    except KeyboardInterrupt:
        print([x.name for x in threading.enumerate() if x.name.startswith("hf_paged-")])
hf_paged.check_integrity(model)
"""
FORK = """
manager = model.init_continuous_batching(config)
manager.start()
name = manager.add_request(prompt)
while manager.engine.stats().num_steps < 50:  # modules that steps need are imported
    time.sleep(0.01)
child = os.fork()
if not child:
    assert not manager.is_running() and manager.get_result() is None
    manager.stop()
    manager.start()
    output = manager.get_result(manager.add_request(prompt, max_new_tokens=5))
    assert len(output.generated_tokens) == 5, output
    manager.stop()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert manager.is_running()
manager.cancel_request(name)
assert manager.get_result(name).error
manager.add_request(prompt)
print("the last line")  # the interpreter ends with a running manager
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "printed"),
    [(INTERRUPT, "[]\n[]\n"), (FORK, "the last line\n")],
    ids=["ctrl-c", "fork"],
)
def test_processes_end(code: str, printed: str) -> None:
    """A batch by Ctrl-C; a child process without a thread, which can start one."""
    if code is FORK and not hasattr(os, "fork"):
        pytest.skip("needs fork")
    command = [sys.executable, "-c", RUN + textwrap.dedent(code)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0 and ended.stdout == printed, ended.stderr


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_field_of_the_config_is_mapped_or_left() -> None:
    """... and stands in the guide; one that is not known is refused."""
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    assert known <= {*MAPPED_FIELDS, *IGNORED_FIELDS}
    assert not set(MAPPED_FIELDS) & set(IGNORED_FIELDS)
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "integrations.md").read_text()
    for name, meaning in (MAPPED_FIELDS | IGNORED_FIELDS).items():
        assert f"| `{name}` | {meaning} |" in guide

    class Newer(ContinuousBatchingConfig):
        pass

    newer = copy.copy(ContinuousBatchingConfig.__dataclass_fields__["seed"])
    newer.name = "reads_minds"
    Newer.__dataclass_fields__ = {**Newer.__dataclass_fields__, newer.name: newer}  # type: ignore[attr-defined]
    config = Newer()
    config.reads_minds = None  # type: ignore[attr-defined]
    make_paged_config(config)
    config.reads_minds = 1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="reads_minds"):
        make_paged_config(config)


@pytest.mark.slow
def test_what_fields_of_the_config_mean() -> None:
    base = {"block_size": 32}
    none, paged = ContinuousBatchingConfig(), hf_paged.PagedConfig
    assert make_paged_config(none, base) == paged(block_size=32)
    assert make_paged_config(none) == paged(block_size=models.BLOCK_SIZE)
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
    assert make_paged_config(given, base) == paged(
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
