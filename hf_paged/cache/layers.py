"""Cache layers that store keys and values in blocks: subclasses of the `transformers` layers that
they replace. `cache.layer_group` owns the block tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from transformers import cache_utils

from ..compiled import untraced
from ..kernels.cpp.blocks import StoreSignature, store_signature
from ..rooms import GradientsRoom, OwnAttentionRoom, room
from ..step import NotPackable, StepMetadata
from .block_pool import OutOfBlocksError
from .handles import PagedTensor
from .kv_blocks import KVBlocks
from .layer_group import LayerGroup
from .reading import read_pair, read_rows
from .waits import Shortage

# Layers that store nothing, such as layers that read another layer's K/V. Older versions of
# transformers lack the class.
EMPTY_LAYERS = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))


class RowOperations:
    """Operations on rows of a layer or a cache, by the row indices that its `reorder_cache`
    takes."""

    def batch_select_indices(self: Any, indices: Tensor) -> None:
        """Keeps the rows `indices` (row indices or a boolean mask), in that order. Raises
        `IndexError` for a mask of another shape."""
        num_rows = self._num_rows
        if not num_rows:
            return
        indices = _as_tensor(indices)
        if indices.dtype == torch.bool:
            if indices.shape != (num_rows,):
                raise IndexError(
                    f"the mask of rows has the shape {tuple(indices.shape)}, but the cache has"
                    f" {num_rows} rows: pass a mask of shape ({num_rows},)"
                )
            indices = indices.nonzero().squeeze(-1)
        self.reorder_cache(indices)

    def batch_repeat_interleave(self: Any, repeats: int) -> None:
        """Repeats each row `repeats` times, sharing its blocks; linear-attention states are
        copied."""
        rows = torch.arange(self._num_rows, device="cpu")
        self.reorder_cache(rows.repeat_interleave(repeats))


class PagedLayer(RowOperations, cache_utils.DynamicLayer):
    """Keys and values of one layer in the blocks of its group; replaces `DynamicLayer`. `keys` and
    `values` are [`PagedTensor`] handles, unless gradients reach them. During a packed step, the
    layer holds no rows. K/V computed with gradients are also kept as tensors with their graph, as
    in `DynamicLayer`, until an update or an operation on rows runs with gradients disabled, or
    until `reset` or `PagedCache.detach`. Without the optional package `gradients`, an update that
    gradients reach raises `RoomMissingError`, with nothing stored."""

    def __init__(self, group: LayerGroup, index: int) -> None:
        cache_utils.CacheLayerMixin.__init__(self)
        self.group = group
        self.index = index
        self.num_positions = 0
        # Whether the model's own code has read the handle that `update` returned for the values of
        # a decode, or `values` of borrowed rows. From then on, `update` returns dense tensors in
        # decodes, and `keys` and `values` of borrowed rows are dense tensors.
        self.should_gather = False
        # handles returned in the last packed step, by the signature of its K/V
        self.packed_handles: dict[StoreSignature, tuple[PagedTensor, PagedTensor]] = {}
        self.graph_states: Any = None  # `gradients.GraphStates`
        group.num_layers += 1
        self.num_operations = group.rows.num_operations

    @untraced
    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Stores new K/V `(batch, heads, n, dim)`, and returns all visible K/V as handles. Instead
        of handles, returns tensors with their graph if gradients reach new or stored K/V, the
        result of `own_attention.row_tensors` in a step with a `key_len`, and dense tensors in
        decodes with `should_gather`. Raises, with nothing stored: `OutOfBlocksError`; `ValueError`
        for another batch size or K/V that do not fit; `NotPackable` for a shape other than the
        packed step's; and `RuntimeError` for K/V that a function transform traces (`torch.func`,
        forward-mode differentiation), or if the layer missed an operation (`_check_current`)."""
        keys = key_states
        values = value_states
        gradients: GradientsRoom | None = None
        if torch.is_grad_enabled():
            needs_grad = key_states.requires_grad or value_states.requires_grad
            if needs_grad:
                keys = key_states.detach()
                values = value_states.detach()
            # borrowed rows are computed by their owner, without gradients
            if (needs_grad or self.graph_states is not None) and not self.group.rows.is_borrowed:
                gradients = room(
                    "gradients", "a forward with gradients (outside `torch.no_grad()`)"
                )
        signature = store_signature(keys, values)
        self._check_states(key_states, value_states, signature)
        context_len = self.num_positions
        step, blocks = self._store(keys, values, signature)
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if gradients is not None:
            return gradients.extend(self, step, blocks, key_states, value_states)
        self.graph_states = None
        if step.key_len is not None:
            own_attention: OwnAttentionRoom = room("own_attention", "a model's own attention code")
            return own_attention.row_tensors(step, blocks, (keys.dtype, values.dtype))
        if context_len == 0:
            return self._new_handles(step, blocks, signature, keys, values)
        is_decode = keys.shape[2] == 1
        if self.should_gather and is_decode:
            return read_pair(step, blocks)
        track = self.group.rows.handles.add
        reader = self if is_decode else None
        cached_keys = track(PagedTensor(step, blocks, False))
        cached_values = track(PagedTensor(step, blocks, True, reader=reader))
        return cached_keys, cached_values

    def _check_states(
        self, key_states: Tensor, value_states: Tensor, signature: StoreSignature
    ) -> None:
        """Raises `ValueError` or `RuntimeError` if `update` must not store these K/V."""
        blocks = self.blocks
        if blocks is None or signature not in blocks.stores:  # stored signatures were checked
            key_shape = key_states.shape
            value_shape = value_states.shape
            have_four_axes = len(key_shape) == 4 and len(value_shape) == 4
            sizes_match = key_shape[::2] == value_shape[::2]  # batch size and number of tokens
            if not (have_four_axes and sizes_match):
                raise ValueError(
                    f"layer {self.index} got keys of shape {tuple(key_shape)} and values of shape"
                    f" {tuple(value_shape)}: both must be (batch, heads, tokens, dim), with the"
                    " same batch size and number of tokens"
                )
        self._check_current()
        if _is_transformed(key_states) or _is_transformed(value_states):
            raise RuntimeError(
                f"layer {self.index} got keys or values of a function transform (`torch.func`,"
                " forward-mode differentiation), which blocks cannot hold: use a `DynamicCache`"
            )

    def _store(
        self,
        keys: Tensor,
        values: Tensor,
        signature: StoreSignature,
    ) -> tuple[StepMetadata, KVBlocks]:
        """Stores new K/V in blocks. If too few are free and the rows are not borrowed, first waits
        for calls of other threads to free some. Returns the step and the layer's blocks."""
        group = self.group
        context_len = self.num_positions
        batch_size = keys.shape[0]
        query_len = keys.shape[2]
        device = keys.device
        shortage: Shortage | None = None
        is_first = not group.length
        while True:
            try:
                group.memory.free_abandoned()  # a pool cannot be recounted in the middle of a step
                with group.memory.lock:
                    old_blocks = self.blocks
                    if old_blocks is None or signature not in old_blocks.stores:
                        num_new_tables = group.num_new_tables(context_len)
                        group.group_memory.layer(
                            self.index,
                            keys,
                            values,
                            group.num_layers,
                            num_new_tables,
                        )
                    step = group.advance(batch_size, context_len, query_len, device).on(device)
                    blocks = group.group_memory.storage.layers[self.index]  # may have grown
                    assert step.slots is not None
                    blocks.store(signature, keys, values, step.slots)
                    if step.columns is not None:
                        self.num_positions = step.columns.stop
                return step, blocks
            except BaseException as error:
                if is_first:
                    self.num_positions = context_len
                    group.undo_first_step(query_len)
                if not isinstance(error, OutOfBlocksError):
                    raise
                shortage = shortage or Shortage(group.memory, is_alone=group.rows.is_only_holder)
                if group.rows.is_borrowed or not shortage.wait():
                    raise

    def _new_handles(
        self,
        step: StepMetadata,
        blocks: KVBlocks,
        signature: StoreSignature,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns handles to the new K/V of a layer's first tokens, or of a packed step. A packed
        step reuses the handles of the last packed step if its K/V have the same signature."""
        is_packed = step.columns is None
        if is_packed and signature in self.packed_handles:
            handles = self.packed_handles[signature]
            for handle, fresh in zip(handles, (keys, values)):
                handle.bind(step, blocks, fresh)
            return handles
        handles = PagedTensor(step, blocks, False, keys), PagedTensor(step, blocks, True, values)
        if is_packed:
            self.packed_handles = {signature: handles}
        return handles

    @property
    def blocks(self) -> KVBlocks | None:
        """The layer's keys and values in blocks; `None` until it is allocated."""
        return self.group.group_memory.storage.layers.get(self.index)

    def _select_in_graph(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies a selection to `graph_states`."""
        if self.graph_states is not None:
            self.graph_states = self.graph_states.select(function)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Sets dtype and device; `update` allocates blocks."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def _visible_states(is_value: bool) -> property:
        def get(self: PagedLayer) -> Tensor | None:
            self._check_current()
            blocks = self.blocks
            if not self.num_positions or blocks is None:
                return None
            device = blocks.keys.device
            step = self.group.view(self.num_positions, device).on(device)
            if self.graph_states is not None and torch.is_grad_enabled():
                return self.graph_states.visible(step, blocks)[is_value]
            rows = self.group.rows
            # borrowed rows belong to an engine, whose forwards do not write to keys and values
            if not rows.is_borrowed:
                handle = PagedTensor(step, blocks, is_value, has_read_only_views=True)
            elif self.should_gather:
                return read_rows(step, blocks, is_value)
            else:
                handle = PagedTensor(step, blocks, is_value, reader=self if is_value else None)
            return rows.handles.add(handle)

        def refuse(self: PagedLayer, value: Tensor | None) -> None:
            if value is not None:
                raise AttributeError(
                    "keys and values of a paged layer are in blocks and cannot be assigned: use"
                    " `update`, `crop`, `reset`, `reorder_cache` or `batch_select_indices`"
                )

        return property(
            get,
            refuse,
            doc="Visible K or V, `(batch, heads, length, dim)`; `None` while the layer is empty.",
        )

    keys = _visible_states(False)
    values = _visible_states(True)

    def plain_bytes(self, num_rows: int, length: int) -> int:
        """Returns the bytes of keys and values that the stock layer would hold for `num_rows` rows
        of `length` positions; 0 if this layer has no blocks yet."""
        blocks = self.blocks
        if blocks is None:
            return 0
        num_stored = length - self.group.spec.first_visible(length)
        token_bytes = sum(heads * dim * dtype.itemsize for heads, dim, dtype in blocks.formats)
        return num_rows * num_stored * token_bytes

    def get_seq_length(self) -> int:
        """Returns the number of logical positions so far, including padding."""
        return self.num_positions

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of keys that attention gets with the next `query_length` queries, and
        the position of the first key."""
        packed_step = self.group.packed_step
        if packed_step is not None and packed_step.key_len is not None:
            return packed_step.key_len, 0
        first = self.group.spec.first_visible(self.num_positions)
        return self.num_positions + query_length - first, first

    def _run_once(self, operation: Callable[..., None], *args: Any) -> None:
        """Runs an operation on all rows, unless another layer has already requested it. An
        operation that raises is not counted. Raises `NotPackable` in a packed step."""
        if self.group.packed_step is not None:
            raise NotPackable(f"layer {self.index} of a packed step has no rows to change")
        if self.graph_states is not None:
            self.graph_states.check()
        rows = self.group.rows
        if self.num_operations == rows.num_operations:
            rows.num_rows_before = len(rows.sequences)
            operation(*args)
            rows.num_operations += 1
        self.num_operations += 1

    def _check_current(self) -> None:
        """Raises `RuntimeError` if this layer missed an operation on rows, or if tensors of
        `graph_states` were written to in place."""
        if self.num_operations != self.group.rows.num_operations:
            raise RuntimeError(
                f"layer {self.index} missed an operation on rows or lengths that other layers of"
                " the cache have run: call operations on the whole cache, and `reset` the cache"
            )
        if self.graph_states is not None:
            self.graph_states.check()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes row `i` a copy of row `beam_idx[i]`, `(n,)` int32 or int64, by permuting block
        tables. Raises `IndexError`, with nothing changed, for other tensors or missing rows."""
        beam_idx = _as_tensor(beam_idx)
        is_vector = beam_idx.dim() == 1
        if not (is_vector and beam_idx.dtype in (torch.int32, torch.int64)):
            raise IndexError(
                f"row indices must be a vector of int32 or int64, not {beam_idx.dtype} of shape"
                f" {tuple(beam_idx.shape)}"
            )
        indices = beam_idx.tolist()
        self._run_once(self.group.rows.select, indices)
        self._select_in_graph(lambda states: states[indices])

    @property
    def _num_rows(self) -> int:
        """The number of rows for this layer's next operation, which other layers may have run."""
        rows = self.group.rows
        is_current = self.num_operations == rows.num_operations
        return len(rows.sequences) if is_current else rows.num_rows_before

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Removes the last `-tokens_to_remove` positions and, in a sliding layer, tokens outside
        the window. Raises `RuntimeError` if the window is full and the past is not recorded. A
        positive number is the length to keep in older versions of transformers, which log that it
        is deprecated; newer versions raise `ValueError`."""
        count = int(tokens_to_remove)
        is_full = self.group.spec.first_visible(self.num_positions) > 0
        if is_full and not self.group.record_past:
            raise RuntimeError(
                "`crop` cannot go back: the sliding window is full and older tokens were freed."
                " Call `activate_past_recording` on the cache first"
            )
        if count > 0:
            cache_utils.DynamicLayer().crop(count)  # logs or raises, depending on the version
            count = min(0, count - self.num_positions)
        num_removed = min(self.num_positions, -count)
        # if another layer of the group holds more positions, this layer's updates overwrite them
        self._run_once(self.group.rows.crop, num_removed)
        self.num_positions -= num_removed
        if num_removed:
            self._select_in_graph(lambda kv: kv[:, :, : max(0, kv.shape[2] - num_removed)])

    def set_length(self, length: int) -> None:
        """Sets the number of positions, after the cache has taken over rows of this length."""
        # drops the handles of the former rows, which a deep copy of the layer would gather
        self.num_positions, self.packed_handles = length, {}
        self.graph_states = None
        blocks = self.blocks
        if length and blocks is not None:
            self.lazy_initialization(blocks.keys, blocks.values)
            self.dtype = blocks.dtypes[0]  # not that of the stored codes

    def reset(self) -> None:
        """Empties the layer. The first layer of a cache to be reset frees the blocks of all
        layers."""
        self.num_positions = 0
        self.is_initialized = False
        self.graph_states = None
        self._run_once(self.group.rows.free)


class PagedSlidingWindowLayer(PagedLayer, cache_utils.DynamicSlidingWindowLayer):
    """A layer with a sliding window; replaces `DynamicSlidingWindowLayer`."""

    def __init__(self, group: LayerGroup, index: int) -> None:
        super().__init__(group, index)
        window = group.spec.window
        assert window is not None
        self.sliding_window = window
        self._sliding_window_tensor = torch.tensor(window, dtype=torch.long)

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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(_as_tensor(beam_idx))

    update = PagedLayer.update
    lazy_initialization = PagedLayer.lazy_initialization
    batch_select_indices = PagedLayer.batch_select_indices
    batch_repeat_interleave = PagedLayer.batch_repeat_interleave


class PagedHybridLayer(PagedLayer, cache_utils.LinearAttentionAndFullAttentionLayer):
    """A layer with paged K/V and a linear-attention state; replaces
    `LinearAttentionAndFullAttentionLayer`."""

    _linear = cache_utils.LinearAttentionLayer

    def __init__(
        self,
        group: LayerGroup,
        index: int,
        number_of_states: int = 1,
    ) -> None:
        super().__init__(group, index)
        self._linear.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        parent: Any = self._linear if kwargs else PagedLayer
        parent.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        self._linear.reset(self)
        PagedLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        PagedLayer.reorder_cache(self, beam_idx)  # first: if it raises, nothing has changed
        self._linear.reorder_cache(self, _as_tensor(beam_idx))

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        if getattr(self, "record_past", True):  # otherwise the linear part raises an error
            PagedLayer.crop(self, tokens_to_remove)
        self._linear.crop(self, int(tokens_to_remove))


class PagedHybridSlidingWindowLayer(PagedHybridLayer, PagedSlidingWindowLayer):
    """A hybrid layer with a sliding window; replaces
    `LinearAttentionAndSlidingWindowAttentionLayer`."""


def _is_transformed(states: Tensor) -> bool:
    """Whether a function transform (`torch.func`, forward-mode differentiation) traces the
    tensor."""
    if torch._C._functorch.is_functorch_wrapped_tensor(states):
        return True
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(states).tangent is not None


def _as_tensor(rows: Any) -> Tensor:
    """Returns `rows` as a tensor. A new tensor is on the CPU: torch's default may be `meta`."""
    if isinstance(rows, Tensor):
        return rows
    tensor = torch.as_tensor(rows, device="cpu")
    return tensor if tensor.numel() else tensor.long()  # an empty list becomes a float tensor
