"""Allocates, shares and frees the blocks of all sequences over all layer groups, and attaches the
blocks of cached prefixes. Holds no tensors; the scheduler decides which requests get blocks."""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..seams import Tier
from .block_pool import BlockTable, OutOfBlocksError
from .epochs import Epochs
from .groups import UNBOUNDED
from .prefix_index import PrefixIndex
from .sequence_blocks import NO_BLOCKS, UNCACHED, SequenceBlocks

if TYPE_CHECKING:  # not imported at run time: they use tensors
    from .group_memory import GroupMemory
    from .memory import PagedMemory


class BlockManager:
    """Allocates blocks to sequences: `SequenceBlocks.tables[i]` belongs to `groups[i]`. The copies
    of copy-on-write that `append` needs wait until `flush_copies`; `extend` makes its copies
    immediately. `memory` owns the groups and limits their blocks."""

    def __init__(self, groups: Sequence[GroupMemory], memory: PagedMemory) -> None:
        """`memory` may be a weak proxy, since the memory holds its managers."""
        self.groups = list(groups)
        self.memory = memory
        # records lengths; stored, since `memory` may be collected before the sequences end
        self._length_recorder = memory.sizes
        self.prefix_caching = True  # whether full blocks are cached and reused for equal prefixes
        block_sizes = [group.block_size for group in groups]
        sizes = [size for size in block_sizes if size < UNBOUNDED] or [memory.block_size]
        # cached prefixes end at multiples of this size, where blocks of all groups end, since sizes
        # are powers of two
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
        self._sequences = weakref.WeakKeyDictionary[SequenceBlocks, None]()  # live ones
        # owners of blocks with other content (adapter weights); each has a `recover` method
        self.other_owners = weakref.WeakSet[Any]()
        states = [index for index, group in enumerate(groups) if group.holds_states]
        self.has_states = bool(states)  # if so, `truncate` cannot restore the earlier states
        # index of the first group of states that is not empty; `None` if there is none
        self._state_group = next((index for index in states if specs[index].is_counted), None)
        self._copies: list[dict[int, int]] = [{} for _ in groups]  # source by target
        self.epochs = Epochs()
        # how often a cached prefix was attached to a sequence, or restored from a tier or a file
        self.num_hits = 0
        # error of a group in the last `take`; `None` if that succeeded or `num_free` was too small
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
        return self.prefix_caching and self._state_group is not None

    @property
    def num_unsized(self) -> int:
        """Groups whose bytes per block are unknown although a budget depends on them, so that
        `num_free` may be too large."""
        num_unsized = 0
        for group in self.groups:
            num_unsized += not group.is_sized
        return num_unsized

    @property
    def num_total(self) -> int:
        """Blocks that would be available if no table of this or another pool held any."""
        return self.memory.num_available(self.groups, if_unused=True)

    def num_spanned(
        self,
        first: int,
        end: int,
        chunk: int,
        blocks: SequenceBlocks = NO_BLOCKS,
    ) -> list[int]:
        """Returns each group's `GroupSpec.num_spanned` for a sequence that holds `blocks`."""
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

    def sequences(self) -> list[SequenceBlocks]:
        """Returns the live sequences."""
        return [*self._sequences]

    def tables(self, index: int, *others: Iterable[SequenceBlocks]) -> Iterator[BlockTable]:
        """Yields the group's tables of all live sequences, and of `others`."""
        # copied, since garbage collection may remove sequences during the iteration
        sequences = dict.fromkeys([*self._sequences, *itertools.chain(*others)])
        return (blocks.tables[index] for blocks in sequences)

    def new(self) -> SequenceBlocks:
        """Returns the blocks of a new sequence: empty tables."""
        tables = tuple(BlockTable(group.pool, group.block_size) for group in self.groups)
        blocks = SequenceBlocks(tables, self.epochs.current)
        self._sequences[blocks] = None
        return blocks

    def append(
        self,
        blocks: SequenceBlocks,
        num_tokens: int,
        can_skip: bool = False,
        num_committed: int = sys.maxsize,
    ) -> bool:
        """Extends the sequence by `num_tokens` tokens and allocates their slots. Returns `False`,
        with the sequence not extended, if too few blocks are free. First frees window blocks, as
        `trim` does; pass `num_committed` if `truncate` may go back to that many tokens. With
        `can_skip`, an empty sequence gets blocks only for new tokens that later queries see."""
        tables = blocks.tables
        can_skip = can_skip and not any(table.block_ids for table in tables)
        if can_skip:
            for table in tables:
                table.free()  # an earlier call may have skipped blocks before it ran out of blocks
        length = tables[0].num_tokens
        if not length:
            blocks.epoch = self.epochs.current
        end = length + num_tokens
        if can_skip:
            for group, table in zip(self.groups, tables):
                table.skip(group.spec.first_visible(end))
        self.trim(blocks, num_committed)
        allocated_ids = None
        while allocated_ids is None:
            needs = [table.num_needed_blocks(end - table.num_tokens) for table in tables]
            allocated_ids = self.take(needs, tables)
            if allocated_ids is None and not self._unregister_state(blocks):
                return False
        for table, copies, new_ids in zip(tables, self._copies, allocated_ids):
            unused_ids = new_ids[table.num_needed_blocks(end - table.num_tokens) :]
            if unused_ids:  # `take` dropped this sequence's snapshot, so its slot needs no copy
                table.pool.release(unused_ids)
                new_ids = new_ids[: -len(unused_ids)]
            copy = table.append(end - table.num_tokens, new_ids)
            if copy is not None:
                source, target = copy
                # a source that itself awaits a copy has its content in that copy's source
                copies[target] = copies.get(source, source)
        blocks.capacity = -(-end // self.node_size) * self.node_size
        return True

    def reserve_next(self, blocks: SequenceBlocks) -> bool:
        """Allocates a slot for the next token, so that a step only has to count the token. Returns
        `False` if too few blocks are free, or if a block must be copied first."""
        tables = blocks.tables
        if tables[0].num_tokens < blocks.capacity:
            return True
        has_read_only_tail = any(table.read_only_tail is not None for table in tables)
        if has_read_only_tail or not self.append(blocks, 1):
            return False
        for table in tables:
            table.num_tokens -= 1
        return True

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

    def trim(self, blocks: SequenceBlocks, num_committed: int = sys.maxsize) -> None:
        """Frees window blocks that no later query sees; with `num_committed`, only those that no
        query after the first `num_committed` tokens sees. Must not be called between the scheduling
        of tokens and their computation."""
        if not self.has_windows:
            return
        for group, table in zip(self.groups, blocks.tables):
            num_tokens = min(table.num_tokens, num_committed)
            table.drop_before(group.spec.first_visible(num_tokens))

    def take(
        self,
        needs: Sequence[int],
        tables: Sequence[BlockTable] | None = None,
    ) -> list[list[int]] | None:
        """Allocates `needs[i]` blocks of each `groups[i]`, with refcount 1, for `tables[i]`, if
        given (`BlockPool.take`). Returns their ids by group; `None` if limits or free memory allow
        too few. If it returns `None` or raises, nothing is allocated."""
        self.take_error = None
        are_free = [
            not needed or group.has_free(needed) for group, needed in zip(self.groups, needs)
        ]
        if False in are_free:
            groups = zip(self.groups, needs)
            num_counted = sum(needed for group, needed in groups if group.spec.is_counted)
            if num_counted and num_counted > self.num_free:
                return None
        allocated_ids: list[list[int]] = []
        try:
            for index, (group, needed) in enumerate(zip(self.groups, needs)):
                after = tables[index].block_ids if tables else ()
                if not needed:
                    allocated_ids.append([])
                elif are_free[index] and needed <= group.pool.num_free:
                    # checked again: freeing blocks for another group may have shrunk this pool
                    allocated_ids.append(group.pool.allocate(needed, after))
                else:
                    allocated_ids.append(group.take(needed, after))
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

    def _unregister_state(self, blocks: SequenceBlocks) -> bool:
        """Drops the snapshot that the prefix cache keeps in the sequence's state slot, so that the
        sequence can write to the slot. Returns `False` if there is none, or if another table holds
        the slot."""
        if self._state_group is None:
            return False
        table = blocks.tables[self._state_group]
        for slot in table.block_ids:
            if table.pool.refcount(slot) == 1 and table.pool.is_kept(slot):
                table.pool.invalidate(slot)
                return True
        return False

    def truncate(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Removes all tokens from `num_tokens` on; restores no states. Raises `ValueError`, and
        changes nothing, if the new end lies in blocks that left the window."""
        for table in blocks.tables:
            table.check_truncate(num_tokens)
        for table in blocks.tables:
            table.truncate(num_tokens)
        blocks.limit_capacity(num_tokens)
        if blocks.num_registered * self.node_size > num_tokens:
            blocks.node, blocks.num_registered = None, 0

    def fork(self, blocks: SequenceBlocks) -> SequenceBlocks:
        """Returns a sequence with the same tokens, which shares their blocks (copy-on-write)."""
        if not blocks.tables:
            return self.new()
        tables = tuple(table.fork() for table in blocks.tables)
        blocks.limit_capacity(tables[0].num_tokens)  # both now share the tail
        child = SequenceBlocks(
            tables, blocks.epoch, blocks.node, blocks.num_registered, blocks.capacity
        )
        self._sequences[child] = None
        return child

    def end(self, blocks: SequenceBlocks) -> None:
        """Frees a finished sequence and records its length for `block_size="auto"`."""
        if blocks.tables:
            length = blocks.tables[0].num_tokens
            if length and self._length_recorder is not None:
                self._length_recorder.note(length)
        self.free(blocks)

    def free(self, blocks: SequenceBlocks) -> None:
        """Frees every block of the sequence, and removes the sequence from the manager."""
        is_counted = blocks in self._sequences
        for copies, table in zip(self._copies, blocks.tables):
            if table.block_ids and not is_counted:  # of a garbage-collected cycle: recounts miss it
                table.abandon()
            if copies:
                for block_id in table.block_ids:
                    if table.pool.refcount(block_id) == 1:
                        # the next holder may write to the block before the copy runs
                        copies.pop(block_id, None)
            table.free()
        blocks.forget_registered()
        self._sequences.pop(blocks, None)

    def flush_copies(self) -> None:
        """Runs the queued copies, one batch per group."""
        for group, copies in zip(self.groups, self._copies):
            if copies:
                group.copy_blocks([(source, target) for target, source in copies.items()])
                copies.clear()

    def recover(self) -> None:
        """Drops queued copies, the prefix cache and the blocks of `other_owners`, even if an
        exception left them half changed. The caller must then recount the pools."""
        self._copies = [{} for _ in self.groups]
        self.index.recover()
        for owner in list(self.other_owners):
            owner.recover()
        for blocks in list(self._sequences):
            blocks.forget_registered()

    def match(
        self,
        blocks: SequenceBlocks,
        token_ids: Sequence[Hashable],
        namespace: Hashable,
        min_tokens: int = 0,
    ) -> int:
        """Attaches the longest cached prefix of `token_ids` to an empty sequence, if that prefix
        has at least `min_tokens` tokens. A prefix consists of whole blocks and excludes the last
        token, whose logits are needed. Returns the number of attached tokens."""
        if not self.prefix_caching or namespace is UNCACHED:
            return 0
        size = self.node_size
        max_nodes = (len(token_ids) - 1) // size
        links = self.index.find(token_ids, namespace, max_nodes)
        path = [link.node for link in links if link.node is not None]
        num_nodes = len(path)
        num_tokens = num_nodes * size
        if not path or num_tokens < min_tokens:
            return 0
        self.num_hits += 1
        for group_index, table in enumerate(blocks.tables):
            needed_nodes = self.index.needed_nodes(group_index, num_nodes)
            block_ids = (path[index].block_ids[group_index] for index in needed_nodes)
            cached_ids = [block_id for block_id in block_ids if block_id is not None]
            table.attach(cached_ids, needed_nodes.start * size // table.block_size, num_tokens)
        blocks.node, blocks.num_registered = path[-1], num_nodes
        blocks.epoch = min(node.epoch for node in path)
        blocks.capacity = num_tokens
        return num_tokens

    def set_tier(self, tier: Tier | None) -> None:
        """Sets the tier that stores blocks evicted from the prefix cache; `None`: no tier."""
        self.tier = tier
        self.index.offload_to(None if tier is None else self._offload)

    def _offload(self, group_index: int, block_id: int, digest: bytes) -> None:
        """Passes a block that the prefix cache is evicting to the tier."""
        assert self.tier is not None
        self.tier.keep(group_index, block_id, digest, self.epochs.are_verified)

    def num_shared_blocks(self, blocks: SequenceBlocks, num_rows: int) -> int:
        """Returns how many registered blocks of a sequence have more holders than the `num_rows`
        rows of its request; 0 without prefix caching, or if cached prefixes need snapshots."""
        if not self.prefix_caching or self.keeps_states:
            return 0
        num_tokens = blocks.num_registered * self.node_size
        num_shared = 0
        for table in blocks.tables:
            end = max(0, num_tokens // table.block_size - table.num_dropped)
            for block_id in table.block_ids[:end]:
                num_shared += table.pool.refcount(block_id) > num_rows
        return num_shared

    def num_matching(self, token_ids: Sequence[Hashable], namespace: Hashable) -> int:
        """Returns how many tokens `match` would attach if every block had a snapshot of states."""
        max_nodes = (len(token_ids) - 1) // self.node_size
        links = self.index.find(token_ids, namespace, max_nodes, ignored_group=self._state_group)
        return len(links) * self.node_size

    def register(
        self,
        blocks: SequenceBlocks,
        token_ids: Sequence[Hashable],
        num_tokens: int,
        namespace: Hashable,
    ) -> None:
        """Registers in the prefix index the blocks that the first `num_tokens` tokens fill, up to
        the last token at which blocks of all groups end. If `num_tokens` is one of the sequence's
        `stops`, also registers the sequence's state slot as a snapshot: the step that begins now
        must copy this state before it changes the state. Registered blocks must be computed before
        another sequence reads them."""
        size = self.node_size
        num_nodes = num_tokens // self.block_size * self.index.stride
        is_cached = self.prefix_caching and namespace is not UNCACHED
        if num_nodes <= blocks.num_registered or not is_cached:
            return
        if blocks.epoch < self.epochs.first_valid:  # as `Epochs.is_outdated`
            return
        is_stop = num_tokens == num_nodes * size and num_tokens in blocks.stops
        state_group = self._state_group if is_stop else None
        has_only_states = len(self.groups) == (self._state_group is not None)
        if state_group is None and has_only_states:
            return
        node = blocks.node
        first = blocks.num_registered
        if node is None or node.parent is None:
            # no block is registered yet, or an eviction has removed the node from the index
            node = self.index.root(namespace)
            first = 0
        for index in range(first, num_nodes):
            end = (index + 1) * size
            tokens = tuple(token_ids[end - size : end])
            block_ids = list(map(operator.methodcaller("block_ending_at", end), blocks.tables))
            if state_group is not None and index + 1 == num_nodes:
                (block_ids[state_group],) = blocks.tables[state_group].block_ids
            node = self.index.add(node, tokens, block_ids, blocks.epoch)
        blocks.node, blocks.num_registered = node, num_nodes

    def forget_before_period(self) -> None:
        """Drops the registered blocks of all epochs before the current period, since the model has
        changed. Sequences of these epochs register no more blocks."""
        self.index.remove_before(self.epochs.drop_before_period())

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
        for blocks in list(self._sequences):
            blocks.check_integrity()
