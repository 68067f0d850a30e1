"""The linear layers of one decode step, one after the other as in a model: PyTorch's `F.linear`
and the C++ kernel that reads the weights in place, in turns, for 1 to 512 rows.

    python -m benchmarks.linears [--models llama-100m ...] [--quick] [--json PATH]

Medians of 15 turns, 95% intervals. The floor is the bytes of the weights over the best
streaming-read bandwidth of the same run. Targets: 1.4 up to 64 rows with AMX, 1.05 up to 32
without. Above 256 rows with AMX, or 64 without, steps leave products to PyTorch; where PyTorch has
none in bfloat16, products of more than 128 rows are computed in float32.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import runner
from benchmarks.ceilings import CPU_BYTES, bandwidth
from benchmarks.models import SHAPES, Shape
from benchmarks.paired import estimate, ratios
from benchmarks.report import markdown
from hf_paged.kernels.cpp import linear as kernel
from hf_paged.kernels.cpp.build import PATHS, best_path

MODELS = ("llama-100m", "qwen2.5-0.5b")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TURNS = 15


def weights(shape: Shape) -> list[Tensor]:
    """Linear weights of one forward, each `(width, depth)`, in model order, the LM head last."""
    hidden, inner = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner)]
    sizes = layer * shape.layers + [(shape.vocab, hidden)]
    return [torch.randn(size, dtype=torch.float32).to(torch.bfloat16) for size in sizes]


def compare(layers: list[Tensor], rows: int, turns: int) -> dict[str, Any]:
    """Seconds of one forward's products by each, and the ratio of PyTorch's to ours."""
    depths = {layer.shape[1] for layer in layers}
    inputs = {depth: torch.randn(rows, depth).to(torch.bfloat16) for depth in depths}
    works = {
        name: lambda linear=linear: [linear(inputs[layer.shape[1]], layer) for layer in layers]
        for name, linear in {"torch": F.linear, "ours": kernel.linear}.items()
    }
    seconds = runner.take_turns(runner.timed(works), turns, warm_ups=1)
    faster = estimate(ratios(seconds["torch"], seconds["ours"]))
    medians = {name: round(1e3 * statistics.median(x), 2) for name, x in seconds.items()}
    return {f"{name}_ms": medians[name] for name in works} | faster.entries(2)


def run(args: argparse.Namespace) -> dict[str, Any]:
    reading = bandwidth("cpu", args.num_bytes)  # bytes per second
    rows = []
    for name in args.models:
        layers = weights(SHAPES[name])
        floor = sum(layer.nbytes for layer in layers) / reading
        for count in args.rows:
            row = {"model": name, "rows": count, "floor_ms": round(1e3 * floor, 2)}
            rows.append(row | compare(layers, count, args.turns))
    path = {number: name for name, number in PATHS.items()}[best_path()]
    return {"path": path, "bandwidth_gb_s": round(reading / 1e9, 1), "rows": rows}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        {
            "model": row["model"],
            "rows": row["rows"],
            "floor, ms": str(row["floor_ms"]),
            "torch, ms": str(row["torch_ms"]),
            "ours, ms": str(row["ours_ms"]),
            "torch / ours": "**{}** ({} to {})".format(row["ratio"], *row["interval"]),
        }
        for row in rows
    ]
    return markdown(lines, right=("floor, ms", "torch, ms", "ours, ms"))


def show(runs: Sequence[dict[str, Any]]) -> list[str]:
    (data,) = runs
    said = f"Path of the kernel: {data['path']}. Read: {data['bandwidth_gb_s']} GB/s."
    return [said, table(data["rows"])]


BENCHMARK = runner.Benchmark(
    __doc__,
    run,
    show,
    title="Products of few rows",
    results=(("linears-cpu",), ("linears-cpu-avx2",)),
    options={"--models": runner.option(nargs="+", default=list(MODELS), choices=list(SHAPES))},
    fixed={"rows": ROWS, "turns": TURNS, "num_bytes": CPU_BYTES},
    quick={"models": ["llama-tiny"], "rows": (1, 5), "turns": 1, "num_bytes": 1 << 26},
)
main = BENCHMARK.main

if __name__ == "__main__":
    raise SystemExit(main())
