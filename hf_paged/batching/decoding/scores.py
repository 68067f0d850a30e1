"""Operations on `(rows, vocab)` scores: batched calls of transformers' logits processors, argmax,
draws, log-probabilities. They read scores and token ids, but no requests."""

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
from ...model.values import package_of
from ...step import numbers_on

_REPETITION_PENALTY = stock.RepetitionPenaltyLogitsProcessor
CHUNK = 128  # vocabulary entries per partial maximum or sum

# Processors that read only the scores, each with the numeric attribute that may differ between the
# rows of one call (`None`: no attribute may).
_SCORE_ONLY: dict[type, str | None] = {
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

# Processors that read only the scores and the length, each with a predicate of (processor, length):
# whether the processor changes scores at this length.
_LENGTH_DEPENDENT: dict[type, Callable[[Any, int], bool]] = {
    stock.MinLengthLogitsProcessor: lambda p, length: length < p.min_length,
    stock.MinNewTokensLengthLogitsProcessor: lambda p, length: (
        length < p.prompt_length_to_skip + p.min_new_tokens
    ),
    stock.ForcedBOSTokenLogitsProcessor: lambda p, length: length == 1,
    stock.ForcedEOSTokenLogitsProcessor: lambda p, length: length == p.max_length - 1,
    stock.ExponentialDecayLengthPenalty: lambda p, length: length > p.regulation_start,
    stock.SuppressTokensAtBeginLogitsProcessor: lambda p, length: length == p.begin_index,
}

_MIN_LENGTH_PROCESSORS = (stock.MinLengthLogitsProcessor, stock.MinNewTokensLengthLogitsProcessor)

# Processors that decodings can share (`BatchableProcessors`).
_BATCHABLE = {*_SCORE_ONLY, *_LENGTH_DEPENDENT, _REPETITION_PENALTY}
# Processors that compute each row from that row alone. Some of them hold a value for each row
# (`narrow_processors`).
_ROW_WISE = {
    *_BATCHABLE,
    stock.NoRepeatNGramLogitsProcessor,
    stock.SequenceBiasLogitsProcessor,
    stock.NoBadWordsLogitsProcessor,
    stock.EncoderRepetitionPenaltyLogitsProcessor,
    stock.EncoderNoRepeatNGramLogitsProcessor,
    stock.WatermarkLogitsProcessor,
}
# Processors whose scores of a row do not depend on other rows. The processors below that are not
# row-wise get the whole batch in every step: they keep a state for each row, run the model, pass a
# row's index to a caller's function, or belong to one model.
_NOT_MIXING_ROWS = {
    *_ROW_WISE,
    stock.AlternatingCodebooksLogitsProcessor,
    stock.BarkEosPrioritizerLogitsProcessor,
    stock.PrefixConstrainedLogitsProcessor,
    stock.SynthIDTextWatermarkLogitsProcessor,
    stock.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    stock.WhisperNoSpeechDetection,
    stock.WhisperTimeStampLogitsProcessor,
}


def are_row_wise(processors: LogitsProcessorList, num_rows: int) -> bool:
    """Whether all processors compute each row from that row's ids and scores alone, without a
    state, the model or a caller's code, so that they can run on a subset of the `num_rows` rows."""
    kind = stock.EncoderRepetitionPenaltyLogitsProcessor
    # with fewer prompts than rows, it depends on transformers' version which rows this kind affects
    for processor in processors:
        if type(processor) is kind and len(processor.encoder_input_ids) != num_rows:
            return False
    if type(processors) is not LogitsProcessorList:
        return False
    return all(type(processor) in _ROW_WISE for processor in processors)


def may_mix_rows(processors: LogitsProcessorList) -> bool:
    """Whether a row's scores may depend on the scores of other rows. Processors of this package
    compute each row from that row alone (`seams.Grammars`)."""
    if type(processors) is not LogitsProcessorList:
        return True
    kinds = map(type, processors)
    return any(
        kind not in _NOT_MIXING_ROWS and package_of(kind.__module__) != "hf_paged" for kind in kinds
    )


def can_run_on_drafts(processor: Any) -> bool:
    """Whether the processor can run on draft tokens: it computes each row from that row alone and,
    apart from minimum lengths, does not depend on the length."""
    kind = type(processor)
    if kind not in _ROW_WISE:
        return False
    return kind not in _LENGTH_DEPENDENT or kind in _MIN_LENGTH_PROCESSORS


def narrow_processors(
    processors: LogitsProcessorList,
    rows: Sequence[int],
    num_rows: int,
) -> LogitsProcessorList:
    """Returns row-wise processors for only `rows` of a batch, given the processors for all of its
    `num_rows` rows."""
    narrowed_processors = LogitsProcessorList()
    for processor in processors:
        narrowed_attributes: dict[str, Any] = {}
        for name in ("encoder_input_ids", "prompt_ignore_length"):
            value = getattr(processor, name, None)
            if isinstance(value, Tensor):
                narrowed_attributes[name] = value[list(rows)]
        if type(processor) is stock.EncoderNoRepeatNGramLogitsProcessor:
            ngrams = processor.generated_ngrams
            num_prompts = processor.batch_size
            prompts = [row * num_prompts // num_rows for row in rows]
            narrowed_attributes["generated_ngrams"] = [ngrams[prompt] for prompt in prompts]
            narrowed_attributes["batch_size"] = len(rows)
        if narrowed_attributes:
            processor = copy.copy(processor)
            vars(processor).update(narrowed_attributes)
        narrowed_processors.append(processor)
    return narrowed_processors


def _constant_attributes(processor: Any) -> tuple[Any, ...]:
    """Returns the attribute values in which two processors of one type must agree to share a
    call."""
    if type(processor) is _REPETITION_PENALTY:
        return ()
    varying_name = _SCORE_ONLY.get(type(processor))
    constants: list[Any] = []
    for name, value in sorted(vars(processor).items()):
        if name == varying_name:
            continue
        if isinstance(value, Tensor):
            value = tuple(value.flatten().tolist())
        constants.append(value)
    return tuple(constants)


class BatchableProcessors:
    """The processors of a single-row decoding. Decodings with equal `key` can share a call of
    `process_together`, since their `processors` differ at most in one number each, and in the
    `penalty_mask`. They can share it only in steps in which no `length_dependent` processor changes
    scores."""

    def __init__(self, processors: LogitsProcessorList, input_ids: Tensor):
        self.processors: list[Any] = []
        # processors of `_LENGTH_DEPENDENT`, each with its predicate; not in `processors`
        self.length_dependent: list[tuple[Callable[[Any, int], bool], Any]] = []
        # whether a processor reads tokens, so that new tokens must be added to `pending_tokens`
        self.reads_tokens = False
        self.pending_tokens: list[int] = []  # not marked in `penalty_mask` yet
        processor: Any
        for processor in processors:
            is_active = _LENGTH_DEPENDENT.get(type(processor))
            if is_active is not None:
                self.length_dependent.append((is_active, processor))
                continue
            self.processors.append(processor)
            if type(processor) is _REPETITION_PENALTY:
                self.reads_tokens = True
                num_ignored = int(processor.prompt_ignore_length or 0)
                self.pending_tokens = input_ids[0, num_ignored:].tolist()
        self.key = tuple(
            (type(processor), _constant_attributes(processor)) for processor in self.processors
        )
        # `(rows, vocab)` bool, shared by several decodings; row `row` marks the tokens to which
        # this decoding's repetition penalty applies
        self.penalty_mask: Tensor | None = None
        self.row = 0

    def share(self, penalty_mask: Tensor, row: int) -> None:
        """Makes `row` of `penalty_mask` this decoding's row."""
        self.penalty_mask, self.row = penalty_mask, row

    @classmethod
    def of(cls, processors: LogitsProcessorList, input_ids: Tensor) -> BatchableProcessors | None:
        """Makes the batchable processors of a row with `(1, length)` ids. Returns `None` if the
        list's class is not transformers' own, if the type of a processor is not in `_BATCHABLE`, or
        if there are several repetition penalties."""
        kinds = [type(processor) for processor in processors]
        is_plain = type(processors) is LogitsProcessorList
        if not is_plain or kinds.count(_REPETITION_PENALTY) > 1 or not _BATCHABLE.issuperset(kinds):
            return None
        return cls(processors, input_ids)


@torch.inference_mode(False)  # the mask outlives the step, and later steps write to it
def _update_penalty_mask(
    members: Sequence[BatchableProcessors], vocab: int, device: torch.device
) -> Tensor:
    """Marks the members' pending tokens, and returns the members' rows of the penalty mask,
    `(members, vocab)` bool. Afterwards the members share one mask, so that the next step with the
    same members copies no rows, and marks all new tokens at once."""
    member_rows = range(len(members))
    penalty_mask = members[0].penalty_mask
    rows = [member.row for member in members if member.penalty_mask is penalty_mask]
    if penalty_mask is None or rows != list(member_rows):
        no_tokens = torch.zeros(vocab, dtype=torch.bool, device=device)
        mask_rows = [
            no_tokens if member.penalty_mask is None else member.penalty_mask[member.row]
            for member in members
        ]
        penalty_mask = torch.stack(mask_rows)
        for row, member in enumerate(members):
            member.share(penalty_mask, row)
    new_entries = [
        (row, token)
        for row in member_rows
        for token in members[row].pending_tokens
        if token < vocab
    ]
    if new_entries:
        rows_of_tokens, tokens = numbers_on(device, list(zip(*new_entries)))
        penalty_mask[rows_of_tokens, tokens] = True
    for member in members:
        member.pending_tokens.clear()
    return penalty_mask[: len(members)]


def _divide(scores: Tensor, column: Tensor) -> Tensor:
    """Divides `(rows, vocab)` scores by a number per row, `(rows, 1)`, and returns the same bits as
    torch's division by a Python number: on CUDA, torch multiplies by the number's reciprocal."""
    return scores * column.reciprocal() if scores.is_cuda else scores / column


def process_together(scores: Tensor, members: Sequence[BatchableProcessors]) -> Tensor:
    """Applies the `processors` of each row's member to `(rows, vocab)` float32 scores, and returns
    the result. `members`: one per row, all with the same `key`; their `length_dependent` processors
    change no scores in this step."""
    for processors in zip(*(member.processors for member in members)):
        first_processor: Any = processors[0]
        kind = type(first_processor)
        name = _SCORE_ONLY.get(kind)
        values: list[Any] = []
        if name:
            values = [getattr(processor, name) for processor in processors]
        if kind is _REPETITION_PENALTY:
            vocab = scores.shape[1]
            penalty_mask = _update_penalty_mask(members, vocab, scores.device)
            penalties = [processor.penalty for processor in processors]
            penalty = numbers_on(scores.device, penalties, torch.float)[:, None]
            quotients = _divide(scores, penalty)
            penalized_scores = torch.where(scores < 0, scores * penalty, quotients)
            scores = torch.where(penalty_mask, penalized_scores, scores)
        elif name is None or values.count(values[0]) == len(values):
            scores = first_processor(None, scores)
        elif name == "temperature":
            scores = _divide(scores, numbers_on(scores.device, values, torch.float)[:, None])
        elif name == "top_k":
            vocab = scores.shape[1]
            counts = [min(value, vocab) for value in values]
            ranks = numbers_on(scores.device, counts)[:, None]
            best, _ = torch.topk(scores, max(counts))
            thresholds = best.gather(1, ranks - 1)
            scores = scores.masked_fill(scores < thresholds, first_processor.filter_value)
        else:  # in transformers' formula, a `(rows, 1)` column takes the place of a number
            column = numbers_on(scores.device, values, torch.double)[:, None]
            # transformers rounds `1 - top_p`, and the other numbers themselves, to float32
            if name == "top_p":
                column = 1 - (1 - column).float().double()
            else:
                column = column.float()
            column_processor = copy.copy(first_processor)
            setattr(column_processor, name, column)
            scores = column_processor(None, scores)
    return scores


def argmax(scores: Tensor) -> Tensor:
    """Returns `scores.argmax(dim=-1)`, `(rows,)`; of equal maxima, the first index. On the CPU,
    first finds the best chunk by `amax`, which takes a tenth of the time of `argmax`, and then the
    index in that chunk by `max`, which in half precision takes half the time of `argmax`."""
    rows, vocab = scores.shape
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    if vocab < 8 * CHUNK:
        return scores.max(dim=-1).indices
    chunks = _split_into_chunks(scores, float("-inf"))
    maxima = chunks.amax(dim=-1)
    chunk_indices = maxima.max(dim=-1).indices  # [rows]
    row_indices = torch.arange(rows, device="cpu")
    best_chunks = chunks[row_indices, chunk_indices]  # [rows, CHUNK]
    return chunk_indices * CHUNK + best_chunks.max(dim=-1).indices


def _split_into_chunks(scores: Tensor, fill: float) -> Tensor:
    """Pads `(rows, vocab)` scores with `fill`, and returns them as `(rows, chunks, CHUNK)`."""
    num_missing = -scores.shape[1] % CHUNK
    if num_missing:
        scores = torch.nn.functional.pad(scores, (0, num_missing), value=fill)
    return scores.unflatten(1, (-1, CHUNK))


def draw(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns `torch.multinomial(probs, 1, generator=generator).squeeze(1)` for `(rows, vocab)`
    probabilities, and leaves the generator in the state in which that call would leave it. Raises
    torch's `RuntimeError` for rows that torch rejects; but on a GPU where `exponential_race` equals
    torch's draw, such rows get arbitrary tokens, since the draw does not synchronize."""
    if probs.is_cpu or not _race_equals_multinomial(probs.device):
        return cpp.multinomial(probs, generator)
    return exponential_race(probs, generator)


def exponential_race(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws tokens `(rows,)` from `(rows, vocab)` probabilities as torch's `multinomial` does: in
    each row, the index of the smallest of independent exponential variables with these rates."""
    times = torch.empty_like(probs).exponential_(1, generator=generator)
    return probs.div(times).argmax(dim=-1)


@functools.cache
def _race_equals_multinomial(device: torch.device) -> bool:
    """Whether `exponential_race` draws the same tokens as the installed torch's `multinomial` on
    `device`; torch does not document its algorithm."""
    first = torch.Generator(device).manual_seed(0)
    second = torch.Generator(device).manual_seed(0)
    for shape in ((1, 777), (5, 32000)):
        generator = second.clone_state()
        logits = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
        probs = logits.mul_(3).softmax(dim=-1)
        expected = torch.multinomial(probs, num_samples=1, generator=first)
        actual = exponential_race(probs, second)
        has_equal_state = torch.equal(first.get_state(), second.get_state())
        if not has_equal_state or not torch.equal(actual, expected.squeeze(1)):
            return False
    return True


def draw_by_inversion(probs: Tensor) -> Tensor:
    """Draws tokens `(rows,)` from `(rows, vocab)` probabilities with torch's global generator, by
    inverse transform sampling: first a chunk of the vocabulary, then an index in the chunk."""
    chunks = _split_into_chunks(probs, 0.0)
    sums = chunks.sum(dim=-1).double()
    chunk_cdf = sums.cumsum(dim=-1)
    chunk_indices = _invert_cdf(chunk_cdf)  # [rows]
    rows = torch.arange(len(chunk_indices), device=chunk_indices.device)
    chosen_chunks = chunks[rows, chunk_indices]  # [rows, CHUNK]
    cdf = chosen_chunks.double().cumsum(dim=-1)
    return chunk_indices * CHUNK + _invert_cdf(cdf)


def _invert_cdf(cdf: Tensor) -> Tensor:
    """Draws indices `(rows,)` from `(rows, n)` cumulative sums, which need not end at one."""
    rows, width = cdf.shape
    quantiles = torch.rand((rows, 1), dtype=torch.double, device=cdf.device)
    levels = quantiles * cdf[:, -1:]
    # the first index whose cumulative sum exceeds the level: never an index of probability zero
    index = torch.searchsorted(cdf, levels, right=True)
    return index.squeeze(1).clamp(max=width - 1)


def values_at(scores: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Returns `scores[rows, tokens]`; minus infinity for tokens past the last column, which occur
    if a processor widened the scores."""
    last = scores.shape[1] - 1
    values = scores[rows, tokens.clamp(max=last)]
    return values.masked_fill(tokens > last, float("-inf"))


def logprobs_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """Returns the log-probability of one token per row, `(rows,)`, under `(rows, vocab)` scores."""
    rows = torch.arange(len(scores), device=scores.device)
    chosen_scores = values_at(scores, rows, tokens.to(scores.device))
    return chosen_scores - scores.logsumexp(dim=-1)


def select_rows(values: Tensor, rows: list[int]) -> Tensor:
    """Returns `values[rows]` for ascending `rows`; `values` itself if these are all of its rows."""
    if len(rows) == len(values):
        return values
    return values[numbers_on(values.device, rows)]


def top_tokens(raw: Tensor, scores: Tensor, count: int) -> list[Tensor]:
    """Returns the `count` best tokens of each row of the `(rows, vocab)` logits `raw`: `(rows,
    count)` ids, and their values in `raw` and in the processed `scores`. If `count` exceeds the
    vocabulary, returns the whole vocabulary."""
    best, ids = raw.topk(min(count, raw.shape[1]), dim=-1)
    rows = torch.arange(len(ids), device=ids.device)
    return [ids, best, values_at(scores, rows[:, None], ids)]


def alternatives(raw: Tensor, scores: Tensor, count: int) -> list[Tensor]:
    """Returns the same as `top_tokens`, with log-probabilities instead of logits and scores."""
    ids, best, processed = top_tokens(raw, scores, count)
    unprocessed = best - raw.logsumexp(dim=-1, keepdim=True)
    return [ids, unprocessed, processed - scores.logsumexp(dim=-1, keepdim=True)]


class PromptLogprobs:
    """Records, chunk by chunk, the log-probabilities of a prompt's tokens except the first, and the
    `num_alternatives` most probable tokens at each position. Recomputed tokens overwrite earlier
    values."""

    MAX_ROWS = 256  # maximum number of rows of logits that are converted to float32 at once

    def __init__(self, token_ids: Sequence[int], num_alternatives: int) -> None:
        self.token_ids = token_ids
        self.num_alternatives = num_alternatives
        # by position: the token's log-probability, `None` until it is recorded
        self.values: list[float | None] = [None] * len(token_ids)
        # by position: pairs of token id and log-probability, best first
        self.alternatives: list[list[tuple[int, float]]] = [[] for _ in token_ids]

    def num_recordable(self, start: int, end: int) -> int:
        """Returns for how many of the computed tokens `[start, end)` the prompt has a next token:
        the logits after a token give the log-probability of the next one."""
        last_position = len(self.token_ids) - 1
        return max(0, min(end, last_position) - start)

    def record(self, start: int, logits: Tensor) -> None:
        """Records the log-probabilities of tokens `[start + 1, start + 1 + n)` from the `(n,
        vocab)` logits of the tokens before them, in any float dtype."""
        for part in logits.split(self.MAX_ROWS):
            next_positions = slice(start + 1, start + 1 + len(part))
            part = part.float()
            next_ids = self.token_ids[next_positions]
            tokens = torch.tensor(next_ids, device=part.device)
            self.values[next_positions] = logprobs_of(part, tokens).tolist()
            if self.num_alternatives:
                top = alternatives(part, part, self.num_alternatives)
                ids, best, _ = (values.tolist() for values in top)
                pairs = zip(ids, best)
                self.alternatives[next_positions] = [list(zip(*pair)) for pair in pairs]
            start += len(part)
