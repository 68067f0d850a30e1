"""The linear layers of one decode step, one after the other as in a model: PyTorch's `F.linear`
and the C++ kernel that reads the weights in place, in turns, for 1 to 512 rows.

    python -m benchmarks.linears [--models llama-100m ...] [--quick] [--json PATH]

The floor is the bytes of the weights over the best streaming-read bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ceilings import CPU_BYTES, bandwidth
from benchmarks.machine import facts
from benchmarks.models import SHAPES, Shape
from benchmarks.paired import interval
from hf_paged.kernels.cpp import linear as kernel
from hf_paged.kernels.cpp.build import PATHS, best_path

MODELS = ("llama-100m", "qwen2.5-0.5b")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TURNS = 15
TARGET = 1.4  # PyTorch's time over ours with AMX, up to 64 rows


def weights(shape: Shape) -> list[Tensor]:
    """Linear weights of one forward, each `(width, depth)`, in model order, the LM head last."""
    config: Any = shape.config()
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner)]
    sizes = layer * config.num_hidden_layers + [(config.vocab_size, hidden)]
    return [torch.randn(size, dtype=torch.float32).to(torch.bfloat16) for size in sizes]


def compare(layers: list[Tensor], rows: int, turns: int) -> dict[str, Any]:
    """Seconds of one forward's products by each, and the ratio of PyTorch's to ours."""
    inputs = {
        depth: torch.randn(rows, depth).to(torch.bfloat16)
        for depth in {layer.shape[1] for layer in layers}
    }
    systems = {"torch": F.linear, "ours": kernel.linear}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(turns + 1):
        for name in list(systems) if turn % 2 else reversed(list(systems)):
            start = time.perf_counter()
            for layer in layers:
                systems[name](inputs[layer.shape[1]], layer)
            if turn:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - start)
    ratios = [theirs / ours for theirs, ours in zip(seconds["torch"], seconds["ours"])]
    low, high = interval(ratios) or (min(ratios), max(ratios))
    found: dict[str, Any] = {
        f"{name}_ms": round(1e3 * statistics.median(taken), 2) for name, taken in seconds.items()
    }
    return found | {
        "ratio": round(statistics.median(ratios), 2),
        "interval": [round(low, 2), round(high, 2)],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| model | rows | floor, ms | torch, ms | ours, ms | torch / ours |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        cells = row["model"], row["rows"], row["floor_ms"], row["torch_ms"], row["ours_ms"]
        bounds = "{} to {}".format(*row["interval"])
        lines.append(f"| {' | '.join(map(str, cells))} | **{row['ratio']}** ({bounds}) |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(SHAPES))
    parser.add_argument("--quick", action="store_true", help="a tiny model and few rows")
    parser.add_argument("--json", help="also write the results here")
    args = parser.parse_args(argv)
    found = facts()
    names, counts, turns = (["llama-tiny"], (1, 5), 1) if args.quick else (args.models, ROWS, TURNS)
    reading = bandwidth("cpu", 1 << 26 if args.quick else CPU_BYTES)  # bytes per second
    rows = []
    for name in names:
        layers = weights(SHAPES[name])
        floor = sum(layer.nbytes for layer in layers) / reading
        for count in counts:
            row = {"model": name, "rows": count, "floor_ms": round(1e3 * floor, 2)}
            rows.append(row | compare(layers, count, turns))
    path = {number: name for name, number in PATHS.items()}[best_path()]
    print(table(rows))
    if args.json:
        made = {
            "machine": found,
            "path": path,
            "bandwidth_gb_s": round(reading / 1e9, 1),
            "rows": rows,
        }
        with open(args.json, "w") as file:
            json.dump(made, file, indent=1)


if __name__ == "__main__":
    main()
