"""The blocks of one sequence in all layer groups: takes them from `block_manager.BlockManager`,
shares and frees them, and attaches the blocks of cached prefixes. Holds no tensors."""

from __future__ import annotations

import operator
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .block_pool import BlockTable
from .prefix_index import Node

if TYPE_CHECKING:
    from .block_manager import BlockManager

UNCACHED = object()
"""The namespace of sequences that do not use the prefix cache."""


class _WithWeakRefs:
    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class SequenceBlocks(_WithWeakRefs):
    """The blocks of one sequence: `tables[i]` belongs to the manager's `groups[i]`. All tables hold
    the same number of tokens, except in a cache's own rows, whose layers advance one after another,
    and after a forward in which the model's own code added tokens."""

    tables: tuple[BlockTable, ...] = ()
    epoch: int = 0  # the epoch (`Epochs`) of the oldest block
    node: Node | None = None  # node of the last registered block in the prefix index
    num_registered: int = 0  # number of nodes on the path to `node`, including `node`
    # number of tokens up to which a decode needs neither new nor copied blocks, but only raises
    # token counts
    capacity: int = 0
    # token counts at which a step must end, so that `register` can register the state there
    stops: tuple[int, ...] = ()
    manager: BlockManager = None  # type: ignore[assignment]  # `None` only without tables

    @property
    def is_outdated(self) -> bool:
        """Whether it has blocks from before the model changed or the whole cache was dropped."""
        return self.epoch < self.manager.epochs.first_valid

    @property
    def needs_verification(self) -> bool:
        """Whether it has registered blocks that were computed before the current span and have
        not been verified in it."""
        return self.num_registered > 0 and self.epoch < self.manager.epochs.span_start

    def forget_registered(self) -> None:
        """Forgets `node`, `num_registered` and `capacity`. The prefix index keeps its nodes."""
        self.node, self.num_registered, self.capacity = None, 0, 0

    def limit_capacity(self, num_tokens: int = 0) -> None:
        """Limits `capacity` to `num_tokens`, since the blocks of later tokens were removed, shared,
        or used by a model's own code."""
        self.capacity = min(self.capacity, num_tokens)

    def append(
        self,
        num_tokens: int,
        can_skip: bool = False,
        num_committed: int = sys.maxsize,
    ) -> bool:
        """Extends the sequence by `num_tokens` tokens and allocates their slots. Returns `False`,
        with the sequence not extended, if too few blocks are free. First calls `trim`; pass
        `num_committed` if `truncate` may go back to that many tokens. With `can_skip`, an empty
        sequence gets blocks only for new tokens that later queries see."""
        manager = self.manager
        tables = self.tables
        can_skip = can_skip and not any(table.block_ids for table in tables)
        if can_skip:
            for table in tables:
                table.free()  # an earlier call may have skipped blocks before it ran out of blocks
        length = tables[0].num_tokens
        if not length:
            self.epoch = manager.epochs.current
        end = length + num_tokens
        if can_skip:
            for group, table in zip(manager.groups, tables):
                table.skip(group.spec.first_visible(end))
        if manager.has_windows:
            self.trim(num_committed)
        allocated_ids = None
        while allocated_ids is None:
            needs = [table.num_needed_blocks(end - table.num_tokens) for table in tables]
            allocated_ids = manager.take(needs, tables)
            if allocated_ids is None and not self._unregister_state():
                return False
        for table, copies, new_ids in zip(tables, manager.copies, allocated_ids):
            unused_ids = new_ids and new_ids[table.num_needed_blocks(end - table.num_tokens) :]
            if unused_ids:  # `take` dropped this sequence's snapshot, so its slot needs no copy
                table.pool.release(unused_ids)
                new_ids = new_ids[: -len(unused_ids)]
            copy = table.append(end - table.num_tokens, new_ids)
            if copy is not None:
                source, target = copy
                # a source that itself awaits a copy has its content in that copy's source
                copies[target] = copies.get(source, source)
        self.capacity = -(-end // manager.node_size) * manager.node_size
        return True

    def reserve_next(self) -> bool:
        """Allocates a slot for the next token, so that its step only raises token counts. Returns
        `False` if too few blocks are free, or if a block must be copied first."""
        tables = self.tables
        if tables[0].num_tokens < self.capacity:
            return True
        has_read_only_tail = any(table.read_only_tail is not None for table in tables)
        if has_read_only_tail or not self.append(1):
            return False
        for table in tables:
            table.num_tokens -= 1
        return True

    def trim(self, num_committed: int = sys.maxsize) -> None:
        """Frees window blocks that no later query sees. With `num_committed`, every query after the
        first `num_committed` tokens counts as later, since `truncate` may go back to them. Must not
        be called between the scheduling of tokens and their computation."""
        if not self.tables:
            return
        for group, table in zip(self.manager.groups, self.tables):
            num_tokens = min(table.num_tokens, num_committed)
            table.drop_before(group.spec.first_visible(num_tokens))

    def _unregister_state(self) -> bool:
        """Drops the snapshot that the prefix cache keeps in the sequence's state slot, so that the
        sequence can write to the slot. Returns `False` if there is none, or if another table holds
        the slot."""
        if self.manager.state_group is None:
            return False
        table = self.tables[self.manager.state_group]
        for slot in table.block_ids:
            if table.pool.refcount(slot) == 1 and table.pool.is_kept(slot):
                table.pool.invalidate(slot)
                return True
        return False

    def truncate(self, num_tokens: int) -> None:
        """Removes all tokens from `num_tokens` on; restores no states. Raises `ValueError`, and
        changes nothing, if the new end lies in blocks that left the window."""
        for table in self.tables:
            table.check_truncate(num_tokens)
        for table in self.tables:
            table.truncate(num_tokens)
        self.limit_capacity(num_tokens)
        if self.num_registered * self.manager.node_size > num_tokens:
            self.node, self.num_registered = None, 0

    def fork(self) -> SequenceBlocks:
        """Returns a sequence with the same tokens, which shares their blocks (copy-on-write)."""
        if not self.tables:
            return self
        tables = tuple(table.fork() for table in self.tables)
        self.limit_capacity(tables[0].num_tokens)  # both now share the tail
        child = SequenceBlocks(
            tables, self.epoch, self.node, self.num_registered, self.capacity, manager=self.manager
        )
        self.manager.live[child] = None
        return child

    def end(self) -> None:
        """Frees a finished sequence and records its length for `block_size="auto"`."""
        if self.tables:
            length = self.tables[0].num_tokens
            if length:
                self.manager.length_recorder.note(length)
        self.free()

    def free(self) -> None:
        """Frees every block of the sequence, and removes the sequence from the manager."""
        if not self.tables:
            return
        is_live = self in self.manager.live
        for copies, table in zip(self.manager.copies, self.tables):
            # a sequence in a garbage-collected cycle is no longer in `live`, so recounts miss it
            if table.block_ids and not is_live:
                table.abandon()
            if copies:
                for block_id in table.block_ids:
                    if table.pool.refcount(block_id) == 1:
                        # the next holder may write to the block before the copy runs
                        copies.pop(block_id, None)
            table.free()
        self.forget_registered()
        self.manager.live.pop(self, None)

    def match(
        self,
        token_ids: Sequence[Hashable],
        namespace: Hashable,
        min_tokens: int = 0,
    ) -> int:
        """Attaches the longest cached prefix of `token_ids` to an empty sequence, if that prefix
        has at least `min_tokens` tokens. A prefix consists of whole blocks and excludes the last
        token, whose logits are needed. Returns the number of attached tokens."""
        manager = self.manager
        if not manager.prefix_caching or namespace is UNCACHED:
            return 0
        size = manager.node_size
        max_nodes = (len(token_ids) - 1) // size
        links = manager.index.find(token_ids, namespace, max_nodes)
        path = [link.node for link in links if link.node is not None]
        num_nodes = len(path)
        num_tokens = num_nodes * size
        if not path or num_tokens < min_tokens:
            return 0
        manager.num_hits += 1
        for group_index, table in enumerate(self.tables):
            needed_nodes = manager.index.needed_nodes(group_index, num_nodes)
            block_ids = (path[index].block_ids[group_index] for index in needed_nodes)
            cached_ids = [block_id for block_id in block_ids if block_id is not None]
            table.attach(cached_ids, needed_nodes.start * size // table.block_size, num_tokens)
        self.node, self.num_registered = path[-1], num_nodes
        self.epoch = min(node.epoch for node in path)
        self.capacity = num_tokens
        return num_tokens

    def num_shared_blocks(self, num_rows: int) -> int:
        """Returns how many registered blocks of this sequence have more holders than the `num_rows`
        rows of its request; 0 without prefix caching, or if cached prefixes need snapshots of
        states."""
        manager = self.manager
        if not manager.prefix_caching or manager.keeps_states:
            return 0
        num_tokens = self.num_registered * manager.node_size
        num_shared = 0
        for table in self.tables:
            end = max(0, num_tokens // table.block_size - table.num_dropped)
            for block_id in table.block_ids[:end]:
                num_shared += table.pool.refcount(block_id) > num_rows
        return num_shared

    def register(
        self,
        token_ids: Sequence[Hashable],
        num_tokens: int,
        namespace: Hashable,
    ) -> None:
        """Registers in the prefix index the blocks that the first `num_tokens` tokens fill, up to
        the last token at which blocks of all groups end. If `num_tokens` is one of the sequence's
        `stops`, also registers the sequence's state slot as a snapshot: the step that begins now
        must copy this state before it changes the state. Registered blocks must be computed before
        another sequence reads them."""
        if not self.tables:
            return
        manager = self.manager
        size = manager.node_size
        num_nodes = num_tokens // manager.block_size * manager.index.stride
        is_cached = manager.prefix_caching and namespace is not UNCACHED
        if num_nodes <= self.num_registered or not is_cached:
            return
        if self.epoch < manager.epochs.first_valid:  # `is_outdated`, inlined
            return
        is_stop = num_tokens == num_nodes * size and num_tokens in self.stops
        state_group = manager.state_group if is_stop else None
        has_only_states = len(manager.groups) == (manager.state_group is not None)
        if state_group is None and has_only_states:
            return
        node = self.node
        first = self.num_registered
        if node is None or node.parent is None:
            # no block is registered yet, or an eviction has removed the node from the index
            node = manager.index.root(namespace)
            first = 0
        for index in range(first, num_nodes):
            end = (index + 1) * size
            tokens = tuple(token_ids[end - size : end])
            block_ids = list(map(operator.methodcaller("block_ending_at", end), self.tables))
            if state_group is not None and index + 1 == num_nodes:
                (block_ids[state_group],) = self.tables[state_group].block_ids
            node = manager.index.add(node, tokens, block_ids, self.epoch)
        self.node, self.num_registered = node, num_nodes

    def __del__(self) -> None:
        # an exception may have dropped a sequence that holds blocks, or interrupted `__init__`
        # before it set `tables`
        for table in getattr(self, "tables", ()):
            table.pool.needs_recount |= bool(table.block_ids)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless lengths, blocks and `capacity` agree."""
        lengths = {table.num_tokens for table in self.tables}
        if self.capacity and len(lengths) != 1:  # where they may differ, the capacity is 0
            raise AssertionError(f"the groups of a sequence hold {sorted(lengths)} tokens")
        for table in self.tables:
            # up to a whole block may be unused, since `reserve_next` allocates ahead
            num_unused = table.num_unused_slots
            if table.block_ids and not 0 <= num_unused <= table.block_size:
                raise AssertionError(f"{len(table.block_ids)} blocks for {table.num_tokens} tokens")
            is_writable = self.capacity > table.num_tokens
            tail = table.read_only_tail
            if is_writable and tail is not None:
                raise AssertionError(f"block {tail} is shared or kept, but may be written to")


NO_BLOCKS = SequenceBlocks()
"""The blocks of a sequence that is not admitted yet, or whose blocks were freed."""
