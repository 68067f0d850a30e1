"""Decode attention alone: the paged backends against attention over contiguous, padded K/V.

    python -m benchmarks.attention --device cpu [--quick] [--json PATH]

A is the best a padded `[batch, kv_heads, longest, head_dim]` cache allows: SDPA with the query heads of a group packed
beside the query, a bool mask only where rows differ. `hf` is what transformers' sdpa path calls (`enable_gqa`), for
information. As in a model, every call reads the K/V of the next layer, so that no cache of the processor holds it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import machine
from hf_paged.attention import backends, cpu, reference
from hf_paged.attention.metadata import AttentionMetadata

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """Attention heads of a model."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int


@dataclass(frozen=True)
class Case:
    """One batch: tokens in the cache of each row."""

    name: str
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """Milliseconds of one layer; ratios are to A of the same run."""

    shape: str
    case: str
    dtype: str
    contender: str
    median_ms: float
    min_ms: float
    max_ms: float
    ratio: float
    gb_per_s: float


SHAPES = (Shape("Qwen2.5-0.5B", 14, 2, 64, 24), Shape("Llama-3.2-1B", 32, 8, 64, 16))
_RAGGED = torch.linspace(64, 1024, 32).long()[torch.randperm(32, generator=torch.Generator().manual_seed(0))]
CASES = (Case("32 x 64..1024", tuple(_RAGGED.tolist())), Case("8 x 512", (512,) * 8), Case("1 x 512", (512,)))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Data:
    """The same K and V, per layer, in blocks and padded."""

    query: Tensor  # [batch, heads, 1, head_dim]
    pools: list[Tensor]  # each [num_blocks, 2 * kv_heads, BLOCK_SIZE, head_dim]
    padded: list[tuple[Tensor, Tensor]]  # K and V, each [batch, kv_heads, longest, head_dim]
    mask: Tensor | None  # [batch, 1, 1, longest] bool
    metadata: AttentionMetadata


def make_data(shape: Shape, case: Case, dtype: torch.dtype, device: torch.device, layers: int) -> Data:
    """Random K/V in randomly placed blocks, as a pool that has been in use for a while."""
    generator = torch.Generator().manual_seed(0)
    longest, batch = max(case.lengths), len(case.lengths)
    counts = [-(-length // BLOCK_SIZE) for length in case.lengths]
    order = torch.randperm(sum(counts), generator=generator)
    tables = torch.zeros(batch, max(counts), dtype=torch.int32)
    taken = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[taken : taken + count]
        taken += count
    pools, padded = [], []
    dims = (2 * shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    values = torch.randn(len(order), *dims, generator=generator).to(device, dtype)
    for layer in range(layers):
        pool = values.roll(layer, dims=0)
        both = torch.zeros(batch, 2 * shape.kv_heads, longest, shape.head_dim, dtype=dtype, device=device)
        for row, (count, length) in enumerate(zip(counts, case.lengths)):
            blocks = pool[tables[row, :count].long().to(device)]
            both[row, :, :length] = blocks.transpose(0, 1).flatten(1, 2)[:, :length]
        pools.append(pool)
        padded.append((both[:, : shape.kv_heads].contiguous(), both[:, shape.kv_heads :].contiguous()))
    ragged = len(set(case.lengths)) > 1
    lengths = torch.tensor(case.lengths, device=device)
    metadata = AttentionMetadata(
        tables.to(device),
        lengths.int(),
        torch.zeros_like(lengths).int(),
        case.lengths,
        (0,) * batch,
        query_len=1,
        block_size=BLOCK_SIZE,
    )
    return Data(
        query=torch.randn(batch, 1, shape.heads, shape.head_dim, generator=generator).to(device, dtype).transpose(1, 2),
        pools=pools,
        padded=padded,
        mask=(torch.arange(longest, device=device) < lengths[:, None])[:, None, None] if ragged else None,
        metadata=metadata,
    )


def contenders(shape: Shape, data: Data) -> dict[str, Callable[[int], Tensor]]:
    """Functions of the layer; each returns `[batch, 1, heads, head_dim]`."""
    batch, heads, _, head_dim = data.query.shape
    scale = head_dim**-0.5

    def padded_packed(layer: int) -> Tensor:
        key, value = data.padded[layer]
        packed = data.query.reshape(batch, shape.kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=data.mask, scale=scale)
        return out.reshape(batch, heads, 1, head_dim).transpose(1, 2)

    def padded_hf(layer: int) -> Tensor:
        key, value = data.padded[layer]
        out = F.scaled_dot_product_attention(
            data.query, key, value, attn_mask=data.mask, scale=scale, enable_gqa=heads != shape.kv_heads
        )
        return out.transpose(1, 2)

    def paged(function: Callable[..., Tensor]) -> Callable[[int], Tensor]:
        def call(layer: int) -> Tensor:
            pool = data.pools[layer]
            key, value = pool[:, : shape.kv_heads], pool[:, shape.kv_heads :]
            return function(data.query, key, value, data.metadata, scale=scale)

        return call

    return {
        "A": padded_packed,
        "ours": paged(backends.paged_attention),
        "portable": paged(cpu.paged_attention),
        "hf": padded_hf,
    }


def check(shape: Shape, data: Data, functions: dict[str, Callable[[int], Tensor]]) -> None:
    """Every contender gives the reference's numbers."""
    pool = data.pools[0]
    key, value = pool[:, : shape.kv_heads], pool[:, shape.kv_heads :]
    expected = reference.paged_attention(data.query, key, value, data.metadata, scale=shape.head_dim**-0.5)
    tolerance = 1e-4 if data.query.dtype == torch.float32 else 2e-2
    for name, function in functions.items():
        try:
            torch.testing.assert_close(function(0), expected, atol=tolerance, rtol=tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name} differs from the reference: {error}") from None


def measure(functions: dict[str, Callable[[int], Tensor]], layers: int, repeats: int) -> dict[str, list[float]]:
    """Seconds per call. Contenders take turns, a pass over all layers each, so that a busy machine slows all alike."""
    accelerator = torch.cuda.is_available()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            if name == "hf" and repeat > 2:  # up to ten times slower than the others, and only for information
                continue
            if accelerator:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for layer in range(layers):
                function(layer)
            if accelerator:
                torch.cuda.synchronize()
            if repeat:  # the first pass warms up
                times[name].append((time.perf_counter() - start) / layers)
    return times


def run(shape: Shape, case: Case, dtype: str, device: torch.device, repeats: int) -> list[Result]:
    data = make_data(shape, case, DTYPES[dtype], device, shape.layers)
    functions = contenders(shape, data)
    with torch.no_grad():
        check(shape, data, functions)
        times = measure(functions, shape.layers, repeats)
    tokens = sum(case.lengths)
    read = 2 * tokens * shape.kv_heads * shape.head_dim * DTYPES[dtype].itemsize
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return [
        Result(
            shape.name,
            case.name,
            dtype,
            name,
            round(medians[name] * 1e3, 4),
            round(min(seconds) * 1e3, 4),
            round(max(seconds) * 1e3, 4),
            round(medians[name] / medians["A"], 3),
            round(read / medians[name] / 1e9, 2),
        )
        for name, seconds in times.items()
    ]


def table(results: list[Result]) -> str:
    lines = [
        "| heads | rows x tokens | dtype | contender | ms a layer, median (min..max) | ratio to A | GB/s of real K/V |",
        "|---|---|---|---|--:|--:|--:|",
    ]
    for r in results:
        spread = f"{r.median_ms:.3f} ({r.min_ms:.3f}..{r.max_ms:.3f})"
        lines.append(
            f"| {r.shape} | {r.case} | {r.dtype} | {r.contender} | {spread} | {r.ratio:.2f} | {r.gb_per_s:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    parser = argparse.ArgumentParser(description="Decode attention: paged backends against padded contiguous K/V.")
    parser.add_argument("--device", choices=devices, default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=15, help="timed passes over all layers")
    parser.add_argument("--quick", action="store_true", help="bf16, 2 layers, 2 passes: only to see that it runs")
    parser.add_argument("--json", type=Path, help="write machine facts and results there")
    arguments = parser.parse_args()
    dtypes, repeats = arguments.dtype, arguments.repeats
    shapes: tuple[Shape, ...] = SHAPES
    if arguments.quick:
        dtypes, repeats, shapes = ["bf16"], 2, tuple(replace(shape, layers=2) for shape in SHAPES)
    facts = machine.facts(arguments.device)
    print("; ".join(f"{name} {value}" for name, value in facts.items()) + "\n")
    results = []
    for dtype in dtypes:
        for shape in shapes:
            for case in CASES:
                results += run(shape, case, dtype, torch.device(arguments.device), repeats)
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": facts, "results": [asdict(r) for r in results]}, indent=1))


if __name__ == "__main__":
    main()
