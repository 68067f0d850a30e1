"""Runs all checks: `python -m tests.support.full [PART ...]`, which `.ci/full` calls.

Parts run one after the other; a failure does not stop later parts. `benchmarks/results/full.json`
gets the commands, counts, times and the machine; the exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from hf_paged.rooms import ROOMS

ROOT = Path(__file__).resolve().parents[2]
RESULT = report.RESULTS / "full.json"
LINES = report.RESULTS / "line_faults.json"
PYTEST = ["-m", "pytest", "-n", "2", "--dist", "worksteal"]
LEAST = ["--least", "3000"]  # tests that pass without any one room
ECOSYSTEM_PYTHON = ".venv-ecosystem/bin/python"
MATRIX = "tests/test_parity_matrix.py"
FAULTS = [
    "tests/test_faults.py",
    "tests/test_interrupts.py",
    "tests/batching/test_engine_faults.py",
]


def with_transformers(name: str, requirement: str) -> list[list[str]]:
    """The commands that run the fast part in an environment `name` with this transformers, the
    newest that fits, and PyTorch as pinned."""
    python = f".venv-{name}/bin/python"
    return [
        [sys.executable, "-m", "venv", str(Path(python).parents[1])],
        [python, "-m", "pip", "install", "-q", "-c", "constraints.txt", "torch"],
        [python, "-m", "pip", "install", "-q", "--upgrade", "-e", ".[test]", requirement],
        [python, *PYTEST],
    ]


PARTS: dict[str, list[list[str]]] = {
    "matrix": [[sys.executable, *PYTEST, "-m", "", MATRIX]],
    "faults": [[sys.executable, *PYTEST, "-m", "", *FAULTS]],
    "tests": [
        [sys.executable, *PYTEST, "-m", "", *(f"--ignore={path}" for path in (MATRIX, *FAULTS))]
    ],
    "rooms": [
        [sys.executable, "-m", "tests.support.alone", "--without", name, *PYTEST[2:], *LEAST]
        for name in ROOMS
    ],
    "architectures": [[sys.executable, "-m", "tests.support.architectures"]],
    "fuzz": [[sys.executable, "-m", "tests.support.fuzz", "--cases", "500"]],
    "lines": [
        [
            sys.executable,
            "-m",
            "tests.support.line_faults",
            "--jobs",
            "2",
            "--json",
            str(LINES.relative_to(ROOT)),
        ],
        [
            sys.executable,
            "-m",
            "tests.support.line_faults",
            "--jobs",
            "2",
            "--opcodes",
            "--sample",
            "800",
        ],
    ],
    "machine": [[sys.executable, "-m", "tests.support.engine_machine", "--examples", "2000"]],
    "load": [[sys.executable, "-m", "tests.support.load", "--steps", "20000", "--jobs", "2"]],
    "interrupts": [
        [sys.executable, "-m", "tests.support.interrupts", "--count", "1000"],
        [sys.executable, "-m", "tests.support.interrupts", "--count", "1000", "--calls"],
    ],
    "threads": [[sys.executable, "-m", "tests.support.threads", "--mixes", "500"]],
    "sanitizers": [[sys.executable, "-m", "tests.support.sanitize", "--calls", "10000"]],
    "ecosystem": [
        [sys.executable, "-m", "venv", str(Path(ECOSYSTEM_PYTHON).parents[1])],
        [
            ECOSYSTEM_PYTHON,
            "-m",
            "pip",
            "install",
            "-q",
            "-c",
            "constraints-ecosystem.txt",
            "-e",
            ".[test,ecosystem]",
        ],
        [ECOSYSTEM_PYTHON, "-m", "pytest", "-m", "", "tests/ecosystem"],
    ],
    "transformers-5.17": with_transformers("transformers-5.17", "transformers==5.17.*"),
    "transformers-newest": with_transformers("transformers-newest", "transformers"),
}
"""Commands of each part, from the root of the checkout; the first failure ends the part."""

UNITS = (
    "passed failed skipped error errors deselected classes equal cases mixes calls runs steps"
    " preemptions interrupts wrong reports faults"
).split()
COUNT = re.compile(rf"\b([\d,]*\d) ({'|'.join(UNITS)})\b")


def run(command: Sequence[str]) -> tuple[int, dict[str, int]]:
    """Runs a command and shows its output; returns its exit code and the counts in the last line
    that has any."""
    counts: dict[str, int] = {}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            counts = {
                unit: int(count.replace(",", "")) for count, unit in COUNT.findall(line)
            } or counts
    return process.returncode, counts


def run_part(name: str) -> dict[str, Any]:
    """Runs a part; returns its entry of the result."""
    start = time.monotonic()
    code, counts = 0, dict[str, int]()
    for command in PARTS[name]:
        if not code:
            code, counts = run(command)
    seconds = round(time.monotonic() - start, 1)
    command = shlex.join(["python", *PARTS[name][-1][1:]])
    return {
        "part": name,
        "command": command,
        "exit_code": code,
        "counts": counts,
        "seconds": seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; without any, all"
    )
    names = parser.parse_args(argv).parts or list(PARTS)
    if unknown := set(names) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    result: dict[str, Any] = {
        "command": shlex.join([".ci/full", *names]),
        "facts": machine.facts(),
        "parts": [],
    }
    for name in names:
        print(f"---- {name}", flush=True)
        result["parts"].append(run_part(name))
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    for part in result["parts"]:
        counts = ", ".join(f"{count:,} {unit}" for unit, count in part["counts"].items())
        print(
            f"{part['part']:18} {'FAILED' if part['exit_code'] else 'ok':7} {part['seconds']:8.0f}"
            f" s  {counts}"
        )
    return int(any(part["exit_code"] for part in result["parts"]))


if __name__ == "__main__":
    sys.exit(main())
