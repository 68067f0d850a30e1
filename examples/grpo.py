"""GRPO with TRL and rollouts from paged memory: the same training as with plain `generate`.

One option of the config, `generation_kwargs`, turns it on. Eight samples of a prompt share its
blocks. With `idle_release_seconds=0` the pool is released after each rollout, so that the optimizer
step has all memory. The model is a small one that writes nonsense; the reward counts commas. The
script exits with status 1 if a token of a rollout, or a loss, differs from the run on plain
`generate`.

    pip install trl && python examples/grpo.py [--train-seconds 10] [--quick]
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from typing import Any

import tiny_model  # before transformers: it sets the environment
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import hf_paged

NUM_SAMPLES = 8  # per prompt
PAGED = {"cache_implementation": "paged", "cache_config": {"idle_release_seconds": 0}}


class Rollouts:
    """Sampled tokens and mean reward of each rollout."""

    def __init__(self) -> None:
        self.tokens: list[list[list[int]]] = []
        self.rewards: list[float] = []

    def reward(
        self, completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        found = [text.count(",") - 0.1 * abs(len(text) - 60) / 60 for text in completions]
        self.tokens.append([list(map(int, ids)) for ids in completion_ids])
        self.rewards.append(sum(found) / len(found))
        return found


class Memory(TrainerCallback):
    """Records the pool's bytes before each optimizer step."""

    def __init__(self) -> None:
        self.held_bytes: list[int] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.held_bytes.append(hf_paged.memory_stats(model).held_bytes)


def train(
    model: Any, tokenizer: Any, steps: int, new_tokens: int, generation: dict[str, Any]
) -> tuple[Any, ...]:
    """The rollouts, the losses, the pool's bytes at each optimizer step, and the seconds of the
    training."""
    rollouts, memory = Rollouts(), Memory()
    prompts = [text[:160] for _, text in zip(range(steps), tiny_model.MANUAL.values())]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=NUM_SAMPLES,
            num_generations=NUM_SAMPLES,
            max_completion_length=new_tokens,
            max_steps=steps,
            learning_rate=1e-4,
            beta=0.0,
            seed=0,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            generation_kwargs=generation,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rollouts.reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[memory],
        )
        trainer.remove_callback(PrinterCallback)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return rollouts, losses, memory.held_bytes, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=6, help="optimizer steps (default 6; 2 with --quick)"
    )
    tiny_model.add_arguments(parser, seconds=10)
    arguments = parser.parse_args()
    model, tokenizer = tiny_model.from_arguments(arguments)
    work = (2, 12) if arguments.quick else (arguments.steps, 48)
    plain = train(copy.deepcopy(model), tokenizer, *work, {})
    paged = train(model, tokenizer, *work, PAGED)
    route = hf_paged.last_route(model)
    for step, reward in enumerate(paged[0].rewards):
        print(
            f"step {step}: mean reward {reward:+.3f}, loss {paged[1][step]:+.5f}, pool"
            f" {paged[2][step]} bytes"
        )
    print(f"\nseconds: plain {plain[3]:.1f}, paged {paged[3]:.1f}; road: {route.road}")
    print(f"at most {hf_paged.memory_stats(model).peak_bytes / 2**20:.1f} MiB of keys and values")
    equal = paged[0].tokens == plain[0].tokens, paged[1] == plain[1]
    print(
        f"equal to plain generate: rollouts {'yes' if equal[0] else 'NO'}, losses"
        f" {'yes' if equal[1] else 'NO'}"
    )
    return 0 if all(equal) and route.road == "engine" and not any(paged[2]) else 1


if __name__ == "__main__":
    sys.exit(main())
