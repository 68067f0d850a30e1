"""Compares the tests for a GPU that another environment collects with those of this one:
`python -m tests.support.collected PYTHON`, from the root of the checkout.

Fails if a module cannot be collected there, or if a test is missing whose module was not skipped
for lack of a package.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import tools


class Collected(NamedTuple):
    tests: list[str]  # node ids of the tests marked `gpu`
    skipped: dict[str, str]  # why a module was skipped, by its path


class Observer:
    """A plugin that notes what pytest collects."""

    def __init__(self) -> None:
        self.collected = Collected([], {})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            assert isinstance(report.longrepr, tuple)
            self.collected.skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected.tests.extend(item.nodeid for item in session.items)


def collect(python: str) -> Collected:
    """Collects with this interpreter. Raises `RuntimeError` if pytest reports errors."""
    with tempfile.NamedTemporaryFile() as file:
        command = tools.module(".collected", "--write", file.name, python=python)
        run = subprocess.run(command, cwd=tools.ROOT, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(
                f"{python} does not collect all tests:\n{(run.stdout + run.stderr)[-8000:]}"
            )
        return Collected(**json.loads(Path(file.name).read_text()))


def lost(here: Collected, there: Collected) -> list[str]:
    """The tests that only this environment collects, without those of modules that the other one
    skips."""
    known = {*there.tests}
    missing = [name for name in here.tests if name not in known]
    return [name for name in missing if name.partition("::")[0] not in there.skipped]


def main(argv: Sequence[str] | None = None) -> int:
    parser = tools.parser(__doc__, write=(Path, "only collect here, into this file"))
    parser.add_argument("python", nargs="?", default=sys.executable, help="the other interpreter")
    options = parser.parse_args(argv)
    if options.write is not None:
        observer = Observer()
        arguments = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
        code = pytest.main(arguments, [observer])
        options.write.write_text(json.dumps(observer.collected._asdict()))
        return int(code)
    here, there = collect(sys.executable), collect(options.python)
    missing = lost(here, there)
    for path, reason in sorted(there.skipped.items()):
        print(f"{path} is skipped there: {reason}")
    counts = f"{len(here.tests)} tests for a GPU here, {len(there.tests)} there"
    print(f"{counts}, {len(missing)} of them lost")
    print(*missing, sep="\n")
    return int(bool(missing) or not there.tests)


if __name__ == "__main__":
    sys.exit(main())
