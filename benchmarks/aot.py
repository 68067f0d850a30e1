"""Kernels compiled ahead of time for chips that need not be here.

A launcher is called with tensors of the meta device, or of the CPU, while Triton's driver is a stand-in and launches
only compile. So what is compiled is what a call of that launcher would run: signature, specialisation, constants and
options. Needs a process without `TRITON_INTERPRET`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from benchmarks import binaries
from benchmarks.chips import CHIPS, Chip

Job = TypeVar("Job")
Result = TypeVar("Result")

OPERATIONS = {
    **{name: rf"\b{name}\b" for name in ("HMMA", "HGMMA", "UTCHMMA", "LDGSTS", "LDG", "BAR")},
    **{f"{name}.128": rf"\b{name}\.E\S*\.128\b" for name in ("LDG", "LDGSTS", "STG")},
    "MFMA": r"\bv_mfma",
}
"""Instructions that are counted: patterns by name."""


class Launch(NamedTuple):
    kernel: str
    options: dict[str, Any]  # arguments that were given by name
    compiled: Any  # Triton's `CompiledKernel`; `None` where nothing was compiled
    key: str  # under which Triton keeps what it compiled; "" where it had it already


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What one kernel takes on one chip: registers of a thread; bytes of stack and of spilled registers of a thread,
    both 0 unless registers were spilled; bytes of shared memory of a block; tokens whose keys and values are loaded at
    a time, 0 where no such tile is; instructions of the main loop, a warp; what was asked for and is not there."""

    case: str
    kernel: str
    chip: str
    num_warps: int
    num_stages: int
    registers: int
    stack: int
    spilled: int
    shared: int
    tile: int
    loop: int
    instructions: dict[str, int]
    missing: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        """What makes this kernel unfit for its chip."""
        found, most = [], CHIPS[self.chip].block_shared
        if self.stack or self.spilled:
            found.append(f"spills: {self.stack} bytes of stack, {self.spilled} of registers")
        if self.shared > most:
            found.append(f"needs {self.shared} bytes of shared memory, a block has {most}")
        return found + [f"has no {name}" for name in self.missing]

    @property
    def residency(self) -> tuple[int, str]:
        """Blocks that a multiprocessor holds, and what keeps it from holding more."""
        return CHIPS[self.chip].residency(self.registers, self.shared, self.num_warps)

    @property
    def per_token(self) -> float | None:
        """Instructions of all warps a token of the main loop."""
        return round(self.loop * self.num_warps / self.tile, 1) if self.tile and self.loop else None


class _Driver:
    """Stands for a GPU driver: enough of one for Triton to choose a target."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip

    def get_current_target(self) -> Any:
        return self._chip.target()

    def get_current_device(self) -> str:
        return self._chip.name  # the key under which Triton keeps what it compiled

    def get_current_stream(self, device: str) -> int:
        return 0


@contextlib.contextmanager
def only_compile(chip: Chip, is_compiling: bool = True) -> Iterator[list[Launch]]:
    """Within it, launches compile for that chip and run nothing; yields the list of them. Without `is_compiling` not
    even that: they only find the key of what they would run."""
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    require_compiler()
    launches: list[Launch] = []
    keys: list[str] = []
    run, hook, active = JITFunction.run, knobs.runtime.jit_cache_hook, driver._active

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        keys.clear()
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append(Launch(self.__name__, kwargs, compiled, keys[0] if keys else ""))
        return compiled

    def remember(*args: Any, key: str, **kwargs: Any) -> bool:
        keys.append(key)
        return not is_compiling  # true: Triton leaves the compilation to the hook

    driver.set_active(_Driver(chip))
    JITFunction.run = record
    knobs.runtime.jit_cache_hook = remember
    try:
        yield launches
    finally:
        knobs.runtime.jit_cache_hook = hook
        JITFunction.run = run
        driver._active = active


def require_compiler() -> None:
    """Raises `SystemExit` in a process whose kernels are interpreted."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise SystemExit("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")


def measure(name: str, call: Callable[[], Any], chip: Chip, wanted: Sequence[str] = ()) -> list[Compiled]:
    """Compiles what `call` launches and reads what it takes; the first kernel shall have the instructions `wanted`."""
    with only_compile(chip) as launches:
        call()
    found = []
    for launch in launches:
        usage, code = binaries.read(launch.compiled.asm)
        counts = binaries.count(code, OPERATIONS)
        metadata = launch.compiled.metadata
        found.append(
            Compiled(
                case=name,
                kernel=launch.kernel,
                chip=chip.name,
                num_warps=metadata.num_warps,
                num_stages=metadata.num_stages,
                registers=usage.registers,
                stack=usage.stack,
                spilled=usage.spilled,
                shared=max(usage.shared, metadata.shared),  # dynamic shared memory is not in the binary
                tile=launch.options.get("TILE", 0),
                loop=binaries.main_loop(code),
                instructions=counts,
                missing=tuple(op for op in wanted if op not in counts) if not found else (),
            )
        )
    return found


def in_processes(work: Callable[[Job], Result], jobs: Sequence[Job], processes: int) -> Iterator[Result]:
    """`map`, in processes, since Triton compiles under the interpreter's lock."""
    with multiprocessing.get_context("spawn").Pool(max(1, min(processes, len(jobs)))) as pool:
        yield from pool.imap(work, jobs)
