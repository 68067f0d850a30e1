"""The part of a `seams.Recorder` that records rectangles."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ..model.state import ModelState
from .rectangle import Rectangle


class RectangleRecorder(Protocol):
    """Records decode steps of rectangles and replays them."""

    def begin(self, state: ModelState | None) -> None:
        """Like `Runner.begin`."""

    def run(self, rectangle: Rectangle, prepared: dict[str, Any]) -> Tensor | None:
        """Replays a step with the model inputs `prepared`; unless `check` must follow, changes the
        states. Returns logits `(rows, vocab_size)`; `None` if no recording serves the step."""

    def check(self, rectangle: Rectangle, replayed: Tensor, expected: Tensor) -> None:
        """Compares the logits `(rows, vocab_size)` and states of the last step, a replay, with
        those of the model's own forward, with the same effect as `Recorder.check`."""
