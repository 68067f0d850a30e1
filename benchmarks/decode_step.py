"""
One decode step of `generate` on random weights: plain against `cache_implementation="paged"`.

    python -m benchmarks.decode_step [--device cuda --model llama-3.1-8b --case 64x8192]
                                     [--json PATH]

Both run in one process, in turns. A step is timed between two calls of a stopping criterion, so it
covers all that `generate` does per token; the prefill is excluded.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_paged
from benchmarks.machine import devices, facts
from benchmarks.models import SHAPES, Shape, build


@dataclass(frozen=True)
class Case:
    """Rows and their prompt lengths in tokens; shorter rows are left-padded. `turns`: turns of
    plain and paged."""

    name: str
    lengths: tuple[int, ...]
    turns: int


def cases(quick: bool, asked: str = "") -> list[Case]:
    """Three cases, smaller with `quick`, or the one asked for as `ROWSxTOKENS`."""
    if asked:
        rows, length = map(int, asked.split("x"))
        return [Case(asked, (length,) * rows, 5)]
    if quick:
        return [Case("1x128", (128,), 3), Case("4 rows of 32..256", (32, 100, 180, 256), 3)]
    ragged = tuple(64 + round(i * (1024 - 64) / 31) for i in range(32))
    return [
        Case("1x512", (512,), 25),
        Case("8x512", (512,) * 8, 5),
        Case("32 rows of 64..1024", ragged, 2),
    ]


class Clock(StoppingCriteria):
    """Records when each step ends; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def steps(self) -> list[float]:
        """Seconds of each step after the first, which includes the prefill."""
        return [b - a for a, b in zip(self.times, self.times[1:])]


def step_seconds(
    model: Any, inputs: dict[str, torch.Tensor], new_tokens: int, **kwargs: Any
) -> tuple[list[float], Any]:
    """Seconds of each decode step, and the tokens of the output."""
    clock = Clock()
    tokens = model.generate(
        **inputs,
        max_new_tokens=new_tokens + 1,
        do_sample=False,
        eos_token_id=None,
        stopping_criteria=StoppingCriteriaList([clock]),
        **kwargs,
    )
    return clock.steps(), tokens


def padded(lengths: tuple[int, ...], vocab_size: int, device: str) -> dict[str, torch.Tensor]:
    """Random left-padded prompts with their attention mask."""
    generator = torch.Generator().manual_seed(0)
    width = max(lengths)
    ids = torch.randint(3, vocab_size, (len(lengths), width), generator=generator)
    mask = torch.arange(width)[None, :] >= width - torch.tensor(lengths)[:, None]
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.long().to(device)}


def run(device: str, shape: Shape, some: list[Case], new_tokens: int) -> list[dict[str, Any]]:
    """Rows of the table."""
    model = build(shape, device, torch.bfloat16)
    rows = []
    for case in some:
        inputs = padded(case.lengths, shape.vocab, device)
        seconds: dict[str, list[float]] = {"plain": [], "paged": []}
        options: dict[str, dict[str, Any]] = {
            "plain": {},
            "paged": {"cache_implementation": "paged"},
        }
        short = {name: tensor[:, -8:] for name, tensor in inputs.items()}
        for name in seconds:
            step_seconds(model, short, 4, **options[name])  # warm-up
        ratios = []
        for _ in range(case.turns):
            medians = {}
            for name in seconds:
                steps, _ = step_seconds(model, inputs, new_tokens, **options[name])
                seconds[name] += steps
                medians[name] = statistics.median(steps)
            ratios.append(medians["paged"] / medians["plain"])
        rows.append(
            {
                "case": case.name,
                **{
                    f"{name}_ms": round(1e3 * statistics.median(values), 2)
                    for name, values in seconds.items()
                },
                "ratio": round(statistics.median(ratios), 3),
                "ratio_min": round(min(ratios), 3),
                "ratio_max": round(max(ratios), 3),
                "route": asdict(hf_paged.last_route(model) or hf_paged.Route("plain", "")),
            }
        )
        hf_paged.free(model)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| case | plain ms | paged ms | paged / plain | min..max | in place |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['case']} | {row['plain_ms']} | {row['paged_ms']} | **{row['ratio']}** |"
            f" {row['ratio_min']}..{row['ratio_max']} |"
            f" {'yes' if row['route']['in_place'] else 'no'} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=devices(), default="cpu")
    parser.add_argument(
        "--model", choices=list(SHAPES), help="(qwen2.5-0.5b; llama-tiny with --quick)"
    )
    parser.add_argument("--case", default="", help="one of your own, ROWSxTOKENS of the prompts")
    parser.add_argument(
        "--quick", action="store_true", help="a small model: only to see that it runs"
    )
    parser.add_argument("--only", default="", help="regular expression on the case's name")
    parser.add_argument(
        "--new-tokens", type=int, help="steps timed in each turn (24; 4 with --quick)"
    )
    parser.add_argument("--json", help="also write the results here")
    args = parser.parse_args(argv)
    shape = SHAPES[args.model or ("llama-tiny" if args.quick else "qwen2.5-0.5b")]
    some = [case for case in cases(args.quick, args.case) if re.search(args.only, case.name)]
    rows = run(args.device, shape, some, args.new_tokens or (4 if args.quick else 24))
    print(table(rows))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"machine": facts(args.device), "model": shape.name, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
