"""Stage (f): `pytest -m gpu`, a sample across files first, until the time is over."""

from __future__ import annotations

import collections
import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day.record import NO_DEVICE, Record, Skipped
from benchmarks.workers import Lost, in_workers

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short", "--rootdir", str(ROOT)]
SECONDS = 90.0  # of one test; of a group, by its size
GROUP = 6  # tests of one function that a process runs together
MAX_FAILURES, LINES = 40, 3  # failures that are kept, and their lines
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
    files: dict[str, str] = {}
    for function in functions:
        files.setdefault(function.partition("::")[0], function)
    first = set(files.values())
    groups: list[tuple[str, ...]] = [
        (functions[name][0],) for name in sorted(functions, key=lambda name: name not in first)
    ]
    rest = [
        (at, tuple(ids[at : at + GROUP]))
        for ids in functions.values()
        for at in range(1, len(ids), GROUP)
    ]
    groups += [group for _, group in sorted(rest, key=lambda item: item[0])]
    return sorted(groups, key=lambda group: LAST in group[0])


def run(record: Record, paths: tuple[str, ...] = ("tests",)) -> None:
    """A row with the counts, and one for each of the first failures."""
    record.note_machine()
    counts: dict[str, Any] = collections.Counter(passed=0, failed=0, skipped=0)
    record.add(what="pytest -m gpu", counts=counts)
    (_, found), *_ = [
        *in_workers(collect, [paths], 1, record.left),
        (paths, Lost("collecting took too long")),
    ]
    if isinstance(found, Lost):
        raise RuntimeError(found.reason)
    counts["collected"] = len(found.names)
    fail(record, counts, found.failed)
    if record.is_fake:
        if not found.failed:
            raise Skipped(NO_DEVICE)
        return
    processes = max(1, min(PROCESSES, (os.cpu_count() or 1) - 2))
    for names, result in in_workers(
        run_group, in_order(found.names), processes, SECONDS, record.until
    ):
        if isinstance(result, Lost):
            fail(record, counts, {" ".join(names): result.reason})
            continue
        counts["passed"] += len(result.passed)
        counts["skipped"] += len(set(result.skipped))
        fail(record, counts, result.failed)


def fail(record: Record, counts: dict[str, Any], failed: dict[str, str]) -> None:
    """Adds failures, and writes the counts."""
    for name, lines in failed.items():
        counts["failed"] += 1
        if counts["failed"] <= MAX_FAILURES:
            record.add(test=name, problem=lines)
    record.write()
