"""Attention on the CPU by the C++ kernel, which reads the blocks in place. Calls that the kernel
does not support go to `gather`."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ...cache.kv_blocks import KVBlocks
from ...kernels import cpp as kernels_cpp
from ...kernels import quantized
from ...kernels.cpp.attention import FLOAT_DTYPE_NUMBERS, Attention
from ...kernels.cpp.build import PATHS, batch_invariant, best_path
from ...step import StepMetadata
from ...threads import start
from ...topics import Topic
from . import gather, reference
from .reference import AttentionCall

logger = logging.getLogger(__name__)

MAX_TILE_QUERIES = 16
"""On a CPU with AMX, plain bfloat16 calls with more queries per row go to `gather`, unless they are
recorded or must be batch-invariant. PyTorch is faster for them, since the kernel uses AMX tiles for
scores, but not for sums of values."""


def is_available() -> bool:
    """Whether the kernel can be called and agrees with PyTorch."""
    return kernels_cpp.is_available() and _agrees_in_thread()


@torch.no_grad()
def _agrees(code_dtype: torch.dtype | None = None) -> bool:
    """Whether the kernel agrees with PyTorch; with `code_dtype`, on quantized blocks of that dtype.
    `_agrees_in_thread` checks this once per process and dtype, since our tests do not cover the
    user's compiler and CPU. The check covers each number of query rows (queries times heads) per
    K/V head for which the kernel has separate code."""
    generator = torch.Generator().manual_seed(0)
    blocks_shape = (10, 1, 16, 64)
    shapes = ((18, 9, 64), blocks_shape, blocks_shape)
    query, keys, values = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        for shape in shapes
    )
    tables = torch.arange(10, dtype=torch.int32, device="cpu").view(2, 5)
    tolerances = {
        torch.float32: 1e-4,
        torch.bfloat16: 2e-2,
        torch.float16: 2e-3,
    }
    kv_dtype = {dtype: name for name, dtype in quantized.DTYPES.items()}.get(code_dtype)
    sizes = [*((heads, 1) for heads in range(1, 10)), (1, 9)]
    for dtype, tolerance in tolerances.items():
        blocks = KVBlocks.allocate(10, 16, keys.to(dtype), values.to(dtype), kv_dtype=kv_dtype)
        quantized.write(blocks.keys, slice(None), keys)
        quantized.write(blocks.values, slice(None), values)
        for heads, query_len in sizes:
            step = StepMetadata.rectangle(tables, (71, 33), 16, query_len=query_len)
            queries = query[: 2 * query_len, :heads].to(dtype).contiguous()
            call = AttentionCall(queries, blocks, step, scale=0.125)
            # in float64, whose precision no option of torch reduces
            expected = reference.attend(call._replace(query=queries.double()))
            output = _kernel(call)(queries, step).double()
            if not torch.allclose(output, expected, rtol=tolerance, atol=tolerance):
                logger.warning(
                    Topic.CPP_KERNELS(
                        "hf_paged runs without its C++ attention kernel%s, on the slower portable"
                        " path: on this CPU, the kernel's results differ from PyTorch's. If it was"
                        " compiled here and is not part of the installed wheel, set CXX to another"
                        " compiler"
                    ),
                    "" if code_dtype is None else f" for blocks of {code_dtype}",
                )
                return False
    return True


_agreements: dict[torch.dtype | None, bool] = {}  # results of `_agrees`, by dtype of codes


def _agrees_in_thread(code_dtype: torch.dtype | None = None) -> bool:
    """Returns the result of `_agrees`, run in another thread, which the current forward's modes and
    recordings do not affect. If no thread can be started or the check raises an error, returns
    `False`, and the next call checks again."""
    if code_dtype not in _agreements:

        def check() -> None:
            _agreements[code_dtype] = _agrees(code_dtype)

        thread = start(check, "hf_paged kernel check", on_error=_log_failed_check)
        if thread is not None:
            thread.join()
    return _agreements.get(code_dtype, False)


def _log_failed_check(error: BaseException) -> None:
    logger.warning(
        Topic.CPP_KERNELS("the check of the C++ attention kernel failed"), exc_info=error
    )


def unsupported_reason(call: AttentionCall) -> str | None:
    """Returns why `attend` does not support a call; `None` if it does."""
    bias = call.bias
    if call.needs_grad:
        return "the call requires a gradient: the C++ kernel computes none"
    if not _supports_bias(bias):
        assert bias is not None
        return f"the bias is {bias.dtype} on {bias.device}: the C++ kernel takes floats on the CPU"
    code_dtype = call.blocks.quantized_dtype
    if code_dtype is not None and not _agrees_in_thread(code_dtype):
        return (
            f"the C++ kernel is not used for blocks of {code_dtype}: its results differ from"
            " PyTorch's, or could not be compared with them. The log says which"
        )
    try:
        _kernel(call)
    except TypeError as error:
        return str(error)
    return None


def attend(call: AttentionCall) -> Tensor:
    """Computes the result of `reference.attend`, summed in float32, by the kernel or, for rows with
    many queries (`_is_long`), by `gather`."""
    if not _is_long(call):
        kernel = _kernel(call)
        return kernel(call.query, call.step, call.sinks, call.bias)
    if call.step.query_len is None:  # some rows may have few queries
        return call.by_groups(attend)
    return gather.attend(call)


def _is_long(call: AttentionCall) -> bool:
    """Whether a row has so many queries that `gather` is faster than the kernel
    (`MAX_TILE_QUERIES`)."""
    if best_path() != PATHS["amx"]:
        return False
    if call.query.dtype is not torch.bfloat16 or not call.is_plain:
        return False
    if batch_invariant.get() or call.step.lengths is not None:
        return False
    return call.step.max_query_len > MAX_TILE_QUERIES


def attend_prepared(call: AttentionCall) -> Tensor | None:
    """Computes `attend` by the kernel that the last call on these blocks prepared, so that fewer
    checks suffice. Returns `None` if no call prepared one, if that call's signature differs from
    this call's, or if this call may need a gradient or `gather`."""
    kernel = call.blocks.kernels.get(_signature(call))
    if kernel is None or torch.is_grad_enabled():
        return None
    if _is_long(call) or not _supports_bias(call.bias):
        return None
    return kernel(call.query, call.step, call.sinks, call.bias)


def _supports_bias(bias: Tensor | None) -> bool:
    return bias is None or (bias.dtype in FLOAT_DTYPE_NUMBERS and bias.is_cpu)


def _signature(call: AttentionCall) -> tuple[object, ...]:
    """Returns a key that is equal for calls on the same blocks that can share an `Attention`."""
    query = call.query
    sinks = call.sinks
    sinks_key = None
    if sinks is not None:
        sinks_key = (sinks.dtype, sinks.shape, sinks.stride(), sinks.device)
    return query.shape, query.stride(), query.dtype, sinks_key, call.scale, call.softcap


def _kernel(call: AttentionCall) -> Attention:
    """Returns the call's `Attention`, which the blocks keep for the next call. Raises the
    constructor's errors, among them `TypeError` if the kernel does not support the tensors."""
    blocks = call.blocks
    signature = _signature(call)
    kernel = blocks.kernels.get(signature)
    if kernel is None:
        kernel = Attention(
            call.query,
            blocks.keys,
            blocks.values,
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        blocks.kernels = {signature: kernel}
    return kernel
