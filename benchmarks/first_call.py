"""A notebook's first `generate` call, plain and paged, each in a new process: what it takes, what
of that is spent on checking the model, on loading or compiling the C++ kernels and on recording
decode steps, and what a later call takes.

    python -m benchmarks.first_call [--model llama-100m] [--dtype bfloat16] [--turns 5] [--quick]
                                    [--json PATH]

One paged process finds the kernels compiled, as in the wheel, which contains them, or after an
earlier call on the machine; another does not. Medians of processes, compiling of one.
`last_route(model).setup_seconds` lists the parts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import unittest.mock
from collections.abc import Sequence
from typing import Any

import torch

import hf_paged
from benchmarks import runner
from benchmarks.models import SHAPES, build
from benchmarks.report import markdown

ROWS, PROMPT_TOKENS = 4, 64
# a first paged call takes at most this factor of plain's, and so much more
TARGET_FACTOR, TARGET_SECONDS = 1.5, 1.0
SYSTEMS = {
    "plain": "plain `generate`",
    "paged": "paged, kernels compiled before",
    "compiling": "paged, compiling",
}
PARTS = {"self_check": "self-check", "build": "kernels", "record": "recording"}


def measure(system: str, name: str, dtype: str, new_tokens: int) -> dict[str, float]:
    """Returns, for a new process, the seconds of the first call, of its parts, and of the third
    call. (Later calls may still record, since a step is recorded once it has run a few times.)"""
    shape = SHAPES[name]
    model = build(shape, "cpu", getattr(torch, dtype)).eval()
    prompts = torch.randint(
        3, shape.vocab - 1, (ROWS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    mask = torch.ones_like(prompts)
    options: dict[str, Any] = dict(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
    )
    if system != "plain":
        options["cache_implementation"] = "paged"
    seconds, parts = [], dict.fromkeys(PARTS, 0.0)
    for turn in range(3):
        seconds.append(
            runner.seconds_of(lambda: model.generate(prompts, attention_mask=mask, **options))
        )
        route = hf_paged.last_route(model)
        if turn == 0 and system != "plain":
            assert route is not None and route.road == "engine", route
            parts |= route.setup_seconds
    return {"first": seconds[0], "later": seconds[2], **parts}


def measure_anew(system: str, *arguments: Any) -> dict[str, float]:
    """`measure` in a new process, with an empty folder for kernels if they are to be compiled."""
    with tempfile.TemporaryDirectory() as folder:
        folders = {"HF_PAGED_CACHE_DIR": folder} if system == "compiling" else {}
        with unittest.mock.patch.dict(os.environ, folders):
            (found,) = runner.in_processes(1, measure, system, *arguments)
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    """A row of medians for each system. Compiling is measured once."""
    settings = args.model, args.dtype, args.new_tokens
    if "paged" in args.systems:
        # compiles the kernels unless they are; warms the file cache
        measure_anew("paged", *settings)
    arms = {
        system: (lambda turn, system=system: measure_anew(system, *settings))
        for system in args.systems
    }
    compiling = {name: arms.pop(name) for name in ("compiling",) if name in arms}
    measured = runner.take_turns(arms, args.turns, title=args.model)
    measured |= runner.take_turns(compiling, 1)
    rows = []
    for system, runs in measured.items():
        row: dict[str, Any] = {"system": system, "turns": len(runs)}
        for part in runs[0]:
            row[part] = round(statistics.median(each[part] for each in runs), 3)
        firsts = [round(each["first"], 3) for each in runs]
        rows.append(row | {"range": [min(firsts), max(firsts)]})
    sizes = {"model": args.model, "dtype": args.dtype, "new_tokens": args.new_tokens}
    return {**sizes, "rows": rows}


def limit(rows: Sequence[dict[str, Any]]) -> float:
    """Returns the most seconds that the target allows a first paged call."""
    (plain,) = (row["first"] for row in rows if row["system"] == "plain")
    return TARGET_FACTOR * plain + TARGET_SECONDS


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = []
    for row in rows:
        low, high = row["range"]
        span = f" ({low:.2f} to {high:.2f})" if row["turns"] > 1 else ""
        line = {"call": SYSTEMS[row["system"]], "first call, s": f"{row['first']:.2f}{span}"}
        for part, title in PARTS.items():
            told = "" if row["system"] == "plain" else f"{row[part]:.2f}"
            line[f"of it {title}, s"] = told
        lines.append({**line, "third call, s": f"{row['later']:.2f}"})
    return markdown(lines, right=list(lines[0])[1:])


def show(runs: Sequence[runner.Data]) -> list[str]:
    (data,) = runs
    sizes = f"{ROWS} prompts of {PROMPT_TOKENS} tokens, {data['new_tokens']} new"
    target = f"{TARGET_FACTOR:g} times plain's time plus {TARGET_SECONDS:g} s"
    said = f"The target for a first paged call is {target}, here {limit(data['rows']):.2f} s."
    of = f"{sizes}, `{data['model']}` in {data['dtype']}, {data['rows'][0]['turns']} processes."
    return [f"{of} {said}", table(data["rows"])]


BENCHMARK = runner.Benchmark(
    __doc__,
    run,
    show,
    title="The first call",
    results=(("first_call-cpu-llama-100m",),),
    options={"--model": runner.MODEL, "--dtype": runner.DTYPE},
    turns=5,
    fixed={"new_tokens": 64, "systems": tuple(SYSTEMS)},
    quick={
        "model": "llama-tiny",
        "turns": 1,
        "new_tokens": 8,
        "systems": ("plain", "compiling"),
    },
)
main = BENCHMARK.main

if __name__ == "__main__":
    raise SystemExit(main())
