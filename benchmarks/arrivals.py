"""Requests that arrive at random moments: a log-normal ShareGPT-like trace with Poisson arrivals
(Orca, OSDI 2022, section 6; PagedAttention, arXiv 2309.06180, section 6.1), at fractions of the
rate that `PagedEngine` reaches when all requests wait at the start.

Plain `generate` takes the requests that have arrived, at most `MAX_BATCH`, and returns when the
last row has ended; its times per token are those that a streamer would see. Normalized latency is a
request's time from arrival to end, divided by its new tokens.
"""

from __future__ import annotations

import bisect
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import runner
from benchmarks.continuous import GenerateBatch
from benchmarks.models import Shape
from benchmarks.paper.traces import SHAREGPT, make_trace
from benchmarks.systems import Answer, Engine, Generate, latencies
from benchmarks.workloads import Batch, Workload, batch_of

MAX_BATCH = 32
SHARES = (0.4, 0.8, 1.2, 2.0)  # of the engine's rate when all requests wait
WORKLOAD = Workload("arrivals", "Poisson arrivals, ShareGPT-like lengths", 0, (0, 0), (0, 0))


class Record(NamedTuple):
    """Timestamps of one request, in seconds since the start of the trace."""

    arrived: float
    tokens: list[float]
    finished: float


class Trace(NamedTuple):
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

    def records(self, answer: Answer) -> list[Record]:
        """Of a system that returns each request when it ends."""
        tokens = [[moment - answer.start for moment in row] for row in answer.times]
        ends = (row[-1] for row in tokens)
        return [Record(*request) for request in zip(self.arrivals, tokens, ends)]


Serve = Callable[[Any, Shape, Trace], list[Record]]


def by_engine(model: Any, shape: Shape, trace: Trace) -> list[Record]:
    """Runs `PagedEngine.step` and adds requests as they arrive."""
    engine = Engine()
    engine(model, shape, WORKLOAD, Batch([[shape.never - 1] * 8], [2]))  # as in a running server
    try:
        return trace.records(engine.serve(model, WORKLOAD, *trace))
    finally:
        engine.free()


def by_generate(model: Any, shape: Shape, trace: Trace) -> list[Record]:
    """Runs plain `generate` on the requests that have arrived, batch after batch."""
    start, records = time.perf_counter(), list[Record]()
    while (first := len(records)) < len(trace.arrivals):
        time.sleep(max(0.0, start + trace.arrivals[first] - time.perf_counter()))
        now = time.perf_counter() - start
        end = bisect.bisect(trace.arrivals, now, first, min(first + MAX_BATCH, len(trace.arrivals)))
        part = slice(first, end)
        batch = Batch(trace.batch.prompts[part], trace.batch.new_tokens[part])
        answer = Generate()(model, shape, WORKLOAD, batch) if end > first else Answer([], [])
        finished = time.perf_counter() - start
        for arrived, times in zip(trace.arrivals[part], answer.times):
            records.append(Record(arrived, [moment - start for moment in times], finished))
    return records


def by_generate_batch(peer: GenerateBatch) -> Serve:
    """Runs transformers' continuous batching manager and adds requests as they arrive."""
    return lambda model, shape, trace: trace.records(peer.serve(model, WORKLOAD, *trace))


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

    def serve(turn: int, system: Serve, *, trace: Trace) -> runner.Turn:
        if turn < 0:
            return runner.Turn(0.0)
        records = system(model, shape, trace)
        seconds = max(record.finished for record in records)
        return runner.Turn(seconds, figures=figures(records, trace.batch.new_tokens))

    make = functools.partial(Trace.make, model.device.type, quick, shape.vocab)
    everything = make(float("inf"), 0)
    by_engine(model, shape, everything)  # warm-up
    capacity = serve(0, by_engine, trace=everything).figures["served/s"]
    for number, share in enumerate(SHARES[:2] if quick else SHARES):
        work = functools.partial(serve, trace=make(share * capacity, number + 1))
        arms = {name: runner.guarded(arm) for name, arm in runner.each(work, systems).items()}
        rate = {"arrive/s": share * capacity}
        name = f"arrivals, {share:g} of capacity"
        yield runner.Case(name, arms, turns=1, figures=rate, first=number)
