"""Memory of a recording's tensors: in the tape's arena, or at an outside address."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.cpp.attention import DTYPES as FLOATS

DTYPES = {**FLOATS, torch.int64: 3}  # that fused lists (`Rows`) can read
_ALIGNMENT = 64


class Ref(NamedTuple):
    """A tensor. `value` is the number of the tape's value (a piece of memory) that holds it from
    byte `start` on; if that is `None`, `start` is its address."""

    value: int | None
    start: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def place(self) -> tuple[int | None, int, torch.dtype]:
        return self.value, self.start, self.dtype


class Values:
    """The storages that a recording's operations made, as numbered values."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # bytes of each
        self._numbers: dict[int, int] = {}  # by address of the storage
        self.fixed: dict[int, int] = {}  # addresses of values outside the tape's memory, by number
        self.constants: list[Tensor] = []  # computed once, by the recording
        self.held: list[Tensor] = []  # outside tensors that must live as long as the tape
        # outside storages that operations use, by address
        self.outside: dict[int, torch.UntypedStorage] = {}

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
        """Adds outside memory that the tape changes, as a value at a fixed address."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            number = len(self.sizes)
            self.fixed[number] = storage.data_ptr()
            self.add(tensor)

    def ref(self, tensor: Tensor) -> Ref:
        number = self.number(tensor)
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        start = tensor.data_ptr()
        if number is None or number in self.fixed:
            self.outside[base] = storage
        if number is not None:
            start -= base
        sizes = tuple(tensor.shape)
        strides = tuple(tensor.stride())
        return Ref(number, start, tensor.dtype, sizes, strides)


class Arena:
    """One piece of memory for all values of a tape; values that are never needed at the same time
    may share a place."""

    def __init__(self, values: Values, spans: dict[int, tuple[int, int]]) -> None:
        """`spans`: the first and the last entry of the tape that uses each value."""
        sizes = values.sizes
        self._fixed = values.fixed
        placed: list[tuple[int, int, int, int]] = []  # start, end, first, last
        self._starts: dict[int, int] = {}
        largest_first = sorted(spans, key=lambda number: -sizes[number])
        nbytes = 0
        for number in largest_first:
            if number in self._fixed:
                continue
            first, last = spans[number]
            num_units = -(-sizes[number] // _ALIGNMENT)
            size = num_units * _ALIGNMENT
            start = 0
            for low, high, begins, ends in placed:  # sorted by start
                overlaps = begins <= last and first <= ends
                if not overlaps:
                    continue
                if low - start >= size:
                    break
                start = max(start, high)
            self._starts[number] = start
            end = start + size
            placed.append((start, end, first, last))
            placed.sort()
            nbytes = max(nbytes, end)
        self.nbytes = nbytes
        capacity = nbytes + _ALIGNMENT
        with torch.inference_mode(False):
            self._memory = torch.zeros(capacity, dtype=torch.uint8, device="cpu")
        address = self._memory.data_ptr()
        self._base = -(-address // _ALIGNMENT) * _ALIGNMENT

    def address(self, ref: Ref) -> int:
        if ref.value is None:
            return ref.start
        fixed = self._fixed.get(ref.value)
        if fixed is not None:
            return ref.start + fixed
        start = self._base + self._starts[ref.value]
        return ref.start + start

    def tensor(self, ref: Ref) -> Tensor:
        """Returns a tensor on that memory, which it does not keep alive."""
        if 0 in ref.sizes:
            return torch.empty(ref.sizes, dtype=ref.dtype, device="cpu")
        span = 1
        for size, stride in zip(ref.sizes, ref.strides):
            span += (size - 1) * stride
        nbytes = span * ref.dtype.itemsize
        buffer_type = ctypes.c_char * nbytes
        memory = buffer_type.from_address(self.address(ref))
        with torch.inference_mode(False):
            numbers = torch.frombuffer(memory, dtype=ref.dtype)
            return numbers.as_strided(ref.sizes, ref.strides)
