"""Reinforcement learning with TRL's `GRPOTrainer`: rollouts of 4 steps, plain, paged and by
transformers' name `generate_batch` on our engine, in turns, from the same weights. A step has 1 or
4 prompts, with 8 generations of 48 tokens each.

    python -m benchmarks.grpo [--turns 8] [--quick] [--json PATH]

Needs TRL: `pip install -c constraints.txt -e ".[integrations]"`.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback

import hf_paged
from benchmarks.machine import facts
from benchmarks.models import FIRST_WORD, PAD, SHAPES, Shape, build
from benchmarks.paired import interval, ratios

STEPS, GENERATIONS, NEW_TOKENS, LENGTH, TURNS = 4, 8, 48, 64, 8
PROMPTS = (1, 4)  # prompts per step
TARGET = 2.2  # speedup over plain rollouts
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


def texts(shape: Shape, count: int, length: int) -> list[str]:
    """Prompts from `length` tokens down to half of that."""
    generator = torch.Generator().manual_seed(0)
    lengths = [length - length * number // (2 * count) for number in range(count)]
    rows = [
        torch.randint(FIRST_WORD, shape.never, (size,), generator=generator) for size in lengths
    ]
    return [" ".join(f"w{i}" for i in row.tolist()) for row in rows]


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
        data = Dataset.from_dict({"prompt": texts(shape, STEPS * prompts, length)})
        trainer = GRPOTrainer(
            model, reward, config, train_dataset=data, processing_class=tokenizer(shape)
        )
        trainer.remove_callback(PrinterCallback)
        model.seconds = []
        start = time.perf_counter()
        trainer.train()
        whole = time.perf_counter() - start
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return sum(model.seconds), whole, [rollouts, losses]


def run(name: str, turns: int, prompts: int, new_tokens: int, length: int) -> dict[str, Any]:
    """Median seconds of each system, speedup of the paged rollouts, and whether tokens and losses
    are equal."""
    shape = SHAPES[name]
    model = build(shape, "cpu", torch.float32)
    model.__class__ = Timed
    weights = copy.deepcopy(model.state_dict())
    seconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    whole: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    expected, are_equal = None, True
    for turn in tqdm(range(turns + 1), desc=name, disable=None):  # the first is a warm-up
        for system in list(SYSTEMS) if turn % 2 else reversed(list(SYSTEMS)):
            model.load_state_dict(weights)
            rollouts, training, found = train(model, shape, system, prompts, new_tokens, length)
            expected = expected or found
            are_equal &= found == expected
            if turn:
                seconds[system].append(rollouts)
                whole[system].append(training)
    hf_paged.check_integrity(model)
    route = hf_paged.last_route(model)
    row: dict[str, Any] = {"model": name, "dtype": "float32", "turns": turns, "prompts": prompts}
    row |= {
        "new_tokens": new_tokens,
        "length": length,
        "equal": are_equal,
        "road": route.road if route else None,
    }
    for title, of in (("rollouts", seconds), ("training", whole)):
        row[title] = {system: round(statistics.median(values), 3) for system, values in of.items()}
        for system, suffix in (("paged", ""), ("generate_batch", "_by_batches")):
            faster = ratios(of["plain"], of[system])
            span = interval(faster) or (min(faster), max(faster))
            row[title][f"faster{suffix}"] = round(statistics.median(faster), 3)
            row[title][f"interval{suffix}"] = [round(bound, 3) for bound in span]
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| model | what | plain, s | paged, s | plain / paged | tokens and losses |",
        "|---|---|--:|--:|--:|---|",
    ]
    for row in rows:
        for title in ("rollouts", "training"):
            cell, equal = row[title], "equal" if row["equal"] else "NOT equal"
            what = (
                f"{title}: {STEPS} steps of {row['prompts']} x {GENERATIONS} x {row['new_tokens']}"
                " tokens"
            )
            for system, suffix in (("paged", ""), ("generate_batch", "_by_batches")):
                if system not in cell:  # older results lack this system
                    continue
                low, high = cell[f"interval{suffix}"]
                faster = f"{cell[f'faster{suffix}']} ({low} to {high})"
                name = what if system == "paged" else f"{what}, by `generate_batch`"
                seconds = f"{cell['plain']} | {cell[system]}"
                lines.append(
                    f"| {row['model']}, {row['dtype']} | {name} | {seconds} | {faster} | {equal} |"
                )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--quick", action="store_true", help="a tiny model, few tokens and turns")
    parser.add_argument("--json", help="also write the results here")
    args = parser.parse_args(argv)
    hf_paged.install(continuous_batching=True)
    found = facts()
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (name, turns), sizes = ("llama-24m", args.turns), (NEW_TOKENS, LENGTH)
        if args.quick:
            (name, turns), sizes = ("llama-tiny", 1), (6, 12)
        rows = [run(name, turns, prompts, *sizes) for prompts in PROMPTS]
    print(table(rows))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": found, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
