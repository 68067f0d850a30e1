"""The state of a decoding between two forwards, and the criteria that end its rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import stopping_criteria as known

from ...interrupts import let_in
from ...step import to_device
from .speculation import Draft

Fetch = Callable[[Tensor], list[int]]  # brings tokens (n,) to the host


Alternatives = list[tuple[int, float, float]]
"""The most probable tokens at one position, each with its log-probability before and after logits processors."""

Record = tuple[tuple[float, float], Alternatives]
"""A token's log-probabilities (before and after processors), and its alternatives."""


@dataclass(frozen=True)
class SampledTokens:
    """Tokens that one step chose. All lists hold Python numbers; rows are indices into the decoding's rows."""

    tokens: list[int]  # next token of every row (pad for finished rows)
    parents: list[int] | None  # beams: row i continues row parents[i]; None: every row continues itself
    finished: list[int]  # rows that need no more forwards
    rows: list[int]  # rows that were open before; the other rows' tokens are padding
    earlier: tuple[int, ...] = ()  # with a draft (one row): the step's new tokens before the last


@dataclass(frozen=True)
class LoopInputs:
    """Arguments of transformers' decoding loops, and options for drawing tokens and recording log-probabilities."""

    input_ids: Tensor  # (rows, length) int64 or int32, padded on the left
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    generator: torch.Generator | None = None  # `None`: torch's global one
    record_logprobs: bool = False
    num_top: int = 0  # alternatives to record for each token


class StopChecker:
    """A call's stopping criteria. Evaluates transformers' own criteria on tokens and lengths without tensors."""

    def __init__(self, criteria: StoppingCriteriaList):
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        own = known.EosTokenCriteria, known.MaxLengthCriteria, known.MaxTimeCriteria, known.StopStringCriteria
        found: dict[type, list[Any]] = {kind: [] for kind in own}
        self.others: list[Any] = []  # a caller's criteria, which get the ids of the whole batch
        for criterion in criteria if type(criteria) is StoppingCriteriaList else [criteria]:
            found.get(type(criterion), self.others).append(criterion)
        eos, limits, self._times, self.stop_strings = found.values()
        self._eos_ids = {token for criterion in eos for token in criterion.eos_token_id.tolist()}
        self.max_length: int | None = min((limit.max_length for limit in limits), default=None)  # prompt included
        # criterion that logs once if a row gets longer than the model's positions
        self._positions = next((each for each in reversed(limits) if each.max_position_embeddings is not None), None)

    def reason(self, token: int, length: int, hits_stop_string: bool) -> str | None:
        """Returns why a row of `length` tokens that ends in `token` has ended, without asking `others`; else `None`."""
        if token in self._eos_ids:
            return "eos"
        if self._times and any(time.time() - limit.initial_timestamp > limit.max_time for limit in self._times):
            return "criteria"
        if hits_stop_string:
            return "stop_string"
        if self.max_length is not None and length >= self.max_length:
            return "length"
        if self._positions is not None and length > self._positions.max_position_embeddings:
            self._positions(torch.zeros((1, length), dtype=torch.long, device="cpu"), None)
            self._positions = None
        return None


def hits(criterion: Any, ids: Tensor, scores: tuple[Tensor, ...] | None) -> list[bool]:
    """Evaluates a criterion for each row; a single bool holds for all rows, as in transformers' list."""
    none = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    return (none | criterion(ids, scores)).tolist()


def stop_string_hits(criterion: known.StopStringCriteria, rows: list[list[int]]) -> list[bool]:
    """Whether each row has just completed one of the strings. `rows` holds at least the last `maximum_token_len` tokens
    of each, or all."""
    width = criterion.maximum_token_len
    nothing = len(criterion.embedding_vec) - 1  # stands for a token that matches nothing
    padded = [[nothing] * (width - len(tokens)) + tokens[-width:] for tokens in rows]
    return hits(criterion, torch.tensor(padded, device="cpu"), None)  # on the CPU, without a device sync


class Decoding:
    """transformers' decoding loop, suspended between two forwards. Unusable after an exception in a step."""

    max_length: int  # tokens, prompt included
    can_split = False  # whether the rows can advance independently
    draft: Draft | None = None  # the draft computed together with the last token of its only row

    def __init__(self, inputs: LoopInputs, num_returned: int):
        config: Any = inputs.generation_config
        self.inputs, self.config = inputs, config
        self.generator, self.record_logprobs, self.num_top = inputs.generator, inputs.record_logprobs, inputs.num_top
        self.logits_processor, self.stopping_criteria = inputs.logits_processor, inputs.stopping_criteria
        self.stop_checker = StopChecker(self.stopping_criteria)
        self.num_rows, self.length = inputs.input_ids.shape
        # rows whose logits the next step takes, in this order; rows that left no longer need K/V
        self.open_rows = list(range(self.num_rows))
        # of each returned sequence: "eos", "stop_string", "criteria" or "length"; `None` while it runs
        self.finish_reasons: list[str | None] = [None] * num_returned
        # if recorded, by returned sequence and new token: log-probabilities before and after processors
        self.logprobs: list[list[tuple[float, float]]] = [[] for _ in range(num_returned)]
        self.top_logprobs: list[list[Alternatives]] = [[] for _ in range(num_returned)]
        keeps = config.return_dict_in_generate
        # `(rows, vocab)` of each step, if requested
        self.scores: tuple[Tensor, ...] | None = () if keeps and config.output_scores else None
        self.raw_logits: tuple[Tensor, ...] | None = () if keeps and config.output_logits else None
        self._ids = inputs.input_ids
        self._new: list[list[int]] = []  # by step, tokens of every row that are not in `_ids` yet
        self._runs_known_code = True  # no caller's code sees the batch

    @property
    def is_done(self) -> bool:
        return not self.open_rows

    @property
    def input_ids(self) -> Tensor:
        """`(rows, cur_len)`, contiguous, int64 (the prompts' dtype before the first token). Later steps make a new
        tensor."""
        if self._new:
            columns = to_device(torch.tensor(self._new, dtype=torch.long, device="cpu"), self._ids.device).t()
            self._ids = torch.cat([self._ids, columns], dim=-1)  # int64 from the first token on, as transformers' are
            self._new = []
        return self._ids

    def _callers_code(self) -> AbstractContextManager[None]:
        """Context for processors and criteria, which lets interrupts reach a caller's code."""
        return nullcontext() if self._runs_known_code else let_in(waiting=False)

    def _of_all_rows(self, values: Tensor) -> Tensor:
        """Expands values of open rows to `(num_rows, vocab)` float32. Rows that left get ones: finite logits, equal
        probabilities."""
        if len(values) == self.num_rows:
            return values
        every = torch.ones((self.num_rows, values.shape[-1]), device=values.device)
        every[to_device(torch.tensor(self.open_rows, dtype=torch.long, device="cpu"), values.device)] = values
        return every
