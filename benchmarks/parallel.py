"""One model over several processes. `PagedEngine` on a model in one process with all cores, and
sharded over two CPU processes (`tp_plan="auto"`, torchrun, gloo) that share the cores: seconds for
the same prompts, bytes of K/V per process; each turn has new processes and follows a warm-up. No
GPU has run it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import hf_paged
from benchmarks import runner
from benchmarks.models import SHAPES, build
from benchmarks.systems import served
from benchmarks.workloads import Workload


def serve(model: Any, vocab: int, count: int, new: int, turn: int) -> dict[str, Any]:
    """Seconds of a turn after a warm-up, its tokens, and peak bytes of this process's blocks."""
    options = {"max_new_tokens": new, "do_sample": False}
    with hf_paged.PagedEngine(model, hf_paged.PagedConfig(prefix_caching=False)) as engine:
        for number in (-2, turn):
            batch = Workload("parallel", count, (32, 255), (0, 0)).batch(number, vocab)
            seconds, results = served(engine, batch.prompts, options)
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


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="A model sharded over processes",
    results=(("parallel-cpu-1", "parallel-cpu-2"),),
    turns=3,
    is_exact=True,
    fixed={"model": "llama-100m", "prompts": 32, "new_tokens": 64, "warm_ups": 0},
    quick={"model": "llama-tiny", "turns": 1, "prompts": 4, "new_tokens": 8},
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        raise SystemExit(BENCHMARK.main())
