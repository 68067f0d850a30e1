"""
One model over several processes.

    python -m benchmarks.parallel [--model llama-100m] [--processes 2] [--turns 3] [--quick]
                                  [--json PATH]

First table, measured: `PagedEngine` on a model in one process with all cores, and sharded over
several CPU processes (`tp_plan="auto"`, torchrun, gloo) that share the cores: seconds for the same
prompts, bytes of K/V per process; medians of turns, with minimum and maximum. Second table,
computed: LLaMA models of 7B to 65B on 1 to 8 GPUs. A decode step reads a GPU's share of the weights
and of K/V once, and sums the hidden states of each row twice per layer over the links (a ring
all-reduce); all memory beside the weights holds blocks. No GPU has run it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import hf_paged
from benchmarks import report, runner
from benchmarks.ceilings import Ceilings
from benchmarks.models import SHAPES, Shape, build
from benchmarks.roofline import Cost, step_seconds
from benchmarks.workloads import texts

COMPUTED = ("model", "gpus", "weights_gib", "kv_tokens", "rows", "step_ms", "tokens_s", "ratio")

# A100 80 GB SXM, data sheet: bytes and operations (bfloat16) per second; NVLink in one direction.
A100 = Ceilings(2.039e12, {"bfloat16": 312e12})
A100_BYTES, A100_LINK = 80e9, 300e9
USED = 0.9  # share of its memory used for weights and blocks
LENGTH = 2048  # tokens of each row
MAX_ROWS = 256
LLAMAS = tuple(
    Shape(
        f"LLaMA-{name}", "llama", hidden, layers, heads, heads, 128, intermediate, 32000, tied=False
    )
    for name, hidden, layers, heads, intermediate in (
        ("7B", 4096, 32, 32, 11008),
        ("13B", 5120, 40, 40, 13824),
        ("33B", 6656, 60, 52, 17920),
        ("65B", 8192, 80, 64, 22016),
    )
)


def cost(shape: Shape, gpus: int = 1) -> Cost:
    """Cost of one GPU's share, in bfloat16, without norms."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    body = shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
    part = dataclasses.replace(shape, kv_heads=shape.kv_heads // gpus)
    return Cost(part, body // gpus, shape.hidden * shape.vocab // gpus, 2)


def all_reduce_seconds(shape: Shape, gpus: int, rows: int) -> float:
    """Seconds of a step's all-reduces: two per layer, each sends `2 (n - 1) / n` of the rows'
    hidden states."""
    return 2 * shape.layers * rows * shape.hidden * 2 * 2 * (gpus - 1) / gpus / A100_LINK


def scaling() -> list[dict[str, Any]]:
    rows = []
    for shape in LLAMAS:
        first = 0.0
        for gpus in (1, 2, 4, 8):
            if shape.kv_heads % gpus:
                continue
            part = cost(shape, gpus)
            # plus the embedding
            weights = part.weight_bytes + shape.hidden * shape.vocab * 2 // gpus
            left = USED * A100_BYTES - weights
            num_tokens = int(left / part.shape.kv_bytes(1, 2))
            count = min(MAX_ROWS, num_tokens // LENGTH)
            row: dict[str, Any] = {
                "model": shape.name,
                "gpus": gpus,
                "weights_gib": round(weights / 2**30, 1),
            }
            if count < 1:
                rows.append({**row, "kv_tokens": max(0, num_tokens), "rows": 0})
                continue
            seconds = step_seconds(
                part, A100, A100.flops["bfloat16"], count, count, [LENGTH] * count
            )
            seconds += all_reduce_seconds(shape, gpus, count)
            rate = count / seconds
            first = first or rate / gpus
            speeds = {
                "step_ms": round(1000 * seconds, 1),
                "tokens_s": round(rate),
                "ratio": round(rate / first, 2),
            }
            rows.append({**row, "kv_tokens": num_tokens, "rows": count, **speeds})
    return rows


def serve(model: Any, vocab: int, count: int, new: int, turns: int) -> dict[str, Any]:
    """Seconds of each turn after a warm-up, tokens, and peak bytes of this process's blocks."""
    seconds, tokens = [], []
    options = {"max_new_tokens": new, "do_sample": False}
    with hf_paged.PagedEngine(model, hf_paged.PagedConfig(prefix_caching=False)) as engine:
        for turn in range(turns + 1):
            words = random.Random(f"parallel {turn}")
            prompts = texts(words, (words.randrange(32, 256) for _ in range(count)), vocab)
            start = time.perf_counter()
            results = engine.generate(prompts, options)
            seconds.append(time.perf_counter() - start)
            tokens.append([result.token_ids for result in results])
        return {"seconds": seconds[1:], "tokens": tokens, "kv_bytes": engine.stats().peak_bytes}


def child(folder: str, count: int, new: int, turns: int) -> None:
    """Runs one of the processes; the first writes the result of `serve`."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    options: dict[str, Any] = {}
    if world > 1:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=world)
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    if int(os.environ.get("RANK", "0")):
        hf_paged.serve_rank(model)
    else:
        found = serve(model, model.config.vocab_size, count, new, turns)
        Path(folder, "found.json").write_text(json.dumps(found))
    if world > 1:
        torch.distributed.destroy_process_group()


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    sizes = args.prompts, args.new_tokens, args.turns
    expected = None
    with tempfile.TemporaryDirectory() as folder:
        build(SHAPES[args.model], "cpu", torch.float32).save_pretrained(folder)
        for world in (1, args.processes):
            command = [sys.executable]
            if world > 1:
                command += ["-m", "torch.distributed.run", "--standalone"]
                command += [f"--nproc_per_node={world}"]
            command += ["-m", "benchmarks.parallel", "--child", folder, *map(str, sizes)]
            subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[1])
            found = json.loads(Path(folder, "found.json").read_text())
            expected = expected or found["tokens"]
            seconds = statistics.median(found["seconds"])
            row = {
                "processes": world,
                "equal": "yes" if found["tokens"] == expected else "NO",
                "seconds": round(seconds, 3),
                "tokens_s": round(args.prompts * args.new_tokens / seconds, 1),
                "kv_bytes": found["kv_bytes"],
                "turns": len(found["seconds"]),
            }
            rows.append({**row, "seconds_by_turn": found["seconds"]})
    return rows


def pooled(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows that combine the turns of several runs of one revision. Each kind ran its turns in
    separate processes, so ratios are not taken within a turn."""
    found = []
    for (count,), rows in runner.grouped(runs, "processes").items():
        seconds = [one for row in rows for one in row.get("seconds_by_turn", [row["seconds"]])]
        median = statistics.median(seconds)
        equal = all(row["equal"] == "yes" for row in rows)
        found.append(
            {
                "processes": count,
                "turns, runs": f"{sum(row['turns'] for row in rows)}, {len(rows)}",
                "s": f"{median:.3g} ({min(seconds):.3g} to {max(seconds):.3g})",
                "tokens/s": rows[0]["tokens_s"] * rows[0]["seconds"] / median,
                "peak of K/V in each process, MiB": max(row["kv_bytes"] for row in rows) / 2**20,
                "tokens": "equal" if equal else "NOT equal",
            }
        )
    return found


def draw(data: Mapping[str, Any], path: Path) -> Path:
    """Computed tokens per second of the models over GPUs."""
    foot = (
        f"Computed from data sheets, not measured: A100 of 80 GB, bfloat16, rows of {LENGTH} tokens"
    )
    figure, axis = report.figure(460, foot)
    values: dict[str, dict[str, float]] = {}
    for row in sorted(data["computed"], key=lambda row: row["gpus"]):
        if row["rows"]:
            values.setdefault(f"{row['gpus']} GPU{'s' * (row['gpus'] > 1)}", {})[row["model"]] = (
                row["tokens_s"]
            )
    report.grouped_bars(axis, values)
    axis.set_xscale("log")
    report.log_ticks(axis.xaxis)
    axis.set_xlabel("tokens per second")
    report.title(axis, "One model over several GPUs (computed)")
    report.legend_below(figure, axis, 4)
    return report.save(figure, path)


def run(args: argparse.Namespace) -> dict[str, Any]:
    found = {"model": args.model, "prompts": args.prompts, "new_tokens": args.new_tokens}
    return {**found, "rows": measured(args), "computed": scaling()}


def show(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    data, rows = runs[0], f"rows of {LENGTH} tokens, at most {MAX_ROWS}"
    return [
        f"{data['model']}, float32, {data['prompts']} prompts, {data['new_tokens']} new tokens",
        report.markdown(pooled(runs)),
        f"**Computed from data sheets, not measured**: bfloat16, A100 80 GB, {rows}; the ratio is"
        " the throughput over that of as many independent GPUs:",
        report.markdown(data["computed"], COMPUTED),
    ]


BENCHMARK = runner.Benchmark(
    __doc__,
    run,
    show,
    title="A model sharded over processes",
    results=(("parallel-cpu-1", "parallel-cpu-2"),),
    options={"--model": runner.MODEL, "--processes": runner.option(type=int, default=2)},
    turns=3,
    fixed={"prompts": 32, "new_tokens": 64},
    quick={"model": "llama-tiny", "turns": 1, "prompts": 4, "new_tokens": 8},
    draw=draw,
    picture="Computed: tokens a second of 7B to 65B over GPUs",
)
main = BENCHMARK.main

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        raise SystemExit(main())
