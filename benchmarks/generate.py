"""A model with random weights gets new prompts in each turn. "ours" is
`generate(cache_implementation="paged")`, "engine" is `PagedEngine`, `generate_batch` is
transformers' continuous batching. All are compared with plain `generate` at its fastest batch size;
W9's callers are threads, its plain one calls them one after another, and engines get its prompts at
once.

W6 may be 3% slower than plain. "Equal" is the share of positions with plain generate's token:
after the first near tie that bfloat16 decides the other way, the texts differ, so that tokens are
also compared on a tiny model in float32. Latencies are medians, over the turns, of each turn's
percentiles; beams have none, since their tokens are decided at the end. The roofline reads the
weights once a step and computes products at the best measured rate.

Waste is the share of allocated slots that hold no token at the peak, for lengths like ShareGPT's.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import hf_paged
from benchmarks import ceilings, report, runner, tables
from benchmarks.ceilings import Cost, call_seconds
from benchmarks.models import SHAPES, Shape, build
from benchmarks.paper.traces import SHAREGPT, make_trace
from benchmarks.peers import ENGINES, TITLES, Peer
from benchmarks.runner import Case, Data, Turn, flag, option
from benchmarks.systems import (
    KEPT,
    Answer,
    Engine,
    Generate,
    GenerateBatch,
    InThreads,
    SmallPool,
    System,
    latencies,
)
from benchmarks.workloads import ALL, Workload, batch_of, contiguous_bytes

OURS = ("ours", "engine")
SMALL_POOL, SLOWER = "engine, a third of its peak", 1.6
"""An engine with few blocks, and the most that its time may be of the time with all blocks."""
GENERATE_BATCH, FASTER = "generate_batch", 2.5
"""transformers' continuous batching, and the least that its time should be of ours."""
LONG = ("W1", "W2", "W3")
KV_SHARE, WASTE = "K/V of plain's, %", "waste, %"
LIMITS = {"W2": {KV_SHARE: 40.0}, "W4": {KV_SHARE: 18.0}, "waste": {WASTE: 4.0}}
EXACT = " on a tiny model in float32"
MARGIN = 1.005  # two latencies closer than this are printed alike
MINUTES = 33.0
SHARES = {"W1": 20, "W2": 32, "W3": 17, "W4": 6, "W5": 5, "W6": 10, "W9": 4, "W10": 10}
SHARES |= {"waste": 3}
"""Shares of a run's time, in the run's order, of W1 with the start of the peers; time that a part
leaves goes to the later parts."""


def model_of(shape: Shape, device: str, int8: bool, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model with random weights, perhaps as 8-bit integers, one scale a row (torchao)."""
    model = build(shape, device, dtype)
    if int8:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    return model


def systems_for(
    workload: Workload, peers: Sequence[Peer] = (), others: bool = False, invariant: bool = False
) -> dict[str, System]:
    """Systems by name; plain comes first, once per batch size. `others`: transformers' other
    ways, too."""
    sizes = workload.batch_sizes or (0,)
    found: dict[str, System] = {
        f"plain, batch {size}" if size else "plain": Generate(size) for size in sizes
    }
    engine = Engine()
    if workload.in_threads:
        found = {"plain": Generate(1), "plain in threads": InThreads()}
    found["ours"] = (InThreads if workload.in_threads else Generate)(cache="paged")
    found["engine"] = engine
    if workload.name == "W2":
        found[SMALL_POOL] = SmallPool(of=engine)
    if invariant:
        found["engine, batch_invariant"] = Engine(replace(KEPT, batch_invariant=True))
    found |= {TITLES[peer.name]: peer for peer in peers}
    if others:
        found["static, compiled"] = Generate(sizes[len(sizes) // 2], cache="static")
        if workload.name in LONG:
            found[GENERATE_BATCH] = GenerateBatch()
    return found


def timed(
    system: System, model: Any, shape: Shape, workload: Workload, turn: int
) -> tuple[float, Answer, dict[str, float]]:
    """Seconds of a call, its answer, its latencies. Raises if rows do not have the lengths asked
    for."""
    batch = workload.batch(turn, shape.vocab)
    torch.manual_seed(turn)
    gc.collect()
    ceilings.synchronize(model.device)
    start = time.perf_counter()
    answer = system(model, shape, workload, batch)
    ceilings.synchronize(model.device)
    seconds = time.perf_counter() - start
    asked = [length for length in batch.new_tokens for _ in range(workload.rows_per_prompt)]
    if [len(row) for row in answer.rows] != asked:
        given = sum(map(len, answer.rows))
        raise RuntimeError(
            f"gave {given} tokens in {len(answer.rows)} rows, not {sum(asked)} in {len(asked)}"
        )
    return seconds, answer, latencies(answer.times, [start] * len(answer.times))


def arm(
    name: str, system: System, model: Any, shape: Shape, workload: Workload, floor: float
) -> runner.Arm:
    """Turns of a system. Some have whole warm-up turns: a compiled cache is compiled for exact
    lengths, and our decode steps are recorded for each number of rows (`benchmarks.first_call` has
    what that costs)."""
    is_cuda, is_warm = model.device.type == "cuda", isinstance(system, SmallPool)
    is_whole = name in OURS or (isinstance(system, Generate) and system.cache == "static")

    def work(turn: int) -> Turn:
        if is_warm and turn < 0:
            return Turn(0.0)
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        now = workload if turn >= 0 or is_whole else workload.scaled(prompts=0.1, tokens=0.1)
        seconds, answer, times = timed(system, model, shape, now, turn)
        figures: dict[str, Any] = {"tokens/s": sum(map(len, answer.rows)) / seconds, **times}
        batch = workload.batch(turn, shape.vocab)
        if (held := system.kv_bytes(model, shape, workload, batch)) is not None:
            figures["K/V, MiB"] = held / 2**20
            if name in OURS:
                plain = contiguous_bytes(shape, workload, batch, model.dtype.itemsize)
                figures[KV_SHARE] = 100 * held / plain
        if is_cuda:
            figures["device, MiB"] = torch.cuda.max_memory_allocated() / 2**20
        if floor:
            figures["of the roofline, %"] = 100 * floor / seconds
        if isinstance(system, Peer) and system.settings:
            figures["settings"] = system.settings
        # each request of an engine has its own random state
        is_like_plain = not workload.sampled or isinstance(system, Generate)
        return Turn(seconds, answer.rows if is_like_plain else None, figures)

    return runner.guarded(work)


def case_of(
    model: Any,
    shape: Shape,
    workload: Workload,
    systems: Mapping[str, System],
    limits: ceilings.Ceilings | None = None,
) -> Case:
    """All systems on one workload; on a CPU the slow peers run one turn. `limits`: for the
    roofline."""
    floor = 0.0
    if limits is not None:
        batch = workload.batch(0, shape.vocab)
        rows = max(workload.rows_per_prompt, workload.num_beams)
        lengths = list(map(len, batch.prompts)), batch.new_tokens, rows, workload.prefix
        flops = limits.flops[str(model.dtype).removeprefix("torch.")]
        floor = call_seconds(Cost.of(model, shape), limits, flops, *lengths)
    over: dict[str, Any] = {"plain": dict.fromkeys(OURS, workload.target)}
    if GENERATE_BATCH in systems:
        over[GENERATE_BATCH] = dict.fromkeys(OURS, FASTER)
    over |= {"engine": {SMALL_POOL: 1 / SLOWER}} if SMALL_POOL in systems else {}
    over |= {"ours": {}} if any(isinstance(system, Peer) for system in systems.values()) else {}
    is_cpu, is_long = model.device.type == "cpu", workload.name in LONG
    settings: dict[str, list[str]] = {}  # by the system
    for name, system in systems.items():
        if isinstance(system, Peer):
            settings.setdefault(ENGINES[system.name].worker, []).append(name)
        elif name.startswith("plain, batch"):
            settings.setdefault("plain", []).append(name)
    return Case(
        workload.name,
        {name: arm(name, one, model, shape, workload, floor) for name, one in systems.items()},
        over,
        workload.repeats,
        limits=LIMITS.get(workload.name, {}),
        once=[name for name, system in systems.items() if system.is_peer and is_cpu and is_long],
        settings=list(settings.values()),
        fewest=workload.fewest,
    )


def freed(model: Any, systems: Mapping[str, System], case: Case) -> Iterator[Case]:
    """The case; frees the systems' memory after it. Peers stay for the next."""
    yield case
    for system in systems.values():
        if not isinstance(system, Peer):
            system.free()
    hf_paged.free(model)


def exact(device: str, workload: Workload) -> Iterator[Case]:
    """Tokens in float32 on small inputs, also with a third of the blocks."""
    tiny = SHAPES["llama-tiny"]
    model = build(tiny, device, torch.float32)
    small = replace(workload.scaled(prompts=0.25, tokens=0.125), batch_sizes=())
    systems = systems_for(small)
    case = case_of(model, tiny, small, systems)
    name = f"{workload.name}{EXACT}"
    yield from freed(model, systems, case._replace(name=name, over={}, limits={}, turns=1))


def waste(device: str, quick: bool) -> Iterator[Case]:
    """ShareGPT-like lengths through the engine. Counts of blocks depend only on lengths, so a small
    model is enough."""
    shape = SHAPES["llama-tiny"]
    model, engine = build(shape, device, torch.bfloat16), Engine()
    trace = make_trace(SHAREGPT, 16 if quick else 64)
    batch = batch_of(trace, 0.25 if quick else 1.0, shape.vocab)
    workload = Workload("waste", len(batch.prompts), (0, 0), (0, 0))

    def work(turn: int) -> Turn:
        if turn < 0:
            return Turn(0.0)
        seconds = runner.seconds_of(lambda: engine(model, shape, workload, batch))
        return Turn(seconds, figures={WASTE: engine.engine.stats().waste_percent})

    arms, limits = {"engine": runner.guarded(work)}, LIMITS["waste"]
    case = Case("ShareGPT-like lengths", arms, turns=1, limits=limits)
    yield from freed(model, {"engine": engine}, case)


def sized(workload: Workload, args: argparse.Namespace) -> Workload:
    """The workload of a run."""
    if args.quick:
        small = workload.scaled(0.125, 0.06)
        return replace(small, repeats=1, fewest=1, processes=1, target=None)
    turns = args.repeats or workload.repeats
    return replace(workload, repeats=turns, fewest=args.repeats or workload.fewest)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    shape, start = SHAPES[args.model], time.perf_counter()
    args.ceilings = limits = ceilings.measure(args.device, args.quick)
    model = model_of(shape, args.device, args.int8, getattr(torch, args.dtype))
    later = {part: share for part, share in SHARES.items() if part in args.only}
    with contextlib.ExitStack() as ending:
        peers = [Peer(name, args.int8) for name in args.peers]
        for each in peers:
            ending.callback(each.free)
        for name in [name for name in ALL if name in args.only]:
            workload = sized(ALL[name], args)
            left = start + 60 * args.minutes - time.perf_counter()
            until = time.perf_counter() + left * later[name] / sum(later.values())
            del later[name]
            systems = systems_for(workload, peers, not args.no_peers, args.batch_invariant)
            case = case_of(model, shape, workload, systems, None if args.int8 else limits)
            yield from freed(model, systems, case._replace(first=args.first, until=until))
            if not args.first:
                yield from exact(args.device, ALL[name])
    if "waste" in args.only and not args.no_memory:
        yield from waste(args.device, args.quick)


def again(args: argparse.Namespace) -> argparse.Namespace | None:
    """Plain and ours on the short workloads in another process: another memory layout, another
    build of the model."""
    names = [name for name in args.only if name in ALL and ALL[name].processes > 1]
    if not names or args.quick:
        return None
    turns = args.repeats or ALL[names[0]].repeats
    minutes = args.minutes * sum(map(SHARES.get, names)) / sum(map(SHARES.get, args.only))
    others = {"only": names, "no_peers": True, "peers": [], "first": turns, "minutes": minutes}
    return argparse.Namespace(**{**vars(args), **others})


def ahead(pairs: Iterable[tuple[Data, Data | None]]) -> str:
    """Lists the largest latencies in which another system is ahead of ours, from pairs of rows."""
    found = []
    for row, other in pairs:
        for key, value in row["figures"].items():
            theirs = other["figures"].get(key) if other else None
            if key.endswith("p99, ms") and theirs and value > MARGIN * theirs:
                what = f"{other['system']} in {key} of {row['case']} ({row['system']})"  # type: ignore[index]
                found.append(f"{what}, {report.text(theirs)} against {report.text(value)}")
    return f"Ahead of ours: {'; '.join(found)}." if found else ""


def show(runs: Sequence[Data]) -> Iterator[str]:
    """Whole calls, and what else was checked."""
    rows = tables.pooled(runs)
    yield runs[0].get("title", "")
    whole = [row for row in rows if row["case"] in ALL]
    ran = [row for row in whole if "problem" not in row]
    yield tables.table(ran)
    ours = [row for row in ran if row["system"] in OURS]
    plain = [tables.base_of(rows, row["case"], "plain") for row in ours]
    yield ahead(zip(ours, plain))
    reasons: dict[str, list[str]] = {}
    for row in whole:
        if "problem" in row:
            reasons.setdefault(f"{row['system']} ({row['problem']})", []).append(row["case"])
    parts = [f"{said} on {', '.join(names)}" for said, names in reasons.items()]
    yield f"Without figures: {'; '.join(parts)}." if parts else ""
    if wasted := [row for row in rows if WASTE in row["figures"]]:
        yield tables.table(wasted)
    exact = [row["equal"] for row in rows if row["case"].endswith(EXACT) and "equal" in row]
    if equal := [share == 1 for share in exact]:
        yield f"{sum(equal)} of {len(equal)} checks{EXACT} give plain's tokens exactly."
    if "(random weights, float32)" in runs[0].get("title", ""):
        equal = [row["equal"] == 1 for row in ours if row.get("equal") is not None]
        yield f"In float32, {sum(equal)} of {len(equal)} calls of ours give plain's tokens exactly."
    yield tables.targets(rows)


def title(args: argparse.Namespace) -> str:
    bits = "8 bits" if args.int8 else args.dtype
    return f"`{args.model}` (random weights, {bits}). M{str(args.ceilings)[1:]}."


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    again=again,
    show=show,
    title="Whole calls",
    results=[
        (f"generate-{kind}cpu-llama-100m",) for kind in ("", "other-dtype-", "int8-", "invariant-")
    ],
    said=title,
    options={
        "--device": runner.DEVICE,
        "--model": runner.MODEL,
        "--dtype": runner.DTYPE,
        "--no-peers": flag("no other way of transformers' own"),
        "--peers": option(
            "engines for processors, each installed apart",
            nargs="+",
            default=[],
            choices=list(TITLES),
        ),
        "--int8": flag("weights as 8-bit integers: torchao's, the peers' own"),
        "--batch-invariant": flag("the engine once more, with batch_invariant"),
        "--no-memory": flag("leave out the waste of blocks"),
        "--repeats": option("turns of each system in a process, whatever they take", type=int),
        "--minutes": option("to plan with (%(default)g)", type=float, default=MINUTES),
    },
    only="such as W1,waste (all)",
    known=list(SHARES),
    fixed={"first": 0},
    quick={"model": "llama-tiny"},
    is_wrong=lambda data: any(
        row.get("equal", 1.0) < 1 for row in data["rows"] if row["case"].endswith(EXACT)
    ),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
