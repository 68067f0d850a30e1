"""The keys and values of one layer in blocks: their tensors and layout, writes and copies. Callers
decide how many blocks there are, and which tokens they hold."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..forks import lazy_property
from ..kernels import cpp, quantized, uses_triton
from ..kernels.cpp import blocks as cpp_blocks
from ..kernels.cpp.attention import Attention
from ..kernels.cpp.blocks import Gather, StoreSignature
from ..kernels.triton import DTYPES
from ..kernels.triton.launch import LaunchFailedError
from ..seams import MappedRows
from .free_memory import commits_when_touched, reserved_tensor
from .groups import GroupSpec

# Host tensors of at least this many bytes get separate mappings, as in glibc's allocator.
MIN_RESERVED_BYTES = 32 << 20

KVFormat = tuple[int, int, torch.dtype]
"""Heads, head dim and dtype of a token's keys or values."""

Store = Callable[..., None]
"""Called with keys, values, slots and, optionally, the `store_signature`, as `choose_store`
describes."""


@dataclass(eq=False)
class KVBlocks:
    """Blocks of one layer: `keys` and `values` `(num_blocks, heads, block_size, dim)` are views of
    `data`. `dtypes` are the dtypes of the model's K/V, which blocks may store in another dtype.
    If stored K and V agree in heads, dim and dtype, `data` is one tensor `(num_blocks, 2 * heads,
    block_size, dim)`, K heads first; if only the dims differ (MLA: latent and rotary key), one
    tensor `(num_blocks, heads, block_size, key_dim + value_dim)`; otherwise two tensors. With
    quantization, the tensors hold byte tiles `(num_blocks, heads, tile_bytes)`, which include the
    scales (`kernels.quantized`); K and V of several heads and different dims then also have two
    tensors."""

    data: tuple[Tensor, ...]
    keys: Tensor
    values: Tensor
    dtypes: tuple[torch.dtype, torch.dtype] = ()  # type: ignore[assignment]
    rows: MappedRows | None = field(default=None, repr=False)
    """The mapping of rows to contiguous addresses, if the storage has one."""

    def __post_init__(self) -> None:
        is_quantized = quantized.is_quantized(self.keys)
        self.dtypes = self.dtypes or (self.keys.dtype, self.values.dtype)
        # dtype of the codes, if blocks are quantized
        self.quantized_dtype = self.keys.dtype if is_quantized else None
        # whether keys and values are quantized side by side, with one scale for both
        self.shares_scales = is_quantized and self.keys.stride(2) != self.keys.shape[3]
        # the function that stored the last K/V, by their `store_signature`; K/V with this signature
        # fit these blocks
        self.stores: dict[StoreSignature, Store] = {}
        # prepared calls of the C++ kernel, by the signature of the steps that they serve
        self.kernels: dict[Hashable, Attention] = {}
        # attributes, not properties, since each growth of a pool sums them over all layers
        self.num_blocks = self.keys.shape[0]
        self.block_bytes = sum(tensor[0].nbytes for tensor in self.data if len(tensor))
        # whether blocks take no memory until first used
        self.is_elastic = commits_when_touched(self.keys.device)

    @property
    def pair(self) -> tuple[tuple[Tensor, torch.dtype], tuple[Tensor, torch.dtype]]:
        """Keys and values, each with the dtype in which the model computes them."""
        key_dtype, value_dtype = self.dtypes
        return (self.keys, key_dtype), (self.values, value_dtype)

    @property
    def formats(self) -> tuple[KVFormat, ...]:
        """The formats in which the model computes keys and values."""
        return tuple((blocks.shape[1], blocks.shape[3], dtype) for blocks, dtype in self.pair)

    @property
    def tiles(self) -> tuple[Tensor, ...]:
        """`data` as tensors `(num_blocks, heads, block_size, dim)`, of codes if quantized."""
        *_, code_format = self.view_arguments
        return _tiles(self.data, code_format)

    def store(
        self,
        signature: StoreSignature,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> None:
        """Writes K/V to `slots` with the function that `choose_store` returns. Reuses this function
        while `signature` (`store_signature`) stays equal, since choosing takes longer than a small
        store. The shapes are described at `choose_store`."""
        blocks = self
        stored_signature: StoreSignature | None = signature
        if self.rows is not None:
            self.rows.preserve_views()
        if self.shares_scales:
            blocks = self.latents
            keys = torch.cat((keys, values), dim=3)
            values = keys
            stored_signature = None
        store = self.stores.get(signature)
        if store is None:
            store = choose_store(keys, values, blocks.keys, blocks.values, slots)
            self.stores = {signature: store}
        store(keys, values, slots, stored_signature)

    def fits(self, keys: Tensor, values: Tensor) -> bool:
        """Whether K/V `(batch, heads, n, dim)` have these blocks' heads, dims, device and
        `dtypes`."""
        if self.dtypes != (keys.dtype, values.dtype):
            return False
        return sizes_of(self.keys, self.values) == sizes_of(keys, values)

    def widened_states(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Returns empty tensors like `keys` and `values`, in dtypes that can represent both these
        K/V and K/V of `dtypes`."""
        pairs = zip((keys, values), self.dtypes)
        return [
            states[:, :, :0].to(torch.promote_types(dtype, states.dtype)) for states, dtype in pairs
        ]

    def select(self, block_ids: list[int]) -> KVBlocks:
        """Returns a copy of the blocks `block_ids`."""
        return self.like([tensor[block_ids] for tensor in self.data])

    def put_blocks(self, block_ids: Tensor | list[int], blocks: KVBlocks) -> None:
        """Writes `blocks`, of the same heads, dims and quantization and on any device, to the
        blocks `block_ids`, in order."""
        if self.rows is not None:
            self.rows.preserve_views()
        if self.quantized_dtype is not None:
            for target, source in zip(self.data, blocks.data):
                target[block_ids] = source.to(target.device)
        else:
            keys = blocks.keys.to(self.keys)
            values = blocks.values.to(self.values)
            self.keys[block_ids], self.values[block_ids] = keys, values

    @lazy_property
    def gathers(self) -> tuple[list[Gather], list[Gather]] | None:
        """Prepared C++ gathers of the keys and of the values: for each, one gather per tensor in
        `quantized.stored_tensors`. `None` without the kernel."""
        if not self.keys.is_cpu or not cpp.is_available():
            return None
        with _disable_current_modes():  # under a fake tensor mode, tensors would lack memory
            keys, values = map(quantized.stored_tensors, (self.keys, self.values))
            return list(map(Gather, keys)), list(map(Gather, values))

    @lazy_property
    def latents(self) -> KVBlocks:
        """For keys and values stored side by side: the same blocks, with the joined tensor as both
        `keys` and `values`."""
        (tile,) = self.tiles
        return KVBlocks(self.data, tile, tile, self.dtypes)

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        keys: Tensor,
        values: Tensor,
        kv_dtype: str | None = None,
    ) -> KVBlocks:
        """Allocates uninitialised blocks for K/V like `keys` and `values`, each `(batch, heads, n,
        dim)`. `kv_dtype`: `PagedConfig.kv_dtype`. Raises `ValueError` for sizes that cannot be
        quantized."""
        heads, key_dim = keys.shape[1::2]
        value_heads, value_dim = values.shape[1::2]
        dtypes = (keys.dtype, values.dtype)
        code_format = None
        key_dtype, value_dtype = dtypes
        if kv_dtype is not None:
            key_dtype = value_dtype = quantized.DTYPES[kv_dtype]
            code_format = (block_size, key_dtype)
        elif key_dtype is torch.float32 and value_dtype in (torch.bfloat16, torch.float16):
            # under autocast, rotated keys stay in float32 beside values in half precision, and
            # attention rounds both to half precision
            key_dtype = value_dtype
        are_alike = (heads, key_dtype) == (value_heads, value_dtype)
        # heads and dim of each tensor
        if are_alike and key_dim == value_dim:
            sizes = [(2 * heads, key_dim)]
        elif are_alike and (kv_dtype is None or heads == 1):
            sizes = [(heads, key_dim + value_dim)]
        else:
            sizes = [(heads, key_dim), (value_heads, value_dim)]
        data = []
        for (num_heads, dim), dtype in zip(sizes, (key_dtype, value_dtype)):
            tile_shape: tuple[int, ...] = (block_size, dim)
            if kv_dtype is not None:
                quantized.check_alignment(block_size, dim)
                tile_shape, dtype = (quantized.tile_bytes(block_size, dim),), torch.uint8
            data.append(_empty((num_blocks, num_heads, *tile_shape), dtype, keys.device))
        return cls.view(tuple(data), heads, key_dim, dtypes, code_format)

    @classmethod
    def view(
        cls,
        data: tuple[Tensor, ...],
        heads: int,
        key_dim: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        code_format: tuple[int, torch.dtype] | None = None,
    ) -> KVBlocks:
        """Returns blocks whose keys (with `heads` and `key_dim`) and values are views of `data`.
        `code_format`: for quantized blocks, the block size and the dtype of the codes."""
        tiles = _tiles(data, code_format)
        if len(tiles) == 2:
            return cls(data, *tiles, dtypes)
        (joined_tile,) = tiles
        if joined_tile.shape[1] == 2 * heads:
            keys = joined_tile[:, :heads]
            values = joined_tile[:, heads:]
        else:
            keys = joined_tile[..., :key_dim]
            values = joined_tile[..., key_dim:]
        return cls(data, keys, values, dtypes)

    def like(self, data: Sequence[Tensor]) -> KVBlocks:
        """Returns blocks over `data` with the same heads, dims, dtypes and quantization."""
        return self.view(tuple(data), *self.view_arguments)

    @property
    def view_arguments(self) -> tuple[Any, ...]:
        """The arguments after `data` with which `view` returns blocks like these."""
        _, heads, block_size, dim = self.keys.shape
        code_format = self.quantized_dtype and (block_size, self.quantized_dtype)
        return heads, dim, self.dtypes, code_format

    def __reduce__(self) -> tuple[Any, ...]:
        return KVBlocks.view, (self.data, *self.view_arguments)

    def grown(self, num_blocks: int) -> KVBlocks:
        """Returns a copy enlarged to `num_blocks` blocks. The added blocks are uninitialised."""
        tensors = [
            _empty((num_blocks, *tensor.shape[1:]), tensor.dtype, tensor.device)
            for tensor in self.data
        ]
        for new_tensor, old_tensor in zip(tensors, self.data):
            new_tensor[: old_tensor.shape[0]] = old_tensor
        return self.like(tensors)


class LayerKV(NamedTuple):
    """The formats of the keys and values that the model computes in one layer."""

    spec: GroupSpec
    layer_index: int
    formats: tuple[KVFormat, ...]  # `KVBlocks.formats`


def _tiles(
    data: tuple[Tensor, ...], code_format: tuple[int, torch.dtype] | None
) -> tuple[Tensor, ...]:
    if code_format is None:
        return data
    return tuple(quantized.codes(tensor, *code_format) for tensor in data)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # a tensor made in inference mode could not be written to outside of that mode
    with torch.inference_mode(False):
        size = math.prod(shape) * dtype.itemsize
        is_on_linux_host = device.type == "cpu" and sys.platform == "linux"
        if is_on_linux_host and size >= MIN_RESERVED_BYTES:
            return reserved_tensor(size).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)


def empty_states(formats: Iterable[KVFormat], device: torch.device | str) -> list[Tensor]:
    """Returns empty keys and values `(0, heads, 0, dim)` of these formats."""
    return [
        torch.empty(0, heads, 0, dim, dtype=dtype, device=device) for heads, dim, dtype in formats
    ]


def sizes_of(keys: Tensor, values: Tensor) -> list[tuple[int, int, torch.device]]:
    """Returns the heads, dim and device of keys and of values."""
    return [(states.shape[1], states.shape[3], states.device) for states in (keys, values)]


def choose_store(
    keys: Tensor,
    values: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    slots: Tensor,
) -> Store:
    """Returns a `Store`, which writes K/V `(batch, heads, n, dim)` of any strides into blocks
    `(num_blocks, heads, block_size, dim)`, converted to the blocks' dtypes or quantized. It may be
    reused for K/V with an equal `store_signature` and any slots of the same shape. `slots` `(batch,
    n)` int64: `block_id * block_size + offset` of each token, without duplicates; negative for
    tokens that are not stored."""
    write: Callable[..., None] = store_portable
    has_equal_heads = keys.size(1) == values.size(1)
    if uses_triton(key_blocks):
        tensors = (keys, values, key_blocks, value_blocks)
        supported_dtypes = (*DTYPES, *quantized.MAX_CODES)
        device = key_blocks.device
        are_supported = all(
            tensor.dtype in supported_dtypes and tensor.device == device for tensor in tensors
        )
        are_supported &= quantized.are_quantized_alike(key_blocks, value_blocks)
        if has_equal_heads and are_supported:
            write = _store_triton
    elif has_equal_heads and cpp.is_available():
        key_dtype = keys.dtype
        value_dtype = values.dtype
        if not quantized.is_quantized(key_blocks):  # else the kernel itself quantizes K/V
            key_dtype = key_blocks.dtype
            value_dtype = value_blocks.dtype
        with contextlib.suppress(TypeError):  # if the kernel does not support such tensors
            store = cpp_blocks.Store(
                keys.to(key_dtype), values.to(value_dtype), key_blocks, value_blocks, slots
            )
            if (keys.dtype, values.dtype) == (key_dtype, value_dtype):
                return store
            return lambda keys, values, slots, _=None: store(
                keys.to(key_dtype), values.to(value_dtype), slots
            )

    return lambda keys, values, slots, _=None: write(keys, values, key_blocks, value_blocks, slots)


def _store_triton(*tensors: Tensor) -> None:
    from ..kernels.triton import store as triton_store  # needs Triton

    try:
        triton_store.store(*tensors)
    except LaunchFailedError:
        store_portable(*tensors)


def store_portable(
    keys: Tensor,
    values: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    slots: Tensor,
) -> None:
    """Writes K/V as `choose_store` describes, in plain PyTorch on any device."""
    block_size = key_blocks.shape[2]
    index, token_indices = _targets(slots, block_size, key_blocks.device)
    for blocks, states in ((key_blocks, keys), (value_blocks, values)):
        tokens = states.transpose(1, 2).flatten(0, 1)  # [batch * n, heads, dim]
        if token_indices is not None:
            tokens = tokens[token_indices]
        quantized.write(blocks, index, tokens)


# `entry` holds a weak reference to the slots, the key and the result of the thread's last call of
# `_targets`, since all layers of a step have the same slots. The three are one attribute, so that
# an interrupt cannot leave a key beside the targets of other slots.
_last_targets = threading.local()


def _targets(
    slots: Tensor,
    block_size: int,
    device: torch.device,
) -> tuple[Any, Tensor | None]:
    """Returns the index into blocks of the tokens to store, and these tokens' positions in the
    flattened `slots` (`None`: all). Synchronizes with the device if called for new `slots`."""
    version = None if slots.is_inference() else slots._version
    key = (block_size, device, version)
    entry = getattr(_last_targets, "entry", None)
    if entry is not None:
        last_slots, last_key, targets = entry
        if last_key == key and last_slots() is slots:
            return targets
    flat_slots = slots.to(device).flatten()
    token_indices = None
    if (flat_slots < 0).any():
        token_indices = (flat_slots >= 0).nonzero().squeeze(1)
        flat_slots = flat_slots[token_indices]
    index = (flat_slots // block_size, slice(None), flat_slots % block_size)
    targets = (index, token_indices)
    _last_targets.entry = (weakref.ref(slots), key, targets)
    return targets
