"""The sequences that a step has scheduled so far. Plain Python: no tensors, no policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...plan import StepPlan
from ..request import Request, Sequence


@dataclass
class ScheduledRows:
    """The sequences that the step has scheduled so far, and the requests that it has admitted and
    preempted. `plan` makes the step's plan from them."""

    decodes: list[Sequence] = field(default_factory=list)  # each computes one token
    num_partial_decodes: int = 0  # how many of `decodes` have further tokens to compute
    # sequences with a draft, each with its number of tokens: the last token and the draft
    drafted: list[tuple[Sequence, int]] = field(default_factory=list)
    # chunks of a prefill or recompute, each with its number of tokens
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    num_chunk_tokens: int = 0
    num_other_tokens: int = 0  # in `drafted` and `chunks`
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    # number of rows of running requests that need one token in this step; `None` until the first
    # call of `num_pending_decodes`
    _num_decoding: int | None = None

    def __bool__(self) -> bool:
        """Whether any token is scheduled."""
        return bool(self.decodes or self.drafted or self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_other_tokens

    @property
    def num_draft_tokens(self) -> int:
        return self.num_other_tokens - self.num_chunk_tokens - len(self.drafted)

    def num_pending_decodes(self, running: Iterable[Request]) -> int:
        """Returns how many rows of the running requests need one token and are not scheduled yet.
        Chunks leave one token of the step to each of these rows."""
        if self._num_decoding is None:
            rows = (row for request in running for row in request.open_sequences)
            self._num_decoding = sum(row.num_to_compute == 1 for row in rows)
        num_scheduled = len(self.decodes) - self.num_partial_decodes + len(self.drafted)
        return self._num_decoding - num_scheduled

    def add_decode(self, sequence: Sequence, is_partial: bool) -> None:
        self.num_partial_decodes += is_partial
        self.decodes.append(sequence)

    def add_drafted(self, sequence: Sequence, count: int) -> None:
        self.num_other_tokens += count
        self.drafted.append((sequence, count))

    def add_chunk(self, sequence: Sequence, count: int) -> None:
        self.num_chunk_tokens += count
        self.num_other_tokens += count
        self.chunks.append((sequence, count))

    def shares_forward(self, request: Request) -> bool:
        """Whether the request's prompt belongs to the same `Prompts` as all chunks scheduled so
        far, if any, so that one forward computes the prompt with them. Such a prompt may exceed the
        token budget."""
        if request.inputs is None:
            return False
        for sequence, _ in self.chunks:
            inputs = sequence.request.inputs
            if inputs is None or inputs[0] is not request.inputs[0]:
                return False
        return True

    def plan(self) -> StepPlan:
        """Returns the step's plan: decodes, sequences with drafts, then chunks."""
        sequences = self.decodes
        counts = [1] * len(sequences)
        num_logits = counts
        if self.num_partial_decodes:
            num_logits = [int(sequence.num_to_compute == 1) for sequence in sequences]
        other_rows = [*self.drafted, *self.chunks]
        if other_rows:
            sequences = sequences + [sequence for sequence, _ in other_rows]
            counts = counts + [count for _, count in other_rows]
            num_logits = num_logits + [count for _, count in self.drafted]
            for sequence, count in self.chunks:
                num_logits.append(int(count == sequence.num_to_compute))
        return StepPlan(
            sequences,
            [sequence.num_computed_tokens for sequence in sequences],
            counts,
            num_logits,
            num_decodes=len(self.decodes) + len(self.drafted),
            has_drafts=bool(self.drafted),
            has_inputs=bool([row for row in sequences if row.request.inputs is not None]),
            admitted=self.admitted,
            preempted=self.preempted,
        )
