"""Models that accelerate runs under bf16 autocast: prepared by hand, and by
`Seq2SeqTrainer(bf16=True)`.

bfloat16 keeps 8 bits, so a random model's best two tokens are often equal, and the order of a sum
decides. These models have memorized answers, each from its whole prompt, so no choice depends on
rounding.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.utils.import_utils import enable_tf32

import hf_paged
from hf_paged import PagedEngine
from tests.callers.test_callers import Pairs, assert_used_pool, seq2seq_trainer, timeless
from tests.support import models
from tests.support.checks import assert_same_tokens
from tests.support.precision import BY_BACKEND, LEGACY, default_precision
from tests.support.rooms import records_on_cpu

NUM_PROMPTS, PROMPT_LENGTH, ANSWER_LENGTH = 8, 21, 10
PADDING = 6  # tokens


@pytest.fixture(autouse=True)
def no_accelerator_left() -> Iterator[None]:
    """accelerate keeps its mixed precision in globals, which would affect another test's
    Accelerator or Trainer."""
    states = (AcceleratorState, GradientState, PartialState)
    for state in states:  # those of tests of other files
        state._reset_state()
    yield
    for state in states:
        state._reset_state()


class Answers(Dataset):
    """
    Prompts that differ in one token, every second left-padded, and an answer to each.

    Args:
        joined (`bool`): Answers follow the prompts, as in training of a decoder-only model, with
            the loss on the answer. Otherwise they are the labels: of an encoder-decoder model, with
            the same number of tokens, or, to evaluate a decoder-only model, of the prompt.
    """

    def __init__(self, is_encoder_decoder: bool, joined: bool) -> None:
        self.prompts = models.token_ids(1, PROMPT_LENGTH, seed=1).repeat(NUM_PROMPTS, 1)
        self.prompts[:, PROMPT_LENGTH // 2] = torch.arange(NUM_PROMPTS) + 40
        self.masks = torch.ones_like(self.prompts)
        self.masks[1::2, :PADDING] = 0
        self.prompts[1::2, :PADDING] = models.PAD
        self.answers = models.token_ids(NUM_PROMPTS, ANSWER_LENGTH, seed=2)
        self.labels = self.answers if is_encoder_decoder else self.prompts
        self.ids = self.prompts
        if joined and not is_encoder_decoder:
            self.ids = torch.cat([self.prompts, self.answers], 1)
            self.masks = torch.cat([self.masks, torch.ones_like(self.answers)], 1)
            self.labels = torch.cat([torch.full_like(self.prompts, -100), self.answers], 1)

    def __len__(self) -> int:
        return NUM_PROMPTS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.ids[index],
            "attention_mask": self.masks[index],
            "labels": self.labels[index],
        }


def trainer_of(model: PreTrainedModel, folder: Path) -> Seq2SeqTrainer:
    is_encoder_decoder = model.config.is_encoder_decoder
    settings = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        bf16=True,
        predict_with_generate=True,
        generation_max_length=ANSWER_LENGTH + (1 if is_encoder_decoder else PROMPT_LENGTH),
        per_device_eval_batch_size=3,
        per_device_train_batch_size=NUM_PROMPTS,
        learning_rate=4e-3,
        lr_scheduler_type="constant",
        max_steps=40,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    learned, asked = (Answers(is_encoder_decoder, joined) for joined in (True, False))
    return Seq2SeqTrainer(model=model, args=settings, train_dataset=learned, eval_dataset=asked)


@pytest.mark.slow_cases("llama")
@pytest.mark.parametrize("name", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_seq2seq_trainer_bf16(name: str, tmp_path: Path) -> None:
    """Predict, train until the answers are known, predict and evaluate, as with plain."""
    results: dict[bool, list[Any]] = {}
    for paged in (False, True):
        model = models.build(name)
        if paged:
            model.generation_config.cache_implementation = "paged"
            model.generation_config.cache_config = {"block_size": 8}
        trainer = trainer_of(model, tmp_path)
        before = trainer.predict(trainer.eval_dataset)
        trainer.train()
        after = [trainer.predict(trainer.eval_dataset, num_beams=num_beams) for num_beams in (1, 3)]
        results[paged] = [before.predictions.shape, *(output.predictions for output in after)]
        results[paged] += [
            timeless(output.metrics)
            for output in (*after, SimpleNamespace(metrics=trainer.evaluate()))
        ]
        if paged:
            assert hf_paged.last_route(model).road == "engine"
            assert_used_pool(model)
    start = 1 if model.config.is_encoder_decoder else PROMPT_LENGTH
    for plain in results[False][1:3]:
        answers = torch.tensor(plain)[:, start : start + ANSWER_LENGTH]
        assert_same_tokens(
            trainer.eval_dataset.answers,
            answers,
            "plain does not know the answers: the test is void",
        )
    assert results[True][0] == results[False][0]
    for plain, paged in zip(results[False][1:3], results[True][1:3]):
        assert_same_tokens(torch.tensor(plain), torch.tensor(paged), "predictions")
    for plain, paged in zip(results[False][3:], results[True][3:]):
        assert plain == pytest.approx(paged)


@functools.cache
def _knowing(name: str) -> PreTrainedModel:
    """A model that knows the answers, trained in float32."""
    model = models.build(name).train()
    data = Answers(model.config.is_encoder_decoder, joined=True)
    batch = {key: torch.stack([data[i][key] for i in range(len(data))]) for key in data[0]}
    positions = {}
    if not model.config.is_encoder_decoder:  # as `generate` counts
        positions["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(300):
        optimizer.zero_grad()
        loss = model(**batch, **positions).loss
        if loss < 0.01:
            break
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.slow_cases(but=["llama-*"])
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "t5"])
def test_accelerate_bf16(name: str, num_beams: int) -> None:
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare(copy.deepcopy(_knowing(name)))
    data = Answers(model.config.is_encoder_decoder, joined=False)
    seen: list[torch.dtype] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    inputs = {
        "input_ids": data.prompts,
        "attention_mask": data.masks,
        "max_new_tokens": ANSWER_LENGTH,
        "num_beams": num_beams,
    }
    expected = model.generate(**inputs, do_sample=False)
    assert set(seen) == {torch.bfloat16}, "no autocast: the test is void"
    hook.remove()
    assert_same_tokens(
        data.answers,
        expected[:, -ANSWER_LENGTH:],
        "plain does not know the answers: the test is void",
    )
    assert_same_tokens(expected, model.generate(**inputs, do_sample=False, **models.PAGED))
    assert hf_paged.last_route(model).road == "engine"
    assert_used_pool(model)


# --------------------------------------------------------------------------- precision of float32

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}
NEW = 20  # tokens: enough for recorded steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["all", "cuda.matmul", "cudnn", "mkldnn.matmul", "medium, then all", "all, then medium"]
)
def test_precision_of_float32(name: str) -> None:
    setters = BY_BACKEND | LEGACY
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    with default_precision():
        for part in name.split(", then "):
            setters[part]()
        for mode in MODES.values():
            torch.manual_seed(0)
            expected = model.generate(**inputs, **mode, max_new_tokens=NEW)
            torch.manual_seed(0)
            found = model.generate(**inputs, **mode, max_new_tokens=NEW, **models.PAGED)
            assert_same_tokens(expected, found, name)
            route = hf_paged.last_route(model)
            assert route is not None
            assert route.road == "engine"
            assert route.reason.startswith("packed")
            assert not records_on_cpu() or route.num_captured_steps > 0
        prompt = models.token_ids(1, 9, seed=3)
        expected = model.generate(prompt, do_sample=False, max_new_tokens=NEW)
        with PagedEngine(model, {"block_size": models.BLOCK_SIZE}) as engine:
            result = engine.generate(prompt.tolist(), {"do_sample": False, "max_new_tokens": NEW})[
                0
            ]
        assert result.error is None
        assert result.sequences[0].token_ids == expected[0, 9:].tolist()
    assert_used_pool(model)


@pytest.mark.slow
def test_an_engine_between_whose_steps_the_precision_changes() -> None:
    model, options = models.build("llama"), {"do_sample": False, "max_new_tokens": 2 * NEW}
    prompt = models.token_ids(1, 9, seed=3)
    expected = model.generate(prompt, **options)[0, 9:].tolist()
    with default_precision(), PagedEngine(model, {"block_size": models.BLOCK_SIZE}) as engine:
        for setter in [None, *BY_BACKEND.values()]:
            engine.add_request(prompt[0].tolist(), options)
            for _ in range(NEW):
                engine.step()
            if setter is not None:
                setter()
            results = []
            while engine.has_unfinished:
                results += [output.result for output in engine.step()]
            assert results[-1].error is None
            assert results[-1].sequences[0].token_ids == expected


@pytest.mark.slow_cases("t5")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_trainer_that_turns_on_tf32(name: str, tmp_path: Path) -> None:
    """As `TrainingArguments(tf32=True)`, which wants an Ampere GPU, does."""
    predictions, pairs = [], Pairs()
    if name == "llama":
        pairs.labels = pairs.inputs
    with default_precision():
        for is_paged in (False, True):
            model = models.build(name)
            if is_paged:
                model.generation_config.cache_implementation = "paged"
            trainer = seq2seq_trainer(model, tmp_path, num_beams=1)
            enable_tf32(True)
            options = {"max_length": None, "max_new_tokens": NEW}
            predictions.append(torch.tensor(trainer.predict(pairs, **options).predictions))
    assert_same_tokens(*predictions)
    assert_used_pool(model)


@pytest.mark.parametrize("name", ["all", "mkldnn.matmul"])
def test_inspect_in_another_precision(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hf_paged import inspect

    models.config("llama").save_pretrained(tmp_path)
    with default_precision():
        BY_BACKEND[name]()
        assert inspect.main([str(tmp_path)]) == 0
    assert "packed" in capsys.readouterr().out
