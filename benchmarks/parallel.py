"""
One model over several processes.

    python -m benchmarks.parallel [--turns 3] [--quick] [--json PATH]

First table, measured: `PagedEngine` on a model in one process with all cores, and sharded over
two CPU processes (`tp_plan="auto"`, torchrun, gloo) that share the cores: seconds for the same
prompts, bytes of K/V per process; each turn has new processes and follows a warm-up. Second table,
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
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import hf_paged
from benchmarks import report, runner
from benchmarks.ceilings import Ceilings
from benchmarks.models import SHAPES, Shape, build
from benchmarks.roofline import Cost, step_seconds
from benchmarks.systems import served
from benchmarks.workloads import texts

COMPUTED = {
    "model": "model",
    "gpus": "GPUs",
    "weights_gib": "weights, GiB",
    "kv_tokens": "K/V, tokens",
    "rows": "rows",
    "step_ms": "a step, ms",
    "tokens_s": "tokens/s",
    "ratio": "ratio",
}

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
        for gpus in [count for count in (1, 2, 4, 8) if not shape.kv_heads % count]:
            part = cost(shape, gpus)
            # plus the embedding
            weights = part.weight_bytes + shape.hidden * shape.vocab * 2 // gpus
            num_tokens = int((USED * A100_BYTES - weights) / part.shape.kv_bytes(1, 2))
            count = max(0, min(MAX_ROWS, num_tokens // LENGTH))
            row = {"model": shape.name, "gpus": gpus, "weights_gib": round(weights / 2**30, 1)}
            row |= {"kv_tokens": max(0, num_tokens), "rows": count}
            rows.append(row)
            if count:
                flops, lengths = A100.flops["bfloat16"], [LENGTH] * count
                seconds = step_seconds(part, A100, flops, count, count, lengths)
                seconds += all_reduce_seconds(shape, gpus, count)
                rate = count / seconds
                first = first or rate / gpus
                row |= {"step_ms": round(1000 * seconds, 1), "tokens_s": round(rate)}
                row["ratio"] = round(rate / first, 2)
    return rows


def serve(model: Any, vocab: int, count: int, new: int, turn: int) -> dict[str, Any]:
    """Seconds of a turn after a warm-up, its tokens, and peak bytes of this process's blocks."""
    options = {"max_new_tokens": new, "do_sample": False}
    with hf_paged.PagedEngine(model, hf_paged.PagedConfig(prefix_caching=False)) as engine:
        for number in (-2, turn):
            words = random.Random(f"parallel {number}")
            prompts = texts(words, (words.randrange(32, 256) for _ in range(count)), vocab)
            seconds, results = served(engine, prompts, options)
        tokens = [result.token_ids for result in results]
        return {"seconds": seconds, "tokens": tokens, "kv_bytes": engine.stats().peak_bytes}


def child(folder: str, count: int, new: int, turn: int) -> None:
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
        found = serve(model, model.config.vocab_size, count, new, turn)
        Path(folder, "found.json").write_text(json.dumps(found))
    if world > 1:
        torch.distributed.destroy_process_group()


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    sizes = args.prompts, args.new_tokens
    with tempfile.TemporaryDirectory() as folder:
        build(SHAPES[args.model]).save_pretrained(folder)

        def run(turn: int, world: int) -> runner.Turn:
            command = [sys.executable]
            if world > 1:
                command += ["-m", "torch.distributed.run", "--standalone"]
                command += [f"--nproc_per_node={world}"]
            command += ["-m", "benchmarks.parallel", "--child", folder, *map(str, (*sizes, turn))]
            subprocess.run(command, check=True, cwd=Path(__file__).resolve().parents[1])
            found = json.loads(Path(folder, "found.json").read_text())
            figures = {"K/V of each process, MiB": found["kv_bytes"] / 2**20}
            return runner.Turn(found["seconds"], found["tokens"], figures)

        worlds = {f"{world} process{'es' * (world > 1)}": world for world in (1, 2)}
        size = f"{args.prompts} prompts, {args.new_tokens} new tokens each"
        case = f"{args.model}, float32, {size}"
        yield runner.Case(case, runner.each(run, worlds), {"1 process": {}})


def computed(_: Any) -> list[str]:
    """The second table."""
    rows = f"rows of {LENGTH} tokens, at most {MAX_ROWS}"
    return [
        f"**Computed from data sheets, not measured**: bfloat16, A100 80 GB, {rows}; the ratio is"
        " the throughput over that of as many independent GPUs:",
        report.markdown(scaling(), COMPUTED),
    ]


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="A model sharded over processes",
    results=(("parallel-cpu-1", "parallel-cpu-2"),),
    notes=computed,
    turns=3,
    is_exact=True,
    fixed={"model": "llama-100m", "prompts": 32, "new_tokens": 64, "warm_ups": 0},
    quick={"model": "llama-tiny", "turns": 1, "prompts": 4, "new_tokens": 8},
)
main = BENCHMARK.main

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        raise SystemExit(main())
