"""Adapters in folders while requests are admitted, preempted and finished."""

from __future__ import annotations

import gc
import os
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_paged import PagedConfig, PagedEngine
from hf_paged.adapters import loop_adapters
from hf_paged.adapters.files import AdapterFile, read_adapter_file
from hf_paged.adapters.mixing import NotMixableError
from hf_paged.adapters.peft_models import peft_layers
from hf_paged.plan import StepPlan
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


def test_the_error_of_merged_adapters_names_the_requests_adapter(tmp_path: Path) -> None:
    model, prompt = many(3), prompts(12)[0]
    folder = saved(model, tmp_path)[2]
    model.delete_adapter("a2")
    names = ["a0", "a1", folder]
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        for name in names:
            engine.add_request(prompt, GREEDY, request_id=name, adapter=name)
        engine.step()
        model.merge_adapter()
        results = run_all(engine)
        for name in names:
            shown = os.path.realpath(name) if name is folder else name
            assert f"adapter {shown!r} was requested, but" in str(results[name].error)
        message = f"adapter {folder!r} was requested, but adapters are merged"
        with pytest.raises(ValueError, match=re.escape(message)):
            engine.add_request(prompt, GREEDY, adapter=folder)
        assert_drained(engine)


def test_weights_of_deleted_adapters_are_freed() -> None:
    model = many(2)
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        for result in engine.generate(prompts(9, 14), GREEDY, adapter=["a0", "a1"]):
            assert result.error is None
        adapters: Any = engine._core.get_loop().executor.adapters()
        assert set(adapters._model_adapters) == {"a0", "a1"}
        kept = adapters._model_adapters["a0"]
        layers = [layer for layer in peft_layers(engine.model) if "a1" in layer.lora_A]
        weights = [weakref.ref(layer.lora_A["a1"].weight) for layer in layers]
        del layers
        model.delete_adapter("a1")
        engine.generate(prompts(9), GREEDY)
        gc.collect()
        assert weights and not any(weight() is not None for weight in weights)
        assert adapters._model_adapters == {"a0": kept}


def test_a_mixed_forward_that_failed_is_not_repeated_beside_a_row_with_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The row runs apart, but its adapter could be mixed."""
    with PagedEngine(many(3), PagedConfig(block_size=8)) as engine:
        engine.generate(prompts(9), GREEDY, adapter="a0")
        executor = engine._core.get_loop().executor
        adapters: Any = executor.adapters()
        calls = []

        def fail(*arguments: Any) -> None:
            calls.append(arguments)
            raise NotMixableError("a module gets other rows")

        def logits(name: str, plan: StepPlan, executor: Any) -> torch.Tensor:
            return torch.zeros(len(plan), 2)

        monkeypatch.setattr(loop_adapters, "run_mixed", fail)
        monkeypatch.setattr(adapters, "check_mixing", lambda module_names: None)
        monkeypatch.setattr(adapters, "_run_one_adapter", logits)
        rows = []
        for name, inputs in (("a0", None), ("a1", None), ("a2", object())):
            request = SimpleNamespace(adapter=name, inputs=inputs)
            row = SimpleNamespace(
                request=request, num_computed_tokens=4, token_ids=[5] * 5, draft=[]
            )
            rows.append((row, 1))
        for _ in range(2):
            assert adapters.run(StepPlan.of(rows), executor).shape == (3, 2)
        assert len(calls) == 1


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [
        ("_random_adapter", ValueError("a layer is split in another way"), "in another way"),
        (
            "_mixing_check",
            torch.OutOfMemoryError("CUDA out of memory"),
            "too little memory is free",
        ),
    ],
    ids=["split", "memory"],
)
def test_reasons_against_mixing_point_to_their_topic(
    target: str, error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(f"hf_paged.adapters.loop_adapters.{target}", fail)
    with PagedEngine(many(2), PagedConfig(block_size=8)) as engine:
        for result in engine.generate(prompts(9, 14), GREEDY, adapter=["a0", "a1"]):
            assert result.error is None
        (reason,) = (reason for reason in engine.route.slowed_by if text in reason)
        assert reason.endswith("[troubleshooting.md#adapters]")


def test_other_processes_drop_prefetched_adapters_that_no_request_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = saved(many(1), tmp_path)
    with PagedEngine(models.build("llama"), PagedConfig(block_size=8)) as engine:
        engine.generate(prompts(9), GREEDY, adapter=folder)
        adapters: Any = engine._core.get_loop().executor.adapters()
        orders = []
        processes = SimpleNamespace(adapters=lambda *order: orders.append(order))
        file = AdapterFile(str(tmp_path / "other"), "", 1)
        with monkeypatch.context() as patch:
            patch.setattr(adapters, "_processes", processes)
            adapters.prefetch([SimpleNamespace(adapter=file, adapter_bytes=1)])
            adapters.prefetch([])
        assert orders == [("load_ahead", [file]), ("load_ahead", [])]
        assert not adapters.store._loading


def test_waiting_adapters_are_prefetched_again_after_a_change_of_the_model(tmp_path: Path) -> None:
    first, second = saved(many(2), tmp_path)
    with PagedEngine(models.build("llama"), PagedConfig(block_size=8)) as engine:
        engine.generate(prompts(9), GREEDY, adapter=first)
        adapters: Any = engine._core.get_loop().executor.adapters()
        file = read_adapter_file(second)
        waiting = [SimpleNamespace(adapter=file, adapter_bytes=1)]
        adapters.prefetch(waiting)
        adapters.forget_model()
        assert not adapters.store._loading
        adapters.prefetch(waiting)
        assert list(adapters.store._loading) == [file]
