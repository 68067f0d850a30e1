"""How the rows of a step are laid out in the model's forward."""

from __future__ import annotations

from typing import NamedTuple

from ..model.self_check import Sides


class Layout(NamedTuple):
    """How forwards of a model are laid out: packed, unless `unsupported_reason` says why not; then as rectangles."""

    unsupported_reason: str | None = None
    sides: Sides = Sides()

    @property
    def reason(self) -> str:
        """What a [`Route`] says of it."""
        if self.unsupported_reason is None:
            return "packed forwards under the engine's scheduler"
        how = "side by side" if self.sides.rows else "one by one"
        return f"rows {how} under the engine's scheduler, not packed: {self.unsupported_reason}"


PACKED = Layout()
