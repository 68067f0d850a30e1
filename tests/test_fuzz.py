"""A fixed part of `python -m tests.support.fuzz`, and a check that its comparison detects
differences."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.rooms import RoomMissingError
from tests.support import fuzz, fuzz_cases, models
from tests.support.fuzz_cases import Case

SEED = 2026
CASES = 40


@pytest.mark.slow_cases("10", "9", "2?", "3?")
@pytest.mark.parametrize("number", range(CASES))
def test_case(number: int) -> None:
    case = fuzz_cases.draw(SEED, number)
    try:
        assert fuzz.run_case(case)
    except RoomMissingError:
        raise
    except Exception as error:
        command = f"python -m tests.support.fuzz --seed {SEED} --only {number}"
        raise AssertionError(f"{command}\n{case}\n{error}") from error


def test_a_case_is_drawn_from_its_number_alone() -> None:
    assert [fuzz_cases.draw(SEED, n) for n in (3, 7)] == [fuzz_cases.draw(SEED, n) for n in (3, 7)]
    assert fuzz_cases.draw(SEED, 3) != fuzz_cases.draw(SEED, 7) != fuzz_cases.draw(SEED + 1, 7)


def test_every_option_is_drawn_among_500_cases() -> None:
    cases = [fuzz_cases.draw(0, number) for number in range(500)]
    options = {name for case in cases for name in (*case.options, *case.late)}
    invalid = [name for given in fuzz_cases.INVALID for name in given]
    expected = {*fuzz_cases.SHAPERS, *fuzz_cases.SHARPENERS, *invalid}
    expected |= {"use_cache", "prefill_chunk_size", "early_stopping", "length_penalty", "ends"}
    expected |= {"num_return_sequences", "output_scores", "output_logits", "output_hidden_states"}
    expected |= {"max_new_tokens", "max_length", "processors", "criteria", "stop_strings"}
    expected |= {"prefix_allowed", "streamer", "prompt_lookup"}
    assert not expected - options
    assert {case.model for case in cases} == set(models.DECODER_ONLY)
    assert {case.mode for case in cases} == {"greedy", "sample", "beams", "beam_sample"}
    assert {case.cache_config["block_size"] for case in cases} == {8, 16, 32}
    for flag in ("train", "by_config"):
        assert {getattr(case, flag) for case in cases} == {True, False}
    assert {kind for case in cases for kind in case.calls} == {"first", "same", "turn"}


@pytest.mark.slow
def test_ends_make_rows_stop_at_different_steps() -> None:
    """In most cases of several rows with ends from the greedy text, rows end at several lengths."""
    found, model = [], models.get("llama")
    for case in (fuzz_cases.draw(SEED, number, "llama") for number in range(100)):
        has_ends = isinstance(case.late.get("ends"), list)
        if len(case.lengths) == 1 or case.prompts == "equal" or not has_ends:
            continue
        rows = fuzz_cases.prompts(case)
        text = fuzz.greedy_text(model, fuzz_cases.inputs(case, rows, model))
        case = dataclasses.replace(case, by_config=False)
        ends = fuzz_cases.arguments(case, max(map(len, rows)), text).arguments["eos_token_id"]
        ends = ends if isinstance(ends, list) else [ends]
        stops = [token in ends for row in text for token in row]
        starts = range(0, len(stops), fuzz.GREEDY_STEPS)
        lengths = {(stops[n : n + fuzz.GREEDY_STEPS] + [True]).index(True) for n in starts}
        found.append(len(lengths) > 1)
    assert len(found) >= 20
    assert sum(found) > len(found) / 2


# A call with everything that is compared: scores, logits, states, a processor that records its
# inputs.
RETURNED = ("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states")
PLAIN = Case(
    seed=SEED,
    number=0,
    model="llama",
    mode="sample",
    lengths=(9, 4, 16),
    prompts="words",
    mask="given",
    calls=("first", "turn"),
    options={"do_sample": True, **dict.fromkeys(RETURNED, True)},
    late={"max_new_tokens": 8, "ends": [(0, 4), (1, 6)], "processors": ["bias"], "streamer": True},
    cache_config={"block_size": 8},
    budget=None,
    by_config=False,
    train=False,
)
BEAMS = dataclasses.replace(
    PLAIN,
    mode="beams",
    options={
        **PLAIN.options,
        **dict(do_sample=False, num_beams=3, early_stopping=True, length_penalty=0.0),
    },
    late={"max_new_tokens": 16, "ends": "frequent", "processors": ["bias"]},
)


def raises(error: type[Exception], message: str) -> Callable[[Any, Any], None]:
    def wrong(output: Any, processor: Any) -> None:
        raise error(message)  # a new one each time: its traceback holds the call's cache

    return wrong


def wrong_dtype(output: Any, processor: Any) -> None:
    output.sequences = output.sequences.int()


def missing_step(output: Any, processor: Any) -> None:
    output.logits = output.logits[:-1]


# `ModelOutput` itself does not allow this
delete = collections.OrderedDict.__delitem__

# the message, and what makes an output wrong that a processor has seen
WRONGS: dict[str, Callable[[Any, Any], object]] = {
    r"sequences: first difference at \[1,": lambda output, _: output.sequences[1, -8].bitwise_xor_(
        1
    ),
    r"scores\[0\]": lambda output, _: output.scores[0].add_(0.01),
    r"logits\[1\]": lambda output, _: output.logits[1][0, 7].add_(0.01),
    r"hidden_states\[1\]": lambda output, _: output.hidden_states[1][-1][0, 0, 3].add_(0.01),
    r"sequences: torch.int64 became torch.int32": wrong_dtype,
    r"logits: \d+ steps became \d+": missing_step,
    r"fields: .* became": lambda output, _: delete(output, "logits"),
    r"another random state": lambda output, _: torch.rand(1),
    r"shown to user code": lambda _, processor: processor.seen[1][0, 0].add_(1),
    r"plain is served, paged raises .*KeyError": raises(KeyError, "not asked for"),
    r"out of blocks without a budget": raises(hf_paged.OutOfBlocksError, "without a budget"),
}

After = Callable[[Any, Any, Any, bool, Any], object]


@pytest.fixture
def after_each_call(monkeypatch: pytest.MonkeyPatch) -> Callable[[After], None]:
    """Sets what is called after each generate with its model, inputs, options, paged, output."""

    def wrap(after: After) -> None:
        right = fuzz.generate

        def generate(*call: Any) -> Any:
            output = right(*call)
            after(*call, output)
            return output

        monkeypatch.setattr(fuzz, "generate", generate)

    return wrap


CASES_OF_WRONGS = [
    *((said, PLAIN) for said in WRONGS),
    *((said, BEAMS) for said in WRONGS if said.startswith(("sequences: first", "scores", "shown"))),
]


@pytest.mark.parametrize(("said", "case"), CASES_OF_WRONGS)
def test_a_wrong_result_is_caught(said: str, case: Case, after_each_call: Any) -> None:
    def change(model: Any, inputs: Any, options: Any, paged: bool, output: Any) -> None:
        if paged:
            WRONGS[said](output, options["logits_processor"][0])

    after_each_call(change)
    with pytest.raises(AssertionError, match=said):
        fuzz.run_case(case)


@pytest.mark.slow
def test_blocks_that_stay_in_use_are_caught(after_each_call: Any) -> None:
    held = []
    after_each_call(lambda *call: held.append(call[-1].past_key_values))
    with pytest.raises(AssertionError, match="blocks are still in use"):
        fuzz.run_case(PLAIN)


def test_a_model_left_changed_is_caught(after_each_call: Any) -> None:
    after_each_call(lambda model, inputs, options, paged, output: model.train(paged))
    with pytest.raises(AssertionError, match="the model is not as it was"):
        fuzz.run_case(PLAIN)


@pytest.mark.parametrize("case", [PLAIN, BEAMS], ids=["sample", "beams"])
def test_what_comes_after_a_row_s_end_is_not_compared(case: Case, after_each_call: Any) -> None:
    changed: list[int] = []

    def change(model: Any, inputs: Any, options: Any, paged: bool, output: Any) -> None:
        rows = fuzz.OpenRows(case, output, inputs["input_ids"].shape[1])
        for step, scores in enumerate(output.scores if paged else ()):
            ended = sorted({*range(len(scores))} - {*rows.at(step)})
            scores[ended] = float("nan")
            changed.extend(ended)

    after_each_call(change)
    fuzz.run_case(case)
    assert changed
