"""States of linear attention and convolutions: no tokens, one slot a sequence."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .block_pool import BlockPool


class StateRows:
    """Copies of the states of some rows, which no forward moves on."""

    def __init__(self, parts: Sequence[tuple[Sequence[Any], list[int]]], device: torch.device | None = None) -> None:
        self.state_layers = [SimpleNamespace() for _ in parts[0][0]]
        gather_states(self.state_layers, parts, device)


class StateStorage:
    """The storage of a group of states: which row of which holder has the state of each slot, a block id of `pool`. A
    slot that was copied is the same row until one is computed again. Their runner keeps steps alive (`holders`), the
    storage itself keeps `StateRows`."""

    def __init__(self, pool: BlockPool) -> None:
        self.capacity, self.block_bytes, self.nbytes, self.num_rows, self.is_elastic = 0, 0, 0, 0, True
        self.layers: dict[int, Any] = {}  # as a `Storage` has them: no layer has blocks
        self._pool = pool
        self._rows: dict[int, tuple[Callable[[], Any], int]] = {}

    def grow(self, num_blocks: int, most: int) -> None:
        self.capacity = max(self.capacity, num_blocks)

    def clear(self) -> None:
        """No slot is used or kept any more."""
        self._rows, self.capacity = {}, 0

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Slot `target` gets the state of slot `source`, for each pair; all are read before one is written."""
        found = [(target, self._rows[source]) for source, target in copies if source in self._rows]
        self._rows.update(found)

    def put(self, slots: Sequence[int], holder: Any, row_bytes: int) -> None:
        """Row `i` of `holder.state_layers`, as `gather_states` takes them, is the state of `slots[i]` from now on.
        `row_bytes`: bytes of one row over all layers."""
        ref = weakref.ref(holder)
        self._rows.update((slot, (ref, row)) for row, slot in enumerate(slots))
        self.block_bytes = row_bytes

    def find(self, slot: int) -> tuple[Any, int]:
        """The holder and the row of a slot's state. Raises `KeyError` where it has none."""
        get, row = self._rows[slot]
        holder = get()
        if holder is None:
            raise KeyError(slot)
        return holder, row

    def holders(self) -> dict[Any, set[int]]:
        """By holder the slots whose state it has; what is neither in use nor kept is forgotten."""
        found: dict[Any, set[int]] = {}
        for slot, (get, _) in list(self._rows.items()):
            holder = get()
            if holder is None or not (self._pool.refcount(slot) or self._pool.is_kept(slot)):
                del self._rows[slot]
            else:
                found.setdefault(holder, set()).add(slot)
        return found

    def copy_kept(self) -> None:
        """States that the prefix cache keeps become copies, as their rows will move on; those that are lost, as their
        step is no longer alive, lose their names."""
        for slot in self._pool.kept:
            try:
                holder, row = self.find(slot)
            except KeyError:
                self._pool.lose(slot)
            else:
                if not isinstance(holder, StateRows):
                    self._keep([slot], StateRows([(holder.state_layers, [row])]))

    def copy_out(self, slots: Iterable[int]) -> StateRows:
        """The states of these slots, one at least, in host memory. Raises `KeyError` where one has none."""
        parts = [(holder.state_layers, [row]) for holder, row in map(self.find, slots)]
        return StateRows(parts, torch.device("cpu"))

    def put_back(self, host: StateRows, slots: dict[int, int]) -> None:
        """Row `row` of the copies becomes the state of `slots[row]`, on the device that it came from."""
        self._keep(list(slots.values()), StateRows([(host.state_layers, list(slots))]))

    def _keep(self, slots: Sequence[int], rows: StateRows) -> None:
        self._rows.update((slot, (lambda: rows, row)) for row, slot in enumerate(slots))


def state_layers(cache: Any) -> list[Any]:
    """The layers of a cache, or of none, that hold states."""
    return [layer for layer in getattr(cache, "layers", ()) if hasattr(layer, "recurrent_states")]


def num_state_bytes(layers: Sequence[Any]) -> int:
    held = (held for layer in layers for held in (layer.conv_states, layer.recurrent_states))
    return sum(state.nbytes for states in held for state in states.values() if state is not None)


def gather_states(
    layers: Sequence[Any], parts: Sequence[tuple[Sequence[Any], list[int]]], device: torch.device | None = None
) -> None:
    """Fills the states of `layers`, of transformers' linear-attention classes, which have none: `parts` are layers of
    the same model and the rows that are taken of them, in order. On `device`, or where they are computed."""
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
