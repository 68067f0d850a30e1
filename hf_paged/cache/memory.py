"""The pools and storages of all layer groups under one budget, for one model or one
`PagedCache`."""

from __future__ import annotations

import functools
import logging
import operator
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import forks
from ..config import AUTO, PagedConfig, VirtualStorage
from ..interrupts import is_interrupt, restoring
from ..tools.pictures import group_label, memory_figures, memory_html
from ..topics import Topic
from . import budget
from .block_manager import BlockManager, SequenceBlocks
from .block_pool import BlockPool, BlockTable, OutOfBlocksError
from .block_sizes import DEFAULT_BLOCK_SIZE, MIN_UNSERVED, BlockSizes, Choice
from .groups import UNBOUNDED, BlockGroup, GroupSpec, StateSpec
from .handles import Handles
from .states import StateStorage
from .storage import KVBlocks, LayerKV, Storage, commits_when_touched, free_bytes, trim
from .tier_prefixes import TierError
from .virtual import MappedStorage
from .waits import Holder

logger = logging.getLogger(__name__)

# New block ids are added a few at a time, so that freed blocks, whose pages are warm, are used
# again first.
GROWTH_STEP = 16
MANY_RUNS = 16  # runs of blocks that a pool with virtual storage adds at once, for rows to begin in
KEPT_STATES = 16  # state snapshots up to which a pool without a budget grows rather than evicts
# An engine's pool without a budget keeps this many cached blocks for each block of its peak use,
# and grows beside them.
CACHED_RATIO = 2
_TITLE = "Memory for keys and values"
_TAKEN_BYTES = operator.attrgetter("taken_bytes")


@dataclass(frozen=True, repr=False)
class MemoryStats:
    """
    Memory statistics. "Peak" is since the memory was created or since the last reset.

    Args:
        block_size (`int`): Tokens per block; with `"auto"` of the largest.
        block_sizes (`dict`): With `"auto"`, the `block_size` of each layer group by its name, and
            the `reason` of the choice (`cache.block_sizes.Choice`).
        kv_dtype (`str`, *optional*): The dtype of stored keys and values (`PagedConfig.kv_dtype`).
        used_blocks, peak_blocks (`int`): Blocks in use, over all layer groups.
        used_bytes, peak_bytes (`int`): Bytes of those blocks, over all layers.
        call_bytes (`int`): The most bytes of keys and values in use at once during the last
            `generate` call that no other call on the model overlapped; states of linear attention
            are not counted.
        plain_bytes (`int`): Bytes of keys and values that plain's `DynamicCache` would hold at the
            end of that call: every row as long as the longest, with padding, and one copy for each
            sample or beam.
        held_bytes (`int`): Bytes of all blocks that were ever in use and not given back since.
        waste (`float`): Share of the allocated slots that were unused at the peak.
        copied_blocks (`int`): Blocks copied by copy-on-write.
        cached_blocks (`int`): Blocks that no table holds, kept for the prefix cache until evicted.
        shared_blocks (`int`): Blocks in use that more than one block table holds.
        budget_bytes (`int`, *optional*): Limit of `hf_paged.budget` on all pools of the process
            together.
        tier_host_bytes (`int`): Bytes of evicted prefix blocks in host memory.
        tier_disk_bytes (`int`): Bytes of the files in the folder of `prefix_tiers`, as far as this
            process knows.
        tier_kept_blocks, tier_restored_blocks (`int`): Blocks copied to the tiers, and restored
            from them.
    """

    block_size: int = 0
    used_blocks: int = 0
    peak_blocks: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0
    call_bytes: int = 0
    plain_bytes: int = 0
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

    def __repr__(self) -> str:
        figures = memory_figures(self)
        width = max(map(len, figures))
        lines = (f"  {label:{width}}  {text}" for label, text in figures.items())
        return "\n".join([_TITLE, *lines])

    def _repr_html_(self) -> str:
        return memory_html(_TITLE, memory_figures(self), {})


class Mirror(Protocol):
    """Is notified, in order, of all changes to the content of blocks except what forwards write."""

    def moved(self, name: str, group: GroupMemory, arguments: tuple[Any, ...], result: Any) -> None:
        """Called after `MOVES[name](group, *arguments)` returned `result`."""


MOVES: dict[str, Callable[..., Any]] = {}
"""Functions that move the content of a group's blocks, by name (`mirrored`)."""


def mirrored(move: Callable[..., Any]) -> Any:
    """Decorates a function of a [`GroupMemory`] that moves the content of its blocks, to notify the
    memory's mirror. Only such functions may call code that writes to blocks
    (`tests/cache/test_mirror.py` checks the callers)."""
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
        block_size = UNBOUNDED
        if not self.holds_states:
            block_size = memory.block_size_of(spec)
        super().__init__(BlockPool(), spec, block_size)
        # weak, to avoid a cycle: the pool is freed with the memory's last user, not by the garbage
        # collector
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
            storage = MappedStorage(self.block_size, self.spec, config.storage, self.pool)
            memory = self.memory
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
        block_bytes = self.storage.block_bytes if self._is_short else self.block_bytes
        held = self.pool.num_blocks * block_bytes
        if self.pool.run_length > 1:
            return min(held, self.storage.physical_bytes)
        return held

    @property
    def taken_bytes(self) -> int:
        """Bytes that are no longer free."""
        if self.storage.is_elastic:
            return self.held_bytes
        return max(self.held_bytes, self.storage.nbytes)

    @property
    def is_sized(self) -> bool:
        """Whether the bytes of a block are known, or do not matter."""
        if budget.limit(self.memory) is None or self.holds_states:
            return True
        return self.block_bytes > 0

    @property
    def is_incomplete(self) -> bool:
        """Whether the layers hold only part of a cached block's content."""
        return self._is_making or not self.storage.layers

    def expect(self, block_bytes: int) -> None:
        """Notes a block's bytes over all layers. Raises `OutOfBlocksError` if the pool is then over
        the budget."""
        expected_bytes = max(block_bytes, self._expected_bytes)
        self._expected_bytes, self._is_short = expected_bytes, False
        if not budget.charge(self.memory):
            self._is_short = True
            raise OutOfBlocksError(
                f"needs {self.pool.num_blocks:,} blocks of {self.block_size} tokens of"
                f" {self.block_bytes:,} bytes: {_budget_text()}"
            )

    def has_free(self, num_blocks: int) -> bool:
        memory = self.memory
        pool = self.pool
        if memory.config.num_blocks is not None:  # which counts the blocks of all groups
            return False
        if self._is_short or pool.has_lost or memory.is_recovery_due:
            return False
        return num_blocks <= pool.num_free

    def make_room(self, num_blocks: int) -> None:
        """Makes `num_blocks` blocks allocatable. Raises `OutOfBlocksError`. With a budget the pool
        grows up to it before it evicts cached blocks, unless that needs larger tensors; without one
        it evicts first, except that it keeps a few snapshots of states, and cached blocks of an
        engine (`PagedMemory.keeps_cached`) while the machine has memory for them."""
        if self.has_free(num_blocks):
            return
        memory = self.memory
        pool = self.pool
        config = memory.config
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
            budget.limit(memory) is not None
            or config.num_blocks is not None
            or config.memory_fraction is not None
        )
        has_rows = pool.num_blocks + missing <= self.storage.num_rows
        evictable = pool.num_cached
        if self.holds_states:
            if has_budget or pool.num_cached < KEPT_STATES:
                evictable = 0
        elif has_budget and (has_rows or self.storage.is_elastic):
            evictable = 0
        elif not has_budget and memory.keeps_cached and has_rows and self._has_spare_memory:
            evictable = max(0, pool.num_cached - CACHED_RATIO * pool.peak_used)
        missing -= evictable
        if missing <= 0:
            return
        affordable = memory.num_affordable(self)
        step = 0
        if not self.holds_states and self.is_sized:
            step = min(GROWTH_STEP, pool.num_blocks)
        if affordable < sys.maxsize and len(memory.groups) > 1:  # leave the rest to other groups
            step = 0
        if pool.run_length > 1 and self.storage.is_elastic and not has_budget:
            # only ids: blocks take no memory before they are written to
            step = MANY_RUNS * pool.run_length
        spare = self.storage.num_rows - pool.num_blocks
        if missing <= spare:
            step = min(step, spare)
        added = max(missing, step)
        num_obtainable = pool.num_available + max(0, affordable)
        if num_blocks > num_obtainable and memory.release_unused(self):
            affordable = memory.num_affordable(self)
        if added > affordable:
            added = max(0, min(missing, affordable))
        if num_blocks > pool.num_available + added:
            free = max(0, affordable) + pool.num_available
            raise self._over_budget(num_blocks, free)
        if not added:
            return
        new_rows = added
        if not self.storage.is_elastic:
            new_rows = max(0, pool.num_blocks + added - self.storage.num_rows)
        if not budget.charge(memory, new_rows * self.block_bytes):
            # another thread took the budget meanwhile
            raise self._over_budget(num_blocks, pool.num_available)
        try:
            left = budget.left()
            most = affordable
            if left is not None:
                num_left = left // max(1, self.block_bytes)
                most = min(affordable, added + num_left)
            self.storage.grow(pool.num_blocks + added, most=pool.num_blocks + most)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            if is_interrupt(error):
                raise
            raise self._no_memory(f"{added} more blocks", error) from error
        else:
            pool.grow(added)
        finally:
            budget.note(memory)

    @property
    def _has_spare_memory(self) -> bool:
        """Whether cached blocks take at most half of the memory that would be free without them.
        Memory of a storage that is not elastic is taken already."""
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
        return _over_budget(needed, self.memory.block_size, free, free + self.pool.num_used, option)

    def _no_memory(self, what: str, error: Exception) -> OutOfBlocksError:
        return OutOfBlocksError(
            f"needs {what} of {self.block_size} tokens, for which there is no memory: free some, or"
            f" limit the pool by `num_blocks` ({self.memory.config.num_blocks}) or"
            f" `memory_fraction` ({self.memory.config.memory_fraction}) in `cache_config`, or in an"
            f" engine's `PagedConfig` ({error})"
        )

    @mirrored
    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies block `source` to block `target` in every layer, and counts them."""
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
        """Returns the blocks of layer `index` of `num_layers` for K/V like these, allocated on
        first use. `num_begun`: tables with blocks that the step writes to, `None` if any has
        content. Raises `ValueError` if the layer's blocks have other heads, dims or device,
        `OutOfBlocksError` if there is no memory."""
        layer: KVBlocks | None = self.storage.find(index, keys, values)
        if layer is not None:
            return layer
        if index in self.storage.layers:
            has_content = num_begun is None
            if num_begun is not None:
                num_live = sum(bool(table.block_ids) for table in self.live_tables())
                has_content = num_live > num_begun
            if has_content:
                layer = self.storage.promote(index, keys, values)
                budget.note(self.memory)
                return layer
        self._is_making = True
        try:
            # cached blocks have no content in the new layer
            self.pool.evict(self.pool.num_cached)
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
            if is_interrupt(error):
                raise
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
                number = manager.groups.index(self)
                yield from manager.tables(number)


def _over_budget(
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


class PagedMemory:
    """Pools, storages and the budget of one model or one standalone cache. `lock` guards
    allocation, growth and writes. Readers need no lock: growing a tensor leaves the old one
    unchanged."""

    def __init__(
        self,
        config: PagedConfig,
        is_bounded: bool = True,
        sizes: BlockSizes | None = None,
        keeps_cached: bool = False,
    ) -> None:
        """`is_bounded`: whether `hf_paged.budget` counts it; `False` for short checks of a model.
        `sizes`: block sizes with `block_size` `"auto"`; without it all blocks have the default
        size. `keeps_cached`: without a budget, grow beside up to `CACHED_RATIO` cached blocks for
        each block of the most in use at once, rather than evict them."""
        self.config = config
        self.is_bounded = is_bounded
        self.keeps_cached = keeps_cached
        self.sizes: BlockSizes | None = None
        if config.block_size == AUTO:
            self.sizes = sizes or BlockSizes()
        self.lock = forks.rlock()
        # an engine's lock, taken before `lock`, also in finalizers of its streams
        self.outer_lock: Any = None
        self.groups: dict[GroupSpec, GroupMemory] = {}
        self.managers: dict[tuple[GroupSpec, ...], BlockManager] = {}  # by the groups of a model
        # of the weights that computed cached blocks (`weights.WeightsGuard`)
        self.fingerprint: Hashable = None
        # graphs, which hold block addresses, by a model's specs
        self.graphs: dict[Hashable, Any] = {}
        self._limit_bytes: int | None = None
        self._released_peak_bytes = 0  # of layers freed since the last reset
        self.num_copied = self._peak_blocks = 0  # copied by copy-on-write since the last reset
        self._peak_used: dict[GroupSpec, int] = {}
        self._waste = 0.0
        self._calls = weakref.WeakSet[Any]()  # `generate` calls that run
        self._lone_call: Hashable = None  # the one that runs, unless another overlapped it
        # the most in use since `begin_call`
        self._call_blocks = 0
        self._call_used = dict[GroupSpec, int]()
        self._call_bytes = self._plain_bytes = 0  # of the last lone call that ended
        self.handles: dict[int, Handles] = {}  # of each cache, by the id of its rows
        self.is_recovery_due = False  # `recover` has begun, and not come to its end
        self._abandoned: deque[tuple[BlockManager, list[SequenceBlocks], Handles]] = deque()
        self.charged_bytes = 0  # to `hf_paged.budget`
        self.holders: list[Holder] = []  # calls that hold blocks; only appended to and removed from
        self.num_steps = 0  # of all calls, of each layer group: for those that wait for blocks
        self.last_used = time.monotonic()  # by a call, or an engine
        # With sharded heads, where other processes hold other heads of the same blocks. `least`
        # returns the minimum of a number over all processes; `mirror` is notified of changes to
        # blocks if this process does the bookkeeping for all.
        self.least: Callable[[int], int] | None = None
        self.mirror: Mirror | None = None
        if is_bounded:
            budget.join(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedMemory:
        return self  # blocks are shared by refcount; a copied cache forks its tables

    def __reduce__(self) -> tuple[Any, ...]:
        # each layer group pickles the blocks it holds
        return PagedMemory, (self.config, True, self.sizes)

    def block_size_of(self, spec: GroupSpec) -> int:
        """Returns the tokens per block of a group that does not hold states."""
        size = self.config.block_size
        if isinstance(size, str) and self.sizes is not None:
            return self.sizes.of(spec)
        return int(size)

    @property
    def block_size(self) -> int:
        """The largest block size of the groups, except those of states."""
        size = self.config.block_size
        if not isinstance(size, str):
            return int(size)
        groups = list(self.groups.values())
        sizes = (group.block_size for group in groups if not group.holds_states)
        return max(sizes, default=DEFAULT_BLOCK_SIZE)

    def better_sizes(self) -> BlockSizes | None:
        """Returns better block sizes for the lengths seen since, if any, for a new memory. `None`
        while a table holds a block, or while cached prefixes are worth keeping: one has been hit,
        or few sequences have ended so far. May be called without the lock."""
        if self.sizes is None or self.is_used:
            return None
        managers = list(self.managers.values())
        has_served = any(manager.num_hits for manager in managers)
        may_serve = has_served or self.sizes.num_ended < MIN_UNSERVED
        groups = list(self.groups.values())
        if may_serve and any(group.pool.num_cached for group in groups):
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
                made = BlockManager(
                    groups,
                    self.block_size,
                    lambda: memory.num_obtainable(groups),
                    num_total=lambda: memory.num_obtainable(groups, if_unused=True),
                )
                if self.sizes is not None:
                    made.note_length = self.sizes.note
                made.num_withheld, made.release_unused = (
                    lambda: memory.num_withheld,
                    lambda: memory.release_unused(),
                )
                made.is_used = lambda: memory.is_used
                self.managers[specs] = made
            return self.managers[specs]

    def abandon(self, manager: BlockManager, rows: list[SequenceBlocks], handles: Handles) -> None:
        """Frees the rows of a collected cache without waiting: at once, or, if a thread holds the
        lock, when blocks are next taken or counted."""
        if not sys or sys.is_finalizing():  # the interpreter ends, and has cleared modules
            return
        self._abandoned.append((manager, rows, handles))
        if not self.lock._is_owned():  # type: ignore[attr-defined]  # else its holder is in the middle of a change
            self.free_abandoned()

    @restoring
    def changing(self) -> Iterator[None]:
        """Around a change of tables, with the lock: recovers after an exception that may have split
        it. What a caller may have got wrong is checked before."""
        with self.lock:
            if self.is_recovery_due:
                self.recover()
            try:
                yield
            except (OutOfBlocksError, TierError):  # raised with nothing changed
                raise
            except BaseException:
                self.recover()
                raise

    def recover(self) -> None:
        """After an exception that may have split a change: makes all pools agree with the tables of
        living sequences, and drops what is cached. Copies that were queued are lost: their
        sequences must be computed again. If this raises, the next change, or the next count of
        blocks, begins with it."""
        with self.lock:
            self.is_recovery_due = True
            for manager in self.managers.values():
                manager.recover()
            for group in self.groups.values():
                group.pool.recount(table.block_ids for table in group.live_tables())
            self.is_recovery_due = False

    def free_abandoned(self) -> None:
        """Frees the rows of collected caches, unless another thread holds the lock, and, unless
        this thread does, the blocks of sequences that an exception lost."""
        groups = list(self.groups.values())
        is_due = self.is_recovery_due
        for group in groups:
            is_due |= group.pool.has_lost
        if is_due and not self.lock._is_owned():  # type: ignore[attr-defined]
            with self.lock:
                if self.is_recovery_due:
                    self.recover()
                for group in groups:
                    group.pool.recount(table.block_ids for table in group.live_tables())
        if not self._abandoned:
            return
        while self._abandoned and self.lock.acquire(blocking=False):
            try:
                manager, rows, handles = self._abandoned.popleft()
                try:
                    with torch._C.DisableTorchFunction(), _disable_current_modes():
                        # those of any thread's code
                        handles.gather()
                except Exception as error:
                    if is_interrupt(error):
                        raise
                    logger.warning(
                        Topic.MEMORY("keys or values that outlive their cache are lost: %s"),
                        error,
                    )
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
        num_used = 0
        for group in self.groups.values():
            if group.spec.is_counted:
                num_used += group.pool.num_used
        return num_used

    @property
    def is_used(self) -> bool:
        """Whether any table holds a block. May be read without the lock."""
        self.free_abandoned()
        groups = list(self.groups.values())
        return any(group.pool.num_used for group in groups)

    @property
    def taken_bytes(self) -> int:
        """Bytes that are no longer free."""
        return sum(map(_TAKEN_BYTES, self.groups.values()))

    @property
    def num_cached(self) -> int:
        """Cached blocks, which no table holds, over all groups."""
        return sum(group.pool.num_cached for group in self.groups.values())

    def num_obtainable(self, groups: Sequence[GroupMemory], if_unused: bool = False) -> int:
        """Returns how many blocks these groups may still take, including cached ones, or with
        `if_unused` could take if no table of this or another pool held a block; `sys.maxsize`
        without a budget. With a limit in bytes and blocks of different bytes, counts the
        smallest."""
        limit = sys.maxsize
        if self.config.num_blocks is not None:
            num_used = 0 if if_unused else self.num_used
            limit = self.config.num_blocks - num_used
        sizes = [group.block_bytes for group in groups if group.block_bytes]
        if not sizes:
            return limit
        total = self._most_bytes(if_unused)
        if total is None:
            return limit
        # may exceed a budget that was lowered
        if if_unused:
            held = sum(group.pool.num_blocks for group in groups)
        else:
            held = sum(group.pool.num_available for group in groups)
            all_groups = self.groups.values()
            total -= sum(group.pool.num_used * group.block_bytes for group in all_groups)
        num_affordable = total // min(sizes)
        return min(limit, max(held, num_affordable))

    @property
    def num_withheld(self) -> int:
        """Blocks that `hf_paged.budget` would allow in addition if no other pool were in use."""
        total = budget.limit(self)
        groups = self.groups.values()
        sizes = [group.block_bytes for group in groups if group.block_bytes]
        if total is None or not sizes:
            return 0
        share = budget.share(self) or 0
        num_bytes = max(0, total - share)
        return num_bytes // min(sizes)

    def make_place(self, needed: int, first: GroupMemory) -> None:
        """Evicts cached blocks, those of `first` first, so that `needed` more used blocks stay
        within `num_blocks`."""
        total = self.config.num_blocks
        used = self.num_used
        if total is None or not first.spec.is_counted:
            return
        free = total - used
        if needed > free:
            raise _over_budget(needed, self.block_size, free, total, "`num_blocks`")
        excess = used + self.num_cached + needed - total
        for group in (first, *self.groups.values()):
            if excess <= 0:
                return
            excess -= group.pool.evict(excess)

    def _most_bytes(self, if_unused: bool = False) -> int | None:
        """Returns the bytes that `memory_fraction` and `hf_paged.budget` allow, or with `if_unused`
        would allow if no other pool were in use; `None` without either."""
        if if_unused:
            most = budget.limit(self)
        else:
            most = budget.share(self)
        fraction = self.config.memory_fraction
        if fraction is not None and self._limit_bytes is None:
            limit_bytes = self.affordable_bytes()
            if self.least is not None:
                limit_bytes = self.least(limit_bytes)
            self._limit_bytes = limit_bytes
        if self._limit_bytes is None:
            return most
        if most is None:
            return self._limit_bytes
        return min(most, self._limit_bytes)

    def num_affordable(self, group: GroupMemory) -> int:
        """Returns how many more blocks `memory_fraction` and `hf_paged.budget` allow `group`."""
        block_bytes = group.block_bytes
        if not block_bytes:
            return sys.maxsize
        total = self._most_bytes()
        if total is None:
            return sys.maxsize
        left = (total - self.taken_bytes) // block_bytes
        if group.storage.is_elastic:
            return left
        num_spare_rows = group.storage.num_rows - group.pool.num_blocks
        return max(0, left) + max(0, num_spare_rows)

    def affordable_bytes(self) -> int:
        """Returns the bytes that `memory_fraction` allows, including those already taken."""
        held = Counter[torch.device]()  # bytes of a block over the device's layers
        for group in self.groups.values():
            for layer in group.storage.layers.values():
                held[layer.keys.device] += layer.block_bytes
        total = sum(held.values())
        of_devices = []  # bytes of blocks over all layers that each device has room for
        for device, count in held.items():
            device_bytes = free_bytes(device)
            if count:
                device_bytes = device_bytes * total // count
            of_devices.append(device_bytes)
        if of_devices:
            # the device that fills up first decides
            free = min(of_devices)
        else:
            free = free_bytes(torch.device("cpu"))
        fraction = self.config.memory_fraction or 1
        return int(fraction * (free + self.taken_bytes))

    def release_unused(self, but: GroupMemory | None = None) -> bool:
        """With a limit in bytes, frees the memory of groups, except `but`, in which no table holds
        a block, so that others can take it. Returns whether there were any."""
        if self.config.memory_fraction is None and budget.limit(self) is None:
            return False
        others = [group for group in self.groups.values() if group is not but]
        unused = [group for group in others if not group.pool.num_used]
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

    def begin_call(self, call: Hashable) -> None:
        """Starts to count the most blocks in use during a `generate` call."""
        self.free_abandoned()
        with self.lock:
            self._calls.add(call)
            self._lone_call = call if len(self._calls) == 1 else None
            self._call_blocks, self._call_used = 0, {}

    def end_call(self, call: Hashable, plain_bytes: int | None) -> None:
        """Notes the bytes of blocks at the call's peak, and those that plain's cache would hold
        (`None`: the call failed), unless another call overlapped it: then the blocks are those of
        both."""
        with self.lock:
            is_lone, self._lone_call = self._lone_call is call, None
            self._calls.discard(call)
            if plain_bytes is None or not is_lone:
                return
            used = ((self.groups[spec], count) for spec, count in self._call_used.items())
            self._call_bytes = sum(
                count * group.block_bytes for group, count in used if not group.holds_states
            )
            self._plain_bytes = plain_bytes
            # fewer blocks may be more bytes, where groups differ
            self._released_peak_bytes = max(self._released_peak_bytes, self._call_bytes)

    def note_peak(self) -> None:
        """Counts a step, and updates the peaks if more blocks are in use than before."""
        self.num_steps += 1
        used = self.num_used
        if used > self._call_blocks:
            self._call_blocks = used
            self._call_used = {spec: group.pool.num_used for spec, group in self.groups.items()}
        if used < self._peak_blocks or not used:
            return
        self._peak_blocks = used
        self._peak_used = {key: group.pool.num_used for key, group in self.groups.items()}
        slots = unused = 0
        for group in self.groups.values():
            if group.holds_states:
                continue
            tails = {
                table.block_ids[-1]: table.num_unused_slots
                for table in group.live_tables()
                if table.block_ids
            }
            slots += group.pool.num_used * group.block_size
            unused += sum(tails.values())
        self._waste = unused / slots if slots else 0.0

    def release(self) -> bool:
        """Frees all memory (on devices: to PyTorch's allocator), cached blocks and graphs, unless a
        table holds a block; returns whether it did. May be called at any moment, from any thread:
        running sequences hold blocks, and the next write allocates the layers again."""
        with self.lock:
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
        with self.lock:
            if any(manager.tier for manager in self.managers.values()):
                for group in self.groups.values():
                    group.pool.evict(group.pool.num_cached)

    @property
    def _peak_bytes(self) -> int:
        used = self._peak_used.items()
        of_layers = sum(count * self.groups[spec].storage.block_bytes for spec, count in used)
        return max(of_layers, self._released_peak_bytes)

    def reset_peak(self) -> None:
        self._released_peak_bytes = 0
        self._peak_blocks, self._waste, self.num_copied, self._peak_used = 0, 0.0, 0, {}
        self.note_peak()

    def stats(self) -> MemoryStats:
        """Returns the current statistics."""
        self.free_abandoned()
        with self.lock:
            groups = self.groups.values()
            managers = self.managers.values()
            tiers: list[Any] = [manager.tier for manager in managers if manager.tier is not None]
            return MemoryStats(
                block_size=self.block_size,
                block_sizes=self._choices(),
                kv_dtype=self.config.kv_dtype,
                used_blocks=self.num_used,
                peak_blocks=self._peak_blocks,
                used_bytes=sum(group.pool.num_used * group.storage.block_bytes for group in groups),
                peak_bytes=self._peak_bytes,
                call_bytes=self._call_bytes,
                plain_bytes=self._plain_bytes,
                held_bytes=self._held_bytes,
                waste=self._waste,
                copied_blocks=self.num_copied,
                cached_blocks=self.num_cached,
                shared_blocks=sum(group.pool.num_shared for group in groups),
                budget_bytes=budget.limit(),
                tier_host_bytes=sum(tier.host_bytes for tier in tiers),
                # all share one folder
                tier_disk_bytes=max((tier.disk_bytes for tier in tiers), default=0),
                tier_kept_blocks=sum(tier.num_kept for tier in tiers),
                tier_restored_blocks=sum(tier.num_restored for tier in tiers),
            )

    def _choices(self) -> dict[str, Choice]:
        choices: dict[str, Choice] = {}
        if self.sizes is None:
            return choices
        for spec, choice in self.sizes.chosen.items():
            prefix = ""
            if spec.kind.startswith("assistant"):
                prefix = f"{spec.kind}, "
            choices[f"{prefix}{group_label(spec.label)}"] = choice
        return choices

    def block_map(self) -> dict[Hashable, list[int]]:
        """Returns, by layer group, how many tables hold each block; 0 if it is free, -1 if it is
        cached."""
        with self.lock:
            groups = self.groups.items()
            return {spec.label: group.pool.states() for spec, group in groups}

    def layers(self) -> tuple[LayerKV, ...]:
        """Returns what the allocated layers store."""
        layers = []
        for spec, group in self.groups.items():
            for index, layer in group.storage.layers.items():
                forms = []
                for stored, dtype in layer.pair:
                    forms.append((stored.shape[1], stored.shape[3], dtype))
                layers.append(LayerKV(spec, index, *forms))
        return tuple(layers)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every pool agrees with the living tables."""
        self.free_abandoned()
        with self.lock:
            for group in self.groups.values():
                group.pool.check_integrity([table.block_ids for table in group.live_tables()])
            total = self.config.num_blocks
            if total is not None and self.num_used + self.num_cached > total:
                raise AssertionError(
                    f"{self.num_used} blocks in use, {self.num_cached} cached, the budget is"
                    f" {total}"
                )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the autocast dtype on `device` in this thread; `None` if autocast is off."""
    if device.type == "meta":  # without autocast in torch
        return None
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
