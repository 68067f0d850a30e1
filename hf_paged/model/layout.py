"""The layout that a model's checks allow: how its rows may share forwards."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache.kv_blocks import LayerKV


@dataclass(frozen=True)
class Layout:
    """How rows share a model's forward. Rows are packed unless there is an `unsupported_reason`.
    `RectangleLayout`, in the optional package `rectangles`, describes layouts that are not packed.
    """

    unsupported_reason: str | None = None  # why rows cannot be packed; `None`: they are packed
    # whether prompts of different lengths may share a forward, since padding changes no result; if
    # not, only prompts of equal length may
    can_mix_lengths: bool = True
    # whether rows of any requests may share a forward; if not, rows stay in the batch in which they
    # began
    is_side_by_side: bool = True
    # whether a prompt may be computed in chunks, and begin after cached tokens
    can_chunk: bool = True
    # number of positions in the model's shortest table of positions, which limits the tokens of a
    # sequence; `None`: no limit is known
    max_positions: int | None = None
    # whether forwards that are not packed grow that table on demand
    can_grow_unpacked: bool = False
    # the formats of the K/V that the cache's layers store, if rows may join and leave a batch;
    # otherwise empty
    layers: tuple[LayerKV, ...] = ()

    @property
    def reason_against_drafts(self) -> str | None:
        """Why a row cannot verify several draft tokens in one forward and roll back the rejected
        ones; `None` if it can."""
        return self.unsupported_reason

    @property
    def reason(self) -> str:
        """The `reason` of a [`Route`] that uses this layout."""
        return "packed forwards under the engine's scheduler"
