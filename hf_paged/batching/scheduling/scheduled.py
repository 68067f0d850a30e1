"""The sequences that a step has scheduled so far, and the tokens that it may still schedule. Plain
Python: no tensors, no policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...plan import StepPlan
from ..request import Request, Sequence


@dataclass(slots=True)
class Budget:
    """The numbers of tokens that a step may still schedule for running requests."""

    num_tokens: int  # in all
    num_chunk_tokens: int  # in chunks beside decodes
    num_draft_tokens: int  # in drafts
    # tokens reserved for decodes that are not scheduled yet; negative until the step's first chunk,
    # for which `Scheduler._chunk_limit` counts these decodes
    num_reserved: int = -1


@dataclass
class Scheduled:
    """The sequences scheduled so far, from which `plan` makes the step's plan."""

    decodes: list[Sequence] = field(default_factory=list)  # one token of each
    has_partial_decodes: bool = False  # whether some of `decodes` have further tokens to compute
    # sequences with a draft, each with its number of tokens: the last token and the draft
    drafted: list[tuple[Sequence, int]] = field(default_factory=list)
    # chunks of a prefill or recompute, each with its number of tokens
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether any token is scheduled."""
        return bool(self.decodes or self.drafted or self.chunks)

    def shares_forward(self, request: Request) -> bool:
        """Whether the request's prompt belongs to the same `Prompts` as all chunks scheduled so
        far, if any, so that one forward computes them. Such a prompt may exceed the token
        budget."""
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
        if self.has_partial_decodes:
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
            has_chunks=bool(self.chunks),
            has_drafts=bool(self.drafted),
            has_inputs=bool([row for row in sequences if row.request.inputs is not None]),
            admitted=self.admitted,
            preempted=self.preempted,
        )
