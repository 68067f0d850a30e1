"""Figures of the papers behind this package on our system, beside the published ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

PAGED_ATTENTION = "PagedAttention, arXiv 2309.06180"
VATTENTION = "vAttention, arXiv 2405.04437"


def published(figure: str, source: str, why: str = "") -> dict[str, Any]:
    """Columns of a row with a published figure. `source`: the paper, and the section or figure that
    was read. `why`: the reason why ours differs."""
    return {"published": figure, "published in": source, "what differs": why}


def ranged(values: Sequence[float], digits: str = ".4g") -> str:
    """Median, minimum and maximum of some values."""
    return f"{statistics.median(values):{digits}} ({min(values):{digits}}..{max(values):{digits}})"
