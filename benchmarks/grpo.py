"""Reinforcement learning with TRL's `GRPOTrainer` and a random model in float32: rollouts of 4
steps, plain, paged and by transformers' name `generate_batch` on our engine, in 8 turns, from the
same weights. A step has 1 or 4 prompts of up to 64 tokens, with 8 generations of 48 tokens each.
Paged rollouts should be 2.2 times as fast as plain ones; `generate_batch` may take 1.2 times as
long as paged ones. Needs TRL: `pip install -c constraints.txt -e ".[integrations]"`."""

from __future__ import annotations

import argparse
import copy
import functools
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback

import hf_paged
from benchmarks import runner
from benchmarks.models import PAD, SHAPES, Shape, build
from benchmarks.systems import road_of
from benchmarks.workloads import texts

STEPS, GENERATIONS = 4, 8
PROMPTS = (1, 4)  # prompts per step
SYSTEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "paged": {"generation_kwargs": {"cache_implementation": "paged"}},
    # transformers' name, on our engine
    "generate_batch": {"use_transformers_continuous_batching": True},
}


class Timed(LlamaForCausalLM):
    """Records the seconds of each rollout."""

    seconds: list[float]
    _is_timed = False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().generate, *args, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().generate_batch, *args, **kwargs)

    def _timed(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_timed:  # nested call: the outer one is timed
            return method(*args, **kwargs)
        start, self._is_timed = time.perf_counter(), True
        output = method(*args, **kwargs)
        self._is_timed = False
        self.seconds.append(time.perf_counter() - start)
        return output


def tokenizer(shape: Shape) -> PreTrainedTokenizerFast:
    """One word per id; the end-of-text id is the one that no row generates."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(shape.vocab)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=f"w{PAD}", eos_token=f"w{shape.never}"
    )


def prompts_of(shape: Shape, count: int, length: int) -> list[str]:
    """Prompts from `length` tokens down to half of that."""
    lengths = [length - length * number // (2 * count) for number in range(count)]
    rows = texts(random.Random(0), lengths, shape.vocab)
    return [" ".join(f"w{word}" for word in row) for row in rows]


def train(
    model: Any, shape: Shape, system: str, prompts: int, new_tokens: int, length: int
) -> tuple[float, float, list[Any]]:
    """Seconds of the rollouts, seconds of the whole training, and all tokens with the losses."""
    from datasets import Dataset  # here, so that `benchmarks.readme` needs neither
    from trl import GRPOConfig, GRPOTrainer

    rollouts: list[Any] = []

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        rollouts.append(completion_ids)
        return [float(sum(ids) % 17) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=GENERATIONS * prompts,
            num_generations=GENERATIONS,
            max_completion_length=new_tokens,
            max_steps=STEPS,
            beta=0.0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
            **SYSTEMS[system],
        )
        data = Dataset.from_dict({"prompt": prompts_of(shape, STEPS * prompts, length)})
        trainer = GRPOTrainer(
            model, reward, config, train_dataset=data, processing_class=tokenizer(shape)
        )
        trainer.remove_callback(PrinterCallback)
        model.seconds = []
        whole = runner.seconds_of(trainer.train)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return sum(model.seconds), whole, [rollouts, losses]


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    shape = SHAPES[args.model]
    model = build(shape)
    model.__class__ = Timed
    weights = copy.deepcopy(model.state_dict())
    hf_paged.install(continuous_batching=True)
    transformers.logging.set_verbosity_error()

    def rollouts(turn: int, system: str, *, prompts: int) -> runner.Turn:
        model.load_state_dict(weights)
        seconds, whole, found = train(model, shape, system, prompts, args.new_tokens, args.length)
        route = "plain" if system == "plain" else road_of(model)
        figures = {"training, s": whole, "route": route}
        return runner.Turn(seconds, found, figures)

    for prompts in PROMPTS:
        arms = runner.each(functools.partial(rollouts, prompts=prompts), list(SYSTEMS))
        size = f"{STEPS} steps of {prompts} x {GENERATIONS} x {args.new_tokens} tokens"
        over = {"plain": {"paged": 2.2}, "paged": {"generate_batch": 1 / 1.2}}
        yield runner.Case(f"{args.model}, float32, rollouts: {size}", arms, over)
        hf_paged.check_integrity(model)


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="Rollouts",
    results=(("grpo-cpu-llama-24m",),),
    turns=8,
    is_exact=True,
    fixed={"model": "llama-24m", "new_tokens": 48, "length": 64},
    quick={"model": "llama-tiny", "turns": 1, "new_tokens": 6, "length": 12},
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
