"""The cache of a packed forward: `[1, sum(query_len)]` tokens of many sequences, each with block tables of its own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from transformers import cache_utils

from ..step import Derives
from . import storage
from .layer_group import LayerGroup
from .layers import PagedSlidingWindowLayer
from .paged_cache import PagedCache

# Layers that hold nothing, as those that read another layer's keys and values; older transformers leave them out.
EMPTY_LAYERS: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))


class NotPackable(RuntimeError):
    """The model did something with packed keys, values or masks that is only right for one sequence a row."""


class NotCapturable(RuntimeError):
    """A step cannot be recorded to be run again with other inputs: it would do what only the host can."""


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence in the packed dimension. Lengths are in table coordinates."""

    first: int  # packed position of its first token
    query_len: int
    seq_len: int  # tokens that the table holds, the `query_len` new ones included
    block_ids: list[int]


class LayerStates(NamedTuple):
    """New states `(1, heads, num_tokens, dim)` of a layer, and its blocks."""

    keys: torch.Tensor
    values: torch.Tensor
    blocks: storage.KVBlocks


@dataclass(eq=False)
class PackedStep(Derives):
    """
    One layer group's share of a packed step: `num_decodes` sequences with one new token each, then chunks.

    A runner overwrites `tables` when it builds the next step: by then no code may read through this one any more.

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
        block_ids (`Sequence[list[int]]`): `tables` on the host; nothing if no shared blocks shall be looked for.
        lengths (`torch.Tensor` of shape `(2, num_decodes)`, int32, on the device, *optional*): Of decodes that are
            recorded to be run again with other tables and lengths: what `seq_lens` would say, and where each row
            starts, 0. Nothing may then be decided by their numbers; `seq_lens` is empty.
    """

    num_tokens: int
    slots: torch.Tensor
    block_size: int
    window: int | None
    num_decodes: int
    tables: torch.Tensor
    seq_lens: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    block_ids: Sequence[list[int]] = ()
    lengths: torch.Tensor | None = None
    states: dict[int, LayerStates] = field(default_factory=dict)
    """What each layer has stored so far, by its index. It goes with the step, so that nothing outlives it."""

    @property
    def num_rows(self) -> int:
        """Tables that the step writes to."""
        return self.num_decodes + len(self.chunks)

    @property
    def begins(self) -> bool:
        """Whether every row begins in this step, so that nothing was stored for any of them before."""
        if self.lengths is not None:
            return False
        return all(n == 1 for n in self.seq_lens) and all(chunk.query_len == chunk.seq_len for chunk in self.chunks)


class PackedTensor(torch.Tensor):
    """
    A layer's keys or values in a packed step, `(1, heads, num_tokens, dim)` as the model sees them.

    Our attention function reads the blocks through `states`. There is no dense tensor that means the same, so any other
    operation raises [`NotPackable`].
    """

    layer: PackedStates
    is_value: bool

    @staticmethod
    def __new__(cls, layer: PackedStates, like: torch.Tensor, is_value: bool) -> PackedTensor:
        """`like`: the new states, whose shape, strides, dtype and device it shows."""
        handle = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        handle.layer, handle.is_value = layer, is_value
        return handle

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def step(self) -> PackedStep:
        """The step that is computed now."""
        step = self.layer.share.step
        if step is None:
            raise NotPackable("packed keys or values are read after their step")
        return step

    @property
    def blocks(self) -> torch.Tensor:
        """`(num_blocks, heads, block_size, dim)`: the layer's keys or values."""
        blocks = self.step.states[self.layer.index].blocks
        return blocks.values if self.is_value else blocks.keys

    @property
    def fresh(self) -> torch.Tensor:
        """`(1, heads, num_tokens, dim)`: those of this step."""
        states = self.step.states[self.layer.index]
        return states.values if self.is_value else states.keys

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PackedTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotPackable(f"{func} reads packed keys or values: only the attention interface may")


class Share:
    """The step that is computed now, for all layers of a group."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step: PackedStep | None = None


class PackedStates:
    """
    What a layer keeps for steps whose states look the same: handles, and how states are stored. Finding these out
    takes longer than a small kernel. It keeps no tensor alive.

    Args:
        share ([`Share`]): Where the layer finds its step.
        index (`int`): The layer's.
        blocks ([`KVBlocks`]): Of the layer.
        keys, values (`torch.Tensor` of shape `(1, heads, num_tokens, dim)`): New states.
        slots (`torch.Tensor` of shape `(1, num_tokens)`, int64): Where they go.
    """

    __slots__ = ("blocks", "index", "key", "share", "signature", "store", "value")

    def __init__(
        self,
        share: Share,
        index: int,
        blocks: storage.KVBlocks,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        self.share, self.index = share, index
        self.signature = self.sign(keys, values)
        self.blocks = weakref.ref(blocks)
        self.store = storage.prepare_store(blocks, keys, values, slots)
        self.key, self.value = PackedTensor(self, keys, False), PackedTensor(self, values, True)

    @staticmethod
    def sign(keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, ...]:
        """Equal for states that one object serves."""
        return keys.shape, keys.stride(), keys.dtype, keys.device, values.shape, values.stride(), values.dtype


class PackedLayer(cache_utils.DynamicLayer):
    """One layer of a [`PackedCache`]; stands for `DynamicLayer`. It holds nothing between steps."""

    def __init__(self, group: LayerGroup, share: Share, index: int) -> None:
        cache_utils.CacheLayerMixin.__init__(self)
        self._init_packed(group, share, index)

    def _init_packed(self, group: LayerGroup, share: Share, index: int) -> None:
        self.group, self.share, self.index = group, share, index
        self._states: PackedStates | None = None

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
        step, group = self.share.step, self.group
        if step is None or key_states.shape[0] != 1 or key_states.shape[2] != step.num_tokens:
            expected = "no step" if step is None else f"a packed step of {step.num_tokens} tokens"
            raise NotPackable(f"layer {self.index} got states of shape {tuple(key_states.shape)} in {expected}")
        if value_states.shape[::2] != key_states.shape[::2]:
            raise NotPackable(
                f"layer {self.index} got keys of shape {tuple(key_states.shape)} and values of shape "
                f"{tuple(value_states.shape)}"
            )
        with group.memory.lock:
            states, blocks = self._states, group.blocks.storage.layers.get(self.index)
            if (
                states is None
                or blocks is None
                or states.blocks() is not blocks
                or states.signature != states.sign(key_states, value_states)
            ):
                num_begun = step.num_rows if step.begins else None
                blocks = group.blocks.layer(self.index, key_states, value_states, group.num_layers, num_begun)
                states = self._states = PackedStates(
                    self.share, self.index, blocks, key_states, value_states, step.slots
                )
            states.store(key_states, value_states, step.slots)
        step.states[self.index] = LayerStates(key_states, value_states, blocks)
        return states.key, states.value

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
        return -1 if self.group.spec.window is None else self.group.spec.window

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotPackable(f"layer {self.index} of a packed step has no rows to change")

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse


class PackedSlidingWindowLayer(PackedLayer, cache_utils.DynamicSlidingWindowLayer):
    """Stands for `DynamicSlidingWindowLayer`."""

    is_sliding = True

    def _init_packed(self, group: LayerGroup, share: Share, index: int) -> None:
        super()._init_packed(group, share, index)
        assert group.spec.window is not None
        self.sliding_window, self.cumulative_length, self.record_past = group.spec.window, 0, False
        self._sliding_window_tensor = torch.tensor(group.spec.window, dtype=torch.long)

    activate_past_recording = PackedLayer._refuse


class PackedCache(cache_utils.DynamicCache):
    """
    What the model gets as `past_key_values` in a packed forward. It is used for every step of a runner.

    Args:
        cache ([`PagedCache`]): A cache built for the model that holds nothing: it tells the layers' kinds, and its
            groups own the blocks.
    """

    def __init__(self, cache: PagedCache) -> None:
        self.specs = list(cache.groups)
        shares = {spec: Share() for spec in cache.groups}
        layers: list[Any] = []
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, EMPTY_LAYERS):
                layers.append(layer)
            else:
                sliding = isinstance(layer, PagedSlidingWindowLayer)
                kind = PackedSlidingWindowLayer if sliding else PackedLayer
                layers.append(kind(layer.group, shares[layer.group.spec], index))
        cache_utils.Cache.__init__(self, layers=layers)
        self._shares = list(shares.values())

    @property
    def is_compileable(self) -> bool:
        """Never: tables live on the host."""
        return False

    def begin(self, steps: list[PackedStep] | None) -> None:
        """The next forward is this step, one share a group in the order of `specs`; `None`: there is none."""
        for number, share in enumerate(self._shares):
            share.step = None if steps is None else steps[number]
