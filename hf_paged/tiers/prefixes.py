"""Restores the blocks of a prefix that the pool lacks from a store below it. Handles no tensors:
their content passes through."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..cache.block_manager import BlockManager
from ..cache.block_pool import OutOfBlocksError
from ..cache.prefix_index import Link
from ..interrupts import is_interrupt

if TYPE_CHECKING:
    from .store import PrefixStore


class TierError(Exception):
    """A store failed to copy blocks, because of `cause`: memory ran out, or the layers differ. The
    pool is unchanged."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Converts the errors of a copy to `TierError`."""
    try:
        yield
    except OutOfBlocksError:
        raise
    except (MemoryError, RuntimeError, ValueError) as error:  # torch raises the second
        if is_interrupt(error):
            raise
        raise TierError(error) from error


def adopt(
    store: PrefixStore,
    manager: BlockManager,
    links: Sequence[Link],
    namespace: Hashable,
    read: Callable[[int, int], Any | None],
) -> bool:
    """Writes the blocks of a path that the pool lacks to new blocks, and registers these as cached.
    `read` returns their content by group and position. Returns `False` if a block cannot be read.
    Raises `OutOfBlocksError` if the pool has no free blocks for them, and `TierError` if they
    cannot be copied or do not fit the layers. In all these cases the pool is unchanged."""
    cached_ids: list[list[int]] = []  # by group, the path's blocks that the pool has
    contents: list[dict[int, Any]] = []  # by group, the others by position on the path
    for number in range(len(manager.groups)):
        cached_ids.append([])
        contents.append({})
        for n in manager.index.needed_nodes(number, len(links)):
            node = links[n].node
            block_id = None if node is None else node.block_ids[number]
            if block_id is not None:
                cached_ids[number].append(block_id)
                continue
            with copying():
                content = read(number, n)
            if content is None:
                return False
            contents[number][n] = content
    needs = [len(of_group) for of_group in contents]
    for group, block_ids in zip(manager.groups, cached_ids):  # so that `take` does not evict them
        group.pool.acquire(block_ids)
    allocated = manager.take(needs)
    try:
        if allocated is None:
            raise manager.take_error or OutOfBlocksError(
                f"needs {sum(needs)} blocks of {manager.size_text} tokens,"
                f" {manager.num_free} available: raise `num_blocks`"
                f" ({store.memory.config.num_blocks})"
            )
        for number, (of_group, block_ids) in enumerate(zip(contents, allocated)):
            if block_ids:
                with copying():
                    store.put_back(number, list(of_group.values()), block_ids)
        restored = [
            dict(zip(of_group, block_ids)) for of_group, block_ids in zip(contents, allocated)
        ]
        node = manager.index.root(namespace)
        for n, link in enumerate(links):
            node = manager.index.add(
                node,
                link.tokens,
                [of_group.get(n) for of_group in restored],
                manager.epochs.current,
            )
        manager.num_hits += 1
        return True
    finally:
        new = allocated or [[] for _ in cached_ids]
        for group, block_ids, new_ids in zip(manager.groups, cached_ids, new):
            group.pool.release(reversed([*block_ids, *new_ids]))
