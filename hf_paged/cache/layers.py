"""`transformers` cache layers with keys and values in blocks; subclasses of the stock layers that they replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.autograd import forward_ad
from transformers import cache_utils

from ..step import NotPackable, StepMetadata
from .groups import GroupSpec
from .handles import READ_ONLY, PagedTensor, RowTensor, read_rows
from .rows import LayerGroup
from .storage import KVBlocks, Look, looks

# Up to 5.17, `crop` also accepted the length to keep, as a positive number.
_CROP_TAKES_A_LENGTH = Version(transformers.__version__) < Version("5.18")

# Layers that hold nothing, such as those that read another layer's K/V; older transformers have no such class.
EMPTY_LAYERS: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))


class GraphStates(NamedTuple):
    """A layer's latest keys and values `(batch, heads, n, dim)` with their autograd graph, which blocks cannot have."""

    keys: Tensor
    values: Tensor
    versions: tuple[int, ...]  # a write in place changes them

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> GraphStates:
        return cls(keys, values, _versions(keys, values))

    def map(self, function: Callable[[Tensor], Tensor]) -> GraphStates:
        return GraphStates.of(function(self.keys), function(self.values))

    def last(self, num_tokens: int) -> GraphStates:
        surplus = self.keys.shape[2] - num_tokens
        return self.map(lambda states: states[:, :, surplus:]) if surplus > 0 else self

    def check(self) -> None:
        """Raises `RuntimeError` if they were written to: the blocks do not have what was written."""
        if _versions(self.keys, self.values) != self.versions:
            raise RuntimeError(READ_ONLY)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphStates:
        return self  # they are not written to

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickle has the keys and values of the blocks, and no graph


class PagedLayer(cache_utils.DynamicLayer):
    """Keys and values of one layer in the blocks of its group; replaces `DynamicLayer`. Its `update`, `keys` and
    `values` return [`PagedTensor`] handles. During a packed step (`PagedCache.begin`) the layer holds no rows.
    Keys and values computed with gradients are also kept as tensors with their graph, as `DynamicLayer` keeps them:
    until an update or an operation on rows without gradients, or `PagedCache.detach`."""

    def __init__(self, group: LayerGroup, index: int) -> None:
        cache_utils.CacheLayerMixin.__init__(self)
        self.group, self.index = group, index
        self.num_seen = 0
        self.gathers = False  # set once the model's own code reads values of a decode: decodes then gather at once
        self.packed_handles: tuple[PagedTensor, PagedTensor] | None = None  # of the last packed step
        self._packed_look: Look | None = None
        self.graph_states: GraphStates | None = None
        group.num_layers += 1
        self.num_operations = group.rows.num_operations

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores new K/V `(batch, heads, n, dim)` and returns handles to all visible K/V. Raises `OutOfBlocksError`
        with nothing allocated, `ValueError` with nothing stored if the batch size differs or K/V do not fit,
        `NotPackable` if the shape is not that of the packed step. With gradients enabled, returns tensors through which
        gradients reach the new K/V and all that were stored with gradients; raises `RuntimeError`, with nothing stored,
        for K/V that a function transform traces (`torch.func`, forward-mode differentiation)."""
        if torch.compiler.is_dynamo_compiling():  # checked here, since the wrapper of `disable` slows every call
            return self._update_untraced(key_states, value_states)
        return self._update(key_states, value_states)

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        key_shape, value_shape = key_states.shape, value_states.shape
        if len(key_shape) != 4 or len(value_shape) != 4 or key_shape[::2] != value_shape[::2]:
            raise ValueError(
                f"layer {self.index} got keys of shape {tuple(key_shape)} and values of shape {tuple(value_shape)}: "
                "both need (batch, heads, tokens, dim), with one batch size and one number of tokens"
            )
        self._check_turn()
        if _is_transformed(key_states) or _is_transformed(value_states):
            raise RuntimeError(
                f"layer {self.index} got keys or values of a function transform (`torch.func`, forward-mode "
                "differentiation), which needs a `DynamicCache`, as blocks hold numbers only"
            )
        needs_grad = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        keys, values = (key_states.detach(), value_states.detach()) if needs_grad else (key_states, value_states)
        group, context_len, query_len = self.group, self.num_seen, key_shape[2]
        # the owner of borrowed rows computes without gradients
        has_graph = (needs_grad or self._is_in_graph) and not group.rows.borrows
        look = looks(keys, values)
        with group.memory.lock:
            layers = group.blocks.storage.layers
            if self.index not in layers or layers[self.index].look != look:
                group.blocks.layer(self.index, keys, values, group.num_layers, group.num_begun(context_len))
            step = group.advance(key_shape[0], context_len, query_len, keys.device).on(keys.device)
            blocks = group.blocks.storage.layers[self.index]  # may have grown
            assert step.slots is not None
            blocks.store(look, keys, values, step.slots)
            if step.columns is not None:
                self.num_seen = step.columns.stop
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if has_graph:
            return self._extend_graph(step, blocks, key_states, value_states)
        self.graph_states = None
        if step.key_len is not None:
            pairs = zip((blocks.keys, blocks.values), (keys.dtype, values.dtype))
            shown_keys, shown_values = (RowTensor(step, blocks, stored, dtype) for stored, dtype in pairs)
            return shown_keys, shown_values
        if context_len == 0:
            made = self.packed_handles
            if step.columns is None and made is not None and self._packed_look == look:
                for handle, fresh, (stored, _) in zip(made, (keys, values), blocks.pair):
                    handle.step, handle.layer, handle.blocks, handle.fresh = step, blocks, stored, fresh
                return made
            made = PagedTensor(step, blocks, False, keys), PagedTensor(step, blocks, True, values)
            if step.columns is None:
                self.packed_handles, self._packed_look = made, look
            return made
        if self.gathers and query_len == 1:
            dense_keys, dense_values = (read_rows(step, blocks, x, dtype) for x, dtype in blocks.pair)
            return dense_keys, dense_values
        remember = group.rows.remember
        return (
            remember(PagedTensor(step, blocks, False)),
            remember(PagedTensor(step, blocks, True, reader=self if query_len == 1 else None)),
        )

    _update_untraced = torch.compiler.disable(_update)

    @property
    def _is_in_graph(self) -> bool:
        """Whether gradients, if enabled, reach cached keys and values."""
        return self.graph_states is not None and torch.is_grad_enabled()

    def _extend_graph(
        self, step: StepMetadata, blocks: KVBlocks, key_states: Tensor, value_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Appends new K/V to `graph_states`, as rounded as they are stored; returns all that the step shows."""
        query_len, past = key_states.shape[2], self.graph_states
        new = [key_states, value_states]
        if not blocks.is_exact:  # gradients pass through the rounding
            stored = [read_rows(step, blocks, x, dtype)[:, :, -query_len:] for x, dtype in blocks.pair]
            new = [rounded + (states - states.detach()) for rounded, states in zip(stored, new)]
        if past is not None:
            new = [torch.cat(pair, dim=2) for pair in zip(past[:2], new)]
        states = GraphStates.of(*new)
        # a first forward attends to what it computed
        is_first = self.num_seen == query_len
        shown = (key_states, value_states) if is_first else self._with_graph(step, blocks, states)
        if not self.group.record_past:
            states = states.last(self.num_seen - self.group.spec.first_visible(self.num_seen))
        self.graph_states = states
        return shown

    def _with_graph(self, step: StepMetadata, blocks: KVBlocks, states: GraphStates) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of `step.columns`, of which `states` are the last, without a graph before."""
        assert step.columns is not None
        keys, values, _ = states.last(len(step.columns))
        num_missing = len(step.columns) - keys.shape[2]
        if not num_missing:
            return keys, values
        past = [read_rows(step, blocks, x, dtype)[:, :, :num_missing] for x, dtype in blocks.pair]
        return torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)

    def _select_in_graph(self, function: Callable[[Tensor], Tensor]) -> None:
        """Selects from `graph_states`; drops them without gradients, as operations on `DynamicLayer` do."""
        states = self.graph_states
        if states is not None:
            self.graph_states = states.map(function) if torch.is_grad_enabled() else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Notes dtype and device; `update` allocates blocks."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def _shown(is_value: bool) -> property:
        def show(self: PagedLayer) -> Tensor | None:
            self._check_turn()
            if not self.num_seen or self.index not in self.group.blocks.storage.layers:
                return None
            blocks = self.group.blocks.storage.layers[self.index]
            step = self.group.view(self.num_seen, blocks.keys.device).on(blocks.keys.device)
            if self._is_in_graph:
                assert self.graph_states is not None
                return self._with_graph(step, blocks, self.graph_states)[is_value]
            rows = self.group.rows
            # an owner of borrowed rows only reads
            return rows.remember(PagedTensor(step, blocks, is_value, keeps_views=not rows.borrows))

        def refuse(self: PagedLayer, value: Tensor | None) -> None:
            if value is not None:
                raise AttributeError(
                    "keys and values of a paged layer live in blocks and cannot be assigned: use `update`, `crop`, "
                    "`reset`, `reorder_cache` or `batch_select_indices`"
                )

        return property(show, refuse, doc="All shown, `(batch, heads, length, dim)`, or `None` while there is nothing.")

    keys, values = _shown(False), _shown(True)

    def get_seq_length(self) -> int:
        """Returns the logical positions seen, including padding."""
        return self.num_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the length and first position of the keys that the next `query_length` queries are shown."""
        if self.group.packed is not None and self.group.packed.key_len is not None:
            return self.group.packed.key_len, 0
        first = self.group.spec.first_visible(self.num_seen)
        return self.num_seen + query_length - first, first

    def _once(self, operation: Callable[..., None], *args: Any) -> None:
        """Runs an operation on all rows if this layer is the first to ask for it; if it raises, it is not counted."""
        if self.group.packed is not None:
            raise NotPackable(f"layer {self.index} of a packed step has no rows to change")
        if self.graph_states is not None:
            self.graph_states.check()
        rows = self.group.rows
        if self.num_operations == rows.num_operations:
            operation(*args)
            rows.num_operations += 1
        self.num_operations += 1

    def _check_turn(self) -> None:
        if self.num_operations != self.group.rows.num_operations:
            raise RuntimeError(
                f"layer {self.index} was left out of an operation on rows or lengths that layers of its kind were "
                "given, with which it shares block tables: call it on the cache, and `reset` this cache"
            )
        if self.graph_states is not None:
            self.graph_states.check()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes row `i` a copy of row `beam_idx[i]` by permuting block tables. Raises `IndexError`, with nothing
        changed."""
        beam_idx = _as_tensor(beam_idx)
        if beam_idx.numel() and (beam_idx.dim() != 1 or beam_idx.dtype not in (torch.int32, torch.int64)):
            raise IndexError(
                f"the cache takes row numbers, a vector of int32 or int64, not {beam_idx.dtype} of shape "
                f"{tuple(beam_idx.shape)}"
            )
        rows = beam_idx.tolist()
        self._once(self.group.rows.select, rows)
        self._select_in_graph(lambda states: states[rows])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices` (positions or a boolean mask), in that order."""
        self.reorder_cache(row_numbers(indices, len(self.group.rows.held)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times, sharing its blocks."""
        self._once(self.group.rows.select, torch.arange(len(self.group.rows.held)).repeat_interleave(repeats).tolist())
        self._select_in_graph(lambda states: states.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forgets the last `-tokens_to_remove` positions and, in a sliding layer, tokens outside the window."""
        count = int(tokens_to_remove)
        if count > 0:
            if not _CROP_TAKES_A_LENGTH:
                raise ValueError(f"`crop` takes the tokens to remove as a negative number, not {count}")
            count = min(0, count - self.num_seen)
        window = self.group.spec.window
        if window is not None and self.num_seen >= window and not self.group.record_past:
            raise RuntimeError(
                "`crop` was called, but the sliding window is full and older tokens were given back: call "
                "`activate_past_recording` on the cache first"
            )
        removed = min(self.num_seen, -count)
        self.num_seen -= removed
        # another layer may hold more: excess tokens are overwritten
        self._once(self.group.rows.crop, removed)
        if removed:
            self._select_in_graph(lambda states: states[:, :, : max(0, states.shape[2] - removed)])

    def reset(self) -> None:
        """Empties the layer and frees its blocks."""
        self.num_seen = 0
        self.is_initialized = False
        self.graph_states = None
        self._once(self.group.rows.free)


class PagedSlidingWindowLayer(PagedLayer, cache_utils.DynamicSlidingWindowLayer):
    """A layer with a sliding window; replaces `DynamicSlidingWindowLayer`."""

    def __init__(self, group: LayerGroup, index: int) -> None:
        super().__init__(group, index)
        assert group.spec.window is not None
        self.sliding_window = group.spec.window
        self._sliding_window_tensor = torch.tensor(group.spec.window, dtype=torch.long)

    cumulative_length = property(PagedLayer.get_seq_length)

    @property
    def record_past(self) -> bool:
        """Whether tokens outside the window are kept until the next `crop`."""
        return self.group.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.group.record_past = value


class PagedIndexedLayer(cache_utils.DynamicIndexedLayer, PagedLayer):
    """A layer with dense indexer keys beside its paged K/V; replaces `DynamicIndexedLayer`."""

    def __init__(self, group: LayerGroup, index: int) -> None:
        PagedLayer.__init__(self, group, index)
        self.indexer_keys = self.indexer_position_ids = None
        self.is_indexer_initialized = False

    update = PagedLayer.update
    lazy_initialization = PagedLayer.lazy_initialization
    batch_select_indices = PagedLayer.batch_select_indices


class PagedHybridLayer(PagedLayer, cache_utils.LinearAttentionAndFullAttentionLayer):
    """A layer with paged K/V and a linear-attention state; replaces `LinearAttentionAndFullAttentionLayer`."""

    _linear = cache_utils.LinearAttentionLayer

    def __init__(self, group: LayerGroup, index: int, number_of_states: int = 1) -> None:
        super().__init__(group, index)
        self._linear.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        (self._linear if kwargs else PagedLayer).lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        self._linear.reset(self)
        PagedLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._linear.reorder_cache(self, _as_tensor(beam_idx))
        PagedLayer.reorder_cache(self, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._linear.reorder_cache(self, torch.arange(num_state_rows(self), device="cpu").repeat_interleave(repeats))
        PagedLayer.batch_repeat_interleave(self, repeats)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        self._linear.crop(self, int(tokens_to_remove))
        PagedLayer.crop(self, tokens_to_remove)


def _is_transformed(states: Tensor) -> bool:
    """Whether a transform of functions traces the tensor: it has a tangent, or no memory of its own."""
    if torch._C._functorch.is_functorch_wrapped_tensor(states):
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(states).tangent is not None


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def _as_tensor(rows: Any) -> Tensor:
    """Returns a tensor, made on the CPU if needed: the default device may be `meta`."""
    return rows if isinstance(rows, Tensor) else torch.as_tensor(rows, device="cpu")


def row_numbers(indices: Tensor, num_rows: int) -> Tensor:
    """Returns the row numbers for `indices`: positions, or a boolean mask of `num_rows`. Raises `IndexError`."""
    indices = _as_tensor(indices)
    if indices.dtype != torch.bool:
        return indices
    if indices.shape != (num_rows,):
        raise IndexError(
            f"a mask of shape {tuple(indices.shape)} came for {num_rows} rows: one of shape ({num_rows},) is needed"
        )
    return indices.nonzero().squeeze(-1)


def num_state_rows(layer: Any) -> int:
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return next((state.shape[0] for state in states if state is not None), 0)


_STAND_INS: dict[type, type[PagedLayer]] = {
    cache_utils.DynamicLayer: PagedLayer,
    cache_utils.DynamicSlidingWindowLayer: PagedSlidingWindowLayer,
    cache_utils.DynamicIndexedLayer: PagedIndexedLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer: PagedHybridLayer,
}
SPECS: dict[type, type[GroupSpec]] = {}
"""The spec class of a stock layer class, if it is not [`GroupSpec`]."""


def spec_of(layer: Any, kind: str) -> GroupSpec | None:
    """Returns the group spec of a stock or paged layer in a cache of this kind; `None` if it has no paged class."""
    if isinstance(layer, PagedLayer):
        return dataclasses.replace(layer.group.spec, kind=kind)
    if type(layer) not in _STAND_INS:
        return None
    return SPECS.get(type(layer), GroupSpec)(kind, getattr(layer, "sliding_window", None))


def stand_in(layer: Any, group: LayerGroup | None, index: int) -> Any:
    """Returns the paged layer that replaces an empty stock layer, number `index` of a cache, in the group of `spec_of`;
    without a group (Mamba states, a model's own compressed layers) the layer itself."""
    if group is None:
        return layer
    paged: Any = _STAND_INS.get(type(layer), type(layer))
    return paged(group, index, layer.number_of_states) if paged is PagedHybridLayer else paged(group, index)
