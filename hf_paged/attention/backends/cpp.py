"""Attention on the CPU by the C++ kernel, which reads the blocks in place."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from ...cache.storage import KVBlocks
from ...kernels import cpp as kernels_cpp
from ...kernels.cpp.attention import DTYPES, Attention
from ...step import StepMetadata
from . import gather, reference
from .reference import AttentionCall

logger = logging.getLogger(__name__)

# Queries of a row up to which reading the blocks in place beats gathering them once: where `gather` calls PyTorch's
# SDPA, in float32 and in half precision, for which it also rounds as that does; and where it computes each operation.
MAX_QUERIES, MAX_HALF_QUERIES, MAX_EXPLICIT_QUERIES = 64, 16, 512


def is_available() -> bool:
    """Whether the kernel was built and computes what PyTorch does."""
    return kernels_cpp.is_available() and _agrees()


@functools.cache
def _agrees() -> bool:
    """Whether what the user's compiler made for this CPU, which no test of ours has seen, computes what PyTorch does on
    each number of rows that the kernel has code for. Checked once per process."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(shape, generator=generator, device="cpu")
        for shape in ((18, 9, 64), (10, 1, 16, 64), (10, 1, 16, 64))
    )
    tables = torch.arange(10, dtype=torch.int32, device="cpu").view(2, 5)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        blocks = KVBlocks((), keys.to(dtype), values.to(dtype))
        for heads, query_len in (*((heads, 1) for heads in range(1, 10)), (1, 9)):
            step = StepMetadata.rectangle(tables, (71, 33), 16, query_len=query_len)
            queries = query[: 2 * query_len, :heads].to(dtype).contiguous()
            call = AttentionCall(queries, blocks, step, scale=0.125)
            if not torch.allclose(_kernel(call)(queries, step), reference.attend(call), rtol=tolerance, atol=tolerance):
                logger.warning(
                    "hf_paged runs without its C++ attention kernel, on the portable path, which is slower: built by "
                    "this compiler for this CPU, it computes other numbers than PyTorch. Set CXX to another compiler"
                )
                return False
    return True


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
