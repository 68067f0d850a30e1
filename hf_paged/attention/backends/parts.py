"""Which K/V tiles a step's attention gathers, in which parts: worked out once per step, used by every layer.

Rows of one length go together, and a part is small enough for a scratch that stays in the cache of the processor.
"""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from ...step import StepMetadata

SCRATCH_BYTES = 2 << 20
"""Bytes of gathered K and V at a time, as far as one head of one row allows; larger falls out of the L2 and L3."""

SLICE_QUERIES = 256
"""Queries at a time under a mask: keys that none of them sees are left out, and the mask has no more rows than this."""


class Hidden:
    """
    What the mask of a step adds to the scores: minus infinity where a query does not see a key, else 0. Counted from
    the last query and key it is the same for rows of any length: one serves them all with its lower right corner. Made
    when it is first asked for.
    """

    def __init__(self, queries: int, keys: int, window: int | None, device: torch.device) -> None:
        self.queries, self.keys, self.window, self.device = queries, keys, window, device
        self._made: dict[tuple[torch.dtype, int, int], Tensor] = {}

    def corner(self, queries: int, keys: int, dtype: torch.dtype, heads: int = 1) -> Tensor:
        """`[heads * queries, keys]` in `dtype`: the last `queries` of `keys` positions, again for each head. A view."""
        rows = self.queries if heads == 1 else queries
        made = self._made.get((dtype, heads, rows))
        if made is None:
            with torch.inference_mode(False), torch.no_grad():
                query = torch.arange(-rows, 0, device=self.device)[:, None]
                key = torch.arange(-self.keys, 0, device=self.device)
                hidden = key > query
                if self.window is not None:
                    hidden |= key <= query - self.window
                made = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
                made = made.masked_fill_(hidden, -math.inf).repeat(heads, 1)
            self._made[dtype, heads, rows] = made
        return made[-heads * queries :, -keys:]


@dataclass(frozen=True)
class Slice:
    """Queries `[first, last)` of a part and the keys `[low, high)` that any of them sees, counted within the part."""

    first: int
    last: int
    low: int
    high: int


@dataclass(frozen=True)
class Part:
    """Rows of one geometry and a range of K/V heads, small enough for the scratch.

    The visible range of every row starts `offset` tokens into its first gathered block and is `length` tokens long;
    its queries before `first_query` see nothing.
    """

    rows: slice | Tensor
    lows: tuple[int, ...]
    heads: tuple[int, int]
    offset: int
    length: int
    first_query: int
    blocks: Tensor  # [rows, gathered blocks] int64
    key_tiles: Tensor | None  # row indices into `_flat`, None if only `blocks` can be indexed
    value_tiles: Tensor | None
    shape: tuple[int, int, int]  # rows, K/V heads, gathered tokens
    slices: tuple[Slice, ...]  # all queries in order
    hidden: Hidden | None  # None if every query sees everything
    causal: bool  # as many keys as queries, and each query sees those up to itself


@dataclass(frozen=True)
class Plan:
    parts: tuple[Part, ...]
    complete: bool  # whether every query of every row sees something


_scratch = threading.local()


def _scratch_bytes(size: int, device: torch.device) -> Tensor:
    """This thread's scratch on `device`, grown to `size` bytes: fresh memory would cost its page faults every time."""
    held: Tensor | None = getattr(_scratch, str(device), None)
    if held is None or held.numel() < size:
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            held = torch.empty(size, dtype=torch.uint8, device=device)
        setattr(_scratch, str(device), held)
    return held


def gather(part: Part, key_blocks: Tensor, value_blocks: Tensor, *, reuse: bool) -> tuple[Tensor, Tensor]:
    """K and V of a part, each `[rows, kv_heads, length, dim]`. With `reuse` they lie in the scratch of this thread,
    until its next call; without, in memory of their own, as a gradient needs."""
    start, size = 0, math.prod(part.shape)
    key_bytes = -(-size * key_blocks.shape[3] * key_blocks.element_size() // 64) * 64
    scratch = None
    if reuse:
        value_bytes = size * value_blocks.shape[3] * value_blocks.element_size()
        scratch = _scratch_bytes(key_bytes + value_bytes, key_blocks.device)
    gathered = []
    for blocks, tiles in ((key_blocks, part.key_tiles), (value_blocks, part.value_tiles)):
        dim = blocks.shape[3]
        if tiles is None:
            picked = blocks[:, part.heads[0] : part.heads[1]][part.blocks].transpose(1, 2).reshape(*part.shape, dim)
        else:
            flat = _flat(blocks)
            if scratch is None:
                picked = flat.index_select(0, tiles)
            else:
                room = scratch[start : start + size * dim * blocks.element_size()]
                picked = room.view(blocks.dtype).view(-1, flat.shape[1])
                torch.index_select(flat, 0, tiles, out=picked)
            picked = picked.view(*part.shape, dim)
        gathered.append(picked[:, :, part.offset : part.offset + part.length])
        start = key_bytes
    return gathered[0], gathered[1]


def _flat(blocks: Tensor) -> Tensor:
    """A pool of contiguous tiles as `[tiles, unit]`, a view whatever its strides over blocks and heads."""
    unit = _unit(blocks)
    last = (blocks.shape[0] - 1) * blocks.stride(0) + (blocks.shape[1] - 1) * blocks.stride(1)
    return blocks.as_strided(((last + blocks.shape[2] * blocks.shape[3]) // unit, unit), (unit, 1))


def _unit(blocks: Tensor) -> int:
    """Elements that are gathered at once: a whole tile unless the strides forbid it."""
    return math.gcd(blocks.shape[2] * blocks.shape[3], blocks.stride(0), blocks.stride(1))


def plan_parts(step: StepMetadata, key_blocks: Tensor, value_blocks: Tensor) -> Plan:
    """The parts of one step with equally many queries a row: built once for all layers that are laid out alike."""
    plans = step.plan(_no_plans)
    sizes = (key_blocks.element_size() * key_blocks.shape[3], value_blocks.element_size() * value_blocks.shape[3])
    layout = (*key_blocks.shape, *key_blocks.stride(), *value_blocks.shape, *value_blocks.stride(), *sizes)
    plan = plans.get(layout)
    if plan is None:
        with torch.inference_mode(False), torch.no_grad():
            plan = plans[layout] = _build_plan(step, key_blocks, value_blocks, sum(sizes))
    return plan


def _no_plans(step: StepMetadata) -> dict[tuple[int, ...], Plan]:
    return {}


def _build_plan(step: StepMetadata, key_blocks: Tensor, value_blocks: Tensor, token_bytes: int) -> Plan:
    kv_heads, query_len = key_blocks.shape[1], step.query_len
    assert query_len is not None
    geometries: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    complete = True
    for row, (seq_len, low) in enumerate(zip(step.seq_lens, step.starts)):
        first_query = 0
        if step.causal:
            position = seq_len - query_len
            first_query = max(0, low - position)
            if step.window is not None:
                low = max(low, position + first_query - step.window + 1)
        complete = complete and first_query == 0 and low < seq_len
        if first_query < query_len and low < seq_len:
            geometry = (seq_len - low, low % step.block_size, first_query)
            geometries.setdefault(geometry, []).append((row, low))
    parts = []
    hidden = None
    if step.causal and query_len > 1 and geometries:
        longest = max(length for length, _, _ in geometries)
        if step.window is not None:
            longest = min(longest, SLICE_QUERIES + step.window - 1)
        hidden = Hidden(min(query_len, SLICE_QUERIES), longest, step.window, key_blocks.device)
    for (length, offset, first_query), members in sorted(geometries.items(), reverse=True):
        blocks = -(-(offset + length) // step.block_size)
        head_bytes = blocks * step.block_size * token_bytes
        num_rows = max(1, SCRATCH_BYTES // (head_bytes * kv_heads))
        num_heads = max(1, min(kv_heads, SCRATCH_BYTES // head_bytes))
        queries = query_len - first_query
        sees_all = step.window is None or step.window >= length
        for at in range(0, len(members), num_rows):
            chosen = members[at : at + num_rows]
            tables = torch.stack(
                [
                    step.block_tables[row, low // step.block_size : low // step.block_size + blocks]
                    for row, low in chosen
                ]
            ).long()
            for head in range(0, kv_heads, num_heads):
                heads = (head, min(kv_heads, head + num_heads))
                parts.append(
                    Part(
                        rows=_rows([row for row, _ in chosen], tables.device),
                        lows=tuple(low for _, low in chosen),
                        heads=heads,
                        offset=offset,
                        length=length,
                        first_query=first_query,
                        blocks=tables,
                        key_tiles=_tiles(tables, heads, key_blocks),
                        value_tiles=_tiles(tables, heads, value_blocks),
                        shape=(len(chosen), heads[1] - heads[0], blocks * step.block_size),
                        slices=_slices(queries, length, hidden),
                        hidden=hidden if queries > 1 else None,
                        causal=hidden is not None and length == queries > 1 and sees_all,
                    )
                )
    return Plan(tuple(parts), complete)


def _slices(queries: int, length: int, hidden: Hidden | None) -> tuple[Slice, ...]:
    """The last `queries` of `length` tokens in slices of like size."""
    if hidden is None:
        return (Slice(0, queries, 0, length),)
    count, past = -(-queries // SLICE_QUERIES), length - queries
    window = hidden.window or length
    bounds = [queries * index // count for index in range(count + 1)]
    return tuple(
        Slice(first, last, max(0, past + first - window + 1), past + last) for first, last in itertools.pairwise(bounds)
    )


def _rows(rows: list[int], device: torch.device) -> slice | Tensor:
    """A slice, which costs no copy, where the rows are consecutive."""
    if rows == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _tiles(tables: Tensor, heads: tuple[int, int], blocks: Tensor) -> Tensor | None:
    """Indices, in units of `_unit`, of the tiles of `tables` `[rows, n]` for a range of heads, head-major. `None` where
    a tile is not contiguous, as K beside V in one tensor, and so no row of a view."""
    if blocks.stride(3) != 1 or blocks.stride(2) != blocks.shape[3]:
        return None
    unit, tile = _unit(blocks), blocks.shape[2] * blocks.shape[3]
    head = torch.arange(*heads, device=tables.device) * (blocks.stride(1) // unit)
    inner = torch.arange(tile // unit, device=tables.device)
    tiles = tables[:, None, :, None] * (blocks.stride(0) // unit) + head[:, None, None] + inner
    return tiles.flatten()
