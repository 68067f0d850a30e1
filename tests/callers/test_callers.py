"""Libraries that call `generate`: pipelines, Trainer, PEFT, `torch.compile`, threads, nested
calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    pipeline,
)

import hf_paged
from tests.support import models
from tests.support.checks import assert_same_tokens, in_threads

NEW_TOKENS = 12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
BEAMS: dict[str, Any] = {"num_beams": 3, **GREEDY}


def assert_used_pool(model: torch.nn.Module) -> None:
    assert hf_paged.memory_stats(model).peak_blocks > 0, "the call did not use the paged pool"
    hf_paged.check_integrity(model)
    assert hf_paged.memory_stats(model).used_blocks == 0


# --------------------------------------------------------------------------------------- pipeline

TEXTS = (
    models.corpus()[0],
    models.corpus()[1][:9],
    models.corpus()[2][:23],
    models.corpus()[3][:40],
    "b",
)


# each size of a batch with each of two entry points and some mode
@pytest.mark.slow_cases(
    but=[
        "keyword-1-mode2",
        "keyword-2-mode0",
        "keyword-5-mode1",
        "generation_config-1-mode0",
        "generation_config-2-mode1",
        "generation_config-5-mode2",
    ]
)
@pytest.mark.parametrize(
    "mode", [GREEDY, BEAMS, {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 8}]
)
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("door", ["keyword", "generation_config"])
def test_pipeline_text_generation(door: str, batch_size: int, mode: dict[str, Any]) -> None:
    results = []
    for paged in (False, True):
        model = copy.deepcopy(models.get("llama"))
        keyword = models.PAGED if paged and door == "keyword" else {}
        if paged and door == "generation_config":
            model.generation_config.cache_implementation = "paged"
        generator = pipeline(
            "text-generation", model=model, tokenizer=models.tokenizer(), device="cpu"
        )
        torch.manual_seed(0)
        results.append(generator(list(TEXTS), batch_size=batch_size, **mode, **keyword))
    assert results[0] == results[1]
    assert_used_pool(model)


# ---------------------------------------------------------------------------------------- Trainer


class Pairs(Dataset):
    """Eight pairs of token ids, input and label."""

    def __init__(self) -> None:
        self.inputs = models.token_ids(8, 10, seed=1)
        self.labels = models.token_ids(8, 7, seed=2)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.inputs[index]
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": self.labels[index],
        }


def seq2seq_trainer(
    model: PreTrainedModel, folder: Path, num_beams: int, **arguments: Any
) -> Seq2SeqTrainer:
    def share_of_labels(predictions: Any) -> dict[str, float]:
        width = min(predictions.predictions.shape[1] - 1, predictions.label_ids.shape[1])
        hits = predictions.predictions[:, 1 : width + 1] == predictions.label_ids[:, :width]
        return {"hits": float(hits.mean()), "sum": float(predictions.predictions.sum())}

    settings = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        predict_with_generate=True,
        generation_max_length=14,
        generation_num_beams=num_beams,
        per_device_eval_batch_size=3,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        max_steps=2,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **arguments,
    )
    pairs = Pairs()
    return Seq2SeqTrainer(
        model=model,
        args=settings,
        train_dataset=pairs,
        eval_dataset=pairs,
        compute_metrics=share_of_labels,
    )


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {
        key: value
        for key, value in metrics.items()
        if not key.endswith(("runtime", "per_second", "preparation_time"))
    }


@pytest.mark.slow
def test_seq2seq_trainer_with_a_generation_config_argument(tmp_path: Path) -> None:
    predictions = []
    for config in ({}, {"cache_implementation": "paged", "cache_config": {"block_size": 8}}):
        model = models.build("t5")
        generation_config = GenerationConfig(
            **config, decoder_start_token_id=models.PAD, pad_token_id=models.PAD, max_length=14
        )
        trainer = seq2seq_trainer(model, tmp_path, num_beams=2, generation_config=generation_config)
        predictions.append(torch.tensor(trainer.predict(trainer.eval_dataset).predictions))
    assert_same_tokens(*predictions)
    assert_used_pool(model)


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
    for labels in (
        inputs["input_ids"].flip(0),
        inputs["input_ids"].flip(0).clamp(max=9),
        inputs["input_ids"],
    ):
        inputs["labels"] = labels  # different labels for the same token ids
        expected = model.generate(**inputs, max_new_tokens=100)
        assert torch.equal(model.generate(**inputs, max_new_tokens=100, **models.PAGED), expected)


def test_training_step_after_a_paged_call_has_the_same_gradients() -> None:
    """A call leaves no state that changes a training step."""
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


# ------------------------------------------------------------------------------------------- PEFT


# ---------------------------------------------------------------------------------------- compile


# -------------------------------------------------------------------------------------- the model


@pytest.mark.slow_cases(but=["llama"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "t5"])
def test_deepcopy_after_a_paged_call(name: str) -> None:
    model, inputs = models.build(name), models.prompt(name)
    expected = model.generate(**inputs, **BEAMS)
    model.generate(**inputs, **BEAMS, **models.PAGED)
    twin = copy.deepcopy(model)
    assert hf_paged.memory_stats(twin).peak_blocks == 0, (
        "a copy of a model is not a copy of its pool"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same_tokens(
        expected,
        twin.generate(**inputs, **BEAMS, **models.PAGED),
        "the copy, with the original zeroed",
    )
    assert_same_tokens(expected, twin.generate(**inputs, **BEAMS), "the copy, plain")


def test_dtype_changed_after_a_paged_call() -> None:
    """One pool per dtype that the model produces: bfloat16 after float32 and back."""
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    single = model.generate(**inputs, **GREEDY)
    assert_same_tokens(single, model.generate(**inputs, **GREEDY, **models.PAGED), "float32")
    model.to(torch.bfloat16)
    logits = {
        "return_dict_in_generate": True,
        "output_logits": True,
        "do_sample": False,
        "max_new_tokens": 1,
    }
    expected = model.generate(**inputs, **logits).logits[0]
    actual = model.generate(**inputs, **logits, **models.PAGED).logits[0]
    torch.testing.assert_close(actual, expected, atol=0.15, rtol=0.05)  # bfloat16 keeps 8 bits
    half = model.generate(**inputs, **GREEDY, **models.PAGED)
    assert half.shape == single.shape
    model.to(torch.float32)
    assert_same_tokens(
        model.generate(**inputs, **GREEDY),
        model.generate(**inputs, **GREEDY, **models.PAGED),
        "back",
    )
    assert_used_pool(model)


def test_saved_files_are_the_same_with_a_pool(tmp_path: Path) -> None:
    model = models.build("llama")
    model.save_pretrained(tmp_path / "without")
    torch.save(model.state_dict(), tmp_path / "without.pt")
    model.generate(**models.prompt("llama"), **GREEDY, **models.PAGED)
    output = model.generate(
        **models.prompt("llama"), **GREEDY, **models.PAGED, return_dict_in_generate=True
    )
    assert hf_paged.memory_stats(model).used_blocks > 0, "a returned cache holds its blocks"
    model.save_pretrained(tmp_path / "with")
    torch.save(model.state_dict(), tmp_path / "with.pt")
    names = sorted(path.name for path in (tmp_path / "without").iterdir())
    assert sorted(path.name for path in (tmp_path / "with").iterdir()) == names
    for name in names:
        assert (tmp_path / "with" / name).read_bytes() == (
            tmp_path / "without" / name
        ).read_bytes(), name
    left, right = torch.load(tmp_path / "without.pt"), torch.load(tmp_path / "with.pt")
    assert left.keys() == right.keys()
    reloaded = LlamaForCausalLM.from_pretrained(tmp_path / "with")
    inputs = models.prompt("llama")
    assert_same_tokens(
        output.sequences, reloaded.generate(**inputs, **GREEDY, **models.PAGED), "reloaded"
    )


# ---------------------------------------------------------------------------------------- threads


REPEATS = 4


def repeat(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], options: dict[str, Any]
) -> Callable[[], Any]:
    return lambda: [model.generate(**inputs, **options) for _ in range(REPEATS)]


def attention_implementations(model: PreTrainedModel) -> list[str]:
    return [
        module.config._attn_implementation
        for module in model.modules()
        if hasattr(module, "config")
    ]


@pytest.mark.slow_cases(but=["names0"])
@pytest.mark.parametrize("names", [("llama", "mistral"), ("llama", "t5"), ("gemma2", "gpt2")])
def test_two_threads_on_two_models(names: tuple[str, str]) -> None:
    jobs, expected = [], []
    for index, name in enumerate(names):
        inputs, mode = models.padded_prompt(name), (BEAMS, GREEDY)[index]
        expected.append(models.get(name).generate(**inputs, **mode))
        jobs.append(repeat(models.get(name), inputs, {**mode, **models.PAGED}))
    for want, outputs in zip(expected, in_threads(*jobs), strict=True):
        for output in outputs:
            assert_same_tokens(want, output)
    for name in names:
        assert_used_pool(models.get(name))


@pytest.mark.slow_cases(
    "*-bart", "both paged-gemma2", "both paged-llama", "three paged and one plain-*"
)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bart"])
@pytest.mark.parametrize("kinds", ["both paged", "paged and plain", "three paged and one plain"])
def test_threads_on_one_model(name: str, kinds: str) -> None:
    """Calls overlap, of different shapes; a thread switches the model's attention while others use
    it."""
    model = models.get(name)
    before = attention_implementations(model)
    backends = {
        "both paged": [models.PAGED, models.PAGED],
        "paged and plain": [models.PAGED, {}],
        "three paged and one plain": [models.PAGED, {}, models.PAGED, models.PAGED],
    }[kinds]
    modes = (GREEDY, BEAMS, {"num_beams": 2, **GREEDY}, GREEDY)
    lengths = ((13, 4, 9), (6, 17), (20,), (3, 11, 5, 8))
    jobs, expected = [], []
    for index, backend in enumerate(backends):
        inputs = models.padded_prompt(name, lengths[index], seed=index)
        expected.append(model.generate(**inputs, **modes[index]))
        jobs.append(repeat(model, inputs, {**modes[index], **backend}))
    for thread, (want, outputs) in enumerate(zip(expected, in_threads(*jobs), strict=True)):
        for output in outputs:
            assert_same_tokens(want, output, f"thread {thread}")
    assert attention_implementations(model) == before
    assert_used_pool(model)


# ---------------------------------------------------------------------------------------- nesting


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
    inputs = models.prompt("llama")
    inner_options = {"do_sample": False, "num_beams": 2, "max_new_tokens": 3}

    def call(outer_backend: dict[str, Any], inner_backend: dict[str, Any]) -> torch.Tensor:
        processor = Judge(judge, {**inner_options, **inner_backend})
        return model.generate(
            **inputs, **outer, **outer_backend, logits_processor=LogitsProcessorList([processor])
        )

    before = attention_implementations(model)
    expected = call({}, {})
    assert not torch.equal(expected, model.generate(**inputs, **outer)), (
        "the judge changes nothing: the test is void"
    )
    actual = call(
        models.PAGED if paged != "inner" else {}, models.PAGED if paged != "outer" else {}
    )
    assert_same_tokens(expected, actual)
    assert attention_implementations(model) == before
    hf_paged.check_integrity(model)
    assert hf_paged.memory_stats(model).used_blocks == 0
