"""The C++ sources, the compiler of this machine, the flags of every build, and the processor's
capabilities. `build.py` and `prebuilt.py` run the compiler."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
_INCLUDED = ("attention", "draw", "hash", "lanes", "linear", "rows", "team", "tiles")
SOURCES = (SOURCE, *(SOURCE.with_name(f"{name}.cpp") for name in _INCLUDED))
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-Wno-psabi",
)


def find_compiler() -> list[str]:
    """Returns the command of the C++ compiler: `CXX` with its options if it is set, otherwise the
    first of `c++`, `g++` and `clang++` that is installed. Raises `RuntimeError` if none is found,
    and on Windows."""
    if sys.platform == "win32":
        raise RuntimeError("the kernels cannot be built on Windows")
    configured_command = shlex.split(os.environ.get("CXX") or "")
    names = configured_command[:1] or ["c++", "g++", "clang++"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise RuntimeError(
            f"found no C++ compiler (tried {', '.join(names)}): install one, or set CXX"
        )
    return [compiler, *configured_command[1:]]


def link_flags(compiler: list[str]) -> tuple[str, ...]:
    """Returns the flags that link the C++ standard library, which a C compiler does not link by
    itself; no flags for a C++ compiler. (`CXX` may name a C compiler: PEFT's BOFT sets `CXX=gcc`,
    and leaves it set when it cannot build its own kernels.)"""
    programs = [part for part in compiler if not part.startswith("-")]  # ignores `-std=c++17`
    if any("++" in Path(program).name for program in programs):
        return ()
    return ("-lc++" if sys.platform == "darwin" else "-lstdc++", "-lm")


def compile_command(compiler: list[str], flags: Sequence[str], output: Path) -> list[str]:
    """Returns the command that compiles the kernels with `flags` into the library `output`."""
    return [
        *compiler,
        *COMMON_FLAGS,
        *flags,
        str(SOURCE),
        "-o",
        str(output),
        *link_flags(compiler),
    ]


def cpu_flags() -> set[str]:
    """Returns the CPU flags that Linux reports; an empty set on other systems."""
    return set(_cpuinfo("flags", "Features").split())


@functools.cache
def cpu_vendor() -> str:
    """Returns the CPU's vendor as Linux reports it, such as `AuthenticAMD`; empty for an ARM CPU,
    and on other systems."""
    return _cpuinfo("vendor_id")


def _cpuinfo(*names: str) -> str:
    """Returns the value on the first line of `/proc/cpuinfo` that begins with one of these names;
    empty if there is none."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if os.access(cpuinfo, os.R_OK) else []
    line = next((line for line in lines if line.startswith(names)), "")
    return line.partition(":")[2].strip()
