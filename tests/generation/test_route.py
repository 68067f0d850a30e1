"""The route of an engine or a call, and warnings if it is slower than possible."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import re
from typing import Any

import pytest
import torch
import transformers

from hf_paged import PagedEngine, Route, last_route
from hf_paged.kernels import cpp
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.checks import assert_paged_is_plain
from tests.support.engine_helpers import assert_served_as_lone, prompts

OPTIONS = {"max_new_tokens": 4, "do_sample": False}
PROMPTS = prompts(5, 9)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if record.name.startswith("hf_paged")]
    messages = [record.getMessage() for record in found if record.levelno >= logging.WARNING]
    caplog.clear()
    # logged once per process
    return [message for message in messages if "C++ kernels" not in message]


def test_a_packed_engine(caplog: pytest.LogCaptureFixture) -> None:
    model = models.build("llama")
    packed = Route("engine", "packed forwards under the engine's scheduler", in_place=True)
    with PagedEngine(model) as engine:
        assert engine.route is None and engine.stats().route is None and last_route(model) is None
        engine.generate(PROMPTS, OPTIONS)
        assert engine.route == engine.stats().route == last_route(model) == packed
        engine.generate(PROMPTS, {**OPTIONS, "num_beams": 2})
        assert engine.route.prefills_shared
        model.generate(torch.tensor([PROMPTS[0]]), **OPTIONS)
        assert last_route(model).road == "plain"
        engine.generate(PROMPTS, OPTIONS)
        assert last_route(model) == engine.route
    assert warnings(caplog) == []


def test_an_engine_that_runs_row_by_row_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = models.build("llama")
    model.model.norm.register_forward_hook(lambda *args: None)
    why = "there are forward hooks on model.norm [troubleshooting.md#hooks]"
    slow = f"requests run one by one, not packed: {why}"
    said = [f"LlamaForCausalLM runs slower than it could: {slow}"]
    for each, num_warnings in ((model, 1), (model, 0), (copy.deepcopy(model), 1)):
        with PagedEngine(each) as engine:
            engine.generate(PROMPTS, OPTIONS)
            route = engine.route
            assert route == engine.stats().route == last_route(each) and route.road == "rows"
        assert route.reason.startswith("rows stay in their original batch")
        assert route.reason.endswith(why) and route.slowed_by == (slow,)
        assert warnings(caplog) == said * num_warnings


@pytest.mark.parametrize("takes_anything", [False, True])
def test_an_engine_serves_a_forward_that_is_no_function(takes_anything: bool) -> None:
    """Like wrappers of other packages: packed, or row by row if the signature hides the
    arguments."""
    model: Any = models.build("llama")
    model.forward = functools.partial(model.forward)
    if takes_anything:
        model.forward.__signature__ = inspect.signature(lambda *args, **kwargs: None)
    stats = assert_served_as_lone(model, PROMPTS, OPTIONS)
    assert stats.route.road == ("rows" if takes_anything else "engine")


DOUBLE = (
    "queries are torch.float64 on cpu, keys torch.float64 on cpu, values torch.float64 on cpu"
    r" \[troubleshooting.md#gathered\]$"
)


@pytest.mark.parametrize(
    ("name", "on_engine", "told"),
    [
        ("GPTNeoForCausalLM", False, r"decode steps \(rows side by side under.*only attention can"),
        *(("LlamaForCausalLM", on_engine, DOUBLE) for on_engine in (True, False)),
    ],
)
def test_keys_and_values_that_are_gathered_are_told_once(
    name: str, on_engine: bool, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    if name == "LlamaForCausalLM":
        if not cpp.is_available():
            pytest.skip("no C++ kernel that could take anything")
        model: Any = models.build("llama").double()
    else:
        model = tiny_model(transformers.GPTNeoForCausalLM)  # custom attention code
    for _ in range(2):
        if on_engine:
            with PagedEngine(model) as engine:
                engine.generate(PROMPTS, OPTIONS)
                assert engine.route == last_route(model)
        else:
            model.generate(torch.tensor(PROMPTS[:1]), **OPTIONS, **models.PAGED)
    route = last_route(model)
    assert name == "LlamaForCausalLM" or not route.in_place
    (reason,) = route.slowed_by
    assert re.search(told, reason)
    assert warnings(caplog) == [f"{name} runs slower than it could: {reason}"]


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_call_says_nothing_unless_the_kernel_is_missing(
    name: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if has_kernel and not cpp.is_available():
        pytest.skip("without the kernel it is slow, and says so")
    monkeypatch.setattr(cpp, "is_available", lambda: has_kernel)
    model = models.build(name)
    model.generate(**models.padded_prompt(name), **OPTIONS, **models.PAGED)
    route = last_route(model)
    assert route.in_place and len(route.slowed_by) == (not has_kernel)
    for reason in route.slowed_by:
        assert "the C++ kernel is unavailable" in reason and "HF_PAGED_CPP=0" in reason
    assert warnings(caplog) == [] or not has_kernel


class Weighted(transformers.LlamaForCausalLM):
    """Weights tokens by a float mask of one value per token, without positions in `forward`."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **options: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 2:
            shape = (input_ids.shape[1], attention_mask.shape[1])
            causal = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
            attention_mask = (causal * attention_mask[:, None, None]).log()
        return super().forward(input_ids, attention_mask=attention_mask, **options)


@pytest.mark.parametrize("weight", [0.01, 1.0])
def test_a_mask_of_weights_is_not_dropped(weight: float, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = models.build("llama")
    model.__class__ = Weighted
    mask = torch.ones(2, 9)
    mask[:, 2:7] = weight
    inputs = {"input_ids": models.token_ids(2, 9), "attention_mask": mask}
    route = assert_paged_is_plain(model, inputs, {**OPTIONS, "max_new_tokens": 40})
    reason = "the attention mask has values other than 0 and 1 [troubleshooting.md#inputs]"
    said = [f"Weighted runs slower than it could: {reason}"] if weight != 1 else []
    assert route.road == ("hf_loop" if said else "engine") and warnings(caplog) == said
