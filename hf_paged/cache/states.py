"""Storage for states of linear attention and convolutions: one slot per sequence, for any number of
tokens. It decides neither which states are kept nor which sequence has which slot."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .block_pool import BlockPool


class _StateLayer:
    """Attributes of a layer of states, as `gather_states` sets them."""


class StateRows:
    """Copies of the states of some rows, which forwards do not change."""

    def __init__(
        self,
        parts: Sequence[tuple[Sequence[Any], list[int]]],
        device: torch.device | None = None,
    ) -> None:
        layers, _ = parts[0]
        self.state_layers = [_StateLayer() for _ in layers]
        gather_states(self.state_layers, parts, device)

    def put_back(self, group: Any, index: int, num_layers: int, block_ids: dict[int, int]) -> None:
        """Makes a copy of each row `row` the state of slot `block_ids[row]`, on the original
        device."""
        rows = StateRows([(self.state_layers, list(block_ids))])
        group.storage.keep(block_ids.values(), rows)


class StateStorage:
    """The storage of a group of states: maps each slot, a block id of `pool`, to the row and holder
    of its state. A copied slot refers to the same row until one of the two is computed again. The
    runner keeps the steps in `holders` alive; the storage itself keeps `StateRows` alive."""

    nbytes = num_rows = growth_step = 0
    is_elastic = True
    most_bytes: int | None = None

    def __init__(self, pool: BlockPool) -> None:
        self.block_bytes = 0
        self.layers: dict[int, Any] = {}  # always empty
        self.pool = pool
        self._rows: dict[int, tuple[Callable[[], Any], int]] = {}

    def grow(self, num_blocks: int, most: int) -> None:
        """Does nothing: the holders own the memory."""

    def make(self, *_: Any) -> Any:
        """Raises `TypeError`: states have no layers of blocks."""
        raise TypeError("a storage of states has no layers of blocks")

    reserve = outline = promote = make

    def clear(self) -> None:
        """Forgets all states. Call it only while no slot is used or kept."""
        self._rows = {}

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies the state of slot `source` to slot `target`, for each pair, reading all sources
        before writing."""
        copied = []
        for source, target in copies:
            if source in self._rows:
                copied.append((target, self._rows[source]))
        self._rows.update(copied)

    def put(self, slots: Iterable[int], holder: Any, row_bytes: int) -> None:
        """Makes row `i` of `holder.state_layers` (see `gather_states`) the state of `slots[i]`.
        `row_bytes`: bytes of one row over all layers."""
        ref = weakref.ref(holder)
        self._rows.update((slot, (ref, row)) for row, slot in enumerate(slots))
        self.block_bytes = row_bytes

    def keep(self, slots: Iterable[int], rows: StateRows) -> None:
        """Makes row `i` of these copies the state of `slots[i]`, and keeps them alive."""
        self._rows.update((slot, (lambda: rows, row)) for row, slot in enumerate(slots))

    def find(self, slot: int) -> tuple[Any, int]:
        """Returns the holder and the row of a slot's state. Raises `KeyError` if it has none."""
        get, row = self._rows[slot]
        holder = get()
        if holder is None:
            raise KeyError(slot)
        return holder, row

    def holders(self) -> dict[Any, set[int]]:
        """Returns the slots by the holder of their state; drops slots that are neither used nor
        kept."""
        slots_by_holder: dict[Any, set[int]] = {}
        for slot, (get, _) in list(self._rows.items()):
            holder = get()
            if holder is None or not (self.pool.refcount(slot) or self.pool.is_kept(slot)):
                del self._rows[slot]
            else:
                slots_by_holder.setdefault(holder, set()).add(slot)
        return slots_by_holder

    def copy_snapshots(self) -> None:
        """Copies the states that the prefix cache keeps, since forwards will change their rows.
        Evicts states whose step is no longer alive from the prefix cache."""
        for slot in self.pool.kept_ids:
            try:
                holder, row = self.find(slot)
            except KeyError:
                self.pool.invalidate(slot)
            else:
                if not isinstance(holder, StateRows):
                    part = (holder.state_layers, [row])
                    self.keep([slot], StateRows([part]))

    def copy_out(self, slots: Iterable[int]) -> StateRows:
        """Copies the states of these slots (at least one) to host memory. Raises `KeyError` if a
        slot has none."""
        parts = []
        for slot in slots:
            holder, row = self.find(slot)
            parts.append((holder.state_layers, [row]))
        return StateRows(parts, torch.device("cpu"))


def state_layers(cache: Any) -> list[Any]:
    """Returns the layers of a cache that hold states; none if `cache` is `None`."""
    layers = getattr(cache, "layers", ())
    return [layer for layer in layers if hasattr(layer, "recurrent_states")]


def num_state_bytes(layers: Sequence[Any]) -> int:
    num_bytes = 0
    for layer in layers:
        for states in _states_of(layer):
            stored = (state for state in states.values() if state is not None)
            num_bytes += sum(state.nbytes for state in stored)
    return num_bytes


_STATES = ("conv_states", "recurrent_states")
_DICTS = (
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


def state_tensors(layers: Sequence[Any]) -> list[Tensor]:
    """Returns the states `(rows, ...)` of these layers, in order."""
    states = (states for layer in layers for states in _states_of(layer))
    return [state for by_number in states for state in by_number.values() if state is not None]


def set_state_tensors(layers: Sequence[Any], tensors: Iterable[Tensor]) -> None:
    """Makes these the states of the layers, in the order of `state_tensors`."""
    new = iter(tensors)
    for layer in layers:
        for states in _states_of(layer):
            for number, state in states.items():
                if state is not None:
                    states[number] = next(new)


def _states_of(layer: Any) -> list[dict[int, Tensor | None]]:
    return [getattr(layer, name) for name in _STATES]


def copy_state_attributes(layer: Any, like: Any) -> None:
    """Gives a layer the states of `like` and all else that belongs to them, in dicts of its own,
    which refer to the same tensors."""
    for name in (*_STATES, *_DICTS):
        setattr(layer, name, dict(getattr(like, name)))
    for name in ("number_of_states", "record_past", "dtype", "device"):
        setattr(layer, name, getattr(like, name))


def gather_states(
    layers: Sequence[Any],
    parts: Sequence[tuple[Sequence[Any], list[int]]],
    device: torch.device | None = None,
) -> None:
    """Fills empty `layers`, of transformers' linear-attention classes, with rows of other layers of
    the same model: `parts` are pairs of layers and row numbers, in order. The states go to
    `device`, by default that of the layers."""
    for index, layer in enumerate(layers):
        sources = [(held[index], rows) for held, rows in parts]
        like, _ = sources[0]
        target = like.device if device is None else device
        for name in _DICTS:
            flags = getattr(like, name)
            setattr(layer, name, dict(flags))
        layer.dtype = like.dtype
        layer.device = like.device
        for name in _STATES:
            states: dict[int, Tensor | None] = {}
            for number, state in getattr(like, name).items():
                states[number] = None
                if state is not None:
                    stored = [(getattr(source, name)[number], rows) for source, rows in sources]
                    states[number] = _rows(stored).to(target)
            setattr(layer, name, states)


def _rows(parts: list[tuple[Tensor, list[int]]]) -> Tensor:
    selected = []
    for state, rows in parts:
        index = torch.tensor(rows, device=state.device)
        selected.append(state.index_select(0, index))
    if len(selected) == 1:
        return selected[0]
    return torch.cat(selected)
