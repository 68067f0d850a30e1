"""Gradients through a `PagedCache`: keeps keys and values with their autograd graph, which their
copies in blocks lack. `cache.layers` decides when to keep them. This module is one of hf_paged's
optional parts (`rooms.GradientsRoom`), and imports none of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .cache.handles import READ_ONLY
from .cache.kv_blocks import KVBlocks
from .cache.layers import PagedLayer
from .cache.paged_cache import PagedCache
from .cache.reading import read_pair
from .step import StepMetadata


class GraphStates(NamedTuple):
    """A layer's latest keys and values, each `(batch, heads, n, dim)`, with their autograd
    graph."""

    keys: Tensor
    values: Tensor
    versions: tuple[int, ...]  # of both tensors; a write in place increases them

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> GraphStates:
        return cls(keys, values, _versions(keys, values))

    def select(self, function: Callable[[Tensor], Tensor]) -> GraphStates | None:
        """Returns states with `function` applied to keys and to values; `None` if gradients are
        disabled, since transformers' `DynamicLayer` would lose its graph, too."""
        if not torch.is_grad_enabled():
            return None
        keys = function(self.keys)
        values = function(self.values)
        return GraphStates.of(keys, values)

    def last(self, num_tokens: int) -> GraphStates:
        """Returns the states of the last `num_tokens` tokens, or all if there are fewer."""
        surplus = self.keys.shape[2] - num_tokens
        if surplus <= 0:
            return self
        return GraphStates.of(self.keys[:, :, surplus:], self.values[:, :, surplus:])

    def visible(self, step: StepMetadata, blocks: KVBlocks) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of `step.columns`, each `(batch, heads, len(columns), dim)`.
        These states hold the last columns. Earlier columns that they lack come from `blocks`,
        without a graph."""
        assert step.columns is not None
        num_visible = len(step.columns)
        keys, values, _ = self.last(num_visible)
        num_missing = num_visible - keys.shape[2]
        if not num_missing:
            return keys, values
        past_keys, past_values = (past[:, :, :num_missing] for past in read_pair(step, blocks))
        return torch.cat([past_keys, keys], dim=2), torch.cat([past_values, values], dim=2)

    def check(self) -> None:
        """Raises `RuntimeError` if the tensors were written to in place, since the blocks still
        hold the old values."""
        if _versions(self.keys, self.values) != self.versions:
            raise RuntimeError(READ_ONLY)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphStates:
        return self  # shared, since its tensors are never written to

    def __reduce__(self) -> Any:
        return type(None), ()  # `None`: a pickled cache has the K/V of blocks, without a graph


def extend(
    layer: PagedLayer,
    step: StepMetadata,
    blocks: KVBlocks,
    key_states: Tensor,
    value_states: Tensor,
) -> tuple[Tensor, Tensor]:
    """Appends a step's new K/V `(batch, heads, n, dim)` to the layer's `graph_states`, rounded as
    `blocks` store them. Returns all keys and all values that the step attends to."""
    new_states = [key_states, value_states]
    if not _is_exact(blocks):  # gradients pass through the rounding
        pairs = zip(read_pair(step, blocks), new_states)
        new_states = [
            stored[:, :, stored.shape[2] - states.shape[2] :] + (states - states.detach())
            for stored, states in pairs
        ]
    if layer.graph_states is not None:
        pairs = zip(layer.graph_states[:2], new_states)
        new_states = [torch.cat(pair, dim=2) for pair in pairs]
    states = GraphStates.of(*new_states)
    # a first forward attends to the K/V that it computed
    is_first = layer.num_positions == key_states.shape[2]
    visible = (key_states, value_states) if is_first else states.visible(step, blocks)
    if not layer.group.record_past:
        first_visible = layer.group.spec.first_visible(layer.num_positions)
        states = states.last(layer.num_positions - first_visible)
    layer.graph_states = states
    return visible


def _is_exact(blocks: KVBlocks) -> bool:
    """Whether blocks hold K/V of their `dtypes` without rounding, being neither quantized nor of a
    narrower dtype."""
    return blocks.quantized_dtype is None and all(
        torch.promote_types(tensor.dtype, dtype) == tensor.dtype for tensor, dtype in blocks.pair
    )


def detach(cache: PagedCache) -> None:
    """Implements `PagedCache.detach`."""
    for layer in cache.layers:
        if isinstance(layer, PagedLayer):
            layer.graph_states = None
        # any layer may hold tensors with a graph, for example linear attention's states and
        # indexers' keys
        tensors = {
            name: value
            for name, value in vars(layer).items()
            if isinstance(value, (dict, list, Tensor))
        }
        vars(layer).update(tree_map_only(Tensor, Tensor.detach, tensors))


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)
