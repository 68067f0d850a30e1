"""Cascade attention of a decode step: shared blocks read once a group of rows, tails by the decode kernel, then merged.

The prefix kernel is the prefill kernel without a causal mask, with all queries of a group side by side, so that a
prompt of `n` samples is read once and not `n` times (cascade inference, FlashInfer, arXiv 2501.01005, sec. 3.1.2).
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...step import StepMetadata
from . import decode
from .cascade_plan import CascadeCosts, SharedPrefix, plan_cascade
from .merge import merge
from .prefill import prefill_parts

LAUNCH_BYTES = 16 << 20
"""What a GPU reads while two more kernels start and end: about 4 us at 4 TB/s. An estimate, not a measurement."""


class Cascade(NamedTuple):
    """
    A step's shared prefixes, made once for all layers.

    Args:
        tails (`StepMetadata`): The step, with the rows of groups starting where their prefix ends.
        prefixes (`StepMetadata`): A row for each group: its shared tokens and blocks, its members as queries.
        query_index (`torch.Tensor` of shape `(n,)`, int32, on the device): Rows that are in a group, group by group.
    """

    tails: StepMetadata
    prefixes: StepMetadata
    query_index: Tensor

    @classmethod
    def make(cls, groups: Sequence[SharedPrefix], step: StepMetadata) -> Cascade:
        """The cascade of `groups` of the rows of a step of one query a row."""
        size, device = step.block_size, step.block_tables.device
        width = max(group.num_blocks for group in groups)
        starts, tables, bounds, members = [0] * step.num_rows, array("i"), [0], array("i")
        for rows, num_blocks in groups:
            bounds.append(bounds[-1] + len(rows))
            members.extend(rows)
            tables.extend((*step.block_ids[rows[0]][:num_blocks], *([0] * (width - num_blocks))))
            for row in rows:
                starts[row] = num_blocks * size
        on_device = torch.frombuffer(tables + members, dtype=torch.int32).to(device, non_blocking=True)
        shared, query_index = on_device.split((len(tables), len(members)))
        prefixes = StepMetadata(
            block_tables=shared.view(len(groups), width),
            query_start=tuple(bounds),
            seq_lens=tuple(group.num_blocks * size for group in groups),
            starts=(0,) * len(groups),
            block_size=size,
            causal=False,
        )
        return cls(dataclasses.replace(step, starts=tuple(starts)), prefixes, query_index)


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
    query: Tensor, key_blocks: Tensor, value_blocks: Tensor, step: StepMetadata, costs: CascadeCosts | None = None
) -> Cascade | None:
    """
    The cascade that pays off for a step of decodes, or `None`. Rows whose window ends within them share nothing.

    Args:
        query (`torch.Tensor` of shape `(rows, heads, head_dim)`)
        step ([`StepMetadata`]): With `block_ids`.
        costs ([`CascadeCosts`], *optional*): `default_costs` if not given.
    """
    if not step.block_ids or any(step.starts):
        return None
    window = step.window
    seq_lens = [length if window is None or length <= window else 0 for length in step.seq_lens]
    costs = costs or default_costs(query, key_blocks, value_blocks)
    groups = plan_cascade(step.block_ids, seq_lens, step.block_size, costs)
    return Cascade.make(groups, step) if groups else None


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
    `decode_attention` of a step with one query a row, up to rounding: the tails' results are rounded to the query's
    dtype before they are merged. Sinks are counted with the tails.

    Args:
        query (`torch.Tensor` of shape `(rows, heads, head_dim)`)
        num_splits (`int`, *optional*): Parts that shared tokens are cut into; chosen by the size of the chip if not
            given.

    Returns:
        `torch.Tensor` of shape `(rows, heads, value_dim)`, in the query's dtype.
    """
    tails, prefixes, query_index = cascade
    out, lse = decode.decode_attention(
        query, key_blocks, value_blocks, tails, scale=scale, softcap=softcap, sinks=sinks, return_lse=True
    )
    options: dict[str, Any] = dict(scale=scale, softcap=softcap, query_index=query_index, num_splits=num_splits)
    parts, parts_lse = prefill_parts(query, key_blocks, value_blocks, prefixes, **options)
    assert parts_lse is not None
    merge(parts, parts_lse, out, tail=out, tail_lse=lse, index=query_index)
    return out
