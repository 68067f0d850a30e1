"""Follows the columns of gathered keys through the operations of a recorded forward, up to a
softmax over them. In a replay, only the first columns are stored. Attention of a single token may
have no mask that hides the other columns, so `UnmaskedColumns.hide` adds one."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..cache.handles import written_tensors
from .length import KeyLength

# operations on one tensor whose results keep its axes, if they keep the axes' sizes and strides
_MOVES_AXES = frozenset(
    "alias detach expand permute select slice squeeze t transpose unsqueeze".split()
)
_RESHAPES = frozenset("view _unsafe_view _reshape_alias".split())
_COPIES = frozenset("clone _to_copy".split())
# for each operand of a product, by its axis: the result's axis
_PRODUCT_AXES = {"mm": ({0: 0}, {1: 1}), "bmm": ({0: 0, 1: 1}, {0: 0, 2: 2})}


class _ColumnAxis(NamedTuple):
    axis: int  # from the left
    last: Tensor  # index of the last stored column, `()` int64


class UnmaskedColumns:
    """The tensors of a recording with an axis of columns that no mask has hidden yet. They are
    identified by their memory, which the recording keeps alive. The result of an operation whose
    effect on the columns is not certain is not among them."""

    def __init__(self) -> None:
        # by storage, then by offset, sizes and strides
        self._columns: dict[int, dict[Hashable, _ColumnAxis]] = {}
        self._biases: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def add(self, keys: Tensor, last: Tensor) -> None:
        """Adds gathered keys or values `(n, heads, columns, dim)`. `last`: the index of the last
        column that the rows have stored, `()` int64."""
        self._put(keys, _ColumnAxis(2, last))

    def hide(self, scores: Tensor, axis: int, *args: Any) -> tuple[Any, ...]:
        """Returns the arguments of a softmax, `scores`, `axis` and `args`. If it is over columns
        that no mask has hidden, the returned scores are minus infinity in the columns that are not
        stored."""
        columns = self._find(scores)
        if columns is None or columns.axis != axis % scores.dim():
            return scores, axis, *args
        last = columns.last
        key = id(last), scores.shape[axis], scores.dtype
        if key not in self._biases:
            is_stored = torch.arange(scores.shape[axis], device=scores.device) <= last
            bias = scores.new_zeros(scores.shape[axis]).masked_fill(~is_stored, -math.inf)
            self._biases[key] = bias, last  # keeps `last` alive, so that its id is not reused
        bias, _ = self._biases[key]
        inner_axes = [1] * (scores.dim() - 1 - columns.axis)
        return scores + bias.view(-1, *inner_axes), axis, *args

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Adds the result of an operation if it has the columns of an operand, and removes the
        tensors that the operation writes to."""
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        columns = [self._find(operand) for operand in operands]
        for tensor in written_tensors(func, args, kwargs):
            if type(tensor) is Tensor:
                self._columns.pop(tensor.untyped_storage()._cdata, None)
        lasts = [x.last for x in columns if x is not None]
        if not lasts or not isinstance(result, Tensor):
            return
        axes = [None if x is None else x.axis for x in columns]
        axis = _result_axis(func, operands, axes, result)
        if axis is not None and all(last is lasts[0] for last in lasts):
            self._put(result, _ColumnAxis(axis, lasts[0]))

    def has_unmasked(self, tensor: Tensor) -> bool:
        """Whether the memory of a plain tensor has columns that no mask has hidden."""
        return tensor.untyped_storage()._cdata in self._columns

    def sizes(self, func: Any, tensor: Tensor, args: Any, kwargs: Any) -> Any:
        """Returns the result of one of `SIZE_FUNCTIONS`, with a `KeyLength` for columns."""
        columns = self._find(tensor)
        if columns is None:
            return func(tensor, *args, **kwargs)
        sizes = [*tensor.shape]
        sizes[columns.axis] = KeyLength(sizes[columns.axis], columns.last)
        if args or kwargs:
            return sizes[args[0] if args else kwargs["dim"]]
        return torch.Size(sizes)

    def _find(self, tensor: Tensor) -> _ColumnAxis | None:
        if type(tensor) is not Tensor:  # others may have no memory
            return None
        views = self._columns.get(tensor.untyped_storage()._cdata, {})
        return views.get(_geometry(tensor))

    def _put(self, tensor: Tensor, columns: _ColumnAxis) -> None:
        views = self._columns.setdefault(tensor.untyped_storage()._cdata, {})
        views[_geometry(tensor)] = columns


SIZE_FUNCTIONS = (Tensor.size, Tensor.shape.__get__)

current_columns: ContextVar[UnmaskedColumns | None] = ContextVar("unmasked_columns", default=None)
"""The columns of this thread's recording."""


def _geometry(tensor: Tensor) -> Hashable:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def _result_axis(
    func: Any, operands: Sequence[Tensor], axes: Sequence[int | None], result: Tensor
) -> int | None:
    """Returns the result's axis of columns; `None` if it is not certain that there is one. `axes`:
    each operand's axis of columns, or `None`."""
    name = func._schema.name.removeprefix("aten::")
    if name in _PRODUCT_AXES:
        pairs = [(axis, _PRODUCT_AXES[name][i]) for i, axis in enumerate(axes) if axis is not None]
        return pairs[0][1].get(pairs[0][0]) if len(pairs) == 1 else None
    if torch.Tag.pointwise in func.tags or name in _COPIES:
        return _broadcast_axis(operands, axes, result)
    axis = axes[0]
    if axis is None or len(operands) > 1:
        return None
    source = operands[0]
    if name in _MOVES_AXES:
        expected = source.shape[axis], source.stride(axis)
        kept = [*zip(result.shape, result.stride())]
    elif name in _RESHAPES:
        expected = source.shape[axis], math.prod(source.shape[axis + 1 :])
        inner_sizes = (math.prod(result.shape[i + 1 :]) for i in range(result.dim()))
        kept = [*zip(result.shape, inner_sizes)]
    else:
        return None
    return kept.index(expected) if kept.count(expected) == 1 else None


def _broadcast_axis(
    operands: Sequence[Tensor], axes: Sequence[int | None], result: Tensor
) -> int | None:
    """As `_result_axis`, for an elementwise operation: also `None` if another operand has more than
    one element along that axis, since it may be a mask."""
    from_right = {axis - x.dim() for x, axis in zip(operands, axes) if axis is not None}
    if len(from_right) > 1:
        return None
    (axis,) = from_right
    for x, known_axis in zip(operands, axes):
        if known_axis is None and x.dim() >= -axis and x.shape[axis] > 1:
            return None
    return axis + result.dim()
