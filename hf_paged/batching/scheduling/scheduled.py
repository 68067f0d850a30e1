"""What a step has scheduled so far, and how many tokens it may still schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...plan import StepPlan
from ..request import Request, Sequence


@dataclass(slots=True)
class Budget:
    """Tokens that running requests may still get in a step."""

    left: int  # of all tokens
    chunks: int  # of chunks beside decodes
    drafts: int  # of drafts
    reserved: int = -1  # for decodes that come later; below 0 until the first chunk counts them


@dataclass
class Scheduled:
    """What is scheduled so far: becomes the step's plan."""

    decodes: list[Sequence] = field(default_factory=list)  # one token of each
    has_parts: bool = False  # whether some of these have more to compute
    drafted: list[tuple[Sequence, int]] = field(default_factory=list)  # a last token and a draft
    # chunks of prefill or recomputation
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is something to compute."""
        return bool(self.decodes or self.drafted or self.chunks)

    def has_rows_of(self, request: Request) -> bool:
        """Whether rows of this request are scheduled."""
        return any(sequence.request is request for sequence in self.plan().sequences)

    def shares_forward(self, request: Request) -> bool:
        """Whether the step's prefills all run in the forward that this prompt needs. Then a prompt
        computed as a whole may exceed the token budget."""
        if request.inputs is None:
            return False
        for sequence, _ in self.chunks:
            others = sequence.request.inputs
            if others is None or others[0] is not request.inputs[0]:
                return False
        return True

    def plan(self) -> StepPlan:
        sequences = self.decodes
        counts = [1] * len(sequences)
        num_logits = counts
        if self.has_parts:
            num_logits = [int(sequence.num_to_compute == 1) for sequence in sequences]
        others = [*self.drafted, *self.chunks]
        if others:
            sequences = sequences + [sequence for sequence, _ in others]
            counts = counts + [count for _, count in others]
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
