"""Stage (d): steps of random models: milliseconds a token, launches, and the time in which the GPU
waits for the host, beside plain `generate` and a compiled static cache."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import StoppingCriteriaList

import hf_paged
from benchmarks import runner
from benchmarks.gpu_day import jobs
from benchmarks.models import SHAPES, build
from benchmarks.systems import StopsAt
from benchmarks.workloads import left_padded, texts
from hf_paged.kernels.hashing import hash_tensors

SYSTEMS: dict[str, dict[str, Any]] = {
    "paged": {"cache_implementation": "paged"},
    "plain": {},
    "static": {"cache_implementation": "static"},
}
PROFILED_STEPS = (4, 12)  # the difference of the two leaves the prompt out
LAUNCHES = ("LaunchKernel", "GraphLaunch")  # in the names of the driver's and the runtime's calls


class Case(NamedTuple):
    """
    Args:
        rows, tokens (`int`): Number of prompts, and their length.
        new_tokens (`int`): Steps of each call.
        systems (`tuple[str, ...]`): Of `SYSTEMS`.
    """

    model: str
    rows: int
    tokens: int
    new_tokens: int
    systems: tuple[str, ...]


BOTH = ("paged", "plain")
CASES = (
    Case("qwen3-0.6b", 1, 16, 64, BOTH),
    Case("llama-3.1-8b", 1, 16, 64, BOTH),
    Case("qwen3-0.6b", 64, 2048, 24, BOTH),
    Case("llama-3.1-8b", 64, 2048, 16, BOTH),
    Case("qwen3-0.6b", 1, 16, 64, ("static",)),  # compiling comes last: it takes longest
    Case("llama-3.1-8b", 1, 16, 64, ("static",)),
)
QUICK_CASES = (Case("llama-tiny", 1, 16, 12, BOTH), Case("llama-tiny", 4, 32, 12, BOTH))


def fingerprint(model: Any) -> dict[str, Any]:
    """Milliseconds in which all weights are hashed, as before cached prefixes are used."""
    weights = list(model.parameters())
    # the result is on the host
    seconds = [runner.seconds_of(lambda: hash_tensors(weights)) for _ in range(3)]
    gigabytes = sum(weight.nbytes for weight in weights) / 1e9
    return {"fingerprint, ms": 1000 * min(seconds), "weights, GB": gigabytes}


def step_seconds(
    model: Any, inputs: dict[str, torch.Tensor], new_tokens: int, **options: Any
) -> tuple[list[float], torch.Tensor]:
    """Seconds of each decode step after the first, which includes the prefill, between two calls of
    a stopping criterion: all that `generate` does per token. Also all tokens."""
    rows, width = inputs["input_ids"].shape
    clock = StopsAt(width, [new_tokens + 1] * rows, model.device)
    tokens = model.generate(
        **inputs,
        max_new_tokens=new_tokens + 1,
        do_sample=False,
        eos_token_id=None,
        stopping_criteria=StoppingCriteriaList([clock]),
        **options,
    )
    return [after - before for before, after in itertools.pairwise(clock.times)], tokens


def arm(model: Any, case: Case, system: str) -> runner.Arm:
    """Turns of a system. The warm-up compiles, and records what is replayed."""
    prompts = texts(random.Random(0), [case.tokens] * case.rows, SHAPES[case.model].vocab)
    inputs, options, is_one = left_padded(prompts, model.device), SYSTEMS[system], case.rows == 1
    first = 0.0

    def work(turn: int) -> runner.Turn:
        nonlocal first
        if turn < 0:
            steps = case.new_tokens if is_one or system == "static" else 6
            first = runner.seconds_of(lambda: step_seconds(model, inputs, steps, **options))
            return runner.Turn(0.0)
        seconds, output = step_seconds(model, inputs, case.new_tokens, **options)
        if is_one:
            seconds += step_seconds(model, inputs, case.new_tokens, **options)[0]
        middle = statistics.median(seconds)
        figures: dict[str, Any] = {"least, ms": 1000 * min(seconds), "first call, s": first}
        if system == "paged":
            route = hf_paged.last_route(model)
            figures |= {"replayed": route.num_captured_steps, **fingerprint(model)}
            figures |= {"slowed by": " / ".join(route.slowed_by)}
            figures |= {"held, GB": hf_paged.memory_stats(model).held_bytes / 1e9}
        if is_one and model.device.type == "cuda" and system != "static":
            figures |= profiled(model, inputs, 1000 * middle, options)
        return runner.Turn(middle, output[:, case.tokens :].tolist(), figures)

    return runner.guarded(work)


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    """A step of each system, while there is time."""
    models: dict[str, Any] = {}
    until = time.perf_counter() + 60 * args.minutes
    for case in QUICK_CASES if args.quick else CASES:
        if time.perf_counter() > until:
            break
        if case.model not in models:
            models[case.model] = build(SHAPES[case.model], args.device, torch.bfloat16)
        arms = {system: arm(models[case.model], case, system) for system in case.systems}
        name = f"{case.model}, {case.rows} x {case.tokens}"
        yield runner.Case(name, arms, {"plain": {}} if "plain" in arms else {}, turns=1)
        hf_paged.free(models[case.model])


def profiled(
    model: Any, inputs: dict[str, torch.Tensor], ms: float, options: dict[str, Any]
) -> dict[str, float]:
    """Of one step: calls that launch something, kernels that run, their milliseconds, and those
    without any."""
    totals = []
    for steps in PROFILED_STEPS:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            step_seconds(model, inputs, steps, **options)
        totals.append(counts(profile.events()))
    few, many = totals
    launches, kernels, busy = (
        (b - a) / (PROFILED_STEPS[1] - PROFILED_STEPS[0]) for a, b in zip(few, many)
    )
    return {
        "launches": launches,
        "kernels": kernels,
        "gpu_ms": busy,
        "host_ms": max(0.0, ms - busy),
    }


def counts(events: Iterable[Any]) -> tuple[float, float, float]:
    """Of the profiler's events: calls that launch something, kernels that run, their
    milliseconds."""
    launches = kernels = busy = 0.0
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels += 1
            busy += event.time_range.elapsed_us() / 1000
        elif any(name in event.name for name in LAUNCHES):
            launches += 1
    return launches, kernels, busy


main = runner.Benchmark(__doc__, cases, options=jobs.OPTIONS, is_wrong=jobs.has_failed).main

if __name__ == "__main__":
    raise SystemExit(main())
