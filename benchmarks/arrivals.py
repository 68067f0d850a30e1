"""Requests that arrive at random moments: a log-normal ShareGPT-like trace with Poisson arrivals
(Orca, OSDI 2022, section 6; PagedAttention, arXiv 2309.06180, section 6.1), at fractions of the
rate that `PagedEngine` reaches when all requests wait at the start.

Plain `generate` takes the requests that have arrived, at most `MAX_BATCH`, and returns when the
last row has ended; its times per token are those that a streamer would see. Normalized latency is a
request's time from arrival to end, divided by its new tokens.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import runner
from benchmarks.continuous import PATIENCE, GenerateBatch, add
from benchmarks.models import Shape
from benchmarks.paper.traces import SHAREGPT, make_trace
from benchmarks.systems import Engine, Generate, latencies
from benchmarks.workloads import GREEDY, Batch, Workload, batch_of

MAX_BATCH = 32
SHARES = (0.4, 0.8, 1.2, 2.0)  # of the engine's rate when all requests wait
WORKLOAD = Workload("arrivals", "Poisson arrivals, ShareGPT-like lengths", 0, (0, 0), (0, 0))


@dataclass
class Record:
    """Timestamps of one request, in seconds since the start of the trace."""

    arrived: float
    tokens: list[float] = field(default_factory=list)
    finished: float = 0.0


@dataclass(frozen=True)
class Trace:
    """Requests with their arrival times in seconds, in order."""

    batch: Batch
    arrivals: list[float]

    @classmethod
    def make(cls, device: str, quick: bool, vocab: int, rate: float, repeat: int) -> Trace:
        """On a CPU lengths are an eighth and requests fewer, to bound the run time."""
        count, scale = (40, 0.125) if device == "cpu" else (256, 1.0)
        if quick:
            count, scale = 8, 0.05
        trace = make_trace(SHAREGPT, count, rate)
        return cls(batch_of(trace, scale, vocab, repeat), trace.arrivals)


class Clock:
    """A trace that is being served."""

    def __init__(self, trace: Trace) -> None:
        self.records, self.batch = [Record(time) for time in trace.arrivals], trace.batch
        self.start, self.next = time.perf_counter(), 0

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    def arrived(self, most: int = 0) -> range:
        """The requests that have arrived since the last call, at most `most` of them."""
        first, now, end = self.next, self.now, len(self.records)
        end = min(end, first + most) if most else end
        while self.next < end and self.records[self.next].arrived <= now:
            self.next += 1
        return range(first, self.next)

    def wait(self) -> float:
        """Seconds until the next request; 1 after the last."""
        if self.next == len(self.records):
            return 1.0
        return max(0.0, self.records[self.next].arrived - self.now)


Serve = Callable[[Any, Shape, Trace], list[Record]]


def by_engine(model: Any, shape: Shape, trace: Trace) -> list[Record]:
    """Runs `PagedEngine.step` and adds requests as they arrive."""
    engine = Engine()
    engine(model, shape, WORKLOAD, Batch([[shape.never - 1] * 8], [2]))  # as in a running server
    running, clock = dict[str, Record](), Clock(trace)
    try:
        while clock.next < len(clock.records) or running:
            for index in clock.arrived():
                name = engine.add(clock.batch.prompts[index], clock.batch.new_tokens[index], GREEDY)
                running[name] = clock.records[index]
            if not running:
                time.sleep(clock.wait())
                continue
            for output in engine.engine.step():
                record = running[output.request_id]
                record.tokens.extend([clock.now] * len(output.new_tokens))
                if output.finished:
                    if output.result.error is not None:
                        raise output.result.error
                    running.pop(output.request_id).finished = clock.now
    finally:
        engine.free()
    return clock.records


def by_generate(model: Any, shape: Shape, trace: Trace) -> list[Record]:
    """Runs plain `generate` on the requests that have arrived, batch after batch."""
    clock, batch = Clock(trace), trace.batch
    while clock.next < len(clock.records):
        time.sleep(clock.wait())
        chosen = clock.arrived(MAX_BATCH)
        part = slice(chosen.start, chosen.stop)
        parts = Batch(batch.prompts[part], batch.new_tokens[part])
        answer = Generate()(model, shape, WORKLOAD, parts) if chosen else None
        for record, times in zip(clock.records[part], answer.times if answer else ()):
            record.tokens = [moment - clock.start for moment in times]
            record.finished = clock.now
    return clock.records


def by_generate_batch(peer: GenerateBatch) -> Serve:
    """Runs transformers' continuous batching manager and adds requests as they arrive."""

    def serve(model: Any, shape: Shape, trace: Trace) -> list[Record]:
        batch, finished, count = trace.batch, 0, len(trace.arrivals)
        with peer.manager(model, WORKLOAD, batch) as manager:
            clock = Clock(trace)
            while finished < count:
                for index in clock.arrived():
                    add(manager, batch.prompts[index], str(index), batch.new_tokens[index])
                result = manager.get_result(timeout=min(1.0, clock.wait()))
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    record = clock.records[int(result.request_id)]
                    record.tokens = [moment - clock.start for moment in result.timestamps]
                    record.finished, finished = clock.now, finished + 1
                elif result is None and (not manager.is_running() or clock.now > PATIENCE):
                    raise RuntimeError(f"the manager ended with {finished} of {count} served")
        return clock.records

    return serve


def figures(records: Sequence[Record], asked: Sequence[int]) -> dict[str, float]:
    """Columns of the table. Raises if a request got a number of tokens other than asked for."""
    given = [len(record.tokens) for record in records]
    if given != list(asked):
        raise RuntimeError(f"gave {sum(given)} tokens, not {sum(asked)}")
    seconds = max(record.finished for record in records)
    normalized = [
        1e3 * (record.finished - record.arrived) / len(record.tokens) for record in records
    ]
    times, starts = [record.tokens for record in records], [record.arrived for record in records]
    return {
        "tokens/s": sum(given) / seconds,
        "served/s": len(records) / seconds,
        "normalized, ms/token": statistics.mean(normalized),
        "normalized p50, ms": float(np.percentile(normalized, 50)),
        "normalized p99, ms": float(np.percentile(normalized, 99)),
        **latencies(times, starts),
    }


def cases(
    model: Any, shape: Shape, peer: GenerateBatch | None, quick: bool
) -> Iterator[runner.Case]:
    """One for each rate; the order of the systems alternates."""
    systems: dict[str, Serve] = {"engine": by_engine, "plain, static batches": by_generate}
    if peer is not None:
        systems["generate_batch, tuned"] = by_generate_batch(peer)
    device = model.device.type
    everything = Trace.make(device, quick, shape.vocab, float("inf"), 0)
    by_engine(model, shape, everything)  # warm-up
    asked = everything.batch.new_tokens
    capacity = figures(by_engine(model, shape, everything), asked)["served/s"]
    for number, share in enumerate(SHARES[:2] if quick else SHARES, 1):
        trace = Trace.make(device, quick, shape.vocab, share * capacity, number)

        def arm(turn: int, serve: Serve, trace: Trace = trace) -> runner.Turn | float:
            if turn < 0:
                return 0.0
            records = serve(model, shape, trace)
            seconds = max(record.finished for record in records)
            return runner.Turn(seconds, figures=figures(records, trace.batch.new_tokens))

        arms = {
            name: runner.guarded(functools.partial(arm, serve=serve))
            for name, serve in systems.items()
        }
        rate = {"arrive/s": share * capacity}
        name = f"arrivals, {share:g} of capacity"
        yield runner.Case(name, arms, turns=1, figures=rate, first=number - 1)
