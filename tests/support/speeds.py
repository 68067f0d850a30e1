"""Every generative architecture of transformers, tiny and random: is `"paged"` ever slower than
plain `generate`?

    python -m tests.support.speeds [--only REGEX] [--rows 1 8] [--json PATH] [--jobs N]

Both calls take turns in alternating order in one process with one thread; a class whose 95%
interval of the paired ratio crosses `paired.NOT_SLOWER` gets more turns until the interval is
narrow. Tiny models compute next to nothing, so a ratio here compares the work around the forwards.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import hf_paged
from benchmarks import machine, paired, report
from tests.support import tools
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import make_inputs
from tests.support.architecture_media import join, media_rows
from tests.support.architectures import ONLY, list_architectures
from tests.support.tools import describe
from tests.support.workers import Lost

Inputs = dict[str, Any]

NEW_TOKENS = 48
OPTIONS = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
WARM_UPS = 3  # the engine checks a model's forwards, then records a step
TURNS = paired.FEWEST
MOST_TURNS = 60
HALF_WIDTH = 0.03
SECONDS_PER_CLASS = 300.0


@dataclasses.dataclass
class Speed:
    """Seconds of a class's calls with a number of rows, and how the paged one was served."""

    name: str
    rows: int
    medium: str = ""
    plain: float | None = None
    paged: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    turns: int = 0
    road: str = ""
    replayed: int = 0  # decode steps
    reason: str = ""  # of the route, or why nothing was measured

    @property
    def is_slower(self) -> bool:
        return self.interval is not None and self.interval[0] > paired.NOT_SLOWER


def inputs_of(model: PreTrainedModel, num_rows: int) -> tuple[str, Inputs]:
    """The medium and the inputs of a call with this many rows: of the model's first medium, text if
    it has none."""
    (medium, pair), *_ = make_inputs(model).items()
    if num_rows > 1:
        return medium, join([pair] * (num_rows // 2))
    if rows := media_rows(model):
        medium, (first, *_) = next(iter(rows.items()))
        return medium, first
    halves = {}
    for name, x in pair.items():
        halves[name] = x[: len(x) // 2] if isinstance(x, torch.Tensor) else x
    return medium, halves


def generate(model: PreTrainedModel, inputs: Inputs, is_paged: bool) -> float:
    """The seconds of a call."""
    arguments = copy.deepcopy(inputs)
    if is_paged:
        arguments["cache_implementation"] = "paged"
    start = time.perf_counter()
    model.generate(**arguments, **OPTIONS)
    return time.perf_counter() - start


def measure(job: tuple[str, int]) -> Speed:
    """Measures a class with a number of rows; whatever fails is the reason of the result."""
    name, num_rows = job
    speed = Speed(name, num_rows)
    with tools.quietly():
        try:
            _measure(speed)
        except Exception as error:
            speed.reason = describe(error)
    return speed


def _measure(speed: Speed) -> None:
    model = tiny_model(getattr(transformers, speed.name))
    model.generation_config.eos_token_id = None
    speed.medium, inputs = inputs_of(model, speed.rows)
    arms = {is_paged: partial(generate, model, inputs, is_paged) for is_paged in (False, True)}
    for _ in range(WARM_UPS):
        for call in arms.values():
            call()
    route = hf_paged.last_route(model)
    if route is not None:
        speed.road = route.road
        speed.replayed = route.num_captured_steps
        speed.reason = route.reason
    gc.collect()
    gc.freeze()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    while not _is_decided(seconds):
        order = (False, True) if len(seconds[True]) % 2 else (True, False)
        for is_paged in order:
            seconds[is_paged].append(arms[is_paged]())
    gc.unfreeze()
    estimate = paired.estimate(paired.ratios(seconds[True], seconds[False]))
    speed.plain, speed.paged = (statistics.median(seconds[arm]) for arm in (False, True))
    speed.ratio = round(estimate.value, 3)
    speed.interval = round(estimate.low, 3), round(estimate.high, 3)
    speed.turns = len(seconds[True])


def _is_decided(seconds: dict[bool, Sequence[float]]) -> bool:
    """Whether the interval lies on one side of `paired.NOT_SLOWER`, or is narrow."""
    ratios = paired.ratios(seconds[True], seconds[False])
    if len(ratios) < TURNS:
        return False
    low, high = paired.interval(ratios)
    is_narrow = high - low <= 2 * HALF_WIDTH and len(ratios) >= paired.ENOUGH
    is_clear = high < paired.NOT_SLOWER or low > paired.NOT_SLOWER
    return is_clear or is_narrow or len(ratios) >= MOST_TURNS


def sweep(names: Sequence[str], rows: Sequence[int], jobs: int) -> list[Speed]:
    """Measures each class with each number of rows; a process that dies loses its current one."""
    pairs = [*itertools.product(names, rows)]
    found = dict(tools.swept(measure, pairs, jobs, SECONDS_PER_CLASS))
    lost = {x: Speed(*x, reason=y.reason) for x, y in found.items() if isinstance(y, Lost)}
    return [(found | lost)[pair] for pair in pairs]


def table(speeds: Sequence[Speed]) -> str:
    """The results in Markdown, the slowest first."""
    rows = []
    for speed in sorted(speeds, key=lambda speed: -(speed.ratio or 0)):
        row = dataclasses.asdict(speed)
        if speed.interval is not None:
            row["interval"] = "{:.3f} to {:.3f}".format(*speed.interval)
        rows.append(row)
    return report.markdown(rows)


def summary(speeds: Sequence[Speed]) -> str:
    """Counts by number of rows."""
    lines = []
    for num_rows in sorted({speed.rows for speed in speeds}):
        measured = [speed for speed in speeds if speed.rows == num_rows and speed.ratio is not None]
        if not measured:
            continue
        ratio = statistics.median(speed.ratio or 0 for speed in measured)
        lines.append(
            f"- rows {num_rows}: {len(measured)} classes measured,"
            f" {sum(speed.is_slower for speed in measured)} slower than {paired.NOT_SLOWER:g} of"
            f" plain, {sum(speed.replayed > 0 for speed in measured)} recorded,"
            f" {sum(speed.road == 'engine' for speed in measured)} on the engine; median ratio"
            f" {ratio:.3f}"
        )
    return "\n".join(lines)


def main() -> int:
    rows = dict(type=int, nargs="+", default=[1, 8], help="1, or an even number")
    options = tools.parser(__doc__, jobs=1, only=ONLY, rows=rows, json=Path).parse_args()
    names = list_architectures(pattern=options.only)
    facts = machine.facts()
    speeds = sweep(names, options.rows, options.jobs)
    print(table(speeds), summary(speeds), sep="\n\n")
    if options.json:
        head = {"command": report.command_line(), "facts": facts}
        tools.write_results(options.json, head, speeds)
    return int(any(speed.is_slower for speed in speeds))


if __name__ == "__main__":
    raise SystemExit(main())
