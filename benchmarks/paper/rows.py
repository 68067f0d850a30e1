"""What a table of `benchmarks.paper` returns, and how large it is to be."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PAPER = "PagedAttention, arXiv 2309.06180"
VATTENTION = "vAttention, arXiv 2405.04437"
READ = "read"
"""The published figure was looked up in the paper's text or printed on its figure."""
TOLD = "S4, not in the paper"
"""
The figure is from the document S4 of those that this project was asked for in: an article on the PagedAttention paper,
of 2026-02-17, in Japanese. The paper itself does not have it.
"""
TOLD_S1 = "S1, not looked up in the paper"
"""The figure is from the document S1: an article on the vAttention paper, of 2025-03-11, in Korean."""
TOLD_S2 = "S2, from the announcement of vLLM"
"""The figure is from the document S2: notes on the announcement of vLLM, of 2023-06-20, in Korean."""


@dataclass(frozen=True)
class Row:
    """
    One line.

    Args:
        name (`str`): What is measured.
        published (`str`): As published; empty where the papers have no such figure.
        ours (`float` or `str`): In `unit`.
        source (`str`): Section or figure with `READ`, or `TOLD`, `TOLD_S1`, `TOLD_S2`.
        why (`str`): Why ours differs.
        details (`dict`, *optional*): Numbers behind `ours`, for the JSON and the plots.
    """

    name: str
    published: str
    ours: float | str
    unit: str
    source: str
    why: str = ""
    details: dict[str, Any] | None = None

    def as_dict(self, table: str) -> dict[str, Any]:
        """For `benchmarks.report`."""
        return {"table": table, **{key: value for key, value in asdict(self).items() if value is not None}}


@dataclass(frozen=True)
class Size:
    """
    How much a run does.

    Args:
        requests (`int`): Of the trace that compares the schedulers, by measured costs.
        short (`int`): Of every other simulated trace.
        shape (`str`): Of the model whose steps, copies and attention are timed, from `benchmarks.models.SHAPES`.
        engine_shape (`str`): Of the model that whole requests run on.
        context (`int`): Tokens of a preempted request, and of a row that a kernel reads.
        engine_requests (`int`): That whole requests are timed with, for each block size.
        beam_prompts (`int`): Prompts of each beam search.
        beam_tokens (`int`): Most tokens of such a prompt, and most new ones.
        repeats (`int`): Of everything that is timed.
        seeds (`int`): Of traces, where a figure is shown with its range over them.
        small (`str`): Shape of the model that whole calls take turns on, in float32.
        turns (`int`): Of contenders, in each of `processes` processes.
    """

    requests: int
    short: int
    shape: str
    engine_shape: str
    context: int
    engine_requests: int
    beam_prompts: int
    beam_tokens: int
    repeats: int
    seeds: int
    small: str = "llama-tiny"
    turns: int = 1
    processes: int = 1


TINY = Size(60, 40, "llama-tiny", "llama-tiny", 64, 2, 2, 24, 1, 1)
QUICK = Size(10_000, 1_000, "llama-100m", "llama-tiny", 256, 8, 3, 64, 3, 2)
FULL = Size(1_000_000, 10_000, "llama-100m", "llama-100m", 1024, 8, 4, 256, 9, 5, "llama-24m", 8, 2)


def ranged(values: Sequence[float], digits: str = ".4g") -> str:
    """The median of some values, and the least and the greatest of them."""
    return f"{statistics.median(values):{digits}} ({min(values):{digits}}..{max(values):{digits}})"
