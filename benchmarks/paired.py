"""Statistics of turns: ratios of two systems' times within a turn, their intervals and verdicts."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

FEWEST = 5
"""Turns below which there is no interval."""
ENOUGH = 15
"""Least number of turns for the interval to decide whether one system is as fast as the other."""
NOT_SLOWER = 1.03
"""Two systems count as equally fast unless the interval of the time ratio lies wholly above
this."""
RESAMPLES = 2000


def ratios(slower: Sequence[float], faster: Sequence[float]) -> list[float]:
    """Seconds of `slower` over those of `faster`, for each turn that both ran."""
    return [a / b for a, b in zip(slower, faster)]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% bootstrap interval of the median (percentiles, fixed seed); `None` with too few
    values."""
    if len(values) < FEWEST:
        return None
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]


class Estimate(NamedTuple):
    """A median with its 95% interval, or with the range of too few values."""

    value: float
    low: float
    high: float

    def text(self, digits: int) -> str:
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"

    def entries(self, digits: int) -> dict[str, Any]:
        """The entries of a row."""
        return {"ratio": round(self.value, digits), "interval": self.bounds(digits)}

    def bounds(self, digits: int) -> list[float]:
        return [round(self.low, digits), round(self.high, digits)]


def estimate(values: Sequence[float]) -> Estimate:
    """The median and its interval."""
    low, high = interval(values) or (min(values), max(values))
    return Estimate(statistics.median(values), low, high)


def verdict(values: Sequence[float], target: float | None) -> str:
    """Whether speed ratios reach `target`, by their median. A target of 1 means "not slower",
    decided by the interval if there are enough turns; empty without a target.
    """
    if target is None:
        return ""
    found = interval(values)
    if target == 1 and found is not None and len(values) >= ENOUGH:
        return f"not slower: {said(found[1] >= 1 / NOT_SLOWER)}"
    return f"at least {target:g}: {said(statistics.median(values) >= target)}"


def at_most(value: float, limit: float) -> str:
    return f"at most {limit:g}: {said(value <= limit)}"


def said(met: bool) -> str:
    return "met" if met else "not met"


def span(values: Sequence[float] | None) -> str:
    """Formats an interval, or the range of some values."""
    return f"{min(values):.3g}..{max(values):.3g}" if values else ""
