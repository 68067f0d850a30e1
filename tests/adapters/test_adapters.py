"""Requests with several adapters in one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_paged import PagedConfig, PagedEngine
from tests.support import models
from tests.support.engine_helpers import assert_drained, assert_same_as_lone, prompts, run_all
from tests.support.peft_models import lone_with, lora_model, many, saved
from tests.test_faults import OnPurpose

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 14}


def test_a_request_whose_adapter_is_deleted_fails_alone() -> None:
    """PEFT's layers ignore unknown adapter names: the request would get the base model's tokens."""
    model, texts = lora_model(), prompts(20, 25, 18)
    expected = lone_with(model, "second", texts[1], GREEDY)
    with PagedEngine(model, PagedConfig(block_size=8, max_num_seqs=2)) as engine:
        for i, (prompt, adapter) in enumerate(zip(texts, ("first", "second", "first"))):
            engine.add_request(prompt, GREEDY, request_id=str(i), adapter=adapter)
        engine.step()
        model.delete_adapter("first")
        results = run_all(engine)
        assert_drained(engine)
    for name in "02":
        assert "adapter 'first' does not exist: the model has second" in str(results[name].error)
    assert_same_as_lone(expected, results["1"], GREEDY, "the other adapter")


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_raises_as_adapters_are_prefetched(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is repeated once; then its requests end with the error. Others are served."""
    tuned, texts = many(2), prompts(9, 14)
    expected = [lone_with(tuned, f"a{number}", text, GREEDY) for number, text in enumerate(texts)]
    folders = saved(tuned, tmp_path)
    with PagedEngine(models.build("llama"), PagedConfig(block_size=8)) as engine:
        engine.generate(texts[:1], {**GREEDY, "max_new_tokens": 1}, adapter=folders[:1])
        errors = [OnPurpose("on purpose")] * times
        adapters = engine._core.get_loop().executor.adapters()
        prefetch = adapters.prefetch

        def failing(waiting: Any) -> None:
            if errors:
                raise errors.pop()
            prefetch(waiting)

        monkeypatch.setattr(adapters, "prefetch", failing)
        results = engine.generate(texts, GREEDY, adapter=folders)
        assert any(isinstance(result.error, OnPurpose) for result in results) == (times > 1)
        results = engine.generate(texts, GREEDY, adapter=folders)
        for lone, result, folder in zip(expected, results, folders):
            assert_same_as_lone(lone, result, GREEDY, folder)
        assert_drained(engine)
