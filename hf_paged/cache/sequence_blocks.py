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
    """The blocks of one sequence: one block table per layer group, all with the same number of
    tokens."""

    tables: tuple[BlockTable, ...] = ()
    epoch: int = 0  # the manager's epoch when the first token was stored
    node: Node | None = None  # node of the last registered block in the prefix index
    num_registered: int = 0  # nodes of the prefix index up to and including `node`
    # tokens for which the tables have writable slots: up to it, a decode step only counts
    capacity: int = 0
    # token counts at which a step must end, so that `register` can register the state there
    stops: tuple[int, ...] = ()

    def __del__(self) -> None:
        # it still has blocks if an exception dropped it; no tables, if during construction
        for table in getattr(self, "tables", ()):
            table.pool.needs_recount |= bool(table.block_ids)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless the tables agree."""
        lengths = {table.num_tokens for table in self.tables}
        if self.capacity and len(lengths) != 1:  # tables of a cache's row may differ
            raise AssertionError(f"the groups of a sequence hold {sorted(lengths)} tokens")
        for table in self.tables:
            # at most the slots of one block, which `reserve_next` allocates ahead
            num_unused = table.num_unused_slots
            if table.block_ids and not 0 <= num_unused <= table.block_size:
                raise AssertionError(f"{len(table.block_ids)} blocks for {table.num_tokens} tokens")
            is_writable = self.capacity > table.num_tokens
            if is_writable and table.shared_tail is not None:
                raise AssertionError(f"block {table.shared_tail} is shared, but may be written to")


NO_BLOCKS = SequenceBlocks()
"""The blocks of a sequence before it is admitted and after its blocks are freed."""
