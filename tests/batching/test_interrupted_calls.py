"""Calls of an engine other than steps, interrupted at any of our lines."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hf_paged
from hf_paged import PagedEngine
from tests.batching.test_unfinished_requests import GREEDY
from tests.support import models
from tests.support.engine_helpers import assert_drained

OURS = str(Path(hf_paged.__file__).parent)
PROMPT = [5, 6, 7]
LONG = {**GREEDY, "max_new_tokens": 20}


class Interrupts:
    """Raises `KeyboardInterrupt` before the line of ours with this number, in the order of
    execution, and again as the `again`-th function of ours after it is entered."""

    def __init__(self, number: int = 0, again: int = 0) -> None:
        self.number = number
        self.again = again
        self.count = 0
        self.num_entered = 0

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.number:
                raise KeyboardInterrupt  # which ends the tracing
        return self.trace

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(OURS):
            return
        if self.number and self.count >= self.number:
            self.num_entered += 1
            if self.num_entered == self.again:
                raise KeyboardInterrupt

    def run(self, call: Callable[[], object]) -> bool:
        """Returns whether the call was interrupted, and drops the exception, which holds frames."""
        before = sys.gettrace(), sys.getprofile()
        try:
            try:
                sys.setprofile(self.profile)
                sys.settrace(self.trace)
                call()
            finally:
                sys.settrace(before[0])
                sys.setprofile(before[1])
        except KeyboardInterrupt:
            return True
        return False


def interrupts(call: Callable[[], object], num_lines: int) -> Iterator[Interrupts]:
    """Interrupts of calls such as this one: single ones at `num_lines` of its lines, and double
    ones."""
    whole = Interrupts()
    whole.run(call)
    for number in range(1, whole.count + 1, max(1, whole.count // num_lines)):
        yield Interrupts(number)
        yield Interrupts(number, 1 + number % 7)


# ------------------------------------------------------------------------------------ `free`, exit


def build_engine() -> PagedEngine:
    engine = PagedEngine(models.get("llama"), {"block_size": 8})
    engine.add_request(PROMPT, LONG, request_id="a")
    engine.add_request([8, 9], LONG, request_id="b")
    engine.step()
    return engine


def leave(engine: PagedEngine) -> None:
    engine.__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("end", [PagedEngine.free, leave])
def test_an_interrupted_free_leaves_an_engine_that_can_be_used(
    end: Callable[[PagedEngine], None],
) -> None:
    engine = build_engine()
    expected = engine.generate([PROMPT], GREEDY)[0].token_ids
    num_interrupted = 0
    for interrupt in interrupts(functools.partial(end, build_engine()), 25):
        engine = build_engine()
        num_interrupted += interrupt.run(functools.partial(end, engine))
        for _ in range(2):
            (result,) = engine.generate([PROMPT], GREEDY)
            assert result.error is None and result.token_ids == expected, f"{vars(interrupt)}"
        while engine.has_unfinished:
            engine.step()
        assert_drained(engine)
        engine.free()
    assert num_interrupted > 40


def test_free_called_again_ends_what_an_interrupted_one_left() -> None:
    for interrupt in interrupts(build_engine().free, 40):
        engine = build_engine()
        interrupt.run(engine.free)
        engine.free()
        results = {output.request_id: output.result for output in engine.step()}
        assert not engine.has_unfinished
        # two in a row may fall on both attempts to tell one
        assert interrupt.again or {*results} == {"a", "b"}, f"{vars(interrupt)}"
        assert engine._core.loop is None
