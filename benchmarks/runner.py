"""The runner of the benchmarks: command line, arms that take turns, processes, statistics, tables,
JSON files. A benchmark is a function of its options that yields cases: arms that take turns on the
same inputs, and what they are compared with. The rest is the same for all."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from benchmarks import machine, report, tables
from benchmarks.models import SHAPES
from benchmarks.systems import NotAvailable, quiet
from benchmarks.workloads import equal_share

Data = tables.Data
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
MINUTES = option("to plan with; then each case runs a single turn", type=float)
QUICK = flag("small: only shows that it runs")
"""Options that several benchmarks have."""


def parser_of(
    about: str | None, options: Mapping[str, Data], **keywords: Any
) -> argparse.ArgumentParser:
    """A parser. `about`: the module's docstring, which is its help. `options`: keywords of
    `add_argument` for each option."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=layout, **keywords)
    for flag, keywords in options.items():
        parser.add_argument(flag, **keywords)
    return parser


def parts(parser: argparse.ArgumentParser, asked: str, known: Iterable[str]) -> list[str]:
    """The names in `asked`, by commas; ends the process if one is not known."""
    names = [name.strip() for name in asked.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        parser.error(
            f"argument --only: invalid choice: {unknown[0]!r} (choose from {', '.join(known)})"
        )
    return names


def writable(parser: argparse.ArgumentParser, flag: str, folder: Path) -> None:
    """Creates a folder; ends the process if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        parser.error(f"argument {flag}: cannot write to {folder}: {error.strerror}")


class Turn(NamedTuple):
    """One turn of an arm."""

    seconds: float  # what is compared; 0 where no time is
    tokens: Any = (
        None  # compared with those of the case's first arm in the same turn, unless `None`
    )
    figures: Mapping[str, Any] = {}  # further columns: the median of a number, the last text


Arm = Callable[[int], "Turn | float | str"]


class Case(NamedTuple):
    """Arms that take turns on the same inputs."""

    name: str
    # by system, a function of the turn's number, which is below 0 in warm-up turns; it returns a
    # `Turn`, the seconds, or why the system does not run
    arms: Mapping[str, Arm]
    # by the system that the others are compared with, the least that its time over another's should
    # be; systems whose names end in ", batch SIZE" are one, of which the fastest counts
    over: Mapping[str, Mapping[str, float | None]] = {}
    turns: int | None = None  # instead of the benchmark's
    figures: Mapping[str, Any] = {}  # further columns, the same for all arms
    limits: Mapping[str, float] = {}  # by a figure's name, the most that it should be
    once: Collection[str] = ()  # arms that run a single turn
    # arms that are one system at several settings: after a turn of all, only the fastest goes on
    settings: Sequence[Sequence[str]] = ()
    first: int = 0  # number of the first turn
    # after so many turns, none begins that may end after `until`; `None`: all turns run
    fewest: int | None = None
    until: float = math.inf  # a moment of `time.perf_counter`
    end: float = math.inf  # the end of the whole run, after which no turn but the first may end


def guarded(work: Arm) -> Arm:
    """The arm, or, from its first failure on, why it does not run: a failing peer is a result."""
    problem = ""

    def arm(turn: int) -> Turn | float | str:
        nonlocal problem
        if not problem:
            try:
                return work(turn)
            except NotAvailable as error:
                problem = str(error)
            except Exception as error:
                problem = report.failed(error)
        return problem

    return arm


def row_of(case: str, system: str, problem: str = "", **figures: Any) -> Data:
    """A row without times; `problem`: why the system does not run."""
    row: Data = {"case": case, "system": system, "seconds": [], "over": {}, "figures": figures}
    return row | ({"problem": problem} if problem else {})


def fails(*needed: str) -> Callable[[Data], bool]:
    """Whether a system, of these if there are any, does not run: for `Benchmark.is_wrong`."""
    return lambda data: any(
        "problem" in row and (not needed or row["system"] in needed) for row in data["rows"]
    )


def rows_of(
    cases: Callable[[argparse.Namespace], Iterable[Case]],
    args: argparse.Namespace,
    keep: Callable[[list[Data]], Any] = lambda rows: None,
) -> list[Data]:
    """Rows of this process: one for each arm of each case. `keep` gets those so far after each
    case."""
    rows: list[Data] = []
    minutes = (getattr(args, "minutes", None) or math.inf) / max(1, getattr(args, "processes", 1))
    end = time.perf_counter() + 60 * minutes
    # a number of turns that is asked for counts before the minutes
    last = math.inf if getattr(args, "repeats", None) else end
    with quiet(), frozen():
        for case in cases(args):
            if minutes < math.inf:
                fewest = 1 if case.fewest is None else case.fewest
                case = case._replace(until=min(case.until, end), fewest=fewest, end=last)
            turns = args.turns if case.turns is None else case.turns
            rows += rows_of_case(case, turns, getattr(args, "warm_ups", 1))
            keep(rows)
    return rows


def take_turns(case: Case, turns: int, warm_ups: int) -> dict[str, list[Turn | str]]:
    """What the arms return for the numbers of the turns: every other turn goes backwards. Warm-up
    turns have numbers below 0, and their results are left out; all but the first end within half of
    the time."""
    found: dict[str, list[Turn | str]] = {name: [] for name in case.arms}
    fewest = turns if case.fewest is None else case.fewest
    spent: dict[str, float] = {}  # seconds of each arm's last turn
    half = (time.perf_counter() + case.until) / 2
    numbers = range(case.first - warm_ups, case.first + turns)
    for turn in tqdm(numbers, desc=case.name, disable=None):
        count = turn - case.first
        number = count if count < 0 else turn
        ended = slower_settings(case.settings, found).union(case.once)
        running = [
            name
            for name, mine in found.items()
            if not (mine and (name in ended or isinstance(mine[-1], str)))
        ]
        planned = time.perf_counter() + sum(spent.get(name, 0.0) for name in running)
        if count > 0 and (planned > case.end or (count >= fewest and planned > case.until)):
            break
        if count < 0 and spent and planned > half:
            continue  # of slow arms one warm-up turn is enough
        for name in running[:: -1 if turn % 2 else 1]:
            spent[name], result = clocked(functools.partial(case.arms[name], number))
            if count >= 0:
                found[name].append(result if isinstance(result, Turn | str) else Turn(result))
    return found


def slower_settings(
    settings: Sequence[Sequence[str]], found: Mapping[str, Sequence[Turn | str]]
) -> set[str]:
    """The arms that another setting of the same system outran in the first turn."""
    slower: set[str] = set()
    for names in settings:
        first = [(found[name][0], name) for name in names if found[name]]
        seconds = {name: turn.seconds for turn, name in first if isinstance(turn, Turn)}
        slower |= {name for name in seconds if seconds[name] > min(seconds.values())}
    return slower


def rows_of_case(case: Case, turns: int, warm_ups: int = 1) -> list[Data]:
    """Runs all arms; one row for each."""
    found, rows = take_turns(case, turns, warm_ups), []
    expected = [turn.tokens for turn in next(iter(found.values())) if not isinstance(turn, str)]
    for name, mine in found.items():
        problems = [turn for turn in mine if isinstance(turn, str)]
        row = row_of(case.name, name, *problems[:1])
        rows.append(row)
        if problems:
            continue
        row["seconds"] = [turn.seconds for turn in mine]
        row["over"] = {base: targets.get(name) for base, targets in case.over.items()}
        pairs = list(zip(expected, (turn.tokens for turn in mine)))
        if pairs and pairs[0][1] is not None:
            row["equal"] = statistics.mean(share_of(*pair) for pair in pairs)
        row["figures"] = {**case.figures, **tables.middles(turn.figures for turn in mine)}
        if limited := {key: most for key, most in case.limits.items() if key in row["figures"]}:
            row["limits"] = limited
    return rows


def share_of(expected: Any, actual: Any) -> float:
    """Share of equal tokens of lists of rows; of anything else whether it is equal."""
    if expected == actual:
        return 1.0
    is_tokens = isinstance(actual, list) and all(isinstance(row, list) for row in actual)
    return min(0.999, equal_share(expected, actual)) if is_tokens else 0.0


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as a command. An option on the command line comes before `quick` and `fixed`, in
    which `processes` run one after the other (with 0, the turns are this process's) and `warm_ups`
    turns come first."""

    about: str  # help of the command
    # from the options, the cases, one after the other; what follows a `yield` runs when its turns
    # are over; all of it runs in each process
    cases: Callable[[argparse.Namespace], Iterable[Case]] | None = None
    # from the options, those of a second process, which runs some of the cases once more
    again: Callable[[argparse.Namespace], argparse.Namespace | None] | None = None
    # instead of `cases`: from the options and what writes the JSON file early, its entries
    measure: Callable[[argparse.Namespace, Callable[[Data], Any]], Data] | None = None
    # instead of the table of the rows: from the content of JSON files, those of several processes
    # that ran one revision, the paragraphs to print
    show: Callable[[Sequence[Data]], Iterable[str]] | None = None
    title: str = ""  # of its section in the documentation
    # names of committed JSON files that the section shows, those of one table together
    results: Sequence[Sequence[str]] = ()
    said: Callable[[argparse.Namespace], str] | None = None  # from the options, a line on the sizes
    notes: Callable[[Sequence[Data]], Iterable[str]] | None = None  # paragraphs below the table
    options: Mapping[str, Data] = field(default_factory=dict)  # more, with `add_argument` keywords
    fixed: Data = field(default_factory=dict)  # settings that are no options
    quick: Data = field(default_factory=dict)  # all that `--quick` changes
    turns: int | None = None  # default of `--turns`; `None`: no such option
    only: str = ""  # help of `--only`; empty: no such option
    known: Iterable[str] = ()  # names that `--only` takes, by commas; empty: it takes any text
    is_exact: bool = False  # whether the command fails where tokens differ
    is_wrong: Callable[[Data], bool] | None = None  # whether the entries fail another check
    keeps: bool = False  # whether the JSON file keeps the cases of earlier runs that this one lacks

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        options = dict(self.options)
        if self.turns is not None:
            said = "of each contender, the order alternates (%(default)s)"
            options["--turns"] = option(said, type=int, default=self.turns)
        options.setdefault("--minutes", MINUTES)
        if self.only:
            options["--only"] = option(self.only, default=",".join(self.known))
        options["--json"] = option("also write the results to this file", type=Path)
        parser = parser_of(self.about, {**options, "--quick": QUICK})
        parser.set_defaults(**self.fixed)
        if parser.parse_args(argv).quick:
            parser.set_defaults(**self.quick)
        args = parser.parse_args(argv)
        if args.json:
            writable(parser, "--json", args.json.parent)
        if self.known:
            args.only = parts(parser, args.only, self.known)
        return args

    def run(self, args: argparse.Namespace, keep: Callable[[Data], Any]) -> Data:
        """The entries of the JSON file; `keep` gets them after each case of this process, too."""
        if self.measure is not None:
            return self.measure(args, keep)
        assert self.cases is not None
        processes = getattr(args, "processes", 0)
        more = () if processes else (lambda rows: keep({"rows": rows}),)
        found = in_processes(processes, rows_of, self.cases, args, *more)
        if self.again is not None and (second := self.again(args)) is not None:
            try:
                found += in_processes(1, rows_of, self.cases, second)
            except Exception as error:  # the turns of this process are kept
                print(f"the second process {report.failed(error)}", file=sys.stderr)
        said = {} if self.said is None else {"title": self.said(args)}
        return said | {"rows": tables.pooled({"rows": rows} for rows in found)}

    def section(self) -> str:
        """The documentation of the committed results: what the docstring says of the benchmark, and
        what the command prints."""
        parts = [f"**{self.title}**: {report.flow(self.about)}"]
        for names in self.results:
            names = [name for name in names if report.exists(name)]
            if not names:
                continue
            files = [report.result(name) for name in names]
            for group in [[run] for run in files[0]["runs"]] if "runs" in files[0] else [files]:
                parts += self.shown(group)
        return "\n\n".join(parts)

    def shown(self, runs: Sequence[Data]) -> list[str]:
        """The machine and the tables of one group of results."""
        module = (self.measure or self.cases).__module__  # type: ignore[union-attr]
        own = runs[0].get("command", f"python -m {module}")
        facts, *others = [run["facts"] for run in runs]
        revisions = dict.fromkeys(map(report.revision_of, others))
        revisions.pop(report.revision_of(facts), None)
        command = f"`{own}`, {report.machine_of(facts)}"
        command += f"; also {', '.join(revisions)}" if revisions else ""
        return [f"{command}:", *filter(None, self.paragraphs(runs))]

    def paragraphs(self, runs: Sequence[Data]) -> list[str]:
        """What the command prints."""
        if self.show is not None:
            return list(self.show(runs))
        rows = tables.pooled(runs)
        notes = [] if self.notes is None else self.notes(rows)
        return [runs[0].get("title", ""), tables.table(rows), *notes]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs the command; returns 1 if the check fails, 2 if there is a file of earlier runs that
        cannot be read."""
        args = self.parse(argv)
        facts = machine.facts(getattr(args, "device", "cpu"))
        run = {"command": report.command_line(), "facts": facts}
        old = []
        if self.keeps and args.json and args.json.exists():
            try:
                old = report.read(args.json).get("runs", [])
            except report.Damaged as error:
                print(error, file=sys.stderr)
                return 2

        def keep(found: Data) -> None:
            """Writes all that there is: a run that is killed leaves its cases so far."""
            if args.json:
                if machine.revision() != facts["revision"]:
                    facts["tree"] = "changed during the run"
                data = run | found
                content = {"runs": added(old, data)} if self.keeps else data
                report.replace_file(args.json, json.dumps(content, indent=1) + "\n")

        with quiet():
            data = run | self.run(args, keep)
        keep(data)
        print(*self.shown([data]), sep="\n\n")
        differs = any(row.get("equal") not in (None, 1.0) for row in data["rows"])
        if self.is_exact and differs:
            print("tokens differ", file=sys.stderr)
        return int((self.is_exact and differs) or bool(self.is_wrong and self.is_wrong(data)))


def added(runs: Sequence[Data], run: Data) -> list[Data]:
    """The runs plus `run`, whose cases replace older ones: running all of them takes hours."""
    new = {row["case"] for row in run["rows"]}
    kept = [{**old, "rows": [row for row in old["rows"] if row["case"] not in new]} for old in runs]
    return [old for old in kept if old["rows"]] + [run]


def clocked(work: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds that a call takes, and what it returns."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    return clocked(work)[0]


def each(work: Callable[[int, Any], Any], settings: Iterable[Any]) -> dict[str, Arm]:
    """Arms that call `work` with the turn and a setting: a value of a mapping, else a name."""
    named = settings if isinstance(settings, Mapping) else {str(one): one for one in settings}
    return {name: lambda turn, one=one: work(turn, one) for name, one in named.items()}  # type: ignore[misc]


def in_processes(processes: int, work: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Results of `work(*arguments)` in new processes, one after the other, which take as many
    threads as this one; with 0 in this one."""
    found = [] if processes else [work(*arguments)]
    for _ in range(processes):
        context, threads = get_context("spawn"), torch.get_num_threads()
        with ProcessPoolExecutor(1, context, torch.set_num_threads, (threads,)) as process:
            found.append(process.submit(work, *arguments).result())
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
