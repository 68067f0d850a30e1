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
    num_logits: int  # wanted: of the last token, where the sequence is then computed as far as it goes
    adapter: str | None


@dataclass
class StepPlan:
    """
    One step: sequences with their `query_len`. Their `num_computed_tokens` counts these tokens already, and their
    tables have room for them.

    Args:
        decodes, chunks (`list[tuple[Sequence, int]]`): Those with one token to compute, and with more.
        preempted, admitted (`list[Request]`): Requests that lost their blocks, and that came in, in this step.
    """

    decodes: list[tuple[Sequence, int]] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    @property
    def items(self) -> list[tuple[Sequence, int]]:
        """All sequences of the step, decodes first."""
        return self.decodes + self.chunks

    def __str__(self) -> str:
        return ", ".join(map(str, self.rows)) or "nothing"

    @property
    def rows(self) -> list[PlannedRow]:
        """The same as plain data, until a sequence gets its next token."""
        return [
            PlannedRow(s.request.request_id, s.index, count, int(not s.num_to_compute), s.request.adapter)
            for s, count in self.items
        ]
