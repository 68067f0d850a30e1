"""An engine's metrics in Prometheus format."""

from __future__ import annotations

import pytest

prometheus_client = pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from hf_paged import PagedEngine  # noqa: E402
from hf_paged.tools.metrics import EngineCollector  # noqa: E402

from ..support import models  # noqa: E402
from ..support.engine_helpers import engine_of  # noqa: E402


def read(registry: prometheus_client.CollectorRegistry) -> dict[str, float]:
    """Values by name without our prefix and by labels except the model's, as a server would read
    them."""
    text = prometheus_client.generate_latest(registry).decode()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for key, value in sample.labels.items() if key != "model_name"]
            values[".".join([sample.name.removeprefix("hf_paged_"), *labels])] = sample.value
    return values


def test_what_an_engine_did() -> None:
    with engine_of(num_blocks=64) as engine:
        registry = prometheus_client.CollectorRegistry()
        registry.register(EngineCollector(engine))
        before = read(registry)
        assert before["generation_tokens_total"] == before["time_to_first_token_seconds_count"] == 0
        prompt = list(range(5, 25))
        engine.generate([prompt, prompt[::-1]], {"max_new_tokens": 6})
        engine.generate([prompt], {"max_new_tokens": 1})
        for _ in range(3):
            engine.add_request(prompt, {"max_new_tokens": 30})
        engine.step()
        engine.step()
        now, stats = read(registry), engine.stats()
        expected = {
            "num_requests_running": 3,
            "num_requests_waiting": 0,
            "requests_finished_total": 3,
            "prompt_tokens_total": 6 * 20,
            "prefix_cache_hit_tokens_total": 4 * 16,
            "generation_tokens_total": stats.num_generated_tokens,
            "kv_cache_max_blocks": 64,
            "kv_cache_blocks.shared": 2,
            "kv_cache_blocks.one_sequence": 3,
            "kv_cache_blocks.cached": stats.cached_blocks,
            "time_to_first_token_seconds_count": 3,
            "time_to_first_token_seconds_bucket.+Inf": 3,
            # one request had a single token
            "time_per_output_token_seconds_count": 2,
        }
        assert {name: now[name] for name in expected} == expected
        assert stats.num_prefix_hit_tokens == 4 * 16 and stats.cached_blocks > 0
        assert 0 < now["time_per_output_token_seconds_sum"] < now["step_seconds_total"]
        bucket = "time_to_first_token_seconds_b"
        rising = [value for name, value in now.items() if name.startswith(bucket)]
        assert len(rising) == 16 and rising == sorted(rising)


def test_a_cancelled_request_is_timed_where_it_began() -> None:
    with engine_of() as engine:
        first, second = (engine.add_request([5, 6, 7], {"max_new_tokens": 9}) for _ in range(2))
        engine.cancel(first)
        engine.step()
        engine.cancel(second)
        stats = engine.stats()
    assert stats.num_finished == 2
    assert sum(stats.first_token_seconds.counts) == 1
    assert sum(stats.output_token_seconds.counts) == 0


def test_several_engines_and_names_that_are_taken() -> None:
    """Engines are created and closed; no two collectors of one registry have the same names."""
    registry, engines = prometheus_client.CollectorRegistry(), dict[str, PagedEngine]()
    registry.register(EngineCollector(lambda: engines))
    assert "steps_total" not in read(registry)
    names = ("one", 'two "quoted"')
    for name in names:
        engines[name] = PagedEngine(models.get("llama"))
    engines["one"].generate([[5, 6, 7]], {"max_new_tokens": 4})
    for name, count in zip(names, (4, 0)):
        labels = {"model_name": name}
        assert registry.get_sample_value("hf_paged_generation_tokens_total", labels) == count
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(EngineCollector(engines))
