"""The C++ sources, the flags for every compiler, the compiler of this machine, and the processor's
flags."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
_INCLUDED = ("attention", "draw", "hash", "lanes", "linear", "rows", "tiles")
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
    """The C++ compiler's command, with the options in `CXX`. Raises `RuntimeError` if there is
    none."""
    if sys.platform == "win32":
        raise RuntimeError("no build on Windows")
    own = shlex.split(os.environ.get("CXX") or "")
    names = own[:1] or ["c++", "g++", "clang++"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise RuntimeError(
            f"no C++ compiler was found, tried {', '.join(names)}: install one, or set CXX"
        )
    return [compiler, *own[1:]]


def link_flags(compiler: list[str]) -> tuple[str, ...]:
    """The C++ library, for the command of a C compiler, which links none: `CXX=gcc`, which PEFT's
    BOFT sets and leaves set when it cannot build its own kernels."""
    if any("++" in Path(part).name for part in compiler):
        return ()
    return ("-lc++" if sys.platform == "darwin" else "-lstdc++", "-lm")


def compile_command(compiler: list[str], flags: Sequence[str], output: Path) -> list[str]:
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
    """The CPU flags that Linux reports; empty on other systems."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if os.access(cpuinfo, os.R_OK) else []
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return set(found.partition(":")[2].split())
