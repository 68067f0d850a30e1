"""The verdicts of a model's checks: how its rows may share forwards."""

from __future__ import annotations

from typing import NamedTuple

from ..cache.kv_blocks import LayerKV


class Layout(NamedTuple):
    """How rows share a model's forward: packed, or otherwise as rectangles."""

    unsupported_reason: str | None = None  # why rows cannot be packed; `None`: they are packed
    # prompts of different lengths may share a forward, since padding changes no result; if not,
    # only prompts of equal length may
    can_mix_lengths: bool = True
    # rows of any requests may share a forward; if not, rows stay in the batch in which they began,
    # with everything that the model's own loop carries from step to step (`TOGETHER`)
    is_side_by_side: bool = True
    # a prompt of rows that are not packed may be computed in chunks, and begin after cached tokens;
    # prompts of packed rows always may
    can_chunk: bool = False
    # prefill and token-by-token decode may give different logits, so a recompute must split the
    # tokens into the steps of the first run
    depends_on_splits: bool = False
    # maximum number of tokens of a sequence, by the model's tables of positions; `None`: no limit
    # is known
    max_positions: int | None = None
    # whether forwards that are not packed grow these tables on demand
    can_grow_unpacked: bool = False
    # the K/V that the cache's layers store, if rows may join and leave; otherwise empty
    layers: tuple[LayerKV, ...] = ()

    @property
    def reason_against_drafts(self) -> str | None:
        """Why a row cannot verify several draft tokens in one forward and roll back the rejected
        ones; `None` if it can."""
        if self.is_side_by_side and self.can_chunk:
            return None
        return self.unsupported_reason

    @property
    def reason(self) -> str:
        """The `reason` of a [`Route`] that uses this layout."""
        if self.unsupported_reason is None:
            return "packed forwards under the engine's scheduler"
        how = "rows stay in their original batch under the engine's scheduler"
        if self.is_side_by_side:
            how = "rows side by side under the engine's scheduler, not packed"
        return f"{how}: {self.unsupported_reason}"


class PromptsVerdict(NamedTuple):
    """Whether rows may decode packed after the model's own forward has computed their prompts,
    which are more than token ids."""

    unsupported_reason: str | None = None  # why they cannot; `None`: they can
    can_reuse: bool = False  # other prompts may use a prompt's cached prefix
    can_begin_after_text: bool = False  # the model's own forward may begin after cached text


TOGETHER = Layout(
    "rows stay together", can_mix_lengths=False, is_side_by_side=False, depends_on_splits=True
)
