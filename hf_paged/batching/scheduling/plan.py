"""What one step computes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..request import Request, Sequence


class PlannedRow(NamedTuple):
    """One sequence in a step, as plain data."""

    request_id: Hashable
    sequence: int  # its place in the request
    num_tokens: int  # to compute
    num_logits: int  # wanted: 1, of the last token, once all tokens of the sequence are computed
    adapter: str | None


@dataclass
class StepPlan:
    """One step. `num_computed_tokens` counts its tokens already, and the tables have room for them."""

    decodes: list[tuple[Sequence, int]] = field(default_factory=list)  # with one token to compute
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # with more
    preempted: list[Request] = field(default_factory=list)  # lost their blocks in this step
    admitted: list[Request] = field(default_factory=list)

    @property
    def items(self) -> list[tuple[Sequence, int]]:
        """All sequences of the step with their `query_len`, decodes first."""
        return self.decodes + self.chunks

    @property
    def rows(self) -> list[PlannedRow]:
        """The same as plain data, until a sequence gets its next token."""
        return [
            PlannedRow(s.request.request_id, s.index, count, int(not s.num_to_compute), s.request.adapter)
            for s, count in self.items
        ]

    def __str__(self) -> str:
        return ", ".join(map(str, self.rows)) or "nothing"
