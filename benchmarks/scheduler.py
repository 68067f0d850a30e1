"""The scheduler alone, without a model: ShareGPT-like requests through schedule, append and finish
on one core (`benchmarks.paper.serving`), all of them waiting at the start.

Time is CPU time of everything except adding the requests, over all scheduled tokens, prompt tokens
included. Waste is the share of allocated slots that hold no token, over all steps.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

from benchmarks import runner
from benchmarks.paper.measured import A100
from benchmarks.paper.serving import BLOCK_SIZE, MAX_SEQS, Outcome, serve_paged
from benchmarks.paper.traces import LONGEST, SHAREGPT, make_trace

PLENTY, FEW = 2 * MAX_SEQS * LONGEST, 2_000 * BLOCK_SIZE  # slots; few cause preemptions


def serve(turn: int, sizes: tuple[int, int], *, most_tokens: int) -> runner.Turn:
    """At least `most_tokens` tokens, or all, of a number of requests, in a number of slots."""
    count, slots = sizes
    trace = make_trace(SHAREGPT, count)
    outcome: Outcome = serve_paged(trace, A100, slots, most_tokens=most_tokens)
    usage = outcome.usage
    figures = {
        "tokens scheduled": outcome.tokens,
        "µs per token": 1e6 * outcome.scheduling / outcome.tokens,
        "preemptions": outcome.preemptions,
        "waste, %": 100 * usage.internal / (usage.used + usage.internal),
    }
    return runner.Turn(outcome.scheduling, figures=figures)


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    settings = {f"{length} waiting": (length, PLENTY) for length in args.lengths}
    settings[f"{args.lengths[0]} waiting, {FEW // BLOCK_SIZE} blocks"] = args.lengths[0], FEW
    work = functools.partial(serve, most_tokens=args.tokens)
    yield runner.Case("CPU time", runner.each(work, settings))


main = runner.Benchmark(
    __doc__,
    cases,
    turns=3,
    fixed={"lengths": (1_000, 10_000, 100_000, 1_000_000), "tokens": 400_000, "warm_ups": 0},
    quick={"lengths": (1_000, 10_000), "tokens": 30_000, "turns": 1},
).main

if __name__ == "__main__":
    raise SystemExit(main())
