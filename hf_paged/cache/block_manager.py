"""Block tables of many sequences over all layer groups, and the prefix cache. Plain Python: no tensors, no policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .block_pool import BlockTable, OutOfBlocksError
from .groups import UNBOUNDED, BlockGroup, StateSpec
from .prefix_index import Link, Node, PrefixIndex

UNCACHED = object()
"""The namespace of sequences that do not use the prefix cache."""


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """The blocks of one sequence: one block table per layer group, all with the same number of tokens."""

    tables: tuple[BlockTable, ...] = ()
    epoch: int = 0  # the manager's when the first token was stored
    node: Node | None = None  # the prefix index's node of the last registered block
    num_registered: int = 0  # blocks offered to the prefix index
    capacity: int = 0  # tokens for which the tables have writable blocks: until then a decode step only counts
    stops: tuple[int, ...] = ()  # token counts at which a step ends, so that `register` can keep the state there


def _block_of(link: Link, group: int) -> int | None:
    return None if link.node is None else link.node.block_ids[group]


NO_BLOCKS = SequenceBlocks()
"""The blocks of a sequence before it is admitted and after its blocks are freed."""


class Tier(Protocol):
    """Keeps the content of evicted blocks (`cache.tiers`)."""

    def keep(self, group: int, block_id: int, digest: bytes, is_vouched_for: bool) -> None:
        """Keeps a block that is being evicted, by its digest (`prefix_index.Link`). If not vouched for, it is served
        only after `confirm`."""

    def has(self, group: int, digest: bytes) -> bool:
        """Whether `read` may find the group's block with this digest, including unconfirmed blocks."""

    def read(self, group: int, digest: bytes) -> Any:
        """Returns the block's content under the current weights; `None` if it is lost."""

    def put_back(self, group: int, contents: list[Any], block_ids: list[int]) -> None:
        """Writes contents from `read` to blocks. Raises `ValueError` if they do not fit the layers."""

    @property
    def wants_confirmation(self) -> bool:
        """Whether many kept bytes are not vouched for."""

    def confirm(self) -> None:
        """Marks all kept blocks as computed with the last fingerprinted weights."""

    def discard(self) -> None:
        """Drops kept blocks that are not vouched for."""


class BlockManager:
    """Allocates blocks to sequences: `SequenceBlocks.tables[i]` belongs to `groups[i]`. Copies of shared blocks are
    queued (`flush_copies`). `num_free` counts the blocks that may still be taken over all groups, including cached
    ones; by default those of the pools. `prefix_caching`: keep full blocks, and reuse them for the same tokens."""

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        block_size: int,
        num_free: Callable[[], int] | None = None,
        prefix_caching: bool = True,
    ) -> None:
        self.groups, self.prefix_caching = list(groups), prefix_caching
        self._block_sizes = [group.spec.block_size(group.block_size or block_size) for group in groups]
        sizes = [size for size in self._block_sizes if size < UNBOUNDED] or [block_size]
        # sizes are powers of two: at multiples of the largest, blocks of all groups end, and shared prefixes may end
        self.block_size = max(sizes)
        self._unit = min(sizes)  # tokens per node of the index
        ratios = [1 if size == UNBOUNDED else size // self._unit for size in self._block_sizes]
        windows = [group.spec.prefix_window for group in groups]
        self.index = PrefixIndex([group.pool for group in groups], windows, self._unit, ratios)
        self.has_windows = any(group.spec.window is not None for group in groups)
        self.tier: Tier | None = None  # keeps blocks that the prefix cache evicts (`set_tier`)
        self.num_withheld: Callable[[], int] = lambda: (
            0
        )  # blocks missing in `num_free` while other models' pools are in use
        # with a limit in bytes: frees the memory of groups without used blocks; returns whether there were any
        self.release_unused: Callable[[], bool] = lambda: False
        self._num_free = num_free
        self._alive: dict[SequenceBlocks, None] = {}
        specs = enumerate(group.spec for group in groups)
        self._states = next((i for i, spec in specs if isinstance(spec, StateSpec) and not spec.is_empty), None)
        self.has_states = any(isinstance(group.spec, StateSpec) for group in groups)  # `truncate` cannot restore states
        self._copies: list[dict[int, int]] = [{} for _ in groups]  # source by target
        self._epoch = 0  # counts windows and drops
        self._window = 0  # first epoch of the open window; 0: blocks of all epochs are vouched for
        self._dropped = 0  # blocks of earlier epochs must not be registered
        self.num_hits = 0  # sequences that began with a cached prefix, and prefixes restored from the tier
        self.note_length: Callable[[int], None] = lambda length: None  # called with the length of each ended sequence
        self.refusal: OutOfBlocksError | None = None  # why the last `take` failed, if not by the number of free blocks

    @property
    def num_free(self) -> int:
        """Blocks that may still be taken over all groups, including cached ones."""
        return sum(group.pool.num_available for group in self.groups) if self._num_free is None else self._num_free()

    @property
    def size_text(self) -> str:
        """Tokens per block, for messages."""
        return f"{self._unit}" if self._unit == self.block_size else f"{self._unit} to {self.block_size}"

    @property
    def num_used(self) -> int:
        """Blocks of these groups that some table holds."""
        return sum(group.pool.num_used for group in self.groups)

    @property
    def keeps_states(self) -> bool:
        """Whether a cached prefix needs a snapshot of the states at its end."""
        return self.prefix_caching and self._states is not None

    @property
    def num_unsized(self) -> int:
        """Groups whose bytes per block are not known yet, so that `num_free` may be too large."""
        return sum(not group.is_sized for group in self.groups)

    @property
    def num_total(self) -> int:
        """Blocks that would be available if nothing else ran."""
        used = sum(group.pool.num_used for group in self.groups if group.spec.is_counted)
        return self.num_free + used + self.num_withheld()

    def num_spanned(self, first: int, end: int, chunk: int, blocks: SequenceBlocks = NO_BLOCKS) -> list[int]:
        """Returns `GroupSpec.num_spanned` of each group, given the blocks that `blocks` holds of earlier tokens."""
        held = [len(table.block_ids) for table in blocks.tables] or [0] * len(self.groups)
        return [
            group.spec.num_spanned(first, end, chunk, count, size)
            for group, count, size in zip(self.groups, held, self._block_sizes)
        ]

    def has_room(self, needs: Sequence[int], reserve: int = 0) -> bool:
        """Whether `needs[i]` blocks of each group can be taken together with `reserve` blocks left."""
        if sum(needs) + reserve > self.num_free:
            return False
        if len(self.groups) == 1:
            return True
        taken = self.take(needs)  # groups compete for memory: only trying tells
        if taken is None:
            return False
        for group, block_ids in zip(self.groups, taken):
            group.pool.release(block_ids)
        return True

    def tables(self, group: int) -> Iterator[BlockTable]:
        return (blocks.tables[group] for blocks in list(self._alive))  # a copy: garbage collection may free sequences

    def new(self) -> SequenceBlocks:
        tables = (BlockTable(group.pool, size) for group, size in zip(self.groups, self._block_sizes))
        blocks = SequenceBlocks(tuple(tables), self._epoch)
        self._alive[blocks] = None
        return blocks

    def append(
        self, blocks: SequenceBlocks, num_tokens: int, skips: bool = False, num_settled: int | None = None
    ) -> bool:
        """Makes room for `num_tokens` more tokens and counts them as held; `False` if there is no room. First frees
        window blocks that no query after the held tokens sees, or after `num_settled` of them, to which `truncate` may
        go back. With `skips`, an empty sequence begins without the blocks that no query after the new tokens sees."""
        tables = blocks.tables
        if skips and not any(table.block_ids for table in tables):
            length = 0
            for table in tables:
                table.free()  # an earlier call may have skipped blocks before it ran out of room
        else:
            length, skips = tables[0].num_tokens, False
        if not length:
            blocks.epoch = self._epoch
        end = length + num_tokens
        for group, table in zip(self.groups, tables) if skips else ():
            table.skip(group.spec.first_visible(end))
        self.trim(blocks, num_settled)
        last = [table.last_block for table in tables]
        taken = self.take([table.num_needed(end - table.num_tokens) for table in tables], last)
        if taken is None and self._unname_state(blocks):
            taken = self.take([table.num_needed(end - table.num_tokens) for table in tables], last)
        if taken is None:
            return False
        for table, copies, new_ids in zip(tables, self._copies, taken):
            spare = new_ids[table.num_needed(end - table.num_tokens) :]
            if spare:  # taking blocks evicted this sequence's snapshot, which then needs no copy
                table.pool.release(spare)
                new_ids = new_ids[: -len(spare)]
            copy = table.append(end - table.num_tokens, new_ids)
            if copy is not None:
                source, target = copy
                # the content of a source with a queued copy is still in that copy's source
                copies[target] = copies.get(source, source)
        blocks.capacity = -(-end // self._unit) * self._unit
        return True

    def reserve_next(self, blocks: SequenceBlocks) -> bool:
        """Takes the block for one more token, so that a step can count it without `append`. `False` if there is no
        block, or a copy is needed first."""
        tables = blocks.tables
        if tables[0].num_tokens < blocks.capacity:
            return True
        if any(table.shared_tail is not None for table in tables) or not self.append(blocks, 1):
            return False
        for table in tables:
            table.num_tokens -= 1
        return True

    def extend(self, group: int, tables: Sequence[BlockTable], ranges: Sequence[tuple[int, int]]) -> bool:
        """Makes tokens `ranges[i]` of each table of a group writable: copies shared blocks, and counts tokens past the
        end as held. Returns whether the tables hold different blocks now. Raises `OutOfBlocksError` with nothing
        changed."""
        pool = self.groups[group].pool
        counts = [max(0, end - table.num_tokens) for table, (_, end) in zip(tables, ranges)]
        writers = Counter(block for table, tokens in zip(tables, ranges) for block in table.shared_blocks(*tokens))
        needed = sum(map(BlockTable.num_new_blocks, tables, counts))
        for block_id, count in writers.items():
            # the last holder writes in place, unless the prefix cache keeps the block
            needed += count if pool.is_kept(block_id) else min(count, pool.refcount(block_id) - 1)
        if needed:
            self.groups[group].make_room(needed)
        copies = [copy for table, tokens in zip(tables, ranges) for copy in table.own(*tokens)] if writers else []
        for table, count in zip(tables, counts):
            table.append(count)
        if copies:
            self.groups[group].copy_blocks(copies)
        return needed > 0

    def trim(self, blocks: SequenceBlocks, num_settled: int | None = None) -> None:
        """Frees window blocks that no later query sees. Not to be called between scheduling and computing tokens."""
        for group, table in zip(self.groups, blocks.tables) if self.has_windows else ():
            num_tokens = table.num_tokens if num_settled is None else min(table.num_tokens, num_settled)
            table.drop_before(group.spec.first_visible(num_tokens))

    def take(self, needs: Sequence[int], after: Sequence[int | None] | None = None) -> list[list[int]] | None:
        """Takes `needs[i]` new blocks of each group, with refcount 1, preferably after the block `after[i]`. Returns
        `None`, with none taken, if there are too few."""
        total = sum(needed for group, needed in zip(self.groups, needs) if group.spec.is_counted)
        self.refusal = None
        if total and total > self.num_free:
            return None
        taken: list[list[int]] = []
        try:
            for group, needed, last in zip(self.groups, needs, after or [None] * len(needs)):
                taken.append(group.take(needed, last) if needed else [])
        except OutOfBlocksError as error:
            self.refusal = OutOfBlocksError(str(error))  # without the traceback, whose frames may keep tensors alive
            for group, block_ids in zip(self.groups, taken):
                group.pool.release(block_ids)
            return None
        return taken

    def _unname_state(self, blocks: SequenceBlocks) -> bool:
        """Drops the prefix cache's snapshot in the sequence's state slot if no other table holds the slot, so that the
        sequence can write there. Returns whether there was one."""
        table = None if self._states is None else blocks.tables[self._states]
        if table is None or not table.block_ids or table.pool.refcount(table.block_ids[0]) > 1:
            return False
        is_kept = table.pool.is_kept(table.block_ids[0])
        if is_kept:
            table.pool.lose(table.block_ids[0])
        return is_kept

    def truncate(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Forgets all tokens from `num_tokens` on. Raises `ValueError` if earlier blocks were freed by the window."""
        for table in blocks.tables:
            table.truncate(num_tokens)
        blocks.capacity = min(blocks.capacity, num_tokens)
        if blocks.num_registered * self._unit > num_tokens:
            blocks.node, blocks.num_registered = None, 0

    def fork(self, blocks: SequenceBlocks) -> SequenceBlocks:
        if not blocks.tables:
            return self.new()
        tables = tuple(table.fork() for table in blocks.tables)
        twin = SequenceBlocks(tables, blocks.epoch, blocks.node, blocks.num_registered)
        twin.capacity = blocks.capacity = blocks.tables[0].num_tokens  # the tail is shared now
        self._alive[twin] = None
        return twin

    def end(self, blocks: SequenceBlocks) -> None:
        """Frees a finished sequence and notes its length."""
        if blocks.tables and (length := blocks.tables[0].num_tokens):
            self.note_length(length)
        self.free(blocks)

    def free(self, blocks: SequenceBlocks) -> None:
        """Frees every block of the sequence and removes it from the manager."""
        for copies, table in zip(self._copies, blocks.tables):
            for block_id in table.block_ids if copies else ():
                if table.pool.refcount(block_id) == 1:  # its next holder may write to it before the copy runs
                    copies.pop(block_id, None)
            table.free()
        blocks.capacity = blocks.num_registered = 0
        blocks.node = None
        self._alive.pop(blocks, None)

    def flush_copies(self) -> None:
        """Runs the queued copies, one batch per group."""
        for group, copies in zip(self.groups, self._copies):
            if copies:
                group.copy_blocks([(source, target) for target, source in copies.items()])
                copies.clear()

    def match(self, blocks: SequenceBlocks, token_ids: Sequence[Hashable], namespace: Hashable, least: int = 0) -> int:
        """Attaches the longest cached prefix of `token_ids` to an empty sequence, in whole blocks and without the last
        token, whose logits are needed, if it has at least `least` tokens. Returns its number of tokens."""
        if not self.prefix_caching or namespace is UNCACHED:
            return 0
        size = self._unit
        path = self.index.find(token_ids, namespace, (len(token_ids) - 1) // size)
        if not path or len(path) * size < least:
            return 0
        self.num_hits += 1
        for group, table in enumerate(blocks.tables):
            needed = self.index.needed(group, len(path))
            held = [block_id for n in needed if (block_id := path[n].block_ids[group]) is not None]
            if table.block_size == UNBOUNDED:
                table.attach(held, 0, len(path) * size)
            else:
                table.attach(held, needed.start * size // table.block_size)
        blocks.node, blocks.num_registered, blocks.epoch = path[-1], len(path), min(node.epoch for node in path)
        blocks.capacity = len(path) * size
        return blocks.capacity

    def set_tier(self, tier: Tier | None) -> None:
        self.tier, self.index.spill = tier, None if tier is None else self._spill

    def _spill(self, group: int, block_id: int, digest: bytes) -> None:
        assert self.tier is not None
        self.tier.keep(group, block_id, digest, self.is_vouched_for)

    def restorable(self, token_ids: Sequence[Hashable], namespace: Hashable) -> list[Link]:
        """Returns the path that `match` would attach if the pools had the tier's blocks."""
        if self.tier is None or not self.prefix_caching or namespace is UNCACHED:
            return []
        return self.index.reach(token_ids, namespace, (len(token_ids) - 1) // self._unit, self.tier.has)

    def restore(self, token_ids: Sequence[Hashable], namespace: Hashable, num_tokens: int) -> bool:
        """Restores blocks from the tier for `match` to find, if that gives a prefix longer than `num_tokens`. `False`
        if there are none, or no room. The current weights must have been vouched for."""
        tier = self.tier
        while tier is not None:
            links = self.restorable(token_ids, namespace)
            if self.num_tokens(links) <= num_tokens:
                return False
            contents = [{n: tier.read(g, links[n].digest) for n in self.missing(g, links)} for g in self._group_range]
            if all(content is not None for of_group in contents for content in of_group.values()):
                return self.adopt(links, namespace, contents, tier)
        return False  # no tier; a block that `read` could not find is gone from the tier, so that the loop ends

    def num_tokens(self, path: Sequence[Any]) -> int:
        """Returns the number of tokens of a path of nodes or links."""
        return len(path) * self._unit

    @property
    def _group_range(self) -> range:
        return range(len(self.groups))

    def missing(self, group: int, links: Sequence[Link]) -> list[int]:
        """Returns the positions on a path whose blocks of this group a sequence after it needs and the pool lacks."""
        return [n for n in self.index.needed(group, len(links)) if _block_of(links[n], group) is None]

    def adopt(self, links: Sequence[Link], namespace: Hashable, contents: Sequence[dict[int, Any]], tier: Tier) -> bool:
        """Writes `contents[group]`, by position on the path, to new blocks and registers them as cached. `False`, with
        nothing changed, if there is no room. Raises `ValueError` if they do not fit the layers."""
        held = [
            [block for n in self.index.needed(g, len(links)) if (block := _block_of(links[n], g)) is not None]
            for g in self._group_range
        ]
        for group, block_ids in zip(self.groups, held):  # so that making room does not evict them
            group.pool.acquire(block_ids)
        taken = self.take([len(numbers) for numbers in contents])
        try:
            if taken is None:
                return False
            for g, (numbers, block_ids) in enumerate(zip(contents, taken)):
                if block_ids:
                    tier.put_back(g, list(numbers.values()), block_ids)
            named = [dict(zip(numbers, block_ids)) for numbers, block_ids in zip(contents, taken)]
            node = self.index.root(namespace)
            for n, link in enumerate(links):
                node = self.index.add(node, link.tokens, [of_group.get(n) for of_group in named], self._epoch)
            self.num_hits += 1
            return True
        finally:
            for group, block_ids, new_ids in zip(self.groups, held, taken or [[] for _ in held]):
                group.pool.release(reversed([*block_ids, *new_ids]))

    def num_shared(self, blocks: SequenceBlocks, num_rows: int) -> int:
        """Counts the registered blocks of a sequence with more holders than its request's `num_rows` rows."""
        if not self.prefix_caching or self.keeps_states:
            return 0
        return sum(
            table.pool.refcount(block_id) > num_rows
            for table in blocks.tables
            for block_id in table.block_ids[: blocks.num_registered * self._unit // table.block_size]
        )

    def num_known(self, token_ids: Sequence[Hashable], namespace: Hashable) -> int:
        """Returns the tokens that `match` would attach if there were a state snapshot after each block."""
        size = self._unit
        return size * len(self.index.find(token_ids, namespace, (len(token_ids) - 1) // size, without=self._states))

    def register(
        self, blocks: SequenceBlocks, token_ids: Sequence[Hashable], num_tokens: int, namespace: Hashable
    ) -> None:
        """Registers the new full blocks below `num_tokens` in the prefix index, and, at one of the sequence's stops,
        the state there, which the step that begins now must copy. Returns at once if no block has filled up. Registered
        blocks must be computed before another sequence reads them."""
        size = self._unit
        full = num_tokens // self.block_size * self.index.stride  # nodes up to where blocks of all groups are full
        is_cached = self.prefix_caching and namespace is not UNCACHED
        if full <= blocks.num_registered or not is_cached or blocks.epoch < self._dropped:
            return
        names_state = self._states is not None and num_tokens == full * size and num_tokens in blocks.stops
        if not names_state and len(self.groups) == (self._states is not None):  # only states, and none to keep here
            return
        node, first = blocks.node, blocks.num_registered
        if node is None or node.parent is None:  # forgotten: one of its path's blocks was evicted
            node, first = self.index.root(namespace), 0
        for number in range(first, full):
            tokens = tuple(token_ids[number * size : (number + 1) * size])
            end = (number + 1) * size
            held = [
                table.full_block(end // table.block_size - 1) if end % table.block_size == 0 else None
                for table in blocks.tables
            ]
            if self._states is not None and names_state and number + 1 == full:
                (held[self._states],) = blocks.tables[self._states].block_ids
            node = self.index.add(node, tokens, held, blocks.epoch)
        blocks.node, blocks.num_registered = node, full

    def begin_window(self) -> None:
        """Opens a window, since others may have changed the model: blocks computed before it need vouching for."""
        self._epoch += 1
        self._window = self._epoch

    def needs_vouching(self, blocks: SequenceBlocks) -> bool:
        """Whether the sequence holds registered blocks from before this window, and `vouch` was not called in it."""
        return blocks.num_registered > 0 and blocks.epoch < self._window

    @property
    def is_vouched_for(self) -> bool:
        return not self._window

    def vouch(self) -> None:
        """Marks all registered blocks as computed with the current model."""
        self._window = 0

    def forget_before_window(self) -> None:
        """Drops all registered blocks from before this window: the model has changed. Later ones are not registered."""
        self._dropped = max(self._dropped, self._window)
        self.index.forget_before(self._window)

    def drop_cached(self) -> None:
        """Drops everything cached; sequences keep their blocks, which are not registered later."""
        self._epoch += 1
        self._dropped = self._epoch
        self.index.clear()
        if self.tier is not None:
            self.tier.discard()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless tables, index and pools agree. Others may hold blocks of the same pools."""
        self.index.check_integrity()
        for number, group in enumerate(self.groups):
            group.pool.check_integrity((table.block_ids for table in self.tables(number)), are_all=False)
        for blocks in self._alive:
            lengths = {table.num_tokens for table in blocks.tables}
            if blocks.capacity and len(lengths) != 1:  # tables of a cache's row may differ
                raise AssertionError(f"the groups of a sequence hold {sorted(lengths)} tokens")
            for table in blocks.tables:
                # a whole block if it was reserved for the next token
                if table.block_ids and not 0 <= table.num_unused_slots <= table.block_size:
                    raise AssertionError(f"{len(table.block_ids)} blocks for {table.num_tokens} tokens")
                if blocks.capacity > table.num_tokens and table.shared_tail is not None:
                    raise AssertionError(f"block {table.shared_tail} is shared, but may be written to")
