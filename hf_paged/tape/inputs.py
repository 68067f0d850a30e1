"""The buffers of a recorded step on the device, for its tokens and block tables."""

from __future__ import annotations

import ctypes
import dataclasses
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batching.execution.inputs import Bounds, PackedTokens, write_changed
from ..kernels.triton.cascade import SharedPrefix
from ..step import Cascade, Lengths, StepMetadata


class Sizes(NamedTuple):
    """Capacity of a recorded step."""

    decodes: int  # leading rows, of one token each
    widths: tuple[int, ...]  # columns of each layer group's block tables
    chunks: int = 0  # rows after the decodes, of any number of tokens
    chunk_tokens: int = 0  # in all chunks together
    # by group: prefixes shared by decodes, columns of their tables
    prefixes: tuple[tuple[int, int], ...] = ()
    ranges: int = 0  # token ranges with an adapter

    @property
    def rows(self) -> int:
        """All rows; with chunks one more, for padding tokens."""
        if not self.chunks:
            return self.decodes
        return self.decodes + self.chunks + 1

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk_tokens


class _Part(NamedTuple):
    """A part of the buffers on host and device: "q" (int64) or "i" (int32) numbers."""

    host: Any
    device: Tensor

    def write(self, numbers: list[int]) -> None:
        typed = array(self.host.format, numbers)
        self.host[: len(numbers)] = typed

    def spread(
        self,
        numbers: list[int],
        decodes: int,
        shift: int,
        unused: int = 0,
    ) -> None:
        """Writes the whole part: decodes' numbers first, and those of chunks behind room for
        `shift` more decodes."""
        rest = len(self.host) - len(numbers) - shift
        every = [
            *numbers[:decodes],
            *[unused] * shift,
            *numbers[decodes:],
            *[unused] * rest,
        ]
        self.host[:] = array(self.host.format, every)


Take = Callable[[str, int], _Part]


class _GroupInputs:
    """The parts of a layer group's [`StepMetadata`]."""

    def __init__(self, sizes: Sizes, number: int, take: Take) -> None:
        rows = sizes.rows
        self.width = sizes.widths[number]
        self.slots = take("q", sizes.tokens)
        self.seq_lens = take("i", rows)
        self.starts = take("i", rows)
        self.origins = take("i", rows)
        self.tables = take("i", rows * self.width)
        self.known: list[list[int]] = [[] for _ in range(rows)]  # block ids that each row holds
        self.prefixes: _Prefixes | None = None
        if sizes.prefixes and sizes.prefixes[number][0]:
            num_prefixes, width = sizes.prefixes[number]
            self.prefixes = _Prefixes(
                sizes.decodes,
                num_prefixes,
                width,
                take,
            )


class _Prefixes:
    """The parts of a [`Cascade`] of decodes. Decodes that share nothing form a last group with an
    empty prefix."""

    def __init__(
        self,
        num_rows: int,
        num_groups: int,
        width: int,
        take: Take,
    ) -> None:
        self.num_rows = num_rows
        self.num_groups = num_groups
        self.width = width
        self.tail_starts = take("i", num_rows)
        self.members = take("i", num_rows)
        self.seq_lens = take("i", num_groups + 1)
        self.starts = take("i", num_groups + 1)
        self.bounds = take("i", num_groups + 2)
        self.tables = take("i", (num_groups + 1) * width)
        self.known: list[list[int]] = [[] for _ in range(num_groups)]

    def fill(
        self,
        groups: Sequence[SharedPrefix],
        tables: list[list[int]],
        block_size: int,
    ) -> None:
        starts = [0] * self.num_rows
        bounds = [0]
        members = list[int]()
        for rows, num_blocks in groups:
            members += rows
            bounds.append(len(members))
            for row in rows:
                starts[row] = num_blocks * block_size
        empty = self.num_groups - len(groups)
        alone = set(range(self.num_rows)).difference(members)
        seq_lens = [num_blocks * block_size for _, num_blocks in groups]
        seq_lens += [0] * (empty + 1)
        tail_bounds = [*[bounds[-1]] * empty, self.num_rows]
        self.tail_starts.write(starts)
        self.members.write([*members, *alone])
        self.bounds.write([*bounds, *tail_bounds])
        self.seq_lens.write(seq_lens)
        shared = []
        for rows, num_blocks in groups:
            first_table = tables[rows[0]]
            shared.append(first_table[:num_blocks])
        write_changed(
            self.tables.host,
            self.width,
            self.known,
            shared,
        )

    def cascade(self, decodes: StepMetadata) -> Cascade:
        assert decodes.lengths is not None
        lengths = Lengths(
            self.seq_lens.device,
            self.starts.device,
            self.bounds.device,
        )
        ends = [self.num_rows] * (self.num_groups + 1)
        query_start = (0, *ends)  # all rows may share one prefix
        tables = self.tables.device.view(-1, self.width)
        prefixes = StepMetadata(
            tables,
            query_start,
            (),
            (),
            decodes.block_size,
            causal=False,
            lengths=lengths,
        )
        tail_lengths = decodes.lengths._replace(starts=self.tail_starts.device)
        tails = dataclasses.replace(decodes, lengths=tail_lengths)
        return Cascade(tails, prefixes, self.members.device)


class StaticInputs:
    """Buffers at fixed addresses for steps that fit in `sizes`, filled with one copy per step.
    Unused rows hold token 0 at position 0, not stored (slot -1) and attending to nothing (length
    0). `token_ids` and `positions` are `(1, tokens)` int64. `kept`, only with chunks, is `(decodes
    + chunks,)` int64: the tokens whose logits are wanted. `ranges` is `(sizes.ranges, 2)` int64:
    for each adapter its range of decode tokens, then, with chunks, that of chunk tokens."""

    def __init__(
        self,
        sizes: Sizes,
        windows: list[int | None],
        block_sizes: list[int],
        device: torch.device,
    ) -> None:
        self.sizes = sizes
        self.windows = windows
        self.block_sizes = block_sizes
        has_chunks = sizes.chunks > 0
        num_kept = sizes.decodes + sizes.chunks
        num_longs = (2 + len(sizes.widths)) * sizes.tokens
        num_longs += 2 * sizes.ranges
        num_ints = 0
        for width in sizes.widths:
            num_ints += (3 + width) * sizes.rows
        if has_chunks:
            num_longs += num_kept
            num_ints += sizes.rows + 1
        for count, width in sizes.prefixes:
            if count:
                num_ints += 2 * sizes.decodes + 1
                num_ints += (3 + width) * (count + 1)
        with torch.inference_mode(False):  # they outlive the call
            size = num_longs + -(-num_ints // 2)
            is_pinned = device.type != "cpu"
            self._host = torch.zeros(
                size,
                dtype=torch.long,
                pin_memory=is_pinned,
                device="cpu",
            )
            self._buffer = torch.zeros_like(self._host, device=device)
            kind = ctypes.c_char * self._host.nbytes
            characters = kind.from_address(self._host.data_ptr())
            memory = memoryview(characters).cast("B")
            longs = memory[: 8 * num_longs].cast("q")
            ints = memory[8 * num_longs :].cast("i")
            int_buffer = self._buffer[num_longs:].view(torch.int32)
            free = {
                "q": _Part(longs, self._buffer[:num_longs]),
                "i": _Part(ints, int_buffer),
            }

            def take(kind: str, count: int) -> _Part:
                host, on_device = free[kind]
                taken = _Part(host[:count], on_device[:count])
                free[kind] = _Part(host[count:], on_device[count:])
                return taken

            self._token_ids = take("q", sizes.tokens)
            self._positions = take("q", sizes.tokens)
            self._groups = []
            for number in range(len(sizes.widths)):
                self._groups.append(_GroupInputs(sizes, number, take))
            self._kept = take("q", num_kept) if has_chunks else None
            self._query_start = None
            if has_chunks:
                self._query_start = take("i", sizes.rows + 1)
            self._ranges = take("q", 2 * sizes.ranges)
            self.ranges = self._ranges.device.view(-1, 2)
            self.token_ids = self._token_ids.device[None]
            self.positions = self._positions.device[None]
            self.kept: Tensor | None = None
            if self._kept is not None:
                self.kept = self._kept.device
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()

    def fill(
        self,
        tokens: PackedTokens,
        prefixes: Sequence[Sequence[SharedPrefix]] = (),
        ranges: Sequence[tuple[Bounds, Bounds]] = (),
    ) -> None:
        """Copies a step to the buffers, with the prefixes that its decodes share in each layer
        group and each adapter's token ranges. First waits until the previous copy from pinned host
        memory is done."""
        if self._copied is not None:
            self._copied.synchronize()
        sizes = self.sizes
        decodes = tokens.num_decodes
        shift = sizes.decodes - decodes
        self._token_ids.spread(tokens.token_ids, decodes, shift)
        self._positions.spread(tokens.positions, decodes, shift)
        pairs = zip(tokens.groups, self._groups)
        for number, (group, inputs) in enumerate(pairs):
            inputs.slots.spread(group.slots, decodes, shift, -1)
            inputs.seq_lens.spread(group.seq_lens, decodes, shift)
            inputs.origins.spread(group.origins, decodes, shift)
            write_changed(
                inputs.tables.host,
                inputs.width,
                inputs.known,
                group.tables[:decodes],
            )
            if sizes.chunks:
                write_changed(
                    inputs.tables.host,
                    inputs.width,
                    inputs.known,
                    group.tables[decodes:],
                    sizes.decodes,
                )
            if inputs.prefixes is not None:
                inputs.prefixes.fill(
                    prefixes[number],
                    group.tables,
                    self.block_sizes[number],
                )
        if self._query_start is not None and self._kept is not None:
            starts = [shift + start for start in tokens.query_start[decodes:]]
            num_unused = sizes.rows - sizes.decodes - len(starts)
            query_start = [
                *range(sizes.decodes),
                *starts,
                *starts[-1:] * num_unused,
                sizes.tokens,
            ]
            self._query_start.write(query_start)
            kept = []
            for place in tokens.last:
                kept.append(place if place < decodes else place + shift)
            num_unkept = sizes.decodes + sizes.chunks - len(kept)
            kept += [0] * num_unkept
            self._kept.write(kept)
        bounds = list[int]()
        for (start, end), (first, last) in ranges:
            bounds += (start, end)
            if sizes.chunks:
                bounds += (first + shift, last + shift)
        if bounds:
            self._ranges.write(bounds)
        self._buffer.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def steps(self) -> list[StepMetadata]:
        """Returns one step per layer group. Any chunk may fill all the room for tokens; the host's
        bounds say the first does."""
        sizes = self.sizes
        decodes = sizes.decodes
        rows = sizes.rows
        ends = [sizes.tokens] * (rows - decodes)
        query_start = (*range(decodes + 1), *ends)
        begins = None
        if self._query_start is not None:
            begins = self._query_start.device
        steps = []
        groups = zip(self.windows, self.block_sizes, self._groups)
        for window, size, inputs in groups:
            lengths = Lengths(
                inputs.seq_lens.device,
                inputs.starts.device,
                begins,
                inputs.origins.device,
            )
            step = StepMetadata(
                inputs.tables.device.view(rows, inputs.width),
                query_start,
                (),
                (),
                size,
                window=window,
                slots=inputs.slots.device[None],
                lengths=lengths,
            )
            if inputs.prefixes is not None:
                in_front = step.rows(0, decodes)
                cascade = inputs.prefixes.cascade(in_front)
                step = dataclasses.replace(step, cascade=cascade)
            steps.append(step)
        return steps
