"""All layer groups' pools and storages under one budget: what hangs on a model, or belongs to one `PagedCache`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from ..config import PagedConfig
from .block_pool import BlockPool, OutOfBlocksError
from .block_table import BlockTable, num_blocks_needed
from .storage import LayerBlocks, Storage

# Fresh block ids are made a few at a time, so that freed blocks, whose pages are warm, are used again first.
GROWTH_STEP = 16


@dataclass(frozen=True)
class MemoryStats:
    """
    What a paged memory holds. "Peak" is since it was made or since the last reset.

    Args:
        block_size (`int`): Tokens in a block.
        used_blocks, peak_blocks (`int`): Blocks in use, over all layer groups.
        used_bytes, peak_bytes (`int`): Bytes of those blocks, over all layers.
        held_bytes (`int`): Bytes of every block that was ever touched and not given back by `free`.
        waste (`float`): Share of the slots that were allocated but unused at the peak.
        copied_blocks (`int`): Blocks copied by copy-on-write.
    """

    block_size: int = 0
    used_blocks: int = 0
    peak_blocks: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0
    held_bytes: int = 0
    waste: float = 0.0
    copied_blocks: int = 0


class GroupMemory:
    """The pool and the storage of one layer group, with the tables that are alive in it."""

    def __init__(self, memory: PagedMemory, block_size: int) -> None:
        self.memory = memory
        self.block_size = block_size
        self.pool = BlockPool()
        self.storage = Storage(block_size)
        self.table_sets: weakref.WeakSet[Any] = weakref.WeakSet()

    def make_room(self, tables: Sequence[BlockTable], num_tokens: Sequence[int]) -> int:
        """
        Grows the pool so that appending `num_tokens[i]` to each table succeeds, and returns how many blocks that will
        take. Raises `OutOfBlocksError`.
        """
        needed = num_blocks_needed(tables, num_tokens)
        if needed:
            self.reserve(needed)
        return needed

    def take(self, num_blocks: int) -> list[int]:
        """`num_blocks` new blocks with refcount 1. Raises `OutOfBlocksError`."""
        self.reserve(num_blocks)
        return self.pool.allocate(num_blocks)

    def expect(self, num_blocks: int, share: float) -> None:
        """Expect up to `num_blocks` blocks; `share` is that of the memory available which a layer may set aside."""
        with self.memory.lock:
            self.storage.reserve(num_blocks, share)
            if not self.pool.num_used:
                self.storage.drop_smaller(num_blocks)

    def reserve(self, needed: int) -> None:
        """Sees to it that `needed` blocks are free. Raises `OutOfBlocksError`."""
        self.memory.check_num_blocks(needed)
        missing = needed - self.pool.num_free
        if missing > 0:
            added = max(missing, min(GROWTH_STEP, self.pool.num_blocks))
            self.memory.check_bytes(self, added, self.storage.block_bytes)
            self.pool.grow(added)
            self.storage.grow(self.pool.num_blocks)

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> LayerBlocks:
        """The blocks of layer `index`, made on first use. Raises `OutOfBlocksError` if `memory_fraction` forbids it."""
        layer = self.storage.find(index, keys, values)
        if layer is None:
            block_bytes = self.block_size * sum(x.shape[1] * x.shape[3] * x.element_size() for x in (keys, values))
            self.memory.check_bytes(self, 0, self.storage.block_bytes + block_bytes, keys.device)
            layer = self.storage.make(index, keys, values)
        return layer

    def live_tables(self) -> Iterable[BlockTable]:
        """Every table of every cache that is alive."""
        for table_set in list(self.table_sets):
            yield from table_set.tables


class PagedMemory:
    """
    Pools, storages and the budget of one model or one standalone cache.

    `lock` guards allocation, growth and writes, so that several caches (calls in several threads, deep copies of a
    prompt's cache) may share one memory. Readers need no lock: growing a tensor leaves the old one as it was.
    """

    def __init__(self, config: PagedConfig) -> None:
        self.config = config
        self.lock = threading.RLock()
        self.groups: dict[Hashable, GroupMemory] = {}
        self._limit_bytes: int | None = None
        self._copied_blocks = self._peak_blocks = 0
        self._peak_used: dict[Hashable, int] = {}
        self._waste = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedMemory:
        return self  # blocks are shared by refcount; a copied cache forks its tables

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config}  # each layer group pickles the blocks it holds

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["config"])  # type: ignore[misc]

    def group(self, key: Hashable) -> GroupMemory:
        """The pool and storage of the layer group `key`."""
        with self.lock:
            if key not in self.groups:
                self.groups[key] = GroupMemory(self, self.config.block_size)
            return self.groups[key]

    @property
    def num_used(self) -> int:
        """Blocks in use over all groups."""
        return sum(group.pool.num_used for group in self.groups.values())

    def check_num_blocks(self, needed: int) -> None:
        """Raises `OutOfBlocksError` unless the budget has `needed` more blocks."""
        total = self.config.num_blocks
        if total is not None and needed > total - self.num_used:
            raise OutOfBlocksError(
                f"needs {needed} blocks of {self.config.block_size} tokens, {total - self.num_used} of {total} are "
                "free: raise `num_blocks` in `cache_config`, or lower the batch size, the prompt length or "
                "`max_new_tokens`"
            )

    def check_bytes(self, group: GroupMemory, added: int, block_bytes: int, device: torch.device | None = None) -> None:
        """Raises `OutOfBlocksError` unless `memory_fraction` allows `added` more blocks of `block_bytes` in `group`."""
        fraction = self.config.memory_fraction
        if fraction is None or not block_bytes:
            return
        held = self._held_bytes()
        if self._limit_bytes is None:
            device = device or next(iter(group.storage.layers.values())).keys.device
            self._limit_bytes = int(fraction * (free_bytes(device) + held))
        others = held - group.pool.num_blocks * group.storage.block_bytes
        needed = group.pool.num_blocks + added
        allowed = max(0, self._limit_bytes - others) // block_bytes
        if needed > allowed:
            free = max(0, allowed - group.pool.num_used)
            raise OutOfBlocksError(
                f"needs {needed - group.pool.num_used} blocks of {self.config.block_size} tokens ({block_bytes} bytes "
                f"each), {free} of {allowed} are free: raise `memory_fraction` ({fraction}) in `cache_config`, or "
                f"lower the batch size, the prompt length or `max_new_tokens`"
            )

    def copied(self, num_blocks: int) -> None:
        """Counts blocks copied by copy-on-write."""
        self._copied_blocks += num_blocks

    def _held_bytes(self) -> int:
        return sum(group.pool.num_blocks * group.storage.block_bytes for group in self.groups.values())

    def note_peak(self) -> None:
        """Records the blocks in use if they are the most so far."""
        used = self.num_used
        if used < self._peak_blocks or not used:
            return
        self._peak_blocks = used
        self._peak_used = {key: group.pool.num_used for key, group in self.groups.items()}
        slots = unused = 0
        for group in self.groups.values():
            tails = {t.block_ids[-1]: t.num_unused_slots for t in group.live_tables() if t.block_ids}
            slots += group.pool.num_used * group.block_size
            unused += sum(tails.values())
        self._waste = unused / slots

    def reset_peak(self) -> None:
        """Starts counting the peak anew."""
        self._peak_blocks, self._waste, self._copied_blocks = 0, 0.0, 0
        self._peak_used = {}
        self.note_peak()

    def stats(self) -> MemoryStats:
        """The figures of now."""
        with self.lock:
            groups = self.groups.values()
            return MemoryStats(
                block_size=self.config.block_size,
                used_blocks=self.num_used,
                peak_blocks=self._peak_blocks,
                used_bytes=sum(group.pool.num_used * group.storage.block_bytes for group in groups),
                peak_bytes=sum(n * self.groups[key].storage.block_bytes for key, n in self._peak_used.items()),
                held_bytes=self._held_bytes(),
                waste=self._waste,
                copied_blocks=self._copied_blocks,
            )

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every pool agrees with the tables that are alive."""
        with self.lock:
            for group in self.groups.values():
                group.pool.check_integrity([table.block_ids for table in group.live_tables()])
            total = self.config.num_blocks
            if total is not None and self.num_used > total:
                raise AssertionError(f"{self.num_used} blocks in use, the budget is {total}")


def free_bytes(device: torch.device) -> int:
    """Bytes of memory free on `device`."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    return int(getattr(torch, device.type).mem_get_info(device)[0])
