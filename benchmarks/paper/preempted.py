"""Swap against recompute in a memory that is too small."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hf_paged
from benchmarks import runner
from benchmarks.models import SHAPES, build
from benchmarks.paper import PAGED_ATTENTION, published
from benchmarks.systems import served
from benchmarks.workloads import GREEDY, Workload
from hf_paged.config import MIN_BLOCK_SIZE

BLOCKS = {8: "swap slower", 16: "comparable", 64: "comparable"}
"""What the paper says, by block size."""
METHODS = ("swap", "recompute")
WHY = "a copy in host memory sets up no PCIe transfers, and a CPU computes a prompt slowly"
SHAPE = replace(SHAPES["llama-24m"], name="llama-24m of 2 layers", layers=2, vocab=2048)
QUICK = SHAPES["llama-tiny"]


def preempted(args: argparse.Namespace) -> Iterator[runner.Case]:
    """PagedAttention (arXiv 2309.06180), section 7.3 and figure 19b: whole runs with swap against
    whole runs with recompute, by block size.

    The same: one trace, one undersized memory, one method for all preemptions. Different: host
    memory on both sides of a swap; 2 layers of a small random model in float32 on a CPU; few
    requests with short contexts.
    """
    shape, slots, new_tokens = (QUICK, 128, 32) if args.quick else (SHAPE, 384, 128)
    model = build(shape)
    prompts = Workload("preempted", 8, (16, 48), (0, 0)).batch(0, shape.vocab).prompts
    options = {**GREEDY, "max_new_tokens": new_tokens}

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
    for block in blocks[:1] if args.quick else blocks:
        case = f"preempted, block size {block}, {shape.name}"
        arms = runner.each(functools.partial(work, block=block), METHODS)
        figures = published(BLOCKS[block], f"{PAGED_ATTENTION}, section 7.3", WHY)
        yield runner.Case(case, arms, {"swap": {}}, figures=figures)
