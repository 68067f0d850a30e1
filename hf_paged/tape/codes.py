"""Weights that a forward makes from int8 codes before it multiplies by them, as those of torchao:
the codes, or `(codes - zeros) * scales`, as floats. Products then read the codes themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.cpp.attention import FLOAT_DTYPE_NUMBERS
from ..kernels.cpp.linear import is_group_supported
from .record import Operation


class CodedWeight(NamedTuple):
    """A weight as `kernels.cpp.linear.linear` takes it."""

    codes: Tensor  # (width, depth) int8, or a view of them
    zeros: Tensor | None = None  # (width, groups) int8
    scales: Tensor | None = None  # (width, groups)


@dataclass(frozen=True)
class _Made:
    """What the floats in a storage were made from."""

    codes: Tensor  # int8
    length: int = 0  # of rows of the codes that have one number in `zeros` and `scales` each
    zeros: Tensor | None = None  # int8
    scales: Tensor | None = None
    dtypes: frozenset[torch.dtype] = frozenset()  # to which the products with `scales` were rounded


@dataclass
class CodedWeights:
    """The weights of one recording that are made from codes. `is_constant`: whether no operation of
    the recording makes a tensor or writes to it. `is_written`: whether an operation writes to a
    tensor's storage after it was made."""

    is_constant: Callable[[Tensor], bool]
    is_written: Callable[[Tensor], bool]
    _made: dict[int, _Made] = field(default_factory=dict)  # by address of the floats' storage

    def note(self, operation: Operation) -> None:
        """Notes an operation that makes floats from codes, or from such floats."""
        function, args, kwargs, result = operation
        name = function.name()
        made = None
        if name == "aten::_to_copy":
            (source,) = args
            if source.dtype is torch.int8 and self.is_constant(source):
                made = _Made(source)
            else:
                made = self._find(source)
        elif name == "aten::sub.Tensor" and not kwargs:
            made = self._with_zeros(*args)
        elif name == "aten::mul.Tensor":
            made = self._with_scales(*args)
        if made is None or result.dtype not in FLOAT_DTYPE_NUMBERS or self.is_written(result):
            return
        if made.scales is not None:
            made = replace(made, dtypes=made.dtypes | {result.dtype})
        if _are_alike(result, made.codes):
            self._made[_address(result)] = made

    def _with_zeros(self, floats: Tensor, zeros: Tensor) -> _Made | None:
        made, made_zeros = self._find(floats), self._find(zeros)
        if made is None or made_zeros is None or not _is_per_row(zeros, floats):
            return None
        if made.length or made_zeros.length or not made_zeros.codes.is_contiguous():
            return None
        return _Made(made.codes, floats.shape[-1], made_zeros.codes)

    def _with_scales(self, floats: Tensor, scales: Tensor) -> _Made | None:
        made = self._find(floats)
        if made is None or made.scales is not None or not _is_per_row(scales, floats):
            return None
        length = floats.shape[-1]
        is_supported = scales.dtype in FLOAT_DTYPE_NUMBERS and self.is_constant(scales)
        if not is_supported or made.length not in (0, length):
            return None
        return _Made(made.codes, length, made.zeros, scales)

    def _find(self, floats: Any) -> _Made | None:
        """Returns what a tensor was made from, if it is the whole of what was made."""
        if not isinstance(floats, Tensor):
            return None
        made = self._made.get(_address(floats))
        if made is None or floats.storage_offset() or not _are_alike(floats, made.codes):
            return None
        return made

    def find(self, weight: Tensor) -> CodedWeight | None:
        """Returns the codes of a product's `weight` `(depth, width)`; `None` if it was not made
        from codes that the kernel reads."""
        made = self._made.get(_address(weight))
        if made is None:
            return None
        codes, length = made.codes, made.length
        if not length:
            if codes.dim() != 2:
                return None
            offset = codes.storage_offset() + weight.storage_offset()
            return CodedWeight(codes.as_strided(weight.shape, weight.stride(), offset).t())
        depth, width = weight.shape
        is_whole = not weight.storage_offset() and weight.numel() == codes.numel()
        is_stored_by_row = weight.stride() == (1, depth) and codes.is_contiguous()
        if made.scales is None or not (is_whole and is_stored_by_row):
            return None
        # the kernel does not round the weights: they may be rounded to the product's dtype alone
        is_precise = made.dtypes <= {weight.dtype, torch.float32}
        if not (is_precise and is_group_supported(depth, length)):
            return None
        shape = width, depth // length
        zeros = None if made.zeros is None else made.zeros.view(shape)
        return CodedWeight(codes.view(width, depth), zeros, made.scales.view(shape))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _are_alike(floats: Tensor, codes: Tensor) -> bool:
    """Whether two tensors have the same number of elements, at the same offsets."""
    if floats.numel() != codes.numel():
        return False
    if floats.is_contiguous() and codes.is_contiguous():
        return True
    return floats.shape == codes.shape and floats.stride() == codes.stride()


def _is_per_row(values: Any, floats: Tensor) -> bool:
    """Whether `values` is a contiguous tensor with one number for each row of `floats` along its
    last axis."""
    if not isinstance(values, Tensor) or not values.is_contiguous():
        return False
    return floats.is_contiguous() and values.shape == (*floats.shape[:-1], 1)
