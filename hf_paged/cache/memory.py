"""The pools and storages of all layer groups under common limits, for one model or one
`PagedCache`. The block tables of sequences belong to managers and caches."""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import forks
from ..config import PagedConfig
from ..interrupts import is_interrupt, restoring
from ..seams import Processes, Recorder, StorageFactory
from ..threads import attempt, take_over
from ..topics import Topic
from . import budget
from .block_manager import BlockManager
from .block_pool import OutOfBlocksError
from .block_sizes import MIN_ENDED_WITHOUT_HIT, BlockSizes
from .free_memory import free_bytes_of_all, trim
from .group_memory import GroupMemory
from .groups import GroupSpec
from .handles import Handles
from .kv_blocks import LayerKV
from .memory_stats import MemoryStats, share_of_unused_slots, stats_of
from .sequence_blocks import SequenceBlocks
from .storage import storage_of
from .waits import Holder

logger = logging.getLogger(__name__)


class PagedMemory:
    """The pools, the storages and the limits of one model or one standalone cache. `lock` guards
    allocation, growth and writes. Readers need no lock: growing a tensor leaves the old one
    unchanged."""

    def __init__(
        self,
        config: PagedConfig,
        is_bounded: bool = True,
        sizes: BlockSizes | None = None,
        keeps_cached: bool = False,
        make_storage: StorageFactory | None = None,
        processes: Processes | None = None,
        outer_lock: Any = None,
    ) -> None:
        """`is_bounded`: whether `hf_paged.budget` limits this memory; `False` for short checks of a
        model. `sizes`: the block sizes; by default, all blocks have the config's size or, under
        `block_size="auto"`, the default one. `keeps_cached`: whether pools without a limit keep up
        to `CACHED_RATIO` cached blocks per block of their peak use, and grow instead of evicting
        them. `make_storage`: makes the storage of a layer group with keys and values; by default,
        the storage that the config selects. `processes`: the processes that compute each step
        together, each with some heads of every block. `outer_lock`: an engine's lock, acquired
        before `lock`."""
        self.config = config
        self.make_storage: StorageFactory = make_storage or storage_of
        self.is_bounded = is_bounded
        self.keeps_cached = keeps_cached
        self.processes = processes
        self.sizes = sizes or BlockSizes(block_size=config.block_size)
        self.lock = forks.rlock()
        self.outer_lock = outer_lock
        self.groups: dict[GroupSpec, GroupMemory] = {}
        self.managers: dict[tuple[GroupSpec, ...], BlockManager] = {}  # by the specs of a model
        # fingerprint of the weights that computed cached blocks (`model.weights.WeightsGuard`)
        self.fingerprint: Hashable = None
        # recorders of steps, by the specs of a model; recordings contain block addresses
        self.recorders: dict[Hashable, Recorder] = {}
        # bytes that `memory_fraction` allows; `None` until computed
        self._fraction_limit: int | None = None
        # since the last reset: the highest peak, in bytes, of freed layers and of ended calls
        self._released_peak_bytes = 0
        self.num_copied = 0  # blocks copied by copy-on-write since the last reset
        self.peak_blocks = 0  # maximum of blocks in use at once since the last reset
        self._peak_used: dict[GroupMemory, int] = {}
        self.waste = 0.0  # share of the slots of used blocks that held no token at the peak
        self._calls = weakref.WeakSet[Any]()  # running `generate` calls
        self._lone_call: Hashable = None  # the running call, unless another has overlapped it
        self._call_blocks = 0  # maximum of blocks in use at once since `begin_call`
        self._call_used: dict[GroupMemory, int] = {}  # the blocks of each group at that moment
        # of the last completed call that no other call overlapped (`MemoryStats`)
        self.call_bytes = self.plain_bytes = 0
        self.handles: dict[int, Handles] = {}  # of each cache, by the `id` of its `CacheRows`
        self.is_recovery_due = False  # `recover` has begun but not finished
        self.abandoned: deque[tuple[list[SequenceBlocks], Handles]] = deque()
        self.charged_bytes = 0  # bytes charged to `hf_paged.budget`
        self.holders: list[Holder] = []  # calls that hold blocks; only appended to and removed from
        # grows with every step of any call, so that waiting calls see that others progress
        self.progress_count = 0
        self.note_use()
        if is_bounded:
            budget.join(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedMemory:
        return self  # shared: a copied cache forks its tables, and refcounts count both

    def __reduce__(self) -> tuple[Any, ...]:
        # the rows of a cache pickle the content of their blocks
        return PagedMemory, (self.config, True, self.sizes, False, self.make_storage)

    @property
    def block_size(self) -> int:
        """The largest block size, in tokens, of groups of keys and values."""
        groups = list(self.groups.values())
        sizes = (group.block_size for group in groups if not group.holds_states)
        return max(sizes, default=self.sizes.default)

    def better_sizes(self) -> BlockSizes | None:
        """Returns block sizes for a new memory if the recorded lengths suggest other sizes than
        the current ones, otherwise `None`. Also returns `None` while a table holds a block, and
        while cached prefixes may be reused: one has been, or fewer than `MIN_ENDED_WITHOUT_HIT`
        sequences have ended. May be called without the lock."""
        if self.sizes.is_fixed or self.is_used:
            return None
        has_hits = any(manager.num_hits for manager in list(self.managers.values()))
        may_hit = has_hits or self.sizes.num_ended < MIN_ENDED_WITHOUT_HIT
        groups = list(self.groups.values())
        if may_hit and any(group.pool.num_cached for group in groups):
            return None
        return self.sizes.better_sizes()

    def group(self, spec: GroupSpec) -> GroupMemory:
        """Returns the layer group of a spec, created on first use."""
        with self.lock:
            if spec not in self.groups:
                self.groups[spec] = GroupMemory(self, spec)
            return self.groups[spec]

    def manager(self, specs: Iterable[GroupSpec]) -> BlockManager:
        """Returns the manager of sequences with a table in each of these groups."""
        specs = tuple(specs)
        with self.lock:
            if specs not in self.managers:
                groups = [self.group(spec) for spec in specs]
                self.managers[specs] = BlockManager(groups, weakref.proxy(self))
            return self.managers[specs]

    def abandon(self, rows: list[SequenceBlocks], handles: Handles) -> None:
        """Frees the rows of a garbage-collected cache without waiting for the lock: now or, if a
        thread holds it, the next time that blocks are counted or run short."""
        if not sys or sys.is_finalizing():  # at exit the interpreter clears modules
            return
        self.abandoned.append((rows, handles))
        if not self.lock._is_owned():  # type: ignore[attr-defined]  # else this thread may be in the middle of a change
            self._free_rows()

    @restoring
    def changing(self) -> Iterator[None]:
        """A context for a change of tables: holds the lock, and recovers after an exception that
        may have left the change half done. Validate arguments before you enter this context. If
        garbage collection ends the context in another thread, it does not wait for the lock."""
        owner_id = threading.get_ident()
        with self.lock:
            if self.is_recovery_due:
                self.recover()
            try:
                yield
            except OutOfBlocksError:  # raised with nothing changed
                raise
            except BaseException:
                self.is_recovery_due = True
                if take_over(self.lock, owner_id):
                    self.recover()
                raise

    def recover(self) -> None:
        """Makes all pools agree with the tables of live sequences after an exception that may have
        left a change half done. Drops all cached blocks, the blocks of `BlockManager.other_owners`,
        and queued copies, whose sequences must then be recomputed. If this method raises, the next
        change or count of blocks calls it again."""
        with self.lock:
            self.is_recovery_due = True
            for manager in self.managers.values():
                manager.recover()
            self._recount()
            self.is_recovery_due = False

    def _recount(self) -> None:
        for group in self.groups.values():
            group.pool.recount(table.block_ids for table in group.live_tables(self))

    def free_abandoned(self) -> None:
        """Frees the rows of garbage-collected caches, unless another thread holds the lock. Unless
        this thread holds it, also finishes a recovery that is due, and recounts all pools if a
        table with blocks was garbage-collected."""
        may_recount = not self.lock._is_owned()  # type: ignore[attr-defined]
        if may_recount:
            self._recount_if_due()
        self._free_rows()
        if may_recount:  # caches in cycles only abandon their blocks
            self._recount_if_due()

    def _recount_if_due(self) -> None:
        groups = list(self.groups.values())
        if self.is_recovery_due or any(group.pool.needs_recount for group in groups):
            with self.lock:
                if self.is_recovery_due:
                    self.recover()
                self._recount()

    def _free_rows(self) -> None:
        """Frees the rows of garbage-collected caches, unless another thread holds the lock."""
        while self.abandoned:
            with attempt(self.lock) as is_held:
                if not is_held:
                    return
                rows, handles = self.abandoned.popleft()
                try:
                    with torch._C.DisableTorchFunction(), _disable_current_modes():
                        # this thread may be inside other code's torch modes
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
                        blocks.end()

    def gather_handles(self) -> None:
        """Gathers the handles of all caches."""
        for handles in list(self.handles.values()):
            handles.gather()

    @property
    def num_used(self) -> int:
        """Blocks that tables hold, over all counted groups."""
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
        return any(group.pool.num_used for group in list(self.groups.values()))

    @property
    def occupied_bytes(self) -> int:
        """Bytes of memory that the groups occupy."""
        return sum(group.occupied_bytes for group in self.groups.values())

    @property
    def num_cached(self) -> int:
        """Cached blocks over all groups."""
        return sum(group.pool.num_cached for group in self.groups.values())

    def num_available(self, groups: Sequence[GroupMemory], assume_unused: bool = False) -> int:
        """Returns how many blocks these groups can still allocate, including cached ones;
        `sys.maxsize` without a limit. With `assume_unused`, how many they could allocate if no
        table of this or another pool held a block. Under a limit in bytes, counts blocks of the
        smallest size."""
        limit = sys.maxsize
        if self.config.num_blocks is not None:
            num_used = 0 if assume_unused else self.num_used
            limit = self.config.num_blocks - num_used
        block_bytes = _least_block_bytes(groups)
        max_bytes = self._max_bytes(assume_unused) if block_bytes else None
        if max_bytes is None:
            return limit
        # existing blocks count, even if a lowered budget no longer allows them
        if assume_unused:
            num_existing = sum(group.pool.num_blocks for group in groups)
        else:
            num_existing = sum(group.pool.num_available for group in groups)
            all_groups = self.groups.values()
            max_bytes -= sum(group.pool.num_used * group.block_bytes for group in all_groups)
        return min(limit, max(num_existing, max_bytes // block_bytes))

    @property
    def num_held_by_others(self) -> int:
        """Additional blocks that `hf_paged.budget` would allow if no other pool were in use."""
        block_bytes = _least_block_bytes(self.groups.values())
        if budget.limit(self) is None or not block_bytes:
            return 0
        return budget.bytes_of_others(self) // block_bytes

    def _max_bytes(self, assume_unused: bool = False) -> int | None:
        """Returns the bytes that `memory_fraction` and `hf_paged.budget` allow; `None` without
        either. With `assume_unused`, as if no other pool were in use."""
        budget_bytes = budget.limit(self)
        if budget_bytes is not None and not assume_unused:
            budget_bytes -= budget.bytes_of_others(self)
        if self.config.memory_fraction is not None and self._fraction_limit is None:
            fraction_limit = self.fraction_bytes()
            if self.processes is not None:
                fraction_limit = self.processes.minimum(fraction_limit)
            self._fraction_limit = fraction_limit
        if self._fraction_limit is None:
            return budget_bytes
        if budget_bytes is None:
            return self._fraction_limit
        return min(budget_bytes, self._fraction_limit)

    def growth_limit(self, group: GroupMemory) -> int:
        """Returns how many blocks `group` may add; `sys.maxsize` if no limit in bytes applies."""
        block_bytes = group.block_bytes
        max_bytes = self._max_bytes() if block_bytes else None
        if max_bytes is None:
            return sys.maxsize
        num_allowed = max(0, max_bytes - self.occupied_bytes) // block_bytes
        if group.storage.is_elastic:
            return num_allowed
        num_spare_blocks = group.storage.num_allocated_blocks - group.pool.num_blocks
        return num_allowed + max(0, num_spare_blocks)

    def fraction_bytes(self) -> int:
        """Returns the bytes that `memory_fraction` allows, including `occupied_bytes`."""
        block_bytes = Counter[torch.device]()  # bytes of a block over the device's layers
        for group in self.groups.values():
            for layer in group.storage.layers.values():
                block_bytes[layer.keys.device] += layer.block_bytes
        fraction = self.config.memory_fraction or 1
        return int(fraction * (free_bytes_of_all(block_bytes) + self.occupied_bytes))

    def release_unused(self, excluded_group: GroupMemory | None = None) -> bool:
        """Under a limit in bytes, frees the memory of every group without used blocks, except
        `excluded_group`. Returns whether it freed any."""
        if self.config.memory_fraction is None and budget.limit(self) is None:
            return False
        unused_groups = [
            group
            for group in self.groups.values()
            if group is not excluded_group and not group.pool.num_used and group.occupied_bytes
        ]
        if unused_groups:
            self._release(unused_groups)
        return bool(unused_groups)

    def _release(self, groups: Iterable[GroupMemory]) -> None:
        """Frees the memory of these groups and of recorded steps."""
        self._released_peak_bytes = self.peak_bytes
        for group in groups:
            group.release()
        for recorder in self.recorders.values():
            recorder.release()
        self.update_charge()

    def update_charge(self) -> None:
        """Charges `hf_paged.budget` for the current bytes. Called with the lock held."""
        self.charged_bytes = self.occupied_bytes

    def note_use(self) -> None:
        """Sets `last_used` to now, when a call or an engine starts or stops using the memory."""
        self.last_used = time.monotonic()

    def drop_recorders(self) -> None:
        """Drops the recorders. Called when no engine or model will run steps on this memory any
        more: callers' caches may keep it alive, but need no recorders."""
        self.recorders = {}

    def begin_call(self, call: Hashable) -> None:
        """Begins to track the peak of used blocks during a `generate` call."""
        self.free_abandoned()
        with self.lock:
            self._calls.add(call)
            self._lone_call = call if len(self._calls) == 1 else None
            self._call_blocks, self._call_used = 0, {}

    def end_call(self, call: Hashable, plain_bytes: int | None) -> None:
        """Unless the call failed (`plain_bytes` is `None`) or another call overlapped it, records
        the bytes of keys and values at its peak, and `plain_bytes`, the bytes of a plain cache."""
        with self.lock:
            is_lone, self._lone_call = self._lone_call is call, None
            self._calls.discard(call)
            if plain_bytes is None or not is_lone:
                return
            self.call_bytes = sum(
                count * group.block_bytes
                for group, count in self._call_used.items()
                if not group.holds_states
            )
            self.plain_bytes = plain_bytes
            # peaks are found by the number of blocks: if groups' blocks differ in size, fewer
            # blocks may take more bytes
            self._released_peak_bytes = max(self._released_peak_bytes, self.call_bytes)

    def note_progress(self) -> None:
        """Counts a step; updates the call's peak, and the peaks since the last reset, if the blocks
        in use reach them."""
        self.progress_count += 1
        num_used = self.num_used
        if num_used > self._call_blocks:
            self._call_blocks = num_used
            self._call_used = {group: group.pool.num_used for group in self.groups.values()}
        if num_used and num_used >= self.peak_blocks:
            self._set_peak(num_used)

    def release(self) -> bool:
        """Frees all memory (on a device: to PyTorch's allocator) and cached blocks, unless a table
        holds a block; returns whether it did. May be called at any time from any thread, since
        running sequences hold blocks. The next write allocates the layers again. If it can reuse
        their old addresses (`Storage.released`), recorded steps stay valid."""
        with self.changing():
            if self.is_used:
                return False
            self._release(self.groups.values())
            self._fraction_limit = None
        trim()
        return True

    def evict_cached(self) -> None:
        """Evicts all cached blocks, for tiers to keep. Does nothing if no manager has a tier."""
        with self.changing():
            if any(manager.tier is not None for manager in self.managers.values()):
                for group in self.groups.values():
                    group.pool.evict(group.pool.num_cached)

    @property
    def peak_bytes(self) -> int:
        """The maximum number of bytes of blocks in use at once, since the last reset."""
        counts = self._peak_used.items()
        layer_bytes = sum(count * group.storage.block_bytes for group, count in counts)
        return max(layer_bytes, self._released_peak_bytes)

    def reset_peak(self) -> None:
        """Restarts the peaks from the current use, and the count of copied blocks from 0."""
        self._released_peak_bytes = self.num_copied = 0
        self._set_peak(self.num_used)

    def _set_peak(self, num_used: int) -> None:
        self.peak_blocks = num_used
        self._peak_used = {group: group.pool.num_used for group in self.groups.values()}
        self.waste = share_of_unused_slots(self.groups.values())

    def stats(self) -> MemoryStats:
        """Returns the current statistics."""
        self.free_abandoned()
        with self.lock:
            return stats_of(self)

    def block_map(self) -> dict[tuple[str, int | None], list[int]]:
        """Returns, by the label of each layer group, how many tables hold each block: 0 for a free
        block, -1 for a cached one."""
        with self.lock:
            groups = self.groups.items()
            return {spec.label: group.pool.holder_counts() for spec, group in groups}

    def layers(self) -> tuple[LayerKV, ...]:
        """Returns the formats of keys and values of each allocated layer."""
        return tuple(
            LayerKV(spec, index, layer.formats)
            for spec, group in self.groups.items()
            for index, layer in group.storage.layers.items()
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless pools agree with live tables and with `num_blocks`."""
        self.free_abandoned()
        is_mid_change = self.lock._is_owned()  # type: ignore[attr-defined]
        with self.lock:
            if not is_mid_change:  # garbage collection may have run since `free_abandoned`
                self._recount_if_due()
            for group in self.groups.values():
                group.pool.check_integrity([table.block_ids for table in group.live_tables(self)])
            total = self.config.num_blocks
            if total is not None and self.num_used + self.num_cached > total:
                raise AssertionError(
                    f"{self.num_used} blocks are in use and {self.num_cached} cached, but"
                    f" `num_blocks` is {total}"
                )


def _least_block_bytes(groups: Iterable[GroupMemory]) -> int:
    """Returns the bytes of the groups' smallest block; 0 while unknown."""
    sizes = (group.block_bytes for group in groups if group.block_bytes)
    return min(sizes, default=0)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the autocast dtype on `device` in this thread; `None` if autocast is off."""
    if device.type == "meta":  # torch has no autocast for it
        return None
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
