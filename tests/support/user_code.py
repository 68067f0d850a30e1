"""Processors and criteria of users, by kind: what the random calls pass to `generate`. `after`: the
number of calls after which one raises, waits or ends."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria


class OwnError(RuntimeError):
    """Raised by user code; its text says by whose."""


class Processor(LogitsProcessor):
    def __init__(self, kind: str, after: int = 0, owner: str = "", is_paged: bool = True) -> None:
        self.kind, self.after, self.owner, self.is_paged = kind, after, owner, is_paged
        self.thread = threading.get_ident()
        self.num_calls = 0
        self.shown: list[tuple[Tensor, Tensor, bool]] = []
        self.best: Tensor | None = None  # of the call before

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert threading.get_ident() == self.thread, "called in the thread of another call"
        self.num_calls += 1
        is_late = self.num_calls > self.after
        if self.kind == "raises" and is_late:
            raise OwnError(self.owner)
        if self.kind == "slow" and is_late and self.is_paged:
            time.sleep(0.01)
        if self.kind == "bias":  # writes to what it is given
            scores[:, 20 + 7 * input_ids.shape[1] % 60] += 3.0
        if self.kind == "watches":
            self.shown.append((input_ids.clone(), scores.clone(), scores.is_inference()))
        if self.kind == "odd":
            return scores + 0.5 * (torch.arange(scores.shape[1]) % 2 == input_ids[:, -1:] % 2)
        if self.kind == "no repeats":
            return scores.scatter(1, input_ids[:, -1:], float("-inf"))
        if self.kind == "banned":  # the row's likeliest token at the call before
            best, self.best = self.best, scores.argmax(-1, keepdim=True)
            if best is not None:
                return scores.scatter(1, best, scores.min(-1, keepdim=True).values)
        return scores


class Criterion(StoppingCriteria):
    def __init__(self, kind: str, after: int = 0, owner: str = "") -> None:
        self.kind, self.after, self.owner, self.num_calls = kind, after, owner, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        is_late = self.num_calls > self.after
        if self.kind == "raises" and is_late:
            raise OwnError(self.owner)
        if self.kind == "rows":
            return input_ids[:, -1] % 5 == 0
        if self.kind == "eleventh":
            return input_ids[:, -1] % 11 == 0
        if self.kind == "all":  # one bool for all rows, as older user code returns
            return is_late
        return torch.full((len(input_ids),), self.kind == "ends" and is_late)
