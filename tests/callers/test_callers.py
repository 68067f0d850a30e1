"""Libraries that call `generate`: pipelines, copies, dtypes, files, threads, nested calls."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    pipeline,
)

import hf_paged
from tests.support import models
from tests.support.checks import (
    assert_pool_empty,
    assert_same_tokens,
    attention_of,
    generate_both,
    in_threads,
    plain_run,
)

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
BEAMS: dict[str, Any] = {"num_beams": 3, **GREEDY}
SAMPLES: dict[str, Any] = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 8}


def assert_used_pool(model: Any) -> None:
    assert hf_paged.memory_stats(model).peak_blocks > 0, "the call did not use the paged pool"
    assert_pool_empty(model)


@pytest.mark.slow_cases(but=["1-greedy", "2-beams", "5-sampled"])
@pytest.mark.parametrize("mode", [GREEDY, BEAMS, SAMPLES], ids=["greedy", "beams", "sampled"])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_pipeline_text_generation(batch_size: int, mode: dict[str, Any]) -> None:
    """Asked by a keyword, or by the model's generation config."""
    texts = [text[:size] for text, size in zip(models.corpus(), (40, 9, 23, 40, 1))]
    results = []
    for asked_by in ("nothing", "keyword", "config"):
        model = copy.deepcopy(models.get("llama"))
        if asked_by == "config":
            model.generation_config.cache_implementation = "paged"
        keyword = models.PAGED if asked_by == "keyword" else {}
        generator = pipeline(
            "text-generation", model=model, tokenizer=models.tokenizer(), device="cpu"
        )
        torch.manual_seed(0)
        results.append(generator(texts, batch_size=batch_size, **mode, **keyword))
        if asked_by != "nothing":
            assert_used_pool(model)
    assert results[1] == results[2] == results[0]


@pytest.mark.slow
def test_labels_that_a_model_itself_prepares_are_its_prompts() -> None:
    class Own(LlamaForCausalLM):
        def prepare_inputs_for_generation(
            self, input_ids: Any, labels: Any = None, **kwargs: Any
        ) -> Any:
            prepared = super().prepare_inputs_for_generation(input_ids, **kwargs)
            if labels is not None and kwargs.get("is_first_iteration"):
                prepared["input_ids"] = labels
            return prepared

    model, inputs = models.build("llama"), models.prompt("llama")
    model.__class__ = Own
    flipped = inputs["input_ids"].flip(0)
    for labels in (flipped, flipped.clamp(max=9), inputs["input_ids"]):
        inputs["labels"] = labels  # different labels for the same token ids
        assert_same_tokens(*generate_both(model, inputs, {"max_new_tokens": 100}))


def test_a_training_step_after_a_paged_call_has_the_same_gradients() -> None:
    gradients = []
    for paged in ({}, models.PAGED):
        model = models.build("llama").train()
        inputs = models.padded_prompt("llama")
        model.generate(**inputs, **GREEDY, **paged)
        assert model.training
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, atol=0, rtol=0)


@pytest.mark.slow_cases("t5")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_copy_of_a_model_is_no_copy_of_its_pool(name: str) -> None:
    model, inputs = models.build(name), models.prompt(name)
    expected, _ = generate_both(model, inputs, BEAMS)
    twin = copy.deepcopy(model)
    assert hf_paged.memory_stats(twin).peak_blocks == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for tokens in generate_both(twin, inputs, BEAMS):
        assert_same_tokens(expected, tokens, "the copy, with the original zeroed")


def test_a_dtype_that_changes_after_a_paged_call_gets_a_pool_of_its_own() -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    single, paged = generate_both(model, inputs, GREEDY)
    assert_same_tokens(single, paged, "float32")
    model.to(torch.bfloat16)
    logits = {"return_dict_in_generate": True, "output_logits": True, **GREEDY}
    expected, actual = generate_both(model, inputs, logits)
    # bfloat16 keeps 8 bits
    torch.testing.assert_close(actual.logits[0], expected.logits[0], atol=0.15, rtol=0.05)
    assert actual.sequences.shape == single.shape
    del expected, actual
    model.to(torch.float32)
    single, paged = generate_both(model, inputs, GREEDY)
    assert_same_tokens(single, paged, "back")
    assert_used_pool(model)


def test_saved_files_are_the_same_with_a_pool(tmp_path: Path) -> None:
    model, inputs = models.build("llama"), models.prompt("llama")

    def files(name: str) -> dict[str, bytes]:
        model.save_pretrained(tmp_path / name)
        torch.save(model.state_dict(), tmp_path / name / "weights.pt")
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    before = files("model")
    model.generate(**inputs, **GREEDY, **models.PAGED)
    output = model.generate(**inputs, **GREEDY, **models.PAGED, return_dict_in_generate=True)
    assert hf_paged.memory_stats(model).used_blocks > 0, "a returned cache holds its blocks"
    assert files("model") == before
    reloaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    tokens = reloaded.generate(**inputs, **GREEDY, **models.PAGED)
    assert_same_tokens(output.sequences, tokens, "reloaded")


@pytest.mark.slow_cases("bart", "gemma2")
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bart"])
def test_threads_on_two_models(name: str) -> None:
    """One of which plain calls use, too; `tests/test_threads.py` has more on one model."""
    jobs, expected = [], []
    calls = ((name, BEAMS, models.PAGED), (name, GREEDY, {}), ("llama", GREEDY, models.PAGED))
    before = attention_of(models.get(name))
    for index, (model_name, mode, backend) in enumerate(calls):
        model = models.get(model_name)
        inputs = models.padded_prompt(model_name, (13, 4, 9), seed=index)
        expected.append(plain_run(model, inputs, mode))
        options = {**inputs, **mode, **backend}
        jobs.append(lambda m=model, o=options: [m.generate(**o) for _ in range(4)])
    for want, outputs in zip(expected, in_threads(*jobs), strict=True):
        for output in outputs:
            assert_same_tokens(want, output)
    assert attention_of(models.get(name)) == before
    for model_name in (name, "llama"):
        assert_used_pool(models.get(model_name))


class Judge(LogitsProcessor):
    """Queries a model at every step, by a separate `generate` call, and biases the scores by the
    answer."""

    def __init__(self, model: PreTrainedModel, options: dict[str, Any]) -> None:
        self.model, self.options = model, options

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(input_ids)
        answer = self.model.generate(input_ids=input_ids, attention_mask=mask, **self.options)
        return scores.scatter_add(1, answer[:, -1:], torch.full((len(scores), 1), 2.0))


@pytest.mark.slow_cases(but=["outer-*"])
@pytest.mark.parametrize("outer", [GREEDY, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize("inner", ["same model", "other model"])
@pytest.mark.parametrize("paged", ["both", "outer", "inner"])
def test_generate_inside_a_processor(outer: dict[str, Any], inner: str, paged: str) -> None:
    model = models.get("llama")
    judge = model if inner == "same model" else models.get("mistral")
    inputs, before = models.prompt("llama"), attention_of(model)

    def call(outer_backend: dict[str, Any], inner_backend: dict[str, Any]) -> torch.Tensor:
        asked = {"do_sample": False, "num_beams": 2, "max_new_tokens": 3, **inner_backend}
        processors = LogitsProcessorList([Judge(judge, asked)])
        return model.generate(**inputs, **outer, **outer_backend, logits_processor=processors)

    expected = call({}, {})
    assert not torch.equal(expected, plain_run(model, inputs, outer)), (
        "void: the judge does nothing"
    )
    backends = {
        "both": (models.PAGED,) * 2,
        "outer": (models.PAGED, {}),
        "inner": ({}, models.PAGED),
    }
    assert_same_tokens(expected, call(*backends[paged]))
    assert attention_of(model) == before
    assert_pool_empty(model)
