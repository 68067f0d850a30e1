"""Packed forwards that fail only once requests run: the requests go on with rows side by side."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LogitsProcessor

import hf_paged
from hf_paged import PagedConfig, PagedEngine, last_route
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import make_inputs
from tests.support.architecture_media import media_rows
from tests.support.engine_helpers import (
    assert_drained,
    assert_same_as_lone,
    lone_run,
    prompts,
    run_all,
)

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
LENGTH = 30  # tokens from which on a mask is dense: more than the self-check has
SIDE_BY_SIDE = "computed side by side from now on"


class DenseAfter:
    """A layer's attention that makes the mask an ordinary tensor for positions from `length` on."""

    def __init__(self, attention: Any, length: int) -> None:
        self.forward, self.length = attention.forward, length

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            kwargs["attention_mask"] is not None
            and int(kwargs["position_ids"].max()) >= self.length
        ):
            kwargs["attention_mask"] = kwargs["attention_mask"].clone()
        return self.forward(*args, **kwargs)


class At(LogitsProcessor):
    """Calls `act` before the `step`-th token is chosen."""

    def __init__(self, step: int, act: Any) -> None:
        self.left, self.act = step, act

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            self.act()
        return scores


def make_dense(model: Any, length: int = LENGTH) -> Any:
    for layer in model.get_decoder().layers:
        layer.self_attn.forward = DenseAfter(layer.self_attn, length)
    return model


def undo(model: Any) -> None:
    for layer in model.get_decoder().layers:
        del layer.self_attn.forward


def sequences(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if SIDE_BY_SIDE in record.message]


CALLS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "beams": {**GREEDY, "num_beams": 3, "num_return_sequences": 2},
    "samples": {**GREEDY, "do_sample": True, "num_return_sequences": 2},
    "lookup": {**GREEDY, "prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_call_goes_on(name: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, options = make_dense(models.build(name)), CALLS[kind]
    inputs = (
        models.prompt(name, 1, 13) if kind == "lookup" else models.padded_prompt(name, (13, 9, 21))
    )
    torch.manual_seed(0)
    expected = model.generate(**inputs, **options)
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING):
        actual = model.generate(**inputs, **options, **models.PAGED)
    assert torch.equal(actual, expected)
    route = last_route(model)
    assert route.road == "engine" and any(SIDE_BY_SIDE in reason for reason in route.slowed_by)
    (warning,) = warnings_of(caplog)
    assert "the attention mask is a dense tensor" in warning
    hf_paged.check_integrity(model)


@pytest.mark.slow
def test_the_next_call_is_not_packed_while_the_model_stays_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, inputs = make_dense(models.build("llama")), models.padded_prompt("llama")
    expected = model.generate(**inputs, **GREEDY)
    reasons = []
    for _ in range(3):
        assert torch.equal(model.generate(**inputs, **GREEDY, **models.PAGED), expected)
        reasons.append(last_route(model).reason)
    assert "not packed" not in reasons[0]
    assert all(
        "not packed: packed, its forward fails: the attention mask is a dense" in x
        for x in reasons[1:]
    )
    assert len(warnings_of(caplog)) == 1
    undo(model)
    assert torch.equal(model.generate(**inputs, **GREEDY, **models.PAGED), expected)
    assert "not packed" not in last_route(model).reason and not last_route(model).slowed_by


def test_a_returned_cache_of_such_a_call_can_be_continued() -> None:
    model, inputs = make_dense(models.build("llama")), models.padded_prompt("llama")
    options = {**GREEDY, "return_dict_in_generate": True, "eos_token_id": list(range(5, 17))}
    outputs = [model.generate(**inputs, **options, **extra) for extra in ({}, models.PAGED)]
    assert any(SIDE_BY_SIDE in reason for reason in last_route(model).slowed_by)
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    texts = []
    for output in outputs:
        ids = torch.cat([output.sequences, torch.full((3, 2), 20)], dim=1)
        mask = torch.ones_like(ids)
        mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
        cache = output.past_key_values
        texts.append(
            model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False
            )
        )
    assert torch.equal(*texts)


@pytest.mark.slow
def test_requests_of_an_engine_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """Among them are some with drafts, with prompt log-probabilities, and some that are added
    later, in chunks."""
    model = make_dense(models.build("gemma3"))
    texts = prompts(9, 14, 21, 25, 60, 11)
    lone = [lone_run(model, text, GREEDY) for text in texts]
    with torch.no_grad():
        logits = model(torch.tensor([texts[4]])).logits[0].log_softmax(-1)
    logprobs = logits[:-1].gather(1, torch.tensor(texts[4][1:])[:, None])[:, 0]
    with PagedEngine(
        model, PagedConfig(block_size=8, max_num_batched_tokens=16, speculation="ngram")
    ) as engine:
        for number, text in enumerate(texts[:3]):
            engine.add_request(text, GREEDY, request_id=str(number))
        results = {}
        while engine.has_unfinished and not warnings_of(caplog):
            results |= {
                output.request_id: output.result
                for output in engine.step()
                if output.result is not None
            }
        assert len(results) < 3, results
        engine.check_integrity()
        for number, text in enumerate(texts[3:], 3):
            engine.add_request(text, GREEDY, request_id=str(number), prompt_logprobs=number == 4)
        run_all(engine, results)
        for number, expected in enumerate(lone):
            assert_same_as_lone(expected, results[str(number)], GREEDY, str(number))
        torch.testing.assert_close(
            torch.tensor(results["4"].prompt_logprobs[1:]), logprobs, atol=1e-3, rtol=1e-3
        )
        assert_drained(engine)
        (result,) = engine.generate(texts[:1], GREEDY)  # in rectangles
        assert_same_as_lone(
            lone[0], result, GREEDY, "later"
        ) and "not packed" in engine.route.reason
        undo(model)
        (result,) = engine.generate(texts[:1], GREEDY)
        assert_same_as_lone(lone[0], result, GREEDY, "packed again")
        assert "not packed" not in engine.route.reason
    assert len(warnings_of(caplog)) == 1


def test_the_loop_packs_again_once_it_begins_with_the_model_as_it_was() -> None:
    model, (text,) = models.build("llama"), prompts(9)
    lone = lone_run(model, text, GREEDY)
    with PagedEngine(model, PagedConfig(block_size=8, capture=False)) as engine:
        runner = engine._core.get_loop().executor.runner
        for step in (2, 5):
            changes = [At(step, lambda: make_dense(model, 0)), At(step + 6, lambda: undo(model))]
            engine.add_request(text, GREEDY, logits_processor=changes)
            (result,) = run_all(engine).values()
            assert_same_as_lone(lone, result, GREEDY, str(step))
            assert engine._core.get_loop().executor.runner is runner
            assert not runner.is_packed
        (result,) = engine.generate([text], GREEDY)
        assert runner.is_packed
        assert_same_as_lone(lone, result, GREEDY, "unchanged")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"]
)
def test_pictures_go_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also with three position axes."""
    model = tiny_model(getattr(transformers, name))
    rows = [
        {key: x for key, x in row.items() if key != "attention_mask"}
        for row in media_rows(model)["image"]
    ]
    lone = [
        model.generate(**row, **GREEDY)[0, row["input_ids"].shape[1] :].tolist() for row in rows
    ]
    inputs = make_inputs(model)["image"]
    expected = model.generate(**inputs, **GREEDY)
    changes = [At(3, lambda: make_dense(model, 0))]
    actual = model.generate(**inputs, **GREEDY, **models.PAGED, logits_processor=changes)
    assert torch.equal(actual, expected) and len(warnings_of(caplog)) == 1
    undo(model)
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        for number, row in enumerate(rows):
            changes = [At(3, lambda: make_dense(model, 0))] if number == 1 else []
            engine.add_request(row, GREEDY, request_id=str(number), logits_processor=changes)
        results = run_all(engine)
        assert [results[str(number)].token_ids for number in range(3)] == lone
        assert any(SIDE_BY_SIDE in reason for reason in engine.route.slowed_by)
        assert_drained(engine)


@pytest.mark.parametrize("is_engine", [False, True], ids=["call", "engine"])
def test_dropout_that_is_switched_on_ends_no_request(is_engine: bool) -> None:
    """Also where another thread or a streamer does it: the forward finds it."""
    model = models.build("llama", attention_dropout=0.5)
    changes = [At(4, model.train)]
    if is_engine:
        with PagedEngine(model, PagedConfig(block_size=8)) as engine:
            for number, text in enumerate(prompts(9, 14, 21)):
                given = changes if number == 0 else []
                engine.add_request(text, GREEDY, request_id=str(number), logits_processor=given)
            results = run_all(engine)
            assert all(result.error is None for result in results.values())
            assert all(len(result.token_ids) == 24 for result in results.values())
            assert_drained(engine)
        return
    inputs = models.padded_prompt("llama")
    torch.manual_seed(0)
    expected = model.generate(**inputs, **GREEDY, logits_processor=changes)
    model.eval()
    torch.manual_seed(0)
    actual = model.generate(
        **inputs, **GREEDY, **models.PAGED, logits_processor=[At(4, model.train)]
    )
    assert torch.equal(actual, expected), "all rows are open to the end: the same numbers are drawn"
    model.generate(**inputs, **GREEDY, **models.PAGED)
    assert "training mode" in last_route(model).reason
    model.eval()
    model.generate(**inputs, **GREEDY, **models.PAGED)
    assert (
        "packed forwards" in last_route(model).reason and "not on" not in last_route(model).reason
    )


@pytest.mark.slow
@pytest.mark.parametrize("from_folders", [False, True], ids=["own", "folders"])
def test_rows_with_adapters_go_on(from_folders: bool, tmp_path: Path) -> None:
    adapters = pytest.importorskip("tests.support.peft_models")
    model, texts = adapters.many(3), prompts(12, 13, 14)
    names = list(model.peft_config)
    lone = [adapters.lone_with(model, name, text, GREEDY) for name, text in zip(names, texts)]
    base = model.get_base_model()
    if from_folders:
        names, model = adapters.saved(model, tmp_path), models.build("llama")
        base = model
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        for number, (text, name) in enumerate(zip(texts, names)):
            changes = [At(3, lambda: make_dense(base, 0))] if number == 1 else []
            engine.add_request(
                text, GREEDY, request_id=str(number), adapter=name, logits_processor=changes
            )
        results = run_all(engine)
        for number, expected in enumerate(lone):
            assert_same_as_lone(expected, results[str(number)], GREEDY, str(number))
        assert any(SIDE_BY_SIDE in reason for reason in engine.route.slowed_by)
        assert_drained(engine)


def test_an_assistant_that_cannot_be_packed_goes_on() -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    assistant = make_dense(models.build("llama", seed=5), 23)
    expected = model.generate(**inputs, **GREEDY)
    actual = model.generate(**inputs, **GREEDY, **models.UNRECORDED, assistant_model=assistant)
    assert torch.equal(actual, expected) and last_route(model).num_draft_tokens > 0


@pytest.mark.slow
def test_batch_invariance_is_refused_rather_than_lost() -> None:
    model = make_dense(models.build("llama"))
    config = {**models.PAGED["cache_config"], "batch_invariant": True}
    inputs = models.padded_prompt("llama")
    with pytest.raises(RuntimeError, match="the attention mask is a dense tensor"):
        model.generate(**inputs, **GREEDY, cache_implementation="paged", cache_config=config)
    hf_paged.check_integrity(model)
