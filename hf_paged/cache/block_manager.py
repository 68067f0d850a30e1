"""Allocates the blocks of all sequences over all layer groups, and owns the prefix index and the
queued copies. Holds no tensors; the scheduler decides which requests get blocks."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..seams import Tier
from .block_pool import BlockTable, OutOfBlocksError
from .epochs import Epochs
from .groups import UNBOUNDED
from .prefix_index import PrefixIndex
from .sequence_blocks import NO_BLOCKS, SequenceBlocks

if TYPE_CHECKING:  # not imported at run time: they use tensors
    from .group_memory import GroupMemory
    from .memory import PagedMemory


class BlockManager:
    """Allocates blocks to sequences: `SequenceBlocks.tables[i]` belongs to `groups[i]`.
    `SequenceBlocks.append` queues its copy-on-write copies until `flush_copies`; `extend` copies
    at once. `memory` owns the groups and limits their blocks."""

    def __init__(self, groups: Sequence[GroupMemory], memory: PagedMemory) -> None:
        """`memory` may be a weak proxy, since the memory holds its managers."""
        self.groups = list(groups)
        self.memory = memory
        # a strong reference, since `memory` may be garbage-collected before the sequences end
        self.length_recorder = memory.sizes
        self.prefix_caching = True  # whether full blocks are cached and reused for equal prefixes
        block_sizes = [group.block_size for group in groups]
        sizes = [size for size in block_sizes if size < UNBOUNDED] or [memory.block_size]
        # cached prefixes end at multiples of this size: since block sizes are powers of two, blocks
        # of all groups end there
        self.block_size = max(sizes)
        self.node_size = min(sizes)  # tokens per node of the index
        # nodes per block, by group
        ratios = [1 if size == UNBOUNDED else size // self.node_size for size in block_sizes]
        pools = [group.pool for group in groups]
        specs = [group.spec for group in groups]
        windows = [spec.prefix_window for spec in specs]
        self.index = PrefixIndex(pools, windows, self.node_size, ratios)
        self.has_windows = any(spec.window is not None for spec in specs)
        self.tier: Tier | None = None  # stores blocks that the prefix cache evicts (`set_tier`)
        self.live = weakref.WeakKeyDictionary[SequenceBlocks, None]()  # sequences
        # owners of blocks with other content (adapter weights); each has a `recover` method
        self.other_owners = weakref.WeakSet[Any]()
        states = [index for index, group in enumerate(groups) if group.holds_states]
        self.has_states = bool(states)  # if so, `truncate` cannot restore the earlier states
        # index of the first group of states that is counted; `None` if there is none
        self.state_group = next((index for index in states if specs[index].is_counted), None)
        self.copies: list[dict[int, int]] = [{} for _ in groups]  # source by target
        self.epochs = Epochs()
        # how often a cached prefix was attached to a sequence, or restored from a tier or a file
        self.num_hits = 0
        # the error that a group raised in the last `take`; `None` if the call succeeded, or if
        # `num_free` was too small
        self.take_error: OutOfBlocksError | None = None

    @property
    def num_free(self) -> int:
        """Blocks that the limits allow `take` to allocate over all groups, including cached ones;
        `sys.maxsize` without a limit."""
        return self.memory.num_available(self.groups)

    @property
    def size_text(self) -> str:
        """Tokens per block, for messages."""
        if self.node_size == self.block_size:
            return f"{self.node_size}"
        return f"{self.node_size} to {self.block_size}"

    @property
    def keeps_states(self) -> bool:
        """Whether prefixes are cached and need a snapshot of the states at their end."""
        return self.prefix_caching and self.state_group is not None

    @property
    def num_unsized(self) -> int:
        """Number of groups whose bytes per block are unknown although a budget needs them. Unless
        it is 0, `num_free` may be too large."""
        num_unsized = 0
        for group in self.groups:
            num_unsized += not group.is_sized
        return num_unsized

    @property
    def num_total(self) -> int:
        """Blocks that would be available if no table of this or another pool held any."""
        return self.memory.num_available(self.groups, assume_unused=True)

    def num_spanned(
        self,
        first: int,
        end: int,
        chunk: int,
        blocks: SequenceBlocks = NO_BLOCKS,
    ) -> list[int]:
        """Returns, by group, the maximum number of counted blocks that tokens `[first, end)` of a
        sequence occupy at once, besides its `blocks`, if up to `chunk` tokens are appended at a
        time (`GroupSpec.num_spanned`)."""
        counts = [len(table.block_ids) for table in blocks.tables] or [0] * len(self.groups)
        return [
            group.spec.num_spanned(first, end, chunk, count, group.block_size)
            for group, count in zip(self.groups, counts)
        ]

    def can_take(self, needs: Sequence[int], reserve: int = 0) -> bool:
        """Whether the limits allow `take(needs)` and leave at least `reserve` blocks available.
        With several groups, also tries `take(needs)`, which may evict cached blocks, and releases
        the allocated blocks."""
        num_needed = sum(needs) + reserve
        if num_needed > self.num_free:
            return False
        if len(self.groups) == 1:
            return True
        allocated_ids = self.take(needs)  # groups compete for memory: only trying can tell
        self._release(allocated_ids or [])
        return allocated_ids is not None

    def tables(self, index: int, *others: Iterable[SequenceBlocks]) -> Iterator[BlockTable]:
        """Yields the tables of `groups[index]` in all live sequences and in `others`."""
        # copied, since garbage collection may remove sequences during the iteration
        sequences = dict.fromkeys([*self.live, *itertools.chain(*others)])
        return (blocks.tables[index] for blocks in sequences)

    def new(self) -> SequenceBlocks:
        """Returns the blocks of a new sequence: empty tables."""
        tables = tuple(BlockTable(group.pool, group.block_size) for group in self.groups)
        blocks = SequenceBlocks(tables, self.epochs.current, manager=self)
        self.live[blocks] = None
        return blocks

    def extend(
        self,
        group_index: int,
        tables: Sequence[BlockTable],
        ranges: Sequence[tuple[int, int]],
    ) -> bool:
        """Makes the tokens `ranges[i]`, a half-open interval, writable in each `tables[i]` of a
        group: copies shared and kept blocks, and extends tables that are too short. Returns
        whether a table got new blocks. Raises `OutOfBlocksError` with no table changed; after any
        other error, the pool must be recounted."""
        group = self.groups[group_index]
        counts = [max(0, end - table.num_tokens) for table, (_, end) in zip(tables, ranges)]
        writers = Counter(
            block
            for table, tokens in zip(tables, ranges)
            for block in table.read_only_blocks(*tokens)
        )
        num_needed = sum(map(BlockTable.num_new_blocks, tables, counts))
        for block_id, num_writers in writers.items():
            # the last holder writes in place, unless the prefix cache keeps the block
            num_others = group.pool.refcount(block_id) - 1 + group.pool.is_kept(block_id)
            num_needed += min(num_writers, num_others)
        if num_needed:
            group.ensure_free(num_needed)
        if writers:
            old_ids = [list(table.block_ids) for table in tables]
            try:
                rows = zip(tables, ranges)
                copies = [copy for table, tokens in rows for copy in table.copy_on_write(*tokens)]
                if copies:
                    group.copy_blocks(copies)
            except BaseException:  # a table must not hold blocks without content
                for table, block_ids in zip(tables, old_ids):
                    table.block_ids = block_ids
                raise
        for table, count in zip(tables, counts):
            table.append(count)
        return num_needed > 0

    def take(
        self,
        needs: Sequence[int],
        tables: Sequence[BlockTable] | None = None,
    ) -> list[list[int]] | None:
        """Allocates `needs[i]` blocks of each `groups[i]`, with refcount 1. Returns their ids by
        group; `None` if limits or free memory allow too few. If it returns `None` or raises,
        nothing is allocated. `tables[i]`: the table that will hold the new blocks (`after` of
        `BlockPool.allocate`)."""
        self.take_error = None
        are_free = [
            not num_needed or group.has_free(num_needed)
            for group, num_needed in zip(self.groups, needs)
        ]
        if False in are_free:
            groups = zip(self.groups, needs)
            num_counted = sum(num_needed for group, num_needed in groups if group.spec.is_counted)
            if num_counted and num_counted > self.num_free:
                return None
        allocated_ids: list[list[int]] = []
        try:
            for index, (group, num_needed) in enumerate(zip(self.groups, needs)):
                after = tables[index].block_ids if tables else ()
                if not num_needed:
                    allocated_ids.append([])
                elif are_free[index] and num_needed <= group.pool.num_free:
                    # checked again: freeing blocks for another group may have shrunk this pool
                    allocated_ids.append(group.pool.allocate(num_needed, after))
                else:
                    allocated_ids.append(group.take(num_needed, after))
        except BaseException as error:
            self._release(allocated_ids)
            if not isinstance(error, OutOfBlocksError):  # such as a `MemoryError`
                raise
            # a copy without the traceback, whose frames may keep tensors alive
            self.take_error = OutOfBlocksError(str(error))
            return None
        return allocated_ids

    def _release(self, allocated_ids: list[list[int]]) -> None:
        for group, block_ids in zip(self.groups, allocated_ids):
            group.pool.release(block_ids)

    def flush_copies(self) -> None:
        """Runs the queued copies, one batch per group."""
        for group, copies in zip(self.groups, self.copies):
            if copies:
                group.copy_blocks([(source, target) for target, source in copies.items()])
                copies.clear()

    def recover(self) -> None:
        """Drops queued copies, the prefix cache and the blocks of `other_owners`, even if an
        exception left them half changed. The caller must then recount the pools."""
        self.copies = [{} for _ in self.groups]
        self.index.recover()
        for owner in list(self.other_owners):
            owner.recover()
        for blocks in list(self.live):
            blocks.forget_registered()

    def set_tier(self, tier: Tier | None) -> None:
        """Sets the tier that stores blocks evicted from the prefix cache; `None`: no tier."""
        self.tier = tier
        self.index.offload = None if tier is None else self._offload

    def _offload(self, group_index: int, block_id: int, digest: bytes) -> None:
        """Passes a block that the prefix cache is evicting to the tier."""
        assert self.tier is not None
        self.tier.keep(group_index, block_id, digest, self.epochs.are_verified)

    def drop_cached(self) -> None:
        """Drops the prefix cache and the tier's unverified blocks. Current sequences keep their
        blocks but register no more of them."""
        self.epochs.drop()
        self.index.clear()
        if self.tier is not None:
            self.tier.discard()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless tables, index and pools agree. Sequences of other managers
        may hold blocks of the same pools."""
        self.index.check_integrity()
        for index, group in enumerate(self.groups):
            tables = (table.block_ids for table in self.tables(index))
            group.pool.check_integrity(tables, is_complete=False)
        for blocks in list(self.live):
            blocks.check_integrity()
