"""What `benchmarks.generate` compares: a system takes a model, a workload and a batch, and returns the new tokens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.continuous_batching.utils import WorkloadHints

import hf_paged
from benchmarks.workloads import PAD, Batch, Shape, Workload, left_padded


class StopsAt(StoppingCriteria):
    """Row `i` is done after `new_tokens[i]` tokens."""

    def __init__(self, width: int, new_tokens: list[int], device: str) -> None:
        self.lengths = width + torch.tensor(new_tokens, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.lengths


class NotAvailable(Exception):
    """The system is not part of this version."""


@dataclass(frozen=True)
class Generate:
    """`model.generate`, `batch_size` prompts at a time (0: all); on the paged cache with `paged`."""

    batch_size: int = 0
    paged: bool = False
    cache_config: hf_paged.PagedConfig | None = None

    def __call__(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> list[list[int]]:
        rows: list[list[int]] = []
        size = self.batch_size or len(batch.prompts)
        for start in range(0, len(batch.prompts), size):
            part = Batch(batch.prompts[start : start + size], batch.new_tokens[start : start + size])
            rows += self._part(model, shape, workload, part)
        return rows

    def _part(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> list[list[int]]:
        inputs = left_padded(batch.prompts, model.device)
        width = inputs["input_ids"].shape[1]
        options: dict[str, Any] = {**workload.options, "max_new_tokens": max(batch.new_tokens)}
        if batch.ragged:
            stops = StopsAt(width, batch.new_tokens, model.device)
            options |= {"stopping_criteria": StoppingCriteriaList([stops]), "eos_token_id": shape.never}
        if self.paged:
            options |= {"cache_implementation": "paged", "cache_config": self.cache_config}
        new = model.generate(**inputs, **options)[:, width:].tolist()
        lengths = [length for length in batch.new_tokens for _ in range(workload.rows_per_prompt)]
        for row, length in zip(new, lengths):
            if any(token != PAD for token in row[length:]):
                raise RuntimeError(f"a row went on after its {length} tokens")
        return [row[:length] for row, length in zip(new, lengths)]


@dataclass
class Engine:
    """`hf_paged.PagedEngine`, one for all repeats, as a user would keep it."""

    cache_config: hf_paged.PagedConfig | None = None
    engine: Any = None

    def __call__(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> list[list[int]]:
        if not hasattr(hf_paged, "PagedEngine"):
            raise NotAvailable("this version has no `hf_paged.PagedEngine`")
        if self.engine is None:
            self.engine = hf_paged.PagedEngine(model, self.cache_config or hf_paged.PagedConfig())
        configs = [
            GenerationConfig(**workload.options, max_new_tokens=length, pad_token_id=PAD, eos_token_id=None)
            for length in batch.new_tokens
        ]
        results = self.engine.generate(batch.prompts, generation_config=configs)
        for result in results:
            if result.error is not None:
                raise result.error
        return [sequence.token_ids for result in results for sequence in result.sequences]

    def free(self) -> None:
        if self.engine is not None:
            self.engine.free()
            self.engine = None


@dataclass(frozen=True)
class GenerateBatch:
    """
    transformers' continuous batching. Prompts that get as many tokens each go through `generate_batch`, others through
    the manager that it makes, since only that takes a length for each request.

    Args:
        attention (`str`): "sdpa" or "eager" (which it makes "paged|eager").
        settings (`tuple`): Pairs of `ContinuousBatchingConfig`; none: its defaults.
        sized (`bool`): `num_blocks` as the batch needs, and a fifth more; else as much memory as it finds.
    """

    attention: str = "sdpa"
    settings: tuple[tuple[str, Any], ...] = ()
    sized: bool = False

    def __str__(self) -> str:
        options = [self.attention, *(f"{name}={value}" for name, value in self.settings)]
        return ", ".join(options + ["num_blocks as needed"] * self.sized)

    def __call__(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> list[list[int]]:
        settings = dict(self.settings)
        if self.sized:
            page = settings.get("page_size", 256)
            pairs = zip(batch.prompts, batch.new_tokens)
            needed = sum(-(-(len(prompt) + new) // page) for prompt, new in pairs)
            settings["num_blocks"] = needed + needed // 5 + 1
        options = {
            "generation_config": GenerationConfig(
                **workload.options, max_new_tokens=max(batch.new_tokens), pad_token_id=PAD, eos_token_id=None
            ),
            "continuous_batching_config": ContinuousBatchingConfig(**settings) if settings else None,
        }
        with _attention(model, self.attention):
            if batch.ragged:
                results = self._by_manager(model, batch, options)
            else:
                results = list(model.generate_batch(batch.prompts, **options).values())
        failed = next((result.error for result in results if result.error is not None), None)
        if failed is not None or len(results) != len(batch.prompts):
            raise RuntimeError(failed or f"{len(results)} of {len(batch.prompts)} results came back")
        return [list(result.generated_tokens) for result in results]

    @staticmethod
    @torch.no_grad()
    def _by_manager(model: Any, batch: Batch, options: dict[str, Any]) -> list[Any]:
        hints = WorkloadHints(
            max_prompt_length=max(map(len, batch.prompts)),
            max_generated_length=max(batch.new_tokens),
            num_requests=len(batch.prompts),
        )
        names = [f"request {index}" for index in range(len(batch.prompts))]
        results: dict[str, Any] = {}
        with model.continuous_batching_context_manager(**options, workload_hints=hints, timeout=5) as manager:
            for name, prompt, length in zip(names, batch.prompts, batch.new_tokens):
                manager.add_request(prompt, name, max_new_tokens=length, eos_token_id=-1)
            while len(results) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    results[result.request_id] = result
                elif result is None and not manager.is_running():
                    break
        return [results[name] for name in names if name in results]


@contextlib.contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def tuned(model: Any, shape: Shape, workload: Workload, quick: bool) -> tuple[GenerateBatch, list[tuple[str, float]]]:
    """
    The settings of `generate_batch` that are fastest on `workload`, one knob after the other, and the seconds of
    every candidate (infinite where it failed).
    """
    batch = workload.batch(-1, shape.vocab)
    seconds: dict[GenerateBatch, float] = {}

    def fastest(candidates: list[GenerateBatch]) -> GenerateBatch:
        for candidate in candidates:
            if candidate in seconds:
                continue
            start = time.perf_counter()
            try:
                candidate(model, shape, workload, batch)
                seconds[candidate] = time.perf_counter() - start
            except Exception:
                seconds[candidate] = float("inf")
        return min(candidates, key=seconds.__getitem__)

    def with_setting(base: GenerateBatch, name: str, value: Any) -> GenerateBatch:
        return GenerateBatch(base.attention, tuple(sorted({**dict(base.settings), name: value}.items())), base.sized)

    base = GenerateBatch(sized=True, settings=(("max_batch_tokens", 512), ("page_size", 32)))
    fastest([base])  # warm-up
    del seconds[base]
    best = fastest([base, GenerateBatch("eager", base.settings, True)])
    for name, values in (("max_batch_tokens", (256, 1024, 4096)), ("page_size", (16, 64, 256))):
        best = fastest([best, *(with_setting(best, name, value) for value in values[: 1 if quick else None])])
    if not quick:
        best = fastest([best, with_setting(best, "allow_block_sharing", False)])
    return best, [(str(candidate), taken) for candidate, taken in seconds.items()]
