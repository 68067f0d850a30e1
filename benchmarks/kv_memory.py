"""Bytes of K/V: the memory figures of `benchmarks.generate`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import hf_paged
from benchmarks import paired
from benchmarks.generate_tables import OURS
from benchmarks.models import SHAPES, Shape, build
from benchmarks.systems import Engine, Generate, NotAvailable
from benchmarks.workloads import Batch, Workload, contiguous_bytes, equal_share, sharegpt_like

ITEMSIZE = 2  # of bfloat16


@dataclass(frozen=True)
class Measurement:
    """`value` is in `unit`; `target` says the issue's target and whether it is met; `problem` says
    why a value is missing."""

    what: str
    system: str
    value: float = 0.0
    unit: str = ""
    target: str = ""
    problem: str = ""


def guarded(what: str, system: str, measure: Callable[[], Measurement]) -> Measurement:
    """Runs `measure`; returns a failure as a result."""
    try:
        return measure()
    except NotAvailable as error:
        return Measurement(what, system, problem=str(error))
    except Exception as error:
        return Measurement(what, system, problem=f"failed: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class Peak:
    """Most blocks and bytes in use at once; `waste` is the percentage of allocated slots unused at
    that moment."""

    num_blocks: int
    num_bytes: int
    waste: float


def peak(system: Any, model: Any, shape: Shape, workload: Workload, batch: Batch) -> Peak:
    """The peak of one run in a fresh pool; an engine uses its own pool."""
    hf_paged.free(model)
    try:
        system(model, shape, workload, batch)
        if isinstance(system, Engine):
            own = system.engine.stats()
            return Peak(own.peak_blocks, own.peak_bytes, own.waste_percent)
        stats = hf_paged.memory_stats(model, reset=True)
        return Peak(stats.peak_blocks, stats.peak_bytes, 100 * stats.waste)
    finally:
        if isinstance(system, Engine):
            system.free()
        hf_paged.free(model)


LIMITS = {"W2": 40.0, "W4": 18.0}
"""Most peak bytes, in percent of plain's."""


def of_rows(
    rows: Sequence[Mapping[str, Any]],
    shape: Shape,
    workload: Workload,
    small: str,
    num_blocks: int | None,
) -> list[Measurement]:
    """
    Memory figures from the rows of a workload.

    Args:
        small (`str`): Name of the engine with the smaller pool of `num_blocks` blocks.
    """
    found = []
    by_name = {row["system"]: row for row in rows if "seconds" in row}
    if workload.name in LIMITS:
        batch = workload.batch(0, shape.vocab)
        plain = contiguous_bytes(shape, workload, batch, ITEMSIZE) / 2**20
        for name in OURS:
            used = by_name[name]["kv_mib"] if name in by_name else None
            if used is not None:
                share = 100 * used / plain
                unit = f"% of plain's KV bytes ({used:.1f} of {plain:.1f} MiB)"
                target = paired.at_most(share, LIMITS[workload.name])
                found.append(Measurement(f"{workload.name} peak", name, share, unit, target))
    if small in by_name and "engine" in by_name:
        ratios = paired.ratios(by_name[small]["seconds"], by_name["engine"]["seconds"])
        value = statistics.median(ratios)
        told = f"{paired.span(ratios)}, {len(ratios)} turns, num_blocks={num_blocks}"
        unit = f"x the time with all blocks ({told})"
        what = f"{workload.name} in a third of its peak"
        found.append(Measurement(what, "engine", value, unit, paired.at_most(value, 1.6)))
    return found


def waste(device: str, quick: bool) -> Measurement:
    """Allocated, unused slots at the peak, with ShareGPT-like lengths through the engine. Block
    counts depend only on lengths, so a small model is enough.
    """
    shape = SHAPES["llama-tiny"]
    batch = sharegpt_like(16 if quick else 64, 0.25 if quick else 1.0, shape.vocab)
    workload = Workload("waste", "", len(batch.prompts), (0, 0), (0, 0))
    share = peak(Engine(), build(shape, device, torch.bfloat16), shape, workload, batch).waste
    return Measurement(WASTE, "engine", share, "%", paired.at_most(share, 4.0))


def a_third(device: str, workload: Workload, quick: bool) -> Measurement:
    """Compares the tokens of a tiny float32 model in a third of its peak blocks with plain's."""
    tiny = SHAPES["llama-tiny"]
    small = workload if quick else workload.scaled(prompts=0.25, tokens=0.25)
    small = replace(small, batch_sizes=())
    model = build(tiny, device, torch.float32)
    batch = small.batch(0, tiny.vocab)
    expected = Generate()(model, tiny, small, batch).rows
    needed = peak(Engine(), model, tiny, small, batch).num_blocks
    system = Engine(hf_paged.PagedConfig(num_blocks=needed // 3))
    try:
        share = 100 * equal_share(expected, system(model, tiny, small, batch).rows)
    finally:
        system.free()
    target = f"all: {paired.said(share == 100)}"
    return Measurement(THIRD, "engine", share, "% of tokens equal", target)


WASTE, THIRD = "waste, ShareGPT-like lengths", "W2 in a third of its peak, float32"


def measure(device: str, workloads: Sequence[Workload], quick: bool) -> list[Measurement]:
    """Measurements that need separate runs, for the chosen workloads."""
    found = []
    for workload in workloads:
        if workload.name == "W2":
            found.append(
                guarded(THIRD, "engine", lambda workload=workload: a_third(device, workload, quick))
            )
    return [*found, guarded(WASTE, "engine", lambda: waste(device, quick))] if found else []
