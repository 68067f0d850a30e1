"""A packed step on the host, and its block tables as tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class GroupTokens(NamedTuple):
    """A packed step's slots and block tables in one layer group."""

    slots: list[int]  # by token
    tables: list[list[int]]  # block ids of each row
    seq_lens: list[int]  # tokens in each table, the step's included
    origins: list[int]  # sequence position at which each table begins


class PackedTokens(NamedTuple):
    token_ids: list[int]
    positions: list[int]
    last: list[int]  # packed positions whose logits are returned
    query_start: list[int]  # first packed position of each row, then the end of the last
    num_decodes: int  # leading rows with one token each
    groups: list[GroupTokens]
    rope_factors: list[int]  # by token; empty if all tokens use the factors of short sequences
    # positions on each axis, if a sequence does not just count tokens
    axes: list[list[int]] | None = None
    has_drafts: bool = False  # whether some rows are draft tokens of a row before them


def write_changed(
    ints: Any,
    width: int,
    known: list[list[int]],
    tables: Iterable[list[int]],
    first: int = 0,
) -> None:
    """Writes changed rows of `width`, from row `first` on: only the new block ids if a table has
    only grown since `known`, as most do from step to step, else the whole row."""
    for row, block_ids in enumerate(tables, first):
        held = known[row]
        if held == block_ids:
            continue
        if held != block_ids[: len(held)]:
            known[row] = held = []
        start = row * width
        added = block_ids[len(held) :]
        begin = start + len(held)
        ints[begin : begin + len(added)] = array("i", added)
        held += added  # after the write, which an interrupt may prevent


class TableRows:
    """Block tables of a step's rows as one tensor. Each step writes only changed rows, in place, so
    no code may still use the previous step's tensor."""

    def __init__(self) -> None:
        self._known: list[list[int]] = []
        self._width = 0
        self._buffer = array("i")
        self._tensor = torch.empty(0, 0, dtype=torch.int32, device="cpu")

    def tensor(self, tables: list[list[int]]) -> Tensor:
        """`(len(tables), max_blocks)` int32 on the CPU, valid until the next call."""
        rows = len(tables)
        width = max(map(len, tables), default=0)
        if rows > len(self._known) or width > self._width:
            rows_held = max(rows, len(self._known))
            width = max(width + width // 2, self._width)  # block tables grow by one block at a time
            num_bytes = 4 * rows_held * width
            buffer = array("i", bytes(num_bytes))
            # shares the buffer, which must never be resized
            flat = torch.frombuffer(buffer, dtype=torch.int32)
            tensor = flat.view(rows_held, width)
            known: list[list[int]] = [[] for _ in range(rows_held)]
            self._known, self._width, self._buffer, self._tensor = known, width, buffer, tensor
        write_changed(self._buffer, self._width, self._known, tables)
        return self._tensor[:rows]


Bounds = tuple[int, int]
"""Packed tokens `[start, end)`."""
