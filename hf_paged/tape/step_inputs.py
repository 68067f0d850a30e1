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
# of the row inputs of a recording, of which up to `graph_keys.MAX_GRAPHS` are kept. The steps of
# models that read more take so long that replays hardly save time.
MAX_BYTES = 16 << 20


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


def without_encoder_inputs(prepared: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Returns the inputs, with meta tensors for those of these names, which the encoder takes: a
    recorded forward may read neither their content nor their sizes (`record.ReadGuard`)."""
    inputs = dict(prepared)
    for name in names & prepared.keys():
        if isinstance(prepared[name], Tensor):
            inputs[name] = torch.empty_like(prepared[name], device="meta")
    return inputs


def constants_of(prepared: dict[str, Any]) -> Hashable:
    """Returns what a recording treats as constants: inputs, and the names of those without
    content."""
    items = prepared.items()
    values = tuple((name, value) for name, value in items if isinstance(value, (bool, int, str)))
    return values, frozenset(name for name, x in items if isinstance(x, Tensor) and x.is_meta)


class RowInputs:
    """Tensors `(rows, ...)` by name, in the form of a layer of states."""

    is_fixed = True  # a recording serves tensors of these shapes only

    def __init__(self, tensors: dict[Hashable, Tensor]) -> None:
        """`tensors`: not empty."""
        self.recurrent_states = dict(tensors)  # views of a recording's buffers once it used them
        self.device = next(iter(tensors.values())).device
        self._given = tensors
        self._versions = {name: _version_of(tensor) for name, tensor in tensors.items()}

    @property
    def names(self) -> tuple[Hashable, ...]:
        return tuple(self._given)

    def has_form(self, name: Hashable, tensor: Tensor) -> bool:
        """Whether this holds a tensor of this name and of the form of `tensor`."""
        given = self._given.get(name)
        return given is not None and (given.dtype, given.shape) == (tensor.dtype, tensor.shape)

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
        return self.has_form(name, tensor) and torch.equal(given, tensor)


def note_row_inputs(rectangle: Any, inputs: Mapping[str, Tensor]) -> str | None:
    """Sets the `row_inputs` of a rectangle to the tensors of `inputs`, and those of its own
    cross-attention cache. In a step with the content of the last one, keeps the object, so that
    nothing is copied to buffers again. If the tensors are too large for the buffers of each
    recording, changes nothing and returns the reason; otherwise `None`."""
    tensors = dict(_cross_states(rectangle.cache))
    tensors.update(inputs.items())
    if sum(tensor.nbytes for tensor in tensors.values()) > MAX_BYTES:
        return f"its tensors of media take more than {MAX_BYTES >> 20} MiB"
    last = rectangle.row_inputs
    if not tensors:
        rectangle.row_inputs = None
    elif last is None or not last.equals(tensors):
        rectangle.row_inputs = RowInputs(tensors)
    return None


def is_row_input(name: str, value: Tensor, rectangle: Any) -> bool:
    """Whether a tensor of a step's inputs is one that `note_row_inputs` takes: a row's part is the
    same in each step, or has a size for the new token alone, and does not grow with the rows'
    tokens."""
    if value.dim() < 2 or len(value) != len(rectangle.blocks):
        return False
    if rectangle.row_inputs is not None and rectangle.row_inputs.has_form(name, value):
        return True  # as in the last step
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
