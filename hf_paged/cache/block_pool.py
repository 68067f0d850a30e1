"""Block ids and the tables that map sequences to them. Plain Python: no tensors, no requests, no policy."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than the budget has left. Nothing was allocated when it is raised."""


class BlockPool:
    """The ids `0 .. num_blocks - 1` of one layer group. A block is used (held by `refcount` block tables), cached (by
    none, but kept) or free. Cached ones are evicted in LRU order (PagedAttention, arXiv 2309.06180, section 4.2)."""

    def __init__(self, num_blocks: int = 0) -> None:
        self._refcounts: list[int] = []
        self._free: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._kept: dict[int, Callable[[int], None]] = {}  # whom to tell of a block's eviction; used blocks too
        self.num_shared = 0  # blocks that more than one table holds
        self.run_length = 1  # how many blocks that follow each other a table gets, as far as they are free
        self._wrong_write: str | None = None
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
        """Blocks that `allocate` can take: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._refcounts) - len(self._free) - len(self._cached)

    def refcount(self, block_id: int) -> int:
        return self._refcounts[block_id]

    def states(self) -> list[int]:
        """Of each block the number of tables that hold it; 0 if it is free, -1 if it is cached."""
        return [-1 if block_id in self._cached else count for block_id, count in enumerate(self._refcounts)]

    def is_kept(self, block_id: int) -> bool:
        return block_id in self._kept

    @property
    def kept(self) -> list[int]:
        """The blocks whose content is to be kept, used ones too."""
        return list(self._kept)

    @property
    def is_exclusive(self) -> bool:
        """Whether any used block may be written to: none has two holders, and no content is to be kept."""
        return not (self.num_shared or self._kept)

    def grow(self, num_blocks: int) -> None:
        first = len(self._refcounts)
        self._refcounts.extend([0] * num_blocks)
        self._free.update((block_id, None) for block_id in range(first, first + num_blocks))

    def shrink(self) -> None:
        """Forgets the last blocks, as far as none of them is used."""
        self.evict(self.num_cached)
        while self._refcounts and not self._refcounts[-1]:
            self._refcounts.pop()
            del self._free[len(self._refcounts)]

    def allocate(self, num_blocks: int, after: int | None = None) -> list[int]:
        """Takes `num_blocks` blocks, each with refcount 1; evicts cached ones if too few are free. Where tables get
        runs (`run_length`), those that follow block `after` come first. Raises `OutOfBlocksError`, having taken and
        evicted none."""
        free = self._free
        if num_blocks > self.num_available:
            cached = f" and {self.num_cached} cached" if self._cached else ""
            raise OutOfBlocksError(f"needs {num_blocks} blocks, {self.num_free} of {self.num_blocks} are free{cached}")
        while num_blocks > len(free):  # a listener that is told of an eviction may drop further blocks
            self.evict(1)
        if self.run_length > 1:
            block_ids = self._take_runs(num_blocks, after)
        else:
            block_ids = [free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._refcounts[block_id] = 1
        return block_ids

    def _take_runs(self, num_blocks: int, after: int | None) -> list[int]:
        free, taken, run = self._free, [], self.run_length
        following = -1 if after is None else after + 1
        for _ in range(num_blocks):
            if following not in free:  # a run that is free as a whole, else what was freed first
                starts = range(0, self.num_blocks - run + 1, run)
                whole = (at for at in starts if all(block_id in free for block_id in range(at, at + run)))
                following = next(whole, next(iter(free)))
            del free[following]
            taken.append(following)
            following += 1
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """One more table holds each of these used or cached blocks."""
        for block_id in block_ids:
            refcount = self._refcounts[block_id]
            if refcount == 0:
                if block_id not in self._cached:
                    raise ValueError(f"block {block_id} is free and cannot be shared")
                del self._cached[block_id]
            elif refcount == 1:
                self.num_shared += 1
            self._refcounts[block_id] = refcount + 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One table fewer holds each of these; blocks that no table holds are cached or free, in the order given."""
        for block_id in block_ids:
            refcount = self._refcounts[block_id]
            if refcount == 0:
                raise ValueError(f"block {block_id} is already free")
            self._refcounts[block_id] = refcount - 1
            if refcount == 1:
                (self._cached if block_id in self._kept else self._free)[block_id] = None
            elif refcount == 2:
                self.num_shared -= 1

    def keep(self, block_id: int, on_evict: Callable[[int], None]) -> None:
        """This used block becomes cached, not free, when no table has it; `on_evict(block_id)` is told when it goes."""
        if self._refcounts[block_id] == 0 or block_id in self._kept:
            raise ValueError(f"block {block_id} is not used or already kept")
        self._kept[block_id] = on_evict

    def drop(self, block_id: int) -> None:
        """The content of this block is no longer worth keeping. `on_evict` is not called."""
        del self._kept[block_id]
        if block_id in self._cached:
            del self._cached[block_id]
            self._free[block_id] = None

    def lose(self, block_id: int) -> None:
        """As `drop`, but `on_evict` is told."""
        on_evict = self._kept[block_id]
        self.drop(block_id)
        on_evict(block_id)

    def evict(self, num_blocks: int) -> int:
        """Turns up to `num_blocks` cached blocks into free ones, least recently released first; returns how many."""
        before = len(self._cached)
        target = max(0, before - num_blocks)
        while len(self._cached) > target:
            block_id, _ = self._cached.popitem(last=False)
            on_evict = self._kept.pop(block_id)
            self._free[block_id] = None
            on_evict(block_id)
        return before - len(self._cached)

    def note_write(self, block_ids: Iterable[int]) -> None:
        """These blocks are about to be written to. Raises `AssertionError`, now and from `check_integrity` ever after,
        if more than one table holds one of them or its content is to be kept."""
        if self.is_exclusive:
            return
        for block_id in block_ids:
            if self._refcounts[block_id] != 1 or block_id in self._kept:
                self._wrong_write = (
                    f"block {block_id} was to be written to: refcount {self._refcounts[block_id]}, kept: "
                    f"{block_id in self._kept}"
                )
                raise AssertionError(self._wrong_write)

    def check_integrity(self, tables: Iterable[Sequence[int]], are_all: bool = True) -> None:
        """Raises `AssertionError` unless refcounts, free and cached blocks and the ids that `tables` hold agree;
        tables that are not all may hold fewer."""
        held = Counter(block_id for table in tables for block_id in table)
        for block_id in {*held, *range(self.num_blocks)}:
            refcount = self._refcounts[block_id] if 0 <= block_id < self.num_blocks else 0
            if held[block_id] > refcount or (are_all and held[block_id] < refcount):
                raise AssertionError(f"block {block_id}: refcount {refcount}, held by {held[block_id]} tables")
        if self._wrong_write is not None:
            raise AssertionError(self._wrong_write)
        for block_id, refcount in enumerate(self._refcounts):
            state = (block_id in self._free, block_id in self._cached)
            if state != (refcount == 0 and block_id not in self._kept, refcount == 0 and block_id in self._kept):
                raise AssertionError(
                    f"block {block_id}: refcount {refcount}, kept: {block_id in self._kept}, (free, cached): {state}"
                )
        counts = (self.num_free, self.num_cached, self.num_used, self.num_shared)
        used, shared = (sum(refcount > least for refcount in self._refcounts) for least in (0, 1))
        if sum(counts[:3]) != self.num_blocks or counts[2:] != (used, shared):
            raise AssertionError(f"(free, cached, used, shared) is {counts} of {self.num_blocks} blocks")


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks that hold tokens `[num_dropped * block_size, num_tokens)` of one sequence: token `t` lives in
    `block_ids[t // block_size - num_dropped]` at offset `t % block_size`. Tables that share a block never write to it:
    `append` first replaces a shared tail block and returns the copy to make (copy-on-write)."""

    pool: BlockPool
    block_size: int
    block_ids: list[int] = field(default_factory=list)
    num_dropped: int = 0
    num_tokens: int = 0

    @property
    def first_token(self) -> int:
        return self.num_dropped * self.block_size

    @property
    def last_block(self) -> int | None:
        return self.block_ids[-1] if self.block_ids else None

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

    def full_block(self, number: int) -> int | None:
        """The block that holds tokens `[number, number + 1) * block_size`; `None` if it was given back."""
        return self.block_ids[number - self.num_dropped] if number >= self.num_dropped else None

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
        return self.num_new_blocks(num_tokens) + (num_tokens > 0 and self.shared_tail is not None)

    def append(self, num_tokens: int, new_ids: Sequence[int] | None = None) -> tuple[int, int] | None:
        """Makes room for `num_tokens` more tokens and counts them as held, in `num_needed(num_tokens)` blocks that were
        allocated for this, or that it takes itself. Returns the copy `(source_block, target_block)` to make before
        anything is written, or `None`. Raises `OutOfBlocksError`; the table is then as it was."""
        if num_tokens == 0:
            return None
        tail = self.shared_tail
        if new_ids is None:
            new_ids = self.pool.allocate(self.num_new_blocks(num_tokens) + (tail is not None), self.last_block)
        copy = None
        if tail is not None:
            copy = (tail, new_ids[0])
            new_ids = new_ids[1:]
            self.pool.release([tail])
            self.block_ids[-1] = copy[1]
        self.block_ids += new_ids
        self.num_tokens += num_tokens
        return copy

    def attach(self, block_ids: Sequence[int], num_dropped: int, num_tokens: int | None = None) -> None:
        """Lets an empty table hold these blocks, which others computed, as if `num_dropped` had gone before. They are
        full, unless it says `num_tokens`."""
        if self.block_ids or self.num_tokens:
            raise ValueError(f"a table that holds {self.num_tokens} tokens cannot begin with others")
        self.pool.acquire(block_ids)
        self.block_ids = list(block_ids)
        self.num_dropped = num_dropped
        full = (num_dropped + len(block_ids)) * self.block_size
        self.num_tokens = full if num_tokens is None else num_tokens

    def skip(self, num_tokens: int) -> None:
        """Starts an empty table at token `num_tokens`, rounded down to a block: what is in front is never stored."""
        self.attach([], num_tokens // self.block_size)

    def drop_before(self, token: int) -> None:
        """Gives back the leading blocks that hold only tokens before `token`."""
        count = max(0, min(token // self.block_size - self.num_dropped, len(self.block_ids)))
        if count:
            self.pool.release(self.block_ids[:count])
            del self.block_ids[:count]
            self.num_dropped += count

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
        block_ids = self.block_ids[: -(-self.num_tokens // self.block_size) - self.num_dropped]
        self.pool.acquire(block_ids)
        return BlockTable(self.pool, self.block_size, block_ids, self.num_dropped, self.num_tokens)

    def free(self) -> None:
        self.pool.release(reversed(self.block_ids))
        self.block_ids = []
        self.num_dropped = self.num_tokens = 0
