"""Attention on the CPU by the C++ kernel, which reads the blocks in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.cpp.attention import MAX_QUERIES, Attention
from ...kernels.cpp.attention import unsupported_reason as kernel_reason
from ..call import AttentionCall
from . import gather


def unsupported_reason(call: AttentionCall) -> str | None:
    """What keeps `attend` from taking a call, in words; `None` if nothing does."""
    query_len = call.step.query_len
    if query_len is not None and query_len > MAX_QUERIES:
        return f"{query_len} queries a row: gathering once is faster for more than {MAX_QUERIES}"
    if call.needs_grad:
        return "a gradient is wanted: the kernel computes none"
    return kernel_reason(call.query, call.blocks.keys, call.blocks.values, call.sinks, call.bias)


def attend(call: AttentionCall) -> Tensor:
    """`reference.attend`; float32 arithmetic for every dtype. Rows of many queries go to `gather`."""
    query_len = call.step.query_len
    if query_len is None:
        parts = [(part, (part.step.query_len or 0) > MAX_QUERIES) for part in call.by_groups()]
        return torch.cat([gather.attend(part) if is_long else attend(part) for part, is_long in parts])
    blocks = call.blocks
    kernel = blocks.attention = Attention(
        call.query, blocks.keys, blocks.values, query_len, scale=call.scale, softcap=call.softcap, sinks=call.sinks
    )
    return kernel(call.query, call.step, call.sinks, call.bias)


def attend_again(call: AttentionCall) -> Tensor | None:
    """`attend` by what the last call on these blocks found out, without another look; `None` if it was unlike this."""
    kernel = call.blocks.attention
    if kernel is None or call.bias is not None or torch.is_grad_enabled():
        return None
    if kernel.signature != Attention.sign(call.query, call.step.query_len, call.scale, call.softcap, call.sinks):
        return None
    return kernel(call.query, call.step, call.sinks)
