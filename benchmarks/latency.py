"""Latency figures from token timestamps."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile by linear interpolation; NaN without values."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=1000, method="inclusive")[
        max(0, min(998, round(10 * percent) - 1))
    ]


def summary(times: Sequence[Sequence[float]], starts: Sequence[float]) -> dict[str, float]:
    """p50 and p99 of the milliseconds from each row's start to its first token (TTFT) and between
    consecutive tokens (TPOT), by the titles of columns; empty without times."""
    first = [row[0] - start for row, start in zip(times, starts) if row]
    between = [after - before for row in times for before, after in itertools.pairwise(row)]
    return {
        f"{name} p{percent}, ms": 1e3 * percentile(values, percent)
        for name, values in {"TTFT": first, "TPOT": between}.items()
        for percent in (50, 99)
        if values
    }
