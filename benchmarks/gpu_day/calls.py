"""Stages (d) and (e): steps of random models and whole calls, as in `benchmarks.generate`."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks import ceilings, generate, runner
from benchmarks.gpu_day import jobs
from benchmarks.models import SHAPES, build
from benchmarks.runner import option
from benchmarks.systems import Answer, Engine, Generate, GenerateBatch, System
from benchmarks.workloads import WORKLOADS, Workload
from hf_paged.kernels.hashing import hash_tensors
from hf_paged.tape import graphs

LLAMA, QWEN, TINY = "llama-3.1-8b", "qwen3-0.6b", "llama-tiny"
TURNS = 3
ONE = Workload("1 x 16", 1, (16, 16), (64, 64))
MANY = Workload("64 x 2048", 64, (2048, 2048), (16, 16))


class UnrecordedChunks(Generate):
    """Ours, while only steps of decodes are recorded."""

    def __call__(self, *arguments: Any) -> Answer:
        with mock.patch.object(graphs, "MAX_CHUNK_TOKENS", 0):
            return super().__call__(*arguments)


OURS: dict[str, System] = {"plain": Generate(), "ours": Generate(cache="paged"), "engine": Engine()}
PAIR = {name: OURS[name] for name in ("plain", "ours")}
BATCH = {"plain": Generate(), "generate_batch": GenerateBatch()}
CHUNKS = {**PAIR, "ours, chunks not recorded": UnrecordedChunks(cache="paged")}
STATIC = {"plain": Generate(), "static, compiled": Generate(cache="static")}
W1, W3, W6 = (WORKLOADS[name] for name in ("W1", "W3", "W6"))
Round = tuple[str, tuple[Workload, ...], dict[str, System]]
ROUNDS: dict[str, tuple[Round, ...]] = {
    "steps": (
        (QWEN, (ONE,), PAIR),
        (LLAMA, (ONE,), PAIR),
        (QWEN, (MANY,), PAIR),
        (LLAMA, (MANY,), PAIR),
    ),
    "calls": (
        (LLAMA, (W6, W1, W3), OURS),
        (LLAMA, (W1, W3), BATCH),
        (QWEN, (W6, W1, W3), OURS),
        (QWEN, (W3,), CHUNKS),
        (LLAMA, (W6,), STATIC),
        (QWEN, (W6, W1), STATIC),
        (QWEN, (W1, W3), BATCH),
    ),
}
"""Workloads of a model, and the systems that take turns, with plain in each: what is compared most
comes first."""


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    """The workloads of each model, while there is time."""
    limits = ceilings.measure(args.device, args.quick)
    models: dict[str, Any] = {}
    until = time.perf_counter() + 60 * args.minutes
    for name, workloads, systems in ROUNDS[args.part]:
        if args.quick and name == LLAMA:
            continue
        name = TINY if args.quick else name
        for workload in workloads:
            if time.perf_counter() > until:
                return
            if name not in models:
                models[name] = build(SHAPES[name], args.device, torch.bfloat16)
            model, shape = models[name], SHAPES[name]
            if args.quick:
                workload = dataclasses.replace(workload.scaled(0.125, 0.06), target=None)
            case = generate.case_of(model, shape, workload, systems, limits)
            title = f"{name}, {workload.name}, {list(systems)[-1]}"
            case = case._replace(name=title, turns=None, fewest=1, once=())
            yield from generate.freed(model, systems, case)
            if workload.name == ONE.name:
                weights = list(model.parameters())  # hashed before cached prefixes are used
                arms = runner.timed({"fingerprint": lambda weights=weights: hash_tensors(weights)})
                yield runner.Case(f"{name}, a step", arms)


main = runner.Benchmark(
    __doc__,
    cases,
    options=jobs.OPTIONS | {"--part": option(choices=list(ROUNDS), default="calls")},
    fixed={"turns": TURNS},
    quick={"turns": 1},
    is_wrong=runner.fails("plain", *generate.OURS),
).main

if __name__ == "__main__":
    raise SystemExit(main())
