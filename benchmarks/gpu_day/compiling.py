"""Stage 0: calls models of two layers in several processes, which compiles the kernels that later
stages use, while those check other things."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

import torch

from benchmarks import runner
from benchmarks.gpu_day import jobs
from benchmarks.models import SHAPES, build
from benchmarks.runner import Data
from benchmarks.systems import road_of
from benchmarks.workloads import left_padded

MODELS = ("qwen3-0.6b", "llama-3.1-8b")
PROCESSES, SECONDS = 4, 180.0  # and seconds of one job
BUILD = "from hf_paged.kernels import cpp; raise SystemExit(not cpp.is_available())"
"""Builds the C++ kernels, which the last stage uses."""


class Warm(NamedTuple):
    """The first two layers of a model in a `generate` call."""

    model: str
    rows: int
    device: str


def measure(args: argparse.Namespace, keep: Any) -> Data:
    os.nice(10)  # the stages beside it go first
    end = time.monotonic() + 60 * args.minutes
    environment = {name: value for name, value in os.environ.items() if name != "HF_PAGED_CPP"}
    building = subprocess.Popen([sys.executable, "-c", BUILD], env=environment)
    names = ("llama-tiny",) if args.quick else MODELS
    warms = [Warm(name, size, args.device) for name in names for size in (1, 64)]
    processes = 1 if args.quick else min(PROCESSES, os.cpu_count() or 1)
    calls = {str(warm): warm for warm in warms}
    rows = jobs.rows_of(call, calls, processes, SECONDS, end, keep)
    try:
        built = not building.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        built = None
    return {"rows": [*rows, runner.row_of("C++ kernels", "a process", built=built)]}


def call(warm: Warm) -> list[Data]:
    """Calls `generate` twice, so that steps are recorded."""
    shape = dataclasses.replace(SHAPES[warm.model], layers=2)
    prompts = [list(range(3, 19 - row % 8)) for row in range(warm.rows)]
    options = dict(max_new_tokens=64, do_sample=False, cache_implementation="paged")
    model = build(shape, warm.device, torch.bfloat16)
    inputs = left_padded(prompts, warm.device)
    first, second = (
        runner.seconds_of(lambda: model.generate(**inputs, **options)) for _ in range(2)
    )
    figures = {"first": first, "second": second, "route": road_of(model)}
    return [runner.row_of(str(warm), "calls", **figures)]


main = runner.Benchmark(
    __doc__, measure=measure, options=jobs.OPTIONS, is_wrong=runner.fails()
).main

if __name__ == "__main__":
    raise SystemExit(main())
