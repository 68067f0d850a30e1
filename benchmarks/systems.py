"""Systems of `benchmarks.generate`: each takes a model, a workload and a batch, and returns the new
tokens."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_paged
from benchmarks.models import PAD, Shape
from benchmarks.workloads import Batch, Workload, contiguous_bytes, left_padded

KEPT = hf_paged.PagedConfig(idle_release_seconds=None)
"""Pools and recorded steps stay between turns, as a peer's process does: the turns of other systems
take longer than the minute after which an idle pool is freed."""
PAGE_SIZE = (
    "page_size"
    if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters
    else "block_size"
)
"""The option for tokens per page of transformers' continuous batching; older ones call a page a
block."""


class NotAvailable(Exception):
    """The system does not run here; the message goes into the table."""


class Answer(NamedTuple):
    """What a system returns for a batch."""

    rows: list[list[int]]  # new tokens of every row
    times: list[list[float]]  # `time.perf_counter` of each token; empty where unknown


def joined(answers: Iterable[Answer]) -> Answer:
    """The answer to all parts of a batch."""
    whole = Answer([], [])
    for answer in answers:
        whole.rows.extend(answer.rows)
        whole.times.extend(answer.times)
    return whole


def latencies(times: Sequence[Sequence[float]], starts: Sequence[float]) -> dict[str, float]:
    """p50 and p99 of the milliseconds from each row's start to its first token (TTFT) and between
    consecutive tokens (TPOT), by the titles of columns; empty without times."""
    first = [row[0] - start for row, start in zip(times, starts) if row]
    between = [after - before for row in times for before, after in itertools.pairwise(row)]
    return {
        f"{name} p{percent}, ms": 1e3 * float(np.percentile(values, percent))
        for name, values in {"TTFT": first, "TPOT": between}.items()
        for percent in (50, 99)
        if values
    }


class StopsAt(StoppingCriteria):
    """Ends row `i` after `new_tokens[i]` tokens; records when each step's tokens are available."""

    def __init__(self, width: int, new_tokens: Sequence[int], device: Any) -> None:
        self.lengths = width + torch.tensor(new_tokens, device=device)
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return input_ids.shape[1] >= self.lengths


class System(ABC):
    """One way to generate."""

    is_peer = False  # whether it is several times slower than the others and gets fewer turns

    @abstractmethod
    def __call__(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> Answer:
        """The new tokens of every row of `batch`, and their timestamps."""

    def kv_bytes(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> int | None:
        """Peak bytes of K/V in the last call; `None`: unknown."""
        return None

    def free(self) -> None:  # noqa: B027  most have nothing to free
        """Frees memory."""


@dataclass(frozen=True)
class Generate(System):
    """`model.generate`."""

    batch_size: int = 0  # prompts per call; 0: all
    cache: str | None = None  # `cache_implementation`
    cache_config: hf_paged.PagedConfig | None = KEPT

    def __call__(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> Answer:
        if self.cache == "static":
            if model.device.type != "cuda":
                why = "transformers compiles the static cache's forward on an accelerator only"
                raise NotAvailable(f"skipped: {why}")
            if workload.num_beams > 1:
                why = "beams move the rows of a cache, which a compiled one does not"
                raise NotAvailable(f"skipped: {why}")
        return joined(self._part(model, shape, workload, part) for part in self._parts(batch))

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        size = self.batch_size or len(batch.prompts)
        for start in range(0, len(batch.prompts), size):
            yield Batch(batch.prompts[start : start + size], batch.new_tokens[start : start + size])

    def _part(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> Answer:
        inputs = left_padded(batch.prompts, model.device)
        width = inputs["input_ids"].shape[1]
        has_beams = workload.num_beams > 1
        if has_beams and batch.ragged:
            raise NotAvailable("skipped: beams of one call get the same number of tokens")
        lengths = [length for length in batch.new_tokens for _ in range(workload.rows_per_prompt)]
        stops = StopsAt(width, lengths, model.device)
        options: dict[str, Any] = {**workload.options, "max_new_tokens": max(batch.new_tokens)}
        if not has_beams:  # beams settle their tokens only at the end
            options["stopping_criteria"] = StoppingCriteriaList([stops])
        if batch.ragged:
            options["eos_token_id"] = shape.never
        if self.cache is not None:
            options["cache_implementation"] = self.cache
        if self.cache == "paged":
            options["cache_config"] = self.cache_config
        new = model.generate(**inputs, **options)[:, width:].tolist()
        for row, length in zip(new, lengths):
            if any(token != PAD for token in row[length:]):
                raise RuntimeError(f"a row went on after its {length} tokens")
        times = [] if has_beams else [stops.times[:length] for length in lengths]
        return Answer([row[:length] for row, length in zip(new, lengths)], times)

    def kv_bytes(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> int | None:
        if self.cache == "paged":
            return hf_paged.memory_stats(model, reset=True).peak_bytes
        return max(
            contiguous_bytes(shape, workload, part, model.dtype.itemsize)
            for part in self._parts(batch)
        )


@dataclass(frozen=True)
class InThreads(Generate):
    """A web app: each prompt's call in a thread of its own, all at once."""

    batch_size: int = 1

    def __call__(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> Answer:
        with ThreadPoolExecutor(len(batch.prompts)) as pool:
            call = functools.partial(self._part, model, shape, workload)
            return joined(pool.map(call, self._parts(batch)))

    def kv_bytes(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> int | None:
        if self.cache == "paged":
            return super().kv_bytes(model, shape, workload, batch)
        itemsize = model.dtype.itemsize
        return sum(contiguous_bytes(shape, workload, part, itemsize) for part in self._parts(batch))


@dataclass
class Engine(System):
    """`hf_paged.PagedEngine`, one for all repeats, as users keep it."""

    cache_config: hf_paged.PagedConfig = KEPT
    engine: Any = None

    def __call__(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> Answer:
        if self.engine is None:
            self.engine = hf_paged.PagedEngine(model, self.cache_config)
        results: dict[str, Any] = {}
        times: dict[str, list[list[float]]] = {}
        for prompt, length in zip(batch.prompts, batch.new_tokens):
            options = {**workload.options, "max_new_tokens": length}
            config = GenerationConfig(**options, pad_token_id=PAD, eos_token_id=None)
            name = self.engine.add_request(prompt, config)
            times[name] = [[] for _ in range(workload.rows_per_prompt)]
        while self.engine.has_unfinished:
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                for sequence in output.new_tokens:
                    times[output.request_id][sequence].append(now)
                if output.finished:
                    results[output.request_id] = output.result
        checked(list(results.values()))
        rows = [sequence.token_ids for name in times for sequence in results[name].sequences]
        told = workload.num_beams == 1
        return Answer(rows, [row for name in times for row in times[name]] if told else [])

    def kv_bytes(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> int | None:
        return self.engine.stats().peak_bytes

    def free(self) -> None:
        if self.engine is not None:
            self.engine.free()
            self.engine = None


@dataclass
class SmallPool(Engine):
    """An engine with a third of the peak blocks of another engine's last turn."""

    of: Engine | None = None  # the other engine

    def __call__(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> Answer:
        if self.engine is None:
            if self.of is None or self.of.engine is None:
                raise NotAvailable("skipped: the engine that it is compared with did not run")
            blocks = self.of.engine.stats().peak_blocks // 3
            self.cache_config = replace(KEPT, num_blocks=blocks)
        return super().__call__(model, shape, workload, batch)


@dataclass(frozen=True)
class GenerateBatch(System):
    """transformers' `generate_batch`, for prompts that all get the same number of tokens, with as
    many pages as they need and a fifth more."""

    page_tokens: int = 32
    max_batch_tokens: int = 1024
    is_peer = True

    def __call__(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> Answer:
        if batch.ragged:
            raise NotAvailable("skipped: rows of one call get the same number of tokens")
        new = batch.new_tokens[0]
        needed = sum(-(-(len(prompt) + new) // self.page_tokens) for prompt in batch.prompts)
        config = ContinuousBatchingConfig(
            num_blocks=needed + needed // 5 + 1,
            max_batch_tokens=self.max_batch_tokens,
            **{PAGE_SIZE: self.page_tokens},
        )
        options = {**workload.options, "max_new_tokens": new}
        results = model.generate_batch(
            batch.prompts,
            generation_config=GenerationConfig(**options, pad_token_id=PAD, eos_token_id=None),
            continuous_batching_config=config,
            record_timestamps=True,
        )
        answers = checked(list(results.values()))
        rows = [list(one.generated_tokens) for one in answers]
        return Answer(rows, [one.timestamps or [] for one in answers])


def served(
    engine: hf_paged.PagedEngine, prompts: Any, options: Any, **more: Any
) -> tuple[float, list[Any]]:
    """Seconds in which an engine serves these prompts, and its results, none of which failed."""
    start = time.perf_counter()
    results = engine.generate(prompts, options, **more)
    return time.perf_counter() - start, checked(results)


def road_of(model: Any) -> str:
    """How the model's last call of `generate` was served."""
    route = hf_paged.last_route(model)
    return route.road if route else "plain"


def checked(results: list[Any]) -> list[Any]:
    """The results of an engine; raises the error of one that failed."""
    for error in (result.error for result in results):
        if error is not None:  # transformers' own are texts
            raise error if isinstance(error, Exception) else RuntimeError(error)
    return results


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings and logs that libraries would print into a table."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
