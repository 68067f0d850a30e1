"""`Seq2SeqTrainer` in common set-ups: mixed precision, gradient checkpointing, PEFT adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Seq2SeqTrainer

import hf_paged
from tests.callers.test_callers import Pairs, assert_used_pool, seq2seq_trainer
from tests.callers.test_mixed_precision import no_accelerator_left  # noqa: F401
from tests.support import models
from tests.support.checks import assert_same_tokens

peft = pytest.importorskip("peft")

ROAD = "engine"  # of both models
BF16, CHECKPOINTING = {"bf16": True}, {"gradient_checkpointing": True}
# whether there is an adapter, and the arguments
SETUPS: dict[str, tuple[bool, dict[str, Any]]] = {
    "fp32": (False, {}),
    "bf16": (False, BF16),
    "checkpointing": (False, CHECKPOINTING),
    "peft": (True, {}),
    "peft, bf16, checkpointing": (True, {**BF16, **CHECKPOINTING}),
}


def prepare(
    name: str, has_adapter: bool, arguments: dict[str, Any], folder: Path, is_paged: bool
) -> Seq2SeqTrainer:
    model: Any = models.build(name)
    if is_paged:
        model.generation_config.cache_implementation = "paged"
    if has_adapter:
        targets = ["q", "v"] if model.config.is_encoder_decoder else ["q_proj", "v_proj"]
        task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, target_modules=targets, task_type=task, init_lora_weights=False
        )
        model = peft.get_peft_model(model, config)
        model.enable_input_require_grads()
    trainer = seq2seq_trainer(model, folder, num_beams=1, logging_steps=1, **arguments)
    trainer.args.max_steps = 3
    return trainer


@pytest.mark.slow_cases("llama-bf16", "llama-fp32", "llama-peft, bf16, checkpointing")
@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("checkpointing", "peft") else [])
        for name in SETUPS
    ],
)
@pytest.mark.parametrize("name", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_seq2seq_trainer(name: str, setup: str, tmp_path: Path) -> None:
    """Predict, train, predict from the new weights. In float32 all tokens are plain's, in any
    precision all losses."""
    results: list[tuple[list[Tensor], list[float]]] = []
    for is_paged in (False, True):
        trainer = prepare(name, *SETUPS[setup], tmp_path, is_paged)
        pairs = Pairs()
        if name == "llama":
            pairs.labels = pairs.inputs
            trainer.train_dataset = pairs
        model = trainer.model.get_base_model() if SETUPS[setup][0] else trainer.model
        predictions = [trainer.predict(pairs).predictions]
        trainer.train()
        predictions += [
            trainer.predict(pairs).predictions,
            trainer.predict(pairs, num_beams=3).predictions,
        ]
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        results.append(([torch.tensor(each) for each in predictions], losses))
        if is_paged:
            route = hf_paged.last_route(model)
            assert route is not None and route.road == ROAD, route
            assert_used_pool(model)
    (plain, plain_losses), (paged, paged_losses) = results
    assert len(plain_losses) == 3 and paged_losses == plain_losses
    assert not torch.equal(plain[0], plain[1]), "training changed nothing: the test is void"
    for expected, actual in zip(plain, paged):
        if setup == "bf16":
            # with an adapter, accelerate casts the wrapper, which `generate` bypasses
            assert expected.shape == actual.shape and (expected == actual).float().mean() > 0.8
        else:
            assert_same_tokens(expected, actual)
