"""Stage 0: compiles kernels on all cores, at the shapes that later stages use, while those check
other things.

Compiling needs no GPU, so that a folder of compiled kernels can be made on another machine and
carried along: `python -m benchmarks.gpu_day --only 0 --device fake --minutes 60 --cache FOLDER`.
Triton takes a kernel from there if it was compiled by the same Triton, by its key.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple

import torch

from benchmarks.aot import only_compile
from benchmarks.chips import CHIPS
from benchmarks.gpu_day.record import Record, first_lines
from benchmarks.models import SHAPES, build
from benchmarks.workers import Lost, in_workers
from benchmarks.workloads import left_padded
from tests.support.kernels import aot, variants

MODELS = ("llama-3.1-8b", "qwen3-0.6b")  # both with eight K/V heads of 128
CASES = ("hash", "copy", "int8")  # beginnings of `AotCase` names
FAKE_CHIP = "sm_90"
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


def run(record: Record) -> None:
    """Compiles ahead, then calls models of two layers, which compiles what is made for them, on the
    device."""
    os.nice(10)  # the stages beside it go first
    record.note_machine()
    environment = {name: value for name, value in os.environ.items() if name != "HF_PAGED_CPP"}
    building = subprocess.Popen([sys.executable, "-c", BUILD], env=environment)
    chip = FAKE_CHIP if record.is_fake else "sm_{}{}".format(*torch.cuda.get_device_capability())
    processes = 1 if record.is_fake else os.cpu_count() or 1
    start = time.monotonic()
    jobs = jobs_for(chip) if chip in CHIPS else []
    counts: dict[str, Any] = {"what": f"compiled ahead for {chip}", "jobs": len(jobs), "done": 0}
    record.add(**counts)
    for job, problem in in_workers(
        compile_ahead, jobs, processes, SECONDS, record.until - record.left / 3
    ):
        counts |= {"done": counts["done"] + 1, "seconds": round(time.monotonic() - start, 1)}
        record.rows[0] |= counts
        record.write()
        if problem:
            record.add(
                what=str(job), problem=problem.reason if isinstance(problem, Lost) else problem
            )
    names = ("llama-tiny",) if record.is_fake else MODELS[::-1]
    warms = [
        Warm(name, 2, rows, "paged", record.torch_device) for name in names for rows in (1, 64)
    ]
    if not record.is_fake:  # these are compiled as a whole, so with all layers
        warms += [
            Warm(name, SHAPES[name].layers, 1, "static", record.torch_device) for name in names
        ]
    for warm, found in in_workers(call, warms, min(processes, 6), 3 * SECONDS, record.until):
        record.add(
            **warm._asdict(), **({"problem": found.reason} if isinstance(found, Lost) else found)
        )
    try:
        record.add(what="C++ kernels", built=not building.wait(max(0.0, record.left)))
    except subprocess.TimeoutExpired:
        record.add(what="C++ kernels", note="no time left")


def jobs_for(chip: str) -> list[Job]:
    """The fewest steps that need every kernel of both models, in the order in which the models meet
    them."""
    jobs = []
    for name in MODELS:
        known: set[str] = set()
        with only_compile(CHIPS[chip], is_compiling=False) as launches:
            for index, step in enumerate(variants.mixed_steps(device="meta")):
                launches.clear()
                variants.run(step, blocks(), SHAPES[name].heads)
                keys = {launch.key for launch in launches} - known
                known |= keys
                jobs += [Job(chip, SHAPES[name].heads, index)] if keys - {""} else []
    chosen = [
        index
        for index, case in enumerate(aot.cases())
        if case.name.startswith(CASES) and chip in case.chips
    ]
    return jobs + [Job(chip, 0, index) for index in chosen]


def blocks() -> torch.Tensor:
    """Blocks without memory: launch parameters are then chosen for the chip that is compiled
    for."""
    sizes = (variants.NUM_BLOCKS, 2 * variants.KV_HEADS, variants.BLOCK_SIZE, variants.DIM)
    return torch.empty(*sizes, dtype=torch.bfloat16, device="meta")


def compile_ahead(job: Job) -> str:
    """Compiles all that a job launches; returns the error, or an empty string."""
    try:
        with only_compile(CHIPS[job.chip]):
            if job.heads:
                variants.run(
                    list(variants.mixed_steps(device="meta"))[job.index], blocks(), job.heads
                )
            else:
                aot.cases()[job.index].call()
    except Exception as error:
        return first_lines(error)
    return ""


def call(warm: Warm) -> dict[str, Any]:
    """Calls `generate` twice, so that steps are recorded; returns the seconds of the first call."""
    import hf_paged

    shape = dataclasses.replace(
        SHAPES[warm.model], layers=min(warm.layers, SHAPES[warm.model].layers)
    )
    start = time.monotonic()
    try:
        model = build(shape, warm.device, torch.bfloat16)
        inputs = left_padded(
            [list(range(3, 19 - row % 8)) for row in range(warm.rows)], warm.device
        )
        for _ in range(2):
            model.generate(
                **inputs, max_new_tokens=64, do_sample=False, cache_implementation=warm.cache
            )
            first = round(time.monotonic() - start, 1)
            start = time.monotonic()
        route = hf_paged.last_route(model)
        replayed = None if route is None else route.num_captured_steps
        return {"first": first, "second": round(time.monotonic() - start, 1), "replayed": replayed}
    except Exception as error:
        return {"problem": first_lines(error)}
