"""Checks shared by several test files, and concurrent calls from several threads."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import hf_paged
from tests.support import models


def attention_of(model: PreTrainedModel) -> dict[str, str | None]:
    """The attention implementation of each module with a config."""
    return {
        name: module.config._attn_implementation
        for name, module in model.named_modules()
        if hasattr(module, "config") and hasattr(module.config, "_attn_implementation")
    }


def model_state(model: PreTrainedModel) -> dict[str, Any]:
    """State of a model that a call must not change."""
    return {
        "attention": attention_of(model),
        "training": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [
            len(module._forward_hooks) + len(module._forward_pre_hooks)
            for module in model.modules()
        ],
        "generation_config": model.generation_config.to_dict(),
        "grad": torch.is_grad_enabled(),
    }


_PLAIN_RUNS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # with the random state behind them


def plain_run(
    model: PreTrainedModel, inputs: dict[str, Any], options: dict[str, Any], seed: int | None = None
) -> Any:
    """The output of plain `generate`, drawn from the seed. Tokens of the session's shared models
    are kept: many tests compare with the same."""
    key = _plain_run_key(model, inputs, options, seed)
    if key is None or key not in _PLAIN_RUNS:
        if seed is not None:
            torch.manual_seed(seed)
        output = model.generate(**inputs, **options)
        if key is None or not isinstance(output, torch.Tensor):
            return output
        _PLAIN_RUNS[key] = output.clone(), torch.get_rng_state()
    tokens, random_state = _PLAIN_RUNS[key]
    if seed is not None:
        torch.set_rng_state(random_state)
    return tokens.clone()


def _plain_run_key(
    model: PreTrainedModel, inputs: dict[str, Any], options: dict[str, Any], seed: int | None
) -> str | None:
    """What decides the tokens of plain `generate`; None if a run is not kept: of a model that a
    test may change, with options that are not plain data, with draws but no seed. A model that is
    not as it was, in its weights, hooks, forwards or attributes, has another key, and so have
    caches that a test has patched."""
    draws = options.get("do_sample", model.generation_config.do_sample)
    if not models.is_shared(model) or "cache_implementation" in options or (draws and seed is None):
        return None
    forwards = [(type(module), type(module).forward) for module in model.modules()]
    caches = [DynamicLayer.update, DynamicSlidingWindowLayer.update]
    versions = [parameter._version for parameter in model.parameters()]
    modes = torch.is_autocast_enabled("cpu"), torch.get_default_dtype()
    as_lists = {
        name: (x.tolist(), str(x.dtype)) if isinstance(x, torch.Tensor) else x
        for name, x in inputs.items()
    }
    try:
        given = json.dumps([as_lists, options, seed], sort_keys=True)
    except TypeError:
        return None
    return f"{id(model)} {given} {model_state(model)} {forwards} {caches} {versions} {modes}"


def assert_pool_empty(model: PreTrainedModel, where: str = "the call") -> None:
    """Asserts that the model's pools are intact, and that no call holds a block."""
    hf_paged.check_integrity(model)
    if hf_paged.memory_stats(model).used_blocks:
        gc.collect()  # a returned cache may be in a reference cycle
    used = hf_paged.memory_stats(model).used_blocks
    assert used == 0, f"{used} blocks are still in use after {where}"


def assert_equal(expected: Any, actual: Any, what: str) -> None:
    assert expected == actual, f"{what}: {expected} became {actual}"


def assert_same_tokens(expected: torch.Tensor, actual: torch.Tensor, what: str = "tokens") -> None:
    assert_equal(expected.shape, actual.shape, f"{what}: shape")
    if not torch.equal(expected, actual):
        first = (expected != actual).nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: first difference at {first}\nplain\n{expected}\npaged\n{actual}"
        )


def generate_both(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    options: dict[str, Any],
    paged: dict[str, Any] = models.PAGED,
    seed: int = 3,
) -> tuple[Any, Any]:
    """Outputs of plain and of paged `generate`, both drawn from this seed."""
    plain = plain_run(model, inputs, options, seed)
    torch.manual_seed(seed)
    return plain, model.generate(**inputs, **options, **paged)


def assert_paged_is_plain(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    options: dict[str, Any],
    paged: dict[str, Any] = models.PAGED,
) -> hf_paged.Route:
    """Asserts that both give the same tokens and that no block stays in use; returns the route."""
    assert_same_tokens(*generate_both(model, inputs, options, paged))
    assert_pool_empty(model)
    route = hf_paged.last_route(model)
    assert route is not None
    return route


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """Runs the jobs concurrently and returns their results; raises the first exception of a job."""
    barrier = threading.Barrier(len(jobs))
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def work(index: int, job: Callable[[], Any]) -> None:
        try:
            barrier.wait(30)
            results[index] = job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
    return results
