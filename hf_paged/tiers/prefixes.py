"""Prefixes whose blocks lie in a store below the pool: the adoption of blocks that the pool lacks.
Plain Python: no tensors."""

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
    """A store failed to copy blocks, for the reason in `cause`: no memory, or other layers. Nothing
    was changed."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Raises `TierError` for the errors of a copy."""
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
    """Writes the blocks of a path that the pool lacks, which `read` returns by group and position,
    to new blocks and registers them as cached. `False` if one cannot be read. Raises
    `OutOfBlocksError` if there is no room, `TierError` if they cannot be copied, or do not fit the
    layers. Then nothing is changed."""
    held: list[list[int]] = []  # the path's blocks that a sequence after it needs, of each group
    contents: list[dict[int, Any]] = []  # by position on the path
    for number in range(len(manager.groups)):
        held.append([])
        contents.append({})
        for n in manager.index.needed(number, len(links)):
            node = links[n].node
            block_id = None if node is None else node.block_ids[number]
            if block_id is not None:
                held[number].append(block_id)
                continue
            with copying():
                content = read(number, n)
            if content is None:
                return False
            contents[number][n] = content
    needs = [len(numbers) for numbers in contents]
    for group, block_ids in zip(manager.groups, held):  # so that making room does not evict them
        group.pool.acquire(block_ids)
    taken = manager.take(needs)
    try:
        if taken is None:
            raise manager.refusal or OutOfBlocksError(
                f"needs {sum(needs)} blocks of {manager.size_text} tokens,"
                f" {manager.num_free} available: raise `num_blocks`"
                f" ({store.memory.config.num_blocks})"
            )
        for number, (of_group, block_ids) in enumerate(zip(contents, taken)):
            if block_ids:
                with copying():
                    store.put_back(number, list(of_group.values()), block_ids)
        named = [dict(zip(numbers, block_ids)) for numbers, block_ids in zip(contents, taken)]
        node = manager.index.root(namespace)
        for n, link in enumerate(links):
            node = manager.index.add(
                node,
                link.tokens,
                [of_group.get(n) for of_group in named],
                manager.epochs.current,
            )
        manager.num_hits += 1
        return True
    finally:
        for group, block_ids, new_ids in zip(manager.groups, held, taken or [[] for _ in held]):
            group.pool.release(reversed([*block_ids, *new_ids]))
