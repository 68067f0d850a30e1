"""Operations on `(rows, vocab)` scores: batched calls of transformers' logits processors, argmax,
draws, logprobs."""

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
from ...step import ids_to_device, to_device

_PENALTY = known.RepetitionPenaltyLogitsProcessor
CHUNK = 128  # tokens of the vocabulary per partial maximum or sum

# Processors that read only the scores, with the name of the number that may differ between rows of
# one call.
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

# Processors that read only the scores and the length, and change nothing unless the predicate of
# (self, length) holds.
_LENGTH_BOUND: dict[type, Callable[[Any, int], bool]] = {
    known.MinLengthLogitsProcessor: lambda p, length: length < p.min_length,
    known.MinNewTokensLengthLogitsProcessor: lambda p, length: (
        length < p.prompt_length_to_skip + p.min_new_tokens
    ),
    known.ForcedBOSTokenLogitsProcessor: lambda p, length: length == 1,
    known.ForcedEOSTokenLogitsProcessor: lambda p, length: length == p.max_length - 1,
    known.ExponentialDecayLengthPenalty: lambda p, length: length > p.regulation_start,
    known.SuppressTokensAtBeginLogitsProcessor: lambda p, length: length == p.begin_index,
}

_LEAST_LENGTHS = (known.MinLengthLogitsProcessor, known.MinNewTokensLengthLogitsProcessor)

# Processors that compute each row from that row alone; some hold a value for each row of the call
# (`for_rows`).
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
    """Whether each row's scores depend on that row alone, and no caller's code sees the `num_rows`
    rows."""
    kind = known.EncoderRepetitionPenaltyLogitsProcessor
    # with fewer prompts than rows, transformers' versions differ in which rows of a prompt it
    # affects
    for processor in processors:
        if type(processor) is kind and len(processor.encoder_input_ids) != num_rows:
            return False
    if type(processors) is not LogitsProcessorList:
        return False
    return all(type(processor) in _ROW_WISE for processor in processors)


def leaves_rows_alone(processor: Any) -> bool:
    """Whether the processor may run on tokens that are only drafted: it holds no state, and forces
    no token."""
    kind = type(processor)
    if kind not in _ROW_WISE:
        return False
    return kind not in _LENGTH_BOUND or kind in _LEAST_LENGTHS


def for_rows(
    processors: LogitsProcessorList,
    rows: Sequence[int],
    num_rows: int,
) -> LogitsProcessorList:
    """Narrows the row-wise processors of a call over `num_rows` rows to a batch of `rows`."""
    narrowed = LogitsProcessorList()
    for processor in processors:
        kind = type(processor)
        narrow = copy.copy(processor)
        if kind is known.EncoderRepetitionPenaltyLogitsProcessor:
            prompt_ids = processor.encoder_input_ids
            narrow.encoder_input_ids = prompt_ids[list(rows)]
        elif kind is known.EncoderNoRepeatNGramLogitsProcessor:
            ngrams = processor.generated_ngrams
            num_prompts = processor.batch_size
            prompts = [row * num_prompts // num_rows for row in rows]
            narrow.generated_ngrams = [ngrams[prompt] for prompt in prompts]
            narrow.batch_size = len(rows)
        elif isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
            lengths = processor.prompt_ignore_length
            narrow.prompt_ignore_length = lengths[list(rows)]
        else:
            narrow = processor
        narrowed.append(narrow)
    return narrowed


def _constants(processor: Any) -> tuple[Any, ...]:
    """Returns the attributes that must be equal for two processors of one type to share a call."""
    varies = _SEQUENCE_FREE.get(type(processor))
    constants: list[Any] = []
    for name, value in sorted(vars(processor).items()):
        if name == varies:
            continue
        if isinstance(value, Tensor):
            value = tuple(value.flatten().tolist())
        constants.append(value)
    return tuple(constants)


class BatchableProcessors:
    """Processors of a one-row decoding that share calls with those of decodings of equal `key`.
    These differ at most in their `seen` tokens and in the numbers that `together` takes per row.
    `bound`: processors in `_LENGTH_BOUND`."""

    def __init__(self, processors: LogitsProcessorList, input_ids: Tensor):
        self.processors: list[Any] = []
        self.bound: list[tuple[Callable[[Any, int], bool], Any]] = []
        for processor in processors:
            acts = _LENGTH_BOUND.get(type(processor))
            if acts is None:
                self.processors.append(processor)
            else:
                self.bound.append((acts, processor))
        key: list[tuple[Any, ...]] = []
        # whether a processor reads the tokens, so that new ones are noted in `unseen`
        self.reads_tokens = any(type(processor) is _PENALTY for processor in self.processors)
        # to be added to `seen`
        self.unseen: list[int] = []
        for processor in self.processors:
            kind = type(processor)
            if kind is _PENALTY:
                key.append((kind,))
                ignored = int(processor.prompt_ignore_length or 0)
                self.unseen = input_ids[0, ignored:].tolist()
            else:
                key.append((kind, *_constants(processor)))
        self.key = tuple(key)
        # (1, vocab) bool: tokens to which the repetition penalty applies
        self.seen: Tensor | None = None

    @classmethod
    def of(cls, processors: LogitsProcessorList, input_ids: Tensor) -> BatchableProcessors | None:
        """Makes them for a row of `(1, length)` ids. `None` if a processor depends on the order of
        tokens or is a caller's."""
        kinds = [type(processor) for processor in processors]
        batchable = sum(kind in _SEQUENCE_FREE or kind in _LENGTH_BOUND for kind in kinds)
        batchable += _PENALTY in kinds  # at most one
        is_plain = type(processors) is LogitsProcessorList
        if not is_plain or batchable != len(processors):
            return None
        return cls(processors, input_ids)


def _seen_by(members: Sequence[BatchableProcessors], vocab: int, device: torch.device) -> Tensor:
    """Returns the members' `seen`, updated, as `(members, vocab)` bool. Afterwards these rows are
    adjacent in one tensor, so that the next step with the same members copies none and writes all
    new tokens at once."""
    for member in members:
        if member.seen is None:
            member.seen = torch.zeros((1, vocab), dtype=torch.bool, device=device)
    seen_rows = [member.seen for member in members if member.seen is not None]
    seen = stack_rows(seen_rows)
    for row, member in enumerate(members):
        member.seen = seen[row : row + 1]
    new = [
        (row, token)
        for row, member in enumerate(members)
        for token in member.unseen
        if token < vocab
    ]
    if new:
        rows, tokens = ids_to_device(new, device).t()
        seen[rows, tokens] = True
    for member in members:
        member.unseen = []
    return seen


def stack_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates `(1, vocab)` parts to `(n, vocab)`; a view if they are adjacent in one
    tensor."""
    first = parts[0]
    num_rows = len(parts)
    if num_rows == 1:
        return first
    start = first.data_ptr()
    size = first.nbytes
    offset = first.storage_offset() * first.element_size()
    room = first.untyped_storage().nbytes() - offset
    if room >= num_rows * size and first.is_contiguous():
        pointers = [part.data_ptr() for part in parts]
        if pointers == list(range(start, start + num_rows * size, size)):
            vocab = first.shape[1]
            return first.as_strided((num_rows, vocab), (vocab, 1))
    return torch.cat(list(parts))


def together(scores: Tensor, members: Sequence[BatchableProcessors]) -> Tensor:
    """Applies each row's processors to `(rows, vocab)` float32 scores. All members have the same
    key."""
    for stage in zip(*(member.processors for member in members)):
        first: Any = stage[0]
        kind = type(first)
        name = _SEQUENCE_FREE.get(kind)
        values: list[Any] = []
        if name:
            values = [getattr(processor, name) for processor in stage]
        if kind is _PENALTY:
            vocab = scores.shape[1]
            seen = _seen_by(members, vocab, scores.device)
            penalties = [processor.penalty for processor in stage]
            penalty = _column(penalties, scores)
            lowered = torch.where(scores < 0, scores * penalty, scores / penalty)
            scores = torch.where(seen, lowered, scores)
        elif name is None or values.count(values[0]) == len(values):
            scores = first(None, scores)
        elif name == "top_k":
            vocab = scores.shape[1]
            counts = [min(value, vocab) for value in values]
            sizes = _column(counts, scores)
            best, _ = torch.topk(scores, max(counts))
            least = best.gather(1, sizes - 1)
            scores = scores.masked_fill(scores < least, first.filter_value)
        else:  # transformers' formula broadcasts a `(rows, 1)` column
            column = _column(values, scores, torch.double)
            # rounds to float32 where transformers does: `1 - top_p`, and the other numbers
            # themselves
            if name == "top_p":
                column = 1 - (1 - column).float().double()
            else:
                column = column.float()
            shared = copy.copy(first)
            setattr(shared, name, column)
            scores = shared(None, scores)
    return scores


def _column(
    values: list[Any],
    scores: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns `values` as a `(len(values), 1)` tensor on the device of `scores`."""
    row = torch.tensor(values, dtype=dtype, device="cpu")
    return to_device(row, scores.device)[:, None]


def argmax(scores: Tensor) -> Tensor:
    """`argmax(dim=-1)`, first of equals. On the CPU torch finds a maximum ten times faster than its
    index, and in half precision `max` finds that twice as fast as `argmax`."""
    rows, vocab = scores.shape
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    if vocab < 8 * CHUNK:
        return scores.max(dim=-1).indices
    if vocab % CHUNK:
        padding = (0, -vocab % CHUNK)
        scores = torch.nn.functional.pad(scores, padding, value=float("-inf"))
    chunks = scores.unflatten(1, (-1, CHUNK))  # [rows, chunks, CHUNK]
    maxima = chunks.amax(dim=-1)
    first = maxima.max(dim=-1).indices  # [rows]
    indices = torch.arange(rows, device="cpu")
    inner = chunks[indices, first]  # [rows, CHUNK]
    return first * CHUNK + inner.max(dim=-1).indices


def draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws as `torch.multinomial(probs, 1, generator=generator).squeeze(1)` for `(rows, vocab)`
    probabilities: same tokens, same generator state afterwards. On a device without a sync, and
    with arbitrary tokens for rows that torch rejects."""
    if probs.is_cpu or not _races(probs.device):
        return cpp.multinomial(probs, generator)
    return race(probs, generator)


def race(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws a token for each row: the smallest of independent exponential variables with these
    rates, as `multinomial`."""
    times = torch.empty_like(probs).exponential_(1, generator=generator)
    return probs.div(times).argmax(dim=-1)


@functools.cache
def _races(device: torch.device) -> bool:
    """Whether `race` draws the same tokens as this torch build's `multinomial` on `device`; torch
    does not document its algorithm."""
    first = torch.Generator(device).manual_seed(0)
    second = torch.Generator(device).manual_seed(0)
    for shape in ((1, 777), (5, 32000)):
        logits = torch.randn(shape, generator=second.clone_state(), device=device)
        probs = logits.mul_(3).softmax(dim=-1)
        drawn = torch.multinomial(probs, num_samples=1, generator=first)
        raced = race(probs, second)
        if not torch.equal(raced, drawn.squeeze(1)):
            return False
        state = first.get_state()
        if not torch.equal(state, second.get_state()):
            return False
    return True


def invert(probs: Tensor) -> Tensor:
    """Draws an index for each row of `(rows, vocab)` probabilities: first a chunk of the
    vocabulary, then an index in it."""
    missing = -probs.shape[1] % CHUNK
    probs = torch.nn.functional.pad(probs, (0, missing))
    chunks = probs.unflatten(1, (-1, CHUNK))  # [rows, chunks, CHUNK]
    sums = chunks.sum(dim=-1).double()
    chunk_mass = sums.cumsum(dim=-1)
    first = _invert_cumulated(chunk_mass)  # [rows]
    rows = torch.arange(len(first), device=first.device)
    inner = chunks[rows, first]  # [rows, CHUNK]
    mass = inner.double().cumsum(dim=-1)
    return first * CHUNK + _invert_cumulated(mass)


def _invert_cumulated(mass: Tensor) -> Tensor:
    rows, width = mass.shape
    share = torch.rand((rows, 1), dtype=torch.double, device=mass.device)
    level = share * mass[:, -1:]
    # the first index whose cumulated mass exceeds the level: never one with probability zero
    index = torch.searchsorted(mass, level, right=True)
    return index.squeeze(1).clamp(max=width - 1)


def values_at(scores: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """`scores[rows, tokens]`; minus infinity for tokens past the last column, which a processor may
    have added."""
    last = scores.shape[1] - 1
    values = scores[rows, tokens.clamp(max=last)]
    return values.masked_fill(tokens > last, float("-inf"))


def logprobs_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """Returns log-probabilities `(rows,)` of one token a row under `(rows, vocab)` scores."""
    rows = torch.arange(len(scores), device=scores.device)
    chosen = values_at(scores, rows, tokens.to(scores.device))
    return chosen - scores.logsumexp(dim=-1)


def pick(values: Tensor, rows: list[int]) -> Tensor:
    """`values[rows]` for rising `rows`; the tensor itself if these are all rows."""
    if len(rows) == len(values):
        return values
    return values[ids_to_device(rows, values.device)]


def alternatives(raw: Tensor, scores: Tensor, count: int) -> list[Tensor]:
    """Returns the `count` best tokens of each row of `(rows, vocab)` logits: `(rows, count)` ids,
    and their log-probabilities under the logits and under the processed scores."""
    most = min(count, raw.shape[1])
    best, ids = raw.topk(most, dim=-1)
    rows = torch.arange(len(ids), device=ids.device)
    best_scores = values_at(scores, rows[:, None], ids)
    processed = best_scores - scores.logsumexp(dim=-1, keepdim=True)
    unprocessed = best - raw.logsumexp(dim=-1, keepdim=True)
    return [ids, unprocessed, processed]


class PromptLogprobs:
    """Records log-probabilities of a prompt's tokens (except the first) chunk by chunk;
    recomputation overwrites."""

    MAX_ROWS = 256  # rows of logits converted to float32 at once

    def __init__(self, token_ids: Sequence[int], num_top: int) -> None:
        self.token_ids = token_ids
        self.num_top = num_top
        self.values: list[float | None] = [None] * len(token_ids)
        self.top: list[list[tuple[int, float]]] = [[] for _ in token_ids]

    def num_wanted(self, start: int, end: int) -> int:
        """Returns how many of the computed tokens `start` to `end` are followed by another prompt
        token."""
        last = min(end, len(self.token_ids) - 1)
        return max(0, last - start)

    def record(self, start: int, logits: Tensor) -> None:
        """Records from the `(n, vocab)` logits, in the model's dtype, of the tokens from `start`
        on."""
        for part in logits.split(self.MAX_ROWS):
            behind = slice(start + 1, start + 1 + len(part))
            part = part.float()
            following = self.token_ids[behind]
            tokens = torch.tensor(following, device=part.device)
            self.values[behind] = logprobs_of(part, tokens).tolist()
            if self.num_top:
                top = alternatives(part, part, self.num_top)
                ids, best, _ = (values.tolist() for values in top)
                pairs = zip(ids, best)
                self.top[behind] = [list(zip(*pair)) for pair in pairs]
            start += len(part)
