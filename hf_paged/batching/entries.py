"""What an engine remembers of an unfinished request, and what it says of it in the end."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import MaxTimeCriteria

from ..interrupts import let_in
from .arguments import as_config, as_list, as_priority, as_seed, check_streamed_rows, check_streamer
from .decoding.beam import BeamDecoding
from .decoding.prepare import request_decoding
from .job import Job
from .prompts import Prompt, prompt_ids
from .request import Request, Sequence
from .results import RequestOutput, RequestResult, SequenceResult, TextTracker, Timings


@dataclass(eq=False)
class Entry:
    """
    An unfinished request.

    Args:
        added (`float`): When it was added, in seconds of `time.perf_counter`.
        tokenizer (*optional*): For text in the result.
        text ([`TextTracker`], *optional*): For text piece by piece.
        limits (`list[MaxTimeCriteria]`): Of `max_time`, whose clock starts with the step that first runs the request.
        queued, first_token (`float`, *optional*): As in [`Timings`].
        outbox (`deque[RequestOutput]`, *optional*): Of the caller that waits for this request.
    """

    request_id: str
    request: Request
    job: Job
    prompt_ids: list[int]
    added: float
    tokenizer: Any
    text: TextTracker | None
    streamer: Any
    record_logprobs: bool
    limits: list[MaxTimeCriteria]
    queued: float | None = None
    first_token: float | None = None
    outbox: deque[RequestOutput] | None = None

    def result(self, reason: str | None, error: Exception | None) -> RequestResult:
        """How it ended: by itself, or for a reason (`"cancelled"`, `"error"`). What goes wrong here is its error."""
        sequences: list[SequenceResult] = []
        try:
            sequences, failure = self._sequences(reason)
        except Exception as caught:  # what an interrupt left of the decoding is no more to be read
            failure = caught
        return RequestResult(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            sequences=sequences,
            error=failure if error is None else error,
            timings=Timings(self.queued, self.first_token, time.perf_counter() - self.added),
            num_prefix_hit_tokens=self.request.num_hit_tokens,
            num_preemptions=self.request.num_preemptions,
        )

    def close(self, reason: str | None) -> None:
        """
        After the end, once it is told: nothing refers to itself, and readers of the streamer wait no longer. To be
        called within `held`; interrupts reach the streamer.
        """
        # request, job and entry hold one another: what the decoding holds goes now, not at the next collection
        self.request.payload, self.job.state = [], None
        if reason is not None and self.streamer is not None:  # else the decoding has ended it
            with contextlib.suppress(Exception), let_in(waiting=False):
                self.streamer.end()

    def _sequences(self, reason: str | None) -> tuple[list[SequenceResult], Exception | None]:
        """What it returns, and what the tokenizer raised."""
        decoding, first = self.job.decoding, len(self.prompt_ids)
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
            if self.tokenizer is not None and failure is None:
                try:
                    text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
                except Exception as caught:
                    failure = caught
            logprobs = decoding.logprobs[i] if self.record_logprobs else None
            score = None if scores is None else scores[i]
            results.append(SequenceResult(token_ids, ended or reason or "cancelled", text, logprobs, score))
        return results, failure


def new_entry(
    model: PreTrainedModel,
    tokenizer: Any,
    request_id: str,
    input_ids: Prompt,
    generation_config: Any,
    *,
    priority: int,
    logits_processor: Any,
    stopping_criteria: Any,
    streamer: Any,
    adapter: str | None,
    seed: int | None,
    return_logprobs: bool,
    cache_salt: str | None,
) -> Entry:
    """A request from the arguments of `PagedEngine.add_request`, not queued yet. Raises its errors."""
    priority, seed = as_priority(priority), as_seed(seed)
    check_streamer(streamer)
    prompt = prompt_ids(input_ids, tokenizer)
    criteria = as_list("stopping_criteria", stopping_criteria)
    generator = None if seed is None else torch.Generator(device=model.device).manual_seed(seed)
    decoding = request_decoding(
        model,
        prompt,
        as_config(generation_config),
        logits_processor=as_list("logits_processor", logits_processor),
        stopping_criteria=criteria,
        streamer=streamer,
        generator=generator,
        tokenizer=tokenizer,
        record_logprobs=return_logprobs,
    )
    check_streamed_rows(streamer, decoding.num_rows, "ask for one sequence a request")
    request = Request(
        request_id=request_id,
        sequences=[Sequence(list(prompt))],
        priority=priority,
        namespace=(adapter, cache_salt),
        adapter=adapter,
        max_num_tokens=decoding.max_length,
        num_rows=decoding.num_rows,
    )
    job = Job(decoding, [(request, index) for index in range(decoding.num_rows)])
    job.state = Entry(
        request_id=request_id,
        request=request,
        job=job,
        prompt_ids=prompt,
        added=time.perf_counter(),
        tokenizer=tokenizer,
        text=None if tokenizer is None else TextTracker(tokenizer),
        streamer=streamer,
        record_logprobs=return_logprobs,
        limits=[c for c in decoding.stopping_criteria if type(c) is MaxTimeCriteria and c not in criteria],
    )
    return job.state
