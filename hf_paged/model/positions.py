"""Recognises the tables of positions that a model's forward reads, and counts the positions that
they hold."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .own_loop import first_inputs
from .trial import ForwardFailedError, Trial, sample_tokens
from .values import addresses_of, kept_tensors

_aten = torch.ops.aten
# tokens of the prompt, and steps behind it, that show which tables a forward reads
_NUM_PROBED = 4
_NUM_STEPS = 3


class PositionTable(NamedTuple):
    """An axis of a tensor, of which a forward reads index `offset + position`."""

    size: int
    offset: int
    # whether the tensor is a parameter, which no forward replaces by a longer one
    is_parameter: bool


class PositionReads(TorchDispatchMode):
    """Wraps a forward of the one token at `position`: collects in `tables` the axes of which the
    forward reads a single index. Raises `IndexError` before a read past an axis's end, which would
    end the process on a GPU."""

    def __init__(self, position: int, model: nn.Module) -> None:
        super().__init__()
        self.position = position
        self.tables = set[PositionTable]()
        self._addresses = addresses_of(kept_tensors(model))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for size, indices in self._reads(func.overloadpacket, args):
            if indices and max(indices) >= size:
                raise IndexError(f"index {max(indices)} is read of an axis of {size}")
            if len(indices) == 1:
                self.tables.add(
                    PositionTable(
                        size, min(indices) - self.position, isinstance(args[0], nn.Parameter)
                    )
                )
        return func(*args, **(kwargs or {}))

    def _reads(self, kind: Any, args: tuple[Any, ...]) -> list[tuple[int, set[int]]]:
        """Returns the size of each axis that an operation reads in part, and the indices that it
        reads; of a slice, one end."""
        if kind is _aten.embedding:
            return [(len(args[0]), _values(args[1]))]
        if kind in (_aten.gather, _aten.index_select) and args[0].dim():
            return [(args[0].shape[args[1]], _values(args[2]))]
        if kind is _aten.index:
            reads = []
            for size, index in zip(args[0].shape, args[1]):
                if index is not None and index.dtype in (torch.int64, torch.int32):
                    reads.append((size, _values(index)))
            return reads
        if kind is not _aten.slice or len(args) < 4:
            return []
        _, axis, start, end = args[:4]
        size = args[0].shape[axis]
        takes_start = not start or start < 0  # `x[:end]`
        takes_end = not takes_start and (end is None or end >= size)
        # Code slices intermediate tensors for many reasons. So only slices of the model's own
        # tensors count, and slices `x[start:]` (MPT reads its table from the end).
        if not takes_end and self._addresses.isdisjoint(addresses_of(args[:1])):
            return []
        if takes_start:
            return [(size, {end - 1})] if end is not None and 0 < end < size else []
        if end is None or end > size:  # `x[size - length:]`: a table read from its end
            # an empty slice is no error
            return [(size, {size - 1 - start})] if start < size else []
        return [(size, {end - 1})]


def _values(index: Tensor) -> set[int]:
    return set(index.flatten().tolist())


def shorten(model: nn.Module, size: int, length: int) -> bool:
    """Cuts the model's buffers with an axis of `size`, and the tensors among its modules'
    attributes, to `length` on that axis; returns whether there are any. The caller restores the
    attributes of modules."""
    is_shorter = False
    for module in model.modules():
        for tensors in (module._buffers, vars(module)):
            for name, value in list(tensors.items()):
                if (
                    isinstance(value, Tensor)
                    and not isinstance(value, nn.Parameter)
                    and size in value.shape
                ):
                    tensors[name] = value.narrow(value.shape.index(size), 0, length)
                    is_shorter = True
    return is_shorter


def num_positions(
    trial: Trial, encoder_inputs: dict[str, Any] | None = None
) -> tuple[int | None, int | None]:
    """Returns the number of positions that the model's fixed tables hold, and that of the tables
    that its forward grows when needed; `None` if there are none or a forward fails.
    `encoder_inputs`: for a model with an encoder. A table is an axis of which each step reads one
    index, which follows that of the step before."""
    try:
        tables = _tables(trial, encoder_inputs)
    except ForwardFailedError:
        return None, None
    fixed: list[int] = []
    growing: list[int] = []
    for table in tables:
        counts = growing if _grows(trial, encoder_inputs, table) else fixed
        counts.append(table.size - table.offset)
    return min(fixed, default=None), min(growing, default=None)


def _grows(trial: Trial, encoder_inputs: dict[str, Any] | None, table: PositionTable) -> bool:
    """Whether forwards grow a table that was cut to one position less than they need."""
    if not table.is_parameter:
        with contextlib.suppress(ForwardFailedError):
            length = table.offset + _NUM_PROBED + _NUM_STEPS - 1
            _tables(trial, encoder_inputs, table.size, length)
            return True
    return False


def _tables(
    trial: Trial, encoder_inputs: dict[str, Any] | None, size: int = 0, length: int = 0
) -> set[PositionTable]:
    """The tables that decode steps read, after buffers of `size` are cut to `length`."""
    model = trial.model
    with trial.forwards():
        if size and not shorten(model, size, length):
            raise IndexError("the table is not a buffer")
        columns = [0] * (_NUM_PROBED + _NUM_STEPS)
        ids = sample_tokens(model)[:1, columns]
        prompt = ids[:, :_NUM_PROBED]
        inputs = first_inputs(model, prompt, torch.ones_like(prompt), None)
        if encoder_inputs:
            del inputs["attention_mask"]  # the forward would take it as the encoder's
            inputs |= encoder_inputs
        tables_by_step: list[set[PositionTable]] = []

        def reading(length: int) -> PositionReads:
            reads = PositionReads(length - 1, model)
            tables_by_step.append(reads.tables)
            return reads

        trial.decode(prompt, inputs, ids[:, _NUM_PROBED:], reading)
        return set.intersection(*tables_by_step[1:])
