"""The prebuilt libraries of a wheel, one per instruction level, and the choice of one for this
processor. `python -m hf_paged.kernels.cpp.prebuilt`, which `.ci/release` runs, builds them into the
folder `lib`. A checkout contains no libraries."""

from __future__ import annotations

import argparse
import functools
import hashlib
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .compiler import COMMON_FLAGS, SOURCES, compile_command, cpu_flags, find_compiler

FOLDER = Path(__file__).with_name("lib")
_V2 = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
_V3 = f"{_V2} abm avx avx2 bmi1 bmi2 f16c fma movbe"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
# instruction levels, best first: compiler options, and the CPU flags (as Linux names them) that
# the compiled code requires
LEVELS = {
    "x86-64-v4-amx": (
        "-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16",
        f"{_V4} avx512_bf16 amx_tile amx_bf16",
    ),
    "x86-64-v4-bf16": ("-march=x86-64-v4 -mavx512bf16", f"{_V4} avx512_bf16"),
    "x86-64-v4": ("-march=x86-64-v4", _V4),
    "x86-64-v3": ("-march=x86-64-v3", _V3),
    "x86-64-v2": ("-march=x86-64-v2", _V2),
}


def supported_levels(flags: set[str]) -> Iterator[str]:
    """Yields the `LEVELS` that a processor with these CPU flags supports, best first."""
    for level, (_, required_flags) in LEVELS.items():
        if flags.issuperset(required_flags.split()):
            yield level


def find(flags: set[str] | None = None) -> Path | None:
    """Returns the path of the best library for a processor with these CPU flags (by default this
    processor's); `None` if there is none. Ignores libraries that were built from other sources, and
    files whose name does not end with the hash of their content."""
    if platform.machine() != "x86_64":
        return None
    if flags is None:
        flags = cpu_flags()
    for level in supported_levels(flags):
        for path in FOLDER.glob(f"kernels-{level}-{_sources_hash()}-*.so"):
            if path.is_file() and path.stem.endswith(_content_hash(path)):
                return path
    return None


def _content_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@functools.cache
def _sources_hash() -> str:
    parts = *(source.read_bytes() for source in SOURCES), COMMON_FLAGS, LEVELS
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> int:
    """Replaces the libraries in `FOLDER`, one for each level, and prints their names. Raises
    `RuntimeError` without a compiler, and `SubprocessError` if the compiler fails or takes longer
    than 300 seconds."""
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.so"):
        path.unlink()
    for level, (flags, _) in LEVELS.items():
        static_flags = ("-fopenmp", "-static-libstdc++", "-static-libgcc", "-s")
        path = FOLDER / f"{level}.so"
        command = compile_command(find_compiler(), [*flags.split(), *static_flags], path)
        subprocess.run(command, check=True, timeout=300)
        name = f"kernels-{level}-{_sources_hash()}-{_content_hash(path)}.so"
        path.rename(path.with_name(name))
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
