"""The rows of a cache, owned or borrowed: select, crop, free, copies and pickles. Keys, values and
layers are elsewhere."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ..interrupts import guarded
from ..step import ReadCounters
from .groups import GroupSpec
from .handles import Handles, PagedTensor
from .layer_group import LayerGroup
from .memory import PagedMemory
from .sequence_blocks import SequenceBlocks
from .swap import HostBlocks, HostLayer, host_rows, number_blocks, put_back


class CacheRows:
    """Rows of a batch, each with one block table per layer group. If `borrows`, they belong to
    another owner (`PagedCache.take`). Every layer requests and counts each operation on rows; the
    first request runs it for all layers."""

    def __init__(
        self,
        memory: PagedMemory,
        specs: Iterable[GroupSpec],
        counters: ReadCounters,
        borrows: bool = False,
    ) -> None:
        self.memory = memory
        self.specs = tuple(specs)
        self.counters = counters
        self.borrows = borrows
        self.manager = memory.manager(self.specs)
        self.num_operations = 0
        self.held: list[SequenceBlocks] = []
        self.groups: weakref.WeakValueDictionary[GroupSpec, LayerGroup] = (
            weakref.WeakValueDictionary()
        )
        self._handles = memory.handles[id(self)] = Handles()

    def __del__(self) -> None:
        """Frees every block, now or later: a finalizer may run in any thread and under any lock, so
        it must not wait."""
        if "_handles" in self.__dict__:
            del self.memory.handles[id(self)]
            if self.held and not self.borrows:
                self.memory.abandon(self.manager, self.held, self._handles)

    @property
    def is_only_holder(self) -> bool:
        """Whether no other rows hold blocks of the memory."""
        tables = zip(*(blocks.tables for blocks in self.held))
        num_used = self.memory.num_used
        num_held = 0
        for group in tables:
            block_ids = {block_id for table in group for block_id in table.block_ids}
            num_held += len(block_ids)
        return num_used <= num_held

    def track(self, handle: PagedTensor) -> PagedTensor:
        """Tracks `handle`, so that it is gathered before its blocks change or are freed."""
        self._handles.add(handle)
        return handle

    def gather_handles(self) -> None:
        """Gathers all living handles, since their blocks are about to change."""
        self._handles.gather()

    @guarded
    def select(self, indices: Sequence[int]) -> None:
        """Makes row `i` a copy of the former row `indices[i]` by permuting and forking tables; no
        blocks are copied. Leaves borrowed rows to their owner (`PagedCache.take`). Raises
        `IndexError`."""
        old = self.held
        if self.borrows or not old:
            return
        num_rows = len(old)
        numbers = range(num_rows)
        if list(indices) == list(numbers):
            return
        missing = [i for i in indices if not -num_rows <= i < num_rows]
        if missing:
            raise IndexError(
                f"there are no rows {missing}: the cache holds rows 0 to {len(old) - 1}"
            )
        with self.memory.changing():
            self.gather_handles()
            indices = [numbers[i] for i in indices]
            # a row that keeps its index keeps its blocks
            self.held = [
                old[i] if i == row else self.manager.fork(old[i]) for row, i in enumerate(indices)
            ]
            for row, blocks in enumerate(old):
                if row >= len(indices) or indices[row] != row:
                    self.manager.free(blocks)
            for group in self.groups.values():
                if group.paddings:
                    group.paddings = tuple(group.paddings[i] for i in indices)
                group.forget_steps()
            self.memory.note_peak()

    @guarded
    def crop(self, num_removed: int) -> None:
        """Removes the last `num_removed` logical positions, then tokens outside the windows. Raises
        `ValueError`, with nothing changed, if the new end lies in freed blocks."""
        groups = list(self.groups.values())
        lengths = [max(0, group.length - num_removed) for group in groups]
        for group, length in zip(groups, lengths):
            group.check_crop(length)
        with self.memory.changing():
            self.gather_handles()
            for group, length in zip(groups, lengths):
                group.crop(length)

    @guarded
    def free(self, gathers: bool = True) -> None:
        """Frees every block; with `gathers` first gathers the handles that are still
        alive."""
        with self.memory.changing():
            try:
                if gathers:
                    self.gather_handles()
            finally:
                if not self.borrows:
                    for blocks in self.held:
                        self.manager.end(blocks)
                self.held = []
                self._handles.clear()
                for group in self.groups.values():
                    group.clear()

    @guarded
    def __deepcopy__(self, memo: dict[int, Any]) -> CacheRows:
        """Returns rows over the same blocks. Copies of the groups attach themselves to them."""
        counters = copy.deepcopy(self.counters, memo)
        twin = CacheRows(self.memory, self.specs, counters, self.borrows)
        memo[id(self)] = twin
        twin.num_operations = self.num_operations
        with self.memory.changing():
            if self.borrows:
                twin.held = list(self.held)
            else:
                twin.held = [self.manager.fork(blocks) for blocks in self.held]
        for group in self.groups.values():
            # layers that have not yet written this step must copy the blocks, which are now shared
            group.forget_steps()
        return twin

    _FIELDS = ("memory", "specs", "counters", "borrows", "num_operations")

    @guarded
    def __getstate__(self) -> dict[str, Any]:
        """State for pickle, with the content of the tables' blocks, renumbered from 0."""
        state = {name: getattr(self, name) for name in self._FIELDS}
        state["groups"] = []
        with self.memory.changing():
            for number, group in enumerate(self.manager.groups):
                tables = [blocks.tables[number] for blocks in self.held]
                numbers = number_blocks(tables)
                rows = [
                    (host_rows(table, numbers), table.num_dropped, table.num_tokens)
                    for table in tables
                ]
                contents = {}
                if numbers:
                    layers = group.storage.layers.items()
                    contents = {index: layer.select(list(numbers)) for index, layer in layers}
                state["groups"].append((rows, contents))
        return state

    @guarded
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*(state[name] for name in self._FIELDS[:4]))  # type: ignore[misc]
        self.num_operations = state["num_operations"]
        with self.memory.changing():
            for number, (group, (rows, contents)) in enumerate(
                zip(self.manager.groups, state["groups"])
            ):
                if not self.held:
                    self.held = [self.manager.new() for _ in rows]
                num_blocks = 1 + max((row for ids, _, _ in rows for row in ids), default=-1)
                new_ids = group.take(num_blocks)
                host = HostBlocks()
                for index, content in contents.items():
                    host[index] = HostLayer(content, content.keys.device)
                put_back(group, host, dict(enumerate(new_ids)))
                for blocks, (ids, num_dropped, num_tokens) in zip(self.held, rows):
                    table = blocks.tables[number]
                    table.num_dropped, table.num_tokens = num_dropped, num_tokens
                    table.hold([new_ids[row] for row in ids])
                group.pool.release(new_ids)
