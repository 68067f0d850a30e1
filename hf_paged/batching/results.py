"""The outputs of a `PagedEngine`: the new tokens of each step, results of requests, statistics.
They are plain data, which later steps do not change. Also decodes new tokens to text."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..cache.memory_stats import BlockStats
from ..model.registry import Route


@dataclass(frozen=True)
class Timings:
    """Times of a request, in seconds since it was added; `None` for events that did not happen."""

    queued: float | None = None  # until the first step that computed it began
    first_token: float | None = None  # until its first new token
    total: float | None = None  # until it finished


@dataclass(frozen=True)
class SequenceResult:
    """One sequence of a request.

    Args:
        token_ids (`list[int]`): The new tokens, without padding; an EOS token is included.
        finish_reason (`str`): `"eos"`, `"length"`, `"stop_string"`, `"criteria"` (the caller's, or
            `max_time`), `"cancelled"` or `"error"`. If beam search finishes fewer sequences than
            requested, the missing ones have `"error"`.
        text (`str`, *optional*): The decoded new tokens; `None` if the engine has no tokenizer, if
            the tokenizer raised, or if beam search ended without a finished sequence.
        logprobs (`list[tuple[float, float]]`, *optional*): With `return_logprobs`: the
            log-probability of each new token under the model (full vocabulary, before logits
            processors: `log_softmax` of `output_logits`), and under the distribution that it was
            chosen from (`log_softmax` of `output_scores`; for beams, what it adds to the score).
        score (`float`, *optional*): The score of a beam, including the length penalty.
        top_logprobs (`list[list[tuple[int, float, float]]]`, *optional*): For each new token, the
            `top_logprobs` most probable tokens under the model, best first, each with its two
            log-probabilities as in `logprobs`.
    """

    token_ids: list[int]
    finish_reason: str
    text: str | None = None
    logprobs: list[tuple[float, float]] | None = None
    score: float | None = None
    top_logprobs: list[list[tuple[int, float, float]]] | None = None


@dataclass(frozen=True)
class RequestResult:
    """The result of a request. `token_ids`, `text`, `finish_reason` and `logprobs` are taken from
    its first sequence.

    Args:
        request_id (`str`): The request's id.
        prompt_ids (`list[int]`): The prompt's token ids; empty for a prompt without any, and for
            text or a chat in a request that could not be added.
        sequences (`list[SequenceResult]`): The `num_return_sequences` sequences, best beam first;
            empty for a request that could not be added, or whose tokens could not be read.
        error (`Exception`, *optional*): The error that ended the request early, or that the
            tokenizer raised.
        timings ([`Timings`]): Time in the queue, to the first token, and to the end.
        num_prefix_hit_tokens (`int`): Prompt tokens found in the prefix cache when the request was
            first admitted.
        num_preemptions (`int`): How often the request was preempted.
        prompt_logprobs (`list[float | None]`, *optional*): The log-probability of each prompt token
            under the model, given the tokens before it; `None` for the first token, and for tokens
            that were not computed before the request ended.
        prompt_top_logprobs (`list[list[tuple[int, float]]]`, *optional*): For the position of each
            prompt token, the `top_logprobs` most probable tokens, best first, with their
            log-probabilities; empty where `prompt_logprobs` is `None`.
        num_drafts, num_draft_tokens, num_accepted_tokens (`int`): Number of verified drafts, of
            draft tokens in them, and of accepted draft tokens.
    """

    request_id: str
    prompt_ids: list[int]
    sequences: list[SequenceResult] = field(default_factory=list)
    error: Exception | None = None
    timings: Timings = Timings()
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def _first_sequence(self) -> SequenceResult:
        return self.sequences[0] if self.sequences else SequenceResult([], "error")

    @property
    def token_ids(self) -> list[int]:
        return self._first_sequence.token_ids

    @property
    def text(self) -> str | None:
        return self._first_sequence.text

    @property
    def finish_reason(self) -> str:
        return self._first_sequence.finish_reason

    @property
    def logprobs(self) -> list[tuple[float, float]] | None:
        return self._first_sequence.logprobs


@dataclass
class RequestOutput:
    """The new token of each sequence of a request. A step that accepts draft tokens returns
    several outputs, in order.

    Args:
        request_id (`str`): The request's id.
        new_tokens (`dict[int, int]`): The new token of each sequence, by its index in the request.
            Empty for beam search, whose tokens are final only at the end, and for an output that
            only reports the result.
        text (`str`, *optional*): The text that the first sequence's new token adds, if the engine
            has a tokenizer.
        result ([`RequestResult`], *optional*): Set when the request has ended.
    """

    request_id: str
    new_tokens: dict[int, int] = field(default_factory=dict)
    text: str | None = None
    result: RequestResult | None = None

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.result is not None


@dataclass(frozen=True)
class Histogram:
    """Counts of values in buckets.

    Args:
        bounds (`tuple[float, ...]`): The inclusive upper bounds of the buckets, in ascending order.
        counts (`tuple[int, ...]`): The number of values in each bucket; the last entry is the
            number of values above all bounds. Empty before the first value.
        total (`float`): The sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...] = ()
    total: float = 0.0

    def with_value(self, value: float) -> Histogram:
        """Returns a copy with one more value."""
        counts = list(self.counts or [0] * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, value)] += 1
        return Histogram(self.bounds, tuple(counts), self.total + value)


# bounds in seconds: 1, 2 and 5 times powers of ten; the lowest bounds suit small models
FIRST_TOKEN_SECONDS = Histogram(
    (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
)
OUTPUT_TOKEN_SECONDS = Histogram(
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
)


class RequestTotals:
    """Totals over the requests of an engine that have ended, for [`EngineStats`]."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.first_token_seconds = FIRST_TOKEN_SECONDS
        self.output_token_seconds = OUTPUT_TOKEN_SECONDS

    def add(self, result: RequestResult) -> None:
        """Adds the result of a request that has ended."""
        self.counts["num_finished"] += 1
        if result.timings.queued is not None:  # it was admitted
            self.counts["num_prompt_tokens"] += len(result.prompt_ids)
            self.counts["num_prefix_hit_tokens"] += result.num_prefix_hit_tokens
        first_seconds = result.timings.first_token
        total_seconds = result.timings.total
        if first_seconds is None or total_seconds is None:
            return
        lengths = [len(sequence.token_ids) for sequence in result.sequences]
        num_later_tokens = max(lengths, default=0) - 1
        self.first_token_seconds = self.first_token_seconds.with_value(first_seconds)
        if num_later_tokens > 0:
            self.output_token_seconds = self.output_token_seconds.with_value(
                (total_seconds - first_seconds) / num_later_tokens
            )


@dataclass(frozen=True, kw_only=True)
class EngineStats(BlockStats):
    """The current state of a `PagedEngine`, and counters since the engine was made.

    Args:
        num_blocks (`int`, *optional*): `PagedConfig.num_blocks`; `None` if it is not set.
        used_blocks, shared_blocks, cached_blocks, peak_blocks (`int`): Blocks that sequences hold;
            blocks that several sequences hold; blocks that only the prefix cache holds; the maximum
            of `used_blocks` since `PagedEngine.memory` was made or `memory_stats(..., reset=True)`
            reset it.
        used_bytes, peak_bytes (`int`): Bytes of `used_blocks` and of `peak_blocks`, over all
            layers.
        budget_bytes (`int`, *optional*): As in [`MemoryStats`].
        block_sizes (`dict`): As in [`MemoryStats`].
        tier_host_bytes, tier_disk_bytes, tier_kept_blocks, tier_restored_blocks (`int`): As in
            [`MemoryStats`].
        waste_percent (`float`): Percentage of the slots of used blocks that held no token at the
            peak.
        num_running, num_waiting (`int`): Requests in the batch, and requests that wait to be
            admitted, for the first time or after a preemption.
        num_finished, num_preemptions, num_swaps (`int`): Requests that have ended, even early;
            preemptions; and swaps to host memory; since the engine was made.
        num_prompt_tokens, num_prefix_hit_tokens (`int`): Prompt tokens of the requests admitted
            since the engine was made, and how many of them were found in the prefix cache.
        num_generated_tokens, num_steps (`int`): Since the engine was made.
        num_captured_steps (`int`): Forwards replayed from a recording since the engine was made. A
            step runs several forwards if its adapters cannot share one.
        num_drafts, num_draft_tokens, num_accepted_tokens (`int`): Verified drafts, draft tokens in
            them, and accepted draft tokens (`PagedConfig.speculation`, `assistant_model`), since
            the engine was made.
        num_adapter_hits, num_adapter_loads, num_adapter_evictions (`int`): For adapters in folders,
            since the engine was made: requests whose adapter was already in the pool when they were
            first admitted, loads from files, and evictions.
        seconds (`float`): Time spent in steps.
        tokens_per_second (`float`): Generated tokens divided by `seconds`.
        first_token_seconds, output_token_seconds ([`Histogram`]): For the requests that ended since
            the engine was made: the time from arrival to the first new token, and the mean time per
            token after it, in the longest sequence.
        route ([`Route`], *optional*): How requests are served, as `PagedEngine.route`.
        kv_dtype (`str`, *optional*): The storage dtype of K/V (`PagedConfig.kv_dtype`).
    """

    num_blocks: int | None
    waste_percent: float
    num_running: int
    num_waiting: int
    num_finished: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_prompt_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_captured_steps: int = 0
    seconds: float = 0.0
    tokens_per_second: float
    first_token_seconds: Histogram
    output_token_seconds: Histogram
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_adapter_hits: int = 0
    num_adapter_loads: int = 0
    num_adapter_evictions: int = 0
    route: Route | None


def decode(tokenizer: Any, token_ids: list[int]) -> Any:
    """Returns the text of tokens, without special tokens. Raises the tokenizer's errors. A panic of
    a Rust tokenizer, which is not an `Exception`, becomes a `RuntimeError`, so that it ends one
    request instead of the thread."""
    try:
        return tokenizer.decode(token_ids, skip_special_tokens=True)
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError(f"the tokenizer cannot decode the new tokens: {error!r}") from error


# a character that still lacks some of its bytes decodes to the replacement character
_INCOMPLETE = re.compile("\N{REPLACEMENT CHARACTER}$")
# also the beginnings of " n't", " ' " and others, whose spaces `clean_up_tokenization` removes
_INCOMPLETE_OR_CLEANABLE = re.compile("(?:\N{REPLACEMENT CHARACTER}| n?|'| '[vr])$")


class TextTracker:
    """Decodes tokens incrementally, and holds back text that later tokens may still change. The
    returned pieces concatenate to the text of all tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        cleans_up = getattr(text_tokenizer, "clean_up_tokenization_spaces", False)
        self._incomplete = _INCOMPLETE_OR_CLEANABLE if cleans_up else _INCOMPLETE
        self.token_ids: list[int] = []
        # index of the first token that is decoded again, as context for later tokens
        self._context_start = 0
        self._num_returned = 0  # number of tokens whose text was returned

    def add(self, token_ids: list[int], is_last: bool = False) -> str:
        """Adds tokens, and returns the text that they complete; all remaining text if `is_last`. If
        the tokenizer raises, nothing is added."""
        token_ids = self.token_ids + token_ids
        previous_text = decode(self.tokenizer, token_ids[self._context_start : self._num_returned])
        text = decode(self.tokenizer, token_ids[self._context_start :])
        self.token_ids = token_ids
        if not is_last and (len(text) <= len(previous_text) or self._incomplete.search(text)):
            return ""
        self._context_start, self._num_returned = self._num_returned, len(self.token_ids)
        return str(text[len(previous_text) :])

    def flush(self) -> str:
        """Returns all text that is held back."""
        if self._num_returned == len(self.token_ids):
            return ""
        return self.add([], is_last=True)


MAX_PENDING_OUTPUTS = 1 << 14  # limit on outputs without a result, which take a few megabytes


def trim_pending(outputs: list[RequestOutput]) -> None:
    """Removes outputs from the list: keeps all outputs with a result, and the last
    `MAX_PENDING_OUTPUTS` of the others. The results will contain the removed tokens."""
    if len(outputs) <= MAX_PENDING_OUTPUTS:
        return
    unfinished_outputs = [output for output in outputs if not output.finished]
    dropped_ids = set(map(id, unfinished_outputs[:-MAX_PENDING_OUTPUTS]))
    outputs[:] = [output for output in outputs if id(output) not in dropped_ids]
