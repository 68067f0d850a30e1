"""How many blocks the groups of a manager may take. It never takes or frees any."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .groups import BlockGroup

if TYPE_CHECKING:
    from .group_memory import GroupMemory
    from .memory import PagedMemory


class BlockSupply:
    """The blocks of the groups' own pools, which no other manager uses."""

    def __init__(self, groups: Sequence[BlockGroup]) -> None:
        self.groups = groups

    @property
    def num_free(self) -> int:
        """Blocks that may still be taken over all groups, including cached ones."""
        return sum(group.pool.num_available for group in self.groups)

    @property
    def num_total(self) -> int:
        """Blocks that would be available if nothing else ran."""
        counted = (group for group in self.groups if group.spec.is_counted)
        return self.num_free + sum(group.pool.num_used for group in counted)

    @property
    def num_withheld(self) -> int:
        """Blocks missing in `num_free` while other models' pools are in use."""
        return 0

    @property
    def is_used(self) -> bool:
        """Whether a table holds a block that counts against the limit of these groups."""
        return any(group.pool.num_used for group in self.groups)

    def release_unused(self) -> bool:
        """With a limit in bytes, frees the memory of groups without used blocks; returns whether
        there were any."""
        return False

    def note_length(self, length: int) -> None:
        """Notes the length of an ended sequence."""


class MemorySupply(BlockSupply):
    """The blocks that a memory, with its other groups, and `hf_paged.budget` leave to these
    groups."""

    groups: Sequence[GroupMemory]

    def __init__(self, groups: Sequence[GroupMemory], memory: PagedMemory) -> None:
        super().__init__(groups)
        self._memory: PagedMemory = weakref.proxy(memory)  # no cycle
        self._sizes = memory.sizes

    @property
    def num_free(self) -> int:
        return self._memory.num_obtainable(self.groups)

    @property
    def num_total(self) -> int:
        return self._memory.num_obtainable(self.groups, if_unused=True)

    @property
    def num_withheld(self) -> int:
        return self._memory.num_withheld

    @property
    def is_used(self) -> bool:
        return self._memory.is_used

    def release_unused(self) -> bool:
        return self._memory.release_unused()

    def note_length(self, length: int) -> None:
        if self._sizes is not None:
            self._sizes.note(length)
