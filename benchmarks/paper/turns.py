"""Runs contenders in turns in several processes, and formats their times."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import hf_paged
from benchmarks import paired, runner, tables
from benchmarks.models import SHAPES, Shape
from benchmarks.paper.rows import NONE, Published, Row, Size
from benchmarks.systems import served
from benchmarks.workloads import GREEDY, texts

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


def small_shape(size: Size, layers: int) -> Shape:
    """The small model with few layers and a small vocabulary, so that a long run has time for
    turns, and the logits do not dominate attention."""
    shape = SHAPES[size.small]
    layers, vocab = min(layers, shape.layers), min(2048, shape.vocab)
    return replace(shape, name=f"{shape.name} of {layers} layers", layers=layers, vocab=vocab)


def serve(
    model: Any, shape: Shape, pairs: list[tuple[int, int]], config: dict[str, Any], seed: int = 0
) -> tuple[float, Any]:
    """Seconds in which a new engine serves greedy requests of these prompt and output lengths, and
    its stats."""
    lengths, outputs = zip(*pairs)
    prompts = texts(random.Random(seed), lengths, shape.vocab)
    configs = [{**GREEDY, "max_new_tokens": output} for output in outputs]
    with hf_paged.PagedEngine(model, {"prefix_caching": False, **config}) as engine:
        return served(engine, prompts, configs)[0], engine.stats()


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
