"""Portable fast attention over block tables: gathers a few rows of one length at a time, then runs dense attention on
exact lengths, so that no slot outside a row's visible range is used. Plain PyTorch: any device, differentiable."""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...cache.row_slots import PlacedRows, Placement
from ...kernels import quantized
from ...step import StepMetadata
from . import reference
from .reference import AttentionCall

PACK_QUERIES = 64
"""Below this many queries per row, a group's query heads are packed with the queries (M = group * query_len), up to 3.5
times as fast in half precision. From here on CPU SDPA lays out K and V itself and skips what causal masking hides."""

APART_QUERIES = 32
"""From this many queries per row, a group's heads run one after another if all scores are held at once."""

SCRATCH_BYTES = 2 << 20
"""Gathered K and V at a time, in bytes, unless one head of one row takes more; more would not stay in L2 and L3."""

SLICE_QUERIES = 256
"""Queries at a time under a mask: skips keys that none of them sees, and bounds the mask's rows."""


class Layout(NamedTuple):
    """Memory layout of a layer's keys or values; the last dimension is contiguous."""

    shape: tuple[int, ...]  # blocks, heads, block size, dim
    stride: tuple[int, ...]
    itemsize: int

    @property
    def unit(self) -> tuple[int, int]:
        """Distance and width, in elements, of a gathered unit: a whole tile if the strides allow; a token of a head if
        keys and values are interleaved."""
        (_, _, size, dim), (block, head, token, _) = self.shape, self.stride
        if token != dim:
            return token, dim
        unit = math.gcd(size * dim, block, head)
        return unit, unit

    def tiles(self, tables: Tensor, heads: slice) -> Tensor:
        """Indices into `flat` of the blocks `tables` `[rows, n]` of some heads, head-major."""
        distance, _ = self.unit
        block, head = (stride // distance for stride in self.stride[:2])
        inner = torch.arange(self.shape[2] * self.stride[2] // distance, device=tables.device)
        heads_at = torch.arange(heads.start, heads.stop, device=tables.device) * head
        return (tables[:, None, :, None] * block + heads_at[:, None, None] + inner).flatten()

    def flat(self, blocks: Tensor) -> Tensor:
        """`blocks` as `[tiles, width]`, a view whatever its strides over blocks and heads."""
        distance, width = self.unit
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride)) + 1 - width
        return blocks.as_strided((last // distance + 1, width), (distance, 1))


@dataclass(frozen=True)
class Part:
    """Rows of one geometry and a range of K/V heads, small enough for the scratch."""

    rows: slice | Tensor
    members: tuple[tuple[int, int], ...]  # each row's number and first visible position
    heads: slice
    offset: int  # of the visible range in the first gathered block
    length: int  # of the visible range
    first_query: int  # earlier queries see nothing
    tiles: tuple[Tensor, ...]  # indices for keys and values; if quantized, for codes and scales of each
    shape: tuple[int, int, int]  # rows, K/V heads, gathered tokens
    slices: tuple[tuple[slice, slice], ...]  # all queries in order, with the keys that any of them sees
    mask_keys: int  # columns of the step's mask, 0 if every query sees everything
    causal: bool  # as many keys as queries, and each query sees keys up to itself
    place: tuple[slice, int] | None = None
    """For rows that are contiguous in memory (`virtual.LayerRows`): their slots, and the first visible position."""


def attend(call: AttentionCall) -> Tensor:
    """`reference.attend`, fast. Plain bfloat16 and float16 calls round where PyTorch's SDPA rounds. A group of rows
    that all begin in this step uses the step's keys and values directly, if available."""
    outputs = []
    for part in call.by_groups():
        is_fresh = part.fresh is not None and part.is_plain and part.step.begins
        outputs.append(_attend_fresh(part) if is_fresh else _attend_gathered(part))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _rows(states: Tensor, step: StepMetadata) -> Tensor:
    """Views `(T, heads, dim)` of rows with equally many queries as `(n, heads, query_len, dim)`."""
    assert step.query_len is not None
    return states.unflatten(0, (step.num_rows, step.query_len)).transpose(1, 2)


def _attend_fresh(call: AttentionCall) -> Tensor:
    query, key, value = (_rows(x, call.step).to(call.query.dtype) for x in (call.query, *(call.fresh or ())))
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=call.scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).flatten(0, 1)


def _attend_gathered(call: AttentionCall) -> Tensor:
    step, keys, values = call.step, call.blocks.keys, call.blocks.values
    (_, heads, _), kv_heads, layouts = call.query.shape, values.shape[1], list[Layout]()
    group = heads // kv_heads
    rows = None if call.needs_grad else call.blocks.rows
    placed = None if rows is None else rows.place(step)
    if placed is not None:
        parts, is_complete = step.plan(plan_rows, kv_heads, placed.placement)
        if step.query_len == len(parts) == 1 and is_complete and call.is_plain and group > 1:
            return _decode_in_place(call, parts[0], placed, group)
    elif quantized.is_quantized(keys) and keys.stride(2) != keys.shape[3]:  # tiles that keys and values share
        return reference.attend(call)
    else:
        planes = [plane for blocks in (keys, values) for plane in quantized.planes(blocks)]
        layouts = [Layout(x.shape, x.stride(), x.element_size()) for x in planes]
        parts, is_complete = step.plan(plan_parts, *layouts)
    query = _rows(call.query, step)
    batch, _, query_len, _ = query.shape
    bias = call.bias
    if bias is not None:
        length = bias.shape[-1] if bias.shape[-1] > 1 else max(step.seq_lens, default=0)
        bias = bias.expand(batch, heads, query_len if bias.shape[2] > 1 else 1, length)
    shape = batch, query_len, heads, values.shape[3]
    out = query.new_empty(shape) if is_complete else query.new_zeros(shape)
    for part in parts:
        some = slice(part.heads.start * group, part.heads.stop * group)
        own_bias, first, length = None, part.first_query, part.length
        if bias is not None:
            own_bias = torch.stack([bias[row, some, :, low : low + length] for row, low in part.members])
            own_bias = _of_queries(own_bias, slice(first, None))
        own = call.of_heads(some, query[part.rows, some, first:], own_bias)
        gathered = _gather(own, part, layouts) if placed is None else _view(own, part, placed)
        output = _attend_part(own, part, *gathered)
        if is_complete and len(parts) == 1:
            return output.flatten(0, 1).contiguous()
        out[part.rows, first:, some] = output
    return out.flatten(0, 1)


def _decode_in_place(call: AttentionCall, part: Part, placed: PlacedRows, group: int) -> Tensor:
    """`_attend_slice` in as few calls as possible, for one query per row, and rows of one length in neighbouring slots
    of `LayerRows`."""
    key, value = _view(call, part, placed)
    rows, kv_heads, _ = part.shape
    packed = call.query.view(rows, kv_heads, group, call.query.shape[2])
    return F.scaled_dot_product_attention(packed, key, value, scale=call.scale).flatten(1, 2)


def _attend_part(call: AttentionCall, part: Part, key: Tensor, value: Tensor) -> Tensor:
    """Computes a part, `[rows, queries, heads, value_dim]`: `call` has its queries `[rows, heads, queries, dim]`, sinks
    and bias `[rows, heads, queries, length]`; keys and values are `[rows, kv_heads, length, dim]`."""
    rows, heads, queries, dim = call.query.shape
    holds_scores = not call.is_plain or not call.query.is_cpu or dim != value.shape[3]
    apart = heads // key.shape[1] if holds_scores and queries >= APART_QUERIES else 1
    is_causal = part.causal and call.is_plain and queries >= PACK_QUERIES
    slices = ((slice(None), slice(None)),) if is_causal else part.slices
    if len(slices) == apart == 1:
        return _attend_slice(call, part, key, value, is_causal)
    out = call.query.new_empty(rows, queries, heads, value.shape[3])
    for (chosen, seen), member in itertools.product(slices, range(apart)):
        one = slice(member, None, apart)
        own_bias = None if call.bias is None else _of_queries(call.bias[:, one, :, seen], chosen)
        own = call.of_heads(one, call.query[:, one, chosen], own_bias)
        out[:, chosen, one] = _attend_slice(own, part, key[:, :, seen], value[:, :, seen], is_causal)
    return out


def _of_queries(bias: Tensor, chosen: slice) -> Tensor:
    """Selects queries of a bias `[rows, heads, queries or 1, keys]`."""
    return bias[:, :, chosen] if bias.shape[2] > 1 else bias


def _attend_slice(call: AttentionCall, part: Part, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """`_attend_part` for consecutive queries and the keys that they see."""
    query, scale = call.query, call.scale
    queries, kv_heads, keys = query.shape[2], key.shape[1], key.shape[2]
    group = query.shape[1] // kv_heads
    if not call.is_plain:
        return _attend_explicitly(call, part, key, value)
    if queries >= PACK_QUERIES or (group == 1 and queries > 1):
        mask = None if is_causal else _mask(call.step, part, queries, keys, query.dtype)
        result = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=group > 1
        )
        return result.transpose(1, 2)
    packed = query.unflatten(1, (kv_heads, group)).flatten(2, 3)  # [rows, kv_heads, M, dim]
    if packed.shape[2] == 1 and query.dtype != torch.float32 and query.is_cpu:
        # With one query row, half-precision SDPA on the CPU is two to three times slower than this.
        weights = torch.matmul(packed, key.transpose(-1, -2)).mul_(scale).softmax(-1, dtype=torch.float32)
        result = torch.matmul(weights.to(value.dtype), value)
    else:
        mask = _mask(call.step, part, queries, keys, query.dtype, heads=group)
        result = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    if queries == 1:
        return result.flatten(1, 2).unsqueeze(1)
    return result.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend_explicitly(call: AttentionCall, part: Part, key: Tensor, value: Tensor) -> Tensor:
    """`_attend_slice` with softcap, sinks and bias, in float32."""
    query, sinks, queries, kv_heads = call.query, call.sinks, call.query.shape[2], key.shape[1]
    compute = torch.promote_types(query.dtype, torch.float32)
    packed = query.unflatten(1, (kv_heads, -1)).flatten(2, 3).to(compute)  # [rows, kv_heads, M, dim]
    scores = torch.matmul(packed, key.to(compute).transpose(-1, -2)) * call.scale
    scores = scores.unflatten(2, (-1, queries)).flatten(1, 2)  # [rows, heads, queries, keys]
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    for added in (call.bias, _mask(call.step, part, queries, key.shape[2], compute)):
        if added is not None:
            scores = scores + added.to(compute)
    if sinks is not None:  # one more column without a value
        scores = torch.cat([scores, sinks.to(compute)[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    blind = scores.amax(dim=-1, keepdim=True) == -math.inf  # their softmax would be NaN: zeros instead
    weights = scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)[..., : key.shape[2]]
    weights = weights.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [rows, kv_heads, M, keys]
    result = torch.matmul(weights, value.to(compute)).unflatten(2, (-1, queries)).flatten(1, 2)
    return result.to(query.dtype).transpose(1, 2)


def _mask(step: StepMetadata, part: Part, queries: int, keys: int, dtype: torch.dtype, heads: int = 1) -> Tensor | None:
    """The mask of the last queries and keys, `[heads * queries, keys]`, added to the scores. It is a view of one mask
    per step, since counted from the end it is the same for rows of any length."""
    if not part.mask_keys:
        return None
    rows = min(step.query_len or 1, SLICE_QUERIES) if heads == 1 else queries
    return step.plan(_step_mask, rows, part.mask_keys, dtype, heads)[-heads * queries :, -keys:]


@torch.inference_mode(False)
def _step_mask(step: StepMetadata, queries: int, keys: int, dtype: torch.dtype, heads: int) -> Tensor:
    """Minus infinity where a query does not see a key, else 0."""
    query = torch.arange(-queries, 0, device=step.block_tables.device)[:, None]
    key = torch.arange(-keys, 0, device=query.device)
    hidden = key > query
    if step.window is not None:
        hidden |= key <= query - step.window
    return torch.zeros(hidden.shape, dtype=dtype, device=query.device).masked_fill_(hidden, -math.inf).repeat(heads, 1)


# -- which tiles are gathered together ------------------------------------------------------------------------------

_scratch = threading.local()  # by device; new memory would cost page faults every time


def _view(call: AttentionCall, part: Part, placed: PlacedRows) -> list[Tensor]:
    """Returns what `_gather` returns as views of rows that are contiguous in memory, if they have the query's dtype."""
    assert part.place is not None
    slots, low = part.place
    return [x[slots, :, low : low + part.length].to(call.query.dtype) for x in (placed.keys, placed.values)]


def _gather(call: AttentionCall, part: Part, layouts: list[Layout]) -> list[Tensor]:
    """Gathers K and V of a part, each `[rows, kv_heads, length, dim]` in the query's dtype. They are in this thread's
    scratch until its next call; in new memory if a gradient is wanted."""
    sizes = [math.prod(part.shape) * layout.shape[3] * layout.itemsize for layout in layouts]
    *begins, end = itertools.accumulate((-(-size // 64) * 64 for size in sizes), initial=0)
    scratch, device = None, call.query.device
    if not call.needs_grad:
        scratch = getattr(_scratch, str(device), None)
        if scratch is None or scratch.numel() < end:
            with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
                scratch = torch.empty(end, dtype=torch.uint8, device=device)
            setattr(_scratch, str(device), scratch)
    gathered, places = [], zip(layouts, part.tiles, begins, sizes)
    for blocks in (call.blocks.keys, call.blocks.values):
        found = []
        for plane, (layout, tiles, start, size) in zip(quantized.planes(blocks), places):
            flat = layout.flat(plane)
            room = None if scratch is None else scratch[start : start + size].view(plane.dtype).view(-1, flat.shape[1])
            picked = torch.index_select(flat, 0, tiles, out=room).view(*part.shape, layout.shape[3])
            found.append(picked[:, :, part.offset : part.offset + part.length])
        gathered.append(quantized.join(found, blocks, call.query.dtype))
    return gathered


@torch.inference_mode(False)
@torch.no_grad()
def plan_parts(step: StepMetadata, *layouts: Layout) -> tuple[tuple[Part, ...], bool]:
    """Returns the parts of a step with equally many queries per row, and whether they cover every query of every row.
    `step.plan` runs this once for all layers of one layout."""
    kv_heads, size = layouts[0].shape[1], step.block_size
    geometries, is_complete = _geometries(step)
    parts = []
    for (length, offset, first_query), found in geometries:
        num_blocks = -(-(offset + length) // size)
        shared = _shared_fields(step, length, first_query, geometries)
        head_bytes = num_blocks * size * sum(layout.itemsize * layout.shape[3] for layout in layouts)
        num_rows = max(1, SCRATCH_BYTES // (head_bytes * kv_heads))
        num_heads = max(1, min(kv_heads, SCRATCH_BYTES // head_bytes))
        for at in range(0, len(found), num_rows):
            members = tuple(found[at : at + num_rows])
            rows = [row for row, _ in members]
            is_range = rows == list(range(rows[0], rows[-1] + 1))  # a slice costs no copy
            chosen = slice(rows[0], rows[-1] + 1) if is_range else torch.tensor(rows, device=step.block_tables.device)
            firsts = [(row, low // size) for row, low in members]
            tables = torch.stack([step.block_tables[row, first : first + num_blocks] for row, first in firsts]).long()
            for head in range(0, kv_heads, num_heads):
                heads = slice(head, min(kv_heads, head + num_heads))
                tiles = tuple(layout.tiles(tables, heads) for layout in layouts)
                shape = len(rows), heads.stop - head, num_blocks * size
                parts.append(Part(chosen, members, heads, offset, length, first_query, tiles, shape, **shared))
    return tuple(parts), is_complete


def plan_rows(step: StepMetadata, kv_heads: int, placement: Placement) -> tuple[tuple[Part, ...], bool]:
    """`plan_parts` for rows that are contiguous in memory: one part for rows of one geometry in neighbouring slots."""
    geometries, is_complete = _geometries(step)
    parts = []
    for (length, offset, first_query), found in geometries:
        shared = _shared_fields(step, length, first_query, geometries)
        places = [(placement.slots[row], placement.firsts[row] + low) for row, low in found]
        starts = [
            at
            for at, ((row, _), (slot, low)) in enumerate(zip(found, places))
            if not at or (row - 1, slot - 1, low) != (found[at - 1][0], *places[at - 1])
        ]
        for at, end in itertools.pairwise([*starts, len(found)]):
            members, (slot, low) = tuple(found[at:end]), places[at]
            rows, slots = slice(members[0][0], members[-1][0] + 1), slice(slot, slot + end - at)
            shape = end - at, kv_heads, length
            parts.append(
                Part(
                    *(rows, members, slice(0, kv_heads), offset, length, first_query, (), shape),
                    **shared,
                    place=(slots, low),
                )
            )
    return tuple(parts), is_complete


Geometry = tuple[int, int, int]
"""The number of tokens that a row sees, the offset of the first in its block, and the first query that sees any."""


def _geometries(step: StepMetadata) -> tuple[list[tuple[Geometry, list[tuple[int, int]]]], bool]:
    """Returns rows with their first visible position by geometry, longest first; and whether every query sees a key."""
    query_len, size = step.query_len, step.block_size
    assert query_len is not None
    geometries: dict[Geometry, list[tuple[int, int]]] = {}
    is_complete = True
    for row, (seq_len, low) in enumerate(zip(step.seq_lens, step.starts)):
        first_query = 0
        if step.causal:
            position = seq_len - query_len
            first_query = max(0, low - position)
            if step.window is not None:
                low = max(low, position + first_query - step.window + 1)
        is_complete = is_complete and first_query == 0 and low < seq_len
        if first_query < query_len and low < seq_len:
            geometries.setdefault((seq_len - low, low % size, first_query), []).append((row, low))
    return sorted(geometries.items(), reverse=True), is_complete


def _shared_fields(
    step: StepMetadata, length: int, first_query: int, geometries: list[tuple[Geometry, list[tuple[int, int]]]]
) -> dict[str, Any]:
    """Fields that all parts of one geometry share."""
    query_len = step.query_len
    assert query_len is not None
    mask_keys = geometries[0][0][0] if step.causal and query_len > 1 else 0
    if step.window is not None:
        mask_keys = min(mask_keys, SLICE_QUERIES + step.window - 1)
    queries = query_len - first_query
    window, hidden = (mask_keys and step.window) or length, mask_keys if queries > 1 else 0
    num_slices, past = -(-queries // SLICE_QUERIES) if mask_keys else 1, length - queries
    bounds = itertools.pairwise(queries * index // num_slices for index in range(num_slices + 1))
    slices = tuple((slice(i, j), slice(max(0, past + i - window + 1), past + j)) for i, j in bounds)
    is_causal = hidden > 0 and length == queries and window >= length
    return {"slices": slices, "mask_keys": hidden, "causal": is_causal}
