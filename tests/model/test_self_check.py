"""Findings of the check before a model's first packed step, and when they are dropped."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_paged
from hf_paged import PagedEngine, compat, last_route
from hf_paged.model.forwards import behavior_key
from tests.support import models
from tests.support.checks import assert_paged_is_plain
from tests.support.engine_helpers import assert_lone, prompts

OPTIONS = {"max_new_tokens": 12, "do_sample": False}
FOUND = "packed, its logits of decode steps are"


def with_keyword(scale: int) -> Any:
    def forward(x: Any, *, scale: int = scale) -> Any:
        return x

    return forward


def test_forwards_that_differ_in_a_keyword_have_keys_of_their_own() -> None:
    assert (
        behavior_key(with_keyword(1))
        == behavior_key(with_keyword(1))
        != behavior_key(with_keyword(2))
    )
    first, second = (functools.partial(with_keyword(1), **{name: 1}) for name in ("x", "scale"))
    assert behavior_key(first) != behavior_key(second)


class _Single(nn.Module):
    """Computes something else for a row of one token once `is_on`, like code that detects decode
    steps by their shape."""

    def __init__(self, inner: nn.Module, is_on: bool = True) -> None:
        super().__init__()
        self.inner, self.is_on = inner, is_on

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) * (0.5 if self.is_on and hidden.shape[1] == 1 else 1.0)


class _CountsCached(transformers.LlamaForCausalLM):
    """Shifts its logits by the cached length."""

    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(compat.OUTPUT_CACHE)
        cached = 0 if cache is None else cache.get_seq_length()
        outputs = super().forward(*args, **kwargs)
        outputs.logits = torch.roll(outputs.logits, cached, dims=-1)
        return outputs


def _halved(self: _Single, hidden: torch.Tensor) -> torch.Tensor:
    return self.inner(hidden) * (0.5 if hidden.shape[1] == 1 else 1.0)


def _build(kind: str) -> Any:
    model: Any = models.build("llama")
    if kind == "single":
        model.model.layers[0].mlp = _Single(model.model.layers[0].mlp)
    else:
        model.__class__ = _CountsCached
    return model


def _assert_found(model: Any, engine: PagedEngine) -> None:
    """Asserts that rows run one by one, with plain's tokens."""
    texts = prompts(5, 9, 3)
    assert_lone(engine, texts, engine.generate(texts, OPTIONS), OPTIONS)
    route = assert_paged_is_plain(model, models.padded_prompt("llama"), OPTIONS)
    assert route.road == "engine" and FOUND in route.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["single", "counts"])
def test_code_that_acts_on_decode_steps_is_found_out(kind: str, dtype: torch.dtype) -> None:
    model = _build(kind).to(dtype)
    if dtype is torch.float32:
        with PagedEngine(model) as engine:
            _assert_found(model, engine)
    model.generate(**models.padded_prompt("llama"), **OPTIONS, **models.PAGED)
    assert FOUND in last_route(model).reason


@pytest.mark.slow
@pytest.mark.parametrize("change", ["class", "attribute"])
def test_code_that_changes_after_the_check(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = models.build("llama")
    single = model.model.layers[0].mlp = _Single(model.model.layers[0].mlp, is_on=False)
    with PagedEngine(model) as engine:
        engine.generate(prompts(5, 9, 3), OPTIONS)
        model.generate(**models.padded_prompt("llama"), **OPTIONS, **models.PAGED)
        assert FOUND not in last_route(model).reason
        if change == "class":
            monkeypatch.setattr(_Single, "forward", _halved)
        else:
            single.is_on = True
        _assert_found(model, engine)


class _Fails(nn.Module):
    """Raises in its first forward."""

    def __init__(self, inner: nn.Module, error: Exception | None) -> None:
        super().__init__()
        self.inner = inner
        self.failures = iter([error])  # not a list, whose elements the self-check would put back

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for error in self.failures:
            if error is None:
                torch.empty(1 << 50)
            raise error
        return self.inner(hidden)


@pytest.mark.parametrize(
    "error",
    [None, torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), ValueError("no disk")],
    ids=["cpu", "device", "python", "passing"],
)
def test_a_forward_that_fails_once_in_the_check_is_no_verdict(error: Exception | None) -> None:
    """Memory that ran out is raised; another error leaves the call to another layout."""
    model: Any = models.build("llama")
    model.model.layers[1].mlp = _Fails(model.model.layers[1].mlp, error)
    inputs = models.padded_prompt("llama")
    if isinstance(error, ValueError):
        found = model.generate(**inputs, **OPTIONS, **models.PAGED)
        assert "not packed: its forward fails: no disk" in last_route(model).reason
        assert torch.equal(found, model.generate(**inputs, **OPTIONS))
    else:
        with pytest.raises((MemoryError, RuntimeError)):
            model.generate(**inputs, **OPTIONS, **models.PAGED)
        hf_paged.check_integrity(model)
    route = assert_paged_is_plain(model, inputs, OPTIONS)
    assert route.road == "engine"
    assert "packed forwards under the engine's scheduler" in route.reason


def with_cell(value: Any) -> Any:
    return lambda: value


class _Scale:
    def __init__(self, scale: int) -> None:
        self.scale = scale

    def __call__(self, x: Any) -> Any:
        return x * self.scale


def test_keys_do_not_depend_on_the_addresses_of_objects_that_are_freed() -> None:
    """Dicts that were made for a key and freed gave their ids to the next dicts."""
    first, second = with_cell(1), with_cell(1)
    parts = behavior_key(functools.partial(max, first, second))
    assert parts[2] == parts[3] == behavior_key(first)
    # Python makes the dict of an object's attributes when it is first read
    keys = [behavior_key(functools.partial(first, _Scale(scale))) for scale in (2, 3, 2)]
    assert keys[0] != keys[1] and keys[0] == keys[2]


def test_keys_tell_scalars_of_several_types_and_signs_apart() -> None:
    values = (1, True, 1.0, 0, False, 0.0, -0.0, float("nan"), None, "1")
    assert len({behavior_key(with_cell(value)) for value in values}) == len(values)
    one, other = (behavior_key(with_cell(float("nan"))) for _ in range(2))
    assert one == other


def test_keys_tell_which_callable_occurs_twice() -> None:
    first, second = with_cell(1), with_cell(2)
    keys = [behavior_key(functools.partial(max, first, second, x)) for x in (first, second)]
    assert keys[0] != keys[1]
