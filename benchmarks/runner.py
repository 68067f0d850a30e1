"""The runner of the benchmarks: command line, arms that take turns, processes, tables, JSON files.

A benchmark says what it builds and measures (a function of its options that returns the entries of
its JSON file, `rows` among them), what it shows of them, and which rows are wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from benchmarks import machine, report
from benchmarks.models import SHAPES
from benchmarks.systems import quiet

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


@dataclass(frozen=True)
class Benchmark:
    """
    A benchmark as a command.

    Args:
        about (`str`): Help of the command.
        measure (`Callable`): From the options, the entries of the JSON file.
        show (`Callable`): From the content of JSON files, those of several processes that ran one
            revision, the paragraphs to print.
        options (`dict[str, dict]`): Options besides those below, and their `add_argument` keywords.
        fixed, quick (`dict`): Settings that are no options, and all that `--quick` changes; an
            option on the command line comes before both.
        turns (`int`, *optional*): Default of `--turns`; `None`: no such option.
        only (`str`): Help of `--only`; empty: no such option.
        known (`Iterable[str]`): Names that `--only` takes, by commas; empty: it takes any text.
        title (`str`): Of its section in the documentation.
        results (`Sequence`): Committed JSON files that the section shows, by their names; those of
            one table together.
        picture (`str`): Says what `draw` shows.
        is_wrong (`Callable`): Whether the entries fail the benchmark's check: the exit status is
            then 1.
        draw (`Callable`, *optional*): Draws a picture of the entries to a path.
        adds (`Callable`, *optional*): The content of the JSON file, from that of the file so far
            (empty without one) and from the entries.
    """

    about: str
    measure: Callable[[argparse.Namespace], Data]
    show: Callable[[Sequence[Data]], Iterable[str]]
    title: str = ""
    results: Sequence[Sequence[str]] = ()
    picture: str = ""
    options: Mapping[str, Data] = field(default_factory=dict)
    fixed: Data = field(default_factory=dict)
    quick: Data = field(default_factory=dict)
    turns: int | None = None
    only: str = ""
    known: Iterable[str] = ()
    is_wrong: Callable[[Data], bool] = lambda data: any(
        row.get("equal") == "NO" for row in data["rows"]
    )
    draw: Callable[[Data, Path], Any] | None = None
    adds: Callable[[Data, Data], Data] | None = None

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

    def section(self) -> str:
        """The documentation of the committed results: what the docstring says of the benchmark, and
        what the command prints."""
        paragraphs = self.about.strip().split("\n\n")
        said = [report.flow(one) for one in paragraphs if not one.startswith("    ")]
        parts = [f"**{self.title}**: {' '.join(said)}"]
        for names in self.results:
            runs = [report.result(name) for name in names]
            parts += self.shown(runs) if "runs" not in runs[0] else []
            for run in runs[0].get("runs", ()):
                parts += self.shown([run])
        return "\n\n".join(parts)

    def shown(self, runs: Sequence[Data]) -> list[str]:
        """The machine and the tables of one group of results."""
        facts = runs[0].get("facts") or runs[0]["machine"]  # as older results name them
        command = f"`python -m {self.measure.__module__}`, {report.machine_of(facts)}"
        processes = f"; {len(runs)} processes" if len(runs) > 1 else ""
        picture = report.picture_of(self.results[0][0], self.picture) if self.picture else []
        return [f"{command}{processes}:", *filter(None, self.show(runs)), *picture]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs the command; returns 1 if the check fails."""
        args = self.parse(argv)
        if getattr(args, "threads", None):
            torch.set_num_threads(args.threads)
        facts = machine.facts(getattr(args, "device", "cpu"))
        with quiet():
            data = {"facts": facts, **self.measure(args)}
        print(*self.show([data]), sep="\n\n")
        if args.json:
            content = data
            if self.adds is not None:
                content = self.adds(report.read(args.json) if args.json.exists() else {}, data)
            report.replace_file(args.json, json.dumps(content, indent=1) + "\n")
            if self.draw is not None:
                picture, draw = args.json.with_suffix(".png"), self.draw
                report.plot(lambda: draw(data, picture))
        return int(self.is_wrong(data))


def in_order(names: Iterable[Name], turn: int) -> list[Name]:
    """The names in the order of a turn: every other turn goes backwards."""
    return list(names) if turn % 2 else list(names)[::-1]


def take_turns(
    arms: Mapping[Name, Callable[[int], Result]], turns: int, warm_ups: int = 0, title: str = ""
) -> dict[Name, list[Result]]:
    """What each arm returns for the numbers of the turns, in alternating order. Warm-up turns have
    numbers below 0, and their results are left out."""
    found: dict[Name, list[Result]] = {name: [] for name in arms}
    for turn in tqdm(range(-warm_ups, turns), desc=title, disable=None):
        for name in in_order(arms, turn):
            result = arms[name](turn)
            if turn >= 0:
                found[name].append(result)
    return found


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def timed(works: Mapping[str, Callable[[], Any]]) -> dict[str, Callable[[int], float]]:
    """Arms of `take_turns` that return the seconds of a call."""

    def arm(work: Callable[[], Any]) -> Callable[[int], float]:
        return lambda turn: seconds_of(work)

    return {name: arm(work) for name, work in works.items()}


def in_processes(processes: int, work: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Results of `work(*arguments)` in new processes, one after the other; with 0 in this one."""
    found = [] if processes else [work(*arguments)]
    for _ in range(processes):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
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
