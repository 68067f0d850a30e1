"""Whatever fails between a step and its reader, every request ends exactly once, and its reader is
told."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import MaxTimeCriteria

from hf_paged import PagedEngine
from hf_paged.threads import attempt, step_lock
from tests.support import models
from tests.support.checks import in_threads
from tests.support.engine_helpers import (
    HALF,
    MODES,
    Asked,
    Recorder,
    Spelled,
    assert_drained,
    engine_of,
    prompts,
    results_of,
    run_all,
    steps,
    told_by,
)
from tests.support.rooms import needs_fingerprints
from tests.test_faults import Countdown, FailingProcessor, OnPurpose

GREEDY = MODES["greedy"]
LONG = {"do_sample": False, "max_new_tokens": 400}
TEXT = [5, 6, 7]


def force(*texts: list[int]) -> dict[str, Any]:
    """Forces row `i` to generate the tokens of `texts[i]` behind `TEXT`, and then its last one
    again; one text is for all rows."""

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        for row in range(len(scores)):
            text = texts[row % len(texts)]
            forced[row, text[min(ids.shape[1] - len(TEXT), len(text) - 1)]] = 0
        return forced

    return {"logits_processor": [process]}


# -------------------------------------------------------------------------------- text that fails


@pytest.mark.parametrize("mode", ["greedy", "samples", "beams"])
@pytest.mark.parametrize("when", ["first piece", "end"])
def test_a_tokenizer_that_raises_fails_that_request_alone(mode: str, when: str) -> None:
    count, streamer = MODES[mode]["max_new_tokens"], Recorder()

    def check(token_ids: list[int]) -> None:
        if 77 in token_ids and (when == "first piece" or len(token_ids) == count):
            raise OnPurpose("no such token")

    with engine_of(tokenizer=Spelled(before=check)) as engine:
        engine.add_request(TEXT, GREEDY, request_id="50", **force([50]))
        bad = {**force([77]), **({"streamer": streamer} if mode == "greedy" else {})}
        engine.add_request(TEXT, MODES[mode], request_id="bad", seed=1, **bad)
        engine.add_request(TEXT, GREEDY, request_id="51", **force([51]))
        outputs = steps(engine)
        assert_drained(engine)
    results, told = results_of(outputs), told_by(outputs)
    failed = results.pop("bad")
    assert isinstance(failed.error, OnPurpose) and failed.text is None
    streamed = when == "first piece" and mode != "beams"
    assert failed.token_ids == [77] * (1 if streamed else count)
    assert failed.finish_reason == ("error" if streamed else "length")
    # beams are not settled before the end
    assert told["bad"].get(0, []) == ([] if mode == "beams" else failed.token_ids)
    assert mode != "greedy" or streamer.ended == 1
    for name, result in results.items():
        assert told[name][0] == result.token_ids == [int(name)] * 20
        assert result.text == f" {name}" * 20 and result.error is None


def test_results_already_there_survive_a_step_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of() as engine:
        Asked(engine, [TEXT] * 3)
        engine.step()
        engine.cancel("0")
        engine.cancel("1")
        with monkeypatch.context() as patch, pytest.raises(OnPurpose):
            patch.setattr(engine._core.loop, "step", lambda *_: Countdown(1, OnPurpose)())
            engine.step()
        assert [o.request_id for o in engine.step()] == ["0", "1", "2"]


def test_a_reader_whose_request_is_gone_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    countdown, step = Countdown(60, OnPurpose), PagedEngine.step

    def counted(self: PagedEngine) -> Any:
        countdown()
        return step(self)

    monkeypatch.setattr(PagedEngine, "step", counted)
    with engine_of() as engine:
        for other in (None, "mine"):  # by then another request may use the id
            stream = engine.stream([TEXT], LONG, request_id="mine")
            next(stream)
            engine._core.remove(engine._core.requests["mine"])
            if other is not None:
                engine.add_request(TEXT, GREEDY, request_id=other)
            with pytest.raises(RuntimeError, match=r"'mine'. are gone without a result"):
                list(stream)
        assert list(engine._core.requests) == ["mine"], "the other's request was cancelled"


def test_an_interrupted_step_says_nothing_of_the_next_request_of_that_id() -> None:
    class Interrupts(Recorder):
        def put(self, value: torch.Tensor) -> None:
            if value.dim() == 1:
                raise KeyboardInterrupt

    with engine_of() as engine:
        engine.add_request(TEXT, GREEDY, request_id="0", streamer=Interrupts())
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.cancel("0")
        asked = Asked(engine, [[8, 9, 10]])
        first, *outputs = engine.step() + steps(engine)
        asked.check(results_of(outputs))
        assert_drained(engine)
    assert (first.result.prompt_ids, first.result.finish_reason) == (TEXT, "cancelled")


def test_an_asynchronous_reader_that_is_cancelled_in_the_middle_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running, go_on, errors = threading.Event(), threading.Event(), []

    async def read(engine: PagedEngine) -> None:
        async for _ in engine.astream([TEXT], LONG):
            pass

    async def main(engine: PagedEngine) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *error: errors.append(error))
        task = asyncio.ensure_future(read(engine))
        await asyncio.to_thread(running.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine._core.requests, "the step was meant to be in progress"
        go_on.set()

    with engine_of() as engine:
        step = engine._core.get_loop().step

        def slow(window: Any) -> Any:
            running.set()
            assert go_on.wait(20)
            return step(window)

        with monkeypatch.context() as patch:
            patch.setattr(engine._core.loop, "step", slow)
            asyncio.run(main(engine))  # ends with the worker threads
        assert_drained(engine)
        assert not errors
        assert engine.generate([TEXT], GREEDY)[0].error is None


# ---------------------------------------------------------------------------- rows that end first


@pytest.mark.parametrize("ends", ["criteria", "eos"])
def test_what_is_told_of_a_row_ends_where_the_row_does(ends: str) -> None:
    """transformers does not treat a criterion's end as EOS, so the row goes on while others do. The
    caller's processor may read these rows, so they stay, as padding, until the last one ends."""
    texts = [[50, 77, 51], [50, 51, 52, 77], [50, 51, 52, 53, 54, 77]]
    config = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 9}
    own = force(*texts)
    if ends == "eos":
        config["eos_token_id"] = 77
    else:
        own["stopping_criteria"] = [lambda ids, scores, **more: ids[:, -1] == 77]
    with engine_of(tokenizer=Spelled([77])) as engine:
        outputs = list(engine.stream([TEXT], config, **own))
        assert ends == "criteria" or engine.stats().num_generated_tokens == 2 + 4 + 6
    (told,), result = told_by(outputs).values(), outputs[-1].result
    assert [s.finish_reason for s in result.sequences] == [ends] * 3
    rows = [[50, 77], *texts[1:]]
    assert [s.token_ids for s in result.sequences] == [told[row] for row in range(3)] == rows
    assert "".join(output.text or "" for output in outputs) == result.text == f" 50{HALF}"


# ------------------------------------------------------------------------ cancelled within a step


@pytest.mark.parametrize("how", ["cancel", "free", "finalizer"])
def test_what_is_cancelled_in_a_forward_changes_no_other_request(how: str) -> None:
    with engine_of() as engine:
        asked, calls = Asked(engine), []
        streams = [engine.stream([TEXT], LONG, request_id="gone")]
        next(streams[0])
        for name, text in zip("12", prompts(9, 14)):
            asked.add(name, text)
        engine.step()
        # the last: an abandoned reader, finalized by the garbage collector
        acts = {"cancel": lambda: engine.cancel("gone"), "free": engine.free}
        act = acts.get(how, streams.clear)

        def within(*inputs: Any) -> None:
            calls.append(inputs)
            if len(calls) == 3:
                act()

        hook = engine.model.model.layers[0].register_forward_hook(within)
        try:
            results = run_all(engine)
        finally:
            hook.remove()
        assert_drained(engine)
        if how == "free":
            expected = engine.generate(prompts(9, 14), GREEDY)
            for result, whole in zip(map(results.get, "12"), expected):
                assert result.token_ids == whole.token_ids[: len(result.token_ids)]
        else:
            asked.check(results)
        for result in [list(stream)[-1].result for stream in streams]:
            assert result.finish_reason == "cancelled"
            assert len(result.token_ids) in (4, 5)


def test_a_stream_that_is_collected_under_the_models_lock_waits_for_no_step() -> None:
    """The collector runs in any thread, here in one for whose lock the step of another waits. A
    stream is left to it as by an exception that is stored with its traceback."""
    engine = PagedEngine(models.build("llama"), {"block_size": 8})
    core, lock, is_held = engine._core, step_lock(engine.model), threading.Event()
    other = Asked(engine)

    def leave_in_cycle() -> None:
        session = types.SimpleNamespace(stream=engine.stream([TEXT], LONG, request_id="gone"))
        session.itself = session
        next(session.stream)

    def collect() -> None:
        with lock:
            is_held.set()
            is_free = True
            while is_free:
                with attempt(core.inner_lock) as is_free:
                    time.sleep(0.001)
            gc.collect()

    def step() -> None:
        assert is_held.wait(30)
        engine.step()
        assert list(core.requests) == ["other"], "the step ends the request"

    gc.disable()  # it is to run in that thread
    try:
        leave_in_cycle()
        other.add("other", TEXT)
        in_threads(collect, step)
    finally:
        gc.enable()
    other.check()


@pytest.mark.parametrize("how", ["step", "stats", "add_request", "check_integrity"])
def test_a_stream_that_is_closed_under_the_models_lock_ends_in_the_next_call(how: str) -> None:
    with engine_of() as engine:
        stream = engine.stream([TEXT], LONG, request_id="gone")
        next(stream)
        with step_lock(engine.model):
            stream.close()
        assert list(engine._core.requests) == ["gone"]
        if how == "add_request":
            assert engine.add_request(TEXT, GREEDY, request_id="gone") == "gone"
            assert run_all(engine)["gone"].finish_reason == "length"
        else:
            getattr(engine, how)()
        assert not engine._core.requests and not engine._core.cancelled_requests
        assert engine.memory.num_used == 0
        assert_drained(engine)


# -------------------------------------------------------------------------------------- streamers


@pytest.mark.parametrize("at", [3, 6])  # in the middle, and at the last token
def test_a_request_that_its_own_streamer_cancels_is_told_of_all_its_tokens(at: int) -> None:
    class Leaves(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.values) == at + 1:
                engine.cancel("a")

    streamer = Leaves()
    with engine_of() as engine:
        engine.add_request(TEXT, {"max_new_tokens": 6}, request_id="a", streamer=streamer)
        outputs = steps(engine)
    result = outputs[-1].result
    assert {0: result.token_ids} == told_by(outputs)["a"]
    assert result.finish_reason == ("length" if at == 6 else "cancelled")
    assert len(result.token_ids) == at and streamer.ended == 1


@pytest.mark.parametrize("how", ["cancelled", "freed", "failed", "closed", "raises"])
def test_streamers_are_ended_however_the_request_ends(how: str) -> None:
    class Streamer(Recorder):
        def end(self) -> None:
            super().end()
            if how == "raises":
                raise OnPurpose

    countdown = Countdown(2 if how == "failed" else 0, OnPurpose)
    streamer, own = Streamer(), {"logits_processor": [FailingProcessor(countdown)]}
    with engine_of() as engine:
        stream = engine.stream([TEXT], LONG, streamer=streamer, request_id="a", **own)
        next(stream)
        if how == "closed":
            stream.close()
        else:
            if how == "freed":
                engine.free()
            elif how != "failed":
                engine.cancel("a")
            *_, output = stream
            assert output.result.finish_reason == ("error" if how == "failed" else "cancelled")
        assert_drained(engine)
    assert streamer.ended == 1 and len(streamer.values) >= 2


def test_a_request_that_is_refused_puts_nothing_to_its_streamer() -> None:
    streamer = Recorder()
    with engine_of(num_blocks=4) as engine:
        for options, arguments, message in [
            (LONG, {}, "blocks"),
            (GREEDY, {"priority": "high"}, "priority"),
            ({"num_beams": 2}, {}, "streamer"),
        ]:
            with pytest.raises((RuntimeError, ValueError), match=message):
                engine.add_request(TEXT, options, streamer=streamer, **arguments)
        assert streamer.values == [] and not engine.has_unfinished


# ---------------------------------------------------------------------------------- other reports


@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}])
def test_max_time_counts_from_the_first_step_of_the_request(
    mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]

    def tick(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        now[0] += 1  # a second per token
        return scores

    own = MaxTimeCriteria(max_time=5.5, initial_timestamp=now[0])
    clock = {"logits_processor": [tick]}
    with engine_of(max_num_seqs=1) as engine:
        monkeypatch.setattr(time, "time", lambda: now[0])
        engine.add_request(TEXT, GREEDY, request_id="before", **clock)
        engine.add_request(TEXT, {**GREEDY, **mode, "max_time": 5.5}, request_id="own", **clock)
        engine.add_request(TEXT, {**GREEDY, **mode}, request_id="kept", stopping_criteria=[own])
        results = run_all(engine)
    # a criterion of the caller's own keeps its time
    counts = {name: len(result.token_ids) for name, result in results.items()}
    assert counts == {"before": 20, "own": 6, "kept": 1}
    assert results["own"].finish_reason == "criteria"


@needs_fingerprints
def test_hit_tokens_stay_those_of_the_first_admission_after_a_recovery() -> None:
    ids = prompts(48)[0]
    with engine_of(max_num_batched_tokens=8) as engine:
        engine.generate([ids[:17]], GREEDY)
        request_id = engine.add_request(ids, GREEDY)
        engine.step()
        engine._core.loop.recover()  # as after an interrupt; drops the prefix cache
        assert run_all(engine)[request_id].num_prefix_hit_tokens == 16


def test_integrity_is_checked_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of() as engine:
        engine.generate([TEXT], GREEDY)
        free = []

        def try_lock(lock: Any) -> None:
            free.append(lock.acquire(blocking=False))
            if free[-1]:
                lock.release()

        def check() -> None:
            for lock in (engine._core.inner_lock, engine.memory.lock):
                in_threads(lambda lock=lock: try_lock(lock))

        for part in (engine.memory, engine._core.loop.blocks):
            monkeypatch.setattr(part, "check_integrity", check)
        engine.check_integrity()
    assert free == [False, True, False, False]  # the memory's own check takes the memory's lock


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "samples", "beams"])
@pytest.mark.parametrize("leave", [None, PagedEngine.cancel], ids=["ends", "cancelled"])
def test_an_ended_requests_tensors_go_at_once(
    leave: Callable[[PagedEngine, str], None] | None, mode: str
) -> None:
    with engine_of() as engine:
        gc.collect()
        gc.disable()
        try:
            engine.add_request(TEXT, MODES[mode], request_id="a")
            decoding = weakref.ref(engine._core.requests["a"].decoding)
            engine.step()
            if leave is not None:
                leave(engine, "a")
            assert sorted(run_all(engine)) == ["a"]
            assert decoding() is None, "what it holds waits for the next collection"
        finally:
            gc.enable()
