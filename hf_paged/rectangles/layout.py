"""How rows share rectangles."""

from __future__ import annotations

import dataclasses

from ..model.layout import Layout


@dataclasses.dataclass(frozen=True)
class RectangleLayout(Layout):
    """How rows that cannot be packed share a model's forward: as rectangles."""

    # prefill and token-by-token decode may give different logits, so a recompute must split the
    # tokens into the steps of the first run
    depends_on_splits: bool = False

    @property
    def reason_against_drafts(self) -> str | None:
        if self.is_side_by_side and self.can_chunk:
            return None
        return self.unsupported_reason

    @property
    def reason(self) -> str:
        how = "rows stay in their original batch under the engine's scheduler"
        if self.is_side_by_side:
            how = "rows side by side under the engine's scheduler, not packed"
        return f"{how}: {self.unsupported_reason}"


# rows stay in the batch in which they began, with everything that the model's own loop carries from
# step to step
TOGETHER = RectangleLayout(
    "rows stay together",
    can_mix_lengths=False,
    is_side_by_side=False,
    can_chunk=False,
    depends_on_splits=True,
)
