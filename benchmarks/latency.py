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


def first_tokens(times: Sequence[Sequence[float]], starts: Sequence[float]) -> list[float]:
    """Seconds from each row's start to its first token (TTFT)."""
    return [row[0] - start for row, start in zip(times, starts) if row]


def between_tokens(times: Sequence[Sequence[float]]) -> list[float]:
    """Seconds between consecutive tokens of all rows (TPOT)."""
    return [after - before for row in times for before, after in itertools.pairwise(row)]


def summary(times: Sequence[Sequence[float]], starts: Sequence[float]) -> dict[str, float]:
    """p50 and p99 of both in milliseconds, by the titles of columns; empty without times."""
    found = {}
    for name, values in (("TTFT", first_tokens(times, starts)), ("TPOT", between_tokens(times))):
        if values:
            found |= {
                f"{name} p50, ms": 1e3 * percentile(values, 50),
                f"{name} p99, ms": 1e3 * percentile(values, 99),
            }
    return found
