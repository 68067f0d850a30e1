"""Swap against recompute in a memory that is too small."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Iterator
from typing import Any

import hf_paged
from benchmarks import paired, runner
from benchmarks.models import build
from benchmarks.paper.rows import (
    PAPER,
    READ,
    Published,
    Row,
    Size,
    measured,
    small_shape,
    timed_row,
)
from benchmarks.systems import served
from benchmarks.workloads import GREEDY, texts
from hf_paged.config import MIN_BLOCK_SIZE

BLOCKS = {8: "swap slower", 16: "comparable", 64: "comparable"}
"""What the paper says, by block size."""
METHODS = ("swap", "recompute")
WHY = (
    "a copy within host memory has no PCIe transfers to set up, and a CPU computes a prompt slowly"
)


def cases(size: Size) -> Iterator[runner.Case]:
    """Whole runs with each preemption method, by block size."""
    shape, draw = small_shape(size, 2), random.Random(3)
    model, is_quick = build(shape), size.turns == 1
    lengths = [draw.randrange(16, 49) for _ in range(max(6, size.engine_requests))]
    prompts = texts(random.Random(0), lengths, shape.vocab)
    options = {**GREEDY, "max_new_tokens": 32 if is_quick else 128}
    slots = 128 if is_quick else 384

    def work(turn: int, method: str, *, block: int) -> runner.Turn:
        config: dict[str, Any] = {"block_size": block, "num_blocks": slots // block}
        config |= {"preemption": method, "prefix_caching": False}
        with hf_paged.PagedEngine(model, config) as engine:
            seconds, stats = served(engine, prompts, options)[0], engine.stats()
        counts = f"{stats.num_preemptions} preemptions, {stats.num_swaps} swaps"
        if not stats.num_preemptions or (method == "swap") != (stats.num_swaps > 0):
            raise RuntimeError(f"{method}: {counts}")
        return runner.Turn(seconds, figures={"preemptions": stats.num_preemptions})

    blocks = [block for block in BLOCKS if block >= MIN_BLOCK_SIZE]
    for block in blocks[:1] if is_quick else blocks:
        yield runner.Case(str(block), runner.each(functools.partial(work, block=block), METHODS))


def preempted(size: Size) -> list[Row]:
    """PagedAttention (arXiv 2309.06180), section 7.3 and figure 19b: whole runs with swap against
    whole runs with recompute, by block size.

    The same: one trace, one undersized memory, one method for all preemptions. Different: host
    memory on both sides of a swap; 2 layers of a small random model in float32 on a CPU; few
    requests with short contexts.
    """
    rows, shape = [], small_shape(size, 2).name
    for block, found in measured(cases, size).items():
        times = {method: found[method]["seconds"] for method in METHODS}
        figures = ", ".join(
            f"{method} {statistics.median(times[method]):.3g} s,"
            f" {found[method]['figures']['preemptions']:g} preemptions"
            for method in METHODS
        )
        name = f"time with swap over time with recompute, block size {block}, {shape}"
        published = Published(BLOCKS[int(block)], f"{PAPER}, section 7.3 ({READ})", WHY)
        ratios = paired.ratios(times["swap"], times["recompute"])
        rows.append(timed_row(name, ratios, size, published, f"; {figures}"))
    return rows
