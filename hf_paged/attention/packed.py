"""Attention of a packed step: neighbours of one query length, decodes above all, as rows of one batch."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..cache.packed import Chunk, NotCapturable, NotPackable, PackedStep, PackedTensor
from ..kernels import cpp, uses_triton
from ..step import StepMetadata
from . import backends
from .masks import PagedMask

Plan = TypeVar("Plan")


class Stretch(NamedTuple):
    """
    Neighbours in the packed dimension with the same `query_len`: rows of one call of a backend. `fresh`: each is the
    first of its sequence and sees nothing but itself, so that it is plain causal attention on this step's states.
    """

    first: int
    rows: int
    metadata: StepMetadata
    fresh: bool
    fields: cpp.DecodeFields | None = None  # of decodes on the CPU


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attention of every sequence's new tokens over its own blocks.

    Args:
        query (`torch.Tensor` of shape `(1, heads, num_tokens, head_dim)`): Any float dtype.
        key, value (`PackedTensor` of shape `(1, kv_heads, num_tokens, dim)`): Handles of this step.
        attention_mask (`PagedMask`): Causal, perhaps with a window.
        scale, softcap, sinks: As in `reference.paged_attention`.

    Returns:
        `torch.Tensor` of shape `(1, num_tokens, heads, value_dim)`, in the query's dtype; under autocast in autocast's.

    Raises:
        NotPackable: if the mask says anything that a packed step cannot keep apart by sequence.
        NotCapturable: if the step's lengths are on the device only, and no backend can use those.
    """
    if not (isinstance(key, PackedTensor) and isinstance(value, PackedTensor)):
        raise NotPackable("packed keys or values go with ordinary ones")
    step, query = key.step, backends.as_autocast(query)
    if query.shape[0] != 1 or query.shape[2] != step.num_tokens:
        raise NotPackable(f"queries of shape {tuple(query.shape)} in a packed step of {step.num_tokens} tokens")
    features: dict[str, Any] = dict(scale=scale, softcap=softcap, sinks=sinks)
    if _uses_triton(step, query):
        from .backends import triton_packed as kernels

        kernel_plan = plan_packed(step, attention_mask, query.device, kernels.KernelPlan)
        obstacle = kernels.supports(query, key.blocks, value.blocks, kernel_plan, scale, sinks)
        if obstacle is None:
            return kernels.packed_attention(query, key.blocks, value.blocks, kernel_plan, **features)
        backends.log_once(obstacle)
    plan = plan_packed(step, attention_mask, query.device, _build_plan)
    if plan[0].fields is not None and len(plan) == 1:
        decoded = _decode(query, key, value, plan[0], sinks, scale, softcap)
        if decoded is not None:
            return decoded
    if step.lengths is not None:
        raise NotCapturable("no attention kernel that takes its lengths from the device serves it")
    is_plain = softcap is None and sinks is None
    parts = []
    for stretch in plan:
        part = _rows(query, stretch)  # [rows, heads, query_len, head_dim]
        if stretch.fresh and is_plain:
            output = scaled_dot_product_attention(
                part,
                _rows(key.fresh, stretch).to(query.dtype),
                _rows(value.fresh, stretch).to(query.dtype),
                is_causal=True,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            ).transpose(1, 2)
        else:
            output = backends.paged_attention(part, key.blocks, value.blocks, stretch.metadata, **features)
        parts.append(output.flatten(0, 1))  # [rows * query_len, heads, value_dim]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


def _uses_triton(step: PackedStep, query: torch.Tensor) -> bool:
    """`kernels.uses_triton`, asked once for all layers: it reads the environment."""
    found = step.memo.get("uses_triton")
    if found is None:
        found = step.memo["uses_triton"] = uses_triton(query)
    return bool(found)


def _decode(
    query: torch.Tensor,
    key: PackedTensor,
    value: PackedTensor,
    stretch: Stretch,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor | None:
    """
    Attention of a step that has nothing but decodes, by the call that the layer's last step prepared; `None` where the
    C++ kernel does not serve it.
    """
    layer = key.layer
    if key is not layer.key or value is not layer.value:  # a model that mixes keys and values of layers
        return None
    signature = cpp.DecodeCall.sign(query, sinks, scale, softcap)
    call = layer.decode
    if call is None or call.signature != signature:
        rows, metadata = _rows(query, stretch), stretch.metadata
        if backends.select(rows, key.blocks, value.blocks, metadata, sinks) is not cpp:
            return None
        call = layer.decode = cpp.DecodeCall(query, key.blocks, value.blocks, sinks, scale, softcap)
    return call(query, stretch.fields, sinks)


def _rows(states: torch.Tensor, stretch: Stretch) -> torch.Tensor:
    """`(1, heads, num_tokens, dim)` to `(rows, heads, query_len, dim)` of a stretch, a view."""
    query_len = stretch.metadata.query_len
    part = states[0, :, stretch.first : stretch.first + stretch.rows * query_len]
    return part.unflatten(1, (stretch.rows, query_len)).transpose(0, 1)


def plan_packed(
    step: PackedStep,
    attention_mask: torch.Tensor | None,
    device: torch.device,
    build: Callable[[PackedStep, int | None, torch.device], Plan],
) -> Plan:
    """What `build` makes of a step and the window of a mask, worked out once for all layers. Raises `NotPackable`."""
    found = step.memo.get((id(attention_mask), build))
    if found is None or found[0] is not attention_mask:
        window = _window(step, attention_mask)
        plan = step.memo.get((window, device, build))
        if plan is None:
            plan = step.memo[window, device, build] = build(step, window, device)
        found = step.memo[id(attention_mask), build] = (attention_mask, plan)
    return found[1]


def _window(step: PackedStep, mask: torch.Tensor | None) -> int | None:
    """The window of a mask that is causal and nothing else; tokens that the group gave back must lie outside it."""
    if not isinstance(mask, PagedMask):
        raise NotPackable(f"the attention mask is {'None' if mask is None else 'a dense tensor'}")
    arguments, pattern = mask.arguments, mask.pattern
    sizes = [arguments.get(name, 0) for name in ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset")]
    if pattern is None or not pattern.causal or pattern.chunk is not None:
        raise NotPackable("the attention mask is more than causal with a window")
    if sizes != [1, step.num_tokens, step.num_tokens, 0, 0]:
        raise NotPackable(f"the attention mask was made for other sizes than 1 x {step.num_tokens} tokens: {sizes}")
    if mask.visible_columns() != ((0,), (step.num_tokens,)):
        raise NotPackable("the attention mask hides tokens")
    if step.window is not None and (pattern.window is None or pattern.window > step.window):
        raise NotPackable(f"the mask's window is {pattern.window}, but the cache keeps {step.window} tokens")
    return pattern.window


def _build_plan(step: PackedStep, window: int | None, device: torch.device) -> tuple[Stretch, ...]:
    stretches = []
    if step.num_decodes:
        metadata = _metadata(step.tables, step.seq_lens, 1, step.block_size, window, device, step.lengths)
        fields = cpp.DecodeFields.of(metadata) if device.type == "cpu" else None
        stretches.append(Stretch(0, step.num_decodes, metadata, fresh=False, fields=fields))

    def kind(chunk: Chunk) -> tuple[int, bool]:
        sees_all = window is None or window >= chunk.query_len
        return chunk.query_len, sees_all and chunk.seq_len == chunk.query_len > 1

    for (query_len, fresh), group in itertools.groupby(step.chunks, kind):
        chunks = list(group)
        width = max(len(chunk.block_ids) for chunk in chunks)
        ids = [block for chunk in chunks for block in (*chunk.block_ids, *([0] * (width - len(chunk.block_ids))))]
        tables = _int32(ids, device).view(len(chunks), width)
        seq_lens = tuple(chunk.seq_len for chunk in chunks)
        metadata = _metadata(tables, seq_lens, query_len, step.block_size, window, device)
        stretches.append(Stretch(chunks[0].first, len(chunks), metadata, fresh))
    return tuple(stretches)


def _metadata(
    tables: torch.Tensor,
    seq_lens: tuple[int, ...],
    query_len: int,
    block_size: int,
    window: int | None,
    device: torch.device,
    lengths: torch.Tensor | None = None,
) -> StepMetadata:
    if lengths is None:
        on_device, starts = _int32(seq_lens, device), torch.zeros(len(seq_lens), dtype=torch.int32, device=device)
    else:
        on_device, starts = lengths
    return StepMetadata(
        block_tables=tables,
        seq_lens=on_device,
        starts=starts,
        seq_lens_host=seq_lens,
        starts_host=(0,) * len(seq_lens),
        query_len=query_len,
        block_size=block_size,
        causal=True,
        window=window,
    )


def _int32(values: Any, device: torch.device) -> torch.Tensor:
    # an array's buffer becomes a tensor three times as fast as a list does
    return torch.frombuffer(array("i", values), dtype=torch.int32).to(device)
