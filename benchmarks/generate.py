"""
Whole calls: plain `generate`, `cache_implementation="paged"`, `PagedEngine` and transformers' `generate_batch`.

    python -m benchmarks.generate --device cpu [--model llama-100m] [--only W1,W3] [--quick] [--json FILE]

Random weights in bfloat16; every system runs in this process, in turns whose order rotates, on fresh prompts in every
repeat. Targets are printed beside the ratios and never asserted. What fails is listed with its reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import hf_paged
from benchmarks import kv_memory, machine
from benchmarks.systems import Engine, Generate, GenerateBatch, NotAvailable, tuned
from benchmarks.workloads import SHAPES, WORKLOADS, Shape, Workload, build, equal_share

PEER_REPEATS = 2  # of transformers' continuous batching, several times slower than the others
PEER_TARGETS = {"generate_batch": 6.0, "generate_batch, tuned": 2.5}  # its time over ours, on W1 to W3
OURS = ("ours", "engine")


@dataclass
class Result:
    """
    Seconds of each repeat and what the tokens were like.

    Args:
        cpu_seconds (`list[float]`): Of all threads; well below `seconds` times threads, the cores were shared.
        problem (`str`): Why there are no figures: "not available" or "failed: ..."; empty if there are.
        tokens (`int`): New tokens of one repeat, checked against what was asked for.
        equal (`list[float]`): Share of tokens equal to plain's, of each repeat.
    """

    workload: str
    system: str
    problem: str = ""
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    equal: list[float] = field(default_factory=list)


def systems_for(workload: Workload, peer: GenerateBatch | None) -> dict[str, Callable[..., list[list[int]]]]:
    """By name; plain comes first, once for each batch size."""
    sizes = workload.batch_sizes or (0,)
    found: dict[str, Any] = {f"plain, batch {size}" if size else "plain": Generate(size) for size in sizes}
    found |= {"ours": Generate(paged=True), "engine": Engine()}
    if peer is not None and workload.name in ("W1", "W2", "W3"):
        found |= {"generate_batch": GenerateBatch(), "generate_batch, tuned": peer}
    return found


def timed(
    system: Callable[..., list[list[int]]], model: Any, shape: Shape, workload: Workload, repeat: int
) -> tuple[tuple[float, float], list[list[int]]]:
    """Seconds, CPU seconds and tokens of one call. Raises if a row has another number of tokens than asked for."""
    batch = workload.batch(repeat, shape.vocab)
    torch.manual_seed(repeat)
    gc.collect()
    _synchronize()
    start = time.perf_counter(), time.process_time()
    rows = system(model, shape, workload, batch)
    _synchronize()
    seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    asked = [length for length in batch.new_tokens for _ in range(workload.rows_per_prompt)]
    if [len(row) for row in rows] != asked:
        raise RuntimeError(f"gave {sum(map(len, rows))} tokens in {len(rows)} rows, not {sum(asked)} in {len(asked)}")
    return seconds, rows


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(
    model: Any,
    shape: Shape,
    workload: Workload,
    peer: GenerateBatch | None,
    repeats: int,
    peer_repeats: int = PEER_REPEATS,
) -> list[Result]:
    """`repeats` turns of every system after a short warm-up of each; `tuned` has warmed the peers up."""
    systems = systems_for(workload, peer)
    results = {name: Result(workload.name, name) for name in systems}
    warm_up = workload.scaled(prompts=0.1, tokens=0.1)
    for repeat in range(-1, repeats):
        tokens: dict[str, list[list[int]]] = {}
        names = list(systems)
        turn = max(0, repeat) % len(names)
        for name in names[turn:] + names[:turn]:
            result = results[name]
            if result.problem or (isinstance(systems[name], GenerateBatch) and not 0 <= repeat < peer_repeats):
                continue
            try:
                seconds, rows = timed(systems[name], model, shape, workload if repeat >= 0 else warm_up, repeat)
            except NotAvailable as error:
                result.problem = f"not available: {error}"
            except Exception as error:  # a peer that fails is a result
                result.problem = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            else:
                if repeat >= 0:
                    tokens[name] = rows
                    result.seconds.append(seconds[0])
                    result.cpu_seconds.append(seconds[1])
                    result.tokens = sum(map(len, rows))
        plain = next((tokens[name] for name in reversed(names) if name.startswith("plain") and name in tokens), None)
        for name, rows in tokens.items():
            if plain is not None and (not workload.sampled or name == "ours"):  # other draws are other samples
                results[name].equal.append(equal_share(plain, rows))
    for system in systems.values():
        if isinstance(system, Engine):
            system.free()
    hf_paged.free(model)
    return list(results.values())


def best_plain(results: Sequence[Result]) -> Result | None:
    """The fastest batch size of plain `generate`."""
    plain = [result for result in results if result.system.startswith("plain") and result.seconds]
    return min(plain, key=lambda result: statistics.median(result.seconds), default=None)


def ratio(slower: Result, faster: Result) -> float:
    """Median over the repeats that both ran of one's time over the other's."""
    return statistics.median(a / b for a, b in zip(slower.seconds, faster.seconds))


def verdict(value: float, target: float | None) -> str:
    return "" if target is None else f"at least {target:g}: {'met' if value >= target else 'not met'}"


HEADER = (
    "| workload | system | seconds, median (min..max) | CPU s | turns | tokens/s | plain / it | target | equal |\n"
    "|---|---|--:|--:|--:|--:|--:|---|--:|"
)


def lines(results: Sequence[Result], target: float | None) -> str:
    """Markdown below `HEADER`, one row for each system of one workload."""
    rows = []
    plain = best_plain(results)
    for result in results:
        if result.problem:
            rows.append(f"| {result.workload} | {result.system} | {result.problem} | | | | | | |")
            continue
        seconds, median, cpu = result.seconds, *map(statistics.median, (result.seconds, result.cpu_seconds))
        speed = ratio(plain, result) if plain else 0.0
        rows.append(
            f"| {result.workload} | {result.system} | {median:.2f} ({min(seconds):.2f}..{max(seconds):.2f}) "
            f"| {cpu:.2f} | {len(seconds)} | {result.tokens / median:.0f} | {speed:.2f} "
            f"| {verdict(speed, target) if result.system in OURS else ''} "
            f"| {f'{statistics.mean(result.equal):.0%}' if result.equal else ''} |"
        )
    return "\n".join(rows)


def peer_table(results: Sequence[Result]) -> str:
    """How much longer transformers' continuous batching takes than each of ours."""
    found = {(result.workload, result.system): result for result in results if result.seconds}
    rows = ["| workload | | time over | | target |", "|---|---|---|--:|---|"]
    for (workload, system), peer in found.items():
        for ours in OURS:
            if system in PEER_TARGETS and (workload, ours) in found:
                value = ratio(peer, found[workload, ours])
                rows.append(
                    f"| {workload} | {system} | {ours} | {value:.2f} | {verdict(value, PEER_TARGETS[system])} |"
                )
    return "\n".join(rows) if len(rows) > 2 else ""


def check(shape: Shape, device: str, workloads: Sequence[Workload]) -> list[tuple[str, str, str]]:
    """Tokens in float32, where they must be plain's: workload, system, and "equal" or what is wrong. Small."""
    model = build(SHAPES["llama-tiny"], device, torch.float32)
    found = []
    for workload in workloads:
        small = workload.scaled(prompts=0.25, tokens=0.125)
        systems: dict[str, Any] = {"ours": Generate(paged=True)}
        if not workload.sampled:  # each request of an engine has a random state of its own
            systems["engine"] = Engine()
        _, expected = timed(Generate(), model, SHAPES["llama-tiny"], small, 0)
        for name, system in systems.items():
            try:
                _, actual = timed(system, model, SHAPES["llama-tiny"], small, 0)
                share = equal_share(expected, actual)
                found.append((workload.name, name, "equal" if expected == actual else f"{share:.1%} equal"))
            except NotAvailable:
                found.append((workload.name, name, "not available"))
            except Exception as error:
                found.append((workload.name, name, f"failed: {type(error).__name__}: {error}"))
    return found


def main() -> None:
    """The command line."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=devices, default="cpu")
    parser.add_argument("--model", choices=list(SHAPES), default="llama-100m")
    parser.add_argument("--only", default="", help="workloads, for example W1,W3; without it all, and the memory")
    parser.add_argument("--no-peers", action="store_true", help="leave out generate_batch")
    parser.add_argument("--no-memory", action="store_true", help="leave out the memory measurements")
    parser.add_argument("--repeats", type=int, help="turns of each system; each workload has its own number without it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tiny model and short texts: only to see that it runs")
    parser.add_argument("--json", type=Path, help="write the machine's facts and all figures there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")

    shape = SHAPES["llama-tiny" if args.quick else args.model]
    workloads = [WORKLOADS[name] for name in args.only.split(",") if name] or list(WORKLOADS.values())
    if args.quick:
        workloads = [replace(workload.scaled(0.25, 0.125), repeats=2) for workload in workloads]
    model: Any = build(shape, args.device, torch.bfloat16)
    facts = machine.facts(args.device)
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{shape.name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, bfloat16\n", flush=True)

    peer: GenerateBatch | None = None
    tried: list[tuple[str, float]] = []
    if not args.no_peers and any(workload.name in ("W1", "W2", "W3") for workload in workloads):
        trial = WORKLOADS["W1"].scaled(*((0.25, 0.125) if args.quick else (0.5, 0.5)))
        peer, tried = tuned(model, shape, replace(trial, new_tokens=(16, 16)), args.quick)
        print("generate_batch, tuned on half of W1's prompts and lengths, 16 new tokens:")
        for settings, seconds in tried:
            print(f"  {seconds:8.2f} s  {settings}{'  <- runs below' if settings == str(peer) else ''}")
        print(flush=True)
    print("\n".join(f"{workload.name}: {workload.title}" for workload in workloads) + f"\n\n{HEADER}", flush=True)
    results: list[Result] = []
    for workload in workloads:
        found = run(model, shape, workload, peer, args.repeats or workload.repeats, 1 if args.quick else PEER_REPEATS)
        print(lines(found, workload.target), flush=True)
        results += found
    print(f"\n{peer_table(results)}\n", flush=True)
    checked = check(shape, args.device, workloads)
    print("float32, tiny: " + "; ".join(f"{workload} {system} {how}" for workload, system, how in checked) + "\n")
    memory = [] if args.no_memory else kv_memory.measure(model, shape, workloads, args.quick)
    for line in memory:
        print(line)
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "machine": facts,
                    "model": asdict(shape),
                    "generate_batch": {"runs": str(peer), "tried": tried},
                    "results": [asdict(result) for result in results],
                    "float32": checked,
                    "memory": [asdict(line) for line in memory],
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
