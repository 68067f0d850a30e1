"""Finds rows of a decode step that share enough leading blocks to attend to these once for all rows
(cascade inference, FlashInfer, arXiv 2501.01005, section 3.1.2). Does not require Triton."""

from __future__ import annotations

import bisect
import dataclasses
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...step import Cascade, StepMetadata, to_device


class SharedPrefix(NamedTuple):
    rows: tuple[int, ...]
    num_blocks: int  # leading blocks that the rows' block tables share


class CascadeCosts(NamedTuple):
    token_bytes: int  # K and V of one token of a layer, all heads
    state_bytes: int  # output and log-sum-exp of one query over one part of its keys, all heads
    rows_per_read: int  # rows whose queries one program computes per read of a shared block
    splits: int = 1  # parts into which shared keys are split
    overhead_bytes: int = 0  # bytes that could be read while two more kernels start, once per step


def make_cascade(groups: Sequence[SharedPrefix], step: StepMetadata) -> Cascade:
    size, device = step.block_size, step.block_tables.device
    width = max(group.num_blocks for group in groups)
    starts = [0] * step.num_rows
    tables = array("i")
    bounds = [0]
    members = array("i")
    for rows, num_blocks in groups:
        bounds.append(bounds[-1] + len(rows))
        members.extend(rows)
        tables.extend((*step.block_ids[rows[0]][:num_blocks], *([0] * (width - num_blocks))))
        for row in rows:
            starts[row] = num_blocks * size
    on_device = to_device(torch.frombuffer(tables + members, dtype=torch.int32), device)
    shared, query_index = on_device.split((len(tables), len(members)))
    prefixes = StepMetadata(
        block_tables=shared.view(len(groups), width),
        query_start=tuple(bounds),
        seq_lens=tuple(group.num_blocks * size for group in groups),
        starts=(0,) * len(groups),
        block_size=size,
        causal=False,
    )
    return Cascade(dataclasses.replace(step, starts=tuple(starts)), prefixes, query_index)


def default_costs(heads: int, key_blocks: Tensor, value_blocks: Tensor) -> CascadeCosts:
    """Returns the costs of a layer with this many query heads."""
    kv_heads, _, key_dim = key_blocks.shape[1:]
    value_dim = value_blocks.shape[3]
    return CascadeCosts(
        token_bytes=kv_heads * (key_dim + value_dim) * key_blocks.element_size(),
        state_bytes=heads * (value_dim + 1) * 4,
        rows_per_read=max(1, 128 * kv_heads // heads),  # query rows of a program
        splits=8,  # fills an H200 with one group and 8 K/V heads of 2 programs each
        overhead_bytes=16 << 20,  # about 4 us at 4 TB/s: an estimate, not a measurement
    )


def find_cascade(step: StepMetadata, costs: CascadeCosts) -> Cascade | None:
    """Returns the cascade that pays off for a step of decodes, or `None`."""
    if not step.block_ids or any(step.starts):
        return None
    groups = plan_cascade(step.block_ids, step.seq_lens, step.block_size, costs, step.window)
    return make_cascade(groups, step) if groups else None


def plan_cascade(
    tables: Sequence[list[int]],
    seq_lens: Sequence[int],
    block_size: int,
    costs: CascadeCosts,
    window: int | None = None,
) -> tuple[SharedPrefix, ...]:
    """Returns groups of rows (each row in at most one) that move fewer bytes if their shared
    leading blocks are read once per `rows_per_read` rows, at the cost of writing and reading one
    more state per row and split; none if they save at most `overhead_bytes` together. The last
    token of a row is never in a shared part, and rows longer than their window share no blocks."""
    usable = {
        row: (seq_len - 1) // block_size
        for row, seq_len in enumerate(seq_lens)
        if seq_len > block_size and (window is None or seq_len <= window)
    }
    groups, saved = _best(list(usable), tables, usable, block_size, costs)
    return tuple(groups) if saved > costs.overhead_bytes else ()


def _best(
    rows: list[int],
    tables: Sequence[list[int]],
    usable: dict[int, int],
    block_size: int,
    costs: CascadeCosts,
) -> tuple[list[SharedPrefix], int]:
    """Returns one group of all rows, or the best groups of subsets that share more blocks; and the
    saved bytes."""
    if len(rows) < 2:
        return [], 0
    # A prefix of both the least and the greatest table is a prefix of all tables; list comparisons
    # run in C.
    chosen = [tables[row] for row in rows]
    least = min(chosen)
    greatest = max(chosen)
    most = min(usable[row] for row in rows)
    shared = bisect.bisect_left(
        range(1, most + 1), True, key=lambda count: least[:count] != greatest[:count]
    )
    reads = -(-len(rows) // costs.rows_per_read)
    whole = (len(rows) - reads) * shared * block_size * costs.token_bytes
    whole -= 2 * len(rows) * (costs.splits + 1) * costs.state_bytes
    branches: dict[int, list[int]] = {}
    for row in rows:
        if usable[row] > shared:
            branches.setdefault(tables[row][shared], []).append(row)
    parts: list[SharedPrefix] = []
    total = 0
    for branch in branches.values():
        groups, saving = _best(branch, tables, usable, block_size, costs)
        parts += groups
        total += saving
    if whole > max(total, 0):
        return [SharedPrefix(tuple(rows), shared)], whole
    return parts, total
