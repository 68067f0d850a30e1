"""Cost of a step by the roofline of a paper's accelerator, and whole runs of the engine."""

from __future__ import annotations

import random
from typing import Any

import hf_paged
from benchmarks import runner
from benchmarks.models import Shape
from benchmarks.paper.serving import StepCost
from benchmarks.systems import checked
from benchmarks.workloads import GREEDY, texts

OPT_13B_KV_BYTES = 2 * 5120 * 40 * 2
"""Bytes per token: keys and values, hidden size, layers, bytes of float16 (arXiv 2309.06180,
section 3)."""
OPT_13B_SLOTS = 15_700
"""K/V slots on an A100 of 40 GB (arXiv 2309.06180, table 1)."""
A100 = StepCost(
    "OPT-13B on an A100, roofline",
    fixed=0.0,
    floor=26e9 / 1.555e12,  # bytes of the weights (table 1) over the data sheet's bandwidth
    per_token=2 * 13e9 / 312e12,  # operations over the data sheet's float16 rate
    per_context=OPT_13B_KV_BYTES / 1.555e12,
)


def serve(
    model: Any, shape: Shape, pairs: list[tuple[int, int]], config: dict[str, Any], seed: int = 0
) -> tuple[float, Any]:
    """Seconds in which a new engine serves greedy requests of these prompt and output lengths, and
    its stats."""
    lengths, outputs = zip(*pairs)
    prompts = texts(random.Random(seed), lengths, shape.vocab)
    configs = [{**GREEDY, "max_new_tokens": output} for output in outputs]
    with hf_paged.PagedEngine(model, {"prefix_caching": False, **config}) as engine:
        seconds, results = runner.clocked(lambda: engine.generate(prompts, configs))
        checked(results)
        return seconds, engine.stats()
