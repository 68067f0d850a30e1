"""The kernels that `benchmarks.compiled` compiled without a GPU, by chip."""

from __future__ import annotations

from benchmarks import report
from benchmarks.chips import CHIPS
from benchmarks.report import Row as Data
from benchmarks.report import flow

COMPILED = "compiled"


def compiled(data: Data) -> str:
    """One row for each chip and version of Triton."""
    rows = []
    for chip in CHIPS.values():
        for version in sorted(data["runs"]):
            kernels = [
                row for row in data["rows"] if (row["chip"], row["triton"]) == (chip.name, version)
            ]
            if kernels:
                rows.append(
                    {
                        "chip": chip.name,
                        "Triton": version,
                        "kernels": len(kernels),
                        "most shared memory, bytes": max(row["shared"] for row in kernels),
                        "a block has": chip.block_shared,
                        "kernels that spill": sum(row["spills"] > 0 for row in kernels),
                        "revision": ", ".join(sorted({row["revision"] for row in kernels})),
                    }
                )
    said = flow(
        f"""**Triton kernels, compiled without a GPU**, `{data["command"]}`: attention of decodes and prompts for
        heads of 64 to 576, quantized blocks, shared prefixes, stores, merges, copies, hashes, LoRA.
        Nothing has run. Registers and instructions of each kernel:
        [{COMPILED}.md](../benchmarks/results/{COMPILED}.md)."""
    )
    return f"{said}\n\n{report.markdown(rows)}"
