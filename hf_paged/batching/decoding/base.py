"""What a decoding is between two forwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.utils import ModelOutput

from ...interrupts import let_in
from .stopping import StopChecker

Logprobs = list[tuple[float, float]]  # per generated token: of the model's own distribution, of the processed one
Fetch = Callable[[Tensor], list[int]]  # brings tokens (n,) to the host


@dataclass(frozen=True)
class SampledTokens:
    """What one step decided. All lists are Python numbers; rows are indices into the decoding's rows."""

    tokens: list[int]  # next token of every row (pad for finished rows)
    parents: list[int] | None  # beams: row i continues row parents[i]; None: every row continues itself
    finished: list[int]  # rows that need no more forwards from now on
    rows: list[int]  # rows that were open: their tokens are their own, those of the others are padding


@dataclass(frozen=True)
class LoopInputs:
    """What transformers' loops receive, and how tokens are drawn and reported."""

    input_ids: Tensor  # (rows, length) int64 or int32, padded on the left
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    generator: torch.Generator | None = None  # `None`: torch's global one
    record_logprobs: bool = False


class Decoding(ABC):
    """
    transformers' decoding loop, stopped between two forwards. `sampler.sample_step` takes it from one to the next;
    after an exception there it is of no more use.

    Args:
        inputs ([`LoopInputs`]): What the loop receives.
        num_returned (`int`): Sequences of the result.

    Attributes:
        open_rows (`list[int]`): Rows whose logits the next step takes, in this order. Rows that left it need no keys or
            values any more.
        max_length (`int`): Tokens, prompt included.
        finish_reasons (`list[str | None]`): `"eos"`, `"stop_string"`, `"criteria"` or `"length"` of each returned
            sequence; `None` while it runs.
        logprobs (`list[Logprobs]`): Of each returned sequence; empty lists unless they were asked for.
        scores, raw_logits (`tuple[torch.Tensor, ...]`, *optional*): `(rows, vocab)` of each step, where asked for.
    """

    max_length: int

    def __init__(self, inputs: LoopInputs, num_returned: int):
        config: Any = inputs.generation_config
        self.inputs, self.config = inputs, config
        self.generator, self.record_logprobs = inputs.generator, inputs.record_logprobs
        self.logits_processor, self.stopping_criteria = inputs.logits_processor, inputs.stopping_criteria
        self.stop_checker = StopChecker(self.stopping_criteria)
        self.num_rows, self.length = inputs.input_ids.shape
        self.open_rows = list(range(self.num_rows))
        self.finish_reasons: list[str | None] = [None] * num_returned
        self.logprobs: list[Logprobs] = [[] for _ in range(num_returned)]
        keeps = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if keeps and config.output_scores else None
        self.raw_logits: tuple[Tensor, ...] | None = () if keeps and config.output_logits else None
        self._ids = inputs.input_ids
        self._runs_known_code = True  # no code of a caller's own sees the batch

    @property
    def is_done(self) -> bool:
        """Whether no row needs another forward."""
        return not self.open_rows

    @property
    def can_split(self) -> bool:
        """Whether the rows may go on one by one."""
        return False

    @property
    def batch_key(self) -> Hashable | None:
        """Decodings with equal keys are sampled as one batch in the next step; `None`: this one is alone in its own."""
        return None

    @property
    def input_ids(self) -> Tensor:
        """`(num_rows, cur_len)` int64: every row so far, as processors see them next; a later step makes a new one."""
        return self._ids

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Tokens of every returned sequence up to its own last, prompt and padding included."""

    @abstractmethod
    def result(self, past_key_values: Any = None) -> Tensor | ModelOutput:
        """What the model's own loop would return: a tensor, or its `ModelOutput` when that was asked for."""

    def _callers_code(self) -> AbstractContextManager[None]:
        """Around processors and criteria: interrupts reach a caller's own."""
        return nullcontext() if self._runs_known_code else let_in(waiting=False)

    def _of_all_rows(self, logits: Tensor) -> Tensor:
        """`(num_rows, vocab)` float32, a copy. Rows that left take part with logits of zero, always finite."""
        logits = logits.to(dtype=torch.float32, device=self._ids.device, copy=True)
        if len(logits) == self.num_rows:
            return logits
        every = torch.zeros((self.num_rows, logits.shape[-1]), device=logits.device)
        every[self.open_rows] = logits
        return every
