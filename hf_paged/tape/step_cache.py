"""The cache that a model's forward gets while a decode step of a rectangle is recorded. Its keys
and values have as many columns as the step's block tables can hold tokens, and its length is a
tensor on the device. Its blocks are those of the model's empty cache."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Sequence
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
from ..cache.layers import EMPTY_LAYERS, PagedIndexedLayer, PagedLayer
from ..cache.paged_cache import PagedCache
from ..cache.reading import gather
from ..kernels.cpp.blocks import store_signature
from ..rectangles.states import (
    copy_state_attributes,
    is_same_memory,
    set_state_tensors,
    state_or_indexer_layers,
    state_tensors,
)
from ..step import KeysReadError, NotCapturable, StepMetadata
from . import unmasked
from .columns import Columns, LiveColumns, StoredColumns
from .length import Length


class StepLayer(CacheLayerMixin):
    """One layer of a recorded step, in which each of `n` rows appends a token."""

    def __init__(
        self,
        blocks: KVBlocks | None,
        step: StepMetadata,
        length: Tensor | int,
        is_sliding: bool,
        reads_keys: bool,
    ) -> None:
        """`blocks`: `None` if nothing has been stored in the layer. `length`: the number of
        positions stored by earlier steps, `()` int64; an int for an encoder's keys and values,
        which no step changes. `reads_keys`: whether to gather keys and values, since the model's
        own code reads them."""
        self._blocks = blocks
        self.step = step
        self.length = length
        self.is_sliding = is_sliding
        self._reads_keys = reads_keys
        self.is_initialized = blocks is not None
        self.is_updated = False  # whether the new token is stored

    @property
    def blocks(self) -> KVBlocks:
        """The layer's blocks. Raises `NotCapturable` if there are none yet."""
        if self._blocks is None:
            raise NotCapturable("a layer of the model's cache has no blocks yet")
        return self._blocks

    @property
    def keys(self) -> Tensor:
        """`(n, heads, capacity, dim)`: a handle or, with `reads_keys`, a gathered tensor."""
        return self._keys_or_values(False)

    @property
    def values(self) -> Tensor:
        """`(n, heads, capacity, dim)`: as `keys`."""
        return self._keys_or_values(True)

    def _keys_or_values(self, is_value: bool) -> Tensor:
        blocks = self.blocks
        if not self._reads_keys:
            return PagedTensor(self.step, blocks, is_value)
        gathered = gather(self.step, blocks, is_value)
        columns = unmasked.current_columns.get()
        if columns is not None and isinstance(self.length, Length) and self.step.window is None:
            columns.add(gathered, self.length.tensor)
        return gathered

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores K/V `(n, heads, 1, dim)`; returns `keys` and `values`. Raises `NotCapturable` for
        other numbers of rows or tokens."""
        assert self.step.slots is not None
        if key_states.shape[::2] != self.step.slots.shape:
            raise NotCapturable("its forward stores a different number of tokens than it receives")
        signature = store_signature(key_states, value_states)
        self.blocks.store(signature, key_states, value_states, self.step.slots)
        self.is_updated = True
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the blocks exist already."""

    def get_seq_length(self) -> Any:
        """Returns `length`, plus 1 after `update`; 0 if nothing has been stored in the layer."""
        if self._blocks is None:
            return 0
        return self.length + 1 if self.is_updated else self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """Returns the number of keys (the capacity), and the position of the first key. In a layer
        with a window, that position is a tensor `()` for all rows, which have dropped the same
        number of tokens. It is 0 in other layers, and in all layers if rows have padding or with
        `reads_keys`."""
        assert self.step.columns is not None and self.step.lengths is not None
        first: Any = 0
        if self.step.window is not None and not (self._reads_keys or self.step.has_padding):
            assert self.step.lengths.origins is not None
            first = self.step.lengths.origins[0]
        return len(self.step.columns), first

    def get_max_length(self) -> int:
        """Returns -1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its old name, deprecated in transformers 5.17


class HybridStepLayer(StepLayer, LinearAttentionLayer):
    """A layer of a recorded step with keys, values and states of linear attention."""


class IndexedStepLayer(StepLayer):
    """A layer of a recorded step with keys, values and indexer keys."""

    # (n, at least capacity, dim), with zeros in the columns after `length`; `None` if the running
    # step's layer has none
    indexer_keys: Tensor | None = None

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """The positions `(axes, n, capacity)` of all columns; `None` if the running step's layer
        has none. The forward appends the new token's position. Raises `KeysReadError` without
        `reads_keys`."""
        positions, length = self.__dict__.get("indexer_position_ids"), self.length
        if positions is None:
            return None
        if not self._reads_keys:  # the masks then do not hide columns that are not stored
            raise KeysReadError("the model's own code reads positions of indexer keys")
        assert isinstance(length, Length) and self.step.columns is not None
        stored = positions[..., : len(self.step.columns)]
        return StoredColumns(stored, length.tensor, axis=2)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        if isinstance(positions, Columns):  # the buffer already contains the new token's position
            return
        self.__dict__["indexer_position_ids"] = positions

    def take(self, source: Any) -> None:
        """Takes the indexer keys, and their positions if there are any, from `source`, the running
        step's layer. Raises `NotCapturable` if there is not one for each of the cache's tokens."""
        length = self.length
        assert isinstance(length, Length)
        if any(state.shape[1] != length.recorded_value for state in state_tensors([source])):
            raise NotCapturable("its cache has a different number of indexer keys than of tokens")
        copy_state_attributes(self, source)

    def update_indexer(self, indexer_key_states: Tensor) -> Columns:
        """Stores indexer keys `(n, 1, dim)` in column `length`; returns those of all columns,
        `(n, capacity, dim)`. The forward's masks hide columns that are not stored. Raises
        `NotCapturable` for other sizes, and `KeysReadError` without `reads_keys`."""
        if not self._reads_keys:  # the masks then do not hide columns that are not stored
            raise KeysReadError("the model's own code reads indexer keys")
        buffer, length = self.indexer_keys, self.length
        num_rows = self.step.num_rows
        if buffer is None or indexer_key_states.shape != (num_rows, 1, buffer.shape[2]):
            raise NotCapturable("its forward stores indexer keys of another shape than before")
        assert isinstance(length, Length) and self.step.columns is not None
        buffer.index_copy_(1, length.tensor.view(1), indexer_key_states)
        return Columns(buffer[:, : len(self.step.columns)], length.tensor)


class LiveLayer:
    """A [`StepLayer`] as a live module of the step gets it."""

    def __init__(self, layer: StepLayer) -> None:
        self._layer = layer
        self._num_new = int(layer.is_updated)

    @property
    def keys(self) -> Tensor:
        """A handle `(n, heads, get_seq_length(), dim)`."""
        step = dataclasses.replace(self._layer.step, columns=range(self.get_seq_length()))
        return PagedTensor(step, self._layer.blocks, False)

    def get_seq_length(self) -> int:
        length = self._layer.length
        return int(length.tensor if isinstance(length, Length) else length) + self._num_new

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """As `IndexedStepLayer.update_indexer`, but returns only the stored columns."""
        assert isinstance(self._layer, IndexedStepLayer)
        return LiveColumns.of(self._layer.update_indexer(indexer_key_states)).stored_columns()


class StepCache(Cache):
    """The cache of a recorded step."""

    def live_cache(self) -> Cache:
        """Returns the cache that a live module of the step gets. Its lengths are numbers, and its
        indexer keys ordinary tensors."""
        layers = [LiveLayer(x) if isinstance(x, StepLayer) else x for x in self.layers]
        cache: Any = Cache(layers=layers)
        return cache

    @property
    def live_tensors(self) -> list[Tensor]:
        """The tensors that a live module may read and write through the cache."""
        layers = [layer for layer in self.layers if isinstance(layer, IndexedStepLayer)]
        lengths = [layer.length.tensor for layer in layers if isinstance(layer.length, Length)]
        return [*state_tensors(layers), *lengths]


def step_cache(
    cache: PagedCache,
    steps: Sequence[StepMetadata],
    length: Tensor,
    running_layers: Sequence[Any],
    states: Sequence[Tensor],
    reads_keys: bool,
    unused_layers: Collection[int] = (),
) -> Any:
    """Returns the cache of a recorded forward. `cache`: the model's empty cache. `steps`: one per
    layer group of `cache`, then of its cross-attention cache. `running_layers`: the running step's
    `state_or_indexer_layers`, whose attributes are copied. `states`: the tensors `(n, ...)` of
    their states, which the forward reads and changes. `length` and `reads_keys`: as in `StepLayer`.
    `unused_layers`: as in `Rectangle`. Raises `NotCapturable` for unsupported layers."""
    self_steps = steps[: len(cache.groups)]
    self_cache = _cache_of_one_kind(cache, self_steps, length, reads_keys, unused_layers)
    state_classes = LinearAttentionLayer, IndexedStepLayer
    layers = [layer for layer in self_cache.layers if isinstance(layer, state_classes)]
    for layer, source in zip(layers, running_layers, strict=True):
        if isinstance(layer, IndexedStepLayer):
            layer.take(source)
        else:
            copy_state_attributes(layer, source)
    set_state_tensors(layers, states)
    if cache.cross is None:
        return self_cache
    cross_steps = steps[len(cache.groups) :]
    columns = cross_steps[0].columns
    assert columns is not None
    cross_cache = _cache_of_one_kind(cache.cross, cross_steps, len(columns), reads_keys)
    encoder_decoder_cache = EncoderDecoderCache(self_cache, cross_cache)
    encoder_decoder_cache.is_updated = dict.fromkeys(range(len(cross_cache.layers)), True)
    return encoder_decoder_cache


def _cache_of_one_kind(
    cache: PagedCache,
    steps: Sequence[StepMetadata],
    length: Tensor | int,
    reads_keys: bool,
    unused_layers: Collection[int] = (),
) -> Cache:
    """As `step_cache`, but without states, and for self-attention or cross-attention alone."""
    step_by_group = dict(zip(cache.groups.values(), steps))
    layers = []
    for layer in cache.layers:
        if isinstance(layer, PagedLayer):
            blocks = None if layer.index in unused_layers else layer.blocks
            layer_class = StepLayer
            if isinstance(layer, LinearAttentionLayer):
                layer_class = HybridStepLayer
            elif isinstance(layer, PagedIndexedLayer):
                layer_class = IndexedStepLayer
            layer = layer_class(
                blocks, step_by_group[layer.group], length, layer.is_sliding, reads_keys
            )
        elif isinstance(layer, LinearAttentionLayer):
            layer = copy.copy(layer)
        elif not isinstance(layer, EMPTY_LAYERS):
            raise NotCapturable(f"its cache has an unsupported layer, {type(layer).__name__}")
        layers.append(layer)
    return StepCache(layers=layers)


def store_states(cache: Any, states: Sequence[Tensor]) -> None:
    """Copies into `states` those states of `cache` that the forward replaced by new tensors."""
    for state, current in zip(states, state_tensors(state_or_indexer_layers(cache)), strict=True):
        if not is_same_memory(current, state):
            state.copy_(current)
