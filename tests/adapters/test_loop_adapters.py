"""Adapters while requests are admitted, preempted, failed and finished."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import weakref
from types import SimpleNamespace

import pytest
import torch

from hf_paged.adapters import loop_adapters
from hf_paged.adapters.files import AdapterFile, read_adapter_file
from hf_paged.adapters.mixing import NotMixableError
from hf_paged.adapters.peft_models import peft_layers
from hf_paged.plan import StepPlan
from tests.adapters.test_mixing import (
    GREEDY,
    adapters_of,
    assert_served,
    check,
    engine_of,
    lone_runs,
)
from tests.support.engine_helpers import assert_drained, build_mamba, prompts, run_all
from tests.support.peft_models import lora, lora_model, many, peft, saved
from tests.test_faults import OnPurpose


def test_a_request_whose_adapter_is_deleted_fails_alone():
    """PEFT's layers ignore unknown adapter names: the request would get the base model's tokens."""
    model, texts = lora_model(), prompts(20, 25, 18)
    expected = lone_runs(model, ["second"], texts[1:])
    with engine_of(model, max_num_seqs=2) as engine:
        for i, (prompt, adapter) in enumerate(zip(texts, ("first", "second", "first"))):
            engine.add_request(prompt, GREEDY, request_id=str(i), adapter=adapter)
        with pytest.raises(ValueError, match="'third' does not exist: the model has first, second"):
            engine.add_request(texts[0], GREEDY, adapter="third")
        engine.step()
        model.delete_adapter("first")
        results = run_all(engine)
        assert_drained(engine)
    for name in "02":
        assert "adapter 'first' does not exist: the model has second" in str(results[name].error)
    check(expected, [results["1"]])


def test_an_adapter_that_cannot_be_loaded_keeps_no_other_from_its_place(tmp_path):
    wrong = saved(many(1, "gpt2", target_modules=["c_attn"]), tmp_path / "gpt2")[0]
    right = saved(many(2), tmp_path / "llama")
    with engine_of() as engine:
        first, *others = engine.generate(prompts(12, 12, 12), GREEDY, adapter=[wrong, *right])
        assert "cannot be loaded" in str(first.error)
        assert [result.error for result in others] == [None, None]
        assert engine.stats().num_adapter_loads == 2
        assert_drained(engine)
    for copied in (pickle.loads(pickle.dumps(first.error)), copy.deepcopy(first.error)):
        assert type(copied) is type(first.error) and str(copied) == str(first.error)


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_raises_as_adapters_are_prefetched(times, tmp_path, monkeypatch):
    """It is repeated once; then its requests end with the error. Others are served."""
    tuned, texts = many(2), prompts(9, 14)
    expected, folders = lone_runs(tuned, tuned.peft_config, texts), saved(tuned, tmp_path)
    with engine_of() as engine:
        engine.generate(texts[:1], {**GREEDY, "max_new_tokens": 1}, adapter=folders[:1])
        errors, adapters = [OnPurpose("on purpose")] * times, adapters_of(engine)
        prefetch = adapters.prefetch

        def failing(waiting):
            if errors:
                raise errors.pop()
            prefetch(waiting)

        monkeypatch.setattr(adapters, "prefetch", failing)
        results = engine.generate(texts, GREEDY, adapter=folders)
        assert any(isinstance(result.error, OnPurpose) for result in results) == (times > 1)
        assert_served(engine, expected, folders, texts)


def test_a_preempted_request_is_no_hit(tmp_path):
    (folder,) = saved(many(1), tmp_path)
    with engine_of() as engine:
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


def test_a_model_without_keys_keeps_adapters_only_while_requests_use_them(tmp_path):
    """No block accounts for their weights, so nothing would evict them."""
    peft_model = peft.get_peft_model(build_mamba(), lora(target_modules=["in_proj"]), "a0")
    peft_model.add_adapter("a1", lora(target_modules=["in_proj"], r=2))
    folders = saved(peft_model, tmp_path)
    with engine_of(build_mamba()) as engine:
        for _ in range(2):
            for result in engine.generate(prompts(12, 12), GREEDY, adapter=folders):
                assert result.error is None
        adapters, stats = adapters_of(engine), engine.stats()
        assert not adapters.pages._adapters and not adapters.store._resident
        assert stats.num_adapter_loads == stats.num_adapter_evictions == 4
        assert_drained(engine)


def test_the_error_of_merged_adapters_names_the_requests_adapter(tmp_path):
    model, prompt = many(3), prompts(12)[0]
    folder = saved(model, tmp_path)[2]
    model.delete_adapter("a2")
    names = ["a0", "a1", folder]
    with engine_of(model) as engine:
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


def test_weights_of_deleted_adapters_are_freed():
    model = many(2)
    with engine_of(model) as engine:
        for result in engine.generate(prompts(9, 14), GREEDY, adapter=["a0", "a1"]):
            assert result.error is None
        adapters = adapters_of(engine)
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


def test_a_mixed_forward_that_failed_is_not_repeated_beside_a_row_with_inputs(monkeypatch):
    """The row runs apart, but its adapter could be mixed."""
    with engine_of(many(3)) as engine:
        engine.generate(prompts(9), GREEDY, adapter="a0")
        executor, calls, rows = engine._core.get_loop().executor, [], []
        adapters = executor.adapters()

        def fail(*arguments):
            calls.append(arguments)
            raise NotMixableError("a module gets other rows")

        monkeypatch.setattr(loop_adapters, "run_mixed", fail)
        monkeypatch.setattr(adapters, "check_mixing", lambda names: None)
        monkeypatch.setattr(
            adapters, "_run_one_adapter", lambda name, plan, executor: torch.zeros(len(plan), 2)
        )
        computed = {"num_computed_tokens": 4, "token_ids": [5] * 5, "draft": []}
        for name, inputs in (("a0", None), ("a1", None), ("a2", object())):
            request = SimpleNamespace(adapter=name, inputs=inputs)
            rows.append((SimpleNamespace(request=request, **computed), 1))
        for _ in range(2):
            assert adapters.run(StepPlan.of(rows), executor).shape == (3, 2)
        assert len(calls) == 1


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [
        ("_random_adapter", ValueError("split in another way"), "in another way"),
        ("_mixing_check", torch.OutOfMemoryError("CUDA"), "too little memory is free"),
    ],
)
def test_reasons_against_mixing_point_to_their_topic(target, error, text, monkeypatch):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(loop_adapters, target, fail)
    with engine_of(many(2)) as engine:
        for result in engine.generate(prompts(9, 14), GREEDY, adapter=["a0", "a1"]):
            assert result.error is None
        (reason,) = (reason for reason in engine.route.slowed_by if text in reason)
        assert reason.endswith("[troubleshooting.md#adapters]")


def test_prefetched_adapters_that_no_request_waits_for_are_dropped(tmp_path, monkeypatch):
    """In other processes, too; after a change of the model they are prefetched again."""
    first, second = saved(many(2), tmp_path)
    with engine_of() as engine:
        engine.generate(prompts(9), GREEDY, adapter=first)
        adapters, orders = adapters_of(engine), []
        processes = SimpleNamespace(call_adapters=lambda *order: orders.append(order))
        file = AdapterFile(str(tmp_path / "other"), "", 1)
        with monkeypatch.context() as patch:
            patch.setattr(adapters, "_processes", processes)
            adapters.prefetch([SimpleNamespace(adapter=file, adapter_bytes=1)])
            adapters.prefetch([])
        assert orders == [("load_ahead", [file]), ("load_ahead", [])]
        assert not adapters.store._prefetches
        file = read_adapter_file(second)
        waiting = [SimpleNamespace(adapter=file, adapter_bytes=1)]
        adapters.prefetch(waiting)
        adapters.forget_model()
        assert not adapters.store._prefetches
        adapters.prefetch(waiting)
        assert list(adapters.store._prefetches) == [file]
