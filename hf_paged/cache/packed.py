"""The cache of a packed forward: `[1, sum(query_len)]` tokens of many sequences, each with block tables of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from transformers import cache_utils

from . import storage
from .layer_group import LayerGroup
from .layers import PagedSlidingWindowLayer
from .paged_cache import PagedCache

# Layers that hold nothing, as those that read another layer's keys and values; older transformers leave them out.
EMPTY_LAYERS: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))


class NotPackable(RuntimeError):
    """The model did something with packed keys, values or masks that is only right for one sequence a row."""


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence in the packed dimension. Lengths are in table coordinates."""

    first: int  # packed position of its first token
    query_len: int
    seq_len: int  # tokens that the table holds, the `query_len` new ones included
    block_ids: list[int]


@dataclass(eq=False)
class PackedStep:
    """
    One layer group's share of a packed step: `num_decodes` sequences with one new token each, then chunks.

    A runner overwrites `tables` when it builds the next step: by then nobody may read through this one any more.

    Args:
        num_tokens (`int`): Length of the packed dimension.
        slots (`torch.Tensor` of shape `(1, num_tokens)`, int64): Where each token's K and V go.
        block_size (`int`): Tokens in a block.
        window (`int`, *optional*): Tokens that a layer of the group looks back, itself included.
        num_decodes (`int`): Leading packed positions that are one sequence each.
        tables (`torch.Tensor` of shape `(num_decodes, max_blocks)`, int32): Their block tables; what is past a row's
            last block means nothing.
        seq_lens (`tuple[int, ...]`): Tokens that each of these tables holds, the new one included.
        chunks (`tuple[Chunk, ...]`): The rest of the packed dimension, without gaps.
    """

    num_tokens: int
    slots: torch.Tensor
    block_size: int
    window: int | None
    num_decodes: int
    tables: torch.Tensor
    seq_lens: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    memo: dict[Any, Any] = field(default_factory=dict)


class PackedTensor(torch.Tensor):
    """
    A layer's keys or values in a packed step, `(1, heads, num_tokens, dim)` as the model sees them.

    Our attention function reads `blocks` through `step`. There is no dense tensor that means the same, so any other
    operation raises [`NotPackable`].
    """

    step: PackedStep
    blocks: torch.Tensor
    fresh: torch.Tensor

    @staticmethod
    def __new__(cls, step: PackedStep, blocks: torch.Tensor, fresh: torch.Tensor) -> PackedTensor:
        """
        Args:
            blocks (`torch.Tensor` of shape `(num_blocks, heads, block_size, dim)`): The layer's keys or values.
            fresh (`torch.Tensor` of shape `(1, heads, num_tokens, dim)`): Those of this step.
        """
        handle = torch.Tensor._make_wrapper_subclass(
            cls, fresh.shape, strides=fresh.stride(), dtype=fresh.dtype, device=fresh.device
        )
        handle.step, handle.blocks, handle.fresh = step, blocks, fresh
        return handle

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PackedTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotPackable(f"{func} reads packed keys or values: only the attention interface may")


class PackedLayer(cache_utils.DynamicLayer):
    """One layer of a [`PackedCache`]; stands for `DynamicLayer`. It holds nothing between steps."""

    def __init__(self, group: LayerGroup, index: int) -> None:
        cache_utils.CacheLayerMixin.__init__(self)
        self._init_packed(group, index)

    def _init_packed(self, group: LayerGroup, index: int) -> None:
        self.group, self.index = group, index
        self.step: PackedStep | None = None
        self._handles: list[PackedTensor | None] = [None, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Stores the states of all packed tokens and returns handles that attention reads through.

        Args:
            key_states, value_states (`torch.Tensor` of shape `(1, heads, num_tokens, dim)`).

        Raises:
            NotPackable: for states of another shape than the step's.
        """
        step, group = self.step, self.group
        if step is None or key_states.shape[0] != 1 or key_states.shape[2] != step.num_tokens:
            expected = "no step" if step is None else f"a packed step of {step.num_tokens} tokens"
            raise NotPackable(f"layer {self.index} got states of shape {tuple(key_states.shape)} in {expected}")
        with group.memory.lock:
            blocks = group.blocks.layer(group, self.index, key_states, value_states, is_empty=False)
            storage.store(key_states, value_states, blocks.keys, blocks.values, step.slots)
        return self._handle(0, step, blocks.keys, key_states), self._handle(1, step, blocks.values, value_states)

    def _handle(self, which: int, step: PackedStep, blocks: torch.Tensor, fresh: torch.Tensor) -> PackedTensor:
        """A handle of the last step again where shapes allow: making one costs as much as a small kernel."""
        handle = self._handles[which]
        same = handle is not None and handle.shape == fresh.shape and handle.stride() == fresh.stride()
        if handle is None or not same or handle.dtype != fresh.dtype:
            handle = self._handles[which] = PackedTensor(step, blocks, fresh)
        handle.step, handle.blocks, handle.fresh = step, blocks, fresh
        return handle

    def release(self) -> None:
        """The step is over: its states need not be kept."""
        for handle in self._handles:
            if handle is not None:
                handle.__dict__.clear()

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: blocks exist before the step."""

    def get_seq_length(self) -> int:
        """0: what comes before is in the block tables, and positions are passed."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As if the packed tokens were one sequence; attention knows better."""
        return query_length, 0

    def get_max_length(self) -> int:
        """The window, or -1 for no maximum."""
        return -1 if self.group.window is None else self.group.window

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotPackable(f"layer {self.index} of a packed step has no rows to change")

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse


class PackedSlidingWindowLayer(PackedLayer, cache_utils.DynamicSlidingWindowLayer):
    """Stands for `DynamicSlidingWindowLayer`."""

    is_sliding = True

    def _init_packed(self, group: LayerGroup, index: int) -> None:
        super()._init_packed(group, index)
        assert group.window is not None
        self.sliding_window, self.cumulative_length, self.record_past = group.window, 0, False
        self._sliding_window_tensor = torch.tensor(group.window, dtype=torch.long)

    activate_past_recording = PackedLayer._refuse


class PackedCache(cache_utils.DynamicCache):
    """
    What the model gets as `past_key_values` in a packed forward. It is used for every step of a runner.

    Args:
        cache ([`PagedCache`]): A cache built for the model that holds nothing: it tells the layers' kinds, and its
            groups own the blocks.
    """

    def __init__(self, cache: PagedCache) -> None:
        self.windows = list(cache.groups)
        layers: list[Any] = []
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, EMPTY_LAYERS):
                layers.append(layer)
            else:
                sliding = isinstance(layer, PagedSlidingWindowLayer)
                layers.append((PackedSlidingWindowLayer if sliding else PackedLayer)(layer.group, index))
        cache_utils.Cache.__init__(self, layers=layers)
        packed = [layer for layer in layers if isinstance(layer, PackedLayer)]
        self._members = [[layer for layer in packed if layer.group is group] for group in cache.groups.values()]

    @property
    def is_compileable(self) -> bool:
        """Never: tables live on the host."""
        return False

    def begin(self, steps: list[PackedStep] | None) -> None:
        """The next forward is this step, one share a group in the order of `windows`; `None`: there is none."""
        for number, layers in enumerate(self._members):
            for layer in layers:
                layer.step = None if steps is None else steps[number]
                if steps is None:
                    layer.release()
