"""The entries of a tape, except row operations: calls of C++ kernels, matrix products, PyTorch's
operations and calls of modules. Packs the arguments of the entries that run in C++. `tape.py` runs
the entries."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..kernels.cpp import linear
from ..kernels.cpp.build import best_path
from .buffers import AddressOf, PackedCall, StoreBytes, TensorRef, buffer_ids_of
from .columns import with_stored_columns
from .live import LiveRefused, LiveValue
from .rows import RowOps


def check_kernel(name: str, error: int) -> None:
    """Raises `MemoryError` or `RuntimeError` if a kernel returned an error."""
    if error == 6:
        raise MemoryError(f"not enough memory for the kernel {name!r}")
    if error:
        raise RuntimeError(f"the kernel {name!r} failed with error {error}")


@dataclass(eq=False)
class KernelEntry:
    """A call of a C++ kernel. `packed`: its argument struct, in which `pack` fills in the
    addresses."""

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


class LinearPiece(NamedTuple):
    """One weight of a [`Linear`], with its bias, its output and, for int8, its zeros and scales."""

    weight: TensorRef
    bias: TensorRef | None
    out: TensorRef
    zeros: TensorRef | None = None  # (width, groups) int8; only of an int8 weight
    scales: TensorRef | None = None  # (width, groups); only of an int8 weight

    @property
    def code_format(self) -> linear.CodeFormat | None:
        """How the weight is stored; `None` if it is not int8."""
        if self.weight.dtype is not torch.int8:
            return None
        if self.scales is None:
            return linear.CodeFormat()
        length = self.weight.sizes[1] // self.scales.sizes[1]
        return linear.CodeFormat(length, self.scales.dtype)


@dataclass(eq=False)
class Linear:
    """`y = x W^T + b` for several weights with the same `x` `(rows, depth)`."""

    x: TensorRef
    # whether weights are stored as `(depth, width)` instead of `(width, depth)`
    is_transposed: bool
    pieces: list[LinearPiece]

    @property
    def merge_key(self) -> Hashable:
        """A key that is equal for products that one call can compute with the same results as
        separate calls."""
        piece = self.pieces[0]
        is_wide = piece.out.sizes[1] >= linear.MIN_TILE_WIDTH
        return self.x, self.is_transposed, piece.code_format, is_wide

    @property
    def reads(self) -> set[int]:
        # codes, zeros and scales are constants
        inputs = [ref for piece in self.pieces for ref in (piece.weight, piece.bias)]
        return buffer_ids_of([self.x, *inputs])

    @property
    def writes(self) -> set[int]:
        return buffer_ids_of(piece.out for piece in self.pieces)

    def pack(self, address: AddressOf, store: StoreBytes) -> PackedCall:
        x = self.x
        num_rows, depth = x.sizes
        x_fields = address(x), x.dtype, num_rows, depth, x.strides[0]
        pieces = []
        for weight, bias, out, *codes in self.pieces:
            bias_address, *code_addresses = (0 if y is None else address(y) for y in (bias, *codes))
            sizes = out.sizes[1], weight.strides[0], out.strides[0]
            pieces.append((address(weight), bias_address, address(out), *sizes, *code_addresses))
        code_format = self.pieces[0].code_format
        return "linear", linear.pack(x_fields, self.is_transposed, code_format, pieces, best_path())


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


@dataclass(eq=False)
class ModuleCall:
    """A call of a live module (`live.py`), with [`TensorRef`]s in place of tensors."""

    module: weakref.ref[nn.Module]
    arguments: Any  # positional and keyword arguments
    # for its result, or for each item of the tuple or list that it returns: the `TensorRef` to copy
    # a tensor to, `None` for `None`, a `LiveValue` for any other value
    results: list[Any]
    result_type: type  # tuple, list or `Tensor`
    reads: set[int]  # ids of buffers
    writes: set[int]

    def bind(
        self, tensor_of: Callable[[TensorRef], Tensor], values: dict[int, Any]
    ) -> Callable[[], None]:
        """Returns a function that calls the module on the tape's memory. `values`: the values of
        the tape's `LiveValue`s in a replay, by `id` of the `LiveValue`; the function reads and sets
        them. It raises [`LiveRefused`] if the result is unlike the recorded one."""
        arguments = tree_map_only(TensorRef, tensor_of, self.arguments)
        leaves, spec = tree_flatten(arguments)
        targets = tree_map_only(TensorRef, tensor_of, self.results)
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}

        def run() -> None:
            current = [values[id(leaf)] if type(leaf) is LiveValue else leaf for leaf in leaves]
            args, kwargs = with_stored_columns(tree_unflatten(current, spec))
            module = self.module()
            assert module is not None
            with torch.no_grad():
                result = module(*args, **kwargs)
                is_sequence = self.result_type is not Tensor
                items = result if is_sequence else [result]
                if type(result) is not self.result_type or len(items) != len(targets):
                    raise LiveRefused(type(module), "returns results of different types")
                for target, item in zip(targets, items):
                    if type(target) is LiveValue:
                        values[id(target)] = item
                    elif not _is_alike(target, item):
                        raise LiveRefused(type(module), "returns tensors of different sizes")
                    elif target is not None:
                        if item.untyped_storage()._cdata in storages:
                            raise LiveRefused(type(module), "returns its argument in some steps")
                        target.copy_(item)

        return run


def _is_alike(target: Tensor | None, result: Any) -> bool:
    """Whether a live module's result can be copied to `target` without a conversion, or both are
    `None`."""
    if target is None:
        return result is None
    if not isinstance(result, Tensor) or result.shape != target.shape:
        return False
    return result.dtype is target.dtype and result.device == target.device


Entry = RowOps | KernelEntry | Linear | TorchOp | ModuleCall


def lifetimes(entries: list[Entry]) -> dict[int, tuple[int, int]]:
    """Returns, by buffer id, the indices of the first and the last entry that use the buffer."""
    lifetime_by_id: dict[int, tuple[int, int]] = {}
    for index, entry in enumerate(entries):
        for buffer_id in entry.reads | entry.writes:
            first, _ = lifetime_by_id.get(buffer_id, (index, index))
            lifetime_by_id[buffer_id] = first, index
    return lifetime_by_id
