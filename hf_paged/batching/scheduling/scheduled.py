"""What a step has scheduled so far, and how many tokens it may still schedule. Plain Python: no
tensors, no policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...plan import StepPlan
from ..request import Request, Sequence


@dataclass(slots=True)
class Budget:
    """Tokens that running requests may still get in a step."""

    left: int  # of all kinds
    chunks: int  # in chunks beside decodes
    drafts: int  # in drafts
    reserved: int = -1  # for later decodes; below 0 until the first chunk counts these


@dataclass
class Scheduled:
    """The sequences scheduled so far, which become the step's plan."""

    decodes: list[Sequence] = field(default_factory=list)  # one token of each
    has_parts: bool = False  # whether some of these have more tokens to compute
    drafted: list[tuple[Sequence, int]] = field(default_factory=list)  # a last token and a draft
    # chunks of prefill or recomputation
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether any token is scheduled."""
        return bool(self.decodes or self.drafted or self.chunks)

    def has_rows_of(self, request: Request) -> bool:
        """Whether rows of this request are scheduled."""
        return any(sequence.request is request for sequence in self.plan().sequences)

    def shares_forward(self, request: Request) -> bool:
        """Whether all prefills of the step run in the forward that this prompt needs; then this
        prompt, computed as a whole, may exceed the token budget."""
        if request.inputs is None:
            return False
        for sequence, _ in self.chunks:
            inputs = sequence.request.inputs
            if inputs is None or inputs[0] is not request.inputs[0]:
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
