"""Prefixes whose blocks a tier below the pool keeps: found, restored and adopted. Plain Python: no
tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol

from ..interrupts import is_interrupt
from .block_manager import UNCACHED, BlockManager
from .block_pool import OutOfBlocksError
from .prefix_index import Link


class Tier(Protocol):
    """Keeps the content of evicted blocks (`cache.tiers`)."""

    def keep(self, group: int, block_id: int, digest: bytes, is_vouched_for: bool) -> None:
        """Keeps a block that is being evicted, by its digest (`prefix_index.Link`). If not vouched
        for, it is served only after `confirm`."""

    def has(self, group: int, digest: bytes) -> bool:
        """Whether `read` may find the group's block with this digest, including unconfirmed
        blocks."""

    def read(self, group: int, digest: bytes) -> Any:
        """Returns the block's content under the current weights; `None` if it is lost."""

    def put_back(self, group: int, contents: list[Any], block_ids: list[int]) -> None:
        """Writes contents from `read` to blocks. Raises `ValueError` if they do not fit the
        layers."""

    @property
    def wants_confirmation(self) -> bool:
        """Whether many kept bytes are not vouched for."""

    def confirm(self) -> None:
        """Marks all kept blocks as computed with the last fingerprinted weights."""

    def discard(self) -> None:
        """Drops kept blocks that are not vouched for."""


class TierError(Exception):
    """A tier failed to copy blocks, for the reason in `cause`: no memory, or other layers. Nothing
    was changed."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextlib.contextmanager
def _copying() -> Iterator[None]:
    try:
        yield
    except OutOfBlocksError:
        raise
    except (MemoryError, RuntimeError, ValueError) as error:  # torch raises the second
        if is_interrupt(error):
            raise
        raise TierError(error) from error


def num_tokens_of(manager: BlockManager, path: Sequence[Any]) -> int:
    """Returns the number of tokens of a path of nodes or links."""
    return len(path) * manager.unit


def restorable(
    manager: BlockManager, token_ids: Sequence[Hashable], namespace: Hashable
) -> list[Link]:
    """Returns the path that `match` would attach if the pools had the tier's blocks."""
    if manager.tier is None:
        return []
    if not manager.prefix_caching or namespace is UNCACHED:
        return []
    max_nodes = (len(token_ids) - 1) // manager.unit
    return manager.index.reach(token_ids, namespace, max_nodes, manager.tier.has)


def restore(
    manager: BlockManager, token_ids: Sequence[Hashable], namespace: Hashable, num_tokens: int
) -> bool:
    """Restores blocks from the tier for `match` to find, if that gives a prefix longer than
    `num_tokens`. `False` if there are none, or no room. The current weights must have been
    vouched for. Raises `TierError`."""
    tier = manager.tier
    while tier is not None:
        links = restorable(manager, token_ids, namespace)
        if num_tokens_of(manager, links) <= num_tokens:
            return False
        contents = []  # of each group's missing blocks, by position on the path
        for group in range(len(manager.groups)):
            absent = missing(manager, group, links)
            with _copying():
                contents.append({n: tier.read(group, links[n].digest) for n in absent})
        blocks = (block for of_group in contents for block in of_group.values())
        if all(block is not None for block in blocks):
            return adopt(manager, links, namespace, contents, tier)
    # no tier; a block that `read` could not find is gone from the tier, so that the loop ends
    return False


def missing(manager: BlockManager, group: int, links: Sequence[Link]) -> list[int]:
    """Returns the positions on a path whose blocks of this group a sequence after it needs and
    the pool lacks."""
    needed = manager.index.needed(group, len(links))
    return [n for n in needed if _block_of(links[n], group) is None]


def adopt(
    manager: BlockManager,
    links: Sequence[Link],
    namespace: Hashable,
    contents: Sequence[dict[int, Any]],
    tier: Tier,
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
                with _copying():
                    tier.put_back(number, list(of_group.values()), block_ids)
        named = [dict(zip(numbers, block_ids)) for numbers, block_ids in zip(contents, taken)]
        node = manager.index.root(namespace)
        for n, link in enumerate(links):
            node = manager.index.add(
                node,
                link.tokens,
                [of_group.get(n) for of_group in named],
                manager.epoch,
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
