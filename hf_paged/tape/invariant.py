"""Batch-invariant forwards: a row's bits do not depend on the other rows, as each operation uses the kernels of tapes.

PyTorch's products, means and elementwise functions round differently with the number of rows, since blocking, thread
splits and the code for vector tails change. Computing in one order for every batch follows Thinking Machines'
`batch_invariant_ops` (He et al. 2025, "Defeating Nondeterminism in LLM Inference").
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
    inputs: dict[int, int]  # a tensor's index among the inputs, by its address when the program was made
    outputs: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]  # sizes, strides
    is_single: bool
    is_in_place: bool

    def __call__(self, tensors: list[Tensor]) -> Any:
        made = [torch.empty_strided(*found[:2], dtype=found[2], device="cpu") for found in self.outputs]
        starts = [tensor.data_ptr() for tensor in tensors]
        places = [tensor.data_ptr() for tensor in made if tensor.numel()]
        held: list[Any] = []

        def address(ref: Ref) -> int:
            return starts[self.inputs[ref.start]] if ref.value is None else places[ref.value] + ref.start

        def keep(data: bytes) -> int:
            held.append(ctypes.create_string_buffer(data, len(data)))
            return ctypes.addressof(held[-1])

        for entry in self.entries:
            name, packed = pack(entry, address, keep)
            if error := kernel(name)(packed):
                raise RuntimeError(f"the kernel {name!r} gave up with error {error}")
        if self.is_in_place:
            return tensors[0]
        return made[0] if self.is_single else tuple(made)


_UNKNOWN: Any = object()


class _Invariant(TorchDispatchMode):
    def __init__(self, programs: dict[Hashable, _Program | None]) -> None:
        super().__init__()
        self._programs = programs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            found = decompose(func, args, kwargs)
            if found is NotImplemented and func in _PARTS:
                found = _PARTS[func](*args, **kwargs)
        if found is not NotImplemented:
            return found
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func.is_view or not any(tensor.is_floating_point() and tensor.numel() for tensor in tensors):
            return func(*args, **kwargs)
        # tensors at one address may be read once, so the key says which share one
        first = {tensor.data_ptr(): number for number, tensor in enumerate(reversed(tensors))}
        key = func, *kwargs, *(_kind(leaf, first) for leaf in leaves)
        program = self._programs.get(key, _UNKNOWN)
        if program is _UNKNOWN:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            program = self._programs[key] = _program(func, args, kwargs, tensors)
        return func(*args, **kwargs) if program is None else program(tensors)


def _sum(x: Tensor, dims: Any, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    """Sums one dimension other than the last, in order, such as the outputs of a token's experts."""
    if not x.is_floating_point() or dims is None or len(dims) != 1 or dims[0] % x.dim() == x.dim() - 1:
        return NotImplemented
    first, *others = (part.float() for part in x.unbind(dims[0]))
    total = functools.reduce(torch.add, others, first).to(dtype or x.dtype)
    return total.unsqueeze(dims[0]) if keepdim else total


def _grouped_mm(x: Tensor, weights: Tensor, offs: Tensor | None = None, *others: Any, **options: Any) -> Any:
    """Multiplies rows of `x` by their group's weights; `offs` has the groups' ends."""
    if offs is None or x.dim() != 2 or weights.dim() != 3 or others or any(options.values()):
        return NotImplemented
    bounds = [0, *offs.tolist()]
    found = x.new_zeros(x.shape[0], weights.shape[2])
    for weight, start, end in zip(weights, bounds, bounds[1:]):
        if start < end:
            found[start:end] = x[start:end] @ weight
    return found


# operations computed from parts that have kernels
_PARTS: dict[Any, Callable[..., Any]] = {aten.sum.dim_IntList: _sum, aten._grouped_mm.default: _grouped_mm}


def _kind(leaf: Any, first: dict[int, int]) -> Hashable:
    if not isinstance(leaf, Tensor):
        return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf  # since -0.0 == 0.0 and NaN != NaN
    if type(leaf) not in (Tensor, torch.nn.Parameter) or not leaf.is_cpu:
        raise NotInvariant(f"{type(leaf).__name__} on {leaf.device}: the kernels take plain tensors on the CPU")
    return leaf.dtype, leaf.shape, leaf.stride(), first[leaf.data_ptr()]


def _program(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> _Program | None:
    """Makes an operation's program; `None` if PyTorch's own is batch-invariant. Raises [`NotInvariant`] if no kernel
    computes it."""
    if is_exact(func, args) or not any("Tensor" in str(found.type) for found in func._schema.returns):
        return None
    is_in_place = func._schema.is_mutable
    shaped = args[0] if is_in_place else func(*_on_meta(args), **_on_meta(kwargs))
    leaves = shaped if isinstance(shaped, (tuple, list)) else (shaped,)
    outputs = [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves]
    if not any(dtype.is_floating_point for *_, dtype in outputs):
        return None
    made = [torch.empty_strided(*output[:2], dtype=output[2], device="cpu") for output in outputs]
    found = args[0] if is_in_place else made[0] if isinstance(shaped, Tensor) else tuple(made)
    lowering = Lowering(lambda tensor: True)
    for tensor in () if is_in_place else made:
        lowering.values.add_outside(tensor)  # else stores to it would be dropped as unused
    try:
        entries = lowering.run([Operation(func, args, kwargs, found)])
    except NotCapturable as error:
        raise NotInvariant(str(error)) from None
    if not entries or any(isinstance(entry, Call) for entry in entries):
        kinds = "; ".join(f"{x.dtype} {tuple(x.shape)} {x.stride()}" for x in tensors)
        raise NotInvariant(f"no kernel computes {func} of {kinds}")
    inputs = {tensor.data_ptr(): number for number, tensor in reversed(list(enumerate(tensors)))}
    return _Program(entries, inputs, [] if is_in_place else outputs, isinstance(shaped, Tensor), is_in_place)


def _on_meta(x: Any) -> Any:
    return tree_map_only(Tensor, lambda y: torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="meta"), x)


_programs: dict[Hashable, _Program | None] = {}


@contextlib.contextmanager
def in_fixed_order() -> Iterator[None]:
    """Within it, kernels that this thread calls, and tapes it records, sum in an order that depends on the row only."""
    token = batch_invariant.set(True)
    try:
        yield
    finally:
        batch_invariant.reset(token)


class _OneLinear(TorchFunctionMode):
    """Runs `F.linear` as one product of rows, since PyTorch adds the bias at a point that depends on input strides."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        are_plain = all(x is None or type(x) in (Tensor, torch.nn.Parameter) for x in args)
        if func is not F.linear or kwargs or not are_plain:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        rows = x.reshape(-1, x.shape[-1])
        found = rows.mm(weight.t()) if not bias or bias[0] is None else torch.addmm(bias[0], rows, weight.t())
        return found.view(*x.shape[:-1], weight.shape[0])


@contextlib.contextmanager
def by_kernels() -> Iterator[None]:
    """For use in `in_fixed_order`: makes all that this thread computes batch-invariant. Raises [`NotInvariant`] before
    an operation without a kernel, `NotCapturable` before the content of a tensor goes to Python or NumPy. While a tape
    is recorded, the tape does this."""
    with _OneLinear(), contextlib.ExitStack() as stack:
        if observer.get() is None:
            stack.enter_context(NothingRead())
            stack.enter_context(_Invariant(_programs))
        yield
