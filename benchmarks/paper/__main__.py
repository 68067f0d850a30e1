"""Reproduces the tables of the seed papers on our system, each row beside the published figure.

python -m benchmarks.paper [--quick] [--only NAME ...] [--json PATH]

Measurements behind a ratio of times take turns, half of them in a second process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, report, runner
from benchmarks.paper import article, vattention
from benchmarks.paper.kernel import overhead
from benchmarks.paper.memory import batch_size, block_sizes, waste
from benchmarks.paper.plots import draw_all
from benchmarks.paper.rows import FULL, QUICK, READ, TOLD, TOLD_S1, TOLD_S2, Row, Size
from benchmarks.paper.schedulers import schedulers
from benchmarks.paper.sharing import example, sampling
from benchmarks.runner import option

TABLES: dict[str, Callable[[Size], list[Row]]] = {
    "waste": waste,
    "batch_size": batch_size,
    "sampling": sampling,
    "example": example,
    "block_sizes": block_sizes,
    "overhead": overhead,
    "schedulers": schedulers,
    **vattention.TABLES,
    **article.TABLES,
}
COLUMNS = {
    "table": "table",
    "name": "what",
    "published": "published",
    "ours": "ours",
    "unit": "unit",
    "source": "published in",
    "why": "why they differ",
}
NOTES = (
    f"`{READ}`: the figure was looked up in the paper. `{TOLD}`: it is from the document S4 of"
    " those that this project was asked for in, an article on the PagedAttention paper"
    f" (2026-02-17, Japanese), and the paper does not have it. `{TOLD_S1}`: it is from S1, an"
    f" article on the vAttention paper (2025-03-11, Korean). `{TOLD_S2}`: it is from S2, notes on"
    " that announcement (2023-06-20, Korean). A value with a range is the median with the least"
    " and the greatest over several seeds, or turns if it is timed; the spread is that of the"
    " lengths' logarithms, a constant that the paper does not give. What each table has in common"
    " with the paper's is in its docstring, `benchmarks/paper/`."
)


OPTIONS = {
    "--only": option(f"of {', '.join(TABLES)}", nargs="+", metavar="NAME"),
    "--quick": option("small traces and models, under 60 s", action="store_true"),
    "--json": option("a .md and plots beside it; keeps what other runs put there", type=Path),
}


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = runner.parser_of(__doc__, OPTIONS, prog="python -m benchmarks.paper")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.only or [] if name not in TABLES]
    if unknown:
        parser.error(f"there is no table {', '.join(unknown)}: choose from {', '.join(TABLES)}")
    if options.json is not None and options.json.suffix != ".json":
        parser.error(f"--json {options.json}: the name must end in .json")
    size = QUICK if options.quick else FULL
    facts = machine.facts()
    print("; ".join(f"{name} {value}" for name, value in facts.items()) + "\n")
    rows, runs = run([name for name in TABLES if name in (options.only or TABLES)], size)
    if options.json is not None:
        write(options.json, facts, rows, runs)


def run(names: list[str], size: Size) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Prints each table when it is ready; returns their rows, and each table's command, seconds and
    machine facts."""
    rows: list[dict[str, Any]] = []
    runs: dict[str, Any] = {}
    for name in names:
        start = time.perf_counter()
        found = [row.as_dict(name) for row in TABLES[name](size)]
        seconds = time.perf_counter() - start
        table = report.markdown(found, list(COLUMNS)[1:])
        print(f"{name}, {seconds:.1f} s\n\n{table}\n", flush=True)
        rows += found
        runs[name] = {"command": report.command_line(), "seconds": round(seconds, 1)}
        runs[name]["facts"] = machine.facts()
    print(NOTES, file=sys.stderr)
    return rows, runs


def write(
    path: Path, facts: dict[str, Any], rows: list[dict[str, Any]], runs: dict[str, Any]
) -> None:
    """Replaces these tables in `path`, keeps the others there, and draws the plots of all
    tables."""
    kept = report.read(path) if path.exists() else {"rows": [], "runs": {}}
    runs = {**kept["runs"], **runs}
    new = {row["table"] for row in rows}
    both = [row for row in kept["rows"] if row["table"] not in new] + rows
    both.sort(key=lambda row: list(TABLES).index(row["table"]))
    dates = [
        {
            "table": name,
            "command": f"`{runs[name]['command']}`",
            "date, UTC": runs[name]["facts"]["date"],
            "seconds": runs[name]["seconds"],
            "threads": runs[name]["facts"]["threads"],
            "load": runs[name]["facts"]["load_1min"],
            "revision": runs[name]["facts"]["revision"],
        }
        for name in sorted(runs, key=list(TABLES).index)
    ]
    report.write(
        path.stem,
        facts,
        both,
        directory=path.parent,
        columns=COLUMNS,
        command="python -m benchmarks.paper",
        notes=f"{NOTES}\n\n{report.markdown(dates)}",
        extra={"runs": runs},
    )
    draw_all({"rows": both, "runs": runs}, path.with_suffix(""))


if __name__ == "__main__":
    main()
