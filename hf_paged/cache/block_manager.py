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
"""The namespace of sequences that the prefix cache neither serves nor keeps."""


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """What one sequence holds: a block table a layer group, all with the same number of tokens."""

    tables: tuple[BlockTable, ...] = ()
    epoch: int = 0  # the manager's when the first token was stored
    node: Node | None = None  # of the last block that was offered to the prefix index
    num_registered: int = 0  # blocks that have been
    capacity: int = 0  # tokens for which the tables have blocks of their own: a step of one may just count it
    stops: tuple[int, ...] = ()  # tokens after which a step ends, for `register` to keep the state there


def _block_of(link: Link, group: int) -> int | None:
    return None if link.node is None else link.node.block_ids[group]


NO_BLOCKS = SequenceBlocks()
"""What a sequence has before it is admitted and after its blocks went back."""


class Tier(Protocol):
    """Keeps what blocks held that the pools gave up (`cache.tiers`)."""

    def keep(self, group: int, block_id: int, digest: bytes, is_vouched_for: bool) -> None:
        """This block goes, with this digest (`prefix_index.Link`). Not vouched for: it is served after `confirm`."""

    def has(self, group: int, digest: bytes) -> bool:
        """Whether `read` may find that of the group; also where it is to be found out yet of which weights it is."""

    def read(self, group: int, digest: bytes) -> Any:
        """What the block held, under the weights of now; `None` if that is lost."""

    def put_back(self, group: int, contents: list[Any], block_ids: list[int]) -> None:
        """Writes what `read` found to blocks. Raises `ValueError` where it does not fit the layers."""

    @property
    def wants_confirmation(self) -> bool:
        """Whether much of what was kept is not vouched for."""

    def confirm(self) -> None:
        """All that was kept is of the weights whose fingerprint was taken last."""

    def discard(self) -> None:
        """... is not, where it was not vouched for."""


class BlockManager:
    """Gives sequences their blocks: `SequenceBlocks.tables[i]` belongs to `groups[i]`. Copies of shared blocks are
    queued (`flush_copies`). `num_free` counts the blocks that may still be taken over all groups, cached ones included;
    by default what the pools have. `prefix_caching`: serve and keep full blocks by the tokens that they hold."""

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
        # sizes are powers of two: behind this number of tokens blocks of all groups end, and prefixes that are shared
        self.block_size = max(sizes)
        self._unit = min(sizes)  # tokens of a node of the index
        ratios = [1 if size == UNBOUNDED else size // self._unit for size in self._block_sizes]
        windows = [group.spec.prefix_window for group in groups]
        self.index = PrefixIndex([group.pool for group in groups], windows, self._unit, ratios)
        self.has_windows = any(group.spec.window is not None for group in groups)
        self.tier: Tier | None = None  # what keeps blocks that the prefix cache gives up (`set_tier`)
        self.num_withheld: Callable[[], int] = lambda: (
            0
        )  # blocks that `num_free` lacks while other models' pools are used
        # gives up what groups without a used block hold, where a limit is in bytes; returns whether there was any
        self.release_unused: Callable[[], bool] = lambda: False
        self._num_free = num_free
        self._alive: dict[SequenceBlocks, None] = {}
        specs = enumerate(group.spec for group in groups)
        self._states = next((i for i, spec in specs if isinstance(spec, StateSpec) and not spec.is_empty), None)
        self.has_states = any(isinstance(group.spec, StateSpec) for group in groups)  # which no `truncate` takes back
        self._copies: list[dict[int, int]] = [{} for _ in groups]  # source by target
        self._epoch = 0  # counts windows and drops
        self._window = 0  # first epoch of the window that is open; 0: blocks of all epochs are vouched for in it
        self._dropped = 0  # blocks of earlier epochs must not be named
        self.num_hits = 0  # sequences that began with a cached prefix, and prefixes that were brought back
        self.note_length: Callable[[int], None] = lambda length: None  # told of each sequence that ends (`end`)
        self.refusal: OutOfBlocksError | None = None  # why blocks were not given last, where it was not by their number

    @property
    def num_free(self) -> int:
        """Blocks that may still be taken over all groups; cached ones count."""
        return sum(group.pool.num_available for group in self.groups) if self._num_free is None else self._num_free()

    @property
    def size_text(self) -> str:
        """Tokens in a block, for messages."""
        return f"{self._unit}" if self._unit == self.block_size else f"{self._unit} to {self.block_size}"

    @property
    def num_used(self) -> int:
        """Blocks of these groups that any table holds."""
        return sum(group.pool.num_used for group in self.groups)

    @property
    def keeps_states(self) -> bool:
        """Whether a sequence can begin only where a snapshot of its states is kept."""
        return self.prefix_caching and self._states is not None

    @property
    def num_unsized(self) -> int:
        """Groups of which `num_free` does not know yet what blocks take, so that it may be too large."""
        return sum(not group.is_sized for group in self.groups)

    @property
    def num_total(self) -> int:
        """All blocks that can be had once nothing else runs."""
        used = sum(group.pool.num_used for group in self.groups if group.spec.is_counted)
        return self.num_free + used + self.num_withheld()

    def num_spanned(self, first: int, end: int, chunk: int, blocks: SequenceBlocks = NO_BLOCKS) -> list[int]:
        """`GroupSpec.num_spanned` of each group, beside what `blocks` has of the tokens in front."""
        held = [len(table.block_ids) for table in blocks.tables] or [0] * len(self.groups)
        return [
            group.spec.num_spanned(first, end, chunk, count, size)
            for group, count, size in zip(self.groups, held, self._block_sizes)
        ]

    def has_room(self, needs: Sequence[int], reserve: int = 0) -> bool:
        """Whether `needs[i]` blocks of each group can be had together, and `reserve` be left."""
        if sum(needs) + reserve > self.num_free:
            return False
        if len(self.groups) == 1:
            return True
        taken = self.take(needs)  # no count tells what one group can have while the others take theirs
        if taken is None:
            return False
        for group, block_ids in zip(self.groups, taken):
            group.pool.release(block_ids)
        return True

    def tables(self, group: int) -> Iterator[BlockTable]:
        return (blocks.tables[group] for blocks in list(self._alive))  # a collected cache frees its own

    def new(self) -> SequenceBlocks:
        tables = (BlockTable(group.pool, size) for group, size in zip(self.groups, self._block_sizes))
        blocks = SequenceBlocks(tuple(tables), self._epoch)
        self._alive[blocks] = None
        return blocks

    def append(
        self, blocks: SequenceBlocks, num_tokens: int, skips: bool = False, num_settled: int | None = None
    ) -> bool:
        """Makes room for `num_tokens` more tokens and counts them as held; `False` if there is none. Window blocks that
        no later query sees are given back first, or none behind `num_settled` tokens, to which `truncate` may go back;
        with `skips` a sequence begins without those."""
        tables = blocks.tables
        if skips and not any(table.block_ids for table in tables):
            length = 0
            for table in tables:
                table.free()  # skipped before, when there was no room
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
            if spare:  # the snapshot that the sequence stands at went with another group's blocks, as these were taken
                table.pool.release(spare)
                new_ids = new_ids[: -len(spare)]
            copy = table.append(end - table.num_tokens, new_ids)
            if copy is not None:
                source, target = copy
                # a source that is itself still to be copied to has its content elsewhere
                copies[target] = copies.get(source, source)
        blocks.capacity = -(-end // self._unit) * self._unit
        return True

    def reserve_next(self, blocks: SequenceBlocks) -> bool:
        """Takes the block that one more token needs, which can then just be counted. `False` if there is none, or a
        copy is to be made first."""
        tables = blocks.tables
        if tables[0].num_tokens < blocks.capacity:
            return True
        if any(table.shared_tail is not None for table in tables) or not self.append(blocks, 1):
            return False
        for table in tables:
            table.num_tokens -= 1
        return True

    def extend(self, group: int, tables: Sequence[BlockTable], ranges: Sequence[tuple[int, int]]) -> bool:
        """Makes tokens `ranges[i]` of each table of a group writable: blocks that others hold too are copied, and what
        is past the end is counted as held. Returns whether the tables hold other blocks now. Raises `OutOfBlocksError`
        with nothing changed."""
        pool = self.groups[group].pool
        counts = [max(0, end - table.num_tokens) for table, (_, end) in zip(tables, ranges)]
        writers = Counter(block for table, tokens in zip(tables, ranges) for block in table.shared_blocks(*tokens))
        needed = sum(map(BlockTable.num_new_blocks, tables, counts))
        for block_id, count in writers.items():
            # the last holder of a block writes to it in place, unless its content is to be kept
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
        """Gives back the window blocks that no later query sees; not between scheduling tokens and computing them."""
        for group, table in zip(self.groups, blocks.tables) if self.has_windows else ():
            num_tokens = table.num_tokens if num_settled is None else min(table.num_tokens, num_settled)
            table.drop_before(group.spec.first_visible(num_tokens))

    def take(self, needs: Sequence[int], after: Sequence[int | None] | None = None) -> list[list[int]] | None:
        """`needs[i]` new blocks of each group, with refcount 1, best next to the block `after[i]`; `None`, with none
        taken, if they cannot be had."""
        total = sum(needed for group, needed in zip(self.groups, needs) if group.spec.is_counted)
        self.refusal = None
        if total and total > self.num_free:
            return None
        taken: list[list[int]] = []
        try:
            for group, needed, last in zip(self.groups, needs, after or [None] * len(needs)):
                taken.append(group.take(needed, last) if needed else [])
        except OutOfBlocksError as error:
            self.refusal = OutOfBlocksError(str(error))  # without frames, which may hold what was half made
            for group, block_ids in zip(self.groups, taken):
                group.pool.release(block_ids)
            return None
        return taken

    def _unname_state(self, blocks: SequenceBlocks) -> bool:
        """Gives up the snapshot that the sequence stands at, if no other does: its slot is then the sequence's own."""
        table = None if self._states is None else blocks.tables[self._states]
        if table is None or not table.block_ids or table.pool.refcount(table.block_ids[0]) > 1:
            return False
        is_kept = table.pool.is_kept(table.block_ids[0])
        if is_kept:
            table.pool.lose(table.block_ids[0])
        return is_kept

    def truncate(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Forgets all tokens from `num_tokens` on. `ValueError` if blocks in front of that left the window."""
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
        """`free`, of a sequence that has all the tokens that it will have."""
        if blocks.tables and (length := blocks.tables[0].num_tokens):
            self.note_length(length)
        self.free(blocks)

    def free(self, blocks: SequenceBlocks) -> None:
        """Gives every block back. The sequence is no longer the manager's."""
        for copies, table in zip(self._copies, blocks.tables):
            for block_id in table.block_ids if copies else ():
                if table.pool.refcount(block_id) == 1:  # its next holder may write to it before a queued copy is made
                    copies.pop(block_id, None)
            table.free()
        blocks.capacity = blocks.num_registered = 0
        blocks.node = None
        self._alive.pop(blocks, None)

    def flush_copies(self) -> None:
        """Makes the queued copies, one batch a group."""
        for group, copies in zip(self.groups, self._copies):
            if copies:
                group.copy_blocks([(source, target) for target, source in copies.items()])
                copies.clear()

    def match(self, blocks: SequenceBlocks, token_ids: Sequence[Hashable], namespace: Hashable, least: int = 0) -> int:
        """Lets an empty sequence begin with the longest cached prefix of `token_ids`, in whole blocks and short of the
        last token, whose logits are needed, if it has at least so many tokens. Returns the number of its tokens."""
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
        """The path with which `match` would let a sequence begin if the pools had the blocks that the tier has."""
        if self.tier is None or not self.prefix_caching or namespace is UNCACHED:
            return []
        return self.index.reach(token_ids, namespace, (len(token_ids) - 1) // self._unit, self.tier.has)

    def restore(self, token_ids: Sequence[Hashable], namespace: Hashable, num_tokens: int) -> bool:
        """Brings blocks from the tier back, where they make a prefix longer than `num_tokens`, for `match` to find;
        the model as it is now must have been vouched for. `False` if there are none, or no room for them."""
        tier = self.tier
        while tier is not None:
            links = self.restorable(token_ids, namespace)
            if self.num_tokens(links) <= num_tokens:
                return False
            contents = [{n: tier.read(g, links[n].digest) for n in self.missing(g, links)} for g in self._group_range]
            if all(content is not None for of_group in contents for content in of_group.values()):
                return self.adopt(links, namespace, contents, tier)
        return False  # what `read` did not find the tier has no more

    def num_tokens(self, path: Sequence[Any]) -> int:
        """That the nodes, or links, of a path hold."""
        return len(path) * self._unit

    @property
    def _group_range(self) -> range:
        return range(len(self.groups))

    def missing(self, group: int, links: Sequence[Link]) -> list[int]:
        """Which blocks of a path a sequence behind it needs of this group that the pool does not have."""
        return [n for n in self.index.needed(group, len(links)) if _block_of(links[n], group) is None]

    def adopt(self, links: Sequence[Link], namespace: Hashable, contents: Sequence[dict[int, Any]], tier: Tier) -> bool:
        """Takes blocks for `contents`, by their number on the path for each group, and names them, cached. `False`,
        with nothing changed, if there is no room. Raises `ValueError` where they do not fit the layers."""
        held = [
            [block for n in self.index.needed(g, len(links)) if (block := _block_of(links[n], g)) is not None]
            for g in self._group_range
        ]
        for group, block_ids in zip(self.groups, held):  # what makes room must not take these
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
        """Named blocks of a sequence that more tables hold than those of its request's `num_rows` rows."""
        if not self.prefix_caching or self.keeps_states:
            return 0
        return sum(
            table.pool.refcount(block_id) > num_rows
            for table in blocks.tables
            for block_id in table.block_ids[: blocks.num_registered * self._unit // table.block_size]
        )

    def num_known(self, token_ids: Sequence[Hashable], namespace: Hashable) -> int:
        """Tokens with which `match` would let a sequence begin if there were a snapshot of the state behind each
        block."""
        size = self._unit
        return size * len(self.index.find(token_ids, namespace, (len(token_ids) - 1) // size, without=self._states))

    def register(
        self, blocks: SequenceBlocks, token_ids: Sequence[Hashable], num_tokens: int, namespace: Hashable
    ) -> None:
        """Names the full blocks below `num_tokens` that have no name yet, and at one of the sequence's stops the state
        there, which the step that begins now is to copy. Costs nothing where no block got full. What is named must be
        computed, or be so before another sequence reads it."""
        size = self._unit
        full = num_tokens // self.block_size * self.index.stride  # as far as blocks of all groups are full
        is_cached = self.prefix_caching and namespace is not UNCACHED
        if full <= blocks.num_registered or not is_cached or blocks.epoch < self._dropped:
            return
        names_state = self._states is not None and num_tokens == full * size and num_tokens in blocks.stops
        if not names_state and len(self.groups) == (self._states is not None):  # no block would keep the node's place
            return
        node, first = blocks.node, blocks.num_registered
        if node is None or node.parent is None:  # forgotten, as a block that only the index knew was evicted
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
        """Others may have changed the model since the last step: what was computed until now needs vouching for."""
        self._epoch += 1
        self._window = self._epoch

    def needs_vouching(self, blocks: SequenceBlocks) -> bool:
        """Whether the sequence began with blocks from before this window, for which `vouch` was not called in it."""
        return blocks.num_registered > 0 and blocks.epoch < self._window

    @property
    def is_vouched_for(self) -> bool:
        return not self._window

    def vouch(self) -> None:
        """The model is what it was when all blocks that have names were computed."""
        self._window = 0

    def forget_before_window(self) -> None:
        """The model is another: nothing from before this window is served, or named, any more."""
        self._dropped = max(self._dropped, self._window)
        self.index.forget_before(self._window)

    def drop_cached(self) -> None:
        """Nothing computed before this call is served again; sequences keep theirs."""
        self._epoch += 1
        self._dropped = self._epoch
        self.index.clear()
        if self.tier is not None:
            self.tier.discard()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless tables, names and pools agree. Others may hold blocks of the same pools."""
        self.index.check_integrity()
        for number, group in enumerate(self.groups):
            group.pool.check_integrity((table.block_ids for table in self.tables(number)), are_all=False)
        for blocks in self._alive:
            lengths = {table.num_tokens for table in blocks.tables}
            if blocks.capacity and len(lengths) != 1:  # tables of a cache's row may differ
                raise AssertionError(f"the groups of a sequence hold {sorted(lengths)} tokens")
            for table in blocks.tables:
                # a whole block where it was reserved for the next token
                if table.block_ids and not 0 <= table.num_unused_slots <= table.block_size:
                    raise AssertionError(f"{len(table.block_ids)} blocks for {table.num_tokens} tokens")
                if blocks.capacity > table.num_tokens and table.shared_tail is not None:
                    raise AssertionError(f"block {table.shared_tail} is shared, but may be written to")
