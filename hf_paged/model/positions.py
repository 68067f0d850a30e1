"""Tables of positions that a model's forward reads: how they are recognised, and which of them
end."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class Table(NamedTuple):
    """An axis of which a forward reads place `offset + position`."""

    size: int
    offset: int
    # whether it is one of a parameter, which no forward replaces by a longer one
    is_parameter: bool


class PositionReads(TorchDispatchMode):
    """Around a forward of the one token at `position`: collects in `tables` all of which the
    forward reads one place. Raises `IndexError` before a read past an axis's end, which on a GPU
    would end the process."""

    def __init__(self, position: int, model: nn.Module) -> None:
        super().__init__()
        self.position = position
        self.tables = set[Table]()
        held = (x for module in model.modules() for part in _parts(module) for x in part.values())
        self._addresses = {x.untyped_storage().data_ptr() for x in held if _is_plain(x)}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        reads = _reads(func.overloadpacket, args)
        # code cuts what it computes for many reasons; it cuts a table of the model, or takes the
        # end of one (MPT)
        if func is _aten.slice.Tensor and not (self._is_of_model(args[0]) or _takes_end(args)):
            reads = []
        for size, places in reads:
            if places and max(places) >= size:
                raise IndexError(f"place {max(places)} is read of {size}")
            if len(places) == 1:
                self.tables.add(
                    Table(size, min(places) - self.position, isinstance(args[0], nn.Parameter))
                )
        return func(*args, **(kwargs or {}))

    def _is_of_model(self, tensor: Tensor) -> bool:
        return _is_plain(tensor) and tensor.untyped_storage().data_ptr() in self._addresses


def _parts(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, vars(module)


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter, nn.Buffer) and value.layout is torch.strided


def _takes_end(args: tuple[Any, ...]) -> bool:
    """Whether a slice is `x[start:]`."""
    _, axis, start, end = (*args, 0, None, None)[:4]
    return bool(start) and start > 0 and (end is None or end >= args[0].shape[axis])


def _reads(kind: Any, args: tuple[Any, ...]) -> list[tuple[int, set[int]]]:
    """Returns the size of each axis that an operation reads in part, and which places it reads; of
    a slice one end."""
    if kind is _aten.embedding:
        return [(len(args[0]), _values(args[1]))]
    if kind in (_aten.gather, _aten.index_select) and args[0].dim():
        return [(args[0].shape[args[1]], _values(args[2]))]
    if kind is _aten.index:
        indices = enumerate(args[1])
        return [(args[0].shape[axis], _values(index)) for axis, index in indices if _counts(index)]
    if kind is _aten.slice:
        axis, start, end = (*args[1:], 0, None, None)[:3] if len(args) > 3 else (0, 0, None)
        size = args[0].shape[axis]
        if not start or start < 0:  # `x[:end]`
            return [(size, {end - 1})] if end is not None and 0 < end < size else []
        if end is None or end > size:  # `x[size - length:]`: a table that is read from its end
            # nothing is left, which is no error
            return [(size, {size - 1 - start})] if start < size else []
        return [(size, {end - 1})]
    return []


def _counts(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.int64, torch.int32)


def _values(index: Tensor) -> set[int]:
    return set(index.flatten().tolist())


def shorten(model: nn.Module, size: int, length: int) -> bool:
    """Cuts all buffers of the model with an axis of `size`, and tensors kept like them, to `length`
    places; returns whether there are any. For use where attributes of modules are restored."""
    is_shorter = False
    for module in model.modules():
        for held in _parts(module)[1:]:
            for name, value in list(held.items()):
                if (
                    isinstance(value, Tensor)
                    and not isinstance(value, nn.Parameter)
                    and size in value.shape
                ):
                    held[name] = value.narrow(value.shape.index(size), 0, length)
                    is_shorter = True
    return is_shorter
