"""Batch-invariant forwards: each operation runs the kernels of tapes, so that a row's bits do not
depend on the other rows. Leaves which operations have kernels to `lower.py`.

PyTorch's products, means and elementwise functions round differently for different numbers of rows:
their blocking, thread splits and code for vector tails change. Computing every batch in one order
follows Thinking Machines' `batch_invariant_ops` (He et al. 2025, "Defeating Nondeterminism in LLM
Inference").
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
from .entries import Kernel, Linear, TorchOp
from .exact import is_exact
from .lower import Lowering
from .products import ProductsOfRows
from .record import Operation, ReadGuard, decompose, tensors_in
from .rows import Rows
from .tape import keep

aten = torch.ops.aten

_MAX_PROGRAMS = 8192


class NotInvariant(NotPackable):
    """An operation has no batch-invariant kernel."""


class _Program(NamedTuple):
    """The kernels that compute an operation on tensors of certain shapes."""

    entries: list[Rows | Kernel | Linear]
    # a tensor's index among the inputs, by its address when the program was created
    inputs: dict[int, int]
    # sizes, strides, dtype; empty if the operation changes its first input
    outputs: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    is_single: bool

    def __call__(self, tensors: list[Tensor]) -> Any:
        outputs = [
            torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")
            for sizes, strides, dtype in self.outputs
        ]
        starts = [tensor.data_ptr() for tensor in tensors]
        output_starts = [tensor.data_ptr() for tensor in outputs if tensor.numel()]
        keep_all = functools.partial(keep, [])

        def address(ref: TensorRef) -> int:
            if ref.buffer_id is None:
                number = self.inputs[ref.offset]
                return starts[number]
            return output_starts[ref.buffer_id] + ref.offset

        for entry in self.entries:
            name, packed = entry.pack(address, keep_all)
            error = kernel(name)(packed)
            if error:
                raise RuntimeError(f"the kernel {name!r} failed with error {error}")
        if not outputs:
            return tensors[0]
        if self.is_single:
            return outputs[0]
        return tuple(outputs)


_MISSING: Any = object()


_programs: dict[Hashable, _Program | None] = {}


class _Invariant(TorchDispatchMode):
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
            if result is NotImplemented and func in _PARTS:
                result = _PARTS[func](*args, **kwargs)
        if result is not NotImplemented:
            return result
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func.is_view:
            return func(*args, **kwargs)
        has_floats = any(tensor.is_floating_point() and tensor.numel() for tensor in tensors)
        if not has_floats:
            return func(*args, **kwargs)
        # a program may read tensors at one address once, so the key says which tensors share one
        backwards = reversed(list(enumerate(tensors)))
        first = {tensor.data_ptr(): number for number, tensor in backwards}
        kinds = (_kind(leaf, first) for leaf in leaves)
        key = func, *kwargs, *kinds
        program = _programs.get(key, _MISSING)
        if program is _MISSING:
            if len(_programs) >= _MAX_PROGRAMS:
                _programs.clear()
            program = _program(func, args, kwargs, first)
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
    """Sums one dimension other than the last in order: of the outputs of a token's experts, say."""
    if not x.is_floating_point() or dims is None or len(dims) != 1:
        return NotImplemented
    (dim,) = dims
    last_dim = x.dim() - 1
    if dim % x.dim() == last_dim:
        return NotImplemented
    parts = x.unbind(dim)
    first, *others = (part.float() for part in parts)
    total = functools.reduce(torch.add, others, first)
    total = total.to(dtype or x.dtype)
    if keepdim:
        return total.unsqueeze(dim)
    return total


def _grouped_mm(
    x: Tensor,
    weights: Tensor,
    offs: Tensor | None = None,
    *others: Any,
    **options: Any,
) -> Any:
    """Multiplies the rows of `x` by their group's weights; `offs` holds the ends of the groups."""
    if offs is None or x.dim() != 2 or weights.dim() != 3 or others or any(options.values()):
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


# operations that are computed by several others, which have kernels
_PARTS: dict[Any, Callable[..., Any]] = {
    aten.sum.dim_IntList: _sum,
    aten._grouped_mm.default: _grouped_mm,
}


def _kind(leaf: Any, first: dict[int, int]) -> Hashable:
    if not isinstance(leaf, Tensor):
        # `repr`, since -0.0 == 0.0 and NaN != NaN
        if isinstance(leaf, float):
            return type(leaf), repr(leaf)
        return type(leaf), leaf
    is_plain = type(leaf) in (Tensor, torch.nn.Parameter)
    if not is_plain or not leaf.is_cpu:
        raise NotInvariant(
            f"{type(leaf).__name__} on {leaf.device}: the kernels take plain tensors on the CPU"
        )
    number = first[leaf.data_ptr()]
    return leaf.dtype, leaf.shape, leaf.stride(), number


def _program(
    func: Any,
    args: Any,
    kwargs: Any,
    inputs: dict[int, int],
) -> _Program | None:
    """Creates an operation's program; `None` if PyTorch's operation is batch-invariant itself.
    Raises [`NotInvariant`] if no kernel computes it."""
    returns_tensors = any("Tensor" in str(x.type) for x in func._schema.returns)
    if is_exact(func, args, kwargs) or not returns_tensors:
        return None
    result = args[0]
    outputs: list[Tensor] = []
    if not func._schema.is_mutable:
        on_meta = func(*_empty_like(args, "meta"), **_empty_like(kwargs, "meta"))
        result = _empty_like(on_meta, "cpu")
        outputs = tree_leaves(result)
    if not any(tensor.is_floating_point() for tensor in tensors_in(result)):
        return None
    lowering = Lowering(lambda tensor: True)
    for tensor in outputs:
        lowering.buffers.add_fixed(tensor)  # so that stores to it are not dropped as unused
    operation = Operation(func, args, kwargs, result)
    try:
        entries = lowering.run([operation])
    except NotCapturable as error:
        raise NotInvariant(str(error)) from None
    packable = [entry for entry in entries if not isinstance(entry, TorchOp)]
    # in a fixed order, the lowering refuses operations that are neither exact nor kernels
    assert entries and len(packable) == len(entries)
    layouts = [(x.shape, x.stride(), x.dtype) for x in outputs]
    return _Program(packable, inputs, layouts, isinstance(result, Tensor))


def _empty_like(x: Any, device: str) -> Any:
    """Replaces the tensors in `x` by empty ones of the same sizes and strides."""

    def empty(y: Tensor) -> Tensor:
        return torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=device)

    return tree_map_only(Tensor, empty, x)


@restoring
def in_fixed_order() -> Iterator[None]:
    """Within the context, kernels that this thread calls, and tapes that it records, sum in an
    order that depends only on the row."""
    token = batch_invariant.set(True)
    try:
        yield
    finally:
        batch_invariant.reset(token)


@restoring
def by_kernels() -> Iterator[None]:
    """For use in `in_fixed_order`: makes this thread's operations batch-invariant. Raises
    [`NotInvariant`] before an operation without a kernel, and `NotCapturable` before Python or
    NumPy reads a tensor. While a tape is recorded, the recording does this."""
    with ProductsOfRows(), contextlib.ExitStack() as stack:
        if observer.get() is None:
            stack.enter_context(ReadGuard())
            stack.enter_context(_Invariant())
        yield
