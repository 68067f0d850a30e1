"""Portable fast attention over block tables: gathers rows of one length, or of similar lengths,
then runs dense attention on them. No slot outside a row's visible range is used. Plain PyTorch: any
device, differentiable."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
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
"""Below this many queries per row, a group's query heads are packed with the queries (M = group *
query_len), up to 3.5 times as fast in half precision. From here on CPU SDPA lays out K and V itself
and skips what causal masking hides."""

APART_QUERIES = 32
"""From this many queries per row, a group's heads run one after another if all scores are held at
once."""

SCRATCH_BYTES = 2 << 20
DEVICE_SCRATCH_BYTES = 64 << 20
"""Gathered K and V at a time, in bytes, unless one head of one row takes more. On the CPU more
would not stay in L2 and L3; on other devices less would take no longer than its launches."""

MASK_ALIGNMENT = 16
"""Elements: to other rows of a mask, PyTorch's fused kernels on a GPU add padding, in each
layer."""

PADDING_SHARE = 8
"""Rows of several lengths are gathered together while their padding takes at most this part of the
scratch: it costs less than further operations."""

SLICE_QUERIES = 256
"""Queries at a time under a mask: skips keys that none of them sees, and bounds the mask's rows."""


class Layout(NamedTuple):
    """Memory layout of a layer's keys or values; the last dimension is contiguous."""

    shape: tuple[int, ...]  # blocks, heads, block size, dim
    stride: tuple[int, ...]
    itemsize: int

    def unit(self, is_token: bool) -> tuple[int, int]:
        """Distance and width, in elements, of a gathered unit: a token of a head; unless
        `is_token`, a whole tile if the strides allow, which they do not where keys and values are
        interleaved."""
        _, _, size, dim = self.shape
        block, head, token, _ = self.stride
        if is_token or token != dim:
            distance = math.gcd(token, block, head)
            return distance, dim
        unit = math.gcd(size * dim, block, head)
        return unit, unit

    def tiles(self, tables: Tensor, heads: slice) -> Tensor:
        """Indices into `flat` of the blocks `tables` `[rows, n]` of some heads, head-major."""
        _, _, size, dim = self.shape
        _, _, token, _ = self.stride
        distance, width = self.unit(False)
        step = width if token == dim else token
        num_units = size * token // step
        inner = torch.arange(num_units, device=tables.device)
        inner = inner * (step // distance)
        return self._indices(tables, inner, heads, distance)

    def tokens(
        self,
        tables: Tensor,
        positions: Tensor,
        heads: slice,
    ) -> Tensor:
        """Indices into `flat` of the tokens at `positions` `[rows, n]` of rows with block tables
        `tables`."""
        size = self.shape[2]
        distance, _ = self.unit(True)
        token = self.stride[2] // distance
        inner = positions % size * token
        inner = inner[:, None, :, None]
        blocks = tables.gather(1, positions // size)
        return self._indices(blocks, inner, heads, distance)

    def _indices(
        self,
        blocks: Tensor,
        inner: Tensor,
        heads: slice,
        distance: int,
    ) -> Tensor:
        """Indices of units in blocks `[rows, n]`, head-major; `inner`: the units' distance from the
        start of a head."""
        block, head = (stride // distance for stride in self.stride[:2])
        first = torch.arange(heads.start, heads.stop, device=blocks.device)
        first = first[:, None, None] * head
        indices = blocks[:, None, :, None]
        indices = indices * block
        indices = indices + first + inner
        return indices.flatten()

    def flat(self, blocks: Tensor, is_token: bool) -> Tensor:
        """`blocks` as `[units, width]`, a view whatever its strides over blocks and heads."""
        distance, width = self.unit(is_token)
        axes = zip(self.shape, self.stride)
        last_element = sum((size - 1) * stride for size, stride in axes)
        last = last_element + 1 - width
        num_units = last // distance + 1
        shape = (num_units, width)
        return blocks.as_strided(shape, (distance, 1))


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of one geometry, or padded to one, and a range of K/V heads, small enough for the
    scratch."""

    rows: slice | Tensor
    members: tuple[tuple[int, int], ...]  # each row's number and first visible position
    heads: slice
    offset: int  # of the visible range in the first gathered block
    length: int  # of the visible range
    first_query: int  # earlier queries see nothing
    # indices for keys and values; if quantized, for codes and scales of each
    tiles: tuple[Tensor, ...]
    shape: tuple[int, int, int]  # rows, K/V heads, gathered tokens
    # all queries in order, with the keys that any of them sees
    slices: tuple[tuple[slice, slice], ...]
    mask_keys: int  # columns of the step's mask, 0 if every query sees everything
    causal: bool  # as many keys as queries, and each query sees keys up to itself
    positions: Tensor | None = None
    """For rows of several lengths: the position of each gathered token, `[rows, length]`. Rows end
    together: in front of a shorter one its first visible token is repeated."""
    hidden: Tensor | None = None
    """With `positions`: which of them are such repetitions, `[rows, 1, 1, length]`."""
    place: tuple[slice, int] | None = None
    """For rows that are contiguous in memory (`virtual.LayerRows`): their slots, and the first
    visible position."""


def attend(call: AttentionCall) -> Tensor:
    """`reference.attend`, fast. Plain bfloat16 and float16 calls round where PyTorch's SDPA rounds.
    A group of rows that all begin in this step uses the step's keys and values directly, if
    available."""
    outputs = []
    for part in call.by_groups():
        is_fresh = part.fresh is not None and part.is_plain and part.step.begins
        if is_fresh:
            outputs.append(_attend_fresh(part))
        else:
            outputs.append(_attend_gathered(part))
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs)


def _rows(states: Tensor, step: StepMetadata) -> Tensor:
    """Views `(T, heads, dim)` of rows with equally many queries as `(n, heads, query_len, dim)`."""
    assert step.query_len is not None
    shape = (step.num_rows, step.query_len)
    return states.unflatten(0, shape).transpose(1, 2)


def _attend_fresh(call: AttentionCall) -> Tensor:
    step = call.step
    fresh = call.fresh or ()
    states = (call.query, *fresh)
    dtype = call.query.dtype
    query, key, value = (_rows(x, step).to(dtype) for x in states)
    has_groups = query.shape[1] != key.shape[1]
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        scale=call.scale,
        enable_gqa=has_groups,
    )
    output = output.transpose(1, 2)
    return output.flatten(0, 1)


def _attend_gathered(call: AttentionCall) -> Tensor:
    step = call.step
    keys = call.blocks.keys
    values = call.blocks.values
    _, heads, _ = call.query.shape
    kv_heads = values.shape[1]
    layouts = list[Layout]()
    group = heads // kv_heads
    rows = None if call.needs_grad else call.blocks.rows
    placed = None
    if rows is not None:
        placed = rows.place(step)
    if placed is not None:
        parts, is_complete = step.plan(plan_rows, kv_heads, placed.placement)
        is_one_decode = step.query_len == len(parts) == 1 and is_complete
        if is_one_decode and call.is_plain and group > 1:
            return _decode_in_place(call, parts[0], placed, group)
    elif quantized.is_quantized(keys) and keys.stride(2) != keys.shape[3]:
        # tiles that keys and values share
        return reference.attend(call)
    else:
        for blocks in (keys, values):
            for plane in quantized.planes(blocks):
                stride = plane.stride()
                itemsize = plane.element_size()
                layouts.append(Layout(plane.shape, stride, itemsize))
        parts, is_complete = step.plan(plan_parts, *layouts)
    query = _rows(call.query, step)
    batch, _, query_len, _ = query.shape
    bias = call.bias
    if bias is not None:
        length = bias.shape[-1]
        if length <= 1:
            length = max(step.seq_lens, default=0)
        bias_queries = 1
        if bias.shape[2] > 1:
            bias_queries = query_len
        bias = bias.expand(batch, heads, bias_queries, length)
    value_dim = values.shape[3]
    shape = (batch, query_len, heads, value_dim)
    out = None
    if len(parts) != 1 or not is_complete:
        if is_complete:
            out = query.new_empty(shape)
        else:
            out = query.new_zeros(shape)
    for part in parts:
        first_head = part.heads.start * group
        end_head = part.heads.stop * group
        some = slice(first_head, end_head)
        own_bias = None
        first = part.first_query
        length = part.length
        if bias is not None:
            if part.positions is not None:
                own_bias = bias[part.rows, some]
                sizes = own_bias.shape[:3]
                index = part.positions[:, None, None]
                index = index.expand(*sizes, -1)
                own_bias = own_bias.gather(3, index)
            else:
                lows = {low for _, low in part.members}
                if len(lows) == 1:
                    low = lows.pop()
                    visible = slice(low, low + length)
                    own_bias = bias[part.rows, some, :, visible]
                else:
                    biases = []
                    for row, low in part.members:
                        visible = slice(low, low + length)
                        row_bias = bias[row, some, :, visible]
                        biases.append(row_bias)
                    own_bias = torch.stack(biases)
            own_bias = _of_queries(own_bias, slice(first, None))
        queries = query[part.rows, some, first:]
        own = call.of_heads(some, queries, own_bias)
        if placed is None:
            gathered = _gather(own, part, layouts)
        else:
            gathered = _view(own, part, placed)
        output = _attend_part(own, part, *gathered)
        if out is None:
            output = output.flatten(0, 1)
            return output.contiguous()
        out[part.rows, first:, some] = output
    assert out is not None
    return out.flatten(0, 1)


def _decode_in_place(
    call: AttentionCall,
    part: Part,
    placed: PlacedRows,
    group: int,
) -> Tensor:
    """`_attend_slice` in as few calls as possible, for one query per row, and rows of one length in
    neighbouring slots of `LayerRows`."""
    key, value = _view(call, part, placed)
    rows, kv_heads, _ = part.shape
    dim = call.query.shape[2]
    packed = call.query.view(rows, kv_heads, group, dim)
    output = F.scaled_dot_product_attention(packed, key, value, scale=call.scale)
    return output.flatten(1, 2)


def _attend_part(
    call: AttentionCall,
    part: Part,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Computes a part, `[rows, queries, heads, value_dim]`: `call` has its queries `[rows, heads,
    queries, dim]`, sinks and bias `[rows, heads, queries, length]`; keys and values are `[rows,
    kv_heads, length, dim]`."""
    rows, heads, queries, dim = call.query.shape
    value_dim = value.shape[3]
    is_plain = call.is_plain
    holds_scores = not is_plain or not call.query.is_cpu or dim != value_dim
    apart = 1
    if holds_scores and queries >= APART_QUERIES:
        apart = heads // key.shape[1]
    is_causal = part.causal and is_plain and queries >= PACK_QUERIES
    slices = part.slices
    if is_causal:
        everything = slice(None)
        slices = ((everything, everything),)
    if len(slices) == apart == 1:
        return _attend_slice(call, part, key, value, is_causal)
    out = call.query.new_empty(rows, queries, heads, value_dim)
    pieces = itertools.product(slices, range(apart))
    for (chosen, seen), member in pieces:
        one = slice(member, None, apart)
        bias = None
        if call.bias is not None:
            bias = call.bias[:, one, :, seen]
            bias = _of_queries(bias, chosen)
        query = call.query[:, one, chosen]
        own = call.of_heads(one, query, bias)
        seen_keys = key[:, :, seen]
        seen_values = value[:, :, seen]
        out[:, chosen, one] = _attend_slice(own, part, seen_keys, seen_values, is_causal)
    return out


def _of_queries(bias: Tensor, chosen: slice) -> Tensor:
    """Selects queries of a bias `[rows, heads, queries or 1, keys]`."""
    if bias.shape[2] > 1:
        return bias[:, :, chosen]
    return bias


def _attend_slice(
    call: AttentionCall,
    part: Part,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
) -> Tensor:
    """`_attend_part` for consecutive queries and the keys that they see."""
    query = call.query
    dtype = query.dtype
    step = call.step
    scale = call.scale
    queries = query.shape[2]
    kv_heads = key.shape[1]
    keys = key.shape[2]
    group = query.shape[1] // kv_heads
    if not call.is_plain:
        if call.softcap is None and call.sinks is None:
            return _attend_with_bias(call, part, key, value)
        return _attend_explicitly(call, part, key, value)
    stays_unpacked = queries >= PACK_QUERIES or (group == 1 and queries > 1)
    if stays_unpacked:
        mask = None
        if not is_causal:
            mask = _mask(step, part, queries, keys, dtype)
        result = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=group > 1,
        )
        return result.transpose(1, 2)
    packed = query.unflatten(1, (kv_heads, group))
    packed = packed.flatten(2, 3)  # [rows, kv_heads, M, dim]
    is_half_row = packed.shape[2] == 1 and dtype.itemsize == 2
    if is_half_row and query.is_cpu:
        # With one query row, half-precision SDPA on the CPU is two to three times slower than this.
        transposed = key.transpose(-1, -2)
        scores = torch.matmul(packed, transposed)
        scores = scores.mul_(scale)
        mask = _mask(step, part, queries, keys, dtype)
        if mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1, dtype=torch.float32)
        weights = weights.to(value.dtype)
        result = torch.matmul(weights, value)
    else:
        mask = _mask(step, part, queries, keys, dtype, heads=group)
        result = F.scaled_dot_product_attention(
            packed,
            key,
            value,
            attn_mask=mask,
            scale=scale,
        )
    if queries == 1:
        result = result.flatten(1, 2)
        return result.unsqueeze(1)
    result = result.unflatten(2, (group, queries))
    result = result.permute(0, 3, 1, 2, 4)
    return result.flatten(2, 3)


def _attend_with_bias(
    call: AttentionCall,
    part: Part,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """`_attend_slice` with a bias, in float32. A query that sees nothing gets zeros, as PyTorch's
    SDPA defines."""
    query = call.query
    queries = query.shape[2]
    keys = key.shape[2]
    compute = torch.promote_types(query.dtype, torch.float32)
    assert call.bias is not None
    added = call.bias.to(compute)
    mask = _mask(call.step, part, queries, keys, compute)
    if mask is None:
        mask = added
    else:
        mask = added + mask
    has_groups = query.shape[1] != key.shape[1]
    result = F.scaled_dot_product_attention(
        query.to(compute),
        key.to(compute),
        value.to(compute),
        mask,
        scale=call.scale,
        enable_gqa=has_groups,
    )
    result = result.to(query.dtype)
    return result.transpose(1, 2)


def _attend_explicitly(
    call: AttentionCall,
    part: Part,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """`_attend_slice` with softcap, sinks and bias, in float32."""
    query = call.query
    sinks = call.sinks
    queries = query.shape[2]
    kv_heads = key.shape[1]
    keys = key.shape[2]
    compute = torch.promote_types(query.dtype, torch.float32)
    by_group = (kv_heads, -1)
    by_query = (-1, queries)
    # [rows, kv_heads, M, dim]
    packed = query.unflatten(1, by_group)
    packed = packed.flatten(2, 3)
    packed = packed.to(compute)
    scores = torch.matmul(packed, key.to(compute).transpose(-1, -2))
    scores = scores * call.scale
    scores = scores.unflatten(2, by_query)
    scores = scores.flatten(1, 2)  # [rows, heads, queries, keys]
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap)
        scores = scores * call.softcap
    mask = _mask(call.step, part, queries, keys, compute)
    for added in (call.bias, mask):
        if added is not None:
            scores = scores + added.to(compute)
    if sinks is not None:  # one more column without a value
        column = sinks.to(compute)
        column = column[:, None, None]
        sizes = scores.shape[:-1]
        column = column.expand(*sizes, 1)
        scores = torch.cat([scores, column], dim=-1)
    if call.bias is None:  # the mask shows every query something
        weights = scores.softmax(dim=-1)
    else:
        # their softmax would be NaN: zeros instead
        highest = scores.amax(dim=-1, keepdim=True)
        blind = highest == -math.inf
        weights = scores.masked_fill(blind, 0.0)
        weights = weights.softmax(dim=-1)
        weights = weights.masked_fill(blind, 0.0)
    # [rows, kv_heads, M, keys]
    weights = weights[..., :keys]
    weights = weights.unflatten(1, by_group)
    weights = weights.flatten(2, 3)
    result = torch.matmul(weights, value.to(compute))
    result = result.unflatten(2, by_query)
    result = result.flatten(1, 2)
    result = result.to(query.dtype)
    return result.transpose(1, 2)


def _mask(
    step: StepMetadata,
    part: Part,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    heads: int = 1,
) -> Tensor | None:
    """The mask of the last queries and keys, `[heads * queries, keys]`, added to the scores. It is
    a view of one mask per step, since counted from the end it is the same for rows of any length;
    with the rows' padding, `[rows, 1, heads * queries or 1, keys]`, one per part."""
    if part.hidden is not None:
        return step.plan(_padded_mask, part, queries, dtype, heads)
    if not part.mask_keys:
        return None
    rows = queries
    if heads == 1:
        rows = min(step.query_len or 1, SLICE_QUERIES)
    mask = step.plan(_step_mask, rows, part.mask_keys, dtype, heads)
    return mask[-heads * queries :, -keys:]


@torch.inference_mode(False)
def _step_mask(
    step: StepMetadata,
    queries: int,
    keys: int,
    dtype: torch.dtype,
    heads: int,
) -> Tensor:
    """Minus infinity where a query does not see a key, else 0."""
    device = step.block_tables.device
    query = torch.arange(-queries, 0, device=device)
    query = query[:, None]
    key = torch.arange(-keys, 0, device=device)
    hidden = key > query
    if step.window is not None:
        hidden |= key <= query - step.window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    mask = mask.masked_fill_(hidden, -math.inf)
    return mask.repeat(heads, 1)


@torch.inference_mode(False)
def _padded_mask(
    step: StepMetadata,
    part: Part,
    queries: int,
    dtype: torch.dtype,
    heads: int,
) -> Tensor:
    """Minus infinity where a query does not see a key, or the key is padding, else 0. Its rows in
    memory are multiples of `MASK_ALIGNMENT`."""
    hidden = part.hidden
    assert hidden is not None
    rows = hidden.shape[0]
    num_units = -(-part.length // MASK_ALIGNMENT)
    width = num_units * MASK_ALIGNMENT
    mask_queries = 1
    if part.mask_keys:
        mask_queries = heads * queries
    shape = (rows, 1, mask_queries, width)
    mask = torch.zeros(shape, dtype=dtype, device=hidden.device)
    mask = mask[..., : part.length]
    mask.masked_fill_(hidden, -math.inf)
    if part.mask_keys:
        step_mask = _step_mask(step, queries, part.length, dtype, heads)
        mask += step_mask
    return mask


# -- which tiles are gathered together -----------------------------------------------------------

Geometry = tuple[int, int, int]
"""The number of tokens that a row sees, the offset of the first in its block, and the first query
that sees any."""

Rows = tuple[Geometry, list[tuple[int, int]]]
"""A geometry, and its rows with the first visible position of each."""

_scratch = threading.local()  # on the CPU, where new memory would cost page faults every time


def _view(call: AttentionCall, part: Part, placed: PlacedRows) -> list[Tensor]:
    """Returns what `_gather` returns as views of rows that are contiguous in memory, if they have
    the query's dtype."""
    assert part.place is not None
    slots, low = part.place
    dtype = call.query.dtype
    end = low + part.length
    visible = slice(low, end)
    key = placed.keys[slots, :, visible]
    value = placed.values[slots, :, visible]
    return [key.to(dtype), value.to(dtype)]


def _gather(call: AttentionCall, part: Part, layouts: list[Layout]) -> list[Tensor]:
    """Gathers K and V of a part, each `[rows, kv_heads, length, dim]` in the query's dtype. On the
    CPU they are in this thread's scratch until its next call; on other devices, and if a gradient
    is wanted, in new memory."""
    num_vectors = math.prod(part.shape)
    sizes = [num_vectors * layout.shape[3] * layout.itemsize for layout in layouts]
    aligned_sizes = (-(-size // 64) * 64 for size in sizes)
    *begins, end = itertools.accumulate(aligned_sizes, initial=0)
    scratch = None
    if call.query.is_cpu and not call.needs_grad:
        scratch = getattr(_scratch, "memory", None)
        if scratch is None or scratch.numel() < end:
            with torch.inference_mode(False):
                # an inference tensor could not be written outside inference mode
                scratch = torch.empty(end, dtype=torch.uint8, device="cpu")
            _scratch.memory = scratch
    gathered = []
    dtype = call.query.dtype
    places = zip(layouts, part.tiles, begins, sizes)
    is_token = part.positions is not None
    last = part.offset + part.length
    visible = slice(part.offset, last)
    keys = call.blocks.keys
    values = call.blocks.values
    for blocks in (keys, values):
        found = []
        planes = quantized.planes(blocks)
        for plane, (layout, tiles, start, size) in zip(planes, places):
            flat = layout.flat(plane, is_token)
            room = None
            if scratch is not None:
                room = scratch[start : start + size]
                room = room.view(plane.dtype)
                room = room.view(-1, flat.shape[1])
            picked = torch.index_select(flat, 0, tiles, out=room)
            dim = layout.shape[3]
            picked = picked.view(*part.shape, dim)
            found.append(picked[:, :, visible])
        states = quantized.join(found, blocks, dtype)
        gathered.append(states)
    return gathered


@torch.inference_mode(False)
@torch.no_grad()
def plan_parts(step: StepMetadata, *layouts: Layout) -> tuple[tuple[Part, ...], bool]:
    """Returns the parts of a step with equally many queries per row, and whether they cover every
    query of every row. `step.plan` runs this once for all layers of one layout."""
    distinct_layouts = {*layouts}
    kv_heads = layouts[0].shape[1]
    size = step.block_size
    scratch = SCRATCH_BYTES if step.block_tables.is_cpu else DEVICE_SCRATCH_BYTES
    token_bytes = sum(layout.itemsize * layout.shape[3] for layout in layouts)  # of one head
    geometries, is_complete = _geometries(step)
    most_tokens = scratch // (token_bytes * kv_heads)
    parts = []
    for group in _similar(step, geometries, most_tokens):
        (geometry, found), *others = group
        length, offset, first_query = geometry
        shared = _shared_fields(step, length, first_query, geometries)
        if others:
            part = _padded_part(step, group, layouts, shared)
            parts.append(part)
            continue
        last = offset + length
        num_blocks = -(-last // size)
        num_tokens = num_blocks * size
        head_bytes = num_tokens * token_bytes
        row_bytes = head_bytes * kv_heads
        num_rows = max(1, scratch // row_bytes)
        num_heads = min(kv_heads, scratch // head_bytes)
        num_heads = max(1, num_heads)
        for at in range(0, len(found), num_rows):
            members = tuple(found[at : at + num_rows])
            row_tables = []
            for row, low in members:
                first = low // size
                visible = slice(first, first + num_blocks)
                table = step.block_tables[row, visible]
                row_tables.append(table)
            tables = torch.stack(row_tables)
            tables = tables.long()
            for head in range(0, kv_heads, num_heads):
                end = min(kv_heads, head + num_heads)
                heads = slice(head, end)
                indices = {layout: layout.tiles(tables, heads) for layout in distinct_layouts}
                tiles = tuple(indices[layout] for layout in layouts)
                shape = (len(members), end - head, num_tokens)
                part = Part(
                    rows=_index(step, members),
                    members=members,
                    heads=heads,
                    offset=offset,
                    length=length,
                    first_query=first_query,
                    tiles=tiles,
                    shape=shape,
                    **shared,
                )
                parts.append(part)
    return tuple(parts), is_complete


def _index(step: StepMetadata, members: tuple[tuple[int, int], ...]) -> slice | Tensor:
    """The index of the members' rows: if possible a slice, which costs no copy."""
    rows = [row for row, _ in members]
    first = rows[0]
    end = rows[-1] + 1
    if rows == list(range(first, end)):
        return slice(first, end)
    device = step.block_tables.device
    return torch.tensor(rows, device=device)


def _similar(
    step: StepMetadata,
    geometries: list[Rows],
    most: int,
) -> Iterator[list[Rows]]:
    """Groups geometries of similar lengths, of at most `most` tokens with their padding. Steps of
    many queries have few rows, and skip what none of them sees."""
    group = list[Rows]()
    num_rows = 0
    padding = 0
    queries = step.query_len or 1
    for geometry in geometries:
        (length, _, first_query), found = geometry
        longest = length
        skips_queries = first_query > 0
        if group:
            longest, _, group_first_query = group[0][0]
            skips_queries = skips_queries or group_first_query > 0
        count = len(found)
        num_rows = num_rows + count
        padding = padding + (longest - length) * count
        # a group's mask has a row for each query and head, kept for all layers
        mask_size = num_rows * longest * queries
        fits = mask_size <= most and padding * PADDING_SHARE <= most
        stays_apart = not fits or skips_queries or queries >= APART_QUERIES
        if group and stays_apart:
            yield group
            group = []
            num_rows = count
            padding = 0
        group.append(geometry)
    if group:
        yield group


def _padded_part(
    step: StepMetadata,
    group: list[Rows],
    layouts: tuple[Layout, ...],
    shared: dict[str, Any],
) -> Part:
    """The part of all rows of a group, whose first geometry is the longest."""
    geometry, _ = group[0]
    length, _, _ = geometry
    kv_heads = layouts[0].shape[1]
    rows_of_group = (row for _, found in group for row in found)
    members = tuple(sorted(rows_of_group))
    device = step.block_tables.device
    row_bounds = []
    for row, low in members:
        first = step.seq_lens[row] - length
        row_bounds.append((first, low))
    bounds = torch.tensor(row_bounds, device=device)
    firsts = bounds[:, :1]
    lows = bounds[:, 1:]
    columns = torch.arange(length, device=device)
    positions = firsts + columns
    hidden = positions < lows
    hidden = hidden[:, None, None]
    rows = _index(step, members)
    positions = positions.maximum(lows)
    tables = step.block_tables[rows]
    tables = tables.long()
    heads = slice(0, kv_heads)
    distinct_layouts = {*layouts}
    indices = {layout: layout.tokens(tables, positions, heads) for layout in distinct_layouts}
    tiles = tuple(indices[layout] for layout in layouts)
    shape = (len(members), kv_heads, length)
    return Part(
        rows=rows,
        members=members,
        heads=heads,
        offset=0,
        length=length,
        first_query=0,
        tiles=tiles,
        shape=shape,
        positions=positions,
        hidden=hidden,
        **shared,
    )


def plan_rows(
    step: StepMetadata,
    kv_heads: int,
    placement: Placement,
) -> tuple[tuple[Part, ...], bool]:
    """`plan_parts` for rows that are contiguous in memory: one part for rows of one geometry in
    neighbouring slots."""
    geometries, is_complete = _geometries(step)
    heads = slice(0, kv_heads)
    parts = []
    for geometry, found in geometries:
        length, offset, first_query = geometry
        shared = _shared_fields(step, length, first_query, geometries)
        places = []
        starts = []
        previous: tuple[int, int, int] | None = None
        for at, (row, low) in enumerate(found):
            slot = placement.slots[row]
            first = placement.firsts[row] + low
            places.append((slot, first))
            if previous != (row - 1, slot - 1, first):
                starts.append(at)
            previous = (row, slot, first)
        bounds = [*starts, len(found)]
        for at, end in itertools.pairwise(bounds):
            members = tuple(found[at:end])
            slot, first = places[at]
            num_rows = end - at
            slots = slice(slot, slot + num_rows)
            first_row, _ = members[0]
            last_row, _ = members[-1]
            rows = slice(first_row, last_row + 1)
            part = Part(
                rows=rows,
                members=members,
                heads=heads,
                offset=offset,
                length=length,
                first_query=first_query,
                tiles=(),
                shape=(num_rows, kv_heads, length),
                place=(slots, first),
                **shared,
            )
            parts.append(part)
    return tuple(parts), is_complete


def _geometries(step: StepMetadata) -> tuple[list[Rows], bool]:
    """Returns rows with their first visible position by geometry, longest first; and whether every
    query sees a key."""
    query_len = step.query_len
    size = step.block_size
    assert query_len is not None
    geometries: dict[Geometry, list[tuple[int, int]]] = {}
    is_complete = True
    ranges = zip(step.seq_lens, step.starts)
    for row, (seq_len, low) in enumerate(ranges):
        first_query = 0
        if step.causal:
            position = seq_len - query_len
            first_query = max(0, low - position)
            if step.window is not None:
                window_start = position + first_query - step.window + 1
                low = max(low, window_start)
        sees_keys = low < seq_len
        is_complete = is_complete and first_query == 0 and sees_keys
        if first_query < query_len and sees_keys:
            length = seq_len - low
            offset = low % size
            geometry = (length, offset, first_query)
            members = geometries.setdefault(geometry, [])
            members.append((row, low))
    longest_first = sorted(geometries.items(), reverse=True)
    return longest_first, is_complete


def _shared_fields(
    step: StepMetadata,
    length: int,
    first_query: int,
    geometries: list[Rows],
) -> dict[str, Any]:
    """Fields that all parts of one geometry share."""
    query_len = step.query_len
    assert query_len is not None
    mask_keys = 0
    if step.causal and query_len > 1:
        longest, _, _ = geometries[0][0]
        mask_keys = longest
    if step.window is not None:
        most_keys = SLICE_QUERIES + step.window - 1
        mask_keys = min(mask_keys, most_keys)
    queries = query_len - first_query
    window = length
    num_slices = 1
    if mask_keys:
        window = step.window or length
        num_slices = -(-queries // SLICE_QUERIES)
    hidden = mask_keys if queries > 1 else 0
    past = length - queries
    bounds = [queries * index // num_slices for index in range(num_slices + 1)]
    slices = []
    for start, end in itertools.pairwise(bounds):
        chosen = slice(start, end)
        first_key = past + start - window + 1
        seen = slice(max(0, first_key), past + end)
        slices.append((chosen, seen))
    is_causal = hidden > 0 and length == queries and window >= length
    return {
        "slices": tuple(slices),
        "mask_keys": hidden,
        "causal": is_causal,
    }
