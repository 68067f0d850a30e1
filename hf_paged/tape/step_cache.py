"""The cache that a model's forward gets while a decode step of a rectangle is recorded: every
tensor has the size of the step's capacity, and lengths are numbers on the device. It owns neither
blocks nor states."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    EncoderDecoderCache,
    LinearAttentionLayer,
)

from ..cache.handles import PagedTensor
from ..cache.kv_blocks import KVBlocks
from ..cache.layers import EMPTY_LAYERS, PagedLayer
from ..cache.paged_cache import PagedCache
from ..cache.reading import gather
from ..cache.states import (
    copy_state_attributes,
    set_state_tensors,
    state_layers,
    state_tensors,
)
from ..cache.store import store_signature
from ..step import NotCapturable, StepMetadata


class StepLayer(CacheLayerMixin):
    """One layer of a recorded step, whose rows `(n,)` each append a token."""

    def __init__(
        self,
        blocks: KVBlocks | None,
        step: StepMetadata,
        length: Tensor | int,
        is_sliding: bool,
        is_read: bool,
    ) -> None:
        """`blocks`: `None` if nothing has been stored in the layer. `length`: `()` int64, the
        positions that earlier steps have stored; of an encoder's keys and values, which no step
        changes, a number. `is_read`: whether the model's own code reads keys and values."""
        self._blocks = blocks
        self.step = step
        self.length = length
        self.is_sliding = is_sliding
        self._is_read = is_read
        self.is_initialized = blocks is not None

    @property
    def blocks(self) -> KVBlocks:
        """The keys and values. Raises `NotCapturable` if there are none."""
        if self._blocks is None:
            raise NotCapturable("a layer of its cache has no blocks yet")
        return self._blocks

    @property
    def keys(self) -> Tensor:
        """`(n, heads, capacity, dim)`."""
        return self._show(False)

    @property
    def values(self) -> Tensor:
        """`(n, heads, capacity, dim)`."""
        return self._show(True)

    def _show(self, is_value: bool) -> Tensor:
        blocks = self.blocks
        if not self._is_read:
            return PagedTensor(self.step, blocks, is_value)
        stored = blocks.values if is_value else blocks.keys
        return gather(self.step, stored, blocks.dtypes[is_value])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores K/V `(n, heads, 1, dim)`, and returns `keys` and `values`."""
        assert self.step.slots is not None
        if key_states.shape[::2] != self.step.slots.shape:
            raise NotCapturable("its forward stores a different number of tokens than it gets")
        signature = store_signature(key_states, value_states)
        self.blocks.store(signature, key_states, value_states, self.step.slots)
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the blocks exist already."""

    def get_seq_length(self) -> Any:
        """Returns the positions that earlier steps have stored."""
        return 0 if self._blocks is None else self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the length and first position of the keys."""
        assert self.step.columns is not None
        return len(self.step.columns), 0

    def get_max_length(self) -> int:
        """Returns -1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name up to transformers 5.23


class HybridStepLayer(StepLayer, LinearAttentionLayer):
    """A layer of a recorded step that has states, too."""


def step_cache(
    cache: PagedCache,
    steps: Sequence[StepMetadata],
    length: Tensor,
    running: Sequence[Any],
    states: Sequence[Tensor],
    is_read: bool,
) -> Any:
    """Makes the cache of a step's forward from one step per layer group of `cache`, a model's empty
    cache, and of its cross-attention cache; its layers of states are as those of the `running`
    rows, with `states` `(n, ...)`, which the forward reads and changes. `length` and
    `is_read` as in `StepLayer`."""
    self_cache = _step_cache(cache, steps[: len(cache.groups)], length, is_read)
    with_states = [x for x in self_cache.layers if isinstance(x, LinearAttentionLayer)]
    for layer, like in zip(with_states, running, strict=True):
        copy_state_attributes(layer, like)
    set_state_tensors(with_states, states)
    if cache.cross is None:
        return self_cache
    cross_steps = steps[len(cache.groups) :]
    columns = cross_steps[0].columns
    assert columns is not None
    cross = _step_cache(cache.cross, cross_steps, len(columns), is_read)
    both = EncoderDecoderCache(self_cache, cross)
    both.is_updated = dict.fromkeys(range(len(cross.layers)), True)
    return both


def _step_cache(
    cache: PagedCache, steps: Sequence[StepMetadata], length: Tensor | int, is_read: bool
) -> Cache:
    by_group = dict(zip(cache.groups.values(), steps))
    layers = []
    for layer in cache.layers:
        if isinstance(layer, PagedLayer):
            blocks = layer.group.blocks.storage.layers.get(layer.index)
            kind = HybridStepLayer if isinstance(layer, LinearAttentionLayer) else StepLayer
            layer = kind(blocks, by_group[layer.group], length, layer.is_sliding, is_read)
        elif isinstance(layer, LinearAttentionLayer):
            layer = copy.copy(layer)
        elif not isinstance(layer, EMPTY_LAYERS):
            raise NotCapturable(f"its cache has a {type(layer).__name__}")
        layers.append(layer)
    return Cache(layers=layers)


def store_states(cache: Any, states: Sequence[Tensor]) -> None:
    """At the end of the forward: copies states for which it has set other tensors to `states`."""
    for state, new in zip(states, state_tensors(state_layers(cache)), strict=True):
        if new is not state:
            state.copy_(new)
