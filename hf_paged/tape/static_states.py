"""The buffers at fixed addresses in which a recorded step reads and changes its rows' states. Which
rows they are is up to the caller."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache.states import set_state_tensors, state_tensors


class StaticStates:
    """Buffers for the states of up to `num_rows` rows, in the form of those of `layers`. The rows
    of a step keep their states here, so that their next step copies nothing, until other rows use
    the buffers."""

    def __init__(self, layers: Sequence[Any], num_rows: int) -> None:
        with torch.inference_mode(False):  # the buffers outlive the call
            self.buffers = [
                torch.zeros((num_rows, *state.shape[1:]), dtype=state.dtype, device=state.device)
                for state in state_tensors(layers)
            ]
        self._layers: list[weakref.ref[Any]] = []  # whose states are here
        self._views: list[Tensor] = []  # their states

    def copy_in(self, layers: Sequence[Any]) -> None:
        """Copies the states of these layers to the first rows, where no rows keep any yet."""
        states = state_tensors(layers)
        torch._foreach_copy_(self._first(states), states)

    def move_in(self, layers: Sequence[Any]) -> None:
        """Makes the first rows the states of these layers, without a copy if they are already."""
        states = state_tensors(layers)
        if len(states) == len(self._views) and all(map(operator.is_, states, self._views)):
            return
        self._move_out()
        views = self._first(states)
        torch._foreach_copy_(views, states)
        self._layers = [weakref.ref(layer) for layer in layers]
        self._views = views
        set_state_tensors(layers, views)

    def _first(self, states: Sequence[Tensor]) -> list[Tensor]:
        return [buffer[: len(state)] for buffer, state in zip(self.buffers, states, strict=True)]

    def _move_out(self) -> None:
        """Gives the layers whose states are here copies of them."""
        here = {id(view) for view in self._views}
        for ref in self._layers:
            layer = ref()
            if layer is not None:
                states = state_tensors([layer])
                copies = [state.clone() if id(state) in here else state for state in states]
                set_state_tensors([layer], copies)
        self._layers = []
