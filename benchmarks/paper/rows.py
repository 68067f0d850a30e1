"""Rows of a table of `benchmarks.paper`, and the size of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

PAPER = "PagedAttention, arXiv 2309.06180"
VATTENTION = "vAttention, arXiv 2405.04437"
READ = "read"
"""The published figure was read in the paper's text or on its plot."""
TOLD = "S4, not in the paper"
""" The figure is from S4, one of the documents that define this project's task: an article on the
PagedAttention paper, of 2026-02-17, in Japanese. The paper does not have the figure.
"""
TOLD_S1 = "S1, not looked up in the paper"
"""The figure is from the document S1: an article on the vAttention paper, of 2025-03-11, in
Korean."""
TOLD_S2 = "S2, from the announcement of vLLM"
"""The figure is from the document S2: notes on the announcement of vLLM, of 2023-06-20, in
Korean."""


class Published(NamedTuple):
    """
    A figure that was published.

    Args:
        source (`str`): Section or figure with `READ`, or `TOLD`, `TOLD_S1`, `TOLD_S2`.
        why (`str`): Reason why ours differs.
    """

    figure: str = ""
    source: str = ""
    why: str = ""


NONE = Published()


@dataclass(frozen=True)
class Row:
    """
    One line of a table.

    Args:
        name (`str`): The measured quantity.
        ours (`float` or `str`): Our figure, in `unit`.
        published, source, why (`str`): As in [`Published`]; empty if the papers have no figure.
        details (*optional*): Numbers behind `ours`, for the JSON file.
    """

    name: str
    ours: float | str
    unit: str
    published: str = ""
    source: str = ""
    why: str = ""
    details: Any = None

    def as_dict(self, table: str) -> dict[str, Any]:
        """The row for the JSON file."""
        return {
            "case": table,
            **{key: value for key, value in asdict(self).items() if value is not None},
        }


@dataclass(frozen=True)
class Size:
    """
    Amount of work of a run.

    Args:
        short (`int`): Requests of a simulated trace.
        shape (`str`): Model whose steps and attention are timed, from `benchmarks.models.SHAPES`.
        context (`int`): Tokens of a row that a kernel reads.
        engine_requests (`int`): Timed requests per block size.
        repeats (`int`): Repeats of every timed measurement.
        seeds (`int`): Number of traces, for figures shown with their range over seeds.
        small (`str`): Shape of the float32 model for whole calls that take turns.
        turns (`int`): Turns of the contenders in each of `processes` processes.
    """

    short: int
    shape: str
    context: int
    engine_requests: int
    repeats: int
    seeds: int
    small: str = "llama-tiny"
    turns: int = 1
    processes: int = 1


TINY = Size(40, "llama-tiny", 64, 2, 1, 1)
QUICK = Size(1_000, "llama-100m", 256, 8, 3, 2)
FULL = Size(10_000, "llama-100m", 1024, 8, 9, 5, "llama-24m", 8, 2)


def ranged(values: Sequence[float], digits: str = ".4g") -> str:
    """Median, minimum and maximum of some values."""
    return f"{statistics.median(values):{digits}} ({min(values):{digits}}..{max(values):{digits}})"
