"""Cascade attention of a decode step: shared blocks read once a group of rows, tails by the decode kernel, then merged.

The prefix kernel is the prefill kernel without a causal mask, with all queries of a group side by side, so that a
prompt of `n` samples is read once and not `n` times (cascade inference, FlashInfer, arXiv 2501.01005, sec. 3.1.2).
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ...step import StepMetadata
from . import decode, prefill
from .cascade_plan import CascadeCosts, SharedPrefix, plan_cascade
from .merge import merge

LAUNCH_BYTES = 16 << 20
"""What a GPU reads while two more kernels start and end: about 4 us at 4 TB/s. An estimate, not a measurement."""


@dataclasses.dataclass(frozen=True)
class Cascade:
    """
    A step's shared prefixes on the device, made once for all layers.

    Args:
        tails (`StepMetadata`): That of the step, with the rows of groups starting where their prefix ends.
        query_index (`torch.Tensor` of shape `(n,)`, int32): Rows that are in a group, group by group.
        cu_query_lens (`torch.Tensor` of shape `(groups + 1,)`, int32): Where each group begins in `query_index`.
        prefix_lens (`torch.Tensor` of shape `(groups,)`, int32): Shared tokens of each group.
        block_tables (`torch.Tensor` of shape `(groups, max_blocks)`, int32): Shared blocks of each group.
        max_rows (`int`): Rows of the largest group.
    """

    tails: StepMetadata
    query_index: Tensor
    cu_query_lens: Tensor
    prefix_lens: Tensor
    block_tables: Tensor
    max_rows: int

    @classmethod
    def make(cls, groups: Sequence[SharedPrefix], tables: Sequence[list[int]], metadata: StepMetadata) -> Cascade:
        """The cascade of `groups` of the rows of `metadata`, whose block ids are `tables`; one copy to the device."""
        size, num_rows, device = metadata.block_size, metadata.batch_size, metadata.seq_lens.device
        width = max(group.num_blocks for group in groups)
        starts = [0] * num_rows
        bounds = [0]
        for group in groups:
            bounds.append(bounds[-1] + len(group.rows))
            for row in group.rows:
                starts[row] = group.num_blocks * size
        buffer = array("i", starts)
        buffer.extend(bounds)
        buffer.extend(group.num_blocks * size for group in groups)
        for group in groups:
            buffer.extend(group.rows)
        for group in groups:
            buffer.extend(tables[group.rows[0]][: group.num_blocks])
            buffer.extend([0] * (width - group.num_blocks))
        lengths = (num_rows, len(bounds), len(groups), bounds[-1], len(groups) * width)
        on_device = torch.frombuffer(buffer, dtype=torch.int32).to(device, non_blocking=True)
        first, cu_query_lens, prefix_lens, query_index, blocks = on_device.split(lengths)
        tails = dataclasses.replace(metadata, starts=first, starts_host=tuple(starts))
        largest = max(len(group.rows) for group in groups)
        return cls(tails, query_index, cu_query_lens, prefix_lens, blocks.view(len(groups), width), largest)


def default_costs(query: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> CascadeCosts:
    """What a layer with such heads moves; arguments as in `find_cascade`."""
    kv_heads, _, key_dim = key_blocks.shape[1:]
    heads, value_dim = query.shape[1], value_blocks.shape[3]
    return CascadeCosts(
        token_bytes=kv_heads * (key_dim + value_dim) * key_blocks.element_size(),
        state_bytes=heads * (value_dim + 1) * 4,
        rows_per_read=max(1, 128 * kv_heads // heads),  # query rows of a program
        splits=8,  # what fills an H200 with one group and 8 K/V heads on 2 programs each
        overhead_bytes=LAUNCH_BYTES,
    )


def find_cascade(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    tables: Sequence[list[int]],
    metadata: StepMetadata,
    costs: CascadeCosts | None = None,
) -> Cascade | None:
    """
    The cascade that pays off for a decode step, or `None`. Rows whose window ends within them share nothing.

    Args:
        query (`torch.Tensor` of shape `(rows, heads, 1, head_dim)`)
        tables (`Sequence[list[int]]`): Block ids of each row, those of `metadata` on the host.
        costs ([`CascadeCosts`], *optional*): `default_costs` if not given.
    """
    if prefill.supports(query[:, :, 0], key_blocks, value_blocks, 1.0) or any(metadata.starts_host):
        return None
    window = metadata.window
    seq_lens = [length if window is None or length <= window else 0 for length in metadata.seq_lens_host]
    costs = costs or default_costs(query, key_blocks, value_blocks)
    groups = plan_cascade(tables, seq_lens, metadata.block_size, costs)
    return Cascade.make(groups, tables, metadata) if groups else None


def cascade_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    cascade: Cascade,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """
    `decode.paged_attention` of a step with one query a row, up to rounding: the tails' results are rounded to the
    query's dtype before they are merged. Sinks are counted with the tails.

    Args:
        query (`torch.Tensor` of shape `(rows, heads, 1, head_dim)`)
        num_splits (`int`, *optional*): Parts that shared tokens are cut into; chosen by the size of the chip if not
            given.

    Returns:
        `torch.Tensor` of shape `(rows, 1, heads, value_dim)`, in the query's dtype.
    """
    out, lse = decode.paged_attention(
        query, key_blocks, value_blocks, cascade.tails, scale=scale, softcap=softcap, sinks=sinks, return_lse=True
    )
    queries = query[:, :, 0]
    num_queries, (num_groups, width) = cascade.query_index.shape[0], cascade.block_tables.shape
    launch = prefill.Launch.choose(queries, key_blocks, value_blocks, num_queries, num_groups, cascade.max_rows)
    if num_splits is None:
        num_splits = launch.num_splits(width * key_blocks.shape[2], query.device)
    partials = query.new_empty(num_splits, num_queries, *out.shape[2:], dtype=torch.float32)
    partials_lse = lse.new_empty(partials.shape[:3])
    launch.run(
        queries, key_blocks, value_blocks, partials, partials_lse,
        cascade.cu_query_lens, cascade.prefix_lens, cascade.block_tables,
        scale=scale, causal=False, softcap=softcap, query_index=cascade.query_index,
    )  # fmt: skip
    merge(partials, partials_lse, out[:, 0], tail=out[:, 0], tail_lse=lse[:, 0], index=cascade.query_index)
    return out
