"""Stage (e): whole calls, by the code of `benchmarks.generate`."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any
from unittest import mock

import torch

from benchmarks import ceilings, generate, runner
from benchmarks.continuous import PAGE_SIZE, GenerateBatch
from benchmarks.gpu_day.record import Record
from benchmarks.models import SHAPES, build
from benchmarks.systems import Answer, Engine, Generate, System, quiet
from benchmarks.workloads import WORKLOADS, Workload
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
FAKE_ROUNDS = (
    (TINY, ("W6", "W1", "W3"), OURS),
    (TINY, ("W3",), CHUNKS),
    (TINY, ("W1",), BATCH),
    (TINY, ("W6",), STATIC),
)


def run(record: Record) -> None:
    """A row for each system of each workload."""
    limits = ceilings.measure(record.torch_device, record.is_fake)
    record.note_machine(ceilings=str(limits))
    models: dict[str, Any] = {}
    for model, names, systems in FAKE_ROUNDS if record.is_fake else ROUNDS:
        for name in names:
            about = {"model": model, "workload": name}
            if record.left < 4:
                record.add(**about, systems=", ".join(systems), note="no time left")
                continue
            with record.guard(**about), quiet():
                if model not in models:
                    models[model] = build(SHAPES[model], record.torch_device, torch.bfloat16)
                workload = scaled(WORKLOADS[name], record.is_fake)
                case = generate.case_of(models[model], SHAPES[model], workload, systems, limits)
                turns, until = 1 if record.is_fake else TURNS, time.perf_counter() + record.left - 2
                case = case._replace(turns=turns, fewest=1, until=until)
                rows = [
                    row
                    for one in generate.freed(models[model], systems, case)
                    for row in runner.rows_of_case(one, turns)
                ]
                for row in rows:
                    record.add(**about, **of_interest(row, rows))


def scaled(workload: Workload, is_fake: bool) -> Workload:
    """The workload, or one that a processor serves in a second."""
    if not is_fake:
        return workload
    return dataclasses.replace(workload.scaled(0.125, 0.06), target=None)


def of_interest(row: runner.Data, rows: list[runner.Data]) -> dict[str, Any]:
    """The row of the record. Only ours must run."""
    found = {"system": row["system"]}
    if "problem" in row:
        must_run = row["system"] in ("plain", *generate.OURS)
        return found | {"problem" if must_run else "note": row["problem"]}
    for one, base, ratio, _ in runner.comparisons(rows):
        found |= {"plain_over": ratio.value} if (one, base) == (row, "plain") else {}
    equal = {"equal_share": row["equal"]} if "equal" in row else {}
    return found | {"s": statistics.median(row["seconds"])} | equal | row["figures"]
