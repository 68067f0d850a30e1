"""Requests and their sequences: tokens, how many of them are computed, status. Plain Python: no
tensors, no policy."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from ..cache.block_manager import BlockManager
from ..cache.sequence_blocks import NO_BLOCKS, UNCACHED, SequenceBlocks


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """The tokens of one row. With `num_computed_tokens == num_tokens` it has its logits and waits
    for the next token."""

    token_ids: list[int]  # prompt and generated tokens; the sequence owns the list
    request: Request = field(init=False)
    index: int = 0  # position in `request.sequences`
    # tokens with K and V in its blocks; those of a step count once it is committed
    num_computed_tokens: int = 0
    # draft tokens, which follow the last token and are computed in the same step; they stay in the
    # block tables until the step's sampling has accepted or rejected them
    draft: list[int] = field(default_factory=list)
    # for models with states, while there is a draft: the blocks and the state from before it
    before_draft: SequenceBlocks = NO_BLOCKS
    # while preempted: its length when it last had logits; at that length it needs no forward
    logits_length: int = 0
    # `NO_BLOCKS` while it waits for (re)computation, and once it is finished
    blocks: SequenceBlocks = NO_BLOCKS
    # the swapper's record, while its blocks are on the host
    swapped: Any = None
    is_finished: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def keys(self) -> list[Any]:
        """Its tokens' keys in the prefix index: the token ids, or hashable values that stand for
        other inputs."""
        keys, inputs = self.request.keys, self.request.inputs
        if keys is None or inputs is None:
            return self.token_ids
        prompts, row = inputs
        return keys + prompts.keys_after(row, self.token_ids[len(keys) :])

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether its next forward computes the rest of the prompt at once, because the prompt has
        inputs beside token ids."""
        return self.request.inputs is not None and self.num_computed_tokens <= self.request.num_text

    def append_draft(self, blocks: BlockManager, limit: int) -> int:
        """Appends its last token and up to `limit` draft tokens to its blocks; returns the number
        of draft tokens. If blocks are short, drops the draft and returns 0: a draft preempts no
        request."""
        del self.draft[max(0, limit) :]
        count = len(self.draft)
        if count:
            blocks.register(
                self.blocks,
                self.keys,
                self.num_computed_tokens,
                self.request.namespace,
            )
            before = NO_BLOCKS
            if blocks.has_states:
                before = blocks.fork(self.blocks)
            if blocks.append(self.blocks, 1 + count):
                self.before_draft = before
                return count
            blocks.free(before)
        self.draft = []
        return 0

    def commit_draft(self, blocks: BlockManager, num_accepted: int = 0) -> None:
        """Keeps the K and V of the first `num_accepted` draft tokens, and drops the rest. A state
        cannot be truncated: unless all tokens were accepted, a sequence with states gets back the
        state from before the step, whose tokens are then recomputed."""
        if not self.draft:
            return
        before, self.before_draft = self.before_draft, NO_BLOCKS
        if before is NO_BLOCKS or num_accepted == len(self.draft):
            self.num_computed_tokens += num_accepted
            blocks.truncate(self.blocks, self.num_computed_tokens)
        else:
            before, self.blocks = self.blocks, before
            self.num_computed_tokens = self.blocks.tables[0].num_tokens
        blocks.free(before)
        self.draft = []

    def fork_from(self, other: Sequence, blocks: BlockManager) -> None:
        """Takes over the tokens and counts of `other`, with a fork of its blocks."""
        self.blocks = NO_BLOCKS
        if other.blocks is not NO_BLOCKS:
            self.blocks = blocks.fork(other.blocks)
        self.token_ids, self.swapped = list(other.token_ids), other.swapped
        self.num_computed_tokens = other.num_computed_tokens
        self.logits_length = other.logits_length

    def __repr__(self) -> str:
        return f"Sequence({self.num_computed_tokens} of {self.num_tokens} tokens computed)"


class Rope(Protocol):
    """Rotary factors that depend on the sequence's length (`model.rope.LengthRope`)."""

    must_recompute: bool  # whether a sequence is recomputed when its factors change

    def factors(self, length: int) -> int: ...


class RopeNamespace(NamedTuple):
    """The namespace of prefixes computed with other rotary factors than the default ones."""

    usual: Hashable  # the namespace with the default factors
    factors: int


class RowsError(Exception):
    """An error of a step that concerns only some of its requests; the others repeat the step."""

    cause: Exception | None = None  # the error that the concerned requests end with

    def concerns(self, request: Request) -> bool:
        raise NotImplementedError


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One prompt with the sequences that grow from it (samples or beams): the unit of admission and
    of preemption."""

    request_id: Hashable
    # at first usually one, which holds the prompt and is forked once it is computed
    sequences: list[Sequence]
    max_num_tokens: int  # the maximal length of a sequence
    num_rows: int = 1  # number of sequences after forking
    priority: int = 0  # lower runs earlier
    namespace: Hashable = None  # prefixes are shared only within it: the adapter and the cache salt
    adapter: Hashable = None  # adapter of its forwards; `None`: the model as it is
    adapter_bytes: int = 0  # size of the adapter weights that the pool must hold while it runs
    # for a prompt with inputs beside token ids: the call's `Prompts`, which the runner reads, and
    # the row in them; the model's own forward computes such a prompt as a whole
    inputs: tuple[Any, int] | None = None
    num_encoder_tokens: int = 0  # length of the encoder output that all its rows attend to
    # blocks of the encoder output, while it runs
    encoded: SequenceBlocks = NO_BLOCKS
    # the prefix index's keys of the prompt's tokens, if not their ids
    keys: list[Hashable] | None = None
    # tokens up to the last placeholder of media content: a reused prefix has at least so many, or
    # at most `num_text`, the tokens before the first placeholder (0 unless the model's own forward
    # may begin after cached tokens)
    num_content: int = 0
    num_text: int = 0
    status: Status = Status.WAITING
    # the scheduler's sort key: number of earlier arrivals plus weighted priority, that number
    key: tuple[float, int] = (0, 0)
    # when it was first in a batch, in seconds of `time.perf_counter`
    admitted_at: float | None = None
    num_prompt_tokens: int = field(init=False)  # of its shortest sequence when it was added
    # unfinished sequences, including those still to be forked
    num_open_rows: int = field(init=False)
    # while its rows are recomputed: tokens that the first row computes for all
    num_shared_tokens: int = 0
    num_preemptions: int = 0
    # whether the first new token is drafted as well: a separate step computes the last prompt token
    drafts_first_token: bool = False
    # total length of its sequences when it was last preempted while running alone
    num_tokens_alone: int = -1
    rope_factors: int = 0  # identifies its rotary factors (`Scheduler.rope`)
    max_positions: int = sys.maxsize  # tokens of a sequence that the model's forward can compute
    num_hit_tokens: int = 0  # prompt tokens found in the prefix cache when it was first admitted
    # criteria of `max_time`, whose clocks start with the step that first runs the request
    clocks: Collection[Any] = ()
    # recorder of the prompt's log-probabilities (`scores.PromptLogprobs`)
    prompt_logprobs: Any = None

    def __post_init__(self) -> None:
        sequences, self.sequences = self.sequences, []
        self.adopt(sequences)
        self.num_rows = self.num_open_rows = max(self.num_rows, len(sequences))
        self.num_prompt_tokens = min(len(sequence.token_ids) for sequence in sequences)

    def adopt(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.request, sequence.index = self, len(self.sequences)
            self.sequences.append(sequence)

    def limit_positions(self, count: int | None, shift: int = 0) -> None:
        """Limits its length to the `count` positions of the model's table, of which the prompt
        takes `shift` more than it has tokens. Raises `IndexError` if the prompt goes past the
        table."""
        if count is None:
            return
        length = max(sequence.num_tokens for sequence in self.sequences) + shift
        if length > count:
            raise IndexError(
                f"the prompt of request {self.request_id!r} takes {length} positions, and the"
                f" model's table of positions holds {count}: shorten the prompt"
            )
        self.max_positions = count - shift
        self.max_num_tokens = min(self.max_num_tokens, self.max_positions + 1)

    def update_factors(self, rope: Rope) -> bool:
        """Updates its rotary factors and namespace; returns whether they changed. Prefixes with
        different factors are not shared."""
        length = self.num_prompt_tokens
        if rope.must_recompute:
            length = max(sequence.num_tokens for sequence in self.open_sequences)
        factors = rope.factors(length)
        if factors == self.rope_factors:
            return False
        namespace = self.namespace
        if isinstance(namespace, RopeNamespace):
            namespace = namespace.usual
        if namespace is not UNCACHED:
            namespace = RopeNamespace(namespace, factors)
        self.rope_factors = factors
        self.namespace = namespace
        return True

    def start_clocks(self, now: float) -> None:
        """Starts the clocks of `max_time` at `now`, in seconds of `time.time`."""
        for criterion in self.clocks:
            criterion.initial_timestamp = now

    @property
    def exceeds_positions(self) -> bool:
        """Whether an open sequence has tokens past the table of positions."""
        return any(sequence.num_tokens > self.max_positions for sequence in self.open_sequences)

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
        """Whether all its tokens are computed, so that it waits for the next ones."""
        return not any(
            sequence.num_to_compute for sequence in self.sequences if not sequence.is_finished
        )

    @property
    def awaits_tokens(self) -> bool:
        """Whether it was preempted with all its logits, and has nothing to compute until a sequence
        gets a token."""
        return all(
            sequence.logits_length == len(sequence.token_ids) for sequence in self.open_sequences
        )

    def fork(self, blocks: BlockManager, count: int) -> None:
        """Adds forks of its first sequence, for `count` sequences in all."""
        forks = [Sequence([]) for _ in range(count - len(self.sequences))]
        for fork in forks:
            fork.fork_from(self.sequences[0], blocks)
        self.adopt(forks)

    def permute(self, blocks: BlockManager, parents: list[int], tokens: list[int]) -> None:
        """Replaces sequence `i` by `parents[i]` plus `tokens[i]`, and frees the blocks of the
        replaced ones; copies no K or V. Finished sequences stay."""
        old = [copy.copy(sequence) for sequence in self.sequences]
        moved = [
            row for row, parent in enumerate(parents) if row != parent and not old[row].is_finished
        ]
        for row in moved:
            self.sequences[row].fork_from(old[parents[row]], blocks)
        for row in moved:
            blocks.free(old[row].blocks)
        for sequence, token in zip(self.sequences, tokens):
            if not sequence.is_finished:
                sequence.token_ids.append(token)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {self.sequences})"
