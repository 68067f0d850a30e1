"""
Compiles the Triton kernels for chips that this machine lacks: resources, length of the main loops, blocks per
multiprocessor.

    python -m benchmarks.compiled [--chips sm_90 gfx942] [--only "decode d128"] [--quick] [--results DIR]

Measures no time. Loops are counted in SASS (NVIDIA) or LLVM's text (AMD): instructions of one warp per tile of keys,
and of all warps of a block per token.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.aot import Compiled, in_processes, measure, require_compiler
from benchmarks.chips import CHIPS
from benchmarks.machine import facts
from benchmarks.report import RESULTS, command_line, markdown, write
from benchmarks.tune import Problem

HALF, FULL = torch.bfloat16, torch.float32
META = torch.device("meta")
QUICK_CHIP, QUICK = "sm_90", ("decode d128 64x8192", "store d128")
TARGET_CASE, TARGET = "decode d128 64x8192", 490
"""Most instructions of the decode kernel's loop per tile of 64 tokens, on NVIDIA chips."""

COLUMNS = {
    "chip": "chip",
    "case": "case",
    "kernel": "kernel",
    "tile": "tile, tokens",
    "num_warps": "warps",
    "num_stages": "stages",
    "registers": "registers",
    "shared": "shared, bytes",
    "spills": "spills, bytes",
    "loop": "loop, instructions",
    "per_token": "a token",
    "blocks": "blocks a multiprocessor",
    "limit": "limited by",
}


def _decode(dim: int, rows: int, seq_len: int, dtype: torch.dtype = HALF, query_len: int = 1) -> None:
    Problem.make(dim, dtype, rows, query_len, seq_len, META).decode(None)


def _prefill(dim: int, rows: int, queries: int, seq_len: int, dtype: torch.dtype = HALF) -> None:
    Problem.make(dim, dtype, rows, queries, seq_len, META).prefill(None)


def _store(heads: int, dim: int) -> None:
    from hf_paged.kernels.triton.store import store

    keys, values = torch.empty(1000, 2 * heads, 16, dim, dtype=HALF, device=META).chunk(2, dim=1)
    states = torch.empty(1, 64, heads, dim, dtype=HALF, device=META).transpose(1, 2)
    store(states, states, keys, values, torch.empty(1, 64, dtype=torch.int64, device=META))


CASES: dict[str, Callable[[], Any]] = {
    **{f"decode d{dim} 64x8192": functools.partial(_decode, dim, 64, 8192) for dim in (64, 80, 128, 192, 256, 576)},
    "decode d128 8 queries": functools.partial(_decode, 128, 32, 2048, query_len=8),
    "decode d128 float32": functools.partial(_decode, 128, 64, 8192, FULL),
    **{f"prefill d{dim} 8x512 of 4096": functools.partial(_prefill, dim, 8, 512, 4096) for dim in (64, 128, 256, 576)},
    "prefill d128 8x16 of 8192": functools.partial(_prefill, 128, 8, 16, 8192),
    "prefill d128 1x64 of 8192": functools.partial(_prefill, 128, 1, 64, 8192),
    "prefill d128 float32": functools.partial(_prefill, 128, 8, 512, 4096, FULL),
    "store d128": functools.partial(_store, 8, 128),
}
"""Calls of launchers by name, at the heads of `tune.SHAPES`. They include the merges of split rows."""


def _measure(job: tuple[str, str]) -> list[Compiled]:
    case, chip = job
    return measure(case, CASES[case], CHIPS[chip])


def row(found: Compiled) -> dict[str, Any]:
    """The row for JSON and for the table."""
    blocks, limit = found.residency
    extra = {"spills": found.stack + found.spilled, "per_token": found.per_token, "blocks": blocks, "limit": limit}
    return dataclasses.asdict(found) | extra | {"tile": found.tile or None, "loop": found.loop or None}


def verdicts(found: Sequence[Compiled]) -> list[str]:
    """One line per target: whether it is met."""
    lines = []
    for one in found:
        if (one.case, one.kernel) == (TARGET_CASE, "attention_kernel") and not CHIPS[one.chip].is_amd:
            verdict = "holds" if one.loop <= TARGET else "MISSED"
            lines.append(
                f"{one.case} on {one.chip}: {one.loop} instructions a tile of {one.tile}, at most {TARGET}: {verdict}"
            )
    problems = [f"{one.case}, {one.kernel} on {one.chip}: {'; '.join(one.problems)}" for one in found if one.problems]
    return lines + (problems or [f"none of {len(found)} kernels spills registers, each fits its chip"])


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=list(CHIPS), default=list(CHIPS))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile at the same time")
    parser.add_argument("--quick", action="store_true", help=f"two cases on {QUICK_CHIP}: shows that it runs")
    parser.add_argument("--results", type=Path, help="directory for the files (benchmarks/results; none with --quick)")
    args = parser.parse_args(argv)
    require_compiler()
    import triton

    machine = facts() | {"triton": triton.__version__}
    cases, chips = (QUICK, [QUICK_CHIP]) if args.quick else (CASES, args.chips)
    jobs = [(case, chip) for chip in chips for case in cases if args.only in case]
    found: list[Compiled] = []
    for number, compiled in enumerate(in_processes(_measure, jobs, args.jobs), start=1):
        found += compiled
        print(f"{number} of {len(jobs)}: {' on '.join(jobs[number - 1])}", file=sys.stderr, flush=True)
    rows = [row(one) for one in found]
    notes = "\n".join(f"- {line}" for line in verdicts(found))
    print(markdown(rows, COLUMNS), notes, sep="\n\n")
    directory = args.results or (None if args.quick else RESULTS)
    if directory is not None:
        command = command_line(argv, "benchmarks.compiled")
        write("compiled", machine, rows, directory=directory, columns=COLUMNS, command=command, notes=notes)


if __name__ == "__main__":
    main()
