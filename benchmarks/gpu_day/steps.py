"""Stage (d): steps of random models: milliseconds a token, launches, and the time in which the GPU
waits for the host, beside plain `generate` and a compiled static cache."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from transformers import StoppingCriteriaList

import hf_paged
from benchmarks.gpu_day.record import Record
from benchmarks.models import SHAPES, build
from benchmarks.systems import StopsAt, quiet
from benchmarks.workloads import equal_share, left_padded, texts
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
FAKE_CASES = (Case("llama-tiny", 1, 16, 12, BOTH), Case("llama-tiny", 4, 32, 12, BOTH))


def run(record: Record) -> None:
    """A row for each system of each case."""
    record.note_machine()
    models: dict[str, Any] = {}
    for case in FAKE_CASES if record.is_fake else CASES:
        tokens: dict[str, list[list[int]]] = {}
        for system in case.systems:
            about = {"model": case.model, "case": f"{case.rows}x{case.tokens}", "system": system}
            if record.left < 3:
                record.add(**about, note="no time left")
                continue
            with record.guard(**about), quiet():
                if case.model not in models:
                    models[case.model] = build(
                        SHAPES[case.model], record.torch_device, torch.bfloat16
                    )
                    record.add(**about, **fingerprint(models[case.model]))
                row, tokens[system] = timed(models[case.model], case, system, record)
                if "paged" in tokens and system != "paged":
                    row["equal_share"] = equal_share(tokens["paged"], tokens[system])
                record.add(**about, **row)
                hf_paged.free(models[case.model])


def fingerprint(model: Any) -> dict[str, Any]:
    """Milliseconds in which all weights are hashed, as before cached prefixes are used."""
    weights, seconds = list(model.parameters()), []
    for _ in range(3):
        start = time.perf_counter()
        hash_tensors(weights)  # the result is on the host
        seconds.append(time.perf_counter() - start)
    gigabytes = sum(weight.numel() * weight.element_size() for weight in weights) / 1e9
    return {"fingerprint_ms": 1000 * min(seconds), "weights_gb": gigabytes}


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


def timed(
    model: Any, case: Case, system: str, record: Record
) -> tuple[dict[str, Any], list[list[int]]]:
    """The figures of a system, and its tokens. The first call compiles, and records what is
    replayed."""
    prompts = texts(random.Random(0), [case.tokens] * case.rows, SHAPES[case.model].vocab)
    inputs = left_padded(prompts, record.torch_device)
    options = SYSTEMS[system]
    start = time.perf_counter()
    step_seconds(
        model, inputs, case.new_tokens if system == "static" or case.rows == 1 else 6, **options
    )
    first = time.perf_counter() - start
    seconds, output = step_seconds(model, inputs, case.new_tokens, **options)
    if case.rows == 1:
        seconds += step_seconds(model, inputs, case.new_tokens, **options)[0]
    row: dict[str, Any] = {
        "ms": 1000 * statistics.median(seconds),
        "ms_min": 1000 * min(seconds),
        "first_s": first,
    }
    route = hf_paged.last_route(model) if system == "paged" else None
    if route is not None:
        row |= {"replayed": route.num_captured_steps, "slowed_by": " / ".join(route.slowed_by)}
        row["held_gb"] = hf_paged.memory_stats(model).held_bytes / 1e9
    if case.rows == 1 and not record.is_fake and system != "static":
        with record.guard(model=case.model, system=system, what="profile"):
            row |= profiled(model, inputs, row["ms"], options)
    return row, output[:, case.tokens :].tolist()


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
