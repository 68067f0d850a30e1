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

OPTIONS = {"max_new_tokens": 12, "do_sample": False}
PROMPTS = [models.token_ids(1, length, seed=length)[0].tolist() for length in (5, 9, 3)]


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
    """Computes something else for a row of one token, like code that detects decode steps by their
    shape."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) * (0.5 if hidden.shape[1] == 1 else 1.0)


class _CountsCached(transformers.LlamaForCausalLM):
    """Shifts its logits by the cached length."""

    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(compat.OUTPUT_CACHE)
        cached = 0 if cache is None else cache.get_seq_length()
        outputs = super().forward(*args, **kwargs)
        outputs.logits = torch.roll(outputs.logits, cached, dims=-1)
        return outputs


def _single() -> Any:
    model = models.build("llama")
    mlp: Any = model.model.layers[0]
    mlp.mlp = _Single(mlp.mlp)
    return model


def _counts() -> Any:
    model = _CountsCached(models.config("llama")).eval()
    models.init_weights(model, 0)
    model.generation_config = models.build("llama").generation_config
    return model


@pytest.mark.parametrize(("build", "road"), [(_single, "engine"), (_counts, "engine")])
def test_code_that_acts_on_decode_steps_is_found_out(build: Any, road: str) -> None:
    model = build()
    inputs = models.padded_prompt("llama")
    expected = model.generate(**inputs, **OPTIONS)
    assert torch.equal(model.generate(**inputs, **OPTIONS, **models.PAGED), expected)
    route = last_route(model)
    assert route is not None and route.road == road  # rectangular rows, or packed
    assert "packed, its logits of decode steps are" in route.reason
    with PagedEngine(model) as engine:
        results = engine.generate(PROMPTS, OPTIONS)
    for prompt, result in zip(PROMPTS, results):
        assert (
            result.token_ids
            == model.generate(torch.tensor([prompt]), **OPTIONS)[0, len(prompt) :].tolist()
        )


@pytest.mark.parametrize("build", [_single, _counts])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_check_fails_in_half_precision_too(build: Any, dtype: torch.dtype) -> None:
    model = build().to(dtype)
    model.generate(**models.padded_prompt("llama"), **OPTIONS, **models.PAGED)
    route = last_route(model)
    assert route is not None and "packed, its logits of decode steps are" in route.reason


class _Switch(_Single):
    """As `_Single` once `is_on`."""

    is_on = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) if self.is_on else self.inner(hidden)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["class", "attribute"])
def test_code_that_changes_after_the_check_is_checked_again(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.build("llama")
    layer: Any = model.model.layers[0]
    layer.mlp = _Switch(layer.mlp)
    inputs = models.padded_prompt("llama")
    with PagedEngine(model) as engine:
        engine.generate(PROMPTS, OPTIONS)
        model.generate(**inputs, **OPTIONS, **models.PAGED)
        if change == "class":
            monkeypatch.setattr(_Switch, "forward", _Single.forward)
        else:
            layer.mlp.is_on = True
        results = engine.generate(PROMPTS, OPTIONS)
    for prompt, result in zip(PROMPTS, results):
        assert (
            result.token_ids
            == model.generate(torch.tensor([prompt]), **OPTIONS)[0, len(prompt) :].tolist()
        )
    found = model.generate(**inputs, **OPTIONS, **models.PAGED)
    route = last_route(model)
    assert route is not None and "packed, its logits of decode steps are" in route.reason
    assert torch.equal(found, model.generate(**inputs, **OPTIONS))


class _Fails(nn.Module):
    """Raises in its first forward."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind
        self.failures = iter([kind])  # not a list, whose elements the self-check would put back

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if next(self.failures, None) is not None:
            if self.kind == "cpu":
                torch.empty(1 << 50)
            if self.kind == "passing":
                raise ValueError("the disk is away")
            raise (
                MemoryError
                if self.kind == "python"
                else torch.OutOfMemoryError("CUDA out of memory")
            )
        return self.inner(hidden)


@pytest.mark.parametrize("kind", ["cpu", "device", "python"])
def test_memory_that_ran_out_is_no_verdict(kind: str) -> None:
    model = models.build("llama")
    model.model.layers[1].mlp = _Fails(model.model.layers[1].mlp, kind)  # type: ignore[union-attr]
    inputs = models.padded_prompt("llama")
    with pytest.raises((MemoryError, RuntimeError)):
        model.generate(**inputs, **OPTIONS, **models.PAGED)
    hf_paged.check_integrity(model)
    paged = model.generate(**inputs, **OPTIONS, **models.PAGED)
    route = last_route(model)
    assert route is not None and route.road == "engine"
    assert torch.equal(paged, model.generate(**inputs, **OPTIONS))


def test_a_plain_forward_that_fails_in_the_check_is_no_verdict() -> None:
    model = models.build("llama")
    model.model.layers[1].mlp = _Fails(model.model.layers[1].mlp, "passing")  # type: ignore[union-attr]
    inputs = models.padded_prompt("llama")
    for reason in (
        "not packed: its forward fails: the disk is away",
        "packed forwards under the engine's scheduler",
    ):
        paged = model.generate(**inputs, **OPTIONS, **models.PAGED)
        route = last_route(model)
        assert route is not None and route.road == "engine"
        assert reason in route.reason
        assert torch.equal(paged, model.generate(**inputs, **OPTIONS))


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
