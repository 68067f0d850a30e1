"""Compiles the Triton kernels for chips that this machine lacks: resources, length of the main
loops, blocks per multiprocessor.

    python -m benchmarks.compiled [--chips sm_90 gfx942] [--only decode-d128] [--quick]
                                  [--json PATH]

Attention of decodes and prompts for heads of 64 to 576, quantized blocks, shared prefixes, stores,
merges, copies, hashes, LoRA. Nothing has run, and no time is measured. Loops are counted in SASS
(NVIDIA) or LLVM's text (AMD): instructions of one warp per tile of keys, and of all warps of a
block per token. The file keeps the rows of other cases, chips and versions of Triton.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from tqdm import tqdm

from benchmarks import report, runner, tables
from benchmarks.aot import Compiled, measure, require_compiler
from benchmarks.chips import CHIPS
from benchmarks.runner import Data, option

QUICK_CHIP, QUICK = "sm_90", ("decode-d128-bf16", "merge-d128-bf16", "store-h8-d128-bf16")
TARGET_CASE, TARGET = "decode-d128-bf16", 490
"""Most instructions of the decode kernel's loop per tile of 64 tokens, on NVIDIA chips."""
FIGURES = {
    "tile": "tile, tokens",
    "num_warps": "warps",
    "num_stages": "stages",
    "registers": "registers",
    "shared": "shared, bytes",
    "tensor_columns": "tensor columns",
    "loop": "loop, instructions",
}
"""Titles of the resources of `Compiled`."""


CASES = (
    *(f"decode-d{dim}-bf16" for dim in (64, 80, 128, 192, 256, 512)),
    "decode-d576_512-bf16-latent",
    "decode-d128-bf16-g8-q8",
    "decode-d128-fp32",
    *(f"prefill-d{dim}-bf16" for dim in (64, 128, 512, "576_512")),
    "prefill-d256-bf16-all",
    "prefill-d128-bf16-chunk8",
    "prefill-d128-bf16-split",
    "prefill-d128-bf16-bias",
    "prefill-d112-fp32",
    "prefix-d64-bf16-n16",
    "merge-d128-bf16",
    "store-h8-d128-bf16",
    "int8-decode-128",
    "int8-prefill-128",
    "fp8_e4m3-store-128",
    "fp8_e4m3-decode-512-64",
    "lora rank 128 bfloat16",
    "hash",
    "copy-words",
)
"""Cases of `tests.support.kernels`, which are compiled here for all chips."""


def _measure(job: tuple[str, str]) -> list[Compiled]:
    from tests.support.kernels.aot import cases

    name, chip = job
    (call,) = (case.call for case in cases() if case.name == name)
    return measure(name, call, CHIPS[chip])


def row(found: Compiled, version: str) -> Data:
    """The row of a kernel."""
    figures = {title: getattr(found, key) for key, title in FIGURES.items()}
    blocks, limit = found.residency
    figures |= {"spills, bytes": found.stack + found.spilled, "a token": found.per_token}
    figures |= {"blocks a multiprocessor": blocks, "limited by": limit}
    figures |= {"problems": "; ".join(found.problems), "instructions": found.instructions}
    limits = {}
    is_target = (found.case, found.kernel) == (TARGET_CASE, "attention_kernel")
    if is_target and not CHIPS[found.chip].is_amd:
        limits = {FIGURES["loop"]: TARGET}
    case = f"{found.case}, {found.chip}, Triton {version}"
    return runner.row_of(case, found.kernel, **figures) | {"limits": limits}


def compile_all(args: argparse.Namespace, keep: Any) -> Data:
    """The rows of all cases on all chips."""
    require_compiler()
    import triton

    jobs = [
        (case, chip)
        for chip in args.chips
        for case in args.cases
        if any(name in case for name in args.only)
    ]
    # processes, since Triton holds the GIL while it compiles
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        found = tqdm(pool.map(_measure, jobs), total=len(jobs), disable=None)
        return {"rows": [row(one, triton.__version__) for ones in found for one in ones]}


def section(data: Data) -> str:
    """Of docs/figures/kernels.md."""
    said = """**Triton kernels, compiled without a GPU**, `python -m benchmarks.compiled`. Nothing
        has run. Registers and instructions of each kernel:
        [compiled.json](../../benchmarks/results/compiled.json)."""
    return "\n\n".join([report.flow(said), *show(data["runs"])])


def show(runs: Sequence[Data]) -> list[str]:
    """One row for each chip and version of Triton."""
    kernels: dict[tuple[str, str], list[tuple[Data, str]]] = {}
    for run in runs:
        for one in run["rows"]:
            *_, chip, version = one["case"].split(", ")
            kernels.setdefault((chip, version), []).append((one, run["facts"]["revision"]))
    order = [(chip, version) for chip in CHIPS for version in sorted({key[1] for key in kernels})]
    rows = []
    for chip, version in filter(kernels.__contains__, order):
        figures = [one["figures"] for one, _ in kernels[chip, version]]
        row = {"chip": chip, "Triton": version.removeprefix("Triton "), "kernels": len(figures)}
        row["most shared memory, bytes"] = max(one["shared, bytes"] for one in figures)
        row["a block has"] = CHIPS[chip].block_shared
        row["kernels that spill"] = sum(one["spills, bytes"] > 0 for one in figures)
        row["revision"] = ", ".join(sorted({revision for _, revision in kernels[chip, version]}))
        rows.append(row)
    return [report.markdown(rows), tables.targets(tables.pooled(runs))]


BENCHMARK = runner.Benchmark(
    __doc__,
    measure=compile_all,
    show=show,
    options={
        "--chips": option(nargs="+", choices=list(CHIPS), default=list(CHIPS)),
        "--only": option("cases that contain one of these", nargs="+", default=[""]),
        "--jobs": option("processes that compile at the same time", type=int, default=2),
    },
    fixed={"cases": CASES},
    quick={"chips": [QUICK_CHIP], "cases": QUICK},
    keeps=True,
)
main = BENCHMARK.main

if __name__ == "__main__":
    raise SystemExit(main())
