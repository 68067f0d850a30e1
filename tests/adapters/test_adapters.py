"""Requests with several adapters in one step."""

from __future__ import annotations

from typing import Any

from hf_paged import PagedConfig, PagedEngine
from tests.adapters.test_peft_engine import lone_with, lora_model
from tests.support.engine_helpers import assert_drained, assert_same_as_lone, prompts, run_all

BEAMS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 14, "num_beams": 3}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 14}


def test_item_01_a_step_of_two_adapters_that_computes_no_sequence_to_the_end() -> None:
    """Readmitted beams are computed once up to where they agree, which is no beam's end; here for
    two adapters."""
    model, texts, adapters = lora_model(), prompts(20, 25, 18), ("first", "second", "first")
    with PagedEngine(
        model, PagedConfig(block_size=8, num_blocks=12, preemption="recompute")
    ) as engine:
        for i, (prompt, adapter) in enumerate(zip(texts, adapters)):
            engine.add_request(prompt, BEAMS, request_id=str(i), adapter=adapter)
        results = run_all(engine)
        assert engine.stats().num_preemptions > 0
        assert_drained(engine)
    for i, (prompt, adapter) in enumerate(zip(texts, adapters)):
        assert_same_as_lone(
            lone_with(model, adapter, prompt, BEAMS), results[str(i)], BEAMS, f"{i}, {adapter}"
        )


def test_item_01_a_request_whose_adapter_is_deleted_fails_alone() -> None:
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
