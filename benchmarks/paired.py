"""Statistics of turns: ratios of two systems' times within a turn, their intervals and verdicts."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

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
    is_interval: bool = True

    def text(self, digits: int) -> str:
        value, low, high = (f"{one:.{digits}f}" for one in (self.value, self.low, self.high))
        return value if self.low == self.high else f"{value} ({low} to {high})"

    def reaches(self, target: float) -> bool:
        """Whether the interval reaches the target; with too few values, whether the median does."""
        return (self.high if self.is_interval else self.value) >= target


def estimate(values: Sequence[float]) -> Estimate:
    """The median and its interval."""
    found = interval(values)
    low, high = found or (min(values), max(values))
    return Estimate(statistics.median(values), low, high, found is not None)


def said(is_met: bool) -> str:
    return "met" if is_met else "not met"
