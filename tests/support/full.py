"""Runs all checks: `python -m tests.support.full [PART ...]`, which `.ci/full` calls.

Parts run one after the other; a failure does not stop later parts. `benchmarks/results/full.json`
gets the commands, counts, times and the machine; the exit code is 1 if a part failed.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from hf_paged.rooms import ROOMS
from tests.support import tools
from tests.support.tools import ROOT, module

RESULT = report.RESULTS / "full.json"
LINES = (report.RESULTS / "line_faults.json").relative_to(ROOT)
PYTEST = ("-n", 2, "--dist", "worksteal")
# of tests that pass without any one room (without all of them, fewer do: `.ci/run`)
LEAST = ("--least", 3000)
MATRIX = "tests/test_parity_matrix.py"
FAULTS = [
    "tests/test_faults.py",
    "tests/test_interrupts.py",
    "tests/batching/test_engine_faults.py",
]


def environment(name: str, *install: Sequence[str]) -> tuple[str, list[list[str]]]:
    """The interpreter of an environment, and the commands that make it and install into it."""
    python = f".venv-{name}/bin/python"
    pip = [module("pip", "install", "-q", *arguments, python=python) for arguments in install]
    return python, [module("venv", Path(python).parents[1]), *pip]


def with_transformers(name: str, requirement: str) -> list[list[str]]:
    """The commands that run the fast part in an environment `name` with this transformers, the
    newest that fits, and PyTorch as pinned."""
    pinned, newest = ("-c", "constraints.txt", "torch"), ("--upgrade", "-e", ".[test]", requirement)
    python, commands = environment(name, pinned, newest)
    return [*commands, module("pytest", *PYTEST, python=python)]


def in_ecosystem() -> list[list[str]]:
    packages = ("-c", "constraints-ecosystem.txt", "-e", ".[test,ecosystem]")
    python, commands = environment("ecosystem", packages)
    return [*commands, module("pytest", "-m", "", "tests/ecosystem", python=python)]


PARTS: dict[str, list[list[str]]] = {
    "matrix": [module("pytest", *PYTEST, "-m", "", MATRIX)],
    "faults": [module("pytest", *PYTEST, "-m", "", *FAULTS)],
    "tests": [
        module("pytest", *PYTEST, "-m", "", *(f"--ignore={path}" for path in (MATRIX, *FAULTS)))
    ],
    "rooms": [module(".alone", "--without", name, *PYTEST, *LEAST) for name in ROOMS],
    "architectures": [module(".architectures")],
    "fuzz": [module(".fuzz", "--cases", 500)],
    "lines": [
        module(".line_faults", "--jobs", 2, "--json", LINES),
        module(".line_faults", "--jobs", 2, "--opcodes", "--sample", 800),
    ],
    "machine": [module(".engine_machine", "--examples", 2000)],
    "load": [module(".load", "--steps", 20000, "--jobs", 2)],
    "interrupts": [
        module(".interrupts", "--count", 1000),
        module(".interrupts", "--count", 1000, "--calls"),
    ],
    "threads": [module(".threads", "--mixes", 500)],
    "sanitizers": [module(".sanitize", "--calls", 10000)],
    "ecosystem": in_ecosystem(),
    "transformers-5.17": with_transformers("transformers-5.17", "transformers==5.17.*"),
    "transformers-newest": with_transformers("transformers-newest", "transformers"),
}
"""Commands of each part, from the root of the checkout; the first failure ends the part."""


def run_part(name: str) -> dict[str, Any]:
    """Runs a part; returns its entry of the result."""
    start = time.monotonic()
    code, counts = 0, dict[str, int]()
    for command in PARTS[name]:
        if not code:
            code, counts = tools.run_counted(command)
    seconds = round(time.monotonic() - start, 1)
    command = shlex.join(["python", *PARTS[name][-1][1:]])
    ended = {"exit_code": code, "counts": counts, "seconds": seconds}
    return {"part": name, "command": command, **ended}


def main(argv: Sequence[str] | None = None) -> int:
    parser = tools.parser(__doc__)
    known = f"one of {', '.join(PARTS)}; without any, all"
    parser.add_argument("parts", nargs="*", metavar="PART", help=known)
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
        outcome = "FAILED" if part["exit_code"] else "ok"
        print(f"{part['part']:18} {outcome:7} {part['seconds']:8.0f} s  {counts}")
    return int(any(part["exit_code"] for part in result["parts"]))


if __name__ == "__main__":
    sys.exit(main())
