"""The inputs of a rectangle's decode step other than tokens and masks. A recording contains some as
constants. It reads the others from buffers, as it reads states: tensors with a row for each of the
rectangle's rows, such as features of media and their masks, or the keys and values of a
cross-attention cache that the model created."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils import ModelOutput

from .. import compat
from ..cache.paged_cache import PagedCache
from ..model.own_loop import cache_parts

_CROSS_STATES = ("keys", "values")
# limit on the row inputs of one recording, of which up to `graph_keys.MAX_GRAPHS` are kept. Steps
# that read more take so long that a replay hardly saves time.
MAX_BYTES = 16 << 20


def position_axes(prepared: dict[str, Any], num_rows: int, column: int) -> list[list[int]] | None:
    """Returns the position ids of the rows, by axis; `None` if `prepared` has none for each row, or
    if there is one axis, on which all equal `column`."""
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
    """Returns the inputs, with meta tensors in place of those called `names`, which only the
    encoder uses: a recorded forward may read neither their content nor their sizes
    (`record.ReadGuard`)."""
    inputs = dict(prepared)
    for name in names & prepared.keys():
        if isinstance(prepared[name], Tensor):
            inputs[name] = torch.empty_like(prepared[name], device="meta")
    return inputs


def constants_of(prepared: dict[str, Any]) -> Hashable:
    """Returns a key of what a recording treats as constants: the inputs that are booleans, integers
    or strings, and the names of meta tensors."""
    items = prepared.items()
    values = tuple((name, value) for name, value in items if isinstance(value, (bool, int, str)))
    return values, frozenset(name for name, x in items if isinstance(x, Tensor) and x.is_meta)


class RowInputs:
    """Tensors `(rows, ...)` by name, as a layer of states, so that a recording reads them as it
    reads states."""

    is_fixed = True  # a recording serves tensors of these shapes only

    def __init__(self, tensors: dict[Hashable, Tensor]) -> None:
        """`tensors`: not empty."""
        # replaced by views of a recording's buffers once one has read them
        self.recurrent_states = dict(tensors)
        self.device = next(iter(tensors.values())).device
        self._tensors = tensors
        self._versions = {name: _version_of(tensor) for name, tensor in tensors.items()}

    @property
    def names(self) -> tuple[Hashable, ...]:
        return tuple(self._tensors)

    def has_similar(self, name: Hashable, tensor: Tensor) -> bool:
        """Whether this holds a tensor of this name, with the dtype and shape of `tensor`."""
        held = self._tensors.get(name)
        return held is not None and (held.dtype, held.shape) == (tensor.dtype, tensor.shape)

    def equals(self, tensors: Mapping[Hashable, Tensor]) -> bool:
        """Whether this holds the content of `tensors`."""
        if self._tensors.keys() != tensors.keys():
            return False
        return all(self._has_content(name, tensor) for name, tensor in tensors.items())

    def _has_content(self, name: Hashable, tensor: Tensor) -> bool:
        held = self._tensors[name]
        version = self._versions[name]
        if version is None or version != _version_of(held):
            return False
        if held is tensor:
            return True
        return self.has_similar(name, tensor) and torch.equal(held, tensor)


def note_row_inputs(rectangle: Any, inputs: Mapping[str, Tensor]) -> str | None:
    """Sets a rectangle's `row_inputs` to `inputs`, with the keys and values of a cross-attention
    cache that the model created. If nothing has changed since the last step, keeps the object, so
    that nothing is copied to buffers again. If a recording cannot read the tensors, changes nothing
    and returns the reason; otherwise `None`."""
    tensors = dict(_cross_states(rectangle.cache))
    tensors.update(inputs.items())
    if any(tensor is None for tensor in tensors.values()):
        return "its cross-attention cache has layers without keys"
    if sum(tensor.nbytes for tensor in tensors.values()) > MAX_BYTES:
        return (
            "its inputs for each row, and its cross-attention keys and values, take more than"
            f" {MAX_BYTES >> 20} MiB"
        )
    last = rectangle.row_inputs
    if not tensors:
        rectangle.row_inputs = None
    elif last is None or not last.equals(tensors):
        rectangle.row_inputs = RowInputs(tensors)
    return None


def is_row_input(name: str, value: Tensor, rectangle: Any) -> bool:
    """Whether an input tensor can be a row input (`note_row_inputs`). It can if it has one entry
    for each row, and no axis that grows with the rows' tokens. An entry must be the same in every
    step, or cover only the new token."""
    if value.dim() < 2 or len(value) != len(rectangle.blocks):
        return False
    if rectangle.row_inputs is not None and rectangle.row_inputs.has_similar(name, value):
        return True  # as in the last step
    names = [input_name for input_name, x in rectangle.inputs.items() if x is value]
    if not rectangle.constant_names.isdisjoint(names):
        return True
    return (bool(names) or value.shape[1] == 1) and rectangle.width not in value.shape


def with_cross_states(cache: Any, running_cache: Any, tensors: Mapping[Hashable, Tensor]) -> Any:
    """Returns `cache`, with a cross-attention cache that holds `tensors` if `running_cache` has one
    that the model created."""
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
    """The cross-attention cache that the model created; `None` if there is none."""
    _, *cross_caches = cache_parts(cache)
    return next((cross for cross in cross_caches if not isinstance(cross, PagedCache)), None)


def _cross_states(cache: Any) -> Iterator[tuple[Hashable, Tensor]]:
    cross = _own_cross_cache(cache)
    layers = () if cross is None else cross.layers
    for index, layer in enumerate(layers):
        for name in _CROSS_STATES:
            yield (index, name), getattr(layer, name)


def _version_of(tensor: Tensor) -> int | None:
    """The number of writes to a tensor; `None` for inference tensors, whose writes torch does not
    count."""
    return None if tensor.is_inference() else tensor._version


PassedInputs = dict[str, Any]
"""Maps an output's name to the name of the input that a forward returns unchanged as this output
or, for a nested `ModelOutput`, to a dict of the same form."""


def passed_inputs(outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> PassedInputs:
    """Returns which of a forward's outputs are inputs that it passes through."""
    passed: PassedInputs = {}
    for name, value in outputs.items():
        if isinstance(value, ModelOutput):
            nested = passed_inputs(value, inputs)
            if nested:
                passed[name] = nested
        elif isinstance(value, Tensor):
            names = [input_name for input_name, x in inputs.items() if x is value]
            if names:
                passed[name] = names[0]
    return passed


def outputs_of(passed: PassedInputs, inputs: Mapping[str, Any], cache: Any = None) -> ModelOutput:
    """Returns what is known of the outputs of a replay: its cache, and the inputs that the forward
    passes through."""
    outputs = ModelOutput() if cache is None else ModelOutput({compat.OUTPUT_CACHE: cache})
    for name, source in passed.items():
        is_nested = isinstance(source, dict)
        outputs[name] = outputs_of(source, inputs) if is_nested else inputs[source]
    return outputs
