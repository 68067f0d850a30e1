"""The block tables of one cache's layer group: layers that see the same tokens and keep them equally long."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ..interrupts import held
from .block_pool import OutOfBlocksError
from .block_table import BlockTable, num_copies
from .handles import PagedTensor, ReadCounters, Step
from .memory import PagedMemory


class LayerGroup:
    """
    One block table a row, shared by all layers of the group.

    The first layer that updates in a step moves the tables on for all of them. Operations on rows (`select_rows`,
    `crop`) are asked for by every layer in turn and done once: each layer counts its operations, and the group does
    the one that it has not done yet.

    Args:
        memory ([`PagedMemory`]): Where blocks come from.
        key (`Hashable`): Names the group in the memory.
        window (`int`, *optional*): Tokens a layer looks back, itself included; what is older is given back.
        counters ([`ReadCounters`]): Shared by the whole cache.
        borrows (`bool`): The tables are others' (`borrow`), with room for each step before it begins.
    """

    def __init__(
        self, memory: PagedMemory, key: Hashable, window: int | None, counters: ReadCounters, borrows: bool = False
    ) -> None:
        self.memory, self.key, self.window, self.counters, self.borrows = memory, key, window, counters, borrows
        self.tables: list[BlockTable] = []
        self.length = 0  # logical positions, padding included
        self.paddings: tuple[int, ...] = ()
        self.expected_paddings: tuple[tuple[int, ...], int] | None = None  # and length of a first step
        self.record_past = False
        self.num_operations = 0
        self.num_layers = 0
        self._attach()

    def _attach(self) -> None:
        self.blocks = self.memory.group(self.key)
        self._step: Step | None = None
        self._slots: torch.Tensor | None = None
        self._view: Step | None = None
        self._host_tables: tuple[tuple[int, ...], ...] | None = None  # None: tables changed since they were taken
        self._device_tables: dict[torch.device, torch.Tensor] = {}
        self._snapshots: list[weakref.ref[PagedTensor]] = []
        if not self.borrows:
            with held(), self.memory.lock:
                self.blocks.table_sets.add(self)

    def __del__(self) -> None:
        if hasattr(self, "_snapshots"):  # else it was interrupted before it held anything
            self.free()

    # -- moving on ------------------------------------------------------------------------------------------------

    def advance(
        self, batch_size: int, context_len: int, query_len: int, device: torch.device | str = "cpu"
    ) -> tuple[Step, torch.Tensor]:
        """
        Makes logical positions `[context_len, context_len + query_len)` writable in every row.

        Returns the step, and the slot of each new token, `(batch, query_len)` int64 with -1 for what is not stored, on
        the `device` that the first layer of the step asked for.
        Raises `OutOfBlocksError` with nothing allocated, `ValueError` for another batch size.
        """
        if not self.tables and not self.length:
            self._open(batch_size, query_len)
        if batch_size != len(self.tables):
            raise ValueError(f"the cache holds {len(self.tables)} rows, but keys of {batch_size} rows came")
        length = context_len + query_len
        step = self._step
        if step is not None and (step.length, step.context_len) == (length, context_len) and self._slots is not None:
            return step, self._slots
        if self.borrows:
            self._grow(length)
        elif context_len < self.length:
            self._own(context_len, length)
        if length > self.length:
            try:
                with held():
                    self._extend(length, context_len)
            except OutOfBlocksError:
                if not self.length:  # nothing is held: be as if never asked
                    self.free()
                raise
        for table, padding in zip(self.tables, self.paddings):
            places = table.places(max(0, context_len - padding), max(0, length - padding))
            self.blocks.pool.note_write(table.block_ids[place] for place in places)
        self._view = None
        self._step = self._snapshot(length, context_len)
        self._slots = self._new_slots(self._step).to(device)
        return self._step, self._slots

    def _grow(self, length: int) -> None:
        """Borrowed tables have room for the step, but for what a model adds of its own: prompts that it learned."""
        counts = [max(0, length - padding - table.num_tokens) for table, padding in zip(self.tables, self.paddings)]
        if any(counts):
            self.blocks.make_room(self.tables, counts)
            for table, count in zip(self.tables, counts):
                table.append(count)
        self.length, self._host_tables = length, None

    def _open(self, batch_size: int, length: int) -> None:
        (paddings, expected_length), self.expected_paddings = self.expected_paddings or ((), 0), None
        is_expected = len(paddings) == batch_size and expected_length == length
        self.paddings = paddings if is_expected else (0,) * batch_size
        self.tables = [BlockTable(self.blocks.pool, self.blocks.block_size) for _ in range(batch_size)]

    def _extend(self, length: int, context_len: int) -> None:
        if self.window is not None and not self.record_past:
            self._drop_outside_window(context_len)
            if context_len == 0 and length >= self.window and not self.length:
                # a first prefill attends to its own states: what will be outside the window is never stored
                for table, padding in zip(self.tables, self.paddings):
                    table.skip(max(0, length - self.window + 1 - padding))
        counts = [max(0, length - padding) - table.num_tokens for table, padding in zip(self.tables, self.paddings)]
        if self.blocks.make_room(self.tables, counts):
            self._host_tables = None
        if any(count and table.shared_tail is not None for table, count in zip(self.tables, counts)):
            self._keep_snapshots()
        copies = [copy for table, count in zip(self.tables, counts) if (copy := table.append(count)) is not None]
        if copies:
            self.blocks.copy_on_write(copies)
        self.length = length
        self.memory.note_peak()

    def _own(self, context_len: int, length: int) -> None:
        """
        Copies the blocks of logical positions `[context_len, length)` that are there already and that others hold too.
        Some are there where a layer holds fewer tokens than another of the group: its own, beside cross attention's.
        """
        if context_len == 0 and any(self.paddings):
            raise ValueError(
                f"a layer starts with {length} tokens where another of its kind holds {self.length}, of which the "
                f"first {self.paddings} of each row were padding and are not stored: pass rows without padding in front"
            )
        # a first prefill attends to its own states
        self._check_window(context_len or length)
        ranges = [(max(0, context_len - padding), max(0, length - padding)) for padding in self.paddings]
        writers = Counter(block for table, tokens in zip(self.tables, ranges) for block in table.shared_blocks(*tokens))
        if writers:
            self._keep_snapshots()
            self.blocks.reserve(num_copies(self.blocks.pool, writers))
            copies = [copy for table, tokens in zip(self.tables, ranges) for copy in table.own(*tokens)]
            self.blocks.copy_on_write(copies)
            self._host_tables = None
            self.memory.note_peak()

    def _check_window(self, length: int) -> None:
        """Raises `ValueError` unless what the next query after `length` positions is shown is still there."""
        first = self.first_visible(length)
        dropped = (table.num_dropped * table.block_size for table in self.tables)
        given_back = max((padding + count for padding, count in zip(self.paddings, dropped) if count), default=0)
        if given_back > first:
            raise ValueError(
                f"a layer looks {self.window} tokens back from token {length}, of which the first {given_back} were "
                f"given back, as another layer of its kind holds {self.length} tokens: update all layers in each step"
            )

    def _drop_outside_window(self, length: int) -> None:
        """Gives back what no query at logical position `length` or later can see."""
        assert self.window is not None
        for table, padding in zip(self.tables, self.paddings):
            oldest = max(0, length - self.window + 1 - padding)
            if oldest // table.block_size > table.num_dropped and table.block_ids:
                self._keep_snapshots()
                table.drop_before(oldest)
                self._host_tables = None

    def first_visible(self, length: int) -> int:
        """First logical position that the next query after `length` positions is shown (as transformers counts)."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def _first_shown(self, length: int, context_len: int) -> int:
        first = self.first_visible(context_len)
        if self.record_past and length == context_len:  # outside a step: all that is still there
            sizes = (table.num_dropped * table.block_size for table in self.tables)
            kept = [padding + dropped for padding, dropped in zip(self.paddings, sizes) if dropped]
            first = min(first, max(kept, default=0))
        return first

    def _snapshot(self, length: int, context_len: int) -> Step:
        size = self.blocks.block_size
        if self._host_tables is None:
            self._host_tables = tuple(tuple(table.block_ids) for table in self.tables)
            self._device_tables = {}
        return Step(
            length=length,
            context_len=context_len,
            first=self._first_shown(length, context_len),
            block_size=size,
            paddings=self.paddings,
            dropped=tuple(table.num_dropped * size for table in self.tables),
            host_tables=self._host_tables,
            tables=self._device_tables,
            counters=self.counters,
        )

    def _new_slots(self, step: Step) -> torch.Tensor:
        size, position = step.block_size, step.context_len
        if not step.host_tables:
            return torch.empty(0, step.query_len, dtype=torch.long)
        if step.query_len == 1:
            slots = []
            for ids, padding, dropped in zip(step.host_tables, step.paddings, step.dropped):
                token = position - padding - dropped
                slots.append([ids[token // size] * size + token % size if token >= 0 else -1])
            return torch.tensor(slots)
        tables = step.block_tables(torch.device("cpu")).long()
        behind = torch.tensor([padding + dropped for padding, dropped in zip(step.paddings, step.dropped)])
        tokens = torch.arange(position, step.length)[None, :] - behind[:, None]  # (batch, query_len)
        stored = tokens >= 0
        tokens = tokens.clamp(min=0)
        columns = (tokens // size).clamp(max=max(0, tables.shape[1] - 1))
        slots = tables.gather(1, columns) * size + tokens % size if tables.shape[1] else torch.zeros_like(tokens)
        return slots.masked_fill_(~stored, -1)

    # -- what a layer shows outside a step ------------------------------------------------------------------------

    def view(self, length: int) -> Step:
        """A step without queries over the first `length` logical positions."""
        if self._view is None or self._view.length != length or self.length != length:
            if length < self.length:
                self._check_window(length)
            self._view = self._snapshot(length, length)
        return self._view

    def remember(self, handle: PagedTensor) -> PagedTensor:
        """Keeps what `handle` shows true: it is gathered before its blocks are given back, or left to other tables."""
        if len(self._snapshots) > 64:
            self._snapshots = [ref for ref in self._snapshots if ref() is not None]
        self._snapshots.append(weakref.ref(handle))
        return handle

    def _keep_snapshots(self) -> None:
        for ref in self._snapshots:
            if (handle := ref()) is not None:
                handle.dense()
        self._snapshots.clear()

    def _forget_steps(self) -> None:
        self._step = self._slots = self._view = self._host_tables = None

    # -- operations on rows ---------------------------------------------------------------------------------------

    def select_rows(self, indices: Sequence[int]) -> None:
        """Row `i` becomes what row `indices[i]` was: tables are permuted and forked, nothing is copied."""
        if not self.tables or list(indices) == list(range(len(self.tables))):
            return
        with held(), self.memory.lock:
            self._keep_snapshots()
            old = self.tables
            if missing := [i for i in indices if not -len(old) <= i < len(old)]:
                raise IndexError(f"rows {missing} are asked for, the cache holds rows 0 to {len(old) - 1}")
            indices = [range(len(old))[i] for i in indices]
            # a row that stays where it is keeps its table object
            new = [old[i] if i == row else old[i].fork() for row, i in enumerate(indices)]
            for row, table in enumerate(old):
                if row >= len(new) or new[row] is not table:
                    table.free()
            self.tables = new
            self.paddings = tuple(self.paddings[i] for i in indices)
            self._forget_steps()
            self.memory.note_peak()

    def crop(self, length: int) -> None:
        """Forgets logical positions from `length` on, and what is outside the window then."""
        with held(), self.memory.lock:
            self._keep_snapshots()
            for table, padding in zip(self.tables, self.paddings):
                table.truncate(max(0, length - padding))
            self.length = min(self.length, length)
            if self.window is not None:
                self._drop_outside_window(self.length)
            self._forget_steps()

    def free(self, keep_snapshots: bool = True) -> None:
        """Forgets everything and gives every block back; handles still alive are gathered first if `keep_snapshots`."""
        with held(), self.memory.lock:
            try:
                if keep_snapshots:
                    self._keep_snapshots()
            finally:
                for table in () if self.borrows else self.tables:
                    table.free()
                self.tables, self.length, self.paddings, self.expected_paddings = [], 0, (), None
                self._snapshots.clear()
                self._forget_steps()

    def borrow(self, tables: list[BlockTable], paddings: tuple[int, ...], length: int) -> None:
        """Reads and writes these tables from now on, which hold `length` logical positions of each row, or more."""
        self.tables, self.paddings, self.length = tables, paddings, length
        self._forget_steps()

    def adopt(self, tables: list[BlockTable], paddings: tuple[int, ...], length: int) -> None:
        """Takes over tables that hold what rows of `length` logical positions would; the group must be empty."""
        with held(), self.memory.lock:
            self.free()
            self.tables, self.paddings, self.length = tables, paddings, length

    def fork(self, counters: ReadCounters) -> LayerGroup:
        """A second group over the same blocks."""
        twin = LayerGroup(self.memory, self.key, self.window, counters, self.borrows)
        with held(), self.memory.lock:
            twin.tables = list(self.tables) if self.borrows else [table.fork() for table in self.tables]
            self._forget_steps()  # a layer that is still to write its part of the step shares the blocks now
        twin.length, twin.paddings, twin.record_past = self.length, self.paddings, self.record_past
        twin.expected_paddings, twin.num_layers = self.expected_paddings, self.num_layers
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGroup:
        counters = memo.setdefault(id(self.counters), ReadCounters())
        twin = memo[id(self)] = self.fork(counters)
        twin.num_operations = self.num_operations
        return twin

    # -- pickling: the blocks that the tables hold, renumbered from 0 ------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        own = (
            "memory",
            "key",
            "window",
            "counters",
            "borrows",
            "length",
            "paddings",
            "expected_paddings",
            "record_past",
        )
        state: dict[str, Any] = {name: getattr(self, name) for name in (*own, "num_operations", "num_layers")}
        held = list(dict.fromkeys(block_id for table in self.tables for block_id in table.block_ids))
        numbers = {block_id: number for number, block_id in enumerate(held)}
        state["tables"] = [
            ([numbers[block_id] for block_id in table.block_ids], table.num_dropped, table.num_tokens)
            for table in self.tables
        ]
        layers = self.blocks.storage.layers.items() if held else ()
        state["contents"] = {index: (layer.keys[held], layer.values[held]) for index, layer in layers}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        tables, contents = state.pop("tables"), state.pop("contents")
        self.__dict__.update(state)
        self.tables = []
        self._attach()
        with held(), self.memory.lock:
            size = self.blocks.block_size
            taken = self.blocks.take(1 + max((number for ids, _, _ in tables for number in ids), default=-1))
            for numbers, num_dropped, num_tokens in tables:
                table = BlockTable(self.blocks.pool, size)
                table.block_ids = [taken[number] for number in numbers]
                table.num_dropped, table.num_tokens = num_dropped, num_tokens
                self.blocks.pool.acquire(table.block_ids)
                self.tables.append(table)
            self.blocks.pool.release(taken)
            for index, (keys, values) in contents.items():
                layer = self.blocks.layer(self, index, keys, values, is_empty=True)
                layer.keys[taken], layer.values[taken] = keys, values
