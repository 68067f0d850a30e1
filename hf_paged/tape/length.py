"""Lengths in the forward of a recorded rectangle step. A [`Length`] of the cache is a tensor, so
that model code can compute position ids from it, but comparing it with an int returns a bool,
without reading the tensor. A [`KeyLength`] is the number of columns of gathered keys."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Compare = Callable[[int, int], bool]

# by the function that an operator calls: 1 if it adds a number, -1 if it subtracts one; as with an
# int, `+=` makes a new length
_SIGNS = {Tensor.add: 1, Tensor.add_: 1, Tensor.sub: -1, Tensor.sub_: -1}
_COMPARISONS: dict[Callable[..., Any], Compare] = {
    Tensor.gt: operator.gt,
    Tensor.ge: operator.ge,
    Tensor.lt: operator.lt,
    Tensor.le: operator.le,
    Tensor.__eq__: operator.eq,
    Tensor.ne: operator.ne,
}


class LengthRange:
    """The cache lengths, `minimum` to `maximum` inclusive, for which every comparison in recorded
    forwards gives its recorded result."""

    def __init__(self) -> None:
        self.minimum = 0
        self.maximum: float = float("inf")

    def narrow(self, minimum: int | None, maximum: int | None) -> None:
        if minimum is not None:
            self.minimum = max(self.minimum, minimum)
        if maximum is not None:
            self.maximum = min(self.maximum, maximum)

    def __contains__(self, length: int) -> bool:
        return self.minimum <= length <= self.maximum


class Length(Tensor):
    """The length of the cache plus `offset`, `()` int64. A comparison with an int returns a bool,
    and narrows `valid_lengths`, since the bool may decide which operations are recorded."""

    tensor: Tensor  # this length as an ordinary tensor
    recorded_value: int  # this length in the recorded step
    offset: int
    valid_lengths: LengthRange  # cache lengths for which replays are valid

    @staticmethod
    def __new__(
        cls, tensor: Tensor, recorded_value: int, valid_lengths: LengthRange, offset: int = 0
    ) -> Length:
        self = Tensor._make_subclass(cls, tensor)
        self.tensor = tensor
        self.recorded_value = recorded_value
        self.valid_lengths = valid_lengths
        self.offset = offset
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(args) == 2 and isinstance(args[0], Length) and type(args[1]) is int:
            length, number = args
            if func in _COMPARISONS:
                return length._compare(_COMPARISONS[func], number)
            if func in _SIGNS and not kwargs:
                return length._add(_SIGNS[func] * number)
        args, kwargs = tree_map_only(Length, operator.attrgetter("tensor"), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _add(self, delta: int) -> Length:
        value, offset = self.recorded_value + delta, self.offset + delta
        return Length(self.tensor + delta, value, self.valid_lengths, offset)

    def _compare(self, operation: Compare, number: int) -> bool:
        """Compares with a number, and narrows the valid cache lengths to a range in which the
        result is the same."""
        # cache lengths below `split` give one result, all others the other; in a comparison for
        # equality, only `split` itself gives the other
        split = number - self.offset
        if operation in (operator.gt, operator.le):
            split += 1
        cache_length = self.recorded_value - self.offset
        is_equality = operation in (operator.eq, operator.ne)
        if is_equality and cache_length == split:
            self.valid_lengths.narrow(split, split)
        elif is_equality and cache_length > split:
            self.valid_lengths.narrow(split + 1, None)
        elif cache_length >= split:
            self.valid_lengths.narrow(split, None)
        else:
            self.valid_lengths.narrow(None, split - 1)
        return operation(self.recorded_value, number)


class KeyLength(int):
    """The number of columns of gathered keys, plus `offset`. As an int, it counts all columns that
    the block tables can hold; but in a range between two such lengths (`with_ranges`), it counts
    only the stored columns."""

    last: Tensor  # index of the last stored column, `()` int64
    offset: int

    def __new__(cls, number: int, last: Tensor, offset: int = 0) -> KeyLength:
        self = super().__new__(cls, number)
        self.last, self.offset = last, offset
        return self

    def __add__(self, number: int) -> int:
        return self._derive(super().__add__(number), number, 1)

    __radd__ = __add__

    def __sub__(self, number: int) -> int:
        return self._derive(super().__sub__(number), number, -1)

    def _derive(self, result: int, number: int, sign: int) -> int:
        if type(number) is not int:
            return result
        return KeyLength(result, self.last, self.offset + sign * number)


RANGE_FUNCTIONS = frozenset({torch.arange, Tensor.__getitem__})


def with_ranges(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs one of `RANGE_FUNCTIONS` on a range between two lengths: the range has the same size in
    every replay, so a tensor of positions replaces it. Returns `NotImplemented` for other calls."""
    if func is torch.arange and len(args) == 2:
        positions = _positions_between(*args)
        if positions is not None:
            return positions.to(device=kwargs.get("device"), dtype=kwargs.get("dtype"))
    if func is Tensor.__getitem__:
        x, index = args
        items = index if isinstance(index, tuple) else (index,)
        ranges = [
            _positions_between(item.start, item.stop) if _is_range(item) else None for item in items
        ]
        # with another index tensor, a tensor of positions would not select what the slice selects
        are_basic = all(isinstance(item, (slice, int, type(None))) for item in items)
        if are_basic and sum(positions is not None for positions in ranges) == 1:
            pairs = zip(items, ranges)
            return x[tuple(item if positions is None else positions for item, positions in pairs)]
    return NotImplemented


def _is_range(item: Any) -> bool:
    return isinstance(item, slice) and item.step is None


def _positions_between(start: Any, stop: Any) -> Tensor | None:
    """Returns the positions `[start, stop)`, int64, if both are a `Length`, or both a `KeyLength`;
    otherwise `None`."""
    if isinstance(start, Length) and isinstance(stop, Length):
        first = start.tensor
    elif isinstance(start, KeyLength) and isinstance(stop, KeyLength):
        first = start.last + (1 + start.offset)
    else:
        return None
    return torch.arange(stop.offset - start.offset, device=first.device) + first
