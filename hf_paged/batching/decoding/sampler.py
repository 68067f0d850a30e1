"""One step of many decodings: tokens are chosen from logits on the device, and accepted on the
host."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...interrupts import is_interrupt
from ...step import ids_to_device
from .base import (
    Decoding,
    Fetch,
    LogitRows,
    Record,
    Result,
    SampledTokens,
    join_rows,
    stop_string_hits,
)
from .beam import BeamDecoding
from .sample import SampleDecoding
from .scores import alternatives, argmax, invert, logprobs_of, pick, together

_NO_TOKEN = -1  # for a row whose scores allow no token
_TAKES_MAXIMUM = operator.attrgetter("takes_maximum")
_IS_SIMPLE = operator.attrgetter("is_simple")


@dataclass
class Choice:
    """The next tokens of a batch of decodings, on their device."""

    places: list[int]  # positions of the decodings in the step
    batch: list[SampleDecoding]
    tokens: Tensor  # (open rows,) int64, may contain `_NO_TOKEN`
    # if any row is recorded: (recorded rows,) log-probabilities before and after processors; if any
    # has alternatives: their (recorded rows, k) ids and both log-probabilities
    logprobs: list[Tensor]

    def records(self) -> list[Record]:
        """Returns a record for each open row, of which some are recorded: zeros for the others."""
        columns = [values.tolist() for values in self.logprobs]
        recorded = zip(*columns)
        records: list[Record] = []
        for decoding in self.batch:
            for _ in decoding.open_rows:
                if decoding.record_logprobs:
                    record = _record(*next(recorded), decoding.num_top)
                else:
                    record = _NOTHING
                records.append(record)
        return records


_NOTHING: Record = ((0.0, 0.0), [])


def _record(raw: float, processed: float, *rest: Any) -> Record:
    *columns, count = rest
    top = list(zip(*columns))
    return (raw, processed), top[:count]


def sample_step(
    ready: Sequence[tuple[Decoding, LogitRows]],
    fetch: Fetch | None = None,
) -> list[Result]:
    """Takes one step of each decoding with its logits, one row for each of its open rows; `n + 1`
    for a decoding with a draft of `n` tokens. Such a decoding accepts tokens as long as they equal
    the draft's, and one more, each as if sampled in a separate step. `fetch` as in
    `sample_position`."""
    drafted = [index for index, (row, _) in enumerate(ready) if row.draft is not None]
    if not drafted:
        return sample_position(ready, fetch)
    results: dict[int, Result] = {}
    greedy = [(index, *ready[index]) for index in drafted if ready[index][0].takes_maximum]
    if greedy:
        results.update(_accept_best(greedy))
    indices = range(len(ready))
    rest = [index for index in indices if index not in results]
    while rest:
        members = [ready[index] for index in rest]
        parts = [(decoding, _at(rows, decoding)) for decoding, rows in members]
        for index, result in zip(rest, sample_position(parts)):
            results[index] = _with_earlier(results.get(index), result)
        rest = [index for index in rest if _goes_on(ready[index][0], results[index])]
    return [results[index] for index in indices]


def unknown_token(result: Result, num_embeddings: int) -> IndexError | None:
    """Returns an error if the next forward would get an id without an embedding."""
    if isinstance(result, BaseException):
        return None
    if isinstance(result, int):
        tokens = [result]
    else:
        tokens = [result.tokens[row] for row in result.rows if row not in result.finished]
    for token in tokens:
        if not 0 <= token < num_embeddings:
            return IndexError(  # as the embedding raises
                f"token id {token} was chosen, but ids from 0 to {num_embeddings - 1} have an"
                " embedding: a logits processor widened the scores, or a stopping criterion wrote"
                " the id"
            )
    return None


def _accept_best(members: list[tuple[int, Any, LogitRows]]) -> dict[int, Result]:
    """Accepts drafts of greedy decodings without processors, with one argmax for all."""
    logits = join_rows([rows for _, _, rows in members])
    tokens = argmax(logits).tolist()
    start = 0
    results: dict[int, Result] = {}
    for index, decoding, rows in members:
        end = start + rows.end - rows.start
        results[index] = _accept_run(decoding, tokens[start:end])
        start = end
    return results


def _accept_run(decoding: SampleDecoding, chosen: list[int]) -> Result:
    """Accepts tokens of consecutive positions, as long as they equal the draft's, and one more."""
    if decoding.takes_runs and decoding.draft is not None:
        count = len(chosen)
        pairs = zip(chosen, decoding.draft.tokens)
        for position, (token, guess) in enumerate(pairs):
            if token != guess:
                count = position + 1
                break
        return decoding.accept_run(chosen[:count])
    run: Result | None = None
    for token in chosen:
        (result,) = _accept([decoding], [token], [])
        run = _with_earlier(run, result)
        if not _goes_on(decoding, result):
            break
    assert run is not None
    return run


def _with_earlier(before: Result | None, result: Result) -> Result:
    if isinstance(before, SampledTokens) and isinstance(result, SampledTokens):
        earlier = (*before.earlier, *before.tokens)
        return result._replace(earlier=earlier)
    return result


def _goes_on(decoding: Decoding, result: Result) -> bool:
    """Whether the token just chosen is the draft's, so that the logits behind it are valid;
    advances `draft.position` then."""
    draft = decoding.draft
    if draft is None or not isinstance(result, SampledTokens) or decoding.is_done:
        return False
    if result.tokens != draft.tokens[draft.position : draft.position + 1]:
        return False
    draft.position += 1
    return True


def _at(rows: LogitRows, decoding: Decoding) -> LogitRows:
    """Returns the logits for the decoding's next token."""
    if decoding.draft is None:
        return rows
    first = rows.start + decoding.draft.position
    return LogitRows(rows.logits, first, first + 1)


def sample_position(
    ready: Sequence[tuple[Decoding, LogitRows]],
    fetch: Fetch | None = None,
) -> list[Result]:
    """Takes one step of each decoding with its logits, one row for each of its open rows. One-row
    decodings with equal `batch_key` are sampled as one batch; those without a seeded generator draw
    by `invert`. An error or an interrupt in a caller's code becomes the result of its decoding
    only. `fetch` brings the tokens of all open rows to the host, in the order of the decodings; it
    is called at most once, and only if all have tokens."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return sample_position(ready, fetch)
    results: dict[int, Result] = {}
    choices: list[Choice] = []
    for indices in _groups(ready):
        _choose_or_fail(ready, indices, choices, results)
    if results or fetch is None:
        fetch = Tensor.tolist
    fetched = _fetch_or_fail(choices, fetch, results)
    for choice, tokens, records in fetched:
        results.update(zip(choice.places, _accept(choice.batch, tokens, records)))
    return [results[index] for index in range(len(ready))]


def _groups(ready: Sequence[tuple[Decoding, LogitRows]]) -> Iterable[Sequence[int]]:
    """Returns the indices of decodings that are sampled as one batch."""
    constants = [None if row.draft is not None else row.constant_key for row, _ in ready]
    if None not in constants and len(set(constants)) == 1:
        return [range(len(ready))]
    groups: dict[Hashable, list[int]] = {}
    for index, ((decoding, _), key) in enumerate(zip(ready, constants)):
        if key is None:
            key = decoding.batch_key
        if key is None:
            key = index
        groups.setdefault(key, []).append(index)
    return groups.values()


def _choose_or_fail(
    ready: Sequence[tuple[Any, LogitRows]],
    indices: Sequence[int],
    choices: list[Choice],
    results: dict[int, Result],
) -> None:
    """Adds a choice for the decodings at these indices, which share a batch; if the batch fails,
    chooses for each one separately, and stores the errors of those that fail."""
    decoding, rows = ready[indices[0]]
    try:
        if isinstance(decoding, BeamDecoding):
            results[indices[0]] = decoding.step(rows.take())
        else:
            batch, parts = zip(*[ready[index] for index in indices])
            choices.append(_choose(list(indices), list(batch), join_rows(parts)))
    except BaseException as error:
        if len(indices) == 1:
            results[indices[0]] = error
            return
        if is_interrupt(error):
            raise
        for index in indices:
            _choose_or_fail(ready, [index], choices, results)


def _choose(
    places: list[int],
    batch: list[SampleDecoding],
    logits: Tensor,
) -> Choice:
    """Chooses tokens from the `(n, vocab)` logits of all open rows of the batch."""
    if all(map(_TAKES_MAXIMUM, batch)):
        return Choice(places, batch, argmax(logits), [])
    if len(batch) == 1:
        raw, scores = batch[0].process(logits)
    else:
        raw = logits.to(torch.float32)
        batchable = [row.batchable for row in batch if row.batchable is not None]
        scores = together(raw, batchable)
    if batch[0].do_sample:
        tokens = _draw(batch, scores)
    else:
        tokens = argmax(scores)
    if tokens.shape != logits.shape[:1]:
        raise RuntimeError(
            f"the logits processors returned scores {tuple(scores.shape)} for logits"
            f" {tuple(logits.shape)}"
        )
    records = (decoding.record_logprobs for decoding in batch for _ in decoding.open_rows)
    recorded = [row for row, is_recorded in enumerate(records) if is_recorded]
    logprobs: list[Tensor] = []
    if recorded:
        chosen = pick(tokens, recorded).clamp_min(0)
        kept_raw = pick(raw, recorded)
        kept_scores = pick(scores, recorded)
        before = logprobs_of(kept_raw, chosen)
        after = logprobs_of(kept_scores, chosen)
        logprobs = [before, after]
        num_top = max(decoding.num_top for decoding in batch)
        if num_top:
            logprobs += alternatives(kept_raw, kept_scores, num_top)
    return Choice(places, batch, tokens, logprobs)


def _draw(batch: list[SampleDecoding], scores: Tensor) -> Tensor:
    """Draws tokens `(n,)` from `(n, vocab)` scores; `_NO_TOKEN` for rows whose scores allow none.
    For a single decoding on the CPU, raises torch's error instead."""
    probs = torch.nn.functional.softmax(scores, dim=-1)
    if len(batch) == 1 and probs.is_cpu:
        return batch[0].draw(probs)
    is_drawn = probs.sum(dim=-1) > 0
    if not probs.is_cpu or not is_drawn.all():
        # keeps the draws of the other rows as they are
        probs = torch.where(is_drawn[:, None], probs, 1.0)
    return torch.where(is_drawn, _draw_rows(batch, probs), _NO_TOKEN)


def _draw_rows(batch: list[SampleDecoding], probs: Tensor) -> Tensor:
    if len(batch) == 1:
        return batch[0].draw(probs)
    seeded = [i for i, decoding in enumerate(batch) if decoding.generator is not None]
    if not seeded:
        return invert(probs)
    unseeded = [i for i, decoding in enumerate(batch) if decoding.generator is None]
    seeded_probs = pick(probs, seeded).split(1)
    pairs = zip(seeded, seeded_probs)
    drawn = torch.cat([batch[i].draw(row_probs) for i, row_probs in pairs])
    if not unseeded:
        return drawn
    sources = [*seeded, *unseeded]
    order = sorted(range(len(batch)), key=sources.__getitem__)
    inverted = invert(pick(probs, unseeded))
    all_drawn = torch.cat([drawn, inverted])
    return all_drawn[ids_to_device(order, probs.device)]


def _fetch_or_fail(
    choices: list[Choice],
    fetch: Fetch,
    results: dict[int, Result],
) -> list[tuple[Choice, list[int], list[Record]]]:
    """Returns each choice with its tokens and records on the host. If fetching fails, fetches each
    choice separately, and stores the errors of those that fail."""
    fetched: list[tuple[Choice, list[int], list[Record]]] = []
    try:
        tokens_of_choices = _fetch(choices, fetch)
        for choice, tokens in zip(choices, tokens_of_choices):
            records = choice.records() if choice.logprobs else []
            fetched.append((choice, tokens, records))
        return fetched
    except Exception as error:
        if len(choices) == 1 or is_interrupt(error):
            for choice in choices:
                results.update(dict.fromkeys(choice.places, error))
            return []
    fetched = []
    for choice in choices:
        fetched += _fetch_or_fail([choice], Tensor.tolist, results)
    return fetched


def _fetch(choices: list[Choice], fetch: Fetch) -> list[list[int]]:
    """Returns the tokens of each choice, brought to the host by one call of `fetch`."""
    if len(choices) < 2:
        return [fetch(choice.tokens) for choice in choices]
    device = choices[0].tokens.device
    parts: dict[int, Tensor] = {}
    for choice in choices:
        sizes = [len(decoding.open_rows) for decoding in choice.batch]
        tokens = choice.tokens.to(device)
        parts.update(zip(choice.places, tokens.split(sizes)))
    order = sorted(parts)
    in_order = torch.cat([parts[index] for index in order])
    fetched = iter(fetch(in_order))
    on_host: dict[int, list[int]] = {}
    for index in order:
        count = len(parts[index])
        on_host[index] = [next(fetched) for _ in range(count)]
    tokens_of_choices: list[list[int]] = []
    for choice in choices:
        chosen = [token for index in choice.places for token in on_host[index]]
        tokens_of_choices.append(chosen)
    return tokens_of_choices


def _accept(
    batch: list[SampleDecoding],
    tokens: list[int],
    records: list[Record],
) -> list[Result]:
    """Lets each decoding accept the tokens of its open rows, with their records; returns the
    results."""
    if all(map(_IS_SIMPLE, batch)) and _NO_TOKEN not in tokens:
        return SampleDecoding.accept_each(batch, tokens)
    counts = [len(decoding.open_rows) for decoding in batch]
    ends = itertools.accumulate(counts)
    parts = [slice(end - count, end) for count, end in zip(counts, ends)]
    results: list[Result] = []
    try:
        rows = [(decoding, row) for decoding in batch for row in decoding.open_rows]
        stopped = _stopped(rows, tokens)
    except BaseException as error:
        if len(batch) == 1:
            return [error]
        if is_interrupt(error):
            raise
        for decoding, part in zip(batch, parts):
            results += _accept([decoding], tokens[part], records[part])
        return results
    for decoding, part in zip(batch, parts):
        try:
            if _NO_TOKEN in tokens[part]:
                raise RuntimeError(
                    "the scores of the next token contain nan, or no token has a finite one"
                )
            recorded: Sequence[Record] = ()
            if decoding.record_logprobs:
                recorded = records[part]
            stops: Sequence[bool] = ()
            if stopped:
                indices = range(part.start, part.stop)
                stops = [index in stopped for index in indices]
            results.append(decoding.accept(tokens[part], recorded, stops))
        except BaseException as error:
            results.append(error)
    return results


def _stopped(rows: list[tuple[SampleDecoding, int]], tokens: list[int]) -> set[int]:
    """Returns which rows complete a stop string with their new tokens. Evaluates equal criteria
    once."""
    groups: dict[Hashable, tuple[Any, list[int]]] = {}
    for index, (decoding, _) in enumerate(rows):
        for criterion in decoding.stop_checker.stop_strings:
            table = getattr(criterion, "embedding_vec", criterion)
            key = (criterion.stop_strings, id(table))
            _, members = groups.setdefault(key, (criterion, []))
            members.append(index)
    stopped: set[int] = set()
    for criterion, members in groups.values():
        count = criterion.maximum_token_len - 1
        tails: list[list[int]] = []
        for index in members:
            decoding, row = rows[index]
            tail = decoding.tail(row, count)
            tails.append([*tail, tokens[index]])
        are_hits = stop_string_hits(criterion, tails)
        for index, is_hit in zip(members, are_hits):
            if is_hit:
                stopped.add(index)
    return stopped
