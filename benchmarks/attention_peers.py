"""Contenders of `benchmarks.attention`: the paged backends, and what they are timed beside.

Each is a function that prepares: from the tensors of a setting it makes a function of the layer
with output `(batch, query_len, heads, head_dim)`, or raises `NotAvailable` with the reason. Work
needed once for all layers is done there, outside the timing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.attention_data import Data
from benchmarks.ceilings import seconds_of
from benchmarks.systems import NotAvailable
from hf_paged import kernels
from hf_paged.attention import backends
from hf_paged.attention.backends import reference
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.kernels import quantized as quantization

Attention = Callable[[int], Tensor]
Prepare = Callable[[Data], Attention]
CONTIGUOUS = "contiguous sdpa"
INT8 = "ours: int8"


def ours(data: Data) -> Attention:
    """The backend chosen for a model's call."""
    return lambda layer: data.attend(backends, layer)


def backend_of(name: str) -> Prepare:
    """One of the paged backends."""

    def prepare(data: Data) -> Attention:
        device = torch.device(data.setting.device)
        if name == "triton" and device.type == "cpu":
            raise NotAvailable("skipped: needs a GPU")
        if name == "triton" and not kernels.triton.is_available(device):
            raise NotAvailable("not available: see the log")
        if name == "cpp" and not kernels.cpp.is_available():
            raise NotAvailable("not available: the kernels could not be built")
        backend = backends.BACKENDS[name]
        if name in ("cpp", "triton") and (reason := backend.unsupported_reason(data.calls[0])):
            raise NotAvailable(f"skipped: {reason}")
        return lambda layer: data.attend(backend, layer)

    return prepare


def int8(data: Data) -> Attention:
    """The backend chosen with `PagedConfig(kv_dtype="int8")`, over the same K/V, quantized."""
    calls = [call._replace(blocks=quantized(call.blocks)) for call in data.calls]
    if backends.select(calls[0]) is backends.gather:
        raise NotAvailable("skipped: no kernel takes it")
    return lambda layer: data.by_row(backends.attend(calls[layer]))


def expected(name: str, data: Data) -> Tensor:
    """What a contender gives for layer 0, by the reference."""
    if name != INT8:
        return data.expected
    call = data.calls[0]._replace(blocks=quantized(data.calls[0].blocks))
    return data.by_row(reference.attend(call))


def quantized(blocks: KVBlocks, kv_dtype: str = "int8") -> KVBlocks:
    """The same keys and values in blocks of one byte a number."""
    keys, values = blocks.keys, blocks.values
    found = KVBlocks.allocate(*keys.shape[::2], keys, values, kv_dtype=kv_dtype)
    quantization.write(found.keys, slice(None), keys)
    quantization.write(found.values, slice(None), values)
    return found


def contiguous(data: Data) -> Attention:
    """The ideal without paging: SDPA over padded `[batch, kv_heads, longest, head_dim]`, the
    fastest of four variants: query heads of a group packed along the queries, one head per group at
    a time, `enable_gqa`, and repeated keys."""
    case, shape = data.setting.case, data.setting.shape
    batch, group = len(case.seq_lens), shape.heads // shape.kv_heads
    # [batch, kv_heads, group, query_len, head_dim]
    grouped = data.query.unflatten(1, (shape.kv_heads, group))
    causal = case.phase == "prefill" and not case.ragged
    mask = None if causal or (case.query_len == 1 and not case.ragged) else data.visible()
    group_mask = mask if mask is None or case.query_len == 1 else mask.repeat(1, 1, group, 1)
    masked: dict[str, Any] = dict(attn_mask=mask, is_causal=causal, scale=data.scale)

    def packed(layer: int) -> Tensor:
        options = dict(attn_mask=group_mask, scale=data.scale)
        queries = grouped.flatten(2, 3)
        out = sdpa(queries, *data.contiguous[layer], **options)
        out = out.unflatten(2, (group, case.query_len)).permute(0, 3, 1, 2, 4)
        return out.reshape(batch, case.query_len, shape.heads, shape.head_dim)

    def by_head(layer: int) -> Tensor:
        out = data.query.new_empty(batch, case.query_len, shape.kv_heads, group, shape.head_dim)
        for index in range(group):
            queries = grouped[:, :, index]
            part = sdpa(queries, *data.contiguous[layer], **masked)
            out[:, :, :, index] = part.transpose(1, 2)
        return out.flatten(2, 3)

    def gqa(layer: int) -> Tensor:
        options = dict(**masked, enable_gqa=group > 1)
        return sdpa(data.query, *data.contiguous[layer], **options).transpose(1, 2)

    def repeated(layer: int) -> Tensor:
        key, value = (part.repeat_interleave(group, dim=1) for part in data.contiguous[layer])
        return sdpa(data.query, key, value, **masked).transpose(1, 2)

    candidates = [by_head, gqa, repeated] if causal else [packed, by_head, gqa]
    return min(candidates, key=lambda function: _seconds(function, data))


def _seconds(function: Attention, data: Data) -> float:
    calls = (functools.partial(function, layer) for layer in (0, 1, 0, 1))
    return min(seconds_of(call, data.query.device) for call in calls)


def transformers_sdpa(data: Data) -> Attention:
    """The attention function of a Llama with a contiguous cache, with the mask that it gets."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    case, shape = data.setting.case, data.setting.shape
    groups = shape.heads // shape.kv_heads
    module: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=True, training=False)
    has_mask = case.ragged or case.phase == "chunk"
    mask = data.visible() if has_mask else None
    return lambda layer: sdpa_attention_forward(
        module, data.query, *data.contiguous[layer], mask, scaling=data.scale
    )[0]


def _require_cuda(data: Data) -> None:
    if data.setting.device != "cuda":
        raise NotAvailable("skipped: needs a CUDA device")
    if data.setting.dtype == "fp32":
        raise NotAvailable("skipped: half precision only")


def varlen(data: Data) -> Attention:
    """torch's `varlen_attn` with a block table, over the same blocks as ours."""
    _require_cuda(data)
    from torch.nn.attention.varlen import varlen_attn

    case, query = data.setting.case, data.packed
    starts = _starts([case.query_len] * len(case.seq_lens), query.device)
    options: dict[str, Any] = dict(scale=data.scale, window_size=(-1, 0), enable_gqa=True)
    options |= dict(seqused_k=data.step.on_device.seq_lens, block_table=data.step.block_tables)

    def call(layer: int) -> Tensor:
        key, value = (part.transpose(1, 2) for part in data.blocks[layer])
        sizes = case.query_len, case.longest
        return data.by_row(varlen_attn(query, key, value, starts, None, *sizes, **options))

    return call


def aten_flash(data: Data) -> Attention:
    """torch's FlashAttention over one contiguous slot per row, with the lengths on the device."""
    _require_cuda(data)
    case, query = data.setting.case, data.packed
    batch = len(case.seq_lens)
    rows, slots = (_starts([size] * batch, query.device) for size in (case.query_len, case.longest))
    options = dict(scale=data.scale, seqused_k=data.step.on_device.seq_lens)
    sizes = (rows, slots, case.query_len, case.longest, 0.0, case.query_len > 1, False)
    # [layers, 2, batch * longest, kv_heads, D]
    padded = data.padded.transpose(3, 4).contiguous().flatten(2, 3)

    flash = torch.ops.aten._flash_attention_forward
    return lambda layer: data.by_row(flash(query, *padded[layer], *sizes, **options)[0])


def _starts(counts: list[int], device: torch.device) -> Tensor:
    """`[0, counts[0], counts[0] + counts[1], ...]`, int32."""
    return pad(torch.tensor(counts).cumsum(0), (1, 0)).int().to(device)


PEERS: dict[str, Prepare] = {
    CONTIGUOUS: contiguous,
    "ours": ours,
    **{f"ours: {name}": backend_of(name) for name in backends.BACKENDS},
    INT8: int8,
    "HF sdpa": transformers_sdpa,
    "varlen_attn": varlen,
    "aten flash, contiguous": aten_flash,
}
"""All contenders: the contiguous ideal, ours, then the others."""
