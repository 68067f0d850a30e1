"""States of linear attention and convolutions: no tokens, one slot a sequence."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .block_pool import BlockPool


class StateStorage:
    """The storage of a group of states: which row of which step holds the state of each slot, a block id of `pool`. A
    slot that was copied is the same row until one is computed again. Their runner keeps steps alive (`holders`)."""

    def __init__(self, pool: BlockPool) -> None:
        self.capacity, self.block_bytes = 0, 0
        self.layers: dict[int, Any] = {}  # as a `Storage` has them: no layer has blocks
        self._pool = pool
        self._rows: dict[int, tuple[weakref.ref[Any], int]] = {}

    def grow(self, num_blocks: int, exactly: bool = False) -> None:
        self.capacity = max(self.capacity, num_blocks)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Slot `target` gets the state of slot `source`, for each pair; all are read before one is written."""
        found = [(target, self._rows[source]) for source, target in copies if source in self._rows]
        self._rows.update(found)

    def put(self, slots: Sequence[int], holder: Any, row_bytes: int) -> None:
        """Row `i` of `holder` is the state of `slots[i]` from now on. `row_bytes`: bytes of one row over all layers."""
        ref = weakref.ref(holder)
        self._rows.update((slot, (ref, row)) for row, slot in enumerate(slots))
        self.block_bytes = row_bytes

    def find(self, slot: int) -> tuple[Any, int]:
        """The holder and the row of a slot's state. Raises `KeyError` where it has none."""
        ref, row = self._rows[slot]
        holder = ref()
        if holder is None:
            raise KeyError(slot)
        return holder, row

    def holders(self) -> dict[Any, set[int]]:
        """By holder the slots in use whose state it has; what is no longer in use is forgotten."""
        found: dict[Any, set[int]] = {}
        for slot, (ref, _) in list(self._rows.items()):
            holder = ref()
            if holder is None or not self._pool.refcount(slot):
                del self._rows[slot]
            else:
                found.setdefault(holder, set()).add(slot)
        return found


def state_layers(cache: Any) -> list[Any]:
    """The layers of a cache, or of none, that hold states."""
    return [layer for layer in getattr(cache, "layers", ()) if hasattr(layer, "recurrent_states")]


def num_state_bytes(layers: Sequence[Any]) -> int:
    held = (held for layer in layers for held in (layer.conv_states, layer.recurrent_states))
    return sum(state.nbytes for states in held for state in states.values() if state is not None)


def gather_states(layers: Sequence[Any], parts: Sequence[tuple[Sequence[Any], list[int]]]) -> None:
    """Fills the states of `layers`, of transformers' linear-attention classes, which have none: `parts` are layers of
    the same model and the rows that are taken of them, in order."""
    for place, layer in enumerate(layers):
        sources = [(held[place], rows) for held, rows in parts]
        like = sources[0][0]
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            setattr(layer, name, dict(getattr(like, name)))
        layer.conv_kernel_size, layer.dtype, layer.device = dict(like.conv_kernel_size), like.dtype, like.device
        for name in ("conv_states", "recurrent_states"):
            setattr(
                layer,
                name,
                {
                    number: None if state is None else _rows([(getattr(s, name)[number], rows) for s, rows in sources])
                    for number, state in getattr(like, name).items()
                },
            )


def _rows(parts: list[tuple[torch.Tensor, list[int]]]) -> torch.Tensor:
    selected = [state.index_select(0, torch.tensor(rows, device=state.device)) for state, rows in parts]
    return selected[0] if len(selected) == 1 else torch.cat(selected)
