"""LoRA adapters: rows with different adapters in one forward, against one forward per adapter, and
against all rows with one adapter. Greedy rows of random text over adapters of random weights, on
all linear layers of the decoder, in float32 on the CPU: as the engine runs them; with one forward
per adapter and step, as older versions did; from folders, where the pool has room for half of the
adapters; all rows with one adapter; all without. All take the same turns, after warm-up turns."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import hf_paged
from benchmarks import runner
from benchmarks.models import SHAPES, build
from benchmarks.systems import served
from benchmarks.workloads import Workload
from hf_paged.adapters.loop_adapters import LoopAdapters

FASTER, OF_ONE = 3.0, 0.7
"""Targets: throughput over that of one forward per adapter, and over that of a single adapter."""
ROWS, ADAPTERS, RANK = 32, 8, 16
PROMPTS = Workload("lora", ROWS, (8, 32), (0, 0))
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MIXED, APART, FOLDERS = "together", "one adapter a forward", "folders, room for half"
ONE, BASE = "one adapter", "base"


class Contender(NamedTuple):
    """Rows of an engine, each with its adapter."""

    engine: hf_paged.PagedEngine
    adapters: list[str]
    mixes: bool = True  # whether one forward has rows of several adapters
    is_compared: bool = True  # whether its rows have the adapters of the first contender's

    def generate(self, prompts: list[list[int]], new_tokens: int) -> runner.Turn:
        options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
        patch, forwards = unittest.mock.patch.object, itertools.count()
        model_runner = self.engine._core.get_loop().executor.runner
        run, before = model_runner.run, self.engine.stats().num_adapter_loads

        def counted(*args: Any) -> Any:
            next(forwards)
            return run(*args)

        apart = patch(LoopAdapters, "_get_mixable", lambda *_: {})
        with patch(model_runner, "run", counted), contextlib.nullcontext() if self.mixes else apart:
            seconds, results = served(self.engine, prompts, options, adapter=self.adapters)
        tokens = [result.token_ids for result in results]
        loads = self.engine.stats().num_adapter_loads - before
        figures = {"forwards": next(forwards), "adapters loaded": loads}
        return runner.Turn(seconds, tokens if self.is_compared else None, figures)


def adapted(model: Any) -> Any:
    """The model with adapters, both of whose matrices are random."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=RANK, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=False
    )
    found = peft.get_peft_model(model, config, adapter_name="a0")
    for number in range(1, ADAPTERS):
        found.add_adapter(f"a{number}", config)
    return found.eval()


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    shape, new = SHAPES[args.model], args.new_tokens
    model, bare = (build(shape) for _ in range(2))
    model = adapted(model)
    names = [f"a{row % ADAPTERS}" for row in range(ROWS)]

    def work(turn: int, contender: Contender) -> runner.Turn:
        return contender.generate(PROMPTS.batch(turn, shape.vocab).prompts, new)

    config = hf_paged.PagedConfig(prefix_caching=False)
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        folders = {name: str(Path(path) / name) for name in model.peft_config}
        block = int(config.block_size)
        weights = sum(one.nbytes for name, one in model.named_parameters() if ".a0." in name)
        own = -(-weights // shape.kv_bytes(block, 4))  # blocks that one adapter takes of the budget
        prompts = PROMPTS.batch(0, shape.vocab).prompts
        needed = sum(-(-(len(prompt) + new) // block) for prompt in prompts)
        blocks = own * (ADAPTERS // 2) + needed
        small = hf_paged.PagedConfig(prefix_caching=False, num_blocks=blocks)
        one, none = ["a0"] * ROWS, ["__base__"] * ROWS
        paths, engine = [folders[name] for name in names], hf_paged.PagedEngine
        contenders = {
            APART: Contender(engine(model, config), names, mixes=False),
            MIXED: Contender(engine(model, config), names),
            FOLDERS: Contender(engine(bare, small), paths),
            ONE: Contender(engine(model, config), one, is_compared=False),
            BASE: Contender(engine(model, config), none, is_compared=False),
        }
        size = f"{ROWS} rows over {ADAPTERS} adapters of rank {RANK}, {new} new tokens each"
        over = {APART: {MIXED: FASTER}, ONE: {MIXED: OF_ONE}}
        yield runner.Case(f"{size}, {args.model}, float32", runner.each(work, contenders), over)
        for contender in contenders.values():
            hf_paged.check_integrity(contender.engine.model)
            contender.engine.free()


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="Adapters",
    results=(("lora-cpu",),),
    turns=9,
    is_exact=True,
    fixed={"model": "llama-100m", "warm_ups": 2, "new_tokens": 64},
    quick={"model": "llama-tiny", "turns": 1, "warm_ups": 1, "new_tokens": 8},
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
