"""The cache that a model's forward gets while a decode step of a rectangle is recorded: every
tensor has the size of the step's capacity, and lengths are device tensors. It owns neither blocks
nor states."""

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
        reads_keys: bool,
    ) -> None:
        """`blocks`: `None` if nothing has been stored in the layer. `length`: `()` int64, the
        positions that earlier steps have stored; an int for an encoder's keys and values, which no
        step changes. `reads_keys`: whether the model's own code reads keys and values."""
        self._blocks = blocks
        self.step = step
        self.length = length
        self.is_sliding = is_sliding
        self._reads_keys = reads_keys
        self.is_initialized = blocks is not None

    @property
    def blocks(self) -> KVBlocks:
        """The keys and values. Raises `NotCapturable` if there are none."""
        if self._blocks is None:
            raise NotCapturable("a layer of the model's cache has no blocks yet")
        return self._blocks

    @property
    def keys(self) -> Tensor:
        """`(n, heads, capacity, dim)`."""
        return self._tensor(False)

    @property
    def values(self) -> Tensor:
        """`(n, heads, capacity, dim)`."""
        return self._tensor(True)

    def _tensor(self, is_value: bool) -> Tensor:
        blocks = self.blocks
        if not self._reads_keys:
            return PagedTensor(self.step, blocks, is_value)
        stored = blocks.values if is_value else blocks.keys
        return gather(self.step, stored, blocks.dtypes[is_value])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores K/V `(n, heads, 1, dim)`, and returns `keys` and `values`."""
        assert self.step.slots is not None
        if key_states.shape[::2] != self.step.slots.shape:
            raise NotCapturable("its forward stores a different number of tokens than it receives")
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
    """A layer of a recorded step with both keys and values, and states of linear attention."""


def step_cache(
    cache: PagedCache,
    steps: Sequence[StepMetadata],
    length: Tensor,
    running_layers: Sequence[Any],
    states: Sequence[Tensor],
    reads_keys: bool,
) -> Any:
    """Makes the cache of a recorded forward. `cache`: the model's empty cache. `steps`: one per
    layer group of `cache`, then of its cross-attention cache. Layers of states copy the attributes
    of `running_layers` and hold `states` `(n, ...)`, which the forward reads and changes. `length`
    and `reads_keys` as in `StepLayer`."""
    self_cache = _step_cache(cache, steps[: len(cache.groups)], length, reads_keys)
    with_states = [x for x in self_cache.layers if isinstance(x, LinearAttentionLayer)]
    for layer, source in zip(with_states, running_layers, strict=True):
        copy_state_attributes(layer, source)
    set_state_tensors(with_states, states)
    if cache.cross is None:
        return self_cache
    cross_steps = steps[len(cache.groups) :]
    columns = cross_steps[0].columns
    assert columns is not None
    cross = _step_cache(cache.cross, cross_steps, len(columns), reads_keys)
    encoder_decoder_cache = EncoderDecoderCache(self_cache, cross)
    encoder_decoder_cache.is_updated = dict.fromkeys(range(len(cross.layers)), True)
    return encoder_decoder_cache


def _step_cache(
    cache: PagedCache, steps: Sequence[StepMetadata], length: Tensor | int, reads_keys: bool
) -> Cache:
    step_by_group = dict(zip(cache.groups.values(), steps))
    layers = []
    for layer in cache.layers:
        if isinstance(layer, PagedLayer):
            blocks = layer.group.blocks.storage.layers.get(layer.index)
            layer_class = HybridStepLayer if isinstance(layer, LinearAttentionLayer) else StepLayer
            layer = layer_class(
                blocks, step_by_group[layer.group], length, layer.is_sliding, reads_keys
            )
        elif isinstance(layer, LinearAttentionLayer):
            layer = copy.copy(layer)
        elif not isinstance(layer, EMPTY_LAYERS):
            raise NotCapturable(f"its cache has an unsupported layer, {type(layer).__name__}")
        layers.append(layer)
    return Cache(layers=layers)


def store_states(cache: Any, states: Sequence[Tensor]) -> None:
    """Copies the states that the forward replaced with new tensors back into `states`."""
    for state, new in zip(states, state_tensors(state_layers(cache)), strict=True):
        if new is not state:
            state.copy_(new)
