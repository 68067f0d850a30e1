"""A fixed part of `python -m tests.support.threads`, and a check that it detects errors."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.overlap import _loops
from tests.support import thread_mixes, threads
from tests.support.thread_mixes import Call, Mix, draw, get_model
from tests.support.tools import run_apart
from tests.support.user_code import OwnError, Processor

SEED = 5


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.full)])
def test_mixes(count: int) -> None:
    """In a separate process, which a hang ends: it prints all stacks."""
    done = run_apart(".threads", "--seed", SEED, "--mixes", count)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"(\w[a-z ]+): (\d+)", done.stdout.splitlines()[-2])
    counts = {name: int(found) for name, found in told}
    assert counts["equal"] > count and counts["shared steps"] > count, counts
    # of the few signals, possibly none hits its call
    signals = ("interrupted",) if count > 100 else ()
    for name in (*signals, "raised", "calls with preemptions", "late callers", "autocast"):
        assert counts.get(name), f"{name}: none of {counts}"


def test_a_mix_is_drawn_from_its_number_alone() -> None:
    assert [draw(SEED, n) for n in (3, 7)] == [draw(SEED, n) for n in (3, 7)]
    assert draw(SEED, 3) != draw(SEED, 7) != draw(SEED + 1, 7)


def test_all_kinds_are_drawn_among_200_mixes() -> None:
    mixes = [draw(0, number) for number in range(200)]
    calls = [call for mix in mixes for own in mix.calls for call in own]
    assert {mix.model for mix in mixes} == set(thread_mixes.MODELS)
    assert {mix.in_main for mix in mixes} == {mix.may_run_out for mix in mixes} == {True, False}
    codes = [code for call in calls for code in (call.processor, call.criterion, call.streamer)]
    kinds = {code[0] for code in codes if code is not None}
    assert kinds == {"bias", "slow", "raises", "watches", "ends", "rows", "one", "by row"}
    options = {name for call in calls for name in (*call.options, *call.cache_config)}
    assert {"num_beams", "num_return_sequences", "eos_token_id"} <= options
    assert {"return_dict_in_generate", "num_blocks", "preemption", "cache_salt"} <= options
    for flag in ("is_autocast", "is_inference", "is_poisoned"):
        assert {getattr(call, flag) for call in calls} == {True, False}
    for mix in mixes:
        assert sum(call.options["do_sample"] for own in mix.calls for call in own) <= 1


GREEDY = Call(
    owner="0/0",
    texts=((0, 9), (1, 5)),
    options={"max_new_tokens": 8, "do_sample": False},
    cache_config={"block_size": 8},
    processor=("watches", 0),
    criterion=None,
    streamer=("one", 1),
    is_autocast=False,
    is_inference=False,
    is_poisoned=False,
    seed=0,
    pause=0.0,
)


def mix_of(*calls: Call) -> Mix:
    own = tuple((call,) for call in calls)
    return Mix("llama", own, in_main=False, interrupted=None, delay=0.0)


def with_processor(kind: str) -> Call:
    return dataclasses.replace(GREEDY, processor=(kind, 3))


MIX = mix_of(*(dataclasses.replace(GREEDY, owner=f"{thread}/0") for thread in range(4)))


def played(mix: Mix, change: Callable[[Any], object] | None, patch: pytest.MonkeyPatch) -> str:
    """Errors reported for a mix; `change` gets the outcome of every paged call."""
    right = thread_mixes.play

    def play(model: Any, call: Call, is_paged: bool, around: Any = None) -> Any:
        outcome = right(model, call, is_paged, around)
        if is_paged and change is not None:
            change(outcome)
        return outcome

    patch.setattr(threads, "play", play)
    return "\n".join(threads.run_mix(mix, threads.Observer()))


def in_inference_mode(outcome: Any) -> None:
    with torch.inference_mode():
        outcome.tokens = outcome.tokens.clone()


def leave_a_loop(outcome: Any) -> None:
    for memory in list(_loops):
        _loops[memory]["left"] = None  # type: ignore[assignment]


def ends_with(error: BaseException) -> Callable[[Any], object]:
    return lambda outcome: setattr(outcome, "error", error)


WRONGS: dict[str, Callable[[Any], object]] = {
    "plain's tokens": lambda outcome: outcome.tokens[1, -1].add_(1),
    "scores 1.0e-02 from plain's in step 3": lambda outcome: outcome.shown[3][1][0, 7].add_(0.01),
    "the streamer was told": lambda outcome: outcome.told.pop(),
    "an inference tensor": in_inference_mode,
    "plain gave tokens, paged:\nKeyError": ends_with(KeyError("not asked for")),
    "interrupted by another's signal": ends_with(KeyboardInterrupt()),
    "no call kept the blocks": ends_with(hf_paged.OutOfBlocksError("without a budget")),
    "the model was": lambda outcome: get_model("llama").train(),
    "loops are left": leave_a_loop,
}


@pytest.mark.parametrize("said", WRONGS)
def test_a_wrong_outcome_is_caught(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        assert said in played(MIX, WRONGS[said], monkeypatch)
    finally:
        get_model("llama").eval()
        _loops.clear()


def test_what_is_right_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not played(MIX, None, monkeypatch)


@pytest.mark.slow
def test_blocks_that_stay_in_use_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []

    def holds(outcome: Any) -> None:
        paged = {"cache_implementation": "paged", "cache_config": GREEDY.cache_config}
        options = {**GREEDY.options, **paged, "return_dict_in_generate": True}
        held.append(get_model("llama").generate(torch.full((1, 5), 30), **options))

    assert "blocks are still in use" in played(mix_of(GREEDY), holds, monkeypatch)


def test_the_error_of_another_call_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(outcome: Any) -> None:
        assert isinstance(outcome.error, OwnError)
        outcome.error = OwnError("another")

    assert "another call's" in played(mix_of(with_processor("raises")), swapped, monkeypatch)


def test_a_call_in_half_precision_computed_in_another_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = dataclasses.replace(GREEDY, is_autocast=True)
    assert not played(mix_of(call), None, monkeypatch)

    def in_float(outcome: Any) -> None:
        outcome.shown = [(ids, scores + 1e-4, flag) for ids, scores, flag in outcome.shown]

    assert "not computed in half precision" in played(mix_of(call), in_float, monkeypatch)


@pytest.mark.slow
def test_a_hang_is_told_with_all_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, right = threading.Event(), Processor.__call__

    def waits(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.is_paged and self.kind == "slow":
            ended.wait()
        return right(self, input_ids, scores)

    monkeypatch.setattr(threads, "HANG_SECONDS", 1.0)
    monkeypatch.setattr(Processor, "__call__", waits)
    try:
        with pytest.raises(threads.Hang) as caught:
            threads.run_mix(mix_of(GREEDY, with_processor("slow")), threads.Observer())
        assert "in waits" in str(caught.value)
    finally:
        ended.set()
