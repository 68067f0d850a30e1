"""One sequence's map from logical to physical blocks. Plain Python: no tensors, no policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .block_pool import BlockPool


class BlockTable:
    """The blocks that hold tokens `[num_dropped * block_size, num_tokens)` of one sequence: token `t` lives in
    `block_ids[t // block_size - num_dropped]` at offset `t % block_size`. Tables that share a block never write to it:
    `append` first replaces a shared tail block and returns the copy to make (copy-on-write)."""

    __slots__ = ("block_ids", "block_size", "num_dropped", "num_tokens", "pool")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.block_ids: list[int] = []
        self.num_dropped = 0
        self.num_tokens = 0

    @property
    def first_token(self) -> int:
        return self.num_dropped * self.block_size

    @property
    def num_unused_slots(self) -> int:
        """Slots allocated past the last token."""
        return (self.num_dropped + len(self.block_ids)) * self.block_size - self.num_tokens

    def num_new_blocks(self, num_tokens: int) -> int:
        """Blocks that `append(num_tokens)` adds to the table, copy-on-write apart."""
        if num_tokens == 0:
            return 0
        last = -(-(self.num_tokens + num_tokens) // self.block_size)
        return last - self.num_dropped - len(self.block_ids)

    @property
    def shared_tail(self) -> int | None:
        """The partly filled tail block, if other tables hold it too or its content is to be kept: no write to it."""
        return next(iter(self.shared_blocks(self.num_tokens, self.num_tokens + 1)), None)

    def places(self, first: int, last: int) -> range:
        """Indices into `block_ids` of the blocks that hold tokens `[first, last)`, as far as they are there."""
        begin, end = first // self.block_size, -(-last // self.block_size)
        return range(max(0, begin - self.num_dropped), max(0, min(end - self.num_dropped, len(self.block_ids))))

    def shared_blocks(self, first: int, last: int) -> list[int]:
        """The blocks that hold tokens `[first, last)` and must not be written to, as `shared_tail` says."""
        pool = self.pool
        if pool.is_exclusive:
            return []
        found = (self.block_ids[place] for place in self.places(first, last))
        return [block_id for block_id in found if pool.refcount(block_id) > 1 or pool.is_kept(block_id)]

    def own(self, first: int, last: int) -> list[tuple[int, int]]:
        """Replaces the blocks that `shared_blocks` names; returns the copies to make before anything is written."""
        copies = []
        for source in self.shared_blocks(first, last):
            (target,) = self.pool.allocate(1)
            self.pool.release([source])
            self.block_ids[self.block_ids.index(source)] = target
            copies.append((source, target))
        return copies

    def slots(self, first: int, end: int) -> list[int]:
        """Where tokens `[first, end)` are stored, counted from the first that the table holds."""
        size, ids = self.block_size, self.block_ids
        if first < 0 or end > len(ids) * size:
            raise ValueError(f"tokens [{first}, {end}) of a table that holds {len(ids)} blocks of {size} tokens")
        if end - first == 1:
            return [ids[first // size] * size + first % size]
        slots: list[int] = []
        for block in range(first // size, -(-end // size)):
            start, base = block * size, ids[block] * size
            slots += range(base + max(0, first - start), base + min(size, end - start))
        return slots

    def num_needed(self, num_tokens: int) -> int:
        """Blocks that `append(num_tokens)` takes, copy-on-write included."""
        if num_tokens == 0:
            return 0
        return self.num_new_blocks(num_tokens) + (self.shared_tail is not None)

    def append(self, num_tokens: int, new_ids: Sequence[int] | None = None) -> tuple[int, int] | None:
        """Makes room for `num_tokens` more tokens and counts them as held, in `num_needed(num_tokens)` blocks that were
        allocated for this, or that it takes itself. Returns the copy `(source_block, target_block)` to make before
        anything is written, or `None`. Raises `OutOfBlocksError`; the table is then as it was."""
        if num_tokens == 0:
            return None
        tail = self.shared_tail
        if new_ids is None:
            new_ids = self.pool.allocate(self.num_new_blocks(num_tokens) + (tail is not None))
        copy = None
        if tail is not None:
            copy = (tail, new_ids[0])
            new_ids = new_ids[1:]
            self.pool.release([tail])
            self.block_ids[-1] = copy[1]
        self.block_ids += new_ids
        self.num_tokens += num_tokens
        return copy

    def attach(self, block_ids: Sequence[int], num_dropped: int) -> None:
        """Lets an empty table hold these full blocks, which others computed, as if `num_dropped` had gone before."""
        if self.block_ids or self.num_tokens:
            raise ValueError(f"attach({block_ids}) to a table that holds {self.num_tokens} tokens")
        self.pool.acquire(block_ids)
        self.block_ids = list(block_ids)
        self.num_dropped = num_dropped
        self.num_tokens = (num_dropped + len(block_ids)) * self.block_size

    def skip(self, num_tokens: int) -> None:
        """Starts an empty table at token `num_tokens`, rounded down to a block: what is in front is never stored."""
        if self.block_ids or self.num_tokens:
            raise ValueError(f"skip({num_tokens}) on a table that holds {self.num_tokens} tokens")
        self.num_dropped = num_tokens // self.block_size
        self.num_tokens = self.num_dropped * self.block_size

    def drop_before(self, token: int) -> int:
        """Gives back the leading blocks that hold only tokens before `token`; returns how many."""
        count = max(0, min(token // self.block_size - self.num_dropped, len(self.block_ids)))
        if count:
            self.pool.release(self.block_ids[:count])
            del self.block_ids[:count]
            self.num_dropped += count
        return count

    def truncate(self, num_tokens: int) -> None:
        """Forgets all tokens from `num_tokens` on and gives back the blocks that held only those."""
        if num_tokens >= self.num_tokens:
            return
        if num_tokens < self.num_dropped * self.block_size:
            raise ValueError(f"truncate to {num_tokens} tokens, but the first {self.first_token} were given back")
        keep = -(-num_tokens // self.block_size) - self.num_dropped
        # tail first: of what is freed together, the head of a sequence is the more likely to be asked for again
        self.pool.release(reversed(self.block_ids[keep:]))
        del self.block_ids[keep:]
        self.num_tokens = num_tokens

    def fork(self) -> BlockTable:
        """A second table over the same tokens; what is reserved for more stays this one's."""
        table = BlockTable(self.pool, self.block_size)
        table.block_ids = self.block_ids[: -(-self.num_tokens // self.block_size) - self.num_dropped]
        table.num_dropped, table.num_tokens = self.num_dropped, self.num_tokens
        self.pool.acquire(table.block_ids)
        return table

    def free(self) -> None:
        self.pool.release(reversed(self.block_ids))
        self.block_ids = []
        self.num_dropped = self.num_tokens = 0


def num_copies(pool: BlockPool, writers: Mapping[int, int]) -> int:
    """Blocks that copy-on-write takes when `writers[block_id]` tables are going to write to each block."""
    # the last holder of a block writes to it in place, unless its content is to be kept
    return sum(
        count if pool.is_kept(block_id) else min(count, pool.refcount(block_id) - 1)
        for block_id, count in writers.items()
    )
