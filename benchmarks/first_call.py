"""A notebook's first `generate` call, plain and paged, each in a new process: what it takes, what
of that is spent on checking the model, on loading or compiling the C++ kernels and on recording
decode steps, and what the third call takes. A first paged call should take at most 1.5 times
plain's time and 1 s more. 4 prompts of 64 tokens. One paged process finds the kernels compiled, as
in the wheel, which contains them, or after an earlier call on the machine; another does not.
Medians of processes, compiling of one. `last_route(model).setup_seconds` lists the parts."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import unittest.mock
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import hf_paged
from benchmarks import runner
from benchmarks.models import SHAPES, build
from benchmarks.workloads import left_padded, texts

ROWS, PROMPT_TOKENS = 4, 64
PARTS = {"self_check": "self-check, s", "build": "kernels, s", "record": "recording, s"}


def measure(system: str, name: str, dtype: str, new_tokens: int) -> runner.Turn:
    """The first call of a new process, with its parts and the seconds of the third call. (Later
    calls may still record, since a step is recorded once it has run a few times.)"""
    shape = SHAPES[name]
    model = build(shape, "cpu", getattr(torch, dtype)).eval()
    prompts = texts(random.Random(0), [PROMPT_TOKENS] * ROWS, shape.vocab)
    inputs = left_padded(prompts, "cpu")
    options: dict[str, Any] = dict(max_new_tokens=new_tokens, do_sample=False)
    options["min_new_tokens"] = new_tokens
    if system == "paged":
        options["cache_implementation"] = "paged"
    seconds, parts = [], dict.fromkeys(PARTS, 0.0)
    for turn in range(3):
        seconds.append(runner.seconds_of(lambda: model.generate(**inputs, **options)))
        route = hf_paged.last_route(model)
        if turn == 0 and system == "paged":
            assert route is not None and route.road == "engine", route
            parts |= route.setup_seconds
    figures = {PARTS[part]: spent for part, spent in parts.items() if part in PARTS}
    return runner.Turn(seconds[0], figures=figures | {"third call, s": seconds[2]})


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    settings = args.model, args.dtype, args.new_tokens

    def in_process(turn: int, system: str) -> runner.Turn:
        (found,) = runner.in_processes(1, measure, system, *settings)
        return found

    arms = runner.each(in_process, ("plain", "paged"))
    yield runner.Case("first call", arms, {"plain": {}})
    with tempfile.TemporaryDirectory() as folder:  # without kernels
        with unittest.mock.patch.dict(os.environ, {"HF_PAGED_CACHE_DIR": folder}):
            yield runner.Case("compiling", {"paged": arms["paged"]}, turns=1)


def limit(rows: Sequence[runner.Data]) -> Iterator[str]:
    """What the target is in the same turns."""
    for row in rows:
        if (row["case"], row["system"]) == ("first call", "plain"):
            most = 1.5 * statistics.median(row["seconds"]) + 1
            yield f"1.5 times plain's time and 1 s more are {most:.2f} s."


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="The first call",
    results=(("first_call-cpu-llama-100m",),),
    said=lambda args: f"{args.new_tokens} new tokens, `{args.model}` in {args.dtype}",
    notes=limit,
    options={"--dtype": runner.DTYPE},
    turns=5,
    fixed={"model": "llama-100m", "new_tokens": 64, "warm_ups": 0},
    quick={"model": "llama-tiny", "turns": 1, "new_tokens": 8},
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
