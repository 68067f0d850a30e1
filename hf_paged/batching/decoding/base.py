"""The state of a decoding between two forwards, and the criteria that end its rows. It holds tokens
and criteria, and leaves keys, values and blocks to the loop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import stopping_criteria as stock

from ...step import numbers_on
from .returned import check_hits
from .stop_strings import StopStrings

Fetch = Callable[[Tensor], list[int]]  # copies tokens (n,) to the host


Alternatives = list[tuple[int, float, float]]
"""The most probable tokens at one position, each with its log-probability before and after logits
processors."""

Record = tuple[tuple[float, float], Alternatives]
"""A token's log-probabilities (before and after processors), and its alternatives."""


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
        """Returns `(end - start, vocab)`, a view."""
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
    """Tokens that one step chose. All lists hold Python numbers; rows are indices into the
    decoding's rows."""

    tokens: list[int]  # next token of every row (pad for finished rows)
    # beams: row i continues row parents[i]; None: every row continues itself
    parents: list[int] | None
    finished: list[int]  # rows that need no more forwards
    rows: list[int]  # rows that were open before; the other rows' tokens are padding
    earlier: tuple[int, ...] = ()  # with a draft (one row): the step's new tokens before the last


Result = int | SampledTokens | BaseException
"""A decoding's result of a step; an `int` is the token of its single row, which continues."""


@dataclass(frozen=True)
class LoopInputs:
    """Arguments of transformers' decoding loops, and options for drawing tokens and recording
    log-probabilities."""

    input_ids: Tensor  # (rows, length) int64 or int32, padded on the left
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    generator: torch.Generator | None = None  # `None`: torch's global one
    record_logprobs: bool = False
    num_top: int = 0  # alternatives to record for each token


class StopChecker:
    """A call's stopping criteria. Evaluates transformers' own criteria on token ids and lengths,
    without tensors."""

    def __init__(self, criteria: StoppingCriteriaList):
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.eos_ids: set[int] = set()
        self.max_length: int | None = None  # prompt included
        # the criterion that warns once if a row gets longer than the model's positions
        self._positions: Any = None
        self._times: list[Any] = []
        self.stop_strings: list[Any] = []
        # a caller's criteria, which get the ids of the whole batch
        self.callers_criteria: list[Any] = []
        # up to this length only an EOS token can end a row
        self.free_length = sys.maxsize
        listed: Any = criteria
        if type(criteria) is not StoppingCriteriaList:
            listed = [criteria]
        for criterion in listed:
            kind = type(criterion)
            if kind is stock.EosTokenCriteria:
                self.eos_ids.update(criterion.eos_token_id.tolist())
            elif kind is stock.MaxLengthCriteria:
                max_length: int = criterion.max_length
                if self.max_length is not None:
                    max_length = min(max_length, self.max_length)
                self.max_length = max_length
                self.free_length = min(self.free_length, max_length - 1)
                if criterion.max_position_embeddings is not None:
                    self._positions = criterion
                    most = criterion.max_position_embeddings
                    self.free_length = min(self.free_length, most)
            elif kind is stock.MaxTimeCriteria:
                self._times.append(criterion)
                self.free_length = 0
            elif kind in (stock.StopStringCriteria, StopStrings):
                self.stop_strings.append(criterion)
            else:
                self.callers_criteria.append(criterion)

    def reason(self, token: int, length: int, hits_stop_string: bool) -> str | None:
        """Returns why a row of `length` tokens ends with `token`, `None` if it does not. The
        caller evaluates `callers_criteria`."""
        if token in self.eos_ids:
            return "eos"
        for limit in self._times:
            if time.time() - limit.initial_timestamp > limit.max_time:
                return "criteria"
        if hits_stop_string:
            return "stop_string"
        if self.max_length is not None and length >= self.max_length:
            return "length"
        positions = self._positions
        if positions is not None and length > positions.max_position_embeddings:
            ids = torch.zeros((1, length), dtype=torch.long, device="cpu")
            positions(ids, None)
            self._positions = None
        return None


def hits(
    criterion: Any,
    ids: Tensor,
    scores: tuple[Tensor, ...] | None,
) -> list[bool]:
    """Evaluates a criterion for each row; a single bool stands for all rows, as in transformers'
    `StoppingCriteriaList`."""
    are_hits = criterion(ids, scores)
    try:
        return torch.as_tensor(are_hits).expand(len(ids)).tolist()
    except Exception as error:
        check_hits(criterion, are_hits, len(ids), error)
        raise


def stop_string_hits(
    criterion: stock.StopStringCriteria | StopStrings,
    rows: list[list[int]],
) -> list[bool]:
    """Whether the last token of each row completes one of the strings. `rows` holds at least the
    last `maximum_token_len` tokens of each, or all."""
    if isinstance(criterion, StopStrings):
        return criterion.hits(rows)
    width = criterion.maximum_token_len
    no_match = len(criterion.embedding_vec) - 1  # an id that matches no string
    padding = [no_match] * width
    padded = [(padding + tokens)[-width:] for tokens in rows]
    # on the CPU, without a device sync
    ids = torch.tensor(padded, device="cpu")
    return hits(criterion, ids, None)


class Draft:
    """A row's draft in one step. The forward verifies `tokens`, which the scheduler may shorten:
    its logits are sampled as usual, position after position, up to the first token that is not the
    draft's."""

    is_drawn = False  # whether a sampled row takes its tokens from `sample`

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.position = 0  # of the token that is chosen next

    def sample(self, probs: Tensor, generator: torch.Generator | None) -> Tensor:
        """Returns the next token `(1,)` for `(1, vocab)` probabilities."""
        raise NotImplementedError


class Decoding:
    """transformers' decoding loop, suspended between two forwards. Unusable after an exception in a
    step."""

    max_length: int  # tokens, prompt included
    can_split = False  # whether the rows can advance independently
    has_ended_streamer = False
    is_streamed = False
    draft: Draft | None = None  # the draft computed together with the last token of its only row
    chooses_argmax = False  # whether the next token is simply the argmax of the logits
    accepts_runs = False  # whether the tokens of a draft can be chosen and accepted at once
    # whether it has one row, of which only `stop_checker` reads new tokens: their ids and the
    # length
    is_simple = False
    # `batch_key`, if that is the same in every step without a draft
    constant_key: Hashable | None = None

    def __init__(self, inputs: LoopInputs, num_returned: int):
        config: Any = inputs.generation_config
        self.inputs = inputs
        self.config = config
        self.generator = inputs.generator
        self.record_logprobs = inputs.record_logprobs
        self.num_top = inputs.num_top
        self.logits_processor = inputs.logits_processor
        self.stopping_criteria = inputs.stopping_criteria
        self.stop_checker = StopChecker(self.stopping_criteria)
        self.num_rows, self.length = inputs.input_ids.shape
        # rows whose logits the next step takes, in this order; the others need no K/V any more
        self.open_rows = list(range(self.num_rows))
        # by returned sequence: "eos", "stop_string", "criteria" or "length"; `None` while it runs
        self.finish_reasons: list[str | None] = [None] * num_returned
        # if log-probabilities are recorded, by returned sequence and new token
        self.records: list[list[Record]] = [[] for _ in range(num_returned)]
        keeps = config.return_dict_in_generate
        # `(rows, vocab)` of each step, if requested
        self.scores: tuple[Tensor, ...] | None = None
        self.raw_logits: tuple[Tensor, ...] | None = None
        if keeps and config.output_scores:
            self.scores = ()
        if keeps and config.output_logits:
            self.raw_logits = ()
        self._ids = inputs.input_ids
        self._new: list[list[int]] = []  # by step, tokens of every row that are not in `_ids` yet
        self._runs_stock_code = True  # no caller's code sees the batch
        # whether a step may run a caller's code, which may change the model
        self.runs_callers_code = False

    @property
    def is_done(self) -> bool:
        return not self.open_rows

    @property
    def batch_key(self) -> Hashable | None:
        """Single rows of equal keys are sampled as one batch in the next step; `None`: this one is
        sampled alone."""
        return None

    @property
    def input_ids(self) -> Tensor:
        """`(rows, cur_len)`, contiguous, int64 (the prompts' dtype before the first token). Later
        steps make a new tensor."""
        if self._new:
            columns = numbers_on(self._ids.device, self._new).t()
            # int64 from the first token on, as transformers' are
            ids = torch.cat([self._ids, columns], dim=-1)
            self._ids, self._new = ids, []  # at once: a fault between them would repeat the tokens
        return self._ids

    def _of_all_rows(self, values: Tensor) -> Tensor:
        """Expands values of open rows to `(num_rows, vocab)` float32. Rows that ended get ones,
        which are finite logits and equal probabilities."""
        if len(values) == self.num_rows:
            return values
        vocab = values.shape[-1]
        all_values = torch.ones((self.num_rows, vocab), device=values.device)
        all_values[numbers_on(values.device, self.open_rows)] = values
        return all_values
