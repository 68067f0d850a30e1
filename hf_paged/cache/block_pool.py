"""Block pools and block tables: ids, reference counts, eviction and copy-on-write. Holds no tensors
and knows neither requests nor scheduling policy."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..topics import Topic, TopicError

BlockSelector = Callable[[dict[int, None], int, int, Sequence[int]], list[int]]
"""Selects free ids, removes them from the dict of free ids, and returns them. Arguments: the free
ids, the pool's size in blocks, the number of ids to select, and the ids already in the table that
will hold the blocks; the selector may prefer ids that follow the table's last one."""


class OutOfBlocksError(TopicError, RuntimeError):
    """More blocks are needed than the limits of the pool, or free memory, allow. The operation that
    raises this error leaves no block allocated, unless its docstring says otherwise."""

    topic = Topic.OUT_OF_BLOCKS


class BlockPool:
    """Block ids `0 .. num_blocks - 1` of one layer group (PagedAttention, arXiv 2309.06180, section
    4.2). A block is used (held by `refcount` block tables), cached (held by none, content kept) or
    free. Cached blocks are evicted in LRU order (RadixAttention, arXiv 2312.07104, section 3)."""

    def __init__(self, num_blocks: int = 0, select: BlockSelector | None = None) -> None:
        """`select` selects the blocks to allocate; by default, the ones free for the longest
        time."""
        self._refcounts: list[int] = []
        self._free: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        # `on_evict` of each kept block, which is cached, or will be when it is released
        self._kept: dict[int, Callable[[int], None]] = {}
        self.num_shared = 0  # blocks that more than one table holds
        self.peak_used = 0  # maximum number of blocks in use since the last `shrink`
        self.select = select
        self._write_error: str | None = None
        # whether a table was garbage-collected while it held blocks, or `recount` has raised
        self.needs_recount = False
        self.grow(num_blocks)

    @property
    def num_blocks(self) -> int:
        return len(self._refcounts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Free and cached blocks, which `allocate` can take."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._refcounts) - len(self._free) - len(self._cached)

    def refcount(self, block_id: int) -> int:
        return self._refcounts[block_id]

    def holder_counts(self) -> list[int]:
        """Returns how many tables hold each block; 0 if it is free, -1 if it is cached."""
        return [
            -1 if block_id in self._cached else count
            for block_id, count in enumerate(self._refcounts)
        ]

    def is_kept(self, block_id: int) -> bool:
        """Whether the block is cached, or will be when it is released."""
        return block_id in self._kept

    def is_read_only(self, block_id: int) -> bool:
        """Whether the block must not be written to, since it is shared or kept."""
        return self._refcounts[block_id] > 1 or block_id in self._kept

    @property
    def kept_ids(self) -> list[int]:
        """Ids of cached blocks, and of used blocks that will be cached when released."""
        return list(self._kept)

    @property
    def is_exclusive(self) -> bool:
        """Whether no block is shared or kept, so that all used blocks may be written to."""
        return not (self.num_shared or self._kept)

    def grow(self, num_blocks: int) -> None:
        """Adds `num_blocks` free blocks."""
        first = len(self._refcounts)
        new_ids = range(first, first + num_blocks)
        self._refcounts.extend([0] * num_blocks)
        self._free.update(dict.fromkeys(new_ids))

    def shrink(self) -> None:
        """Evicts all cached blocks, removes the unused blocks after the last used one, and resets
        `peak_used` to the current use."""
        self.evict(self.num_cached)
        while self._refcounts and not self._refcounts[-1]:
            self._refcounts.pop()
            del self._free[len(self._refcounts)]
        self.peak_used = self.num_used

    def allocate(self, num_blocks: int, after: Sequence[int] = ()) -> list[int]:
        """Allocates `num_blocks` blocks with refcount 1, and returns their ids; evicts cached
        blocks if too few are free. `after`: the ids already in the table that will hold the blocks,
        for `select`. Raises `OutOfBlocksError` with nothing changed."""
        free = self._free
        if num_blocks > len(free) and num_blocks > self.num_available:
            cached_text = f" and {self.num_cached} cached" if self._cached else ""
            raise OutOfBlocksError(
                f"needs {num_blocks} blocks, but only {self.num_free} of {self.num_blocks} are"
                f" free{cached_text}"
            )
        while num_blocks > len(free):  # one at a time, since `on_evict` may free further blocks
            self.evict(1)
        if self.select is None:
            block_ids = [free.popitem(last=False)[0] for _ in range(num_blocks)]
        else:
            block_ids = self.select(free, self.num_blocks, num_blocks, after)
        for block_id in block_ids:
            self._refcounts[block_id] = 1
        self.peak_used = max(self.peak_used, len(self._refcounts) - len(free) - len(self._cached))
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Adds a holder to each of these used or cached blocks. Raises `ValueError` for a free
        one."""
        for block_id in block_ids:
            refcount = self._refcounts[block_id]
            if refcount == 0:
                if block_id not in self._cached:
                    raise ValueError(f"block {block_id} is free and cannot be shared")
                del self._cached[block_id]
            elif refcount == 1:
                self.num_shared += 1
            self._refcounts[block_id] = refcount + 1
        self.peak_used = max(self.peak_used, self.num_used)

    def release(self, block_ids: Iterable[int]) -> None:
        """Removes a holder from each block. Blocks left without holders become cached or free, in
        the order given. Raises `ValueError` for a block that has no holder."""
        for block_id in block_ids:
            refcount = self._refcounts[block_id]
            if refcount == 0:
                raise ValueError(f"block {block_id} has no holder to remove")
            self._refcounts[block_id] = refcount - 1
            if refcount == 1:
                (self._cached if block_id in self._kept else self._free)[block_id] = None
            elif refcount == 2:
                self.num_shared -= 1

    def keep(self, block_id: int, on_evict: Callable[[int], None]) -> None:
        """Makes a used block become cached, not free, when its last holder releases it; its
        eviction calls `on_evict(block_id)`. Raises `ValueError` if the block is unused or already
        kept."""
        if self._refcounts[block_id] == 0 or block_id in self._kept:
            raise ValueError(f"block {block_id} is unused or already kept")
        self._kept[block_id] = on_evict

    def forget_kept_by(self, on_evict: Callable[[int], None]) -> None:
        """Stops keeping every block with this `on_evict`, without calling it. The caller must then
        call `recount`."""
        self._kept = {
            block_id: callback
            for block_id, callback in self._kept.items()
            if callback is not on_evict
        }

    def drop(self, block_id: int) -> None:
        """Stops keeping a block's content, without calling `on_evict`. A cached block becomes
        free."""
        del self._kept[block_id]
        if block_id in self._cached:
            del self._cached[block_id]
            self._free[block_id] = None

    def invalidate(self, block_id: int) -> None:
        """Stops keeping a block's content and calls `on_evict`."""
        on_evict = self._kept[block_id]
        self.drop(block_id)
        on_evict(block_id)

    def evict(self, num_blocks: int) -> int:
        """Frees at least `num_blocks` cached blocks, or all if there are fewer, least recently
        released first. Returns how many were freed, including blocks that `on_evict` callbacks
        dropped."""
        num_cached = len(self._cached)
        target = max(0, num_cached - num_blocks)
        while len(self._cached) > target:
            self.invalidate(next(iter(self._cached)))
        return num_cached - len(self._cached)

    def recount(self, tables: Iterable[Sequence[int]]) -> None:
        """Recomputes refcounts, free and cached blocks from `tables`, the block ids of every table,
        after an exception that may have left the pool half changed."""
        self.needs_recount = False
        try:
            num_holders = Counter(block_id for table in tables for block_id in table)
            self._refcounts = [num_holders[block_id] for block_id in range(self.num_blocks)]
            self.num_shared = sum(refcount > 1 for refcount in self._refcounts)
            unused_ids = set(range(self.num_blocks)).difference(num_holders)
            self._free = OrderedDict.fromkeys(sorted(unused_ids.difference(self._kept)))
            lru_order = [*self._cached, *self._kept]
            self._cached = OrderedDict.fromkeys(
                block_id
                for block_id in lru_order
                if block_id in unused_ids and block_id in self._kept
            )
        except BaseException:
            self.needs_recount = True
            raise

    def check_writable(self, block_ids: Iterable[int]) -> None:
        """Raises `AssertionError`, now and from every later `check_integrity`, if one of the blocks
        that are about to be written is shared or kept."""
        for block_id in block_ids:
            if self.is_read_only(block_id):
                self._write_error = (
                    f"block {block_id} would be overwritten: refcount"
                    f" {self._refcounts[block_id]}, kept: {block_id in self._kept}"
                )
                raise AssertionError(self._write_error)

    def check_integrity(self, tables: Iterable[Sequence[int]], is_complete: bool = True) -> None:
        """Raises `AssertionError` unless refcounts, free and cached blocks and the ids in `tables`
        agree, or if `check_writable` ever raised. Unless `is_complete`, further tables may hold
        blocks. While a recount is due, refcounts may exceed the tables: garbage collection may drop
        a table even during the check."""
        num_holders = Counter(block_id for table in tables for block_id in table)
        refcounts = dict(enumerate(self._refcounts))
        for block_id in {*num_holders, *refcounts}:
            refcount = refcounts.get(block_id, 0)
            num_tables = num_holders[block_id]
            is_leaked = is_complete and num_tables < refcount and not self.needs_recount
            if num_tables > refcount or is_leaked:
                raise AssertionError(
                    f"block {block_id}: refcount {refcount}, held by {num_tables} tables"
                )
        if self._write_error is not None:
            raise AssertionError(self._write_error)
        unused_ids = {block_id for block_id, count in refcounts.items() if not count}
        kept_ids = self._kept.keys()
        num_shared = sum(refcount > 1 for refcount in refcounts.values())
        expected = (unused_ids - kept_ids, unused_ids & kept_ids, num_shared)
        actual = (set(self._free), set(self._cached), self.num_shared)
        if actual != expected:
            raise AssertionError(f"(free, cached, number shared) is {actual}, not {expected}")


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks that hold tokens `[num_dropped * block_size, num_tokens)` of one sequence: token
    `t` is stored in `block_ids[t // block_size - num_dropped]` at offset `t % block_size`. Shared
    or kept blocks are never written to: if the tail block is shared or kept, `append` replaces it
    and returns the required copy (copy-on-write)."""

    pool: BlockPool
    block_size: int
    block_ids: list[int] = field(default_factory=list)
    num_dropped: int = 0
    num_tokens: int = 0

    @property
    def first_token(self) -> int:
        return self.num_dropped * self.block_size

    @property
    def num_unused_slots(self) -> int:
        """Allocated slots past the last token."""
        num_blocks = self.num_dropped + len(self.block_ids)
        return num_blocks * self.block_size - self.num_tokens

    def num_new_blocks(self, num_tokens: int) -> int:
        """Returns how many blocks `append(num_tokens)` adds to the table, not counting one that a
        copy-on-write replaces."""
        if num_tokens == 0:
            return 0
        length = self.num_tokens + num_tokens
        num_blocks = -(-length // self.block_size)
        return num_blocks - self.num_dropped - len(self.block_ids)

    @property
    def read_only_tail(self) -> int | None:
        """The tail block, if it has a slot for the next token but must not be written to, since
        it is shared or kept; otherwise `None`."""
        index = self.num_tokens // self.block_size - self.num_dropped
        if index >= len(self.block_ids):
            return None
        block_id = self.block_ids[index]
        return block_id if self.pool.is_read_only(block_id) else None

    def block_ending_at(self, end: int) -> int | None:
        """Returns the id of the block whose last slot is that of token `end - 1`; `None` if no
        block ends there, or if that block has been dropped."""
        num_blocks, offset = divmod(end, self.block_size)
        if offset or num_blocks <= self.num_dropped:
            return None
        return self.block_ids[num_blocks - 1 - self.num_dropped]

    def read_only_blocks(self, first: int, end: int) -> list[int]:
        """Returns the blocks of tokens `[first, end)` that must not be written to, since they are
        shared or kept."""
        pool = self.pool
        if pool.is_exclusive:
            return []
        first_index = first // self.block_size - self.num_dropped
        end_index = -(-end // self.block_size) - self.num_dropped
        return [
            block_id
            for block_id in self.block_ids[max(0, first_index) : max(0, end_index)]
            if pool.is_read_only(block_id)
        ]

    def copy_on_write(self, first: int, end: int) -> list[tuple[int, int]]:
        """Replaces `read_only_blocks(first, end)` with new blocks; returns the copies `(source,
        target)` that must precede any write. If free blocks run out, raises `OutOfBlocksError`
        after replacing some of them."""
        copies = []
        for source in self.read_only_blocks(first, end):
            (target,) = self.pool.allocate(1)
            self.pool.release([source])
            self.block_ids[self.block_ids.index(source)] = target
            copies.append((source, target))
        return copies

    def slots(self, first: int, end: int) -> list[int]:
        """Returns the slots, `block_id * block_size + offset`, of tokens `[first, end)`. Raises
        `ValueError` for tokens without a slot."""
        size = self.block_size
        ids = self.block_ids
        num_dropped_tokens = self.num_dropped * size
        if first < num_dropped_tokens or end > num_dropped_tokens + len(ids) * size:
            raise ValueError(
                f"tokens [{first}, {end}) are not in the table's {len(ids)} blocks of {size} tokens"
                f" from token {num_dropped_tokens} on"
            )
        first -= num_dropped_tokens
        end -= num_dropped_tokens
        if end - first == 1:
            first_slot_of_block = ids[first // size] * size
            return [first_slot_of_block + first % size]
        slots: list[int] = []
        first_block = first // size
        end_block = -(-end // size)
        for index in range(first_block, end_block):
            start = index * size
            first_slot_of_block = ids[index] * size
            first_slot = first_slot_of_block + max(0, first - start)
            end_slot = first_slot_of_block + min(size, end - start)
            slots += range(first_slot, end_slot)
        return slots

    def num_needed_blocks(self, num_tokens: int) -> int:
        """Returns how many blocks `append(num_tokens)` needs, including one for copy-on-write."""
        num_new = self.num_new_blocks(num_tokens)
        needs_copy = num_tokens > 0 and self.read_only_tail is not None
        return num_new + needs_copy

    def append(
        self,
        num_tokens: int,
        new_ids: Sequence[int] | None = None,
    ) -> tuple[int, int] | None:
        """Extends the table by `num_tokens` tokens. `new_ids`: ids of
        `num_needed_blocks(num_tokens)` allocated blocks; `None` allocates them. If `read_only_tail`
        is replaced, returns the copy `(source, target)` that must precede any write; otherwise
        `None`. Raises `OutOfBlocksError` with the table unchanged."""
        if num_tokens == 0:
            return None
        tail = self.read_only_tail
        if new_ids is None:
            new_ids = self.pool.allocate(self.num_needed_blocks(num_tokens), self.block_ids)
        copy = None
        if tail is not None:
            copy = (tail, new_ids[0])
            new_ids = new_ids[1:]
            self.pool.release([tail])
            self.block_ids[-1] = copy[1]
        self.block_ids += new_ids
        self.num_tokens += num_tokens
        return copy

    def attach(
        self,
        block_ids: Sequence[int],
        num_dropped: int,
        num_tokens: int,
    ) -> None:
        """Adds computed blocks, which other tables may share, to this empty table, after
        `num_dropped` dropped blocks. `num_tokens`: the new length, including dropped tokens. Raises
        `ValueError` if the table is not empty."""
        if self.block_ids or self.num_tokens:
            raise ValueError(
                f"blocks can only be attached to an empty table: this one holds {self.num_tokens}"
                " tokens"
            )
        self.pool.acquire(block_ids)
        self.block_ids = list(block_ids)
        self.num_dropped, self.num_tokens = num_dropped, num_tokens

    def hold(self, block_ids: list[int]) -> None:
        """Sets the blocks of a table that so far has only token counts, and adds a holder to each
        block."""
        self.block_ids = block_ids
        self.pool.acquire(block_ids)

    def release(self) -> None:
        """Releases all blocks, and keeps only the token counts, until `hold`."""
        self.pool.release(reversed(self.block_ids))
        self.block_ids = []

    def abandon(self) -> None:
        """Drops the blocks without releasing them: a recount of the pool frees them."""
        self.pool.needs_recount, self.block_ids = True, []

    def skip(self, num_tokens: int) -> None:
        """Starts an empty table at token `num_tokens`, rounded down to the start of a block:
        earlier tokens are never stored."""
        num_dropped = num_tokens // self.block_size
        self.attach([], num_dropped, num_dropped * self.block_size)

    def drop_before(self, token: int) -> None:
        """Releases the leading blocks that hold only tokens before `token`."""
        num_before = token // self.block_size - self.num_dropped
        count = max(0, min(num_before, len(self.block_ids)))
        if count:
            self.pool.release(self.block_ids[:count])
            del self.block_ids[:count]
            self.num_dropped += count

    def check_truncate(self, num_tokens: int) -> None:
        """Raises `ValueError` if `truncate(num_tokens)` would."""
        if num_tokens < min(self.first_token, self.num_tokens):
            raise ValueError(
                f"cannot truncate to {num_tokens} tokens: the blocks of the first"
                f" {self.first_token} have been freed"
            )

    def truncate(self, num_tokens: int) -> None:
        """Removes all tokens from `num_tokens` on, and releases the blocks that hold no earlier
        tokens. Raises `ValueError` if the new end lies in dropped blocks."""
        if num_tokens >= self.num_tokens:
            return
        self.check_truncate(num_tokens)
        num_blocks = -(-num_tokens // self.block_size) - self.num_dropped
        # tail first, so that it is evicted first: a sequence's head is more likely to be reused
        self.pool.release(reversed(self.block_ids[num_blocks:]))
        del self.block_ids[num_blocks:]
        self.num_tokens = num_tokens

    def fork(self) -> BlockTable:
        """Returns a table that shares the blocks of this table's tokens, but not the blocks
        allocated for later tokens."""
        num_blocks = -(-self.num_tokens // self.block_size)
        block_ids = self.block_ids[: num_blocks - self.num_dropped]
        self.pool.acquire(block_ids)
        return BlockTable(self.pool, self.block_size, block_ids, self.num_dropped, self.num_tokens)

    def free(self) -> None:
        self.release()
        self.num_dropped = self.num_tokens = 0
