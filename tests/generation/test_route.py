"""The route of an engine or a call, and warnings if it is slower than possible."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from typing import Any

import pytest
import torch
import transformers

from hf_paged import PagedEngine, Route, last_route
from hf_paged.kernels import cpp
from tests.support import models
from tests.support.architecture_configs import tiny_model

OPTIONS = {"max_new_tokens": 4, "do_sample": False}
PROMPTS = [models.token_ids(1, length, seed=length)[0].tolist() for length in (5, 9)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if record.name.startswith("hf_paged")]
    messages = [record.getMessage() for record in found if record.levelno >= logging.WARNING]
    caplog.clear()
    # logged once per process
    return [message for message in messages if "C++ kernels" not in message]


def test_a_packed_engine(caplog: pytest.LogCaptureFixture) -> None:
    model = models.build("llama")
    with PagedEngine(model) as engine:
        assert engine.route is None and engine.stats().route is None and last_route(model) is None
        engine.generate(PROMPTS, OPTIONS)
        assert engine.route == engine.stats().route == last_route(model)
        assert engine.route == Route(
            "engine", "packed forwards under the engine's scheduler", in_place=True
        )
        engine.generate(PROMPTS, {**OPTIONS, "num_beams": 2})
        assert engine.route.prefills_shared
        model.generate(torch.tensor([PROMPTS[0]]), **OPTIONS)
        assert last_route(model).road == "plain"  # type: ignore[union-attr]
        engine.generate(PROMPTS, OPTIONS)
        assert last_route(model) == engine.route
    assert warnings(caplog) == []


def test_an_engine_that_runs_row_by_row_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = models.build("llama")
    model.model.norm.register_forward_hook(lambda *args: None)  # type: ignore[union-attr]
    why = "there are forward hooks on model.norm [troubleshooting.md#hooks]"
    for _ in range(2):
        with PagedEngine(model) as engine:
            engine.generate(PROMPTS, OPTIONS)
            route = engine.route
            assert route is not None and route == engine.stats().route == last_route(model)
            assert (
                route.road == "rows"
                and route.reason.startswith("rows stay in their original batch")
                and route.reason.endswith(why)
            )
            assert route.slowed_by == (f"requests run one by one, not packed: {why}",)
    said = [
        f"LlamaForCausalLM runs slower than it could: requests run one by one, not packed: {why}"
    ]
    assert warnings(caplog) == said
    another = copy.deepcopy(model)
    with PagedEngine(another) as engine:
        engine.generate(PROMPTS, OPTIONS)
    assert warnings(caplog) == said


@pytest.mark.parametrize("takes_anything", [False, True])
def test_an_engine_serves_a_forward_that_is_no_function(takes_anything: bool) -> None:
    """Like wrappers of other packages: packed, or row by row if the signature hides the
    arguments."""
    model = models.build("llama")
    forward = functools.partial(model.forward)
    if takes_anything:
        forward.__signature__ = inspect.signature(lambda *args, **kwargs: None)  # type: ignore[attr-defined]
    model.forward = forward
    with PagedEngine(model) as engine:
        for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, OPTIONS)):
            assert result.error is None, result.error
            assert (
                result.token_ids
                == model.generate(torch.tensor([prompt]), **OPTIONS)[0, len(prompt) :].tolist()
            )
        assert engine.route is not None and engine.route.road == (
            "rows" if takes_anything else "engine"
        )


def test_gathered_keys_and_values(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = tiny_model(transformers.GPTNeoForCausalLM)  # custom attention code
    ids = torch.tensor(PROMPTS[:1])
    for _ in range(2):
        model.generate(ids, **OPTIONS, **models.PAGED)
        route = last_route(model)
        assert route is not None and not route.in_place and len(route.slowed_by) == 1
    assert (
        "keys and values are gathered in decode steps (rows side by side under"
        in route.slowed_by[0]
    )
    assert "only attention can" in route.slowed_by[0]
    assert warnings(caplog) == [
        f"GPTNeoForCausalLM runs slower than it could: {route.slowed_by[0]}"
    ]


@pytest.mark.skipif(not cpp.is_available(), reason="no C++ kernel that could take anything")
@pytest.mark.parametrize("on_engine", [True, False])
def test_tensors_that_the_kernel_does_not_take(
    on_engine: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.build("llama").double()
    for _ in range(2):
        if on_engine:
            with PagedEngine(model) as engine:
                engine.generate(PROMPTS, OPTIONS)
                assert engine.route == last_route(model)
        else:
            model.generate(torch.tensor(PROMPTS[:1]), **OPTIONS, **models.PAGED)
    route = last_route(model)
    assert route is not None and route.road == "engine" and len(route.slowed_by) == 1
    assert route.slowed_by[0].endswith(
        "queries are torch.float64 on cpu, keys torch.float64 on cpu, values torch.float64 on cpu"
        " [troubleshooting.md#gathered]"
    )
    assert warnings(caplog) == [f"LlamaForCausalLM runs slower than it could: {route.slowed_by[0]}"]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_without_the_kernel_the_route_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "is_available", lambda: False)
    model = models.build(name)
    model.generate(**models.padded_prompt(name), **OPTIONS, **models.PAGED)
    route = last_route(model)
    assert route is not None and route.in_place
    assert [
        ("the C++ kernel is unavailable" in reason, "HF_PAGED_CPP=0" in reason)
        for reason in route.slowed_by
    ] == [(True, True)]


@pytest.mark.skipif(not cpp.is_available(), reason="without the kernel it is slow, and says so")
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_fast_call_says_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = models.build(name)
    model.generate(**models.padded_prompt(name), **OPTIONS, **models.PAGED)
    route = last_route(model)
    assert route is not None and route.in_place and route.slowed_by == ()
    assert warnings(caplog) == []
