"""Attention on the CPU by the C++ kernel, which reads the blocks in place."""

from __future__ import annotations

import functools
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ...cache.storage import KVBlocks
from ...kernels import cpp as kernels_cpp
from ...kernels import quantized
from ...kernels.cpp.attention import DTYPES, Attention
from ...kernels.cpp.build import PATHS, batch_invariant, best_path
from ...step import StepMetadata
from . import gather, reference
from .reference import AttentionCall

logger = logging.getLogger(__name__)

MAX_TILE_QUERIES = 16
"""On a CPU with AMX the kernel serves bfloat16 rows of up to this many queries. PyTorch is faster for more: the kernel
uses AMX tiles for scores, not for sums of values."""


def is_available() -> bool:
    """Whether the kernel was built and computes what PyTorch does."""
    return kernels_cpp.is_available() and _agrees()


@functools.cache
@torch.no_grad()
@torch.autocast("cpu", enabled=False)  # the first call of a process may be under autocast
def _agrees(codes: torch.dtype | None = None) -> bool:
    """Whether the kernel, as built by the user's compiler for this CPU (which our tests do not cover), computes what
    PyTorch does, for each number of rows that has separate code; on quantized blocks of dtype `codes`, if given.
    Checked once per process."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        for shape in ((18, 9, 64), (10, 1, 16, 64), (10, 1, 16, 64))
    )
    tables = torch.arange(10, dtype=torch.int32, device="cpu").view(2, 5)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        blocks = KVBlocks((), keys.to(dtype), values.to(dtype))
        if codes is not None:
            tiles = torch.empty(10, 2, quantized.tile_bytes(16, 64), dtype=torch.uint8, device="cpu")
            blocks = KVBlocks.view((tiles,), 1, 64, (dtype, dtype), (16, codes))
            quantized.write(blocks.keys, slice(None), keys)
            quantized.write(blocks.values, slice(None), values)
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


@functools.cache
def _agrees_apart(codes: torch.dtype) -> bool:
    """`_agrees` in another thread, hidden from the modes and recordings of the running forward."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(_agrees, codes).result()


def unsupported_reason(call: AttentionCall) -> str | None:
    """Why `attend` does not support a call; `None` if it does."""
    bias = call.bias
    if call.needs_grad:
        return "a gradient is wanted: the C++ kernel computes none"
    if not _takes_bias(bias):
        assert bias is not None
        return f"the bias is {bias.dtype} on {bias.device}: the C++ kernel takes floats on the CPU"
    codes = call.blocks.quantized_dtype
    if codes is not None and not _agrees_apart(codes):
        return f"the C++ kernel computes other numbers than PyTorch for blocks of {codes}"
    try:
        _kernel(call)
    except TypeError as error:
        return str(error)
    return None


def attend(call: AttentionCall) -> Tensor:
    """`reference.attend`, summed in float32."""
    if not _is_long(call):
        return _kernel(call)(call.query, call.step, call.sinks, call.bias)
    return torch.cat([gather.attend(part) if _is_long(part) else attend(part) for part in call.by_groups()])


def _is_long(call: AttentionCall) -> bool:
    """Whether a row has more queries than the kernel is faster for than PyTorch (`MAX_TILE_QUERIES`)."""
    if best_path() != PATHS["amx"] or call.query.dtype is not torch.bfloat16 or not call.is_plain:
        return False
    if batch_invariant.get() or call.step.lengths is not None:
        return False
    return call.step.plan(_longest) > MAX_TILE_QUERIES


def _longest(step: StepMetadata) -> int:
    """The most queries of a row, the same for all layers."""
    return max((end - start for start, end in itertools.pairwise(step.query_start)), default=0)


def attend_again(call: AttentionCall) -> Tensor | None:
    """`attend` with the kernel of the last call on these blocks, without checks; `None` if that call was different."""
    kernel = call.blocks.attention
    if kernel is None or torch.is_grad_enabled() or _is_long(call) or not _takes_bias(call.bias):
        return None
    return kernel(call.query, call.step, call.sinks, call.bias) if kernel.signature == _sign(call) else None


def _takes_bias(bias: Tensor | None) -> bool:
    return bias is None or (bias.dtype in DTYPES and bias.is_cpu)


def _sign(call: AttentionCall) -> tuple[object, ...]:
    """A key: calls on the same blocks with equal keys share an `Attention`."""
    query, sinks = call.query, call.sinks
    kind = None if sinks is None else (sinks.dtype, sinks.shape, sinks.stride(), sinks.device)
    return query.shape, query.stride(), query.dtype, kind, call.scale, call.softcap


def _kernel(call: AttentionCall) -> Attention:
    """The call's `Attention`, kept for the next call. Raises `TypeError` if the kernel does not take such tensors."""
    query, blocks = call.query, call.blocks
    kernel = blocks.attention
    signature = _sign(call)
    if kernel is None or kernel.signature != signature:
        kernel = blocks.attention = Attention(
            query, blocks.keys, blocks.values, scale=call.scale, softcap=call.softcap, sinks=call.sinks
        )
        kernel.signature = signature
    return kernel
