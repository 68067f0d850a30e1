"""The blocks of one sequence in all layer groups. `block_manager.BlockManager` allocates, shares
and frees them."""

from __future__ import annotations

from dataclasses import dataclass

from .block_pool import BlockTable
from .prefix_index import Node

UNCACHED = object()
"""The namespace of sequences that do not use the prefix cache."""


class _WithWeakRefs:
    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class SequenceBlocks(_WithWeakRefs):
    """The blocks of one sequence: one block table per layer group. All tables hold the same number
    of tokens, except in a cache's own rows, whose layers advance one after another, and after a
    forward that stored more tokens than it was given."""

    tables: tuple[BlockTable, ...] = ()
    epoch: int = 0  # the manager's epoch when the oldest block was begun
    node: Node | None = None  # node of the last registered block in the prefix index
    num_registered: int = 0  # nodes of the prefix index up to and including `node`
    # number of tokens up to which a decode needs neither new nor copied blocks, but only raises
    # token counts
    capacity: int = 0
    # token counts at which a step must end, so that `register` can register the state there
    stops: tuple[int, ...] = ()

    def forget_registered(self) -> None:
        """Forgets `node`, `num_registered` and `capacity`. The prefix index keeps its nodes."""
        self.node, self.num_registered, self.capacity = None, 0, 0

    def limit_capacity(self, num_tokens: int = 0) -> None:
        """Called when blocks from token `num_tokens` on are removed, shared or used by others."""
        self.capacity = min(self.capacity, num_tokens)

    def __del__(self) -> None:
        # an exception may have dropped a sequence that holds blocks, or interrupted `__init__`
        # before it set `tables`
        for table in getattr(self, "tables", ()):
            table.pool.needs_recount |= bool(table.block_ids)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless lengths, blocks and `capacity` agree."""
        lengths = {table.num_tokens for table in self.tables}
        if self.capacity and len(lengths) != 1:  # where they may differ, the capacity is 0
            raise AssertionError(f"the groups of a sequence hold {sorted(lengths)} tokens")
        for table in self.tables:
            # up to a whole block may be unused, since `reserve_next` allocates ahead
            num_unused = table.num_unused_slots
            if table.block_ids and not 0 <= num_unused <= table.block_size:
                raise AssertionError(f"{len(table.block_ids)} blocks for {table.num_tokens} tokens")
            is_writable = self.capacity > table.num_tokens
            tail = table.read_only_tail
            if is_writable and tail is not None:
                raise AssertionError(f"block {tail} is shared or kept, but may be written to")


NO_BLOCKS = SequenceBlocks()
"""The blocks of a sequence that is not admitted yet, or whose blocks were freed."""
