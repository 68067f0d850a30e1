"""Seconds that calls spend on what later calls reuse."""

from __future__ import annotations

import functools
import itertools
import threading
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import hf_paged
from hf_paged import timing
from hf_paged.interrupts import setting
from tests.support import models
from tests.support.rooms import records_on_cpu


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts its calls."""
    counts = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(counts)))


def test_parts_within_parts_are_counted_once(clock: None) -> None:
    seconds: dict[str, float] = {}
    with timing.timed("before"):
        pass
    with setting(timing.setup_seconds, seconds), pytest.raises(KeyError):
        with timing.timed("outer"):  # from 0 to 5
            for _ in range(2):
                with timing.timed("inner"):  # from 1 to 2, from 3 to 4
                    pass
            raise KeyError
    assert seconds == {"outer": 3, "inner": 2}


def test_threads_that_share_seconds_keep_their_own_durations(clock: None) -> None:
    seconds: dict[str, float] = {}

    def step() -> None:
        with setting(timing.setup_seconds, seconds), timing.timed("record"):  # from 1 to 2
            pass

    with setting(timing.setup_seconds, seconds), timing.timed("self_check"):  # from 0 to 3
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert seconds == {"record": 1, "self_check": 3}


def test_the_route_says_what_the_first_call_cost() -> None:
    model, options = models.build("llama"), {"max_new_tokens": 20, "do_sample": False}
    parts = {"self_check", "record"} if records_on_cpu() else {"self_check"}
    calls = []
    for _ in range(2):
        model.generate(**models.prompt("llama"), **options, **models.PAGED)
        calls.append(hf_paged.last_route(model))
    assert [set(route.setup_seconds) for route in calls if route] == [parts, set()]
    assert calls[0] is not None and all(seconds > 0 for seconds in calls[0].setup_seconds.values())
    assert calls[0].reason == calls[1].reason  # type: ignore[union-attr]


def test_an_engine_adds_up_what_its_requests_cost() -> None:
    recorded = ["record"] if records_on_cpu() else []  # loads the kernels
    model = models.build("llama")
    with hf_paged.PagedEngine(model) as engine:
        engine.generate([[5, 6, 7]], {"max_new_tokens": 3, "do_sample": False})
        first = engine.route
        engine.generate([[5, 6, 7]], {"max_new_tokens": 8, "do_sample": False})
        assert first is not None and set(first.setup_seconds) == {"self_check"}
        later = engine.route
    assert later is not None and set(later.setup_seconds) == {"self_check", *recorded}
    assert later.setup_seconds["self_check"] == first.setup_seconds["self_check"]
    assert set(hf_paged.last_route(model).setup_seconds) == set(later.setup_seconds)  # type: ignore[union-attr]


@pytest.mark.skipif(not records_on_cpu(), reason="no step is recorded")
def test_a_first_call_runs_few_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """13 to check the model; a prefill, 3 decode steps, 2 to record the next; all others are
    replayed."""
    # no state that a recording would depend on
    forward, numbers = LlamaForCausalLM.forward, itertools.count()

    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        next(numbers)
        return forward(*args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    model, options = models.build("llama"), {"max_new_tokens": 40, "do_sample": False}
    for expected in (13 + 6, 1):
        first = next(numbers)
        model.generate(**models.prompt("llama"), **options, **models.PAGED)
        assert next(numbers) - first - 1 == expected
