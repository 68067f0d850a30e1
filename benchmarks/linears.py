"""The linear layers of one decode step, one after the other as in a model: PyTorch's `F.linear` and
the C++ kernel that reads the weights in place, in turns, for 1 to 512 rows. The floor is the bytes
of the weights over the best streaming-read bandwidth of the same run. Targets: 1.4 up to 64 rows
with AMX, 1.05 up to 32 without. Above 256 rows with AMX, 128 with AVX512-BF16, 64 with
neither, steps leave products to PyTorch; where it has none in bfloat16, products of more than 128
rows are computed in float32. In float32 the kernel computes 64 rows on AMD's CPUs, 4 on Intel's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import runner
from benchmarks.ceilings import CPU_BYTES, bandwidth
from benchmarks.models import SHAPES, Shape
from hf_paged.kernels.cpp import linear as kernel
from hf_paged.kernels.cpp.build import PATHS, best_path

LINEARS = {"torch": F.linear, "ours": kernel.linear}


def weights(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """Linear weights of one forward, each `(width, depth)`, in model order, the LM head last."""
    hidden, inner = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner)]
    sizes = layer * shape.layers + [(shape.vocab, hidden)]
    return [torch.randn(size, dtype=torch.float32).to(dtype) for size in sizes]


def arms(layers: list[Tensor], rows: int) -> dict[str, runner.Arm]:
    """Seconds of one forward's products by each."""
    depths = {layer.shape[1] for layer in layers}
    inputs = {depth: torch.randn(rows, depth).to(layers[0].dtype) for depth in depths}

    def run(turn: int, linear: Callable[[Tensor, Tensor], Tensor]) -> float:
        def walk() -> None:
            for layer in layers:
                linear(inputs[layer.shape[1]], layer)

        return runner.seconds_of(walk)

    return runner.each(run, LINEARS)


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    reading = bandwidth("cpu", args.num_bytes)  # bytes per second
    for name in args.models:
        layers = weights(SHAPES[name], getattr(torch, args.dtype))
        floor = {"floor, ms": 1e3 * sum(layer.nbytes for layer in layers) / reading}
        for rows in args.rows:
            case = f"{name}, {rows} row{'s' * (rows > 1)}"
            yield runner.Case(case, arms(layers, rows), {"torch": {}}, figures=floor)


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="Products of few rows",
    results=(("linears-cpu",), ("linears-cpu-avx2",), ("linears-float32-cpu-avx2",)),
    said=lambda args: f"Path of the kernel: {list(PATHS)[best_path()]}, in {args.dtype}.",
    options={
        "--models": runner.option(
            nargs="+", default=["llama-100m", "qwen2.5-0.5b"], choices=list(SHAPES)
        ),
        "--dtype": runner.DTYPE,
    },
    fixed={"rows": [1 << power for power in range(10)], "turns": 15, "num_bytes": CPU_BYTES},
    quick={"models": ["llama-tiny"], "rows": (1, 5), "turns": 1, "num_bytes": 1 << 26},
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
