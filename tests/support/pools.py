"""Pools of fixed size without memory, for tests and simulations of what needs no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.block_sizes import BlockSizes
from hf_paged.cache.groups import FULL_ATTENTION, UNBOUNDED, GroupSpec


class PoolGroup:
    """Stands for a `GroupMemory`. Its blocks have no content."""

    block_bytes = 0
    is_sized = True

    def __init__(
        self, pool: BlockPool, spec: GroupSpec = FULL_ATTENTION, block_size: int = 0
    ) -> None:
        """`block_size`: tokens per block; 0: that of `manager_of`."""
        self.pool, self.spec = pool, spec
        self.holds_states = spec.make_states() is not None
        self.block_size = UNBOUNDED if self.holds_states else block_size

    def has_free(self, num_blocks: int) -> bool:
        return False

    def ensure_free(self, num_blocks: int) -> None:
        pass

    def take(self, num_blocks: int, after: Sequence[int] = ()) -> list[int]:
        self.ensure_free(num_blocks)
        return self.pool.allocate(num_blocks, after)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        pass


class Pools:
    """Stands for the `PagedMemory` of these groups, which no other manager uses."""

    num_held_by_others = 0

    def __init__(self, groups: Sequence[Any], block_size: int) -> None:
        self.groups, self.block_size = groups, block_size
        self.sizes = BlockSizes()

    def num_available(self, groups: Sequence[Any], assume_unused: bool = False) -> int:
        num_blocks = sum(group.pool.num_available for group in groups)
        if assume_unused:
            num_blocks += sum(group.pool.num_used for group in groups if group.spec.is_counted)
        return num_blocks

    @property
    def is_used(self) -> bool:
        return any(group.pool.num_used for group in self.groups)


def manager_of(
    groups: Sequence[Any], block_size: int, prefix_caching: bool = True, pools: Any = None
) -> BlockManager:
    """A manager of these groups, with blocks of `block_size` tokens where they name no other."""
    for group in groups:
        group.block_size = group.block_size or block_size
    blocks = BlockManager(groups, pools or Pools(groups, block_size))
    blocks.prefix_caching = prefix_caching
    return blocks
