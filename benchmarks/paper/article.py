"""Tables of the document S4, an article on the PagedAttention paper, and the figure of S2."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Iterator

from benchmarks import generate, paired, parallel, runner
from benchmarks.models import SHAPES, Shape, build
from benchmarks.paper import kernel
from benchmarks.paper.kernel import BLOCKS
from benchmarks.paper.rows import PAPER, READ, TOLD, TOLD_S2, Published, Row, Size
from benchmarks.paper.serving import (
    A100,
    OPT_13B_SLOTS,
    StepCost,
    serve_paged,
    serve_static,
)
from benchmarks.paper.traces import LONGEST, SHAREGPT, make_trace
from benchmarks.paper.turns import measured, said, serve, small_shape, timed_row, times_of
from benchmarks.systems import Generate, System
from benchmarks.workloads import WORKLOADS, Workload

ENGINE_SLOTS = 1024
REQUESTS_A_SECOND = {4: 3.12, 8: 3.38, 16: 3.56, 32: 3.48, 64: 3.21}
OVERHEAD = {4: 11, 8: 6, 16: 3, 32: 8, 64: 18}
"""S4's overhead in percent, by block size."""
SWAPPED_BLOCKS = tuple(block for block in (8, 16, 64) if block in BLOCKS)
METHODS = ("swap", "recompute")
SCALED = {
    "LLaMA-7B": (1.24, 4.21),
    "LLaMA-13B": (0.89, 3.56),
    "LLaMA-33B": (0.34, 1.52),
    "LLaMA-65B": (0.18, 0.89),
}
"""S4's requests per second of FasterTransformer and of vLLM."""


def sharegpt_pairs(size: Size) -> list[tuple[int, int]]:
    """Prompt and output lengths like ShareGPT's, cut so that a run takes about a second."""
    trace = make_trace(SHAREGPT, size.engine_requests, seed=2)
    return [
        (min(256, prompt), max(2, min(48, output // 16)))
        for prompt, output in zip(trace.prompts, trace.outputs)
    ]


def block_cases(size: Size) -> Iterator[runner.Case]:
    """Whole runs, and a layer's attention, by block size."""
    shape, pairs = small_shape(size, 8), sharegpt_pairs(size)
    model = build(shape)

    def work(turn: int, block: int) -> float:
        config = {"block_size": block, "num_blocks": ENGINE_SLOTS // block}
        return serve(model, shape, pairs, config)[0]

    yield runner.Case("engine", runner.each(work, BLOCKS))
    yield runner.Case("kernel", kernel.arms(size))


def sweep(size: Size) -> list[Row]:
    """S4's block sizes: throughput, and an "overhead" that is least at 16, for ShareGPT, LLaMA-13B
    and an A100.

    The same: mean lengths, one memory size for all block sizes. Different: S4 does not define its
    overhead; it names the management of block tables and the unused slots of a request's last
    block. We report two figures: our kernel's time beyond that over contiguous rows (one block per
    row), and allocated but empty slots, simulated in OPT-13B's 15.7K slots. Throughput is the
    engine's on a small random model in float32 on this CPU.
    """
    found, rows = measured(block_cases, size), []
    times = {case: times_of(contenders) for case, contenders in found.items()}
    trace = make_trace(SHAREGPT, max(60, size.short // 8))
    for block in BLOCKS:
        speeds = paired.ratios(times["engine"]["16"], times["engine"][str(block)])
        usage = serve_paged(trace, A100, OPT_13B_SLOTS, block).usage.percent()
        empty = 100 * usage["internal"] / (usage["used"] + usage["internal"])
        over = paired.ratios(
            times["kernel"].get(f"blocks of {block}", []), times["kernel"]["one block a row"]
        )
        over = [100 * (ratio - 1) for ratio in over]
        rate = REQUESTS_A_SECOND[block]
        name = f"throughput at block size {block}, over that at 16, {small_shape(size, 8).name}"
        share = f"{rate / REQUESTS_A_SECOND[16]:.3f} ({rate} requests/s)"
        rows.append(timed_row(name, speeds, size, Published(share, TOLD, _WHY_SWEEP)))
        name = f"overhead at block size {block}: attention over contiguous rows; empty slots"
        layer = said(over, size, ".1f") if over else "not measured: contexts are shorter"
        why = "S4 does not say of what; its figures are least at 16"
        ours, figure = f"{layer}; {empty:.1f} empty", str(OVERHEAD[block])
        rows.append(Row(name, ours, "%", figure, TOLD, why, over))
    return rows


_WHY_SWEEP = (
    "another model, a CPU, and memory that holds few requests, so that large blocks keep some of"
    " them waiting"
)


_WHY_SWAP = (
    "a copy within host memory has no PCIe transfers to set up, and a CPU computes a prompt slowly"
)


def preempting_pairs(size: Size) -> list[tuple[int, int]]:
    """Prompt and output lengths of requests that outgrow the memory while several run."""
    draw, count = random.Random(3), max(6, size.engine_requests)
    return [(draw.randrange(16, 49), 128 if size.turns > 1 else 32) for _ in range(count)]


def preempted_cases(size: Size) -> Iterator[runner.Case]:
    """Whole runs with each preemption method in a memory that is too small, by block size."""
    shape, pairs = small_shape(size, 2), preempting_pairs(size)
    model = build(shape)
    slots = 384 if size.turns > 1 else 128

    def work(turn: int, method: str, *, block: int) -> runner.Turn:
        config = {"block_size": block, "num_blocks": slots // block, "preemption": method}
        seconds, stats = serve(model, shape, pairs, config)
        counts = f"{stats.num_preemptions} preemptions, {stats.num_swaps} swaps"
        if not stats.num_preemptions or (method == "swap") != (stats.num_swaps > 0):
            raise RuntimeError(f"{method}: {counts}")
        return runner.Turn(seconds, figures={"preemptions": stats.num_preemptions})

    for block in SWAPPED_BLOCKS if size.turns > 1 else SWAPPED_BLOCKS[:1]:
        yield runner.Case(str(block), runner.each(functools.partial(work, block=block), METHODS))


def preempted(size: Size) -> list[Row]:
    """PagedAttention (arXiv 2309.06180), section 7.3 and figure 19b: whole runs with swap against
    whole runs with recompute, by block size.

    The same: one trace, one undersized memory, one method for all preemptions. Different: host
    memory on both sides of a swap; 2 layers of a small random model in float32 on a CPU; few
    requests with short contexts.
    """
    said_there = {"8": "swap slower", "16": "comparable", "64": "comparable"}
    rows = []
    for block, found in measured(preempted_cases, size).items():
        times = times_of(found)
        ratios = paired.ratios(times["swap"], times["recompute"])
        figures = ", ".join(
            f"{method} {statistics.median(times[method]):.3g} s,"
            f" {found[method]['figures']['preemptions']:g} preemptions"
            for method in METHODS
        )
        shape = small_shape(size, 2).name
        name = f"time with swap over time with recompute, block size {block}, {shape}"
        published = Published(said_there[block], f"{PAPER}, section 7.3 ({READ})", _WHY_SWAP)
        rows.append(timed_row(name, ratios, size, published, f"; {figures}"))
    return rows


def step_cost(shape: Shape, gpus: int) -> StepCost:
    """Step cost of a model over `gpus` GPUs, from `benchmarks.parallel`."""
    part, bandwidth = parallel.cost(shape, gpus), parallel.A100.bandwidth
    flops = parallel.A100.flops["bfloat16"]
    return StepCost(
        f"{shape.name} on {gpus} GPUs, roofline",
        fixed=0.0,
        floor=part.weight_bytes / bandwidth,
        per_token=2 * (part.body + part.head) / flops,
        per_context=part.shape.kv_bytes(1, 2) / bandwidth,
        per_link=parallel.all_reduce_seconds(shape, gpus, 1),
    )


def scaling(size: Size) -> list[Row]:
    """S4's scaling over model sizes, **computed, not measured**: LLaMA of 7B to 65B on 1 to 8 A100
    of 80 GB.

    The same: ShareGPT's mean lengths, all requests waiting. Different: no GPU has run it. A step
    costs what the roofline of `benchmarks.parallel` gives (a GPU's share of the weights or of the
    products, the K/V that it reads, the all-reduces of each layer). Ours is the engine's scheduler
    and block manager; the other reserves the longest sequence for each row of a static batch, as
    FasterTransformer does. S4 does not say how many GPUs a model has. A case has no row if less
    than one longest sequence fits beside the weights.
    """
    trace, rows = make_trace(SHAREGPT, max(60, size.short // 20)), []
    shapes = {shape.name: shape for shape in parallel.LLAMAS}
    for line in parallel.scaling():
        name, gpus = line["model"], line["gpus"]
        slots = line["kv_tokens"]
        if slots < LONGEST:
            continue
        cost = step_cost(shapes[name], gpus)
        ours, static = serve_paged(trace, cost, slots).rate, serve_static(trace, cost, slots).rate
        theirs, vllm = SCALED[name]
        title = f"computed: {name} on {gpus} GPU{'s' * (gpus > 1)}, ours over static batches"
        figure = f"{vllm / theirs:.1f} ({vllm} over {theirs} requests/s)"
        said_here = f"{ours / static:.1f} ({ours:.3g} over {static:.3g} requests/s)"
        rows.append(Row(title, said_here, "times", figure, TOLD, _WHY_SCALING))
    return rows


_WHY_SCALING = (
    "a static batch waits for its longest row, with room for the longest sequence in each; a"
    " roofline has no overhead per request or kernel; S4 does not say how many GPUs a model has"
)

PLAIN, OURS = "plain", "ours"


def beam_workload(size: Size) -> Workload:
    return WORKLOADS["W5"] if size.turns > 1 else WORKLOADS["W5"].scaled(1, 0.125)


def beam_cases(size: Size) -> Iterator[runner.Case]:
    """Whole calls, and their bytes of K/V."""
    shape, workload = SHAPES[size.small], beam_workload(size)
    model = build(shape)
    systems: dict[str, System] = {PLAIN: Generate(), OURS: Generate(cache="paged")}
    case = generate.case_of(model, shape, workload, systems)
    yield from generate.freed(model, systems, case._replace(turns=None, fewest=None))


def beam_speed(size: Size) -> list[Row]:
    """S2's "up to 55% of the memory, which gives up to 2.2 times the throughput" for beams and
    samples, beside W5.

    The same: beam search. Different: W5 is one prompt of 512 with 8 beams of 64 new tokens, plain
    `generate` against `generate(cache_implementation="paged")`. Saved memory does not enlarge the
    batch; the gain comes from moving and reading fewer bytes. The announcement's figure is of a
    server whose batch grows into the saved memory.
    """
    found, workload = measured(beam_cases, size)["W5"], beam_workload(size)
    times = times_of(found)
    held = {name: row["figures"]["K/V, MiB"] for name, row in found.items()}
    part = "" if size.turns > 1 else ", an eighth of it"
    name = f"plain's time over ours, W5 ({workload.title}, {size.small}, float32{part})"
    plain, ours = (statistics.median(times[system]) for system in (PLAIN, OURS))
    why = "one prompt: no other request takes the room"
    speed = Published("up to 2.2", TOLD_S2, why)
    ratios, more = paired.ratios(times[PLAIN], times[OURS]), f"; {plain:.3g} over {ours:.3g} s"
    saved = Published("up to 55", TOLD_S2, "8 beams share a prompt of 512")
    share = 100 * (1 - held[OURS] / held[PLAIN])
    return [
        timed_row(name, ratios, size, speed, more),
        Row("bytes of keys and values saved, W5", share, "%", *saved),
    ]


TABLES: dict[str, Callable[[Size], list[Row]]] = {
    "sweep": sweep,
    "preempted": preempted,
    "scaling": scaling,
    "beam_speed": beam_speed,
}
