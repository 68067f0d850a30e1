"""Stores states of linear attention and convolutions: one slot per sequence, for any number of
tokens. Callers decide which states to keep and which slot a sequence gets. The functions on layers
also read and replace indexer keys, which no slot stores."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache.block_pool import BlockPool
from ..cache.groups import GroupSpec


class _StateLayer:
    """A layer of states; `gather_states` sets its attributes."""


class StateRows:
    """Copies of the states of some rows; forwards never change the copies. `parts` and `device`:
    as in `gather_states`."""

    def __init__(
        self,
        parts: Sequence[tuple[Sequence[Any], list[int]]],
        device: torch.device | None = None,
    ) -> None:
        layers, _ = parts[0]
        self.state_layers = [_StateLayer() for _ in layers]
        gather_states(self.state_layers, parts, device)

    def put_back(self, group: Any, index: int, num_layers: int, block_ids: dict[int, int]) -> None:
        """Makes row `row`, copied to its original device, the state of slot `block_ids[row]`, for
        each `row` in `block_ids`. Ignores `index` and `num_layers`, which `HostLayer.put_back`
        needs."""
        rows = StateRows([(self.state_layers, list(block_ids))])
        group.storage.put_copies(block_ids.values(), rows)


class StateStorage:
    """The storage of a group of states: maps each slot, a block id of `pool`, to the holder of its
    state and the row in that holder. A holder has `state_layers`: it is a step's rectangle, which
    the runner keeps alive, or [`StateRows`], which this storage keeps alive. A copied slot refers
    to the same row until the state of one of the two slots is computed again."""

    nbytes = num_allocated_blocks = growth_step = 0
    is_elastic = True
    max_bytes: int | None = None

    def __init__(self, pool: BlockPool) -> None:
        self.block_bytes = 0
        # always empty: states are not in blocks
        self.layers: dict[int, Any] = {}
        self.released: dict[int, Any] = {}
        self.pool = pool
        # by slot: a function that returns the holder (`None` once it is gone), and the row
        self._rows: dict[int, tuple[Callable[[], Any], int]] = {}

    def grow(self, num_blocks: int, max_blocks: int) -> None:
        """Does nothing, since the holders own the memory."""

    def make(self, *_: Any) -> Any:
        """Raises `TypeError`: states have no layers of blocks."""
        raise TypeError("a storage of states has no layers of blocks")

    reserve = outline = promote = make

    def clear(self) -> None:
        """Forgets all states. The pool may have no used or kept slots."""
        self._rows = {}

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies the state of slot `source` to slot `target`, for each pair, reading all sources
        before writing. Skips sources without a state."""
        new_rows = []
        for source, target in copies:
            if source in self._rows:
                new_rows.append((target, self._rows[source]))
        self._rows.update(new_rows)

    def put(self, slots: Iterable[int], holder: Any, row_bytes: int) -> None:
        """Makes row `i` of `holder.state_layers` the state of `slots[i]`. `row_bytes`: bytes of one
        row over all layers."""
        ref = weakref.ref(holder)
        self._rows.update((slot, (ref, row)) for row, slot in enumerate(slots))
        self.block_bytes = row_bytes

    def put_copies(self, slots: Iterable[int], rows: StateRows) -> None:
        """Makes row `i` of `rows` the state of `slots[i]`, and keeps `rows` alive."""
        self._rows.update((slot, (lambda: rows, row)) for row, slot in enumerate(slots))

    def find(self, slot: int) -> tuple[Any, int]:
        """Returns the holder of a slot's state, and the row in the holder. Raises `KeyError` if the
        slot has no state or its holder is gone."""
        get_holder, row = self._rows[slot]
        holder = get_holder()
        if holder is None:
            raise KeyError(slot)
        return holder, row

    def holders(self) -> dict[Any, set[int]]:
        """Returns the slots of each holder. Forgets slots that the pool neither uses nor keeps, or
        whose holder is gone."""
        slots_by_holder: dict[Any, set[int]] = {}
        for slot, (get_holder, _) in list(self._rows.items()):
            holder = get_holder()
            if holder is None or not (self.pool.refcount(slot) or self.pool.is_kept(slot)):
                del self._rows[slot]
            else:
                slots_by_holder.setdefault(holder, set()).add(slot)
        return slots_by_holder

    def copy_snapshots(self) -> None:
        """Copies the states that the prefix cache keeps, since forwards will change the rows that
        hold them. Invalidates cached slots that have no state, or whose holder is gone."""
        for slot in self.pool.kept_ids:
            try:
                holder, row = self.find(slot)
            except KeyError:
                self.pool.invalidate(slot)
            else:
                if not isinstance(holder, StateRows):
                    part = (holder.state_layers, [row])
                    self.put_copies([slot], StateRows([part]))

    def copy_out(self, slots: Iterable[int]) -> StateRows:
        """Returns copies of the states of these slots (at least one) in host memory. Raises
        `KeyError` as `find` does."""
        parts = []
        for slot in slots:
            holder, row = self.find(slot)
            parts.append((holder.state_layers, [row]))
        return StateRows(parts, torch.device("cpu"))


@dataclass(frozen=True)
class StateSpec(GroupSpec):
    """States of linear attention and convolutions: each sequence has one slot, which is a block for
    any number of tokens. A snapshot is a state that the prefix cache keeps, in a slot that no
    sequence writes to."""

    kind: str = "states"
    is_empty: bool = False  # the model has no states: the slot only identifies the sequence

    def make_states(self) -> StateStorage:
        return StateStorage(BlockPool())

    @property
    def is_counted(self) -> bool:
        return not self.is_empty

    def num_spanned(self, first: int, end: int, chunk: int, num_held: int, block_size: int) -> int:
        if self.is_empty:
            return 0
        span = super().num_spanned(first, end, chunk, num_held, block_size)
        return max(0, span - num_held)

    @property
    def prefix_window(self) -> int | None:
        """2, so that the snapshot after the previous token is visible; 1 if the model has no
        states, so that no snapshot is needed."""
        return 1 if self.is_empty else 2


def state_layers(cache: Any) -> list[Any]:
    """Returns the layers of a cache that hold states; none if `cache` is `None`."""
    layers = getattr(cache, "layers", ())
    return [layer for layer in layers if hasattr(layer, "recurrent_states")]


def state_or_indexer_layers(cache: Any) -> list[Any]:
    """Returns the layers of a cache that hold states or may hold indexer keys."""
    return [
        layer
        for layer in cache.layers
        if hasattr(layer, "recurrent_states") or hasattr(layer, "indexer_keys")
    ]


def num_state_bytes(layers: Sequence[Any]) -> int:
    """Returns the total bytes of the states of all rows in these layers."""
    return sum(state.nbytes for state in state_tensors(layers))


_STATES = ("conv_states", "recurrent_states")
_STATE_ATTRIBUTES = (
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)
# attributes of indexers, to which a step appends a column: keys (rows, length, dim), and positions
# (axes, rows, length), which the functions below take and return as (rows, length, axes)
_INDEXER_KEYS, _INDEXER_POSITIONS = "indexer_keys", "indexer_position_ids"
_GROWING = (_INDEXER_KEYS, _INDEXER_POSITIONS)


def state_tensors(layers: Sequence[Any]) -> list[Tensor]:
    """Returns the state tensors `(rows, ...)` of these layers, in order, including the keys and
    positions of indexers."""
    tensors = []
    for layer in layers:
        for states, key in _states_of(layer):
            state = states[key]
            tensors.append(state.permute(1, 2, 0) if key == _INDEXER_POSITIONS else state)
    return tensors


def set_state_tensors(layers: Sequence[Any], tensors: Iterable[Tensor]) -> None:
    """Replaces the state tensors of the layers by `tensors`, in the order of `state_tensors`."""
    new_states = iter(tensors)
    for layer in layers:
        for states, key in _states_of(layer):
            state = next(new_states)
            states[key] = state.permute(2, 0, 1) if key == _INDEXER_POSITIONS else state


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two state tensors of one layer are views of the same elements."""
    return a is b or (a.data_ptr(), a.shape) == (b.data_ptr(), b.shape)


def growing_states(layers: Sequence[Any]) -> list[bool]:
    """Returns for each of the `state_tensors` of these layers whether it has a column for each
    token, `(rows, length, ...)`."""
    return [key in _GROWING for layer in layers for _, key in _states_of(layer)]


def state_specs(layers: Sequence[Any], column: int) -> Hashable:
    """Returns the shape of a row and the dtype of each of the `state_tensors` of these layers. The
    shape of a tensor `(rows, length, ...)` with a column for each token has `length - column`
    instead of `length`, so that it is the same in each step."""
    specs = []
    for state, is_growing in zip(state_tensors(layers), growing_states(layers)):
        _, *sizes = state.shape
        if is_growing:
            sizes[0] -= column
        specs.append((*sizes, state.dtype))
    return tuple(specs)


def _states_of(layer: Any) -> list[tuple[dict[Any, Tensor], Any]]:
    """Returns the dict that holds each of the layer's state tensors, with the tensor's key."""
    attributes = vars(layer)
    entries: list[tuple[dict[Any, Tensor], Any]] = []
    for name in _STATES:
        states = attributes.get(name, {})
        for index, state in states.items():
            if state is not None:
                entries.append((states, index))
    for name in _GROWING:
        if attributes.get(name) is not None:
            entries.append((attributes, name))
    return entries


def copy_state_attributes(layer: Any, source: Any) -> None:
    """Copies the states of `source`, and the attributes that describe them, to `layer`. The dicts
    are new, the tensors shared."""
    for name in (*_STATES, *_STATE_ATTRIBUTES):
        if hasattr(source, name):
            setattr(layer, name, dict(getattr(source, name)))
    for name in ("number_of_states", "record_past", "dtype", "device", *_GROWING):
        if hasattr(source, name):
            setattr(layer, name, getattr(source, name))


def gather_states(
    layers: Sequence[Any],
    parts: Sequence[tuple[Sequence[Any], list[int]]],
    device: torch.device | None = None,
) -> None:
    """Sets the states of `layers` to copies of rows of other layers of the same model. `parts`:
    pairs of source layers and the indices of the rows to copy, in order. The copies are on
    `device`, by default the `device` attribute of the first source layer."""
    for index, layer in enumerate(layers):
        sources = [part_layers[index] for part_layers, _ in parts]
        target_device = sources[0].device if device is None else device
        copy_state_attributes(layer, sources[0])
        gathered_states = []
        for states in zip(*(state_tensors([source]) for source in sources)):
            rows = [(state, part_rows) for state, (_, part_rows) in zip(states, parts)]
            gathered_states.append(_concatenate_rows(rows).to(target_device))
        set_state_tensors([layer], gathered_states)


def _concatenate_rows(parts: list[tuple[Tensor, list[int]]]) -> Tensor:
    selected_rows = []
    for state, rows in parts:
        index = torch.tensor(rows, device=state.device)
        selected_rows.append(state.index_select(0, index))
    if len(selected_rows) == 1:
        return selected_rows[0]
    return torch.cat(selected_rows)
