"""
Attention alone: the paged backends against contiguous K/V and against other installed kernels.

    python -m benchmarks.attention --device cpu [--phase decode] [--only REGEX] [--quick]
                                   [--results DIRECTORY]

Decode, chunks (queries over a cached context) and prefill. As in a model, each call reads the K/V
of the next layer, so no processor cache holds them. Each contender's output is compared with the
reference before timing; contenders take turns. "ours: int8" attends to the same K/V stored as int8;
"int8 / ours" is its time over that of the setting's dtype. On a GPU each contender's calls are
captured in a graph where possible and timed by events. A peer that is missing, does not apply or
fails is listed with the reason.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import attention_data, ceilings, machine, paired, report, runner
from benchmarks.attention_data import DTYPES, Data, Setting
from benchmarks.attention_peers import CONTIGUOUS, INT8, Attention, Peer, Skipped, peers
from benchmarks.ceilings import Ceilings
from benchmarks.runner import option
from benchmarks.systems import quiet
from hf_paged.attention.backends import reference

TOLERANCES = {"bf16": 2e-2, "fp32": 1e-4}
COLUMNS = {
    "heads": "heads of",
    "phase": "phase",
    "case": "rows x tokens",
    "block_size": "block",
    "dtype": "dtype",
    "contender": "contender",
    "time": "µs a layer, median (min..max)",
    "over_contiguous": "it / contiguous",
    "ours_over": "ours / it",
    "over_ours": "int8 / ours",
    "gb_per_s": "GB/s",
    "bandwidth_share": "of bandwidth",
    "tflop_per_s": "TFLOP/s",
    "matmul_share": "of matmul",
}


def check(function: Attention, expected: torch.Tensor, dtype: str) -> None:
    """Raises `ArithmeticError` unless the output of layer 0 matches the reference within the
    tolerance of the dtype."""
    actual = function(0)
    if actual.shape != expected.shape:
        raise ArithmeticError(f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
    difference = (actual.float() - expected.float()).abs().max().item()
    if not difference <= TOLERANCES[dtype]:
        raise ArithmeticError(f"differs from the reference by {difference:.3g}")


def admit(contenders: Sequence[Peer], data: Data) -> tuple[dict[str, Attention], dict[str, str]]:
    """Functions that match the reference, and by name the reasons why the others were left out."""
    setting = data.setting
    expected = data.attend(reference, 0)
    functions, problems = {}, {}
    for peer in contenders:
        problem = peer.missing(setting)
        if not problem:
            try:
                function = peer.prepare(data)
                own = peer.expected(data)
                check(function, expected if own is None else own, setting.dtype)
                functions[peer.name] = function
                continue
            except Skipped as error:
                problem = f"skipped: {error}"
            except Exception as error:  # a failing peer is a result
                problem = report.failed(error)[:160]
        problems[peer.name] = problem
    return functions, problems


def record(work: Callable[[], None], device: str) -> Callable[[], None] | None:
    """On a GPU, returns the replay of a graph of `work`, to time kernels and not Python; `None` if
    capture fails."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except Exception:  # for instance, `work` waits for the device
        ceilings.synchronize(device)
        return None
    return graph.replay


def elapsed(work: Callable[[], None], device: str) -> float:
    """Seconds that `work` takes, by device events where available."""
    if torch.device(device).type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1000
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(
    functions: dict[str, Attention], layers: int, device: str, repeats: int, seconds: float
) -> tuple[dict[str, list[float]], set[str]]:
    """Seconds per call, in turns of alternating order; each turn loops over the layers for about
    `seconds`, estimated from the warm-up. Also the names of the contenders captured in a graph, on
    a GPU."""
    names = list(functions)
    calls: dict[str, int] = {}
    works: dict[str, Callable[[], None]] = {}
    recorded: set[str] = set()

    def walk(name: str, count: int) -> Callable[[], None]:
        function = functions[name]

        def work() -> None:
            for call in range(count):
                function(call % layers)

        return work

    for name in names:
        ceilings.synchronize(device)
        calls[name] = max(1, min(layers, round(seconds / elapsed(walk(name, 2), device) * 2)))
        works[name] = walk(name, calls[name])
        if (
            torch.device(device).type == "cuda"
            and (replay := record(works[name], device)) is not None
        ):
            works[name] = replay
            recorded.add(name)
    arms = {
        name: (lambda _, name=name: elapsed(works[name], device) / calls[name]) for name in names
    }
    return runner.take_turns(arms, repeats), recorded


def rows_of(
    setting: Setting, times: dict[str, list[float]], problems: dict[str, str], limits: Ceilings
) -> list[dict[str, Any]]:
    """Rows of the table, in the order of the contenders; shares relate to the ceilings measured in
    this run."""
    common = {
        "heads": setting.shape.name,
        "phase": setting.case.phase,
        "case": setting.case.name,
        "block_size": setting.block_size,
        "dtype": setting.dtype,
    }
    flops = limits.flops[str(DTYPES[setting.dtype])[6:]]
    found = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        num_bytes = setting.quantized_bytes if name == INT8 else setting.num_bytes
        row = {
            **common,
            "contender": name,
            "us": [1e6 * value for value in seconds],
            "time": f"{1e6 * median:.0f} ({1e6 * min(seconds):.0f}..{1e6 * max(seconds):.0f})",
            "gb_per_s": num_bytes / median / 1e9,
            "tflop_per_s": setting.flops / median / 1e12,
            "bandwidth_share": f"{num_bytes / median / limits.bandwidth:.0%}",
            "matmul_share": f"{setting.flops / median / flops:.0%}",
        }
        pairs = {"over_contiguous": (name, CONTIGUOUS), "ours_over": ("ours", name)}
        pairs |= {"over_ours": (name, "ours")} if name == INT8 else {}
        for key, (one, other) in pairs.items():
            if one in times and other in times:
                row[key] = statistics.median(paired.ratios(times[one], times[other]))
        found.append(row)
    return found + [
        {**common, "contender": name, "time": problem} for name, problem in problems.items()
    ]


def run(
    settings: Sequence[Setting],
    contenders: Sequence[Peer],
    limits: Ceilings,
    args: Any,
    facts: dict[str, Any],
) -> None:
    """Prints and writes each setting's rows when they are ready."""
    rows: list[dict[str, Any]] = []
    part = args.phase or (["part"] if args.only else [])
    name = "-".join(["attention", args.device, *part])
    is_gpu = torch.device(args.device).type == "cuda"
    columns = {**COLUMNS, "timed": "timed as"} if is_gpu else COLUMNS
    for setting in settings:
        with torch.no_grad():
            data = attention_data.make(setting, args.quick)
            functions, problems = admit(contenders, data)
            seconds = 0.002 if args.quick else 0.1
            times, recorded = measure(functions, data.layers, setting.device, args.repeats, seconds)
        found = rows_of(setting, times, problems, limits)
        for row in found if is_gpu else ():
            is_recorded = row["contender"] in recorded
            row["timed"] = None
            if "us" in row:
                row["timed"] = "a graph" if is_recorded else "calls"
        report.show(found, columns, is_first=not rows)
        rows += found
        if args.results:
            report.write(
                name, facts, rows, directory=args.results, columns=columns, notes=str(limits)
            )


PHASES = ("decode", "chunk", "prefill")

OPTIONS = {
    "--device": runner.DEVICE,
    "--phase": option(choices=PHASES, nargs="+"),
    "--only": option('regular expression on "heads phase case block dtype"', default=""),
    "--repeats": option("turns of each contender (9; 2 with --quick)", type=int),
    "--threads": runner.THREADS,
    "--flex-seconds": option("compiling flex_attention; 0: leave it out", type=float, default=30.0),
    "--quick": runner.QUICK,
    "--results": runner.RESULTS,
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = runner.parser_of(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    args.repeats = args.repeats or (2 if args.quick else 9)
    args.results = args.results or (None if args.quick else report.RESULTS)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)

    settings = [
        setting
        for setting in attention_data.settings(args.device, args.quick)
        if setting.case.phase in (args.phase or PHASES) and re.search(args.only, setting.title)
    ]
    facts = machine.facts(args.device)
    limits = ceilings.measure(args.device, args.quick)
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{limits}\n", flush=True)
    with quiet():
        run(settings, peers(args.quick, args.flex_seconds), limits, args, facts)


if __name__ == "__main__":
    main()
