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
    """A tensor. `value` is the number of the tape's value (a piece of memory) that holds it from byte `start` on; if
    that is `None`, `start` is its address."""

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
        self.outside: dict[int, torch.UntypedStorage] = {}  # outside storages that operations use, by address

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._numbers:
            self._numbers[storage.data_ptr()] = len(self.sizes)
            self.sizes.append(storage.nbytes())

    def number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(tensor.untyped_storage().data_ptr())

    def add_outside(self, tensor: Tensor) -> None:
        """Adds outside memory that the tape changes, as a value at a fixed address."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self.fixed[len(self.sizes)] = storage.data_ptr()
            self.add(tensor)

    def ref(self, tensor: Tensor) -> Ref:
        number = self.number(tensor)
        if number is None or number in self.fixed:
            storage = tensor.untyped_storage()
            self.outside[storage.data_ptr()] = storage
        start = tensor.data_ptr() - (0 if number is None else tensor.untyped_storage().data_ptr())
        return Ref(number, start, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


class Arena:
    """One piece of memory for all values of a tape; values that are never needed at the same time may share a place."""

    def __init__(self, values: Values, spans: dict[int, tuple[int, int]]) -> None:
        """`spans`: the first and the last entry of the tape that uses each value."""
        sizes, self._fixed = values.sizes, values.fixed
        placed: list[tuple[int, int, int, int]] = []  # start, end, first, last
        self._starts: dict[int, int] = {}
        for number, (first, last) in sorted(spans.items(), key=lambda item: -sizes[item[0]]):
            if number in self._fixed:
                continue
            size = -(-sizes[number] // _ALIGNMENT) * _ALIGNMENT
            start = 0
            for low, high, begins, ends in placed:  # sorted by start
                if begins <= last and first <= ends:
                    if low - start >= size:
                        break
                    start = max(start, high)
            self._starts[number] = start
            placed.append((start, start + size, first, last))
            placed.sort()
        self.nbytes = max((end for _, end, _, _ in placed), default=0)
        with torch.inference_mode(False):
            self._memory = torch.zeros(self.nbytes + _ALIGNMENT, dtype=torch.uint8, device="cpu")
        self._base = -(-self._memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT

    def address(self, ref: Ref) -> int:
        if ref.value is None:
            return ref.start
        fixed = self._fixed.get(ref.value)
        return ref.start + (self._base + self._starts[ref.value] if fixed is None else fixed)

    def tensor(self, ref: Ref) -> Tensor:
        """Returns a tensor on that memory, which it does not keep alive."""
        if not ref.sizes or 0 not in ref.sizes:
            span = 1 + sum((size - 1) * stride for size, stride in zip(ref.sizes, ref.strides))
            memory = (ctypes.c_char * (span * ref.dtype.itemsize)).from_address(self.address(ref))
            with torch.inference_mode(False):
                return torch.frombuffer(memory, dtype=ref.dtype).as_strided(ref.sizes, ref.strides)
        return torch.empty(ref.sizes, dtype=ref.dtype, device="cpu")
