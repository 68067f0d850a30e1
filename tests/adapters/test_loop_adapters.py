"""Adapters in folders while requests are admitted, preempted and finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_paged import PagedConfig, PagedEngine
from tests.batching.test_unfinished_requests import GREEDY
from tests.support import models
from tests.support.engine_helpers import assert_drained, build_mamba, prompts, run_all
from tests.support.peft_models import lora, many, saved

peft = pytest.importorskip("peft")


def test_a_preempted_request_is_no_hit(tmp_path: Path) -> None:
    (folder,) = saved(many(1), tmp_path)
    with PagedEngine(models.build("llama"), PagedConfig(block_size=8)) as engine:
        engine.add_request(prompts(12)[0], GREEDY, adapter=folder)
        engine.step()
        loop = engine._core.get_loop()
        with loop.memory.lock:
            assert len(loop.scheduler.recompute()) == 1
        run_all(engine)
        assert engine.stats().num_adapter_hits == 0
        engine.generate(prompts(12), GREEDY, adapter=folder)
        assert engine.stats().num_adapter_hits == 1
        assert_drained(engine)


def test_a_model_without_keys_keeps_adapters_only_while_requests_use_them(tmp_path: Path) -> None:
    """No block accounts for their weights, so nothing would evict them."""
    peft_model = peft.get_peft_model(build_mamba(), lora(target_modules=["in_proj"]), "a0")
    peft_model.add_adapter("a1", lora(target_modules=["in_proj"], r=2))
    folders = saved(peft_model, tmp_path)
    with PagedEngine(build_mamba(), PagedConfig(block_size=8)) as engine:
        for _ in range(2):
            for result in engine.generate(prompts(12, 12), GREEDY, adapter=folders):
                assert result.error is None
        adapters = engine._core.get_loop().executor.adapters()
        assert not adapters.pages._adapters and not adapters.store._resident
        stats = engine.stats()
        assert stats.num_adapter_loads == stats.num_adapter_evictions == 4
        assert_drained(engine)
