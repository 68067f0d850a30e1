"""Finds the position tables that a model's forward reads, and counts their positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from .. import compat
from ..interrupts import is_interrupt
from ..threads import step_lock
from .own_loop import first_inputs
from .trial import ForwardFailedError, Trial, sample_tokens
from .values import addresses_of

_aten = torch.ops.aten
# numbers of prompt tokens and of decode steps in the forwards whose reads are observed
_NUM_PROMPT_TOKENS = 4
_NUM_STEPS = 3


class PositionTable(NamedTuple):
    """An axis of a tensor. A forward whose last token is at `position` reads this axis at a single
    index, `offset + position`."""

    size: int
    offset: int
    # whether the tensor is a parameter: forwards do not replace parameters with longer ones
    is_parameter: bool


class PositionReads(TorchDispatchMode):
    """Observes a forward whose last token is at `position`: collects in `tables` the axes that the
    forward reads at a single index. Raises `IndexError` instead of letting the forward read past
    the end of an axis, which on a GPU would make the device unusable for the process."""

    def __init__(self, position: int, model: nn.Module) -> None:
        super().__init__()
        self.position = position
        self.tables = set[PositionTable]()
        values = (value for module in model.modules() for value in vars(module).values())
        attributes = [value for value in values if isinstance(value, Tensor)]
        # of the model's own tensors
        self._addresses = addresses_of([*model.parameters(), *model.buffers(), *attributes])

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for size, indices in self._axis_reads(func.overloadpacket, args):
            if indices and max(indices) >= size:
                raise IndexError(f"index {max(indices)} is read from an axis of size {size}")
            if len(indices) == 1:
                self.tables.add(
                    PositionTable(
                        size, min(indices) - self.position, isinstance(args[0], nn.Parameter)
                    )
                )
        return func(*args, **(kwargs or {}))

    def _axis_reads(self, operation: Any, args: tuple[Any, ...]) -> list[tuple[int, set[int]]]:
        """Returns the size of each axis that an operation indexes or slices, and the indices that
        it reads. A slice counts as one index: its last or, for `x[start:]` and `x[-length:]`, its
        first, counted from the end of the axis."""
        if operation is _aten.embedding:
            return [(len(args[0]), _index_values(args[1]))]
        if operation in (_aten.gather, _aten.index_select) and args[0].dim():
            return [(args[0].shape[args[1]], _index_values(args[2]))]
        if operation is _aten.index:
            return [
                (size, _index_values(index))
                for size, index in zip(args[0].shape, args[1])
                if index is not None and index.dtype in (torch.int64, torch.int32)
            ]
        if operation is not _aten.slice or len(args) < 4:
            return []
        _, axis, start, end = args[:4]
        size = args[0].shape[axis]
        start = start or 0
        reads_end = start > 0 and (end is None or end >= size)
        # Code slices intermediate tensors for many reasons, so only their slices `x[start:]` with a
        # positive start count (MPT reads its table from the end). Every slice of the model's own
        # tensors counts.
        if not reads_end and self._addresses.isdisjoint(addresses_of(args[:1])):
            return []
        if start < 0:  # `x[-length:]`
            start += size
        if start <= 0:  # `x[:end]`
            return [(size, {end - 1})] if end is not None and 0 < end < size else []
        if end is None or end > size:  # `x[size - length:]`: a table read from its end
            # an empty slice reads no index
            return [(size, {size - 1 - start})] if start < size else []
        return [(size, {end - 1})]


def _index_values(index: Tensor) -> set[int]:
    return set(index.flatten().tolist())


def shorten(model: nn.Module, size: int, length: int) -> bool:
    """In each buffer and tensor attribute of the model's modules, cuts the first axis of this
    `size`, if there is one, to `length`. Returns whether it has cut any. The caller must restore
    the modules."""
    has_cut = False
    for module in model.modules():
        for tensors in (module._buffers, vars(module)):
            for name, value in list(tensors.items()):
                if (
                    isinstance(value, Tensor)
                    and not isinstance(value, nn.Parameter)
                    and size in value.shape
                ):
                    tensors[name] = value.narrow(value.shape.index(size), 0, length)
                    has_cut = True
    return has_cut


def num_positions(
    trial: Trial, encoder_inputs: dict[str, Any] | None = None
) -> tuple[int | None, int | None]:
    """Returns the number of positions in the shortest of the model's fixed tables, and in the
    shortest of its growing tables, which the forward replaces when they are too short. A number is
    `None` if the model has no table of that kind; both are if a forward fails. A table is an axis
    that each decode step reads at one index, which increases by one per step. `encoder_inputs`:
    model inputs for a model with an encoder."""
    try:
        tables = _find_tables(trial, encoder_inputs)
    except ForwardFailedError:
        return None, None
    fixed_sizes: list[int] = []
    growing_sizes: list[int] = []
    for table in tables:
        sizes = growing_sizes if _can_grow(trial, encoder_inputs, table) else fixed_sizes
        sizes.append(table.size - table.offset)
    return min(fixed_sizes, default=None), min(growing_sizes, default=None)


def _can_grow(trial: Trial, encoder_inputs: dict[str, Any] | None, table: PositionTable) -> bool:
    """Whether forwards succeed although the table is first cut to one position less than they need.
    If so, they replace it with a longer one."""
    if table.is_parameter:
        return False
    num_writes = len(trial.writes)
    length = table.offset + _NUM_PROMPT_TOKENS + _NUM_STEPS - 1
    try:
        _find_tables(trial, encoder_inputs, table.size, length)
        return True
    except ForwardFailedError:
        return False
    finally:
        del trial.writes[num_writes:]  # forwards with the whole table do not replace it


def grow_positions(model: PreTrainedModel, length: int) -> None:
    """Makes the model replace its growing tables (`num_positions`) that have fewer than `length`
    positions: runs a plain forward of one token at position `length - 1`, with a cache in which the
    keys and values of one token are repeated. If the forward fails, the tables stay as they are.
    """
    ids = sample_tokens(model)[:1, :1]
    cache = DynamicCache()
    inputs = {"input_ids": ids, compat.cache_name(model): cache, "use_cache": True}
    try:
        with step_lock(model), torch.no_grad():
            model.base_model(**inputs)
            for layer in cache.layers:
                layer.keys = layer.keys.expand(-1, -1, length - 1, -1)
                layer.values = layer.values.expand(-1, -1, length - 1, -1)
            model.base_model(**inputs, attention_mask=ids.new_ones(1, length))
    except Exception as error:
        if is_interrupt(error):
            raise
        # the table stays as it is, and limits the number of the request's tokens


def _find_tables(
    trial: Trial, encoder_inputs: dict[str, Any] | None, size: int = 0, length: int = 0
) -> set[PositionTable]:
    """Returns the tables that all decode steps read. If `size` is given, `shorten` first cuts
    tensors of that size to `length`. Raises `ForwardFailedError` if there are no such tensors, or
    if a forward fails."""
    model = trial.model
    with trial.forwards():
        if size and not shorten(model, size, length):
            raise IndexError("the table is neither a buffer nor an attribute of a module")
        columns = [0] * (_NUM_PROMPT_TOKENS + _NUM_STEPS)
        ids = sample_tokens(model)[:1, columns]
        prompt = ids[:, :_NUM_PROMPT_TOKENS]
        inputs = first_inputs(model, prompt, torch.ones_like(prompt), None)
        if encoder_inputs:
            del inputs["attention_mask"]  # the forward would apply it to the encoder
            inputs |= encoder_inputs
        tables_by_step: list[set[PositionTable]] = []

        def observe(length: int) -> PositionReads:
            reads = PositionReads(length - 1, model)
            tables_by_step.append(reads.tables)
            return reads

        trial.decode(prompt, inputs, ids[:, _NUM_PROMPT_TOKENS:], observe)
        return set.intersection(*tables_by_step[1:])
