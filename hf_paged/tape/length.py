"""The number of stored positions in the forward of a recorded rectangle step: a tensor, from which
model code can compute position ids, and which it can compare with Python numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Compare = Callable[[int, int], bool]

# the functions that the operators of tensors call; `+=` makes a new length, as with an int
_SUMS = {Tensor.add: 1, Tensor.add_: 1, Tensor.sub: -1, Tensor.sub_: -1}
_COMPARISONS: dict[Callable[..., Any], Compare] = {
    Tensor.gt: operator.gt,
    Tensor.ge: operator.ge,
    Tensor.lt: operator.lt,
    Tensor.le: operator.le,
    Tensor.__eq__: operator.eq,
    Tensor.ne: operator.ne,
}


class LengthRange:
    """The lengths, `least` to `most` inclusive, for which every comparison gives its recorded
    result."""

    def __init__(self) -> None:
        self.least = 0
        self.most: float = float("inf")

    def narrow(self, least: int | None, most: int | None) -> None:
        if least is not None:
            self.least = max(self.least, least)
        if most is not None:
            self.most = min(self.most, most)

    def __contains__(self, length: int) -> bool:
        return self.least <= length <= self.most


class Length(Tensor):
    """The length of the cache plus `offset`, `()` int64. A comparison with a Python number returns
    a constant, which replays reuse, and narrows the `bounds` of lengths that may be replayed."""

    tensor: Tensor  # this length as an ordinary tensor
    recorded_value: int
    offset: int
    bounds: LengthRange

    @staticmethod
    def __new__(
        cls, tensor: Tensor, recorded_value: int, bounds: LengthRange, offset: int = 0
    ) -> Length:
        length = Tensor._make_subclass(cls, tensor)
        length.tensor = tensor
        length.recorded_value = recorded_value
        length.bounds = bounds
        length.offset = offset
        return length

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(args) == 2 and isinstance(args[0], Length) and type(args[1]) is int:
            length, other = args
            if func in _COMPARISONS:
                return length._compare(_COMPARISONS[func], other)
            if func in _SUMS:
                return length._plus(_SUMS[func] * other)
        args, kwargs = tree_map_only(Length, operator.attrgetter("tensor"), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _plus(self, delta: int) -> Length:
        value, offset = self.recorded_value + delta, self.offset + delta
        return Length(self.tensor + delta, value, self.bounds, offset)

    def _compare(self, operation: Compare, other: int) -> bool:
        """Compares with a number, and narrows the bounds to lengths on the same side of it."""
        split = other - self.offset  # the least length on the upper side
        if operation in (operator.gt, operator.le):
            split += 1
        length = self.recorded_value - self.offset
        is_equality = operation in (operator.eq, operator.ne)
        if is_equality and length == split:
            self.bounds.narrow(split, split)
        elif is_equality and length > split:
            self.bounds.narrow(split + 1, None)
        elif length >= split:
            self.bounds.narrow(split, None)
        else:
            self.bounds.narrow(None, split - 1)
        return operation(self.recorded_value, other)


RANGE_FUNCTIONS = frozenset({torch.arange, Tensor.__getitem__})


def with_ranges(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs one of `RANGE_FUNCTIONS` on a range between two lengths, whose size is the same in every
    replay; returns `NotImplemented` if there is no such range."""
    if func is torch.arange and len(args) == 2:
        positions = _range(*args)
        if positions is not None:
            return positions.to(device=kwargs.get("device"), dtype=kwargs.get("dtype"))
    if func is Tensor.__getitem__:
        x, index = args
        parts = index if isinstance(index, tuple) else (index,)
        ranges = [_range(x.start, x.stop) if _is_range(x) else None for x in parts]
        # with other kinds of parts, an index of tensors would select other elements
        are_plain = all(isinstance(part, (slice, int, type(None))) for part in parts)
        if are_plain and sum(positions is not None for positions in ranges) == 1:
            pairs = zip(parts, ranges)
            return x[tuple(part if positions is None else positions for part, positions in pairs)]
    return NotImplemented


def _is_range(part: Any) -> bool:
    return isinstance(part, slice) and part.step is None


def _range(start: Any, stop: Any) -> Tensor | None:
    if not isinstance(start, Length) or not isinstance(stop, Length):
        return None
    offsets = torch.arange(stop.offset - start.offset, device=start.tensor.device)
    return offsets + start.tensor
