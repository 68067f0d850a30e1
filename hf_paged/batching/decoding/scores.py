"""Operations on `(rows, vocab)` scores: batched calls of transformers' logits processors, argmax, draws, logprobs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as known

from ...kernels import cpp
from ...step import to_device

_PENALTY = known.RepetitionPenaltyLogitsProcessor
CHUNK = 128  # tokens of the vocabulary per partial maximum or sum

# Processors that read only the scores, with the name of the number that may differ between rows of one call.
_SEQUENCE_FREE: dict[type, str | None] = {
    known.TemperatureLogitsWarper: "temperature",
    known.TopKLogitsWarper: "top_k",
    known.TopPLogitsWarper: "top_p",
    known.MinPLogitsWarper: "min_p",
    known.TopHLogitsWarper: None,
    known.TypicalLogitsWarper: None,
    known.EpsilonLogitsWarper: None,
    known.EtaLogitsWarper: None,
    known.SuppressTokensLogitsProcessor: None,
    known.InfNanRemoveLogitsProcessor: None,
    known.LogitNormalization: None,
}

# Processors that read only the scores and the length, and change nothing unless the predicate of (self, length) holds.
_LENGTH_BOUND: dict[type, Callable[[Any, int], bool]] = {
    known.MinLengthLogitsProcessor: lambda p, length: length < p.min_length,
    known.MinNewTokensLengthLogitsProcessor: lambda p, length: length < p.prompt_length_to_skip + p.min_new_tokens,
    known.ForcedBOSTokenLogitsProcessor: lambda p, length: length == 1,
    known.ForcedEOSTokenLogitsProcessor: lambda p, length: length == p.max_length - 1,
    known.ExponentialDecayLengthPenalty: lambda p, length: length > p.regulation_start,
    known.SuppressTokensAtBeginLogitsProcessor: lambda p, length: length == p.begin_index,
}

_LEAST_LENGTHS = (known.MinLengthLogitsProcessor, known.MinNewTokensLengthLogitsProcessor)

# Processors that compute each row from that row alone; some hold a value for each row of the call (`for_rows`).
_ROW_WISE = {
    *_SEQUENCE_FREE,
    *_LENGTH_BOUND,
    _PENALTY,
    known.NoRepeatNGramLogitsProcessor,
    known.SequenceBiasLogitsProcessor,
    known.NoBadWordsLogitsProcessor,
    known.EncoderRepetitionPenaltyLogitsProcessor,
    known.EncoderNoRepeatNGramLogitsProcessor,
    known.WatermarkLogitsProcessor,
}


def are_row_wise(processors: LogitsProcessorList, num_rows: int) -> bool:
    """Whether each row's scores depend on that row alone, and no caller's code sees the `num_rows` rows."""
    kind = known.EncoderRepetitionPenaltyLogitsProcessor
    # with fewer prompts than rows, transformers' versions differ in which rows of a prompt it affects
    is_known = all(len(p.encoder_input_ids) == num_rows for p in processors if type(p) is kind)
    return is_known and type(processors) is LogitsProcessorList and all(type(p) in _ROW_WISE for p in processors)


def leaves_rows_alone(processor: Any) -> bool:
    """Whether the processor may run on tokens that are only drafted: it holds no state, and forces no token."""
    return type(processor) in _ROW_WISE and (type(processor) not in _LENGTH_BOUND or type(processor) in _LEAST_LENGTHS)


def for_rows(processors: LogitsProcessorList, rows: Sequence[int], num_rows: int) -> LogitsProcessorList:
    """Narrows the row-wise processors of a call over `num_rows` rows to a batch of `rows`."""
    narrowed = LogitsProcessorList()
    for processor in processors:
        own = copy.copy(processor)
        if type(processor) is known.EncoderRepetitionPenaltyLogitsProcessor:
            own.encoder_input_ids = processor.encoder_input_ids[list(rows)]
        elif type(processor) is known.EncoderNoRepeatNGramLogitsProcessor:
            ngrams, prompts = processor.generated_ngrams, processor.batch_size
            own.generated_ngrams = [ngrams[row * prompts // num_rows] for row in rows]
            own.batch_size = len(rows)
        elif isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
            own.prompt_ignore_length = processor.prompt_ignore_length[list(rows)]
        else:
            own = processor
        narrowed.append(own)
    return narrowed


def _constants(processor: Any) -> tuple[Any, ...]:
    """Returns the attributes that must be equal for two processors of one type to share a call."""
    varies = _SEQUENCE_FREE.get(type(processor))
    values = (value for name, value in sorted(vars(processor).items()) if name != varies)
    return tuple(tuple(v.flatten().tolist()) if isinstance(v, Tensor) else v for v in values)


class BatchableProcessors:
    """Processors of a one-row decoding that share calls with those of decodings of equal `key`. These differ at most in
    their `seen` tokens and in the numbers that `together` takes per row. `bound`: processors in `_LENGTH_BOUND`."""

    def __init__(self, processors: LogitsProcessorList, input_ids: Tensor):
        self.processors = [p for p in processors if type(p) not in _LENGTH_BOUND]
        self.bound = [(_LENGTH_BOUND[type(p)], p) for p in processors if type(p) in _LENGTH_BOUND]
        self.key = tuple((type(p), *(() if type(p) is _PENALTY else _constants(p))) for p in self.processors)
        ignored = next((int(p.prompt_ignore_length or 0) for p in self.processors if type(p) is _PENALTY), None)
        self.unseen: list[int] = [] if ignored is None else input_ids[0, ignored:].tolist()  # to be added to `seen`
        self.seen: Tensor | None = None  # (1, vocab) bool: tokens to which the repetition penalty applies

    @classmethod
    def of(cls, processors: LogitsProcessorList, input_ids: Tensor) -> BatchableProcessors | None:
        """Makes them for a row of `(1, length)` ids. `None` if a processor depends on the order of tokens or is a
        caller's."""
        batchable = sum(type(p) in _SEQUENCE_FREE or type(p) in _LENGTH_BOUND for p in processors)
        batchable += any(type(p) is _PENALTY for p in processors)  # at most one
        is_plain = type(processors) is LogitsProcessorList
        return cls(processors, input_ids) if is_plain and batchable == len(processors) else None


def _seen_by(members: Sequence[BatchableProcessors], vocab: int, device: torch.device) -> Tensor:
    """Returns the members' `seen`, updated, as `(members, vocab)` bool. Afterwards these rows are adjacent in one
    tensor, so that the next step with the same members copies none and writes all new tokens at once."""
    for member in members:
        if member.seen is None:
            member.seen = torch.zeros((1, vocab), dtype=torch.bool, device=device)
    seen = stack_rows([member.seen for member in members if member.seen is not None])
    for row, member in enumerate(members):
        member.seen = seen[row : row + 1]
    new = [(row, token) for row, member in enumerate(members) for token in member.unseen if token < vocab]
    if new:
        rows, tokens = to_device(torch.tensor(new, device="cpu").t().contiguous(), device)
        seen[rows, tokens] = True
    for member in members:
        member.unseen = []
    return seen


def stack_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates `(1, vocab)` parts to `(n, vocab)`; a view if they are adjacent in one tensor."""
    first = parts[0]
    if len(parts) == 1:
        return first
    start, size = first.data_ptr(), first.nbytes
    room = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size()
    if room >= len(parts) * size and first.is_contiguous():
        if all(part.data_ptr() == start + i * size for i, part in enumerate(parts)):
            return first.as_strided((len(parts), first.shape[1]), (first.shape[1], 1))
    return torch.cat(list(parts))


def together(scores: Tensor, members: Sequence[BatchableProcessors]) -> Tensor:
    """Applies each row's processors to `(rows, vocab)` float32 scores. All members have the same key."""
    for stage in zip(*(member.processors for member in members)):
        first: Any = stage[0]
        name = _SEQUENCE_FREE.get(type(first))
        values = [getattr(processor, name) for processor in stage] if name else []
        if type(first) is _PENALTY:
            seen = _seen_by(members, scores.shape[1], scores.device)
            penalty = _column([p.penalty for p in stage], scores)
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        elif name is None or values.count(values[0]) == len(values):
            scores = first(None, scores)
        elif name == "top_k":
            sizes = _column([min(value, scores.shape[1]) for value in values], scores)
            best = torch.topk(scores, min(max(values), scores.shape[1]))[0]
            scores = scores.masked_fill(scores < best.gather(1, sizes - 1), first.filter_value)
        else:  # transformers' formula broadcasts a `(rows, 1)` column
            column = _column(values, scores, torch.double)
            # rounds to float32 where transformers does: `1 - top_p`, and the other numbers themselves
            column = 1 - (1 - column).float().double() if name == "top_p" else column.float()
            shared = copy.copy(first)
            setattr(shared, name, column)
            scores = shared(None, scores)
    return scores


def _column(values: list[Any], scores: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns `values` as a `(len(values), 1)` tensor on the device of `scores`."""
    return to_device(torch.tensor(values, dtype=dtype, device="cpu"), scores.device)[:, None]


def argmax(scores: Tensor) -> Tensor:
    """`argmax(dim=-1)`, first of equals. On the CPU torch finds a maximum ten times faster than its index."""
    rows, vocab = scores.shape
    if scores.device.type != "cpu" or vocab < 8 * CHUNK:
        return scores.argmax(dim=-1)
    if vocab % CHUNK:
        scores = torch.nn.functional.pad(scores, (0, -vocab % CHUNK), value=float("-inf"))
    chunks = scores.unflatten(1, (-1, CHUNK))  # [rows, chunks, CHUNK]
    first = chunks.amax(dim=-1).argmax(dim=-1)  # [rows]
    return first * CHUNK + chunks[torch.arange(rows, device="cpu"), first].argmax(dim=-1)


def draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws as `torch.multinomial(probs, 1, generator=generator).squeeze(1)` for `(rows, vocab)` probabilities: same
    tokens, same generator state afterwards. On a device without a sync, and with arbitrary tokens for rows that torch
    rejects."""
    if probs.is_cpu or not _races(probs.device):
        return cpp.multinomial(probs, generator)
    return race(probs, generator)


def race(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws a token for each row: the smallest of independent exponential variables with these rates, as
    `multinomial`."""
    return probs.div(torch.empty_like(probs).exponential_(1, generator=generator)).argmax(dim=-1)


@functools.cache
def _races(device: torch.device) -> bool:
    """Whether `race` draws the same tokens as this torch build's `multinomial` on `device`; torch does not document its
    algorithm."""
    first, second = (torch.Generator(device).manual_seed(0) for _ in range(2))
    for rows, vocab in ((1, 777), (5, 32000)):
        probs = torch.randn((rows, vocab), generator=second.clone_state(), device=device).mul_(3).softmax(dim=-1)
        drawn = torch.multinomial(probs, num_samples=1, generator=first).squeeze(1)
        if not torch.equal(race(probs, second), drawn) or not torch.equal(first.get_state(), second.get_state()):
            return False
    return True


def invert(probs: Tensor) -> Tensor:
    """Draws an index for each row of `(rows, vocab)` probabilities: first a chunk of the vocabulary, then an index in
    it."""
    probs = torch.nn.functional.pad(probs, (0, -probs.shape[1] % CHUNK))
    chunks = probs.unflatten(1, (-1, CHUNK))  # [rows, chunks, CHUNK]
    first = _invert_cumulated(chunks.sum(dim=-1).double().cumsum(dim=-1))  # [rows]
    inner = chunks[torch.arange(len(first), device=first.device), first]  # [rows, CHUNK]
    return first * CHUNK + _invert_cumulated(inner.double().cumsum(dim=-1))


def _invert_cumulated(mass: Tensor) -> Tensor:
    level = torch.rand((len(mass), 1), dtype=torch.double, device=mass.device) * mass[:, -1:]
    # the first index whose cumulated mass exceeds the level: never one with probability zero
    return torch.searchsorted(mass, level, right=True).squeeze(1).clamp(max=mass.shape[1] - 1)


def values_at(scores: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """`scores[rows, tokens]`; minus infinity for tokens past the last column, which a processor may have added."""
    last = scores.shape[1] - 1
    return scores[rows, tokens.clamp(max=last)].masked_fill(tokens > last, float("-inf"))


def logprobs_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """Returns log-probabilities `(rows,)` of one token a row under `(rows, vocab)` scores."""
    rows = torch.arange(len(scores), device=scores.device)
    return values_at(scores, rows, tokens.to(scores.device)) - scores.logsumexp(dim=-1)


def pick(values: Tensor, rows: list[int]) -> Tensor:
    """`values[rows]` for rising `rows`; the tensor itself if these are all rows."""
    if len(rows) == len(values):
        return values
    return values[to_device(torch.tensor(rows, dtype=torch.long, device="cpu"), values.device)]


def alternatives(raw: Tensor, scores: Tensor, count: int) -> list[Tensor]:
    """Returns the `count` best tokens of each row of `(rows, vocab)` logits: `(rows, count)` ids, and their
    log-probabilities under the logits and under the processed scores."""
    best, ids = raw.topk(min(count, raw.shape[1]), dim=-1)
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    processed = values_at(scores, rows, ids) - scores.logsumexp(dim=-1, keepdim=True)
    return [ids, best - raw.logsumexp(dim=-1, keepdim=True), processed]


class PromptLogprobs:
    """Records log-probabilities of a prompt's tokens (except the first) chunk by chunk; recomputation overwrites."""

    MAX_ROWS = 256  # rows of logits converted to float32 at once

    def __init__(self, token_ids: Sequence[int], num_top: int) -> None:
        self.token_ids, self.num_top = token_ids, num_top
        self.values: list[float | None] = [None] * len(token_ids)
        self.top: list[list[tuple[int, float]]] = [[] for _ in token_ids]

    def num_wanted(self, start: int, end: int) -> int:
        """Returns how many of the computed tokens `start` to `end` are followed by another prompt token."""
        return max(0, min(end, len(self.token_ids) - 1) - start)

    def record(self, start: int, logits: Tensor) -> None:
        """Records from the `(n, vocab)` logits, in the model's dtype, of the tokens from `start` on."""
        for part in logits.split(self.MAX_ROWS):
            behind = slice(start + 1, start + 1 + len(part))
            part = part.float()
            self.values[behind] = logprobs_of(part, torch.tensor(self.token_ids[behind], device=part.device)).tolist()
            if self.num_top:
                ids, best, _ = (values.tolist() for values in alternatives(part, part, self.num_top))
                self.top[behind] = [list(zip(*pair)) for pair in zip(ids, best)]
            start += len(part)
