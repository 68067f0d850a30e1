"""Every kernel compiled ahead of time for chips that need not be here: `python -m tests.support.kernels.aot`.

A launcher is called with tensors of the meta device while Triton's driver is a stand-in and launches only compile. So
what is compiled is what a call of that launcher would run: signature, specialisation, constants and options. The
compiled code is then read with the `cuobjdump` that Triton ships.

Needs a process of its own, without `TRITON_INTERPRET`: `compile_cases` starts one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CASE_MODULES = ("decode_cases", "prefill_cases", "memory_cases", "fused_cases")
"""Modules beside this one with `CASES: list[AotCase]`."""

SHARED_LIMIT = {80: 166912, 90: 232448, 100: 232448}
"""Bytes of shared memory that one block may use, by compute capability (CUDA programming guide, table of limits)."""


@dataclasses.dataclass(frozen=True)
class AotCase:
    """
    Args:
        name (`str`): Kernel first, then what tells this case from others.
        call (`Callable[[], Any]`): Calls a launcher with tensors on the meta device.
        capabilities (`tuple[int, ...]`): Chips to compile for.
        instructions (`tuple[str, ...]`): What the SASS of each must hold, such as `HGMMA`, by capability.
    """

    name: str
    call: Callable[[], Any]
    capabilities: tuple[int, ...] = (80, 90, 100)
    instructions: dict[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Resources of one kernel on one chip: registers of a thread; bytes of stack and local memory of a thread (both 0
    unless registers were spilled), and of shared memory of a block; instructions asked for that are not there."""

    case: str
    kernel: str
    capability: int
    num_warps: int
    num_stages: int
    registers: int
    stack: int
    local: int
    shared: int
    instructions: dict[str, int]
    missing: tuple[str, ...]

    @property
    def problems(self) -> list[str]:
        """What makes this kernel unfit for its chip."""
        found = []
        if self.stack or self.local:
            found.append(f"spills: {self.stack} bytes of stack, {self.local} of local memory")
        if self.shared > SHARED_LIMIT[self.capability]:
            found.append(f"needs {self.shared} bytes of shared memory, a block has {SHARED_LIMIT[self.capability]}")
        found += [f"has no {name}" for name in self.missing]
        return found


class _Driver:
    """Stands for a GPU driver: enough of one for Triton to choose a target."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # the key under which Triton keeps what it compiled

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def only_compile(capability: int) -> Iterator[list[tuple[str, Any]]]:
    """Within it, launches compile for that chip and run nothing; yields the list of (kernel name, compiled kernel)."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, kernel))
        return kernel

    before = driver._active
    driver.set_active(_Driver(capability))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = before


def measure(case: AotCase, capability: int) -> list[Compiled]:
    """Compiles what `case` launches and reads what it takes."""
    with only_compile(capability) as compiled:
        case.call()
    found = []
    for name, kernel in compiled:
        usage, sass = _inspect(kernel.asm["cubin"])
        wanted = case.instructions.get(capability, ())
        counts = {
            op: len(re.findall(rf"\b{op}\b", sass))
            for op in {*wanted, "HMMA", "HGMMA", "UTCHMMA", "LDGSTS", "LDG", "BAR"}
        }
        found.append(
            Compiled(
                case=case.name,
                kernel=name,
                capability=capability,
                num_warps=kernel.metadata.num_warps,
                num_stages=kernel.metadata.num_stages,
                registers=usage["REG"],
                stack=usage["STACK"],
                local=usage["LOCAL"],
                shared=max(usage["SHARED"], kernel.metadata.shared),  # dynamic shared memory is not in the binary
                instructions={op: count for op, count in sorted(counts.items()) if count},
                missing=tuple(op for op in wanted if not counts[op]) if name == compiled[0][0] else (),
            )
        )
    return found


def _inspect(cubin: bytes) -> tuple[dict[str, int], str]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    line = next(line for line in usage.splitlines() if "REG:" in line)
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", line)}, sass


def cases() -> list[AotCase]:
    """All cases of `CASE_MODULES`."""
    modules = [importlib.import_module(f"tests.support.kernels.{name}") for name in CASE_MODULES]
    return [case for module in modules for case in module.CASES]


def compile_cases(only: str = "", capabilities: Iterable[int] = ()) -> list[Compiled]:
    """`measure` for every case whose name contains `only`, in a process without the interpreter."""
    command = [sys.executable, "-m", "tests.support.kernels.aot", "--json", "--only", only]
    for capability in capabilities:
        command += ["--capability", str(capability)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    rows = json.loads(done.stdout.splitlines()[-1])
    return [Compiled(**{**row, "missing": tuple(row["missing"])}) for row in rows]


_LINE = "{:44} {:16} {:>4} {:>5} {:>6} {:>4} {:>5} {:>5} {:>6}  {}"


def line(row: Compiled | None) -> str:
    """A row of the table for readers, or its head."""
    if row is None:
        names = ("sm", "warps", "stages", "regs", "stack", "local", "shared")
        return _LINE.format("case", "kernel", *names, "instructions; problems")
    ops = " ".join(f"{op}:{count}" for op, count in row.instructions.items())
    sizes = (row.capability, row.num_warps, row.num_stages, row.registers, row.stack, row.local, row.shared)
    return _LINE.format(row.case, row.kernel, *sizes, "; ".join([ops, *row.problems]))


def main() -> None:
    """Prints the table of all cases, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--capability", type=int, action="append", help="80, 90 or 100; repeat for several")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile at the same time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise SystemExit("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")
    jobs = [
        (index, capability)
        for index, case in enumerate(cases())
        for capability in case.capabilities
        if options.only in case.name and capability in (options.capability or case.capabilities)
    ]
    rows: list[Compiled] = []
    if not options.json:
        print(line(None), flush=True)
    # processes, since Triton compiles under the interpreter's lock
    with multiprocessing.get_context("spawn").Pool(min(options.jobs, len(jobs) or 1)) as pool:
        for found in pool.imap(_measure, jobs):
            rows += found
            if not options.json:
                print("\n".join(map(line, found)), flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))


def _measure(job: tuple[int, int]) -> list[Compiled]:
    index, capability = job
    return measure(cases()[index], capability)


if __name__ == "__main__":
    main()
