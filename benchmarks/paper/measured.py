"""Cost of a step: fitted to steps of the engine on this machine, and the roofline of a paper's
accelerator."""

from __future__ import annotations

import random
import statistics
import time
from functools import lru_cache
from typing import Any

import torch

import hf_paged
from benchmarks.models import FIRST_WORD, SHAPES, Shape, build
from benchmarks.paper.serving import StepCost

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


def prompt_of(length: int, vocab: int, draw: random.Random) -> list[int]:
    """A prompt of random words."""
    return [draw.randrange(FIRST_WORD, vocab - 1) for _ in range(length)]


@lru_cache(maxsize=1)
def model_of(shape: str) -> Any:
    """A random Llama in bfloat16, as in `benchmarks.generate`."""
    return build(SHAPES[shape], "cpu", torch.bfloat16)


def timed_steps(
    model: Any, shape: Shape, rows: int, prompt: int, steps: int
) -> list[tuple[int, int, float]]:
    """New tokens, cached tokens afterwards, and seconds of each step of `rows` greedy requests:
    first the prefill of all prompts, then `steps` decodes.
    """
    draw = random.Random(f"{rows} {prompt}")
    config = hf_paged.PagedConfig(
        prefix_caching=False, max_num_batched_tokens=max(256, rows * prompt)
    )
    options = {"max_new_tokens": steps + 1, "do_sample": False, "eos_token_id": None}
    points = []
    with hf_paged.PagedEngine(model, config) as engine:
        for _ in range(rows):
            engine.add_request(prompt_of(prompt, shape.vocab, draw), options)
        while engine.has_unfinished:
            start = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - start
            done = len(points)
            points.append((rows if done else rows * prompt, rows * (prompt + done), seconds))
    return points


@lru_cache(maxsize=2)
def measured_cost(shape_name: str, quick: bool) -> tuple[StepCost, float]:
    """Step cost by least squares over steps of many sizes, and the median relative error in
    percent."""
    shape, model = SHAPES[shape_name], model_of(shape_name)
    grid = (
        [(1, 32), (4, 64), (8, 128), (32, 32)]
        if quick
        else [(1, 32), (1, 512), (4, 128), (8, 256), (16, 64)]
    )
    grid += [] if quick else [(32, 32), (32, 64), (64, 16)]
    timed_steps(model, shape, 2, 16, 2)  # warm-up
    points = []
    for rows, prompt in grid:
        found = timed_steps(model, shape, rows, prompt, 4 if quick else 12)
        decodes = found[1:]
        seconds = statistics.median(point[2] for point in decodes)
        points += [found[0], (rows, decodes[len(decodes) // 2][1], seconds)]
    return fit(points, f"{shape_name} on this machine, measured")


def fit(points: list[tuple[int, int, float]], name: str) -> tuple[StepCost, float]:
    """A `StepCost` by least squares of relative errors, with coefficients of at least 0; and the
    median error in percent."""
    seconds = torch.tensor([point[2] for point in points], dtype=torch.float64)
    terms = (
        torch.tensor([[1.0, new, context] for new, context, _ in points], dtype=torch.float64)
        / seconds[:, None]
    )
    used = [0, 1, 2]
    while True:
        found = torch.linalg.lstsq(
            terms[:, used], torch.ones(len(points), 1, dtype=torch.float64)
        ).solution[:, 0]
        if (found >= 0).all() or len(used) == 1:
            break
        used.pop(int(found.argmin()))
    values = [0.0, 0.0, 0.0]
    for place, value in zip(used, found.tolist()):
        values[place] = max(0.0, value)
    cost = StepCost(name, *values)
    errors = [abs(cost.seconds(new, context) / taken - 1) for new, context, taken in points]
    return cost, 100 * statistics.median(errors)


def serve(
    model: Any, shape: Shape, pairs: list[tuple[int, int]], config: dict[str, Any], seed: int = 0
) -> tuple[float, Any]:
    """Seconds in which a new engine serves greedy requests of these prompt and output lengths, and
    its stats."""
    draw = random.Random(seed)
    with hf_paged.PagedEngine(model, {"prefix_caching": False, **config}) as engine:
        for prompt, output in pairs:
            options = {"max_new_tokens": output, "do_sample": False, "eos_token_id": None}
            engine.add_request(prompt_of(prompt, shape.vocab, draw), options)
        start = time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        return time.perf_counter() - start, engine.stats()
