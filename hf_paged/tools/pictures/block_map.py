"""The blocks of a pool as a matplotlib picture: which are free, used, shared by how many, cached."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from typing import Any

from .kinds import KINDS, count_kinds, group_label, to_cells
from .optional import require

WIDTH, DPI = 8.0, 100  # inches; 800 pixels
MAX_CELLS = 128 * 64  # of all groups together; of larger pools a cell shows several blocks
_COLUMNS = ((512, 32), (2048, 64), (MAX_CELLS, 128))  # up to this number of cells, this number of columns
_NUMBERED_COLUMNS = 32  # with more columns the number of holders does not fit into a cell
_HEADING = 1 / 20  # of the width: room above a group among several


def plot_block_map(block_map: Mapping[Any, list[int]], title: str | None = None, ax: Any = None) -> Any:
    """
    Draws a square for each block, in the order of the block ids, layer group under layer group. A shared block says how
    many hold it, where there is room for that.

    Args:
        block_map (`Mapping`): For each layer group, by its window or by kind and window, the holders of every block (0:
            free, -1: cached).
        title (`str`, *optional*): Above the picture.
        ax (`matplotlib.axes.Axes`, *optional*): Draw there; otherwise in a new figure, 800 pixels wide.

    Returns:
        `matplotlib.figure.Figure`: What was drawn in. A new one does not belong to pyplot: a notebook shows it, a
        script saves it (`figure.savefig`).

    Raises:
        ImportError: without matplotlib.
    """
    groups = {key: states for key, states in block_map.items() if states}
    size = max(1, -(-sum(map(len, groups.values())) // MAX_CELLS))  # blocks in a cell
    panels = [(key, states, to_cells(states, size)) for key, states in groups.items()]
    columns = _num_columns(sum(len(cells) for *_, cells in panels))
    heading = _HEADING * columns if len(panels) > 1 else 0.0
    rows = sum(-(-len(cells) // columns) + heading for *_, cells in panels) or 1.0
    if ax is None:
        ax = new_axes(rows * 0.97 * WIDTH / columns + 0.9 + (0.3 if title else 0.0))
    top = 0.0
    ticks: dict[float, int] = {}
    for key, states, cells in panels:
        if heading:
            text = f"{group_label(key)}: {len(states):,} blocks"
            ax.text(0, top + 0.85 * heading, text, fontsize=9, va="bottom")
            top += heading
        num_rows = _draw_cells(ax, cells, columns, top)
        if size == 1 and columns <= _NUMBERED_COLUMNS:
            _write_numbers(ax, states, columns, top)
        ticks |= {top + row + 0.5: row * columns * size for row in range(0, num_rows, -(-columns // 50))}
        top += num_rows
    _dress(ax, columns, rows, size, ticks)
    if not panels:
        ax.text(columns / 2, 0.5, "no blocks yet", ha="center", va="center")
    if title is not None:
        ax.set_title(title, loc="left", fontsize=10, pad=44, parse_math=False)
    _add_legend(ax, [state for states in groups.values() for state in states])
    return ax.figure


def _num_columns(num_cells: int) -> int:
    return next((columns for most, columns in _COLUMNS if num_cells <= most), _COLUMNS[-1][1])


def new_axes(height: float) -> Any:
    """Axes in a figure of their own, 800 pixels wide and `height` inches high."""
    figure_class = _shown_in_notebooks(require("matplotlib.figure").Figure)
    return figure_class(figsize=(WIDTH, height), dpi=DPI, layout="constrained").add_subplot()


@functools.cache
def _shown_in_notebooks(figure_class: Any) -> Any:
    class Picture(figure_class):
        """A figure that notebooks show though pyplot, which would show it a second time, does not know of it."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return Picture


def _draw_cells(ax: Any, cells: list[int], columns: int, top: float) -> int:
    """Draws the cells below `top` and returns how many rows they take."""
    colors, collections = require("matplotlib.colors"), require("matplotlib.collections")
    palette = [colors.to_rgba(kind.colour) for kind in KINDS]
    squares = []
    for place in range(len(cells)):
        row, column = divmod(place, columns)
        x, y = column, top + row
        squares.append([(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)])
    line = 1.5 if columns <= _NUMBERED_COLUMNS else 0.5
    faces = [palette[cell] for cell in cells]
    ax.add_collection(collections.PolyCollection(squares, facecolors=faces, edgecolors="white", linewidths=line))
    return -(-len(cells) // columns)


def _write_numbers(ax: Any, states: list[int], columns: int, top: float) -> None:
    for block_id, state in enumerate(states):
        if state > 1:
            row, column = divmod(block_id, columns)
            ax.text(column + 0.5, top + row + 0.52, f"{state}", ha="center", va="center", fontsize=8, weight="bold")


def _dress(ax: Any, columns: int, rows: float, size: int, ticks: dict[float, int]) -> None:
    """`ticks`: by their height in cells, the first block id of rows."""
    ax.set_xlim(0, columns)
    ax.set_ylim(rows, 0)
    ax.set_aspect("equal")
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    ax.set_yticks(list(ticks), [f"{block_id:,}" for block_id in ticks.values()])
    places = range(0, columns, columns // 4) if ticks else ()
    ax.set_xticks([place + 0.5 for place in places], [f"{place * size:,}" for place in places])
    if ticks:
        cells = "" if size == 1 else f"; {size} blocks to a cell"
        ax.set_xlabel(f"block id: number at the row + number below the column{cells}", fontsize=9)


def _add_legend(ax: Any, states: list[int]) -> None:
    patches = require("matplotlib.patches")
    handles = [
        patches.Patch(color=kind.colour, label=f"{kind.label}: {count:,}")
        for kind, count in zip(KINDS, count_kinds(states))
    ]
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "frameon": False}
    ax.legend(handles=handles, ncols=3, fontsize=9, handlelength=1, handleheight=1, **place)
