"""Compiles every kernel ahead of time for chips that this machine lacks, with `benchmarks/aot.py`:
`python -m tests.support.kernels.aot`. `compile_cases` starts a process without `TRITON_INTERPRET`,
as compiling needs."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.aot import Compiled, in_processes, measure, require_compiler
from benchmarks.chips import CHIPS

ROOT = Path(__file__).resolve().parents[3]
CASE_MODULES = (
    "decode_cases",
    "prefill_cases",
    "quantized_cases",
    "memory_cases",
    "lora_cases",
)
"""Modules beside this one with `CASES: list[AotCase]`."""

ALL = tuple(CHIPS)
FAMILIES = ("sm_80", "sm_90", "sm_100", "sm_120")
"""Chips with different code. That for 8.6 and 8.9 is compiled as for 8.0, with less shared
memory."""
LIMITS = ("sm_80", "sm_86", "sm_90", "gfx942")
"""One chip for each amount of shared memory per block. `benchmarks/results/compiled.md` has the
others."""


@dataclasses.dataclass(frozen=True)
class AotCase:
    """
    Args:
        name (`str`): Kernel first, then the distinctive part.
        call (`Callable[[], Any]`): Calls a launcher with tensors on the meta device.
        chips (`tuple[str, ...]`): Names in `CHIPS` of the chips to compile for.
        instructions (`dict[str, tuple[str, ...]]`): Instructions that the code for a chip must
            contain, such as `HGMMA`.
    """

    name: str
    call: Callable[[], Any]
    chips: tuple[str, ...] = FAMILIES
    instructions: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def cases() -> list[AotCase]:
    """All cases of `CASE_MODULES`."""
    modules = [importlib.import_module(f"tests.support.kernels.{name}") for name in CASE_MODULES]
    return [case for module in modules for case in module.CASES]


def run_apart(module: str, *arguments: str) -> Any:
    """The JSON in the last output line of one of our modules, run in a process whose kernels are
    not interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compile_cases(only: str = "", chips: Iterable[str] = ()) -> list[Compiled]:
    """`measure` for every case whose name contains `only`."""
    named = [argument for chip in chips for argument in ("--chip", chip)]
    rows = run_apart("tests.support.kernels.aot", "--json", "--only", only, *named)
    return [Compiled(**{**row, "missing": tuple(row["missing"])}) for row in rows]


_LINE = "{:44} {:16} {:>7} {:>5} {:>6} {:>4} {:>5} {:>5} {:>6} {:>5}  {}"


def line(row: Compiled | None) -> str:
    """A readable row of the table, or its header."""
    if row is None:
        names = ("chip", "warps", "stages", "regs", "stack", "spill", "shared", "loop")
        return _LINE.format("case", "kernel", *names, "instructions; problems")
    ops = " ".join(f"{op}:{count}" for op, count in row.instructions.items())
    sizes = (
        row.num_warps,
        row.num_stages,
        row.registers,
        row.stack,
        row.spilled,
        row.shared,
        row.loop,
    )
    return _LINE.format(row.case, row.kernel, row.chip, *sizes, "; ".join([ops, *row.problems]))


def main() -> None:
    """Prints the table of all cases, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--chip", action="append", choices=list(CHIPS), help="repeat for several")
    parser.add_argument(
        "--jobs", type=int, default=2, help="processes that compile at the same time"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
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
    for found in in_processes(_measure, jobs, options.jobs):
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
