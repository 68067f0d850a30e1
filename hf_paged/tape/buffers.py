"""The memory of a recording's tensors: one buffer for each storage that [`Buffers`] numbers, in the
tape's arena or at a fixed address outside it. The entries of the tape fill the buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.free_memory import discard
from ..kernels.cpp.attention import FLOAT_DTYPE_NUMBERS

DTYPE_NUMBERS = {**FLOAT_DTYPE_NUMBERS, torch.int64: 3}
"""The dtypes that row operations can read, with their numbers in C++."""
_ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True)
class TensorRef:
    """A tensor at byte `offset` of a buffer or, if `buffer_id` is `None`, at address `offset`."""

    buffer_id: int | None
    offset: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in elements

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element through the last. The tensor must not be empty."""
        num_elements = 1
        for size, stride in zip(self.sizes, self.strides):
            num_elements += (size - 1) * stride
        return num_elements * self.dtype.itemsize


AddressOf = Callable[[TensorRef], int]
"""Returns the address of a tensor's first element."""

StoreBytes = Callable[[bytes], int]
"""Copies bytes to memory that lives as long as the calls that point to it; returns its address."""

PackedCall = tuple[str, bytes]
"""The name of a C++ kernel, and the struct of its arguments."""


def buffer_ids_of(leaves: Iterable[Any]) -> set[int]:
    """Returns the ids of the buffers of all tensors among `leaves`, which may also contain other
    arguments of an operation."""
    refs = (leaf for leaf in leaves if isinstance(leaf, TensorRef))
    return {ref.buffer_id for ref in refs if ref.buffer_id is not None}


class Buffers:
    """Numbers the storages that a recording's operations create, and older ones that they write to,
    such as K/V blocks (`add_fixed`). Constants, and storages that are only read or that only the
    last operation writes to, have no buffer."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []  # by buffer id
        # by storage address; no address is reused, since the recording keeps its tensors alive
        self._ids: dict[int, int] = {}
        # addresses of the buffers outside the arena, by id; stores to these buffers are not dropped
        self.fixed_addresses: dict[int, int] = {}
        # tensors that the tape must keep alive: constants, which a replay does not compute again,
        # and tensors that are older than the recording and might be freed
        self.retained_tensors: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        """Adds a buffer for the tensor's storage, unless the storage has one or is empty."""
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        address = storage.data_ptr()
        if num_bytes and address not in self._ids:
            self._ids[address] = len(self.num_bytes)
            self.num_bytes.append(num_bytes)

    def id_of(self, tensor: Tensor) -> int | None:
        """Returns the id of the tensor's buffer; `None` if its storage has none."""
        storage = tensor.untyped_storage()
        return self._ids.get(storage.data_ptr())

    def add_fixed(self, tensor: Tensor) -> None:
        """As `add`, for a storage outside the arena: replays access it at its current address."""
        self.add(tensor)
        buffer_id = self.id_of(tensor)
        if buffer_id is not None:
            self.fixed_addresses[buffer_id] = tensor.untyped_storage().data_ptr()

    def ref(self, tensor: Tensor) -> TensorRef:
        if not tensor.numel():  # it has no address, even as a view of a buffer
            return TensorRef(None, 0, tensor.dtype, tensor.shape, tensor.stride())
        buffer_id = self.id_of(tensor)
        offset = tensor.data_ptr()
        if buffer_id is not None:
            offset -= tensor.untyped_storage().data_ptr()
        return TensorRef(buffer_id, offset, tensor.dtype, tensor.shape, tensor.stride())


class _Placement(NamedTuple):
    """Bytes `[start, end)` of the arena, which a buffer occupies from entry `first` through
    `last`."""

    start: int
    end: int
    first: int
    last: int


class Arena:
    """One allocation for all buffers of a tape that have no fixed address. Buffers are placed by
    decreasing size, each at the lowest offset that is free during its lifetime, so those with
    disjoint lifetimes may share bytes. (Greedy by size in arXiv 2001.03288, section 5, instead
    chooses the smallest free gap.)"""

    def __init__(self, buffers: Buffers, lifetimes: dict[int, tuple[int, int]]) -> None:
        """`lifetimes`: by buffer id, the indices of the first and the last entry that use it.
        Buffers that no entry uses get no memory."""
        largest_first = sorted(lifetimes, key=lambda buffer_id: -buffers.num_bytes[buffer_id])
        placements: list[_Placement] = []  # sorted by start
        offsets: dict[int, int] = {}  # by buffer id
        num_bytes = 0
        for buffer_id in largest_first:
            if buffer_id in buffers.fixed_addresses:
                continue
            first, last = lifetimes[buffer_id]
            num_units = -(-buffers.num_bytes[buffer_id] // _ALIGNMENT)
            size = num_units * _ALIGNMENT
            offset = 0
            for placement in placements:
                if placement.last < first or last < placement.first:
                    continue
                if placement.start - offset >= size:
                    break
                offset = max(offset, placement.end)
            offsets[buffer_id] = offset
            end = offset + size
            placements.append(_Placement(offset, end, first, last))
            placements.sort()
            num_bytes = max(num_bytes, end)
        capacity = num_bytes + _ALIGNMENT  # with space for rounding up the start
        with torch.inference_mode(False):  # outside inference mode, inference tensors are read-only
            self._memory = torch.zeros(capacity, dtype=torch.uint8, device="cpu")
        base = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self._addresses = {buffer_id: base + offset for buffer_id, offset in offsets.items()}
        self._addresses |= buffers.fixed_addresses

    def discard(self) -> bool:
        """Gives the memory back to the system until the next replay; returns whether that was
        possible. The arena then contains zeros, as before the first replay."""
        return discard([self._memory])

    def address(self, ref: TensorRef) -> int:
        if ref.buffer_id is None:
            return ref.offset
        return self._addresses[ref.buffer_id] + ref.offset

    def tensor(self, ref: TensorRef) -> Tensor:
        """Returns a tensor over the memory of `ref`. The tensor keeps the arena's memory alive, but
        the owner of memory outside the arena must outlive the tensor."""
        if 0 in ref.sizes:
            return torch.empty(ref.sizes, dtype=ref.dtype, device="cpu")
        array_type = ctypes.c_char * ref.span_bytes
        memory: Any = array_type.from_address(self.address(ref))
        memory.owner = self._memory
        with torch.inference_mode(False):
            elements = torch.frombuffer(memory, dtype=ref.dtype)
            return elements.as_strided(ref.sizes, ref.strides)
