"""Attention by the Triton kernels, with separate launches for decodes and for chunks, or by a
cascade for decodes that share blocks. Calls that the kernels do not support go to `gather`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels import quantized
from ...kernels.triton import BLOCK_SIZES, DTYPES, MAX_BATCH, MAX_DIM, MAX_QUERIES, cascade
from ...step import StepMetadata
from .reference import AttentionCall


def unsupported_reason(call: AttentionCall) -> str | None:
    """Returns why `attend` does not support a call; `None` if it does."""
    query = call.query
    keys = call.blocks.keys
    values = call.blocks.values
    step = call.step
    tensors = call.tensors
    block_size = step.block_size
    block_dtypes = (*DTYPES, *quantized.MAX_CODES)
    for tensor in tensors:
        is_in_blocks = tensor is keys or tensor is values
        supported_dtypes = block_dtypes if is_in_blocks else DTYPES
        if tensor.dtype not in supported_dtypes:
            dtypes = sorted({str(tensor.dtype) for tensor in tensors})
            return f"dtypes {dtypes}: the kernels support {DTYPES}, and quantized K/V"
    if any(tensor.device != query.device for tensor in (*tensors, step.block_tables)):
        return f"tensors on devices other than the query's {query.device}"
    if call.needs_grad:
        return "the call requires a gradient: the kernels compute none"
    key_dim = keys.shape[3]
    value_dim = values.shape[3]
    if max(key_dim, value_dim) > MAX_DIM:
        return f"head dims {key_dim} and {value_dim}: at most {MAX_DIM}"
    if block_size not in BLOCK_SIZES:
        return (
            f"block size {block_size}: the kernels support powers of two from {BLOCK_SIZES[0]} to"
            f" {BLOCK_SIZES[-1]}"
        )
    heads = query.shape[1]
    key_heads = keys.shape[1]
    value_heads = values.shape[1]
    if key_heads != value_heads or heads % key_heads:
        return f"{heads} query heads over {key_heads} K and {value_heads} V heads"
    if not quantized.are_quantized_alike(keys, values):
        return f"key blocks in {keys.dtype} and value blocks in {values.dtype}"
    if keys.stride(3) != 1 or values.stride(3) != 1:
        return "blocks whose head dimension is not contiguous"
    if step.num_rows > MAX_BATCH:
        return f"{step.num_rows} rows: at most {MAX_BATCH}"
    if _fits_decode_kernel(step):
        return None
    return _prefill_unsupported_reason(call)


def _fits_decode_kernel(step: StepMetadata) -> bool:
    """Whether all rows have the same number of queries, at most `MAX_QUERIES`."""
    return step.query_len is not None and step.query_len <= MAX_QUERIES


def _prefill_unsupported_reason(call: AttentionCall) -> str | None:
    """Returns why the prefill kernel does not support a call that the decode kernel supports;
    `None` if it does."""
    keys = call.blocks.keys
    values = call.blocks.values
    dtype = call.query.dtype
    if call.bias is not None and call.bias.shape[2] > 1:
        return f"a bias that differs between queries, in rows of more than {MAX_QUERIES} queries"
    unquantized_blocks = (blocks for blocks in (keys, values) if not quantized.is_quantized(blocks))
    if any(torch.promote_types(dtype, blocks.dtype) != dtype for blocks in unquantized_blocks):
        return f"blocks of a dtype that the queries' {dtype} cannot represent"
    value_dim = values.shape[3]
    if value_dim > 512:
        return f"values of {value_dim} dimensions: at most 512"
    if call.scale > 0:
        return None
    return f"a scale of {call.scale}: it must be positive"


def attend(call: AttentionCall) -> Tensor:
    """Computes the result of `reference.attend`, summed in float32."""
    from ...kernels.triton import attention  # needs Triton

    step = call.step
    if _fits_decode_kernel(step):
        return _attend_rows(call)
    outputs = []
    query = call.query
    decodes, chunks = step.plan(StepMetadata.split, 1)
    if decodes is not None:
        count = decodes.num_tokens
        decode_call = call._replace(query=query[:count], step=decodes)
        outputs.append(_attend_rows(decode_call))
        query = query[count:]
    if chunks is not None:
        chunk_output = attention.prefill_attention(
            query,
            call.blocks.keys,
            call.blocks.values,
            chunks,
            **_features(call),
            bias=call.bias,
        )
        outputs.append(chunk_output)
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs)


def _attend_rows(call: AttentionCall) -> Tensor:
    """Computes `attend` for rows with the same number of queries, at most `MAX_QUERIES`. Uses the
    step's cascade or, if it has none, the cascade that `find_cascade` returns. Uses the decode
    kernel if there is no cascade, if the call has a bias, or if the prefill kernel does not support
    the call."""
    from ...kernels.triton import attention  # needs Triton

    query = call.query
    step = call.step
    keys = call.blocks.keys
    values = call.blocks.values
    may_cascade = step.block_ids or step.cascade
    if may_cascade and call.bias is None and _prefill_unsupported_reason(call) is None:
        step_cascade = step.cascade
        if not step_cascade:
            costs = cascade.default_costs(query.shape[1], keys, values)
            step_cascade = step.plan(cascade.find_cascade, costs)
        if step_cascade is not None:
            return attention.cascade_attention(query, keys, values, step_cascade, **_features(call))
    return attention.decode_attention(
        query,
        keys,
        values,
        step,
        bias=call.bias,
        **_features(call),
    )


def _features(call: AttentionCall) -> dict[str, Any]:
    return {
        "scale": call.scale,
        "softcap": call.softcap,
        "sinks": call.sinks,
    }
