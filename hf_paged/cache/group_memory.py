"""`GroupMemory`: the pool and the storage of one layer group, and how they grow within the limits
of their memory. The limits themselves are in `cache.memory`."""

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
from .block_pool import BlockPool, BlockTable, OutOfBlocksError
from .free_memory import commits_when_touched, free_bytes
from .groups import UNBOUNDED, GroupSpec, StateSpec
from .kv_blocks import KVBlocks
from .states import StateStorage

if TYPE_CHECKING:
    from .memory import PagedMemory

# Block ids are added a few at a time, so that freed blocks, whose pages are warm, are reused first.
GROWTH_STEP = 16
KEPT_STATES = 16  # a pool without a limit grows, rather than evict, up to this many snapshots
# An engine's pool without a limit keeps this many cached blocks for each block of its peak use,
# and grows beside them.
CACHED_RATIO = 2


def mirrored(move: Callable[..., Any]) -> Any:
    """Decorates a function that moves the content of a [`GroupMemory`]'s blocks, so that the
    memory's other processes repeat it. Only such functions may call code that writes to blocks
    (`tests/ranks/test_mirror.py` checks the callers)."""

    @functools.wraps(move)
    def both(group: GroupMemory, *arguments: Any) -> Any:
        result = move(group, *arguments)
        if (processes := group.memory.processes) is not None:
            processes.moved(both, group, arguments, result)
        return result

    return both


class GroupMemory:
    """One layer group of a memory: `BlockManager`s take its blocks, and this class copies and
    writes them."""

    def __init__(self, memory: PagedMemory, spec: GroupSpec) -> None:
        # weak, to avoid a cycle: the pool is freed with the memory's last user, not by the garbage
        # collector
        self.memory: PagedMemory = weakref.proxy(memory)
        self.holds_states = isinstance(spec, StateSpec)  # each block is a slot for one state
        self.storage: Storage
        if self.holds_states:
            self.block_size = UNBOUNDED
            self.storage = StateStorage(BlockPool())
        else:
            self.block_size = memory.block_size_of(spec)
            weak_memory = self.memory
            self.storage = memory.make_storage(
                memory.config, spec, self.block_size, lambda: weak_memory.gather_handles()
            )
        self.pool = self.storage.pool
        self.spec = spec
        self._expected_bytes = 0  # of a block over all layers, estimated from the first layer
        self._is_short = False  # a layer could not be allocated for all blocks of the pool
        self._is_allocating = False  # a layer is being allocated, and lacks cached blocks' content

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return max(self._expected_bytes, self.storage.block_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool's blocks."""
        block_bytes = self.storage.block_bytes if self._is_short else self.block_bytes
        held = self.pool.num_blocks * block_bytes
        most = self.storage.most_bytes
        return held if most is None else min(held, most)

    @property
    def taken_bytes(self) -> int:
        """Bytes that are no longer free."""
        if self.storage.is_elastic:
            return self.held_bytes
        return max(self.held_bytes, self.storage.nbytes)

    @property
    def is_sized(self) -> bool:
        """Whether the bytes of a block are known, or not needed."""
        if budget.limit(self.memory) is None or self.holds_states:
            return True
        return self.block_bytes > 0

    @property
    def is_incomplete(self) -> bool:
        """Whether the layers hold only part of a cached block's content."""
        return self._is_allocating or not self.storage.layers

    def expect(self, block_bytes: int) -> None:
        """Sets the expected bytes of a block over all layers. Raises `OutOfBlocksError` if the pool
        then exceeds the budget."""
        expected_bytes = max(block_bytes, self._expected_bytes)
        self._expected_bytes, self._is_short = expected_bytes, False
        if not budget.charge(self.memory):
            self._is_short = True
            raise OutOfBlocksError(
                f"needs {self.pool.num_blocks:,} blocks of {self.block_size} tokens of"
                f" {self.block_bytes:,} bytes: {_budget_text()}"
            )

    def has_free(self, num_blocks: int) -> bool:
        """Whether this many blocks are free and no limit has to be checked, so that `ensure_free`
        has nothing to do."""
        memory = self.memory
        pool = self.pool
        if memory.config.num_blocks is not None:  # which counts the blocks of all groups
            return False
        if self._is_short or pool.needs_recount or memory.is_recovery_due:
            return False
        return num_blocks <= pool.num_free

    def ensure_free(self, num_blocks: int) -> None:
        """Makes `num_blocks` blocks allocatable, or raises `OutOfBlocksError`. With a limit the
        pool grows up to it before it evicts cached blocks, unless growth needs larger tensors.
        Without one it evicts first, but keeps a few snapshots of states, and an engine's cached
        blocks (`PagedMemory.keeps_cached`) while the machine has memory for them."""
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
        memory.evict_to_fit(num_blocks, self)
        missing = num_blocks - pool.num_free
        if missing > 0:
            missing -= self._num_to_evict(missing)
        if missing > 0:
            self._grow(num_blocks, missing)

    def take(self, num_blocks: int, after: Sequence[int] = ()) -> list[int]:
        """Takes `num_blocks` new blocks with refcount 1, preferably after the blocks `after` of
        their table. Raises `OutOfBlocksError`."""
        self.ensure_free(num_blocks)
        return self.pool.allocate(num_blocks, after)

    @property
    def _has_limit(self) -> bool:
        memory = self.memory
        config = memory.config
        has_option = config.num_blocks is not None or config.memory_fraction is not None
        return has_option or budget.limit(memory) is not None

    def _num_to_evict(self, missing: int) -> int:
        """Returns how many cached blocks to evict before the pool grows."""
        pool = self.pool
        num_cached = pool.num_cached
        has_limit = self._has_limit
        has_rows = pool.num_blocks + missing <= self.storage.num_rows
        if self.holds_states:
            keeps_all = has_limit or num_cached < KEPT_STATES
        else:
            keeps_all = has_limit and (has_rows or self.storage.is_elastic)
        if keeps_all:
            return 0
        keeps_some = self.memory.keeps_cached and has_rows and not has_limit
        if keeps_some and not self.holds_states and self._has_spare_memory:
            return max(0, num_cached - CACHED_RATIO * pool.peak_used)
        return num_cached

    def _growth_step(self, growth_limit: int) -> int:
        """Returns the least number of blocks to add, of the `growth_limit` that may be added."""
        pool = self.pool
        step = self.storage.growth_step
        if step and self.storage.is_elastic and not self._has_limit:
            # adds only ids: blocks take no memory before they are written to
            return step
        if self.holds_states or not self.is_sized:
            return 0
        if growth_limit < sys.maxsize and len(self.memory.groups) > 1:
            return 0  # leave the rest to other groups
        return min(GROWTH_STEP, pool.num_blocks)

    def _grow(self, num_blocks: int, missing: int) -> None:
        """Adds at least `missing` blocks, so that `num_blocks` can be taken."""
        memory = self.memory
        pool = self.pool
        storage = self.storage
        growth_limit = memory.growth_limit(self)
        step = self._growth_step(growth_limit)
        spare = storage.num_rows - pool.num_blocks
        if missing <= spare:
            step = min(step, spare)
        added = max(missing, step)
        num_available = pool.num_available + max(0, growth_limit)
        if num_blocks > num_available and memory.release_unused(self):
            growth_limit = memory.growth_limit(self)
        if added > growth_limit:
            added = max(0, min(missing, growth_limit))
        if num_blocks > pool.num_available + added:
            free = max(0, growth_limit) + pool.num_available
            raise self._over_budget(num_blocks, free)
        if not added:
            return
        new_rows = added if storage.is_elastic else max(0, added - spare)
        if not budget.charge(memory, new_rows * self.block_bytes):
            # another thread has since taken that part of the budget
            raise self._over_budget(num_blocks, pool.num_available)
        try:
            left = budget.num_uncharged_bytes()
            most = growth_limit
            if left is not None:
                num_left = left // max(1, self.block_bytes)
                most = min(growth_limit, added + num_left)
            storage.grow(pool.num_blocks + added, most=pool.num_blocks + most)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            if is_interrupt(error):
                raise
            raise self._no_memory(f"{added} more blocks", error) from error
        else:
            pool.grow(added)
        finally:
            budget.update_charge(memory)

    @property
    def _has_spare_memory(self) -> bool:
        """Whether cached blocks take at most half of the memory that would be free without them.
        Always true of a storage that is not elastic, whose memory is already allocated."""
        cached_bytes = self.pool.num_cached * self.block_bytes
        if not (cached_bytes and self.storage.is_elastic):
            return True
        return cached_bytes <= free_bytes(torch.device("cpu"))

    def _over_budget(self, needed: int, free: int) -> OutOfBlocksError:
        config = self.memory.config
        if budget.limit(self.memory) is not None:
            return OutOfBlocksError(
                f"needs {needed} blocks of {self.block_size} tokens, {free} available:"
                f" {_budget_text()}"
            )
        option = f"`memory_fraction` ({config.memory_fraction})"
        return over_budget(needed, self.memory.block_size, free, free + self.pool.num_used, option)

    def _no_memory(self, needed: str, error: Exception) -> OutOfBlocksError:
        return OutOfBlocksError(
            f"needs {needed} of {self.block_size} tokens, but memory ran out: free some, or"
            f" limit the pool by `num_blocks` ({self.memory.config.num_blocks}) or"
            f" `memory_fraction` ({self.memory.config.memory_fraction}) in `cache_config`, or in an"
            f" engine's `PagedConfig` ({error})"
        )

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
        num_begun: int | None,
    ) -> KVBlocks:
        """Returns the blocks of layer `index` of `num_layers` for K/V like these; allocates them on
        first use. `num_begun`: how many tables begin in this step, `None` if any has content
        already. Raises `ValueError` if the layer's blocks have other heads, dims or device,
        `OutOfBlocksError` if memory runs out."""
        layer: KVBlocks | None = self.storage.layers.get(index)
        if layer is not None:
            if layer.fits(keys, values):
                return layer
            has_content = num_begun is None
            if num_begun is not None:
                num_live = sum(bool(table.block_ids) for table in self.live_tables())
                has_content = num_live > num_begun
            if has_content:
                layer = self.storage.promote(index, keys, values)
                budget.update_charge(self.memory)
                return layer
        self._is_allocating = True
        try:
            # cached blocks would have no content in the new layer
            self.pool.evict(self.pool.num_cached)
        finally:
            self._is_allocating = False
        self._expected_bytes = 0
        self.expect(num_layers * self.storage.outline(keys, values).block_bytes)
        self._is_short = True
        if not commits_when_touched(keys.device):
            budget.release_idle(self.memory)
        try:
            layer = self.storage.make(index, keys, values)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            if is_interrupt(error):
                raise
            raise self._no_memory(f"{self.pool.num_blocks} blocks", error) from error
        self._is_short = False
        budget.update_charge(self.memory)
        return layer

    @mirrored
    def release(self) -> None:
        """Frees all memory while no table holds a block. Remembers the bytes of a block."""
        self.pool.shrink()
        self._expected_bytes, self._is_short = self.block_bytes, False
        self.storage.clear()

    def live_tables(self) -> Iterable[BlockTable]:
        """Yields the group's tables of all living sequences."""
        for manager in self.memory.managers.values():
            if self in manager.groups:
                number = manager.groups.index(self)
                yield from manager.tables(number)


def over_budget(
    needed: int,
    block_size: int,
    free: int,
    total: int,
    option: str,
) -> OutOfBlocksError:
    return OutOfBlocksError(
        f"needs {needed} blocks of {block_size} tokens, {free} of {total} are free: raise {option}"
        " in `cache_config`, or lower the batch size, the prompt length or `max_new_tokens`"
    )


def _budget_text() -> str:
    return (
        f"`hf_paged.budget` allows {budget.limit() or 0:,} bytes for all models together. Raise it,"
        " end other models' requests, or lower the batch size, the prompt length or"
        " `max_new_tokens`"
    )
