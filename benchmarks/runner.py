"""The runner of the benchmarks: command line, arms that take turns, processes, statistics, tables,
JSON files.

A benchmark is a function of its options that yields cases: arms that take turns on the same inputs,
and what they are compared with. The rest is the same for all.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from benchmarks import machine, paired, report
from benchmarks.models import SHAPES
from benchmarks.systems import quiet
from benchmarks.workloads import equal_share

Data = dict[str, Any]
Name = TypeVar("Name")
Result = TypeVar("Result")


def option(said: str = "", **keywords: Any) -> Data:
    """Keywords of `add_argument`; `said`: the help."""
    return {**keywords, "help": said}


def flag(said: str) -> Data:
    """An option without a value."""
    return option(said, action="store_true")


MODEL = option("shape (%(default)s)", choices=list(SHAPES), default="llama-100m")
DTYPE = option(choices=["bfloat16", "float32"], default="bfloat16")
DEVICE = option(choices=machine.devices(), default="cpu")
THREADS = option("of PyTorch; as many as it takes without it", type=int)
QUICK = flag("small: only shows that it runs")
RESULTS = option("directory for the files (benchmarks/results; none with --quick)", type=Path)
"""Options that several benchmarks have."""


def parser_of(
    about: str | None, options: Mapping[str, Data], **keywords: Any
) -> argparse.ArgumentParser:
    """
    A parser.

    Args:
        about (`str`): The module's docstring, which is its help.
        options (`Mapping[str, dict]`): Keywords of `add_argument` for each option.
    """
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=layout, **keywords)
    for flag, keywords in options.items():
        parser.add_argument(flag, **keywords)
    return parser


def parts(parser: argparse.ArgumentParser, asked: str, known: Iterable[str]) -> list[str]:
    """The names in `asked`, by commas; ends the process if one is not known."""
    names = [name for name in asked.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        parser.error(
            f"argument --only: invalid choice: {unknown[0]!r} (choose from {', '.join(known)})"
        )
    return names


class Turn(NamedTuple):
    """
    One turn of an arm.

    Args:
        seconds (`float`): What is compared; 0 where no time is.
        tokens: Compared with those of the case's first arm in the same turn; `None`: not compared.
        figures (`dict`): Further columns: the median over the turns of a number, the last text.
    """

    seconds: float
    tokens: Any = None
    figures: Mapping[str, Any] = {}


class Case(NamedTuple):
    """
    Arms that take turns on the same inputs.

    Args:
        arms (`dict[str, Callable]`): By system, a function of the turn's number, which is below 0
            in warm-up turns; it returns a [`Turn`] or the seconds.
        over (`dict[str, dict]`): By the system that the others are compared with, the least that
            its time over another's should be.
        turns (`int`, *optional*): Instead of the benchmark's.
        figures (`dict`): Further columns, the same for all arms.
    """

    name: str
    arms: Mapping[str, Callable[[int], Turn | float]]
    over: Mapping[str, Mapping[str, float]] = {}
    turns: int | None = None
    figures: Mapping[str, Any] = {}


def rows_of(
    cases: Callable[[argparse.Namespace], Iterable[Case]], args: argparse.Namespace
) -> list[Data]:
    """Rows of this process: one for each arm of each case."""
    rows = []
    with quiet(), frozen():
        for case in cases(args):
            count = args.turns if case.turns is None else case.turns
            warm_ups = getattr(args, "warm_ups", 1)
            found = take_turns(case.arms, count, warm_ups, case.name)
            turns = {
                name: [turn if isinstance(turn, Turn) else Turn(turn) for turn in mine]
                for name, mine in found.items()
            }
            first = next(iter(turns.values()))
            for name, mine in turns.items():
                row: Data = {"case": case.name, "system": name}
                row["seconds"] = [turn.seconds for turn in mine]
                row["over"] = {
                    base: targets.get(name) for base, targets in case.over.items() if base != name
                }
                if mine[0].tokens is not None:
                    shares = [share_of(a.tokens, b.tokens) for a, b in zip(first, mine)]
                    row["equal"] = statistics.mean(shares)
                figures = joined({key: [one] for key, one in turn.figures.items()} for turn in mine)
                middle = {key: _middle(values) for key, values in figures.items()}
                rows.append(row | {"figures": {**case.figures, **middle}})
    return rows


def share_of(expected: Any, actual: Any) -> float:
    """Share of equal tokens of lists of rows; of anything else whether it is equal."""
    if expected == actual:
        return 1.0
    is_tokens = isinstance(actual, list) and all(isinstance(row, list) for row in actual)
    return min(0.999, equal_share(expected, actual)) if is_tokens else 0.0


def _middle(values: Sequence[Any]) -> Any:
    is_number = all(isinstance(one, int | float) for one in values)
    return statistics.median(values) if is_number else values[-1]


def pooled(runs: Iterable[Mapping[str, Any]]) -> list[Data]:
    """Rows that combine the turns of several processes or files: those of one case and system."""
    rows = []
    for parts in grouped(runs, "case", "system").values():
        row = {**parts[0], "processes": sum(part.get("processes", 1) for part in parts)}
        for key in ("seconds", "ratios"):
            if key in row:
                row[key] = [one for part in parts for one in part[key]]
        if "turns" in row:
            row["turns"] = sum(part["turns"] for part in parts)
        if equal := [part["equal"] for part in parts if part.get("equal") is not None]:
            row["equal"] = statistics.mean(equal)
        figures = joined({key: [one] for key, one in part["figures"].items()} for part in parts)
        row["figures"] = {key: _middle(values) for key, values in figures.items()}
        rows.append(row)
    return rows


def ratio_of(base: Data, row: Data) -> paired.Estimate:
    """The base's time over a row's, within turns. Results from before 2026-11-26 have only the
    estimate, or its ratios."""
    if "ratio" in row:
        return paired.Estimate(row["ratio"], *row["interval"])
    return paired.estimate(row.get("ratios") or paired.ratios(base["seconds"], row["seconds"]))


def table(rows: Sequence[Data]) -> str:
    """Medians of the turns, ratios with their 95% intervals, and what else the rows have. A target
    is met where the interval reaches it."""
    by_name = {(row["case"], row["system"]): row for row in rows}
    lines = []
    for row in rows:
        seconds = row["seconds"]
        line = {"case": row["case"], "system": row["system"]}
        if turns := row.get("turns", len(seconds)):
            line["turns, processes"] = f"{turns}, {row.get('processes', 1)}"
        if any(seconds):
            low, high = min(seconds), max(seconds)
            spread = f" ({report.text(low)} to {report.text(high)})" if len(seconds) > 2 else ""
            line["s"] = report.text(float(statistics.median(seconds))) + spread
        for base, target in row["over"].items():
            if (row["case"], base) not in by_name:
                continue
            ratio = ratio_of(by_name[row["case"], base], row)
            met = "" if target is None else f", at least {target:.3g}: "
            met += "" if target is None else paired.said(ratio.high >= target)
            line[f"{base} / it"] = ratio.text(2) + met
        if row.get("equal") is not None:
            share = row["equal"]
            line["tokens"] = "equal" if share == 1 else f"{math.floor(100 * share)}% equal"
        lines.append(line | row["figures"])
    last = ["tokens", *dict.fromkeys(key for row in rows for key in row["figures"])]
    titles = list(dict.fromkeys(key for line in lines for key in line))
    titles.sort(key=lambda key: last.index(key) + 1 if key in last else 0)
    return report.markdown(lines, {title: title for title in titles}, right=("s",))


@dataclass(frozen=True)
class Benchmark:
    """
    A benchmark as a command.

    Args:
        about (`str`): Help of the command.
        cases (`Callable`, *optional*): From the options, the cases, one after the other; what
            follows a `yield` runs when its turns are over. All of it runs in each process.
        measure (`Callable`, *optional*): Instead of `cases`: from the options, the entries of the
            JSON file, `rows` among them.
        show (`Callable`, *optional*): Instead of the table of the rows: from the content of JSON
            files, those of several processes that ran one revision, the paragraphs to print.
        title (`str`): Of its section in the documentation.
        results (`Sequence`): Committed JSON files that the section shows, by their names; those of
            one table together.
        said (`Callable`, *optional*): From the options, a line about the sizes.
        notes (`Callable`, *optional*): From the rows, paragraphs below the table.
        options (`dict[str, dict]`): Options besides those below, and their `add_argument` keywords.
        fixed, quick (`dict`): Settings that are no options, and all that `--quick` changes; an
            option on the command line comes before both. `processes` run one after the other; with
            0 the turns are this process's. `warm_ups` turns come first.
        turns (`int`, *optional*): Default of `--turns`; `None`: no such option.
        only (`str`): Help of `--only`; empty: no such option.
        known (`Iterable[str]`): Names that `--only` takes, by commas; empty: it takes any text.
        is_exact (`bool`): Whether the command fails where tokens differ.
        is_wrong (`Callable`, *optional*): Whether the entries fail another check: the exit status
            is then 1.
        keeps (`bool`): Whether the JSON file keeps the cases of earlier runs that this one has not.
    """

    about: str
    cases: Callable[[argparse.Namespace], Iterable[Case]] | None = None
    measure: Callable[[argparse.Namespace], Data] | None = None
    show: Callable[[Sequence[Data]], Iterable[str]] | None = None
    title: str = ""
    results: Sequence[Sequence[str]] = ()
    said: Callable[[argparse.Namespace], str] | None = None
    notes: Callable[[Sequence[Data]], Iterable[str]] | None = None
    options: Mapping[str, Data] = field(default_factory=dict)
    fixed: Data = field(default_factory=dict)
    quick: Data = field(default_factory=dict)
    turns: int | None = None
    only: str = ""
    known: Iterable[str] = ()
    is_exact: bool = False
    is_wrong: Callable[[Data], bool] | None = None
    keeps: bool = False

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        options = dict(self.options)
        if self.turns is not None:
            said = "of each contender, the order alternates (%(default)s)"
            options["--turns"] = option(said, type=int, default=self.turns)
        if self.only:
            options["--only"] = option(self.only, default=",".join(self.known))
        options["--json"] = option("also write the results to this file", type=Path)
        parser = parser_of(self.about, {**options, "--quick": QUICK})
        parser.set_defaults(**self.fixed)
        if parser.parse_args(argv).quick:
            parser.set_defaults(**self.quick)
        args = parser.parse_args(argv)
        if self.known:
            args.only = parts(parser, args.only, self.known)
        return args

    def run(self, args: argparse.Namespace) -> Data:
        """The entries of the JSON file."""
        if self.measure is not None:
            return self.measure(args)
        assert self.cases is not None
        found = in_processes(getattr(args, "processes", 0), rows_of, self.cases, args)
        said = {} if self.said is None else {"title": self.said(args)}
        return said | {"rows": pooled({"rows": rows} for rows in found)}

    def section(self) -> str:
        """The documentation of the committed results: what the docstring says of the benchmark, and
        what the command prints."""
        paragraphs = self.about.strip().split("\n\n")
        said = [report.flow(one) for one in paragraphs if not one.startswith("    ")]
        parts = [f"**{self.title}**: {' '.join(said)}"]
        for names in self.results:
            files = [report.result(name) for name in names]
            for group in [[run] for run in files[0]["runs"]] if "runs" in files[0] else [files]:
                parts += self.shown(group)
        return "\n\n".join(parts)

    def shown(self, runs: Sequence[Data]) -> list[str]:
        """The machine and the tables of one group of results."""
        module = (self.measure or self.cases).__module__  # type: ignore[union-attr]
        facts, others = runs[0]["facts"], [run["facts"]["revision"] for run in runs]
        more = "".join(f", {one}" for one in dict.fromkeys(others) if one != facts["revision"])
        command = f"`python -m {module}`, {report.machine_of(facts)}"
        command += f"; also revision{more.removeprefix(',')}" if more else ""
        return [f"{command}:", *filter(None, self.paragraphs(runs))]

    def paragraphs(self, runs: Sequence[Data]) -> list[str]:
        """What the command prints."""
        if self.show is not None:
            return list(self.show(runs))
        rows = pooled(runs)
        notes = [] if self.notes is None else self.notes(rows)
        return [runs[0].get("title", ""), table(rows), *notes]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs the command; returns 1 if the check fails."""
        args = self.parse(argv)
        if getattr(args, "threads", None):
            torch.set_num_threads(args.threads)
        facts = machine.facts(getattr(args, "device", "cpu"))
        with quiet():
            data = {"command": report.command_line(), "facts": facts, **self.run(args)}
        print(*filter(None, self.paragraphs([data])), sep="\n\n")
        if args.json:
            content = data
            if self.keeps:
                old = report.read(args.json).get("runs", []) if args.json.exists() else []
                content = {"runs": added(old, data)}
            report.replace_file(args.json, json.dumps(content, indent=1) + "\n")
        differs = any(row.get("equal") not in (None, 1.0) for row in data["rows"])
        return int((self.is_exact and differs) or bool(self.is_wrong and self.is_wrong(data)))


def added(runs: Sequence[Data], run: Data) -> list[Data]:
    """The runs plus `run`, whose cases replace older ones: running all of them takes hours."""
    new = {row["case"] for row in run["rows"]}
    kept = [{**old, "rows": [row for row in old["rows"] if row["case"] not in new]} for old in runs]
    return [old for old in kept if old["rows"]] + [run]


def in_order(names: Iterable[Name], turn: int) -> list[Name]:
    """The names in the order of a turn: every other turn goes backwards."""
    return list(names)[::-1] if turn % 2 else list(names)


def take_turns(
    arms: Mapping[Name, Callable[[int], Result]],
    turns: int,
    warm_ups: int = 0,
    title: str = "",
    *,
    first: int = 0,
    fewest: int | None = None,
    until: float = math.inf,
    is_done: Callable[[Name, Mapping[Name, Sequence[Result]]], bool] = lambda name, found: False,
) -> dict[Name, list[Result]]:
    """
    What each arm returns for the numbers of the turns, in alternating order. Warm-up turns have
    numbers below 0, and their results are left out.

    Args:
        first (`int`): Number of the first turn.
        fewest (`int`, *optional*): After so many turns none begins that may end after the moment
            `until` of `time.perf_counter`; `None`: all turns run.
        is_done (`Callable`): From an arm's name and all results so far, whether it runs no further.
    """
    found: dict[Name, list[Result]] = {name: [] for name in arms}
    longest = 0.0
    for turn in tqdm(range(first - warm_ups, first + turns), desc=title, disable=None):
        start, count = time.perf_counter(), turn - first
        if count >= (turns if fewest is None else fewest) and start + longest > until:
            break
        for name in in_order(arms, turn):
            if is_done(name, found):
                continue
            result = arms[name](count if count < 0 else turn)
            if count >= 0:
                found[name].append(result)
        if count > 0:
            longest = max(longest, time.perf_counter() - start)
    return found


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def timed(works: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[int], float]]:
    """Arms that return the seconds of a call."""

    def arm(work: Callable[[], Any]) -> Callable[[int], float]:
        return lambda turn: seconds_of(work)

    return {name: arm(work) for name, work in works.items()}


def compared(works: Mapping[str, Callable[[int], Any]]) -> dict[str, Callable[[int], Turn]]:
    """Arms that return the seconds of a call and, as its tokens, what it returns."""

    def arm(work: Callable[[int], Any], turn: int) -> Turn:
        start = time.perf_counter()
        tokens = work(turn)
        return Turn(time.perf_counter() - start, tokens)

    return {name: functools.partial(arm, work) for name, work in works.items()}


def in_processes(processes: int, work: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Results of `work(*arguments)` in new processes, one after the other, which take as many
    threads as this one; with 0 in this one."""
    found = [] if processes else [work(*arguments)]
    for _ in range(processes):
        context, threads = get_context("spawn"), torch.get_num_threads()
        with ProcessPoolExecutor(1, context, torch.set_num_threads, (threads,)) as process:
            found.append(process.submit(work, *arguments).result())
    return found


def joined(runs: Iterable[Mapping[str, Sequence[Result]]]) -> dict[str, list[Result]]:
    """The turns of several processes as one list for each arm."""
    found: dict[str, list[Result]] = {}
    for run in runs:
        for name, values in run.items():
            found.setdefault(name, []).extend(values)
    return found


def grouped(runs: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[Data]]:
    """The rows of several JSON files that have the same values of `keys`."""
    found: dict[tuple[Any, ...], list[Data]] = {}
    for run in runs:
        for row in run["rows"]:
            found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Exempts existing objects from the garbage collections that precede turns."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
