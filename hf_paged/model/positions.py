"""Tables of positions that a model's forward reads: how they are recognised, which of them end, and
how many positions they hold."""

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
# tokens of a prompt, and of steps behind it, that show which tables are read
_NUM_PROBED = 4
_NUM_STEPS = 3


class PositionTable(NamedTuple):
    """An axis of which a forward reads place `offset + position`."""

    size: int
    offset: int
    # whether it is one of a parameter, which no forward replaces by a longer one
    is_parameter: bool


class PositionReads(TorchDispatchMode):
    """Around a forward of the one token at `position`: collects in `tables` all of which the
    forward reads one place. Raises `IndexError` before a read past an axis's end, which on a GPU
    would end the process."""

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
        for size, places in self._reads(func.overloadpacket, args):
            if places and max(places) >= size:
                raise IndexError(f"place {max(places)} is read of {size}")
            if len(places) == 1:
                self.tables.add(
                    PositionTable(
                        size, min(places) - self.position, isinstance(args[0], nn.Parameter)
                    )
                )
        return func(*args, **(kwargs or {}))

    def _reads(self, kind: Any, args: tuple[Any, ...]) -> list[tuple[int, set[int]]]:
        """Returns the size of each axis that an operation reads in part, and which places it reads;
        of a slice one end."""
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
        # code cuts what it computes for many reasons; it cuts a table of the model, or takes the
        # end of one (MPT)
        if not takes_end and self._addresses.isdisjoint(addresses_of(args[:1])):
            return []
        if takes_start:
            return [(size, {end - 1})] if end is not None and 0 < end < size else []
        if end is None or end > size:  # `x[size - length:]`: a table that is read from its end
            # nothing is left, which is no error
            return [(size, {size - 1 - start})] if start < size else []
        return [(size, {end - 1})]


def _values(index: Tensor) -> set[int]:
    return set(index.flatten().tolist())


def shorten(model: nn.Module, size: int, length: int) -> bool:
    """Cuts all buffers of the model with an axis of `size`, and tensors kept like them, to `length`
    places; returns whether there are any. For use where attributes of modules are restored."""
    is_shorter = False
    for module in model.modules():
        for held in (module._buffers, vars(module)):
            for name, value in list(held.items()):
                if (
                    isinstance(value, Tensor)
                    and not isinstance(value, nn.Parameter)
                    and size in value.shape
                ):
                    held[name] = value.narrow(value.shape.index(size), 0, length)
                    is_shorter = True
    return is_shorter


def num_positions(
    trial: Trial, given: dict[str, Any] | None = None
) -> tuple[int | None, int | None]:
    """Returns how many positions the model's tables hold: those that end, and those that its
    forward makes longer when needed; `None` without any, or if a forward fails. `given`: inputs of
    a model with an encoder. A table is an axis of which each step reads one place, the one that
    follows that of the step before."""
    try:
        tables = _tables(trial, given)
    except ForwardFailedError:
        return None, None
    ending: list[int] = []
    growing: list[int] = []
    for table in tables:
        counts = growing if _grows(trial, given, table) else ending
        counts.append(table.size - table.offset)
    return min(ending, default=None), min(growing, default=None)


def _grows(trial: Trial, given: dict[str, Any] | None, table: PositionTable) -> bool:
    """Whether forwards make a table longer that is cut to one place less than they need."""
    if not table.is_parameter:
        with contextlib.suppress(ForwardFailedError):
            _tables(trial, given, table.size, table.offset + _NUM_PROBED + _NUM_STEPS - 1)
            return True
    return False


def _tables(
    trial: Trial, given: dict[str, Any] | None, size: int = 0, length: int = 0
) -> set[PositionTable]:
    """The tables that decode steps read, with buffers of `size` cut to `length`."""
    model = trial.model
    with trial.forwards():
        if size and not shorten(model, size, length):
            raise IndexError("the table is no buffer")
        columns = [0] * (_NUM_PROBED + _NUM_STEPS)
        ids = sample_tokens(model)[:1, columns]
        prompt = ids[:, :_NUM_PROBED]
        inputs = first_inputs(model, prompt, torch.ones_like(prompt), None)
        if given:
            del inputs["attention_mask"]  # it would be the encoder's
            inputs |= given
        tables_by_step: list[set[PositionTable]] = []

        def reading(length: int) -> PositionReads:
            reads = PositionReads(length - 1, model)
            tables_by_step.append(reads.tables)
            return reads

        trial.decode(prompt, inputs, ids[:, _NUM_PROBED:], reading)
        return set.intersection(*tables_by_step[1:])
