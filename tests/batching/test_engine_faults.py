"""Bad input and engine failures end only the affected request; other requests and the model are
unaffected."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_paged
from hf_paged import EngineStalledError, OutOfBlocksError, PagedConfig, PagedEngine, RequestResult
from hf_paged.batching import engine_core
from hf_paged.batching.generation import RequestState
from hf_paged.batching.loop import StepLoop
from hf_paged.batching.progress import MAX_IDLE_STEPS
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.plan import StepPlan
from tests.model import test_positions as tables
from tests.support import models
from tests.support.checks import model_state
from tests.support.engine_helpers import (
    MODES,
    assert_drained,
    assert_same_as_lone,
    build_diff_llama,
    build_mamba,
    lone_run,
    prompts,
    run_all,
)
from tests.support.rooms import fix_prices
from tests.test_faults import (
    Countdown,
    FailingCriteria,
    FailingProcessor,
    FailingStreamer,
    OnPurpose,
    failing_allocation,
    first_norm,
    hooked,
    last_block,
    replaced_forward,
)

GREEDY = MODES["greedy"]
OTHERS = {
    name: MODES[name] for name in ("greedy", "greedy_eos", "sample_warped", "samples", "beams_eos")
}
CONFIG = PagedConfig(block_size=8, max_num_batched_tokens=24)


class Beside:
    """Requests of several modes that run beside a faulty one, with their expected results."""

    def __init__(self, engine: PagedEngine) -> None:
        self.model = engine.model
        self.texts = dict(zip(OTHERS, prompts(4, 19, 9, 22, 13, seed=3)))
        for seed, (name, prompt) in enumerate(self.texts.items()):
            engine.add_request(prompt, OTHERS[name], request_id=name, seed=seed)

    def check(self, results: dict[str, RequestResult], what: str) -> None:
        for seed, (name, prompt) in enumerate(self.texts.items()):
            expected = lone_run(self.model, prompt, OTHERS[name], seed)
            assert_same_as_lone(expected, results[name], OTHERS[name], f"{what}: {name}")


# ---------------------------------------------------------------------------------- refused input

LONG = list(range(4, 104))
# case -> prompt, options, other arguments of add_request, the error, a part of its message
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], str]] = {
    "never fits": (
        LONG,
        GREEDY,
        {},
        OutOfBlocksError,
        r"15 blocks of 8 tokens, at most 12.*num_blocks",
    ),
    "never fits in the end": (
        LONG[:20],
        {"max_new_tokens": 90},
        {},
        OutOfBlocksError,
        "at most 12",
    ),
    "too many samples": (
        LONG[:20],
        {"do_sample": True, "num_return_sequences": 20, "max_new_tokens": 5},
        {},
        OutOfBlocksError,
        "at most 12",
    ),
    "empty": ([], GREEDY, {}, ValueError, "the prompt is empty"),
    "empty tensor": (
        torch.empty(0, dtype=torch.long),
        GREEDY,
        {},
        ValueError,
        "the prompt is empty",
    ),
    "id too high": (
        [5, models.VOCAB_SIZE],
        GREEDY,
        {},
        ValueError,
        "128 is outside the vocabulary.*0 to 127",
    ),
    "id negative": ([5, -1], GREEDY, {}, ValueError, "-1 is outside the vocabulary"),
    "fractions": ([5.5, 6.0], GREEDY, {}, ValueError, "whole numbers"),
    "truth values": ([True, False], GREEDY, {}, ValueError, "whole numbers"),
    "nothing": (None, GREEDY, {}, ValueError, "whole numbers"),
    "a number": (5, GREEDY, {}, ValueError, "whole numbers"),
    "a batch in a list": (
        [[5, 6], [7, 8]],
        GREEDY,
        {},
        ValueError,
        "2 prompts, and a request has one",
    ),
    "a batch in a tensor": (
        torch.ones(2, 3, dtype=torch.long),
        GREEDY,
        {},
        ValueError,
        r"shape \(2, 3\)",
    ),
    "float tensor": (torch.ones(3), GREEDY, {}, ValueError, "float32"),
    "text without a tokenizer": ("hello", GREEDY, {}, ValueError, "tokenizer"),
    "unknown adapter": (
        [5, 6],
        GREEDY,
        {"adapter": "nobody"},
        ValueError,
        "'nobody' does not exist: the model has none",
    ),
    "duplicate id": ([5, 6], GREEDY, {"request_id": "greedy"}, ValueError, "'greedy' is in use"),
    "unknown option": ([5, 6], {"max_new_token": 3}, {}, ValueError, "max_new_token"),
    "config of another type": ([5, 6], "greedy", {}, ValueError, "'greedy'"),
    "several greedy sequences": (
        [5, 6],
        {"num_return_sequences": 2, "do_sample": False},
        {},
        ValueError,
        "num_return",
    ),
    "more sequences than beams": (
        [5],
        {"num_beams": 2, "num_return_sequences": 3},
        {},
        ValueError,
        "num_return_seq",
    ),
    "temperature of zero": (
        [5],
        {"do_sample": True, "temperature": 0.0},
        {},
        ValueError,
        "temperature",
    ),
    "no new tokens": ([5], {"max_new_tokens": 0}, {}, ValueError, "max_new_tokens"),
    "shorter than the prompt": ([5, 6, 7], {"max_length": 2}, {}, ValueError, "max_length"),
    "stop strings without a tokenizer": ([5], {"stop_strings": ["a"]}, {}, ValueError, "tokenizer"),
    "heads that there are none of": ([5], {"use_mtp": True}, {}, ValueError, "Mtp|num_mtp_layers"),
    "contrastive": ([5], {"penalty_alpha": 0.6, "top_k": 4}, {}, ValueError, "contrastive"),
    "attentions": ([5], {"output_attentions": True}, {}, ValueError, "output_attentions"),
    "streamer with beams": (
        [5],
        {"num_beams": 2},
        {"streamer": FailingStreamer(Countdown(10**6, OnPurpose))},
        ValueError,
        "streamer",
    ),
    "failing at the prompt": (
        [5],
        GREEDY,
        {"streamer": FailingStreamer(Countdown(1, OnPurpose))},
        OnPurpose,
        "on purpose",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_with_a_reason(case: str) -> None:
    prompt, options, arguments, error, message = REFUSED[case]
    model = models.get("llama")
    before, rng = model_state(model), torch.get_rng_state()
    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=12)) as engine:
        engine.add_request([5, 6, 7], GREEDY, request_id="greedy")
        engine.step()
        with pytest.raises(error, match=message):
            engine.add_request(prompt, options, **arguments)
        engine.check_integrity()
        assert engine.stats().num_waiting == 0
        result = run_all(engine)["greedy"]
        assert_drained(engine)
    assert_same_as_lone(lone_run(model, [5, 6, 7], GREEDY), result, GREEDY, case)
    assert model_state(model) == before
    assert torch.equal(torch.get_rng_state(), rng), "greedy requests drew random numbers"


@pytest.mark.slow
def test_generate_reports_what_is_refused_in_its_place() -> None:
    cases = {name: case for name, case in REFUSED.items() if not case[2]}
    engine = PagedEngine(models.get("llama"), PagedConfig(block_size=8, num_blocks=12))
    items: list[Any] = []
    options: list[Any] = []
    for prompt, config, *_ in cases.values():
        items += [prompts(9)[0], prompt]
        options += [GREEDY, config]
    results = engine.generate(items, options)
    streamed = [o.result for o in engine.stream(items, options) if o.finished]
    assert_drained(engine)
    expected = lone_run(models.get("llama"), prompts(9)[0], GREEDY)
    assert len(results) == len(streamed) == 2 * len(cases)
    assert sum(result.error is None for result in streamed if result) == len(cases)
    for i, (name, (_, _, _, error, message)) in enumerate(cases.items()):
        assert_same_as_lone(expected, results[2 * i], GREEDY, f"beside {name}")
        refused = results[2 * i + 1]
        assert isinstance(refused.error, error), name
        with pytest.raises(error, match=message):
            raise refused.error
        assert (
            refused.finish_reason == "error" and refused.token_ids == [] and refused.sequences == []
        )


def test_whole_numbers_of_other_types_are_taken() -> None:
    ids = prompts(9)[0]
    with PagedEngine(models.get("llama"), CONFIG) as engine:
        forms = [
            ids,
            tuple(ids),
            np.array(ids),
            torch.tensor(ids, dtype=torch.int32),
            [np.int32(i) for i in ids],
        ]
        results = engine.generate(forms, GREEDY)
        whole = GenerationConfig(**MODES["penalties"])
        engine.add_request(ids, whole.to_dict(), request_id="a")
        engine.add_request(ids, whole, request_id="b")
        twice = run_all(engine)
    for result in results:
        assert result.prompt_ids == ids
        assert_same_as_lone(lone_run(models.get("llama"), ids, GREEDY), result, GREEDY, "forms")
    assert twice["a"].token_ids == twice["b"].token_ids


def test_a_config_as_a_dict_is_that_config() -> None:
    """Options that the config leaves at None take the model's value; None in another dict means
    None."""
    model = models.build("llama")
    ids = prompts(9)[0]
    with PagedEngine(model, CONFIG) as engine:
        (plain,) = engine.generate([ids], {"max_new_tokens": 12, "do_sample": False})
        model.generation_config.eos_token_id = plain.token_ids[4]
        saved = GenerationConfig(max_new_tokens=12, do_sample=False).to_dict()
        (ended,) = engine.generate([ids], saved)
        (whole,) = engine.generate(
            [ids], {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        )
    assert (
        saved["eos_token_id"] is None and ended.finish_reason == "eos" and len(ended.token_ids) <= 5
    )
    assert whole.token_ids == plain.token_ids


def test_unknown_ids_cannot_be_cancelled() -> None:
    with PagedEngine(models.get("llama"), CONFIG) as engine:
        for name in ("nobody", ""):
            with pytest.raises(ValueError, match=f"no unfinished request has the id '{name}'"):
                engine.cancel(name)
        engine.add_request([5, 6], GREEDY, request_id="done")
        run_all(engine)
        with pytest.raises(ValueError, match="'done'"):
            engine.cancel("done")


def test_models_that_the_engine_cannot_serve() -> None:
    with pytest.raises(ValueError, match="block_size"):
        PagedEngine(models.get("llama"), {"block_size": 7})
    with pytest.raises(ValueError, match="`config` has no option `blocks`"):
        PagedEngine(models.get("llama"), {"blocks": 7})


# -------------------------------------------------------------------- a request's own code raises

Fault = Callable[[Countdown], dict[str, Any]]
FAULTS: dict[str, Fault] = {
    "processor": lambda countdown: {"logits_processor": [FailingProcessor(countdown)]},
    "criteria": lambda countdown: {"stopping_criteria": [FailingCriteria(countdown)]},
    "streamer": lambda countdown: {"streamer": FailingStreamer(countdown)},
}


@pytest.mark.slow_cases(
    "2-criteria-greedy",
    "6-criteria-beams",
    "6-criteria-sample",
    "6-criteria-samples",
    "6-processor-samples",
    "6-streamer-greedy",
)
@pytest.mark.parametrize("mode", ["greedy", "sample", "samples", "beams"])
@pytest.mark.parametrize("place", FAULTS)
@pytest.mark.parametrize("call", [2, 6])
def test_a_requests_own_code_fails_that_request_alone(place: str, mode: str, call: int) -> None:
    if place == "streamer" and mode == "beams":
        pytest.skip("beams take no streamer")
    model, prompt = models.get("llama"), prompts(17, seed=8)[0]
    before = model_state(model)
    with PagedEngine(model, CONFIG) as engine:
        engine.add_request(prompt, GREEDY, request_id="first")
        own = FAULTS[place](Countdown(call, OnPurpose))
        engine.add_request(prompt, MODES[mode], request_id="faulty", seed=9, **own)
        beside = Beside(engine)
        results = run_all(engine)
        assert_drained(engine)
        failed = results.pop("faulty")
        assert isinstance(failed.error, OnPurpose)
        assert "error" in {sequence.finish_reason for sequence in failed.sequences}
        assert len(results) == 1 + len(OTHERS)
        beside.check(results, f"{place} in {mode}")
        assert_same_as_lone(
            lone_run(model, prompt, GREEDY), results["first"], GREEDY, "same prompt"
        )
        if mode == "greedy":  # its tokens so far are correct
            expected = lone_run(model, prompt, GREEDY)[0]
            assert failed.token_ids and failed.token_ids == expected[: len(failed.token_ids)]
        again = engine.generate([prompt], MODES["beams"])[0]
        assert_same_as_lone(
            lone_run(model, prompt, MODES["beams"]), again, MODES["beams"], "afterwards"
        )
    assert model_state(model) == before


class Returns(LogitsProcessor):
    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        self.change = change

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return self.change(scores)


@pytest.mark.parametrize(
    "change",
    [
        lambda scores: scores * torch.nan,
        lambda scores: scores - torch.inf,
        lambda scores: scores[:, :0],
        lambda scores: None,
    ],
    ids=["nan", "all forbidden", "no vocabulary", "nothing"],
)
def test_scores_that_nothing_can_be_drawn_from_fail_that_request_alone(change: Any) -> None:
    with PagedEngine(models.get("llama"), CONFIG) as engine:
        for mode in ("sample", "samples"):
            engine.add_request(
                [5, 6, 7], MODES[mode], request_id=f"bad {mode}", logits_processor=[Returns(change)]
            )
        beside = Beside(engine)
        results = run_all(engine)
        assert_drained(engine)
    for mode in ("sample", "samples"):
        assert isinstance(results[f"bad {mode}"].error, Exception), mode
    beside.check(results, "bad scores")


def test_a_processor_that_writes_to_what_it_is_given_changes_no_other_request() -> None:
    """Its tensors are copies: of the other rows' logits, and of the request's ids."""

    class Spoil(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores.fill_(-1e9)
            scores[:, 9] = 0
            return scores

    with PagedEngine(models.get("llama"), CONFIG) as engine:
        for mode in ("greedy", "samples", "beams"):
            engine.add_request(
                [5, 6, 7],
                MODES[mode],
                request_id=f"spoilt {mode}",
                logits_processor=[Spoil()],
                seed=1,
            )
        beside = Beside(engine)
        results = run_all(engine)
    assert set(results["spoilt greedy"].token_ids) == {9}
    assert set(results["spoilt samples"].token_ids) == {9}
    beside.check(results, "spoilt")


@pytest.mark.parametrize(
    ("code", "mode"),
    [
        ("processor", "greedy"),
        ("criterion", "greedy"),
        ("processor", "samples"),
        ("criterion", "samples"),
        ("processor after drafts", "greedy"),
        ("criterion after drafts", "greedy"),
    ],
)
def test_the_tokens_of_a_result_with_an_error_were_streamed(
    code: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A criterion runs when its step's token is chosen; drafts are accepted one after another,
    until one's code raises."""
    fix_prices(monkeypatch.setattr)
    has_drafts = code.endswith("drafts")
    # the first draft verifies the eighth token
    countdown = Countdown(11 if has_drafts else 4, OnPurpose)
    options: dict[str, Any] = {"logits_processor": [FailingProcessor(countdown)]}
    if code.startswith("criterion"):
        options = {"stopping_criteria": [FailingCriteria(countdown)]}
    config = replace(CONFIG, speculation="ngram" if has_drafts else None)
    with PagedEngine(models.get("llama"), config) as engine:
        for request_id in ("first", "faulty"):  # the first one's tokens are the drafts
            more = options if request_id == "faulty" else {}
            engine.add_request(prompts(12)[0], MODES[mode], request_id=request_id, seed=1, **more)
            streamed: dict[int, list[int]] = {}
            while engine.has_unfinished:
                outputs = engine.step()
                for output in outputs:
                    for row, token in output.new_tokens.items():
                        streamed.setdefault(row, []).append(token)
        assert (len(outputs) > 1) == has_drafts
        assert output.result is not None
        assert isinstance(output.result.error, OnPurpose)
        tokens = {row: sequence.token_ids for row, sequence in enumerate(output.result.sequences)}
        assert streamed == tokens and len(tokens[0]) >= 2


def test_an_error_with_the_first_token_leaves_its_time_in_the_result() -> None:
    with PagedEngine(models.get("llama"), CONFIG) as engine:
        (result,) = engine.generate(
            [[5, 6]], GREEDY, stopping_criteria=[FailingCriteria(Countdown(1, OnPurpose))]
        )
    assert len(result.token_ids) == 1 and result.timings.first_token is not None


class HalfCharacters:
    """A tokenizer whose tokens are incomplete characters; `countdown` may raise."""

    def __init__(self, countdown: Countdown) -> None:
        self.countdown = countdown

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        self.countdown()
        return "\N{REPLACEMENT CHARACTER}" * len(token_ids)


class CountingStreamer(BaseStreamer):
    num_ends = 0

    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        self.num_ends += 1


@pytest.mark.parametrize(
    "leave", [lambda engine: engine.cancel("done"), lambda engine: engine.free()]
)
def test_a_request_that_ended_in_an_interrupted_step_ends_once(
    leave: Callable[[PagedEngine], None],
) -> None:
    """Its tokens are chosen, and not output: a cancellation outputs the result of a request that
    ended well."""
    streamer, never = CountingStreamer(), Countdown(0, OnPurpose)
    interrupt = FailingProcessor(Countdown(4, KeyboardInterrupt))
    with PagedEngine(models.get("llama"), CONFIG, tokenizer=HalfCharacters(never)) as engine:
        engine.add_request(
            [5, 6], {**GREEDY, "max_new_tokens": 4}, request_id="done", streamer=streamer
        )
        engine.add_request([5, 7], GREEDY, logits_processor=[interrupt])
        outputs = []
        with pytest.raises(KeyboardInterrupt):
            while True:
                outputs += engine.step()
        leave(engine)
        outputs += engine.step()
    outputs = [output for output in outputs if output.request_id == "done"]
    result = outputs[-1].result
    assert result is not None and result.finish_reason == "length" and streamer.num_ends == 1
    assert [token for output in outputs for token in output.new_tokens.values()] == result.token_ids
    assert "".join(output.text or "" for output in outputs) == result.text != ""


def test_an_interrupt_of_the_tokenizer_at_any_call_loses_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next step makes an interrupted report, drafts included; interrupted while its result is
    made, a request ends with an error. The outputs have exactly the tokens of the result."""
    fix_prices(monkeypatch.setattr)
    countdown = Countdown(0, KeyboardInterrupt)
    config = replace(CONFIG, speculation="ngram")
    num_errors = 0
    with PagedEngine(models.get("llama"), config, tokenizer=HalfCharacters(countdown)) as engine:
        engine.generate(prompts(12), GREEDY)  # its tokens are the drafts
        for call in itertools.count(1):
            engine.add_request(prompts(12)[0], GREEDY)
            countdown.left, outputs = call, []
            while engine.has_unfinished:
                with contextlib.suppress(KeyboardInterrupt):
                    outputs += engine.step()
            outputs += engine.step()
            assert_drained(engine)
            (result,) = [output.result for output in outputs if output.result is not None]
            assert outputs[-1].result is result
            tokens = [token for output in outputs for token in output.new_tokens.values()]
            assert tokens == result.token_ids
            if result.error is None:
                assert "".join(output.text or "" for output in outputs) == result.text
            else:
                assert "interrupted by KeyboardInterrupt" in str(result.error)
                num_errors += 1
            if countdown.left > 0:
                break
    assert call > 2 * 10 and num_errors == 1 and result.num_accepted_tokens > 0


@pytest.mark.parametrize("leave", [lambda engine: engine.cancel("a"), lambda engine: engine.free()])
def test_an_interrupt_of_the_tokenizer_keeps_no_request_from_its_end(
    leave: Callable[[PagedEngine], None],
) -> None:
    countdown = Countdown(0, KeyboardInterrupt)
    with PagedEngine(models.get("llama"), CONFIG, tokenizer=HalfCharacters(countdown)) as engine:
        engine.add_request([5, 6], GREEDY, request_id="a")
        outputs = [*engine.step(), *engine.step()]
        countdown.left = 1
        with pytest.raises(KeyboardInterrupt):
            leave(engine)
        outputs += engine.step()
        assert_drained(engine)
    assert outputs[-1].result is not None and len(outputs[-1].result.token_ids) == 2


@pytest.mark.parametrize("times", [1, 2])
def test_a_result_is_made_again_after_an_error(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may be short for a moment only; if it still is, the result holds the error."""
    countdown = [MemoryError] * times
    make = RequestState._sequence_results

    def failing(self: RequestState, reason: str | None) -> Any:
        if countdown:
            raise countdown.pop()
        return make(self, reason)

    monkeypatch.setattr(RequestState, "_sequence_results", failing)
    model = models.get("llama")
    prompt = prompts(12)[0]
    with PagedEngine(model, CONFIG) as engine:
        engine.add_request(prompt, GREEDY, request_id="short")
        result = run_all(engine)["short"]
        assert_drained(engine)
    if times == 1:
        assert_same_as_lone(lone_run(model, prompt, GREEDY), result, GREEDY, "short")
    else:
        assert isinstance(result.error, MemoryError)


# ----------------------------------------------------------------------------- the forward raises

PLACES: dict[
    str, Callable[[PreTrainedModel, Countdown], contextlib.AbstractContextManager[None]]
] = {
    "first layer": lambda model, countdown: replaced_forward(first_norm(model), countdown),
    "last layer": lambda model, countdown: replaced_forward(last_block(model), countdown),
    "hook": lambda model, countdown: hooked(last_block(model), countdown),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", [1, 2, 9])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_forward_that_raises_once_ends_no_request_beside_others(
    place: str, step: int, name: str
) -> None:
    model = models.get(name)
    before = model_state(model)
    engine = PagedEngine(
        model, PagedConfig(block_size=8, max_num_seqs=5, max_num_batched_tokens=40, capture=False)
    )
    waiting = prompts(12, 30, seed=5)
    beside, countdown = Beside(engine), Countdown(step, OnPurpose)
    for i, prompt in enumerate(waiting):
        engine.add_request(prompt, GREEDY, request_id=f"late {i}", priority=1)
    with PLACES[place](model, countdown):
        results = run_all(engine)
    assert countdown.left < 0, "no forward failed"
    assert_drained(engine)
    for i, prompt in enumerate(waiting):
        assert_same_as_lone(lone_run(model, prompt, GREEDY), results[f"late {i}"], GREEDY, "late")
    # the same prompts again: no block whose content was never computed may be served
    retried = Beside(engine)
    beside.check(results, "beside")
    retried.check(run_all(engine), "again")
    assert_drained(engine)
    engine.free()
    assert model_state(model) == before


@pytest.mark.parametrize("call", [1, 2])
def test_memory_that_is_short_once_while_a_request_is_admitted(call: int) -> None:
    """The request has taken cached blocks by then."""
    model, prompt = models.get("gemma3"), prompts(30)[0]
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        engine.add_request(prompt, {"max_new_tokens": 1}, request_id="first")
        run_all(engine)
        engine.add_request(prompt, GREEDY, request_id="again")
        with failing_allocation(Countdown(call, MemoryError)), pytest.raises(MemoryError):
            engine.step()
        results = run_all(engine)
        assert_drained(engine)
    assert_same_as_lone(lone_run(model, prompt, GREEDY), results["again"], GREEDY, "again")


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_diff_llama, build_mamba], ids=["diff_llama", "mamba"])
@pytest.mark.parametrize("error", [OnPurpose, KeyboardInterrupt])
def test_a_forward_that_raises_in_the_row_layout(build: Any, error: type[BaseException]) -> None:
    model = build()
    before = model_state(model)
    inner, countdown = model.get_output_embeddings(), Countdown(9, error)
    with PagedEngine(model, CONFIG) as engine:
        beside = Beside(engine)
        with replaced_forward(inner, countdown):
            if error is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    run_all(engine)
                engine.check_integrity()
            beside.check(run_all(engine), "interrupted")
        assert countdown.left < 0, "no forward failed"
        assert_drained(engine)
        again = Beside(engine)
        again.check(run_all(engine), "again")
        assert_drained(engine)
    assert model_state(model) == before


BAD = 126  # a token id that no forward takes, and that no request generates
NUM_BESIDE = 8
EIGHT: list[dict[str, Any]] = [
    {
        "do_sample": False,
        "max_new_tokens": 10,
        "suppress_tokens": [BAD],
        **({"num_beams": 3} if i % 3 == 0 else {}),
    }
    for i in range(NUM_BESIDE)
]


class Poison:
    """The model's forward raises on batches for which `is_bad` holds, of token ids; counts forwards
    and failures."""

    def __init__(
        self, model: PreTrainedModel, error: Exception, is_bad: Callable[[torch.Tensor], bool]
    ) -> None:
        self.inner, self.error, self.is_bad = model.get_input_embeddings(), error, is_bad
        self.is_armed, self.num_forwards, self.num_failed = False, 0, 0

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        kind, original = type(self.inner), type(self.inner).forward

        def forward(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
            if module is self.inner and self.is_armed:
                self.num_forwards += 1
                if self.is_bad(ids):
                    self.num_failed += 1
                    raise self.error
            return original(module, ids)

        kind.forward = forward
        try:
            yield
        finally:
            kind.forward = original


def has_bad(ids: torch.Tensor) -> bool:
    return bool((ids == BAD).any())


def build_model(name: str) -> PreTrainedModel:
    return {"diff_llama": build_diff_llama, "mamba": build_mamba}.get(
        name, lambda: models.get(name)
    )()


def eight_prompts(culprits: set[int], shared: int = 0) -> list[list[int]]:
    """Prompts with `shared` tokens in front that are the same, and `BAD` at the end of the
    culprits'."""
    front = prompts(shared, seed=77)[0] if shared else []
    own = prompts(*range(5, 5 + 2 * NUM_BESIDE, 2), seed=41)
    rows = [[(token if token != BAD else 5) for token in front + row] for row in own]
    return [row + [BAD] if number in culprits else row for number, row in enumerate(rows)]


def run_poisoned(
    model: PreTrainedModel, poison: Poison, texts: list[list[int]], **config: Any
) -> tuple[dict[str, RequestResult], PagedEngine]:
    """Results of the requests `EIGHT`, by number, and the drained engine."""
    with poison.given():
        engine = PagedEngine(
            model, PagedConfig(**{"block_size": 8, "max_num_batched_tokens": 400, **config})
        )
        engine.generate([[5, 6, 7]], GREEDY)  # the replaced forward is checked here
        poison.is_armed = True
        for number, (text, options) in enumerate(zip(texts, EIGHT)):
            engine.add_request(text, options, request_id=str(number))
        results = run_all(engine)
        poison.is_armed = False
        assert_drained(engine)
    return results, engine


def check_survivors(
    model: PreTrainedModel,
    texts: list[list[int]],
    results: dict[str, RequestResult],
    culprits: set[int],
    error: Any,
) -> None:
    assert len(results) == NUM_BESIDE
    for number, (text, options) in enumerate(zip(texts, EIGHT)):
        result = results[str(number)]
        if number in culprits:
            assert result.error is error
        else:
            assert_same_as_lone(lone_run(model, text, options), result, options, str(number))


CULPRITS = {
    "one": {3},
    "first": {0},
    "two": {2, 6},
    "half": {0, 1, 2, 3},
    "all": set(range(NUM_BESIDE)),
}


@pytest.mark.slow_cases("gemma3-two")
@pytest.mark.parametrize(
    ("name", "who"),
    [
        *itertools.product(("llama", "mamba"), CULPRITS),
        *itertools.product(("gemma3", "diff_llama"), ("first", "two")),
    ],
)
def test_a_request_whose_forward_raises_ends_alone(name: str, who: str) -> None:
    model, culprits, error = build_model(name), CULPRITS[who], MemoryError("on purpose")
    texts, poison = eight_prompts(culprits), Poison(model, error, has_bad)
    results, _ = run_poisoned(model, poison, texts)
    check_survivors(model, texts, results, culprits, error)
    most = {"one": 4, "first": 4, "two": 7}  # by halves, from 8 requests to one
    assert poison.num_failed <= most.get(who, 2 * NUM_BESIDE - 1)
    if who == "all":
        assert poison.num_forwards == poison.num_failed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "capture", "kind"),
    [("llama", True, "recompute"), ("llama", False, "swap"), ("gemma3", False, "recompute")],
)
def test_blocks_that_a_failed_forward_shared_are_computed_again(
    name: str, capture: bool, kind: str
) -> None:
    """Prompts share their beginning, which the culprit computes first; blocks are few, so that
    requests wait."""
    model, culprits, error = models.get(name), {0, 5}, OnPurpose("on purpose")
    texts, poison = eight_prompts(culprits, shared=24), Poison(model, error, has_bad)
    tight = {
        "num_blocks": 40 if name == "gemma3" else 22,
        "preemption": kind,
        "max_num_batched_tokens": 48,
    }
    results, engine = run_poisoned(model, poison, texts, capture=capture, **tight)
    check_survivors(model, texts, results, culprits, error)
    for number, (text, options) in enumerate(zip(texts, EIGHT)):
        if number not in culprits:
            engine.add_request(text, options, request_id=str(number))
    again = run_all(engine) | {str(number): results[str(number)] for number in culprits}
    check_survivors(model, texts, again, culprits, error)
    assert_drained(engine)


@pytest.mark.slow_cases("*-mamba")
@pytest.mark.parametrize("name", ["llama", "mamba"])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("of all"), MemoryError("of all")], ids=["cuda", "host"]
)
def test_requests_that_fit_in_halves_all_go_on(name: str, error: Exception) -> None:
    model, texts = build_model(name), eight_prompts(set())
    most = max(map(len, texts)) if name == "llama" else 6

    def is_much(ids: torch.Tensor) -> bool:
        return (ids.numel() if name == "llama" else len(ids)) > most

    poison = Poison(model, error, is_much)
    results, _ = run_poisoned(model, poison, texts, capture=False)
    check_survivors(model, texts, results, set(), error)
    assert poison.num_failed > 1


@pytest.mark.slow
def test_requests_come_and_go_while_halves_are_computed() -> None:
    model, culprits, error = models.get("llama"), {2}, OnPurpose("on purpose")
    texts, poison = eight_prompts(culprits), Poison(models.get("llama"), error, has_bad)
    with (
        poison.given(),
        PagedEngine(model, PagedConfig(block_size=8, max_num_batched_tokens=400)) as engine,
    ):
        engine.generate([[5, 6, 7]], GREEDY)
        poison.is_armed = True
        for number, (text, options) in enumerate(zip(texts, EIGHT)):
            engine.add_request(text, options, request_id=str(number))
        results: dict[str, RequestResult] = {}
        for number in range(20):
            if number in (1, 2):  # between two halves
                engine.add_request(texts[number], EIGHT[number], request_id=f"late {number}")
            for name in {1: ["1"], 3: ["7", "late 2"]}.get(number, []):
                if name in engine.block_map() or engine.has_unfinished:
                    engine.cancel(name)
            results |= {
                output.request_id: output.result
                for output in engine.step()
                if output.result is not None
            }
            engine.check_integrity()
        results |= run_all(engine)
        assert_drained(engine)
    assert results["2"].error is error
    assert {name for name, result in results.items() if result.finish_reason == "cancelled"} == {
        "1",
        "7",
        "late 2",
    }
    for name in ("0", "3", "4", "5", "6"):
        options = EIGHT[int(name)]
        assert_same_as_lone(
            lone_run(model, texts[int(name)], options), results[name], options, name
        )
    assert_same_as_lone(lone_run(model, texts[1], EIGHT[1]), results["late 1"], EIGHT[1], "late")


@pytest.mark.slow
def test_an_assistant_that_fails_for_one_request_ends_that_one_alone() -> None:
    model, assistant, error = (
        models.get("llama"),
        copy.deepcopy(models.get_assistant("llama")),
        OnPurpose("on purpose"),
    )
    # sampled rows draft in each step, whatever that costs
    texts, options = (
        eight_prompts({4}),
        {"do_sample": True, "max_new_tokens": 10, "suppress_tokens": [BAD]},
    )
    poison = Poison(assistant, error, has_bad)
    with poison.given(), PagedEngine(model, CONFIG) as engine:
        engine.generate([[5, 6, 7]], GREEDY, assistant_model=assistant)
        poison.is_armed = True
        results = engine.generate(texts, options, assistant_model=assistant)
        assert_drained(engine)
    assert results[4].error is error
    for result in results[:4] + results[5:]:
        assert result.error is None and len(result.token_ids) == 10 and result.num_drafts


# -------------------------------------------------------------------- past the table of positions

POSITIONS = tables.NUM
LONG_TEXT, SHORT_TEXT = 20, 9  # tokens
# one token more than there are positions
PAST = {"do_sample": False, "max_new_tokens": POSITIONS + 2 - LONG_TEXT}
LAST = {"do_sample": False, "max_new_tokens": POSITIONS + 1 - LONG_TEXT}


@pytest.mark.parametrize("name", tables.LEARNED)
def test_a_request_that_grows_past_the_table_of_positions_ends_alone(name: str) -> None:
    model = tables.get(name)
    long, short = prompts(LONG_TEXT, SHORT_TEXT, seed=2)
    expected = lone_run(model, long, LAST)[0]
    with PagedEngine(model, CONFIG) as engine:
        engine.add_request(long, PAST, request_id="past")
        engine.add_request(long, LAST, request_id="last")
        engine.add_request(short, PAST, request_id="short")
        outputs = {"past": [], "last": [], "short": []}  # type: dict[str, list[int]]
        results = {}
        while engine.has_unfinished:
            for output in engine.step():
                outputs[output.request_id] += output.new_tokens.values()
                if output.result is not None:
                    results[output.request_id] = output.result
            engine.check_integrity()
        assert_drained(engine)
    failed = results["past"]
    assert isinstance(failed.error, IndexError) and failed.finish_reason == "error"
    assert f"ends after {POSITIONS}" in str(failed.error)
    assert f"`max_new_tokens` to {LAST['max_new_tokens']}," in str(failed.error)
    assert failed.token_ids == outputs["past"] == expected
    assert_same_as_lone([expected], results["last"], LAST, "as many as there are")
    assert_same_as_lone(lone_run(model, short, PAST), results["short"], PAST, "beside")


@pytest.mark.parametrize("name", tables.LEARNED)
def test_a_prompt_longer_than_the_table_of_positions_is_refused(name: str) -> None:
    model = tables.get(name)
    (long,) = prompts(POSITIONS + 1, seed=2)
    with PagedEngine(model, CONFIG) as engine:
        with pytest.raises(
            IndexError, match=f"takes {POSITIONS + 1} positions, .* holds {POSITIONS}: shorten"
        ):
            engine.add_request(long, {"max_new_tokens": 1})
        assert not engine.has_unfinished and engine.memory.stats().peak_blocks == 0
        (result,) = engine.generate([long[1:]], {"do_sample": False, "max_new_tokens": 1})
        assert_same_as_lone(
            lone_run(model, long[1:], {"do_sample": False, "max_new_tokens": 1}),
            result,
            {},
            "fills the table",
        )
        (refused,) = engine.generate([long], {"max_new_tokens": 1})
        assert isinstance(refused.error, IndexError)


@pytest.mark.parametrize("name", [name for name in tables.UNLIMITED if name != "xglm"])
def test_models_without_a_table_of_positions_are_not_limited(name: str) -> None:
    model = tables.get(name)
    long, longer = prompts(LONG_TEXT, POSITIONS + 8, seed=2)
    with PagedEngine(model, CONFIG) as engine:
        for text in (long, longer):
            options = {"do_sample": False, "max_new_tokens": POSITIONS}
            (result,) = engine.generate([text], options)
            assert_same_as_lone(lone_run(model, text, options), result, options, name)


MANY: dict[str, dict[str, Any]] = {
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 5},
    "ngrams": {"do_sample": False},
}


@pytest.mark.parametrize("mode", MANY)
@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "bart_decoder"])
def test_rows_and_drafts_past_the_table_of_positions(name: str, mode: str) -> None:
    if mode == "lookup" and name == "bart_decoder":
        pytest.skip("its rows verify no drafts")
    model = tables.get(name)
    repeated, short = prompts(4, SHORT_TEXT, seed=2)
    repeated = repeated * 5
    options = {**MANY[mode], "max_new_tokens": 30}
    speculation = "ngram" if mode == "ngrams" else None
    with PagedEngine(model, PagedConfig(block_size=8, speculation=speculation)) as engine:
        engine.add_request(repeated, options, request_id="past", seed=1)
        engine.add_request(short, GREEDY, request_id="beside")
        results = run_all(engine)
        assert_drained(engine)
    failed = results["past"]
    assert isinstance(failed.error, IndexError) and "table of positions" in str(failed.error)
    if mode in ("lookup", "ngrams"):
        last = {"do_sample": False, "max_new_tokens": LAST["max_new_tokens"]}
        assert failed.token_ids == lone_run(model, repeated, last)[0]
    assert_same_as_lone(lone_run(model, short, GREEDY), results["beside"], GREEDY, "beside")


def test_an_assistant_with_fewer_positions_than_its_target_drafts_as_far_as_it_can() -> None:
    model, assistant = models.get("gpt2"), tables.get("gpt2")
    text, longer = prompts(LONG_TEXT, POSITIONS + 5, seed=2)
    options = {"do_sample": False, "max_new_tokens": 30}
    with PagedEngine(model, CONFIG) as engine:
        results = engine.generate([text, longer], options, assistant_model=assistant)
        assert_drained(engine)
    for prompt, result in zip((text, longer), results):
        assert_same_as_lone(lone_run(model, prompt, options), result, options, "assisted")
    assert results[0].num_drafts > 0 == results[1].num_drafts


def test_positions_that_a_caller_gives_count() -> None:
    model = tables.get("gpt2")
    ids = models.token_ids(1, SHORT_TEXT, seed=2)
    inputs = {"position_ids": torch.arange(10, 10 + SHORT_TEXT)[None]}
    room = POSITIONS + 1 - 10 - SHORT_TEXT
    expected = model.generate(ids, **inputs, do_sample=False, max_new_tokens=room)[
        0, SHORT_TEXT:
    ].tolist()
    with PagedEngine(model, CONFIG) as engine:
        engine.add_request(
            ids[0].tolist(), {"do_sample": False, "max_new_tokens": room + 5}, inputs=inputs
        )
        (result,) = run_all(engine).values()
        assert isinstance(result.error, IndexError) and result.token_ids == expected
        inputs["position_ids"] = inputs["position_ids"] + POSITIONS - 12
        with pytest.raises(IndexError, match="shorten the prompt"):
            engine.add_request(ids[0].tolist(), GREEDY, inputs=inputs)
        assert_drained(engine)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_decoder_that_grows_past_its_table_of_positions(name: str) -> None:
    model, (text, other) = tables.get(name), prompts(LONG_TEXT, SHORT_TEXT, seed=2)
    options = {"do_sample": False, "max_new_tokens": POSITIONS + 3, "eos_token_id": None}
    with PagedEngine(model, CONFIG) as engine:
        engine.add_request(text, options, request_id="past")
        engine.add_request(other, {**options, "max_new_tokens": 10}, request_id="short")
        results = run_all(engine)
        assert_drained(engine)
    if name == "t5":
        assert results["past"].error is None
    else:
        assert isinstance(results["past"].error, IndexError) and "table of positions" in str(
            results["past"].error
        )
        assert len(results["past"].token_ids) == POSITIONS
    assert results["short"].error is None and len(results["short"].token_ids) == 10


@pytest.mark.slow_cases(
    "recompute-15-first layer",
    "recompute-2-last layer",
    "recompute-3-*",
    "recompute-8-last layer",
    "roomy-1-first layer",
    "swap-*",
)
@pytest.mark.parametrize("place", ["first layer", "last layer"])
@pytest.mark.parametrize("step", [1, 2, 3, 8, 15])
@pytest.mark.parametrize("kind", ["roomy", "swap", "recompute"])
def test_after_an_interrupt_the_engine_goes_on(place: str, step: int, kind: str) -> None:
    model = models.get("gemma3" if kind == "swap" else "llama")
    before = model_state(model)
    tight = (
        {} if kind == "roomy" else {"num_blocks": 40 if kind == "swap" else 14, "preemption": kind}
    )
    engine = PagedEngine(
        model, PagedConfig(block_size=8, max_num_batched_tokens=24, capture=False, **tight)
    )
    beside, shared = Beside(engine), prompts(26, seed=6)[0]
    for i in range(2):
        engine.add_request(shared, GREEDY, request_id=f"shared {i}")
    results: dict[str, RequestResult] = {}
    with PLACES[place](model, Countdown(step, KeyboardInterrupt)):
        with pytest.raises(KeyboardInterrupt):
            run_all(engine, results)
        engine.check_integrity()
        assert model_state(model)["attention"] == before["attention"]
        run_all(engine, results)
    assert_drained(engine)
    if kind != "roomy":
        assert engine.stats().num_preemptions > 0
        assert (engine.stats().num_swaps > 0) == (kind == "swap")
    beside.check(results, "interrupted")
    for i in range(2):
        assert_same_as_lone(
            lone_run(model, shared, GREEDY), results[f"shared {i}"], GREEDY, "interrupted, shared"
        )
    again = Beside(engine)
    again.check(run_all(engine), "again")
    engine.free()
    assert model_state(model) == before


@pytest.mark.slow_cases(but=["llama-1"])
@pytest.mark.parametrize("step", [1, 2, 3, 9])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_interrupt_between_scheduling_and_the_forward(
    name: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks enter the prefix index when they are scheduled: none may stay there without its
    content."""
    with PagedEngine(models.get(name), CONFIG) as engine:
        beside, results = Beside(engine), {}
        countdown, note_progress = Countdown(step, KeyboardInterrupt), engine.memory.note_progress

        def interrupted() -> None:
            countdown()
            note_progress()

        monkeypatch.setattr(engine.memory, "note_progress", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_all(engine, results)
        engine.check_integrity()
        for seed, (mode, prompt) in enumerate(beside.texts.items()):
            # the same prompts, which hit the cached blocks
            engine.add_request(prompt, OTHERS[mode], request_id=f"{mode} again", seed=seed)
        run_all(engine, results)
        assert_drained(engine)
    beside.check(results, "interrupted")
    beside.check({mode: results[f"{mode} again"] for mode in OTHERS}, "again")


@pytest.mark.slow_cases("greedy-*", "samples-processor")
@pytest.mark.parametrize("place", FAULTS)
@pytest.mark.parametrize("mode", ["greedy", "samples", "beams"])
def test_an_interrupt_while_tokens_are_chosen(place: str, mode: str) -> None:
    """Nothing hangs: each request continues correctly or ends with an error, and the engine
    works."""
    if place == "streamer" and mode == "beams":
        pytest.skip("beams take no streamer")
    with PagedEngine(models.get("llama"), CONFIG) as engine:
        own = FAULTS[place](Countdown(4, KeyboardInterrupt))
        engine.add_request([5, 6, 7], MODES[mode], request_id="own", seed=2, **own)
        beside = Beside(engine)
        results: dict[str, RequestResult] = {}
        with pytest.raises(KeyboardInterrupt):
            run_all(engine, results)
        engine.check_integrity()
        run_all(engine, results)
        assert_drained(engine)
        assert set(results) == {"own", *OTHERS}
        for seed, (name, prompt) in enumerate(beside.texts.items()):
            if results[name].error is None:
                expected = lone_run(engine.model, prompt, OTHERS[name], seed)
                assert_same_as_lone(expected, results[name], OTHERS[name], name)
        again = Beside(engine)
        again.check(run_all(engine), "again")
        assert_drained(engine)


def test_an_interrupted_generate_leaves_nothing_behind() -> None:
    model = models.get("llama")
    with PagedEngine(model, CONFIG) as engine:
        engine.add_request(prompts(11)[0], GREEDY, request_id="other")
        with (
            PLACES["last layer"](model, Countdown(5, KeyboardInterrupt)),
            pytest.raises(KeyboardInterrupt),
        ):
            engine.generate(prompts(9, 20), GREEDY)
        assert engine.stats().num_running == 1, "only the request that was added by hand is left"
        result = run_all(engine)["other"]
        assert_same_as_lone(lone_run(model, prompts(11)[0], GREEDY), result, GREEDY, "other")
        assert_drained(engine)


# --------------------------------------------------------------- steps raise outside of a forward

# place -> the object, and its method, that a step calls outside of the forward
OUTSIDE: dict[str, Callable[[StepLoop], tuple[Any, str]]] = {
    "the span opens": lambda loop: (loop.executor, "open"),
    "drafts": lambda loop: (loop, "propose"),
    "attention is switched": lambda loop: (loop.executor, "attention"),
    "the schedule": lambda loop: (loop.scheduler, "_schedule"),
    "running rows get tokens": lambda loop: (loop.scheduler, "_continue_running"),
    "a request is admitted": lambda loop: (loop.scheduler.preemption, "admit"),
    "blocks are taken": lambda loop: (loop.blocks, "take"),
    "blocks are named": lambda loop: (loop.blocks, "register"),
    "the timeline": lambda loop: (loop.scheduler.timeline, "record_step"),
    "copies": lambda loop: (loop.blocks, "flush_copies"),
    "adapters are checked": lambda loop: (engine_core, "adapters_for"),
    "a model change is handled": lambda loop: (loop.executor, "handle_model_change"),
    "logits are given to requests": lambda loop: (loop.ledger, "deliver"),
    "tokens are applied": lambda loop: (loop.ledger, "apply"),
    "a token is appended": lambda loop: (loop.ledger, "append"),
    "the span is committed": lambda loop: (loop.executor, "commit"),
    "the engine goes idle": lambda loop: (loop.executor, "go_idle"),
}


def failing(
    patch: pytest.MonkeyPatch, engine: PagedEngine, place: str, times: int, after: int = 0
) -> list[str]:
    """Makes a place raise at each of `times` calls, after some that do not; returns a list that
    each raise extends."""
    assert engine._core.loop is not None
    owner, name = OUTSIDE[place](engine._core.loop)
    calls, raised, method = itertools.count(), list[str](), getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if after <= next(calls) < after + times:
            raised.append(place)
            raise OnPurpose("on purpose")
        return method(*args, **kwargs)

    patch.setattr(owner, name, call)
    return raised


@pytest.mark.slow_cases("blocks are named-0", "the engine goes idle-3", "the span is committed-3")
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("place", OUTSIDE)
def test_a_step_that_raises_again_and_again_ends_its_requests(
    place: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request ends soon, with its tokens or with that error, and later ones are served."""
    model = models.get("llama")
    with PagedEngine(
        model, PagedConfig(block_size=8, max_num_seqs=4, max_num_batched_tokens=24)
    ) as engine:
        beside, results, num_raised = Beside(engine), dict[str, RequestResult](), 0
        with monkeypatch.context() as patch:
            raised = failing(patch, engine, place, 10**6, after)
            for _ in range(200):
                try:
                    outputs = engine.step()
                except OnPurpose:
                    num_raised += 1
                else:
                    results |= {o.request_id: o.result for o in outputs if o.result is not None}
                if not engine.has_unfinished:
                    break
        assert set(results) == set(OTHERS)
        assert num_raised or (not raised and (place, after) == ("the engine goes idle", 3))
        for seed, (name, prompt) in enumerate(beside.texts.items()):
            error = results[name].error
            assert error is None or "on purpose" in str(error) or "OnPurpose" in str(error)
            if error is None:
                expected = lone_run(model, prompt, OTHERS[name], seed)
                assert_same_as_lone(expected, results[name], OTHERS[name], name)
        engine.check_integrity()
        assert engine.stats().used_blocks == 0
        again = Beside(engine)
        again.check(run_all(engine), "again")
        assert_drained(engine)


# places where an exception ends the requests concerned
NOT_REPEATED = {"logits are given to requests", "tokens are applied", "a token is appended"}


@pytest.mark.parametrize("place", sorted(OUTSIDE.keys() - NOT_REPEATED))
def test_a_step_that_raises_once_is_repeated(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, texts = models.get("llama"), prompts(4, 19, 9)
    with PagedEngine(model, PagedConfig(block_size=8, max_num_batched_tokens=24)) as engine:
        engine.generate([[5, 6]], GREEDY)
        with monkeypatch.context() as patch:
            raised = failing(
                patch, engine, place, times=1, after=0 if place == "the engine goes idle" else 1
            )
            results = engine.generate(texts, GREEDY)
        for prompt, result in zip(texts, results):
            assert_same_as_lone(lone_run(model, prompt, GREEDY), result, GREEDY, place)
        said = [record for record in caplog.records if "is repeated once" in record.getMessage()]
        assert len(said) == len(raised) == 1
        assert_drained(engine)


def test_readers_of_streams_get_the_error_of_a_step_and_later_ones_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, texts = models.get("llama"), prompts(4, 19, 9)

    async def read(engine: PagedEngine, prompt: list[int]) -> RequestResult:
        results = [
            output.result
            async for output in engine.astream([prompt], GREEDY)
            if output.result is not None
        ]
        return results[0]

    async def read_all(engine: PagedEngine) -> list[RequestResult]:
        return await asyncio.wait_for(
            asyncio.gather(*(read(engine, prompt) for prompt in texts)), 60
        )

    with PagedEngine(model, CONFIG) as engine:
        engine.generate([[5, 6]], GREEDY)
        with monkeypatch.context() as patch:
            failing(patch, engine, "the schedule", 10**6)
            for result in (*asyncio.run(read_all(engine)), *engine.generate(texts, GREEDY)):
                assert isinstance(result.error, OnPurpose)
            assert [
                output.result.error
                for output in engine.stream(texts[:1], GREEDY)
                if output.result is not None
            ]
        for prompt, result in zip(texts, asyncio.run(read_all(engine))):
            assert_same_as_lone(lone_run(model, prompt, GREEDY), result, GREEDY, "later")
        assert_drained(engine)


def test_an_error_that_blocks_are_short_ends_the_first_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, texts = models.get("llama"), prompts(4, 19, 9)
    with PagedEngine(model, CONFIG) as engine:
        for name, prompt in zip("abc", texts):
            engine.add_request(prompt, GREEDY, request_id=name)
            engine.step() if name == "a" else None
        assert engine._core.loop is not None

        def fail() -> Any:
            raise OutOfBlocksError("others hold blocks")

        with monkeypatch.context() as patch:
            patch.setattr(engine._core.loop.scheduler, "schedule", fail)
            with pytest.raises(OutOfBlocksError):
                engine.step()
            (output,) = engine.step()
            # type: ignore[union-attr]
            assert output.request_id == "b" and isinstance(output.result.error, OutOfBlocksError)
        results = run_all(engine)
        for name, prompt in (("a", texts[0]), ("c", texts[2])):
            assert_same_as_lone(lone_run(model, prompt, GREEDY), results[name], GREEDY, name)
        assert_drained(engine)


def test_an_output_that_cannot_be_made_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, texts = models.get("llama"), prompts(4, 19)
    with PagedEngine(model, CONFIG) as engine:
        for name, prompt in zip("ab", texts):
            engine.add_request(prompt, GREEDY, request_id=name)

        def fail() -> Any:
            raise OnPurpose

        monkeypatch.setattr(engine._core.requests["a"], "outputs", fail)
        results = run_all(engine)
        assert isinstance(results["a"].error, OnPurpose)
        assert_same_as_lone(lone_run(model, texts[1], GREEDY), results["b"], GREEDY, "b")
        assert_drained(engine)


# ------------------------------------------------------------------------------------ no progress


def test_no_progress_raises_after_a_bounded_number_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with PagedEngine(models.get("llama"), CONFIG) as engine:
        engine.add_request([5, 6, 7], GREEDY, request_id="a")
        assert engine._core.loop is not None
        with monkeypatch.context() as patch:
            patch.setattr(engine._core.loop.scheduler, "schedule", lambda: StepPlan.of([]))
            for _ in range(MAX_IDLE_STEPS - 1):
                engine.step()
            with pytest.raises(
                EngineStalledError, match=r"no token for 8 steps.*1 waiting.*blocks"
            ):
                engine.step()
        result = run_all(engine)["a"]
        assert_same_as_lone(
            lone_run(models.get("llama"), [5, 6, 7], GREEDY), result, GREEDY, "after a stall"
        )
        with monkeypatch.context() as patch:
            patch.setattr(engine._core.loop.scheduler, "schedule", lambda: StepPlan.of([]))
            (stalled,) = engine.generate([[5, 6]], GREEDY)
            assert isinstance(stalled.error, EngineStalledError)
        assert_drained(engine)


@pytest.mark.slow
def test_blocks_that_a_caller_holds_are_an_error_and_no_endless_wait() -> None:
    model, inputs, other = (
        models.build("llama"),
        models.prompt("llama", 2, 20),
        models.prompt("llama", 2, 20, seed=1),
    )
    paged = {"cache_implementation": "paged", "cache_config": {"block_size": 8, "num_blocks": 12}}
    options = {**GREEDY, "return_dict_in_generate": True, "max_new_tokens": 20}
    kept = model.generate(**inputs, **options, **paged)
    with pytest.raises(OutOfBlocksError, match="free their caches, or raise `num_blocks`"):
        model.generate(**other, **options, **paged)
    hf_paged.check_integrity(model)
    held = hf_paged.memory_stats(model).used_blocks
    assert held == 10
    del kept
    assert hf_paged.memory_stats(model).used_blocks == 0
    assert torch.equal(
        model.generate(**other, **options, **paged).sequences, model.generate(**other, **GREEDY)
    )


# ------------------------------------------------------------------------- the model is unchanged


@pytest.mark.parametrize("training", [False, True])
def test_a_run_leaves_the_model_as_it_was(training: bool) -> None:
    model = models.build("llama").train(training)
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    before, rng = model_state(model), torch.get_rng_state()
    with PagedEngine(model, CONFIG) as engine:
        beside = Beside(engine)
        results = run_all(engine)
        stepwise = PagedEngine(model, CONFIG)
        stepwise.add_request([5, 6, 7], GREEDY)
        stepwise.step()
        assert model_state(model) == before, "between two steps the model must be as it was"
        stepwise.free()
    assert model_state(model) == before
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), rng), (
        "seeded requests drew global numbers"
    )
    beside.check(results, "as it was")
    loss = model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss
    loss.backward()  # it can still be trained


def test_inference_mode_and_grad_mode_may_change_between_calls() -> None:
    model, texts = models.get("llama"), prompts(9, 20)
    expected = [lone_run(model, prompt, GREEDY) for prompt in texts]
    with PagedEngine(model, CONFIG) as engine:
        modes = [
            torch.inference_mode(),
            contextlib.nullcontext(),
            torch.enable_grad(),
            torch.inference_mode(),
        ]
        for mode in modes:
            with mode:
                results = engine.generate(texts, GREEDY)
            for lone, result in zip(expected, results):
                assert_same_as_lone(lone, result, GREEDY, f"{mode}")
        engine.add_request(texts[1], GREEDY, request_id="a")
        with torch.inference_mode():
            engine.step()
        engine.step()
        assert_same_as_lone(expected[1], run_all(engine)["a"], GREEDY, "in the middle")


@pytest.mark.slow
@pytest.mark.parametrize("growth", [1, 3])
def test_a_machine_without_memory_for_more_blocks_preempts(
    growth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out while the pool grows is treated like any shortage of blocks."""
    countdown, grown = Countdown(growth, torch.OutOfMemoryError), KVBlocks.grown
    # otherwise storage is reserved at once, and never grows
    monkeypatch.setattr(engine_core, "UNLIMITED_BLOCKS", 1)

    def failing(self: KVBlocks, num_blocks: int) -> KVBlocks:
        countdown()
        return grown(self, num_blocks)

    model, texts, options = (
        models.get("llama"),
        prompts(9, 20, 31, 14),
        {"do_sample": False, "max_new_tokens": 60},
    )
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        engine.generate([[5, 6]], GREEDY)  # the self-check is over
        monkeypatch.setattr(KVBlocks, "grown", failing)
        results = engine.generate(texts, options)
        assert countdown.left <= 0
        for prompt, result in zip(texts, results):
            assert_same_as_lone(
                lone_run(model, prompt, options), result, options, "short of memory"
            )
        assert_drained(engine)
