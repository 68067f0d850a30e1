"""What a decoding is between two forwards: the protocol the engine drives, and what ends a row."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

Logprobs = list[tuple[float, float]]  # per generated token: of the model's own distribution, of the processed one
Fetch = Callable[[torch.Tensor], list[int]]  # brings tokens (n,) to the host
CHUNK = 128  # tokens of the vocabulary whose maximum, or sum, is taken at once


@dataclass(frozen=True)
class SampledTokens:
    """What one step decided. All lists are Python numbers; rows are indices into the decoding's rows."""

    tokens: list[int]  # next token of every row (pad for finished rows)
    parents: list[int] | None  # beams: row i continues row parents[i]; None: every row continues itself
    finished: list[int]  # rows that need no more forwards from now on
    rows: list[int]  # rows that were open: their tokens are their own, those of the others are padding


class Decoding(ABC):
    """transformers' decoding loop, stopped between two forwards.

    `open_rows` are the rows whose logits the next `advance` takes, in this order; rows that left it need no keys or
    values any more. `lengths`, `finish_reasons` ("eos", "stop_string", "criteria", "length"; `None` while it runs) and
    `logprobs` have one entry per returned sequence. After an exception from `advance` the decoding is of no more use.
    """

    num_rows: int
    max_length: int  # tokens, prompt included
    open_rows: list[int]
    finish_reasons: list[str | None]
    logprobs: list[Logprobs]  # per returned sequence; empty lists unless they were asked for

    @property
    def is_done(self) -> bool:
        return not self.open_rows

    @property
    @abstractmethod
    def input_ids(self) -> torch.Tensor:
        """`(num_rows, cur_len)` int64: every row so far, as processors see them next."""

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Tokens of every returned sequence up to its own last, prompt and padding included."""

    @property
    def can_split(self) -> bool:
        """Whether the rows may go on one by one."""
        return False

    @abstractmethod
    def advance(self, logits: torch.Tensor) -> SampledTokens:
        """Takes `(len(open_rows), vocab)` logits of any float dtype to the next token of every row."""

    @abstractmethod
    def result(self, past_key_values: Any = None) -> Any:
        """What the model's own loop would return: a tensor, or its `ModelOutput` when that was asked for."""


class StopChecker:
    """A call's stopping criteria. transformers' own that look at one token or at the length need no tensors here."""

    def __init__(self, criteria: StoppingCriteriaList):
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.eos_ids: frozenset[int] = frozenset()
        self.max_length: int | None = None  # tokens
        self.others: list[tuple[Any, str]] = []  # (criterion, reason): they see the ids of the whole batch
        self._times: list[MaxTimeCriteria] = []
        self._warn_above: tuple[int, MaxLengthCriteria] | None = None
        self.stop_strings: StopStringCriteria | None = None  # the only one that needs ids, where it is this one
        if type(criteria) is not StoppingCriteriaList:
            self.others = [(criteria, "criteria")]
            return
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos_ids |= frozenset(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxLengthCriteria:
                known = criterion.max_length if self.max_length is None else self.max_length
                self.max_length = min(known, criterion.max_length)
                if criterion.max_position_embeddings is not None:
                    self._warn_above = (criterion.max_position_embeddings, criterion)
            elif type(criterion) is MaxTimeCriteria:
                self._times.append(criterion)
            else:
                reason = "stop_string" if isinstance(criterion, StopStringCriteria) else "criteria"
                self.others.append((criterion, reason))
        if len(self.others) == 1 and type(self.others[0][0]) is StopStringCriteria:
            self.stop_strings = self.others[0][0]

    @property
    def is_row_wise(self) -> bool:
        """Whether no criterion is a caller's own, so that a row's end does not depend on the other rows."""
        return all(type(criterion) is StopStringCriteria for criterion, _ in self.others)

    @property
    def ends_all_at_once(self) -> bool:
        """Whether every row ends in the same step."""
        return not (self.has_eos or self.others)

    def reason(self, token: int, length: int) -> str | None:
        """Why a row of `length` tokens that ends in `token` is over, as far as these two tell."""
        if token in self.eos_ids:
            return "eos"
        if self._times and any(time.time() - limit.initial_timestamp > limit.max_time for limit in self._times):
            return "criteria"
        if self.max_length is not None and length >= self.max_length:
            return "length"
        if self._warn_above is not None and length > self._warn_above[0]:
            self._warn_above[1](torch.zeros((1, length), dtype=torch.long), None)  # it logs its reminder
            self._warn_above = None
        return None

    def reasons(
        self, tokens: list[int], length: int, ids: Callable[[], torch.Tensor], scores: tuple[torch.Tensor, ...] | None
    ) -> list[str | None]:
        """Of every row. `ids()` builds the `(rows, length)` ids, which only criteria in `others` need."""
        found = [self.reason(token, length) for token in tokens]
        for criterion, reason in self.others:
            for row, hit in enumerate(hits(criterion, ids(), scores)):
                if hit and found[row] in (None, "length"):
                    found[row] = reason
        return found


def hits(criterion: Any, ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None) -> list[bool]:
    """What a criterion says of each row; one that returns a single bool speaks for all, as in transformers' list."""
    none = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    return (none | criterion(ids, scores)).tolist()


def num_embeddings(model: Any) -> int:
    """Rows of the model's input embedding: the token ids below it can be computed."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):  # it does not tell
        return sys.maxsize


def values_at(scores: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`scores[rows, tokens]`, minus infinity for tokens behind the last column, which a processor may have added."""
    last = scores.shape[1] - 1
    return scores[rows, tokens.clamp(max=last)].masked_fill(tokens > last, float("-inf"))


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """`scores.argmax(dim=-1)` of `(rows, vocab)`, first of equals.

    On CPU torch finds a maximum ten times faster than its index, so: the maximum of every chunk, the first chunk that
    has the row's maximum, and the index within that chunk alone.
    """
    rows, vocab = scores.shape
    if scores.device.type != "cpu" or vocab < 8 * CHUNK:
        return scores.argmax(dim=-1)
    if vocab % CHUNK:
        scores = torch.nn.functional.pad(scores, (0, -vocab % CHUNK), value=float("-inf"))
    chunks = scores.unflatten(1, (-1, CHUNK))  # [rows, chunks, CHUNK]
    first = chunks.amax(dim=-1).argmax(dim=-1)  # [rows]
    return first * CHUNK + chunks[torch.arange(rows), first].argmax(dim=-1)
