"""`GroupMemory`: the pool and the storage of one layer group, and how they grow within the limits
that `cache.memory` sets."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..interrupts import is_interrupt
from ..seams import Storage
from . import budget
from .block_pool import BlockTable, OutOfBlocksError
from .free_memory import commits_when_touched, free_bytes
from .groups import UNBOUNDED, GroupSpec
from .kv_blocks import KVBlocks

if TYPE_CHECKING:
    from .memory import PagedMemory

# Minimum number of blocks by which a pool of at least this size usually grows. It is small, so that
# freed blocks, whose memory is committed, are reused before new ones.
GROWTH_STEP = 16
KEPT_STATES = 16  # snapshots that a pool without a limit keeps, growing instead of evicting
# An engine's pool without a limit keeps up to this many cached blocks per block of its peak use,
# and grows instead of evicting them.
CACHED_RATIO = 2


def mirrored(move: Callable[..., Any]) -> Any:
    """Decorates a function that moves the content of a [`GroupMemory`]'s blocks, so that the
    memory's other processes (`PagedMemory.processes`) repeat each call. In a memory with other
    processes, only forwards and decorated functions move content (`tests/ranks/test_mirror.py`)."""

    @functools.wraps(move)
    def mirrored_move(group: GroupMemory, *arguments: Any) -> Any:
        result = move(group, *arguments)
        if (processes := group.memory.processes) is not None:
            processes.moved(mirrored_move, group, arguments, result)
        return result

    return mirrored_move


class GroupMemory:
    """The pool and the storage of one layer group. `BlockManager`s allocate blocks of the pool;
    this class grows it and moves the content of blocks."""

    def __init__(self, memory: PagedMemory, spec: GroupSpec) -> None:
        # weak, to avoid a cycle: the pool is freed with the memory's last user, not by the garbage
        # collector
        self.memory: PagedMemory = weakref.proxy(memory)
        states = spec.make_states()
        self.holds_states = states is not None  # if so, a block is a slot for one state
        self.block_size = UNBOUNDED if self.holds_states else memory.sizes.of(spec)
        weak_memory = self.memory
        self.storage: Storage = states or memory.make_storage(
            memory.config, spec, self.block_size, lambda: weak_memory.gather_handles()
        )
        self.pool = self.storage.pool
        self.spec = spec
        self._expected_bytes = 0  # of a block over all layers, estimated from the first layer
        self._is_short = False  # whether a layer lacks memory for some blocks of the pool
        # whether cached blocks are being evicted for a new layer, in which they have no content
        self._is_adding_layer = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, estimated until all are allocated; 0 if unknown."""
        return max(self._expected_bytes, self.storage.block_bytes)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all blocks of the pool, used or not."""
        block_bytes = self.storage.block_bytes if self._is_short else self.block_bytes
        pool_bytes = self.pool.num_blocks * block_bytes
        max_bytes = self.storage.max_bytes
        return pool_bytes if max_bytes is None else min(pool_bytes, max_bytes)

    @property
    def occupied_bytes(self) -> int:
        """Bytes of memory that the group occupies: the bytes of the pool's blocks or, unless the
        storage is elastic, the bytes of the allocated tensors if these take more."""
        if self.storage.is_elastic:
            return self.pool_bytes
        return max(self.pool_bytes, self.storage.nbytes)

    @property
    def is_sized(self) -> bool:
        """Whether the bytes of a block are known, or no budget needs them."""
        if budget.limit(self.memory) is None or self.holds_states:
            return True
        return self.block_bytes > 0

    @property
    def is_incomplete(self) -> bool:
        """Whether the layers hold only part of a cached block's content."""
        return self._is_adding_layer or not self.storage.layers

    def has_free(self, num_blocks: int) -> bool:
        """Whether `num_blocks` blocks are free and no limit has to be checked: `ensure_free` would
        do nothing."""
        memory = self.memory
        pool = self.pool
        if memory.config.num_blocks is not None:  # a limit on all groups together
            return False
        if self._is_short or pool.needs_recount or memory.is_recovery_due:
            return False
        return num_blocks <= pool.num_free

    def ensure_free(self, num_blocks: int) -> None:
        """Makes `num_blocks` blocks available, or raises `OutOfBlocksError`. With a limit, the pool
        grows up to it before evicting cached blocks, unless tensors would have to be reallocated.
        Without a limit, it evicts first, but keeps `KEPT_STATES` snapshots of states and, in an
        engine (`keeps_cached`) with spare memory, `CACHED_RATIO` cached blocks per block of peak
        use. Under `PagedConfig.num_blocks`, it evicts blocks of this group before blocks of other
        groups."""
        if self.has_free(num_blocks):
            return
        memory = self.memory
        pool = self.pool
        memory.free_abandoned()
        if self._is_short:  # the failed call has since freed its blocks
            self._is_short = False
            pool.shrink()
            if not pool.num_blocks:
                self.storage.layers.clear()
        total = memory.config.num_blocks
        if total is not None and self.spec.is_counted:
            num_used = memory.num_used
            if num_blocks > total - num_used:
                raise self._over_limit_error(num_blocks, total - num_used, total)
            excess = num_used + memory.num_cached + num_blocks - total
            for group in (self, *memory.groups.values()):
                excess -= group.pool.evict(excess)
        num_missing = num_blocks - pool.num_free
        if num_missing > 0:
            num_missing -= self._num_evictable(num_missing)
        if num_missing > 0:
            self._grow(num_blocks, num_missing)

    def take(self, num_blocks: int, after: Sequence[int] = ()) -> list[int]:
        """Allocates `num_blocks` blocks with refcount 1, and returns their ids. `after`: as in
        `BlockPool.allocate`. Raises `OutOfBlocksError`."""
        self.ensure_free(num_blocks)
        return self.pool.allocate(num_blocks, after)

    @property
    def _has_limit(self) -> bool:
        memory = self.memory
        config = memory.config
        has_option = config.num_blocks is not None or config.memory_fraction is not None
        return has_option or budget.limit(memory) is not None

    def _num_evictable(self, num_missing: int) -> int:
        """Returns how many cached blocks may be evicted before the pool grows."""
        pool = self.pool
        num_cached = pool.num_cached
        has_limit = self._has_limit
        has_memory = pool.num_blocks + num_missing <= self.storage.num_allocated_blocks
        if self.holds_states:
            return 0 if has_limit or num_cached < KEPT_STATES else num_cached
        if has_limit:
            return 0 if has_memory or self.storage.is_elastic else num_cached
        if self.memory.keeps_cached and has_memory:
            cached_bytes = num_cached * self.block_bytes
            is_allocated = not (cached_bytes and self.storage.is_elastic)
            # cached blocks may take half of the memory that would be free without them
            if is_allocated or cached_bytes <= free_bytes(torch.device("cpu")):
                return max(0, num_cached - CACHED_RATIO * pool.peak_used)
        return num_cached

    def _growth_step(self, growth_limit: int) -> int:
        """Returns the minimum number of blocks to add, if at most `growth_limit` may be added."""
        pool = self.pool
        step = self.storage.growth_step
        if step and self.storage.is_elastic and not self._has_limit:
            # only ids are added: blocks take no memory before they are written to
            return step
        if self.holds_states or not self.is_sized:
            return 0
        if growth_limit < sys.maxsize and len(self.memory.groups) > 1:
            return 0  # leave the rest of the limit to other groups
        return min(GROWTH_STEP, pool.num_blocks)

    def _grow(self, num_blocks: int, num_missing: int) -> None:
        """Adds `num_missing` blocks to the pool, or more, to grow less often. At a limit, adds
        fewer if evicting cached blocks can make up for them. Raises `OutOfBlocksError` unless
        `num_blocks` blocks are then free or cached."""
        memory = self.memory
        pool = self.pool
        storage = self.storage
        growth_limit = memory.growth_limit(self)
        step = self._growth_step(growth_limit)
        num_spare_blocks = storage.num_allocated_blocks - pool.num_blocks
        if num_missing <= num_spare_blocks:
            step = min(step, num_spare_blocks)
        num_added = max(num_missing, step)
        num_available = pool.num_available
        is_over_limit = num_blocks > num_available + growth_limit
        if is_over_limit and memory.release_unused(self):
            growth_limit = memory.growth_limit(self)
        if num_added > growth_limit:
            num_added = min(num_missing, growth_limit)
        if num_blocks > num_available + num_added:
            raise self._over_limit_error(num_blocks, num_available + growth_limit)
        if not num_added:
            return
        num_charged = num_added if storage.is_elastic else max(0, num_added - num_spare_blocks)
        if not budget.charge(memory, num_charged * self.block_bytes):
            # another thread has since used that part of the budget
            raise self._over_limit_error(num_blocks, num_available)
        try:
            uncharged_bytes = budget.num_uncharged_bytes()
            max_added = growth_limit
            if uncharged_bytes is not None:
                num_affordable = uncharged_bytes // max(1, self.block_bytes)
                max_added = min(growth_limit, num_added + num_affordable)
            num_blocks = pool.num_blocks + num_added
            max_blocks = pool.num_blocks + max_added
            self._allocate(f"{num_added} more blocks", storage.grow, num_blocks, max_blocks)
            pool.grow(num_added)
        finally:
            memory.update_charge()

    def _over_limit_error(
        self, num_needed: int, num_available: int, total: int | None = None
    ) -> OutOfBlocksError:
        """Returns the error of a call that needs more blocks than are available. `total`:
        `PagedConfig.num_blocks`, if that is the limit; `None` if the limit is in bytes."""
        blocks = "slots for states" if self.holds_states else f"blocks of {self.block_size} tokens"
        message = f"needs {num_needed} {blocks}, but only {num_available}"
        option = "`num_blocks`"
        if total is None:
            if budget.limit(self.memory) is not None:
                return OutOfBlocksError(f"{message} are available: {_budget_text()}")
            option = f"`memory_fraction` ({self.memory.config.memory_fraction})"
            total = num_available + self.pool.num_used
        return OutOfBlocksError(
            f"{message} of {total} are free: raise {option} in `cache_config`, or lower the batch"
            " size, the prompt length or `max_new_tokens`"
        )

    def _allocate(self, needed_text: str, allocate: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `allocate`, a method of the storage, and returns its result. Raises
        `OutOfBlocksError` in place of `MemoryError` and torch's `RuntimeError`. `needed_text`: the
        requested blocks, for the message."""
        try:
            return allocate(*arguments)
        except (MemoryError, RuntimeError) as error:  # torch raises `RuntimeError`
            if is_interrupt(error):
                raise
            raise OutOfBlocksError(
                f"needs {needed_text} of {self.block_size} tokens, but memory ran out: free memory,"
                f" or limit the pool by `num_blocks` ({self.memory.config.num_blocks}) or"
                f" `memory_fraction` ({self.memory.config.memory_fraction}) in `cache_config`, or"
                f" in an engine's `PagedConfig` ({error})"
            ) from error

    @mirrored
    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies block `source` to block `target` in every layer, for each pair, reading all
        sources before writing, and counts the copies."""
        self.storage.copy_blocks(copies)
        self.memory.num_copied += len(copies)

    def layer(
        self,
        index: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        num_layers: int,
        num_new_tables: int | None,
    ) -> KVBlocks:
        """Returns the blocks of layer `index` of `num_layers` for K/V like `keys` and `values`
        `(batch, heads, n, dim)`. If a table has content in blocks that do not fit these K/V,
        converts them. If no table has, or if the layer has no blocks, evicts all cached blocks and
        allocates the layer. `num_new_tables`: from `LayerGroup.num_new_tables`; `None`: a table has
        content. Raises `ValueError` if stored K/V have other heads, dims or device, and
        `OutOfBlocksError` if an allocation exceeds memory or the budget."""
        layer: KVBlocks | None = self.storage.layers.get(index)
        if layer is not None:
            if layer.fits(keys, values):
                return layer
            tables_with_blocks = (bool(table.block_ids) for table in self.live_tables(self.memory))
            if num_new_tables is None or sum(tables_with_blocks) > num_new_tables:
                return self._promote(layer, index, keys, values)
        self._is_adding_layer = True
        try:
            # cached blocks would have no content in the new layer
            self.pool.evict(self.pool.num_cached)
        finally:
            self._is_adding_layer = False
        expected_bytes = num_layers * self.storage.outline(keys, values).block_bytes
        self._expected_bytes, self._is_short = expected_bytes, False
        is_charged = budget.charge(self.memory)
        self._is_short = True
        if not is_charged:
            raise OutOfBlocksError(
                f"needs {self.pool.num_blocks:,} blocks of {self.block_size} tokens"
                f" ({self.block_bytes:,} bytes each): {_budget_text()}"
            )
        if not commits_when_touched(keys.device):
            budget.release_idle(self.memory)
        layer = self._allocate(
            f"{self.pool.num_blocks} blocks", self.storage.make, index, keys, values
        )
        self._is_short = False
        self.memory.update_charge()
        return layer

    def _promote(
        self, layer: KVBlocks, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> KVBlocks:
        """Converts a layer to dtypes that also hold these K/V, and returns its blocks. Raises the
        errors of `layer`."""
        memory = self.memory
        new_block_bytes = self.storage.outline(*layer.widened_states(keys, values)).block_bytes
        num_bytes = self.pool.num_blocks * max(0, new_block_bytes - layer.block_bytes)
        if num_bytes and not budget.charge(memory, num_bytes):
            raise OutOfBlocksError(
                f"needs {num_bytes:,} bytes for keys and values of a wider dtype: {_budget_text()}"
            )
        try:
            return self._allocate(
                f"{self.pool.num_blocks} blocks", self.storage.promote, index, keys, values
            )
        finally:
            memory.update_charge()

    @mirrored
    def release(self) -> None:
        """Frees all memory and drops cached blocks; keeps `block_bytes` as an estimate. No table
        may hold a block."""
        self.pool.shrink()
        self._expected_bytes, self._is_short = self.block_bytes, False
        self.storage.clear()

    def live_tables(self, memory: PagedMemory) -> Iterable[BlockTable]:
        """Yields the group's tables in all live sequences, and in the rows of garbage-collected
        caches that are not freed yet. Garbage collection of a cycle may have cleared the weak
        references to these rows, and the group's weak reference to `memory`."""
        for manager in memory.managers.values():
            if self in manager.groups:
                live = [*manager.live]  # first: garbage collection may abandon some of them now
                abandoned = [
                    rows for rows, _ in list(memory.abandoned) if rows[0].manager is manager
                ]
                yield from manager.tables(manager.groups.index(self), live, *abandoned)


def _budget_text() -> str:
    return (
        f"`hf_paged.budget` allows {budget.limit() or 0:,} bytes for all models together. Raise it,"
        " end other models' requests, or lower the batch size, the prompt length or"
        " `max_new_tokens`"
    )
