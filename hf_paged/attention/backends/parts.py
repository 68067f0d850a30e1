"""Plans which rows and heads the portable path attends to together, once per step, and where their
keys and values are in the blocks. `gather` computes the attention."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cache.reading import BlockLayout, Units
from ...step import StepMetadata

APART_QUERIES = 32
"""From this many queries per row on, rows of several lengths are not gathered together, and the
heads of a group run one after another if all scores are in memory at once."""

SCRATCH_BYTES = 2 << 20
DEVICE_SCRATCH_BYTES = 64 << 20
"""Bytes of K and V gathered at a time, unless one head of one row takes more. On the CPU more would
not stay in L2 and L3; on other devices gathering less would take no longer than the launches."""

PADDING_SHARE = 8
"""Rows of several lengths are gathered together while their padding takes at most one part in this
many of the scratch: that costs less than further operations."""

SLICE_QUERIES = 256
"""Queries at a time under a mask, which skips keys that none of them sees and bounds the rows of
the mask."""

Member = tuple[int, int]
"""A row's number, and the first position that it sees."""

Geometry = tuple[int, int, int]
"""The number of tokens that a row sees, the offset of the first one in its block, and the first
query that sees any."""

GeometryRows = tuple[Geometry, list[Member]]
"""A geometry and its rows."""


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of one geometry, or padded to one, and a range of K/V heads, which fit in the scratch
    together."""

    rows: slice | Tensor
    members: tuple[Member, ...]
    heads: slice
    offset: int  # of the visible range in the first gathered block
    length: int  # of the visible range
    first_query: int  # earlier queries see no keys
    # all queries in order, each range with the keys that any of its queries sees
    slices: tuple[tuple[slice, slice], ...]
    mask_keys: int  # columns of the step's mask, 0 if every query sees every key
    causal: bool  # as many keys as queries, and each query sees keys up to itself
    # of keys and values; if quantized, of the codes and scales of keys, then of values
    units: tuple[Units, ...] = ()
    positions: Tensor | None = None
    """For rows of several lengths: the position of each gathered token, `[rows, length]`. Rows are
    aligned at their ends: a shorter one is padded in front with copies of its first visible
    token."""
    hidden: Tensor | None = None
    """With `positions`: which of them are such padding, `[rows, 1, 1, length]`."""
    slots: slice | None = None
    """For rows that are contiguous in memory (`seams.PlacedRows`): their slots. The visible range
    begins at `offset` in a slot."""


Parts = tuple[tuple[Part, ...], bool]
"""The parts of a step with equally many queries per row, and whether they cover every query of
every row."""


@torch.inference_mode(False)
@torch.no_grad()
def plan_parts(step: StepMetadata, *layouts: BlockLayout) -> Parts:
    """Returns the parts of gathered rows, with their units in each layout. `step.plan` runs this
    once for all layers with the same layouts."""
    geometries, is_complete = geometries_of(step)
    kv_heads = layouts[0].shape[1]
    size = step.block_size
    scratch = SCRATCH_BYTES if step.block_tables.is_cpu else DEVICE_SCRATCH_BYTES
    token_bytes = sum(layout.itemsize * layout.shape[3] for layout in layouts)  # of one head
    most_tokens = scratch // (token_bytes * kv_heads)
    parts = []
    for group in _similar(step, geometries, most_tokens):
        (geometry, rows), *others = group
        make_part = part_maker(step, geometry, geometries)
        if others:
            part = _padded_part(step, group, layouts, make_part)
            parts.append(part)
            continue
        length, offset, _ = geometry
        num_blocks = -(-(offset + length) // size)
        head_bytes = num_blocks * size * token_bytes
        num_rows = max(1, scratch // (head_bytes * kv_heads))
        num_heads = max(1, min(kv_heads, scratch // head_bytes))
        for at in range(0, len(rows), num_rows):
            members = rows[at : at + num_rows]
            tables = []
            for row, low in members:
                first = low // size
                tables.append(step.block_tables[row, first : first + num_blocks])
            blocks = torch.stack(tables).long()
            index = _index(step, members)
            for head in range(0, kv_heads, num_heads):
                heads = slice(head, min(kv_heads, head + num_heads))
                units = _units(layouts, blocks, heads)
                part = make_part(index, tuple(members), heads, offset, units=units)
                parts.append(part)
    return tuple(parts), is_complete


def _units(
    layouts: tuple[BlockLayout, ...],
    tables: Tensor,
    heads: slice,
    positions: Tensor | None = None,
) -> tuple[Units, ...]:
    """Returns `BlockLayout.units` of each layout, computed once for equal layouts."""
    units = {layout: layout.units(tables, heads, positions) for layout in {*layouts}}
    return tuple(units[layout] for layout in layouts)


def _similar(
    step: StepMetadata,
    geometries: list[GeometryRows],
    most: int,
) -> Iterator[list[GeometryRows]]:
    """Groups geometries of similar lengths, of at most `most` tokens including padding. Steps of
    many queries are not grouped: they have few rows, and skip keys that no query sees."""
    group = list[GeometryRows]()
    num_rows = 0
    padding = 0
    queries = step.query_len or 1
    for geometry in geometries:
        (length, _, first_query), members = geometry
        first = group[0] if group else geometry
        (longest, _, skipped), _ = first
        count = len(members)
        num_rows += count
        padding += (longest - length) * count
        # the mask of a group has a row per query and head, and is kept for all layers
        mask_size = num_rows * longest * queries
        fits = mask_size <= most and padding * PADDING_SHARE <= most
        skips_queries = first_query > 0 or skipped > 0
        if group and (not fits or skips_queries or queries >= APART_QUERIES):
            yield group
            group = []
            num_rows = count
            padding = 0
        group.append(geometry)
    if group:
        yield group


def _padded_part(
    step: StepMetadata,
    group: list[GeometryRows],
    layouts: tuple[BlockLayout, ...],
    make_part: Callable[..., Part],
) -> Part:
    """Returns one part of all rows of a group, whose first geometry is the longest."""
    (length, _, _), _ = group[0]
    members = sorted(member for _, members in group for member in members)
    device = step.block_tables.device
    row_bounds = [(step.seq_lens[row] - length, low) for row, low in members]
    bounds = torch.tensor(row_bounds, device=device)
    lows = bounds[:, 1:]
    positions = bounds[:, :1] + torch.arange(length, device=device)
    hidden = (positions < lows)[:, None, None]
    positions = positions.maximum(lows)
    rows = _index(step, members)
    tables = step.block_tables[rows].long()
    heads = slice(0, layouts[0].shape[1])
    return make_part(
        rows,
        tuple(members),
        heads,
        0,
        units=_units(layouts, tables, heads, positions),
        positions=positions,
        hidden=hidden,
    )


def geometries_of(step: StepMetadata) -> tuple[list[GeometryRows], bool]:
    """Returns the rows and their first visible positions by geometry, longest first, and whether
    every query sees a key."""
    query_len = step.query_len
    assert query_len is not None
    geometries: dict[Geometry, list[Member]] = {}
    is_complete = True
    ranges = zip(step.seq_lens, step.starts)
    for row, (seq_len, low) in enumerate(ranges):
        first_query = 0
        if step.causal:
            position = seq_len - query_len
            first_query = max(0, low - position)
            if step.window is not None:
                low = max(low, position + first_query - step.window + 1)
        sees_keys = low < seq_len
        is_complete = is_complete and first_query == 0 and sees_keys
        if first_query < query_len and sees_keys:
            geometry = (seq_len - low, low % step.block_size, first_query)
            geometries.setdefault(geometry, []).append((row, low))
    longest_first = sorted(geometries.items(), reverse=True)
    return longest_first, is_complete


def part_maker(
    step: StepMetadata,
    geometry: Geometry,
    geometries: list[GeometryRows],
) -> Callable[..., Part]:
    """Returns `Part` with the fields set that all parts of one geometry share."""
    query_len = step.query_len
    assert query_len is not None
    length, _, first_query = geometry
    queries = query_len - first_query
    past = length - queries
    mask_keys = 0
    window = length
    num_slices = 1
    if step.causal and queries > 1:
        (mask_keys, _, _), _ = geometries[0]  # the longest
        if step.window is not None:
            window = step.window
            mask_keys = min(mask_keys, SLICE_QUERIES + window - 1)
        num_slices = -(-queries // SLICE_QUERIES)
    bounds = [queries * index // num_slices for index in range(num_slices + 1)]
    slices = []
    for start, end in itertools.pairwise(bounds):
        first_key = max(0, past + start - window + 1)
        slices.append((slice(start, end), slice(first_key, past + end)))
    return functools.partial(
        Part,
        length=length,
        first_query=first_query,
        slices=tuple(slices),
        mask_keys=mask_keys,
        causal=mask_keys > 0 and length == queries and window >= length,
    )


def _index(step: StepMetadata, members: list[Member]) -> slice | Tensor:
    """Returns the index of the members' rows: if possible a slice, which needs no copy."""
    rows = [row for row, _ in members]
    first = rows[0]
    end = rows[-1] + 1
    if rows == list(range(first, end)):
        return slice(first, end)
    return torch.tensor(rows, device=step.block_tables.device)
