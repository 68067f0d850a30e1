"""Latency figures from token timestamps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np


def summary(times: Sequence[Sequence[float]], starts: Sequence[float]) -> dict[str, float]:
    """p50 and p99 of the milliseconds from each row's start to its first token (TTFT) and between
    consecutive tokens (TPOT), by the titles of columns; empty without times."""
    first = [row[0] - start for row, start in zip(times, starts) if row]
    between = [after - before for row in times for before, after in itertools.pairwise(row)]
    return {
        f"{name} p{percent}, ms": 1e3 * float(np.percentile(values, percent))
        for name, values in {"TTFT": first, "TPOT": between}.items()
        for percent in (50, 99)
        if values
    }
