"""Batch-invariant forwards: each operation runs immediately, with the kernels of tapes, so that the
bits of a row do not depend on the other rows. `lower.py` decides which operations have kernels.

PyTorch's products, means and elementwise functions round differently for different numbers of rows,
since their blocking, their division among threads and their code for vector tails depend on it. Our
kernels compute every row in the same order in any batch, as do those of Thinking Machines'
`batch_invariant_ops` (He et al. 2025, "Defeating Nondeterminism in LLM Inference").
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..interrupts import restoring
from ..kernels.cpp.build import batch_invariant, kernel, observer
from ..step import NotCapturable, NotPackable
from .buffers import TensorRef
from .entries import KernelEntry, Linear, ModuleCall, TorchOp, check_kernel
from .exact import is_batch_invariant
from .lower import Lowering
from .products import RowProducts
from .record import Operation, ReadGuard, decompose, tensors_in
from .rows import RowOps
from .tape import store_bytes

aten = torch.ops.aten

_MAX_PROGRAMS = 8192  # once there are this many, the next one replaces all of them


class NotInvariant(NotPackable):
    """An operation has no batch-invariant kernel."""


class _Program(NamedTuple):
    """The kernels that compute an operation on tensors of certain shapes."""

    entries: list[RowOps | KernelEntry | Linear]
    # the index of each input tensor, by the address that it had when the program was created
    inputs: dict[int, int]
    # sizes, strides and dtype of each output; empty if the operation changes its first input
    outputs: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    returns_one: bool  # whether the operation returns a tensor, not a tuple

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Runs the kernels on `tensors`, the operation's inputs; returns its result."""
        outputs = [
            torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")
            for sizes, strides, dtype in self.outputs
        ]
        input_addresses = [tensor.data_ptr() for tensor in tensors]
        output_addresses = [tensor.data_ptr() for tensor in outputs if tensor.numel()]
        store = functools.partial(store_bytes, [])

        def address(ref: TensorRef) -> int:
            if ref.buffer_id is None:
                index = self.inputs[ref.offset]
                return input_addresses[index]
            return output_addresses[ref.buffer_id] + ref.offset

        for entry in self.entries:
            name, packed = entry.pack(address, store)
            check_kernel(name, kernel(name)(packed))
        if not outputs:
            return tensors[0]
        if self.returns_one:
            return outputs[0]
        return tuple(outputs)


_MISSING: Any = object()
# `None` for operations that PyTorch runs, since they are batch-invariant or return no floats
_programs: dict[Hashable, _Program | None] = {}


class _BatchInvariantMode(TorchDispatchMode):
    """Runs each operation on floats by its program, or by PyTorch if its program is `None`."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            result = decompose(func, args, kwargs)
            if result is NotImplemented and func in _DECOMPOSITIONS:
                result = _DECOMPOSITIONS[func](*args, **kwargs)
        if result is not NotImplemented:
            return result
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func.is_view:
            return func(*args, **kwargs)
        has_floats = any(tensor.is_floating_point() and tensor.numel() for tensor in tensors)
        if not has_floats:
            return func(*args, **kwargs)
        # programs identify inputs by address, so the key includes which inputs share an address
        in_reverse = reversed(list(enumerate(tensors)))
        index_by_address = {tensor.data_ptr(): index for index, tensor in in_reverse}
        leaf_keys = (_leaf_key(leaf, index_by_address) for leaf in leaves)
        key = func, *kwargs, *leaf_keys
        program = _programs.get(key, _MISSING)
        if program is _MISSING:
            if len(_programs) >= _MAX_PROGRAMS:
                _programs.clear()
            program = _create_program(func, args, kwargs, index_by_address)
            _programs[key] = program
        if program is None:
            return func(*args, **kwargs)
        return program(tensors)


def _sum(
    x: Tensor,
    dims: Any,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Computes `aten::sum` of floats over one dimension other than the last (such as the dimension
    of a token's experts), in order. Returns `NotImplemented` for other calls."""
    if not x.is_floating_point() or dims is None or len(dims) != 1:
        return NotImplemented
    if not x.dim():
        return x.to(dtype or x.dtype, copy=True)
    (dim,) = dims
    last_dim = x.dim() - 1
    if dim % x.dim() == last_dim:
        return NotImplemented
    slices = x.unbind(dim)
    first, *following = (part.float() for part in slices)
    total = functools.reduce(torch.add, following, first)
    total = total.to(dtype or x.dtype)
    if keepdim:
        return total.unsqueeze(dim)
    return total


def _grouped_mm(
    x: Tensor,
    weights: Tensor,
    offs: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Computes `aten::_grouped_mm`: multiplies the rows of `x` `(n, depth)` by the weights of their
    group, `(groups, depth, width)`. `offs` `(groups,)` holds the row at which each group ends.
    Returns `NotImplemented` for other calls."""
    if offs is None or x.dim() != 2 or weights.dim() != 3 or args or any(kwargs.values()):
        return NotImplemented
    ends = offs.tolist()
    starts = [0, *ends]
    width = weights.shape[2]
    out = x.new_zeros(x.shape[0], width)
    for weight, start, end in zip(weights, starts, ends):
        if start < end:
            rows = x[start:end]
            out[start:end] = rows @ weight
    return out


# operations that these functions compute with other operations, for which there are kernels
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.sum.dim_IntList: _sum,
    aten._grouped_mm.default: _grouped_mm,
}


def _leaf_key(leaf: Any, index_by_address: dict[int, int]) -> Hashable:
    """Returns the part of a program's key for one argument. Raises [`NotInvariant`] for a tensor
    that is not a plain CPU tensor."""
    if not isinstance(leaf, Tensor):
        # `repr`, since -0.0 == 0.0 and NaN != NaN
        if isinstance(leaf, float):
            return type(leaf), repr(leaf)
        return type(leaf), leaf
    is_plain = type(leaf) in (Tensor, torch.nn.Parameter)
    if not is_plain or not leaf.is_cpu:
        raise NotInvariant(
            f"an operation gets a tensor of type {type(leaf).__name__} on {leaf.device}, but the"
            " batch-invariant kernels take only plain tensors on the CPU"
        )
    index = index_by_address[leaf.data_ptr()]
    return leaf.dtype, leaf.shape, leaf.stride(), index


def _create_program(
    func: Any,
    args: Any,
    kwargs: Any,
    inputs: dict[int, int],
) -> _Program | None:
    """Returns an operation's program; `None` if the operation is batch-invariant in PyTorch or
    returns no floats. `inputs`: as in `_Program`. Raises [`NotInvariant`] if no kernel computes the
    operation."""
    returns_tensors = any("Tensor" in str(x.type) for x in func._schema.returns)
    if is_batch_invariant(func, args, kwargs) or not returns_tensors:
        return None
    result = args[0]
    outputs: list[Tensor] = []
    if not func._schema.is_mutable:
        meta_result = func(*_empty_like(args, "meta"), **_empty_like(kwargs, "meta"))
        result = _empty_like(meta_result, "cpu")
        outputs = tree_leaves(result)
    if not any(tensor.is_floating_point() for tensor in tensors_in(result)):
        return None
    lowering = Lowering(lambda tensor: True)
    for tensor in outputs:
        lowering.buffers.add_fixed(tensor)  # stores to fixed buffers are not dropped
    operation = Operation(func, args, kwargs, result)
    try:
        entries = lowering.run([operation])
    except NotCapturable as error:
        raise NotInvariant(str(error)) from None
    kernels = [entry for entry in entries if not isinstance(entry, (TorchOp, ModuleCall))]
    # `batch_invariant` is set, so the lowering refuses operations that neither PyTorch nor a kernel
    # computes batch-invariantly
    assert entries and len(kernels) == len(entries)
    layouts = [(x.shape, x.stride(), x.dtype) for x in outputs]
    return _Program(kernels, inputs, layouts, isinstance(result, Tensor))


def _empty_like(x: Any, device: str) -> Any:
    """Replaces the tensors in `x` by uninitialized ones on `device` with the same layout."""

    def empty(y: Tensor) -> Tensor:
        return torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=device)

    return tree_map_only(Tensor, empty, x)


@restoring
def in_fixed_order() -> Iterator[None]:
    """A context in which kernels that this thread calls, and tapes that it records, sum in an order
    that depends only on the row."""
    token = batch_invariant.set(True)
    try:
        yield
    finally:
        batch_invariant.reset(token)


@restoring
def batch_invariant_operations() -> Iterator[None]:
    """A context, to be used inside `in_fixed_order`, that makes this thread's operations
    batch-invariant. Raises [`NotInvariant`] before an operation without a kernel, and
    `NotCapturable` before a read of a tensor's content that `ReadGuard` refuses. While a tape is
    recorded, it only reshapes products (`RowProducts`), since the recording does the rest."""
    with RowProducts(), contextlib.ExitStack() as stack:
        if observer.get() is None:
            stack.enter_context(ReadGuard())
            stack.enter_context(_BatchInvariantMode())
        yield
