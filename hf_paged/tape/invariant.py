"""Batch-invariant forwards: a row's bits do not depend on the other rows, as each operation uses
the kernels of tapes.

PyTorch's products, means and elementwise functions round differently with the number of rows, since
blocking, thread splits and the code for vector tails change. Computing in one order for every batch
follows Thinking Machines' `batch_invariant_ops` (He et al. 2025, "Defeating Nondeterminism in LLM
Inference").
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..interrupts import restoring
from ..kernels.cpp.build import batch_invariant, kernel, observer
from ..step import NotCapturable, NotPackable
from .lower import Call, Entry, Lowering, is_exact
from .record import NothingRead, Operation, decompose
from .tape import pack
from .values import Ref

aten = torch.ops.aten

_MAX_PROGRAMS = 8192


class NotInvariant(NotPackable):
    """An operation without a batch-invariant kernel."""


class _Program(NamedTuple):
    """An operation on tensors of given shapes, as kernels."""

    entries: list[Entry]
    # a tensor's index among the inputs, by its address when the program was made
    inputs: dict[int, int]
    outputs: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]  # sizes, strides
    is_single: bool
    is_in_place: bool

    def __call__(self, tensors: list[Tensor]) -> Any:
        made = [
            torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")
            for sizes, strides, dtype in self.outputs
        ]
        starts = [tensor.data_ptr() for tensor in tensors]
        places = [tensor.data_ptr() for tensor in made if tensor.numel()]
        held: list[Any] = []

        def address(ref: Ref) -> int:
            if ref.value is None:
                number = self.inputs[ref.start]
                return starts[number]
            return places[ref.value] + ref.start

        def keep(data: bytes) -> int:
            buffer = ctypes.create_string_buffer(data, len(data))
            held.append(buffer)
            return ctypes.addressof(buffer)

        for entry in self.entries:
            name, packed = pack(entry, address, keep)
            error = kernel(name)(packed)
            if error:
                raise RuntimeError(f"the kernel {name!r} gave up with error {error}")
        if self.is_in_place:
            return tensors[0]
        if self.is_single:
            return made[0]
        return tuple(made)


_UNKNOWN: Any = object()


class _Invariant(TorchDispatchMode):
    def __init__(self, programs: dict[Hashable, _Program | None]) -> None:
        super().__init__()
        self._programs = programs

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            found = decompose(func, args, kwargs)
            if found is NotImplemented and func in _PARTS:
                found = _PARTS[func](*args, **kwargs)
        if found is not NotImplemented:
            return found
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func.is_view:
            return func(*args, **kwargs)
        has_floats = any(tensor.is_floating_point() and tensor.numel() for tensor in tensors)
        if not has_floats:
            return func(*args, **kwargs)
        # tensors at one address may be read once, so the key says which share one
        backwards = enumerate(reversed(tensors))
        first = {tensor.data_ptr(): number for number, tensor in backwards}
        kinds = (_kind(leaf, first) for leaf in leaves)
        key = func, *kwargs, *kinds
        program = self._programs.get(key, _UNKNOWN)
        if program is _UNKNOWN:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            program = _program(func, args, kwargs, tensors)
            self._programs[key] = program
        if program is None:
            return func(*args, **kwargs)
        return program(tensors)


def _sum(
    x: Tensor,
    dims: Any,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Sums one dimension other than the last, in order, such as the outputs of a token's
    experts."""
    if not x.is_floating_point():
        return NotImplemented
    if dims is None or len(dims) != 1:
        return NotImplemented
    dim = dims[0]
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
    """Multiplies rows of `x` by their group's weights; `offs` has the groups' ends."""
    if offs is None or x.dim() != 2 or weights.dim() != 3:
        return NotImplemented
    if others or any(options.values()):
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


# operations computed from parts that have kernels
_PARTS: dict[Any, Callable[..., Any]] = {
    aten.sum.dim_IntList: _sum,
    aten._grouped_mm.default: _grouped_mm,
}


def _kind(leaf: Any, first: dict[int, int]) -> Hashable:
    if not isinstance(leaf, Tensor):
        # since -0.0 == 0.0 and NaN != NaN
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
    tensors: list[Tensor],
) -> _Program | None:
    """Makes an operation's program; `None` if PyTorch's own is batch-invariant. Raises
    [`NotInvariant`] if no kernel computes it."""
    if is_exact(func, args):
        return None
    results = func._schema.returns
    returns_tensors = any("Tensor" in str(result.type) for result in results)
    if not returns_tensors:
        return None
    is_in_place = func._schema.is_mutable
    if is_in_place:
        shaped = args[0]
    else:
        meta_args = _on_meta(args)
        meta_kwargs = _on_meta(kwargs)
        shaped = func(*meta_args, **meta_kwargs)
    leaves = shaped
    if not isinstance(shaped, (tuple, list)):
        leaves = (shaped,)
    outputs = [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves]
    has_floats = any(dtype.is_floating_point for *_, dtype in outputs)
    if not has_floats:
        return None
    made = [
        torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")
        for sizes, strides, dtype in outputs
    ]
    is_single = isinstance(shaped, Tensor)
    if is_in_place:
        result = args[0]
    elif is_single:
        result = made[0]
    else:
        result = tuple(made)
    lowering = Lowering(lambda tensor: True)
    if not is_in_place:
        for tensor in made:
            lowering.values.add_outside(tensor)  # else stores to it would be dropped as unused
    operation = Operation(func, args, kwargs, result)
    try:
        entries = lowering.run([operation])
    except NotCapturable as error:
        raise NotInvariant(str(error)) from None
    has_calls = any(isinstance(entry, Call) for entry in entries)
    if not entries or has_calls:
        kinds = "; ".join(f"{x.dtype} {tuple(x.shape)} {x.stride()}" for x in tensors)
        raise NotInvariant(f"no kernel computes {func} of {kinds}")
    numbered = list(enumerate(tensors))
    inputs = {tensor.data_ptr(): number for number, tensor in reversed(numbered)}
    if is_in_place:
        outputs = []
    return _Program(entries, inputs, outputs, is_single, is_in_place)


def _on_meta(x: Any) -> Any:
    return tree_map_only(
        Tensor, lambda y: torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="meta"), x
    )


_programs: dict[Hashable, _Program | None] = {}


@restoring
def in_fixed_order() -> Iterator[None]:
    """Within it, kernels that this thread calls, and tapes it records, sum in an order that depends
    on the row only."""
    token = batch_invariant.set(True)
    try:
        yield
    finally:
        batch_invariant.reset(token)


class _OneLinear(TorchFunctionMode):
    """Runs `F.linear` as one product of rows, since PyTorch adds the bias at a point that depends
    on input strides."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        are_plain = all(x is None or type(x) in (Tensor, torch.nn.Parameter) for x in args)
        if func is not F.linear or kwargs or not are_plain:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        depth = x.shape[-1]
        rows = x.reshape(-1, depth)
        transposed = weight.t()
        if not bias or bias[0] is None:
            out = rows.mm(transposed)
        else:
            out = torch.addmm(bias[0], rows, transposed)
        width = weight.shape[0]
        return out.view(*x.shape[:-1], width)


@restoring
def by_kernels() -> Iterator[None]:
    """For use in `in_fixed_order`: makes all that this thread computes batch-invariant. Raises
    [`NotInvariant`] before an operation without a kernel, `NotCapturable` before the content of a
    tensor goes to Python or NumPy. While a tape is recorded, the tape does this."""
    with _OneLinear(), contextlib.ExitStack() as stack:
        if observer.get() is None:
            stack.enter_context(NothingRead())
            stack.enter_context(_Invariant(_programs))
        yield
