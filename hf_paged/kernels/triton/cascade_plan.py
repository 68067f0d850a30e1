"""Which rows of a step share blocks that are worth attending to once for all of them. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SharedPrefix(NamedTuple):
    """Rows whose block tables begin with the same `num_blocks` blocks."""

    rows: tuple[int, ...]
    num_blocks: int


class CascadeCosts(NamedTuple):
    """
    What a layer's attention moves, in bytes.

    Args:
        token_bytes: K and V of one token, all heads.
        state_bytes: Output and log-sum-exp of one query over one part of its keys, all heads, as they are merged.
        rows_per_read: Rows whose queries fit beside one another while a shared block is read once.
        splits: Parts that shared keys are cut into.
        overhead_bytes: What could be read while two more kernels start: once a step.
    """

    token_bytes: int
    state_bytes: int
    rows_per_read: int
    splits: int = 1
    overhead_bytes: int = 0


def plan_cascade(
    tables: Sequence[list[int]], seq_lens: Sequence[int], block_size: int, costs: CascadeCosts
) -> tuple[SharedPrefix, ...]:
    """
    Groups of rows, each row in one at most, that read fewer bytes if the blocks at the head of their tables are read
    once for the group and merged with the rest (cascade inference, FlashInfer, arXiv 2501.01005, sec. 3.1.2).

    Without a group, `n` rows read their `t` shared tokens `n` times; with it `n / rows_per_read` times, rounded up,
    and every row writes and reads a state a split more. Among groups within groups (a system prompt of all, prompts of
    some) the saving decides. Nothing is shared if all groups together save less than `overhead_bytes`.

    Args:
        tables (`Sequence[list[int]]`): Block ids of each row; what is past a row's `seq_len` is not looked at.
        seq_lens (`Sequence[int]`): Tokens of each row. The last is the row's own: it is never in a shared part.
        block_size (`int`): Tokens in a block.
        costs ([`CascadeCosts`])
    """
    heads: dict[int, list[int]] = {}
    for row, (table, seq_len) in enumerate(zip(tables, seq_lens)):
        if seq_len > block_size:
            heads.setdefault(table[0], []).append(row)
    usable = {row: (seq_lens[row] - 1) // block_size for rows in heads.values() if len(rows) > 1 for row in rows}
    groups: list[SharedPrefix] = []
    saved = 0
    for rows in heads.values():
        if len(rows) > 1:
            found, saving = _best(rows, tables, usable, block_size, costs)
            groups += found
            saved += saving
    return tuple(groups) if saved > costs.overhead_bytes else ()


def _best(
    rows: list[int], tables: Sequence[list[int]], usable: dict[int, int], block_size: int, costs: CascadeCosts
) -> tuple[list[SharedPrefix], int]:
    """Of rows that share a block at least: one group of them all, or the best groups of those that share more."""
    shared = _num_shared([tables[row] for row in rows], min(usable[row] for row in rows))
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
        if len(branch) > 1:
            found, saving = _best(branch, tables, usable, block_size, costs)
            parts += found
            total += saving
    if whole > max(total, 0):
        return [SharedPrefix(tuple(rows), shared)], whole
    return parts, total


def _num_shared(tables: list[list[int]], most: int) -> int:
    """How many leading blocks, up to `most`, all tables have in common: list comparisons, which run in C."""
    first = tables[0]
    for table in tables[1:]:
        if table[:most] != first[:most]:
            low, high = 0, most  # equal up to low, different at high
            while high - low > 1:
                middle = (low + high) // 2
                if table[low:middle] == first[low:middle]:
                    low = middle
                else:
                    high = middle
            most = low
    return most
