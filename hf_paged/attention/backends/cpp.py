"""Attention on the CPU by the C++ kernel, which reads the blocks in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.cpp.attention import DTYPES, Attention
from . import gather
from .reference import AttentionCall

# Queries of a row up to which reading the blocks in place beats gathering them once: where `gather` calls PyTorch's
# SDPA, in float32 and in half precision, for which it also rounds as that does; and where it computes each operation.
MAX_QUERIES, MAX_HALF_QUERIES, MAX_EXPLICIT_QUERIES = 64, 16, 512


def unsupported_reason(call: AttentionCall) -> str | None:
    """What keeps `attend` from taking a call, in words; `None` if nothing does."""
    query_len, bias = call.step.query_len, call.bias
    if query_len is not None and query_len > _max_queries(call):
        return f"{query_len} queries a row: gathering once is faster for more than {_max_queries(call)}"
    if call.needs_grad:
        return "a gradient is wanted: the C++ kernel computes none"
    if not _takes_bias(bias):
        assert bias is not None
        return f"the bias is {bias.dtype} on {bias.device}: the C++ kernel takes floats on the CPU"
    try:
        _kernel(call)
    except TypeError as error:
        return str(error)
    return None


def attend(call: AttentionCall) -> Tensor:
    """`reference.attend`; float32 arithmetic for every dtype. Rows of many queries go to `gather`."""
    if call.step.query_len is None:
        longest = _max_queries(call)
        parts = [(part, (part.step.query_len or 0) > longest) for part in call.by_groups()]
        return torch.cat([gather.attend(part) if is_long else attend(part) for part, is_long in parts])
    return _kernel(call)(call.query, call.step, call.sinks, call.bias)


def _max_queries(call: AttentionCall) -> int:
    if not call.is_plain:
        return MAX_EXPLICIT_QUERIES
    return MAX_QUERIES if call.query.dtype is torch.float32 else MAX_HALF_QUERIES


def attend_again(call: AttentionCall) -> Tensor | None:
    """`attend` by what the last call on these blocks found out, without another look; `None` if it was unlike this."""
    kernel = call.blocks.attention
    if kernel is None or call.step.query_len is None or torch.is_grad_enabled() or not _takes_bias(call.bias):
        return None
    return kernel(call.query, call.step, call.sinks, call.bias) if kernel.signature == _sign(call) else None


def _takes_bias(bias: Tensor | None) -> bool:
    return bias is None or (bias.dtype in DTYPES and bias.is_cpu)


def _sign(call: AttentionCall) -> tuple[object, ...]:
    """Equal for calls that one `Attention` serves, on the same blocks."""
    query, sinks = call.query, call.sinks
    kind = None if sinks is None else (sinks.dtype, sinks.shape, sinks.stride(), sinks.device)
    return query.shape, query.stride(), query.dtype, call.step.query_len, kind, call.scale, call.softcap


def _kernel(call: AttentionCall) -> Attention:
    """What serves the call, kept for the next one. Raises `TypeError` if the kernel does not take such tensors."""
    query, blocks, query_len = call.query, call.blocks, call.step.query_len
    kernel = blocks.attention
    signature = _sign(call)
    if kernel is None or kernel.signature != signature:
        kernel = blocks.attention = Attention(
            query, blocks.keys, blocks.values, query_len, scale=call.scale, softcap=call.softcap, sinks=call.sinks
        )
        kernel.signature = signature
    return kernel
