"""The scheduler alone, without a model: ShareGPT-like requests through schedule, append and finish
on one core (`benchmarks.paper.serving`), all of them waiting at the start.

Time is CPU time of everything except adding the requests, over all scheduled tokens, prompt tokens
included. Waste is the share of allocated slots that hold no token, over all steps.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

from benchmarks import runner
from benchmarks.paper.measured import A100
from benchmarks.paper.serving import BLOCK_SIZE, MAX_SEQS, Outcome, serve_paged
from benchmarks.paper.traces import LONGEST, SHAREGPT, make_trace
from benchmarks.report import markdown

PLENTY, FEW = 2 * MAX_SEQS * LONGEST, 2_000 * BLOCK_SIZE  # slots; few cause preemptions
COLUMNS = {
    "waiting": "waiting",
    "tokens": "tokens scheduled",
    "us_per_token": "µs per token",
    "preemptions": "preemptions",
}


def serve(count: int, slots: int, most_tokens: int, turn: int = 0) -> dict[str, Any]:
    """A row: at least `most_tokens` tokens, or all, of `count` requests."""
    trace = make_trace(SHAREGPT, count)
    outcome: Outcome = serve_paged(trace, A100, slots, most_tokens=most_tokens)
    usage = outcome.usage
    return {
        "waiting": f"{count}" + f", {slots // BLOCK_SIZE} blocks" * (slots == FEW),
        "tokens": outcome.tokens,
        "us_per_token": 1e6 * outcome.scheduling / outcome.tokens,
        "preemptions": outcome.preemptions,
        "waste_percent": 100 * usage.internal / (usage.used + usage.internal),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Best turn of every queue length, the last one in an undersized pool."""
    settings = [(length, PLENTY) for length in args.lengths] + [(args.lengths[0], FEW)]
    arms = {each: functools.partial(serve, *each, args.tokens) for each in settings}
    turns = runner.take_turns(arms, args.turns)
    return {"rows": [min(mine, key=lambda row: row["us_per_token"]) for mine in turns.values()]}


def show(runs: Sequence[runner.Data]) -> list[str]:
    (data,) = runs
    first, *others, _ = data["rows"]
    slowest = max(row["us_per_token"] for row in others) / first["us_per_token"]
    waste = f"waste at block size {BLOCK_SIZE}: {first['waste_percent']:.2g}%"
    return [markdown(data["rows"], COLUMNS), f"slowest / first: {slowest:.3g}; {waste}"]


main = runner.Benchmark(
    __doc__,
    run,
    show,
    turns=3,
    fixed={"lengths": (1_000, 10_000, 100_000, 1_000_000), "tokens": 400_000},
    quick={"lengths": (1_000, 10_000), "tokens": 30_000, "turns": 1},
).main

if __name__ == "__main__":
    raise SystemExit(main())
