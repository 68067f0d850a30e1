"""Selects the tests that a plain run leaves out beside those marked `slow`: `python -m
tests.support.slowest`.

Runs the tests without that mark on a quiet machine; writes the slowest to `tests/slow.txt`, until
the others fit into the seconds of a plain run. Of the tests that a plain run leaves out, `.ci/run`
runs an eighth; `.ci/full` runs all.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "slow.txt"
SECONDS, WORKERS = 240.0, 2  # for tests alone: workers first start and collect
SHARE = 8


def read() -> frozenset[str]:
    """Reads pytest's node ids."""
    return frozenset(LIST.read_text().splitlines())


def left_to_full(names: Iterable[str]) -> set[str]:
    """Of slow tests, those that only `.ci/full` runs: of each function's parameters all but every
    eighth, in an order that does not follow the grid's, so that each value of each dimension has a
    chance. Functions begin to count at different numbers, so that of eight without parameters one
    is kept."""
    functions: dict[str, list[str]] = defaultdict(list)
    for name in names:
        functions[name.partition("[")[0]].append(name)
    left = set[str]()
    for function, parameters in functions.items():
        parameters.sort(key=lambda name: zlib.crc32(name.encode()))
        first = zlib.crc32(function.encode())
        left.update(name for number, name in enumerate(parameters, first) if number % SHARE)
    return left


def choose(times: dict[str, float], seconds: float) -> list[str]:
    """The fewest tests without which the others take at most `seconds` together."""
    total, slowest = sum(times.values()), sorted(times, key=lambda name: times[name])
    chosen = []
    while total > seconds:
        chosen.append(slowest.pop())
        total -= times[chosen[-1]]
    return sorted(chosen)


def times_of(report: Path) -> dict[str, float]:
    """Seconds of each test of pytest's XML, those of its fixtures included, by node id."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return {
        node_id(case.attrib["classname"], case.attrib["name"]): float(case.attrib["time"])
        for case in cases
    }


def node_id(path: str, name: str) -> str:
    """Pytest's, from the dotted path of a module, and of a class in it, as hypothesis makes."""
    module, dot, of = path.partition(".Test")
    return "::".join((f"{module.replace('.', '/')}.py", *([f"Test{of}"] if dot else ()), name))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; leaves the list unchanged if a test fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.slowest", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"of a plain run, {SECONDS:g} by default"
    )
    options = parser.parse_args(argv)
    before = LIST.read_text()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            "-m",
            "pytest",
            "-n",
            str(WORKERS),
            "--dist",
            "worksteal",
            "--junitxml",
            str(report),
        ]
        LIST.write_text("")
        try:
            code = subprocess.run([sys.executable, *command], cwd=ROOT).returncode
        finally:
            LIST.write_text(before)
        if report.exists():
            LIST.write_text(
                "".join(f"{name}\n" for name in choose(times_of(report), options.seconds * WORKERS))
            )
    return code


if __name__ == "__main__":
    sys.exit(main())
