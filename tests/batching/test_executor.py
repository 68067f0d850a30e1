"""Packed forwards that fail only once requests run: the requests go on with rows side by side."""

from __future__ import annotations

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
from tests.support.architecture_media import media_rows
from tests.support.checks import assert_paged_is_plain, generate_both
from tests.support.engine_helpers import Asked, assert_drained, prompts, run_all

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
LENGTH = 30  # tokens from which on a mask is dense: more than the self-check has
SIDE_BY_SIDE = "computed side by side from now on"


class DenseAfter:
    """A layer's attention that makes the mask an ordinary tensor for positions from `length` on."""

    def __init__(self, attention: Any, length: int) -> None:
        self.forward, self.length = attention.forward, length

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        if mask is not None and int(kwargs["position_ids"].max()) >= self.length:
            kwargs["attention_mask"] = mask.clone()
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
    """The next one is not packed while the model stays so."""
    model, options = make_dense(models.build(name)), CALLS[kind]
    inputs = (
        models.prompt(name, 1, 13) if kind == "lookup" else models.padded_prompt(name, (13, 9, 21))
    )
    route = assert_paged_is_plain(model, inputs, options)
    assert route.road == "engine" and any(SIDE_BY_SIDE in reason for reason in route.slowed_by)
    (warning,) = warnings_of(caplog)
    assert "the attention mask is a dense tensor" in warning
    if (name, kind) == ("llama", "greedy"):
        told = "not packed: packed, its forward fails: the attention mask is a dense"
        assert told in assert_paged_is_plain(model, inputs, options).reason
        assert len(warnings_of(caplog)) == 1
        undo(model)
        route = assert_paged_is_plain(model, inputs, options)
        assert "not packed" not in route.reason and not route.slowed_by


def test_a_returned_cache_of_such_a_call_can_be_continued() -> None:
    model, inputs = make_dense(models.build("llama")), models.padded_prompt("llama")
    options = {**GREEDY, "return_dict_in_generate": True, "eos_token_id": list(range(5, 17))}
    outputs = generate_both(model, inputs, options)
    assert any(SIDE_BY_SIDE in reason for reason in last_route(model).slowed_by)
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    texts = []
    for output in outputs:
        ids = torch.cat([output.sequences, torch.full((3, 2), 20)], dim=1)
        mask = torch.ones_like(ids)
        mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
        given = {"attention_mask": mask, "past_key_values": output.past_key_values}
        texts.append(model.generate(ids, **given, **GREEDY))
    assert torch.equal(*texts)


def test_a_hook_that_is_there_for_some_steps_leaves_later_requests_packed() -> None:
    model, (text,) = models.build("llama"), prompts(9)
    with PagedEngine(model) as engine:
        asked = Asked(engine, [text], GREEDY)
        engine.step()
        hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            engine.step()
        finally:
            hook.remove()
        assert any(SIDE_BY_SIDE in reason for reason in engine.route.slowed_by)
        asked.check()
        Asked(engine, [text], GREEDY).check()
        assert "not packed" not in engine.route.reason


@pytest.mark.slow
def test_requests_of_an_engine_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """Among them are some with drafts, with prompt log-probabilities, and some that are added
    later, in chunks."""
    model, texts = make_dense(models.build("gemma3")), prompts(9, 14, 21, 25, 60, 11)
    with torch.no_grad():
        logits = model(torch.tensor([texts[4]])).logits[0].log_softmax(-1)
    logprobs = logits[:-1].gather(1, torch.tensor(texts[4][1:])[:, None])[:, 0]
    config = PagedConfig(block_size=8, max_num_batched_tokens=16, speculation="ngram")
    with PagedEngine(model, config) as engine:
        asked = Asked(engine, texts[:3], GREEDY)
        while not warnings_of(caplog):
            assert all(output.result is None for output in engine.step())
        engine.check_integrity()
        for number, text in enumerate(texts[3:], 3):
            asked.add(str(number), text, GREEDY, prompt_logprobs=number == 4)
        results = asked.check()
        torch.testing.assert_close(
            torch.tensor(results["4"].prompt_logprobs[1:]), logprobs, atol=1e-3, rtol=1e-3
        )
        for is_packed in (False, True):  # in rectangles, and packed again
            if is_packed:
                undo(model)
            Asked(engine, texts[:1], GREEDY).check()
            assert ("not packed" not in engine.route.reason) == is_packed
    assert len(warnings_of(caplog)) == 1


def served(engine_model: Any, model: Any, prompts: list[Any], adapters: Any = (None,) * 3) -> Any:
    """Tokens of three requests of an engine, beside which the model becomes such a one."""
    with PagedEngine(engine_model, PagedConfig(block_size=8)) as engine:
        for number, (prompt, adapter) in enumerate(zip(prompts, adapters)):
            changes = [At(3, lambda: make_dense(model, 0))] if number == 1 else []
            given = {"request_id": number, "adapter": adapter, "logits_processor": changes}
            engine.add_request(prompt, GREEDY, **given)
        results = run_all(engine)
        assert any(SIDE_BY_SIDE in reason for reason in engine.route.slowed_by)
        assert_drained(engine)
    return [results[number].token_ids for number in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"]
)
def test_pictures_go_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also with three position axes."""
    model = tiny_model(getattr(transformers, name))
    rows = media_rows(model)["image"]
    for row in rows:
        row.pop("attention_mask", None)
    lone = [
        model.generate(**row, **GREEDY)[0, row["input_ids"].shape[1] :].tolist() for row in rows
    ]
    assert served(model, model, rows) == lone
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("is_engine", [False, True], ids=["call", "engine"])
def test_dropout_that_is_switched_on_ends_no_request(is_engine: bool) -> None:
    """Also where another thread or a streamer does it: the forward finds it."""
    model = models.build("llama", attention_dropout=0.5)
    if is_engine:
        with PagedEngine(model, PagedConfig(block_size=8)) as engine:
            Asked(engine, prompts(9, 14), GREEDY)
            engine.add_request([5] * 21, GREEDY, logits_processor=[At(4, model.train)])
            for result in run_all(engine).values():
                assert result.error is None and len(result.token_ids) == 24
            assert_drained(engine)
        return
    inputs, outputs = models.padded_prompt("llama"), []
    for paged in ({}, models.PAGED):
        model.eval()
        torch.manual_seed(0)
        changes = [At(4, model.train)]
        outputs.append(model.generate(**inputs, **GREEDY, **paged, logits_processor=changes))
    assert torch.equal(*outputs), "all rows are open to the end: the same numbers are drawn"


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
    assert [[tokens] for tokens in served(model, base, texts, names)] == lone


def test_an_assistant_that_cannot_be_packed_goes_on() -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    assistant = make_dense(models.build("llama", seed=5), 23)
    options = {**GREEDY, "assistant_model": assistant}
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **options, **models.UNRECORDED), expected)
    assert last_route(model).num_draft_tokens > 0


@pytest.mark.slow
def test_batch_invariance_is_refused_rather_than_lost() -> None:
    model = make_dense(models.build("llama"))
    config = {**models.PAGED["cache_config"], "batch_invariant": True}
    inputs = models.padded_prompt("llama")
    with pytest.raises(RuntimeError, match="the attention mask is a dense tensor"):
        model.generate(**inputs, **GREEDY, cache_implementation="paged", cache_config=config)
    hf_paged.check_integrity(model)


def test_a_model_change_whose_handling_is_interrupted_is_handled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = PagedEngine(models.build("llama"), PagedConfig(block_size=models.BLOCK_SIZE))
    engine.add_request(prompts(9)[0], GREEDY)
    engine.step()
    executor = engine._core.loop.executor
    begin, interrupts = executor.runner.begin, [KeyboardInterrupt()]

    def begin_later(*arguments: Any) -> None:
        if interrupts:
            raise interrupts.pop()
        begin(*arguments)

    monkeypatch.setattr(executor.runner, "begin", begin_later)
    executor.guard.num_changes += 1
    with pytest.raises(KeyboardInterrupt):
        executor.handle_model_change()
    num_embeddings, executor.num_embeddings = executor.num_embeddings, 0
    executor.handle_model_change()
    assert executor.num_embeddings == num_embeddings
