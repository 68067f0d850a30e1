"""The verdicts of a model's checks: how its rows may share forwards."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache.kv_blocks import LayerKV


@dataclass(frozen=True)
class Layout:
    """How rows share a model's forward. They are packed unless there is an `unsupported_reason`;
    then the subclass in the optional package `rectangles` says how they share it."""

    unsupported_reason: str | None = None  # why rows cannot be packed; `None`: they are packed
    # prompts of different lengths may share a forward, since padding changes no result; if not,
    # only prompts of equal length may
    can_mix_lengths: bool = True
    # rows of any requests may share a forward; if not, rows stay in the batch in which they began
    is_side_by_side: bool = True
    # a prompt may be computed in chunks, and begin after cached tokens
    can_chunk: bool = True
    # number of positions in the model's shortest table of positions, which limits the tokens of a
    # sequence; `None`: no limit is known
    max_positions: int | None = None
    # whether forwards that are not packed grow this table on demand
    can_grow_unpacked: bool = False
    # the K/V that the cache's layers store, if rows may join and leave; otherwise empty
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
