"""A Triton kernel that merges attention results over disjoint sets of keys, by the log-sum-exp of
their scores. If it cannot be launched, PyTorch computes the merge."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_tiles import LN_2, LOG2_E
from .launch import LaunchFailedError, launch


@triton.jit(
    do_not_specialize=["num_parts", "num_queries"], do_not_specialize_on_alignment=["index"]
)
def merge_kernel(
    partials,
    partials_lse,
    row_items,
    tail_lse,
    index,
    out,
    out_lse,
    num_parts,
    num_queries,
    partials_stride_part,
    partials_stride_token,
    partials_stride_head,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    STEP: tl.constexpr,
):
    # Each program merges one query and BLOCK_HEADS heads.
    position = tl.program_id(0).to(tl.int64)
    token, source, first = position, position, 0
    if row_items is not None:
        row = tl.program_id(0) // num_queries
        source = (tl.program_id(0) % num_queries).to(tl.int64)
        first = tl.load(row_items + 2 * row).to(tl.int64)
        num_parts = tl.load(row_items + 2 * row + 1)
        if num_parts <= 1:
            return
    if index is not None:
        token = tl.load(index + position).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    is_head = head < HEADS
    out_row = token * HEADS + head
    dim = tl.arange(0, VALUE_WIDTH)
    target = out + out_row[:, None] * VALUE_DIM + dim[None, :]
    is_element = is_head[:, None] & (dim < VALUE_DIM)[None, :]
    minus_inf = float("-inf")

    # Load all log-sum-exps first, so that the loads of values do not wait for one another.
    all_parts = tl.arange(0, BLOCK_PARTS).to(tl.int64)[:, None]
    lse_part = num_queries * HEADS
    lse_rows = partials_lse + (first * lse_part + source * HEADS + head)[None, :]
    lses = tl.load(
        lse_rows + all_parts * lse_part,
        mask=(all_parts < num_parts) & is_head[None, :],
        other=minus_inf,
    )
    top = tl.max(lses, axis=0)
    if tail_lse is not None:
        tail_lses = tl.load(tail_lse + out_row, mask=is_head, other=minus_inf)
        top = tl.maximum(top, tail_lses)
    anchor = tl.where(top == minus_inf, 0.0, top)
    total = tl.sum(tl.exp2((lses - anchor[None, :]) * LOG2_E), axis=0)

    # The values of a part that saw no keys may be anything, so they are not loaded.
    acc = tl.zeros([BLOCK_HEADS, VALUE_WIDTH], dtype=tl.float32)
    if tail_lse is not None:
        weight = tl.exp2((tail_lses - anchor) * LOG2_E)
        total += weight
        tail_values = tl.load(target, mask=is_element & (weight > 0.0)[:, None], other=0.0)
        acc += weight[:, None] * tail_values.to(tl.float32)
    rows = (
        partials
        + (
            first * partials_stride_part
            + source * partials_stride_token
            + head * partials_stride_head
        )[None, :, None]
    )
    for begin in range(0, num_parts, STEP):
        part = (begin + tl.arange(0, STEP)).to(tl.int64)[:, None]
        lse = tl.load(
            lse_rows + part * lse_part, mask=(part < num_parts) & is_head[None, :], other=minus_inf
        )
        weights = tl.exp2((lse - anchor[None, :]) * LOG2_E)[:, :, None]
        mask = (weights > 0.0) & (dim < VALUE_DIM)[None, None, :]
        values = tl.load(
            rows + part[:, :, None] * partials_stride_part + dim[None, None, :],
            mask=mask,
            other=0.0,
        )
        acc += tl.sum(weights * values.to(tl.float32), axis=0)

    tl.debug_barrier()  # all threads must read `out` and `tail_lse` before any writes them
    divisor = tl.where(total > 0.0, total, 1.0)
    tl.store(target, (acc / divisor[:, None]).to(out.dtype.element_ty), mask=is_element)
    if out_lse is not None:
        merged_lse = tl.where(total > 0.0, anchor + tl.log2(divisor) * LN_2, minus_inf)
        tl.store(out_lse + out_row, merged_lse, mask=is_head)


def merge(
    partials: Tensor,
    partials_lse: Tensor,
    out: Tensor,
    *,
    tail_lse: Tensor | None = None,
    index: Tensor | None = None,
    out_lse: Tensor | None = None,
    row_items: Tensor | None = None,
    max_parts: int | None = None,
) -> None:
    """Merges the attention results over parts of the keys into the result over all keys, and writes
    it to `out` (FlashInfer, arXiv 2501.01005, section 2.2). Ignores the values of parts whose
    log-sum-exp is `-inf`; writes zeros if it is `-inf` for every part. If the kernel cannot be
    launched, merges in PyTorch rather than raising: computing the parts again would take longer.

    Args:
        partials, partials_lse: `(parts, n, heads, value_dim)`, and `(parts, n, heads)` float32: the
            results of `n` queries, and the log-sum-exp of their scores.
        out, out_lse: `(num_tokens, heads, value_dim)`, contiguous, and `(num_tokens, heads)`
            float32: the tensors to write.
        tail_lse: `(num_tokens, heads)` float32: the log-sum-exp of the results in `out`, which are
            then merged as another part; may be the same tensor as `out_lse`.
        index: `(n,)`: the token in `out` of each query, all different; `0 .. n - 1` by default.
        row_items: `(rows, 2)` int32, if each row has separate parts: the row's first part, and
            the number of its parts. Then `n` is the number of queries per row, and rows with at
            most one part are left unchanged. Not together with `index`.
        max_parts: The maximum number of parts of a row; by default the total number of parts.
    """
    num_parts, num_queries, heads, value_dim = partials.shape
    num_tokens = num_queries if row_items is None else len(out)
    if num_tokens * heads == 0:
        return
    max_parts = max_parts or num_parts
    width = triton.next_power_of_2(value_dim)
    # one of a few sizes, since each is compiled separately
    block_parts = next(
        (size for size in (16, 64, 256) if size >= max_parts), triton.next_power_of_2(max_parts)
    )
    step = min(8, max(2, 2048 // width))  # parts at a time; more would spill registers
    # At least two: Triton does not vectorise loads of a tile with a dimension of one.
    block_heads = min(triton.next_power_of_2(heads), max(2, 1024 // (width * step)))
    try:
        launch(
            merge_kernel,
            (num_tokens, triton.cdiv(heads, block_heads)),
            partials,
            partials_lse.contiguous(),
            row_items,
            tail_lse,
            index,
            out,
            out_lse,
            num_parts,
            num_queries,
            *partials.stride()[:3],
            HEADS=heads,
            VALUE_DIM=value_dim,
            VALUE_WIDTH=width,
            BLOCK_HEADS=block_heads,
            BLOCK_PARTS=block_parts,
            STEP=step,
            num_warps=4 if width <= 256 else 8,
            writes=(out, out_lse),
        )
    except LaunchFailedError:
        tokens = slice(None) if index is None else index.long()
        _merge_portable(
            partials, partials_lse, out, tail_lse, tokens, out_lse, row_items, max_parts
        )


def _merge_portable(
    partials: Tensor,
    partials_lse: Tensor,
    out: Tensor,
    tail_lse: Tensor | None,
    tokens: slice | Tensor,
    out_lse: Tensor | None,
    row_items: Tensor | None,
    max_parts: int,
) -> None:
    """Merges as `merge` does, in plain PyTorch, without waiting for the device. `tokens`: the
    tokens of `out` to write."""
    minus_inf = float("-inf")
    former_values = out[tokens]
    is_merged = torch.ones((), dtype=torch.bool, device=out.device)
    if row_items is not None:
        # (max_parts, rows, queries, heads): each row's parts, flattened to all tokens
        part = torch.arange(max_parts, device=out.device)[:, None]
        first_item, num_parts = row_items.long().unbind(1)
        items = (first_item + part).clamp(max=len(partials) - 1)
        partials = partials[items].flatten(1, 2)
        partials_lse = (
            partials_lse[items]
            .masked_fill((part >= num_parts)[..., None, None], minus_inf)
            .flatten(1, 2)
        )
        num_queries = len(out) // len(row_items)
        is_merged = (num_parts > 1).repeat_interleave(num_queries, output_size=len(out))[:, None]
    lse = partials_lse
    values = partials.float()
    if tail_lse is not None:
        lse = torch.cat([lse, tail_lse[tokens][None]])
        values = torch.cat([values, former_values[None].float()])
    total = lse.logsumexp(0)
    weights = (lse - total.masked_fill(total == minus_inf, 0.0)).exp()[..., None]
    merged_values = (weights * values.masked_fill(weights == 0, 0.0)).sum(0).to(out.dtype)
    out[tokens] = torch.where(is_merged[..., None], merged_values, former_values)
    if out_lse is not None:
        out_lse[tokens] = torch.where(is_merged, total, out_lse[tokens])
