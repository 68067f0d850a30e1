"""Weights that a forward converts from int8 codes to floats before each product, as torchao does:
`codes` or `(codes - zeros) * scales`. In a tape, the product reads the codes instead."""

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
    """The arguments of `kernels.cpp.linear.linear` for a weight in codes."""

    codes: Tensor  # (width, depth) int8
    zeros: Tensor | None = None  # (width, groups) int8
    scales: Tensor | None = None  # (width, groups)


@dataclass(frozen=True)
class _Recipe:
    """How the floats in a storage were computed from codes."""

    codes: Tensor  # int8
    # consecutive codes that share a number in `zeros` and in `scales`; 0 if there are neither
    group_length: int = 0
    zeros: Tensor | None = None  # int8
    scales: Tensor | None = None
    dtypes: frozenset[torch.dtype] = frozenset()  # to which the scaled floats were rounded


@dataclass
class CodedWeights:
    """The weights that one recording computes from codes. `is_constant` returns whether a replay
    neither creates a tensor nor writes to it. `is_written` returns whether an operation writes to
    a tensor's storage after the one that created it."""

    is_constant: Callable[[Tensor], bool]
    is_written: Callable[[Tensor], bool]
    _recipes: dict[int, _Recipe] = field(default_factory=dict)  # by address of the floats' storage

    def note(self, operation: Operation) -> None:
        """Notes the recipe of an operation's result, if the operation converts codes to floats, or
        computes with floats that have a recipe."""
        function, args, kwargs, result = operation
        name = function.name()
        recipe = None
        if name == "aten::_to_copy":
            (source,) = args
            if source.dtype is torch.int8 and self.is_constant(source):
                recipe = _Recipe(source)
            else:
                recipe = self._recipe_of(source)
        elif name == "aten::sub.Tensor" and not kwargs:
            recipe = self._with_zeros(*args)
        elif name == "aten::mul.Tensor":
            recipe = self._with_scales(*args)
        if recipe is None or result.dtype not in FLOAT_DTYPE_NUMBERS or self.is_written(result):
            return
        if recipe.scales is not None:
            recipe = replace(recipe, dtypes=recipe.dtypes | {result.dtype})
        if _have_same_layout(result, recipe.codes):
            self._recipes[_address(result)] = recipe

    def _with_zeros(self, floats: Tensor, zeros: Tensor) -> _Recipe | None:
        recipe, zeros_recipe = self._recipe_of(floats), self._recipe_of(zeros)
        if recipe is None or zeros_recipe is None or not _is_per_row(zeros, floats):
            return None
        has_groups = recipe.group_length or zeros_recipe.group_length
        if has_groups or not zeros_recipe.codes.is_contiguous():
            return None
        return _Recipe(recipe.codes, floats.shape[-1], zeros_recipe.codes)

    def _with_scales(self, floats: Tensor, scales: Tensor) -> _Recipe | None:
        recipe = self._recipe_of(floats)
        if recipe is None or recipe.scales is not None or not _is_per_row(scales, floats):
            return None
        length = floats.shape[-1]
        is_supported = scales.dtype in FLOAT_DTYPE_NUMBERS and self.is_constant(scales)
        if not is_supported or recipe.group_length not in (0, length):
            return None
        return _Recipe(recipe.codes, length, recipe.zeros, scales)

    def _recipe_of(self, floats: Any) -> _Recipe | None:
        """Returns how a tensor was computed from codes; `None` if it was not computed from codes,
        or if it is a view of only a part of the computed tensor."""
        if not isinstance(floats, Tensor):
            return None
        recipe = self._recipes.get(_address(floats))
        if recipe is None or floats.storage_offset():
            return None
        return recipe if _have_same_layout(floats, recipe.codes) else None

    def find(self, weight: Tensor) -> CodedWeight | None:
        """Returns the codes of a product's `weight` `(depth, width)`; `None` if it was not computed
        from codes, or if the kernel cannot read them."""
        recipe = self._recipes.get(_address(weight))
        if recipe is None:
            return None
        codes, length = recipe.codes, recipe.group_length
        if not length:
            if codes.dim() != 2:
                return None
            offset = codes.storage_offset() + weight.storage_offset()
            return CodedWeight(codes.as_strided(weight.shape, weight.stride(), offset).t())
        depth, width = weight.shape
        is_whole = not weight.storage_offset() and weight.numel() == codes.numel()
        is_stored_by_row = weight.stride() == (1, depth) and codes.is_contiguous()
        if recipe.scales is None or not (is_whole and is_stored_by_row):
            return None
        # the kernel does not round the weights, so the forward may have rounded them only to the
        # product's dtype or to float32
        is_precise = recipe.dtypes <= {weight.dtype, torch.float32}
        if not (is_precise and is_group_supported(depth, length)):
            return None
        shape = width, depth // length
        zeros = None if recipe.zeros is None else recipe.zeros.view(shape)
        return CodedWeight(codes.view(width, depth), zeros, recipe.scales.view(shape))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _have_same_layout(floats: Tensor, codes: Tensor) -> bool:
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
