"""Compiles every kernel ahead of time for chips that this machine lacks, with `benchmarks/aot.py`:
`python -m tests.support.kernels.aot`. `compile_cases` starts a process without `TRITON_INTERPRET`,
as compiling needs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from benchmarks.aot import Compiled, measure, require_compiler
from benchmarks.chips import CHIPS
from tests.support import tools

if TYPE_CHECKING:
    from tests.support.kernels.cases import AotCase


def cases() -> list[AotCase]:
    """All cases. Not imported above: nothing else here needs Triton."""
    from tests.support.kernels.cases import CASES

    return CASES


def run_apart(module: str, *arguments: object) -> Any:
    """The JSON in the last output line of one of our modules, run in a process whose kernels are
    not interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = tools.module(module, *arguments)
    done = subprocess.run(
        command, cwd=tools.ROOT, env=env, capture_output=True, text=True, timeout=1800
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compile_cases() -> list[Compiled]:
    """`measure` for every case."""
    rows = run_apart(".kernels.aot", "--json")
    return [Compiled(**{**row, "missing": tuple(row["missing"])}) for row in rows]


_LINE = "{:44} {:16} {:>7} {:>5} {:>6} {:>4} {:>5} {:>5} {:>6} {:>5}  {}"
_COLUMNS = ("chip", "warps", "stages", "regs", "stack", "spill", "shared", "loop")
_FIELDS = dict(warps="num_warps", stages="num_stages", regs="registers", spill="spilled")


def line(row: Compiled | None) -> str:
    """A readable row of the table, or its header."""
    if row is None:
        return _LINE.format("case", "kernel", *_COLUMNS, "instructions; problems")
    ops = " ".join(f"{op}:{count}" for op, count in row.instructions.items())
    counts = [getattr(row, _FIELDS.get(name, name)) for name in _COLUMNS]
    return _LINE.format(row.case, row.kernel, *counts, "; ".join([ops, *row.problems]))


def main() -> None:
    """Prints the table of all cases, or JSON."""
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
    rows: list[Compiled] = []
    if not options.json:
        print(line(None), flush=True)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for found in pool.map(_measure, jobs):
            rows += found
            if not options.json:
                print("\n".join(map(line, found)), flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))


def _measure(job: tuple[int, str]) -> list[Compiled]:
    index, chip = job
    case = cases()[index]
    return measure(case.name, case.call, CHIPS[chip], case.instructions.get(chip, ()))


if __name__ == "__main__":
    main()
