"""What waits and runs: requests and their sequences. Plain Python: no tensors, no policy."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..cache.block_manager import NO_BLOCKS, BlockManager, SequenceBlocks


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One row's tokens. Where `num_computed_tokens` equals `num_tokens`, it has its logits and waits for a token."""

    token_ids: list[int]  # prompt and generated tokens; the list becomes the sequence's own
    request: Request = field(init=False)
    index: int = field(default=0, init=False)  # its place in `request.sequences`
    # whose K and V are in its blocks, or will be after the step
    num_computed_tokens: int = field(default=0, init=False)
    # candidates for its next tokens: the step that computes its last token computes them behind it, as rows of their
    # own, and they are in the tables until it is known which of them are accepted
    draft: list[int] = field(default_factory=list, init=False)
    # meanwhile, where a model has states: its blocks, and its state, as they were before
    before_draft: SequenceBlocks = field(default=NO_BLOCKS, init=False)
    # while preempted: how many tokens it had when it last had its logits; with no more than that it needs no forward
    num_answered_tokens: int = field(default=0, init=False)
    blocks: SequenceBlocks = field(default=NO_BLOCKS, init=False)  # also while recomputation is due, and in the end
    swapped: Any = field(default=None, init=False)  # the swapper's, while its blocks are on the host
    is_finished: bool = field(default=False, init=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def keys(self) -> list[Any]:
        """What the prefix index knows its tokens by."""
        keys, inputs = self.request.keys, self.request.inputs
        if keys is None or inputs is None:
            return self.token_ids
        prompts, row = inputs
        return keys + prompts.keys_behind(row, self.token_ids[len(keys) :])

    @property
    def is_whole(self) -> bool:
        """Whether the next that is computed of it is its prompt, as a whole, with what is more than token ids of it."""
        return self.request.inputs is not None and not self.num_computed_tokens

    def become(self, other: Sequence, forking: BlockManager | None) -> None:
        """Goes on as the other does: with a fork of its blocks, or without a manager to fork them, with these."""
        self.blocks = forking.fork(other.blocks) if forking and other.blocks is not NO_BLOCKS else other.blocks
        self.token_ids, self.swapped = list(other.token_ids), other.swapped
        self.num_computed_tokens, self.num_answered_tokens = other.num_computed_tokens, other.num_answered_tokens

    def __repr__(self) -> str:
        return f"Sequence({self.num_computed_tokens} of {self.num_tokens} tokens computed)"


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One prompt with the sequences that grow from it (samples or beams): the unit of admission and of preemption."""

    request_id: Hashable
    sequences: list[Sequence]  # most often one, holding the prompt, which is forked once it is computed
    max_num_tokens: int  # the longest that a sequence of it can get
    num_rows: int = 1  # sequences that it will have after forking
    priority: int = 0  # lower runs earlier
    namespace: Hashable = None  # prefixes are shared only within it: the adapter and the cache salt
    adapter: str | None = None  # the PEFT adapter that its forwards run with
    # the call's `Prompts`, which are the runner's, and which row of them it is, where a prompt is more than its token
    # ids: it is computed as a whole, by the model's own forward
    inputs: tuple[Any, int] | None = None
    num_encoder_tokens: int = 0  # whose keys and values all its rows attend to
    encoded: SequenceBlocks = field(default=NO_BLOCKS, init=False)  # what holds these, while it runs
    keys: list[Hashable] | None = None  # what the prefix index knows the prompt's tokens by, if not by their ids
    num_content: int = 0  # tokens up to the last that stands for other content: a prefix that is served holds them all
    status: Status = Status.WAITING
    key: tuple[float, int] = (0, 0)  # the scheduler's order; how many requests came before
    admitted_at: float | None = None  # when it was first in a batch, in seconds of `time.perf_counter`
    num_prompt_tokens: int = field(init=False)  # of its shortest sequence when it was added
    num_open_rows: int = field(init=False)  # that are not finished, those still to be forked included
    num_shared_tokens: int = 0  # while its rows are recomputed: tokens that the first computes for all of them
    num_preemptions: int = 0
    drafts_first: bool = False  # its first token has a draft, too: the last of its prompt is computed by itself
    num_tokens_alone: int = -1  # of its sequences when it last gave up its blocks while no other request ran
    rope_factors: int = 0  # what stands for those of its rotary embeddings (`Scheduler.rope`)
    num_hit_tokens: int = 0  # of its prompt that the prefix cache had when it was first admitted
    prompt_logprobs: Any = None  # what records those of its prompt as it is computed (`scores.PromptLogprobs`)

    def __post_init__(self) -> None:
        sequences, self.sequences = self.sequences, []
        self.adopt(sequences)
        self.num_rows = self.num_open_rows = max(self.num_rows, len(sequences))
        self.num_prompt_tokens = min(len(sequence.token_ids) for sequence in sequences)

    def adopt(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.request, sequence.index = self, len(self.sequences)
            self.sequences.append(sequence)

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def open_sequences(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def is_swapped(self) -> bool:
        return any(sequence.swapped is not None for sequence in self.sequences)

    @property
    def is_computed(self) -> bool:
        """Whether all tokens that it has are computed: it waits for the next ones."""
        return not any(sequence.num_to_compute for sequence in self.sequences if not sequence.is_finished)

    @property
    def is_answered(self) -> bool:
        """Whether, being preempted, it has nothing to compute until a sequence gets a token."""
        return all(sequence.num_answered_tokens == len(sequence.token_ids) for sequence in self.open_sequences)

    def fork(self, blocks: BlockManager, count: int) -> None:
        first = self.sequences[0]
        self.adopt(Sequence([]) for _ in range(count - len(self.sequences)))
        for twin in self.sequences[1:]:
            twin.become(first, blocks)

    def permute(self, blocks: BlockManager, parents: list[int], tokens: list[int]) -> None:
        """Sequence `i` becomes what `parents[i]` was, then `tokens[i]`: no K or V moves. Finished ones stay."""
        old = [copy.copy(sequence) for sequence in self.sequences]
        moved = [row for row, parent in enumerate(parents) if row != parent and not old[row].is_finished]
        taken = set(range(len(old))) - set(moved)  # whose tables are taken already
        for row in moved:
            self.sequences[row].become(old[parents[row]], blocks if parents[row] in taken else None)
            taken.add(parents[row])
        for row, sequence in enumerate(old):
            if row not in taken:
                blocks.free(sequence.blocks)
        for sequence, token in zip(self.sequences, tokens):
            if not sequence.is_finished:
                sequence.token_ids.append(token)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {self.sequences})"
