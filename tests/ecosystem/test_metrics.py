"""An engine's metrics in Prometheus format."""

from __future__ import annotations

import pytest

prometheus_client = pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from hf_paged import PagedEngine  # noqa: E402
from hf_paged.tools.metrics import EngineCollector  # noqa: E402

from ..support import models  # noqa: E402


def read(registry: prometheus_client.CollectorRegistry) -> dict[str, float]:
    """Values by name and labels, except the model's, as a server would read them."""
    text = prometheus_client.generate_latest(registry).decode()
    samples = (
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    )
    return {
        ".".join(
            [sample.name, *(value for key, value in sample.labels.items() if key != "model_name")]
        ): sample.value
        for sample in samples
    }


def test_what_an_engine_did() -> None:
    config = {"block_size": 8, "num_blocks": 64}
    with PagedEngine(models.get("llama"), config) as engine:
        registry = prometheus_client.CollectorRegistry()
        registry.register(EngineCollector(engine))
        before = read(registry)
        assert (
            before["hf_paged_generation_tokens_total"]
            == before["hf_paged_time_to_first_token_seconds_count"]
            == 0
        )
        prompt = list(range(5, 25))
        engine.generate([prompt, prompt[::-1]], {"max_new_tokens": 6})
        engine.generate([prompt], {"max_new_tokens": 1})
        for _ in range(3):
            engine.add_request(prompt, {"max_new_tokens": 30})
        engine.step()
        engine.step()
        now, stats = read(registry), engine.stats()
        assert (
            now["hf_paged_num_requests_running"] == 3 and now["hf_paged_num_requests_waiting"] == 0
        )
        assert now["hf_paged_requests_finished_total"] == 3
        assert now["hf_paged_prompt_tokens_total"] == 6 * 20
        assert (
            now["hf_paged_prefix_cache_hit_tokens_total"] == stats.num_prefix_hit_tokens == 4 * 16
        )
        assert now["hf_paged_generation_tokens_total"] == stats.num_generated_tokens
        assert now["hf_paged_kv_cache_max_blocks"] == 64
        uses = {
            name.partition(".")[2]: value
            for name, value in now.items()
            if "kv_cache_blocks" in name
        }
        assert (
            uses == {"shared": 2, "one_sequence": 3, "cached": stats.cached_blocks}
            and uses["cached"] > 0
        )
        assert now["hf_paged_time_to_first_token_seconds_count"] == 3
        assert now["hf_paged_time_to_first_token_seconds_bucket.+Inf"] == 3
        # one request had a single token
        assert now["hf_paged_time_per_output_token_seconds_count"] == 2
        assert (
            0
            < now["hf_paged_time_per_output_token_seconds_sum"]
            < now["hf_paged_step_seconds_total"]
        )
        rising = [
            value
            for name, value in now.items()
            if name.startswith("hf_paged_time_to_first_token_seconds_b")
        ]
        assert len(rising) == 16 and rising == sorted(rising)


def test_a_cancelled_request_is_timed_where_it_began() -> None:
    with PagedEngine(models.get("llama")) as engine:
        first, second = (engine.add_request([5, 6, 7], {"max_new_tokens": 9}) for _ in range(2))
        engine.cancel(first)
        engine.step()
        engine.cancel(second)
        stats = engine.stats()
        assert stats.num_finished == 2
        assert (
            sum(stats.first_token_seconds.counts) == 1
            and sum(stats.output_token_seconds.counts) == 0
        )


def test_several_engines_and_names_that_are_taken() -> None:
    """Engines are created and closed; no two collectors of one registry have the same names."""
    registry, engines = prometheus_client.CollectorRegistry(), dict[str, PagedEngine]()
    registry.register(EngineCollector(lambda: engines))
    assert "hf_paged_steps_total" not in read(registry)
    for name in ("one", 'two "quoted"'):
        engines[name] = PagedEngine(models.get("llama"))
    engines["one"].generate([[5, 6, 7]], {"max_new_tokens": 4})
    assert registry.get_sample_value("hf_paged_generation_tokens_total", {"model_name": "one"}) == 4
    assert (
        registry.get_sample_value(
            "hf_paged_generation_tokens_total", {"model_name": 'two "quoted"'}
        )
        == 0
    )
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(EngineCollector(engines))
