"""Evaluation while training: `Seq2SeqTrainer` with `predict_with_generate` takes a step of the
optimizer, then generates for its evaluation set, and so on: the weights are others in each
evaluation. Plain and paged, from the same weights; medians, 95% intervals. The target is plain's
time at most.

    python -m benchmarks.trainer [--only T5,Llama] [--turns 5] [--quick] [--json PATH]

Evaluation: 32 prompts of 32 to 64 tokens in batches of 16, 32 new tokens each, greedy, in float32.
Timed are the prediction steps: `generate`, and the loss. The figure beside is the whole training.
"""

from __future__ import annotations

import argparse
import copy
import functools
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.trainer_callback import PrinterCallback

import hf_paged
from benchmarks import runner, side_by_side
from benchmarks.models import SHAPES, build

STEPS, BATCH, LONGEST = 3, 16, 64


class Timed(Seq2SeqTrainer):
    """Records the seconds of `generate` and its tokens."""

    def prediction_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = super().prediction_step(model, inputs, *arguments, **options)
        self.seconds += time.perf_counter() - start
        self.tokens += found[1].tolist()
        return found


def examples(model: Any, count: int) -> list[dict[str, list[int]]]:
    """Prompts padded to one length, at the side of the model's tokenizer, with labels."""
    generator, found = torch.Generator().manual_seed(0), []
    for number in range(count):
        length = LONGEST - LONGEST * number // (2 * count)
        ids = torch.randint(8, 500, (length,), generator=generator).tolist()
        rest, is_right = [0] * (LONGEST - length), model.config.is_encoder_decoder
        padded, mask = (ids + rest, [1] * length + rest), (rest + ids, rest + [1] * length)
        ids, seen = padded if is_right else mask
        found.append({"input_ids": ids, "attention_mask": seen, "labels": ids})
    return found


def train(model: Any, system: str, count: int, new_tokens: int) -> runner.Turn:
    """Seconds of all evaluations, their tokens, and the seconds of the whole training."""
    model.generation_config.cache_implementation = "paged" if system == "paged" else None
    data = examples(model, count)
    with tempfile.TemporaryDirectory() as folder:
        config = Seq2SeqTrainingArguments(
            output_dir=folder,
            predict_with_generate=True,
            generation_config=copy.deepcopy(model.generation_config),
            per_device_train_batch_size=4,
            per_device_eval_batch_size=BATCH,
            eval_strategy="steps",
            eval_steps=1,
            max_steps=STEPS,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        config.generation_config.max_new_tokens = new_tokens
        sets: dict[str, Any] = {"train_dataset": data, "eval_dataset": data}
        trainer = Timed(model, config, compute_metrics=lambda found: {}, **sets)
        trainer.remove_callback(PrinterCallback)
        trainer.seconds, trainer.tokens = 0.0, []
        whole = runner.seconds_of(trainer.train)
    return runner.Turn(trainer.seconds, trainer.tokens, {"training, s": whole})


def case_of(args: argparse.Namespace, title: str, model: Any) -> runner.Case:
    weights = copy.deepcopy(model.state_dict())

    def turn(number: int, system: str) -> runner.Turn:
        model.load_state_dict(weights)
        found = train(model, system, args.count, args.new_tokens)
        route = hf_paged.last_route(model) if system == "paged" else None
        return found._replace(figures={**found.figures, "route": route.road if route else "plain"})

    arms = {system: functools.partial(turn, system=system) for system in ("plain", "paged")}
    return runner.Case(f"{title}, {STEPS} evaluations", arms, {"plain": {"paged": 1.0}})


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    transformers.logging.set_verbosity_error()
    if "T5" in args.only:
        yield case_of(args, "T5-small", side_by_side.build("T5-small", is_tiny=args.is_tiny))
    if "Llama" in args.only:
        shape = SHAPES["llama-tiny" if args.is_tiny else "llama-24m"]
        yield case_of(args, shape.name, build(shape, "cpu", torch.float32))


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="Evaluation while training",
    results=(("trainer-cpu",),),
    turns=5,
    only="models, by commas",
    known=("T5", "Llama"),
    is_exact=True,
    fixed={"is_tiny": False, "count": 32, "new_tokens": 32},
    quick={"is_tiny": True, "turns": 1, "count": 4, "new_tokens": 4},
)
main = BENCHMARK.main

if __name__ == "__main__":
    raise SystemExit(main())
