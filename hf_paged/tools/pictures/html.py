"""What notebooks show of a cache and an engine: a table and a strip of blocks in HTML that needs no library."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from .kinds import FREE, KINDS, Kind, count_kinds, group_label, to_cells

if TYPE_CHECKING:
    from ...batching.results import EngineStats
    from ...cache.memory import MemoryStats

COLUMNS, MAX_ROWS = 64, 12  # cells of a strip; of larger pools a cell shows several blocks
_CELL = 10  # pixels


def cache_html(title: str, stats: MemoryStats, block_map: Mapping[Any, list[int]]) -> str:
    """`memory_html` of what a cache's memory holds."""
    figures = {
        "blocks used, at the peak": f"{stats.used_blocks:,}, {stats.peak_blocks:,}",
        "of them shared": f"{stats.shared_blocks:,}",
        "bytes used, at the peak": f"{format_bytes(stats.used_bytes)}, {format_bytes(stats.peak_bytes)}",
        "tokens in a block": f"{stats.block_size}",
        "blocks copied on write": f"{stats.copied_blocks:,}",
    }
    return memory_html(title, figures, block_map)


def engine_html(title: str, stats: EngineStats, block_map: Mapping[Any, list[int]]) -> str:
    """`memory_html` of what an engine holds and has done."""
    limit = "no limit" if stats.num_blocks is None else f"of {stats.num_blocks:,}"
    hits = stats.num_prefix_hit_tokens / max(1, stats.num_prompt_tokens)
    figures = {
        "requests running, waiting, ended": f"{stats.num_running:,}, {stats.num_waiting:,}, {stats.num_finished:,}",
        "blocks used, at the peak": f"{stats.used_blocks:,}, {stats.peak_blocks:,} ({limit})",
        "of them shared": f"{stats.shared_blocks:,}",
        "bytes used, at the peak": f"{format_bytes(stats.used_bytes)}, {format_bytes(stats.peak_bytes)}",
        "prompt tokens found in the cache": f"{stats.num_prefix_hit_tokens:,} ({hits:.0%})",
        "preemptions, of them by swap": f"{stats.num_preemptions:,}, {stats.num_swaps:,}",
        "tokens generated, steps": f"{stats.num_generated_tokens:,}, {stats.num_steps:,}",
        "tokens per second": f"{stats.tokens_per_second:,.0f}",
    }
    return memory_html(title, figures, block_map)


def memory_html(title: str, figures: Mapping[str, str], block_map: Mapping[Any, list[int]]) -> str:
    """
    A table of `figures` above a strip of every layer group's blocks. Text has the page's own colour; all others are
    readable on light and on dark.

    Args:
        title (`str`): A line above all.
        figures (`Mapping[str, str]`): Names and values. Whatever they hold is shown as it is, never read as HTML.
        block_map (`Mapping`): As in `plot_block_map`.
    """
    cells = "".join(
        f'<tr><td style="text-align:left;padding:1px 12px 1px 0">{escape(name)}</td>'
        f'<td style="text-align:right;padding:1px 0">{escape(value)}</td></tr>'
        for name, value in figures.items()
    )
    strips = "".join(_strip(key, states) for key, states in block_map.items() if states)
    states = [state for states in block_map.values() for state in states]
    table = f'<table style="border:none;margin:4px 0">{cells}</table>'
    return f"<div><b>{escape(title)}</b>{table}{strips}{_legend(states) if states else ''}</div>"


def _strip(key: Hashable, states: list[int]) -> str:
    size = -(-len(states) // (COLUMNS * MAX_ROWS))
    cells = to_cells(states, size)
    width, height = _CELL * min(len(cells), COLUMNS), _CELL * -(-len(cells) // COLUMNS)
    label = escape(f"{group_label(key)}: {len(states):,} blocks" + (f", {size} to a cell" if size > 1 else ""))
    places = [[place for place, cell in enumerate(cells) if cell == kind] for kind in range(len(KINDS))]
    squares = "".join(_squares(kind, each) for kind, each in zip(KINDS, places) if each)
    return (
        f'<div style="margin-top:4px">{label}</div>'
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}" style="display:block;max-width:100%">{squares}</svg>'
    )


def _squares(kind: Kind, places: Iterable[int]) -> str:
    """One SVG path of a square at each place of a strip, with gaps between them."""
    side = _CELL - 1
    corners = ((_CELL * (place % COLUMNS), _CELL * (place // COLUMNS)) for place in places)
    squares = "".join(f"M{x} {y}h{side}v{side}h-{side}z" for x, y in corners)
    # a grey that is pale on white would glare on black: a clear one is pale on both
    fill = 'fill="#808080" fill-opacity="0.35"' if kind is FREE else f'fill="{kind.colour}"'
    return f'<path d="{squares}" {fill}/>'


def _legend(states: list[int]) -> str:
    entries = "".join(
        f'<span style="white-space:nowrap;margin-right:14px"><svg width="{_CELL}" height="{_CELL}">'
        f"{_squares(kind, [0])}</svg> {kind.label}: {count:,}</span>"
        for kind, count in zip(KINDS, count_kinds(states))
        if count
    )
    return f'<div style="margin-top:4px">{entries}</div>'


def format_bytes(num_bytes: float) -> str:
    """In binary units, with about three digits."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.3g} {unit}"
