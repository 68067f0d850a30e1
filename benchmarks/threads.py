"""A web app: 8 threads that call `generate` with one prompt each, against the same calls in
sequence, in turns, in two processes, one after the other.

    python -m benchmarks.threads [--model llama-100m] [--dtype bfloat16] [--quick] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from tqdm import tqdm

import hf_paged
from benchmarks.machine import facts
from benchmarks.models import SHAPES, build
from benchmarks.paired import interval, ratios

THREADS, TURNS, NEW_TOKENS = 8, 8, 16  # turns per process
SYSTEMS = {
    "plain": "plain `generate`, one call after another",
    "plain_threads": "plain `generate` in 8 threads",
    "paged": "paged, one call after another",
    "paged_threads": "**paged in 8 threads**",
    "plain_batch": "plain `generate`, one call with all prompts",
}


def prompts(vocab: int) -> list[torch.Tensor]:
    """Prompts `(1, length)` of 8 different lengths up to 64 tokens."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(3, vocab - 1, (1, 8 * (i + 1)), generator=generator) for i in range(THREADS)
    ]


def measure(
    name: str, dtype: str, turns: int, new_tokens: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Measures in this process: seconds of each system per turn, and the share of its tokens equal
    to plain's."""
    shape = SHAPES[name]
    model = build(shape, "cpu", getattr(torch, dtype)).eval()
    texts = prompts(shape.vocab)
    width = max(text.shape[1] for text in texts)
    ids = torch.cat([torch.nn.functional.pad(text, (width - text.shape[1], 0)) for text in texts])
    mask = torch.cat(
        [
            torch.nn.functional.pad(torch.ones_like(text), (width - text.shape[1], 0))
            for text in texts
        ]
    )
    options: dict[str, Any] = dict(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
    )

    def call(text: torch.Tensor, **paged: Any) -> list[int]:
        output = model.generate(text, attention_mask=torch.ones_like(text), **options, **paged)
        return output[0, text.shape[1] :].tolist()

    def paged_call(text: torch.Tensor) -> list[int]:
        return call(text, cache_implementation="paged")

    with ThreadPoolExecutor(THREADS) as pool:
        systems: dict[str, Callable[[], list[list[int]]]] = {
            "plain": lambda: list(map(call, texts)),
            "plain_threads": lambda: list(pool.map(call, texts)),
            "paged": lambda: list(map(paged_call, texts)),
            "paged_threads": lambda: list(pool.map(paged_call, texts)),
            "plain_batch": lambda: model.generate(ids, attention_mask=mask, **options)[
                :, width:
            ].tolist(),
        }
        expected = systems["plain"]()
        equal = {}
        for system, work in systems.items():  # also a warm-up
            pairs = [pair for ours, plain in zip(work(), expected) for pair in zip(ours, plain)]
            equal[system] = sum(a == b for a, b in pairs) / len(pairs)
        seconds: dict[str, list[float]] = {system: [] for system in systems}
        for turn in tqdm(range(turns), desc=name, disable=None):
            for system in list(systems) if turn % 2 else reversed(list(systems)):
                start = time.perf_counter()
                systems[system]()
                seconds[system].append(time.perf_counter() - start)
    hf_paged.check_integrity(model)
    return seconds, equal


def run(name: str, dtype: str, turns: int, new_tokens: int, num_processes: int) -> dict[str, Any]:
    """Median seconds of each system, its speedup over `paged`, and the share of tokens equal to
    plain's; with one process, runs in this one."""
    seconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    results = [] if num_processes else [measure(name, dtype, turns, new_tokens)]
    for _ in range(num_processes):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            results.append(process.submit(measure, name, dtype, turns, new_tokens).result())
    for found, _ in results:
        for system, values in found.items():
            seconds[system] += values
    equal = results[-1][1]
    row: dict[str, Any] = {
        "model": name,
        "dtype": dtype,
        "turns": len(results) * turns,
        "new_tokens": new_tokens,
    }
    for system in SYSTEMS:
        faster = ratios(seconds["paged"], seconds[system])
        span = interval(faster) or (min(faster), max(faster))
        row[system] = {
            "seconds": round(statistics.median(seconds[system]), 3),
            "throughput": round(statistics.median(faster), 3),
            "interval": [round(bound, 3) for bound in span],
            "equal_tokens": round(equal[system], 3),
        }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        (
            "| model | 8 prompts | seconds | throughput, 1: paged one after another | tokens equal"
            " to plain's |"
        ),
        "|---|---|--:|--:|--:|",
    ]
    for row in rows:
        for system, name in SYSTEMS.items():
            cell = row[system]
            low, high = cell["interval"]
            of = f"{cell['throughput']} ({low} to {high})"
            lines.append(
                f"| {row['model']}, {row['dtype']} | {name} | {cell['seconds']} | {of} |"
                f" {cell['equal_tokens']} |"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-100m", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--quick", action="store_true", help="a tiny model, few tokens and turns")
    parser.add_argument("--json", help="also write the results here")
    args = parser.parse_args(argv)
    found = facts()
    name, turns, new_tokens = (
        ("llama-tiny", 2, 4) if args.quick else (args.model, TURNS, NEW_TOKENS)
    )
    rows = [run(name, args.dtype, turns, new_tokens, num_processes=0 if args.quick else 2)]
    print(table(rows))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": found, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
