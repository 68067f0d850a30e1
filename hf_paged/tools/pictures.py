"""Plots and HTML of blocks and of requests over steps, from plain lists: no models, tensors or
schedulers."""

from __future__ import annotations

import importlib
import io
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..batching.results import EngineStats
    from ..batching.scheduling.timeline import Interval, Verification
    from ..cache.memory_stats import MemoryStats

WIDTH, DPI = 8.0, 100  # inches; 800 pixels
# of all groups of a picture together; in larger pools a cell stands for several blocks
MAX_CELLS = 128 * 64
# up to this number of cells, this number of columns
_NUM_COLUMNS = ((512, 32), (2048, 64), (MAX_CELLS, 128))
_NUMBERED_COLUMNS = 32  # with more columns the number of holders does not fit into a cell
_HEADING = 1 / 20  # of the width: height of a group's heading if there are several groups

# cells of a strip in HTML; in larger pools a cell stands for several blocks
COLUMNS, MAX_ROWS = 64, 12
_CELL = 10  # pixels
MAX_REQUESTS = 40
_MAX_NAME = 16  # characters of a request's id
_STYLES: dict[str, dict[str, Any]] = {  # by the name of a request's activity
    "prefill": {"facecolor": "#E69F00"},
    "recompute": {
        "facecolor": "#E69F00",
        "hatch": "//////",
        "edgecolor": "#5A3D00",
        "linewidth": 0,
    },
    "decode": {"facecolor": "#0072B2"},
    "waiting": {"facecolor": "#BBBBBB"},
    "preempted": {"facecolor": "#D55E00"},
    "swapped out": {"facecolor": "#CC79A7"},
}
_BAR, _NARROW_BAR = 0.76, 0.26  # of a row's height
_DRAFTS = {
    "num_draft_tokens": ("drafted", "#F0E442"),
    "num_accepted_tokens": ("accepted", "#009E73"),
}
# activities with wide bars; the others have narrow ones
_IN_BATCH = ("prefill", "recompute", "decode")


class Kind(NamedTuple):
    """A class of blocks: at least `low` holders, and fewer than the next kind; -1 holders:
    cached."""

    low: int
    label: str
    colour: str


# Colours of Okabe and Ito (Color Universal Design, 2008), distinguishable by colour-blind readers.
KINDS = (
    Kind(-1, "cached", "#56B4E9"),
    Kind(0, "free", "#D9D9D9"),
    Kind(1, "used by one", "#0072B2"),
    Kind(2, "shared by 2 or 3", "#009E73"),
    Kind(4, "shared by 4 to 7", "#E69F00"),
    Kind(8, "shared by 8 or more", "#D55E00"),
)
_LOWS = [kind.low for kind in KINDS]


def kind_index(num_holders: int) -> int:
    """The index in `KINDS` of a block with this number of holders (0: free, -1: cached)."""
    return bisect_right(_LOWS, num_holders) - 1


def count_kinds(states: Iterable[int]) -> list[int]:
    counts = Counter(map(kind_index, states))
    return [counts[index] for index in range(len(KINDS))]


def to_cells(states: list[int], size: int) -> list[int]:
    """The kind of each cell of `size` blocks: the most frequent kind among them."""
    cells = []
    for first in range(0, len(states), size):
        counts = Counter(map(kind_index, states[first : first + size]))
        [(kind, _)] = counts.most_common(1)
        cells.append(kind)
    return cells


def group_label(key: Hashable) -> str:
    """A layer group's label, from its window, or from the kind of its cache and its window."""
    kind, window = key if isinstance(key, tuple) else ("self", key)
    if kind == "cross":
        return "cross attention"
    if window is None:
        return "full attention"
    return f"window of {window:,} tokens"


def format_bytes(num_bytes: float) -> str:
    """Formats bytes in binary units, with about three digits."""
    value = float(num_bytes)
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value >= 1024:
            value = value / 1024
            unit = larger
    if unit == "bytes" or value >= 100:
        return f"{value:.0f} {unit}"
    return f"{value:.3g} {unit}"


def require(module: str) -> Any:
    """Imports a module of matplotlib. Raises `ImportError`, naming the extra, if matplotlib is not
    installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":  # matplotlib is installed, but lacks a dependency
            raise
        message = 'this needs matplotlib: pip install "hf_paged[viz]"'
        raise ImportError(message, name="matplotlib") from error


def _new_axes(height: float) -> Any:
    make_figure = require("matplotlib.figure").Figure
    figure = make_figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")

    def png() -> bytes:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        return buffer.getvalue()

    figure._repr_png_ = png  # without it notebooks show only figures of pyplot
    return figure.add_subplot()


def _add_legend(ax: Any, handles: list[Any], columns: int) -> None:
    ax.legend(
        handles=handles,
        ncols=columns,
        fontsize=8.5,
        handlelength=1.1,
        columnspacing=1.0,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        frameon=False,
    )


def plot_block_map(block_map: Mapping[Any, list[int]], title: str = "", ax: Any = None) -> Any:
    """Plots a square for each block, by block id, group under group, with the number of holders
    where there is room. Returns a figure outside of pyplot. `block_map`: the number of holders of
    every block (0: free, -1: cached), by the group's window or by kind and window. Raises
    `ImportError` without matplotlib."""
    groups = {key: states for key, states in block_map.items() if states}
    num_blocks = sum(map(len, groups.values()))
    size = max(1, -(-num_blocks // MAX_CELLS))  # blocks in a cell
    panels = [(key, states, to_cells(states, size)) for key, states in groups.items()]
    num_cells = sum(len(cells) for *_, cells in panels)
    _, widest = _NUM_COLUMNS[-1]
    columns = next((number for most, number in _NUM_COLUMNS if num_cells <= most), widest)
    heading = 0.0
    if len(panels) > 1:
        heading = _HEADING * columns
    heights = [-(-len(cells) // columns) + heading for *_, cells in panels]
    rows = sum(heights) or 1.0
    if ax is None:
        height = rows * 0.97 * WIDTH / columns + 0.9
        if title:
            height += 0.3
        ax = _new_axes(height)
    poly_collection = require("matplotlib.collections").PolyCollection
    is_wide = columns <= _NUMBERED_COLUMNS
    line = 1.5 if is_wide else 0.5
    top = 0.0
    ticks: dict[float, int] = {}  # by their height in cells, the first block id of rows
    for key, states, cells in panels:
        if heading:
            ax.text(
                0,
                top + 0.85 * heading,
                f"{group_label(key)}: {len(states):,} blocks",
                fontsize=9,
                va="bottom",
            )
            top += heading
        squares = []
        for place in range(len(cells)):
            row, left = divmod(place, columns)
            high = top + row
            right = left + 1
            low = high + 1
            squares.append([(left, high), (right, high), (right, low), (left, low)])
        faces = [KINDS[cell].colour for cell in cells]
        collection = poly_collection(
            squares,
            facecolors=faces,
            edgecolors="white",
            linewidths=line,
        )
        ax.add_collection(collection)
        numbered_states = states if size == 1 and is_wide else ()
        for block_id, state in enumerate(numbered_states):
            if state > 1:
                row, column = divmod(block_id, columns)
                ax.text(
                    column + 0.5,
                    top + row + 0.52,
                    f"{state}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    weight="bold",
                )
        num_rows = -(-len(cells) // columns)
        for row in range(0, num_rows, -(-columns // 50)):
            ticks[top + row + 0.5] = row * columns * size
        top += num_rows
    ax.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal")
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    row_labels = [f"{block_id:,}" for block_id in ticks.values()]
    ax.set_yticks(list(ticks), row_labels)
    numbered = range(0, columns, columns // 4) if ticks else range(0)
    centres = [column + 0.5 for column in numbered]
    column_labels = [f"{column * size:,}" for column in numbered]
    ax.set_xticks(centres, column_labels)
    if panels:
        scale = ""
        if size > 1:
            scale = f"; {size} blocks to a cell"
        ax.set_xlabel(f"block id: number at the row + number below the column{scale}", fontsize=9)
    else:
        ax.text(columns / 2, 0.5, "no blocks yet", ha="center", va="center")
    ax.set_title(title, loc="left", fontsize=10, pad=44, parse_math=False)
    counts = count_kinds(state for states in groups.values() for state in states)
    patch = require("matplotlib.patches").Patch
    handles = []
    for kind, count in zip(KINDS, counts):
        label = f"{kind.label}: {count:,}"
        handles.append(patch(color=kind.colour, label=label))
    _add_legend(ax, handles, columns=3)
    return ax.figure


def plot_intervals(
    intervals: Sequence[Interval],
    unit: str = "steps",
    ax: Any = None,
    max_requests: int = MAX_REQUESTS,
    verifications: Sequence[Verification] = (),
) -> Any:
    """Plots a row for each of the last `max_requests` requests, in order of arrival, over steps or
    seconds, with a mark where each ended. Where a step verified a draft, columns within the row's
    bar show the numbers of drafted and accepted tokens; the longest draft fills the bar. Returns a
    figure as `plot_block_map`. Raises `ValueError` for an unknown `unit` or `max_requests` below
    1."""
    if unit not in ("steps", "seconds"):
        raise ValueError(f"`unit` is {unit!r}: it must be one of steps, seconds")
    if max_requests < 1:
        raise ValueError(f"`max_requests` is {max_requests}: it must be at least 1")
    numbers = sorted({interval.number for interval in intervals})
    rows = {number: row for row, number in enumerate(numbers[-max_requests:])}
    intervals = [interval for interval in intervals if interval.number in rows]
    if ax is None:
        row_height = min(0.24, 10 / max(1, len(rows)))
        ax = _new_axes(row_height * len(rows) + 1.1)
    origin = min((interval.start for interval in intervals), default=0.0)

    def span(interval: Interval) -> tuple[float, float]:
        if unit == "steps":
            return interval.first_step, interval.end_step
        return interval.start - origin, interval.end - origin

    patch = require("matplotlib.patches").Patch
    handles: list[Any] = []
    for activity, style in _STYLES.items():
        of_activity = [interval for interval in intervals if interval.activity.value == activity]
        height = _BAR if activity in _IN_BATCH else _NARROW_BAR
        for number, row in rows.items():
            row_intervals = [interval for interval in of_activity if interval.number == number]
            spans = [span(interval) for interval in row_intervals]
            bars = [(start, end - start) for start, end in spans if end > start]
            if bars:
                ax.broken_barh(bars, (row - height / 2, height), **style)
        if of_activity:
            handles.append(patch(label=activity, **style))
    verifications = [draft for draft in verifications if draft.number in rows]
    most = max((draft.num_draft_tokens for draft in verifications), default=0)
    drafts = _DRAFTS if verifications else {}
    for counted, (label, colour) in drafts.items():
        columns = []
        for draft in verifications:
            left: float = draft.step
            right: float = draft.step + 1
            if unit == "seconds":
                left = draft.start - origin
                right = draft.end - origin
            low = rows[draft.number] + _BAR / 2
            high = low - _BAR * getattr(draft, counted) / most
            columns.append([(left, low), (left, high), (right, high), (right, low)])
        poly_collection = require("matplotlib.collections").PolyCollection
        ax.add_collection(poly_collection(columns, facecolor=colour))
        total = sum(getattr(draft, counted) for draft in verifications)
        handles.append(patch(color=colour, label=f"{label}: {total:,}"))
    ends = [interval for interval in intervals if interval.is_last]
    marks = ax.plot(
        [span(interval)[1] for interval in ends],
        [rows[interval.number] for interval in ends],
        label="ended",
        color="black",
        linestyle="none",
        marker="|",
        markersize=9,
        markeredgewidth=1.8,
    )
    if ends:
        handles += marks
    names = {rows[interval.number]: str(interval.request_id) for interval in intervals}
    rows_a_tick = max(1, -(-len(rows) // 60))
    ticks = sorted(names)[::rows_a_tick]
    labels = []
    for row in ticks:
        name = names[row]
        if len(name) > _MAX_NAME:
            name = f"{name[: _MAX_NAME - 1]}\N{HORIZONTAL ELLIPSIS}"
        labels.append(name)
    ax.set_yticks(ticks, labels, fontsize=8, parse_math=False)
    left = min((span(interval)[0] for interval in intervals), default=0)
    bottom = max(1, len(rows)) - 0.4
    ax.set(xlim=(left, None), ylim=(bottom, -0.6), axisbelow=True)
    label = "step" if unit == "steps" else "seconds"
    ax.set_xlabel(label, fontsize=9)
    ax.tick_params(axis="x", labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    if not rows:
        ax.text(0.5, 0.5, "no requests yet", transform=ax.transAxes, ha="center", va="center")
    if len(rows) < len(numbers):
        ax.set_ylabel(f"the last {len(rows)} of {len(numbers)} requests")
    _add_legend(ax, handles, columns=7)
    return ax.figure


def _used(stats: MemoryStats | EngineStats, limit: str = "") -> dict[str, str]:
    figures = {
        "blocks used, at the peak": f"{stats.used_blocks:,}, {stats.peak_blocks:,}{limit}",
        "of them shared": f"{stats.shared_blocks:,}",
        "bytes used, at the peak": (
            f"{format_bytes(stats.used_bytes)}, {format_bytes(stats.peak_bytes)}"
        ),
    }
    if stats.kv_dtype is not None:
        figures["keys and values stored as"] = stats.kv_dtype
    if stats.budget_bytes is not None:
        figures["budget of all pools"] = format_bytes(stats.budget_bytes)
    if stats.tier_kept_blocks or stats.tier_restored_blocks:
        counts = f"{stats.tier_kept_blocks:,}, {stats.tier_restored_blocks:,}"
        figures["blocks to the tiers below, and back"] = counts
        host = format_bytes(stats.tier_host_bytes)
        disk = format_bytes(stats.tier_disk_bytes)
        figures["bytes in host memory, on disk"] = f"{host}, {disk}"
    return figures


def memory_figures(stats: MemoryStats) -> dict[str, str]:
    """Returns the figures of a `MemoryStats` as text, by label."""
    figures = {}
    if stats.plain_bytes:
        share = f"{stats.call_bytes / stats.plain_bytes:.0%}"
        figures["last call: keys and values at the peak"] = (
            f"{format_bytes(stats.call_bytes)} ({share} of plain's)"
        )
        figures["last call: plain's cache at its end"] = format_bytes(stats.plain_bytes)
    kept = {
        "bytes held by the pool": format_bytes(stats.held_bytes),
        "blocks cached for later prompts": f"{stats.cached_blocks:,}",
    }
    return figures | _used(stats) | kept


def cache_html(title: str, stats: MemoryStats, block_map: Mapping[Any, list[int]]) -> str:
    more = {
        "tokens in a block": f"{stats.block_size}",
        "blocks copied on write": f"{stats.copied_blocks:,}",
    }
    return memory_html(title, _used(stats) | more, block_map)


def engine_html(title: str, stats: EngineStats, block_map: Mapping[Any, list[int]]) -> str:
    hits = stats.num_prefix_hit_tokens / max(1, stats.num_prompt_tokens)
    limit = " (no limit)"
    if stats.num_blocks is not None:
        limit = f" (of {stats.num_blocks:,})"
    figures = {
        "requests running, waiting, ended": (
            f"{stats.num_running:,}, {stats.num_waiting:,}, {stats.num_finished:,}"
        ),
        **_used(stats, limit),
        "prompt tokens found in the cache": f"{stats.num_prefix_hit_tokens:,} ({hits:.0%})",
        "preemptions, of them by swap": f"{stats.num_preemptions:,}, {stats.num_swaps:,}",
        "tokens generated, steps": f"{stats.num_generated_tokens:,}, {stats.num_steps:,}",
        "tokens per second": f"{stats.tokens_per_second:,.0f}",
    }
    if stats.num_draft_tokens:
        figures["tokens drafted, of them accepted"] = (
            f"{stats.num_draft_tokens:,}, {stats.num_accepted_tokens:,}"
        )
    return memory_html(title, figures, block_map)


def memory_html(title: str, figures: Mapping[str, str], block_map: Mapping[Any, list[int]]) -> str:
    """HTML: a table of `figures` above a strip of each group's blocks, readable on light and dark
    backgrounds."""
    cells = "".join(
        f'<tr><td style="text-align:left;padding:1px 12px 1px 0">{escape(name)}</td>'
        f'<td style="text-align:right;padding:1px 0">{escape(value)}</td></tr>'
        for name, value in figures.items()
    )
    strips = "".join(_strip(key, states) for key, states in block_map.items() if states)
    counts = count_kinds(state for states in block_map.values() for state in states)
    legend = "".join(
        f'<span style="white-space:nowrap;margin-right:14px"><svg width="{_CELL}" height="{_CELL}">'
        f"{_squares(kind, [0])}</svg> {kind.label}: {count:,}</span>"
        for kind, count in zip(KINDS, counts)
        if count
    )
    if legend:
        strips += f'<div style="margin-top:4px">{legend}</div>'
    table = f'<table style="border:none;margin:4px 0">{cells}</table>'
    return f"<div><b>{escape(title)}</b>{table}{strips}</div>"


def _strip(key: Hashable, states: list[int]) -> str:
    size = -(-len(states) // (COLUMNS * MAX_ROWS))
    cells = to_cells(states, size)
    width = _CELL * min(len(cells), COLUMNS)
    height = _CELL * -(-len(cells) // COLUMNS)
    label = f"{group_label(key)}: {len(states):,} blocks"
    if size > 1:
        label += f", {size} to a cell"
    label = escape(label)
    squares = ""
    for index, kind in enumerate(KINDS):
        places = [place for place, cell in enumerate(cells) if cell == index]
        if places:
            squares += _squares(kind, places)
    return (
        f'<div style="margin-top:4px">{label}</div>'
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}" style="display:block;max-width:100%">{squares}</svg>'
    )


def _squares(kind: Kind, places: Iterable[int]) -> str:
    side = _CELL - 1
    squares = ""
    for place in places:
        row, column = divmod(place, COLUMNS)
        squares += f"M{_CELL * column} {_CELL * row}h{side}v{side}h-{side}z"
    fill = f'fill="{kind.colour}"'
    if kind.label == "free":
        # a translucent grey is pale on white and on black backgrounds
        fill = 'fill="#808080" fill-opacity="0.35"'
    return f'<path d="{squares}" {fill}/>'
