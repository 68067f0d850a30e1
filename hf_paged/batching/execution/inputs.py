"""A packed step on the host, and the memory that its tokens and block tables are copied to."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...step import Lengths, StepMetadata


class GroupTokens(NamedTuple):
    """The tokens of a packed step in one layer group."""

    slots: list[int]  # of all tokens
    tables: list[list[int]]  # block ids of each row
    seq_lens: list[int]  # tokens that each table holds, those of the step included
    origins: list[int]  # the sequence's position that each table begins with


class PackedTokens(NamedTuple):
    token_ids: list[int]
    positions: list[int]
    last: list[int]  # packed positions whose logits are returned
    query_start: list[int]  # where each row begins, and the end of the last
    num_decodes: int  # leading rows with one token each
    groups: list[GroupTokens]
    rope_factors: list[int]  # of all tokens; none where those of short sequences are all
    axes: list[list[int]] | None = None  # positions on each axis, where a sequence has its own


def _write_changed(ints: Any, start: int, width: int, known: list[list[int]], tables: list[list[int]]) -> None:
    """Writes rows of `width` from `ints[start]` on: of those whose block ids are not the `known` ones all, or what is
    behind these, where a table has only grown, as most do from step to step."""
    for row, block_ids in enumerate(tables):
        held = known[row]
        if held != block_ids:
            if held != block_ids[: len(held)]:
                known[row] = held = []
            first, added = start + row * width, block_ids[len(held) :]
            ints[first + len(held) : first + len(block_ids)] = array("i", added)
            held += added  # after they are written: an interrupt may come before that


class TableRows:
    """Block tables of a step's rows as one tensor. From step to step only the rows that changed are written, in place:
    by then no code may read through the step before."""

    def __init__(self) -> None:
        self._known: list[list[int]] = []
        self._width = 0
        self._buffer = array("i")
        self._tensor = torch.empty(0, 0, dtype=torch.int32, device="cpu")

    def tensor(self, tables: list[list[int]]) -> Tensor:
        """`(len(tables), max_blocks)` int32 on the CPU, valid until the next call."""
        rows, width = len(tables), max(map(len, tables), default=0)
        if rows > len(self._known) or width > self._width:
            rows_held = max(rows, len(self._known))
            width = max(width + width // 2, self._width)  # block tables grow by one block at a time
            buffer = array("i", bytes(4 * rows_held * width))
            # shares the buffer, which is never resized
            tensor = torch.frombuffer(buffer, dtype=torch.int32).view(rows_held, width)
            known: list[list[int]] = [[] for _ in range(rows_held)]
            self._known, self._width, self._buffer, self._tensor = known, width, buffer, tensor
        _write_changed(self._buffer, 0, self._width, self._known, tables)
        return self._tensor[:rows]


class StaticInputs:
    """Buffers at fixed addresses for steps of up to `num_rows` decodes with block tables of `widths` columns a layer
    group, filled for every step with one copy. Rows that a step does not use hold token 0 at position 0, stored nowhere
    (slot -1), which attends to nothing (length 0). `token_ids` and `positions` are `(1, num_rows)` int64."""

    def __init__(
        self, num_rows: int, widths: tuple[int, ...], windows: list[int | None], block_size: int, device: torch.device
    ) -> None:
        self.num_rows, self.widths, self.windows, self.block_size = num_rows, widths, windows, block_size
        num_longs = (2 + len(widths)) * num_rows  # token ids, positions, every group's slots
        num_ints = sum((3 + width) * num_rows for width in widths)  # lengths, starts, origins, tables
        with torch.inference_mode(False):  # they outlive the call
            size, is_pinned = num_longs + -(-num_ints // 2), device.type != "cpu"
            self._host = torch.zeros(size, dtype=torch.long, pin_memory=is_pinned, device="cpu")
            self._buffer = torch.zeros_like(self._host, device=device)
            memory = memoryview((ctypes.c_char * self._host.nbytes).from_address(self._host.data_ptr())).cast("B")
            self._longs, self._ints = memory.cast("q"), memory[8 * num_longs :].cast("i")
            self.token_ids, self.positions, *self._slots = self._buffer[:num_longs].view(-1, 1, num_rows)
            sizes = [rows for width in widths for rows in (3 * num_rows, width * num_rows)]
            parts = self._buffer[num_longs:].view(torch.int32)[:num_ints].split(sizes)
            self._lengths = [part.view(3, num_rows) for part in parts[::2]]
            self._tables = [part.view(num_rows, -1) for part in parts[1::2]]
        # block ids that each row holds
        self._known: list[list[list[int]]] = [[[] for _ in range(num_rows)] for _ in widths]
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, tokens: PackedTokens) -> None:
        """Takes a step of decodes. The host writes pinned memory, and waits if the copy before is still to be made."""
        if self._copied is not None:
            self._copied.synchronize()
        rows, padding = self.num_rows, self.num_rows - len(tokens.token_ids)
        nothing = [0] * padding
        longs = array("q", tokens.token_ids + nothing)
        longs.extend(tokens.positions + nothing)
        start = 0  # of the group in `_ints`
        for group, width, known in zip(tokens.groups, self.widths, self._known):
            longs.extend(group.slots + [-1] * padding)
            self._ints[start : start + rows] = array("i", group.seq_lens + nothing)
            self._ints[start + 2 * rows : start + 3 * rows] = array("i", group.origins + nothing)
            _write_changed(self._ints, start + 3 * rows, width, known, group.tables)
            start += (3 + width) * rows
        self._longs[: len(longs)] = longs
        self._buffer.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def steps(self) -> list[StepMetadata]:
        return [
            StepMetadata.rectangle(
                *(tables, (), self.block_size),
                **{"window": window, "slots": slots, "lengths": Lengths(seq_lens, starts, origins=origins)},
            )
            for slots, window, tables, (seq_lens, starts, origins) in zip(
                self._slots, self.windows, self._tables, self._lengths
            )
        ]
