"""Rows of a table of `benchmarks.paper`, the size of a run, and turns in several processes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from benchmarks import paired, runner, tables
from benchmarks.models import SHAPES, Shape

PAPER = "PagedAttention, arXiv 2309.06180"
READ = "read"
"""The published figure was read in the paper's text or on its plot."""
TOLD_S1 = "S1, not looked up in the paper"
"""The figure is from the document S1: an article on the vAttention paper, of 2025-03-11, in
Korean."""


class Published(NamedTuple):
    """
    A figure that was published.

    Args:
        source (`str`): Section or figure with `READ`, or `TOLD_S1`.
        why (`str`): Reason why ours differs.
    """

    figure: str = ""
    source: str = ""
    why: str = ""


NONE = Published()


@dataclass(frozen=True)
class Row:
    """
    One line of a table.

    Args:
        name (`str`): The measured quantity.
        ours (`float` or `str`): Our figure, in `unit`.
        published, source, why (`str`): As in [`Published`]; empty if the papers have no figure.
        details (*optional*): Numbers behind `ours`, for the JSON file.
    """

    name: str
    ours: float | str
    unit: str
    published: str = ""
    source: str = ""
    why: str = ""
    details: Any = None

    def as_dict(self, table: str) -> dict[str, Any]:
        """The row for the JSON file."""
        return {
            "case": table,
            **{key: value for key, value in asdict(self).items() if value is not None},
        }


@dataclass(frozen=True)
class Size:
    """
    Amount of work of a run.

    Args:
        short (`int`): Requests of a simulated trace.
        engine_requests (`int`): Timed requests per block size.
        seeds (`int`): Number of traces, for figures shown with their range over seeds.
        small (`str`): Shape of the float32 model for whole calls that take turns.
        turns (`int`): Turns of the contenders in each of `processes` processes.
    """

    short: int
    engine_requests: int
    seeds: int
    small: str = "llama-tiny"
    turns: int = 1
    processes: int = 1


TINY = Size(40, 2, 1)
QUICK = Size(1_000, 8, 2)
FULL = Size(10_000, 8, 5, "llama-24m", 8, 2)


def ranged(values: Sequence[float], digits: str = ".4g") -> str:
    """Median, minimum and maximum of some values."""
    return f"{statistics.median(values):{digits}} ({min(values):{digits}}..{max(values):{digits}})"


def measured(
    cases: Callable[[Size], Iterable[runner.Case]], size: Size
) -> dict[str, dict[str, runner.Data]]:
    """Rows of `runner.rows_of` by case and contender, with the turns of `size.processes` processes.
    Raises if a contender's tokens differ from those of the case's first one."""
    processes = size.processes if size.processes > 1 else 0
    found: dict[str, dict[str, runner.Data]] = {}
    runs = runner.in_processes(processes, runner.rows_of, cases, size)
    for row in tables.pooled({"rows": rows} for rows in runs):
        if row.get("equal", 1.0) < 1:
            raise RuntimeError(f"{row['case']}: {row['system']} gives other tokens")
        found.setdefault(row["case"], {})[row["system"]] = row
    return found


def small_shape(size: Size, layers: int) -> Shape:
    """The small model with few layers and a small vocabulary, so that a long run has time for
    turns, and the logits do not dominate attention."""
    shape = SHAPES[size.small]
    layers, vocab = min(layers, shape.layers), min(2048, shape.vocab)
    return replace(shape, name=f"{shape.name} of {layers} layers", layers=layers, vocab=vocab)


def timed_row(
    name: str,
    values: Sequence[float],
    size: Size,
    published: Published = NONE,
    more: str = "",
    unit: str = "times",
) -> Row:
    """A row of values turn by turn, which the JSON file keeps: their median with its 95% interval,
    or with the range if there are few; `more` is said behind them."""
    value, low, high, _ = paired.estimate(values)
    processes = f" in {size.processes} processes" if size.processes > 1 else ""
    turns = f"{len(values)} turn{'s' * (len(values) > 1)}{processes}"
    ours = f"{value:.3f} ({low:.3f}..{high:.3f}), {turns}{more}"
    return Row(name, ours, unit, *published, list(values))
