"""Buffers at fixed addresses in which a recorded step reads and updates the states of its rows. The
caller chooses the rows."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache.free_memory import discard
from ..rectangles.states import set_state_tensors, state_tensors


class StaticStates:
    """Buffers for the states of up to `num_rows` rows, with the shapes and dtypes of the states of
    `layers`. The states of a step's rows stay in the buffers until other rows need the buffers, so
    that the next step of the same rows copies nothing."""

    def __init__(self, layers: Sequence[Any], num_rows: int) -> None:
        with torch.inference_mode(False):  # the buffers outlive the call
            self.buffers = [
                torch.zeros((num_rows, *state.shape[1:]), dtype=state.dtype, device=state.device)
                for state in state_tensors(layers)
            ]
        self._resident_layers: list[weakref.ref[Any]] = []
        self._resident_states: list[Tensor] = []

    def copy_in(self, layers: Sequence[Any]) -> None:
        """Copies the states of these layers to the first rows of the buffers. No layers may hold
        views of the buffers (`move_in`)."""
        states = state_tensors(layers)
        torch._foreach_copy_(self._views_like(states), states)

    def move_in(self, layers: Sequence[Any]) -> None:
        """Copies the states of these layers to the first rows of the buffers, and makes the layers
        hold views of these rows instead. Does nothing if they hold these views already."""
        states = state_tensors(layers)
        if len(states) == len(self._resident_states) and all(
            map(operator.is_, states, self._resident_states)
        ):
            return
        self._move_out()
        views = self._views_like(states)
        torch._foreach_copy_(views, states)
        self._resident_layers = [weakref.ref(layer) for layer in layers]
        self._resident_states = views
        set_state_tensors(layers, views)

    def discard(self) -> bool:
        """Gives the memory of the buffers back until the next step, whose states are copied to
        them; returns whether that was possible."""
        self._move_out()
        self._resident_states = []
        return discard(self.buffers)

    def _views_like(self, states: Sequence[Tensor]) -> list[Tensor]:
        return [buffer[: len(state)] for buffer, state in zip(self.buffers, states, strict=True)]

    def _move_out(self) -> None:
        """Replaces the views that resident layers hold by copies."""
        resident_ids = {id(state) for state in self._resident_states}
        for ref in self._resident_layers:
            layer = ref()
            if layer is not None:
                states = state_tensors([layer])
                copies = [state.clone() if id(state) in resident_ids else state for state in states]
                set_state_tensors([layer], copies)
        self._resident_layers = []
