"""Statistics of turns: ratios of two systems' times in the same turns, and what may be said of them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

FEWEST = 5
"""Turns below which there is no interval."""
ENOUGH = 15
"""Turns from which on the interval decides whether one is as fast as the other."""
NOT_SLOWER = 1.03
"""Two are as fast as each other unless the interval of the times' ratio lies wholly above this."""
RESAMPLES = 2000


def ratios(slower: Sequence[float], faster: Sequence[float]) -> list[float]:
    """One's seconds over the other's, of each turn that both ran."""
    return [a / b for a, b in zip(slower, faster)]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% bootstrap interval of the median (percentiles; the draws are always the same); `None` of few values."""
    if len(values) < FEWEST:
        return None
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]


def verdict(values: Sequence[float], target: float | None) -> str:
    """
    Whether ratios of speed reach `target`: by their median. A target of 1 asks for "not slower", which the interval of
    enough turns answers; empty without a target.
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
    """Of an interval, or of the smallest and the largest of some values."""
    return f"{min(values):.3g}..{max(values):.3g}" if values else ""
