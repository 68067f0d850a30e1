"""TRL's trainers: rollouts between optimizer steps, and generation in a callback, with TRL's
patched forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, TrainerCallback

pytest.importorskip("datasets")
pytest.importorskip("peft")
pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

import hf_paged
from tests.callers.test_callers import assert_used_pool
from tests.callers.test_mixed_precision import no_accelerator_left  # noqa: F401
from tests.support import models

PAGED = {
    "generation_kwargs": {
        "cache_implementation": "paged",
        "cache_config": {"block_size": models.BLOCK_SIZE},
    }
}
BATCHES = {"use_transformers_continuous_batching": True}  # by `generate_batch`
NUM_STEPS, NUM_ROWS = 4, 4
LENGTHS = (9, 23, 40, 12, 30, 7, 18, 25)  # characters
COMMON: dict[str, Any] = dict(
    per_device_train_batch_size=NUM_ROWS,
    max_steps=NUM_STEPS,
    learning_rate=1e-3,
    use_cpu=True,
    report_to=[],
    logging_steps=1,
    save_strategy="no",
    disable_tqdm=True,
    seed=0,
)


def texts() -> list[str]:
    return [text[:length] for text, length in zip(models.corpus(), LENGTHS, strict=False)]


Run = tuple[list[list[list[int]]], list[float]]
"""The tokens of every rollout, and the losses."""


def roll_out(
    trainer_class: type,
    config_class: type,
    folder: Path,
    is_paged: bool,
    road: dict[str, Any] = PAGED,
    **arguments: Any,
) -> Run:
    model: Any = models.build("llama")
    base, rollouts, seen = model, [], []

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        rollouts.append([list(map(int, ids)) for ids in completion_ids])
        seen.append(hf_paged.last_route(base))
        return [float(sum(ids) % 17) for ids in completion_ids]

    own = {
        "num_generations": NUM_ROWS,
        "max_completion_length": 16,
        "beta": 0.0,
        "bf16": False,
        **COMMON,
    }
    adapter = arguments.pop("peft_config", None)
    config = config_class(
        output_dir=str(folder), **{**own, **arguments, **(road if is_paged else {})}
    )
    # a later rollout would find its blocks
    data = Dataset.from_dict({"prompt": [models.corpus()[0] * 3] * 8})
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=models.tokenizer(),
        peft_config=adapter,
    )
    trainer.train()
    if is_paged:
        assert [route.road for route in seen] == ["engine"] * len(seen), seen[-1]
        assert_used_pool(base)
    return rollouts, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


SETUPS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "checkpointing": {"gradient_checkpointing": True},
    "peft": {
        "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    },
}
TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


@pytest.mark.slow_cases("*-fp32")
@pytest.mark.parametrize(
    "setup",
    [pytest.param(name, marks=[] if name == "fp32" else pytest.mark.slow) for name in SETUPS],
)
@pytest.mark.parametrize("name", TRAINERS)
def test_rollouts_between_steps(name: str, setup: str, tmp_path: Path) -> None:
    """A block from the weights before a step would change tokens, and from then on losses."""
    (plain, plain_losses), (paged, paged_losses) = (
        roll_out(*TRAINERS[name], tmp_path, is_paged, **SETUPS[setup]) for is_paged in (False, True)
    )
    assert len(plain) == NUM_STEPS and any(plain_losses)
    for step, (expected, actual) in enumerate(zip(plain, paged, strict=True)):
        assert expected == actual, f"step {step}"
    assert plain_losses == paged_losses


@pytest.fixture
def native_names() -> Iterator[None]:
    hf_paged.install(continuous_batching={"block_size": models.BLOCK_SIZE})
    yield
    hf_paged.uninstall()
    hf_paged.install()


@pytest.mark.slow_cases("*-fp32")
@pytest.mark.usefixtures("native_names")
@pytest.mark.parametrize("setup", ["fp32", pytest.param("peft", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TRAINERS)
def test_rollouts_by_transformers_continuous_batching(
    name: str, setup: str, tmp_path: Path
) -> None:
    """Draws, and so rollouts and losses, equal those of the plain call with the same seed."""
    plain = roll_out(*TRAINERS[name], tmp_path, False, **SETUPS[setup])
    ours = roll_out(*TRAINERS[name], tmp_path, True, road=BATCHES, **SETUPS[setup])
    assert len(plain[0]) == NUM_STEPS and any(plain[1])
    assert ours == plain


@pytest.mark.slow
def test_rollouts_in_mixed_precision(tmp_path: Path) -> None:
    """Compares the first rollouts only: a single token that differs changes all later ones."""
    (plain, _), (paged, _) = (
        roll_out(GRPOTrainer, GRPOConfig, tmp_path, is_paged, bf16=True, temperature=0.3)
        for is_paged in (False, True)
    )
    pairs = [
        (a, b) for expected, actual in zip(plain[0], paged[0]) for a, b in zip(expected, actual)
    ]
    assert sum(a == b for a, b in pairs) / len(pairs) > 0.7


class Generates(TrainerCallback):
    """Samples after every step, with the model in training mode."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.tokens: list[list[list[int]]] = []
        self.roads: list[str] = []

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: PreTrainedModel, **kwargs: Any
    ) -> None:  # type: ignore[override]
        assert model.training
        # their blocks are kept for later calls
        inputs = models.padded_prompt("llama", (40, 33, 37, 40))
        tokens = model.generate(**inputs, do_sample=True, max_new_tokens=8, **self.options)
        self.tokens.append(tokens.tolist())
        route = hf_paged.last_route(model)
        self.roads.append(route.road if route else "")


@pytest.mark.slow_cases("fp32")
@pytest.mark.parametrize("setup", ["fp32", pytest.param("peft", marks=pytest.mark.slow)])
def test_supervised_training_that_generates_in_a_callback(setup: str, tmp_path: Path) -> None:
    runs: list[tuple[Any, ...]] = []
    for options in ({}, models.PAGED):
        callback = Generates(options)
        config = SFTConfig(
            str(tmp_path), max_length=64, bf16=False, gradient_checkpointing=False, **COMMON
        )
        model = models.build("llama")
        trainer = SFTTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_dict({"text": texts()}),
            processing_class=models.tokenizer(),
            callbacks=[callback],
            **SETUPS[setup],
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append((callback.tokens, losses))
    assert callback.roads == ["engine"] * NUM_STEPS
    assert_used_pool(model)
    assert len(runs[0][1]) == NUM_STEPS and len(set(runs[0][1])) > 1
    assert runs[0] == runs[1]
