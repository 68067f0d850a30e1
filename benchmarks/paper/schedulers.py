"""Iteration-level batches with reserved memory, and ours on the same trace."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.paper.rows import PAPER, READ, Published, Row, Size
from benchmarks.paper.serving import A100, serve
from benchmarks.paper.traces import SHAREGPT, make_trace

LOADS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.2, 1.5)
BOUND = 10.0
"""Latency bound, in multiples of the normalized latency of requests that do not wait for each
other."""


def sustained(curve: list[tuple[float, float]], bound: float) -> float:
    """The request rate at which a curve of (rate, latency), in ascending order, crosses `bound`,
    interpolated. At most the last rate; 0 if the first latency is already above the bound.
    """
    for (rate, latency), (next_rate, next_latency) in pairwise(curve):
        if latency <= bound < next_latency:
            return rate + (next_rate - rate) * (bound - latency) / (next_latency - latency)
    return curve[-1][0] if curve[-1][1] <= bound else 0.0


def rate_of(system: str, requests: int, bound: float) -> float:
    """Requests per second that a system serves within the latency bound."""
    most = serve(system, make_trace(SHAREGPT, requests)).rate
    traces = {load * most: make_trace(SHAREGPT, requests, load * most) for load in LOADS}
    curve = [(rate, serve(system, trace).normalized_latency) for rate, trace in traces.items()]
    return sustained(curve, bound)


def alone() -> float:
    """Normalized latency of requests that arrive one at a time."""
    return serve("ours", make_trace(SHAREGPT, 50, rate=1e-9)).normalized_latency


PUBLISHED_RATIOS = {"Max": (2.7, 8.0), "Oracle": (1.7, 2.7)}
"""Over three models. For FasterTransformer's static batches the paper only says "up to 22", which
fits any smaller ratio."""


def schedulers(size: Size) -> list[Row]:
    """PagedAttention (arXiv 2309.06180), section 6.2 and figures 12a and 13a; Orca (OSDI'22)
    introduced the iteration-level scheduling.

    The same: OPT-13B's 15.7K slots, mean lengths, Poisson arrivals, the metric (normalized latency:
    seconds from arrival to end over output tokens, averaged over requests), the reservations.
    Different: time is simulated with a roofline of the paper's model and GPU (`benchmarks.generate`
    measures arrivals on a machine); lengths are log-normal; at most 256 requests at a time and 2048
    tokens per step, for all. Ours is the engine's scheduler and block manager. Figure 13a's batch
    sizes are in the table `batch_size`.
    """
    requests, bound, rows = min(size.short // 4, 2_000), BOUND * alone(), []
    ours = rate_of("ours", requests, bound)
    for system, (low, high) in PUBLISHED_RATIOS.items():
        rate = rate_of(system, requests, bound)
        ratio = ours / rate if rate else "the other is never within it"
        source = f"{PAPER}, section 6.2, over three models ({READ})"
        why = "" if rate and low <= ours / rate <= high else _WHY
        published = Published(f"{low:g} to {high:g}", source, why)
        name = f"ours over Orca ({system}), requests a second; {A100.name}"
        rows.append(Row(name, ratio, "times", *published))
    return rows


_WHY = (
    "a roofline has no overhead per request or kernel, and the published range is over three models"
)
