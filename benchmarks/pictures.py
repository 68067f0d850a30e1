"""Pictures of the results of `benchmarks.generate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, tables
from benchmarks.peers import TITLES
from benchmarks.runner import Data
from benchmarks.workloads import WORKLOADS

NAMES = {
    "ours": 'generate, cache_implementation="paged"',
    "engine": "PagedEngine",
    "engine, a third of its peak": "PagedEngine in a third of its memory",
}


def draw_all(data: Mapping[str, Any], stem: Path) -> list[Path]:
    """Draws what a result of `benchmarks.generate` holds to `<stem>.png` and
    `<stem>-memory.png`."""
    foot = report.caption(data["facts"], data["title"].partition(". ")[0].replace("`", ""))
    drawn = []
    faster = "Plain generate's time over each system's: above 1 is faster"
    less = "Most memory that keys and values take in a call, MiB: less is better"
    for name, values, height, digits, said in (
        ("", speed(data["rows"]), 560, ".2f", faster),
        ("-memory", memory(data["rows"]), 430, ".3g", less),
    ):
        figure, axis = report.figure(height, foot)
        report.grouped_bars(axis, values, label=lambda value, digits=digits: f"{value:{digits}}")  # type: ignore[misc]
        if not name:
            axis.axvline(1.0, color="black", linewidth=0.8)
        report.title(axis, said)
        report.legend_below(figure, axis, 2)
        drawn.append(report.save(figure, stem.with_name(f"{stem.name}{name}.png")))
    return drawn


def by_system(values: Iterable[tuple[Data, float]]) -> dict[str, dict[str, float]]:
    """Values of rows by system, of an engine's settings the greatest, and by workload, in words."""
    found: dict[str, dict[str, float]] = {}
    for row, value in values:
        mine = found.setdefault(NAMES.get(row["system"], row["system"].partition(",")[0]), {})
        group = WORKLOADS[row["case"]].title
        mine[group] = max(value, mine.get(group, 0.0))
    return found


def speed(rows: Sequence[Data]) -> dict[str, dict[str, float]]:
    """Speedup of each system over the fastest plain `generate`, by workload; beside other engines
    of ours only `generate`."""
    has_peers = any(row["system"] in TITLES.values() for row in rows)
    shown = ["ours", *TITLES.values()] if has_peers else {row["system"] for row in rows}
    return by_system(
        (row, ratio.value)
        for row, base, ratio, _ in tables.comparisons(rows)
        if base == "plain" and not row["system"].startswith("plain")
        if row["case"] in WORKLOADS and row["system"] in shown
    )


def memory(rows: Sequence[Data]) -> dict[str, dict[str, float]]:
    """Most MiB of K/V that plain `generate` and ours hold, by workload."""
    return by_system(
        (row | {"system": name}, row["figures"]["K/V, MiB"])
        for case in WORKLOADS
        for name, system in {"plain generate": "plain", "ours": "ours"}.items()
        if (row := tables.base_of(rows, case, system)) is not None
    )
