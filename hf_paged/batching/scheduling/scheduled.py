"""The sequences that a step has scheduled so far, and the numbers of their tokens. Plain Python: no
tensors, no policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...plan import StepPlan
from ..request import Request, Sequence


@dataclass
class Scheduled:
    """The sequences scheduled so far, from which `plan` makes the step's plan."""

    # sequences that compute their last token and their draft
    decodes: list[Sequence] = field(default_factory=list)
    # chunks of a prefill or recompute, each with its number of tokens
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    num_draft_tokens: int = 0  # in `decodes`
    num_chunk_tokens: int = 0  # in `chunks`
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether any token is scheduled."""
        return bool(self.decodes or self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_draft_tokens + self.num_chunk_tokens

    def add_decode(self, sequence: Sequence) -> int:
        """Adds a decode, and returns its number of tokens."""
        self.decodes.append(sequence)
        self.num_draft_tokens += len(sequence.draft)
        return 1 + len(sequence.draft)

    def add_chunk(self, sequence: Sequence, count: int) -> None:
        # chunks of one token come first, where kernels compute them as decodes
        self.chunks.insert(len(self.chunks) if count > 1 else 0, (sequence, count))
        self.num_chunk_tokens += count

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
        """Returns the step's plan: decodes, then chunks."""
        sequences = self.decodes
        counts = [1] * len(sequences)
        if self.num_draft_tokens:
            counts = [1 + len(sequence.draft) for sequence in sequences]
        num_logits = counts
        if self.chunks:
            sequences = sequences + [sequence for sequence, _ in self.chunks]
            num_logits = num_logits + [
                int(count == sequence.num_to_compute) for sequence, count in self.chunks
            ]
            counts = counts + [count for _, count in self.chunks]
        return StepPlan(
            sequences,
            [sequence.num_computed_tokens for sequence in sequences],
            counts,
            num_logits,
            num_decodes=len(self.decodes),
            has_chunks=bool(self.chunks),
            has_drafts=bool(self.num_draft_tokens),
            has_inputs=bool([row for row in sequences if row.request.inputs is not None]),
            admitted=self.admitted,
            preempted=self.preempted,
        )
