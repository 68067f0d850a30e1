"""One step of many decodings: their tokens are chosen from logits on the device, copied to the host
and accepted there. The ledger updates sequences and block tables."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...interrupts import is_interrupt
from ...step import numbers_on
from .base import (
    Decoding,
    Fetch,
    LogitRows,
    Record,
    Result,
    SampledTokens,
    join_rows,
)
from .sample import SampleDecoding
from .scores import (
    alternatives,
    argmax,
    draw_by_inversion,
    logprobs_of,
    process_together,
    select_rows,
)

HostBatch = tuple["SampledBatch", list[int], list[list[Any]]]
"""A batch, with its `tokens` and its `logprobs` on the host."""

_NO_TOKEN = -1  # token of a row whose scores allow no token
_CHOOSES_ARGMAX = operator.attrgetter("chooses_argmax")
_IS_SIMPLE = operator.attrgetter("is_simple")


@dataclass
class SampledBatch:
    """The next tokens, on the device, of decodings that were sampled together."""

    indices: list[int]  # indices of the decodings in the step
    decodings: list[SampleDecoding]
    tokens: Tensor  # (open rows,) int64; may contain `_NO_TOKEN`
    # empty if no row records log-probabilities; otherwise the tokens' log-probabilities before and
    # after processors, (recording rows,); then, if any row records alternatives, their ids, and
    # their log-probabilities before and after processors, (recording rows, k)
    logprobs: list[Tensor]

    def accept(self, tokens: list[int], columns: list[list[Any]]) -> list[Result]:
        """Makes each decoding accept the tokens of its open rows, and returns their results.
        `tokens` and `columns` are `self.tokens` and `self.logprobs` on the host."""
        if all(map(_IS_SIMPLE, self.decodings)) and _NO_TOKEN not in tokens:
            return SampleDecoding.accept_simple(self.decodings, tokens)
        remaining_tokens = iter(tokens)
        recorded_rows = zip(*columns)
        results: list[Result] = []
        for decoding in self.decodings:
            num_rows = len(decoding.open_rows)
            chosen_tokens = list(itertools.islice(remaining_tokens, num_rows))
            records: list[Record] = []
            if decoding.record_logprobs:
                for raw, processed, *top in itertools.islice(recorded_rows, num_rows):
                    top_tokens = list(zip(*top))
                    records.append(((raw, processed), top_tokens[: decoding.num_alternatives]))
            try:
                if _NO_TOKEN in chosen_tokens:
                    raise RuntimeError(
                        "the scores of the next token contain nan or +inf, or no token has a finite"
                        " score"
                    )
                results.append(decoding.accept(chosen_tokens, records))
            except BaseException as error:
                results.append(error)
        return results


def sample_step(
    ready: Sequence[tuple[Decoding, LogitRows]],
    fetch: Fetch | None,
) -> list[Result]:
    """Takes one step of each decoding in `ready`, and returns their results. A decoding comes with
    a row of logits for each of its open rows, or with `n + 1` rows if it has a draft of `n` tokens;
    it then accepts the leading tokens that equal the draft's, and one more, each as if it were
    sampled in a separate step. `fetch` as in `sample_position`, but not called if any decoding has
    a draft."""
    draft_indices = [
        index for index, (decoding, _) in enumerate(ready) if decoding.draft is not None
    ]
    if not draft_indices:
        return sample_position(ready, fetch)
    results: dict[int, Result] = {}
    greedy_indices = [index for index in draft_indices if ready[index][0].accepts_runs]
    if greedy_indices:
        logits = join_rows([ready[index][1] for index in greedy_indices])
        tokens = iter(argmax(logits).tolist())  # a single argmax for all decodings
        for index in greedy_indices:
            decoding: Any
            decoding, rows = ready[index]
            num_tokens = rows.end - rows.start
            results[index] = decoding.accept_run(list(itertools.islice(tokens, num_tokens)))
    indices = range(len(ready))
    pending_indices = [index for index in indices if index not in results]
    while pending_indices:
        members = [ready[index] for index in pending_indices]
        next_logits = [(decoding, _next_logits(rows, decoding)) for decoding, rows in members]
        for index, result in zip(pending_indices, sample_position(next_logits)):
            results[index] = _with_earlier(results.get(index), result)
        pending_indices = [
            index for index in pending_indices if _advance_draft(ready[index][0], results[index])
        ]
    return [results[index] for index in indices]


def unknown_token_error(result: Result, num_embeddings: int) -> IndexError | None:
    """Returns an error if the next forward would get a token id without an embedding; otherwise
    `None`."""
    if isinstance(result, BaseException):
        return None
    if isinstance(result, int):
        tokens = [result]
    else:
        tokens = [result.tokens[row] for row in result.rows if row not in result.finished]
    for token in tokens:
        if not 0 <= token < num_embeddings:
            return IndexError(  # the type of error that the embedding would raise
                f"token id {token} was chosen, but only ids from 0 to {num_embeddings - 1} have an"
                " embedding: the model's head is wider than its embedding, a logits processor"
                " widened the scores, a stopping criterion wrote the id, or it is `pad_token_id`"
            )
    return None


def _with_earlier(previous: Result | None, result: Result) -> Result:
    """Returns `result` with all tokens of `previous`, the previous position's result, as its
    `earlier_tokens`."""
    if isinstance(previous, SampledTokens) and isinstance(result, SampledTokens):
        earlier_tokens = (*previous.earlier_tokens, *previous.tokens)
        return result._replace(earlier_tokens=earlier_tokens)
    return result


def _advance_draft(decoding: Decoding, result: Result) -> bool:
    """If the row continues and its new token equals the draft's, so that the logits after this
    token are valid, advances the draft and returns `True`."""
    draft = decoding.draft
    if draft is None or not isinstance(result, SampledTokens) or decoding.is_done:
        return False
    return draft.advance(result.tokens)


def _next_logits(rows: LogitRows, decoding: Decoding) -> LogitRows:
    """Returns the logits for the decoding's next token."""
    if decoding.draft is None:
        return rows
    first = rows.start + decoding.draft.position
    return LogitRows(rows.logits, first, first + 1)


def sample_position(
    ready: Sequence[tuple[Decoding, LogitRows]],
    fetch: Fetch | None = None,
) -> list[Result]:
    """Chooses the next token of each open row of the decodings in `ready`, from one row of logits
    per open row, and returns the decodings' results. Single-row decodings with equal `batch_key`
    are sampled as one batch; in a batch of several decodings, those without a seeded generator draw
    by `draw_by_inversion`. An error or an interrupt in a caller's code becomes the result of its
    decoding only. `fetch` (default: `Tensor.tolist`) copies the tokens of all open rows to the
    host, in the order of the decodings. It is called at most once, and only if every decoding has
    chosen tokens on the device."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return sample_position(ready, fetch)
    results: dict[int, Result] = {}
    batches: list[SampledBatch] = []
    for indices in _batch_indices(ready):
        _try_choose(ready, indices, batches, results)
    if results or fetch is None:
        fetch = Tensor.tolist
    fetched_batches = _try_fetch(batches, fetch, results)
    for batch, tokens, columns in fetched_batches:
        results.update(zip(batch.indices, batch.accept(tokens, columns)))
    return [results[index] for index in range(len(ready))]


def _batch_indices(ready: Sequence[tuple[Decoding, LogitRows]]) -> Iterable[Sequence[int]]:
    """Returns the indices of the decodings of each batch."""
    constant_keys = [
        None if decoding.draft is not None else decoding.constant_key for decoding, _ in ready
    ]
    if None not in constant_keys and len(set(constant_keys)) == 1:
        return [range(len(ready))]
    groups: dict[Hashable, list[int]] = {}
    for index, (decoding, _) in enumerate(ready):
        key = constant_keys[index] or decoding.batch_key
        groups.setdefault(index if key is None else key, []).append(index)
    return groups.values()


def _try_choose(
    ready: Sequence[tuple[Any, LogitRows]],
    indices: Sequence[int],
    batches: list[SampledBatch],
    results: dict[int, Result],
) -> None:
    """Samples the decodings at these indices as one batch and adds it to `batches`; the result of a
    beam search goes to `results`. If sampling fails, samples each decoding separately, and adds the
    errors of decodings that fail to `results`. Re-raises an interrupt that stops a batch of several
    decodings."""
    decoding, rows = ready[indices[0]]
    try:
        if decoding.has_beams:
            with decoding.running_model():
                results[indices[0]] = decoding.step(rows.take())
        else:
            decodings, parts = zip(*[ready[index] for index in indices])
            batches.append(_choose(list(indices), list(decodings), join_rows(parts)))
    except BaseException as error:
        if len(indices) == 1:
            results[indices[0]] = error
            return
        if is_interrupt(error):
            raise
        for index in indices:
            _try_choose(ready, [index], batches, results)


def _choose(
    indices: list[int],
    decodings: list[SampleDecoding],
    logits: Tensor,
) -> SampledBatch:
    """Chooses tokens from the `(n, vocab)` logits of all open rows of these decodings."""
    if all(map(_CHOOSES_ARGMAX, decodings)):
        return SampledBatch(indices, decodings, argmax(logits), [])
    if len(decodings) == 1:
        raw, scores = decodings[0].process(logits)
    else:
        raw = logits.to(torch.float32)
        batchable = [decoding.batchable for decoding in decodings if decoding.batchable is not None]
        scores = process_together(raw, batchable)
    if decodings[0].do_sample:
        tokens = _draw_from_scores(decodings, scores)
    else:
        tokens = argmax(scores)
    are_recorded = (decoding.record_logprobs for decoding in decodings for _ in decoding.open_rows)
    recorded_indices = [row for row, is_recorded in enumerate(are_recorded) if is_recorded]
    logprobs: list[Tensor] = []
    if recorded_indices:
        recorded_tokens = select_rows(tokens, recorded_indices).clamp_min(0)
        recorded_raw = select_rows(raw, recorded_indices)
        recorded_scores = select_rows(scores, recorded_indices)
        before = logprobs_of(recorded_raw, recorded_tokens)
        after = logprobs_of(recorded_scores, recorded_tokens)
        logprobs = [before, after]
        num_alternatives = max(decoding.num_alternatives for decoding in decodings)
        if num_alternatives:
            logprobs += alternatives(recorded_raw, recorded_scores, num_alternatives)
    return SampledBatch(indices, decodings, tokens, logprobs)


def _draw_from_scores(decodings: list[SampleDecoding], scores: Tensor) -> Tensor:
    """Draws tokens `(n,)` from `(n, vocab)` scores; `_NO_TOKEN` for rows whose scores allow no
    token. For a single decoding on the CPU, raises torch's error instead."""
    probs = scores.softmax(dim=-1)
    if len(decodings) == 1 and probs.is_cpu:
        return decodings[0].draw(probs)
    is_drawable = probs.sum(dim=-1) > 0
    if not probs.is_cpu or not is_drawable.all():
        # rows whose scores allow no token still draw, uniformly, so that they do not change the
        # random numbers of the rows after them
        probs = torch.where(is_drawable[:, None], probs, 1.0)
    return torch.where(is_drawable, _draw_from_probs(decodings, probs), _NO_TOKEN)


def _draw_from_probs(decodings: list[SampleDecoding], probs: Tensor) -> Tensor:
    """Draws tokens `(n,)` from `(n, vocab)` probabilities. If there are several decodings, those
    without a seeded generator draw together, and each of the others separately; a single decoding
    draws its rows by `SampleDecoding.draw`."""
    if len(decodings) == 1:
        return decodings[0].draw(probs)
    unseeded_rows = [row for row, decoding in enumerate(decodings) if decoding.generator is None]
    if len(unseeded_rows) == len(decodings):
        return draw_by_inversion(probs)
    shared_draws: Iterator[Tensor] = iter(())
    if unseeded_rows:
        shared_draws = iter(draw_by_inversion(select_rows(probs, unseeded_rows)).split(1))
    draws = []
    for decoding, row_probs in zip(decodings, probs.split(1)):
        is_seeded = decoding.generator is not None
        draws.append(decoding.draw(row_probs) if is_seeded else next(shared_draws))
    return torch.cat(draws)


def _try_fetch(
    batches: list[SampledBatch],
    fetch: Fetch,
    results: dict[int, Result],
) -> list[HostBatch]:
    """Returns each batch with its tokens and log-probabilities on the host. If the copies fail,
    copies each batch separately, and adds the errors of batches that fail to `results`. An
    interrupt that is an `Exception` becomes the result of all decodings."""
    fetched_batches: list[HostBatch] = []
    try:
        tokens_of_batches = _fetch(batches, fetch)
        for batch, tokens in zip(batches, tokens_of_batches):
            columns = list(map(Tensor.tolist, batch.logprobs))
            fetched_batches.append((batch, tokens, columns))
        return fetched_batches
    except Exception as error:
        if len(batches) == 1 or is_interrupt(error):
            for batch in batches:
                results.update(dict.fromkeys(batch.indices, error))
            return []
    fetched_batches = []
    for batch in batches:
        fetched_batches += _try_fetch([batch], Tensor.tolist, results)
    return fetched_batches


def _fetch(batches: list[SampledBatch], fetch: Fetch) -> list[list[int]]:
    """Returns the tokens of each batch, copied to the host by one call of `fetch`."""
    if len(batches) < 2:
        return [fetch(batch.tokens) for batch in batches]
    device = batches[0].tokens.device
    tokens = torch.cat([batch.tokens.to(device) for batch in batches])
    indices: list[int] = []  # by row of `tokens`: the index of its decoding
    for batch in batches:
        for index, decoding in zip(batch.indices, batch.decodings):
            indices += [index] * len(decoding.open_rows)
    order = sorted(range(len(indices)), key=indices.__getitem__)
    token_by_row = dict(zip(order, fetch(tokens[numbers_on(device, order)])))
    rows = itertools.count()
    return [[token_by_row[next(rows)] for _ in range(len(batch.tokens))] for batch in batches]
