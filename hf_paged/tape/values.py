"""The memory of a recording's tensors: in the tape's arena, or at an outside address. Leaves its
content to the entries."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.cpp.attention import DTYPES as FLOATS

DTYPES = {**FLOATS, torch.int64: 3}  # dtypes that fused lists (`Rows`) can read
_ALIGNMENT = 64


@dataclass(frozen=True)
class Ref:
    """A tensor. `value` is the number of the tape's value (a piece of memory) that holds it from
    byte `start` on; if `value` is `None`, `start` is the tensor's address."""

    value: int | None
    start: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from the tensor's first number to its last."""
        span = 1
        for size, stride in zip(self.sizes, self.strides):
            span += (size - 1) * stride
        return span * self.dtype.itemsize


Address = Callable[[Ref], int]
"""Returns the address of a tensor's memory."""

Keep = Callable[[bytes], int]
"""Stores bytes for as long as packed calls use them; returns their address."""

Packed = tuple[str, bytes]
"""The name of a C++ kernel, and its packed call."""


def values_of(leaves: Iterable[Any]) -> set[int]:
    """The numbers of the values that hold the tensors among `leaves`."""
    refs = (leaf for leaf in leaves if isinstance(leaf, Ref))
    return {ref.value for ref in refs if ref.value is not None}


class Values:
    """The storages that a recording's operations created, as numbered values."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # bytes, by number
        self._numbers: dict[int, int] = {}  # by address of the storage
        self.fixed: dict[int, int] = {}  # addresses of values outside the tape's memory, by number
        # tensors that must live as long as the tape: outside tensors, and constants, which only the
        # recording computed
        self.held: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        address = storage.data_ptr()
        if nbytes and address not in self._numbers:
            self._numbers[address] = len(self.sizes)
            self.sizes.append(nbytes)

    def number(self, tensor: Tensor) -> int | None:
        storage = tensor.untyped_storage()
        return self._numbers.get(storage.data_ptr())

    def add_outside(self, tensor: Tensor) -> None:
        """Adds outside memory that the tape writes, as a value at a fixed address."""
        self.add(tensor)
        number = self.number(tensor)
        if number is not None:
            self.fixed[number] = tensor.untyped_storage().data_ptr()

    def ref(self, tensor: Tensor) -> Ref:
        number = self.number(tensor)
        start = tensor.data_ptr()
        if number is not None:
            start -= tensor.untyped_storage().data_ptr()
        return Ref(number, start, tensor.dtype, tensor.shape, tensor.stride())


class Arena:
    """One piece of memory for all values of a tape. Values that are never needed at the same time
    may overlap in it."""

    def __init__(self, values: Values, spans: dict[int, tuple[int, int]]) -> None:
        """`spans`: the first and the last entry of the tape that use each value."""
        sizes = values.sizes
        allocated: list[tuple[int, int, int, int]] = []  # start, end, first, last
        starts: dict[int, int] = {}
        largest_first = sorted(spans, key=lambda number: -sizes[number])
        nbytes = 0
        for number in largest_first:
            if number in values.fixed:
                continue
            first, last = spans[number]
            num_units = -(-sizes[number] // _ALIGNMENT)
            size = num_units * _ALIGNMENT
            start = 0
            for low, high, begins, ends in allocated:  # sorted by start
                overlaps = begins <= last and first <= ends
                if not overlaps:
                    continue
                if low - start >= size:
                    break
                start = max(start, high)
            starts[number] = start
            end = start + size
            allocated.append((start, end, first, last))
            allocated.sort()
            nbytes = max(nbytes, end)
        capacity = nbytes + _ALIGNMENT
        with torch.inference_mode(False):
            self._memory = torch.zeros(capacity, dtype=torch.uint8, device="cpu")
        base = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        self._addresses = {number: base + start for number, start in starts.items()}
        self._addresses |= values.fixed

    def address(self, ref: Ref) -> int:
        if ref.value is None:
            return ref.start
        return ref.start + self._addresses[ref.value]

    def tensor(self, ref: Ref) -> Tensor:
        """Returns a tensor over the memory of `ref`, which the tensor does not keep alive."""
        if 0 in ref.sizes:
            return torch.empty(ref.sizes, dtype=ref.dtype, device="cpu")
        buffer_type = ctypes.c_char * ref.nbytes
        memory = buffer_type.from_address(self.address(ref))
        with torch.inference_mode(False):
            numbers = torch.frombuffer(memory, dtype=ref.dtype)
            return numbers.as_strided(ref.sizes, ref.strides)
