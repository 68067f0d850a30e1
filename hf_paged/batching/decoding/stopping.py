"""What ends a row."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)


class StopChecker:
    """
    A call's stopping criteria. transformers' own that look at one token or at the length need no tensors here.

    Attributes:
        has_eos (`bool`): Whether rows may end at an EOS token.
        max_length (`int`, *optional*): Tokens, prompt included.
        stop_strings (`list[StopStringCriteria]`): They see the last tokens of a row.
        others (`list[StoppingCriteria]`): Of a caller's own: they see the ids of the whole batch.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.max_length: int | None = None
        self.stop_strings: list[StopStringCriteria] = []
        self.others: list[StoppingCriteria | StoppingCriteriaList] = []
        self._eos_ids: frozenset[int] = frozenset()
        self._times: list[MaxTimeCriteria] = []
        self._warn_above: tuple[int, MaxLengthCriteria] | None = None
        if type(criteria) is not StoppingCriteriaList:
            self.others = [criteria]
            return
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._eos_ids |= frozenset(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxLengthCriteria:
                known = criterion.max_length if self.max_length is None else self.max_length
                self.max_length = min(known, criterion.max_length)
                if criterion.max_position_embeddings is not None:
                    self._warn_above = (criterion.max_position_embeddings, criterion)
            elif type(criterion) is MaxTimeCriteria:
                self._times.append(criterion)
            elif type(criterion) is StopStringCriteria:
                self.stop_strings.append(criterion)
            else:
                self.others.append(criterion)

    @property
    def is_row_wise(self) -> bool:
        """Whether no criterion is a caller's own, so that a row's end does not depend on the other rows."""
        return not self.others

    @property
    def ends_all_at_once(self) -> bool:
        """Whether every row ends in the same step."""
        return not (self.has_eos or self.stop_strings or self.others)

    def reason(self, token: int, length: int, hits_stop_string: bool) -> str | None:
        """Why a row of `length` tokens that ends in `token` is over, but for `others`."""
        if token in self._eos_ids:
            return "eos"
        if self._times and any(time.time() - limit.initial_timestamp > limit.max_time for limit in self._times):
            return "criteria"
        if hits_stop_string:
            return "stop_string"
        if self.max_length is not None and length >= self.max_length:
            return "length"
        if self._warn_above is not None and length > self._warn_above[0]:
            self._warn_above[1](torch.zeros((1, length), dtype=torch.long), None)  # it logs its reminder
            self._warn_above = None
        return None


def hits(
    criterion: StoppingCriteria | StoppingCriteriaList, ids: Tensor, scores: tuple[Tensor, ...] | None
) -> list[bool]:
    """What a criterion says of each row; one that returns a single bool speaks for all, as in transformers' list."""
    none = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    return (none | criterion(ids, scores)).tolist()


def stop_string_hits(criterion: StopStringCriteria, rows: list[list[int]]) -> list[bool]:
    """Whether each row, whose last `maximum_token_len` tokens these are, has just completed one of the strings."""
    width = criterion.maximum_token_len
    nothing = len(criterion.embedding_vec) - 1  # stands for a token that matches nothing
    padded = [[nothing] * (width - len(tokens)) + tokens[-width:] for tokens in rows]
    return hits(criterion, torch.tensor(padded, device=criterion.embedding_vec.device), None)
