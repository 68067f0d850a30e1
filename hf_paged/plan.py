"""`StepPlan`: the tokens that one step computes, as columns of plain data. A plan is frozen and
holds no tensors."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StepPlan:
    """The tokens that a step computes: for row `i`, the `counts[i]` tokens of `sequences[i]` that
    follow its first `starts[i]` tokens. The sequence's blocks hold the K/V of the first tokens and
    have slots for the others. A count includes the row's draft tokens, which follow the sequence's
    last token. Decodes come first.

    A plan does not advance its rows: the loop does, when it commits the plan after the forward."""

    sequences: Sequence[Any]
    starts: Sequence[int]
    counts: Sequence[int]
    # per row: 0 if tokens remain after this step, otherwise 1 plus the number of draft tokens
    num_logits: Sequence[int]
    # number of leading rows that compute one token, or their last token and a draft
    num_decodes: int
    has_drafts: bool
    has_inputs: bool  # rows may have inputs besides token ids
    admitted: Collection[Any] = ()  # requests that begin to run in this step
    preempted: Collection[Any] = ()  # requests that lost their blocks to this step

    @classmethod
    def of(cls, rows: Iterable[tuple[Any, int]]) -> StepPlan:
        """Returns a plan of `count` more tokens for each `(sequence, count)` in `rows`. Decodes
        must come first in `rows`."""
        sequences = []
        starts = []
        counts = []
        num_logits: list[int] = []
        num_decodes = 0
        for sequence, count in rows:
            start = sequence.num_computed_tokens
            num_draft_tokens = len(sequence.draft)
            has_logits = start + count - num_draft_tokens >= len(sequence.token_ids)
            sequences.append(sequence)
            starts.append(start)
            counts.append(count)
            num_row_logits = 1 + num_draft_tokens if has_logits else 0
            # counts leading rows that compute one token, or that need logits for all of their
            # tokens to verify a draft
            num_decodes += num_decodes == len(num_logits) and count in (1, num_row_logits)
            num_logits.append(num_row_logits)
        return cls(
            sequences,
            starts,
            counts,
            num_logits,
            num_decodes=num_decodes,
            has_drafts=any(sequence.draft for sequence in sequences),
            has_inputs=any(sequence.request.inputs is not None for sequence in sequences),
        )

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def has_chunks(self) -> bool:
        """Whether there are rows after the decodes."""
        return self.num_decodes < len(self.sequences)

    def select(self, rows: Sequence[int]) -> StepPlan:
        """Returns the plan of these rows alone, in the given order; decodes must come first. The
        plan has no admitted or preempted requests."""
        return StepPlan.of([(self.sequences[row], self.counts[row]) for row in rows])

    def digest(self) -> int:
        """Returns a hash of the rows' positions, tokens, numbers of draft tokens and adapters. The
        hash must be the same in every process that runs this step. It leaves out block ids, which
        may differ."""
        numbers: list[int] = []
        for sequence, start, count in zip(self.sequences, self.starts, self.counts):
            num_draft_tokens = len(sequence.draft)
            adapter = zlib.crc32(repr(sequence.request.adapter).encode())
            numbers += (start, count, num_draft_tokens, adapter)
            numbers += sequence.token_ids[start : start + count - num_draft_tokens]
        return hash(tuple(numbers))

    def __str__(self) -> str:
        """A list of (request id, sequence index, tokens to compute, number of logits, adapter)."""
        rows = [
            (row.request.request_id, row.index, count, num_logits, row.request.adapter)
            for row, count, num_logits in zip(self.sequences, self.counts, self.num_logits)
        ]
        return str(rows)
