"""The memory behind the blocks of one layer group: when layers are allocated and grow, and which
storage a config selects. Pools allocate block ids."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import rooms
from ..config import PagedConfig
from ..interrupts import is_interrupt
from ..kernels import uses_triton
from ..kernels.triton.launch import LaunchFailedError
from ..seams import Storage
from ..step import numbers_on
from .block_pool import BlockPool
from .free_memory import Reservation, discard
from .groups import FULL_ATTENTION, GroupSpec
from .kv_blocks import KVBlocks, sizes_of

_BLOCK_BYTES = operator.attrgetter("block_bytes")
_NUM_BLOCKS = operator.attrgetter("num_blocks")
_IS_ELASTIC = operator.attrgetter("is_elastic")


class BlockCopier:
    """Copies blocks in all tensors of a storage. With Triton, this takes one transfer of the block
    ids and one launch per device, over a table of the tensors' addresses, which is rebuilt when
    tensors move. Plain PyTorch makes the copies if Triton does not run on the device, if
    `can_launch` is false, after a failed launch, or if a target is also a source. `can_launch`:
    `False` for tensors that are not contiguous."""

    def __init__(self, can_launch: bool = True) -> None:
        self._can_launch = can_launch
        # by device: the addresses as a list, and as a tensor on the device
        self._tables: dict[torch.device, tuple[list[tuple[int, int]], Tensor]] = {}

    def copy(self, tensors: Iterable[Tensor], copies: Sequence[tuple[int, int]]) -> None:
        """Copies block `source` of each tensor `(num_blocks, ...)` to its block `target`, for each
        pair `(source, target)`, reading all sources before writing. `copies` must not be empty, no
        id in it may be negative, and targets must be distinct. Raises `IndexError` for blocks past
        the end, except when plain PyTorch copies on a GPU: there a device-side assertion fails,
        after which the process cannot use the device."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        sources = {source for source, _ in copies}
        has_chains = not sources.isdisjoint(target for _, target in copies)
        for device, device_tensors in by_device.items():
            pairs = numbers_on(device, copies)
            if self._can_launch and not has_chains and uses_triton(device_tensors[0]):
                with contextlib.suppress(LaunchFailedError):
                    max_block_id = max(map(max, copies))
                    self._launch(device_tensors, pairs, max_block_id)
                    continue
            copy_portable(device_tensors, pairs)

    def _launch(self, tensors: list[Tensor], pairs: Tensor, max_block_id: int) -> None:
        from ..kernels.triton import copy  # needs Triton

        num_blocks = min(map(len, tensors))
        if max_block_id >= num_blocks:
            raise IndexError(f"cannot copy block {max_block_id}: there are {num_blocks} blocks")
        addresses = copy.locate_blocks(tensors)
        old_addresses, table = self._tables.get(pairs.device, (None, None))
        if table is None or old_addresses != addresses:
            table = torch.tensor(addresses, dtype=torch.int64, device="cpu").to(pairs.device)
            self._tables[pairs.device] = addresses, table
        copy.copy_blocks(addresses, table, pairs)


def copy_portable(tensors: Iterable[Tensor], pairs: Tensor) -> None:
    """Copies blocks in plain PyTorch, in tensors `(num_blocks, ...)` of any strides on one device;
    `pairs` `(n, 2)` int64 is on that device."""
    sources, targets = pairs.unbind(1)
    for tensor in tensors:
        tensor[targets] = tensor[sources]


class BlockStorage:
    """The block tensors of one layer group, one `KVBlocks` per layer. A layer is allocated at its
    first write, with the pool's number of blocks or the reserved number, whichever is larger. When
    full, it grows to the reserved size or by half, whichever is larger."""

    max_bytes: int | None = None
    growth_step = 0

    def __init__(
        self,
        block_size: int,
        pool: BlockPool,
        spec: GroupSpec = FULL_ATTENTION,
        kv_dtype: str | None = None,
    ) -> None:
        self.block_size = block_size
        self.pool = pool
        self.spec = spec
        self.kv_dtype = kv_dtype
        self.layers: dict[int, KVBlocks] = {}
        self.released: dict[int, KVBlocks] = {}
        self._reservation: Reservation | None = None
        self._copier = BlockCopier()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers."""
        return sum(map(_BLOCK_BYTES, self.layers.values()))

    @property
    def num_allocated_blocks(self) -> int:
        """Blocks for which every layer has allocated memory."""
        return min(map(_NUM_BLOCKS, self.layers.values()), default=0)

    @property
    def is_elastic(self) -> bool:
        """Whether blocks take no memory until first used."""
        return all(map(_IS_ELASTIC, self.layers.values()))

    @property
    def nbytes(self) -> int:
        """Allocated bytes, of used and unused blocks."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        return (tensor for layer in self.layers.values() for tensor in layer.data)

    def reserve(self, reservation: Reservation, can_drop: bool) -> None:
        """Sets the sizes of layers that are allocated or grown from now on. With `can_drop`, if the
        reservation is larger than the previous one, also drops allocated and released layers that
        are too small for it. `can_drop` is allowed only while no block is used or cached."""
        previous, self._reservation = self._reservation, reservation
        num_blocks = reservation.num_blocks[self.spec]
        if can_drop and (previous is None or previous.num_blocks.get(self.spec, 0) < num_blocks):
            self.layers, self.released = (
                {index: layer for index, layer in layers.items() if layer.num_blocks >= num_blocks}
                for layers in (self.layers, self.released)
            )

    def _num_reserved(self, block_bytes: int, device: torch.device) -> int:
        """Returns how many blocks of `block_bytes` bytes to reserve for a layer."""
        reservation = self._reservation
        if reservation is None:
            return 0
        return reservation.num_layer_blocks(self.spec, block_bytes, device)

    def promote(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        """Converts layer `index` to dtypes that hold both the stored and the new K/V, and returns
        its blocks. Raises `ValueError` if heads, dims or device differ, and the errors of `make` if
        memory runs out."""
        layer = self.layers[index]
        stored_sizes = sizes_of(layer.keys, layer.values)
        for stored_size, new_size in zip(stored_sizes, sizes_of(keys, values)):
            if stored_size != new_size:
                raise ValueError(
                    f"layer {index} stores (heads, dim, device) {stored_size}, but the new keys or"
                    f" values have {new_size}: use one cache per model"
                )
        wider_keys, wider_values = layer.widened_states(keys, values)
        dtypes = (wider_keys.dtype, wider_values.dtype)
        if dtypes == layer.dtypes:
            return layer
        if layer.quantized_dtype is not None:
            promoted_layer = replace(layer, dtypes=dtypes)
        else:
            promoted_layer = self._allocate(layer.num_blocks, wider_keys, wider_values)
            # later blocks have not been written to: copying them would commit their memory
            pool_blocks = slice(self.pool.num_blocks)
            promoted_layer.keys[pool_blocks] = layer.keys[pool_blocks]
            promoted_layer.values[pool_blocks] = layer.values[pool_blocks]
        self.layers[index] = promoted_layer
        return promoted_layer

    def grow(self, num_blocks: int, max_blocks: int) -> None:
        """Grows every layer with fewer than `num_blocks` blocks: if memory allows, to the reserved
        size or by half, whichever is more, but not beyond `max_blocks`; otherwise to `num_blocks`.
        Raises the errors of `make` if memory runs out."""
        for index, layer in self.layers.items():
            old_size = layer.num_blocks
            if old_size < num_blocks:
                num_reserved = self._num_reserved(layer.block_bytes, layer.keys.device)
                preferred_size = max(old_size + old_size // 2, num_reserved)
                new_size = max(num_blocks, min(preferred_size, max_blocks))
                try:
                    self.layers[index] = self._grown(layer, new_size)
                except (MemoryError, RuntimeError) as error:  # torch raises `RuntimeError`
                    if is_interrupt(error):
                        raise
                    self.layers[index] = self._grown(layer, num_blocks)

    def _grown(self, layer: KVBlocks, num_blocks: int) -> KVBlocks:
        return layer.grown(num_blocks)

    def _allocate(self, num_blocks: int, keys: Tensor, values: Tensor) -> KVBlocks:
        return KVBlocks.allocate(
            num_blocks,
            self.block_size,
            keys,
            values,
            kv_dtype=self.kv_dtype,
        )

    def outline(self, keys: Tensor, values: Tensor) -> KVBlocks:
        """Returns one block for K/V `(batch, heads, n, dim)` like these, on the meta device."""
        empty_keys = keys[:, :, :0].to("meta")
        empty_values = values[:, :, :0].to("meta")
        return self._allocate(1, empty_keys, empty_values)

    def make(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        """Allocates layer `index` for K/V `(batch, heads, n, dim)` like these, with all blocks of
        the pool and as many reserved blocks as memory allows, or reuses a released layer that fits.
        Returns the layer's blocks. If memory runs out, raises `MemoryError`, or torch's
        `RuntimeError`."""
        block_bytes = self.outline(keys, values).block_bytes
        num_reserved = self._num_reserved(block_bytes, keys.device)
        min_blocks = self.pool.num_blocks
        num_blocks = num_expected = max(min_blocks, num_reserved)
        # a released layer is reused even if it has fewer blocks than are reserved, since recorded
        # steps need its addresses, and the reserved number varies with the free memory
        layer = self.released.pop(index, None)
        if layer is not None and (layer.num_blocks < min_blocks or not layer.fits(keys, values)):
            layer = None  # frees its addresses
        while layer is None:
            try:
                layer = self._allocate(num_blocks, keys, values)
            except (MemoryError, RuntimeError) as error:  # torch raises `RuntimeError`
                if num_blocks == min_blocks or is_interrupt(error):
                    raise
                num_blocks = max(min_blocks, num_blocks // 2)
        if num_blocks < num_expected and self._reservation is not None:
            # less memory is free than the system reported: divide it among the layers
            layer = None
            self._reservation.set_limit(num_blocks * block_bytes)
            num_reserved = self._num_reserved(block_bytes, keys.device)
            num_blocks = max(min_blocks, num_reserved)
            layer = self._allocate(num_blocks, keys, values)
        self.layers[index] = layer
        return layer

    def clear(self) -> None:
        """Frees all memory. Layers that can keep their addresses without memory move to `released`.
        No table may hold a block."""
        released = dict(self.released)
        for index, layer in self.layers.items():
            if layer.rows is None and discard(layer.data):
                released[index] = layer
        self.layers, self.released = {}, released
        if self._reservation is not None:
            self._reservation.reset()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies block `source` to block `target` in every layer, for each pair, reading all
        sources before writing."""
        self._copier.copy(self._tensors(), copies)


def storage_of(
    config: PagedConfig, spec: GroupSpec, block_size: int, before_move: Callable[[], None]
) -> Storage:
    """Returns the storage that a config selects. Implements `seams.StorageFactory`."""
    room = _room(config)
    if room is not None:
        return room.make_storage(config, spec, block_size, before_move)
    return BlockStorage(block_size, BlockPool(), spec, config.kv_dtype)


def fit_blocks(config: PagedConfig, model_config: Any, device: torch.device) -> PagedConfig:
    """Returns `config` with the smallest block size that its storage allows for this model, or
    unchanged if its block size is already that large. Raises `ValueError` if the device or the
    model does not support the storage."""
    room = _room(config)
    return config if room is None else room.fit_blocks(config, model_config, device)


def _room(config: PagedConfig) -> rooms.VirtualRoom | None:
    """Returns the optional package that makes a config's storage; `None` for plain blocks."""
    if config.storage == "blocks":
        return None
    return rooms.room("virtual", f"`storage={config.storage!r}`")
