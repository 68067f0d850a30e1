"""Compiles the Triton kernels for chips that this machine lacks: resources, length of the main
loops, blocks per multiprocessor.

    python -m benchmarks.compiled [--chips sm_90 gfx942] [--only "decode d128"] [--quick]
                                  [--results DIR]

Measures no time. Loops are counted in SASS (NVIDIA) or LLVM's text (AMD): instructions of one warp
per tile of keys, and of all warps of a block per token. The files keep the rows of other cases,
chips and versions of Triton.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import runner
from benchmarks.aot import Compiled, in_processes, measure, require_compiler
from benchmarks.chips import CHIPS
from benchmarks.machine import facts
from benchmarks.report import RESULTS, command_line, markdown, read, write
from benchmarks.runner import option
from benchmarks.tune import Problem

HALF, FULL = torch.bfloat16, torch.float32
META = torch.device("meta")
QUICK_CHIP, QUICK = "sm_90", ("decode d128 64x8192", "store d128")
TARGET_CASE, TARGET = "decode d128 64x8192", 490
"""Most instructions of the decode kernel's loop per tile of 64 tokens, on NVIDIA chips."""

COLUMNS = {
    "triton": "Triton",
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


def _decode(
    dim: int, rows: int, seq_len: int, dtype: torch.dtype = HALF, query_len: int = 1
) -> None:
    Problem.make(dim, dtype, rows, query_len, seq_len, META).decode(None)


def _prefill(dim: int, rows: int, queries: int, seq_len: int, dtype: torch.dtype = HALF) -> None:
    Problem.make(dim, dtype, rows, queries, seq_len, META).prefill(None)


def _store(heads: int, dim: int) -> None:
    from hf_paged.kernels.triton.store import store

    keys, values = torch.empty(1000, 2 * heads, 16, dim, dtype=HALF, device=META).chunk(2, dim=1)
    states = torch.empty(1, 64, heads, dim, dtype=HALF, device=META).transpose(1, 2)
    store(states, states, keys, values, torch.empty(1, 64, dtype=torch.int64, device=META))


CASES: dict[str, Callable[[], Any]] = {
    **{
        f"decode d{dim} 64x8192": functools.partial(_decode, dim, 64, 8192)
        for dim in (64, 80, 128, 192, 256, 512, 576)
    },
    "decode d128 8 queries": functools.partial(_decode, 128, 32, 2048, query_len=8),
    "decode d128 float32": functools.partial(_decode, 128, 64, 8192, FULL),
    **{
        f"prefill d{dim} 8x512 of 4096": functools.partial(_prefill, dim, 8, 512, 4096)
        for dim in (64, 128, 256, 512, 576)
    },
    "prefill d128 8x16 of 8192": functools.partial(_prefill, 128, 8, 16, 8192),
    "prefill d128 1x64 of 8192": functools.partial(_prefill, 128, 1, 64, 8192),
    "prefill d128 float32": functools.partial(_prefill, 128, 8, 512, 4096, FULL),
    "store d128": functools.partial(_store, 8, 128),
}
"""Calls of launchers by name, at the heads of `tune.SHAPES`. They include the merges of split
rows."""

TESTED = (
    "prefill-d128-bf16-bias",
    "prefill-d112-fp32",
    "prefix-d64-bf16-n16",
    "int8-decode-128",
    "int8-prefill-128",
    "fp8_e4m3-store-128",
    "fp8_e4m3-decode-512-64",
    "lora rank 128 bfloat16",
    "hash",
    "copy-words",
)
"""Cases of `tests.support.kernels` that are compiled here, too, for all chips: of the other
kernels."""


def calls() -> dict[str, Callable[[], Any]]:
    """`CASES` and `TESTED` by name."""
    from tests.support.kernels.aot import cases

    by_name = {case.name: case.call for case in cases()}
    return CASES | {name: by_name[name] for name in TESTED}


def _measure(job: tuple[str, str]) -> list[Compiled]:
    case, chip = job
    return measure(case, CASES[case] if case in CASES else calls()[case], CHIPS[chip])


def row(found: Compiled) -> dict[str, Any]:
    """The row for JSON and for the table."""
    row = dataclasses.asdict(found)
    row["spills"] = found.stack + found.spilled
    row["per_token"] = found.per_token
    row["blocks"], row["limit"] = found.residency
    return row | {"tile": found.tile or None, "loop": found.loop or None}


def verdicts(found: Sequence[Compiled]) -> list[str]:
    """One line per target: whether it is met."""
    lines = []
    for one in found:
        is_target = (one.case, one.kernel) == (TARGET_CASE, "attention_kernel")
        if is_target and not CHIPS[one.chip].is_amd:
            verdict = "holds" if one.loop <= TARGET else "MISSED"
            lines.append(
                f"{one.case} on {one.chip}: {one.loop} instructions a tile of {one.tile}, at most"
                f" {TARGET}: {verdict}"
            )
    problems = [
        f"{one.case}, {one.kernel} on {one.chip}: {'; '.join(one.problems)}"
        for one in found
        if one.problems
    ]
    return lines + (
        problems or [f"none of {len(found)} kernels spills registers, each fits its chip"]
    )


def _notes(rows: Sequence[dict[str, Any]]) -> str:
    """The verdicts on the rows of each version of Triton."""
    names = [field.name for field in dataclasses.fields(Compiled)]
    lines = []
    for version in sorted({row["triton"] for row in rows}):
        mine = [row for row in rows if row["triton"] == version]
        zeros = [{"tile": row["tile"] or 0, "loop": row["loop"] or 0} for row in mine]
        kernels = [
            Compiled(**{name: row[name] for name in names} | more) for row, more in zip(mine, zeros)
        ]
        lines += [f"- Triton {version}: {line}" for line in verdicts(kernels)]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    options = {
        "--chips": option(nargs="+", choices=list(CHIPS), default=list(CHIPS)),
        "--only": option("cases that contain one of these", nargs="+", default=[""]),
        "--jobs": option("processes that compile at the same time", type=int, default=2),
        "--quick": runner.flag(f"two cases on {QUICK_CHIP}: shows that it runs"),
        "--results": runner.RESULTS,
    }
    args = runner.parser_of(__doc__, options).parse_args(argv)
    require_compiler()
    import triton

    version = triton.__version__
    machine = facts() | {"triton": version}
    cases, chips = (QUICK, [QUICK_CHIP]) if args.quick else (calls(), args.chips)
    jobs = [
        (case, chip) for chip in chips for case in cases if any(name in case for name in args.only)
    ]
    found: list[Compiled] = []
    for number, compiled in enumerate(in_processes(_measure, jobs, args.jobs), start=1):
        found += compiled
        print(
            f"{number} of {len(jobs)}: {' on '.join(jobs[number - 1])}", file=sys.stderr, flush=True
        )
    rows = [row(one) | {"triton": version, "revision": machine["revision"]} for one in found]
    print(markdown(rows, COLUMNS), _notes(rows), sep="\n\n")
    directory = args.results or (None if args.quick else RESULTS)
    if directory is None:
        return
    command = command_line()
    earlier = read(directory / "compiled.json") if (directory / "compiled.json").exists() else {}
    runs = earlier.get("runs", {}) | {version: {"command": command, "facts": machine}}
    done = {(version, chip, case) for case, chip in jobs}
    kept = [other for other in earlier.get("rows", ()) if "triton" in other]
    rows += [other for other in kept if (other["triton"], other["chip"], other["case"]) not in done]
    rows.sort(key=lambda row: (row["triton"], list(CHIPS).index(row["chip"])))
    files = {"directory": directory, "columns": COLUMNS, "command": command}
    write("compiled", machine, rows, notes=_notes(rows), extra={"runs": runs}, **files)


if __name__ == "__main__":
    main()
