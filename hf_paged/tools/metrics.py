"""Prometheus metrics of engines, which each scrape reads from `PagedEngine.stats()`. Needs the
extra `serve`."""

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

# The metrics of running and waiting requests, prompt tokens, generated tokens and the time to the
# first token have vLLM's names, with the prefix `hf_paged_` instead of `vllm:`, since Prometheus
# reserves colons for recording rules. prometheus_client appends `_total` to the names of counters.
METRICS: dict[Any, dict[str, tuple[str, str]]] = {
    prometheus.GaugeMetricFamily: {
        "kv_cache_max_blocks": ("Maximum number of blocks, if `num_blocks` is set.", "num_blocks"),
        "num_requests_running": ("Requests in the batch.", "num_running"),
        "num_requests_waiting": (
            "Requests that wait to be admitted, for the first time or after a preemption.",
            "num_waiting",
        ),
        "kv_cache_bytes": (
            "Bytes of the blocks that sequences hold, over all layers.",
            "used_bytes",
        ),
        "kv_cache_peak_bytes": (
            "Maximum of kv_cache_bytes since the engine's memory was made or its peaks were reset.",
            "peak_bytes",
        ),
        "tier_host_bytes": ("Bytes of host memory that hold prefix blocks.", "tier_host_bytes"),
        "tier_disk_bytes": ("Bytes of the files that hold prefix blocks.", "tier_disk_bytes"),
    },
    prometheus.CounterMetricFamily: {
        "requests_finished": ("Requests that ended, for any reason.", "num_finished"),
        "prompt_tokens": ("Prompt tokens of admitted requests.", "num_prompt_tokens"),
        "generation_tokens": ("Tokens generated.", "num_generated_tokens"),
        "prefix_cache_hit_tokens": (
            "Prompt tokens of admitted requests that were found in the prefix cache.",
            "num_prefix_hit_tokens",
        ),
        "preemptions": ("Preemptions of requests.", "num_preemptions"),
        "swaps": ("Times that a request's blocks were copied to host memory.", "num_swaps"),
        "tier_kept_blocks": ("Evicted prefix blocks stored in a tier.", "tier_kept_blocks"),
        "tier_restored_blocks": ("Prefix blocks restored from a tier.", "tier_restored_blocks"),
        "steps": ("Steps of the engine.", "num_steps"),
        "captured_steps": ("Forwards that replayed a recorded step.", "num_captured_steps"),
        "drafts": ("Drafts verified, at most one per row and step.", "num_drafts"),
        "draft_tokens": ("Draft tokens verified.", "num_draft_tokens"),
        "accepted_tokens": ("Draft tokens accepted.", "num_accepted_tokens"),
        "step_seconds": ("Time spent in steps.", "seconds"),
    },
    prometheus.HistogramMetricFamily: {
        "time_to_first_token_seconds": (
            "Time from arrival to the first new token, for each request that has ended.",
            "first_token_seconds",
        ),
        "time_per_output_token_seconds": (
            "Average time per token after the first, for each request that has ended.",
            "output_token_seconds",
        ),
    },
}
"""By kind and name of a metric: its help text, and the field of `EngineStats` that has its value.
If the field is `None`, as for a limit that is unset, the metric has no value."""


class EngineCollector(Collector):
    """Collects the metrics of engines for a Prometheus registry. Each scrape reads
    `PagedEngine.stats()`, which waits for the step in progress.

    Args:
        engines ([`PagedEngine`], `dict[str, PagedEngine]`, or a function that returns such a dict):
            The engines, by the value of the label `model_name`. The label of a single engine is
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
        """Yields all metrics without values. A registry uses them to detect duplicate names."""
        return self._metrics({})

    def collect(self) -> Iterator[prometheus.Metric]:
        """Yields all metrics with a value for each engine."""
        engines = self._engines() if callable(self._engines) else self._engines
        return self._metrics({name: engine.stats() for name, engine in engines.items()})

    def _metrics(self, stats_by_model: Mapping[str, EngineStats]) -> Iterator[prometheus.Metric]:
        def make_family(kind: Any, name: str, text: str, *labels: str) -> Any:
            return kind(f"hf_paged_{name}", text, labels=["model_name", *labels])

        blocks = make_family(
            prometheus.GaugeMetricFamily,
            "kv_cache_blocks",
            "Blocks that one sequence holds, that several share, or that are cached.",
            "use",
        )
        for model, stats in stats_by_model.items():
            blocks.add_metric([model, "one_sequence"], stats.used_blocks - stats.shared_blocks)
            blocks.add_metric([model, "shared"], stats.shared_blocks)
            blocks.add_metric([model, "cached"], stats.cached_blocks)
        yield blocks
        for kind, metrics in METRICS.items():
            for name, (text, field) in metrics.items():
                metric = make_family(kind, name, text)
                for model, stats in stats_by_model.items():
                    value = getattr(stats, field)
                    if isinstance(value, Histogram):
                        metric.add_metric([model], cumulative_buckets(value), value.total)
                    elif value is not None:
                        metric.add_metric([model], value)
                yield metric


def cumulative_buckets(histogram: Histogram) -> list[tuple[str, int]]:
    """Returns each upper bound, the last being `"+Inf"`, with the number of values up to it."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    counts = histogram.counts or [0] * len(bounds)
    return list(zip(bounds, accumulate(counts)))
