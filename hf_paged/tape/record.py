"""Records the operations of a forward, of PyTorch and of our kernels, with the tensors that they took and made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..kernels.cpp.build import observer
from ..kernels.triton import launch
from ..step import NotCapturable

aten = torch.ops.aten
_LAZY = frozenset({aten._conj.default, aten._neg_view.default})
_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
_COPIES = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default})
_READS_AT = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten.index.Tensor_out})
_WRITES_AT = frozenset({torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default})


class NothingUnrecorded(TorchDispatchMode):
    """Raises [`NotCapturable`] before an operation that waits for the device, copies to or from it, or draws random
    numbers: in this thread alone, unlike torch's sync debug mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = getattr(func, "tags", ())
        waits = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        if func in _READS_AT:  # the tag is for masks: the host has to know how many elements they choose
            waits = _has_mask(args[1])
        elif func in _WRITES_AT:
            waits = _has_mask(args[1]) and args[2].numel() > 1
        if waits:
            raise NotCapturable(f"its forward waits for the device ({func})")
        if torch.Tag.nondeterministic_seeded in tags:
            raise NotCapturable(f"its forward draws random numbers ({func})")
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func in _COPIES:
            tensors = [x for x in (found, *args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            if len({tensor.device.type for tensor in tensors}) > 1:
                raise NotCapturable(f"its forward copies between host and device ({func})")
        return found


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class NothingRead(TorchFunctionMode):
    """Raises [`NotCapturable`] before the content of a tensor on the CPU goes to Python or NumPy: what is made of it is
    no operation that would run again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise NotCapturable(f"its forward reads the content of a tensor (Tensor.{func.__name__})")
        return func(*args, **(kwargs or {}))


def decompose(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation by its parts, as where autograd takes it apart; `NotImplemented` if it has none."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return NotImplemented
    return func.decompose(*args, **kwargs)


class Operation(NamedTuple):
    """One that PyTorch dispatched."""

    function: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    found: Any


class KernelCall(NamedTuple):
    """One of our C++ kernels: the packed struct, and the tensors whose addresses it has, by the place in it."""

    name: str
    packed: bytes
    reads: dict[int, Tensor]
    writes: dict[int, Tensor]


class Launched(NamedTuple):
    """A launch of one of our Triton kernels: its arguments by place and by name, and what it wrote."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: list[Tensor]


Recorded = Operation | KernelCall | Launched


class _Recorder(NothingUnrecorded):
    def __init__(self, operations: list[Recorded]) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            found = decompose(func, args, kwargs)
        if found is not NotImplemented:
            return found
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _LAZY:
            raise NotCapturable(f"its forward conjugates or negates without computing ({func})")
        # aliases: the shapes of tensors may be changed in place later
        self._operations.append(Operation(func, *tree_map_only(Tensor, aten.alias.default, (args, kwargs, found))))
        return found


@contextlib.contextmanager
def recording() -> Iterator[list[Recorded]]:
    """What this thread computes within it. Raises [`NotCapturable`] for what cannot be run again as it was."""
    operations: list[Recorded] = []
    token = observer.set(lambda *call: operations.append(KernelCall(*call)))
    other = launch.observer.set(lambda *call: operations.append(Launched(*call)))
    try:
        with NothingRead(), _Recorder(operations):
            yield operations
    finally:
        launch.observer.reset(other)
        observer.reset(token)
