"""Stage 0: compiles kernels on all cores, at the shapes that later stages use, while those check
other things.

Compiling needs no GPU, so that a folder of compiled kernels can be made on another machine and
carried along: `python -m benchmarks.gpu_day --only 0 --device fake --minutes 60 --cache FOLDER`.
Triton takes a kernel from there if it was compiled by the same Triton, by its key.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

import torch

import hf_paged
from benchmarks import runner
from benchmarks.aot import only_compile
from benchmarks.chips import CHIPS
from benchmarks.gpu_day import jobs
from benchmarks.models import SHAPES, build
from benchmarks.runner import Data
from benchmarks.workloads import left_padded
from tests.support.kernels import aot, variants

MODELS = ("llama-3.1-8b", "qwen3-0.6b")  # both with eight K/V heads of 128
CASES = ("hash", "copy", "int8")  # beginnings of `AotCase` names
QUICK_CHIP = "sm_90"
SECONDS = 60.0  # of one job
BUILD = "from hf_paged.kernels import cpp; raise SystemExit(not cpp.is_available())"
"""Builds the C++ kernels, which the last stage uses."""


class Job(NamedTuple):
    """A step of one model, or, without heads, an `AotCase`."""

    chip: str
    heads: int
    index: int


class Warm(NamedTuple):
    """The first layers of a model in a `generate` call."""

    model: str
    layers: int
    rows: int
    cache: str
    device: str


def measure(args: argparse.Namespace, keep: Any) -> Data:
    """Compiles ahead, then calls models of two layers, which compiles what is made for them, on the
    device."""
    os.nice(10)  # the stages beside it go first
    seconds, start = 60 * args.minutes, time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "HF_PAGED_CPP"}
    building = subprocess.Popen([sys.executable, "-c", BUILD], env=environment)
    chip = QUICK_CHIP if args.quick else "sm_{}{}".format(*torch.cuda.get_device_capability())
    processes = 1 if args.quick else os.cpu_count() or 1
    ahead = {str(job): job for job in (jobs_for(chip) if chip in CHIPS else [])}
    end = start + 2 / 3 * seconds
    rows = jobs.rows_of(compile_ahead, ahead, processes, SECONDS, end, keep)
    names = ("llama-tiny",) if args.quick else MODELS[::-1]
    warms = [Warm(name, 2, size, "paged", args.device) for name in names for size in (1, 64)]
    if not args.quick:  # these are compiled as a whole, so with all layers
        warms += [Warm(name, SHAPES[name].layers, 1, "static", args.device) for name in names]
    calls, end = {str(warm): warm for warm in warms}, start + seconds
    rows = jobs.rows_of(call, calls, min(processes, 6), 3 * SECONDS, end, keep, rows)
    try:
        built = not building.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        built = None
    return {"rows": [*rows, runner.row_of("C++ kernels", "a process", built=built)]}


def jobs_for(chip: str) -> list[Job]:
    """The fewest steps that need every kernel of both models, in the order in which the models meet
    them."""
    found = []
    for name in MODELS:
        known: set[str] = set()
        with only_compile(CHIPS[chip], is_compiling=False) as launches:
            for index, step in enumerate(variants.mixed_steps(device="meta")):
                launches.clear()
                variants.run(step, blocks(), SHAPES[name].heads)
                keys = {launch.key for launch in launches} - known
                known |= keys
                found += [Job(chip, SHAPES[name].heads, index)] if keys - {""} else []
    for index, case in enumerate(aot.cases()):
        if case.name.startswith(CASES) and chip in case.chips:
            found.append(Job(chip, 0, index))
    return found


def blocks() -> torch.Tensor:
    """Blocks without memory: launch parameters are then chosen for the chip that is compiled
    for."""
    sizes = (variants.NUM_BLOCKS, 2 * variants.KV_HEADS, variants.BLOCK_SIZE, variants.DIM)
    return torch.empty(*sizes, dtype=torch.bfloat16, device="meta")


def compile_ahead(job: Job) -> list[Data]:
    """Compiles all that a job launches."""
    with only_compile(CHIPS[job.chip]):
        if job.heads:
            steps = list(variants.mixed_steps(device="meta"))
            variants.run(steps[job.index], blocks(), job.heads)
        else:
            aot.cases()[job.index].call()
    return []


def call(warm: Warm) -> list[Data]:
    """Calls `generate` twice, so that steps are recorded."""
    shape = dataclasses.replace(SHAPES[warm.model], layers=warm.layers)
    prompts = [list(range(3, 19 - row % 8)) for row in range(warm.rows)]
    options = dict(max_new_tokens=64, do_sample=False, cache_implementation=warm.cache)
    model = build(shape, warm.device, torch.bfloat16)
    inputs = left_padded(prompts, warm.device)
    first, second = (
        runner.seconds_of(lambda: model.generate(**inputs, **options)) for _ in range(2)
    )
    route = hf_paged.last_route(model)
    replayed = None if route is None else route.num_captured_steps
    return [runner.row_of(str(warm), "calls", first=first, second=second, replayed=replayed)]


main = runner.Benchmark(
    __doc__, measure=measure, options=jobs.OPTIONS, is_wrong=runner.fails()
).main

if __name__ == "__main__":
    raise SystemExit(main())
