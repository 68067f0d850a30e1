"""Calls of an engine other than steps, interrupted at any of our lines."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hf_paged
from hf_paged import PagedEngine
from tests.batching.test_unfinished_requests import GREEDY
from tests.support.engine_helpers import (
    assert_drained,
    assert_lone,
    engine_of,
    results_of,
    steps,
)

OURS = str(Path(hf_paged.__file__).parent)
# Calls of C before which Python looks for no signal: a `with` of a lock has such a line of its own
# where it ends, and a `finally` begins with the other.
IN_C = ("with ", "self.pauses.pop(")
# the lines that count `guarded` calls call nothing either
GUARD = PagedEngine.free.__code__
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
        if not frame.f_code.co_filename.startswith(OURS) or frame.f_code is GUARD:
            return None
        if event == "line":
            self.count += 1
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
            if self.count >= self.number > 0 and not text.startswith(IN_C):
                raise KeyboardInterrupt  # which ends the tracing
        return self.trace

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(OURS):
            return
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # an exception may be thrown into it: a signal cannot come before it is handled
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
    engine = engine_of()
    engine.add_request(PROMPT, LONG, request_id="a")
    engine.add_request([8, 9], LONG, request_id="b")
    engine.step()
    return engine


def leave(engine: PagedEngine) -> None:
    engine.__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("end", [PagedEngine.free, leave])
def test_an_interrupted_free_leaves_an_engine_that_can_be_used(end: Any) -> None:
    num_interrupted = 0
    for interrupt in interrupts(functools.partial(end, build_engine()), 25):
        engine = build_engine()
        num_interrupted += interrupt.run(functools.partial(end, engine))
        for _ in range(2):
            assert_lone(engine, [PROMPT], engine.generate([PROMPT], GREEDY), GREEDY)
        steps(engine)
        assert_drained(engine)
        engine.free()
    assert num_interrupted > 40


def test_free_called_again_ends_what_an_interrupted_one_left() -> None:
    for interrupt in interrupts(build_engine().free, 40):
        engine = build_engine()
        interrupt.run(engine.free)
        engine.free()
        ended = results_of(engine.step()).keys()
        assert not engine.has_unfinished
        # two in a row may fall on both attempts to tell one
        assert interrupt.again or ended == {"a", "b"}, f"{vars(interrupt)}"
        assert engine._core.loop is None


# ------------------------------------------------------------------------------------------ pauses


def update(engine: PagedEngine) -> None:
    with engine.weights_update():
        pass


def pause(engine: PagedEngine) -> None:
    with engine.pause():
        pass


def pause_and_resume(engine: PagedEngine) -> None:
    engine.pause()
    engine.resume()


class Interrupted:
    """A lock whose holder is interrupted, once, as it has it."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.is_due = True

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("call", [update, pause, pause_and_resume])
def test_an_interrupt_as_a_pause_begins_or_ends_leaves_no_engine_paused(call: Any) -> None:
    engine = engine_of()
    calling = functools.partial(call, engine)
    for interrupt in interrupts(calling, 1000):
        interrupt.run(calling)
        if call is pause_and_resume:
            with contextlib.suppress(RuntimeError):  # it has ended, or never begun
                engine.resume()
        engine.add_request(PROMPT, GREEDY)
        steps(engine)
    # the error may be kept, as by a notebook, with its frames: here of a wait for a step
    pauses = engine._core.pauses
    lock, pauses.lock = pauses.lock, Interrupted(pauses.lock)
    with pytest.raises(KeyboardInterrupt) as caught:
        call(engine)
    pauses.lock = lock
    engine.generate([PROMPT], GREEDY)
    assert caught.value is not None


def assert_paused(engine: PagedEngine) -> None:
    with pytest.raises(RuntimeError, match="paused by this thread"):
        engine.generate([PROMPT], GREEDY)


def test_a_pause_lasts_until_it_is_resumed() -> None:
    """Also within its context, and if its result is dropped."""
    engine = engine_of()
    with engine.pause(), engine.pause():
        engine.resume()
        assert_paused(engine)
        engine.resume()
        engine.generate([PROMPT], GREEDY)
    with pytest.raises(RuntimeError, match="not paused"):
        engine.resume()
    engine.pause()
    gc.collect()
    assert_paused(engine)
    engine.resume()
    assert engine.generate([PROMPT], GREEDY)[0].error is None
