"""transformers' continuous batching as a system of `benchmarks.generate`, and the search for its
best settings."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from benchmarks import runner
from benchmarks.models import PAD, Shape
from benchmarks.systems import Answer, NotAvailable, System, attention, requests_of
from benchmarks.workloads import WORKLOADS, Batch, Workload

PATIENCE = 600.0  # seconds without output after which a manager counts as failed
# tokens per page; older transformers call a page a block
PAGE_SIZE = (
    "page_size"
    if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters
    else "block_size"
)

FIRST = {"max_batch_tokens": 512, PAGE_SIZE: 32}
CHANGES: tuple[dict[str, Any], ...] = (
    FIRST,
    FIRST,  # the one before was a warm-up
    {"attention": "eager"},
    {"max_batch_tokens": 256},
    {"max_batch_tokens": 1024},
    {PAGE_SIZE: 16},
    {PAGE_SIZE: 64},
    {"allow_block_sharing": False},
)
"""Settings that are tried, each with the best ones so far."""


@dataclass(frozen=True)
class GenerateBatch(System):
    """`generate_batch` for prompts that all get the same number of tokens; otherwise the manager
    that it creates, since only the manager takes a length for each request.

    Args:
        attention (`str`): "sdpa" or "eager" (which it makes "paged|eager").
        settings (`tuple`): Pairs of option and value of `ContinuousBatchingConfig`; empty: its
            defaults.
        sized (`bool`): Whether `num_blocks` is what the batch needs plus a fifth; else it takes the
            memory that it finds.
        fills_memory (`bool`): Whether it may take all free memory.
    """

    attention: str = "sdpa"
    settings: tuple[tuple[str, Any], ...] = ()
    sized: bool = False
    fills_memory: bool = True
    is_peer = True

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.settings) or "defaults"
        return f"{self.attention}, {settings}" + (", num_blocks as needed" if self.sized else "")

    def __call__(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> Answer:
        if not self.sized and not self.fills_memory:
            why = "takes most of the memory, which is too much for a quick run"
            raise NotAvailable(f"skipped: {why}")
        if batch.ragged:
            return self.serve(model, workload, batch)
        with attention(model, self.attention):
            options = self._options(workload, batch)
            found = model.generate_batch(batch.prompts, record_timestamps=True, **options)
        return answer_of(list(found.values()), len(batch.prompts) * workload.rows_per_prompt)

    def _options(self, workload: Workload, batch: Batch) -> dict[str, Any]:
        settings = dict(self.settings)
        if self.sized:
            page = settings.get(PAGE_SIZE, 256)
            pairs = zip(batch.prompts, batch.new_tokens)
            needed = sum(-(-(len(prompt) + new) // page) for prompt, new in pairs)
            settings["num_blocks"] = needed + needed // 5 + 1
        options = {**workload.options, "max_new_tokens": max(batch.new_tokens)}
        generation = GenerationConfig(**options, pad_token_id=PAD, eos_token_id=None)
        batching = ContinuousBatchingConfig(**settings) if settings else None
        return {"generation_config": generation, "continuous_batching_config": batching}

    @contextlib.contextmanager
    def manager(self, model: Any, workload: Workload, batch: Batch) -> Iterator[Any]:
        """A running `ContinuousBatchingManager` with enough blocks for the batch."""
        hints = WorkloadHints(
            max_prompt_length=max(map(len, batch.prompts)),
            max_generated_length=max(batch.new_tokens),
            num_requests=len(batch.prompts),
        )
        options = self._options(workload, batch)
        with torch.no_grad(), attention(model, self.attention):
            with model.continuous_batching_context_manager(
                **options, workload_hints=hints, timeout=5
            ) as manager:
                yield manager

    def serve(
        self, model: Any, workload: Workload, batch: Batch, arrivals: Sequence[float] = ()
    ) -> Answer:
        """The answer to requests that arrive at these seconds after the start, or are all there."""
        waiting, results = requests_of(batch, arrivals), dict[str, Any]()
        count = len(waiting)
        with self.manager(model, workload, batch) as manager:
            start = time.perf_counter()
            while len(results) < count:
                now = time.perf_counter() - start
                while waiting and waiting[0][0] <= now:
                    _, prompt, length = waiting.popleft()
                    manager.add_request(
                        prompt,
                        f"request {count - len(waiting)}",
                        max_new_tokens=length,
                        eos_token_id=-1,
                        record_timestamps=True,
                    )
                result = manager.get_result(timeout=min(1.0, waiting[0][0] - now) if waiting else 1)
                if result is not None and result.is_finished():
                    results[result.request_id] = result
                elif result is None and (not manager.is_running() or now > PATIENCE):
                    break
        names = [f"request {number}" for number in range(1, count + 1)]
        return answer_of([results[name] for name in names if name in results], count, start)


def answer_of(results: list[Any], count: int, start: float = 0.0) -> Answer:
    """The answer of `count` rows; raises if one failed or is missing."""
    failed = next((result.error for result in results if result.error is not None), None)
    if failed is not None or len(results) != count:
        raise RuntimeError(failed or f"{len(results)} of {count} results came back")
    rows = [list(result.generated_tokens) for result in results]
    return Answer(rows, [result.timestamps or [] for result in results], start)


def tuned(model: Any, shape: Shape, quick: bool) -> tuple[GenerateBatch, dict[str, float]]:
    """The fastest settings of `generate_batch` on a part of W1, searched one option at a time, and
    the seconds of every candidate (infinite where it failed).
    """
    scale, new = ((0.1, 0.05), 4) if quick else ((0.5, 0.5), 16)
    workload = replace(WORKLOADS["W1"].scaled(*scale), new_tokens=(new, new))
    call = model, shape, workload, workload.batch(-1, shape.vocab)
    best, seconds = GenerateBatch(sized=True), dict[GenerateBatch, float]()
    for change in CHANGES[:1] if quick else CHANGES:
        settings = {**dict(best.settings), **change}
        implementation = settings.pop("attention", best.attention)
        options = tuple(sorted(settings.items()))
        candidate = replace(best, attention=implementation, settings=options)
        try:
            seconds[candidate] = runner.seconds_of(functools.partial(candidate, *call))
        except Exception:
            seconds[candidate] = float("inf")
        best = min(seconds, key=seconds.__getitem__)
    return best, {str(candidate): taken for candidate, taken in seconds.items()}
