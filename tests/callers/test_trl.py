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

pytestmark = pytest.mark.slow

# by `generate`, or by `generate_batch`
WAYS: dict[str, dict[str, Any]] = {
    "generate": {"generation_kwargs": models.PAGED},
    "batches": {"use_transformers_continuous_batching": True},
}
NUM_STEPS, NUM_ROWS = 4, 4
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
SETUPS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "checkpointing": {"gradient_checkpointing": True},
    "peft": {
        "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    },
}
TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


@pytest.fixture(autouse=True)
def native_names() -> Iterator[None]:
    hf_paged.install(continuous_batching={"block_size": models.BLOCK_SIZE})
    yield
    hf_paged.uninstall()
    hf_paged.install()


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def roll_out(
    trainer: str, folder: Path, way: str | None = None, **arguments: Any
) -> tuple[list[list[list[int]]], list[float]]:
    """The tokens of every rollout, and the losses; of plain calls without a `way`."""
    trainer_class, config_class = TRAINERS[trainer]
    model: Any = models.build("llama")
    rollouts, routes = [], []

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        rollouts.append([list(map(int, ids)) for ids in completion_ids])
        routes.append(hf_paged.last_route(model))
        return [float(sum(ids) % 17) for ids in completion_ids]

    own = {"num_generations": NUM_ROWS, "max_completion_length": 16, "beta": 0.0, "bf16": False}
    adapter = arguments.pop("peft_config", None)
    options = {**COMMON, **own, **arguments, **WAYS.get(way or "", {})}
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=config_class(output_dir=str(folder), **options),
        # a later rollout would find its blocks
        train_dataset=Dataset.from_dict({"prompt": [models.corpus()[0] * 3] * 8}),
        processing_class=models.tokenizer(),
        peft_config=adapter,
    )
    trainer.train()
    if way:
        assert [route.road for route in routes] == ["engine"] * len(routes), routes[-1]
        assert_used_pool(model)
    return rollouts, losses_of(trainer)


@pytest.mark.parametrize(
    ("setup", "ways"),
    [("fp32", WAYS), ("peft", WAYS), ("checkpointing", ["generate"])],
    ids=["fp32", "peft", "checkpointing"],
)
@pytest.mark.parametrize("name", TRAINERS)
def test_rollouts_between_steps(name: str, setup: str, ways: list[str], tmp_path: Path) -> None:
    """A block from the weights before a step would change tokens, and from then on losses."""
    plain, plain_losses = roll_out(name, tmp_path, **SETUPS[setup])
    assert len(plain) == NUM_STEPS and any(plain_losses)
    for way in ways:
        paged, losses = roll_out(name, tmp_path, way, **SETUPS[setup])
        for step, (expected, actual) in enumerate(zip(plain, paged, strict=True)):
            assert expected == actual, f"{way}, step {step}"
        assert losses == plain_losses


def test_rollouts_in_mixed_precision(tmp_path: Path) -> None:
    """Compares the first rollouts only: a single token that differs changes all later ones."""
    plain, paged = (
        roll_out("grpo", tmp_path, way, bf16=True, temperature=0.3)[0] for way in (None, "generate")
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

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: PreTrainedModel, **kwargs: Any
    ) -> None:  # type: ignore[override]
        assert model.training
        # their blocks are kept for later calls
        inputs = models.padded_prompt("llama", (40, 33, 37, 40))
        tokens = model.generate(**inputs, do_sample=True, max_new_tokens=8, **self.options)
        self.tokens.append(tokens.tolist())
        route = hf_paged.last_route(model)
        assert not self.options or (route is not None and route.road == "engine")


@pytest.mark.parametrize("setup", ["fp32", "peft"])
def test_supervised_training_that_generates_in_a_callback(setup: str, tmp_path: Path) -> None:
    texts = [text[: 7 + 5 * number] for number, text in enumerate(models.corpus()[:8])]
    runs: list[tuple[Any, ...]] = []
    for options in ({}, models.PAGED):
        callback = Generates(options)
        model = models.build("llama")
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                str(tmp_path), max_length=64, bf16=False, gradient_checkpointing=False, **COMMON
            ),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=models.tokenizer(),
            callbacks=[callback],
            **SETUPS[setup],
        )
        trainer.train()
        runs.append((callback.tokens, losses_of(trainer)))
    assert_used_pool(model)
    assert len(runs[0][0]) == NUM_STEPS == len(runs[0][1]) and len(set(runs[0][1])) > 1
    assert runs[0] == runs[1]
