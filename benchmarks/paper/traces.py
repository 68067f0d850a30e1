"""Requests with the mean lengths of the PagedAttention paper's data sets (arXiv 2309.06180, section
6.1, figure 11)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

LONGEST = 2048
"""Most tokens of a sequence, prompt and output together: OPT's limit."""
SIGMA = 1.0
"""Spread of the lengths' logarithms. The paper does not give it, so tables show the results of
`SIGMAS`, too."""
SIGMAS = (0.5, SIGMA, 1.5)


@dataclass(frozen=True)
class Lengths:
    """Prompt and output lengths of a data set: log-normal, with the long tail of the paper's
    histograms; the means are the paper's, which does not give the spread."""

    name: str
    mean_in: float
    mean_out: float


SHAREGPT = Lengths("ShareGPT-like", 161.31, 337.99)
ALPACA = Lengths("Alpaca-like", 19.31, 58.45)
Trace = list[tuple[int, int]]
"""Tokens of prompt and output of each request."""


def make_trace(lengths: Lengths, count: int, seed: int = 0, sigma: float = SIGMA) -> Trace:
    """The lengths of `count` requests; `sigma`: the spread of their logarithms."""
    draw, trace = random.Random(seed), Trace()
    for _ in range(count):
        prompt = _length(draw, lengths.mean_in, LONGEST - 1, sigma)
        trace.append((prompt, _length(draw, lengths.mean_out, LONGEST - prompt, sigma)))
    return trace


def _length(draw: random.Random, mean: float, most: int, sigma: float) -> int:
    # exp(mu + sigma^2 / 2) is the mean of a log-normal
    return max(1, min(most, round(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))
