"""Prefixes whose blocks lie in a store below the pool: which blocks the pool lacks, and their
adoption. Plain Python: no tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
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


def missing(manager: BlockManager, group: int, links: Sequence[Link]) -> list[int]:
    """Returns the positions on a path whose blocks of this group a sequence after it needs and
    the pool lacks."""
    needed = manager.index.needed(group, len(links))
    return [n for n in needed if _block_of(links[n], group) is None]


def adopt(
    store: PrefixStore,
    manager: BlockManager,
    links: Sequence[Link],
    namespace: Hashable,
    contents: Sequence[dict[int, Any]],
) -> bool:
    """Writes `contents[group]`, by position on the path, to new blocks and registers them as
    cached. `False`, with nothing changed, if there is no room. Raises `TierError` if they
    cannot be written, or do not fit the layers."""
    held = []  # the path's blocks that a sequence after it needs, of each group
    for number in range(len(manager.groups)):
        needed = manager.index.needed(number, len(links))
        present = (_block_of(links[n], number) for n in needed)
        held.append([block_id for block_id in present if block_id is not None])
    needs = [len(numbers) for numbers in contents]
    for group, block_ids in zip(manager.groups, held):  # so that making room does not evict them
        group.pool.acquire(block_ids)
    taken = manager.take(needs)
    try:
        if taken is None:
            return False
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


def _block_of(link: Link, group: int) -> int | None:
    if link.node is None:
        return None
    return link.node.block_ids[group]
