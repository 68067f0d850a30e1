"""`Seq2SeqTrainer` with `predict_with_generate` takes a step of the optimizer, then generates for
its evaluation set, and so on: the weights differ in each evaluation. Plain and paged runs begin
with the same weights. Target: at most plain's time. 3 evaluations of 32 prompts of 33 to 64 tokens
in batches of 16, 32 new tokens each, greedy, in float32. Timed are the prediction steps, `generate`
and the loss; beside them the whole training."""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Seq2SeqTrainingArguments, logging
from transformers.trainer_callback import PrinterCallback

from benchmarks import runner, side_by_side
from benchmarks.models import SHAPES, build
from benchmarks.systems import road_of

STEPS, LONGEST = 3, 64
OPTIONS: dict[str, Any] = dict(
    per_device_train_batch_size=4,
    per_device_eval_batch_size=16,
    max_steps=STEPS,
    eval_strategy="steps",
    eval_steps=1,
    save_strategy="no",
    predict_with_generate=True,
    seed=0,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)


def trained(model: Any, config: Any, data: list[Any]) -> runner.Turn:
    """Seconds and tokens of the prediction steps, and the seconds of the whole training."""
    from transformers import Seq2SeqTrainer  # here, so that `benchmarks.readme` needs none

    predictions: list[Any] = []

    class Timed(Seq2SeqTrainer):
        def prediction_step(self, *arguments: Any, **options: Any) -> Any:
            step, start = super().prediction_step, time.perf_counter()
            predictions.append((step(*arguments, **options), time.perf_counter() - start))
            return predictions[-1][0]

    sets: dict[str, Any] = {"train_dataset": data, "eval_dataset": data}
    trainer = Timed(model, config, compute_metrics=lambda predictions: {}, **sets)
    trainer.remove_callback(PrinterCallback)
    whole = runner.seconds_of(trainer.train)
    tokens = [row for (_, tokens, _), _ in predictions for row in tokens.tolist()]
    return runner.Turn(sum(spent for _, spent in predictions), tokens, {"training, s": whole})


def examples(count: int, is_right: bool) -> list[dict[str, torch.Tensor]]:
    """Prompts padded to one length, with labels."""
    generator, rows = torch.Generator().manual_seed(0), []
    for number in range(count):
        ids = torch.randint(
            8, 500, (LONGEST - LONGEST * number // (2 * count),), generator=generator
        )
        sides = (0, LONGEST - len(ids)) if is_right else (LONGEST - len(ids), 0)
        ids, mask = (torch.nn.functional.pad(one, sides) for one in (ids, torch.ones_like(ids)))
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": ids})
    return rows


def case_of(args: argparse.Namespace, title: str, model: Any) -> runner.Case:
    weights, data = copy.deepcopy(model.state_dict()), examples(args.count, title[0] == "T")

    def turn(number: int, system: str) -> runner.Turn:
        model.load_state_dict(weights)
        config = copy.deepcopy(model.generation_config)
        config.update(max_new_tokens=args.new_tokens, cache_implementation=system)
        with tempfile.TemporaryDirectory() as folder:
            options = Seq2SeqTrainingArguments(folder, generation_config=config, **OPTIONS)
            result = trained(model, options, data)
        route = road_of(model) if system else "plain"
        return result._replace(figures={**result.figures, "route": route})

    systems = {"plain": None, "paged": "paged"}
    arms = runner.each(turn, systems)
    return runner.Case(f"{title}, {STEPS} evaluations", arms, {"plain": {"paged": 1.0}})


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    logging.set_verbosity_error()
    yield case_of(args, "T5-small", side_by_side.build("T5-small", is_tiny=args.is_tiny))
    shape = SHAPES["llama-tiny" if args.is_tiny else "llama-24m"]
    yield case_of(args, shape.name, build(shape))


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="Evaluation while training",
    results=(("trainer-cpu",),),
    turns=5,
    is_exact=True,
    fixed={"is_tiny": False, "count": 32, "new_tokens": 32},
    quick={"is_tiny": True, "turns": 1, "count": 4, "new_tokens": 4},
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
