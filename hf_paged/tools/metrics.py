"""Prometheus metrics of engines, read from `PagedEngine.stats()` on each scrape. Extra: `serve`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from ..batching.engine import PagedEngine
from ..batching.results import EngineStats, Histogram

try:
    from prometheus_client import core as prometheus
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError(
        'hf_paged.tools.metrics needs prometheus_client: pip install "hf_paged[serve]"',
        name=error.name,
    ) from error

Values = Callable[[EngineStats], float]

# Names follow vLLM (`vllm:num_requests_running`) where it has the metric, with our prefix and
# Prometheus' conventions: base units, and no colon, which is reserved for recording rules.
# prometheus_client appends `_total` to counters.
GAUGES: dict[str, tuple[str, Values]] = {
    "num_requests_running": ("Requests in the batch.", lambda stats: stats.num_running),
    "num_requests_waiting": ("Requests that wait for room.", lambda stats: stats.num_waiting),
    "kv_cache_bytes": (
        "Bytes of the blocks that sequences hold, over all layers.",
        lambda stats: stats.used_bytes,
    ),
    "kv_cache_peak_bytes": ("The most of these bytes so far.", lambda stats: stats.peak_bytes),
    "tier_host_bytes": (
        "Bytes of host memory that hold prefix blocks.",
        lambda stats: stats.tier_host_bytes,
    ),
    "tier_disk_bytes": (
        "Bytes of the files that hold prefix blocks.",
        lambda stats: stats.tier_disk_bytes,
    ),
}
BLOCKS: dict[str, Values] = {
    "one_sequence": lambda stats: stats.used_blocks - stats.shared_blocks,
    "shared": lambda stats: stats.shared_blocks,
    "cached": lambda stats: stats.cached_blocks,
}
COUNTERS: dict[str, tuple[str, Values]] = {
    "requests_finished": (
        "Requests that ended, whatever ended them.",
        lambda stats: stats.num_finished,
    ),
    "prompt_tokens": ("Tokens of prompts.", lambda stats: stats.num_prompt_tokens),
    "generation_tokens": ("Tokens generated.", lambda stats: stats.num_generated_tokens),
    "prefix_cache_hit_tokens": (
        "Tokens of prompts that were found in the prefix cache, of requests that ended.",
        lambda stats: stats.num_prefix_hit_tokens,
    ),
    "preemptions": (
        "Requests that gave their blocks up for others.",
        lambda stats: stats.num_preemptions,
    ),
    "swaps": (
        "Of these, the ones whose blocks went to host memory.",
        lambda stats: stats.num_swaps,
    ),
    "tier_kept_blocks": (
        "Prefix blocks that went below the pool.",
        lambda stats: stats.tier_kept_blocks,
    ),
    "tier_restored_blocks": (
        "Prefix blocks that came back.",
        lambda stats: stats.tier_restored_blocks,
    ),
    "steps": ("Forwards of the batch.", lambda stats: stats.num_steps),
    "captured_steps": (
        "Of these, replays of a recorded step.",
        lambda stats: stats.num_captured_steps,
    ),
    "drafts": ("Verifications of candidates, a row and step each.", lambda stats: stats.num_drafts),
    "draft_tokens": (
        "Candidates for tokens that forwards verified.",
        lambda stats: stats.num_draft_tokens,
    ),
    "accepted_tokens": (
        "Of these, the ones that became tokens.",
        lambda stats: stats.num_accepted_tokens,
    ),
    "step_seconds": ("Time spent in steps.", lambda stats: stats.seconds),
}
HISTOGRAMS: dict[str, tuple[str, Callable[[EngineStats], Histogram]]] = {
    "time_to_first_token_seconds": (
        "From a request's arrival to its first new token, of requests that ended.",
        lambda stats: stats.first_token_seconds,
    ),
    "time_per_output_token_seconds": (
        "A request's average time for a token after the first, of requests that ended.",
        lambda stats: stats.output_token_seconds,
    ),
}


class EngineCollector(Collector):
    """Collects metrics of engines for a Prometheus registry. It keeps no state: each scrape reads
    `PagedEngine.stats()`, which waits for the step in progress.

    Args:
        engines ([`PagedEngine`], `dict[str, PagedEngine]`, or a function that returns such a dict):
            The engines, by the value of the label `model_name`; for a single engine
            `model.name_or_path`, or the name of the model's class.

    Raises:
        ImportError: without prometheus_client, when this module is imported.

    Example:

    ```python
    prometheus_client.REGISTRY.register(EngineCollector(engine))
    prometheus_client.start_http_server(9000)
    ```
    """

    def __init__(
        self,
        engines: PagedEngine | Mapping[str, PagedEngine] | Callable[[], Mapping[str, PagedEngine]],
    ) -> None:
        if isinstance(engines, PagedEngine):
            model = engines.model
            engines = {model.name_or_path or type(model).__name__: engines}
        self._engines = engines

    def describe(self) -> Iterable[prometheus.Metric]:
        """All metrics without values, by which a registry detects duplicate names."""
        return self._metrics({})

    def collect(self) -> Iterator[prometheus.Metric]:
        """All metrics, with a value for each engine."""
        engines = self._engines() if callable(self._engines) else self._engines
        stats = {name: engine.stats() for name, engine in engines.items()}
        return self._metrics(stats)

    def _metrics(self, read: Mapping[str, EngineStats]) -> Iterator[prometheus.Metric]:
        def family(kind: Any, name: str, text: str, *labels: str) -> Any:
            return kind(f"hf_paged_{name}", text, labels=["model_name", *labels])

        for name, (text, value) in GAUGES.items():
            metric = family(prometheus.GaugeMetricFamily, name, text)
            for model, stats in read.items():
                metric.add_metric([model], value(stats))
            yield metric
        metric = family(
            prometheus.GaugeMetricFamily,
            "kv_cache_blocks",
            "Blocks that are in use, by use.",
            "use",
        )
        for model, stats in read.items():
            for use, value in BLOCKS.items():
                metric.add_metric([model, use], value(stats))
        yield metric
        metric = family(
            prometheus.GaugeMetricFamily,
            "kv_cache_max_blocks",
            "Most of them, where a limit is set.",
        )
        for model, stats in read.items():
            if stats.num_blocks is not None:
                metric.add_metric([model], stats.num_blocks)
        yield metric
        for name, (text, value) in COUNTERS.items():
            metric = family(prometheus.CounterMetricFamily, name, text)
            for model, stats in read.items():
                metric.add_metric([model], value(stats))
            yield metric
        for name, (text, histogram) in HISTOGRAMS.items():
            metric = family(prometheus.HistogramMetricFamily, name, text)
            for model, stats in read.items():
                counted = histogram(stats)
                metric.add_metric([model], buckets(counted), counted.total)
            yield metric


def buckets(histogram: Histogram) -> list[tuple[str, int]]:
    """Cumulative counts: for each upper bound, and `+Inf`, the number of values up to it."""
    names = [*map(str, histogram.bounds), "+Inf"]
    counts = histogram.counts or [0] * len(names)
    return list(zip(names, accumulate(counts)))
