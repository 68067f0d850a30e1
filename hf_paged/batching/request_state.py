"""An unfinished request of an engine: how it is made of what callers pass, and what is told of it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import MaxTimeCriteria

from ..config import check_cache_salt
from ..interrupts import let_in
from .arguments import as_config, as_list, as_priority, as_seed, check_streamed_rows, check_streamer
from .decoding.beam import BeamDecoding
from .decoding.prepare import request_decoding
from .execution.adapters import check_adapter
from .generation import Generation
from .prompts import Prompt, prompt_ids
from .request import Request, Sequence
from .results import RequestOutput, RequestResult, SequenceResult, TextTracker, Timings


class RequestState(Generation):
    """
    A request from the arguments of `PagedEngine.add_request`, not queued yet. Raises its errors.

    Attributes:
        prompt_ids (`list[int]`): The prompt.
        limits (`list[MaxTimeCriteria]`): Of `max_time`, whose clock starts with the step that first runs the request.
        outbox (`deque[RequestOutput]`, *optional*): Of the caller that waits for this request; else `step` tells of it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        request_id: str,
        input_ids: Prompt,
        generation_config: Any,
        *,
        priority: int = 0,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        streamer: Any = None,
        adapter: str | None = None,
        seed: int | None = None,
        return_logprobs: bool = False,
        cache_salt: str | None = None,
    ) -> None:
        if adapter is not None:
            check_adapter(model, adapter)
        check_cache_salt(cache_salt)
        priority, seed = as_priority(priority), as_seed(seed)
        check_streamer(streamer)
        self.prompt_ids = prompt_ids(input_ids, tokenizer)
        criteria = as_list("stopping_criteria", stopping_criteria)
        decoding = request_decoding(
            model,
            self.prompt_ids,
            as_config(generation_config),
            logits_processor=as_list("logits_processor", logits_processor),
            stopping_criteria=criteria,
            streamer=streamer,
            generator=None if seed is None else torch.Generator(device=model.device).manual_seed(seed),
            tokenizer=tokenizer,
            record_logprobs=return_logprobs,
        )
        check_streamed_rows(streamer, decoding.num_rows, "ask for one sequence a request")
        self.request = Request(
            request_id=request_id,
            sequences=[Sequence(list(self.prompt_ids))],
            priority=priority,
            namespace=(adapter, cache_salt),
            adapter=adapter,
            max_num_tokens=decoding.max_length,
            num_rows=decoding.num_rows,
        )
        super().__init__(decoding, [(self.request, index) for index in range(decoding.num_rows)])
        self.request_id, self.streamer = request_id, streamer
        self.limits = [c for c in decoding.stopping_criteria if type(c) is MaxTimeCriteria and c not in criteria]
        self.outbox: deque[RequestOutput] | None = None
        self._tokenizer, self._records_logprobs = tokenizer, return_logprobs
        self._text = None if tokenizer is None else TextTracker(tokenizer)
        self._added = time.perf_counter()
        self._first_token: float | None = None  # seconds, as in `Timings`

    @property
    def is_unstarted(self) -> bool:
        """Whether no step has run it."""
        return self.request.admitted_at is None and not self.is_closed

    def output(self) -> tuple[dict[int, int], str | None]:
        """New tokens of the last step, and text, if it has not failed. Sets `error` if the tokenizer raises."""
        if self.error is not None:
            return {}, None  # the tokens are of an earlier step
        if self._first_token is None:
            self._first_token = time.perf_counter() - self._added
        text = None
        if self._text is not None and 0 in self.new_tokens:
            try:
                text = self._text.add([self.new_tokens[0]], last=self.is_done)
            except Exception as failure:
                self.error = failure
        return self.new_tokens, text

    def result(self, reason: str | None) -> RequestResult:
        """How it ended: by itself, or for a reason (`"cancelled"`, `"error"`). What goes wrong here is its error."""
        sequences: list[SequenceResult] = []
        try:
            sequences, failure = self._sequences(reason)
        except Exception as caught:  # what an interrupt left of the decoding is no more to be read
            failure = caught
        admitted_at = self.request.admitted_at
        queued = None if admitted_at is None else admitted_at - self._added
        return RequestResult(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            sequences=sequences,
            error=failure if self.error is None else self.error,
            timings=Timings(queued, self._first_token, time.perf_counter() - self._added),
            num_prefix_hit_tokens=self.request.num_hit_tokens,
            num_preemptions=self.request.num_preemptions,
        )

    def put_prompt(self) -> None:
        """The streamer gets the prompt, `(1, length)`."""
        if self.streamer is not None:
            with let_in(waiting=False):
                self.streamer.put(self.decoding.input_ids.cpu())

    def end_streamer(self, reason: str | None) -> None:
        """After the end, once it is told. A decoding that ended by itself (`reason` is `None`) has done it."""
        if reason is not None and self.streamer is not None:
            with contextlib.suppress(Exception), let_in(waiting=False):
                self.streamer.end()

    def _sequences(self, reason: str | None) -> tuple[list[SequenceResult], Exception | None]:
        """What it returns, and what the tokenizer raised."""
        decoding, first = self.decoding, len(self.prompt_ids)
        scores: list[float] | None = None
        if isinstance(decoding, BeamDecoding):
            if not decoding.is_done:  # nothing is settled
                return [SequenceResult([], reason or "cancelled") for _ in decoding.finish_reasons], None
            if decoding.finish_reasons[0] is None:
                nothing = RuntimeError("no beam could end: the scores contain nan, or too few tokens have a finite one")
                return [SequenceResult([], "error") for _ in decoding.finish_reasons], nothing
            reason = "error"  # of beams that could not end, beside some that did
            scores = decoding.sequences_scores
            ids = decoding.sequences[:, : decoding.config.num_return_sequences].flatten(0, 1)
        else:
            ids = decoding.input_ids
        results: list[SequenceResult] = []
        failure: Exception | None = None
        for i, (length, ended) in enumerate(zip(decoding.lengths, decoding.finish_reasons)):
            token_ids = ids[i, first:length].tolist()
            text = None
            if self._tokenizer is not None and failure is None:
                try:
                    text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
                except Exception as caught:
                    failure = caught
            logprobs = decoding.logprobs[i] if self._records_logprobs else None
            score = None if scores is None else scores[i]
            results.append(SequenceResult(token_ids, ended or reason or "cancelled", text, logprobs, score))
        return results, failure
