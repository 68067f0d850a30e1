"""The inputs of a rectangle's decode step, beside tokens and masks. A recording has constants of
some; it reads others from buffers, as it reads states: tensors with a row for each of the
rectangle's rows, such as features of media and masks of them, and the keys and values of a
cross-attention cache that the model made."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils import ModelOutput

from ..cache.paged_cache import PagedCache
from ..model.own_loop import cache_output, cache_parts

_CROSS_STATES = ("keys", "values")


def position_axes(prepared: dict[str, Any], num_rows: int, column: int) -> list[list[int]] | None:
    """Returns the rows' position ids on each axis; `None` if there are none, or if all on a single
    axis equal the column."""
    position_ids = prepared.get("position_ids")
    if not isinstance(position_ids, Tensor) or position_ids.dim() == 1:
        return None
    if position_ids.dim() == 2 and bool((position_ids == column).all()):
        return None
    rows = position_ids.expand(*position_ids.shape[:-2], num_rows, 1)
    axes: list[list[int]] = rows.reshape(-1, num_rows).long().tolist()
    return axes


def token_types_of(prepared: dict[str, Any]) -> dict[str, int]:
    """Returns the token-type inputs that are equal for every row's new token, with their values."""
    types = {}
    for name, value in prepared.items():
        if name.endswith("token_type_ids") and isinstance(value, Tensor):
            is_column = value.dim() == 2 and value.shape[1] == 1
            if is_column and value.dtype is torch.int64 and bool((value == value[0]).all()):
                types[name] = int(value[0])
    return types


def constants_of(prepared: dict[str, Any]) -> Hashable:
    """Returns the inputs that a recording treats as constants."""
    items = prepared.items()
    return tuple((name, value) for name, value in items if isinstance(value, (bool, int, str)))


class RowInputs:
    """Tensors `(rows, ...)` by name, in the form of a layer of states."""

    def __init__(self, tensors: dict[Hashable, Tensor]) -> None:
        """`tensors`: not empty."""
        self.recurrent_states = dict(tensors)  # views of a recording's buffers once it used them
        self.device = next(iter(tensors.values())).device
        self._given = tensors
        self._versions = {name: _version_of(tensor) for name, tensor in tensors.items()}

    @property
    def names(self) -> tuple[Hashable, ...]:
        return tuple(self._given)

    def equals(self, tensors: Mapping[Hashable, Tensor]) -> bool:
        """Whether this holds the content of `tensors`."""
        if self._given.keys() != tensors.keys():
            return False
        return all(self._has_content(name, tensor) for name, tensor in tensors.items())

    def _has_content(self, name: Hashable, tensor: Tensor) -> bool:
        given = self._given[name]
        version = self._versions[name]
        if version is None or version != _version_of(given):
            return False
        if given is tensor:
            return True
        is_alike = given.dtype == tensor.dtype and given.shape == tensor.shape
        return is_alike and torch.equal(given, tensor)


def row_inputs(rectangle: Any, inputs: Mapping[str, Tensor]) -> RowInputs | None:
    """Returns the tensors of `inputs`, and those of the rectangle's own cross-attention cache;
    `None` if there are none. For a step with the content of the last one, returns the same object,
    so that nothing is copied to buffers again."""
    tensors = dict(_cross_states(rectangle.cache))
    tensors.update(inputs.items())
    if not tensors:
        return None
    last = rectangle.row_inputs
    if last is None or not last.equals(tensors):
        rectangle.row_inputs = RowInputs(tensors)
    result: RowInputs = rectangle.row_inputs
    return result


def is_row_input(value: Tensor, rectangle: Any) -> bool:
    """Whether a tensor of a step's inputs is one that `row_inputs` takes: a row's part is the same
    in each step, or has a size for the new token alone, and does not grow with the rows' tokens."""
    if value.dim() < 2 or len(value) != len(rectangle.blocks):
        return False
    names = [name for name, given in rectangle.inputs.items() if given is value]
    if not rectangle.constant_names.isdisjoint(names):
        return True
    return (bool(names) or value.shape[1] == 1) and rectangle.width not in value.shape


def with_cross_states(cache: Any, running_cache: Any, tensors: Mapping[Hashable, Tensor]) -> Any:
    """Returns `cache`, with a cross-attention cache of `tensors` if `running_cache` has one that
    the model made."""
    cross = _own_cross_cache(running_cache)
    if cross is None:
        return cache
    layers = []
    for index, source in enumerate(cross.layers):
        layer = copy.copy(source)
        for name in _CROSS_STATES:
            setattr(layer, name, tensors[index, name])
        layers.append(layer)
    combined = EncoderDecoderCache(cache, Cache(layers=layers))
    combined.is_updated = dict(running_cache.is_updated)
    return combined


def _own_cross_cache(cache: Any) -> Any:
    """The cross-attention cache that the model made; `None` if there is none."""
    _, *cross_caches = cache_parts(cache)
    return next((cross for cross in cross_caches if not isinstance(cross, PagedCache)), None)


def _cross_states(cache: Any) -> Iterator[tuple[Hashable, Tensor]]:
    cross = _own_cross_cache(cache)
    layers = () if cross is None else cross.layers
    for index, layer in enumerate(layers):
        for name in _CROSS_STATES:
            yield (index, name), getattr(layer, name)


def _version_of(tensor: Tensor) -> int | None:
    """The number of writes to a tensor; `None` if it is not counted."""
    return None if tensor.is_inference() else tensor._version


Passed = dict[str, Any]
"""By name of an output: the name of the input that a forward returns as this output or, of outputs
in outputs, a dict of the same form."""


def passed_inputs(outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> Passed:
    """Returns which inputs a forward's outputs contain."""
    passed: Passed = {}
    for name, value in outputs.items():
        if isinstance(value, ModelOutput):
            nested = passed_inputs(value, inputs)
            if nested:
                passed[name] = nested
        elif isinstance(value, Tensor):
            names = [input_name for input_name, given in inputs.items() if given is value]
            if names:
                passed[name] = names[0]
    return passed


def outputs_of(passed: Passed, inputs: Mapping[str, Any], cache: Any = None) -> ModelOutput:
    """Returns the outputs of a forward of which only the cache and the inputs that it passes on are
    known."""
    outputs = ModelOutput() if cache is None else cache_output(cache)
    for name, source in passed.items():
        is_nested = isinstance(source, dict)
        outputs[name] = outputs_of(source, inputs) if is_nested else inputs[source]
    return outputs
