"""Attention time per context token, by block size: `python -m benchmarks.tune --block-sizes`.
Compares every size with `attention/backends/reference.py` first. Then all sizes take turns, each on
its own steps, over layers that share the step as a model's do, on K/V that no processor cache
holds; preparing a step is part of the time. The medians go to
`hf_paged/kernels/tables/<machine>.json`, which `block_size="auto"` reads; commit it."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention_data, runner
from benchmarks.attention_data import random_calls
from benchmarks.attention_peers import quantized
from benchmarks.ceilings import seconds_of
from benchmarks.machine import facts
from hf_paged.attention import backends
from hf_paged.attention.backends import reference
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.config import KV_DTYPES, MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from hf_paged.kernels import costs, preferred_backend
from hf_paged.step import StepMetadata

SIZES = [
    size for size in (1 << power for power in range(12)) if MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE
]
DIMS = (64, 128)
SMALL = (3, 5, 300, 1)
MOST_TURNS = 50
LOADS = {  # rows, queries per row, tokens per row, layers
    "cpu": [(8, 1, 512, 2), (1, 64, 1024, 1)],
    "cuda": [(64, 1, 4096, 4), (4, 512, 4096, 4)],
}
TOLERANCE = {str(dtype)[6:]: most for dtype, most in attention_data.TOLERANCE.items()}
TOLERANCE |= dict.fromkeys(KV_DTYPES, 2e-4)


def calls_of(
    stored: str, dim: int, block_size: int, load: tuple[int, int, int, int], device: str
) -> list[AttentionCall]:
    """A call of each layer. `stored`: a torch dtype, or a `PagedConfig.kv_dtype` for blocks of
    float32 states."""
    *sizes, layers = load
    dtype = getattr(torch, "float32" if stored in KV_DTYPES else stored)
    calls = random_calls(dim, dtype, tuple(sizes), device, block_size, layers)  # type: ignore[arg-type]
    if stored in KV_DTYPES:
        calls = [call._replace(blocks=quantized(call.blocks, stored)) for call in calls]
    return calls


def run(calls: list[AttentionCall], backend: Any) -> list[torch.Tensor]:
    """Prepares and runs a step; the output of each layer."""
    known = calls[0].step
    step = StepMetadata.rectangle(
        known.block_tables, known.seq_lens, known.block_size, query_len=known.query_start[1]
    )
    return [backend.attend(call._replace(step=step)) for call in calls]


def check(calls: list[AttentionCall], backend: Any, stored: str) -> None:
    """Raises `RuntimeError` if the backend's output differs from the reference."""
    output, expected = run(calls, backend)[0], run(calls, reference)[0]
    most = TOLERANCE[stored]
    if not torch.allclose(output.float(), expected.float(), atol=most, rtol=most):
        blocks = f"{stored} in blocks of {calls[0].step.block_size} tokens"
        raise RuntimeError(f"{blocks} gives other numbers than the reference")


def time_of(calls: list[AttentionCall], backend: Any) -> float:
    """Nanoseconds per context token and layer."""
    seconds = seconds_of(lambda: run(calls, backend), calls[0].query.device)
    return 1e9 * seconds / (sum(calls[0].step.seq_lens) * len(calls))


def measure(device: str, seconds: float, quick: bool = False) -> dict[str, dict[str, float]]:
    """Nanoseconds per token, by kernel and dtype, then block size: the geometric mean over loads of
    the median over as many turns as fit into `seconds`, at least one."""
    first = preferred_backend(torch.empty(0, device=device))
    kernels = dict.fromkeys([first, "gather"] if device == "cpu" else [first])
    dtypes = ["float32"] if quick else ["float32", "bfloat16", "float16", *KV_DTYPES]
    dims, loads = ([64], [(2, 1, 64, 1)]) if quick else (DIMS, LOADS[device])
    every = list(itertools.product(dtypes, dims, loads, kernels))
    medians: dict[tuple[str, str], list[float]] = {}
    begin = time.perf_counter()
    for number, (stored, dim, load, kernel) in enumerate(every, 1):
        backend, entry = backends.BACKENDS[kernel], costs.entry_name(kernel, stored)
        for size in SIZES:
            check(calls_of(stored, dim, size, SMALL, device), backend, stored)
        problems = {size: calls_of(stored, dim, size, load, device) for size in SIZES}
        arms = runner.each(
            lambda turn, calls, backend=backend: time_of(calls, backend),  # type: ignore[misc]
            problems,
        )
        until = begin + seconds * number / len(every)
        case = runner.Case(entry, arms, fewest=1, until=until)
        for row in runner.rows_of_case(case, 1 if quick else MOST_TURNS):
            middle = statistics.median(row["seconds"])
            medians.setdefault((entry, row["system"]), []).append(middle)
    table: dict[str, dict[str, float]] = {}
    for (entry, size), values in sorted(medians.items()):
        table.setdefault(entry, {})[str(size)] = round(statistics.geometric_mean(values), 3)
    return table


def write(device: str, seconds: float, quick: bool, folder: Path) -> list[runner.Data]:
    """Measures and writes the table; rows of the times relative to blocks of 16 tokens."""
    start = time.monotonic()
    table = measure(device, seconds, quick)
    path = folder / f"{costs.machine_name(torch.device(device))}.json"
    origin = {"command": " ".join(sys.argv[1:]), "seconds": round(time.monotonic() - start)}
    path.parent.mkdir(exist_ok=True)
    content = {"costs": table, "measured": {**facts(device), **origin}}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return [
        runner.row_of("over blocks of 16", name, **{n: t / times["16"] for n, t in times.items()})
        for name, times in table.items()
    ]
