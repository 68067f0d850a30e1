"""Bad input and engine failures end only the affected request; other requests and the model are
unaffected."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged import EngineStalledError, OutOfBlocksError, PagedConfig, PagedEngine
from hf_paged.batching import engine_core
from hf_paged.batching.generation import RequestState
from hf_paged.batching.progress import MAX_IDLE_STEPS
from hf_paged.plan import StepPlan
from tests.model import test_positions as tables
from tests.support import models
from tests.support.checks import model_state
from tests.support.engine_helpers import (
    MODES,
    Asked,
    Recorder,
    Spelled,
    assert_drained,
    assert_lone,
    engine_of,
    get_mamba,
    lone_run,
    prompts,
    results_of,
    run_all,
    steps,
    told_by,
)
from tests.support.rooms import fix_prices
from tests.test_faults import (
    Countdown,
    FailingCriteria,
    FailingProcessor,
    FailingStreamer,
    OnPurpose,
    first_norm,
    hooked,
    last_block,
    replaced_forward,
)

GREEDY = MODES["greedy"]
OTHERS = ("greedy", "greedy_eos", "sample_warped", "samples", "beams_eos")
CONFIG = PagedConfig(block_size=8, max_num_batched_tokens=24)
small = functools.partial(engine_of, max_num_batched_tokens=24)


def beside(engine: PagedEngine) -> Asked:
    """Requests of several modes that run beside a faulty one."""
    asked = Asked(engine)
    for seed, (mode, prompt) in enumerate(zip(OTHERS, prompts(4, 19, 9, 22, 13, seed=3))):
        asked.add(mode, prompt, MODES[mode], seed)
    return asked


# ---------------------------------------------------------------------------------- refused input

LONG = list(range(4, 104))
SAMPLES = {"do_sample": True, "num_return_sequences": 20, "max_new_tokens": 5}
# prompt, options, a part of the message; more in tests/test_mistakes.py and tests/test_arguments.py
REFUSED = [
    (LONG, GREEDY, r"15 blocks of 8 tokens, but at most 12.*num_blocks"),
    (LONG[:20], {"max_new_tokens": 90}, "at most 12"),  # in the end
    (LONG[:20], SAMPLES, "at most 12"),
    (None, GREEDY, "whole numbers"),
    (torch.ones(2, 3, dtype=torch.long), GREEDY, r"shape \(2, 3\)"),
    ([5], {"num_return_sequences": 2, "do_sample": False}, "num_return"),
    ([5], {"do_sample": True, "temperature": 0.0}, "temperature"),
    ([5], {"max_new_tokens": 0}, "max_new_tokens"),
    ([5, 6, 7], {"max_length": 2}, "max_length"),
    ([5], {"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
    ([5], {"output_attentions": True}, "output_attentions"),
    ([5], {"num_beams": 2, "low_memory": True}, "low_memory"),
    ([5], {"num_beams": 2, "prompt_lookup_num_tokens": 3}, "leave `prompt_lookup_num_tokens` out"),
]


def test_bad_input_is_refused_with_a_reason() -> None:
    """At once by `add_request`, and by `generate` in its place."""
    with engine_of(num_blocks=12) as engine:
        before, rng = model_state(engine.model), torch.get_rng_state()
        asked = Asked(engine, [[5, 6, 7]])
        engine.step()
        for prompt, options, message in REFUSED:
            error = OutOfBlocksError if "at most" in message else ValueError
            with pytest.raises(error, match=message):
                engine.add_request(prompt, options)
            engine.check_integrity()
            assert engine.stats().num_waiting == 0
            assert torch.equal(torch.get_rng_state(), rng), "greedy requests drew random numbers"
            good, bad = engine.generate([[5, 6], prompt], [GREEDY, options])
            assert_lone(engine, [[5, 6]], [good])
            with pytest.raises(error, match=message):
                raise bad.error
            assert bad.finish_reason == "error" and bad.token_ids == bad.sequences == []
        asked.check()
        assert model_state(engine.model) == before


# -------------------------------------------------------------------- a request's own code raises

FAULTS = {
    "processor": lambda countdown: {"logits_processor": [FailingProcessor(countdown)]},
    "criteria": lambda countdown: {"stopping_criteria": [FailingCriteria(countdown)]},
    "streamer": lambda countdown: {"streamer": FailingStreamer(countdown)},
}
# scores that nothing can be drawn from
BAD_SCORES = {
    "nan": lambda ids, scores: scores * torch.nan,
    "all forbidden": lambda ids, scores: scores - torch.inf,
    "no vocabulary": lambda ids, scores: scores[:, :0],
    "nothing": lambda ids, scores: None,
    "on no device": lambda ids, scores: scores.to("meta"),  # cannot come to the host
}


@pytest.mark.parametrize("mode", ["greedy", "sample", "samples", "beams"])
def test_a_requests_own_code_fails_that_request_alone(mode: str) -> None:
    """Each kind of code in each mode, in an early or a late step."""
    call, (prompt,) = 6 if mode in ("greedy", "sample") else 2, prompts(17, seed=8)
    faulty = {place: make(Countdown(call, OnPurpose)) for place, make in FAULTS.items()}
    if mode == "beams":
        del faulty["streamer"]
    bad_scores = {"greedy": ["on no device"], "beams": []}.get(mode, BAD_SCORES)
    faulty |= {place: {"logits_processor": [BAD_SCORES[place]]} for place in bad_scores}
    with small() as engine:
        before = model_state(engine.model)
        asked = beside(engine)
        asked.add("same prompt", prompt)
        for place, own in faulty.items():
            engine.add_request(prompt, MODES[mode], request_id=place, seed=9, **own)
        results = asked.check()
        assert len(results) == 1 + len(OTHERS) + len(faulty)
        for place in faulty:
            failed = results[place]
            assert isinstance(failed.error, OnPurpose if place in FAULTS else Exception), place
            assert "error" in {sequence.finish_reason for sequence in failed.sequences}
            if mode == "greedy" and place in FAULTS:  # its tokens so far are correct
                expected = results["same prompt"].token_ids
                assert failed.token_ids and failed.token_ids == expected[: len(failed.token_ids)]
        assert_lone(engine, [prompt], engine.generate([prompt], MODES["beams"]), MODES["beams"])
        assert model_state(engine.model) == before


def test_a_processor_that_writes_to_what_it_is_given_changes_no_other_request() -> None:
    """Its tensors are copies: of the other rows' logits, and of the request's ids."""

    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores.fill_(-1e9)
        scores[:, 9] = 0
        return scores

    with small() as engine:
        for mode in ("greedy", "samples", "beams"):
            own = {"logits_processor": [spoil], "seed": 1}
            engine.add_request([5, 6, 7], MODES[mode], request_id=f"spoilt {mode}", **own)
        results = beside(engine).check()
        with pytest.raises(OnPurpose):  # at the prompt
            engine.add_request([5], GREEDY, **FAULTS["streamer"](Countdown(1, OnPurpose)))
        assert_drained(engine)
    assert set(results["spoilt greedy"].token_ids + results["spoilt samples"].token_ids) == {9}


@pytest.mark.parametrize(
    ("code", "mode", "call"),
    [
        ("processor", "greedy", 4),
        ("criteria", "greedy", 1),
        ("processor", "samples", 4),
        ("criteria", "samples", 4),
        # the first draft verifies the eighth token
        ("processor", "drafts", 11),
        ("criteria", "drafts", 11),
    ],
)
def test_the_tokens_of_a_result_with_an_error_were_streamed(
    code: str, mode: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A criterion runs when its step's token is chosen; drafts are accepted one after another,
    until one's code raises."""
    fix_prices(monkeypatch.setattr)
    has_drafts = mode == "drafts"
    options = GREEDY if has_drafts else MODES[mode]
    with small(speculation="ngram" if has_drafts else None) as engine:
        engine.generate(prompts(12), options, seed=1)  # its tokens are the drafts
        own = FAULTS[code](Countdown(call, OnPurpose))
        engine.add_request(prompts(12)[0], options, seed=1, **own)
        outputs = []
        while engine.has_unfinished:
            outputs += (last := engine.step())
    result = outputs[-1].result
    assert isinstance(result.error, OnPurpose)
    assert (len(last) > 1) == has_drafts
    (told,) = told_by(outputs).values()
    assert told == {row: sequence.token_ids for row, sequence in enumerate(result.sequences)}
    assert told[0] and result.timings.first_token is not None


def halves(countdown: Countdown) -> Any:
    """A tokenizer whose tokens are halves of characters; `countdown` may raise."""
    return Spelled(range(models.VOCAB_SIZE), lambda token_ids: countdown())


LEAVE = pytest.mark.parametrize(
    "leave", [lambda engine: engine.cancel("a"), lambda engine: engine.free()]
)


@LEAVE
def test_a_request_that_ended_in_an_interrupted_step_ends_once(leave: Any) -> None:
    """Its tokens are chosen, and not output: a cancellation outputs the result of a request that
    ended well."""
    streamer, never = Recorder(), Countdown(0, OnPurpose)
    interrupt = FAULTS["processor"](Countdown(4, KeyboardInterrupt))
    with small(tokenizer=halves(never)) as engine:
        options = {**GREEDY, "max_new_tokens": 4}
        engine.add_request([5, 6], options, request_id="a", streamer=streamer)
        engine.add_request([5, 7], GREEDY, **interrupt)
        outputs = []
        with pytest.raises(KeyboardInterrupt):
            while True:
                outputs += engine.step()
        leave(engine)
        outputs += engine.step()
    outputs = [output for output in outputs if output.request_id == "a"]
    result = outputs[-1].result
    assert result.finish_reason == "length" and streamer.ended == 1
    assert told_by(outputs)["a"][0] == result.token_ids
    assert "".join(output.text or "" for output in outputs) == result.text != ""


def test_an_interrupt_of_the_tokenizer_at_any_call_loses_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next step makes interrupted reports, drafts included; interrupted while its result is
    made, a request ends with an error. The outputs have exactly the tokens of the results."""
    fix_prices(monkeypatch.setattr)
    countdown, errors = Countdown(0, KeyboardInterrupt), []
    with small(tokenizer=halves(countdown), speculation="ngram") as engine:
        engine.generate(prompts(12), GREEDY)  # its tokens are the drafts
        for call in itertools.count(1):
            for name, prompt in zip("abc", prompts(12, 9, 7)):
                engine.add_request(prompt, GREEDY, request_id=name)
            engine.cancel("c")
            countdown.left, outputs = call, []
            while engine.has_unfinished:
                with contextlib.suppress(KeyboardInterrupt):
                    outputs += engine.step()
            outputs += engine.step()
            assert_drained(engine)
            results, told = results_of(outputs), told_by(outputs)
            assert sorted(o.request_id for o in outputs if o.finished) == [*"abc"]
            for name in "ab":
                result = results[name]
                assert told[name][0] == result.token_ids
                if result.error is None:
                    pieces = [o.text or "" for o in outputs if o.request_id == name]
                    assert "".join(pieces) == result.text
                else:
                    errors.append(str(result.error))
            if countdown.left > 0:
                break
    assert call > 2 * 10 and results["a"].num_accepted_tokens > 0
    assert len(errors) == 2 and all("interrupted by KeyboardInterrupt" in each for each in errors)


@LEAVE
def test_an_interrupt_of_the_tokenizer_keeps_no_request_from_its_end(leave: Any) -> None:
    countdown = Countdown(0, KeyboardInterrupt)
    with small(tokenizer=halves(countdown)) as engine:
        engine.add_request([5, 6], GREEDY, request_id="a")
        engine.step()
        engine.step()
        countdown.left = 1
        with pytest.raises(KeyboardInterrupt):
            leave(engine)
        *_, output = engine.step()
        assert_drained(engine)
    assert len(output.result.token_ids) == 2


def test_a_result_is_made_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may be short for a moment only; if it still is, the result holds the error."""
    countdown, make = [], RequestState._sequence_results

    def failing(self: RequestState, reason: str) -> Any:
        if countdown:
            raise countdown.pop()
        return make(self, reason)

    monkeypatch.setattr(RequestState, "_sequence_results", failing)
    with small() as engine:
        countdown += [MemoryError]
        assert_lone(engine, prompts(12), engine.generate(prompts(12), GREEDY))
        countdown += [MemoryError] * 2
        (result,) = engine.generate(prompts(12), GREEDY)
        assert_drained(engine)
    assert isinstance(result.error, MemoryError)


# ----------------------------------------------------------------------------- the forward raises

PLACES: dict[
    str, Callable[[PreTrainedModel, Countdown], contextlib.AbstractContextManager[None]]
] = {
    "first layer": lambda model, countdown: replaced_forward(first_norm(model), countdown),
    "last layer": lambda model, countdown: replaced_forward(last_block(model), countdown),
    "hook": lambda model, countdown: hooked(last_block(model), countdown),
    "head": lambda model, countdown: replaced_forward(model.get_output_embeddings(), countdown),
}
SWAP = {"num_blocks": 40, "preemption": "swap"}
RECOMPUTE = {"num_blocks": 14, "preemption": "recompute"}
FEW = {"max_num_seqs": 5}  # others wait


def shared_model(name: str) -> PreTrainedModel:
    return get_mamba() if name == "mamba" else models.get(name)


@pytest.mark.slow_cases(but=["KeyboardInterrupt-llama-*-2-*", "KeyboardInterrupt-llama-*-15-*"])
@pytest.mark.parametrize(
    ("name", "place", "step", "config"),
    [
        ("llama", "first layer", 2, FEW),
        ("llama", "hook", 9, {}),
        ("llama", "first layer", 3, RECOMPUTE),
        ("llama", "last layer", 15, RECOMPUTE),
        ("gemma3", "last layer", 1, {}),
        ("gemma3", "first layer", 8, SWAP),
        ("diff_llama", "head", 9, {}),
        ("mamba", "head", 9, {}),
    ],
)
@pytest.mark.parametrize("error", [OnPurpose, KeyboardInterrupt])
def test_after_a_forward_that_failed_once_all_requests_go_on(
    error: type[BaseException], name: str, place: str, step: int, config: dict[str, Any]
) -> None:
    model, shared, countdown = shared_model(name), prompts(26, seed=6)[0], Countdown(step, error)
    before, results = model_state(model), {}
    with PagedEngine(model, replace(CONFIG, capture=False, **config)) as engine:
        asked = beside(engine)
        for i in range(2):
            asked.add(f"shared {i}", shared)
        with PLACES[place](model, countdown):
            if error is KeyboardInterrupt:
                with pytest.raises(error):
                    run_all(engine, results)
                engine.check_integrity()
                assert model_state(model)["attention"] == before["attention"]
            asked.check(run_all(engine, results))
        assert countdown.left < 0, "no forward failed"
        assert_drained(engine)
        assert "num_blocks" not in config or engine.stats().num_preemptions > 0
        assert (engine.stats().num_swaps > 0) == (config is SWAP)
        # the same prompts again: no block whose content was never computed may be served
        beside(engine).check()
    assert model_state(model) == before


BAD_TOKEN = 3  # that no forward takes, no prompt has and no request generates
NUM_BESIDE = 8
TEN = {"max_new_tokens": 10, "suppress_tokens": [BAD_TOKEN], "do_sample": False}
EIGHT = [{**TEN, "num_beams": 3} if i % 3 == 0 else TEN for i in range(NUM_BESIDE)]


@contextlib.contextmanager
def poisoned(
    model: PreTrainedModel, error: Exception, is_bad: Callable[[torch.Tensor], bool]
) -> Iterator[Counter[str]]:
    """The model's forward raises on batches for which `is_bad` holds, of token ids, once "armed" is
    counted; counts forwards and failures."""
    inner, seen = model.get_input_embeddings(), Counter[str]()
    original = type(inner).forward

    def forward(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        if module is inner and seen["armed"]:
            seen["forwards"] += 1
            if is_bad(ids):
                seen["failed"] += 1
                raise error
        return original(module, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(inner), "forward", forward)
        yield seen


def has_bad(ids: torch.Tensor) -> bool:
    return bool((ids == BAD_TOKEN).any())


def eight_prompts(culprits: set[int]) -> list[list[int]]:
    """Prompts with `BAD_TOKEN` at the end of the culprits'."""
    rows = prompts(*range(5, 5 + 2 * NUM_BESIDE, 2), seed=72)
    return [[*row, *[BAD_TOKEN] * (at in culprits)] for at, row in enumerate(rows)]


def run_poisoned(
    model: PreTrainedModel,
    culprits: set[int],
    error: Exception,
    is_bad: Callable[[torch.Tensor], bool] = has_bad,
    act: Callable[[Asked, int], Any] = lambda asked, number: None,
    cancelled: tuple[str, ...] = (),
    **config: Any,
) -> Counter[str]:
    """Runs the requests `EIGHT`, by number, of which the culprits alone must end with the error;
    acts before each step."""
    results = {}
    with poisoned(model, error, is_bad) as seen:
        given = {"block_size": 8, "max_num_batched_tokens": 400, **config}
        engine = PagedEngine(model, PagedConfig(**given))
        engine.generate([[5, 6, 7]], GREEDY)  # the replaced forward is checked here
        seen["armed"], asked = 1, Asked(engine)
        for number, (text, options) in enumerate(zip(eight_prompts(culprits), EIGHT)):
            asked.add(str(number), text, options)
        for number in itertools.count():
            act(asked, number)
            results |= results_of(engine.step())
            engine.check_integrity()
            if not engine.has_unfinished:
                break
    assert_drained(engine)
    names = {str(number) for number in culprits}
    asked.check(results, asked.asked.keys() - names - set(cancelled))
    assert all(results[name].error is error for name in names)
    assert all(results[name].finish_reason == "cancelled" for name in cancelled)
    return seen


CULPRITS = {
    "one": {3},
    "first": {0},
    "two": {2, 6},
    "half": {0, 1, 2, 3},
    "all": set(range(NUM_BESIDE)),
}


@pytest.mark.slow_cases("gemma3-two", "mamba-one", "mamba-half", "diff_llama-first")
@pytest.mark.parametrize(
    ("name", "who"),
    [
        *itertools.product(("llama", "mamba"), CULPRITS),
        *itertools.product(("gemma3", "diff_llama"), ("first", "two")),
    ],
)
def test_a_request_whose_forward_raises_ends_alone(name: str, who: str) -> None:
    seen = run_poisoned(shared_model(name), CULPRITS[who], MemoryError("on purpose"))
    most = {"one": 4, "first": 4, "two": 7}  # by halves, from 8 requests to one
    assert seen["failed"] <= most.get(who, 2 * NUM_BESIDE - 1)
    assert who != "all" or seen["forwards"] == seen["failed"]


@pytest.mark.slow_cases("*-mamba")
@pytest.mark.parametrize("name", ["llama", "mamba"])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("of all"), MemoryError("of all")], ids=["cuda", "host"]
)
def test_requests_that_fit_in_halves_all_go_on(name: str, error: Exception) -> None:
    most = max(map(len, eight_prompts(set()))) if name == "llama" else 6

    def is_much(ids: torch.Tensor) -> bool:
        return (ids.numel() if name == "llama" else len(ids)) > most

    assert run_poisoned(shared_model(name), set(), error, is_much, capture=False)["failed"] > 1


@pytest.mark.slow
def test_requests_come_and_go_while_halves_are_computed() -> None:
    leaving = {1: ["1"], 3: ["7", "late 2"]}

    def act(asked: Asked, number: int) -> None:
        if number in (1, 2):  # between two halves
            asked.add(f"late {number}", *asked.asked[str(number)])
        for name in leaving.get(number, []):
            asked.engine.cancel(name)

    left = ("1", "7", "late 2")
    run_poisoned(models.get("llama"), {2}, OnPurpose("on purpose"), act=act, cancelled=left)


# -------------------------------------------------------------------- past the table of positions

POSITIONS = tables.NUM
LONG_TEXT, SHORT_TEXT = 20, 9  # tokens
# one token more than there are positions
PAST = {"do_sample": False, "max_new_tokens": POSITIONS + 2 - LONG_TEXT}
LAST = {"do_sample": False, "max_new_tokens": POSITIONS + 1 - LONG_TEXT}
ONE = {"do_sample": False, "max_new_tokens": 1}


@pytest.mark.parametrize("name", tables.LEARNED)
def test_a_request_past_the_table_of_positions_ends_alone_or_is_refused(name: str) -> None:
    model = tables.get(name)
    long, short, longest = prompts(LONG_TEXT, SHORT_TEXT, POSITIONS + 1, seed=2)
    with PagedEngine(model, CONFIG) as engine:
        refused = f"takes {POSITIONS + 1} positions, .* holds {POSITIONS}: shorten"
        with pytest.raises(IndexError, match=refused):
            engine.add_request(longest, ONE)
        assert not engine.has_unfinished and engine.memory.stats().peak_blocks == 0
        asked = Asked(engine)
        asked.add("last", long, LAST)
        asked.add("short", short, PAST)
        asked.add("fills the table", longest[1:], ONE)
        engine.add_request(long, PAST, request_id="past")
        outputs = steps(engine)
        assert_drained(engine)
        results = asked.check(results_of(outputs))
        (result,) = engine.generate([longest], ONE)
    failed = results["past"]
    for error in (result.error, failed.error):
        assert isinstance(error, IndexError)
    assert f"ends after {POSITIONS}" in str(failed.error) and failed.finish_reason == "error"
    assert f"`max_new_tokens` to {LAST['max_new_tokens']}," in str(failed.error)
    assert failed.token_ids == told_by(outputs)["past"][0] == results["last"].token_ids


MANY = {
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 5},
    "ngrams": {"do_sample": False},
}


@pytest.mark.parametrize(
    ("name", "mode"), [*itertools.product(("gpt2", "gpt_neo"), MANY), ("bart", "beams")]
)
def test_rows_and_drafts_past_the_table_of_positions(name: str, mode: str) -> None:
    model = tables.get(name)
    repeated, short = prompts(4, SHORT_TEXT, seed=2)
    repeated = repeated * 5
    options = {**MANY[mode], "max_new_tokens": POSITIONS + 3, "eos_token_id": None}
    speculation = "ngram" if mode == "ngrams" else None
    with PagedEngine(model, PagedConfig(block_size=8, speculation=speculation)) as engine:
        engine.add_request(repeated, options, request_id="past", seed=1)
        asked = Asked(engine, [short])
        failed = asked.check()["past"]
    assert isinstance(failed.error, IndexError) and "table of positions" in str(failed.error)
    if mode in ("lookup", "ngrams"):
        assert [failed.token_ids] == lone_run(model, repeated, LAST)


def test_an_assistant_with_fewer_positions_than_its_target_drafts_as_far_as_it_can() -> None:
    model, texts = models.get("gpt2"), prompts(LONG_TEXT, POSITIONS + 5, seed=2)
    options = {"do_sample": False, "max_new_tokens": 30}
    with PagedEngine(model, CONFIG) as engine:
        results = engine.generate(texts, options, assistant_model=tables.get("gpt2"))
        assert_drained(engine)
    assert_lone(engine, texts, results, options)
    assert results[0].num_drafts > 0 == results[1].num_drafts


def test_positions_that_a_caller_gives_count() -> None:
    model, ids = tables.get("gpt2"), models.token_ids(1, SHORT_TEXT, seed=2)
    inputs = {"position_ids": torch.arange(10, 10 + SHORT_TEXT)[None]}
    options = {"do_sample": False, "max_new_tokens": POSITIONS + 1 - 10 - SHORT_TEXT}
    expected = model.generate(ids, **inputs, **options)[0, SHORT_TEXT:].tolist()
    (text,) = ids.tolist()
    with PagedEngine(model, CONFIG) as engine:
        engine.add_request(text, {"do_sample": False, "max_new_tokens": 30}, inputs=inputs)
        (result,) = run_all(engine).values()
        assert isinstance(result.error, IndexError) and result.token_ids == expected
        inputs["position_ids"] = inputs["position_ids"] + POSITIONS - 12
        with pytest.raises(IndexError, match="shorten the prompt"):
            engine.add_request(text, GREEDY, inputs=inputs)
        assert_drained(engine)


# --------------------------------------------------------------- steps raise outside of a forward

# what a step calls outside of the forward
OUTSIDE = {
    "the span opens": "loop.executor.open",
    "drafts": "loop.propose",
    "attention is switched": "loop.executor.attention",
    "the schedule": "loop.scheduler._continue_running",
    "running rows get tokens": "loop.scheduler._continue_running",
    "a request is admitted": "loop.scheduler.preemption.admit",
    "blocks are taken": "loop.blocks.take",
    "blocks are named": "loop.blocks.index.add",
    "the timeline": "loop.scheduler.timeline.record_step",
    "copies": "loop.blocks.flush_copies",
    "adapters are checked": "engine_core.adapters_room_for",
    "a model change is handled": "loop.executor.handle_model_change",
    "logits are given to requests": "loop.ledger.deliver",
    "tokens are applied": "loop.ledger.apply",
    "a token is appended": "loop.ledger.append",
    "the span is committed": "loop.executor.commit",
    "the engine goes idle": "loop.executor.go_idle",
}


def failing(
    patch: pytest.MonkeyPatch, engine: PagedEngine, place: str, times: int, after: int = 0
) -> list[str]:
    """Makes a place raise at each of `times` calls, after some that do not; returns a list that
    each raise extends."""
    path, _, name = OUTSIDE[place].rpartition(".")
    owner = attrgetter(path)(SimpleNamespace(loop=engine._core.loop, engine_core=engine_core))
    calls, raised, method = itertools.count(), [], getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if after <= next(calls) < after + times:
            raised.append(place)
            raise OnPurpose("on purpose")
        return method(*args, **kwargs)

    patch.setattr(owner, name, call)
    return raised


# places of each part of a step that raise before a request has tokens; behind some steps: all
FIRST = [
    "the span opens",
    "the schedule",
    "a request is admitted",
    "logits are given to requests",
    "tokens are applied",
    "a token is appended",
    "the span is committed",
    "the engine goes idle",
]


@pytest.mark.slow_cases("the engine goes idle-3", "the span is committed-3")
@pytest.mark.parametrize(
    ("place", "after"), [*itertools.product(OUTSIDE, [3]), *itertools.product(FIRST, [0])]
)
def test_a_step_that_raises_again_and_again_ends_its_requests(
    place: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request ends soon, with its tokens or with that error, and later ones are served."""
    with small(max_num_seqs=4) as engine:
        asked, results, num_raised = beside(engine), {}, 0
        with monkeypatch.context() as patch:
            raised = failing(patch, engine, place, 10**6, after)
            for _ in range(200):
                try:
                    outputs = engine.step()
                except OnPurpose:
                    num_raised += 1
                else:
                    results |= results_of(outputs)
                if not engine.has_unfinished:
                    break
        assert set(results) == set(OTHERS)
        assert num_raised or (not raised and (place, after) == ("the engine goes idle", 3))
        failed = {name: str(results[name].error) for name in results if results[name].error}
        assert all("on purpose" in error or "OnPurpose" in error for error in failed.values())
        asked.check(results, results.keys() - failed)
        engine.check_integrity()
        assert engine.stats().used_blocks == 0
        beside(engine).check()


# places where an exception ends the requests concerned
NOT_REPEATED = {"logits are given to requests", "tokens are applied", "a token is appended"}


def test_a_step_that_raises_once_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    texts = prompts(4, 19, 9)
    with small() as engine:
        engine.generate([[5, 6]], GREEDY)
        for place in sorted(OUTSIDE.keys() - NOT_REPEATED):
            caplog.clear()
            with pytest.MonkeyPatch.context() as patch:
                after = int(place != "the engine goes idle")
                raised = failing(patch, engine, place, 1, after)
                assert_lone(engine, texts, engine.generate(texts, GREEDY))
            assert_drained(engine)
            engine.reset_prefix_cache()
            said = [r for r in caplog.records if "is repeated once" in r.getMessage()]
            assert len(said) == len(raised) == 1, place


def test_readers_of_streams_get_the_error_of_a_step_and_later_ones_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = prompts(4, 19, 9)

    async def read(engine: PagedEngine, prompt: list[int]) -> Any:
        return [output.result async for output in engine.astream([prompt], GREEDY)][-1]

    async def read_all(engine: PagedEngine) -> list[Any]:
        reads = (read(engine, prompt) for prompt in texts)
        return await asyncio.wait_for(asyncio.gather(*reads), 60)

    with small() as engine:
        engine.generate([[5, 6]], GREEDY)
        with monkeypatch.context() as patch:
            failing(patch, engine, "the schedule", 10**6)
            ends = asyncio.run(read_all(engine)) + engine.generate(texts, GREEDY)
            ends += [output.result for output in engine.stream(texts, GREEDY)]
            assert len(ends) == 9 and all(isinstance(end.error, OnPurpose) for end in ends)
        assert_lone(engine, texts, asyncio.run(read_all(engine)))
        assert_drained(engine)


# ------------------------------------------------------------------ blocks are short, no progress


def test_an_error_that_blocks_are_short_ends_the_first_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> Any:
        raise OutOfBlocksError("others hold blocks")

    with small() as engine:
        asked = Asked(engine, prompts(4))
        engine.step()
        for name, prompt in zip("12", prompts(19, 9)):
            asked.add(name, prompt)
        with monkeypatch.context() as patch:
            patch.setattr(engine._core.loop.scheduler, "schedule", fail)
            with pytest.raises(OutOfBlocksError):
                engine.step()
            (output,) = engine.step()
        assert output.request_id == "1" and isinstance(output.result.error, OutOfBlocksError)
        asked.check(run_all(engine), "02")
        assert_drained(engine)


def test_no_progress_raises_after_a_bounded_number_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with small() as engine:
        asked = Asked(engine, [[5, 6, 7]])
        scheduler = engine._core.loop.scheduler
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "schedule", lambda: StepPlan.of([]))
            for _ in range(MAX_IDLE_STEPS - 1):
                engine.step()
            stalled = r"no token for 8 steps.*1 waiting.*blocks"
            with pytest.raises(EngineStalledError, match=stalled):
                engine.step()
        asked.check()
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "schedule", lambda: StepPlan.of([]))
            (result,) = engine.generate([[5, 6]], GREEDY)
        assert isinstance(result.error, EngineStalledError)
        assert_drained(engine)


# ------------------------------------------------------------------------- the model is unchanged


def test_inference_mode_and_grad_mode_may_change_between_calls() -> None:
    texts, inference = prompts(9, 20), torch.inference_mode
    with small() as engine:
        for mode in (inference, contextlib.nullcontext, torch.enable_grad, inference):
            with mode():
                results = engine.generate(texts, GREEDY)
            assert_lone(engine, texts, results)
        asked = Asked(engine, texts)
        with inference():
            engine.step()
        engine.step()
        asked.check()
