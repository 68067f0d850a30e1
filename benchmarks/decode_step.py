"""
One decode step of `generate` on random weights: plain against `cache_implementation="paged"`.

    python -m benchmarks.decode_step [--device cuda --model llama-3.1-8b --case 64x8192]
                                     [--json PATH]

Both run in one process, in turns. A step is timed between two calls of a stopping criterion, so it
covers all that `generate` does per token; the prefill is excluded.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_paged
from benchmarks import runner
from benchmarks.models import SHAPES, build
from benchmarks.report import markdown


class Case(NamedTuple):
    """Rows and their prompt lengths in tokens; shorter rows are left-padded. `turns`: turns of
    plain and paged."""

    name: str
    lengths: tuple[int, ...]
    turns: int


CASES = (
    Case("1x512", (512,), 25),
    Case("8x512", (512,) * 8, 5),
    Case("32 rows of 64..1024", tuple(64 + round(i * (1024 - 64) / 31) for i in range(32)), 2),
)
QUICK = (Case("1x128", (128,), 3), Case("4 rows of 32..256", (32, 100, 180, 256), 3))


def cases(args: argparse.Namespace) -> list[Case]:
    """Three cases, smaller with `quick`, or the one asked for as `ROWSxTOKENS`."""
    chosen: Sequence[Case] = QUICK if args.quick else CASES
    if args.case:
        rows, length = map(int, args.case.split("x"))
        chosen = [Case(args.case, (length,) * rows, 5)]
    return [case for case in chosen if re.search(args.only, case.name)]


class Clock(StoppingCriteria):
    """Records when each step ends; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def step_seconds(
    model: Any, inputs: dict[str, torch.Tensor], new_tokens: int, **kwargs: Any
) -> tuple[list[float], Any]:
    """Seconds of each decode step after the first, which includes the prefill; all tokens."""
    clock = Clock()
    tokens = model.generate(
        **inputs,
        max_new_tokens=new_tokens + 1,
        do_sample=False,
        eos_token_id=None,
        stopping_criteria=StoppingCriteriaList([clock]),
        **kwargs,
    )
    return [after - before for before, after in itertools.pairwise(clock.times)], tokens


def padded(lengths: tuple[int, ...], vocab_size: int, device: str) -> dict[str, torch.Tensor]:
    """Random left-padded prompts with their attention mask."""
    generator = torch.Generator().manual_seed(0)
    width = max(lengths)
    ids = torch.randint(3, vocab_size, (len(lengths), width), generator=generator)
    mask = torch.arange(width)[None, :] >= width - torch.tensor(lengths)[:, None]
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.long().to(device)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[args.model]
    model = build(shape, args.device, torch.bfloat16)
    rows = []
    for case in cases(args):
        inputs = padded(case.lengths, shape.vocab, args.device)
        short = {name: tensor[:, -8:] for name, tensor in inputs.items()}
        routes = {}

        def steps(
            name: str, inputs: Any = inputs, count: int = args.new_tokens, routes: Any = routes
        ) -> list[float]:
            paged = {"cache_implementation": "paged"} if name == "paged" else {}
            seconds, _ = step_seconds(model, inputs, count, **paged)
            routes[name] = hf_paged.last_route(model)
            return seconds

        for name in ("plain", "paged"):
            steps(name, short, 4)  # warm-up
        arms = {name: (lambda turn, name=name: steps(name)) for name in ("plain", "paged")}
        seconds = runner.take_turns(arms, case.turns)
        medians = {name: list(map(statistics.median, turns)) for name, turns in seconds.items()}
        ratios = [paged / plain for paged, plain in zip(medians["paged"], medians["plain"])]
        row: dict[str, Any] = {"case": case.name}
        for name, turns in seconds.items():
            row[f"{name}_ms"] = round(1e3 * statistics.median(itertools.chain(*turns)), 2)
        row["ratio"] = round(statistics.median(ratios), 3)
        row |= {"ratio_min": round(min(ratios), 3), "ratio_max": round(max(ratios), 3)}
        row["route"] = asdict(routes["paged"] or hf_paged.Route("plain", ""))
        rows.append(row)
        hf_paged.free(model)
    return {"model": shape.name, "rows": rows}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        {
            "case": row["case"],
            "plain ms": str(row["plain_ms"]),
            "paged ms": str(row["paged_ms"]),
            "paged / plain": f"**{row['ratio']}**",
            "min..max": f"{row['ratio_min']}..{row['ratio_max']}",
            "in place": row["route"]["in_place"],
        }
        for row in rows
    ]
    return markdown(lines)


main = runner.Benchmark(
    __doc__,
    run,
    lambda data: [table(data["rows"])],
    options={
        "--device": runner.DEVICE,
        "--model": runner.MODEL | {"default": "qwen2.5-0.5b"},
        "--case": runner.option("one of your own, ROWSxTOKENS of the prompts", default=""),
        "--new-tokens": runner.option("steps timed in each turn", type=int, default=24),
    },
    only="regular expression on the case's name",
    quick={"model": "llama-tiny", "new_tokens": 4},
).main

if __name__ == "__main__":
    raise SystemExit(main())
