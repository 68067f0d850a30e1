"""Who was in the batch when, as a matplotlib picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .figures import add_legend, new_axes, require

if TYPE_CHECKING:
    from ...batching.scheduling.timeline import Interval

MAX_REQUESTS = 40
UNITS = ("steps", "seconds")
_MAX_NAME = 16  # characters of a request's id
# By the name of what a request does; colours of Okabe and Ito.
_STYLES: dict[str, dict[str, Any]] = {
    "prefill": {"facecolor": "#E69F00"},
    "recompute": {"facecolor": "#E69F00", "hatch": "//////", "edgecolor": "#5A3D00", "linewidth": 0},
    "decode": {"facecolor": "#0072B2"},
    "waiting": {"facecolor": "#BBBBBB"},
    "preempted": {"facecolor": "#D55E00"},
    "swapped out": {"facecolor": "#CC79A7"},
}
_IN_BATCH = ("prefill", "recompute", "decode")  # wide bars; what waits has narrow ones


def plot_intervals(
    intervals: Sequence[Interval], unit: str = "steps", ax: Any = None, max_requests: int = MAX_REQUESTS
) -> Any:
    """
    Draws a row for each request, in the order in which they came, and a mark where it ended.

    Args:
        intervals (`Sequence[Interval]`): What [`Timeline.intervals`] returns.
        unit (`str`): What is on the x axis: `"steps"`, or `"seconds"` since the first of what is shown.
        ax (`matplotlib.axes.Axes`, *optional*): Draw there; otherwise in a new figure, 800 pixels wide.
        max_requests (`int`): Number of requests to draw, the last ones.

    Returns:
        `matplotlib.figure.Figure`: As `plot_block_map`.

    Raises:
        ImportError: without matplotlib.
        ValueError: for another unit, or less than one request.
    """
    if unit not in UNITS:
        raise ValueError(f"`unit` is {unit!r}: it must be one of {', '.join(UNITS)}")
    if max_requests < 1:
        raise ValueError(f"`max_requests` is {max_requests}: it must be at least 1")
    numbers = sorted({interval.number for interval in intervals})
    shown = numbers[-max_requests:]
    rows = {number: row for row, number in enumerate(shown)}
    intervals = [interval for interval in intervals if interval.number in rows]
    if ax is None:
        ax = new_axes(min(0.24, 10 / max(1, len(rows))) * len(rows) + 1.1)
    origin = min((interval.start for interval in intervals), default=0.0)

    def span(interval: Interval) -> tuple[float, float]:
        if unit == "steps":
            return interval.first_step, interval.end_step
        return interval.start - origin, interval.end - origin

    patches, lines = require("matplotlib.patches"), require("matplotlib.lines")
    handles: list[Any] = []
    for activity, style in _STYLES.items():
        these = [interval for interval in intervals if interval.activity.value == activity]
        height = 0.76 if activity in _IN_BATCH else 0.26
        for number, row in rows.items():
            spans = [span(interval) for interval in these if interval.number == number]
            if bars := [(start, end - start) for start, end in spans if end > start]:
                ax.broken_barh(bars, (row - height / 2, height), **style)
        if these:
            handles.append(patches.Patch(label=activity, **style))
    ends = [interval for interval in intervals if interval.is_last]
    mark = {"color": "black", "linestyle": "none", "marker": "|", "markersize": 9, "markeredgewidth": 1.8}
    ax.plot([span(each)[1] for each in ends], [rows[each.number] for each in ends], **mark)
    if ends:
        handles.append(lines.Line2D([], [], label="ended", **mark))
    _label_axes(ax, intervals, rows, unit)
    if not shown:
        ax.text(0.5, 0.5, "no requests yet", transform=ax.transAxes, ha="center", va="center")
    if len(shown) < len(numbers):
        ax.set_ylabel(f"the last {len(shown)} of {len(numbers)} requests")
    add_legend(ax, handles, columns=7)
    return ax.figure


def _label_axes(ax: Any, intervals: list[Interval], rows: dict[int, int], unit: str) -> None:
    names = {rows[interval.number]: _short(str(interval.request_id)) for interval in intervals}
    every = max(1, -(-len(rows) // 60))
    ticks = sorted(names)[::every]
    ax.set_yticks(ticks, [names[row] for row in ticks], fontsize=8, parse_math=False)
    ax.set_ylim(max(1, len(rows)) - 0.4, -0.6)
    ax.set_xlim(left=min((interval.first_step for interval in intervals), default=0) if unit == "steps" else 0)
    ax.set_xlabel("step" if unit == "steps" else "seconds", fontsize=9)
    ax.tick_params(axis="x", labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "\N{HORIZONTAL ELLIPSIS}"
