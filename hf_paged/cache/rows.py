"""The rows of a cache, owned or borrowed: select, crop, free, copy and pickle. `cache.layers` calls
these operations, and `cache.kv_blocks` stores the keys and values."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ..interrupts import guarded
from ..step import ReadCounters
from .groups import GroupSpec
from .handles import Handles
from .layer_group import LayerGroup
from .memory import PagedMemory
from .sequence_blocks import SequenceBlocks
from .swap import copy_out, host_rows, number_blocks, put_back


class CacheRows:
    """The sequences of a batch, one per row, each with one block table per layer group. Borrowed
    sequences belong to the caller of `PagedCache.take`, who selects and frees them. Every layer of
    a cache requests and counts each operation on rows; the first request runs the operation for all
    layers and increments `num_operations`."""

    def __init__(
        self,
        memory: PagedMemory,
        specs: Iterable[GroupSpec],
        counters: ReadCounters,
        is_borrowed: bool = False,
        sequences: Iterable[SequenceBlocks] = (),
        num_operations: int = 0,
    ) -> None:
        self.memory = memory
        self.specs = tuple(specs)
        self.counters = counters
        self.is_borrowed = is_borrowed
        self.manager = memory.manager(self.specs)
        self.num_operations = num_operations
        self.num_rows_before = 0  # the number of rows before the last operation
        self.sequences = list(sequences)
        # weak, since the groups refer to their rows: a cycle would delay `__del__`
        self.groups = weakref.WeakValueDictionary[GroupSpec, LayerGroup]()
        # live handles are gathered before their blocks change or are freed
        self.handles = memory.handles[id(self)] = Handles()

    def __del__(self) -> None:
        """Frees the sequences, unless they are borrowed, without waiting for the memory's lock
        (`PagedMemory.abandon`), since a finalizer may run in any thread and under any lock."""
        if "handles" in self.__dict__:  # otherwise `__init__` has raised
            del self.memory.handles[id(self)]
            if self.sequences and not self.is_borrowed:
                self.memory.abandon(self.sequences, self.handles)

    @property
    def is_only_holder(self) -> bool:
        """Whether these rows hold all used blocks of the memory, so that no one else can free
        blocks."""
        tables_by_group = zip(*(sequence.tables for sequence in self.sequences))
        num_used = self.memory.num_used
        return num_used <= sum(map(len, map(number_blocks, tables_by_group)))

    @guarded
    def select(self, indices: Sequence[int]) -> None:
        """Makes row `i` a copy of the former row `indices[i]`, counted from the end if negative, by
        permuting and forking tables; no blocks are copied. Does nothing without rows, or to
        borrowed rows, which their owner selects. Raises `IndexError`, with nothing changed, for
        missing rows."""
        old_rows = self.sequences
        if self.is_borrowed or not old_rows:
            return
        num_rows = len(old_rows)
        all_rows = range(num_rows)
        if list(indices) == list(all_rows):
            return
        out_of_range = [index for index in indices if not -num_rows <= index < num_rows]
        if out_of_range:
            raise IndexError(
                f"there are no rows {out_of_range}: the cache holds rows 0 to {num_rows - 1}"
            )
        with self.memory.changing():
            self.handles.gather()
            sources = [all_rows[index] for index in indices]
            # a row that keeps its index keeps its blocks
            self.sequences = [
                old_rows[source] if source == row else old_rows[source].fork()
                for row, source in enumerate(sources)
            ]
            for row, sequence in enumerate(old_rows):
                if row >= len(sources) or sources[row] != row:
                    sequence.free()
            for group in self.groups.values():
                paddings = group.paddings
                if paddings:
                    paddings = tuple(paddings[source] for source in sources)
                group.set_rows(paddings, group.length)
            self.memory.note_progress()

    @guarded
    def crop(self, num_removed: int) -> None:
        """Removes the last `num_removed` logical positions from every table, even if the rows are
        borrowed, then frees the blocks outside the windows. Raises `ValueError`, with nothing
        changed, if the block at the new end has left a window and been freed."""
        groups = list(self.groups.values())
        lengths = [max(0, group.length - num_removed) for group in groups]
        for group, length in zip(groups, lengths):
            group.check_crop(length)
        with self.memory.changing():
            self.handles.gather()
            for group, length in zip(groups, lengths):
                group.crop(length)

    @guarded
    def free(self, should_gather: bool = True) -> None:
        """Drops all rows, and frees their blocks unless they are borrowed. First gathers the
        handles that are still alive; without `should_gather`, they must not be read any more. If
        gathering raises, the rows are dropped nevertheless."""
        with self.memory.changing():
            try:
                if should_gather:
                    self.handles.gather()
            finally:
                if not self.is_borrowed:
                    for sequence in self.sequences:
                        sequence.end()
                self.sequences = []
                self.handles.clear()
                for group in self.groups.values():
                    group.clear()

    @guarded
    def __deepcopy__(self, memo: dict[int, Any]) -> CacheRows:
        """Returns rows over the same blocks: forks or, if borrowed, the same sequences. Deep copies
        of the groups then attach themselves to the copied rows."""
        counters = copy.deepcopy(self.counters, memo)
        with self.memory.changing():
            sequences = self.sequences
            if not self.is_borrowed:
                sequences = [sequence.fork() for sequence in sequences]
            copied_rows = CacheRows(
                self.memory, self.specs, counters, self.is_borrowed, sequences, self.num_operations
            )
        memo[id(self)] = copied_rows
        for group in self.groups.values():
            # the blocks are now shared: layers that still write in this step must first copy them
            group.set_rows(group.paddings, group.length)
        return copied_rows

    @guarded
    def __getstate__(self) -> dict[str, Any]:
        """State for pickle. `groups` has a pair for each layer group: the table of every row, as
        `(block numbers, number of dropped blocks, number of tokens)`, and host copies of the
        blocks. A block's number is its index in the copies."""
        arguments = ("memory", "specs", "counters", "is_borrowed", "num_operations")
        state = {name: getattr(self, name) for name in arguments}
        state["groups"] = []
        with self.memory.changing():
            for group_index, group in enumerate(self.manager.groups):
                tables = [sequence.tables[group_index] for sequence in self.sequences]
                block_numbers = number_blocks(tables)
                rows = [
                    (host_rows(table, block_numbers), table.num_dropped, table.num_tokens)
                    for table in tables
                ]
                state["groups"].append((rows, copy_out(group, list(block_numbers))))
        return state

    @guarded
    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = state.pop("groups")
        self.__init__(**state)  # type: ignore[misc]
        with self.memory.changing():
            for group_index, (group, (rows, contents)) in enumerate(
                zip(self.manager.groups, groups)
            ):
                if not self.sequences:
                    self.sequences = [self.manager.new() for _ in rows]
                numbers = (number for block_numbers, _, _ in rows for number in block_numbers)
                last_number = max(numbers, default=-1)
                new_ids = group.take(last_number + 1)
                put_back(group, contents, dict(enumerate(new_ids)))
                for sequence, (block_numbers, num_dropped, num_tokens) in zip(self.sequences, rows):
                    block_ids = [new_ids[number] for number in block_numbers]
                    sequence.tables[group_index].attach(block_ids, num_dropped, num_tokens)
                group.pool.release(new_ids)  # the tables hold them now
