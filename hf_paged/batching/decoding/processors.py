"""What is known of transformers' logits processors: which treat every row by itself, and which can share one call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation import logits_process as known
from transformers.generation.logits_process import LogitsProcessorList

# They read the scores alone.
_SEQUENCE_FREE = {
    known.TemperatureLogitsWarper,
    known.TopKLogitsWarper,
    known.TopPLogitsWarper,
    known.TopHLogitsWarper,
    known.MinPLogitsWarper,
    known.TypicalLogitsWarper,
    known.EpsilonLogitsWarper,
    known.EtaLogitsWarper,
    known.SuppressTokensLogitsProcessor,
    known.InfNanRemoveLogitsProcessor,
    known.LogitNormalization,
}

# They read the scores and the number of tokens, and leave the scores as they are unless these hold of (self, tokens).
_LENGTH_BOUND: dict[type, Callable[[Any, int], bool]] = {
    known.MinLengthLogitsProcessor: lambda p, length: length < p.min_length,
    known.MinNewTokensLengthLogitsProcessor: lambda p, length: length < p.prompt_length_to_skip + p.min_new_tokens,
    known.ForcedBOSTokenLogitsProcessor: lambda p, length: length == 1,
    known.ForcedEOSTokenLogitsProcessor: lambda p, length: length == p.max_length - 1,
    known.ExponentialDecayLengthPenalty: lambda p, length: length > p.regulation_start,
    known.SuppressTokensAtBeginLogitsProcessor: lambda p, length: length == p.begin_index,
}

# They read each row's own tokens; some hold a value for each row of the call.
_SEQUENCE_BOUND = {
    known.RepetitionPenaltyLogitsProcessor,
    known.NoRepeatNGramLogitsProcessor,
    known.SequenceBiasLogitsProcessor,
    known.NoBadWordsLogitsProcessor,
    known.EncoderRepetitionPenaltyLogitsProcessor,
    known.EncoderNoRepeatNGramLogitsProcessor,
    known.WatermarkLogitsProcessor,
}


def are_row_wise(processors: LogitsProcessorList, num_rows: int) -> bool:
    """Whether a row's scores depend on that row alone, and no code of a caller's own sees the `num_rows` rows."""
    return type(processors) is LogitsProcessorList and all(_is_row_wise(p, num_rows) for p in processors)


def _is_row_wise(processor: Any, num_rows: int) -> bool:
    if type(processor) is known.EncoderRepetitionPenaltyLogitsProcessor:
        # which rows of a prompt it treats differs between versions of transformers
        return len(processor.encoder_input_ids) == num_rows
    return any(type(processor) in kind for kind in (_SEQUENCE_FREE, _LENGTH_BOUND, _SEQUENCE_BOUND))


def for_rows(processors: LogitsProcessorList, rows: Sequence[int], num_rows: int) -> LogitsProcessorList:
    """The processors of a call over `num_rows` rows, for a batch of only `rows` of them. They must be row-wise."""
    return LogitsProcessorList(_for_rows(processor, rows, num_rows) for processor in processors)


def _for_rows(processor: Any, rows: Sequence[int], num_rows: int) -> Any:
    narrowed = copy.copy(processor)
    if type(processor) is known.RepetitionPenaltyLogitsProcessor:
        if isinstance(processor.prompt_ignore_length, torch.Tensor):
            narrowed.prompt_ignore_length = processor.prompt_ignore_length[list(rows)]
    elif type(processor) is known.EncoderRepetitionPenaltyLogitsProcessor:
        narrowed.encoder_input_ids = processor.encoder_input_ids[list(rows)]
    elif type(processor) is known.EncoderNoRepeatNGramLogitsProcessor:
        ngrams, prompts = processor.generated_ngrams, processor.batch_size
        narrowed.generated_ngrams = [ngrams[row * prompts // num_rows] for row in rows]
        narrowed.batch_size = len(rows)
    else:
        return processor
    return narrowed


def _temperature(_: Any, scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return scores / temperature.float()


def _top_k(self: Any, scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    top_k = top_k.clamp(max=scores.shape[-1])
    best = torch.topk(scores, int(top_k.max()))[0]
    return scores.masked_fill(scores < best.gather(1, top_k - 1), self.filter_value)


def _top_p(self: Any, scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    ascending, order = torch.sort(scores, descending=False)
    mass = ascending.softmax(dim=-1).cumsum(dim=-1)
    remove = mass <= (1 - top_p).float()
    remove[..., -self.min_tokens_to_keep :] = False
    return scores.masked_fill(remove.scatter(1, order, remove), self.filter_value)


def _min_p(self: Any, scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    probs = torch.softmax(scores, dim=-1)
    remove = probs < min_p.float() * probs.amax(dim=-1, keepdim=True)
    kept = torch.topk(probs, min(self.min_tokens_to_keep, probs.shape[-1]), dim=-1).indices
    return scores.masked_fill(remove.scatter(-1, kept, False), self.filter_value)


# The number that may differ from row to row, and transformers' formula with a `(rows, 1)` column in its place.
_COLUMNS: dict[type, tuple[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    known.TemperatureLogitsWarper: ("temperature", _temperature),
    known.TopKLogitsWarper: ("top_k", _top_k),
    known.TopPLogitsWarper: ("top_p", _top_p),
    known.MinPLogitsWarper: ("min_p", _min_p),
}


def _constants(processor: Any) -> tuple[Any, ...]:
    """What must be equal for two processors of one type to share a call."""
    if type(processor) is known.RepetitionPenaltyLogitsProcessor:
        return ()
    varies = _COLUMNS[type(processor)][0] if type(processor) in _COLUMNS else None
    values = (value for name, value in sorted(vars(processor).items()) if name != varies)
    return tuple(tuple(v.flatten().tolist()) if isinstance(v, torch.Tensor) else v for v in values)


class BatchableProcessors:
    """
    The processors of a one-row decoding that can run together with those of others: they read the scores and at most
    which tokens were `seen`. Decodings with equal `key` differ at most in that and in the numbers that `together` takes
    one a row.
    """

    def __init__(self, processors: LogitsProcessorList, input_ids: torch.Tensor):
        self.processors = [p for p in processors if type(p) not in _LENGTH_BOUND]
        penalties = [p for p in processors if type(p) is known.RepetitionPenaltyLogitsProcessor]
        self._penalises = bool(penalties)
        self._seen: torch.Tensor | None = None  # [vocab] bool
        self._unseen: list[int] = []  # tokens that are not in `_seen` yet
        if penalties:
            ignored = penalties[0].prompt_ignore_length
            self._unseen = input_ids[0, 0 if ignored is None else int(ignored) :].tolist()
        self.key = tuple((type(p), *_constants(p)) for p in self.processors)
        self._bound = [(_LENGTH_BOUND[type(p)], p) for p in processors if type(p) in _LENGTH_BOUND]

    @classmethod
    def of(cls, processors: LogitsProcessorList, input_ids: torch.Tensor) -> BatchableProcessors | None:
        """Of a row of `(1, length)` ids. `None` if a processor needs the order of its tokens or is a caller's own."""
        if type(processors) is not LogitsProcessorList:
            return None
        kinds = [type(processor) for processor in processors]
        penalties = kinds.count(known.RepetitionPenaltyLogitsProcessor)
        batchable = sum(kind in _SEQUENCE_FREE or kind in _LENGTH_BOUND for kind in kinds) + min(penalties, 1)
        return cls(processors, input_ids) if batchable == len(kinds) else None

    def note(self, token: int) -> None:
        """The row goes on with `token`."""
        if self._penalises:
            self._unseen.append(token)

    def seen(self, vocab: int, device: torch.device) -> torch.Tensor:
        """`(vocab,)` bool: the tokens that are penalised for having been there."""
        if self._seen is None:
            self._seen = torch.zeros(vocab, dtype=torch.bool, device=device)
        self._seen[[token for token in self._unseen if token < vocab]] = True
        self._unseen = []
        return self._seen

    def suffices(self, length: int) -> bool:
        """Whether only `processors` act on a row of `length` tokens."""
        return not self._bound or not any(acts(processor, length) for acts, processor in self._bound)


def together(scores: torch.Tensor, members: Sequence[BatchableProcessors]) -> torch.Tensor:
    """`(rows, vocab)` float32 scores through the processors of each row's member. All have one key."""
    for stage in zip(*(member.processors for member in members)):
        first = stage[0]
        if type(first) is known.RepetitionPenaltyLogitsProcessor:
            seen = torch.stack([member.seen(scores.shape[1], scores.device) for member in members])
            penalty = torch.tensor([p.penalty for p in stage], device=scores.device)[:, None]
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
            continue
        name, column_wise = _COLUMNS.get(type(first), ("", None))
        values = [getattr(processor, name) for processor in stage] if column_wise else []
        if column_wise is None or values.count(values[0]) == len(values):
            scores = first(None, scores)
        else:
            dtype = torch.long if isinstance(first, known.TopKLogitsWarper) else torch.double
            column = torch.tensor(values, dtype=dtype, device=scores.device)[:, None]  # [rows, 1]
            scores = column_wise(first, scores, column)
    return scores
