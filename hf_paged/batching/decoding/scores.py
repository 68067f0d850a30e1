"""`(rows, vocab)` scores to one token a row."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 128  # tokens of the vocabulary whose maximum, or sum, is taken at once


def argmax(scores: Tensor) -> Tensor:
    """
    `scores.argmax(dim=-1)` of `(rows, vocab)`, first of equals. On CPU torch finds a maximum ten times faster than its
    index: it is that of every chunk, then of the chunks, and the index within the first chunk that has it.
    """
    rows, vocab = scores.shape
    if scores.device.type != "cpu" or vocab < 8 * CHUNK:
        return scores.argmax(dim=-1)
    if vocab % CHUNK:
        scores = torch.nn.functional.pad(scores, (0, -vocab % CHUNK), value=float("-inf"))
    chunks = scores.unflatten(1, (-1, CHUNK))  # [rows, chunks, CHUNK]
    first = chunks.amax(dim=-1).argmax(dim=-1)  # [rows]
    return first * CHUNK + chunks[torch.arange(rows), first].argmax(dim=-1)


def invert(probs: Tensor) -> Tensor:
    """
    Draws an index of each row of `(rows, vocab)` probabilities by inverting the distribution function: a chunk of the
    vocabulary, then an index in it. Takes two of torch's global random numbers a row.
    """
    probs = torch.nn.functional.pad(probs, (0, -probs.shape[1] % CHUNK))
    chunks = probs.unflatten(1, (-1, CHUNK))  # [rows, chunks, CHUNK]
    first = _invert_cumulated(chunks.sum(dim=-1).double().cumsum(dim=-1))  # [rows]
    inner = chunks[torch.arange(len(first), device=first.device), first]  # [rows, CHUNK]
    return first * CHUNK + _invert_cumulated(inner.double().cumsum(dim=-1))


def _invert_cumulated(mass: Tensor) -> Tensor:
    level = torch.rand((len(mass), 1), dtype=torch.double, device=mass.device) * mass[:, -1:]
    # the first index whose mass exceeds the level: never one of no probability
    return torch.searchsorted(mass, level, right=True).squeeze(1).clamp(max=mass.shape[1] - 1)


def values_at(scores: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """`scores[rows, tokens]`, minus infinity for tokens behind the last column, which a processor may have added."""
    last = scores.shape[1] - 1
    return scores[rows, tokens.clamp(max=last)].masked_fill(tokens > last, float("-inf"))


def logprobs_of(scores: Tensor, tokens: Tensor) -> list[float]:
    """Log-probabilities of one token a row under `(rows, vocab)` scores."""
    rows = torch.arange(len(scores), device=scores.device)
    return (values_at(scores, rows, tokens.to(scores.device)) - scores.logsumexp(dim=-1)).tolist()


def pick(values: Tensor, rows: list[int]) -> Tensor:
    """`values[rows]`, which waits for the device, unless it is all of them in order."""
    return values if len(rows) == len(values) else values[rows]
