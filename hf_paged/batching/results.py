"""Outputs of a `PagedEngine`: new tokens of each step, results of requests, statistics. Plain data,
which is never changed by later steps."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..cache.block_sizes import Choice
from ..model.registry import Route


@dataclass(frozen=True)
class Timings:
    """Seconds since the request was added."""

    queued: float | None = None  # until the request was first in a batch
    first_token: float | None = None  # until its first new token
    total: float | None = None  # until it finished


@dataclass(frozen=True)
class SequenceResult:
    """
    One sequence of a request.

    Args:
        token_ids (`list[int]`): The new tokens, up to and including the last one.
        finish_reason (`str`): `"eos"`, `"length"`, `"stop_string"`, `"criteria"`, `"cancelled"` or
            `"error"`. Single beams get `"error"` if beam search found fewer sequences than
            requested.
        text (`str`, *optional*): The decoded new tokens, if the engine has a tokenizer (that can
            decode them).
        logprobs (`list[tuple[float, float]]`, *optional*): For each new token its log-probability
            under the model (full vocabulary, no processors: `log_softmax` of `output_logits`) and
            under the distribution it was chosen from (`log_softmax` of `output_scores`; for beams,
            the term that it adds to the beam's score).
        score (`float`, *optional*): The score of a beam, length penalty included.
        top_logprobs (`list[list[tuple[int, float, float]]]`, *optional*): For each new token the
            `top_logprobs` most probable tokens under the model, best first, each with its
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
    """The result of a request. `token_ids`, `text`, `finish_reason` and `logprobs` are those of
    its first sequence.

    Args:
        request_id (`str`): The id passed to, or returned by, `add_request`.
        prompt_ids (`list[int]`): The prompt.
        sequences (`list[SequenceResult]`): One, or `num_return_sequences`, best beam first.
        error (`Exception`, *optional*): The error that ended the request early, or that the
            tokenizer raised.
        timings ([`Timings`]): Time in the queue, to the first token, and to the end.
        num_prefix_hit_tokens (`int`): Prompt tokens found in the prefix cache when it was first
            admitted.
        num_preemptions (`int`): How often the request was preempted.
        prompt_logprobs (`list[float | None]`, *optional*): The log-probability of each prompt token
            under the model, given the tokens before it; `None` for the first, and for tokens not
            computed before the request ended.
        prompt_top_logprobs (`list[list[tuple[int, float]]]`, *optional*): At the position of each
            prompt token, the `top_logprobs` most probable tokens, best first, with their
            log-probabilities; empty where `prompt_logprobs` is `None`.
        num_drafts, num_draft_tokens, num_accepted_tokens (`int`): Number of verified drafts, of
            tokens in them, and of accepted tokens.
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
    def token_ids(self) -> list[int]:
        if not self.sequences:
            return []
        return self.sequences[0].token_ids

    @property
    def text(self) -> str | None:
        if not self.sequences:
            return None
        return self.sequences[0].text

    @property
    def finish_reason(self) -> str:
        if not self.sequences:
            return "error"
        return self.sequences[0].finish_reason

    @property
    def logprobs(self) -> list[tuple[float, float]] | None:
        if not self.sequences:
            return None
        return self.sequences[0].logprobs


@dataclass
class RequestOutput:
    """New tokens of one request from one step. A step that accepts a draft returns several
    outputs, in order.

    Args:
        request_id (`str`): The request's id.
        new_tokens (`dict[int, int]`): The new token of each sequence, by its index in the request.
            Empty for beam search, whose tokens are final only at the end.
        text (`str`, *optional*): The text that the first sequence's new tokens add, if the engine
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
    """
    Counts of values by upper limit.

    Args:
        bounds (`tuple[float, ...]`): Upper limits (inclusive), in rising order.
        counts (`tuple[int, ...]`): For each limit, the number of values up to it and above the
            previous one; last, the number above all limits.
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


# in seconds: 1, 2, 5 times powers of ten, as in Prometheus' own metrics; from the times of small
# models to minutes
FIRST_TOKEN_SECONDS = Histogram(
    (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
)
OUTPUT_TOKEN_SECONDS = Histogram(
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
)


class RequestTotals:
    """Totals over the requests of an engine, for [`EngineStats`]."""

    def __init__(self) -> None:
        # finished requests; tokens of all prompts; of finished requests, tokens found in the prefix
        # cache
        self.counts = Counter(num_finished=0, num_prompt_tokens=0, num_prefix_hit_tokens=0)
        self.first_token_seconds = FIRST_TOKEN_SECONDS
        self.output_token_seconds = OUTPUT_TOKEN_SECONDS

    def add(self, result: RequestResult) -> None:
        """Adds a request that has ended."""
        self.counts["num_finished"] += 1
        self.counts["num_prefix_hit_tokens"] += result.num_prefix_hit_tokens
        first = result.timings.first_token
        last = result.timings.total
        if first is None or last is None:
            return
        lengths = [len(sequence.token_ids) for sequence in result.sequences]
        num_later = max(lengths, default=0) - 1
        self.first_token_seconds = self.first_token_seconds.with_value(first)
        if num_later > 0:
            self.output_token_seconds = self.output_token_seconds.with_value(
                (last - first) / num_later
            )


@dataclass(frozen=True)
class EngineStats:
    """
    The current state of a `PagedEngine`, and counters since it was made.

    Args:
        num_blocks (`int`, *optional*): Blocks that may be in use at once; `None`: no limit was set.
        used_blocks, shared_blocks, cached_blocks, peak_blocks (`int`): Blocks held by a sequence;
            by more than one; kept for the prefix cache; the most held at once since
            `PagedEngine.memory` was made.
        used_bytes, peak_bytes (`int`): Bytes of the used blocks, and of the peak, over all layers.
        budget_bytes (`int`, *optional*): As in [`MemoryStats`].
        tier_host_bytes, tier_disk_bytes, tier_kept_blocks, tier_restored_blocks (`int`): As in
            [`MemoryStats`].
        block_sizes (`dict`): As in [`MemoryStats`].
        waste_percent (`float`): Share of allocated slots that were unused at the peak.
        num_running, num_waiting (`int`): Requests in the batch, and waiting for room.
        num_finished, num_preemptions, num_swaps (`int`): Since the engine was made.
        num_prompt_tokens, num_prefix_hit_tokens, num_generated_tokens, num_steps (`int`): Since the
            engine was made.
        num_captured_steps (`int`): Forwards replayed from a graph; a step with adapters that cannot
            share a forward has several forwards.
        num_drafts, num_draft_tokens, num_accepted_tokens (`int`): Verified drafts, tokens in them,
            and accepted tokens (`PagedConfig.speculation`, `assistant_model`), since the engine was
            made.
        num_adapter_hits, num_adapter_loads, num_adapter_evictions (`int`): For adapters in folders,
            since the engine was made: requests first admitted while the pool already held their
            adapter, loads from files, and evictions.
        seconds (`float`): Time spent in steps.
        tokens_per_second (`float`): Generated tokens over `seconds`.
        first_token_seconds, output_token_seconds ([`Histogram`]): For the requests that ended since
            the engine was made: time from arrival to the first new token; mean time of each later
            token, over a request's longest sequence.
        route ([`Route`], *optional*): How requests are served, as `PagedEngine.route`.
        kv_dtype (`str`, *optional*): The storage dtype of K/V (`PagedConfig.kv_dtype`).
    """

    num_blocks: int | None
    used_blocks: int
    shared_blocks: int
    cached_blocks: int
    peak_blocks: int
    used_bytes: int
    peak_bytes: int
    waste_percent: float
    num_running: int
    num_waiting: int
    num_finished: int
    num_preemptions: int
    num_swaps: int
    num_prompt_tokens: int
    num_prefix_hit_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_captured_steps: int
    seconds: float
    tokens_per_second: float
    first_token_seconds: Histogram = FIRST_TOKEN_SECONDS
    output_token_seconds: Histogram = OUTPUT_TOKEN_SECONDS
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_adapter_hits: int = 0
    num_adapter_loads: int = 0
    num_adapter_evictions: int = 0
    route: Route | None = None
    kv_dtype: str | None = None
    budget_bytes: int | None = None
    tier_host_bytes: int = 0
    tier_disk_bytes: int = 0
    tier_kept_blocks: int = 0
    tier_restored_blocks: int = 0
    block_sizes: dict[str, Choice] = field(default_factory=dict)


def decode(tokenizer: Any, token_ids: list[int]) -> Any:
    """Decodes tokens. A panic of a tokenizer in Rust, which is no `Exception`, becomes a
    `RuntimeError`, so that it ends one request and no thread."""
    try:
        return tokenizer.decode(token_ids, skip_special_tokens=True)
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:
        raise RuntimeError(f"the tokenizer cannot decode the new tokens: {panic!r}") from panic


# a part of a character decodes to the replacement character until its other bytes follow
_HALF = re.compile("\N{REPLACEMENT CHARACTER}$")
# text that `clean_up_tokenization`, which attaches " .", " n't" and " ' " to the word before, may
# still change: a space, and the beginning of a pattern
_UNCLEAN = re.compile("(?:\N{REPLACEMENT CHARACTER}| n?|'| '[vr])$")


class TextTracker:
    """Turns tokens into text piece by piece, holding back text that later tokens may still change.
    The pieces make up the text of all tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        cleans_up = getattr(text_tokenizer, "clean_up_tokenization_spaces", False)
        self._open = _UNCLEAN if cleans_up else _HALF
        self.token_ids: list[int] = []
        # index of the first token that is decoded, for context; number of tokens already returned
        self._start = self._shown = 0

    def add(self, token_ids: list[int], last: bool = False) -> str:
        """Returns the text that `token_ids` add. If the tokenizer raises, nothing is added."""
        token_ids = self.token_ids + token_ids
        previous_text = decode(self.tokenizer, token_ids[self._start : self._shown])
        text = decode(self.tokenizer, token_ids[self._start :])
        self.token_ids = token_ids
        if not last and (len(text) <= len(previous_text) or self._open.search(text)):
            return ""
        self._start, self._shown = self._shown, len(self.token_ids)
        return str(text[len(previous_text) :])

    def rest(self) -> str:
        """Returns the text held back so far."""
        if self._shown == len(self.token_ids):
            return ""
        return self.add([], last=True)
