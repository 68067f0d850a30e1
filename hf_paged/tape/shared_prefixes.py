"""Finds prefixes that several decodes of a step share and that are worth reading once.
`kernels/triton/cascade.py` estimates what reading them once costs and saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from .. import compat
from ..batching.execution.inputs import PackedTokens
from ..cache.group_memory import GroupMemory
from ..cache.kv_blocks import KVBlocks
from ..forks import lazy_property
from ..kernels.triton.cascade import CascadeCosts, SharedPrefix, default_costs, plan_cascade
from .graph_keys import Prefixes

_NO_SAVINGS = CascadeCosts(token_bytes=0, state_bytes=1, rows_per_read=1)


@dataclass
class SharedPrefixes:
    """Plans the cascades of a model's steps over these layer groups. Its costs are valid until a
    layer's blocks are replaced."""

    model: Callable[[], PreTrainedModel | None]
    groups: list[GroupMemory]

    def find(self, tokens: PackedTokens) -> Prefixes:
        """Returns, for each layer group, the prefixes that are worth reading once for several
        decodes; empty if no group has any."""
        num_decodes = tokens.num_decodes
        shared: list[tuple[SharedPrefix, ...]] = []
        tables = [group.tables[:num_decodes] for group in tokens.groups]
        first_block_counts = (len({table[0] for table in group_tables}) for group_tables in tables)
        if all(count == num_decodes for count in first_block_counts):
            return ()  # no two decodes share their first block, as in most steps
        for group, group_tables, costs, memory in zip(
            tokens.groups, tables, self.costs, self.groups
        ):
            if any(group.starts):  # a cascade's queries see the whole prefix
                shared.append(())
                continue
            lengths = group.seq_lens[:num_decodes]
            window = memory.spec.window
            shared.append(plan_cascade(group_tables, lengths, memory.block_size, costs, window))
        return tuple(shared) if any(shared) else ()

    @lazy_property
    def costs(self) -> list[CascadeCosts]:
        """The costs of each layer group."""
        model: Any = self.model()
        text_config = model.config.get_text_config(decoder=True)
        configs = compat.layer_configs(text_config)
        return [_costs_of(group.storage.layers, configs) for group in self.groups]


def _costs_of(layers: dict[int, KVBlocks], configs: Sequence[Any]) -> CascadeCosts:
    """Returns the costs of a layer group, combined over its layers; `_NO_SAVINGS` if it has no
    layers, or if one of them has heads that are too wide for cascades, or an unknown number of
    heads."""
    layer_costs = []
    for index, blocks in layers.items():
        config = configs[index % len(configs)]
        heads = getattr(config, "num_attention_heads", None)
        is_narrow = all(tile.shape[3] <= 512 for tile in blocks.tiles)
        if not isinstance(heads, int) or not is_narrow:
            return _NO_SAVINGS
        layer_costs.append(default_costs(heads, blocks.keys, blocks.values))
    if not layer_costs:
        return _NO_SAVINGS
    token_bytes, state_bytes, rows_per_read, num_splits, overhead_bytes = zip(*layer_costs)
    return CascadeCosts(
        sum(token_bytes),
        sum(state_bytes),
        min(rows_per_read),
        max(num_splits),
        sum(overhead_bytes),
    )
