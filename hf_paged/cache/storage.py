"""Block tensors of the layers of one layer group: allocation, growth, block copies and the K/V store."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import psutil
import torch
from torch import Tensor

from ..kernels import cpp, quantized, uses_triton
from ..kernels.cpp import attention as cpp_attention
from ..kernels.triton import DTYPES
from . import budget, pages
from .copies import BlockCopies
from .groups import FULL_ATTENTION, GroupSpec

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]
MIN_RESERVED_BYTES = 32 << 20  # the C library also maps larger allocations individually
_UNLIMITED = -1 if resource is None else resource.RLIM_INFINITY

Look: TypeAlias = tuple[Any, ...]
Store: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(eq=False)
class KVBlocks:
    """Blocks of one layer: `keys` and `values` `(num_blocks, heads, block_size, dim)` as views of `data`, for K/V of
    `dtypes`, which may be stored in another dtype (`GroupSpec.storage_dtype`). If K and V agree in heads, dims and
    dtype, `data` is one tensor `(num_blocks, 2 * kv_heads, block_size, head_dim)`, K heads first; if only the dims
    differ (MLA: latent and rotary key), one `(num_blocks, kv_heads, block_size, key_dim + value_dim)`; else two. With
    quantization, `data` are byte tiles `(num_blocks, heads, tile_bytes)`, which include the scales
    (`kernels.quantized`): one tensor for a latent and its rotary key, two for other K and V of different dims."""

    data: tuple[Tensor, ...]
    keys: Tensor
    values: Tensor
    dtypes: tuple[torch.dtype, torch.dtype] = ()  # type: ignore[assignment]
    look: Look | None = field(default=None, init=False, repr=False)
    """`looks` of the K/V that were last stored, which these blocks fit."""
    quantized_dtype: torch.dtype | None = field(default=None, init=False)
    """Dtype of the codes, if blocks are quantized."""
    shares_scales: bool = field(default=False, init=False)
    """Whether keys and values are quantized side by side with one common scale."""
    rows: Any = field(default=None, init=False, repr=False)
    """With virtual storage, the rows as contiguous tensors (`virtual.LayerRows`)."""
    attention: cpp_attention.Attention | None = field(default=None, init=False, repr=False)
    """The prepared C++ kernel call on these blocks, reused by calls with the same tensor layouts."""

    _store: Store | None = field(default=None, init=False, repr=False)
    _latents: KVBlocks | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.dtypes = self.dtypes or (self.keys.dtype, self.values.dtype)
        self.quantized_dtype = self.keys.dtype if quantized.is_quantized(self.keys) else None
        self.shares_scales = self.quantized_dtype is not None and self.keys.stride(2) != self.keys.shape[3]

    @property
    def pair(self) -> tuple[tuple[Tensor, torch.dtype], tuple[Tensor, torch.dtype]]:
        """Keys and values, each with the dtype that the model computes."""
        return (self.keys, self.dtypes[0]), (self.values, self.dtypes[1])

    @property
    def is_exact(self) -> bool:
        """Whether blocks hold every number of K/V of `dtypes`: they are neither quantized nor of a narrower dtype."""
        if self.quantized_dtype is not None:
            return False
        return all(torch.promote_types(stored.dtype, dtype) == stored.dtype for stored, dtype in self.pair)

    @property
    def tiles(self) -> tuple[Tensor, ...]:
        """`data` as `(num_blocks, heads, block_size, dim)`."""
        dtype = self.quantized_dtype
        return self.data if dtype is None else tuple(quantized.codes(x, self.keys.shape[2], dtype) for x in self.data)

    def store(self, look: Look, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Writes K/V to `slots` (`choose_store`). Reuses the chosen function while `look` is the same, since choosing
        takes longer than a small store."""
        blocks = self
        if self.rows is not None:
            self.rows.settle()
        if self.shares_scales:
            blocks, keys = self.latents, torch.cat((keys, values), dim=3)
            values = keys
        if look != self.look or self._store is None:
            self._store, self.look = choose_store(keys, values, blocks.keys, blocks.values, slots), look
        self._store(keys, values, slots)

    def no_states(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns empty keys and values (no rows, no tokens) with the heads, dims and dtypes of the stored ones."""
        keys, values = (x.new_empty(0, x.shape[1], 0, x.shape[3], dtype=dtype, device=device) for x, dtype in self.pair)
        return keys, values

    def at(self, block_ids: list[int]) -> KVBlocks:
        """Returns copies of some blocks."""
        return self.like([tensor[block_ids] for tensor in self.data])

    def put_blocks(self, block_ids: Tensor | list[int], found: KVBlocks) -> None:
        """Writes all blocks of `found`, of the same heads and dims on any device, to `block_ids`."""
        if self.rows is not None:
            self.rows.settle()
        if self.quantized_dtype is not None:
            for target, source in zip(self.data, found.data):
                target[block_ids] = source.to(target.device)
        else:
            self.keys[block_ids], self.values[block_ids] = found.keys.to(self.keys), found.values.to(self.values)

    @property
    def latents(self) -> KVBlocks:
        """Keys and values, stored side by side, as one tensor used both as keys and as values."""
        if self._latents is None:
            (tile,) = self.tiles
            self._latents = KVBlocks(self.data, tile, tile, self.dtypes)
        return self._latents

    @property
    def block_bytes(self) -> int:
        return sum(tensor[0].numel() * tensor.element_size() for tensor in self.data if tensor.shape[0])

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        keys: Tensor,
        values: Tensor,
        spec: GroupSpec = FULL_ATTENTION,
        kv_dtype: str | None = None,
    ) -> KVBlocks:
        """Allocates uninitialised blocks for K/V like `keys` and `values`, each `(batch, heads, n, dim)`; `kv_dtype` as
        in `PagedConfig`."""
        (heads, key_dim), (value_heads, value_dim) = keys.shape[1::2], values.shape[1::2]
        if kv_dtype is not None:
            if (heads, key_dim) == (value_heads, value_dim):
                widths = [(2 * heads, key_dim)]
            elif heads == value_heads == 1:
                widths = [(1, key_dim + value_dim)]
            else:
                widths = [(heads, key_dim), (value_heads, value_dim)]
            sizes = ((num_blocks, count, quantized.tile_bytes(block_size, dim)) for count, dim in widths)
            tiles = tuple(_empty(size, torch.uint8, keys.device) for size in sizes)
            dtype = quantized.DTYPES[kv_dtype]
            return cls.view(tiles, heads, key_dim, (keys.dtype, values.dtype), (block_size, dtype))
        stored = [spec.storage_dtype(dtype) for dtype in _attended(keys.dtype, values.dtype)]
        if (heads, stored[0]) != (value_heads, stored[1]):
            shapes = [(heads, block_size, key_dim), (value_heads, block_size, value_dim)]
        elif key_dim == value_dim:
            shapes = [(2 * heads, block_size, key_dim)]
        else:
            shapes = [(heads, block_size, key_dim + value_dim)]
        data = tuple(_empty((num_blocks, *shape), dtype, keys.device) for shape, dtype in zip(shapes, stored))
        return cls.view(data, heads, key_dim, (keys.dtype, values.dtype))

    @classmethod
    def view(
        cls,
        data: tuple[Tensor, ...],
        heads: int,
        key_dim: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        codes: tuple[int, torch.dtype] | None = None,
    ) -> KVBlocks:
        """Makes blocks whose keys, of `heads` and `key_dim`, and values are views of `data`. For quantized blocks,
        `codes` is the block size and the codes' dtype."""
        tiles = data if codes is None else tuple(quantized.codes(tensor, *codes) for tensor in data)
        if len(tiles) == 2:
            return cls(data, *tiles, dtypes)
        (both,) = tiles
        if both.shape[1] == 2 * heads:
            return cls(data, both[:, :heads], both[:, heads:], dtypes)
        return cls(data, both[..., :key_dim], both[..., key_dim:], dtypes)

    def like(self, data: Sequence[Tensor]) -> KVBlocks:
        return self.view(tuple(data), *self.form)

    @property
    def form(self) -> tuple[Any, ...]:
        """The arguments of `view` after the tensors."""
        (_, heads, block_size, dim), dtype = self.keys.shape, self.quantized_dtype
        return heads, dim, self.dtypes, None if dtype is None else (block_size, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return KVBlocks.view, (self.data, *self.form)

    def grown(self, num_blocks: int) -> KVBlocks:
        tensors = [_empty((num_blocks, *tensor.shape[1:]), tensor.dtype, tensor.device) for tensor in self.data]
        for new, old in zip(tensors, self.data):
            new[: old.shape[0]] = old
        return self.like(tensors)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # the tensor outlives the call: one made in inference mode could not be written to outside it
    with torch.inference_mode(False):
        size = math.prod(shape) * dtype.itemsize
        if device.type == "cpu" and sys.platform == "linux" and size >= MIN_RESERVED_BYTES:
            return pages.reserved(size).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)


def _sizes(keys: Tensor, values: Tensor) -> list[tuple[int, int, torch.device]]:
    return [(states.shape[1], states.shape[3], states.device) for states in (keys, values)]


class Reservation:
    """Expected memory use of a call or an engine, so that memory need not grow step by step: `num_blocks[spec]` blocks
    per layer, within `share` of the memory that is free when the first layer is allocated. On devices where allocation
    commits memory, at most `live[spec]` blocks, which running sequences hold. Memory that layers do not need is divided
    among the other layers, of which `num_layers[spec]` have that spec."""

    def __init__(
        self,
        num_blocks: dict[GroupSpec, int],
        live: dict[GroupSpec, int],
        num_layers: dict[GroupSpec, int],
        share: float,
    ) -> None:
        self.num_blocks, self._live, self._num_layers = num_blocks, live, num_layers
        self._share, self._budget = share, -1  # bytes; -1: not known yet

    def limit(self, free: int) -> None:
        """Sets the budget from `free` bytes of memory."""
        self._budget = int(self._share * free)

    def renew(self) -> None:
        """Makes the next `num_rows` query free memory again."""
        self._budget = -1

    def num_rows(self, spec: GroupSpec, block_bytes: int, device: torch.device) -> int:
        """Returns the blocks to allocate for a layer with this spec, whose blocks take `block_bytes`."""
        if self._budget < 0:
            try:
                self.limit(free_bytes(device))
            except ValueError:  # unknown: allocate blocks as they are used
                self.limit(0)
            left = budget.left()
            if left is not None and not commits_when_touched(device):
                self._budget = min(self._budget, left)
        most = self.num_blocks
        if not commits_when_touched(device):
            most = {each: min(most[each], count) for each, count in self._live.items()}
        left = self._budget // max(block_bytes, 1)
        others = sorted(most[each] for each, count in self._num_layers.items() for _ in range(count))
        for number, wanted in enumerate(others):
            even = left // (len(others) - number)
            if wanted > even:
                return min(most[spec], even)
            left -= wanted
        return most[spec]


def commits_when_touched(device: torch.device) -> bool:
    """Whether allocated memory is committed only when first written to."""
    return device.type == "cpu"


class Storage:
    """The block tensors of one layer group, one `KVBlocks` per layer, allocated when the layer first writes, at the
    reserved size. When full they grow to the reserved size, or by half."""

    def __init__(self, block_size: int, spec: GroupSpec = FULL_ATTENTION, kv_dtype: str | None = None) -> None:
        self.block_size, self.spec, self.kv_dtype = block_size, spec, kv_dtype
        self.capacity = 0
        self.layers: dict[int, KVBlocks] = {}
        self._reservation: Reservation | None = None
        self._copies = BlockCopies()

    @property
    def block_bytes(self) -> int:
        return sum(layer.block_bytes for layer in self.layers.values())

    @property
    def num_rows(self) -> int:
        """Blocks for which every layer has allocated memory."""
        return min((layer.keys.shape[0] for layer in self.layers.values()), default=0)

    @property
    def is_elastic(self) -> bool:
        """Whether blocks take no memory until first used."""
        return all(commits_when_touched(layer.keys.device) for layer in self.layers.values())

    @property
    def nbytes(self) -> int:
        """Allocated bytes, of used and unused blocks."""
        return sum(tensor.nbytes for layer in self.layers.values() for tensor in layer.data)

    def reserve(self, reservation: Reservation, drops: bool) -> None:
        """Sets the sizes of layers allocated or grown from now on. With `drops`, allowed only while no block is used or
        cached, drops smaller layers if more blocks are wanted than before."""
        before, self._reservation = self._reservation, reservation
        num_blocks = reservation.num_blocks[self.spec]
        if drops and (before is None or before.num_blocks.get(self.spec, 0) < num_blocks):
            self.layers = {index: layer for index, layer in self.layers.items() if layer.keys.shape[0] >= num_blocks}

    def _num_reserved(self, block_bytes: int, device: torch.device) -> int:
        reservation = self._reservation
        return 0 if reservation is None else reservation.num_rows(self.spec, block_bytes, device)

    def promote(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        """Converts layer `index` to dtypes that hold both the stored and the new K/V, and returns its blocks. Raises
        `ValueError` if heads, dims or device differ."""
        layer = self.layers[index]
        for held, new in zip(_sizes(layer.keys, layer.values), _sizes(keys, values)):
            if held != new:
                raise ValueError(
                    f"layer {index} holds states of (heads, dim, device) {held}, the new ones have {new}: use a cache "
                    "of their own for another model"
                )
        key_dtype, value_dtype = map(torch.promote_types, layer.dtypes, (keys.dtype, values.dtype))
        if (key_dtype, value_dtype) != layer.dtypes and layer.quantized_dtype is not None:
            self.layers[index] = layer = replace(layer, dtypes=(key_dtype, value_dtype))
        elif (key_dtype, value_dtype) != layer.dtypes:
            like = keys[:, :, :0].to(key_dtype), values[:, :, :0].to(value_dtype)
            wider = self._allocate(layer.keys.shape[0], *like)
            used = slice(self.capacity)  # later blocks were never written: copying would commit their memory
            wider.keys[used], wider.values[used] = layer.keys[used], layer.values[used]
            self.layers[index] = layer = wider
        return layer

    def grow(self, num_blocks: int, most: int) -> None:
        """Makes room for `num_blocks` blocks in every layer; grows to the reserved size or by half, whichever is more,
        but beyond `num_blocks` no further than `most`."""
        for index, layer in self.layers.items():
            rows = layer.keys.shape[0]
            if rows < num_blocks:
                reserved = self._num_reserved(layer.block_bytes, layer.keys.device)
                wanted = max(num_blocks, min(max(rows + rows // 2, reserved), most))
                try:
                    self.layers[index] = self._grown(layer, wanted)
                except (MemoryError, RuntimeError):  # torch raises the latter
                    self.layers[index] = self._grown(layer, num_blocks)
        self.capacity = max(self.capacity, num_blocks)

    def _grown(self, layer: KVBlocks, num_blocks: int) -> KVBlocks:
        return layer.grown(num_blocks)

    def find(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks | None:
        layer = self.layers.get(index)
        if layer is None or layer.dtypes != (keys.dtype, values.dtype):
            return None
        return layer if _sizes(layer.keys, layer.values) == _sizes(keys, values) else None

    def _allocate(self, num_blocks: int, keys: Tensor, values: Tensor) -> KVBlocks:
        return KVBlocks.allocate(num_blocks, self.block_size, keys, values, self.spec, self.kv_dtype)

    def block_bytes_of(self, keys: Tensor, values: Tensor) -> int:
        """Returns the bytes of a block of a layer with K/V like these."""
        return self._allocate(1, *(x[:, :, :0].to("meta") for x in (keys, values))).block_bytes

    def make(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        block_bytes = self.block_bytes_of(keys, values)
        num_blocks = max(self.capacity, self._num_reserved(block_bytes, keys.device))
        layer, wanted = None, num_blocks
        while layer is None:
            try:
                layer = self._allocate(num_blocks, keys, values)
            except (MemoryError, RuntimeError):  # torch raises the latter
                if num_blocks == self.capacity:
                    raise
                num_blocks = max(self.capacity, num_blocks // 2)
        if num_blocks < wanted and self._reservation is not None:
            # less memory than the system reports: divide what there is among the layers
            layer = None
            self._reservation.limit(num_blocks * block_bytes)
            num_blocks = max(self.capacity, self._num_reserved(block_bytes, keys.device))
            layer = self._allocate(num_blocks, keys, values)
        self.layers[index] = layer
        return layer

    def clear(self) -> None:
        """Frees all memory. No table may hold a block."""
        self.layers, self.capacity = {}, 0
        if self._reservation is not None:
            self._reservation.renew()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies block `source` to block `target` in every layer, for each pair; all are read before one is written."""
        self._copies.make((tensor for layer in self.layers.values() for tensor in layer.data), copies)


def free_bytes(device: torch.device) -> int:
    """Returns the bytes of free memory on `device`; on the CPU at most what the process may still map (`ulimit -v`).
    Raises `ValueError` for a device whose free memory torch does not report."""
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    if device.type != "cpu":
        tell = getattr(getattr(torch, device.type, None), "mem_get_info", None)
        if tell is None:
            message = f"torch does not tell how much memory is free on {device}: leave `memory_fraction` out, set "
            raise ValueError(message + "`num_blocks`")
        return int(tell(device)[0])
    free = int(psutil.virtual_memory().available)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0] if resource is not None else _UNLIMITED
    return free if limit == _UNLIMITED else max(0, min(free, limit - psutil.Process().memory_info().vms))


def limits_addresses() -> bool:
    """Whether the process's address space is limited (`ulimit -v`)."""
    return resource is not None and resource.getrlimit(resource.RLIMIT_AS)[0] != _UNLIMITED


def trim() -> None:
    """Returns freed host memory that the C library still holds to the system. (It unmaps large tensors when they are
    freed, but keeps the memory of small ones.)"""
    if (malloc_trim := _malloc_trim()) is not None:
        malloc_trim(0)


@functools.cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or its cause, says that an allocation failed: torch has no single type for that."""
    if error.__cause__ is not None and is_out_of_memory(error.__cause__):
        return True
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


# from the CPU allocators (Linux and macOS, Windows) and from devices that raise a plain RuntimeError
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def _attended(keys: torch.dtype, values: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtypes of K and V in attention. Under autocast, rotated keys stay in float32 beside values in half
    precision, and attention rounds both to half precision."""
    is_mixed = keys is torch.float32 and values in (torch.bfloat16, torch.float16)
    return (values, values) if is_mixed else (keys, values)


def looks(keys: Tensor, values: Tensor) -> Look:
    """Returns a key that is equal for K/V that fit the same blocks and the same store function."""
    return keys.shape, keys.stride(), keys.dtype, keys.device, values.shape, values.stride(), values.dtype


def choose_store(keys: Tensor, values: Tensor, key_blocks: Tensor, value_blocks: Tensor, slots: Tensor) -> Store:
    """Returns a function that writes K/V `(batch, heads, n, dim)`, any strides, into blocks `(num_blocks, heads,
    block_size, dim)`, in their dtype or quantized, for arguments with the same `looks`. `slots` `(batch, n)` int64:
    `block_id * block_size + offset` of each token, each at most once; negative for tokens that are not stored."""
    chosen = store_portable
    fits = keys.size(1) == values.size(1)
    if uses_triton(key_blocks):
        from ..kernels.triton import store as triton  # needs Triton

        tensors = (keys, values, key_blocks, value_blocks)
        taken = (*DTYPES, *quantized.LARGEST)
        if fits and all(x.dtype in taken and x.device == key_blocks.device for x in tensors):
            chosen = triton.store
    elif fits and cpp.is_available():
        casts = (keys.dtype, values.dtype) != (key_blocks.dtype, value_blocks.dtype)
        if quantized.is_quantized(key_blocks):
            with contextlib.suppress(TypeError):  # the kernel does not support such K/V
                return cpp_attention.Store(keys, values, key_blocks, value_blocks, slots)
            return _store_again(chosen, key_blocks, value_blocks)
        with contextlib.suppress(TypeError):  # the kernel does not support such tensors
            stored = keys.to(key_blocks.dtype), values.to(value_blocks.dtype)
            store: Store = cpp_attention.Store(*stored, key_blocks, value_blocks, slots)
            return _cast_first(store, key_blocks.dtype, value_blocks.dtype) if casts else store

    return _store_again(chosen, key_blocks, value_blocks)


def _store_again(chosen: Callable[..., None], key_blocks: Tensor, value_blocks: Tensor) -> Store:
    return lambda keys, values, slots: chosen(keys, values, key_blocks, value_blocks, slots)


def _cast_first(store: Store, key_dtype: torch.dtype, value_dtype: torch.dtype) -> Store:
    return lambda keys, values, slots: store(keys.to(key_dtype), values.to(value_dtype), slots)


def store_portable(keys: Tensor, values: Tensor, key_blocks: Tensor, value_blocks: Tensor, slots: Tensor) -> None:
    """Writes K/V as `choose_store` describes, in plain PyTorch on any device."""
    slots = slots.to(key_blocks.device)
    rows, tokens = (slots >= 0).nonzero(as_tuple=True)
    slot = slots[rows, tokens]
    block_ids, offsets = slot // key_blocks.shape[2], slot % key_blocks.shape[2]
    index = block_ids, slice(None), offsets
    quantized.write(key_blocks, index, keys[rows, :, tokens])
    quantized.write(value_blocks, index, values[rows, :, tokens])
