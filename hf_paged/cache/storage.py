"""Block tensors of the layers of one layer group: allocation, growth, block copies and the K/V
store."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import psutil
import torch
from torch import Tensor

from ..interrupts import is_interrupt
from ..kernels import cpp, quantized, uses_triton
from ..kernels.cpp import attention as cpp_attention
from ..kernels.triton import DTYPES
from ..kernels.triton.launch import LaunchFailedError
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
    """Blocks of one layer: `keys` and `values` `(num_blocks, heads, block_size, dim)` as views of
    `data`, for K/V of `dtypes`, which may be stored in another dtype (`GroupSpec.storage_dtype`).
    If K and V agree in heads, dims and dtype, `data` is one tensor `(num_blocks, 2 * kv_heads,
    block_size, head_dim)`, K heads first; if only the dims differ (MLA: latent and rotary key), one
    `(num_blocks, kv_heads, block_size, key_dim + value_dim)`; else two. With quantization, `data`
    are byte tiles `(num_blocks, heads, tile_bytes)`, which include the scales
    (`kernels.quantized`): one tensor for a latent and its rotary key, two for other K and V of
    different dims."""

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
    """The prepared C++ kernel call on these blocks, reused by calls with the same tensor
    layouts."""

    _store: Store | None = field(default=None, init=False, repr=False)
    _latents: KVBlocks | None = field(default=None, init=False, repr=False)
    # numbers that each growth of a pool adds up over all layers
    num_blocks: int = field(default=0, init=False, repr=False)
    block_bytes: int = field(default=0, init=False, repr=False)
    # whether blocks take no memory until first used
    is_elastic: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        is_quantized = quantized.is_quantized(self.keys)
        self.dtypes = self.dtypes or (self.keys.dtype, self.values.dtype)
        self.quantized_dtype = self.keys.dtype if is_quantized else None
        self.shares_scales = is_quantized and self.keys.stride(2) != self.keys.shape[3]
        self.num_blocks = self.keys.shape[0]
        for tensor in self.data:
            if tensor.shape[0]:
                self.block_bytes += tensor[0].numel() * tensor.element_size()
        self.is_elastic = commits_when_touched(self.keys.device)

    @property
    def pair(self) -> tuple[tuple[Tensor, torch.dtype], tuple[Tensor, torch.dtype]]:
        """Keys and values, each with the dtype that the model computes."""
        key_dtype, value_dtype = self.dtypes
        return (self.keys, key_dtype), (self.values, value_dtype)

    @property
    def is_exact(self) -> bool:
        """Whether blocks hold every number of K/V of `dtypes`: they are neither quantized nor of a
        narrower dtype."""
        if self.quantized_dtype is not None:
            return False
        for stored, dtype in self.pair:
            if torch.promote_types(stored.dtype, dtype) != stored.dtype:
                return False
        return True

    @property
    def tiles(self) -> tuple[Tensor, ...]:
        """`data` as `(num_blocks, heads, block_size, dim)`."""
        dtype = self.quantized_dtype
        if dtype is None:
            return self.data
        block_size = self.keys.shape[2]
        return tuple(quantized.codes(tensor, block_size, dtype) for tensor in self.data)

    def store(
        self,
        look: Look,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> None:
        """Writes K/V to `slots` (`choose_store`). Reuses the chosen function while `look` is the
        same, since choosing takes longer than a small store."""
        blocks = self
        if self.rows is not None:
            self.rows.settle()
        if self.shares_scales:
            blocks = self.latents
            keys = torch.cat((keys, values), dim=3)
            values = keys
        if look != self.look or self._store is None:
            chosen = choose_store(keys, values, blocks.keys, blocks.values, slots)
            self._store, self.look = chosen, look
        self._store(keys, values, slots)

    def no_states(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns empty keys and values (no rows, no tokens) with the heads, dims and dtypes of the
        stored ones."""
        empty = []
        for blocks, dtype in self.pair:
            _, heads, _, dim = blocks.shape
            states = blocks.new_empty(0, heads, 0, dim, dtype=dtype, device=device)
            empty.append(states)
        keys, values = empty
        return keys, values

    def at(self, block_ids: list[int]) -> KVBlocks:
        """Returns copies of some blocks."""
        return self.like([tensor[block_ids] for tensor in self.data])

    def put_blocks(self, block_ids: Tensor | list[int], found: KVBlocks) -> None:
        """Writes all blocks of `found`, of the same heads and dims on any device, to
        `block_ids`."""
        if self.rows is not None:
            self.rows.settle()
        if self.quantized_dtype is not None:
            for target, source in zip(self.data, found.data):
                target[block_ids] = source.to(target.device)
        else:
            keys = found.keys.to(self.keys)
            values = found.values.to(self.values)
            self.keys[block_ids], self.values[block_ids] = keys, values

    @property
    def latents(self) -> KVBlocks:
        """Keys and values, stored side by side, as one tensor used both as keys and as values."""
        if self._latents is None:
            (tile,) = self.tiles
            self._latents = KVBlocks(self.data, tile, tile, self.dtypes)
        return self._latents

    @property
    def plain_token_bytes(self) -> int:
        """Bytes of a token in the dtypes that the model computes, as transformers' own cache stores
        it."""
        num_bytes = 0
        for blocks, dtype in self.pair:
            _, heads, _, dim = blocks.shape
            num_bytes += heads * dim * dtype.itemsize
        return num_bytes

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
        """Allocates uninitialised blocks for K/V like `keys` and `values`, each `(batch, heads, n,
        dim)`; `kv_dtype` as in `PagedConfig`. Raises `ValueError` for sizes that cannot be
        quantized."""
        heads, key_dim = keys.shape[1::2]
        value_heads, value_dim = values.shape[1::2]
        dtypes = (keys.dtype, values.dtype)
        device = keys.device
        if kv_dtype is not None:
            if (heads, key_dim) == (value_heads, value_dim):
                widths = [(2 * heads, key_dim)]
            elif heads == value_heads == 1:
                widths = [(1, key_dim + value_dim)]
            else:
                widths = [(heads, key_dim), (value_heads, value_dim)]
            shapes = []
            for count, dim in widths:
                quantized.check_sizes(block_size, dim)
                num_bytes = quantized.tile_bytes(block_size, dim)
                shapes.append((num_blocks, count, num_bytes))
            tiles = tuple(_empty(shape, torch.uint8, device) for shape in shapes)
            codes = (block_size, quantized.DTYPES[kv_dtype])
            return cls.view(tiles, heads, key_dim, dtypes, codes)
        attended = _attended(*dtypes)
        stored = [spec.storage_dtype(dtype) for dtype in attended]
        key_dtype, value_dtype = stored
        if (heads, key_dtype) != (value_heads, value_dtype):
            shapes = [
                (heads, block_size, key_dim),
                (value_heads, block_size, value_dim),
            ]
        elif key_dim == value_dim:
            shapes = [(2 * heads, block_size, key_dim)]
        else:
            shapes = [(heads, block_size, key_dim + value_dim)]
        tensors = zip(shapes, stored)
        data = tuple(_empty((num_blocks, *shape), dtype, device) for shape, dtype in tensors)
        return cls.view(data, heads, key_dim, dtypes)

    @classmethod
    def view(
        cls,
        data: tuple[Tensor, ...],
        heads: int,
        key_dim: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        codes: tuple[int, torch.dtype] | None = None,
    ) -> KVBlocks:
        """Makes blocks whose keys, of `heads` and `key_dim`, and values are views of `data`. For
        quantized blocks, `codes` is the block size and the codes' dtype."""
        tiles = data
        if codes is not None:
            tiles = tuple(quantized.codes(tensor, *codes) for tensor in data)
        if len(tiles) == 2:
            return cls(data, *tiles, dtypes)
        (both,) = tiles
        if both.shape[1] == 2 * heads:
            keys = both[:, :heads]
            values = both[:, heads:]
        else:
            keys = both[..., :key_dim]
            values = both[..., key_dim:]
        return cls(data, keys, values, dtypes)

    def like(self, data: Sequence[Tensor]) -> KVBlocks:
        return self.view(tuple(data), *self.form)

    @property
    def form(self) -> tuple[Any, ...]:
        """The arguments of `view` after the tensors."""
        _, heads, block_size, dim = self.keys.shape
        codes = None
        if self.quantized_dtype is not None:
            codes = (block_size, self.quantized_dtype)
        return heads, dim, self.dtypes, codes

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.data, *self.form)
        return KVBlocks.view, arguments

    def grown(self, num_blocks: int) -> KVBlocks:
        tensors = [
            _empty((num_blocks, *tensor.shape[1:]), tensor.dtype, tensor.device)
            for tensor in self.data
        ]
        for new, old in zip(tensors, self.data):
            new[: old.shape[0]] = old
        return self.like(tensors)


class LayerKV(NamedTuple):
    """What a layer stores of each token: heads, head dim and dtype of its keys, and of its
    values."""

    spec: GroupSpec
    layer: int
    keys: tuple[int, int, torch.dtype]
    values: tuple[int, int, torch.dtype]


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # the tensor outlives the call: one made in inference mode could not be written to outside it
    with torch.inference_mode(False):
        size = math.prod(shape) * dtype.itemsize
        is_on_linux_host = device.type == "cpu" and sys.platform == "linux"
        if is_on_linux_host and size >= MIN_RESERVED_BYTES:
            memory = pages.reserved(size)
            return memory.view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)


def _sizes(keys: Tensor, values: Tensor) -> list[tuple[int, int, torch.device]]:
    return [
        (keys.shape[1], keys.shape[3], keys.device),
        (values.shape[1], values.shape[3], values.device),
    ]


class Reservation:
    """Expected memory use of a call or an engine, so that memory need not grow step by step:
    `num_blocks[spec]` blocks per layer, within `share` of the memory that is free when the first
    layer is allocated. On devices where allocation commits memory, at most `live[spec]` blocks,
    which running sequences hold. Memory that layers do not need is divided among the other layers,
    of which `num_layers[spec]` have that spec."""

    def __init__(
        self,
        num_blocks: dict[GroupSpec, int],
        live: dict[GroupSpec, int],
        num_layers: dict[GroupSpec, int],
        share: float,
    ) -> None:
        self.num_blocks = num_blocks
        self._live = live
        self._num_layers = num_layers
        self._share = share
        self._budget = -1  # bytes; -1: not known yet

    def limit(self, free: int) -> None:
        """Sets the budget from `free` bytes of memory."""
        self._budget = int(self._share * free)

    def renew(self) -> None:
        """Makes the next `num_rows` query free memory again."""
        self._budget = -1

    def num_rows(self, spec: GroupSpec, block_bytes: int, device: torch.device) -> int:
        """Returns the blocks to allocate for a layer with this spec, whose blocks take
        `block_bytes`."""
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
            most = {}
            for other, count in self._live.items():
                most[other] = min(self.num_blocks[other], count)
        left = self._budget // max(block_bytes, 1)
        others: list[int] = []
        for other, count in self._num_layers.items():
            others.extend(most[other] for _ in range(count))
        others.sort()
        for number, wanted in enumerate(others):
            even = left // (len(others) - number)
            if wanted > even:
                return min(most[spec], even)
            left -= wanted
        return most[spec]


def commits_when_touched(device: torch.device) -> bool:
    """Whether allocated memory is committed only when first written to."""
    return device.type == "cpu"


_BLOCK_BYTES = operator.attrgetter("block_bytes")
_NUM_BLOCKS = operator.attrgetter("num_blocks")
_IS_ELASTIC = operator.attrgetter("is_elastic")


class Storage:
    """The block tensors of one layer group, one `KVBlocks` per layer, allocated when the layer
    first writes, at the reserved size. When full they grow to the reserved size, or by half."""

    def __init__(
        self,
        block_size: int,
        spec: GroupSpec = FULL_ATTENTION,
        kv_dtype: str | None = None,
    ) -> None:
        self.block_size = block_size
        self.spec = spec
        self.kv_dtype = kv_dtype
        self.capacity = 0
        self.layers: dict[int, KVBlocks] = {}
        self._reservation: Reservation | None = None
        self._copies = BlockCopies()

    @property
    def block_bytes(self) -> int:
        return sum(map(_BLOCK_BYTES, self.layers.values()))

    @property
    def num_rows(self) -> int:
        """Blocks for which every layer has allocated memory."""
        return min(map(_NUM_BLOCKS, self.layers.values()), default=0)

    @property
    def is_elastic(self) -> bool:
        """Whether blocks take no memory until first used."""
        return all(map(_IS_ELASTIC, self.layers.values()))

    @property
    def nbytes(self) -> int:
        """Allocated bytes, of used and unused blocks."""
        layers = self.layers.values()
        tensors = (tensor for layer in layers for tensor in layer.data)
        return sum(tensor.nbytes for tensor in tensors)

    def reserve(self, reservation: Reservation, drops: bool) -> None:
        """Sets the sizes of layers allocated or grown from now on. With `drops`, allowed only while
        no block is used or cached, drops smaller layers if more blocks are wanted than before."""
        before, self._reservation = self._reservation, reservation
        num_blocks = reservation.num_blocks[self.spec]
        if drops and (before is None or before.num_blocks.get(self.spec, 0) < num_blocks):
            self.layers = {
                index: layer
                for index, layer in self.layers.items()
                if layer.keys.shape[0] >= num_blocks
            }

    def _num_reserved(self, block_bytes: int, device: torch.device) -> int:
        reservation = self._reservation
        if reservation is None:
            return 0
        return reservation.num_rows(self.spec, block_bytes, device)

    def promote(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        """Converts layer `index` to dtypes that hold both the stored and the new K/V, and returns
        its blocks. Raises `ValueError` if heads, dims or device differ."""
        layer = self.layers[index]
        held_sizes = _sizes(layer.keys, layer.values)
        new_sizes = _sizes(keys, values)
        for held, new in zip(held_sizes, new_sizes):
            if held != new:
                raise ValueError(
                    f"layer {index} holds states of (heads, dim, device) {held}, the new ones have"
                    f" {new}: use one cache per model"
                )
        key_dtype, value_dtype = layer.dtypes
        key_dtype = torch.promote_types(key_dtype, keys.dtype)
        value_dtype = torch.promote_types(value_dtype, values.dtype)
        dtypes = (key_dtype, value_dtype)
        if dtypes == layer.dtypes:
            return layer
        if layer.quantized_dtype is not None:
            promoted = replace(layer, dtypes=dtypes)
        else:
            no_keys = keys[:, :, :0].to(key_dtype)
            no_values = values[:, :, :0].to(value_dtype)
            num_blocks = layer.keys.shape[0]
            promoted = self._allocate(num_blocks, no_keys, no_values)
            # later blocks were never written: copying would commit their memory
            used = slice(self.capacity)
            promoted.keys[used] = layer.keys[used]
            promoted.values[used] = layer.values[used]
        self.layers[index] = promoted
        return promoted

    def grow(self, num_blocks: int, most: int) -> None:
        """Makes room for `num_blocks` blocks in every layer; grows to the reserved size or by half,
        whichever is more, but beyond `num_blocks` no further than `most`."""
        for index, layer in self.layers.items():
            rows = layer.keys.shape[0]
            if rows < num_blocks:
                reserved = self._num_reserved(layer.block_bytes, layer.keys.device)
                with_headroom = max(rows + rows // 2, reserved)
                wanted = max(num_blocks, min(with_headroom, most))
                try:
                    self.layers[index] = self._grown(layer, wanted)
                except (MemoryError, RuntimeError) as error:  # torch raises the latter
                    if is_interrupt(error):
                        raise
                    self.layers[index] = self._grown(layer, num_blocks)
        self.capacity = max(self.capacity, num_blocks)

    def _grown(self, layer: KVBlocks, num_blocks: int) -> KVBlocks:
        return layer.grown(num_blocks)

    def find(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks | None:
        layer = self.layers.get(index)
        dtypes = (keys.dtype, values.dtype)
        if layer is None or layer.dtypes != dtypes:
            return None
        held_sizes = _sizes(layer.keys, layer.values)
        if held_sizes != _sizes(keys, values):
            return None
        return layer

    def _allocate(self, num_blocks: int, keys: Tensor, values: Tensor) -> KVBlocks:
        return KVBlocks.allocate(
            num_blocks,
            self.block_size,
            keys,
            values,
            spec=self.spec,
            kv_dtype=self.kv_dtype,
        )

    def block_bytes_of(self, keys: Tensor, values: Tensor) -> int:
        """Returns the bytes of a block of a layer with K/V like these."""
        return self._outline(keys, values).block_bytes

    def _outline(self, keys: Tensor, values: Tensor) -> KVBlocks:
        """Returns a block of a layer with K/V like these, on the meta device."""
        no_keys = keys[:, :, :0].to("meta")
        no_values = values[:, :, :0].to("meta")
        return self._allocate(1, no_keys, no_values)

    def outline(self, layers: Iterable[LayerKV]) -> dict[int, KVBlocks]:
        """Returns a block of each of these layers that has this spec, on the meta device."""

        def like(heads: int, dim: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(1, heads, 0, dim, dtype=dtype, device="meta")

        blocks = {}
        for layer in layers:
            if layer.spec == self.spec:
                keys = like(*layer.keys)
                values = like(*layer.values)
                index = layer.layer
                blocks[index] = self._allocate(1, keys, values)
        return blocks

    def make(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        block_bytes = self.block_bytes_of(keys, values)
        num_reserved = self._num_reserved(block_bytes, keys.device)
        num_blocks = max(self.capacity, num_reserved)
        wanted = num_blocks
        layer: KVBlocks | None = None
        while layer is None:
            try:
                layer = self._allocate(num_blocks, keys, values)
            except (MemoryError, RuntimeError) as error:  # torch raises the latter
                if num_blocks == self.capacity or is_interrupt(error):
                    raise
                num_blocks = max(self.capacity, num_blocks // 2)
        if num_blocks < wanted and self._reservation is not None:
            # less memory than the system reports: divide what there is among the layers
            layer = None
            self._reservation.limit(num_blocks * block_bytes)
            num_reserved = self._num_reserved(block_bytes, keys.device)
            num_blocks = max(self.capacity, num_reserved)
            layer = self._allocate(num_blocks, keys, values)
        self.layers[index] = layer
        return layer

    def clear(self) -> None:
        """Frees all memory. No table may hold a block."""
        self.layers, self.capacity = {}, 0
        if self._reservation is not None:
            self._reservation.renew()

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies block `source` to block `target` in every layer, for each pair; all are read
        before one is written."""
        layers = self.layers.values()
        tensors = (tensor for layer in layers for tensor in layer.data)
        self._copies.make(tensors, copies)


def free_bytes(device: torch.device) -> int:
    """Returns the bytes of free memory on `device`, with those that torch's allocator holds in
    reserve; on the CPU at most what the process may still map (`ulimit -v`). Raises `ValueError`
    for a device whose free memory torch does not report."""
    if device.type == "mps":
        most = torch.mps.recommended_max_memory()
        allocated = torch.mps.driver_allocated_memory()
        return max(0, most - allocated)
    if device.type != "cpu":
        module: Any = getattr(torch, device.type, None)
        if not hasattr(module, "mem_get_info"):
            message = (
                f"torch does not tell how much memory is free on {device}: leave `memory_fraction`"
                " out, set "
            )
            raise ValueError(message + "`num_blocks`")
        # freed tensors' memory, which the allocator reuses, or returns to the device before it runs
        # out
        reserved = module.memory_reserved(device)
        reserve = reserved - module.memory_allocated(device)
        free = int(module.mem_get_info(device)[0])
        return free + max(0, reserve)
    free = int(psutil.virtual_memory().available)
    limit = _UNLIMITED
    if resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == _UNLIMITED:
        return free
    process = psutil.Process()
    unmapped = limit - process.memory_info().vms
    return max(0, min(free, unmapped))


def limits_addresses() -> bool:
    """Whether the process's address space is limited (`ulimit -v`)."""
    if resource is None:
        return False
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return limit != _UNLIMITED


def trim() -> None:
    """Returns freed host memory that the C library still holds to the system. (It unmaps large
    tensors when they are freed, but keeps the memory of small ones.)"""
    malloc_trim = _malloc_trim()
    if malloc_trim is not None:
        malloc_trim(0)


@functools.cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not glibc
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or its cause, says that an allocation failed: torch has no single type for
    that."""
    cause = error.__cause__
    if cause is not None and is_out_of_memory(cause):
        return True
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return any(words in message for words in _OUT_OF_MEMORY)


# from the CPU allocators (Linux and macOS, Windows) and from devices that raise a plain
# RuntimeError
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def _attended(keys: torch.dtype, values: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtypes of K and V in attention. Under autocast, rotated keys stay in float32
    beside values in half precision, and attention rounds both to half precision."""
    is_half = values in (torch.bfloat16, torch.float16)
    if keys is torch.float32 and is_half:
        return values, values
    return keys, values


def looks(keys: Tensor, values: Tensor) -> Look:
    """Returns a key that is equal for K/V that fit the same blocks and the same store function."""
    return (
        keys.shape,
        keys.stride(),
        keys.dtype,
        keys.device,
        values.shape,
        values.stride(),
        values.dtype,
    )


def choose_store(
    keys: Tensor,
    values: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    slots: Tensor,
) -> Store:
    """Returns a function that writes K/V `(batch, heads, n, dim)`, any strides, into blocks
    `(num_blocks, heads, block_size, dim)`, in their dtype or quantized, for arguments with the same
    `looks`. `slots` `(batch, n)` int64: `block_id * block_size + offset` of each token, each at
    most once; negative for tokens that are not stored."""
    chosen: Callable[..., None] = store_portable
    fits = keys.size(1) == values.size(1)
    if uses_triton(key_blocks):
        tensors = (keys, values, key_blocks, value_blocks)
        taken = (*DTYPES, *quantized.LARGEST)
        device = key_blocks.device
        if fits and all(x.dtype in taken and x.device == device for x in tensors):
            chosen = _store_triton
    elif fits and cpp.is_available():
        dtypes = (keys.dtype, values.dtype)
        stored_dtypes = (key_blocks.dtype, value_blocks.dtype)
        if quantized.is_quantized(key_blocks):
            with contextlib.suppress(TypeError):  # the kernel does not support such K/V
                return cpp_attention.Store(keys, values, key_blocks, value_blocks, slots)
            return _store_again(chosen, key_blocks, value_blocks)
        with contextlib.suppress(TypeError):  # the kernel does not support such tensors
            stored_keys = keys.to(key_blocks.dtype)
            stored_values = values.to(value_blocks.dtype)
            store: Store = cpp_attention.Store(
                stored_keys, stored_values, key_blocks, value_blocks, slots
            )
            if dtypes == stored_dtypes:
                return store
            return _cast_first(store, *stored_dtypes)

    return _store_again(chosen, key_blocks, value_blocks)


def _store_triton(*tensors: Tensor) -> None:
    from ..kernels.triton import store as triton  # needs Triton

    try:
        triton.store(*tensors)
    except LaunchFailedError:
        store_portable(*tensors)


def _store_again(
    chosen: Callable[..., None],
    key_blocks: Tensor,
    value_blocks: Tensor,
) -> Store:
    return lambda keys, values, slots: chosen(keys, values, key_blocks, value_blocks, slots)


def _cast_first(
    store: Store,
    key_dtype: torch.dtype,
    value_dtype: torch.dtype,
) -> Store:
    return lambda keys, values, slots: store(keys.to(key_dtype), values.to(value_dtype), slots)


def store_portable(
    keys: Tensor,
    values: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    slots: Tensor,
) -> None:
    """Writes K/V as `choose_store` describes, in plain PyTorch on any device."""
    block_size = key_blocks.shape[2]
    index, tokens = _places(slots, block_size, key_blocks.device)
    for blocks, states in ((key_blocks, keys), (value_blocks, values)):
        packed = states.transpose(1, 2).flatten(0, 1)  # [batch * n, heads, dim]
        if tokens is not None:
            packed = packed[tokens]
        quantized.write(blocks, index, packed)


# the arguments and the result of `_places` for the last store: layers share a step's slots
_last = threading.local()


def _places(
    slots: Tensor,
    block_size: int,
    device: torch.device,
) -> tuple[Any, Tensor | None]:
    """Returns the index of the stored tokens in blocks, and which tokens these are, `None` for all.
    Waits for the device."""
    version = None if slots.is_inference() else slots._version
    key = (block_size, device, version)
    is_known = getattr(_last, "key", None) == key and _last.slots() is slots
    if not is_known:
        packed = slots.to(device).flatten()
        tokens = None
        is_skipped = packed < 0
        if bool(is_skipped.any()):
            tokens = (packed >= 0).nonzero().squeeze(1)
            packed = packed[tokens]
        index = (packed // block_size, slice(None), packed % block_size)
        # together: an error must not leave the key of other places
        _last.slots, _last.key, _last.places = weakref.ref(slots), key, (index, tokens)
    places: tuple[Any, Tensor | None] = _last.places
    return places
