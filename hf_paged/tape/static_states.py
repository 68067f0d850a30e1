"""Buffers at fixed addresses in which a recorded step reads and updates the states of its rows. The
caller chooses the rows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache.free_memory import discard
from ..rectangles.states import (
    growing_states,
    is_same_memory,
    set_state_tensors,
    state_tensors,
)


class StaticStates:
    """Buffers for the states of up to `num_rows` rows, with the shapes and dtypes of the states of
    `layers`. The buffers of indexers' states have `num_columns` columns, with zeros in those after
    a row's tokens. The states of a step's rows stay in the buffers until other rows need the
    buffers, so that the next step of the same rows copies nothing."""

    def __init__(self, layers: Sequence[Any], num_rows: int, num_columns: int = 0) -> None:
        self._are_growing = growing_states(layers)
        self.buffers: list[Tensor] = []
        for state, is_growing in zip(state_tensors(layers), self._are_growing):
            _, *sizes = state.shape
            if is_growing:
                sizes[0] = num_columns
            with torch.inference_mode(False):  # the buffers outlive the call
                buffer = torch.zeros((num_rows, *sizes), dtype=state.dtype, device=state.device)
            self.buffers.append(buffer)
        self._resident_layers: list[weakref.ref[Any]] = []
        self._resident_states: list[Tensor] = []

    @property
    def overwritten_buffers(self) -> list[Tensor]:
        """The buffers whose content a replay overwrites. In the other buffers, those of indexers'
        states, a replay only writes a column that no row has stored."""
        pairs = zip(self.buffers, self._are_growing)
        return [buffer for buffer, is_growing in pairs if not is_growing]

    def copy_in(self, layers: Sequence[Any]) -> None:
        """Copies the states of these layers to the first rows of the buffers. No layer may hold
        views of the buffers (`move_in`)."""
        self._copy(state_tensors(layers))

    def move_in(self, layers: Sequence[Any]) -> None:
        """Copies the states of these layers to the first rows of the buffers, and makes the layers
        hold views of these rows instead. Does nothing if they hold these views already."""
        states = state_tensors(layers)
        if len(states) == len(self._resident_states) and all(
            map(is_same_memory, states, self._resident_states)
        ):
            return
        self._move_out()
        self._resident_layers = [weakref.ref(layer) for layer in layers]
        self._resident_states = self._copy(states)
        set_state_tensors(layers, self._resident_states)

    def grow(self, layers: Sequence[Any]) -> None:
        """Called after a replay for these layers, which hold views of the buffers: extends the
        views of indexers' states by the column that the replay wrote."""
        if any(self._are_growing):
            for index, view in enumerate(self._resident_states):
                if self._are_growing[index]:
                    num_rows, length = view.shape[:2]
                    grown = self.buffers[index][:num_rows, : length + 1]
                    self._resident_states[index] = grown
            set_state_tensors(layers, self._resident_states)

    def discard(self) -> bool:
        """Gives the memory of the buffers back to the system until the next step, whose states are
        copied to them; returns whether that was possible."""
        self._move_out()
        self._resident_states = []
        return discard(self.buffers)

    def _copy(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Copies states to the first rows of the buffers; returns the views that now hold them."""
        views = []
        for buffer, state, is_growing in zip(self.buffers, states, self._are_growing, strict=True):
            rows = buffer[: len(state)]
            if is_growing:
                rows[:, state.shape[1] :] = 0
                rows = rows[:, : state.shape[1]]
            views.append(rows)
        if views:
            torch._foreach_copy_(views, states)
        return views

    def _move_out(self) -> None:
        """Replaces the views that resident layers hold by copies."""
        storages = {buffer.untyped_storage().data_ptr() for buffer in self.buffers}
        for ref in self._resident_layers:
            layer = ref()
            if layer is not None:
                states = state_tensors([layer])
                copies = [
                    state.clone() if state.untyped_storage().data_ptr() in storages else state
                    for state in states
                ]
                set_state_tensors([layer], copies)
        self._resident_layers = []
