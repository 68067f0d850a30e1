"""Whole calls: plain `generate`, `cache_implementation="paged"`, `PagedEngine` and other engines;
requests that arrive.

    python -m benchmarks.generate --device cpu [--model llama-100m] [--only W1,arrivals] [--quick]
                                  [--results DIRECTORY]

Random weights in bfloat16. All systems run in this process, in turns of alternating order, on new
prompts in each turn; W6 has as many turns in a second process. Targets are printed beside the
ratios and never asserted. Systems that are missing or fail are listed with the reason. Results are
written after each workload. On a CPU the number of turns depends on `--minutes`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch

import hf_paged
from benchmarks import (
    arrivals,
    ceilings,
    generate_tables,
    kv_memory,
    latency,
    machine,
    report,
    runner,
)
from benchmarks.continuous import GenerateBatch, tuned
from benchmarks.generate_tables import COLUMNS, Turns
from benchmarks.models import SHAPES, Shape, build
from benchmarks.peers import TITLES, Peer
from benchmarks.roofline import Cost, call_seconds
from benchmarks.runner import Turn, flag, option
from benchmarks.systems import Answer, Engine, Generate, NotAvailable, SmallPool, System, quiet
from benchmarks.workloads import WORKLOADS, Workload, equal_share

PEERED = ("W1", "W2", "W3")  # compared with `generate_batch`
SMALL_POOL = "engine, a third of its peak"
MINUTES = 33.0
SHARES = {"W1": 12, "W2": 32, "W3": 17, "W4": 6, "W5": 5, "W6": 10, "arrivals": 15, "memory": 3}
"""Shares of a run's time, in the run's order; time that a part leaves goes to the later parts."""


class Kinds(NamedTuple):
    """
    Args:
        int8 (`bool`): Linear weights as 8-bit integers, one scale per row, by torchao; peers use
            their own 8-bit weights.
        invariant (`bool`): Also run the engine with `PagedConfig(batch_invariant=True)`.
    """

    int8: bool = False
    invariant: bool = False


DEFAULT = Kinds()


def model_of(shape: Shape, device: str, int8: bool) -> Any:
    """A model with random weights, in bfloat16 or as 8-bit integers."""
    model = build(shape, device, torch.bfloat16)
    if int8:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    return model


def systems_for(
    workload: Workload,
    tuned_peer: GenerateBatch | None,
    quick: bool,
    peers: Sequence[str] = (),
    kinds: Kinds = DEFAULT,
) -> dict[str, System]:
    """Systems by name; plain comes first, once per batch size. Without `tuned_peer` transformers'
    other ways are left out."""
    sizes = workload.batch_sizes or (0,)
    found: dict[str, System] = {
        f"plain, batch {size}" if size else "plain": Generate(size) for size in sizes
    }
    engine = Engine()
    found |= {"ours": Generate(cache="paged"), "engine": engine}
    if workload.name == "W2":
        found[SMALL_POOL] = SmallPool(of=engine)
    if kinds.invariant:
        found["engine, batch_invariant"] = Engine(hf_paged.PagedConfig(batch_invariant=True))
    found |= {TITLES[name]: Peer(name, kinds.int8) for name in peers}
    if tuned_peer is None:
        return found
    found["static, compiled"] = Generate(sizes[len(sizes) // 2], cache="static")
    if workload.name in PEERED:
        found |= {
            "generate_batch": GenerateBatch(fills_memory=not quick),
            "generate_batch, tuned": tuned_peer,
        }
    return found


def timed(
    system: System, model: Any, shape: Shape, workload: Workload, repeat: int
) -> tuple[tuple[float, float], Answer, dict[str, float]]:
    """Seconds and CPU seconds of a call, its answer, its latencies. Raises if rows do not have the
    lengths asked for."""
    batch = workload.batch(repeat, shape.vocab)
    torch.manual_seed(repeat)
    gc.collect()
    ceilings.synchronize(model.device)
    start = time.perf_counter(), time.process_time()
    answer = system(model, shape, workload, batch)
    ceilings.synchronize(model.device)
    seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    asked = [length for length in batch.new_tokens for _ in range(workload.rows_per_prompt)]
    if [len(row) for row in answer.rows] != asked:
        given = sum(map(len, answer.rows))
        raise RuntimeError(
            f"gave {given} tokens in {len(answer.rows)} rows, not {sum(asked)} in {len(asked)}"
        )
    return seconds, answer, latency.summary(answer.times, [start[0]] * len(answer.times))


def arm(
    system: System, model: Any, shape: Shape, workload: Workload
) -> Callable[[int], Turn | str]:
    """Turns of a system, or why it has none: a failing peer is a result. `tuned` has warmed
    `generate_batch` up; a compiled cache is compiled for exact lengths."""
    problem, is_cuda = "", model.device.type == "cuda"
    is_warm = isinstance(system, GenerateBatch | SmallPool)
    is_whole = isinstance(system, Generate) and system.cache == "static"

    def work(turn: int) -> Turn | str:
        nonlocal problem
        if problem or (is_warm and turn < 0):
            return problem
        now = workload if turn >= 0 or is_whole else workload.scaled(prompts=0.1, tokens=0.1)
        try:
            if is_cuda:
                torch.cuda.reset_peak_memory_stats()
            seconds, answer, latencies = timed(system, model, shape, now, turn)
        except NotAvailable as error:
            problem = str(error)
            return problem
        except Exception as error:
            problem = report.failed(error)
            return problem
        figures: dict[str, Any] = {"cpu_s": seconds[1], "tokens": sum(map(len, answer.rows))}
        held = system.kv_bytes(model, shape, workload, workload.batch(turn, shape.vocab))
        figures |= {} if held is None else {"kv_mib": held / 2**20}
        if is_cuda:
            figures["device_mib"] = torch.cuda.max_memory_allocated() / 2**20
        settings = getattr(system, "settings", "")
        figures |= latencies | ({"settings": settings} if settings else {})
        return Turn(seconds[0], answer.rows, figures)

    return work


def run(
    model: Any,
    shape: Shape,
    workload: Workload,
    systems: dict[str, System],
    repeats: int,
    fewest: int | None = None,
    until: float = math.inf,
    first: int = 0,
) -> dict[str, list[Turn | str]]:
    """Turns of every system after a short warm-up of each; on a CPU the slow peers run one turn.
    Batch sizes of plain that are not the fastest in the first turn run no further turn. The rest:
    see `runner.take_turns`."""
    is_cpu = model.device.type == "cpu"

    def is_done(name: str, found: Turns) -> bool:
        is_slower = name.startswith("plain") and name != generate_tables.best_plain(found)
        return bool(found[name]) and (is_slower or (systems[name].is_peer and is_cpu))

    arms = {name: arm(system, model, shape, workload) for name, system in systems.items()}
    limits = {"first": first, "fewest": fewest, "until": until}
    found = runner.take_turns(arms, repeats, 1, workload.name, **limits, is_done=is_done)
    for system in systems.values():
        system.free()
    hf_paged.free(model)
    return found


def apart(
    device: str, shape: Shape, workload: Workload, kinds: Kinds, first: int
) -> dict[str, list[Turn | str]]:
    """`run` for plain and ours in a separate process: another memory layout, another build of the
    model."""
    with quiet():
        model = model_of(shape, device, kinds.int8)
        systems = systems_for(workload, None, False, kinds=kinds)
        with runner.frozen():
            return run(model, shape, workload, systems, workload.repeats, first=first)


def floor_of(cost: Cost, limits: ceilings.Ceilings, workload: Workload) -> float:
    """Seconds of one call by the roofline."""
    batch = workload.batch(0, cost.shape.vocab)
    rows = max(workload.rows_per_prompt, workload.options.get("num_beams", 1))
    lengths, flops = [len(prompt) for prompt in batch.prompts], limits.flops["bfloat16"]
    new = batch.new_tokens
    return call_seconds(cost, limits, flops, lengths, new, rows, workload.prefix)


def check(device: str, workloads: Sequence[Workload]) -> list[tuple[str, str, str]]:
    """Compares tokens with plain's in float32 on small inputs: workload, system, and "equal" or the
    difference."""
    tiny = SHAPES["llama-tiny"]
    model = build(tiny, device, torch.float32)
    found = []
    for workload in workloads:
        small = workload.scaled(prompts=0.25, tokens=0.125)
        systems: dict[str, System] = {"ours": Generate(cache="paged")}
        if not workload.sampled:  # each request of an engine has its own random state
            systems["engine"] = Engine()
        for name, system in systems.items():
            try:
                expected = timed(Generate(), model, tiny, small, 0)[1].rows
                actual = timed(system, model, tiny, small, 0)[1].rows
                share = equal_share(expected, actual)
                outcome = "equal" if expected == actual else f"{share:.1%} equal"
            except Exception as error:
                outcome = f"failed: {type(error).__name__}: {error}"
            found.append((workload.name, name, outcome))
    return found


OPTIONS = {
    "--device": runner.DEVICE,
    "--model": option("(llama-100m; llama-tiny with --quick)", choices=list(SHAPES)),
    "--only": option("such as W1,arrivals; without it all, and the memory", default=""),
    "--no-peers": flag("no other way of transformers' own"),
    "--peers": option(
        "engines for processors, each installed apart",
        nargs="+",
        default=[],
        choices=list(TITLES),
    ),
    "--int8": flag("weights as 8-bit integers: torchao's, the peers' own"),
    "--batch-invariant": flag("the engine once more, with batch_invariant"),
    "--no-memory": flag("leave out the memory measurements"),
    "--repeats": option("turns of each system in a process, whatever time they take", type=int),
    "--minutes": option(f"to plan with; {MINUTES:g} on a CPU, else without a limit", type=float),
    "--threads": runner.THREADS,
    "--quick": runner.QUICK,
    "--results": runner.RESULTS,
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = runner.parser_of(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    args.only = runner.parts(parser, args.only, [*WORKLOADS, "arrivals"])
    args.model = args.model or ("llama-tiny" if args.quick else "llama-100m")
    args.results = args.results or (None if args.quick else report.RESULTS)
    if args.minutes is None:
        args.minutes = MINUTES if args.device == "cpu" else math.inf
    return args


class Run:
    """Results of a run so far, and its files."""

    def __init__(
        self, args: argparse.Namespace, facts: dict[str, Any], limits: ceilings.Ceilings
    ) -> None:
        self.args, self.facts, self.limits = args, facts, limits
        self.start = time.perf_counter()
        parts = [] if args.peers else map(str.lower, args.only)
        kind = [*(["int8"] if args.int8 else []), "peers" if args.peers else "generate"]
        kind += ["invariant"] if args.batch_invariant else []
        self.name = "-".join([*kind, args.device, args.model, *parts])
        self.rows: list[dict[str, Any]] = []
        absent = {"device_mib": args.device != "cuda", "settings": not args.peers}
        self.columns = {k: title for k, title in COLUMNS.items() if not absent.get(k)}
        self.extra: dict[str, Any] = {
            "ceilings": asdict(limits),
            "model": asdict(SHAPES[args.model]),
        }
        self.extra |= {"seconds": {}, "problems": []}

    def asks_for(self, part: str) -> bool:
        """Whether the arguments ask for this part."""
        return part in self.args.only or not self.args.only

    def until(self, part: str) -> float:
        """Deadline of a part that begins now, by its share of the remaining time."""
        later = [name for name in list(SHARES)[list(SHARES).index(part) :] if self.asks_for(name)]
        now, end = time.perf_counter(), self.start + 60 * self.args.minutes
        return now + (end - now) * SHARES[part] / sum(SHARES[name] for name in later)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Records how long a part takes, and an error that ends it without ending the run; then
        writes all files."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.extra["problems"].append(f"{name} failed: {type(error).__name__}: {error}")
            print(traceback.format_exc(), flush=True)
        self.extra["seconds"][name] = round(time.perf_counter() - start, 1)
        self.write()

    def write(self) -> None:
        """Writes all files. The checkout counts as clean only if it has not changed since the
        start."""
        directory, notes = self.args.results, [str(self.limits), *self.extra["problems"]]
        if machine.revision() != self.facts["revision"]:
            self.facts["tree"] = "changed during the run"
        if directory is None:
            return
        for title, columns in (("peers", None), ("arrivals", arrivals.COLUMNS), ("memory", None)):
            if self.extra.get(title):
                notes.append(report.markdown(self.extra[title], columns))
        options = dict(
            directory=directory, columns=self.columns, notes="\n\n".join(notes), extra=self.extra
        )
        report.write(self.name, self.facts, self.rows, **options)

    def draw(self) -> None:
        """Draws the plots."""
        if self.args.results is not None:
            data = {"facts": self.facts, "rows": self.rows, **self.extra}
            generate_tables.draw_all(data, self.args.results / self.name)


def tune(run: Run, model: Any, shape: Shape, quick: bool) -> GenerateBatch:
    """Finds the settings of `generate_batch` that run as "tuned"."""
    trial = WORKLOADS["W1"].scaled(*((0.1, 0.05) if quick else (0.5, 0.5)))
    peer, tried = tuned(
        model, shape, replace(trial, new_tokens=(4, 4) if quick else (16, 16)), quick
    )
    run.extra["generate_batch"] = {"runs": str(peer), "tried": tried}
    print("generate_batch, tuned on a part of W1's prompts, 16 new tokens:")
    for settings, seconds in tried:
        print(f"  {seconds:8.2f} s  {settings}{'  <- runs below' if settings == str(peer) else ''}")
    print(flush=True)
    return peer


def measure(state: Run, model: Any, workload: Workload, peer: GenerateBatch | None) -> None:
    """Runs all turns of one workload; adds its rows."""
    args, shape = state.args, SHAPES[state.args.model]
    kinds = Kinds(args.int8, args.batch_invariant)
    if args.repeats:
        workload = replace(workload, repeats=args.repeats, fewest=args.repeats)
    systems = systems_for(workload, peer, args.quick, args.peers, kinds)
    floor = 0.0 if args.int8 else floor_of(Cost.of(model, shape), state.limits, workload)
    fewest, until = workload.fewest, state.until(workload.name)
    runs = [run(model, shape, workload, systems, workload.repeats, fewest, until)]
    for process in range(1, workload.processes):
        settings = args.device, shape, workload, kinds, process * workload.repeats
        try:
            runs += runner.in_processes(1, apart, *settings)
        except Exception as error:  # the turns of this process are kept
            state.extra["problems"].append(
                f"{workload.name}, process {process + 1}: {type(error).__name__}: {error}"
            )
    rows = generate_tables.rows_of(workload, runner.joined(runs), floor, len(runs))
    report.show(rows, state.columns, is_first=not state.rows)
    state.rows += rows
    third, blocks = systems.get(SMALL_POOL), None
    if isinstance(third, SmallPool) and third.cache_config:
        blocks = third.cache_config.num_blocks
    memory = kv_memory.of_rows(rows, shape, workload, SMALL_POOL, blocks)
    state.extra["memory"] += map(asdict, memory)


def benchmark(args: argparse.Namespace) -> None:
    """Runs everything that the arguments ask for."""
    shape = SHAPES[args.model]
    workloads = [
        workload for name, workload in WORKLOADS.items() if name in args.only or not args.only
    ]
    if args.quick:
        workloads = [
            replace(workload.scaled(0.125, 0.06), repeats=1, fewest=1, processes=1, target=None)
            for workload in workloads
        ]
    facts, limits = machine.facts(args.device), ceilings.measure(args.device, args.quick)
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    if facts["tree"] != machine.CLEAN:
        print(f"No run of a revision that others can check out: the work tree is {facts['tree']}.")
    model = model_of(shape, args.device, args.int8)
    cost, state = Cost.of(model, shape), Run(args, facts, limits)
    weights = "8-bit weights in bfloat16" if args.int8 else "bfloat16"
    count = f"{(cost.body + cost.head) / 1e6:.1f}M parameters a token"
    print(f"{limits}\n{shape.name}: {count}, {weights}\n", flush=True)
    if args.quick:
        print("A quick run shows that everything runs; its figures and targets say nothing.\n")
    peer: GenerateBatch | None = None
    if not args.no_peers:
        with state.part("tuning of generate_batch"):
            peer = tune(state, model, shape, args.quick)
    print(*(f"{one.name}: {one.title}" for one in workloads), "", sep="\n", flush=True)
    state.extra["workloads"] = {one.name: one.title for one in workloads}
    state.extra |= {"memory": [], "arrivals": []}
    try:
        for workload in workloads:
            with state.part(workload.name):
                measure(state, model, workload, peer)
                state.extra["peers"] = generate_tables.peer_rows(state.rows)
        if state.extra.get("peers"):
            print(f"\n{report.markdown(state.extra['peers'])}\n", flush=True)
        if state.asks_for("arrivals"):
            with state.part("arrivals"):
                peers = {} if peer is None else {"generate_batch, tuned": peer}
                for rows in arrivals.run(model, shape, peers, args.quick):
                    state.extra["arrivals"] += rows
                    state.write()
        with state.part("tokens in float32"):
            state.extra["float32"] = check(args.device, workloads)
            checked = "; ".join(" ".join(line) for line in state.extra["float32"])
            print(f"\nfloat32, tiny: {checked}\n", flush=True)
        if not args.no_memory:
            with state.part("memory"):
                measured = kv_memory.measure(args.device, workloads, args.quick)
                state.extra["memory"] += map(asdict, measured)
        if state.extra["memory"]:
            print(report.markdown(state.extra["memory"]), flush=True)
    finally:
        state.draw()
    for problem in state.extra["problems"]:
        print(problem)
    taken = ", ".join(f"{name} {seconds:.0f}" for name, seconds in state.extra["seconds"].items())
    print(f"\nseconds: {taken}; in all {time.perf_counter() - state.start:.0f}")
    print(f"revision {facts['revision']}, work tree {facts['tree']}")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    with runner.frozen(), quiet():
        benchmark(args)


if __name__ == "__main__":
    main()
