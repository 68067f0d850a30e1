"""A packed step on the host, and the buffers on the device for its tokens and block tables."""

from __future__ import annotations

import ctypes
import dataclasses
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.triton.cascade import SharedPrefix
from ...step import Cascade, Lengths, StepMetadata


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
    axes: list[list[int]] | None = None  # positions on each axis, if a sequence does not just count tokens
    has_drafts: bool = False  # whether some rows are draft tokens of a row before them


def _write_changed(ints: Any, width: int, known: list[list[int]], tables: Iterable[list[int]], first: int = 0) -> None:
    """Writes changed rows of `width`, from row `first` on: only the new block ids if a table has only grown since
    `known`, as most do from step to step, else the whole row."""
    for row, block_ids in enumerate(tables, first):
        held = known[row]
        if held != block_ids:
            if held != block_ids[: len(held)]:
                known[row] = held = []
            start, added = row * width, block_ids[len(held) :]
            ints[start + len(held) : start + len(block_ids)] = array("i", added)
            held += added  # after the write, which an interrupt may prevent


class TableRows:
    """Block tables of a step's rows as one tensor. Each step writes only changed rows, in place, so no code may still
    use the previous step's tensor."""

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
            # shares the buffer, which must never be resized
            tensor = torch.frombuffer(buffer, dtype=torch.int32).view(rows_held, width)
            known: list[list[int]] = [[] for _ in range(rows_held)]
            self._known, self._width, self._buffer, self._tensor = known, width, buffer, tensor
        _write_changed(self._buffer, self._width, self._known, tables)
        return self._tensor[:rows]


Bounds = tuple[int, int]
"""Packed tokens `[start, end)`."""


class Sizes(NamedTuple):
    """Capacity of a recorded step."""

    decodes: int  # leading rows, of one token each
    widths: tuple[int, ...]  # columns of each layer group's block tables
    chunks: int = 0  # rows after the decodes, of any number of tokens
    chunk_tokens: int = 0  # in all chunks together
    prefixes: tuple[tuple[int, int], ...] = ()  # by group: prefixes shared by decodes, columns of their tables
    ranges: int = 0  # token ranges with an adapter

    @property
    def rows(self) -> int:
        """All rows; with chunks one more, for padding tokens."""
        return self.decodes + (self.chunks + 1 if self.chunks else 0)

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk_tokens


class _Part(NamedTuple):
    """A part of the buffers on host and device: "q" (int64) or "i" (int32) numbers."""

    host: Any
    device: Tensor

    def write(self, numbers: list[int]) -> None:
        self.host[: len(numbers)] = array(self.host.format, numbers)


Take = Callable[[str, int], _Part]


class _GroupInputs:
    """The parts of a layer group's [`StepMetadata`]."""

    def __init__(self, sizes: Sizes, number: int, take: Take) -> None:
        rows, self.width = sizes.rows, sizes.widths[number]
        self.slots = take("q", sizes.tokens)
        self.seq_lens, self.starts, self.origins = (take("i", rows) for _ in range(3))
        self.tables = take("i", rows * self.width)
        self.known: list[list[int]] = [[] for _ in range(rows)]  # block ids that each row holds
        num_prefixes, width = sizes.prefixes[number] if sizes.prefixes else (0, 0)
        self.prefixes = _Prefixes(sizes.decodes, num_prefixes, width, take) if num_prefixes else None


class _Prefixes:
    """The parts of a [`Cascade`] of decodes. Decodes that share nothing form a last group with an empty prefix."""

    def __init__(self, num_rows: int, num_groups: int, width: int, take: Take) -> None:
        self.num_rows, self.num_groups, self.width = num_rows, num_groups, width
        self.tail_starts, self.members = take("i", num_rows), take("i", num_rows)
        self.seq_lens, self.starts = take("i", num_groups + 1), take("i", num_groups + 1)
        self.bounds = take("i", num_groups + 2)
        self.tables = take("i", (num_groups + 1) * width)
        self.known: list[list[int]] = [[] for _ in range(num_groups)]

    def fill(self, groups: Sequence[SharedPrefix], tables: list[list[int]], block_size: int) -> None:
        starts, bounds, members = [0] * self.num_rows, [0], list[int]()
        for rows, num_blocks in groups:
            members += rows
            bounds.append(len(members))
            for row in rows:
                starts[row] = num_blocks * block_size
        empty = self.num_groups - len(groups)
        self.tail_starts.write(starts)
        self.members.write([*members, *set(range(self.num_rows)).difference(members)])
        self.bounds.write([*bounds, *[bounds[-1]] * empty, self.num_rows])
        self.seq_lens.write([*(num_blocks * block_size for _, num_blocks in groups), *[0] * (empty + 1)])
        shared = [tables[rows[0]][:num_blocks] for rows, num_blocks in groups]
        _write_changed(self.tables.host, self.width, self.known, shared)

    def cascade(self, decodes: StepMetadata) -> Cascade:
        assert decodes.lengths is not None
        lengths = Lengths(self.seq_lens.device, self.starts.device, self.bounds.device)
        query_start = (0, *[self.num_rows] * (self.num_groups + 1))  # all rows may share one prefix
        tables = self.tables.device.view(-1, self.width)
        prefixes = StepMetadata(tables, query_start, (), (), decodes.block_size, causal=False, lengths=lengths)
        tails = dataclasses.replace(decodes, lengths=decodes.lengths._replace(starts=self.tail_starts.device))
        return Cascade(tails, prefixes, self.members.device)


class StaticInputs:
    """Buffers at fixed addresses for steps that fit in `sizes`, filled with one copy per step. Unused rows hold token 0
    at position 0, not stored (slot -1) and attending to nothing (length 0). `token_ids` and `positions` are
    `(1, tokens)` int64. `kept`, only with chunks, is `(decodes + chunks,)` int64: the tokens whose logits are wanted.
    `ranges` is `(sizes.ranges, 2)` int64: for each adapter its range of decode tokens, then, with chunks, that of chunk
    tokens."""

    def __init__(self, sizes: Sizes, windows: list[int | None], block_sizes: list[int], device: torch.device) -> None:
        self.sizes, self.windows, self.block_sizes = sizes, windows, block_sizes
        has_chunks, num_kept = sizes.chunks > 0, sizes.decodes + sizes.chunks
        num_longs = (2 + len(sizes.widths)) * sizes.tokens + has_chunks * num_kept + 2 * sizes.ranges
        num_ints = sum((3 + width) * sizes.rows for width in sizes.widths) + has_chunks * (sizes.rows + 1)
        num_ints += sum(2 * sizes.decodes + 1 + (3 + width) * (count + 1) for count, width in sizes.prefixes if count)
        with torch.inference_mode(False):  # they outlive the call
            size, is_pinned = num_longs + -(-num_ints // 2), device.type != "cpu"
            self._host = torch.zeros(size, dtype=torch.long, pin_memory=is_pinned, device="cpu")
            self._buffer = torch.zeros_like(self._host, device=device)
            memory = memoryview((ctypes.c_char * self._host.nbytes).from_address(self._host.data_ptr())).cast("B")
            free = {
                "q": _Part(memory[: 8 * num_longs].cast("q"), self._buffer[:num_longs]),
                "i": _Part(memory[8 * num_longs :].cast("i"), self._buffer[num_longs:].view(torch.int32)),
            }

            def take(kind: str, count: int) -> _Part:
                host, on_device = free[kind]
                free[kind] = _Part(host[count:], on_device[count:])
                return _Part(host[:count], on_device[:count])

            self._token_ids, self._positions = take("q", sizes.tokens), take("q", sizes.tokens)
            self._groups = [_GroupInputs(sizes, number, take) for number in range(len(sizes.widths))]
            self._kept = take("q", num_kept) if has_chunks else None
            self._query_start = take("i", sizes.rows + 1) if has_chunks else None
            self._ranges = take("q", 2 * sizes.ranges)
            self.ranges = self._ranges.device.view(-1, 2)
            self.token_ids, self.positions = self._token_ids.device[None], self._positions.device[None]
            self.kept = None if self._kept is None else self._kept.device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def fill(
        self,
        tokens: PackedTokens,
        prefixes: Sequence[Sequence[SharedPrefix]] = (),
        ranges: Sequence[tuple[Bounds, Bounds]] = (),
    ) -> None:
        """Copies a step to the buffers, with the prefixes that its decodes share in each layer group and each adapter's
        token ranges. First waits until the previous copy from pinned host memory is done."""
        if self._copied is not None:
            self._copied.synchronize()
        sizes, decodes = self.sizes, tokens.num_decodes

        def spread(numbers: list[int], size: int, unused: int = 0) -> list[int]:
            """Puts decodes' numbers first, and chunks' numbers after room for `sizes.decodes` decodes."""
            gap, rest = [unused] * (sizes.decodes - decodes), size - sizes.decodes - len(numbers) + decodes
            return [*numbers[:decodes], *gap, *numbers[decodes:], *[unused] * rest]

        self._token_ids.write(spread(tokens.token_ids, sizes.tokens))
        self._positions.write(spread(tokens.positions, sizes.tokens))
        for number, (group, own) in enumerate(zip(tokens.groups, self._groups)):
            own.slots.write(spread(group.slots, sizes.tokens, -1))
            own.seq_lens.write(spread(group.seq_lens, sizes.rows))
            own.origins.write(spread(group.origins, sizes.rows))
            _write_changed(own.tables.host, own.width, own.known, group.tables[:decodes])
            _write_changed(own.tables.host, own.width, own.known, group.tables[decodes:], sizes.decodes)
            if own.prefixes is not None:
                own.prefixes.fill(prefixes[number], group.tables, self.block_sizes[number])
        if self._query_start is not None and self._kept is not None:
            shift = sizes.decodes - decodes
            starts = [shift + start for start in tokens.query_start[decodes:]]
            unused = sizes.rows - sizes.decodes - len(starts)
            self._query_start.write([*range(sizes.decodes), *starts, *starts[-1:] * unused, sizes.tokens])
            kept = [at if at < decodes else at + shift for at in tokens.last]
            self._kept.write([*kept, *[0] * (sizes.decodes + sizes.chunks - len(kept))])
        shift, bounds = sizes.decodes - decodes, list[int]()
        for (start, end), (first, last) in ranges:
            bounds += (start, end, first + shift, last + shift) if sizes.chunks else (start, end)
        self._ranges.write(bounds)
        self._buffer.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def steps(self) -> list[StepMetadata]:
        """Returns one step per layer group. Any chunk may fill all the room for tokens; the host's bounds say the first
        does."""
        decodes, rows = self.sizes.decodes, self.sizes.rows
        query_start = (*range(decodes + 1), *[self.sizes.tokens] * (rows - decodes))
        begins, found = None if self._query_start is None else self._query_start.device, []
        for window, size, own in zip(self.windows, self.block_sizes, self._groups):
            lengths = Lengths(own.seq_lens.device, own.starts.device, begins, own.origins.device)
            step = StepMetadata(
                own.tables.device.view(rows, own.width), query_start, (), (), size,
                window=window, slots=own.slots.device[None], lengths=lengths,
            )  # fmt: skip
            if own.prefixes is not None:
                in_front = step.rows(0, decodes)
                step = dataclasses.replace(step, cascade=own.prefixes.cascade(in_front))
            found.append(step)
        return found
