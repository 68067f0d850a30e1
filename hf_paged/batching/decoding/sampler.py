"""One step of many decodings: logits to tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import Decoding, Fetch, SampledTokens, stop_string_hits
from .beam import BeamDecoding
from .sample import SampleDecoding
from .scores import argmax, invert, logprobs_of, pick, together

Result = SampledTokens | BaseException


@torch.no_grad()
def sample_step(ready: Sequence[tuple[Decoding, Tensor]], fetch: Fetch | None = None) -> list[Result]:
    """One step of each decoding with its logits, `(len(open_rows), vocab)` of any float dtype. Decodings of one row
    and of equal `batch_key` are one batch and, without a generator of their own, draw by `invert`. What goes wrong or
    interrupts a caller's code is the entry of its decoding alone. `fetch` brings tokens to the host, at most once."""
    groups: dict[Hashable, list[int]] = {}
    for place, (decoding, _) in enumerate(ready):
        key = decoding.batch_key if isinstance(decoding, SampleDecoding) else None
        groups.setdefault(place if key is None else key, []).append(place)
    if len(groups) > 1 or fetch is None:
        fetch = Tensor.tolist
    results: dict[int, Result] = {}
    for places in groups.values():
        results.update(zip(places, _step([ready[place] for place in places], fetch)))
    return [results[place] for place in range(len(ready))]


def _step(ready: list[tuple[Any, Tensor]], fetch: Fetch) -> list[Result]:
    batch = [decoding for decoding, _ in ready]
    try:
        if isinstance(batch[0], BeamDecoding):
            return [batch[0].step(ready[0][1])]
        rows = [(decoding, row) for decoding in batch for row in decoding.open_rows]
        tokens, logprobs, failed = _choose(batch, rows, _stack([logits for _, logits in ready]), fetch)
        stopped = _stopped(rows, tokens)
    except BaseException as error:
        if len(ready) == 1:
            return [error]
        if not isinstance(error, Exception):
            raise
        return [_step([each], Tensor.tolist)[0] for each in ready]
    results: list[Result] = []
    start = 0
    for decoding in batch:
        end = start + len(decoding.open_rows)
        try:
            if start in failed:
                raise RuntimeError("the scores of the next token contain nan, or no token has a finite one")
            pairs = [logprobs[i] for i in range(start, end)] if decoding.record_logprobs else ()
            stops = [i in stopped for i in range(start, end)] if stopped else ()
            results.append(decoding.accept(tokens[start:end], pairs, stops))
        except BaseException as error:
            results.append(error)
        start = end
    return results


def _stack(parts: list[Tensor]) -> Tensor:
    """`(1, vocab)` each, to `(n, vocab)`: a view where they lie one after the other in one tensor."""
    first = parts[0]
    if len(parts) == 1:
        return first
    start, size = first.data_ptr(), first.nbytes
    room = first.untyped_storage().nbytes() - first.storage_offset() * first.element_size()
    if room >= len(parts) * size and first.is_contiguous():
        if all(part.data_ptr() == start + i * size for i, part in enumerate(parts)):
            return first.as_strided((len(parts), first.shape[1]), (first.shape[1], 1))
    return torch.cat(parts)


def _choose(
    batch: list[SampleDecoding], rows: list[tuple[SampleDecoding, int]], logits: Tensor, fetch: Fetch
) -> tuple[list[int], dict[int, tuple[float, float]], list[int]]:
    """The next tokens of all rows by `(n, vocab)` logits, log-probabilities by row, and which rows have no token."""
    if all(decoding.takes_maximum for decoding in batch):
        return fetch(argmax(logits)), {}, []
    if len(batch) == 1:
        raw, scores = batch[0].process(logits)
    else:
        raw = logits.to(torch.float32)
        scores = together(raw, [each.batchable for each in batch if each.batchable is not None])
    chosen, failed = _draw(batch, scores) if batch[0].do_sample else (argmax(scores), [])
    logprobs: dict[int, tuple[float, float]] = {}
    recorded = [i for i, (decoding, _) in enumerate(rows) if decoding.record_logprobs]
    if recorded:
        of_rows = (logprobs_of(pick(values, recorded), pick(chosen, recorded)) for values in (raw, scores))
        logprobs = dict(zip(recorded, zip(*of_rows)))
    return fetch(chosen), logprobs, failed


def _draw(batch: list[SampleDecoding], scores: Tensor) -> tuple[Tensor, list[int]]:
    """Tokens `(n,)` drawn by `(n, vocab)` scores; and which rows of a batch of several decodings have none to draw."""
    probs = torch.nn.functional.softmax(scores, dim=-1)
    if len(batch) == 1:
        return batch[0].draw(probs), []
    failed = [i for i, total in enumerate(probs.sum(dim=-1).tolist()) if not total > 0]
    if failed:
        probs[failed] = 1.0  # the others draw what they would draw anyway
    own = [i for i, decoding in enumerate(batch) if decoding.generator is not None]
    if not own:
        return invert(probs), failed
    drawn = torch.empty(len(batch), dtype=torch.long, device=probs.device)
    drawn[own] = torch.cat([batch[i].draw(row) for i, row in zip(own, pick(probs, own).split(1))])
    if len(own) < len(batch):
        shared = [i for i, decoding in enumerate(batch) if decoding.generator is None]
        drawn[shared] = invert(probs[shared])
    return drawn, failed


def _stopped(rows: list[tuple[SampleDecoding, int]], tokens: list[int]) -> set[int]:
    """Which of the rows complete a stop string with their new tokens; equal criteria are asked once."""
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
