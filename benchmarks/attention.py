"""The paged backends against contiguous K/V and against other installed kernels. Decode, chunks
(queries over a cached context) and prefill, a layer. As in a model, each call reads the K/V of the
next layer, so no processor cache holds them. "contiguous sdpa" is SDPA over contiguous keys and
values at its best, the ideal without paging. Each contender's output is compared with the reference
before timing; contenders take turns. "ours: int8" attends to the same K/V stored as int8. On a GPU
each contender's calls are captured in a graph where possible and timed by events. A peer that is
missing, does not apply or fails is listed with the reason."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks import attention_data, ceilings, runner
from benchmarks.attention_data import DTYPES, Setting
from benchmarks.attention_peers import CONTIGUOUS, INT8, PEERS, Attention, expected
from benchmarks.ceilings import Ceilings
from benchmarks.runner import Case, Turn, option

TOLERANCES = {"bf16": 2e-2, "fp32": 1e-4}
LIKE_CONTIGUOUS, INT8_FASTER = 1 / 1.02, 1 / 0.8
"""Targets: of ours for chunks and prompts, of int8 for decodes."""
PHASES = ("decode", "chunk", "prefill")


def prepared(name: str, data: attention_data.Data) -> Attention:
    """The contender's function. Raises `NotAvailable` if it does not run, and `ArithmeticError`
    unless its output of layer 0 matches the reference within the tolerance of the dtype."""
    function = PEERS[name](data)
    actual, right = function(0), expected(name, data)
    if actual.shape != right.shape:
        raise ArithmeticError(f"shape {tuple(actual.shape)}, not {tuple(right.shape)}")
    difference = (actual.float() - right.float()).abs().max().item()
    if not difference <= TOLERANCES[data.setting.dtype]:
        raise ArithmeticError(f"differs from the reference by {difference:.3g}")
    return function


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
    if torch.device(device).type != "cuda":
        return runner.seconds_of(work)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000


def arm(name: str, data: attention_data.Data, limits: Ceilings, seconds: float) -> runner.Arm:
    """Seconds of a call, which is prepared in the warm-up; a turn loops over the layers for about
    `seconds`. Shares relate to the ceilings."""
    setting, count, is_graph, works = data.setting, 0, False, list[Callable[[], None]]()
    is_cuda = torch.device(setting.device).type == "cuda"
    num_bytes = setting.quantized_bytes if name == INT8 else setting.num_bytes
    flops = limits.flops[str(DTYPES[setting.dtype])[6:]]

    @torch.no_grad()
    def work(turn: int) -> Turn:
        nonlocal count, is_graph
        if turn < 0:
            function, count = prepared(name, data), 2

            def walk() -> None:
                for call in range(count):
                    function(call % data.layers)

            ceilings.synchronize(setting.device)
            estimate = seconds / elapsed(walk, setting.device)
            count = max(1, min(data.layers, round(2 * estimate)))
            replay = record(walk, setting.device) if is_cuda else None
            works[:], is_graph = [replay or walk], replay is not None
            return Turn(0.0)
        taken = elapsed(works[0], setting.device) / count
        figures: dict[str, Any] = {
            "GB/s": num_bytes / taken / 1e9,
            "of bandwidth, %": 100 * num_bytes / taken / limits.bandwidth,
            "TFLOP/s": setting.flops / taken / 1e12,
            "of matmul, %": 100 * setting.flops / taken / flops,
        }
        if is_cuda:
            figures["timed as"] = "a graph" if is_graph else "calls"
        return Turn(taken, figures=figures)

    return work


def case_of(
    setting: Setting, names: Iterable[str], limits: Ceilings, quick: bool, seconds: float
) -> Case:
    """All contenders on the same K/V, those that do not run with the reason."""
    with torch.no_grad():
        data = attention_data.make(setting, quick)
    arms = {name: runner.guarded(arm(name, data, limits, seconds)) for name in names}
    is_decode = setting.case.phase == "decode"
    over: dict[str, Any] = {CONTIGUOUS: {} if is_decode else {"ours": LIKE_CONTIGUOUS}}
    over["ours"] = {INT8: INT8_FASTER} if is_decode else {}
    return Case(setting.title, arms, over)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    args.ceilings = ceilings.measure(args.device, args.quick)
    names = [name for name in PEERS if re.fullmatch(args.contenders, name)]
    for setting in attention_data.settings(args.device, args.quick):
        if setting.case.phase in args.phase and re.search(args.only, setting.title):
            yield case_of(setting, names, args.ceilings, args.quick, args.seconds)


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="Attention alone",
    said=lambda args: f"M{str(args.ceilings)[1:]}.",
    options={
        "--device": runner.DEVICE,
        "--phase": option(choices=PHASES, nargs="+", default=PHASES),
        "--repeats": option("turns of each contender", type=int, default=9, dest="turns"),
        "--contenders": option("regular expression on their names", default=".*"),
    },
    only='regular expression on "heads phase case block dtype"',
    fixed={"seconds": 0.1},
    quick={"turns": 2, "seconds": 0.002},
    is_wrong=runner.fails(CONTIGUOUS, "ours"),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
