"""One step of many decodings: tokens are chosen from logits on the device, and accepted on the host."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...step import to_device
from .base import Decoding, Fetch, Record, SampledTokens, stop_string_hits
from .beam import BeamDecoding
from .sample import SampleDecoding
from .scores import alternatives, argmax, invert, logprobs_of, pick, stack_rows, together

Result = SampledTokens | BaseException
_NO_TOKEN = -1  # for a row whose scores allow no token


@dataclass
class Choice:
    """The next tokens of a batch of decodings, on their device."""

    places: list[int]  # positions of the decodings in the step
    batch: list[SampleDecoding]
    tokens: Tensor  # (open rows,) int64, may contain `_NO_TOKEN`
    # if any row is recorded: (recorded rows,) log-probabilities before and after processors; if any has alternatives:
    # their (recorded rows, k) ids and both log-probabilities
    logprobs: list[Tensor]

    def records(self) -> list[Record]:
        """Returns a record for each open row, zeros for rows that are not recorded; empty if none is recorded."""
        recorded = zip(*(values.tolist() for values in self.logprobs))
        rows = [decoding for decoding in self.batch for _ in decoding.open_rows] if self.logprobs else []
        return [
            _record(*next(recorded), decoding.num_top) if decoding.record_logprobs else _NOTHING for decoding in rows
        ]


_NOTHING: Record = ((0.0, 0.0), [])


def _record(raw: float, processed: float, *rest: Any) -> Record:
    *top, count = rest
    return (raw, processed), list(zip(*top))[:count]


def sample_step(ready: Sequence[tuple[Decoding, Tensor]], fetch: Fetch | None = None) -> list[Result]:
    """Takes one step of each decoding with its logits, `(len(open_rows), vocab)` of any float dtype; `(n + 1, vocab)`
    for a decoding with a draft of `n` tokens. Such a decoding accepts tokens as long as they equal the draft's, and one
    more, each as if sampled in a separate step. `fetch` as in `sample_position`."""
    if all(decoding.draft is None for decoding, _ in ready):
        return sample_position(ready, fetch)
    results: dict[int, Result] = {}
    best = [(place, *each) for place, each in enumerate(ready) if each[0].draft is not None and _takes_maximum(each[0])]
    if best:
        results.update(_accept_best(best))
    rest = [place for place in range(len(ready)) if place not in results]
    while rest:
        parts = [(decoding, _at(logits, decoding)) for decoding, logits in (ready[place] for place in rest)]
        for place, result in zip(rest, sample_position(parts)):
            results[place] = _with_earlier(results.get(place), result)
        rest = [place for place in rest if _goes_on(ready[place][0], results[place])]
    return [results[place] for place in range(len(ready))]


def _takes_maximum(decoding: Decoding) -> bool:
    return isinstance(decoding, SampleDecoding) and decoding.takes_maximum


def _accept_best(members: list[tuple[int, Any, Tensor]]) -> dict[int, Result]:
    """Accepts drafts of greedy decodings without processors, with one argmax for all."""
    places, batch, parts = zip(*members)
    tokens, start = argmax(torch.cat(parts)).tolist(), 0
    found: dict[int, Result] = {}
    for place, decoding, part in zip(places, batch, parts):
        found[place] = _accept_run(decoding, tokens[start : start + len(part)])
        start += len(part)
    return found


def _accept_run(decoding: SampleDecoding, chosen: list[int]) -> Result:
    """Accepts tokens of consecutive positions, as long as they equal the draft's, and one more."""
    if decoding.takes_runs and decoding.draft is not None:
        pairs = enumerate(zip(chosen, decoding.draft.tokens), 1)
        last = next((place for place, (token, guess) in pairs if token != guess), len(chosen))
        return decoding.accept_run(chosen[:last])
    earlier: list[int] = []
    for token in chosen:
        result: Result
        if decoding.stop_checker.stop_strings:
            (result,) = _accept([decoding], [token], [])
        else:
            try:
                result = decoding.accept([token])
            except BaseException as error:
                result = error
        if not _goes_on(decoding, result):
            break
        earlier.append(token)
    return replace(result, earlier=tuple(earlier)) if earlier and isinstance(result, SampledTokens) else result


def _with_earlier(before: Result | None, result: Result) -> Result:
    if isinstance(before, SampledTokens) and isinstance(result, SampledTokens):
        return replace(result, earlier=(*before.earlier, *before.tokens))
    return result


def _goes_on(decoding: Decoding, result: Result) -> bool:
    """Whether the token just chosen is the draft's, so that the logits behind it are valid; advances `draft.position`
    then."""
    draft = decoding.draft
    if draft is None or not isinstance(result, SampledTokens) or decoding.is_done:
        return False
    if draft.position == len(draft.tokens) or result.tokens[0] != draft.tokens[draft.position]:
        return False
    draft.position += 1
    return True


def _at(logits: Tensor, decoding: Decoding) -> Tensor:
    """Returns the logits for the decoding's next token."""
    return logits if decoding.draft is None else logits[decoding.draft.position : decoding.draft.position + 1]


@torch.no_grad()
def sample_position(ready: Sequence[tuple[Decoding, Tensor]], fetch: Fetch | None = None) -> list[Result]:
    """Takes one step of each decoding with its logits, `(len(open_rows), vocab)` of any float dtype. One-row decodings
    with equal `batch_key` are sampled as one batch; those without a seeded generator draw by `invert`. An error or an
    interrupt in a caller's code becomes the result of its decoding only. `fetch` brings the tokens of all open rows to
    the host, in the order of the decodings; it is called at most once, and only if all have tokens."""
    groups: dict[Hashable, list[int]] = {}
    for place, (decoding, _) in enumerate(ready):
        key = decoding.batch_key if isinstance(decoding, SampleDecoding) else None
        groups.setdefault(place if key is None else key, []).append(place)
    results: dict[int, Result] = {}
    choices: list[Choice] = []
    for places in groups.values():
        _choose_or_fail([(place, *ready[place]) for place in places], choices, results)
    if results or fetch is None:
        fetch = Tensor.tolist
    for choice, tokens, records in _fetch_or_fail(choices, fetch, results):
        results.update(zip(choice.places, _accept(choice.batch, tokens, records)))
    return [results[place] for place in range(len(ready))]


def _choose_or_fail(members: list[tuple[int, Any, Tensor]], choices: list[Choice], results: dict[int, Result]) -> None:
    """Adds a choice for these decodings, which share a batch; if the batch fails, chooses for each one separately, and
    stores the errors of those that fail."""
    (place, decoding, logits), *others = members
    try:
        if isinstance(decoding, BeamDecoding):
            results[place] = decoding.step(logits)
        else:
            places, batch, parts = zip(*members)
            choices.append(_choose(list(places), list(batch), stack_rows(parts)))
    except BaseException as error:
        if not others:
            results[place] = error
            return
        if not isinstance(error, Exception):
            raise
        for member in members:
            _choose_or_fail([member], choices, results)


def _choose(places: list[int], batch: list[SampleDecoding], logits: Tensor) -> Choice:
    """Chooses tokens from the `(n, vocab)` logits of all open rows of the batch."""
    if all(decoding.takes_maximum for decoding in batch):
        return Choice(places, batch, argmax(logits), [])
    if len(batch) == 1:
        raw, scores = batch[0].process(logits)
    else:
        raw = logits.to(torch.float32)
        scores = together(raw, [each.batchable for each in batch if each.batchable is not None])
    tokens = _draw(batch, scores) if batch[0].do_sample else argmax(scores)
    if tokens.shape != logits.shape[:1]:
        raise RuntimeError(f"the logits processors made scores {tuple(scores.shape)} of logits {tuple(logits.shape)}")
    records = (decoding.record_logprobs for decoding in batch for _ in decoding.open_rows)
    recorded = [row for row, is_recorded in enumerate(records) if is_recorded]
    logprobs: list[Tensor] = []
    if recorded:
        chosen = pick(tokens, recorded).clamp_min(0)
        kept = pick(raw, recorded), pick(scores, recorded)
        logprobs = [logprobs_of(values, chosen) for values in kept]
        if num_top := max(decoding.num_top for decoding in batch):
            logprobs += alternatives(*kept, num_top)
    return Choice(places, batch, tokens, logprobs)


def _draw(batch: list[SampleDecoding], scores: Tensor) -> Tensor:
    """Draws tokens `(n,)` from `(n, vocab)` scores; `_NO_TOKEN` for rows whose scores allow none. For a single decoding
    on the CPU, raises torch's error instead."""
    probs = torch.nn.functional.softmax(scores, dim=-1)
    if len(batch) == 1 and probs.is_cpu:
        return batch[0].draw(probs)
    is_drawn = probs.sum(dim=-1) > 0
    if not probs.is_cpu or not is_drawn.all():
        probs = torch.where(is_drawn[:, None], probs, 1.0)  # keeps the draws of the other rows as they are
    return torch.where(is_drawn, _draw_rows(batch, probs), _NO_TOKEN)


def _draw_rows(batch: list[SampleDecoding], probs: Tensor) -> Tensor:
    if len(batch) == 1:
        return batch[0].draw(probs)
    own = [i for i, decoding in enumerate(batch) if decoding.generator is not None]
    if not own:
        return invert(probs)
    seeded = torch.cat([batch[i].draw(row) for i, row in zip(own, pick(probs, own).split(1))])
    shared = [i for i, decoding in enumerate(batch) if decoding.generator is None]
    if not shared:
        return seeded
    order = sorted(range(len(batch)), key=[*own, *shared].__getitem__)
    return torch.cat([seeded, invert(pick(probs, shared))])[to_device(torch.tensor(order, device="cpu"), probs.device)]


def _fetch_or_fail(
    choices: list[Choice], fetch: Fetch, results: dict[int, Result]
) -> list[tuple[Choice, list[int], list[Record]]]:
    """Returns each choice with its tokens and records on the host. If fetching fails, fetches each choice separately,
    and stores the errors of those that fail."""
    try:
        return [(choice, found, choice.records()) for choice, found in zip(choices, _fetch(choices, fetch))]
    except Exception as error:
        if len(choices) == 1:
            results.update(dict.fromkeys(choices[0].places, error))
            return []
    return [each for choice in choices for each in _fetch_or_fail([choice], Tensor.tolist, results)]


def _fetch(choices: list[Choice], fetch: Fetch) -> list[list[int]]:
    """Returns the tokens of each choice, brought to the host by one call of `fetch`."""
    if len(choices) < 2:
        return [fetch(choice.tokens) for choice in choices]
    device = choices[0].tokens.device
    parts: dict[int, Tensor] = {}
    for choice in choices:
        sizes = [len(decoding.open_rows) for decoding in choice.batch]
        parts.update(zip(choice.places, choice.tokens.to(device).split(sizes)))
    found = iter(fetch(torch.cat([parts[place] for place in sorted(parts)])))
    by_place = {place: [next(found) for _ in range(len(parts[place]))] for place in sorted(parts)}
    return [[token for place in choice.places for token in by_place[place]] for choice in choices]


def _accept(batch: list[SampleDecoding], tokens: list[int], records: list[Record]) -> list[Result]:
    """Lets each decoding accept the tokens of its open rows, with their records; returns the results."""
    ends = list(itertools.accumulate(len(decoding.open_rows) for decoding in batch))
    parts = [slice(end - len(decoding.open_rows), end) for decoding, end in zip(batch, ends)]
    try:
        stopped = _stopped([(decoding, row) for decoding in batch for row in decoding.open_rows], tokens)
    except BaseException as error:
        if len(batch) == 1:
            return [error]
        if not isinstance(error, Exception):
            raise
        return [_accept([decoding], tokens[part], records[part])[0] for decoding, part in zip(batch, parts)]
    results: list[Result] = []
    for decoding, part in zip(batch, parts):
        try:
            if _NO_TOKEN in tokens[part]:
                raise RuntimeError("the scores of the next token contain nan, or no token has a finite one")
            own = records[part] if decoding.record_logprobs else ()
            stops = [i in stopped for i in range(part.start, part.stop)] if stopped else ()
            results.append(decoding.accept(tokens[part], own, stops))
        except BaseException as error:
            results.append(error)
    return results


def _stopped(rows: list[tuple[SampleDecoding, int]], tokens: list[int]) -> set[int]:
    """Returns which rows complete a stop string with their new tokens. Evaluates equal criteria once."""
    groups: dict[Hashable, tuple[Any, list[int]]] = {}
    for i, (decoding, _) in enumerate(rows):
        for criterion in decoding.stop_checker.stop_strings:
            groups.setdefault((criterion.stop_strings, id(criterion.embedding_vec)), (criterion, []))[1].append(i)
    found: set[int] = set()
    for criterion, places in groups.values():
        count = criterion.maximum_token_len - 1
        tails = [[*rows[i][0].tail(rows[i][1], count), tokens[i]] for i in places]
        found |= {i for i, hit in zip(places, stop_string_hits(criterion, tails)) if hit}
    return found
