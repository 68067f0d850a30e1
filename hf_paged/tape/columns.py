"""Tensors that a recorded forward computes from indexer keys. They have a column for each token
that the block tables can hold; in a replay, only the first of these columns are stored."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..step import NotCapturable
from .record import ContentReadError

_LIBRARY = torch.library.Library("hf_paged", "FRAGMENT")
_LIBRARY.define("topk_stored(Tensor scores, int k, Tensor length) -> (Tensor, Tensor)")


def _topk_stored(scores: Tensor, k: int, length: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the values and indices of `topk(k)` over the first `length + 1` columns of `scores`,
    or over the first `k` if these are more. A forward that is not recorded has only these columns.
    Their number matters, since it decides which of several equal scores `topk` chooses."""
    num_columns = max(int(length) + 1, k)
    values, indices = scores[..., :num_columns].contiguous().topk(k)
    return values, indices


_LIBRARY.impl("topk_stored", _topk_stored, "CPU")


# functions whose results have the columns on the same axis, counted from the last
_KEEPS_AXIS = frozenset(
    {
        *(Tensor.float, Tensor.to, Tensor.expand, Tensor.cos, Tensor.sin, torch.cos, torch.sin),
        *(Tensor.mul, Tensor.add, Tensor.sub, Tensor.div, torch.mul, torch.add, torch.cat),
    }
)


class Columns(Tensor):
    """A tensor with an axis of columns: indexer keys `(n, columns, dim)`, their positions, or a
    result computed from these. Only functions that choose columns return ordinary tensors: `topk`,
    and the index that selects the last column. Raises `NotCapturable` for functions after which a
    replay might not see which columns are stored."""

    tensor: Tensor  # this tensor as an ordinary one
    length: Tensor  # the number of columns stored by earlier steps, `()` int64
    num_columns: int
    _known_axis: int | None  # of the columns; `None` if several axes have `num_columns` elements

    @staticmethod
    def __new__(
        cls,
        tensor: Tensor,
        length: Tensor,
        num_columns: int | None = None,
        axis: int | None = None,
    ) -> Columns:
        """`axis`: the axis of the columns; by default the one with `num_columns` elements or,
        without `num_columns`, the second. `num_columns` defaults to the size of that axis."""
        self = Tensor._make_subclass(cls, tensor)
        self.tensor = tensor
        self.length = length
        sizes = [*tensor.shape]
        if num_columns is None:
            axis = 1 if axis is None else axis
            num_columns = sizes[axis]
        if axis is None and sizes.count(num_columns) == 1:
            axis = sizes.index(num_columns)
        self.num_columns, self._known_axis = num_columns, axis
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        source = next(leaf for leaf in leaves if isinstance(leaf, Columns))
        if func in (torch.topk, Tensor.topk) and args and args[0] is source:
            return source._topk(*args[1:], **kwargs)
        if func is Tensor.__getitem__ and source._selects_last(args[1]):
            return source.tensor.index_select(source.axis, source.length.view(1))
        if _writes(func, kwargs) and not isinstance(args[0], Columns):
            raise ContentReadError("a copy of tensors computed from indexer keys")
        args, kwargs = tree_map_only(Columns, operator.attrgetter("tensor"), (args, kwargs))
        keeps_axis = func in _KEEPS_AXIS or (func is Tensor.__getitem__ and type(args[1]) is int)
        derive = source._derive_along_axis if keeps_axis else source._derive
        return tree_map_only(Tensor, derive, func(*args, **kwargs))

    def _derive(self, tensor: Tensor, axis: int | None = None) -> Columns:
        if self.num_columns not in tensor.shape:
            raise ContentReadError("a selection or a reduction of the columns of indexer keys")
        return Columns(tensor, self.length, self.num_columns, axis)

    def _derive_along_axis(self, tensor: Tensor) -> Columns:
        """As `_derive`, if the result has the columns on the same axis, counted from the last."""
        if self._known_axis is None:
            return self._derive(tensor)
        axis = self._known_axis - self.tensor.dim() + tensor.dim()
        if axis < 0 or tensor.shape[axis] != self.num_columns:
            raise ContentReadError("a selection or a reduction of the columns of indexer keys")
        return self._derive(tensor, axis)

    @property
    def axis(self) -> int:
        """The axis of columns. Raises `NotCapturable` if it is not known."""
        if self._known_axis is None:
            raise NotCapturable("the axis of its indexer keys' columns is not known")
        return self._known_axis

    def _selects_last(self, index: Any) -> bool:
        """Whether an index selects the last stored column, and everything on the other axes."""
        items = index if isinstance(index, tuple) else (index,)
        full, last = slice(None), slice(-1, None)
        are_slices = all(type(item) is slice for item in items)
        if not are_slices or last not in items:
            return False
        expected = [last if axis == self.axis else full for axis in range(len(items))]
        return [*items] == expected

    def _topk(
        self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> torch.return_types.topk:
        scores = self.tensor
        is_last = dim % scores.dim() == scores.dim() - 1
        if not (is_last and largest and sorted and scores.shape[-1] == self.num_columns):
            raise ContentReadError("a `topk` that does not return the columns with the best scores")
        return torch.return_types.topk(torch.ops.hf_paged.topk_stored(scores, k, self.length))


class LiveColumns(NamedTuple):
    """[`Columns`] as an argument of a live module, which gets only the stored columns."""

    tensor: Tensor
    length: Tensor
    axis: int

    @classmethod
    def of(cls, columns: Columns) -> LiveColumns:
        return cls(columns.tensor, columns.length, columns.axis)

    def stored_columns(self) -> Tensor:
        return self.tensor.narrow(self.axis, 0, int(self.length) + 1)


def with_stored_columns(arguments: Any) -> Any:
    """Replaces `LiveColumns` in the arguments of a live module by their stored columns."""
    return tree_map(_stored_columns, arguments, is_leaf=_is_live)


def _is_live(value: Any) -> bool:
    return type(value) is LiveColumns


def _stored_columns(leaf: Any) -> Any:
    return leaf.stored_columns() if _is_live(leaf) else leaf


class StoredColumns(Columns):
    """The [`Columns`] that earlier steps have stored. Their buffer also has a column for the new
    token: `torch.cat` with the new column writes it there, and returns all columns."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat and not isinstance(args[0], Tensor) and type(args[0][0]) is cls:
            dim = args[1:] or ((kwargs or {}).get("dim", 0),)
            return args[0][0]._append(*args[0][1:], dim=dim[0])
        return super().__torch_function__(func, types, args, kwargs)

    def _append(self, *others: Tensor, dim: int = 0) -> Columns:
        sizes = [*self.tensor.shape]
        sizes[self.axis] = 1
        forms = [([*x.shape], x.dtype) for x in others]
        if dim % len(sizes) != self.axis or forms != [(sizes, self.tensor.dtype)]:
            raise NotCapturable("its forward appends more than the new token's position")
        (column,) = others
        self.tensor.index_copy_(self.axis, self.length.view(1), column)
        return Columns(self.tensor, self.length, self.num_columns)


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function writes to its first argument or to an `out` tensor."""
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name == "__setitem__" or kwargs.get("out") is not None
