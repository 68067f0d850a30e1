"""Reproduces tables of the papers behind this package on our system, each row beside the published
figure.

    python -m benchmarks.paper [--quick] [--only NAME ...] [--json PATH]

Measurements behind a ratio of times take turns, half of them in a second process. "read": the
figure was looked up in the paper. S1 is one of the documents that this project was asked for in,
an article on the vAttention paper (2025-03-11, Korean). A value with a range is the median with the
least and the greatest over several seeds, or turns if it is timed; the spread is that of the
lengths' logarithms, a constant that the paper does not give. What each table has in common with the
paper's is in its docstring, `benchmarks/paper/`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import report, runner, tables
from benchmarks.paper import simulation
from benchmarks.paper.preempted import preempted
from benchmarks.paper.rows import FULL, QUICK, Row, Size
from benchmarks.paper.spikes import spikes
from benchmarks.report import flow, machine_of
from benchmarks.runner import Data, option

PAGED_ATTENTION: dict[str, Callable[[Size], list[Row]]] = {
    "waste": simulation.waste,
    "batch_size": simulation.batch_size,
    "sampling": simulation.sampling,
    "preempted": preempted,
}
VATTENTION: dict[str, Callable[[Size], list[Row]]] = {"spikes": spikes}
TABLES = PAGED_ATTENTION | VATTENTION
GROUPS: tuple[tuple[Mapping[str, Any], str], ...] = (
    (
        PAGED_ATTENTION,
        """**The PagedAttention paper's tables** (arXiv 2309.06180), repeated with hf_paged. All but
        `preempted`, which is timed, are simulated with the engine's own scheduler and block
        manager, so the machine hardly matters. Medians and ranges over seeds; the paper does not
        state the spread of the lengths' logarithms, so it is a constant here.""",
    ),
    (
        VATTENTION,
        """**vAttention's spikes** (arXiv 2405.04437), repeated with hf_paged: rows at contiguous
        addresses (`storage="virtual"`), which code that knows nothing of blocks reads in place.
        "S1, not looked up in the paper": the figure is from an article about that paper. Medians,
        95% intervals over turns of two processes.""",
    ),
)
"""Tables that share a section of docs/figures/papers.md, and its first paragraph."""
COLUMNS = {
    "name": "what",
    "published": "published",
    "ours": "ours",
    "unit": "unit",
    "source": "published in",
    "why": "what differs",
}


def run(
    names: Sequence[str], size: Size, keep: Callable[[Data], Any] = lambda found: None
) -> list[Data]:
    """The rows of some tables; `keep` gets those so far after each."""
    rows: list[Data] = []
    for name in names:
        rows += [row.as_dict(name) for row in TABLES[name](size)]
        keep({"rows": rows})
    return rows


def measure(args: argparse.Namespace, keep: Callable[[Data], Any]) -> Data:
    names = [name for name in TABLES if name in args.only]
    return {"rows": run(names, QUICK if args.quick else FULL, keep)}


def show(runs: Sequence[Data]) -> Iterator[str]:
    """Each table."""
    for (name,), rows in tables.grouped(runs, "case").items():
        yield f"{name}:"
        yield report.markdown(rows, COLUMNS)


def sections(data: Mapping[str, Any]) -> Iterator[str]:
    """Of docs/figures/papers.md: the rows with a published figure, of the tables that were run."""
    for group, title in GROUPS:
        runs = [one for one in data["runs"] if {row["case"] for row in one["rows"]} & group.keys()]
        shown = [row for one in runs for row in one["rows"] if row["published"]]
        rows = [row for case in group for row in shown if row["case"] == case]
        if rows:
            machines = "; ".join(dict.fromkeys(machine_of(one["facts"]) for one in runs))
            names = " ".join(dict.fromkeys(row["case"] for row in rows))
            yield flow(f"{title} `python -m benchmarks.paper --only {names}` ({machines}):")
            yield report.markdown(rows, COLUMNS)


BENCHMARK = runner.Benchmark(
    __doc__,
    measure=measure,
    show=show,
    options={"--only": option(nargs="+", choices=list(TABLES), default=list(TABLES))},
    keeps=True,
)
main = BENCHMARK.main

if __name__ == "__main__":
    raise SystemExit(main())
