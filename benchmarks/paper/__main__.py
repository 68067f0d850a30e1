"""Figures of the papers behind this package, repeated on our system, beside the published ones:
PagedAttention (arXiv 2309.06180) and vAttention (arXiv 2405.04437). Waste, batch size and sharing
are simulated with the engine's own scheduler and block manager, so that the machine hardly matters:
medians with the least and the greatest over several seeds. The spread is that of the lengths'
logarithms, a constant that the paper does not give. Preemption and spikes are timed in turns of two
processes. Earlier results of spikes have mechanisms that are no longer there. What a case has in
common with the paper's is in its docstring, `benchmarks/paper/`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benchmarks import runner
from benchmarks.paper.preempted import preempted
from benchmarks.paper.simulation import batch_size, sharing, waste
from benchmarks.paper.spikes import spikes

PARTS = {one.__name__: one for one in (waste, batch_size, sharing, preempted, spikes)}


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    for name in args.only:
        yield from PARTS[name](args)


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="The papers' figures",
    results=(("paper-cpu",),),
    options={"--processes": runner.option("one after the other", type=int, default=2)},
    turns=8,
    only="parts, by commas (all)",
    known=list(PARTS),
    keeps=True,
    fixed={"requests": 10_000, "seeds": 5},
    quick={"requests": 400, "seeds": 1, "turns": 1, "processes": 0},
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
