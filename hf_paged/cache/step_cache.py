"""The cache that a model's forward gets while a decode step of a rectangle is recorded: every
tensor has the size of the step's capacity, and lengths are numbers on the device. It owns no
blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from ..step import NotCapturable, StepMetadata
from .handles import PagedTensor
from .kv_blocks import KVBlocks
from .layers import EMPTY_LAYERS, PagedLayer
from .paged_cache import PagedCache
from .store import store_key


class StepLayer(CacheLayerMixin):
    """One layer of a recorded step, whose rows `(n,)` each append a token."""

    def __init__(
        self, blocks: KVBlocks, step: StepMetadata, length: Tensor | int, is_sliding: bool
    ) -> None:
        """`length`: `()` int64, the positions that earlier steps have stored; of an encoder's keys
        and values, which no step changes, a number."""
        self.blocks = blocks
        self.step = step
        self.length = length
        self.is_sliding = is_sliding
        self.is_initialized = True

    @property
    def keys(self) -> Tensor:
        """`(n, heads, capacity, dim)`."""
        return PagedTensor(self.step, self.blocks, False)

    @property
    def values(self) -> Tensor:
        """`(n, heads, capacity, dim)`."""
        return PagedTensor(self.step, self.blocks, True)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores K/V `(n, heads, 1, dim)`, and returns `keys` and `values`."""
        assert self.step.slots is not None
        if key_states.shape[::2] != self.step.slots.shape:
            raise NotCapturable("its forward stores a different number of tokens than it gets")
        key = store_key(key_states, value_states)
        self.blocks.store(key, key_states, value_states, self.step.slots)
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the blocks exist already."""

    def get_seq_length(self) -> Any:
        """Returns the positions that earlier steps have stored."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the length and first position of the keys."""
        assert self.step.columns is not None
        return len(self.step.columns), 0

    def get_max_length(self) -> int:
        """Returns -1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name up to transformers 5.23


def step_cache(cache: PagedCache, steps: Sequence[StepMetadata], length: Tensor) -> Any:
    """Makes the cache of a step's forward from one step per layer group of `cache`, a model's empty
    cache, and of its cross-attention cache. `length` as in `StepLayer`. Raises `NotCapturable` if a
    layer has no blocks yet."""
    self_cache = _step_cache(cache, steps[: len(cache.groups)], length)
    if cache.cross is None:
        return self_cache
    cross_steps = steps[len(cache.groups) :]
    columns = cross_steps[0].columns
    assert columns is not None
    cross = _step_cache(cache.cross, cross_steps, len(columns))
    both = EncoderDecoderCache(self_cache, cross)
    both.is_updated = dict.fromkeys(range(len(cross.layers)), True)
    return both


def _step_cache(cache: PagedCache, steps: Sequence[StepMetadata], length: Tensor | int) -> Cache:
    by_group = dict(zip(cache.groups.values(), steps))
    layers = []
    for layer in cache.layers:
        if isinstance(layer, PagedLayer):
            blocks = layer.group.blocks.storage.layers.get(layer.index)
            if blocks is None:
                raise NotCapturable("a layer of its cache has no blocks yet")
            layer = StepLayer(blocks, by_group[layer.group], length, layer.is_sliding)
        elif not isinstance(layer, EMPTY_LAYERS):
            raise NotCapturable(f"its cache has a {type(layer).__name__}")
        layers.append(layer)
    return Cache(layers=layers)
