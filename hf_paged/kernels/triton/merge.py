"""Triton merge of attention over disjoint sets of keys, each with the log-sum-exp of its scores."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .common import LN_2, LOG2_E, device_guard


@triton.jit
def _take(partial, weight, rows, dim, VALUE_DIM: tl.constexpr):
    # A part that saw nothing has weight 0 and may hold anything.
    inside = (weight > 0.0)[:, None] & (dim < VALUE_DIM)[None, :]
    return weight[:, None] * tl.load(partial + rows[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["parts"])
def merge_kernel(
    partials, partials_lse, tail, tail_lse, index, out, out_lse, parts,
    partials_part, partials_token, partials_head, lse_part, lse_token,
    tail_token, tail_head, tail_lse_token, out_token, out_head, out_lse_token,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    # One position and BLOCK_HEADS heads a program.
    position = tl.program_id(0).to(tl.int64)
    token = position
    if index is not None:
        token = tl.load(index + position).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    real = head < HEADS
    dim = tl.arange(0, VALUE_WIDTH)
    nothing = float("-inf")

    # First the largest log-sum-exp, so that the loads of the second loop do not wait for one another.
    lse_rows = partials_lse + position * lse_token + head
    top = tl.full([BLOCK_HEADS], nothing, dtype=tl.float32)
    own = top
    if tail is not None:
        own = tl.load(tail_lse + token * tail_lse_token + head, mask=real, other=nothing)
        top = own
    for part in range(0, parts):
        top = tl.maximum(top, tl.load(lse_rows + tl.cast(part, tl.int64) * lse_part, mask=real, other=nothing))
    anchor = tl.where(top == nothing, 0.0, top)

    total = tl.zeros([BLOCK_HEADS], dtype=tl.float32)
    acc = tl.zeros([BLOCK_HEADS, VALUE_WIDTH], dtype=tl.float32)
    if tail is not None:
        weight = tl.exp2((own - anchor) * LOG2_E)
        total += weight
        acc += _take(tail, weight, token * tail_token + head * tail_head, dim, VALUE_DIM)
    rows = position * partials_token + head * partials_head
    for part in range(0, parts):
        lse = tl.load(lse_rows + tl.cast(part, tl.int64) * lse_part, mask=real, other=nothing)
        weight = tl.exp2((lse - anchor) * LOG2_E)
        total += weight
        acc += _take(partials + tl.cast(part, tl.int64) * partials_part, weight, rows, dim, VALUE_DIM)

    # `out` may be `tail`: every program reads before any writes.
    tl.debug_barrier()
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + token * out_token + head[:, None] * out_head + dim[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=real[:, None] & (dim < VALUE_DIM)[None, :])
    if out_lse is not None:
        seen = tl.where(total > 0.0, anchor + tl.log2(tl.where(total > 0.0, total, 1.0)) * LN_2, nothing)
        tl.store(out_lse + token * out_lse_token + head, seen, mask=real)


def merge(
    partials: Tensor,
    partials_lse: Tensor,
    out: Tensor,
    *,
    tail: Tensor | None = None,
    tail_lse: Tensor | None = None,
    index: Tensor | None = None,
    out_lse: Tensor | None = None,
) -> None:
    """
    Softmax attention over all keys from that over parts of them (FlashInfer, arXiv 2501.01005, sec. 2.2), in float32.

    A part whose log-sum-exp is `-inf` adds nothing, whatever it holds; if all are, the result is zeros.

    Args:
        partials (`torch.Tensor` of shape `(parts, n, heads, value_dim)`): Attention of `n` queries over each part.
        partials_lse (`torch.Tensor` of shape `(parts, n, heads)`, float32): Log-sum-exp of the scores of each part.
        out (`torch.Tensor` of shape `(num_tokens, heads, value_dim)`): Written; may be `tail`.
        tail (`torch.Tensor` of shape `(num_tokens, heads, value_dim)`, *optional*): One more part.
        tail_lse (`torch.Tensor` of shape `(num_tokens, heads)`, float32): With `tail`.
        index (`torch.Tensor` of shape `(n,)`, integer, *optional*): Which token of `out` and `tail` each query is, each
            at most once; `0 .. n - 1` without it. Other tokens are left as they are.
        out_lse (`torch.Tensor` of shape `(num_tokens, heads)`, float32, *optional*): Written too; may be `tail_lse`.
    """
    parts, positions, heads, value_dim = partials.shape
    if positions * heads == 0:
        return
    width = triton.next_power_of_2(value_dim)
    block_heads = min(triton.next_power_of_2(heads), max(1, 1024 // width))
    with device_guard(out):
        merge_kernel[(positions, triton.cdiv(heads, block_heads))](
            partials, partials_lse, tail, tail_lse, index, out, out_lse, parts,
            *partials.stride()[:3], *partials_lse.stride()[:2],
            *((0, 0) if tail is None else tail.stride()[:2]), 0 if tail_lse is None else tail_lse.stride(0),
            *out.stride()[:2], 0 if out_lse is None else out_lse.stride(0),
            HEADS=heads, VALUE_DIM=value_dim, BLOCK_HEADS=block_heads, VALUE_WIDTH=width,
        )  # fmt: skip
