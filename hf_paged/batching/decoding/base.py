"""The state of a decoding between two forwards, and the criteria that end its rows. A decoding
holds no keys, values or blocks."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import stopping_criteria as stock

from ...step import numbers_on
from ...switches import NOTHING
from .returned import check_criterion_result
from .stop_strings import StopStrings

Fetch = Callable[[Tensor], list[int]]
"""Copies tokens `(n,)` to the host."""

Alternatives = list[tuple[int, float, float]]
"""The tokens at one position that are most probable before logits processors, in descending order:
the id of each token, and its log-probabilities before and after processors."""

Record = tuple[tuple[float, float], Alternatives]
"""The log-probabilities of a token, before and after logits processors, and its alternatives."""


class LogitRows(NamedTuple):
    """Rows `[start, end)` of `(n, vocab)` logits, of any float dtype."""

    logits: Tensor
    start: int
    end: int

    @classmethod
    def of(cls, logits: Tensor) -> LogitRows:
        """Returns all rows of `logits`."""
        return cls(logits, 0, len(logits))

    def take(self) -> Tensor:
        """Returns these rows, `(end - start, vocab)`, as a view."""
        return self.logits[self.start : self.end]


def join_rows(parts: Sequence[LogitRows]) -> Tensor:
    """Returns the rows of all parts, `(n, vocab)`; a view if they are adjacent in one tensor."""
    logits, start, end = parts[0]
    for part in parts[1:]:
        if part.logits is not logits or part.start != end:
            return torch.cat([part.take() for part in parts])
        end = part.end
    if end - start == logits.shape[0]:
        return logits
    return logits[start:end]


class SampledTokens(NamedTuple):
    """The tokens that a decoding chose in one step. Rows are numbered within the decoding."""

    # next token of every row; padding in rows that had ended, if the criteria include EOS
    tokens: list[int]
    # with beams, row i continues row parents[i]; otherwise `None`: every row continues itself
    parents: list[int] | None
    finished: list[int]  # the `rows` that need no forward after this step
    rows: list[int]  # the decoding's `open_rows` before the step
    # of the single row of a decoding with a draft: the step's new tokens except the last
    earlier_tokens: tuple[int, ...] = ()
    num_ended: int = 0  # how many of `rows` a criterion had ended before the step


Result = int | SampledTokens | BaseException
"""A step's result for a decoding: an `int` is the next token of its only row, which continues; an
exception is the error with which the step failed."""


@dataclass(frozen=True)
class LoopInputs:
    """The arguments of transformers' decoding loops, and options for draws and records."""

    input_ids: Tensor  # (rows, length) int64 or int32, left-padded
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    generator: torch.Generator | None = None  # `None`: torch's global generator
    record_logprobs: bool = False
    num_alternatives: int = 0  # how many to record for each token


class StopChecker:
    """The stopping criteria of a decoding, by kind. Evaluates transformers' criteria for EOS,
    length and time on Python numbers."""

    def __init__(self, criteria: StoppingCriteriaList):
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.eos_ids: set[int] = set()
        self.max_length: int | None = None  # tokens, including the prompt
        # the criterion that warns once when a row exceeds the model's `max_position_embeddings`
        self._positions_criterion: Any = None
        self._time_criteria: list[Any] = []
        self.stop_strings: list[Any] = []
        # criteria of the caller, which get the ids of the whole batch
        self.callers_criteria: list[Any] = []
        # up to this length, no criterion for lengths or times needs to be checked
        self.max_unchecked_length = sys.maxsize
        members: Any = criteria
        if type(criteria) is not StoppingCriteriaList:
            members = [criteria]
        for criterion in members:
            kind = type(criterion)
            if kind is stock.EosTokenCriteria:
                self.eos_ids.update(criterion.eos_token_id.flatten().tolist())
            elif kind is stock.MaxLengthCriteria:
                max_length = math.ceil(criterion.max_length)  # `generate` also accepts 8.5
                if self.max_length is not None:
                    max_length = min(max_length, self.max_length)
                self.max_length = max_length
                self.max_unchecked_length = min(self.max_unchecked_length, max_length - 1)
                if criterion.max_position_embeddings is not None:
                    self._positions_criterion = criterion
                    max_positions = criterion.max_position_embeddings
                    self.max_unchecked_length = min(self.max_unchecked_length, max_positions)
            elif kind is stock.MaxTimeCriteria:
                self._time_criteria.append(criterion)
                self.max_unchecked_length = 0
            elif kind in (stock.StopStringCriteria, StopStrings):
                self.stop_strings.append(criterion)
            else:
                self.callers_criteria.append(criterion)

    def finish_reason(self, token: int, length: int, hits_stop_string: bool) -> str | None:
        """Returns why the new token `token` ends its row, which now has `length` tokens; `None` if
        the row continues. `hits_stop_string`: whether `token` completes a stop string. Does not
        evaluate `callers_criteria`."""
        if token in self.eos_ids:
            return "eos"
        for criterion in self._time_criteria:
            if time.time() - criterion.initial_timestamp > criterion.max_time:
                return "criteria"
        if hits_stop_string:
            return "stop_string"
        if self.max_length is not None and length >= self.max_length:
            return "length"
        criterion = self._positions_criterion
        if criterion is not None and length > criterion.max_position_embeddings:
            ids = torch.zeros((1, length), dtype=torch.long, device="cpu")
            criterion(ids, None)
            self._positions_criterion = None
        return None


def hits(
    criterion: Any,
    ids: Tensor,
    scores: tuple[Tensor, ...] | None,
    may_be_column: bool = False,
) -> list[bool]:
    """Returns, for each row of `(rows, length)` ids, whether a criterion ends the row. As in
    transformers' `StoppingCriteriaList`, the criterion may return a single bool for all rows.
    `may_be_column`: whether it may also return one value per row as `(rows, 1)`. Raises the
    criterion's error, or `TypeError` for other results."""
    result = criterion(ids, scores)
    try:
        values = torch.as_tensor(result)
        if may_be_column and values.shape == (len(ids), 1):
            values = values.flatten()
        return values.expand(len(ids)).tolist()
    except Exception as error:
        check_criterion_result(criterion, result, len(ids), error)
        raise


def stop_string_hits(
    criterion: stock.StopStringCriteria | StopStrings,
    rows: list[list[int]],
) -> list[bool]:
    """Returns, for each row, whether its last token completes a stop string. `rows` holds the
    tokens of each row, or at least the last `maximum_token_len` of them."""
    if isinstance(criterion, StopStrings):
        return criterion.hits(rows)
    width = criterion.maximum_token_len
    no_match = len(criterion.embedding_vec) - 1  # an id that no stop string matches
    padding = [no_match] * width
    padded_rows = [(padding + tokens)[-width:] for tokens in rows]
    # on the CPU, to avoid a synchronization with the device
    ids = torch.tensor(padded_rows, device="cpu")
    return hits(criterion, ids, None)


class Draft:
    """A row's draft for one step. The step's forward computes the logits after the row's last token
    and after each draft token. Tokens are chosen from these logits as usual, one position after
    another, up to the first token that differs from the draft. The scheduler cuts `tokens` to
    `Sequence.max_draft_tokens`, or to fewer."""

    is_drawn = False  # whether `sample` draws the tokens of a row with `do_sample`

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.position = 0  # index in `tokens` of the token that is chosen next

    def advance(self, tokens: list[int]) -> bool:
        """Moves to the next position if `tokens`, the single token chosen at this position, equal
        the draft's. Returns whether they do."""
        is_equal = tokens == self.tokens[self.position : self.position + 1]
        self.position += is_equal
        return is_equal

    def sample(self, probs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draws the next token, `(1,)`, given its `(1, vocab)` probabilities after logits
        processors."""
        raise NotImplementedError


class Decoding:
    """transformers' decoding loop, suspended between two forwards. After an exception in a step,
    the decoding is unusable, unless `SampleDecoding.rewind` can undo the step."""

    max_length: int  # tokens, including the prompt
    has_beams = False  # whether tokens are final only at the end, and steps return parents
    can_split = False  # whether the rows can advance independently
    has_ended_streamer = False
    is_streamed = False
    draft: Draft | None = None  # the draft that follows the last token of its only row
    chooses_argmax = False  # whether the next token is the argmax of the unprocessed logits
    accepts_runs = False  # whether `accept_run` can accept the tokens of a draft at once
    # whether it has one row, no streamer and no records, and only EOS, length or time ends it
    is_simple = False
    # `batch_key`, if it is the same in every step without a draft
    constant_key: Hashable | None = None

    def __init__(self, inputs: LoopInputs, num_returned: int):
        config: Any = inputs.generation_config
        self.inputs = inputs
        self.config = config
        self.generator = inputs.generator
        self.record_logprobs = inputs.record_logprobs
        self.num_alternatives = inputs.num_alternatives
        self.logits_processor = inputs.logits_processor
        self.stopping_criteria = inputs.stopping_criteria
        self.stop_checker = StopChecker(self.stopping_criteria)
        self.num_rows, self.length = inputs.input_ids.shape
        # rows whose logits the next step takes, in this order; the K/V of other rows can be freed
        self.open_rows = list(range(self.num_rows))
        # by returned sequence: "eos", "stop_string", "criteria" or "length"; `None` until it ends
        self.finish_reasons: list[str | None] = [None] * num_returned
        # by returned sequence and new token, if log-probabilities are recorded
        self.records: list[list[Record]] = [[] for _ in range(num_returned)]
        returns_dict = config.return_dict_in_generate
        # by step, `(rows, vocab)` float32; `None` unless they are requested
        self.scores: tuple[Tensor, ...] | None = None
        self.raw_logits: tuple[Tensor, ...] | None = None
        if returns_dict and config.output_scores:
            self.scores = ()
        if returns_dict and config.output_logits:
            self.raw_logits = ()
        self._ids = inputs.input_ids
        # by step, the tokens of all rows that are not in `_ids` yet
        self._new_tokens: list[list[int]] = []
        # whether the processors are row-wise (`are_row_wise`) and, with beams, no criterion of the
        # caller reads the batch
        self._is_row_wise = True
        # whether a step may run a caller's code, which may change the model
        self.runs_callers_code = False
        # whether that code may run the model, as processors and criteria may
        self.may_run_model = False
        # makes a context around that code, in which the model runs with the rows' adapter; a
        # streamer runs outside of it, since it may wait for a thread that uses the model
        self.running_model: Callable[[], AbstractContextManager[Any]] = lambda: NOTHING

    @property
    def is_done(self) -> bool:
        """Whether no row needs another forward."""
        return not self.open_rows

    @property
    def can_repeat(self) -> bool:
        """Whether an interrupted step can be undone (`SampleDecoding.rewind`) and repeated."""
        return False

    @property
    def batch_key(self) -> Hashable | None:
        """A key for the next step: single-row decodings with equal keys are sampled as one batch;
        `None`: this decoding is sampled alone."""
        return None

    @property
    def input_ids(self) -> Tensor:
        """The ids `(rows, length)` of all tokens so far: the prompts' tensor or, from the first new
        token on, an int64 tensor as in transformers, contiguous except with beams. Later steps do
        not change it."""
        if self._new_tokens:
            columns = numbers_on(self._ids.device, self._new_tokens).t()
            ids = torch.cat([self._ids, columns], dim=-1)
            # in one statement: an interrupt between two would duplicate the tokens
            self._ids, self._new_tokens = ids, []
        return self._ids

    def _expand_to_all_rows(self, values: Tensor) -> Tensor:
        """Expands `(open rows, vocab)` float32 values to `(num_rows, vocab)`. Ended rows get ones,
        which are valid as logits and as probabilities."""
        if len(values) == self.num_rows:
            return values
        vocab = values.shape[-1]
        all_values = torch.ones((self.num_rows, vocab), dtype=values.dtype, device=values.device)
        all_values[numbers_on(values.device, self.open_rows)] = values
        return all_values
