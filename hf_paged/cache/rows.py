"""The rows of a cache: what each holds, and the operations on them that layers ask for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..interrupts import held
from ..step import ReadCounters
from .block_manager import SequenceBlocks
from .groups import GroupSpec
from .handles import PagedTensor
from .memory import PagedMemory

if TYPE_CHECKING:
    from .layer_group import LayerGroup


class CacheRows:
    """
    Rows of a batch, each of which holds a block table a layer group.

    Operations on rows are asked for by every layer in turn and done once: each layer counts its operations, and the
    first does what has not been done yet.

    Args:
        memory ([`PagedMemory`]): Where blocks come from.
        specs (`Iterable[GroupSpec]`): Of the layer groups.
        counters ([`ReadCounters`]): Of the cache.
        borrows (`bool`): The rows are others' (`take`), with room for each step before it begins.
    """

    def __init__(
        self, memory: PagedMemory, specs: Iterable[GroupSpec], counters: ReadCounters, borrows: bool = False
    ) -> None:
        self.memory, self.specs, self.counters, self.borrows = memory, tuple(specs), counters, borrows
        self.manager = memory.manager(self.specs)
        self.num_operations = 0
        self.held: list[SequenceBlocks] = []
        self.groups: weakref.WeakValueDictionary[GroupSpec, LayerGroup] = weakref.WeakValueDictionary()
        self._snapshots: list[weakref.ref[PagedTensor]] = []

    def __del__(self) -> None:
        if getattr(self, "held", None) and not self.borrows:
            try:
                self.free()
            except BaseException:  # an interrupt before signals were held, which Python drops here
                self.free()
                raise

    def open(self, num_rows: int) -> None:
        """Begins with empty rows."""
        self.held = [self.manager.new() for _ in range(num_rows)]

    def take(self, rows: list[SequenceBlocks], paddings: tuple[int, ...], length: int | None) -> None:
        """
        Holds these rows from now on, or borrows them.

        Args:
            paddings (`tuple[int, ...]`): Leading logical positions of each row that are padding and not stored.
            length (`int`, *optional*): Logical positions of every row, padding included; as many as there were if left
                out.
        """
        with held(), self.memory.lock:
            if not self.borrows:
                self.free()
            self.held = rows
            for group in self.groups.values():
                group.paddings, group.length = paddings, group.length if length is None else length
                group.forget_steps()

    # -- handles that are alive -----------------------------------------------------------------------------------

    def remember(self, handle: PagedTensor) -> PagedTensor:
        """Keeps what `handle` shows true: it is gathered before its blocks are given back, or left to other tables."""
        if len(self._snapshots) > 64:
            self._snapshots = [ref for ref in self._snapshots if ref() is not None]
        self._snapshots.append(weakref.ref(handle))
        return handle

    def keep_snapshots(self) -> None:
        """Gathers what handles show: their blocks are about to change."""
        for ref in self._snapshots:
            if (handle := ref()) is not None:
                handle.dense()
        self._snapshots.clear()

    # -- operations -----------------------------------------------------------------------------------------------

    def select(self, indices: Sequence[int]) -> None:
        """Row `i` becomes what row `indices[i]` was: tables are permuted and forked, nothing is copied."""
        old = self.held
        if not old or list(indices) == list(range(len(old))):
            return
        with held(), self.memory.lock:
            self.keep_snapshots()
            if missing := [i for i in indices if not -len(old) <= i < len(old)]:
                raise IndexError(f"rows {missing} are asked for, the cache holds rows 0 to {len(old) - 1}")
            indices = [range(len(old))[i] for i in indices]
            # a row that stays where it is keeps what it holds
            self.held = [old[i] if i == row else self.manager.fork(old[i]) for row, i in enumerate(indices)]
            for row, blocks in enumerate(old):
                if row >= len(indices) or indices[row] != row:
                    self.manager.free(blocks)
            for group in self.groups.values():
                group.paddings = tuple(group.paddings[i] for i in indices) if group.paddings else ()
                group.forget_steps()
            self.memory.note_peak()

    def crop(self, num_removed: int) -> None:
        """Forgets the last `num_removed` logical positions, and what is outside the windows then."""
        with held(), self.memory.lock:
            self.keep_snapshots()
            for group in self.groups.values():
                group.crop(max(0, group.length - num_removed))

    def free(self, keep_snapshots: bool = True) -> None:
        """Forgets everything and gives every block back; handles still alive are gathered first if `keep_snapshots`."""
        with held(), self.memory.lock:
            try:
                if keep_snapshots:
                    self.keep_snapshots()
            finally:
                for blocks in () if self.borrows else self.held:
                    self.manager.free(blocks)
                self.held = []
                self._snapshots.clear()
                for group in self.groups.values():
                    group.clear()

    # -- copies and pickles -----------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheRows:
        """Second rows over the same blocks, with groups of their own."""
        twin = CacheRows(self.memory, self.specs, memo.setdefault(id(self.counters), ReadCounters()), self.borrows)
        memo[id(self)] = twin
        twin.num_operations = self.num_operations
        with held(), self.memory.lock:
            twin.held = list(self.held) if self.borrows else [self.manager.fork(blocks) for blocks in self.held]
        for group in self.groups.values():
            memo[id(group)] = group.twin(twin)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """With the blocks that the tables hold, renumbered from 0."""
        names = ("memory", "specs", "counters", "borrows", "num_operations")
        state = {name: getattr(self, name) for name in names}
        state["tables"], state["contents"] = [], []
        for number, group in enumerate(self.manager.groups):
            tables = [blocks.tables[number] for blocks in self.held]
            ids = list(dict.fromkeys(block_id for table in tables for block_id in table.block_ids))
            numbers = {block_id: number for number, block_id in enumerate(ids)}
            state["tables"].append([([numbers[i] for i in t.block_ids], t.num_dropped, t.num_tokens) for t in tables])
            layers = self.memory.group(group.spec).storage.layers.items() if ids else ()
            state["contents"].append(
                {
                    index: tuple(x[ids].to(dtype) for x, dtype in zip((layer.keys, layer.values), layer.dtypes))
                    for index, layer in layers
                }
            )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = ("memory", "specs", "counters", "borrows")
        self.__init__(*(state[name] for name in names))  # type: ignore[misc]
        self.num_operations = state["num_operations"]
        with held(), self.memory.lock:
            self.open(len(state["tables"][0]) if state["tables"] else 0)
            for number, (tables, contents) in enumerate(zip(state["tables"], state["contents"])):
                group = self.memory.group(self.specs[number])
                taken = group.take(1 + max((place for ids, _, _ in tables for place in ids), default=-1))
                for blocks, (places, num_dropped, num_tokens) in zip(self.held, tables):
                    table = blocks.tables[number]
                    table.block_ids = [taken[place] for place in places]
                    table.num_dropped, table.num_tokens = num_dropped, num_tokens
                    group.pool.acquire(table.block_ids)
                group.pool.release(taken)
                for index, (keys, values) in contents.items():
                    layer = group.layer(index, keys, values, num_layers=len(contents), num_begun=len(tables))
                    layer.keys[taken], layer.values[taken] = keys.to(layer.keys), values.to(layer.values)
