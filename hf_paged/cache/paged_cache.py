"""`PagedCache`: a `transformers.Cache` over a paged block pool. Contains no kernels; `cache.layers`
implements `update`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import Cache, DynamicCache

from .. import rooms
from ..config import PagedConfig, shown
from ..step import ReadCounters, StepMetadata
from .free_memory import Reservation
from .groups import GroupSpec
from .layer_group import LayerGroup
from .layers import (
    PagedHybridLayer,
    PagedHybridSlidingWindowLayer,
    PagedIndexedLayer,
    PagedLayer,
    PagedSlidingWindowLayer,
    RowOperations,
)
from .memory import PagedMemory
from .memory_stats import MemoryStats
from .rows import CacheRows
from .sequence_blocks import SequenceBlocks
from .storage import fit_blocks

DEFAULT_MEMORY_FRACTION = 0.5  # of free memory, if the config sets no `memory_fraction`

_PAGED_LAYERS = {
    cache_utils.DynamicLayer: PagedLayer,
    cache_utils.DynamicSlidingWindowLayer: PagedSlidingWindowLayer,
    cache_utils.DynamicIndexedLayer: PagedIndexedLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer: PagedHybridLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: PagedHybridSlidingWindowLayer,
}
"""By stock layer of transformers, the paged layer that replaces it."""


def spec_of(layer: Any, kind: str) -> GroupSpec | None:
    """Returns the group spec of a stock or paged layer in a cache of this kind; `None` if no paged
    layer replaces the stock layer."""
    if isinstance(layer, PagedLayer):
        return dataclasses.replace(layer.group.spec, kind=kind)
    if type(layer) not in _PAGED_LAYERS:
        return None
    window = getattr(layer, "sliding_window", None)
    return GroupSpec(kind, window)


def _paged_layer(layer: Any, group: LayerGroup, index: int) -> Any:
    """Returns a new paged layer in place of `layer`, the stock or paged layer `index` of a cache.
    `group` has the layer's spec (`spec_of`)."""
    stock_class = type(layer)
    layer_class: Any = _PAGED_LAYERS.get(stock_class, stock_class)
    if issubclass(layer_class, PagedHybridLayer):
        return layer_class(group, index, layer.number_of_states)
    return layer_class(group, index)


class _WeakMethod:
    """A method that a model sets on a cache (RecurrentGemma), bound by a weak reference: a strong
    one would form a cycle that delays freeing the cache's blocks."""

    def __init__(self, function: Callable[..., Any], cache: PagedCache) -> None:
        self._function = function
        self._cache = weakref.ref(cache)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._cache(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _WeakMethod:
        cache = copy.deepcopy(self._cache(), memo)
        return _WeakMethod(self._function, cache)  # type: ignore[arg-type]


class PagedCache(RowOperations, DynamicCache):
    """A transformers cache whose keys and values are stored in blocks of a pool (PagedAttention,
    arXiv 2309.06180, section 4). Layers with equal specs share block tables; rows share blocks
    until one row writes (copy-on-write); layers with a sliding window free the blocks that leave
    it. A copy by `copy.deepcopy` shares blocks in the same way.

    Args:
        config ([`PreTrainedConfig`], *optional*): The model's configuration, which defines the
            kinds of its layers. Without one, every layer has full attention and is created on its
            first update.
        paged_config ([`PagedConfig`] or `dict`, *optional*): Options of a new memory for this
            cache; with `memory`, they must equal that memory's options.
        memory ([`PagedMemory`], *optional*): A memory to share with other caches; by default, a new
            one.
        kind (`str`): The kind of this cache's groups in the memory (`GroupSpec.kind`).
        offloading, offload_only_non_sliding (`bool`): Ignored, since blocks are not offloaded.
            Accepted for models that rebuild a cache.

    Example:

    ```python
    cache = PagedCache(model.config)
    model(**inputs, cache=cache)  # up to transformers 5.23: past_key_values=cache
    ```
    """

    _positions: torch.Tensor | None = None  # of the tokens in the current packed forward
    cross: PagedCache | None = None
    """The cross-attention cache of a model with an encoder; otherwise `None`."""

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        paged_config: PagedConfig | Mapping[str, Any] | None = None,
        *,
        memory: PagedMemory | None = None,
        kind: str = "self",
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
        **options: Any,
    ) -> None:
        if options:
            misplaced_options = ", ".join(
                f'"{name}": {shown(value)}' for name, value in options.items()
            )
            raise TypeError(
                f"`PagedCache` has no argument `{next(iter(options))}`: pass options of the memory"
                f" in `paged_config`, as in PagedCache(model.config, {{{misplaced_options}}})"
            )
        if config is not None and not hasattr(config, "get_text_config"):
            raise ValueError(
                f"`config` is {shown(config)}: pass the model's configuration,"
                " `PagedCache(model.config)`"
            )
        requested_config = PagedConfig.coerce(paged_config, "paged_config")
        if memory is None:
            memory = PagedMemory(fit_blocks(requested_config, config, torch.device("cpu")))
        elif not isinstance(memory, PagedMemory):
            raise ValueError(f"`memory` is {memory!r}: it must be None or a `PagedMemory`")
        elif paged_config is not None and requested_config != memory.config:
            raise ValueError(
                f"`paged_config` is {paged_config!r}, but `memory` was made with {memory.config!r}:"
                " pass one of the two"
            )
        self._setup(DynamicCache(config=config), memory, kind)

    @classmethod
    def from_empty(
        cls,
        cache: DynamicCache,
        memory: PagedMemory,
        kind: str = "self",
        owner_counters: ReadCounters | None = None,
        cross: PagedCache | None = None,
    ) -> PagedCache:
        """Returns an empty paged cache with the same kinds of layers as `cache`, and with `cross`
        as its cross-attention cache. Only paged layers of `cache` may hold tokens.
        `owner_counters`: the read counters of the rows' owner; with them, the cache borrows the
        rows passed to `take` and owns none."""
        paged_cache = cls.__new__(cls)
        paged_cache._setup(cache, memory, kind, owner_counters, cross)
        return paged_cache

    def empty_twin(
        self, memory: PagedMemory, owner_counters: ReadCounters | None = None
    ) -> PagedCache:
        """Returns an empty cache on `memory` with the same kinds of layers as this cache. Only
        paged layers of this cache may hold tokens. `owner_counters`: an argument of
        `from_empty`."""
        cross = self.cross
        if cross is not None:
            cross = cross.empty_twin(memory, owner_counters)
        return PagedCache.from_empty(self, memory, self.kind, owner_counters, cross)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(value, "__self__", None) is self:
            value = _WeakMethod(value.__func__, self)
        super().__setattr__(name, value)

    def _setup(
        self,
        empty: DynamicCache,
        memory: PagedMemory,
        kind: str,
        owner_counters: ReadCounters | None = None,
        cross: PagedCache | None = None,
    ) -> None:
        self.memory, self.kind, self.cross = memory, kind, cross
        self.counters = owner_counters or ReadCounters()
        specs = [spec_of(layer, kind) for layer in empty.layers]
        if empty.layer_class_to_replicate is not None:
            distinct_specs = dict.fromkeys([GroupSpec(kind)])
        else:
            distinct_specs = dict.fromkeys(filter(None, specs))
        is_borrowed = owner_counters is not None
        self.rows = CacheRows(memory, distinct_specs, self.counters, is_borrowed)
        self.groups = {spec: LayerGroup(self.rows, spec) for spec in distinct_specs}
        layers = []
        for index, (layer, spec) in enumerate(zip(empty.layers, specs)):
            if spec is not None:
                layer = _paged_layer(layer, self.groups[spec], index)
            elif isinstance(empty, PagedCache):  # Mamba states, a model's own compressed layers
                layer = copy.deepcopy(layer)
            layers.append(layer)
        Cache.__init__(self, layers=layers)
        self.layer_class_to_replicate = empty.layer_class_to_replicate

    @property
    def layer_class_to_replicate(self) -> Any:
        """A function that makes the next layer, if the cache was created without a configuration;
        otherwise `None`."""
        if not self._can_grow:
            return None
        group = next(iter(self.groups.values()))
        return functools.partial(PagedLayer, group, len(self.layers))

    @layer_class_to_replicate.setter
    def layer_class_to_replicate(self, value: Any) -> None:
        self._can_grow = value is not None

    @property
    def is_compileable(self) -> bool:
        """`False`, since block tables are on the host. Without this property, transformers would
        compile models whose cache has only Mamba states."""
        return False

    @property
    def paged_layers(self) -> list[PagedLayer]:
        """The layers whose keys and values are in blocks."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    @property
    def layer_kinds(self) -> tuple[tuple[type, int | None], ...]:
        """The type and the window of each layer."""
        return tuple((type(layer), getattr(layer, "sliding_window", None)) for layer in self.layers)

    @property
    def is_empty(self) -> bool:
        """Whether no layer group of the cache holds tokens."""
        return not any(group.length for group in self.groups.values())

    def expect_padding(self, paddings: tuple[int, ...], length: int) -> None:
        """Sets the number of leading padding positions of each row, which are not stored, for a
        first prefill of `length` positions. A prefill of another shape ignores them."""
        for group in self.groups.values():
            if not group.paddings:
                group.clear((paddings, length))

    def reserve(self, num_blocks: int, num_sequences: int) -> None:
        """Reserves memory for the tokens of `num_blocks` blocks of the largest size, within the
        limits of `Reservation`. A layer takes its part in one allocation, instead of step by step,
        when it is next allocated or grown. `num_sequences`: the maximum number of sequences that
        run at a time."""
        config = self.memory.config
        num_tokens = num_blocks * self.memory.block_size
        memory_fraction = config.memory_fraction or DEFAULT_MEMORY_FRACTION
        reservation = Reservation({}, {}, {}, memory_fraction)
        for spec, group in self.groups.items():
            size = group.group_memory.block_size
            blocks_per_sequence = spec.num_spanned(0, num_tokens, 1, 0, size) + 1
            blocks_per_step = config.max_num_batched_tokens // size
            num_live_blocks = num_sequences * blocks_per_sequence + blocks_per_step
            reservation.num_blocks[spec] = -(-num_tokens // size)
            reservation.num_live_blocks[spec] = num_live_blocks
            # 0 as long as no layer exists: without a configuration, updates create the layers
            reservation.num_layers[spec] = max(1, group.num_layers)
        with self.memory.lock:
            for group in self.groups.values():
                group_memory = group.group_memory
                has_content = group_memory.pool.num_used or group_memory.pool.num_cached
                group_memory.storage.reserve(reservation, can_drop=not has_content)

    def take(
        self,
        rows: list[SequenceBlocks],
        paddings: tuple[int, ...],
        length: int | None,
        unused_layers: Collection[int] = (),
    ) -> None:
        """Takes over these rows and frees the former rows. If the cache borrows rows
        (`from_empty`), borrows these and frees none. `paddings`: leading positions of each row that
        are not in its tables. `length`: logical positions of every row, including padding; `None`
        keeps the lengths of layers and groups. `unused_layers`: indices of the layers that have
        stored nothing for these rows, and stay empty."""
        with self.memory.lock:
            if not self.rows.is_borrowed:
                self.rows.free()
            self.rows.sequences = rows
            for group in self.groups.values():
                group.set_rows(paddings, group.length if length is None else length)
        if length is not None:
            for layer in self.paged_layers:
                if layer.index not in unused_layers:
                    layer.set_length(length)

    def set_packed_steps(
        self,
        steps: Sequence[StepMetadata | None],
        positions: torch.Tensor | None = None,
    ) -> None:
        """Starts a packed forward of many sequences, whose tokens and `positions` have the shape
        `[1, sum(query_len)]`. `steps`: one step per group of `groups`; `None` steps end the
        forward. During a packed forward, the cache itself holds no rows."""
        self._positions = positions
        for group, step in zip(self.groups.values(), steps):
            group.packed_step = step
        if None in steps:
            for layer in self.paged_layers:
                for handle in itertools.chain(*layer.packed_handles.values()):
                    handle.bind(None, None, None)

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Returns the number of logical positions so far, including padding. In a packed forward
        and with a `layer_idx`, returns offsets `(sum(query_len),)`, to which a model adds 0, 1, 2,
        ... to get the positions of the tokens."""
        if layer_idx is None or self._positions is None:
            return super().get_seq_length(layer_idx or 0)
        positions = self._positions[0]
        return positions - torch.arange(len(positions), device=positions.device)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Returns the offset to add to 0, 1, 2, ... for the positions of the queries in a mask. In
        a packed forward with a `key_len`, returns the offsets `(sum(query_len),)`."""
        if self._positions is None:  # transformers calls `get_seq_length`: a model may override it
            return super().get_query_offset(layer_idx)
        steps = (group.packed_step for group in self.groups.values())
        if any(step is not None and step.key_len for step in steps):
            return self.get_seq_length(layer_idx)
        return super().get_seq_length(layer_idx)

    @property
    def _num_rows(self) -> int:
        """The number of rows, even if the cache holds only states of linear attention."""
        num_rows = len(self.rows.sequences)
        for layer in self.layers:
            if hasattr(layer, "conv_states"):
                states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
                row_counts = [len(state) for state in states if state is not None]
                num_rows = max([num_rows, *row_counts])
        return num_rows

    def reset(self) -> None:
        """Frees all blocks and empties the cache, which can then be reused."""
        super().reset()
        for layer in self.paged_layers:  # all are empty: none has missed an operation
            layer.num_operations = self.rows.num_operations

    def detach(self) -> None:
        """Detaches all cached tensors from the autograd graph, as for truncated backpropagation
        through time. Raises [`RoomMissingError`] without the optional package `gradients`."""
        gradients: rooms.GradientsRoom = rooms.room("gradients", "`PagedCache.detach`")
        gradients.detach(self)

    def free(self) -> None:
        """Same as `reset`."""
        self.reset()

    def discard(self) -> None:
        """Empties the cache after a failure, without gathering the handles that a traceback may
        still hold."""
        self.rows.free(should_gather=False)
        self.reset()

    def stats(self) -> MemoryStats:
        """Returns the statistics of the memory behind this cache."""
        return self.memory.stats()

    def plain_bytes(self, num_rows: int | None = None, length: int | None = None) -> int:
        """Returns the bytes of keys and values that a `DynamicCache` would hold for `num_rows` rows
        of `length` positions, including padding; by default, the rows and positions of this
        cache."""
        if num_rows is None:
            num_rows = len(self.rows.sequences)
        num_bytes = 0
        for layer in self.paged_layers:
            layer_length = layer.num_positions if length is None else length
            num_bytes += layer.plain_bytes(num_rows, layer_length)
        return num_bytes

    def plot_memory(self, ax: Any = None) -> Any:
        """Plots the blocks of the memory behind this cache, and returns the matplotlib `Figure`.
        Takes the `ax` and raises the errors of [`PagedEngine.plot_memory`].
        """
        return rooms.room("tools", "`plot_memory`").plot_cache(self, ax)

    def _repr_html_(self) -> str | None:
        return rooms.render("cache_html", self)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless pool, tables and refcounts agree."""
        self.memory.check_integrity()
