"""`pytest -m gpu` of some files or of all, each file or each test in a process of its own, until
the time is over."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import runner
from benchmarks.runner import Data, option

ROOT = Path(__file__).resolve().parents[2]
PYTEST = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short", "-rfE"]
SECONDS, PROCESSES = 240.0, 12  # of a file
ALL = "tests/**/test_*.py"
COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def files(paths: list[str]) -> list[str]:
    """The files with tests for a GPU: those for nothing else first, the slowest last."""
    found = [one for path in paths for one in sorted(ROOT.glob(path))]
    texts = {str(one): one.read_text() for one in found}
    names = [name for name, text in texts.items() if re.search(r"\bgpu\b|\bdevice\b", text)]
    return sorted(names, key=lambda name: ("memcheck" in name, "gpu" not in Path(name).name))


def tests_of(names: list[str]) -> list[str]:
    """The tests of these files."""
    command = [sys.executable, "-m", "pytest", *PYTEST, "--collect-only", *names]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "::" in line]


def rows_of_file(name: str, until: float) -> Iterator[Data]:
    """A row with the counts of a file's tests, or of one test, and one for each that failed."""
    # without the plugins of other projects, on a machine that has many
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *PYTEST, "--rootdir", str(ROOT), name]
    title, seconds = name.removeprefix(f"{ROOT}/"), min(SECONDS, until - time.monotonic())
    if seconds <= 0:
        yield runner.row_of(title, "tests", note="no time left")
        return
    options: dict[str, Any] = {"cwd": ROOT, "env": variables, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, timeout=seconds, errors="replace", **options)
    except subprocess.TimeoutExpired:
        yield runner.row_of(title, "tests", f"no result within {seconds:.0f} s")
        return
    lines = [line for line in done.stdout.splitlines() if line.strip()] or [""]
    counts = {kind: int(count) for count, kind in COUNT.findall(lines[-1])}
    problem = "" if done.returncode in (0, 1, 5) else f"exit status {done.returncode}: {lines[-1]}"
    yield runner.row_of(title, "tests", problem, **counts)
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            test, _, reason = line.partition(" ")[2].partition(" - ")
            yield runner.row_of(test, "a test", reason[:300] or "failed")


def measure(args: argparse.Namespace, keep: Any) -> Data:
    """A row for each file of tests, and one for each failure."""
    until, rows = time.monotonic() + 60 * args.minutes, list[Data]()
    names = files(args.paths)
    if args.each:
        names = tests_of(names)
    with ThreadPoolExecutor(max(1, min(PROCESSES, (os.cpu_count() or 1) - 2))) as pool:
        for found in pool.map(lambda name: list(rows_of_file(name, until)), names):
            rows += found
            keep({"rows": rows})
    return {"rows": rows}


BENCHMARK = runner.Benchmark(
    __doc__,
    measure=measure,
    options={
        "--device": runner.DEVICE,
        "--paths": option("of test files", nargs="+", default=[ALL]),
        "--each": runner.flag("each test in a process of its own"),
        "--minutes": option("for all (%(default)g)", type=float, default=3.0),
    },
    quick={"paths": ["tests/kernels/triton/test_copy.py"]},
    is_wrong=runner.fails(),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
