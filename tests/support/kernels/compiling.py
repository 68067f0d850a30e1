"""Compiles kernels ahead of time for chips that this machine lacks.

Calls a launcher with tensors on the meta device or the CPU, while Triton's driver is a stand-in and
each launch only compiles. The result is what a real call of that launcher would run: signature,
specialisation, constants and options. Needs a process without `TRITON_INTERPRET`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.support.kernels import binaries
from tests.support.kernels.chips import CHIPS, TENSOR_COLUMNS, Chip

OPERATIONS = {
    **{name: rf"\b{name}\b" for name in ("HMMA", "HGMMA", "UTCHMMA", "LDGSTS", "LDG", "BAR")},
    **{f"{name}.128": rf"\b{name}\.E\S*\.128\b" for name in ("LDG", "LDGSTS", "STG")},
    "MFMA": r"\bv_mfma",
}
"""Instructions to count: patterns by name."""


class Launch(NamedTuple):
    kernel: str
    options: dict[str, Any]  # arguments passed by keyword
    compiled: Any  # Triton's `CompiledKernel`; `None` where nothing was compiled
    key: str  # Triton's key in its compile cache; "" on a cache hit


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Resources of one kernel on one chip: registers per thread; bytes of stack and of spilled
    registers per thread, both 0 unless registers were spilled; bytes of shared memory per block;
    K/V tokens loaded per iteration, 0 without such a tile; main-loop instructions per warp; wanted
    instructions that are missing."""

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
    tensor_columns: int = 0  # of tensor memory, on Blackwell

    @property
    def problems(self) -> list[str]:
        """What makes this kernel unfit for its chip."""
        found, most = [], CHIPS[self.chip].block_shared
        if self.stack or self.spilled:
            found.append(f"spills: {self.stack} bytes of stack, {self.spilled} of registers")
        if self.shared > most:
            found.append(f"needs {self.shared} bytes of shared memory, a block has {most}")
        if self.tensor_columns > TENSOR_COLUMNS:
            found.append(
                f"needs {self.tensor_columns} columns of tensor memory, a multiprocessor has"
                f" {TENSOR_COLUMNS}"
            )
        return found + [f"has no {name}" for name in self.missing]


class _Driver:
    """Stands in for a GPU driver, just enough for Triton to choose a target."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": chip.block_shared}
        )

    def get_current_target(self) -> Any:
        return self._chip.target()

    def get_current_device(self) -> str:
        return self._chip.name  # the chip part of Triton's cache key

    def get_current_stream(self, device: str) -> int:
        return 0


@contextlib.contextmanager
def only_compile(chip: Chip, is_compiling: bool = True) -> Iterator[list[Launch]]:
    """Within it, launches compile for that chip and run nothing; yields the list of launches.
    Without `is_compiling` they only compute the cache key of the kernel."""
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
        return not is_compiling  # True: the hook replaces Triton's compilation

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


def measure(
    name: str, call: Callable[[], Any], chip: Chip, wanted: Sequence[str] = ()
) -> list[Compiled]:
    """Compiles what `call` launches and reads the resources; the first kernel must contain the
    instructions `wanted`."""
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
                # dynamic shared memory is not in the binary
                shared=max(usage.shared, metadata.shared),
                tile=launch.options.get("TILE", 0),
                loop=binaries.main_loop(code),
                instructions=counts,
                missing=tuple(op for op in wanted if op not in counts) if not found else (),
                tensor_columns=getattr(metadata, "tmem_size", None) or 0,
            )
        )
    return found
