"""Tells which of PyTorch's operations are batch-invariant. `lower.py` decides which operations our
kernels compute."""

from __future__ import annotations

from typing import Any

_VIEWS_IN_PLACE = frozenset(
    "detach_ unsqueeze_ squeeze_ transpose_ t_ swapaxes_ as_strided_".split()
)
# operations that create, move, select, compare or round numbers, or that compute each row
# separately and in order
_INVARIANT = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros zero_"
    " ones ones_like new_ones full full_like new_full fill_ fill scalar_tensor arange linspace"
    " clone copy _to_copy copy_ cat stack repeat index index_select index_put index_put_"
    " _unsafe_index gather scatter scatter_ slice_scatter select_scatter embedding where"
    " masked_fill masked_fill_ constant_pad_nd roll flip tril triu tril_ triu_ topk sort max min"
    " amax amin maximum minimum clamp clamp_min clamp_max clamp_ clamp_min_ clamp_max_ relu relu_"
    " abs neg sign floor ceil round lift_fresh lift_fresh_copy alias_copy _softmax _log_softmax"
    " cumsum histc index_add_ nan_to_num _local_scalar_dense _unsafe_view _reshape_alias".split()
)
# operations in `_INVARIANT` that are batch-invariant for floats only along the last axis
_ALONG_AN_AXIS = frozenset("amax amin cumsum max min sort topk _softmax _log_softmax".split())


def _name(function: Any) -> str:
    """Returns an operation's name without its overload and without the namespace `aten`."""
    name: str = function._schema.name
    return name.removeprefix("aten::")


def is_view_in_place(function: Any) -> bool:
    """Whether an operation changes a tensor's sizes, strides or gradient tracking in place, but
    not its content."""
    return _name(function) in _VIEWS_IN_PLACE


def is_along_last_axis(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation works along the last axis only. `args[0]` is the operation's input."""
    axis = None
    for index, argument in enumerate(function._schema.arguments):
        if argument.name == "dim":
            positional = args[index] if index < len(args) else argument.default_value
            axis = kwargs.get("dim", positional)
    if isinstance(axis, (list, tuple)) and len(axis) == 1:
        (axis,) = axis
    num_axes = args[0].dim()
    if not isinstance(axis, int):
        return num_axes == 1
    return axis % max(1, num_axes) == num_axes - 1


def is_batch_invariant(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether PyTorch's operation is batch-invariant: the bits of a row of its result do not depend
    on the other rows."""
    name = _name(function)
    if name in _ALONG_AN_AXIS and args[0].is_floating_point():
        return is_along_last_axis(function, args, kwargs)
    if name in ("mm", "bmm"):
        return args[0].shape[-1] == 1  # sums of one product each
    return name in _INVARIANT or name in _VIEWS_IN_PLACE
