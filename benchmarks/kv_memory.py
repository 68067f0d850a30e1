"""Bytes of keys and values: what `benchmarks.generate` measures besides time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import hf_paged
from benchmarks.models import SHAPES, Shape, build
from benchmarks.systems import Engine, Generate, NotAvailable
from benchmarks.workloads import Batch, Workload, contiguous_bytes, equal_share, sharegpt_like


@dataclass(frozen=True)
class Measurement:
    """`value` is in `unit`; `target` is the issue's and whether it is met; `problem` says why there is no value."""

    what: str
    system: str
    value: float = 0.0
    unit: str = ""
    target: str = ""
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.what}, {self.system}: " + (self.problem or f"{self.value:.4g} {self.unit} {self.target}".strip())


def guarded(what: str, system: str, measure: Callable[[], Measurement]) -> Measurement:
    """What fails is a result."""
    try:
        return measure()
    except NotAvailable as error:
        return Measurement(what, system, problem=str(error))
    except Exception as error:
        return Measurement(what, system, problem=f"failed: {type(error).__name__}: {error}")


def at_most(value: float, limit: float) -> str:
    return f"(at most {limit:g}: {'met' if value <= limit else 'not met'})"


@dataclass(frozen=True)
class Peak:
    """Most blocks and bytes in use at once; `waste` is the percentage of slots allocated and unused then."""

    num_blocks: int
    num_bytes: int
    waste: float


def peak(system: Any, model: Any, shape: Shape, workload: Workload, batch: Batch) -> Peak:
    """Of one run in a fresh pool; an engine has one of its own."""
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


def paged_share(
    model: Any, shape: Shape, workload: Workload, name: str, system: Any, limit: float
) -> Callable[[], Measurement]:
    """Peak paged bytes in percent of plain's."""

    def measure() -> Measurement:
        batch = workload.batch(0, shape.vocab)
        plain = contiguous_bytes(shape, workload, batch, model.dtype.itemsize)
        used = peak(system, model, shape, workload, batch).num_bytes
        share = 100 * used / plain
        unit = f"% of plain's KV bytes ({used / 2**20:.1f} of {plain / 2**20:.1f} MiB)"
        return Measurement(f"{workload.name} peak", name, share, unit, at_most(share, limit))

    return measure


def waste(model: Any, shape: Shape, quick: bool) -> Callable[[], Measurement]:
    """Slots allocated and unused at the peak, with ShareGPT-like lengths through the engine."""

    def measure() -> Measurement:
        batch = sharegpt_like(16 if quick else 64, 0.25 if quick else 1.0, shape.vocab)
        workload = Workload("waste", "", len(batch.prompts), (0, 0), (0, 0), options={"do_sample": False})
        share = peak(Engine(), model, shape, workload, batch).waste
        return Measurement("waste, ShareGPT-like lengths", "engine", share, "%", at_most(share, 4.0))

    return measure


def a_third(
    model: Any, shape: Shape, workload: Workload, name: str, make: Callable[..., Any], turns: int
) -> list[Callable[[], Measurement]]:
    """
    W2 with a third of the blocks it needs, the time and the tokens of a tiny model in float32. The need is what its
    requests fill from first to last, or the most that were in use at once without a limit, which is less.
    """

    def filled(workload: Workload, shape: Shape) -> int:
        batch = workload.batch(0, shape.vocab)
        lengths = [len(prompt) + new for prompt, new in zip(batch.prompts, batch.new_tokens)]
        return sum(-(-length // hf_paged.PagedConfig().block_size) for length in lengths)

    def in_use(model: Any, shape: Shape, workload: Workload) -> int:
        return peak(make(None), model, shape, workload, workload.batch(0, shape.vocab)).num_blocks

    def limited(needed: int) -> tuple[Any, int]:
        return make(hf_paged.PagedConfig(num_blocks=needed // 3)), needed // 3

    def seconds(system: Any) -> float:
        batch = workload.batch(0, shape.vocab)
        start = time.perf_counter()
        system(model, shape, workload, batch)
        return time.perf_counter() - start

    def ratio(of: str, needed: int) -> Measurement:
        """Over `turns` pairs of runs, whose order changes; the median."""
        system, blocks = limited(needed)
        ratios = []
        for turn in range(turns):
            pair = (system, make(None)) if turn % 2 else (make(None), system)
            times = {one is system: seconds(one) for one in pair}
            ratios.append(times[True] / times[False])
        value = statistics.median(ratios)
        unit = f"x the time with all blocks ({min(ratios):.2f}..{max(ratios):.2f}, {turns} turns, num_blocks={blocks})"
        return Measurement(f"{workload.name} in a third of its {of}", name, value, unit, at_most(value, 1.6))

    def time_ratio() -> Measurement:
        return ratio("blocks", filled(workload, shape))

    def peak_ratio() -> Measurement:
        return ratio("peak", in_use(model, shape, workload))

    def tokens() -> Measurement:
        tiny = SHAPES["llama-tiny"]
        small = workload if shape == tiny else workload.scaled(prompts=0.25, tokens=0.25)
        reference = build(tiny, model.device.type, torch.float32)
        batch = small.batch(0, tiny.vocab)
        expected = Generate()(reference, tiny, small, batch).rows
        system, _ = limited(in_use(reference, tiny, small))
        share = 100 * equal_share(expected, system(reference, tiny, small, batch).rows)
        return Measurement(
            f"{workload.name} in a third, float32", name, share, "% of tokens equal", f"({_equal(share)})"
        )

    return [time_ratio, peak_ratio, tokens]


def _equal(share: float) -> str:
    return f"all: {'met' if share == 100 else 'not met'}"


def measure(model: Any, shape: Shape, workloads: Sequence[Workload], quick: bool) -> list[Measurement]:
    """Every measurement that the chosen workloads allow."""
    named = {workload.name: workload for workload in workloads}
    makers: dict[str, Callable[..., Any]] = {
        "ours": lambda config: Generate(cache="paged", cache_config=config),
        "engine": lambda config: Engine(config),
    }
    found = []
    for name, make in makers.items():
        for which, limit in (("W2", 40.0), ("W4", 18.0)):
            if which in named:
                share = paged_share(model, shape, named[which], name, make(None), limit)
                found.append(guarded(f"{which} peak", name, share))
        # rows under a caller's own criterion advance together: without room for all, every step moves blocks
        if "W2" in named and name == "engine":
            workload = replace(named["W2"], batch_sizes=())
            for function in a_third(model, shape, workload, name, make, 1 if quick else 3):
                found.append(guarded("W2 in a third", name, function))
    if not found:
        return []
    return [*found, guarded("waste, ShareGPT-like lengths", "engine", waste(model, shape, quick))]
