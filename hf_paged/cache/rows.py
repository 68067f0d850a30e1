"""The rows of a cache and their block tables, advanced once per step for all layers of a group."""

from __future__ import annotations

import copy
import itertools
import weakref
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..interrupts import held
from ..step import NotPackable, ReadCounters, StepMetadata
from .block_manager import SequenceBlocks
from .block_pool import BlockTable, OutOfBlocksError
from .groups import GroupSpec
from .handles import Handles, PagedTensor
from .memory import PagedMemory


class LayerGroup:
    """The block tables of one layer group, one per row. The first layer to update in a step advances them for all."""

    def __init__(self, rows: CacheRows, spec: GroupSpec) -> None:
        self.num_layers = 0
        self.record_past = False  # whether tokens outside the window are kept until the next `crop`
        self._attach(rows, spec)
        self.clear()

    def _attach(self, rows: CacheRows, spec: GroupSpec) -> None:
        self.rows, self.spec, self.number = rows, spec, rows.specs.index(spec)
        self.memory, self.blocks = rows.memory, rows.memory.group(spec)
        rows.groups[spec] = self
        self.packed: StepMetadata | None = None  # the step of the current packed forward; no rows are held then
        self.forget_steps()

    def clear(self) -> None:
        self.length = 0  # logical positions, including padding
        self.paddings: tuple[int, ...] = ()  # leading positions of each row that are not stored
        self.expected_paddings: tuple[tuple[int, ...], int] | None = None  # paddings of the first step, and its length
        self.forget_steps()

    def forget_steps(self) -> None:
        """Drops cached steps, since the tables have changed."""
        self._step: StepMetadata | None = None
        self._view: StepMetadata | None = None
        self._block_tables: Tensor | None = None  # `None`: out of date

    @property
    def tables(self) -> list[BlockTable]:
        return [blocks.tables[self.number] for blocks in self.rows.held]

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle and `copy.deepcopy`: the rows bring tables and memory."""
        names = ("length", "paddings", "expected_paddings", "record_past", "num_layers", "rows", "spec")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._attach(state.pop("rows"), state.pop("spec"))
        self.__dict__.update(state)

    def num_begun(self, context_len: int) -> int | None:
        """Counts the tables with blocks that a step after `context_len` positions writes to; `None` if any has
        content."""
        step = self.packed
        if step is None:
            return None if context_len else sum(bool(table.block_ids) for table in self.tables)
        query_lens = tuple(end - start for start, end in itertools.pairwise(step.query_start))
        return step.num_rows if step.seq_lens == query_lens else None

    def advance(
        self, batch_size: int, context_len: int, query_len: int, device: torch.device | str = "cpu"
    ) -> StepMetadata:
        """Makes logical positions `[context_len, context_len + query_len)` writable in every row; returns the step on
        `device`. Raises `OutOfBlocksError` with nothing allocated, `ValueError` if the batch size differs,
        `NotPackable` if sizes are not those of the packed step."""
        if self.packed is not None:
            if (batch_size, query_len) != (1, self.packed.num_tokens):
                raise NotPackable(
                    f"{batch_size} x {query_len} states came in a packed step of {self.packed.num_tokens} tokens"
                )
            return self.packed
        if (self.length or self.rows.held) and batch_size != len(self.rows.held):
            raise ValueError(f"the cache holds {len(self.rows.held)} rows, but keys of {batch_size} rows came")
        if not self.paddings and not self.length:  # begins with empty rows
            (paddings, expected_length), self.expected_paddings = self.expected_paddings or ((), 0), None
            is_expected = len(paddings) == batch_size and expected_length == query_len
            self.paddings = paddings if is_expected else (0,) * batch_size
            if not self.rows.held:
                self.rows.held = [self.rows.manager.new() for _ in range(batch_size)]
        length, step = context_len + query_len, self._step
        if step is not None and step.query_len == query_len and step.columns and step.columns.stop == length:
            return step
        tables = self.tables
        has_room = (padding + table.num_tokens >= length for table, padding in zip(tables, self.paddings))
        if self.rows.borrows and context_len == self.length and all(has_room):
            self.length, self._block_tables = length, None  # the tables' owner has made room and copied shared blocks
        else:
            self._make_room(tables, context_len, length)
        self._view = None
        self._step = self._snapshot(length, query_len, device)
        return self._step

    def _make_room(self, tables: list[BlockTable], context_len: int, length: int) -> None:
        """Makes tokens `[context_len, length)` writable. Some exist already if this layer holds fewer than another of
        the group. Borrowed tables have room, except for tokens that a model adds."""
        ranges = [(max(0, context_len - padding), max(0, length - padding)) for padding in self.paddings]
        try:
            with held():
                self._extend(tables, ranges, context_len, length)
        except OutOfBlocksError:
            if not self.length:  # undo: the rows were empty before
                for table in tables:
                    table.free()
                self.clear()
                if not any(group.length for group in self.rows.groups.values()):
                    self.rows.free()
            raise
        self.blocks.pool.note_write(
            table.block_ids[place] for table, tokens in zip(tables, ranges) for place in table.places(*tokens)
        )

    def _extend(self, tables: list[BlockTable], ranges: list[tuple[int, int]], context_len: int, length: int) -> None:
        window = self.spec.window
        if context_len < self.length:
            if context_len == 0 and any(self.paddings):
                raise ValueError(
                    f"a layer starts with {length} tokens where another of its kind holds {self.length}, of which the "
                    f"first {self.paddings} of each row were padding and are not stored: pass rows without padding"
                )
            self._check_window(context_len or length)  # a first prefill attends only to its new K/V
        if length > self.length and window is not None and not self.record_past:
            self._drop_outside_window(tables, context_len)
            if context_len == 0 and length >= window and not (self.length or self.rows.borrows):
                # a first prefill attends only to its new K/V: tokens that will be outside the window are not stored
                for table, padding in zip(tables, self.paddings):
                    table.skip(max(0, self.spec.first_visible(length) - padding))
        if any(table.shared_blocks(*tokens) for table, tokens in zip(tables, ranges)):
            self.rows.keep_snapshots()
        if self.rows.manager.extend(self.number, tables, ranges) or self.rows.borrows:
            self._block_tables = None
        self.length = max(self.length, length)
        self.memory.note_peak()

    def _check_window(self, length: int) -> None:
        """Raises `ValueError` unless all tokens that the next query after `length` positions sees are still stored."""
        if self._given_back > self.spec.first_visible(length):
            raise ValueError(
                f"a layer looks {self.spec.window} tokens back from token {length}, of which the first "
                f"{self._given_back} were given back, as another layer of its kind holds {self.length} tokens: update "
                "all in each step"
            )

    @property
    def _given_back(self) -> int:
        """The logical position before which some row has freed blocks."""
        rows = zip(self.tables, self.paddings)
        return max((padding + table.first_token for table, padding in rows if table.first_token), default=0)

    def _drop_outside_window(self, tables: list[BlockTable], length: int) -> None:
        for table, padding in zip(tables, self.paddings):
            oldest = max(0, self.spec.first_visible(length) - padding)
            if oldest // table.block_size > table.num_dropped and table.block_ids:
                self.rows.keep_snapshots()
                table.drop_before(oldest)
                self._block_tables = None

    def _snapshot(self, length: int, query_len: int, device: torch.device | str) -> StepMetadata:
        tables, size = self.tables, self.blocks.block_size
        if self._block_tables is None:
            width = max((len(table.block_ids) for table in tables), default=0)
            rows = [table.block_ids + [0] * (width - len(table.block_ids)) for table in tables]
            ids = array("i", itertools.chain.from_iterable(rows))
            self._block_tables = _tensor(ids, torch.int32, len(tables), width)
        seq_lens, origins, slots = [], [], array("q")
        for table, padding in zip(tables, self.paddings):
            origin = padding + table.num_dropped * size
            end = max(0, length - origin)
            start = max(0, length - origin - query_len)
            if query_len == 1 and start < end:
                slots.append(table.block_ids[start // size] * size + start % size)
            elif query_len:
                slots.extend([-1] * (query_len - (end - start)) + table.slots(start, end))
            seq_lens.append(end)
            origins.append(origin)
        first = self.spec.first_visible(length - query_len)
        if self.record_past and not query_len:  # outside a step: everything still stored
            first = min(first, self._given_back)
        return StepMetadata.rectangle(
            self._block_tables.to(device),
            seq_lens,
            size,
            query_len=query_len,
            window=self.spec.window,
            slots=_tensor(slots, torch.long, len(tables), query_len).to(device),
            columns=range(first, length),
            origins=tuple(origins),
            counters=self.rows.counters,
        )

    def view(self, length: int, device: torch.device) -> StepMetadata:
        """Returns a step without queries over the first `length` logical positions."""
        view = self._view
        if view is None or view.columns is None or view.columns.stop != length or self.length != length:
            if length < self.length:
                self._check_window(length)
            view = self._view = self._snapshot(length, 0, device)
        return view

    def crop(self, length: int) -> None:
        """Forgets logical positions from `length` on, then tokens outside the window."""
        tables = self.tables
        for table, padding in zip(tables, self.paddings):
            table.truncate(max(0, length - padding))
        self.length = min(self.length, length)
        self.paddings = tuple(min(padding, length) for padding in self.paddings) if length else ()
        self._drop_outside_window(tables, self.length)
        self.forget_steps()


def _tensor(values: array[int], dtype: torch.dtype, *shape: int) -> Tensor:
    """Makes a tensor from an array's buffer, which is three times as fast as from a list."""
    return (torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype, device="cpu")).view(shape)


class CacheRows:
    """Rows of a batch, each with one block table per layer group; if it `borrows`, another owner's rows (`take`). Every
    layer asks for each operation on rows and counts it; the first layer to ask runs it for all."""

    def __init__(
        self, memory: PagedMemory, specs: Iterable[GroupSpec], counters: ReadCounters, borrows: bool = False
    ) -> None:
        self.memory, self.specs, self.counters, self.borrows = memory, tuple(specs), counters, borrows
        self.manager = memory.manager(self.specs)
        self.num_operations = 0
        self.held: list[SequenceBlocks] = []
        self.groups: weakref.WeakValueDictionary[GroupSpec, LayerGroup] = weakref.WeakValueDictionary()
        self._handles = memory.handles[id(self)] = Handles()

    def __del__(self) -> None:
        """Frees every block, now or later: a finalizer may run in any thread, under any lock, and must not wait."""
        if "_handles" in self.__dict__:
            del self.memory.handles[id(self)]
            if self.held and not self.borrows:
                self.memory.abandon(self.manager, self.held, self._handles)

    def remember(self, handle: PagedTensor) -> PagedTensor:
        """Tracks `handle`, to gather it before its blocks change, are freed or are left to other tables."""
        self._handles.add(handle)
        return handle

    def keep_snapshots(self) -> None:
        """Gathers all living handles, since their blocks are about to change."""
        self._handles.gather()

    def select(self, indices: Sequence[int]) -> None:
        """Makes row `i` what row `indices[i]` was, by permuting and forking tables, without copies. Does nothing to
        borrowed rows: their owner changes them (`PagedCache.take`). Raises `IndexError`."""
        old = self.held
        if self.borrows or not old or list(indices) == list(range(len(old))):
            return
        with held(), self.memory.lock:
            self.keep_snapshots()
            if missing := [i for i in indices if not -len(old) <= i < len(old)]:
                raise IndexError(f"rows {missing} are asked for, the cache holds rows 0 to {len(old) - 1}")
            indices = [range(len(old))[i] for i in indices]
            # a row that keeps its place keeps its blocks
            self.held = [old[i] if i == row else self.manager.fork(old[i]) for row, i in enumerate(indices)]
            for row, blocks in enumerate(old):
                if row >= len(indices) or indices[row] != row:
                    self.manager.free(blocks)
            for group in self.groups.values():
                group.paddings = tuple(group.paddings[i] for i in indices) if group.paddings else ()
                group.forget_steps()
            self.memory.note_peak()

    def crop(self, num_removed: int) -> None:
        """Forgets the last `num_removed` logical positions, then tokens outside the windows."""
        with held(), self.memory.lock:
            self.keep_snapshots()
            for group in self.groups.values():
                group.crop(max(0, group.length - num_removed))

    def free(self, keep_snapshots: bool = True) -> None:
        """Frees every block; with `keep_snapshots` first gathers the handles that are still alive."""
        with held(), self.memory.lock:
            try:
                if keep_snapshots:
                    self.keep_snapshots()
            finally:
                for blocks in () if self.borrows else self.held:
                    self.manager.end(blocks)
                self.held = []
                self._handles.clear()
                for group in self.groups.values():
                    group.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheRows:
        """Returns rows over the same blocks, to which copies of the groups attach themselves."""
        twin = CacheRows(self.memory, self.specs, copy.deepcopy(self.counters, memo), self.borrows)
        memo[id(self)] = twin
        twin.num_operations = self.num_operations
        with held(), self.memory.lock:
            twin.held = list(self.held) if self.borrows else [self.manager.fork(blocks) for blocks in self.held]
        for group in self.groups.values():
            group.forget_steps()  # layers that have not written this step yet must copy the blocks, now shared
        return twin

    _OWN = ("memory", "specs", "counters", "borrows", "num_operations")

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle, with the content of the tables' blocks, renumbered from 0."""
        state = {name: getattr(self, name) for name in self._OWN} | {"tables": [], "contents": []}
        with held(), self.memory.lock:
            for number, group in enumerate(self.manager.groups):
                tables = [blocks.tables[number] for blocks in self.held]
                ids = list(dict.fromkeys(block_id for table in tables for block_id in table.block_ids))
                numbers = {block_id: number for number, block_id in enumerate(ids)}
                rows = [([numbers[i] for i in t.block_ids], t.num_dropped, t.num_tokens) for t in tables]
                state["tables"].append(rows)
                layers = self.memory.group(group.spec).storage.layers.items() if ids else ()
                state["contents"].append({index: layer.at(ids) for index, layer in layers})
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*(state[name] for name in self._OWN[:4]))  # type: ignore[misc]
        self.num_operations = state["num_operations"]
        with held(), self.memory.lock:
            self.held = [self.manager.new() for _ in (state["tables"] or [[]])[0]]
            for number, (tables, contents) in enumerate(zip(state["tables"], state["contents"])):
                group = self.memory.group(self.specs[number])
                taken = group.take(1 + max((place for ids, _, _ in tables for place in ids), default=-1))
                for blocks, (places, num_dropped, num_tokens) in zip(self.held, tables):
                    table = blocks.tables[number]
                    table.block_ids = [taken[place] for place in places]
                    table.num_dropped, table.num_tokens = num_dropped, num_tokens
                    group.pool.acquire(table.block_ids)
                group.pool.release(taken)
                for index, found in contents.items():
                    keys, values = found.no_states(found.keys.device)
                    layer = group.layer(index, keys, values, num_layers=len(contents), num_begun=len(tables))
                    layer.put_blocks(taken, found)
