"""Requests and their sequences: the tokens, how many of them are computed, and the status. Plain
Python: no tensors, no policy."""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from ..cache.block_manager import BlockManager
from ..cache.sequence_blocks import NO_BLOCKS, UNCACHED, SequenceBlocks
from ..plan import StepPlan


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """The tokens of one row. When `num_computed_tokens == num_tokens`, the row has its logits and
    waits for the next token."""

    token_ids: list[int]  # prompt and generated tokens; the sequence owns the list
    request: Request = None  # type: ignore[assignment]  # set by `Request.adopt`
    index: int = 0  # in `request.sequences`
    # tokens whose K and V are in its blocks; a step's tokens count once the step is committed
    num_computed_tokens: int = 0
    # draft tokens, which follow the last token and are computed in the same step as it; their K and
    # V stay in the blocks until sampling has accepted or rejected the tokens
    draft: list[int] = field(default_factory=list)
    # if the model has states: the blocks and the state before the step that verifies the draft
    before_draft: SequenceBlocks = NO_BLOCKS
    # while preempted: the length at which it last had logits; at this length it needs no forward
    logits_length: int = 0
    # `NO_BLOCKS` while it waits to be computed or recomputed, and once it is finished
    blocks: SequenceBlocks = NO_BLOCKS
    swapped: Any = None  # the swapper's record while its blocks are on the host
    is_finished: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_draft_tokens(self) -> int:
        """How many draft tokens the next step may verify. The step also chooses one more token; the
        sequence may then exceed neither the request's maximum length nor the model's positions."""
        return max(0, self.request.max_num_tokens - self.num_tokens - 1)

    @property
    def keys(self) -> list[Any]:
        """The keys of the sequence's tokens in the prefix index: token ids, or hashable values that
        represent other inputs."""
        keys, inputs = self.request.keys, self.request.inputs
        if keys is None or inputs is None:
            return self.token_ids
        prompts, row = inputs
        return keys + prompts.keys_after(row, self.token_ids[len(keys) :])

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether the next forward computes the rest of the prompt at once, because the prompt has
        inputs besides token ids."""
        return (
            self.request.inputs is not None and self.num_computed_tokens <= self.request.media_start
        )

    def begin(self, block_manager: BlockManager) -> None:
        """Gives the sequence empty tables, with nothing computed. Does not free earlier blocks."""
        self.blocks, self.num_computed_tokens = block_manager.new(), 0

    def match(self, keys: list[Hashable], min_tokens: int = 0) -> int:
        """Attaches the longest cached prefix of `keys`, if it has at least `min_tokens` tokens;
        returns its length. Call `begin` first."""
        self.num_computed_tokens = self.blocks.match(keys, self.request.namespace, min_tokens)
        return self.num_computed_tokens

    def note_logits(self, has_logits: bool) -> None:
        """Called when the request is preempted: notes whether the row has its logits."""
        self.logits_length = self.num_tokens if has_logits else 0

    def register_last(self) -> None:
        """Called before the blocks are freed or swapped out: registers the full blocks. Takes
        no snapshot at a stop, since no later step would copy the state."""
        self.blocks.stops = ()
        self.register(self.num_computed_tokens)

    def finish(self) -> None:
        """Ends the sequence, records its length for `block_size="auto"`, and frees its blocks, in
        the pool and on the host. The prefix cache may keep full blocks that are in the pool."""
        if self.swapped is None:
            self.register_last()
        self.is_finished = True
        self.blocks.end()
        self.reset()

    def register(self, num_tokens: int) -> None:
        """Registers in the prefix index the blocks that the first `num_tokens` tokens fill."""
        self.blocks.register(self.keys, num_tokens, self.request.namespace)

    def append_draft(self, limit: int) -> int:
        """Shortens the draft to `limit` and `max_draft_tokens`, allocates slots for the last token
        and the draft, and returns the draft's length. If too few blocks are free, drops the draft,
        since drafts must not preempt requests. Without a draft, allocates nothing and returns 0."""
        del self.draft[max(0, min(limit, self.max_draft_tokens)) :]
        num_draft_tokens = len(self.draft)
        if num_draft_tokens:
            self.register(self.num_computed_tokens)
            before_draft = NO_BLOCKS
            if self.blocks.manager.has_states:
                before_draft = self.blocks.fork()
            if self.blocks.append(1 + num_draft_tokens):
                self.before_draft = before_draft
                return num_draft_tokens
            before_draft.free()
        self.draft = []
        return 0

    def commit_draft(self, num_accepted: int = 0) -> None:
        """Keeps the K and V of the first `num_accepted` draft tokens, and drops the other draft
        tokens. Since a state cannot be truncated, a sequence with states returns to its blocks and
        state before the step unless all draft tokens were accepted; the token before the draft and
        the accepted tokens are then recomputed."""
        if not self.draft:
            return
        unused_blocks, self.before_draft = self.before_draft, NO_BLOCKS
        if unused_blocks is NO_BLOCKS or num_accepted == len(self.draft):
            self.truncate(self.num_computed_tokens + num_accepted)
        else:
            unused_blocks, self.blocks = self.blocks, unused_blocks
            self.num_computed_tokens = self.blocks.tables[0].num_tokens
        unused_blocks.free()
        self.draft = []

    def truncate(self, num_computed: int) -> None:
        """Drops the K and V of the tokens from `num_computed` on, which must be computed again."""
        self.blocks.truncate(num_computed)
        self.num_computed_tokens = num_computed

    def share_blocks(self, parent: Sequence) -> None:
        """Forks the blocks of `parent`, if it has any, and copies its number of computed tokens.
        Does not free this sequence's earlier blocks."""
        self.blocks = parent.blocks.fork()
        self.num_computed_tokens = parent.num_computed_tokens

    def fork_from(self, parent: Sequence) -> None:
        """Copies the tokens and counts of `parent`, shares its blocks on the host, and forks its
        blocks in the pool. Does not free this sequence's earlier blocks."""
        self.share_blocks(parent)
        self.token_ids, self.swapped = list(parent.token_ids), parent.swapped
        self.logits_length = parent.logits_length

    def reset(self) -> None:
        """Frees the blocks, in the pool and on the host, and drops the draft, so that all tokens
        must be computed again."""
        for blocks in (self.blocks, self.before_draft):
            blocks.free()
        self.blocks = self.before_draft = NO_BLOCKS
        self.num_computed_tokens, self.swapped, self.draft = 0, None, []

    def __repr__(self) -> str:
        return f"Sequence({self.num_computed_tokens} of {self.num_tokens} tokens computed)"


class Rope(Protocol):
    """Rotary factors that depend on the sequence's length (`model.rope.LengthRope`)."""

    must_recompute: bool  # whether a sequence is recomputed when its factors change

    def factors_id(self, length: int) -> int:
        """Returns a number that identifies the factors of a sequence of `length` tokens."""


class RopeNamespace(NamedTuple):
    """The namespace of prefixes computed with rotary factors that differ from the default ones."""

    default: Hashable  # the namespace with the default factors
    factors_id: int  # as `Rope.factors_id` returns it


class RowsError(Exception):
    """An error of a step that concerns only some of its requests; the others repeat the step."""

    cause: Exception | None = None  # the error that these requests get; `None`: this error

    def concerns(self, request: Request) -> bool:
        """Whether the error concerns this request."""
        raise NotImplementedError


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One prompt and the sequences that continue it (samples or beams). Requests are admitted and
    preempted as a whole."""

    request_id: Hashable
    # usually one sequence with the prompt, which is forked once the prompt is computed
    sequences: list[Sequence]
    max_num_tokens: int  # maximum length of a sequence, including the prompt
    num_rows: int = 1  # number of sequences after forking
    priority: int = 0  # lower runs earlier
    # for example the adapter and the cache salt; only requests with equal namespaces share prefixes
    namespace: Hashable = None
    adapter: Hashable = None  # adapter of its forwards; `None`: the model as it is
    adapter_bytes: int = 0  # pool bytes that the adapter's weights occupy while the request runs
    # if the prompt has inputs besides token ids, so that the model's own forward computes it whole:
    # the call's `Prompts`, which the runner reads, and the prompt's row in them
    inputs: tuple[Any, int] | None = None
    num_encoder_tokens: int = 0  # length of the encoder output that all its rows attend to
    encoded: SequenceBlocks = NO_BLOCKS  # blocks of the encoder output, while the request runs
    # keys of the prompt's tokens in the prefix index; `None`: the token ids
    keys: list[Hashable] | None = None
    # number of tokens before the first media placeholder; 0 if the model's own forward cannot begin
    # after cached tokens. A reused prefix does not end between `media_start` and `media_end`
    media_start: int = 0
    media_end: int = 0  # number of tokens up to and including the last media placeholder
    status: Status = Status.WAITING
    # in the scheduler: (arrival number plus weighted priority, arrival number)
    sort_key: tuple[float, int] = (0, 0)
    # in seconds of `perf_counter`; `None` before that step's forward ends
    first_step_started_at: float | None = None
    num_prompt_tokens: int = field(init=False)  # initial length of its shortest sequence
    # while its rows are recomputed: number of tokens that the first row computes for all of them
    num_shared_tokens: int = 0
    num_preemptions: int = 0
    # whether the first new token is also drafted; the last prompt token then needs a separate step
    drafts_first_token: bool = False
    # total length of its open sequences when it was last preempted while running alone; -1: never
    num_tokens_alone: int = -1
    rope_factors_id: int = 0  # as `Rope.factors_id` returns it
    # maximum length of a sequence whose tokens all have a position in the model's table
    max_computable_length: int = sys.maxsize
    num_hit_tokens: int = 0  # prompt tokens found in the prefix cache when it was first admitted
    # its own `max_time` criteria, whose clocks start with the first step that runs it
    time_criteria: Collection[Any] = ()
    prompt_logprobs: Any = None  # a `scores.PromptLogprobs`, if they are requested

    def __post_init__(self) -> None:
        sequences, self.sequences = self.sequences, []
        self.adopt(sequences)
        self.num_rows = max(self.num_rows, len(sequences))
        self.num_prompt_tokens = min(len(sequence.token_ids) for sequence in sequences)

    def adopt(self, sequences: Iterable[Sequence]) -> None:
        """Appends sequences, and sets their `request` and `index`."""
        for sequence in sequences:
            sequence.request, sequence.index = self, len(self.sequences)
            self.sequences.append(sequence)

    def set_inputs(
        self,
        prompts: Any,
        row: int,
        keys: Items[tuple[list[Hashable], int, int]] | None,
    ) -> None:
        """Makes a row of `Prompts` the request's prompt. `keys`: by row, the request's `keys`,
        `media_end` and `media_start`; if `None`, it does not use the prefix cache. The text
        before the first placeholder may be shared with any other prompt."""
        self.inputs, self.num_encoder_tokens = (prompts, row), prompts.num_encoder_tokens
        if keys is None or self.namespace is UNCACHED:
            self.namespace = UNCACHED
            return
        self.keys, self.media_end, self.media_start = keys[row]
        if not self.media_start:
            self.namespace = (self.namespace, prompts.names)

    def limit_positions(self, num_positions: int | None, shift: int = 0) -> None:
        """Limits the sequences to the `num_positions` of the model's table (`None`: no limit). The
        prompt takes `shift` more positions than it has tokens. Raises `IndexError` if the prompt
        does not fit into the table."""
        if num_positions is None:
            return
        length = max(sequence.num_tokens for sequence in self.sequences) + shift
        if length > num_positions:
            raise IndexError(
                f"the prompt of request {self.request_id!r} takes {length} positions, and the"
                f" model's table of positions holds {num_positions}: shorten the prompt"
            )
        self.max_computable_length = num_positions - shift
        self.max_num_tokens = min(self.max_num_tokens, self.max_computable_length + 1)

    def update_factors(self, rope: Rope) -> bool:
        """Updates the rotary factors, and returns whether they changed. If so, also updates the
        namespace, since prefixes with different factors cannot be shared."""
        length = self.num_prompt_tokens
        if rope.must_recompute:
            length = max(sequence.num_tokens for sequence in self.open_sequences)
        factors_id = rope.factors_id(length)
        if factors_id == self.rope_factors_id:
            return False
        namespace = self.namespace
        if isinstance(namespace, RopeNamespace):
            namespace = namespace.default
        if namespace is not UNCACHED:
            namespace = RopeNamespace(namespace, factors_id)
        self.rope_factors_id = factors_id
        self.namespace = namespace
        return True

    def admit(self) -> None:
        """Marks the request as running, and records how many of its tokens were cached, unless a
        step has already computed some of them or the request has been preempted."""
        self.status = Status.RUNNING
        if self.first_step_started_at is None and not self.num_preemptions:
            self.num_hit_tokens = sum(row.num_computed_tokens for row in self.sequences)

    def preempt(self) -> None:
        """Counts a preemption, and notes which rows have their logits, so that they need no
        forward before their next tokens."""
        self.num_preemptions += 1
        for sequence in self.open_sequences:
            sequence.note_logits(not sequence.num_to_compute)

    def note_lone_preemption(self) -> bool:
        """Called if the request is preempted while it runs alone: notes its total length, and
        returns whether it has changed since the last such preemption."""
        length_before = self.num_tokens_alone
        self.num_tokens_alone = sum(row.num_tokens for row in self.open_sequences)
        return self.num_tokens_alone != length_before

    def finish(self) -> None:
        """Ends the request and its open sequences."""
        self.status = Status.FINISHED
        for sequence in self.open_sequences:
            sequence.finish()

    def reset(self) -> None:
        """Frees the blocks of all sequences, so that they are computed again."""
        for sequence in self.sequences:
            sequence.reset()
        self.num_shared_tokens = 0

    def note_first_step(self, start: float) -> None:
        """Called once a step that admitted the request is committed: notes its `start`, in seconds
        of `perf_counter`, unless an earlier step has been noted."""
        if self.first_step_started_at is None:
            self.first_step_started_at = start

    def start_clocks(self, now: float) -> None:
        """Starts the clocks of the `max_time` criteria at `now`, in seconds of `time.time`."""
        for criterion in self.time_criteria:
            criterion.initial_timestamp = now

    @property
    def exceeds_positions(self) -> bool:
        """Whether an open sequence has tokens past the table of positions."""
        return any(
            sequence.num_tokens > self.max_computable_length for sequence in self.open_sequences
        )

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def open_sequences(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def num_open_rows(self) -> int:
        """Number of unfinished sequences, including those not forked yet."""
        return self.num_rows - sum(sequence.is_finished for sequence in self.sequences)

    @property
    def is_swapped(self) -> bool:
        return any(sequence.swapped is not None for sequence in self.sequences)

    @property
    def is_computed(self) -> bool:
        """Whether all tokens of the open sequences are computed."""
        return not any(sequence.num_to_compute for sequence in self.open_sequences)

    @property
    def awaits_tokens(self) -> bool:
        """Whether the request was preempted when all its rows had logits, so that it needs no
        forward until its next tokens are sampled."""
        return all(
            sequence.logits_length == len(sequence.token_ids) for sequence in self.open_sequences
        )

    def fork(self, num_sequences: int) -> None:
        """Adds forks of the first sequence until there are `num_sequences` sequences."""
        forks = [Sequence([]) for _ in range(num_sequences - len(self.sequences))]
        for fork in forks:
            fork.fork_from(self.sequences[0])
        self.adopt(forks)

    def advance_shared_prefix(self, sequence: Sequence) -> int:
        """Called if `num_shared_tokens` is not 0: once the first open row has computed them, forks
        its blocks for the other rows. Returns how many tokens a sequence may compute now: for the
        first open row, the missing shared tokens or, if none is missing, its remaining tokens; for
        the others, 0."""
        first_row, *other_rows = self.open_sequences
        if sequence is not first_row:
            return 0
        num_missing = self.num_shared_tokens - sequence.num_computed_tokens
        if num_missing > 0:
            return num_missing
        for row in other_rows:
            row.share_blocks(sequence)
        self.num_shared_tokens = 0
        return sequence.num_to_compute

    def continue_beams(self, parents: list[int], tokens: list[int]) -> None:
        """Makes each unfinished sequence `i` a fork of sequence `parents[i]`, unless `i` is its own
        parent, and appends `tokens[i]`. Frees the blocks of replaced sequences. Copies no K or
        V."""
        sequences = self.sequences
        replaced = {
            row: parent
            for row, parent in enumerate(parents)
            if row != parent and not sequences[row].is_finished
        }
        # one child of a replaced parent takes over the parent's blocks, and the others fork them: a
        # block that only one row holds can be written in place
        heirs = {parent: row for row, parent in replaced.items() if parent in replaced}
        forks = []
        for row, parent_row in replaced.items():
            parent = sequences[parent_row]
            is_heir = heirs.get(parent_row) == row
            blocks = parent.blocks if is_heir else parent.blocks.fork()
            tokens_of_parent = list(parent.token_ids)
            counts = parent.num_computed_tokens, parent.logits_length
            forks.append((sequences[row], blocks, tokens_of_parent, parent.swapped, counts))
        unused_blocks = [sequences[row].blocks for row in replaced if row not in heirs]
        for sequence, blocks, token_ids, swapped, counts in forks:
            sequence.blocks, sequence.token_ids, sequence.swapped = blocks, token_ids, swapped
            sequence.num_computed_tokens, sequence.logits_length = counts
        for blocks in unused_blocks:
            blocks.free()
        for sequence, token in zip(sequences, tokens):
            if not sequence.is_finished:
                sequence.token_ids.append(token)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {self.sequences})"


class RequestListener:
    """Called by a loop's scheduler as requests wait, run and end, and by its ledger as drafts are
    verified. This class only counts steps; `tools.timeline.Timeline` keeps the history of an
    engine's requests."""

    num_steps = 0  # scheduled so far

    def record_waiting(self, request: Request) -> None:
        """Records that a request waits, since it is new, has just stopped running, or has lost its
        swapped-out blocks."""

    def record_step(self, plan: StepPlan) -> None:
        """Records the plan of a step that has just been scheduled."""
        self.num_steps += 1

    def record_verification(
        self, request: Request, num_draft_tokens: int, num_accepted_tokens: int
    ) -> None:
        """Records that the last step verified a draft of this request."""

    def record_end(self, request: Request) -> None:
        """Records that a request has ended."""
