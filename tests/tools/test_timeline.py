"""The timeline against the requests' actual events, step by step; its bounds."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import tracemalloc
from typing import Any

import pytest

from hf_paged import PagedEngine
from hf_paged.batching.request import Request, Sequence, Status
from hf_paged.batching.scheduling.preemption import Preemption
from hf_paged.plan import StepPlan
from hf_paged.tools.timeline import Activity, Timeline
from tests.support import models
from tests.support.engine_helpers import engine_of, prompts, run_all

LENGTHS = (40, 24, 33, 5, 60)


def make_request(name: str = "r", num_tokens: int = 8) -> Request:
    return Request(name, [Sequence([1] * num_tokens)], 64)


def step(timeline: Timeline, chunks: Any = (), admitted: Any = ()) -> None:
    """A step of these chunks."""
    plan = StepPlan.of(chunks)
    timeline.record_step(dataclasses.replace(plan, num_decodes=0, admitted=admitted))
    for sequence, count in chunks:
        sequence.num_computed_tokens += count


def activities(timeline: Timeline, name: str) -> list[tuple[Activity, int, int]]:
    return [
        (interval.activity, interval.first_step, interval.end_step)
        for interval in timeline.intervals()
        if interval.request_id == name and interval.end_step > interval.first_step
    ]


def test_one_that_comes_and_goes_within_a_step_was_not_in_the_batch() -> None:
    timeline, request = Timeline(), make_request()
    timeline.record_waiting(request)
    for _ in range(5):
        timeline.record_waiting(request)
        step(timeline, admitted=[request])
    assert activities(timeline, "r") == [(Activity.WAITING, 0, 5)]
    assert len(timeline.intervals()) == 1


@pytest.mark.parametrize("kept", [3, 2, 0])
def test_a_swapped_request_recomputes_what_it_lost(kept: int) -> None:
    """In the middle of its prefill, after which it still has `kept` tokens."""
    timeline, request = Timeline(), make_request()
    [sequence] = request.sequences
    timeline.record_waiting(request)
    request.status = Status.RUNNING
    step(timeline, [(sequence, 3)], admitted=[request])
    sequence.swapped = Any
    timeline.record_waiting(request)
    step(timeline)
    sequence.swapped, sequence.num_computed_tokens = None, kept
    step(timeline, [(sequence, 8 - kept)], admitted=[request])
    step(timeline)
    last = Activity.PREFILL if kept == 3 else Activity.RECOMPUTE
    expected = [Activity.PREFILL, Activity.SWAPPED, last, Activity.DECODE]
    assert [activity for activity, *_ in activities(timeline, "r")] == expected
    timeline.record_end(request)
    assert not timeline._num_swapped_tokens


@pytest.mark.parametrize("cause", ["admission", "weights"])
def test_a_request_whose_swapped_blocks_are_dropped(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(num_blocks=12, preemption="swap", prefix_caching=False) as engine:
        for prompt in prompts(40, 24):
            engine.add_request(prompt, {"do_sample": False, "max_new_tokens": 25})
        while Activity.SWAPPED not in {each.activity for each in engine.timeline.intervals()}:
            engine.step()
        if cause == "weights":
            with engine.weights_update("recompute"):
                pass
            now = {each.activity for each in engine.timeline._open_intervals.values()}
            assert now == {Activity.PREEMPTED}
        else:
            monkeypatch.setattr(Preemption, "_swap_in", lambda *args: False)
        while engine.has_unfinished:
            engine.step()
        intervals = engine.timeline.intervals()
    for number in {each.number for each in intervals if each.activity is Activity.SWAPPED}:
        told = [each.activity for each in intervals if each.number == number]
        told = told[told.index(Activity.SWAPPED) :]
        assert Activity.RECOMPUTE in told and Activity.PREFILL not in told


def what_it_did(
    request: Request, before: Activity, counts: dict[Sequence, int], has_lost: bool
) -> Activity:
    """The expected timeline entry of a request after a scheduled step, from the request itself."""
    if request.status is Status.WAITING:
        if request.is_swapped:
            return Activity.SWAPPED
        return Activity.PREEMPTED if request.num_preemptions else Activity.WAITING
    rows = [(counts.get(row, 0), row.num_to_compute) for row in request.open_sequences]
    if all(count <= 1 and num_to_compute <= count for count, num_to_compute in rows):
        return Activity.DECODE
    is_again = before in (Activity.PREEMPTED, Activity.RECOMPUTE)
    is_again |= before is Activity.SWAPPED and has_lost
    return Activity.RECOMPUTE if is_again else Activity.PREFILL


def num_computed(request: Request) -> int:
    return sum(sequence.num_computed_tokens for sequence in request.open_sequences)


@pytest.mark.slow_cases("gemma3-*")
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_against_every_step_under_preemption(
    name: str, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(
        name,
        num_blocks=34 if name == "gemma3" else 20,
        preemption=preemption,
        max_num_batched_tokens=24,
        prefix_caching=False,
    )
    expected: dict[str, list[Activity]] = {}
    requests: list[Request] = []
    for i, prompt in enumerate(prompts(*LENGTHS)):
        options = {"do_sample": False, "max_new_tokens": 25, "num_beams": 3 if i == 1 else 1}
        request_id = engine.add_request(prompt, options)
        requests.append(engine._core.requests[request_id].request)
        expected[request_id] = []
    scheduler = engine._core.loop.scheduler
    schedule = scheduler.schedule

    def watched() -> Any:
        computed = {
            request: num_computed(request) for request in requests if not request.is_finished
        }
        batch = schedule()
        counts = dict(zip(batch.sequences, batch.counts))
        for request, count in computed.items():
            told = expected[request.request_id]
            before = told[-1] if told else Activity.WAITING
            told.append(what_it_did(request, before, counts, num_computed(request) < count))
        return batch

    monkeypatch.setattr(scheduler, "schedule", watched)
    run_all(engine)
    seen = {activity for steps in expected.values() for activity in steps}
    assert (Activity.SWAPPED if preemption == "swap" else Activity.RECOMPUTE) in seen
    for request_id, steps in expected.items():
        told = [
            activity
            for activity, first, end in activities(engine.timeline, request_id)
            for _ in range(first, end)
        ]
        assert told == steps, request_id
    assert engine.timeline.num_steps == engine.stats().num_steps
    intervals = engine.timeline.intervals()
    for number in range(len(LENGTHS)):
        own = [interval for interval in intervals if interval.number == number]
        assert [interval.is_last for interval in own] == [False] * (len(own) - 1) + [True]
        for left, right in itertools.pairwise(own):  # they follow one another
            assert (left.end_step, left.end) == (right.first_step, right.start)
            assert left.activity is not right.activity
        assert own[0].activity is Activity.WAITING
        assert all(interval.start <= interval.end for interval in own)
    engine.free()


def test_it_goes_on_when_the_engine_makes_a_new_core() -> None:
    engine = PagedEngine(models.get("llama"))
    for _ in range(2):
        engine.generate([[5, 6, 7]], {"max_new_tokens": 2}, request_id="again")
        engine.free()
    assert {interval.number for interval in engine.timeline.intervals()} == {0, 1}


@pytest.mark.slow
def test_memory_is_bounded_in_intervals_and_in_bytes() -> None:
    timeline = Timeline(max_intervals=300)
    gc.collect()
    tracemalloc.start()
    try:
        for i in range(1000):
            request = make_request(f"request {i}")
            timeline.record_waiting(request)
            step(timeline)
            timeline.record_end(request)
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(timeline.intervals()) == 300 and not timeline._open_intervals
    assert all(not isinstance(value, Request) for value in timeline.intervals()[0])
    assert num_bytes < 300 * 400
    assert timeline.intervals()[-1].request_id == "request 999"
