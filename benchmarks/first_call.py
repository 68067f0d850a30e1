"""A notebook's first `generate` call, plain and paged, each in a new process: what it takes, what
of that is spent on checking the model, on loading or compiling the C++ kernels and on recording
decode steps, and what a later call takes.

    python -m benchmarks.first_call [--model llama-100m] [--dtype bfloat16] [--turns 5] [--quick]
                                    [--json PATH]

One paged process finds the kernels compiled, as in the wheel or after an earlier call on the
machine, another does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from tqdm import tqdm

import hf_paged
from benchmarks.machine import facts
from benchmarks.models import SHAPES, build

ROWS, PROMPT_TOKENS, NEW_TOKENS = 4, 64, 64
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
    options: dict[str, Any] = dict(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
    )
    if system != "plain":
        options["cache_implementation"] = "paged"
    seconds, parts = [], dict.fromkeys(PARTS, 0.0)
    for turn in range(3):
        start = time.perf_counter()
        model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        seconds.append(time.perf_counter() - start)
        route = hf_paged.last_route(model)
        if turn == 0 and system != "plain":
            assert route is not None and route.road == "engine", route
            parts |= route.setup_seconds
    return {"first": seconds[0], "later": seconds[2], **parts}


def measure_anew(system: str, *arguments: Any) -> dict[str, float]:
    """`measure` in a new process, with an empty folder for kernels if they are to be compiled."""
    variable = "HF_PAGED_CACHE_DIR"
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get(variable)
        try:
            if system == "compiling":
                os.environ[variable] = folder
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                return process.submit(measure, system, *arguments).result()
        finally:
            os.environ.pop(variable, None)
            if before is not None:
                os.environ[variable] = before


def run(
    systems: Sequence[str], name: str, dtype: str, turns: int, new_tokens: int
) -> list[dict[str, Any]]:
    """Returns a row of medians for each system; systems take turns. Compiling is measured once."""
    measured: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
    if "paged" in systems:
        # compiles the kernels unless they are; warms the file cache
        measure_anew("paged", name, dtype, new_tokens)
    for turn in tqdm(range(turns), desc=name, disable=None):
        for system in systems if turn % 2 else reversed(systems):
            if system != "compiling" or turn == 0:
                measured[system].append(measure_anew(system, name, dtype, new_tokens))
    rows = []
    for system, runs in measured.items():
        medians = {
            part: round(statistics.median(each[part] for each in runs), 3) for part in runs[0]
        }
        firsts = [each["first"] for each in runs]
        rows.append(
            {
                "system": system,
                "turns": len(runs),
                **medians,
                "range": [round(min(firsts), 3), round(max(firsts), 3)],
            }
        )
    return rows


def limit(rows: Sequence[dict[str, Any]]) -> float:
    """Returns the most seconds that the target allows a first paged call."""
    (plain,) = (row["first"] for row in rows if row["system"] == "plain")
    return TARGET_FACTOR * plain + TARGET_SECONDS


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        (
            f"| call | first call, s | {', s | '.join(f'of it {part}' for part in PARTS.values())},"
            " s | third call, s |"
        ),
        f"|---|--:|{'--:|' * len(PARTS)}--:|",
    ]
    for row in rows:
        parts = [f"{row[part]:.2f}" if row["system"] != "plain" else "" for part in PARTS]
        low, high = row["range"]
        first = (
            f"{row['first']:.2f} ({low:.2f} to {high:.2f})"
            if row["turns"] > 1
            else f"{row['first']:.2f}"
        )
        lines.append(
            f"| {SYSTEMS[row['system']]} | {first} | {' | '.join(parts)} | {row['later']:.2f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-100m", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--turns", type=int, default=5, help="new processes of each system (%(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, few tokens, one turn, compiling"
    )
    parser.add_argument("--json", help="also write the results here")
    args = parser.parse_args(argv)
    machine = facts()
    name, turns, new_tokens = (
        ("llama-tiny", 1, 8) if args.quick else (args.model, args.turns, NEW_TOKENS)
    )
    systems = [system for system in SYSTEMS if not (args.quick and system == "paged")]
    rows = run(systems, name, args.dtype, turns, new_tokens)
    print(table(rows))
    print(f"\nThe target for a first paged call is {limit(rows):.2f} s.")
    if args.json:
        results = {
            "machine": machine,
            "model": name,
            "dtype": args.dtype,
            "new_tokens": new_tokens,
            "rows": rows,
        }
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
