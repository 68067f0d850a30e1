"""The number of stored positions, as the forward of a recorded rectangle sees it: a tensor, from
which code may make position ids, and which it may compare with sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Compare = Callable[[int, int], bool]

# the functions that the operators of tensors call
_SUMS = {Tensor.add: 1, Tensor.sub: -1}
_COMPARISONS: dict[Callable[..., Any], Compare] = {
    Tensor.gt: operator.gt,
    Tensor.ge: operator.ge,
    Tensor.lt: operator.lt,
    Tensor.le: operator.le,
    Tensor.__eq__: operator.eq,
    Tensor.ne: operator.ne,
}


class LengthRange:
    """The lengths for which all comparisons of recorded forwards have the same results."""

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
    """The length of the cache, `()` int64, plus a Python number. A comparison with a Python number
    gives the same result in each replay: it narrows the `bounds` of lengths that may be
    replayed."""

    number: Tensor  # the same, as an ordinary tensor
    value: int  # as the forward is recorded
    offset: int  # more than the length of the cache
    bounds: LengthRange

    @staticmethod
    def __new__(cls, number: Tensor, value: int, bounds: LengthRange, offset: int = 0) -> Length:
        length = Tensor._make_subclass(cls, number)
        length.number = number
        length.value = value
        length.bounds = bounds
        length.offset = offset
        return length

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        length, *others = args
        if isinstance(length, Length) and len(others) == 1 and type(others[0]) is int:
            (other,) = others
            if func in _COMPARISONS:
                return length._compare(_COMPARISONS[func], other)
            if func in _SUMS:
                step = _SUMS[func] * other
                number, value = length.number + step, length.value + step
                return Length(number, value, length.bounds, length.offset + step)
        args, kwargs = tree_map_only(Length, operator.attrgetter("number"), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _compare(self, compare: Compare, other: int) -> bool:
        """Compares with a number, and narrows the bounds to lengths on the same side of it."""
        limit = other - self.offset
        if compare in (operator.gt, operator.le):  # then `other` itself is on the lower side
            limit += 1
        length = self.value - self.offset
        if compare in (operator.eq, operator.ne) and length == limit:
            self.bounds.narrow(limit, limit)
        elif compare in (operator.eq, operator.ne) and length > limit:
            self.bounds.narrow(limit + 1, None)
        elif length >= limit:
            self.bounds.narrow(limit, None)
        else:
            self.bounds.narrow(None, limit - 1)
        return compare(self.value, other)


RANGES = frozenset({torch.arange, Tensor.__getitem__})


def with_ranges(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs one of `RANGES` with a range between two lengths, which has equally many positions in
    each replay; `NotImplemented` without such a range."""
    if func is torch.arange and len(args) == 2:
        positions = _range(*args)
        if positions is not None:
            device = kwargs.get("device")
            dtype = kwargs.get("dtype")
            return positions.to(device=device, dtype=dtype)
    if func is Tensor.__getitem__:
        x, index = args
        parts = index if isinstance(index, tuple) else (index,)
        picked = [_range(x.start, x.stop) if _is_range(x) else None for x in parts]
        if len([part for part in picked if part is not None]) == 1 and Ellipsis not in parts:
            indices = [y if y is not None else x for x, y in zip(parts, picked)]
            return x[tuple(indices)]
    return NotImplemented


def _is_range(part: Any) -> bool:
    return isinstance(part, slice) and part.step is None


def _range(start: Any, stop: Any) -> Tensor | None:
    if not isinstance(start, Length) or not isinstance(stop, Length):
        return None
    count = torch.arange(stop.offset - start.offset, device=start.number.device)
    return count + start.number
