"""Rows of the runner's JSON files: turns of several processes, ratios, targets, tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import paired, report

Data = dict[str, Any]


def middles(parts: Iterable[Mapping[str, Any]]) -> Data:
    """The figures of several turns or processes: the median of numbers, the last text."""
    found: dict[str, list[Any]] = {}
    for part in parts:
        for key, value in part.items():
            found.setdefault(key, []).append(value)
    return {
        key: statistics.median(values)
        if all(isinstance(one, int | float) for one in values)
        else values[-1]
        for key, values in found.items()
    }


def pooled(runs: Iterable[Mapping[str, Any]]) -> list[Data]:
    """Rows that combine the turns of several processes or files: those of one case and system."""
    rows, by_arm = [], dict[tuple[str, str], list[Data]]()
    for one in (row for run in runs for row in run["rows"]):
        by_arm.setdefault((one["case"], one["system"]), []).append(one)
    for parts in by_arm.values():
        row = {**parts[0], "processes": sum(part.get("processes", 1) for part in parts)}
        for key in ("seconds", "ratios"):
            if key in row:
                row[key] = [one for part in parts for one in part[key]]
        if "turns" in row:
            row["turns"] = sum(part["turns"] for part in parts)
        if equal := [part["equal"] for part in parts if part.get("equal") is not None]:
            row["equal"] = statistics.mean(equal)
        row["figures"] = middles(part["figures"] for part in parts)
        rows.append(row)
    return rows


def ratio_of(base: Data, row: Data) -> paired.Estimate:
    """The base's time over a row's, within turns. Results from before 2026-11-26 have only the
    estimate, or its ratios."""
    if "ratio" in row:
        return paired.Estimate(row["ratio"], *row["interval"])
    return paired.estimate(row.get("ratios") or paired.ratios(base["seconds"], row["seconds"]))


def base_of(rows: Iterable[Data], case: str, base: str) -> Data | None:
    """The row of a system, or of its fastest batch size; `None` if it did not run."""
    mine = [
        row
        for row in rows
        if (row["case"], row["system"].partition(", batch ")[0]) == (case, base) and row["seconds"]
    ]
    return min(mine, key=lambda row: statistics.median(row["seconds"]), default=None)


def comparisons(
    rows: Sequence[Data],
) -> Iterator[tuple[Data, str, paired.Estimate, float | None]]:
    """Each row with each system that it is compared with: that one's time over the row's, and the
    least that it should be."""
    for row in rows:
        for base, target in row["over"].items():
            other = base_of(rows, row["case"], base)
            if other is not None and other is not row:
                yield row, base, ratio_of(other, row), target


def targets(rows: Sequence[Data]) -> str:
    """How many targets are met, and those that are not."""
    count, missed = 0, []
    for row, base, ratio, target in comparisons(rows):
        if target is not None:
            count += 1
            if not ratio.reaches(target):
                what = f"{row['case']}: {base} / {row['system']} {report.text(ratio.value)}"
                missed.append(f"{what}, not at least {target:.3g}")
    for row in rows:
        for name, most in row.get("limits", {}).items():
            count += 1
            if not row["figures"][name] <= most:
                what = f"{row['case']}, {row['system']}: {name} {report.text(row['figures'][name])}"
                missed.append(f"{what}, not at most {most:g}")
    said = f"Targets: {count - len(missed)} of {count} are met"
    return f"{said}; not met: {'; '.join(missed)}." if missed else f"{said}."


MOST_FIGURES = 5
"""Columns of figures that a table has beside the times."""


def table(rows: Sequence[Data]) -> str:
    """Medians of the turns, ratios with their 95% intervals, and what else the rows have: many
    figures in a table of their own. A target is met where the interval reaches it, or, with fewer
    than 5 turns, the median."""
    bases = dict.fromkeys(f"{base} / it" for row in rows for base in row["over"])
    ratios: dict[tuple[str, str], Data] = {}
    for row, base, ratio, target in comparisons(rows):
        met = "" if target is None else f", at least {target:.3g}: "
        met += "" if target is None else paired.said(ratio.reaches(target))
        ratios.setdefault((row["case"], row["system"]), {})[f"{base} / it"] = ratio.text(2) + met
    lines, others = [], []
    for row in rows:
        seconds = row["seconds"]
        line = {"case": row["case"], "system": row["system"]}
        others.append(line | _figures(row))
        if turns := row.get("turns", len(seconds)):
            line["turns, processes"] = f"{turns}, {row.get('processes', 1)}"
        if any(seconds):
            low, high = min(seconds), max(seconds)
            spread = f" ({report.text(low)} to {report.text(high)})" if len(seconds) > 2 else ""
            line["s"] = report.text(float(statistics.median(seconds))) + spread
        elif "problem" in row:
            line["s"] = row["problem"]
        line |= ratios.get((row["case"], row["system"]), {})
        if row.get("equal") is not None:
            share = row["equal"]
            line["tokens"] = "equal" if share == 1 else f"{math.floor(100 * share + 1e-9)}% equal"
        lines.append(line)
    if len({key for row in rows for key in row["figures"]}) <= MOST_FIGURES:
        return _table([line | other for line, other in zip(lines, others)], bases)
    parts = [[line for line in part if len(line) > 2] for part in (lines, others)]
    return "\n\n".join(_table(part, bases) for part in parts if part)


def _figures(row: Data) -> Data:
    """The figures of a row, those with a limit with the outcome."""
    outcomes = {
        name: f"{report.text(row['figures'][name])}, at most {most:g}: "
        + paired.said(row["figures"][name] <= most)
        for name, most in row.get("limits", {}).items()
    }
    return row["figures"] | outcomes


def _table(lines: Sequence[Data], ratios: Iterable[str]) -> str:
    titles = list(dict.fromkeys(key for line in lines for key in line))
    known = ["case", "system", "turns, processes", "s", *ratios, "tokens"]
    titles.sort(key=lambda key: known.index(key) if key in known else len(known))
    return report.markdown(lines, {title: title for title in titles}, right=("s",))
