"""The memory itself: per-layer block tensors of one layer group, block copies, growth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import psutil
import torch

from ..kernels import cpp, uses_triton
from ..kernels.cpp import attention as cpp_attention
from ..kernels.cpp import store as cpp_store
from .groups import FULL_ATTENTION, GroupSpec

Look: TypeAlias = tuple[Any, ...]


@dataclass(eq=False)
class KVBlocks:
    """
    The blocks of one layer.

    Args:
        data (`tuple[torch.Tensor, ...]`): What is really allocated. Where K and V agree in heads, dims and dtype it
            is one tensor `(num_blocks, 2 * kv_heads, block_size, head_dim)`, K heads first, so that one gather serves
            both. Where only the dims differ (MLA: latent and rotary key) it is one tensor
            `(num_blocks, kv_heads, block_size, key_dim + value_dim)`, else two.
        keys (`torch.Tensor` of shape `(num_blocks, kv_heads, block_size, key_dim)`): View of the keys.
        values (`torch.Tensor` of shape `(num_blocks, value_heads, block_size, value_dim)`): View of the values.
        dtypes (`tuple[torch.dtype, torch.dtype]`, *optional*): Of the states that keys and values stand for, where they
            are stored in another (`GroupSpec.storage_dtype`).

    Attributes:
        look: That of the states that were last stored (`looks`), which these blocks fit.
        attention ([`kernels.cpp.attention.Attention`], *optional*):
            The C++ kernel's last call on these blocks, for the next one that looks the same.
    """

    data: tuple[torch.Tensor, ...]
    keys: torch.Tensor
    values: torch.Tensor
    dtypes: tuple[torch.dtype, torch.dtype] = ()  # type: ignore[assignment]
    look: Look | None = field(default=None, init=False, repr=False)
    attention: cpp_attention.Attention | None = field(default=None, init=False, repr=False)

    _store: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None = field(
        default=None, init=False, repr=False
    )
    _latents: KVBlocks | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.dtypes = self.dtypes or (self.keys.dtype, self.values.dtype)

    @property
    def pair(self) -> tuple[tuple[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.dtype]]:
        """Keys and values, each with the dtype of the states that it stands for."""
        return (self.keys, self.dtypes[0]), (self.values, self.dtypes[1])

    def store(self, look: Look, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """`store` into these blocks, for states of this look. Finding out how takes longer than a small store."""
        if look != self.look or self._store is None:
            self._store, self.look = _choose(keys, values, self.keys, self.values, slots), look
        self._store(keys, values, slots)

    @property
    def latents(self) -> KVBlocks:
        """Keys and values beside each other as one, which serve as keys and as values."""
        if self._latents is None:
            self._latents = KVBlocks(self.data, self.data[0], self.data[0], self.dtypes)
        return self._latents

    @property
    def block_bytes(self) -> int:
        """Bytes that one block of this layer takes."""
        return sum(tensor[0].numel() * tensor.element_size() for tensor in self.data if tensor.shape[0])

    def matches(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether new states `(batch, heads, n, dim)` fit these blocks."""
        return all(
            (blocks.shape[1], blocks.shape[3], dtype, blocks.device)
            == (states.shape[1], states.shape[3], states.dtype, states.device)
            for blocks, dtype, states in zip((self.keys, self.values), self.dtypes, (keys, values))
        )

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        spec: GroupSpec = FULL_ATTENTION,
    ) -> KVBlocks:
        """Uninitialised blocks for states like `keys` and `values`, each `(batch, heads, n, dim)`."""
        dtypes = keys.dtype, values.dtype
        keys, values = (states[:, :, :0].to(spec.storage_dtype(states.dtype)) for states in (keys, values))
        if (keys.shape[1], keys.dtype) != (values.shape[1], values.dtype):
            shapes = [(num_blocks, x.shape[1], block_size, x.shape[3]) for x in (keys, values)]
            pair = [_empty(shape, states) for shape, states in zip(shapes, (keys, values))]
            return cls(tuple(pair), pair[0], pair[1], dtypes)
        heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
        if key_dim == value_dim:
            shape = (num_blocks, 2 * heads, block_size, key_dim)
        else:
            shape = (num_blocks, heads, block_size, key_dim + value_dim)
        return cls.view(_empty(shape, keys), heads, key_dim, dtypes)

    @classmethod
    def view(
        cls, both: torch.Tensor, heads: int, key_dim: int, dtypes: tuple[torch.dtype, torch.dtype] | None = None
    ) -> KVBlocks:
        """Keys and values as views of the one tensor that holds both."""
        dtypes = dtypes or (both.dtype, both.dtype)
        if both.shape[1] == 2 * heads:
            return cls((both,), both[:, :heads], both[:, heads:], dtypes)
        return cls((both,), both[..., :key_dim], both[..., key_dim:], dtypes)

    def grown(self, num_blocks: int) -> KVBlocks:
        """A copy with room for `num_blocks`."""
        tensors = [_empty((num_blocks, *tensor.shape[1:]), tensor) for tensor in self.data]
        for new, old in zip(tensors, self.data):
            new[: old.shape[0]] = old
        if len(tensors) == 1:
            return self.view(tensors[0], self.keys.shape[1], self.keys.shape[3], self.dtypes)
        return KVBlocks(tuple(tensors), tensors[0], tensors[1], self.dtypes)


def _empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    # outlives the call: a tensor made in inference mode could not be written to by a call outside it
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=like.dtype, device=like.device)


class Storage:
    """
    The block tensors of one layer group, one `KVBlocks` a layer, made when the layer first writes.

    On CPU the tensors are made as large as `reserve` was told, since the system commits a page only when it is touched.
    When they are full they grow by half.
    """

    def __init__(self, block_size: int, spec: GroupSpec = FULL_ATTENTION) -> None:
        self.block_size, self.spec = block_size, spec
        self.capacity = 0
        self._reserved, self._share = 0, 0.0
        self._layers: dict[int, KVBlocks] = {}

    @property
    def layers(self) -> dict[int, KVBlocks]:
        """Blocks by layer index."""
        return self._layers

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers that have written."""
        return sum(layer.block_bytes for layer in self._layers.values())

    def reserve(self, num_blocks: int, share: float) -> None:
        """
        Expect up to `num_blocks` blocks: where untouched memory costs nothing, a layer made from now on holds that
        many, as far as that is no more than `share` of the memory available.
        """
        self._reserved, self._share = num_blocks, share

    def drop_smaller(self, num_blocks: int) -> None:
        """Forgets layers with fewer blocks, whose content no table holds: making them again copies nothing."""
        self._layers = {index: layer for index, layer in self._layers.items() if layer.keys.shape[0] >= num_blocks}

    def promote(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> KVBlocks:
        """
        The blocks of layer `index` in a dtype that holds both what is stored and new states, as `torch.cat` would
        choose. Raises `ValueError` if heads, dims or device differ.
        """
        layer = self._layers[index]
        for blocks, states in ((layer.keys, keys), (layer.values, values)):
            held, new = (blocks.shape[1], blocks.shape[3], blocks.device), (*states.shape[1::2], states.device)
            if held != new:
                raise ValueError(
                    f"layer {index} holds states of (heads, dim, device) {held}, the new ones have {new}: use a cache "
                    "of their own for another model"
                )
        promoted = tuple(
            torch.promote_types(dtype, states.dtype) for dtype, states in zip(layer.dtypes, (keys, values))
        )
        if promoted != layer.dtypes:
            empty = [states[:, :, :0].to(dtype) for states, dtype in zip((keys, values), promoted)]
            wider = KVBlocks.allocate(layer.keys.shape[0], self.block_size, empty[0], empty[1], self.spec)
            used = slice(self.capacity)  # what is behind was never written, and takes no memory before it is
            wider.keys[used] = layer.keys[used]
            wider.values[used] = layer.values[used]
            self._layers[index] = layer = wider
        return layer

    def grow(self, num_blocks: int, exactly: bool = False) -> None:
        """
        Makes room for blocks `0 .. num_blocks - 1` in every layer, keeping what is stored; half as much again as there
        was, unless `exactly`.
        """
        self.capacity = max(self.capacity, num_blocks)
        for index, layer in self._layers.items():
            if layer.keys.shape[0] < self.capacity:
                rows = layer.keys.shape[0]
                num_blocks = self.capacity if exactly else max(self.capacity, rows + rows // 2)
                try:
                    grown = layer.grown(num_blocks)
                except (MemoryError, RuntimeError):  # torch raises the latter
                    if num_blocks == self.capacity:
                        raise
                    grown = layer.grown(self.capacity)
                self._layers[index] = grown

    def find(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> KVBlocks | None:
        """The blocks of layer `index` if they exist and fit states like `keys` and `values`."""
        layer = self._layers.get(index)
        return layer if layer is not None and layer.matches(keys, values) else None

    def make(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> KVBlocks:
        """New blocks for layer `index` and states like `keys` and `values`."""
        num_blocks = self.capacity
        if keys.device.type == "cpu" and self._reserved > num_blocks:
            block_bytes = self.block_size * sum(x.shape[1] * x.shape[3] * x.element_size() for x in (keys, values))
            affordable = int(self._share * free_bytes(keys.device) / max(block_bytes, 1))
            num_blocks = max(num_blocks, min(self._reserved, affordable))
        try:
            layer = KVBlocks.allocate(num_blocks, self.block_size, keys, values, self.spec)
        except (MemoryError, RuntimeError):  # torch raises the latter
            if num_blocks == self.capacity:
                raise
            # The system promises less than it has: the layers get their shares of what it does promise.
            self._reserved = int(self._share * self._most_blocks(num_blocks, keys, values))
            layer = KVBlocks.allocate(max(self.capacity, self._reserved), self.block_size, keys, values, self.spec)
        self._layers[index] = layer
        return layer

    def _most_blocks(self, num_blocks: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """`num_blocks`, or the first of its half, quarter, ... for which there is memory; at least `capacity`."""
        while num_blocks > self.capacity:
            try:
                KVBlocks.allocate(num_blocks, self.block_size, keys, values, self.spec)
                return num_blocks
            except (MemoryError, RuntimeError):
                num_blocks //= 2
        return self.capacity

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies block `source` to block `target` in every layer, one batched copy a layer."""
        sources, targets = (list(ids) for ids in zip(*copies))
        for layer in self._layers.values():
            for tensor in layer.data:
                tensor[torch.tensor(targets, device=tensor.device)] = tensor[
                    torch.tensor(sources, device=tensor.device)
                ]


def free_bytes(device: torch.device) -> int:
    """Bytes of memory free on `device`; on the CPU no more than the process may still map (`ulimit -v`)."""
    if device.type != "cpu":
        return int(getattr(torch, device.type).mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    limit = _mapped_limit()
    return free if limit is None else max(0, min(free, limit - psutil.Process().memory_info().vms))


def _mapped_limit() -> int | None:
    """Bytes of address space that the process may have; `None` without a limit, or on a system that knows none."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that an allocation failed: torch has no one type for that."""
    if error.__cause__ is not None and is_out_of_memory(error.__cause__):
        return True
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and any(words in message for words in _OUT_OF_MEMORY)


# of the allocators for the CPU (on Linux and macOS, on Windows) and of the devices that raise a plain RuntimeError
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def looks(keys: torch.Tensor, values: torch.Tensor) -> Look:
    """Equal for states that the same blocks and the same way of storing serve."""
    return keys.shape, keys.stride(), keys.dtype, keys.device, values.shape, values.stride(), values.dtype


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """
    Writes the K and V of one step into the blocks, in place.

    Args:
        keys, values (`torch.Tensor` of shape `(batch, heads, n, dim)`): The new states, any strides; converted to the
            blocks' dtype.
        key_blocks, value_blocks (`torch.Tensor` of shape `(num_blocks, heads, block_size, dim)`): Where they go.
        slots (`torch.Tensor` of shape `(batch, n)`, int64): `block_id * block_size + offset` of each token, each at
            most once; negative for a token that is not stored.
    """
    _choose(keys, values, key_blocks, value_blocks, slots)(keys, values, slots)


def _choose(
    keys: torch.Tensor, values: torch.Tensor, key_blocks: torch.Tensor, value_blocks: torch.Tensor, slots: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """`store` of states and slots that look like these, as often as there are any; nothing is stored yet."""
    chosen = store_portable
    if uses_triton(key_blocks):
        from ..kernels.triton import store as triton  # needs Triton

        if triton.supports(keys, values, key_blocks, value_blocks, slots):
            chosen = triton.store
    elif cpp_store.supports(keys, values, key_blocks, value_blocks, slots) and cpp.is_available():
        return cpp_store.Store(keys, values, key_blocks, value_blocks, slots)

    def store_again(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        chosen(keys, values, key_blocks, value_blocks, slots)

    return store_again


def store_portable(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`store` in plain PyTorch, on any device."""
    slots = slots.to(key_blocks.device)
    rows, tokens = (slots >= 0).nonzero(as_tuple=True)
    slot = slots[rows, tokens]
    block_ids, offsets = slot // key_blocks.shape[2], slot % key_blocks.shape[2]
    key_blocks[block_ids, :, offsets] = keys[rows, :, tokens].to(key_blocks.dtype)
    value_blocks[block_ids, :, offsets] = values[rows, :, tokens].to(value_blocks.dtype)
