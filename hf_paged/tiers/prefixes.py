"""Restores prefix blocks that are missing from the pool, with content from a tier or a file.
Handles no tensors: the store copies the content."""

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
    """Copying blocks failed with `cause`: memory ran out, or the layers differ. No new block stays
    allocated or registered, but cached blocks may have been evicted."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Converts the errors of a copy to `TierError`, except `OutOfBlocksError`."""
    try:
        yield
    except OutOfBlocksError:
        raise
    except (MemoryError, RuntimeError, ValueError) as error:  # torch raises `RuntimeError`
        if is_interrupt(error):
            raise
        raise TierError(error) from error


def restore_path(
    store: PrefixStore,
    manager: BlockManager,
    links: Sequence[Link],
    namespace: Hashable,
    read: Callable[[int, int], Any | None],
) -> bool:
    """Restores the blocks of a path that are missing from the pool: allocates, fills and registers
    new blocks, leaves them cached, and returns `True`. `read(group, index)` returns the content of
    the group's block at node `index` of the path. Returns `False` if `read` returns `None` for a
    block. Raises `OutOfBlocksError` if too few blocks are free, and `TierError` if blocks cannot be
    copied or do not fit the layers. After `False` or an error, no new block stays allocated or
    registered; cached blocks may have been evicted."""
    cached_ids: list[list[int]] = []  # by group: ids of the path's blocks in the pool
    contents: list[dict[int, Any]] = []  # of missing blocks, by group and index on the path
    for group_index in range(len(manager.groups)):
        cached_ids.append([])
        contents.append({})
        for index in manager.index.needed_nodes(group_index, len(links)):
            node = links[index].node
            block_id = None if node is None else node.block_ids[group_index]
            if block_id is not None:
                cached_ids[group_index].append(block_id)
                continue
            with copying():
                content = read(group_index, index)
            if content is None:
                return False
            contents[group_index][index] = content
    num_missing = [len(group_contents) for group_contents in contents]  # by group
    for group, block_ids in zip(manager.groups, cached_ids):  # so that `take` does not evict them
        group.pool.acquire(block_ids)
    allocated_ids = manager.take(num_missing)
    try:
        if allocated_ids is None:
            raise manager.take_error or OutOfBlocksError(
                f"needs {sum(num_missing)} blocks of {manager.size_text} tokens, but only"
                f" {manager.num_free} are available: raise `num_blocks`"
                f" ({store.memory.config.num_blocks})"
            )
        groups = list(zip(contents, allocated_ids))
        for group_index, (group_contents, block_ids) in enumerate(groups):
            if block_ids:
                with copying():
                    store.put_back(group_index, list(group_contents.values()), block_ids)
        # by group and index on the path: ids of the new blocks
        restored_ids_by_group = [
            dict(zip(group_contents, block_ids)) for group_contents, block_ids in groups
        ]
        node = manager.index.root(namespace)
        for index, link in enumerate(links):
            node = manager.index.add(
                node,
                link.tokens,
                [restored_ids.get(index) for restored_ids in restored_ids_by_group],
                manager.epochs.current,
            )
        manager.num_hits += 1
        return True
    finally:
        new_ids_by_group = allocated_ids or [[] for _ in cached_ids]
        for group, block_ids, new_ids in zip(manager.groups, cached_ids, new_ids_by_group):
            group.pool.release(reversed([*block_ids, *new_ids]))
