"""Which prefixes the decodes of a step share, where reading them once pays."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import compat
from ..batching.execution.inputs import PackedTokens
from ..cache.memory import GroupMemory
from ..kernels.triton.cascade import CascadeCosts, default_costs, plan_cascade
from .graph_keys import Prefixes

_NO_SAVINGS = CascadeCosts(token_bytes=0, state_bytes=1, rows_per_read=1)


class SharedPrefixes:
    """Plans the cascades of a model's steps over these layer groups."""

    def __init__(self, model: weakref.ref[PreTrainedModel], groups: list[GroupMemory]) -> None:
        self._model = model
        self._groups = groups
        self._windows = [group.spec.window for group in groups]
        self._block_sizes = [group.block_size for group in groups]
        self._costs: list[CascadeCosts] | None = None  # by group, of all its layers together

    def forget_costs(self) -> None:
        """After a layer's blocks were replaced."""
        self._costs = None

    def of(self, tokens: PackedTokens) -> Prefixes:
        """The prefixes of each layer group that are worth reading once for several decodes; empty
        if there are none."""
        num_decodes = tokens.num_decodes
        shared = []
        tables = [group.tables[:num_decodes] for group in tokens.groups]
        num_firsts = (len({table[0] for table in group_tables}) for group_tables in tables)
        if all(number == num_decodes for number in num_firsts):
            return ()  # no two begin with the same block, as in most steps
        if self._costs is None:
            self._costs = self._read_costs()
        groups = zip(
            tokens.groups,
            tables,
            self._windows,
            self._block_sizes,
            self._costs,
        )
        for group, group_tables, window, size, costs in groups:
            # as in `find_cascade`: rows longer than their window share nothing
            lengths = group.seq_lens[:num_decodes]
            if window is not None:
                lengths = [length if length <= window else 0 for length in lengths]
            shared.append(plan_cascade(group_tables, lengths, size, costs))
        return tuple(shared) if any(shared) else ()

    def _read_costs(self) -> list[CascadeCosts]:
        """Each layer group's costs, of all its layers together; where kernels have no cascades,
        they save nothing."""
        model: Any = self._model()
        text_config = model.config.get_text_config(decoder=True)
        configs = compat.layer_configs(text_config)
        costs_of_groups = []
        for group in self._groups:
            layers = group.storage.layers
            heads = []
            for index in layers:
                config = configs[index % len(configs)]
                heads.append(getattr(config, "num_attention_heads", None))
            tiles: list[Tensor] = []
            for blocks in layers.values():
                tiles += blocks.tiles
            is_counted = bool(layers) and all(isinstance(count, int) for count in heads)
            if not is_counted or any(tile.shape[3] > 512 for tile in tiles):
                costs_of_groups.append(_NO_SAVINGS)
                continue
            queries = [torch.empty(1, count, 1, 1, device="meta") for count in heads]
            pairs = zip(queries, layers.values())
            layer_costs = []
            for query, blocks in pairs:
                costs = default_costs(query, blocks.keys, blocks.values)
                layer_costs.append(costs)
            token_bytes, state_bytes, rows_per_read, splits, overhead_bytes = zip(*layer_costs)
            total = (
                sum(token_bytes),
                sum(state_bytes),
                min(rows_per_read),
                max(splits),
                sum(overhead_bytes),
            )
            costs_of_groups.append(CascadeCosts(*total))
        return costs_of_groups
