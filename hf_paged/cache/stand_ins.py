"""Chooses the paged layer that replaces a stock layer of transformers, and its layer group."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import cache_utils

from .groups import GroupSpec
from .layer_group import LayerGroup
from .layers import (
    PagedHybridLayer,
    PagedHybridSlidingWindowLayer,
    PagedIndexedLayer,
    PagedLayer,
    PagedSlidingWindowLayer,
)

_STAND_INS: dict[type, type[PagedLayer]] = {
    cache_utils.DynamicLayer: PagedLayer,
    cache_utils.DynamicSlidingWindowLayer: PagedSlidingWindowLayer,
    cache_utils.DynamicIndexedLayer: PagedIndexedLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer: PagedHybridLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: PagedHybridSlidingWindowLayer,
}


def spec_of(layer: Any, kind: str) -> GroupSpec | None:
    """Returns the group spec of a stock or paged layer in a cache of this kind; `None` if no paged
    layer replaces the stock layer."""
    if isinstance(layer, PagedLayer):
        return dataclasses.replace(layer.group.spec, kind=kind)
    if type(layer) not in _STAND_INS:
        return None
    window = getattr(layer, "sliding_window", None)
    return GroupSpec(kind, window)


def paged_layer(layer: Any, group: LayerGroup | None, index: int) -> Any:
    """Returns a new paged layer in place of `layer`, the stock or paged layer `index` of a cache.
    `group` has the layer's spec (`spec_of`). Without a group (Mamba states, a model's own
    compressed layers), returns `layer`."""
    if group is None:
        return layer
    stock_class = type(layer)
    layer_class: Any = _STAND_INS.get(stock_class, stock_class)
    if issubclass(layer_class, PagedHybridLayer):
        return layer_class(group, index, layer.number_of_states)
    return layer_class(group, index)
