"""Stages (a) and (f): `pytest -m gpu` of some folders or of all, a sample across files first, until
the time is over."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runner
from benchmarks.gpu_day import jobs
from benchmarks.runner import Data, option
from benchmarks.workers import Lost, in_workers

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short", "--rootdir", str(ROOT)]
SECONDS = 90.0  # of one test; of a group, by its size
GROUP = 6  # tests of one function that a process runs together
LINES = 3  # of a failure
PROCESSES = 12
LAST = "test_gpu_memcheck.py"  # its tests run under a checker, for minutes


class Recorder:
    """A plugin of pytest that keeps what it collects and what becomes of it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.passed: list[str] = []
        self.skipped: list[str] = []
        self.failed: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [f"{item.path}::{item.nodeid.partition('::')[2]}" for item in session.items]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = last_lines(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = last_lines(report.longreprtext)
        elif report.skipped:
            self.skipped.append(report.nodeid)
        elif report.when == "call":
            self.passed.append(report.nodeid)


def last_lines(text: str) -> str:
    """What failed: pytest's lines that begin with `E`, or the last ones."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line[1:] for line in lines if line.startswith("E ")] or lines[-LINES:]
    return " / ".join(
        line.strip()[:160] for line in dict.fromkeys([*errors[: LINES - 1], *lines[-1:]])
    )


def collect(paths: tuple[str, ...]) -> Recorder:
    """Names of the tests marked `gpu`; files that cannot be imported count as failed."""
    return _pytest(["--collect-only", "--continue-on-collection-errors", *paths])


def run_group(names: tuple[str, ...]) -> Recorder:
    """Runs these tests in this process."""
    return _pytest(list(names))


def _pytest(arguments: list[str]) -> Recorder:
    recorder = Recorder()
    # those of other projects, on a machine that has many
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = pytest.main([*OPTIONS, *arguments], plugins=[recorder])
    if status not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        recorder.failed.setdefault(arguments[-1], f"{status!r}: {last_lines(output.getvalue())}")
    return recorder


def in_order(names: list[str]) -> list[tuple[str, ...]]:
    """Groups of tests: the first of each file, then the first of each function, then the others, a
    group of each function at a time; the slowest file last."""
    functions: dict[str, list[str]] = collections.defaultdict(list)
    for name in names:
        functions[name.partition("[")[0]].append(name)
    ranked: list[tuple[tuple[bool, int], tuple[str, ...]]] = []
    files = set()
    for function, ids in functions.items():
        file = function.partition("::")[0]
        is_last = file.endswith(LAST)
        ranked.append(((is_last, int(file in files)), (ids[0],)))
        for at in range(1, len(ids), GROUP):
            ranked.append(((is_last, 1 + at), tuple(ids[at : at + GROUP])))
        files.add(file)
    return [group for _, group in sorted(ranked, key=lambda one: one[0])]


def rows_of_group(names: tuple[str, ...]) -> list[Data]:
    """A row with the counts of these tests, and one for each that failed."""
    found = run_group(names)
    counts = {"passed": len(found.passed), "skipped": len(set(found.skipped))}
    group = runner.row_of(names[0], "tests", **counts, failed=len(found.failed))
    return [group, *(runner.row_of(name, "a test", said) for name, said in found.failed.items())]


def measure(args: argparse.Namespace, keep: Any) -> Data:
    """A row for each group of tests, and one for each failure."""
    until = time.monotonic() + 60 * args.minutes
    paths = tuple(args.paths)
    lost = paths, Lost("collecting took too long")
    (_, found), *_ = [*in_workers(collect, [paths], 1, 60 + 60 * args.minutes), lost]
    if isinstance(found, Lost):
        raise RuntimeError(found.reason)
    rows = [runner.row_of(name, "a file", said) for name, said in found.failed.items()]
    groups = {names[0]: names for names in in_order(found.names)[: args.most]}
    processes = max(1, min(PROCESSES, (os.cpu_count() or 1) - 2))
    return {"rows": jobs.rows_of(rows_of_group, groups, processes, SECONDS, until, keep, rows)}


main = runner.Benchmark(
    __doc__,
    measure=measure,
    options=jobs.OPTIONS | {"--paths": option("of tests", nargs="+", default=["tests"])},
    fixed={"most": None},
    quick={"most": 4},
    is_wrong=runner.fails(),
).main

if __name__ == "__main__":
    raise SystemExit(main())
