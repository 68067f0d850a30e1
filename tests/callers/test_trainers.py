"""`Seq2SeqTrainer` in common set-ups: mixed precision, gradient checkpointing, PEFT adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

import hf_paged
from tests.callers.test_callers import assert_used_pool
from tests.callers.test_mixed_precision import (
    ANSWER_LENGTH,
    NUM_PROMPTS,
    PROMPT_LENGTH,
    Answers,
    assert_known,
    no_accelerator_left,  # noqa: F401
)
from tests.support import models
from tests.support.checks import assert_same_tokens

peft = pytest.importorskip("peft")

CHECKPOINTING = {"gradient_checkpointing": True}
# whether there is an adapter, and the arguments
SETUPS: dict[str, tuple[bool, dict[str, Any]]] = {
    "fp32": (False, {}),
    "bf16": (False, {"bf16": True}),
    "checkpointing": (False, CHECKPOINTING),
    "peft": (True, {}),
    "peft, bf16, checkpointing": (True, {"bf16": True, **CHECKPOINTING}),
}


def prepare(name: str, setup: str, folder: Path, paged: dict[str, Any]) -> Seq2SeqTrainer:
    """A paged call is asked for by the model's config or, in `fp32`, by the trainer's argument."""
    model: Any = models.build(name)
    is_encoder_decoder = model.config.is_encoder_decoder
    has_adapter, arguments = SETUPS[setup]
    asked = model.generation_config
    if setup == "fp32":
        start = asked.decoder_start_token_id
        asked = GenerationConfig(pad_token_id=models.PAD, decoder_start_token_id=start)
        arguments = {"generation_config": asked}
    asked.update(**paged)
    if has_adapter:
        config = peft.LoraConfig(
            r=4,
            target_modules=["q", "v"] if is_encoder_decoder else ["q_proj", "v_proj"],
            task_type="SEQ_2_SEQ_LM" if is_encoder_decoder else "CAUSAL_LM",
            init_lora_weights=False,
        )
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
        model.enable_input_require_grads()
    settings = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        predict_with_generate=True,
        generation_max_length=ANSWER_LENGTH + (1 if is_encoder_decoder else PROMPT_LENGTH),
        per_device_eval_batch_size=3,
        per_device_train_batch_size=NUM_PROMPTS,
        learning_rate=4e-3,
        lr_scheduler_type="constant",
        max_steps=40 if setup == "bf16" else 3,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **arguments,
    )
    learned, asked = (Answers(is_encoder_decoder, joined) for joined in (True, False))
    return Seq2SeqTrainer(model=model, args=settings, train_dataset=learned, eval_dataset=asked)


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_seq2seq_trainer(name: str, setup: str, tmp_path: Path) -> None:
    """Predict, train (in `bf16` until the answers are known), predict and evaluate: tokens and
    losses are plain's."""
    runs: list[list[list[Any]]] = []
    for paged in ({}, models.PAGED):
        trainer = prepare(name, setup, tmp_path, paged)
        data = trainer.eval_dataset
        outputs = [trainer.predict(data)]
        trainer.train()
        outputs += [trainer.predict(data, num_beams=num_beams) for num_beams in (1, 3)]
        tokens = [torch.tensor(output.predictions) for output in outputs]
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        metrics = [output.metrics["test_loss"] for output in outputs]
        runs.append([tokens, losses, [*metrics, trainer.evaluate()["eval_loss"]]])
    model = trainer.model.get_base_model() if SETUPS[setup][0] else trainer.model
    route = hf_paged.last_route(model)
    assert route is not None and route.road == "engine", route
    assert_used_pool(model)
    (plain, plain_losses, plain_metrics), (tokens, losses, metrics) = runs
    assert len(plain_losses) >= 3 and losses == plain_losses
    assert metrics == pytest.approx(plain_metrics)
    assert not torch.equal(plain[0], plain[1]), "training changed nothing: the test is void"
    for step, (expected, actual) in enumerate(zip(plain, tokens, strict=True)):
        if setup == "bf16" and not step:  # before the answers are known, rounding decides
            assert expected.shape == actual.shape
            continue
        if setup == "bf16":
            start = 1 if model.config.is_encoder_decoder else PROMPT_LENGTH
            assert_known(expected[:, : start + ANSWER_LENGTH], data.answers)
        # with an adapter, accelerate casts the wrapper, which `generate` bypasses
        assert_same_tokens(expected, actual)
