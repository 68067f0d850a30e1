"""
One decode step of `generate` on random weights: plain against `cache_implementation="paged"`.

    python -m benchmarks.decode_step [--device cuda --model llama-3.1-8b --case 64x8192]
                                     [--json PATH]

Both run in one process, in turns. A step is timed between two calls of a stopping criterion, so it
covers all that `generate` does per token; the prefill is excluded. `--case 1x32768` is one long
prompt.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from transformers import StoppingCriteriaList

import hf_paged
from benchmarks import runner
from benchmarks.models import SHAPES, build
from benchmarks.systems import StopsAt

Inputs = dict[str, torch.Tensor]
CASES: dict[str, tuple[tuple[int, ...], int]] = {
    "1x512": ((512,), 25),
    "8x512": ((512,) * 8, 5),
    "32 rows of 64..1024": (tuple(64 + round(i * (1024 - 64) / 31) for i in range(32)), 2),
}
"""Prompt lengths of the rows in tokens, and turns of plain and paged."""
QUICK = {"1x128": ((128,), 3), "4 rows of 32..256": ((32, 100, 180, 256), 3)}
SYSTEMS: dict[str, dict[str, Any]] = {"plain": {}, "paged": {"cache_implementation": "paged"}}


def step_seconds(
    model: Any, inputs: Inputs, new_tokens: int, **kwargs: Any
) -> tuple[list[float], torch.Tensor]:
    """Seconds of each decode step after the first, which includes the prefill; all tokens."""
    rows, width = inputs["input_ids"].shape
    clock = StopsAt(width, [new_tokens + 1] * rows, model.device)
    tokens = model.generate(
        **inputs,
        max_new_tokens=new_tokens + 1,
        do_sample=False,
        eos_token_id=None,
        stopping_criteria=StoppingCriteriaList([clock]),
        **kwargs,
    )
    return [after - before for before, after in itertools.pairwise(clock.times)], tokens


def padded(lengths: tuple[int, ...], vocab_size: int, device: str) -> Inputs:
    """Random left-padded prompts with their attention mask."""
    generator = torch.Generator().manual_seed(0)
    width = max(lengths)
    ids = torch.randint(3, vocab_size, (len(lengths), width), generator=generator)
    mask = torch.arange(width)[None, :] >= width - torch.tensor(lengths)[:, None]
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.long().to(device)}


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    shape = SHAPES[args.model]
    model = build(shape, args.device, torch.bfloat16)
    cases = QUICK if args.quick else CASES
    if args.case:
        rows, length = map(int, args.case.split("x"))
        cases = {args.case: ((length,) * rows, 5)}

    def steps(turn: int, system: str, inputs: Inputs) -> runner.Turn:
        seconds, output = step_seconds(model, inputs, args.new_tokens, **SYSTEMS[system])
        route, figures = hf_paged.last_route(model), {}
        if system == "paged" and route is not None:
            figures = {"in place": "yes" if route.in_place else "no"}
            figures["peak K/V, MiB"] = hf_paged.memory_stats(model).peak_bytes / 2**20
        tokens = output[:, -args.new_tokens :].tolist()
        return runner.Turn(statistics.median(seconds), tokens, figures)

    for name, (lengths, turns) in cases.items():
        if re.search(args.only, name):
            inputs = padded(lengths, shape.vocab, args.device)
            arms = {
                system: functools.partial(steps, system=system, inputs=inputs) for system in SYSTEMS
            }
            yield runner.Case(f"{shape.name}, {name}", arms, {"plain": {}}, turns)
            hf_paged.free(model)


main = runner.Benchmark(
    __doc__,
    cases,
    options={
        "--device": runner.DEVICE,
        "--model": runner.MODEL | {"default": "qwen2.5-0.5b"},
        "--case": runner.option("one of your own, ROWSxTOKENS of the prompts", default=""),
        "--new-tokens": runner.option("steps timed in each turn", type=int, default=24),
    },
    only="regular expression on the case's name",
    quick={"model": "llama-tiny", "new_tokens": 4},
).main

if __name__ == "__main__":
    raise SystemExit(main())
