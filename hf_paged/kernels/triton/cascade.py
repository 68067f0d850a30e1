"""Finds rows of a decode step that share so many leading blocks that one pass over these blocks for
all rows is faster (cascade inference, FlashInfer, arXiv 2501.01005, section 3.1.2). Does not
require Triton."""

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
    """Rows of a step whose block tables begin with the same blocks."""

    rows: tuple[int, ...]
    num_blocks: int  # leading blocks that these rows attend to together


class CascadeCosts(NamedTuple):
    """Costs of one layer, or combined over the layers that share a cascade. `plan_cascade` uses
    them to estimate the memory traffic that a cascade saves."""

    token_bytes: int  # K and V of one token, all heads
    state_bytes: int  # output and log-sum-exp of one query over one part of its keys, all heads
    rows_per_read: int  # rows whose queries one program computes per read of a shared block
    num_splits: int = 1  # parts into which the keys of a shared prefix are split
    overhead_bytes: int = 0  # bytes that can be read while two extra kernels start


def make_cascade(shared_prefixes: Sequence[SharedPrefix], step: StepMetadata) -> Cascade:
    """Splits a decode step, whose block ids are on the host, into a step over the shared prefixes
    and a step over the tails, the remaining tokens of every row. `shared_prefixes`: at least one
    prefix; a row may be in at most one."""
    block_size = step.block_size
    num_prefixes = len(shared_prefixes)
    max_blocks = max(prefix.num_blocks for prefix in shared_prefixes)
    tail_starts = [0] * step.num_rows  # in tokens
    tables = array("i")
    query_start = [0]
    query_rows = array("i")
    for rows, num_blocks in shared_prefixes:
        query_start.append(query_start[-1] + len(rows))
        query_rows.extend(rows)
        shared_ids = step.block_ids[rows[0]][:num_blocks]
        padding = [0] * (max_blocks - num_blocks)
        tables.extend((*shared_ids, *padding))
        for row in rows:
            tail_starts[row] = num_blocks * block_size
    # one copy to the device, which is faster than two
    on_host = torch.frombuffer(tables + query_rows, dtype=torch.int32)
    on_device = to_device(on_host, step.block_tables.device)
    block_tables, query_index = on_device.split((len(tables), len(query_rows)))
    prefixes = StepMetadata(
        block_tables=block_tables.view(num_prefixes, max_blocks),
        query_start=tuple(query_start),
        seq_lens=tuple(prefix.num_blocks * block_size for prefix in shared_prefixes),
        starts=(0,) * num_prefixes,
        block_size=block_size,
        causal=False,  # a prefix ends before each row's query
    )
    tails = dataclasses.replace(step, starts=tuple(tail_starts))
    return Cascade(tails, prefixes, query_index)


def default_costs(num_heads: int, key_blocks: Tensor, value_blocks: Tensor) -> CascadeCosts:
    """Returns the costs of a layer with `num_heads` query heads, whose K and V blocks are
    `(num_blocks, kv_heads, block_size, dim)`."""
    num_kv_heads, _, key_dim = key_blocks.shape[1:]
    value_dim = value_blocks.shape[3]
    return CascadeCosts(
        token_bytes=num_kv_heads * (key_dim + value_dim) * key_blocks.element_size(),
        state_bytes=num_heads * (value_dim + 1) * 4,  # float32
        # a program computes 128 queries, those of all heads that read the same K/V head
        rows_per_read=max(1, 128 * num_kv_heads // num_heads),
        num_splits=8,  # with 8 K/V heads of 2 programs each, one prefix then fills an H200
        overhead_bytes=16 << 20,  # about 4 us at 4 TB/s: an estimate, not a measurement
    )


def find_cascade(step: StepMetadata, costs: CascadeCosts) -> Cascade | None:
    """Returns the cascade of a decode step. Returns `None` if a cascade would not save memory
    traffic, if the block ids are not on the host, or if the first visible token of some row is not
    its first token."""
    if not step.block_ids or any(step.starts):
        return None
    shared_prefixes = plan_cascade(
        step.block_ids, step.seq_lens, step.block_size, costs, step.window
    )
    return make_cascade(shared_prefixes, step) if shared_prefixes else None


def plan_cascade(
    tables: Sequence[list[int]],
    seq_lens: Sequence[int],
    block_size: int,
    costs: CascadeCosts,
    window: int | None = None,
) -> tuple[SharedPrefix, ...]:
    """Chooses prefixes, each row in at most one, that save bytes: a shared block is read once per
    `rows_per_read` rows instead of once per row, but each row writes and reads one state per split
    and one for its tail. At each prefix that rows share, takes either all of them together or only
    subsets that share more blocks. Returns `()` if that saves no more than `overhead_bytes`.

    `tables[i]`: the block ids of row `i`; `seq_lens[i]`: its tokens, including the new one. The
    block of the new token is never shared, since each row writes to its own. A row longer than
    `window` shares no blocks, since its window begins after its first token."""
    num_shareable = {
        row: (seq_len - 1) // block_size
        for row, seq_len in enumerate(seq_lens)
        if seq_len > block_size and (window is None or seq_len <= window)
    }
    rows = list(num_shareable)
    shared_prefixes, saved_bytes = _best_prefixes(rows, tables, num_shareable, block_size, costs)
    return tuple(shared_prefixes) if saved_bytes > costs.overhead_bytes else ()


def _best_prefixes(
    rows: list[int],
    tables: Sequence[list[int]],
    num_shareable: dict[int, int],
    block_size: int,
    costs: CascadeCosts,
) -> tuple[list[SharedPrefix], int]:
    """Returns either one prefix of all `rows` or the best prefixes of subsets that share more
    blocks, whichever saves more bytes; and the saved bytes, before subtracting `overhead_bytes`.
    `num_shareable`: the number of leading blocks that each row may share."""
    if len(rows) < 2:
        return [], 0
    # Lists compare lexicographically, so a prefix common to the least and the greatest table is
    # common to all of them. Comparing lists runs in C.
    row_tables = [tables[row] for row in rows]
    least_table = min(row_tables)
    greatest_table = max(row_tables)
    max_shared = min(num_shareable[row] for row in rows)
    num_shared = bisect.bisect_left(
        range(1, max_shared + 1),
        True,
        key=lambda count: least_table[:count] != greatest_table[:count],
    )
    num_reads = -(-len(rows) // costs.rows_per_read)
    num_saved_tokens = (len(rows) - num_reads) * num_shared * block_size
    num_states = len(rows) * (costs.num_splits + 1)  # of the splits and the tails
    saved_together = num_saved_tokens * costs.token_bytes
    saved_together -= 2 * num_states * costs.state_bytes  # written, then read
    rows_by_next_block: dict[int, list[int]] = {}  # the first block after the shared ones
    for row in rows:
        if num_shareable[row] > num_shared:
            next_block = tables[row][num_shared]
            rows_by_next_block.setdefault(next_block, []).append(row)
    subset_prefixes: list[SharedPrefix] = []
    saved_separately = 0
    for subset in rows_by_next_block.values():
        prefixes, saved_bytes = _best_prefixes(subset, tables, num_shareable, block_size, costs)
        subset_prefixes += prefixes
        saved_separately += saved_bytes
    if saved_together > max(saved_separately, 0):
        return [SharedPrefix(tuple(rows), num_shared)], saved_together
    return subset_prefixes, saved_separately
