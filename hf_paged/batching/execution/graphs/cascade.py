"""
Whether a step is faster eagerly, with shared blocks read once, than as a graph, which knows no shared blocks: those
depend on the tables of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ....cache.memory import GroupMemory
from ....kernels.triton.cascade_plan import CascadeCosts, plan_cascade

if TYPE_CHECKING:
    from ..packed import GroupShare

EAGER_LAYER_BYTES = 800 << 20
"""What a GPU reads while the host launches one layer kernel by kernel: about 0.2 ms at 4 TB/s. An estimate, not a
measurement."""


def eager_costs(groups: Sequence[GroupMemory], num_heads: int) -> list[CascadeCosts]:
    """For each layer group what its layers move together, and what launching all layers of the model takes."""
    from ....kernels.triton.cascade import default_costs  # needs Triton

    query = torch.empty(1, num_heads, 1, 1, device="meta")
    num_layers, found = sum(len(group.storage.layers) for group in groups), []
    for group in groups:
        costs = [default_costs(query, blocks.keys, blocks.values) for blocks in group.storage.layers.values()]
        found.append(
            CascadeCosts(
                token_bytes=sum(cost.token_bytes for cost in costs),
                state_bytes=sum(cost.state_bytes for cost in costs),
                rows_per_read=min(cost.rows_per_read for cost in costs),
                splits=max(cost.splits for cost in costs),
                overhead_bytes=num_layers * EAGER_LAYER_BYTES,
            )
        )
    return found


def has_shared_blocks(shares: Sequence[GroupShare]) -> bool:
    """Whether any two decodes begin with the same block: a quick look, for most steps."""
    return any(len({table[0] for table in share.tables}) < len(share.tables) for share in shares)


def prefers_cascade(
    shares: Sequence[GroupShare], windows: Sequence[int | None], block_size: int, costs: Sequence[CascadeCosts]
) -> bool:
    """
    Whether in some layer group a cascade saves more than the eager launches of all layers cost, by the cascade's own
    rule (`plan_cascade`). The eager step then takes less than the graph, whatever else it does.

    Args:
        shares (`Sequence[GroupShare]`): Of a step of decodes.
        windows (`Sequence[int | None]`): Of the layer groups.
        costs (`Sequence[CascadeCosts]`): What `eager_costs` gave.
    """
    for share, window, cost in zip(shares, windows, costs):
        # as `find_cascade` does: rows whose window ends within them share nothing
        lengths = [length if window is None or length <= window else 0 for length in share.seq_lens]
        if plan_cascade(share.tables, lengths, block_size, cost):
            return True
    return False
