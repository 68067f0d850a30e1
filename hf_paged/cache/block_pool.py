"""Block ids and who holds them. Plain Python: no tensors, no requests."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than the budget has left. Nothing was allocated when it is raised."""


class BlockPool:
    """
    The ids `0 .. num_blocks - 1` of one layer group, each free or held by `refcount` block tables.

    Always true: `num_free + num_used == num_blocks`, and a block is free exactly when its refcount is 0.
    Freed blocks are handed out again least recently freed first, so that a block that may be worth keeping survives
    longest (PagedAttention, arXiv 2309.06180, section 4.2).
    """

    def __init__(self, num_blocks: int = 0) -> None:
        self._refcounts: list[int] = []
        self._free: OrderedDict[int, None] = OrderedDict()
        self.grow(num_blocks)

    @property
    def num_blocks(self) -> int:
        """All blocks, free or used."""
        return len(self._refcounts)

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table holds."""
        return len(self._refcounts) - len(self._free)

    def refcount(self, block_id: int) -> int:
        """Number of tables that hold the block."""
        return self._refcounts[block_id]

    def grow(self, num_blocks: int) -> None:
        """Adds `num_blocks` new, free blocks."""
        first = len(self._refcounts)
        self._refcounts.extend([0] * num_blocks)
        self._free.update((block_id, None) for block_id in range(first, first + num_blocks))

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes `num_blocks` free blocks, each with refcount 1. Raises `OutOfBlocksError`, having taken none."""
        if num_blocks > len(self._free):
            raise OutOfBlocksError(f"needs {num_blocks} blocks, {self.num_free} of {self.num_blocks} are free")
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._refcounts[block_id] = 1
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """One more table holds each of these used blocks."""
        for block_id in block_ids:
            if self._refcounts[block_id] == 0:
                raise ValueError(f"block {block_id} is free and cannot be shared")
            self._refcounts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One table fewer holds each of these blocks; those that nobody holds are free, in the order given."""
        for block_id in block_ids:
            refcount = self._refcounts[block_id]
            if refcount == 0:
                raise ValueError(f"block {block_id} is already free")
            self._refcounts[block_id] = refcount - 1
            if refcount == 1:
                self._free[block_id] = None

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises `AssertionError` unless refcounts, free list and the block ids that `tables` hold agree."""
        held = Counter(block_id for table in tables for block_id in table)
        for block_id, refcount in enumerate(self._refcounts):
            if held[block_id] != refcount:
                raise AssertionError(f"block {block_id}: refcount {refcount}, held by {held[block_id]} tables")
            if (refcount == 0) != (block_id in self._free):
                raise AssertionError(f"block {block_id}: refcount {refcount}, in free list: {block_id in self._free}")
        if self.num_free + self.num_used != self.num_blocks or set(held) - set(range(self.num_blocks)):
            raise AssertionError(f"{self.num_free} free + {self.num_used} used of {self.num_blocks} blocks")
