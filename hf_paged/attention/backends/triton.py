"""Attention by the Triton kernels: one launch for rows of few queries, one for chunks, and cascades if they pay off."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import quantized
from ...kernels.triton import BLOCK_SIZES, DTYPES, MAX_BATCH, MAX_DIM, MAX_QUERIES, cascade
from ...step import StepMetadata
from .reference import AttentionCall


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why `attend` does not support a call; `None` if it does."""
    query, keys, values, step = call.query, call.blocks.keys, call.blocks.values, call.step
    tensors, size = call.tensors, step.block_size
    taken = (*DTYPES, *quantized.LARGEST)
    if any(tensor.dtype not in (taken if tensor is keys or tensor is values else DTYPES) for tensor in tensors):
        return f"dtypes {sorted({str(tensor.dtype) for tensor in tensors})}: the kernels know {DTYPES}"
    if any(tensor.device != query.device for tensor in (*tensors, step.block_tables)):
        return f"tensors on other devices than the query's {query.device}"
    if call.needs_grad:
        return "a gradient is wanted: the kernels compute none"
    if max(keys.shape[3], values.shape[3]) > MAX_DIM:
        return f"head dims {keys.shape[3]} and {values.shape[3]}: at most {MAX_DIM}"
    if size not in BLOCK_SIZES:
        return f"block size {size}: a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}"
    if keys.shape[1] != values.shape[1] or query.shape[1] % keys.shape[1]:
        return f"{query.shape[1]} query heads over {keys.shape[1]} K and {values.shape[1]} V heads"
    if keys.stride(3) != 1 or values.stride(3) != 1:
        return "blocks whose head dimension is not contiguous"
    if step.num_rows > MAX_BATCH:
        return f"{step.num_rows} rows: at most {MAX_BATCH}"
    is_decode = step.query_len is not None and step.query_len <= MAX_QUERIES
    return None if is_decode else _prefill_reason(call)


def _prefill_reason(call: AttentionCall) -> str | None:
    """`unsupported_reason` of the prefill kernel, beyond the limits it shares with the decode kernel."""
    keys, values = call.blocks.keys, call.blocks.values
    if call.bias is not None and call.bias.shape[2] > 1:
        return "a bias that differs among more queries than the decode kernel takes"
    wider = (x for x in (keys, values) if not quantized.is_quantized(x))
    if any(torch.promote_types(call.query.dtype, x.dtype) != call.query.dtype for x in wider):
        return f"blocks of a wider dtype than the queries' {call.query.dtype}"
    if values.shape[3] > 512:
        return f"values of {values.shape[3]} dimensions: at most 512"
    return None if call.scale > 0 else f"a scale of {call.scale}: it must be positive"


def attend(call: AttentionCall) -> Tensor:
    """`reference.attend`, summed in float32."""
    from ...kernels.triton import attention  # needs Triton

    step, keys, values = call.step, call.blocks.keys, call.blocks.values
    if step.query_len is not None and step.query_len <= MAX_QUERIES:
        return _attend_rows(call)
    num_decodes, decodes, chunks = step.plan(_split)
    first = [] if decodes is None else [_attend_rows(call._replace(query=call.query[:num_decodes], step=decodes))]
    rest = attention.prefill_attention(
        call.query[num_decodes:], keys, values, chunks or step, **_features(call), bias=call.bias
    )
    return torch.cat([*first, rest]) if first else rest


def _split(step: StepMetadata) -> tuple[int, StepMetadata | None, StepMetadata | None]:
    """Returns the number of leading rows with one query each, a step of these, and one of the rest; both steps are
    `None` if that number is 0."""
    starts = step.query_start
    count = next((row for row in range(step.num_rows) if starts[row + 1] - starts[row] != 1), 0)
    return (count, step.rows(0, count), step.rows(count, step.num_rows)) if count else (0, None, None)


def _attend_rows(call: AttentionCall) -> Tensor:
    """`attend` for rows of equally many, few queries; with a cascade if it pays off."""
    from ...kernels.triton import attention  # needs Triton

    query, step, keys, values = call.query, call.step, call.blocks.keys, call.blocks.values
    if (step.block_ids or step.cascade) and call.bias is None and _prefill_reason(call) is None:
        found = step.cascade or step.plan(cascade.find_cascade, cascade.default_costs(query, keys, values))
        if found is not None:
            return attention.cascade_attention(query, keys, values, found, **_features(call))
    return attention.decode_attention(query, keys, values, step, bias=call.bias, **_features(call))


def _features(call: AttentionCall) -> dict[str, Any]:
    return {"scale": call.scale, "softcap": call.softcap, "sinks": call.sinks}
