"""Operations on `(rows, vocab)` scores: batched calls of transformers' logits processors, argmax,
draws, log-probabilities. They know scores and token ids, not requests."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from ...kernels import cpp
from ...step import numbers_on

_PENALTY = stock.RepetitionPenaltyLogitsProcessor
CHUNK = 128  # tokens of the vocabulary per partial maximum or sum

# Processors that read only the scores, each with the attribute (a number) that may differ between
# the rows of one call.
_SEQUENCE_FREE: dict[type, str | None] = {
    stock.TemperatureLogitsWarper: "temperature",
    stock.TopKLogitsWarper: "top_k",
    stock.TopPLogitsWarper: "top_p",
    stock.MinPLogitsWarper: "min_p",
    stock.TopHLogitsWarper: None,
    stock.TypicalLogitsWarper: None,
    stock.EpsilonLogitsWarper: None,
    stock.EtaLogitsWarper: None,
    stock.SuppressTokensLogitsProcessor: None,
    stock.InfNanRemoveLogitsProcessor: None,
    stock.LogitNormalization: None,
}

# Processors that read only the scores and the length, each with the predicate of (processor,
# length) under which it changes scores.
_LENGTH_BOUND: dict[type, Callable[[Any, int], bool]] = {
    stock.MinLengthLogitsProcessor: lambda p, length: length < p.min_length,
    stock.MinNewTokensLengthLogitsProcessor: lambda p, length: (
        length < p.prompt_length_to_skip + p.min_new_tokens
    ),
    stock.ForcedBOSTokenLogitsProcessor: lambda p, length: length == 1,
    stock.ForcedEOSTokenLogitsProcessor: lambda p, length: length == p.max_length - 1,
    stock.ExponentialDecayLengthPenalty: lambda p, length: length > p.regulation_start,
    stock.SuppressTokensAtBeginLogitsProcessor: lambda p, length: length == p.begin_index,
}

_LEAST_LENGTHS = (stock.MinLengthLogitsProcessor, stock.MinNewTokensLengthLogitsProcessor)

# Processors that share calls (`BatchableProcessors`), and processors that compute each row from
# that row alone, some of which hold a value for each row of the call (`for_rows`).
_BATCHABLE = {*_SEQUENCE_FREE, *_LENGTH_BOUND, _PENALTY}
_ROW_WISE = {
    *_BATCHABLE,
    stock.NoRepeatNGramLogitsProcessor,
    stock.SequenceBiasLogitsProcessor,
    stock.NoBadWordsLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor,
    stock.EncoderNoRepeatNGramLogitsProcessor,
    stock.WatermarkLogitsProcessor,
}


def are_row_wise(processors: LogitsProcessorList, num_rows: int) -> bool:
    """Whether each row's scores depend on that row alone, and no caller's code sees the `num_rows`
    rows."""
    kind = stock.EncoderRepetitionPenaltyLogitsProcessor
    # with fewer prompts than rows, transformers' versions differ in which rows of a prompt it
    # affects
    for processor in processors:
        if type(processor) is kind and len(processor.encoder_input_ids) != num_rows:
            return False
    if type(processors) is not LogitsProcessorList:
        return False
    return all(type(processor) in _ROW_WISE for processor in processors)


def leaves_rows_alone(processor: Any) -> bool:
    """Whether the processor may run on draft tokens: it holds no state, and forces no token."""
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
        changed: dict[str, Any] = {}
        for name in ("encoder_input_ids", "prompt_ignore_length"):
            of_rows = getattr(processor, name, None)
            if isinstance(of_rows, Tensor):
                changed[name] = of_rows[list(rows)]
        if type(processor) is stock.EncoderNoRepeatNGramLogitsProcessor:
            ngrams = processor.generated_ngrams
            num_prompts = processor.batch_size
            prompts = [row * num_prompts // num_rows for row in rows]
            changed["generated_ngrams"] = [ngrams[prompt] for prompt in prompts]
            changed["batch_size"] = len(rows)
        if changed:
            processor = copy.copy(processor)
            vars(processor).update(changed)
        narrowed.append(processor)
    return narrowed


def _constants(processor: Any) -> tuple[Any, ...]:
    """Returns the attributes that must be equal for two processors of one type to share a call."""
    if type(processor) is _PENALTY:
        return ()
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
    """Processors of a one-row decoding, which share calls with those of decodings of equal `key`:
    these differ at most in their `penalized` tokens and in the numbers that `process_together`
    takes per row. `bound`: the processors in `_LENGTH_BOUND`."""

    def __init__(self, processors: LogitsProcessorList, input_ids: Tensor):
        self.processors: list[Any] = []
        self.bound: list[tuple[Callable[[Any, int], bool], Any]] = []
        # whether a processor reads the tokens, so that new ones must go to `pending_tokens`
        self.reads_tokens = False
        # new tokens that `penalized` does not hold yet
        self.pending_tokens: list[int] = []
        processor: Any
        for processor in processors:
            acts = _LENGTH_BOUND.get(type(processor))
            if acts is not None:
                self.bound.append((acts, processor))
                continue
            self.processors.append(processor)
            if type(processor) is _PENALTY:
                self.reads_tokens = True
                ignored = int(processor.prompt_ignore_length or 0)
                self.pending_tokens = input_ids[0, ignored:].tolist()
        self.key = tuple((type(processor), _constants(processor)) for processor in self.processors)
        # row `row` of `(rows, vocab)` bool: tokens to which the repetition penalty applies
        self.penalized: Tensor | None = None
        self.row = 0

    @classmethod
    def of(cls, processors: LogitsProcessorList, input_ids: Tensor) -> BatchableProcessors | None:
        """Returns the batchable processors of a row of `(1, length)` ids; `None` if a processor
        depends on the order of tokens or is a caller's."""
        kinds = [type(processor) for processor in processors]
        is_plain = type(processors) is LogitsProcessorList
        if not is_plain or kinds.count(_PENALTY) > 1 or not _BATCHABLE.issuperset(kinds):
            return None
        return cls(processors, input_ids)


def _penalized_by(
    members: Sequence[BatchableProcessors], vocab: int, device: torch.device
) -> Tensor:
    """Returns the members' updated `penalized` tokens as `(members, vocab)` bool. They are rows of
    one tensor from then on: the next step with the same members copies none, and writes all new
    tokens at once."""
    numbers = range(len(members))
    penalized = members[0].penalized
    rows = [member.row for member in members if member.penalized is penalized]
    if penalized is None or rows != list(numbers):
        no_tokens = torch.zeros(vocab, dtype=torch.bool, device=device)
        parts = [
            no_tokens if member.penalized is None else member.penalized[member.row]
            for member in members
        ]
        penalized = torch.stack(parts)
        for row, member in enumerate(members):
            member.penalized = penalized
            member.row = row
    new = [
        (row, token) for row in numbers for token in members[row].pending_tokens if token < vocab
    ]
    if new:
        rows_of_tokens, tokens = numbers_on(device, list(zip(*new)))
        penalized[rows_of_tokens, tokens] = True
    for member in members:
        member.pending_tokens = []
    return penalized[: len(members)]


def process_together(scores: Tensor, members: Sequence[BatchableProcessors]) -> Tensor:
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
            penalized = _penalized_by(members, vocab, scores.device)
            penalties = [processor.penalty for processor in stage]
            penalty = numbers_on(scores.device, penalties, None)[:, None]
            lowered = torch.where(scores < 0, scores * penalty, scores / penalty)
            scores = torch.where(penalized, lowered, scores)
        elif name is None or values.count(values[0]) == len(values):
            scores = first(None, scores)
        elif name == "top_k":
            vocab = scores.shape[1]
            counts = [min(value, vocab) for value in values]
            sizes = numbers_on(scores.device, counts)[:, None]
            best, _ = torch.topk(scores, max(counts))
            least = best.gather(1, sizes - 1)
            scores = scores.masked_fill(scores < least, first.filter_value)
        else:  # transformers' formula broadcasts a `(rows, 1)` column
            column = numbers_on(scores.device, values, torch.double)[:, None]
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


def argmax(scores: Tensor) -> Tensor:
    """Returns `argmax(dim=-1)`, the first of equals. On the CPU torch finds a maximum ten times
    faster than its index, and in half precision `max` finds the index twice as fast as `argmax`."""
    rows, vocab = scores.shape
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    if vocab < 8 * CHUNK:
        return scores.max(dim=-1).indices
    chunks = _in_chunks(scores, float("-inf"))
    maxima = chunks.amax(dim=-1)
    first = maxima.max(dim=-1).indices  # [rows]
    indices = torch.arange(rows, device="cpu")
    inner = chunks[indices, first]  # [rows, CHUNK]
    return first * CHUNK + inner.max(dim=-1).indices


def _in_chunks(scores: Tensor, fill: float) -> Tensor:
    """Divides `(rows, vocab)`, padded with `fill`, into `(rows, chunks, CHUNK)`."""
    missing = -scores.shape[1] % CHUNK
    if missing:
        scores = torch.nn.functional.pad(scores, (0, missing), value=fill)
    return scores.unflatten(1, (-1, CHUNK))


def draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws as `torch.multinomial(probs, 1, generator=generator).squeeze(1)` from `(rows, vocab)`
    probabilities: the same tokens, the same generator state afterwards. On a device it does not
    synchronize, and rows that torch would reject get arbitrary tokens."""
    if probs.is_cpu or not _races(probs.device):
        return cpp.multinomial(probs, generator)
    return race(probs, generator)


def race(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws a token for each row as `multinomial` does: the smallest of independent exponential
    variables with these rates."""
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
        has_equal_state = torch.equal(first.get_state(), second.get_state())
        if not has_equal_state or not torch.equal(raced, drawn.squeeze(1)):
            return False
    return True


def draw_by_inversion(probs: Tensor) -> Tensor:
    """Draws an index for each row of `(rows, vocab)` probabilities by inverting the cumulated ones:
    first a chunk of the vocabulary, then an index in it."""
    chunks = _in_chunks(probs, 0.0)
    sums = chunks.sum(dim=-1).double()
    chunk_mass = sums.cumsum(dim=-1)
    first = _invert_cdf(chunk_mass)  # [rows]
    rows = torch.arange(len(first), device=first.device)
    inner = chunks[rows, first]  # [rows, CHUNK]
    mass = inner.double().cumsum(dim=-1)
    return first * CHUNK + _invert_cdf(mass)


def _invert_cdf(mass: Tensor) -> Tensor:
    rows, width = mass.shape
    share = torch.rand((rows, 1), dtype=torch.double, device=mass.device)
    level = share * mass[:, -1:]
    # the first index whose cumulated mass exceeds the level: never one with probability zero
    index = torch.searchsorted(mass, level, right=True)
    return index.squeeze(1).clamp(max=width - 1)


def values_at(scores: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Returns `scores[rows, tokens]`; minus infinity for tokens past the last column: a processor
    may have widened the scores."""
    last = scores.shape[1] - 1
    values = scores[rows, tokens.clamp(max=last)]
    return values.masked_fill(tokens > last, float("-inf"))


def logprobs_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """Returns log-probabilities `(rows,)` of one token a row under `(rows, vocab)` scores."""
    rows = torch.arange(len(scores), device=scores.device)
    chosen = values_at(scores, rows, tokens.to(scores.device))
    return chosen - scores.logsumexp(dim=-1)


def pick(values: Tensor, rows: list[int]) -> Tensor:
    """Returns `values[rows]` for rising `rows`; the tensor itself if these are all rows."""
    if len(rows) == len(values):
        return values
    return values[numbers_on(values.device, rows)]


def top_tokens(raw: Tensor, scores: Tensor, count: int) -> list[Tensor]:
    """Returns the `count` best tokens of each row of `(rows, vocab)` logits: `(rows, count)` ids,
    and their values in the logits and in the processed scores."""
    most = min(count, raw.shape[1])
    best, ids = raw.topk(most, dim=-1)
    rows = torch.arange(len(ids), device=ids.device)
    return [ids, best, values_at(scores, rows[:, None], ids)]


def alternatives(raw: Tensor, scores: Tensor, count: int) -> list[Tensor]:
    """As `top_tokens`, with log-probabilities in place of logits and scores."""
    ids, best, processed = top_tokens(raw, scores, count)
    unprocessed = best - raw.logsumexp(dim=-1, keepdim=True)
    return [ids, unprocessed, processed - scores.logsumexp(dim=-1, keepdim=True)]


class PromptLogprobs:
    """Records log-probabilities of a prompt's tokens (except the first) chunk by chunk;
    recomputation overwrites."""

    MAX_ROWS = 256  # rows of logits converted to float32 at once

    def __init__(self, token_ids: Sequence[int], num_top: int) -> None:
        self.token_ids = token_ids
        self.num_top = num_top
        self.values: list[float | None] = [None] * len(token_ids)
        self.top: list[list[tuple[int, float]]] = [[] for _ in token_ids]

    def num_recorded(self, start: int, end: int) -> int:
        """Returns for how many of the computed tokens `[start, end)` the next token is one of the
        prompt, whose log-probability their logits give."""
        last = min(end, len(self.token_ids) - 1)
        return max(0, last - start)

    def record(self, start: int, logits: Tensor) -> None:
        """Records log-probabilities from the `(n, vocab)` logits, in the model's dtype, of the
        tokens from `start` on."""
        for part in logits.split(self.MAX_ROWS):
            following = slice(start + 1, start + 1 + len(part))
            part = part.float()
            next_ids = self.token_ids[following]
            tokens = torch.tensor(next_ids, device=part.device)
            self.values[following] = logprobs_of(part, tokens).tolist()
            if self.num_top:
                top = alternatives(part, part, self.num_top)
                ids, best, _ = (values.tolist() for values in top)
                pairs = zip(ids, best)
                self.top[following] = [list(zip(*pair)) for pair in pairs]
            start += len(part)
