"""The entries of a tape, except row operations: calls of C++ kernels, matrix products and PyTorch's
operations. Packs the arguments of the entries that run in C++. `tape.py` runs the entries."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.cpp import linear
from ..kernels.cpp.build import best_path
from .buffers import AddressOf, PackedCall, StoreBytes, TensorRef, buffer_ids_of
from .rows import RowOps


def check_kernel(name: str, error: int) -> None:
    """Raises `MemoryError` or `RuntimeError` if a kernel returned an error."""
    if error == 6:
        raise MemoryError(f"not enough memory for the kernel {name!r}")
    if error:
        raise RuntimeError(f"the kernel {name!r} failed with error {error}")


@dataclass(eq=False)
class KernelEntry:
    """A call of a C++ kernel, with its packed argument struct. `pack` fills in the addresses."""

    name: str
    packed: bytes
    refs: dict[int, TensorRef]  # by byte offset in the struct
    reads: set[int]  # ids of buffers
    writes: set[int]

    def pack(self, address: AddressOf, store: StoreBytes) -> PackedCall:
        packed = bytearray(self.packed)
        for offset, ref in self.refs.items():
            struct.pack_into("Q", packed, offset, address(ref))
        return self.name, bytes(packed)


@dataclass(eq=False)
class Linear:
    """`y = x W^T + b` for several weights with the same `x` `(rows, depth)`. Weights may be int8, to
    be multiplied as if converted to the dtype of `x`."""

    x: TensorRef
    # whether weights are stored as `(depth, width)` instead of `(width, depth)`
    is_transposed: bool
    pieces: list[tuple[TensorRef, TensorRef | None, TensorRef]]  # weight, bias, output

    @property
    def merge_key(self) -> tuple[TensorRef, bool, torch.dtype, bool]:
        """A key that is equal for products that one call can compute with the same results as
        separate calls."""
        weight, _, out = self.pieces[0]
        is_wide = out.sizes[1] >= linear.MIN_TILE_WIDTH
        return self.x, self.is_transposed, weight.dtype, is_wide

    @property
    def reads(self) -> set[int]:
        inputs = [ref for weight, bias, _ in self.pieces for ref in (weight, bias)]
        return buffer_ids_of([self.x, *inputs])

    @property
    def writes(self) -> set[int]:
        return buffer_ids_of(out for *_, out in self.pieces)

    def pack(self, address: AddressOf, store: StoreBytes) -> PackedCall:
        x = self.x
        num_rows, depth = x.sizes
        x_fields = address(x), x.dtype, num_rows, depth, x.strides[0]
        has_codes = self.pieces[0][0].dtype is torch.int8
        pieces = []
        for weight, bias, out in self.pieces:
            bias_address = 0 if bias is None else address(bias)
            strides = weight.strides[0], out.strides[0]
            pieces.append((address(weight), bias_address, address(out), out.sizes[1], *strides))
        return "linear", linear.pack(
            x_fields, self.is_transposed, has_codes, pieces, best_path()
        )


@dataclass(eq=False)
class TorchOp:
    """A PyTorch operation, with [`TensorRef`]s in place of tensors."""

    function: Any  # torch._ops.OpOverload
    arguments: Any  # positional and keyword arguments
    # for each result: the `TensorRef` to copy it to, or the result itself if it is not a tensor;
    # empty if the operation works in place
    results: list[Any]
    reads: set[int]  # ids of buffers
    writes: set[int]


Entry = RowOps | KernelEntry | Linear | TorchOp


def lifetimes(entries: list[Entry]) -> dict[int, tuple[int, int]]:
    """Returns, by buffer id, the indices of the first and the last entry that use the buffer."""
    lifetime_by_id: dict[int, tuple[int, int]] = {}
    for index, entry in enumerate(entries):
        for buffer_id in entry.reads | entry.writes:
            first, _ = lifetime_by_id.get(buffer_id, (index, index))
            lifetime_by_id[buffer_id] = first, index
    return lifetime_by_id
