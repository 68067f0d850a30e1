"""Runs contenders in turns in several processes, and formats their times."""

from __future__ import annotations

import contextlib
import os
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks import paired, runner, tables
from benchmarks.models import SHAPES, Shape
from benchmarks.paper.rows import NONE, Published, Row, Size
from hf_paged.kernels import BACKEND_VARIABLE

Times = dict[str, list[float]]
"""Seconds of each contender, turn by turn."""


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


def times_of(rows: Mapping[str, runner.Data]) -> Times:
    return {name: row["seconds"] for name, row in rows.items()}


@contextlib.contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Forces an attention backend within the context (`HF_PAGED_ATTENTION`); `None`: the library
    chooses."""
    with unittest.mock.patch.dict(os.environ):
        os.environ.pop(BACKEND_VARIABLE, None)
        if name is not None:
            os.environ[BACKEND_VARIABLE] = name
        yield


def small_shape(size: Size, layers: int) -> Shape:
    """The small model with few layers and a small vocabulary, so that a long run has time for
    turns, and the logits do not dominate attention."""
    shape = SHAPES[size.small]
    layers, vocab = min(layers, shape.layers), min(2048, shape.vocab)
    return replace(shape, name=f"{shape.name} of {layers} layers", layers=layers, vocab=vocab)


def said(values: Sequence[float], size: Size, digits: str = ".3f") -> str:
    """Median over turns with its 95% interval, or the range if there are few values."""
    value, low, high, _ = paired.estimate(values)
    processes = f" in {size.processes} processes" if size.processes > 1 else ""
    turns = f"{len(values)} turn{'s' * (len(values) > 1)}{processes}"
    return f"{value:{digits}} ({low:{digits}}..{high:{digits}}), {turns}"


def timed_row(
    name: str,
    values: Sequence[float],
    size: Size,
    published: Published = NONE,
    more: str = "",
    unit: str = "times",
    digits: str = ".3f",
) -> Row:
    """A row of values turn by turn, which the JSON file keeps; `more` is said behind them."""
    return Row(name, said(values, size, digits) + more, unit, *published, list(values))
