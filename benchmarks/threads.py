"""A web app: 8 threads that call `generate` with one prompt of 8 to 64 tokens each, for 16 new
ones, against the same calls in sequence; 8 turns in each of two processes, one after the other:
medians, 95% intervals. The target in bfloat16 is 2.5 times the throughput of calls one after
another.

    python -m benchmarks.threads [--model llama-100m] [--dtype bfloat16] [--quick] [--json PATH]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import hf_paged
from benchmarks import runner
from benchmarks.models import SHAPES, build
from benchmarks.paired import estimate, ratios
from benchmarks.report import markdown
from benchmarks.workloads import equal_share, left_padded

THREADS = 8
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
    model = build(shape, "cpu", getattr(torch, dtype))
    texts = prompts(shape.vocab)
    batch = left_padded([text[0].tolist() for text in texts], "cpu")
    width = batch["input_ids"].shape[1]
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
            "plain_batch": lambda: model.generate(**batch, **options)[:, width:].tolist(),
        }
        expected = systems["plain"]()
        # also a warm-up
        equal = {system: equal_share(expected, work()) for system, work in systems.items()}
        seconds = runner.take_turns(runner.timed(systems), turns, title=name)
    hf_paged.check_integrity(model)
    return seconds, equal


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of each system, its speedup over `paged`, and the share of tokens equal to
    plain's."""
    settings = args.model, args.dtype, args.turns, args.new_tokens
    found = runner.in_processes(args.processes, measure, *settings)
    seconds = runner.joined(each for each, _ in found)
    row: dict[str, Any] = {"model": args.model, "dtype": args.dtype}
    row |= {"turns": len(seconds["paged"]), "new_tokens": args.new_tokens}
    for system in SYSTEMS:
        faster = estimate(ratios(seconds["paged"], seconds[system]))
        row[system] = {
            "seconds": round(statistics.median(seconds[system]), 3),
            "throughput": round(faster.value, 3),
            "interval": faster.bounds(3),
            "equal_tokens": round(found[-1][1][system], 3),
        }
    return {"rows": [row]}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        {
            "model": f"{row['model']}, {row['dtype']}",
            "8 prompts": name,
            "seconds": str(row[system]["seconds"]),
            "throughput, 1: paged one after another": "{} ({} to {})".format(
                row[system]["throughput"], *row[system]["interval"]
            ),
            "tokens equal to plain's": str(row[system]["equal_tokens"]),
        }
        for row in rows
        for system, name in SYSTEMS.items()
    ]
    return markdown(lines, right=list(lines[0])[2:])


BENCHMARK = runner.Benchmark(
    __doc__,
    run,
    lambda runs: [table(runs[0]["rows"])],
    title="Threads",
    results=(("threads-cpu-llama-100m",),),
    options={"--model": runner.MODEL, "--dtype": runner.DTYPE},
    fixed={"turns": 8, "new_tokens": 16, "processes": 2},
    quick={"model": "llama-tiny", "turns": 2, "new_tokens": 4, "processes": 0},
)
main = BENCHMARK.main

if __name__ == "__main__":
    raise SystemExit(main())
