"""A web app: 8 threads that call `generate` with one prompt of 8 to 64 tokens each, for 16 new
ones, against the same calls in sequence; 8 turns in each of two processes, one after the other:
medians, 95% intervals. The target in bfloat16 is 2.5 times the throughput of calls one after
another.

    python -m benchmarks.threads [--model llama-100m] [--dtype bfloat16] [--quick] [--json PATH]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import hf_paged
from benchmarks import runner
from benchmarks.models import SHAPES, build
from benchmarks.workloads import left_padded

THREADS = 8
PAGED = "paged, one call after another"


def prompts(vocab: int) -> list[torch.Tensor]:
    """Prompts `(1, length)` of 8 different lengths up to 64 tokens."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(3, vocab - 1, (1, 8 * (i + 1)), generator=generator) for i in range(THREADS)
    ]


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    shape = SHAPES[args.model]
    model = build(shape, "cpu", getattr(torch, args.dtype))
    texts = prompts(shape.vocab)
    batch = left_padded([text[0].tolist() for text in texts], "cpu")
    width = batch["input_ids"].shape[1]
    options: dict[str, Any] = dict(max_new_tokens=args.new_tokens, do_sample=False)
    options["min_new_tokens"] = args.new_tokens

    def call(text: torch.Tensor, **paged: Any) -> list[int]:
        output = model.generate(text, attention_mask=torch.ones_like(text), **options, **paged)
        return output[0, text.shape[1] :].tolist()

    def paged_call(text: torch.Tensor) -> list[int]:
        return call(text, cache_implementation="paged")

    def all_at_once() -> list[list[int]]:
        return model.generate(**batch, **options)[:, width:].tolist()

    with ThreadPoolExecutor(THREADS) as pool:
        systems: dict[str, Callable[[int], list[list[int]]]] = {
            "plain, one call after another": lambda _: list(map(call, texts)),
            "plain in 8 threads": lambda _: list(pool.map(call, texts)),
            PAGED: lambda _: list(map(paged_call, texts)),
            "paged in 8 threads": lambda _: list(pool.map(paged_call, texts)),
            "plain, one call with all prompts": lambda _: all_at_once(),
        }
        over = {PAGED: {"paged in 8 threads": 2.5}}
        yield runner.Case(f"{args.model}, {args.dtype}", runner.compared(systems), over)
    hf_paged.check_integrity(model)


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="Threads",
    results=(("threads-cpu-llama-100m",),),
    options={"--model": runner.MODEL, "--dtype": runner.DTYPE},
    fixed={"turns": 8, "new_tokens": 16, "processes": 2},
    quick={"model": "llama-tiny", "turns": 2, "new_tokens": 4, "processes": 0},
)
main = BENCHMARK.main

if __name__ == "__main__":
    raise SystemExit(main())
