"""Attention time per context token, by block size: `python -m benchmarks.tune --block-sizes`.

Compares every size with `attention/backends/reference.py` first. Then all sizes take turns, each on
its own steps, over layers that share the step as a model's do, on K/V that no processor cache
holds; preparing a step is part of the time. The medians go to
`hf_paged/kernels/tables/<machine>.json`, which `block_size="auto"` reads; commit it.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention_data
from benchmarks.attention_data import Case, Setting
from benchmarks.attention_peers import quantized
from benchmarks.ceilings import synchronize
from benchmarks.machine import facts
from benchmarks.models import SHAPES
from hf_paged.attention import backends
from hf_paged.attention.backends import reference
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.config import KV_DTYPES, MAX_BLOCK_SIZE, MIN_BLOCK_SIZE
from hf_paged.kernels import costs, preferred_backend
from hf_paged.step import StepMetadata

SIZES = [
    size for size in (1 << power for power in range(12)) if MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE
]
HEADS = {64: (32, 8), 128: (32, 8)}  # by head dim: query heads and K/V heads
SMALL = (3, 5, 300)
LOADS = {  # rows, queries per row, tokens per row, layers
    "cpu": [(8, 1, 512, 2), (1, 64, 1024, 1)],
    "cuda": [(64, 1, 4096, 4), (4, 512, 4096, 4)],
}
TOLERANCE = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}
TOLERANCE |= dict.fromkeys(KV_DTYPES, 2e-4)


@dataclass(frozen=True)
class Problem:
    """The last `query_len` tokens of rows of `seq_len` tokens, over layers of blocks in random
    order."""

    calls: list[AttentionCall]
    case: Case
    block_size: int

    @classmethod
    def make(
        cls, stored: str, dim: int, block_size: int, load: tuple[int, int, int, int], device: str
    ) -> Problem:
        """`stored`: a torch dtype, or a `PagedConfig.kv_dtype` for blocks of float32 states."""
        rows, query_len, seq_len, layers = load
        heads, kv_heads = HEADS[dim]
        shape = replace(SHAPES["llama-tiny"], heads=heads, kv_heads=kv_heads, head_dim=dim)
        case = Case("", "", (seq_len,) * rows, query_len)
        dtype = "float32" if stored in KV_DTYPES else stored
        names = {str(one)[6:]: name for name, one in attention_data.DTYPES.items()}
        setting = Setting(shape, case, block_size, names[dtype], device)
        calls = attention_data.make(setting, layers=layers).calls
        if stored in KV_DTYPES:
            calls = [call._replace(blocks=quantized(call.blocks, stored)) for call in calls]
        return cls(calls, case, block_size)

    def run(self, backend: Any) -> list[torch.Tensor]:
        """Prepares and runs a step; returns the output of each layer, `(rows * query_len, heads,
        dim)`."""
        tables = self.calls[0].step.block_tables
        lengths, queries = self.case.seq_lens, self.case.query_len
        step = StepMetadata.rectangle(tables, lengths, self.block_size, query_len=queries)
        return [backend.attend(call._replace(step=step)) for call in self.calls]

    def check(self, backend: Any, stored: str) -> None:
        """Raises `RuntimeError` if the backend's output differs from the reference."""
        output, expected = self.run(backend)[0], self.run(reference)[0]
        most = TOLERANCE[stored]
        if not torch.allclose(output.float(), expected.float(), atol=most, rtol=most):
            blocks = f"{stored} in blocks of {self.block_size} tokens"
            raise RuntimeError(f"{blocks} gives other numbers than the reference")

    def time(self, backend: Any) -> float:
        """Nanoseconds per context token and layer."""
        device, tokens = self.calls[0].query.device, sum(self.case.seq_lens) * len(self.calls)
        synchronize(device)
        start = time.perf_counter()
        self.run(backend)
        synchronize(device)
        return 1e9 * (time.perf_counter() - start) / tokens


def cells(device: str, quick: bool) -> Iterator[tuple[str, str]]:
    """Pairs of kernel and storage dtype to measure."""
    kernels = ["gather"] if device == "cpu" else []
    first = preferred_backend(torch.empty(0, device=device))
    if first not in kernels:
        kernels.insert(0, first)
    dtypes = ["float32"] if quick else ["float32", "bfloat16", "float16", *KV_DTYPES]
    return itertools.product(kernels, dtypes)


def measure(device: str, seconds: float, quick: bool = False) -> dict[str, dict[str, float]]:
    """Nanoseconds per token, by kernel and dtype, then block size: the geometric mean over loads of
    the median over turns. Runs as many turns as fit into `seconds`, at least one."""
    begin = time.monotonic()
    loads = [(2, 1, 64, 1)] if quick else LOADS[device]
    dims = [64] if quick else list(HEADS)
    times: dict[tuple[str, str, int, int, int], list[float]] = {}
    chosen = list(cells(device, quick))
    for kernel, stored in chosen:
        for dim, size in itertools.product(dims, SIZES):
            Problem.make(stored, dim, size, (*SMALL, 1), device).check(
                backends.BACKENDS[kernel], stored
            )
    # rebuild the problems in every round: all at once would take gigabytes, and each round gets
    # other memory addresses
    kernels, dtypes = (list(dict.fromkeys(names)) for names in zip(*chosen))
    every = list(itertools.product(dtypes, dims, enumerate(loads)))
    for number, (stored, dim, (place, load)) in enumerate(itertools.cycle(every)):
        if number >= len(every) and (quick or time.monotonic() - begin > seconds):
            break
        problems = {size: Problem.make(stored, dim, size, load, device) for size in SIZES}
        for kernel, size in itertools.product(kernels, random.sample(SIZES, len(SIZES))):
            # warm-up: first touch of memory, compilation
            problems[size].run(backends.BACKENDS[kernel])
            found = min(problems[size].time(backends.BACKENDS[kernel]) for _ in range(2))
            times.setdefault((kernel, stored, size, dim, place), []).append(found)
    medians: dict[tuple[str, str, int], list[float]] = {}
    for (kernel, stored, size, _, _), values in times.items():
        medians.setdefault((kernel, stored, size), []).append(statistics.median(values))
    table: dict[str, dict[str, float]] = {}
    for (kernel, stored, size), values in sorted(medians.items()):
        mean = math.exp(sum(map(math.log, values)) / len(values))
        table.setdefault(costs.entry_name(kernel, stored), {})[str(size)] = round(mean, 3)
    return table


def write(
    path: Path, table: dict[str, dict[str, float]], seconds: float, where: dict[str, Any]
) -> None:
    """Writes the table of a machine, with the origin of its figures."""
    measured = {**where, "command": " ".join(sys.argv[1:]), "seconds": round(seconds)}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"costs": table, "measured": measured}, indent=2) + "\n")


def run(device: str, seconds: float, quick: bool, folder: Path) -> None:
    """Measures, writes the table and prints times relative to blocks of 16 tokens."""
    start = time.monotonic()
    table = measure(device, seconds, quick)
    path = folder / f"{costs.machine_name(torch.device(device))}.json"
    write(path, table, time.monotonic() - start, facts(device))
    for name, times in table.items():
        over = [f"{size}: {found / times['16']:.3f}" for size, found in times.items()]
        print(f"{name:16}", *over, sep="  ")
    print(f"in {path}")
