"""Whatever fails between a step and its reader, every request ends exactly once, and its reader is
told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, MaxTimeCriteria, StoppingCriteria

from hf_paged import PagedConfig, PagedEngine
from tests.batching.test_engine import Recorder, engine_of
from tests.support import models
from tests.support.engine_helpers import (
    MODES,
    assert_drained,
    assert_same_as_lone,
    lone_run,
    prompts,
    run_all,
)
from tests.test_faults import Countdown, FailingProcessor, OnPurpose

GREEDY = MODES["greedy"]
LONG = {"do_sample": False, "max_new_tokens": 400}


class Force(LogitsProcessor):
    """Leaves only one token to choose."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token] = 0
        return forced


class Fussy:
    """A tokenizer that cannot decode token 77, streamed or at the end of a text of `length`
    tokens."""

    def __init__(
        self, length: int | None = None, error: type[BaseException] | None = OnPurpose
    ) -> None:
        self.length, self.error = length, error

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        if self.error is not None and 77 in token_ids and self.length in (None, len(token_ids)):
            raise self.error("no such token")
        return "".join(f" {token}" for token in token_ids)


# -------------------------------------------------------------------------------- text that fails


@pytest.mark.parametrize("mode", ["greedy", "samples", "beams"])
@pytest.mark.parametrize("when", ["first piece", "end"])
def test_a_tokenizer_that_raises_fails_that_request_alone(mode: str, when: str) -> None:
    texts = prompts(9, 12, 7)
    count = MODES[mode]["max_new_tokens"]
    tokenizer = Fussy(None if when == "first piece" else count)
    with PagedEngine(models.get("llama"), {"block_size": 8}, tokenizer=tokenizer) as engine:
        engine.add_request(texts[0], GREEDY, request_id="first", logits_processor=[Force(50)])
        engine.add_request(
            texts[1], MODES[mode], request_id="bad", logits_processor=[Force(77)], seed=1
        )
        engine.add_request(texts[2], GREEDY, request_id="last", logits_processor=[Force(51)])
        told: dict[str, list[int]] = {}
        results: dict[str, Any] = {}
        while engine.has_unfinished:
            for output in engine.step():
                if 0 in output.new_tokens:
                    told.setdefault(output.request_id, []).append(output.new_tokens[0])
                if output.result is not None:
                    results[output.request_id] = output.result
        assert_drained(engine)
    bad = results.pop("bad")
    assert isinstance(bad.error, OnPurpose) and bad.text is None
    streamed = when == "first piece" and mode != "beams"
    assert len(bad.token_ids) == (1 if streamed else count) and set(bad.token_ids) == {77}
    assert bad.finish_reason == ("error" if streamed else "length")
    assert mode == "beams" or told["bad"] == bad.token_ids
    for name, token in (("first", 50), ("last", 51)):
        assert told[name] == results[name].token_ids == [token] * 20
        assert results[name].text == f" {token}" * 20 and results[name].error is None


@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupted_report_is_made_in_the_next_step(count: int) -> None:
    """No output of the step is lost: neither those already reported nor the pending ones."""
    texts = prompts(9, 12, 7)
    tokenizer = Fussy(error=KeyboardInterrupt)
    with PagedEngine(models.get("llama"), {"block_size": 8}, tokenizer=tokenizer) as engine:
        for i, token in enumerate((50, 77, 51)):
            options = {**GREEDY, "max_new_tokens": count}
            engine.add_request(
                texts[i], options, request_id=str(i), logits_processor=[Force(token)]
            )
        engine.add_request(texts[0], GREEDY, request_id="cancelled")
        engine.cancel("cancelled")
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        tokenizer.error = None
        outputs = [output for _ in range(10) for output in engine.step()]
        assert_drained(engine)
    tokens = {
        name: [o.new_tokens[0] for o in outputs if o.request_id == name and o.new_tokens]
        for name in "012"
    }
    assert tokens == {"0": [50] * count, "1": [77] * count, "2": [51] * count}
    for name, token in (("0", 50), ("1", 77)):
        assert [o.text for o in outputs if o.request_id == name] == [f" {token}"] * count
    ends = sorted(o.request_id for o in outputs if o.finished)
    assert ends == ["0", "1", "2", "cancelled"]


def test_results_already_there_survive_a_step_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any) -> None:
        raise OnPurpose

    with engine_of() as engine:
        for name in "abc":
            engine.add_request([5, 6, 7], GREEDY, request_id=name)
        engine.step()
        engine.cancel("a")
        engine.cancel("b")
        with monkeypatch.context() as patch:
            patch.setattr(engine._core.loop, "step", raises)
            with pytest.raises(OnPurpose):
                engine.step()
        assert [o.request_id for o in engine.step()] == ["a", "b", "c"]


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
            stream = engine.stream([[5, 6, 7]], LONG, request_id="mine")
            next(stream)
            engine._core.remove(engine._core.requests["mine"])
            if other is not None:
                engine.add_request([5, 6], GREEDY, request_id=other)
            with pytest.raises(RuntimeError, match=r"'mine'. are gone without a result"):
                for _ in stream:
                    pass
        assert list(engine._core.requests) == ["mine"], "the other's request was cancelled"


def test_an_interrupted_step_says_nothing_of_the_next_request_of_that_id() -> None:
    class Interrupts(Recorder):
        def put(self, value: torch.Tensor) -> None:
            if value.dim() == 1:
                raise KeyboardInterrupt

    with engine_of() as engine:
        engine.add_request([5, 6, 7], GREEDY, request_id="a", streamer=Interrupts())
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.cancel("a")
        engine.add_request([8, 9, 10], GREEDY, request_id="a")
        outputs = [output for _ in range(30) for output in engine.step()]
        assert_drained(engine)
    cancelled, result = [o.result for o in outputs if o.result is not None]
    assert (cancelled.prompt_ids, cancelled.finish_reason) == ([5, 6, 7], "cancelled")
    assert_same_as_lone(
        lone_run(models.get("llama"), [8, 9, 10], GREEDY), result, GREEDY, "same id"
    )


# --------------------------------------------------------------------------- asynchronous readers


@pytest.mark.slow_cases("timeout")
@pytest.mark.parametrize("how", ["timeout", "cancelled"])
def test_a_reader_that_is_cancelled_in_the_middle_of_a_step(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, go_on = threading.Event(), threading.Event()
    errors: list[Any] = []

    async def read(engine: PagedEngine) -> None:
        async for _ in engine.astream([[5, 6, 7]], LONG):
            pass

    async def main(engine: PagedEngine) -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: errors.append(context)
        )
        if how == "timeout":
            with pytest.raises((TimeoutError, asyncio.TimeoutError)):
                await asyncio.wait_for(read(engine), 0.3)
        else:
            task = asyncio.ensure_future(read(engine))
            await asyncio.to_thread(running.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert running.is_set() and engine._core.requests, "the step was meant to be in progress"
        go_on.set()

    with engine_of() as engine:
        engine.generate([[5, 6]], GREEDY)
        step = engine._core.loop.step

        def slow(window: Any) -> Any:
            running.set()
            assert go_on.wait(20)
            return step(window)

        with monkeypatch.context() as patch:
            patch.setattr(engine._core.loop, "step", slow)
            asyncio.run(main(engine))  # ends with the worker threads
        assert_drained(engine)
        assert not errors
        assert engine.generate([[5, 6]], GREEDY)[0].error is None


# ---------------------------------------------------------------------------- rows that end first


class EndsWith(StoppingCriteria):
    """Rows end at this token; transformers does not treat it as EOS, so the row goes on while
    others do."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


class ForceRows(LogitsProcessor):
    """Forces row `i` to generate the tokens of `texts[i]`."""

    def __init__(self, length: int, texts: list[list[int]]) -> None:
        self.length, self.texts = length, texts

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        for row, text in enumerate(self.texts):
            forced[row, text[min(input_ids.shape[1] - self.length, len(text) - 1)]] = 0
        return forced


class Halves:
    """A tokenizer whose token 77 is half of a character."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            "\N{REPLACEMENT CHARACTER}" if token == 77 else f" {token}" for token in token_ids
        )


@pytest.mark.parametrize("ends", ["criteria", "eos"])
def test_what_is_told_of_a_row_ends_where_the_row_does(ends: str) -> None:
    texts, prompt = [[50, 77, 51], [50, 51, 52, 77], [50, 51, 52, 53, 54, 77]], prompts(9)[0]
    how: dict[str, Any] = {"eos_token_id": 77} if ends == "eos" else {}
    config = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 9, **how}
    own: dict[str, Any] = {"logits_processor": [ForceRows(len(prompt), texts)]}
    if ends == "criteria":
        own["stopping_criteria"] = [EndsWith(77)]
    told: dict[int, list[int]] = {0: [], 1: [], 2: []}
    with PagedEngine(models.get("llama"), {"block_size": 8}, tokenizer=Halves()) as engine:
        outputs = list(engine.stream([prompt], config, **own))
    for row, token in (item for output in outputs for item in output.new_tokens.items()):
        told[row].append(token)
    result = outputs[-1].result
    assert result is not None and [s.finish_reason for s in result.sequences] == [ends] * 3
    assert [s.token_ids for s in result.sequences] == list(told.values()) == [[50, 77], *texts[1:]]
    assert (
        "".join(output.text or "" for output in outputs)
        == result.text
        == " 50\N{REPLACEMENT CHARACTER}"
    )


# ------------------------------------------------------------------------ cancelled within a step


@pytest.mark.parametrize("how", ["cancel", "free", "finalizer"])
def test_what_is_cancelled_in_a_forward_changes_no_other_request(how: str) -> None:
    model, texts = models.get("llama"), prompts(5, 9, 14)
    with PagedEngine(model, {"block_size": 8}) as engine:
        streams = [engine.stream([texts[0]], LONG)]
        if how == "finalizer":  # an abandoned reader, finalized by the garbage collector
            next(streams[0])
        else:
            engine.add_request(texts[0], GREEDY, request_id="0")
        for i in (1, 2):
            engine.add_request(texts[i], GREEDY, request_id=str(i))
        engine.step()
        calls: list[Any] = []

        def within(*inputs: Any) -> None:
            calls.append(inputs)
            if len(calls) != 3:
                return
            if how == "cancel":
                engine.cancel("0")
            elif how == "free":
                engine.free()
            else:
                streams.clear()

        hook = model.model.layers[0].register_forward_hook(within)
        try:
            results = run_all(engine)
        finally:
            hook.remove()
        assert_drained(engine)
        if how == "finalizer":
            assert sorted(results) == ["1", "2"]
        else:
            assert results["0"].finish_reason == "cancelled" and len(results["0"].token_ids) in (
                3,
                4,
            )
        for i in (1, 2):
            expected = lone_run(model, texts[i], GREEDY)[0]
            if how == "free":
                assert results[str(i)].token_ids == expected[: len(results[str(i)].token_ids)]
            else:
                assert results[str(i)].token_ids == expected


@pytest.mark.parametrize("at", [3, 6])  # in the middle, and at the last token
def test_a_request_that_its_own_streamer_cancels_is_told_of_all_its_tokens(at: int) -> None:
    class Leaves(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.values) == at + 1:
                engine.cancel("a")

    streamer, told = Leaves(), list[int]()
    with engine_of() as engine:
        engine.add_request([5, 6, 7], {"max_new_tokens": 6}, request_id="a", streamer=streamer)
        while engine.has_unfinished:
            outputs = engine.step()
            told += [token for output in outputs for token in output.new_tokens.values()]
        result = outputs[-1].result
    assert result is not None and result.token_ids == told and len(told) == at
    assert result.finish_reason == ("length" if at == 6 else "cancelled") and streamer.ended == 1


# -------------------------------------------------------------------------------------- streamers


@pytest.mark.parametrize("how", ["cancelled", "freed", "failed", "closed", "raises"])
def test_streamers_are_ended_however_the_request_ends(how: str) -> None:
    class Streamer(Recorder):
        def end(self) -> None:
            super().end()
            if how == "raises":
                raise OnPurpose

    streamer = Streamer()
    with engine_of() as engine:
        if how == "closed":
            stream = engine.stream([[5, 6, 7]], LONG, streamer=streamer)
            next(stream)
            stream.close()
        else:
            own = (
                {"logits_processor": [FailingProcessor(Countdown(2, OnPurpose))]}
                if how == "failed"
                else {}
            )
            engine.add_request([5, 6, 7], LONG, request_id="a", streamer=streamer, **own)
            engine.step()
            if how == "freed":
                engine.free()
            elif how != "failed":
                engine.cancel("a")
            assert run_all(engine)["a"].finish_reason == (
                "error" if how == "failed" else "cancelled"
            )
        assert_drained(engine)
    assert streamer.ended == 1 and len(streamer.values) >= 2


def test_a_streamer_is_ended_once_when_the_last_piece_of_text_cannot_be_decoded() -> None:
    streamer = Recorder()
    with PagedEngine(models.get("llama"), {"block_size": 8}, tokenizer=Fussy()) as engine:
        own = [ForceRows(3, [[50, 51, 77]])]
        (result,) = engine.generate(
            [[5, 6, 7]], {"max_new_tokens": 3}, streamer=streamer, logits_processor=own
        )
    assert isinstance(result.error, OnPurpose) and result.token_ids == [50, 51, 77]
    assert streamer.ended == 1


def test_a_request_that_is_refused_puts_nothing_to_its_streamer() -> None:
    streamer = Recorder()
    with engine_of(num_blocks=4) as engine:
        with pytest.raises(RuntimeError, match="blocks"):
            engine.add_request([5, 6, 7], LONG, streamer=streamer)
        with pytest.raises(ValueError, match="priority"):
            engine.add_request([5, 6, 7], GREEDY, streamer=streamer, priority="high")  # type: ignore[arg-type]
        assert streamer.values == [] and not engine.has_unfinished


# ---------------------------------------------------------------------------------- other reports


class Clock(LogitsProcessor):
    """The clock advances a second per token."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.now += 1
        return scores


@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}])
def test_max_time_counts_from_the_first_step_of_the_request(mode: dict[str, Any]) -> None:
    clock = Clock()
    own = MaxTimeCriteria(max_time=5.5, initial_timestamp=clock.now)
    with pytest.MonkeyPatch.context() as patch, engine_of(max_num_seqs=1) as engine:
        patch.setattr(time, "time", lambda: clock.now)
        options = {**GREEDY, "eos_token_id": None, **mode}
        engine.add_request(
            [5, 6, 7], {**options, "num_beams": 1}, request_id="before", logits_processor=[clock]
        )
        engine.add_request(
            [5, 6, 8], {**options, "max_time": 5.5}, request_id="limited", logits_processor=[clock]
        )
        engine.add_request([5, 6, 9], options, request_id="own", stopping_criteria=[own])
        results = run_all(engine)
    assert len(results["before"].token_ids) == 20
    assert len(results["limited"].token_ids) == 6 and results["limited"].finish_reason == "criteria"
    assert len(results["own"].token_ids) == 1, "a criterion of the caller's own keeps its time"


def test_hit_tokens_are_those_of_the_prompt_when_it_was_first_admitted() -> None:
    texts = prompts(20, 20, 20, 20)
    with engine_of(num_blocks=14, preemption="recompute") as engine:
        options = {"do_sample": False, "max_new_tokens": 40}
        results = engine.generate(texts, options)
        assert sum(result.num_preemptions for result in results) > 0, "no request was recomputed"
        assert [result.num_prefix_hit_tokens for result in results] == [0] * 4
        assert engine.stats().num_prefix_hit_tokens == 0


def test_integrity_is_checked_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of() as engine:
        engine.generate([[5, 6]], GREEDY)
        free: list[bool] = []

        def ask(lock: Any) -> None:
            free.append(lock.acquire(blocking=False))
            if free[-1]:
                lock.release()

        def check() -> None:
            for lock in (engine._core.inner_lock, engine.memory.lock):
                thread = threading.Thread(target=ask, args=(lock,))
                thread.start()
                thread.join()

        assert engine._core.loop is not None
        for part in (engine.memory, engine._core.loop.blocks):
            monkeypatch.setattr(part, "check_integrity", check)
        engine.check_integrity()
    assert free == [False] * 4


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "samples", "beams"])
@pytest.mark.parametrize("how", ["ends", "cancelled"])
def test_an_ended_requests_tensors_go_at_once(how: str, mode: str) -> None:
    with PagedEngine(models.get("llama"), PagedConfig(block_size=8)) as engine, no_collection():
        engine.add_request([5, 6, 7], MODES[mode], request_id="a")
        decoding = weakref.ref(engine._core.requests["a"].decoding)
        engine.step()
        if how == "cancelled":
            engine.cancel("a")
        assert sorted(run_all(engine)) == ["a"]
        assert decoding() is None, "what it holds waits for the next collection"
