"""Portable fast attention over block tables: gather a few rows at a time, then one dense attention on exact lengths.

Rows of one length go together; each part is gathered into one scratch that stays in the cache of the processor and
serves every layer, and the query heads of a group are packed beside the queries (M = group * query_len), which CPU
SDPA needs to be fast. Nothing is padded, so no slot outside a row's visible range is ever read. Plain PyTorch, so it
runs on any device, and it is differentiable.
"""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_paged.attention.metadata import AttentionMetadata

SCRATCH_BYTES = 2 << 20
"""Bytes of gathered K and V at a time, as far as one head of one row allows; larger falls out of the L2 and L3."""

PACK_QUERIES = 32
"""Queries per row from which the heads of a group run one by one: M is large enough, and causal needs no mask."""


@dataclass(frozen=True)
class _Part:
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
    key_tiles: Tensor
    value_tiles: Tensor
    shape: tuple[int, int, int]  # rows, K/V heads, gathered tokens
    mask: Tensor | None  # [queries, length] bool, None if every query sees everything or `causal`
    causal: bool  # square and causal


@dataclass(frozen=True)
class _Plan:
    parts: tuple[_Part, ...]
    complete: bool  # whether every query of every row sees something


def paged_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`reference.paged_attention`, fast. Plain bfloat16 and float16 calls round where PyTorch's own SDPA rounds."""
    batch, heads, query_len, _ = query.shape
    kv_heads, value_dim = value_blocks.shape[1], value_blocks.shape[3]
    group = heads // kv_heads
    plan = _plan(metadata, key_blocks, value_blocks)
    grads = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key_blocks, value_blocks))
    shape = (batch, query_len, heads, value_dim)
    out = query.new_empty(shape) if plan.complete else query.new_zeros(shape)
    if bias is not None:
        keys = max(bias.shape[-1], max(metadata.seq_lens_host) if bias.shape[-1] == 1 else 0)
        bias = bias.expand(batch, heads, query_len, keys)
    pools = (_flat(key_blocks), _flat(value_blocks))
    for part in plan.parts:
        rows, kv_count, _ = part.shape
        first, last = part.heads[0] * group, part.heads[1] * group
        queries = query_len - part.first_query
        key, value = _gather(part, *pools, key_blocks.shape[3], value_dim, reuse=not grads)
        if key.dtype != query.dtype:
            key, value = key.to(query.dtype), value.to(query.dtype)
        # [rows, kv_count, group, queries, dim]
        grouped = query[part.rows, first:last, part.first_query :].unflatten(1, (kv_count, group))
        extra = None
        if softcap is not None or sinks is not None or bias is not None:
            extra = _Extra(softcap, sinks, bias, part, group)
        if queries == 1 and extra is None and isinstance(part.rows, slice):
            result = _attend(grouped.squeeze(3), key, value, part, scale, 1, slice(0, group), None)
            out[part.rows, -1, first:last] = result.flatten(1, 2)
            continue
        target = out[part.rows] if isinstance(part.rows, slice) else out.new_empty((rows, *shape[1:]))
        for members in _members(group, queries):
            packed = grouped[:, :, members].flatten(2, 3)  # [rows, kv_count, M, dim]
            result = _attend(packed, key, value, part, scale, queries, members, extra)
            result = result.unflatten(2, (-1, queries)).permute(0, 3, 1, 2, 4)
            view = target[:, part.first_query :, first:last].unflatten(2, (kv_count, group))
            view[:, :, :, members] = result
        if not isinstance(part.rows, slice):
            out[part.rows, part.first_query :, first:last] = target[:, part.first_query :, first:last]
    return out


def store(keys: Tensor, values: Tensor, key_blocks: Tensor, value_blocks: Tensor, slots: Tensor) -> None:
    """
    Writes the K/V of one step into the blocks, in place.

    Args:
        keys (`torch.Tensor` of shape `(batch, kv_heads, tokens, head_dim)`), any strides.
        values (`torch.Tensor` of shape `(batch, kv_heads, tokens, value_dim)`), any strides.
        key_blocks (`torch.Tensor` of shape `(num_blocks, kv_heads, block_size, head_dim)`)
        value_blocks (`torch.Tensor` of shape `(num_blocks, kv_heads, block_size, value_dim)`)
        slots (`torch.Tensor` of shape `(batch, tokens)`, int64): `block * block_size + offset` of each token, each at
            most once; negative: the token is not stored.
    """
    rows, tokens = (slots >= 0).nonzero(as_tuple=True)
    slot = slots[rows, tokens]
    block, offset = slot // key_blocks.shape[2], slot % key_blocks.shape[2]
    key_blocks[block, :, offset] = keys[rows, :, tokens].to(key_blocks.dtype)
    value_blocks[block, :, offset] = values[rows, :, tokens].to(value_blocks.dtype)


@dataclass(frozen=True)
class _Extra:
    """What SDPA does not know."""

    softcap: float | None
    sinks: Tensor | None
    bias: Tensor | None
    part: _Part
    group: int


def _members(group: int, queries: int) -> list[slice]:
    """Query heads of a group that are packed into one product: all, or each alone where there are many queries."""
    if queries < PACK_QUERIES:
        return [slice(0, group)]
    return [slice(i, i + 1) for i in range(group)]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: _Part,
    scale: float,
    queries: int,
    members: slice,
    extra: _Extra | None,
) -> Tensor:
    """Dense attention of `[rows, kv_heads, M, dim]` over `[rows, kv_heads, length, dim]`, `M` = members x queries."""
    rows_of_query = query.shape[2]
    causal = part.causal and rows_of_query == queries
    mask = part.mask
    if part.causal and not causal:
        mask = torch.ones(queries, part.length, dtype=torch.bool, device=query.device).tril_()
    if mask is not None and rows_of_query != queries:
        mask = mask.repeat(rows_of_query // queries, 1)
    if extra is None:
        if rows_of_query == 1 and query.dtype != torch.float32 and query.is_cpu:
            # With one query row a half-precision SDPA of the CPU is two to three times slower than this.
            weights = torch.matmul(query, key.transpose(-1, -2)).mul_(scale).softmax(-1, dtype=torch.float32)
            return torch.matmul(weights.to(value.dtype), value)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale)
    return _attend_explicitly(query, key, value, mask, causal, scale, members, extra)


def _attend_explicitly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    members: slice,
    extra: _Extra,
) -> Tensor:
    """`_attend` with softcap, sinks and bias, in float32."""
    part, (first, last) = extra.part, extra.part.heads
    compute = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query.to(compute), key.to(compute).transpose(-1, -2)) * scale
    if extra.softcap is not None:
        scores = torch.tanh(scores / extra.softcap) * extra.softcap
    if extra.bias is not None:
        rows = range(extra.bias.shape[0])[part.rows] if isinstance(part.rows, slice) else part.rows.tolist()
        bias = torch.stack(
            [extra.bias[row, :, part.first_query :, low : low + part.length] for row, low in zip(rows, part.lows)]
        )
        bias = bias.unflatten(1, (-1, extra.group))[:, first:last, members].flatten(2, 3)
        scores = scores + bias.to(compute)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril_()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    # The largest logit, sink included; 0 where all are -inf, so that such a row becomes zeros and not NaN.
    top = scores.amax(dim=-1, keepdim=True)
    sink = None
    if extra.sinks is not None:
        sink = extra.sinks.to(compute).view(-1, extra.group)[first:last, members]  # [kv_heads, members]
        sink = sink.repeat_interleave(scores.shape[2] // sink.shape[1], dim=1).unsqueeze(-1)
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    result = torch.matmul(weights, value.to(compute)) / total.masked_fill(total == 0, 1.0)
    return result.to(query.dtype)


_scratch = threading.local()


def _scratch_bytes(size: int, device: torch.device) -> Tensor:
    """This thread's scratch on `device`, grown to `size` bytes: fresh memory would cost its page faults every time."""
    held: Tensor | None = getattr(_scratch, str(device), None)
    if held is None or held.numel() < size:
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            held = torch.empty(size, dtype=torch.uint8, device=device)
        setattr(_scratch, str(device), held)
    return held


def _gather(
    part: _Part, keys: Tensor, values: Tensor, key_dim: int, value_dim: int, reuse: bool
) -> tuple[Tensor, Tensor]:
    """K and V of a part, `[rows, kv_heads, length, dim]`, from `_flat` pools; in the scratch unless a gradient will ask
    for them."""
    gathered = []
    start, size = 0, math.prod(part.shape)
    key_bytes = -(-size * key_dim * keys.element_size() // 64) * 64
    scratch = _scratch_bytes(key_bytes + size * value_dim * values.element_size(), keys.device) if reuse else None
    for flat, tiles, dim in ((keys, part.key_tiles, key_dim), (values, part.value_tiles, value_dim)):
        if scratch is None:
            picked = flat.index_select(0, tiles)
        else:
            picked = scratch[start : start + size * dim * flat.element_size()].view(flat.dtype).view(-1, flat.shape[1])
            torch.index_select(flat, 0, tiles, out=picked)
        gathered.append(picked.view(*part.shape, dim)[:, :, part.offset : part.offset + part.length])
        start = key_bytes
    return gathered[0], gathered[1]


def _flat(blocks: Tensor) -> Tensor:
    """A pool as `[tiles, unit]`, a view whatever its strides."""
    unit = _unit(blocks)
    last = (blocks.shape[0] - 1) * blocks.stride(0) + (blocks.shape[1] - 1) * blocks.stride(1)
    return blocks.as_strided(((last + blocks.shape[2] * blocks.shape[3]) // unit, unit), (unit, 1))


def _unit(blocks: Tensor) -> int:
    """Elements that are gathered at once: a whole tile unless the strides forbid it."""
    return math.gcd(blocks.shape[2] * blocks.shape[3], blocks.stride(0), blocks.stride(1))


_plans: dict[int, tuple[weakref.ref[AttentionMetadata], dict[tuple[int, ...], _Plan]]] = {}


def _plan(metadata: AttentionMetadata, key_blocks: Tensor, value_blocks: Tensor) -> _Plan:
    """The parts of one step: built once, then read by every layer that passes the same metadata object."""
    known = _plans.get(id(metadata))
    if known is None:
        # By identity: equal metadata of another step is not worth comparing tensors for.
        key = id(metadata)
        known = (weakref.ref(metadata, lambda _: _plans.pop(key, None)), {})
        _plans[key] = known
    sizes = (key_blocks.element_size() * key_blocks.shape[3], value_blocks.element_size() * value_blocks.shape[3])
    layout = (*key_blocks.shape, *key_blocks.stride(), *value_blocks.shape, *value_blocks.stride(), *sizes)
    plan = known[1].get(layout)
    if plan is None:
        with torch.inference_mode(False), torch.no_grad():
            plan = _build_plan(metadata, key_blocks, value_blocks, sum(sizes))
        known[1][layout] = plan
    return plan


def _build_plan(metadata: AttentionMetadata, key_blocks: Tensor, value_blocks: Tensor, token_bytes: int) -> _Plan:
    kv_heads = key_blocks.shape[1]
    geometries: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    complete = True
    for row, (seq_len, low) in enumerate(zip(metadata.seq_lens_host, metadata.starts_host)):
        first_query = 0
        if metadata.causal:
            position = seq_len - metadata.query_len
            first_query = max(0, low - position)
            if metadata.window is not None:
                low = max(low, position + first_query - metadata.window + 1)
        complete = complete and first_query == 0 and low < seq_len
        if first_query < metadata.query_len and low < seq_len:
            geometry = (seq_len - low, low % metadata.block_size, first_query)
            geometries.setdefault(geometry, []).append((row, low))
    parts = []
    for (length, offset, first_query), members in sorted(geometries.items(), reverse=True):
        blocks = -(-(offset + length) // metadata.block_size)
        head_bytes = blocks * metadata.block_size * token_bytes
        num_rows = max(1, SCRATCH_BYTES // (head_bytes * kv_heads))
        num_heads = max(1, min(kv_heads, SCRATCH_BYTES // head_bytes))
        mask, causal = _mask(metadata, length, first_query, key_blocks.device)
        for at in range(0, len(members), num_rows):
            chosen = members[at : at + num_rows]
            tables = torch.stack(
                [
                    metadata.block_tables[row, low // metadata.block_size : low // metadata.block_size + blocks]
                    for row, low in chosen
                ]
            ).long()
            for head in range(0, kv_heads, num_heads):
                heads = (head, min(kv_heads, head + num_heads))
                parts.append(
                    _Part(
                        rows=_rows([row for row, _ in chosen], tables.device),
                        lows=tuple(low for _, low in chosen),
                        heads=heads,
                        offset=offset,
                        length=length,
                        first_query=first_query,
                        key_tiles=_tiles(tables, heads, key_blocks),
                        value_tiles=_tiles(tables, heads, value_blocks),
                        shape=(len(chosen), heads[1] - heads[0], blocks * metadata.block_size),
                        mask=mask,
                        causal=causal,
                    )
                )
    return _Plan(tuple(parts), complete)


def _mask(
    metadata: AttentionMetadata, length: int, first_query: int, device: torch.device
) -> tuple[Tensor | None, bool]:
    """The mask of a geometry, and whether it is square and causal instead. Keys are counted from the visible range's
    first, so what is hidden in front of a row is already gone."""
    queries = metadata.query_len - first_query
    if not metadata.causal or queries == 1:
        return None, False
    if length == queries and (metadata.window is None or metadata.window >= length):
        return None, True
    position = torch.arange(length - queries, length, device=device)[:, None]
    key = torch.arange(length, device=device)
    mask = key <= position
    if metadata.window is not None:
        mask &= key > position - metadata.window
    return mask, False


def _rows(rows: list[int], device: torch.device) -> slice | Tensor:
    """A slice, which costs no copy, where the rows are consecutive."""
    if rows == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _tiles(tables: Tensor, heads: tuple[int, int], blocks: Tensor) -> Tensor:
    """Indices, in units of `_unit`, of the tiles of `tables` `[rows, n]` for a range of heads, head-major."""
    unit, tile = _unit(blocks), blocks.shape[2] * blocks.shape[3]
    head = torch.arange(*heads, device=tables.device) * (blocks.stride(1) // unit)
    inner = torch.arange(tile // unit, device=tables.device)
    tiles = tables[:, None, :, None] * (blocks.stride(0) // unit) + head[:, None, None] + inner
    return tiles.flatten()
