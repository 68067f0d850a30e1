"""Stage (e): whole calls, by the code of `benchmarks.generate`."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks import ceilings, generate, runner
from benchmarks.continuous import PAGE_SIZE, GenerateBatch
from benchmarks.gpu_day import jobs
from benchmarks.models import SHAPES, build
from benchmarks.systems import Answer, Engine, Generate, System
from benchmarks.workloads import WORKLOADS
from hf_paged.tape import graphs

LLAMA, QWEN, TINY = "llama-3.1-8b", "qwen3-0.6b", "llama-tiny"
TURNS = 3
SETTINGS: tuple[tuple[str, Any], ...] = (("max_batch_tokens", 1024), (PAGE_SIZE, 32))


class UnrecordedChunks(Generate):
    """Ours, while only steps of decodes are recorded."""

    def __call__(self, *arguments: Any) -> Answer:
        with mock.patch.object(graphs, "MAX_CHUNK_TOKENS", 0):
            return super().__call__(*arguments)


OURS: dict[str, System] = {"plain": Generate(), "ours": Generate(cache="paged"), "engine": Engine()}
BATCH: dict[str, System] = {
    "plain": Generate(),
    "generate_batch": GenerateBatch(sized=True, settings=SETTINGS),
}
CHUNKS: dict[str, System] = {
    **{"plain": Generate(), "ours": Generate(cache="paged")},
    "ours, chunks not recorded": UnrecordedChunks(cache="paged"),
}
STATIC: dict[str, System] = {"plain": Generate(), "static, compiled": Generate(cache="static")}
ROUNDS = (
    (LLAMA, ("W6", "W1", "W3"), OURS),
    (LLAMA, ("W1", "W3"), BATCH),
    (QWEN, ("W6", "W1", "W3"), OURS),
    (QWEN, ("W3",), CHUNKS),
    (LLAMA, ("W6",), STATIC),
    (QWEN, ("W6", "W1"), STATIC),
    (QWEN, ("W1", "W3"), BATCH),
)
"""Workloads of a model, and the systems that take turns, with plain in each: what is compared most
comes first."""
QUICK_ROUNDS = (
    (TINY, ("W6", "W1", "W3"), OURS),
    (TINY, ("W3",), CHUNKS),
    (TINY, ("W1",), BATCH),
    (TINY, ("W6",), STATIC),
)


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    """The workloads of each model, while there is time."""
    limits = ceilings.measure(args.device, args.quick)
    models: dict[str, Any] = {}
    until = time.perf_counter() + 60 * args.minutes
    for name, workloads, systems in QUICK_ROUNDS if args.quick else ROUNDS:
        for workload in [WORKLOADS[one] for one in workloads]:
            if time.perf_counter() > until:
                return
            if name not in models:
                models[name] = build(SHAPES[name], args.device, torch.bfloat16)
            if args.quick:
                workload = dataclasses.replace(workload.scaled(0.125, 0.06), target=None)
            case = generate.case_of(models[name], SHAPES[name], workload, systems, limits)
            title = f"{name}, {workload.name}, {list(systems)[-1]}"
            case = case._replace(name=title, turns=None, fewest=1, once=())
            yield from generate.freed(models[name], systems, case)


def has_failed(data: runner.Data) -> bool:
    """Only plain `generate` and ours must run."""
    needed = ("plain", *generate.OURS)
    return any("problem" in row and row["system"] in needed for row in data["rows"])


main = runner.Benchmark(
    __doc__,
    cases,
    options=jobs.OPTIONS,
    fixed={"turns": TURNS},
    quick={"turns": 1},
    is_wrong=has_failed,
).main

if __name__ == "__main__":
    raise SystemExit(main())
