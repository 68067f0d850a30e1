"""Plans, once per step, which rows and heads the portable path computes together, and where the
blocks hold their keys and values. `gather` computes the attention."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cache.reading import BlockLayout, GatherIndices
from ...step import StepMetadata

MIN_UNPACKED_QUERIES = 64
"""With fewer queries per row, the queries of all heads that share a K/V head are packed as the rows
of one matrix, which is up to 3.5 times as fast in half precision. With at least this many, SDPA on
the CPU lays out K and V itself and skips keys that causal masking hides."""

MIN_SEPARATE_QUERIES = 32
"""With at least this many queries per row, rows of different lengths are not gathered together; and
if scores are materialized, the query heads of a K/V head run one after another."""

SCRATCH_BYTES = 2 << 20
"""Maximum bytes of K and V that are gathered at a time on the CPU, unless one head of one row takes
more. More would not fit into L2 and L3."""

DEVICE_SCRATCH_BYTES = 64 << 20
"""`SCRATCH_BYTES` for other devices, where launch overhead would take most of the time of smaller
gathers."""

PADDING_DIVISOR = 8
"""Rows of different lengths are gathered together while their padding takes at most
1/`PADDING_DIVISOR` of the scratch, since that costs less than additional operations."""

SLICE_QUERIES = 256
"""Maximum queries per slice of a masked part. Slices skip keys that none of their queries sees, and
bound the number of mask rows."""

Member = tuple[int, int]
"""A row's index in the step, and its first visible position."""

Geometry = tuple[int, int, int]
"""The number of tokens that a row sees, the offset of the first visible token in its block, and the
first query that sees any token."""

GeometryRows = tuple[Geometry, list[Member]]
"""A geometry and its rows."""


@dataclass(frozen=True, eq=False)
class Part:
    """A range of K/V heads of some rows, which have one geometry or are padded to one length. If
    they are gathered, their keys and values fit into the scratch memory together, unless one head
    of one row takes more."""

    # index of these rows in the step; a tensor is int64 `[rows]`, on the block tables' device
    rows: slice | Tensor
    members: tuple[Member, ...]
    heads: slice  # K/V heads
    offset: int  # of the visible range in the first gathered block
    length: int  # of the visible range
    first_query: int  # earlier queries see no keys
    # ranges of queries, counted from `first_query`, and of the keys that any of them sees, counted
    # from the first visible token; together they cover all queries in order
    slices: tuple[tuple[slice, slice], ...]
    mask_keys: int  # columns of the step's mask; 0 if every query sees every key
    # whether there are as many keys as queries, at least `MIN_UNPACKED_QUERIES`, and each query
    # sees keys up to itself
    causal: bool
    # indices of keys and of values; if quantized, of the keys' codes and scales, then the values'
    indices: tuple[GatherIndices, ...] = ()
    positions: Tensor | None = None
    """For rows of different lengths, the position of each gathered token, `[rows, length]`. Rows
    are aligned at their ends: a shorter one begins with copies of its first visible token as
    padding."""
    is_padding: Tensor | None = None
    """With `positions`: true for padding, bool `[rows, 1, 1, length]`."""
    row_slots: slice | None = None
    """For rows that are contiguous in memory (`seams.PlacedRows`): their slots, in which the
    visible range begins at `offset`."""


PartPlan = tuple[tuple[Part, ...], bool]
"""The parts of a step whose rows have the same number of queries, and whether the parts cover every
query of every row."""


@torch.inference_mode(False)
@torch.no_grad()
def plan_parts(step: StepMetadata, *layouts: BlockLayout) -> PartPlan:
    """Returns the parts of a step whose rows are gathered, with their indices in each layout.
    `step.plan` runs this once for all layers with the same layouts."""
    geometries, is_complete = geometries_of(step)
    kv_heads = layouts[0].shape[1]
    block_size = step.block_size
    scratch_bytes = SCRATCH_BYTES if step.block_tables.is_cpu else DEVICE_SCRATCH_BYTES
    token_bytes = sum(layout.itemsize * layout.shape[3] for layout in layouts)  # of one head
    scratch_tokens = scratch_bytes // (token_bytes * kv_heads)
    parts = []
    for group in _group_similar(step, geometries, scratch_tokens):
        (geometry, all_members), *similar_geometries = group
        make_part = part_maker(step, geometry, geometries)
        if similar_geometries:
            part = _padded_part(step, group, layouts, make_part)
            parts.append(part)
            continue
        length, offset, _ = geometry
        num_blocks = -(-(offset + length) // block_size)
        head_bytes = num_blocks * block_size * token_bytes
        num_rows = max(1, scratch_bytes // (head_bytes * kv_heads))
        num_heads = max(1, min(kv_heads, scratch_bytes // head_bytes))
        for start in range(0, len(all_members), num_rows):
            members = all_members[start : start + num_rows]
            tables = []
            for row, first_visible in members:
                first = first_visible // block_size
                tables.append(step.block_tables[row, first : first + num_blocks])
            blocks = torch.stack(tables).long()
            index = _index(step, members)
            for head in range(0, kv_heads, num_heads):
                heads = slice(head, min(kv_heads, head + num_heads))
                indices = _indices_of(layouts, blocks, heads)
                part = make_part(index, tuple(members), heads, offset, indices=indices)
                parts.append(part)
    return tuple(parts), is_complete


def _indices_of(
    layouts: tuple[BlockLayout, ...],
    tables: Tensor,
    heads: slice,
    positions: Tensor | None = None,
) -> tuple[GatherIndices, ...]:
    """Returns `BlockLayout.gather_indices` of each layout, computed once for equal layouts."""
    indices = {layout: layout.gather_indices(tables, heads, positions) for layout in {*layouts}}
    return tuple(indices[layout] for layout in layouts)


def _group_similar(
    step: StepMetadata,
    geometries: list[GeometryRows],
    scratch_tokens: int,
) -> Iterator[list[GeometryRows]]:
    """Yields groups of geometries. Several geometries form a group only if all of their queries see
    keys, and their rows fit into the scratch memory together with little padding. With many queries
    per row, each geometry is a separate group, since there are few rows, and slices skip keys that
    no query sees."""
    group = list[GeometryRows]()
    num_rows = 0
    padding = 0
    num_queries = step.query_len or 1
    for geometry_rows in geometries:
        (length, _, first_query), members = geometry_rows
        (max_length, _, num_skipped), _ = group[0] if group else geometry_rows
        count = len(members)
        num_rows += count
        padding += (max_length - length) * count
        # The group's mask is kept for all layers. It has a row per query or, where heads are
        # packed, per head and query. In both cases, it takes fewer bytes than K and V of
        # `mask_size` tokens.
        mask_size = num_rows * max_length * num_queries
        can_join = mask_size <= scratch_tokens and padding * PADDING_DIVISOR <= scratch_tokens
        skips_queries = first_query > 0 or num_skipped > 0
        if group and (not can_join or skips_queries or num_queries >= MIN_SEPARATE_QUERIES):
            yield group
            group = []
            num_rows = count
            padding = 0
        group.append(geometry_rows)
    if group:
        yield group


def _padded_part(
    step: StepMetadata,
    group: list[GeometryRows],
    layouts: tuple[BlockLayout, ...],
    make_part: Callable[..., Part],
) -> Part:
    """Returns one part with all rows of a group, whose first geometry is the longest."""
    (length, _, _), _ = group[0]
    members = sorted(member for _, members in group for member in members)
    device = step.block_tables.device
    row_bounds = [(step.seq_lens[row] - length, first_visible) for row, first_visible in members]
    bounds = torch.tensor(row_bounds, device=device)
    first_visible = bounds[:, 1:]
    positions = bounds[:, :1] + torch.arange(length, device=device)
    is_padding = (positions < first_visible)[:, None, None]
    positions = positions.maximum(first_visible)
    rows = _index(step, members)
    tables = step.block_tables[rows].long()
    heads = slice(0, layouts[0].shape[1])
    return make_part(
        rows,
        tuple(members),
        heads,
        0,
        indices=_indices_of(layouts, tables, heads, positions),
        positions=positions,
        is_padding=is_padding,
    )


def geometries_of(step: StepMetadata) -> tuple[list[GeometryRows], bool]:
    """Returns the geometries of a step with their members, longest first, and whether every query
    sees a key."""
    query_len = step.query_len
    assert query_len is not None
    geometries: dict[Geometry, list[Member]] = {}
    is_complete = True
    ranges = zip(step.seq_lens, step.starts)
    for row, (seq_len, first_visible) in enumerate(ranges):
        first_query = 0
        if step.causal:
            position = seq_len - query_len
            first_query = max(0, first_visible - position)
            if step.window is not None:
                first_visible = max(first_visible, position + first_query - step.window + 1)
        sees_keys = first_visible < seq_len
        is_complete = is_complete and first_query == 0 and sees_keys
        if first_query < query_len and sees_keys:
            geometry = (seq_len - first_visible, first_visible % step.block_size, first_query)
            geometries.setdefault(geometry, []).append((row, first_visible))
    longest_first = sorted(geometries.items(), reverse=True)
    return longest_first, is_complete


def part_maker(
    step: StepMetadata,
    geometry: Geometry,
    geometries: list[GeometryRows],
) -> Callable[..., Part]:
    """Returns a partial of `Part` with the fields that all parts of one geometry share.
    `geometries`: all geometries of the step, longest first."""
    query_len = step.query_len
    assert query_len is not None
    length, _, first_query = geometry
    num_queries = query_len - first_query
    past = length - num_queries
    mask_keys = 0
    window = length
    num_slices = 1
    is_causal = step.causal and length == num_queries >= MIN_UNPACKED_QUERIES
    if step.causal and num_queries > 1:
        (mask_keys, _, _), _ = geometries[0]
        if step.window is not None:
            window = step.window
            mask_keys = min(mask_keys, SLICE_QUERIES + window - 1)
        num_slices = -(-num_queries // SLICE_QUERIES)
    bounds = [num_queries * index // num_slices for index in range(num_slices + 1)]
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
        causal=is_causal and window >= length,
    )


def _index(step: StepMetadata, members: list[Member]) -> slice | Tensor:
    """Returns the index of the members' rows: a slice, which copies nothing, if they are
    consecutive, else a tensor."""
    rows = [row for row, _ in members]
    first = rows[0]
    end = rows[-1] + 1
    if rows == list(range(first, end)):
        return slice(first, end)
    return torch.tensor(rows, device=step.block_tables.device)
