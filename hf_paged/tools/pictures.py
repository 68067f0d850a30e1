"""Plots of blocks and of requests over steps; HTML of statistics and blocks; statistics as text.
Imports matplotlib on first use."""

from __future__ import annotations

import importlib
import io
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cache.groups import group_label
from .figures import common_figures, memory_figures

if TYPE_CHECKING:
    from ..batching.engine import PagedEngine
    from ..cache.memory_stats import MemoryStats
    from ..cache.paged_cache import PagedCache
    from .timeline import Interval, Verification

TITLE = "Memory for keys and values"
WIDTH, DPI = 8.0, 100  # inches; dots per inch
# limit on the cells of a plot, over all groups; in larger pools a cell stands for several blocks
MAX_CELLS = 128 * 64
_NUM_COLUMNS = (32, 64, 128)
_MAX_CELLS_IN_COLUMNS = (512, 2048)  # maximum cells of a plot with 32 columns, and with 64
_MAX_NUMBERED_COLUMNS = 32  # with more columns, the number of holders does not fit into a cell
_HEADING = 1 / 20  # height of a group's heading, as a fraction of the width

# the size of a strip in HTML, in cells; in larger pools a cell stands for several blocks
COLUMNS, MAX_ROWS = 64, 12
_CELL = 10  # width and height in pixels
MAX_REQUESTS = 40
_MAX_ID_LEN = 16  # characters of a request's id
_STYLES: dict[str, dict[str, Any]] = {  # of bars, by the name of a request's activity
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
_BAR, _NARROW_BAR = 0.76, 0.26  # heights of bars, as fractions of a row's height
_DRAFTS = {  # label and colour of a count of draft tokens, by its field in `Verification`
    "num_draft_tokens": ("drafted", "#F0E442"),
    "num_accepted_tokens": ("accepted", "#009E73"),
}
# activities of requests in the batch, with wide bars; other activities have narrow bars
_IN_BATCH = ("prefill", "recompute", "decode")


class Kind(NamedTuple):
    """A class of blocks: blocks with at least `min_holders` holders, and with fewer than the next
    kind's minimum. A minimum of -1 stands for cached blocks."""

    min_holders: int
    label: str
    colour: str


# Okabe and Ito's colours for colour-blind readers (Color Universal Design, 2008)
KINDS = (
    Kind(-1, "cached", "#56B4E9"),
    Kind(0, "free", "#D9D9D9"),
    Kind(1, "used by one", "#0072B2"),
    Kind(2, "shared by 2 or 3", "#009E73"),
    Kind(4, "shared by 4 to 7", "#E69F00"),
    Kind(8, "shared by 8 or more", "#D55E00"),
)
_MIN_HOLDERS = [kind.min_holders for kind in KINDS]


def kind_index(num_holders: int) -> int:
    """Returns the index in `KINDS` for a block with this number of holders (0: free, -1:
    cached)."""
    return bisect_right(_MIN_HOLDERS, num_holders) - 1


def count_kinds(holder_counts: Iterable[int]) -> list[int]:
    """Returns the number of blocks of each of `KINDS`, given the number of holders of each
    block."""
    counts = Counter(map(kind_index, holder_counts))
    return [counts[index] for index in range(len(KINDS))]


def to_cells(holder_counts: list[int], cell_size: int) -> list[int]:
    """Returns, for each cell of `cell_size` blocks, the index in `KINDS` of the blocks' most
    frequent kind. `holder_counts`: the number of holders of each block."""
    cells = []
    for start in range(0, len(holder_counts), cell_size):
        counts = Counter(map(kind_index, holder_counts[start : start + cell_size]))
        [(index, _)] = counts.most_common(1)
        cells.append(index)
    return cells


def import_matplotlib(module: str) -> Any:
    """Imports a module of matplotlib and returns it. Raises `ImportError`, which names the extra,
    if matplotlib is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":  # matplotlib is installed, but lacks a dependency
            raise
        message = 'a plot needs matplotlib: pip install "hf_paged[viz]"'
        raise ImportError(message, name="matplotlib") from error


def _new_axes() -> Any:
    make_figure = import_matplotlib("matplotlib.figure").Figure
    figure = make_figure(figsize=(WIDTH, 1), dpi=DPI, layout="constrained")

    def png() -> bytes:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        return buffer.getvalue()

    figure._repr_png_ = png  # for notebooks, which by themselves show only pyplot's figures
    return figure.add_subplot()


def _add_boxes(ax: Any, boxes: Iterable[tuple[float, float, float, float]], **style: Any) -> None:
    """Draws boxes `(left, right, top, bottom)`, except those without width."""
    corners = [
        [(left, top), (right, top), (right, bottom), (left, bottom)]
        for left, right, top, bottom in boxes
        if right > left
    ]
    if corners:
        poly_collection = import_matplotlib("matplotlib.collections").PolyCollection
        ax.add_collection(poly_collection(corners, **style))


def _add_legend(
    ax: Any, styles: Mapping[str, Mapping[str, Any]], columns: int, lines: Sequence[Any] = ()
) -> None:
    """Adds a legend with a box for each of `styles`, by label, and with `lines`, which have
    labels of their own."""
    make_patch = import_matplotlib("matplotlib.patches").Patch
    boxes = [make_patch(label=label, **style) for label, style in styles.items()]
    ax.legend(
        handles=[*boxes, *lines],
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
    """Plots a square for each block (in large pools, for several blocks) in order of block ids, one
    group below another. Squares of shared blocks show the number of holders, where it fits.

    Args:
        block_map: By group, the number of holders of each block (0: free, -1: cached). A key is a
            group's window, or its kind and window.
        title: The heading.
        ax: The matplotlib axes to draw on; by default those of a new figure, unknown to pyplot.

    Returns:
        `matplotlib.figure.Figure`: The figure of `ax`.

    Raises:
        ImportError: without matplotlib.
    """
    panels = {key: holder_counts for key, holder_counts in block_map.items() if holder_counts}
    num_blocks = sum(map(len, panels.values()))
    cell_size = max(1, -(-num_blocks // MAX_CELLS))  # blocks per cell
    num_cells = sum(-(-len(holder_counts) // cell_size) for holder_counts in panels.values())
    columns = _NUM_COLUMNS[bisect_left(_MAX_CELLS_IN_COLUMNS, num_cells)]
    heading = _HEADING * columns if len(panels) > 1 else 0.0
    has_large_cells = columns <= _MAX_NUMBERED_COLUMNS
    has_numbers = has_large_cells and cell_size == 1
    is_new = ax is None
    if is_new:
        ax = _new_axes()
    top = 0.0
    ticks: dict[float, int] = {}  # first block ids of labelled rows, by the row's position in cells
    for key, holder_counts in panels.items():
        if heading:
            caption = f"{group_label(key)}: {len(holder_counts):,} blocks"
            ax.text(0, top + 0.85 * heading, caption, fontsize=9, va="bottom")
            top += heading
        cells = to_cells(holder_counts, cell_size)
        boxes = []
        for index in range(len(cells)):
            row, left = divmod(index, columns)
            cell_top = top + row
            boxes.append((left, left + 1, cell_top, cell_top + 1))
            if has_numbers and holder_counts[index] > 1:
                ax.text(
                    left + 0.5,
                    cell_top + 0.52,
                    f"{holder_counts[index]}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    weight="bold",
                )
        _add_boxes(
            ax,
            boxes,
            facecolors=[KINDS[cell].colour for cell in cells],
            edgecolors="white",
            linewidths=1.5 if has_large_cells else 0.5,
        )
        num_rows = -(-len(cells) // columns)
        for row in range(0, num_rows, -(-columns // 50)):
            ticks[top + row + 0.5] = row * columns * cell_size
        top += num_rows
    height = top or 1.0
    if is_new:
        ax.figure.set_figheight(height * 0.97 * WIDTH / columns + (1.2 if title else 0.9))
    ax.set(xlim=(0, columns), ylim=(height, 0), aspect="equal")
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    row_labels = [f"{block_id:,}" for block_id in ticks.values()]
    ax.set_yticks(list(ticks), row_labels)
    labelled_columns = range(0, columns, columns // 4) if panels else range(0)
    centres = [column + 0.5 for column in labelled_columns]
    column_labels = [f"{column * cell_size:,}" for column in labelled_columns]
    ax.set_xticks(centres, column_labels)
    if panels:
        scale = f"; {cell_size} blocks per cell" if cell_size > 1 else ""
        ax.set_xlabel(f"block id: number at the row + number below the column{scale}", fontsize=9)
    else:
        ax.text(columns / 2, 0.5, "no blocks yet", ha="center", va="center")
    ax.set_title(title, loc="left", fontsize=10, pad=44, parse_math=False)
    counts = count_kinds(itertools.chain.from_iterable(panels.values()))
    styles = {
        f"{kind.label}: {count:,}": {"color": kind.colour} for kind, count in zip(KINDS, counts)
    }
    _add_legend(ax, styles, columns=3)
    return ax.figure


def plot_engine(engine: PagedEngine, ax: Any = None) -> Any:
    """Plots the blocks of an engine with `plot_block_map`."""
    block_map = engine.block_map()
    max_blocks = engine.config.num_blocks
    num_used = sum(count > 0 for holder_counts in block_map.values() for count in holder_counts)
    title = f"{type(engine.model).__name__}: {num_used:,} blocks in use"
    if max_blocks is not None:
        num_unallocated = max_blocks - sum(map(len, block_map.values()))
        title += f" of {max_blocks:,}, {num_unallocated:,} not allocated"
    return plot_block_map(block_map, title, ax)


def plot_cache(cache: PagedCache, ax: Any = None) -> Any:
    """Plots the blocks of a cache's memory with `plot_block_map`."""
    block_map = cache.memory.block_map()
    return plot_block_map(block_map, f"{cache.memory.num_used:,} blocks in use", ax)


def plot_intervals(
    intervals: Sequence[Interval],
    unit: str = "steps",
    ax: Any = None,
    max_requests: int = MAX_REQUESTS,
    verifications: Sequence[Verification] = (),
) -> Any:
    """Plots a row for each of the last `max_requests` requests, in order of arrival, over `unit`
    ("steps" or "seconds"), with a mark where a request ended. For each step that verified a draft,
    boxes within the row's bar show the numbers of drafted and accepted tokens; the longest draft
    fills the bar. `ax`, the result and `ImportError` are as in `plot_block_map`. Raises
    `ValueError` for an unknown `unit`, or `max_requests` below 1."""
    if unit not in ("steps", "seconds"):
        raise ValueError(f"`unit` is {unit!r}: it must be 'steps' or 'seconds'")
    if max_requests < 1:
        raise ValueError(f"`max_requests` is {max_requests}: it must be at least 1")
    request_numbers = sorted({interval.number for interval in intervals})
    rows = {number: row for row, number in enumerate(request_numbers[-max_requests:])}
    intervals = [interval for interval in intervals if interval.number in rows]
    if ax is None:
        ax = _new_axes()
        ax.figure.set_figheight(min(0.24 * len(rows), 10) + 1.1)
    origin = min((interval.start for interval in intervals), default=0.0)

    def to_x(step: int, seconds: float) -> float:
        return step if unit == "steps" else seconds - origin

    def make_box(
        item: Interval | Verification, first_step: int, end_step: int, bottom: float, height: float
    ) -> tuple[float, float, float, float]:
        """Returns the box of an interval or a draft; `bottom` is relative to the row's centre."""
        bottom += rows[item.number]
        return to_x(first_step, item.start), to_x(end_step, item.end), bottom - height, bottom

    styles = {}
    for activity, style in _STYLES.items():
        bars = [interval for interval in intervals if interval.activity.value == activity]
        height = _BAR if activity in _IN_BATCH else _NARROW_BAR
        boxes = [make_box(bar, bar.first_step, bar.end_step, height / 2, height) for bar in bars]
        _add_boxes(ax, boxes, **style)
        if bars:
            styles[activity] = style
    drafts = [draft for draft in verifications if draft.number in rows]
    max_draft_tokens = max((draft.num_draft_tokens for draft in drafts), default=0)
    for field, (label, colour) in _DRAFTS.items():
        counts = [getattr(draft, field) for draft in drafts]
        boxes = [
            make_box(draft, draft.step, draft.step + 1, _BAR / 2, _BAR * count / max_draft_tokens)
            for draft, count in zip(drafts, counts)
        ]
        _add_boxes(ax, boxes, facecolor=colour)
        if drafts:
            styles[f"{label}: {sum(counts):,}"] = {"color": colour}
    last_intervals = [interval for interval in intervals if interval.is_last]
    marks = ax.plot(
        [to_x(interval.end_step, interval.end) for interval in last_intervals],
        [rows[interval.number] for interval in last_intervals],
        label="ended",
        color="black",
        linestyle="none",
        marker="|",
        markersize=9,
        markeredgewidth=1.8,
    )
    ids_by_row = {rows[interval.number]: str(interval.request_id) for interval in intervals}
    ticks = range(0, len(rows), max(1, -(-len(rows) // 60)))
    labels = [_shorten(ids_by_row[row]) for row in ticks]
    ax.set_yticks(ticks, labels, fontsize=8, parse_math=False)
    left = min((to_x(interval.first_step, interval.start) for interval in intervals), default=0)
    bottom = max(1, len(rows)) - 0.4
    ax.set(xlim=(left, None), ylim=(bottom, -0.6), axisbelow=True)
    ax.set_xlabel(unit.replace("steps", "step"), fontsize=9)
    ax.tick_params(axis="x", labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    if not rows:
        ax.text(0.5, 0.5, "no requests yet", transform=ax.transAxes, ha="center", va="center")
    if len(rows) < len(request_numbers):
        ax.set_ylabel(f"the last {len(rows)} of {len(request_numbers)} requests")
    _add_legend(ax, styles, columns=7, lines=marks if last_intervals else ())
    return ax.figure


def _shorten(request_id: str) -> str:
    if len(request_id) <= _MAX_ID_LEN:
        return request_id
    return f"{request_id[: _MAX_ID_LEN - 1]}\N{HORIZONTAL ELLIPSIS}"


def engine_html(engine: PagedEngine) -> str:
    """Returns an engine's statistics and blocks as HTML."""
    stats = engine.stats()
    hit_rate = stats.num_prefix_hit_tokens / max(1, stats.num_prompt_tokens)
    limit = " (no limit)"
    if stats.num_blocks is not None:
        limit = f" (of {stats.num_blocks:,})"
    figures = {
        "requests running, waiting, ended": (
            f"{stats.num_running:,}, {stats.num_waiting:,}, {stats.num_finished:,}"
        ),
        **common_figures(stats, limit),
        "prompt tokens found in the cache": f"{stats.num_prefix_hit_tokens:,} ({hit_rate:.0%})",
        "preemptions, of which swaps": f"{stats.num_preemptions:,}, {stats.num_swaps:,}",
        "tokens generated, steps": f"{stats.num_generated_tokens:,}, {stats.num_steps:,}",
        "tokens per second": f"{stats.tokens_per_second:,.0f}",
    }
    if stats.num_draft_tokens:
        figures["tokens drafted, of which accepted"] = (
            f"{stats.num_draft_tokens:,}, {stats.num_accepted_tokens:,}"
        )
    return memory_html(f"PagedEngine({type(engine.model).__name__})", figures, engine.block_map())


def cache_html(cache: PagedCache) -> str:
    """Returns the statistics and blocks of a cache's memory as HTML."""
    stats = cache.stats()
    figures = {
        **common_figures(stats),
        "tokens per block": f"{stats.block_size}",
        "blocks copied on write": f"{stats.copied_blocks:,}",
    }
    title = f"{type(cache).__name__}, {len(cache.layers)} layers"
    return memory_html(title, figures, cache.memory.block_map())


def stats_text(stats: MemoryStats) -> str:
    """Returns the statistics of a memory as text."""
    figures = memory_figures(stats)
    width = max(map(len, figures))
    lines = (f"  {label:{width}}  {text}" for label, text in figures.items())
    return "\n".join([TITLE, *lines])


def stats_html(stats: MemoryStats) -> str:
    """Returns the statistics of a memory as HTML."""
    return memory_html(TITLE, memory_figures(stats), {})


def memory_html(title: str, figures: Mapping[str, str], block_map: Mapping[Any, list[int]]) -> str:
    """Returns HTML with a table of `figures` (texts by label) above a strip of each group's blocks,
    readable on light and dark backgrounds. `block_map` is as in `plot_block_map`."""
    rows = "".join(
        f'<tr><td style="text-align:left;padding:1px 12px 1px 0">{escape(label)}</td>'
        f'<td style="text-align:right;padding:1px 0">{escape(text)}</td></tr>'
        for label, text in figures.items()
    )
    strips = "".join(
        _strip(key, holder_counts) for key, holder_counts in block_map.items() if holder_counts
    )
    counts = count_kinds(count for holder_counts in block_map.values() for count in holder_counts)
    legend = "".join(
        f'<span style="white-space:nowrap;margin-right:14px"><svg width="{_CELL}" height="{_CELL}">'
        f"{_squares(kind, [0])}</svg> {kind.label}: {count:,}</span>"
        for kind, count in zip(KINDS, counts)
        if count
    )
    if legend:
        strips += f'<div style="margin-top:4px">{legend}</div>'
    table = f'<table style="border:none;margin:4px 0">{rows}</table>'
    return f"<div><b>{escape(title)}</b>{table}{strips}</div>"


def _strip(key: Hashable, holder_counts: list[int]) -> str:
    """Returns the HTML of a group's blocks as rows of squares, with a label."""
    cell_size = -(-len(holder_counts) // (COLUMNS * MAX_ROWS))
    cells = to_cells(holder_counts, cell_size)
    width = _CELL * min(len(cells), COLUMNS)
    height = _CELL * -(-len(cells) // COLUMNS)
    label = f"{group_label(key)}: {len(holder_counts):,} blocks"
    if cell_size > 1:
        label += f", {cell_size} per cell"
    label = escape(label)
    squares = ""
    for index, kind in enumerate(KINDS):
        positions = [position for position, cell in enumerate(cells) if cell == index]
        if positions:
            squares += _squares(kind, positions)
    return (
        f'<div style="margin-top:4px">{label}</div>'
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}" style="display:block;max-width:100%">{squares}</svg>'
    )


def _squares(kind: Kind, positions: Iterable[int]) -> str:
    """Returns an SVG path of squares in a kind's colour, at the positions of cells in a strip."""
    side = _CELL - 1
    squares = ""
    for position in positions:
        row, column = divmod(position, COLUMNS)
        squares += f"M{_CELL * column} {_CELL * row}h{side}v{side}h-{side}z"
    fill = f'fill="{kind.colour}"'
    if kind.label == "free":
        # a translucent grey is pale on white and on black backgrounds
        fill = 'fill="#808080" fill-opacity="0.35"'
    return f'<path d="{squares}" {fill}/>'
