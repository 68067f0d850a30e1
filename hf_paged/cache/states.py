"""Storage for states of linear attention and convolutions: one slot per sequence, no tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .block_pool import BlockPool


class StateRows:
    """Copies of the states of some rows, which no forward changes."""

    def __init__(self, parts: Sequence[tuple[Sequence[Any], list[int]]], device: torch.device | None = None) -> None:
        self.state_layers = [SimpleNamespace() for _ in parts[0][0]]
        gather_states(self.state_layers, parts, device)


class StateStorage:
    """The storage of a group of states: maps each slot, a block id of `pool`, to the row and holder of its state. A
    copied slot refers to the same row until one of the two is computed again. The runner keeps steps alive that are
    holders (`holders`); the storage keeps `StateRows` alive."""

    def __init__(self, pool: BlockPool) -> None:
        self.capacity, self.block_bytes, self.nbytes, self.num_rows, self.is_elastic = 0, 0, 0, 0, True
        self.layers: dict[int, Any] = {}  # always empty; `Storage` has this attribute
        self._pool = pool
        self._rows: dict[int, tuple[Callable[[], Any], int]] = {}

    def grow(self, num_blocks: int, most: int) -> None:
        self.capacity = max(self.capacity, num_blocks)

    def clear(self) -> None:
        """Forgets all states. No slot may be used or kept."""
        self._rows, self.capacity = {}, 0

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies the state of slot `source` to slot `target`, for each pair; all are read before one is written."""
        found = [(target, self._rows[source]) for source, target in copies if source in self._rows]
        self._rows.update(found)

    def put(self, slots: Sequence[int], holder: Any, row_bytes: int) -> None:
        """Makes row `i` of `holder.state_layers` (see `gather_states`) the state of `slots[i]`. `row_bytes`: bytes of
        one row over all layers."""
        ref = weakref.ref(holder)
        self._rows.update((slot, (ref, row)) for row, slot in enumerate(slots))
        self.block_bytes = row_bytes

    def find(self, slot: int) -> tuple[Any, int]:
        """Returns the holder and the row of a slot's state. Raises `KeyError` if it has none."""
        get, row = self._rows[slot]
        holder = get()
        if holder is None:
            raise KeyError(slot)
        return holder, row

    def holders(self) -> dict[Any, set[int]]:
        """Returns the slots by the holder of their state; drops slots that are neither used nor kept."""
        found: dict[Any, set[int]] = {}
        for slot, (get, _) in list(self._rows.items()):
            holder = get()
            if holder is None or not (self._pool.refcount(slot) or self._pool.is_kept(slot)):
                del self._rows[slot]
            else:
                found.setdefault(holder, set()).add(slot)
        return found

    def copy_kept(self) -> None:
        """Copies the states that the prefix cache keeps, since forwards will change their rows. Evicts those whose step
        is no longer alive from the prefix cache."""
        for slot in self._pool.kept:
            try:
                holder, row = self.find(slot)
            except KeyError:
                self._pool.lose(slot)
            else:
                if not isinstance(holder, StateRows):
                    self._keep([slot], StateRows([(holder.state_layers, [row])]))

    def copy_out(self, slots: Iterable[int]) -> StateRows:
        """Copies the states of these slots (at least one) to host memory. Raises `KeyError` if one has none."""
        parts = [(holder.state_layers, [row]) for holder, row in map(self.find, slots)]
        return StateRows(parts, torch.device("cpu"))

    def put_back(self, host: StateRows, slots: dict[int, int]) -> None:
        """Makes row `row` of the copies the state of `slots[row]`, on the original device."""
        self._keep(list(slots.values()), StateRows([(host.state_layers, list(slots))]))

    def _keep(self, slots: Sequence[int], rows: StateRows) -> None:
        self._rows.update((slot, (lambda: rows, row)) for row, slot in enumerate(slots))


def state_layers(cache: Any) -> list[Any]:
    """Returns the layers of a cache that hold states; none if `cache` is `None`."""
    return [layer for layer in getattr(cache, "layers", ()) if hasattr(layer, "recurrent_states")]


def num_state_bytes(layers: Sequence[Any]) -> int:
    held = (held for layer in layers for held in (layer.conv_states, layer.recurrent_states))
    return sum(state.nbytes for states in held for state in states.values() if state is not None)


def gather_states(
    layers: Sequence[Any], parts: Sequence[tuple[Sequence[Any], list[int]]], device: torch.device | None = None
) -> None:
    """Fills empty `layers`, of transformers' linear-attention classes, with rows of other layers of the same model:
    `parts` are pairs of layers and their rows, in order. The states go to `device`, by default that of the layers."""
    for place, layer in enumerate(layers):
        sources = [(held[place], rows) for held, rows in parts]
        like = sources[0][0]
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            setattr(layer, name, dict(getattr(like, name)))
        layer.conv_kernel_size, layer.dtype, layer.device = dict(like.conv_kernel_size), like.dtype, like.device
        to = like.device if device is None else device
        for name in ("conv_states", "recurrent_states"):
            states: dict[int, Tensor | None] = {}
            for number, state in getattr(like, name).items():
                found = [(getattr(source, name)[number], rows) for source, rows in sources]
                states[number] = None if state is None else _rows(found).to(to)
            setattr(layer, name, states)


def _rows(parts: list[tuple[Tensor, list[int]]]) -> Tensor:
    selected = [state.index_select(0, torch.tensor(rows, device=state.device)) for state, rows in parts]
    return selected[0] if len(selected) == 1 else torch.cat(selected)
