"""Compiles every kernel ahead of time for chips that this machine lacks: `python -m
tests.support.kernels.aot`. `compile_cases` starts a process without `TRITON_INTERPRET`, as
compiling needs."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from benchmarks import report
from tests.support import tools
from tests.support.kernels.chips import CHIPS
from tests.support.kernels.compiling import Compiled, measure, require_compiler

if TYPE_CHECKING:
    from tests.support.kernels.cases import AotCase


def cases() -> list[AotCase]:
    """All cases. Not imported above: nothing else here needs Triton."""
    from tests.support.kernels.cases import CASES

    return CASES


def run_apart(module: str, *arguments: object) -> Any:
    """The JSON in the last output line of one of our modules, run in a process whose kernels are
    not interpreted."""
    done = tools.run_apart(module, *arguments, timeout=1800, TRITON_INTERPRET="0")
    if done.returncode:
        raise RuntimeError(f"{module} {arguments} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compile_cases() -> list[Compiled]:
    """`measure` for every case."""
    rows = run_apart(".kernels.aot", "--json")
    return [Compiled(**{**row, "missing": tuple(row["missing"])}) for row in rows]


def main() -> None:
    only = "", "cases whose name contains this"
    chip = dict(action="append", choices=list(CHIPS), help="repeat for several")
    options = tools.parser(__doc__, jobs=2, only=only, chip=chip, json=(False, "")).parse_args()
    require_compiler()
    jobs = [
        (index, chip)
        for index, case in enumerate(cases())
        for chip in case.chips
        if options.only in case.name and chip in (options.chip or case.chips)
    ]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        found = [row for rows in pool.map(_measure, jobs) for row in rows]
    rows = [dataclasses.asdict(row) for row in found]
    if options.json:
        print(json.dumps(rows))
    else:
        problems = ({"problems": "; ".join(row.problems)} for row in found)
        print(report.markdown(row | more for row, more in zip(rows, problems)))


def _measure(job: tuple[int, str]) -> list[Compiled]:
    index, chip = job
    case = cases()[index]
    return measure(case.name, case.call, CHIPS[chip], case.instructions.get(chip, ()))


if __name__ == "__main__":
    main()
