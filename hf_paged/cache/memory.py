"""The pools and storages of all layer groups under one budget, for one model or one `PagedCache`."""

from __future__ import annotations

import functools
import logging
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import forks
from ..config import AUTO, PagedConfig, VirtualStorage
from ..interrupts import held
from ..tools.pictures import group_label
from . import budget
from .block_manager import BlockManager, SequenceBlocks
from .block_pool import BlockPool, BlockTable, OutOfBlocksError
from .block_sizes import DEFAULT_BLOCK_SIZE, MIN_UNSERVED, BlockSizes, Choice
from .groups import UNBOUNDED, BlockGroup, GroupSpec, StateSpec
from .handles import Handles
from .states import StateStorage
from .storage import KVBlocks, Storage, commits_when_touched, free_bytes, trim
from .virtual import MappedStorage

logger = logging.getLogger(__name__)

# New block ids are added a few at a time, so that freed blocks, whose pages are warm, are used again first.
GROWTH_STEP = 16
MANY_RUNS = 16  # runs of blocks that a pool with virtual storage adds at once, for rows to begin in
KEPT_STATES = 16  # state snapshots up to which a pool without a budget grows rather than evicts


@dataclass(frozen=True)
class MemoryStats:
    """
    Memory statistics. "Peak" is since the memory was created or since the last reset.

    Args:
        block_size (`int`): Tokens per block; with `"auto"` of the largest.
        block_sizes (`dict`): With `"auto"`, the `block_size` of each layer group by its name, and the `reason` of the
            choice (`cache.block_sizes.Choice`).
        kv_dtype (`str`, *optional*): The dtype of stored keys and values (`PagedConfig.kv_dtype`).
        used_blocks, peak_blocks (`int`): Blocks in use, over all layer groups.
        used_bytes, peak_bytes (`int`): Bytes of those blocks, over all layers.
        held_bytes (`int`): Bytes of all blocks that were ever in use and not given back since.
        waste (`float`): Share of the allocated slots that were unused at the peak.
        copied_blocks (`int`): Blocks copied by copy-on-write.
        cached_blocks (`int`): Blocks that no table holds, kept for the prefix cache until evicted.
        shared_blocks (`int`): Blocks in use that more than one block table holds.
        budget_bytes (`int`, *optional*): Limit of `hf_paged.budget` on all pools of the process together.
        tier_host_bytes (`int`): Bytes of evicted prefix blocks in host memory.
        tier_disk_bytes (`int`): Bytes of the files in the folder of `prefix_tiers`, as far as this process knows.
        tier_kept_blocks, tier_restored_blocks (`int`): Blocks copied to the tiers, and restored from them.
    """

    block_size: int = 0
    used_blocks: int = 0
    peak_blocks: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0
    held_bytes: int = 0
    waste: float = 0.0
    copied_blocks: int = 0
    cached_blocks: int = 0
    shared_blocks: int = 0
    kv_dtype: str | None = None
    budget_bytes: int | None = None
    tier_host_bytes: int = 0
    tier_disk_bytes: int = 0
    tier_kept_blocks: int = 0
    tier_restored_blocks: int = 0
    block_sizes: dict[str, Choice] = field(default_factory=dict)


class Mirror(Protocol):
    """Is notified, in order, of all changes to the content of blocks except what forwards write."""

    def moved(self, name: str, group: GroupMemory, arguments: tuple[Any, ...], result: Any) -> None:
        """Called after `MOVES[name](group, *arguments)` returned `result`."""


MOVES: dict[str, Callable[..., Any]] = {}
"""Functions that move the content of a group's blocks, by name (`mirrored`)."""


def mirrored(move: Callable[..., Any]) -> Any:
    """Decorates a function of a [`GroupMemory`] that moves the content of its blocks, to notify the memory's mirror.
    Only such functions may call code that writes to blocks (`tests/cache/test_mirror.py` checks the callers)."""
    MOVES[move.__name__] = move

    @functools.wraps(move)
    def both(group: GroupMemory, *arguments: Any) -> Any:
        result = move(group, *arguments)
        if (mirror := group.memory.mirror) is not None:
            mirror.moved(move.__name__, group, arguments, result)
        return result

    return both


class GroupMemory(BlockGroup):
    can_grow = True

    def __init__(self, memory: PagedMemory, spec: GroupSpec) -> None:
        self.holds_states = isinstance(spec, StateSpec)  # blocks are slots for states
        super().__init__(BlockPool(), spec, UNBOUNDED if self.holds_states else memory.block_size_of(spec))
        # weak, to avoid a cycle: the pool is freed with the memory's last user, not by the garbage collector
        self.memory: PagedMemory = weakref.proxy(memory)
        self.storage: Any = self._make_storage(memory.config)
        self._expected_bytes = 0  # of a block over all layers, estimated from the first layer
        self._is_short = False  # a layer could not be allocated for all blocks of the pool
        self._is_making = False  # a layer is being made, without content for cached blocks

    def _make_storage(self, config: PagedConfig) -> Storage | StateStorage:
        if self.holds_states:
            return StateStorage(self.pool)
        if isinstance(config.storage, VirtualStorage):
            self.pool.run_length = 1 + config.storage.blocks_ahead
            storage, memory = MappedStorage(self.block_size, self.spec, config.storage, self.pool), self.memory
            storage.before_move = lambda: memory.gather_handles()  # `memory` is a weak proxy
            return storage
        return Storage(self.block_size, self.spec, config.kv_dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return max(self._expected_bytes, self.storage.block_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool's blocks; with runs of blocks at most the storage's physical bytes."""
        held = self.pool.num_blocks * (self.storage.block_bytes if self._is_short else self.block_bytes)
        return min(held, self.storage.physical_bytes) if self.pool.run_length > 1 else held

    @property
    def taken_bytes(self) -> int:
        """Bytes that are no longer free."""
        return self.held_bytes if self.storage.is_elastic else max(self.held_bytes, self.storage.nbytes)

    @property
    def is_sized(self) -> bool:
        """Whether the bytes of a block are known, or do not matter."""
        return budget.limit(self.memory) is None or self.holds_states or self.block_bytes > 0

    @property
    def is_incomplete(self) -> bool:
        """Whether the layers hold only part of a cached block's content."""
        return self._is_making or not self.storage.layers

    def expect(self, block_bytes: int) -> None:
        """Notes a block's bytes over all layers. Raises `OutOfBlocksError` if the pool is then over the budget."""
        self._expected_bytes = max(block_bytes, self._expected_bytes)
        if not budget.charge(self.memory):
            self._is_short = True
            raise OutOfBlocksError(
                f"needs {self.pool.num_blocks:,} blocks of {self.block_size} tokens of {self.block_bytes:,} bytes: "
                f"{_budget_text()}"
            )

    def make_room(self, num_blocks: int) -> None:
        """Makes `num_blocks` blocks allocatable. Raises `OutOfBlocksError`. With a budget the pool grows up to it
        before it evicts cached blocks, unless that needs larger tensors; without one it evicts first, except that it
        keeps a few snapshots of states."""
        memory, pool, config = self.memory, self.pool, self.memory.config
        memory.free_abandoned()
        if self._is_short:  # the call that failed has freed its blocks since
            self._is_short = False
            pool.shrink()
            self.storage.capacity = pool.num_blocks
            if not pool.num_blocks:
                self.storage.layers.clear()
        memory.make_place(num_blocks, self)
        missing = num_blocks - pool.num_free
        if missing <= 0:
            return
        has_budget = (
            budget.limit(memory) is not None or config.num_blocks is not None or config.memory_fraction is not None
        )
        has_rows = self.storage.is_elastic or pool.num_blocks + missing <= self.storage.num_rows
        if not ((has_budget and has_rows) or (self.holds_states and pool.num_cached < KEPT_STATES)):
            missing -= pool.num_cached
            if missing <= 0:
                return
        affordable = memory.num_affordable(self)
        step = 0 if self.holds_states or not self.is_sized else min(GROWTH_STEP, pool.num_blocks)
        if affordable < sys.maxsize and len(memory.groups) > 1:  # leave the rest to other groups
            step = 0
        if pool.run_length > 1 and self.storage.is_elastic and not has_budget:
            step = MANY_RUNS * pool.run_length  # only ids: blocks take no memory before they are written to
        spare = self.storage.num_rows - pool.num_blocks
        added = max(missing, step if missing > spare else min(step, spare))
        if num_blocks > pool.num_available + max(0, affordable) and memory.release_unused(self):
            affordable = memory.num_affordable(self)
        if added > affordable:
            added = max(0, min(missing, affordable))
        if num_blocks > pool.num_available + added:
            free = max(0, affordable) + pool.num_available
            raise self._over_budget(num_blocks, free)
        if not added:
            return
        new_rows = added if self.storage.is_elastic else max(0, pool.num_blocks + added - self.storage.num_rows)
        if not budget.charge(memory, new_rows * self.block_bytes):  # another thread took the budget meanwhile
            raise self._over_budget(num_blocks, pool.num_available)
        try:
            left = budget.left()
            most = affordable if left is None else min(affordable, added + left // max(1, self.block_bytes))
            self.storage.grow(pool.num_blocks + added, most=pool.num_blocks + most)
            pool.grow(added)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            raise self._no_memory(f"{added} more blocks", error) from error
        finally:
            budget.note(memory)

    def _over_budget(self, needed: int, free: int) -> OutOfBlocksError:
        config = self.memory.config
        if budget.limit(self.memory) is not None:
            return OutOfBlocksError(
                f"needs {needed} blocks of {self.block_size} tokens, {free} can be had: {_budget_text()}"
            )
        option = f"`memory_fraction` ({config.memory_fraction})"
        return _over_budget(needed, self.memory.block_size, free, free + self.pool.num_used, option)

    def _no_memory(self, what: str, error: Exception) -> OutOfBlocksError:
        return OutOfBlocksError(
            f"needs {what} of {self.block_size} tokens, for which there is no memory: free some, or bound what is "
            f"taken by `num_blocks` ({self.memory.config.num_blocks}) or `memory_fraction` "
            f"({self.memory.config.memory_fraction}) in `cache_config`, which is an engine's `PagedConfig` ({error})"
        )

    @mirrored
    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies block `source` to block `target` in every layer, and counts them."""
        self.storage.copy_blocks(copies)
        self.memory.num_copied += len(copies)

    def layer(
        self, index: int, keys: torch.Tensor, values: torch.Tensor, num_layers: int, num_begun: int | None
    ) -> KVBlocks:
        """Returns the blocks of layer `index` of `num_layers` for K/V like these, allocated on first use. `num_begun`:
        tables with blocks that the step writes to, `None` if any has content. Raises `ValueError` if the layer's blocks
        have other heads, dims or device, `OutOfBlocksError` if there is no memory."""
        layer: KVBlocks | None = self.storage.find(index, keys, values)
        if layer is not None:
            return layer
        with held():
            if index in self.storage.layers:
                if num_begun is None or sum(bool(table.block_ids) for table in self.live_tables()) > num_begun:
                    layer = self.storage.promote(index, keys, values)
                    budget.note(self.memory)
                    return layer
            self._is_making = True
            try:
                self.pool.evict(self.pool.num_cached)  # cached blocks have no content in the new layer
            finally:
                self._is_making = False
            self._expected_bytes = 0
            self.expect(num_layers * self.storage.block_bytes_of(keys, values))
            self._is_short = True
            if not commits_when_touched(keys.device):
                budget.make_way(self.memory)
            try:
                layer = self.storage.make(index, keys, values)
            except (MemoryError, RuntimeError) as error:  # torch raises the latter
                raise self._no_memory(f"{self.storage.capacity} blocks", error) from error
            self._is_short = False
            budget.note(self.memory)
            return layer

    @mirrored
    def release(self) -> None:
        """Frees all memory, if no table holds a block. Remembers the bytes of a block."""
        self.pool.shrink()
        self._expected_bytes, self._is_short = self.block_bytes, False
        self.storage.clear()

    def live_tables(self) -> Iterable[BlockTable]:
        """Yields the group's tables of all living sequences."""
        for manager in self.memory.managers.values():
            if self in manager.groups:
                yield from manager.tables(manager.groups.index(self))


def _over_budget(needed: int, block_size: int, free: int, total: int, option: str) -> OutOfBlocksError:
    return OutOfBlocksError(
        f"needs {needed} blocks of {block_size} tokens, {free} of {total} are free: raise {option} in `cache_config`, "
        "or lower the batch size, the prompt length or `max_new_tokens`"
    )


def _budget_text() -> str:
    return (
        f"`hf_paged.budget` allows {budget.limit() or 0:,} bytes for all models, and those in use leave no more. Raise "
        "it, end what other models run, or lower the batch size, the prompt length or `max_new_tokens`"
    )


class PagedMemory:
    """Pools, storages and the budget of one model or one standalone cache. `lock` guards allocation, growth and writes.
    Readers need no lock: growing a tensor leaves the old one unchanged."""

    def __init__(self, config: PagedConfig, is_bounded: bool = True, sizes: BlockSizes | None = None) -> None:
        """`is_bounded`: whether `hf_paged.budget` counts it; `False` for short checks of a model. `sizes`: block sizes
        with `block_size` `"auto"`; without it all blocks have the default size."""
        self.config, self.is_bounded = config, is_bounded
        self.sizes = (sizes or BlockSizes()) if config.block_size == AUTO else None
        self.lock = forks.rlock()
        self.outer_lock: Any = None  # an engine's lock, taken before `lock`, also in finalizers of its streams
        self.groups: dict[GroupSpec, GroupMemory] = {}
        self.managers: dict[tuple[GroupSpec, ...], BlockManager] = {}  # by the groups of a model
        self.fingerprint: Hashable = None  # of the weights that computed cached blocks (`weights.WeightsGuard`)
        self.graphs: dict[Hashable, Any] = {}  # graphs, which hold block addresses, by a model's specs
        self._limit_bytes: int | None = None
        self._released_peak_bytes = 0  # of layers freed since the last reset
        self.num_copied = self._peak_blocks = 0  # copied by copy-on-write since the last reset
        self._peak_used: dict[GroupSpec, int] = {}
        self._waste = 0.0
        self.handles: dict[int, Handles] = {}  # of each cache, by the id of its rows
        self._abandoned: deque[tuple[BlockManager, list[SequenceBlocks], Handles]] = deque()
        self.charged_bytes = 0  # to `hf_paged.budget`
        self.last_used = time.monotonic()  # by a call, or an engine
        # With sharded heads, where other processes hold other heads of the same blocks. `least` returns the minimum of
        # a number over all processes; `mirror` is notified of changes to blocks if this process does the bookkeeping
        # for all.
        self.least: Callable[[int], int] | None = None
        self.mirror: Mirror | None = None
        if is_bounded:
            budget.join(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedMemory:
        return self  # blocks are shared by refcount; a copied cache forks its tables

    def __reduce__(self) -> tuple[Any, ...]:
        return PagedMemory, (self.config, True, self.sizes)  # each layer group pickles the blocks it holds

    def block_size_of(self, spec: GroupSpec) -> int:
        """Returns the tokens per block of a group that does not hold states."""
        size = self.config.block_size
        return self.sizes.of(spec) if isinstance(size, str) and self.sizes is not None else int(size)

    @property
    def block_size(self) -> int:
        """The largest block size of the groups, except those of states."""
        sizes = (group.block_size for group in list(self.groups.values()) if not group.holds_states)
        size = self.config.block_size
        return max(sizes, default=DEFAULT_BLOCK_SIZE) if isinstance(size, str) else int(size)

    def better_sizes(self) -> BlockSizes | None:
        """Returns better block sizes for the lengths seen since, if any, for a new memory. `None` while a table holds a
        block, or while cached prefixes are worth keeping: one has been hit, or few sequences have ended so far. May be
        called without the lock."""
        if self.sizes is None or self.is_used:
            return None
        has_served = any(manager.num_hits for manager in list(self.managers.values()))
        may_serve = has_served or self.sizes.num_ended < MIN_UNSERVED
        if may_serve and any(group.pool.num_cached for group in list(self.groups.values())):
            return None
        return self.sizes.renewed()

    def group(self, spec: GroupSpec) -> GroupMemory:
        with self.lock:
            if spec not in self.groups:
                self.groups[spec] = GroupMemory(self, spec)
            return self.groups[spec]

    def manager(self, specs: Iterable[GroupSpec]) -> BlockManager:
        """Returns the manager of sequences with a table in each of these groups."""
        specs = tuple(specs)
        with self.lock:
            if specs not in self.managers:
                memory = weakref.proxy(self)  # no cycle
                groups = [self.group(spec) for spec in specs]
                made = BlockManager(groups, self.block_size, lambda: memory.num_obtainable(groups))
                if self.sizes is not None:
                    made.note_length = self.sizes.note
                made.num_withheld, made.release_unused = lambda: memory.num_withheld, lambda: memory.release_unused()
                self.managers[specs] = made
            return self.managers[specs]

    def abandon(self, manager: BlockManager, rows: list[SequenceBlocks], handles: Handles) -> None:
        """Frees the rows of a collected cache without waiting: at once, or, if a thread holds the lock, when blocks are
        next taken or counted."""
        if not sys or sys.is_finalizing():  # the interpreter ends, and has cleared modules
            return
        self._abandoned.append((manager, rows, handles))
        if not self.lock._is_owned():  # type: ignore[attr-defined]  # else its holder is in the middle of a change
            self.free_abandoned()

    def free_abandoned(self) -> None:
        """Frees the rows of collected caches, unless another thread holds the lock."""
        if not self._abandoned:
            return
        with held():
            while self._abandoned and self.lock.acquire(blocking=False):
                try:
                    manager, rows, handles = self._abandoned.popleft()
                    try:
                        with torch._C.DisableTorchFunction(), _disable_current_modes():  # those of any thread's code
                            handles.gather()
                    except Exception as error:
                        logger.warning("keys or values that outlive their cache are lost: %s", error)
                    finally:
                        for blocks in rows:
                            manager.end(blocks)
                finally:
                    self.lock.release()

    def gather_handles(self) -> None:
        """Gathers the handles of all caches."""
        for handles in list(self.handles.values()):
            handles.gather()

    def groups_of(self, blocks: BlockManager) -> list[GroupMemory]:
        """Returns the groups of a manager of this memory."""
        return [self.groups[group.spec] for group in blocks.groups]

    @property
    def num_used(self) -> int:
        """Blocks that a table holds, over all counted groups."""
        self.free_abandoned()
        return sum(group.pool.num_used for group in self.groups.values() if group.spec.is_counted)

    @property
    def is_used(self) -> bool:
        """Whether any table holds a block. May be read without the lock."""
        self.free_abandoned()
        return any(group.pool.num_used for group in list(self.groups.values()))

    @property
    def taken_bytes(self) -> int:
        """Bytes that are no longer free."""
        return sum(group.taken_bytes for group in self.groups.values())

    @property
    def num_cached(self) -> int:
        """Cached blocks, which no table holds, over all groups."""
        return sum(group.pool.num_cached for group in self.groups.values())

    def num_obtainable(self, groups: Sequence[GroupMemory]) -> int:
        """Returns how many blocks these groups may still take, including cached ones; `sys.maxsize` without a budget.
        With a limit in bytes and blocks of different bytes, counts the smallest."""
        limit = sys.maxsize if self.config.num_blocks is None else self.config.num_blocks - self.num_used
        sizes = [group.block_bytes for group in groups if group.block_bytes]
        total = self._most_bytes() if sizes else None
        if total is None:
            return limit
        used = sum(group.pool.num_used * group.block_bytes for group in self.groups.values())
        held = sum(group.pool.num_available for group in groups)  # may exceed a budget that was lowered
        return min(limit, max(held, (total - used) // min(sizes)))

    @property
    def num_withheld(self) -> int:
        """Blocks that `hf_paged.budget` would allow in addition if no other pool were in use."""
        total, sizes = budget.limit(self), [group.block_bytes for group in self.groups.values() if group.block_bytes]
        if total is None or not sizes:
            return 0
        return max(0, total - (budget.share(self) or 0)) // min(sizes)

    def make_place(self, needed: int, first: GroupMemory) -> None:
        """Evicts cached blocks, those of `first` first, so that `needed` more used blocks stay within `num_blocks`."""
        total, used = self.config.num_blocks, self.num_used
        if total is None or not first.spec.is_counted:
            return
        if needed > total - used:
            raise _over_budget(needed, self.block_size, total - used, total, "`num_blocks`")
        excess = used + self.num_cached + needed - total
        for group in (first, *self.groups.values()):
            if excess <= 0:
                return
            excess -= group.pool.evict(excess)

    def _most_bytes(self) -> int | None:
        """Returns the bytes that `memory_fraction` and `hf_paged.budget` allow; `None` without either."""
        most, fraction = budget.share(self), self.config.memory_fraction
        if fraction is not None and self._limit_bytes is None:
            own = self.affordable_bytes()
            self._limit_bytes = own if self.least is None else self.least(own)
        return min((limit for limit in (most, self._limit_bytes) if limit is not None), default=None)

    def num_affordable(self, group: GroupMemory) -> int:
        """Returns how many more blocks `memory_fraction` and `hf_paged.budget` allow `group`."""
        block_bytes = group.block_bytes
        total = self._most_bytes() if block_bytes else None
        if total is None:
            return sys.maxsize
        left = (total - self.taken_bytes) // block_bytes
        return (
            left if group.storage.is_elastic else max(0, left) + max(0, group.storage.num_rows - group.pool.num_blocks)
        )

    def affordable_bytes(self) -> int:
        """Returns the bytes that `memory_fraction` allows, including those already taken."""
        held = Counter[torch.device]()  # bytes of a block over the device's layers
        for group in self.groups.values():
            for layer in group.storage.layers.values():
                held[layer.keys.device] += layer.block_bytes
        total = sum(held.values())
        # the device that fills up first decides
        each = [free_bytes(device) * total // count if count else free_bytes(device) for device, count in held.items()]
        free = min(each) if each else free_bytes(torch.device("cpu"))
        return int((self.config.memory_fraction or 1) * (free + self.taken_bytes))

    def release_unused(self, but: GroupMemory | None = None) -> bool:
        """With a limit in bytes, frees the memory of groups, except `but`, in which no table holds a block, so that
        others can take it. Returns whether there were any."""
        if self.config.memory_fraction is None and budget.limit(self) is None:
            return False
        unused = [group for group in self.groups.values() if group is not but and not group.pool.num_used]
        unused = [group for group in unused if group.taken_bytes]
        if not unused:
            return False
        self._released_peak_bytes = self._peak_bytes
        for group in unused:
            group.release()
        self._forget_graphs()
        budget.note(self)
        return True

    def _forget_graphs(self) -> None:
        for graphs in self.graphs.values():
            graphs.clear()

    @property
    def _held_bytes(self) -> int:
        return sum(group.held_bytes for group in self.groups.values())

    def note_peak(self) -> None:
        """Updates the peak if more blocks are in use than before."""
        used = self.num_used
        if used < self._peak_blocks or not used:
            return
        self._peak_blocks = used
        self._peak_used = {key: group.pool.num_used for key, group in self.groups.items()}
        slots = unused = 0
        for group in self.groups.values():
            if group.holds_states:
                continue
            tails = {t.block_ids[-1]: t.num_unused_slots for t in group.live_tables() if t.block_ids}
            slots += group.pool.num_used * group.block_size
            unused += sum(tails.values())
        self._waste = unused / slots if slots else 0.0

    def release(self) -> bool:
        """Frees all memory (on devices: to PyTorch's allocator), cached blocks and graphs, unless a table holds a
        block; returns whether it did. May be called at any moment, from any thread: running sequences hold blocks, and
        the next write allocates the layers again."""
        with held(), self.lock:
            if self.is_used:
                return False
            self._released_peak_bytes, self._limit_bytes = self._peak_bytes, None
            for group in self.groups.values():
                group.release()
            self._forget_graphs()
            budget.note(self)
        trim()
        return True

    def give_up_cached(self) -> None:
        """Evicts all cached blocks to the tiers, if there are any."""
        with held(), self.lock:
            for group in self.groups.values() if any(each.tier for each in self.managers.values()) else ():
                group.pool.evict(group.pool.num_cached)

    @property
    def _peak_bytes(self) -> int:
        of_layers = sum(n * self.groups[key].storage.block_bytes for key, n in self._peak_used.items())
        return max(of_layers, self._released_peak_bytes)

    def reset_peak(self) -> None:
        self._released_peak_bytes = 0
        self._peak_blocks, self._waste, self.num_copied, self._peak_used = 0, 0.0, 0, {}
        self.note_peak()

    def stats(self) -> MemoryStats:
        """Returns the current statistics."""
        with self.lock:
            self.free_abandoned()
            groups = self.groups.values()
            tiers: list[Any] = [manager.tier for manager in self.managers.values() if manager.tier is not None]
            return MemoryStats(
                block_size=self.block_size,
                block_sizes=self._choices(),
                kv_dtype=self.config.kv_dtype,
                used_blocks=self.num_used,
                peak_blocks=self._peak_blocks,
                used_bytes=sum(group.pool.num_used * group.storage.block_bytes for group in groups),
                peak_bytes=self._peak_bytes,
                held_bytes=self._held_bytes,
                waste=self._waste,
                copied_blocks=self.num_copied,
                cached_blocks=self.num_cached,
                shared_blocks=sum(group.pool.num_shared for group in groups),
                budget_bytes=budget.limit(),
                tier_host_bytes=sum(tier.host_bytes for tier in tiers),
                tier_disk_bytes=max((tier.disk_bytes for tier in tiers), default=0),  # all share one folder
                tier_kept_blocks=sum(tier.num_kept for tier in tiers),
                tier_restored_blocks=sum(tier.num_restored for tier in tiers),
            )

    def _choices(self) -> dict[str, Choice]:
        found = {} if self.sizes is None else self.sizes.chosen
        names = {spec: f"{spec.kind}, " if spec.kind.startswith("assistant") else "" for spec in found}
        return {f"{names[spec]}{group_label(spec.label)}": choice for spec, choice in found.items()}

    def block_map(self) -> dict[Hashable, list[int]]:
        """Returns, by layer group, how many tables hold each block; 0 if it is free, -1 if it is cached."""
        with self.lock:
            return {spec.label: group.pool.states() for spec, group in self.groups.items()}

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every pool agrees with the living tables."""
        with self.lock:
            self.free_abandoned()
            for group in self.groups.values():
                group.pool.check_integrity([table.block_ids for table in group.live_tables()])
            total = self.config.num_blocks
            if total is not None and self.num_used + self.num_cached > total:
                raise AssertionError(f"{self.num_used} blocks in use, {self.num_cached} cached, the budget is {total}")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the autocast dtype on `device` in this thread; `None` if autocast is off."""
    if device.type == "meta":  # without autocast in torch
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
