"""`generate` never runs on another cache in silence when a paged one was asked for; the two names
that ask for it."""

from __future__ import annotations

import inspect
import json
import logging
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_paged
from hf_paged import compat
from tests.support import models
from tests.support.architecture_configs import tiny_model

OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
ASKED = 'did not use the paged cache that cache_implementation="paged" asks for'


class OwnCache(LlamaForCausalLM):
    """Prepares its cache without transformers' `_prepare_cache_for_generation`."""

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, *args: Any
    ) -> None:
        generation_config.cache_implementation = None
        model_kwargs[compat.OUTPUT_CACHE] = DynamicCache(config=self.config)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    def read() -> list[str]:
        records = [record for record in caplog.records if record.name.startswith("hf_paged")]
        caplog.clear()
        return [record.getMessage() for record in records if record.levelno == logging.WARNING]

    yield read


def generate(model: Any, **options: Any) -> torch.Tensor:
    return model.generate(**models.prompt("llama"), **OPTIONS, **options)


def own_cache() -> dict[str, Any]:
    return {compat.OUTPUT_CACHE: DynamicCache()}


@pytest.mark.parametrize("name", ["paged", "hf_paged"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_cache": False}, "use_cache is False. Leave `use_cache=False` out"),
        (own_cache, "the caller's own cache is used. Pass no cache, or a `hf_paged.PagedCache`"),
    ],
    ids=["use_cache", "own cache"],
)
def test_a_call_that_asked_for_paged_and_got_another_cache_warns_once(
    name: str, options: Any, words: str, messages: Any
) -> None:
    model, plain = models.build("llama"), models.get("llama")
    for warnings in (1, 0):
        given = options() if callable(options) else options
        assert torch.equal(generate(model, cache_implementation=name, **given), generate(plain))
        assert [f"LlamaForCausalLM {ASKED}: {words}" in message for message in messages()] == [
            True
        ] * warnings
    assert hf_paged.last_route(model).road == "plain"


@pytest.mark.parametrize("how", ["a generation config", "the model's config"])
def test_a_configuration_that_asks_warns_as_the_keyword_does(how: str, messages: Any) -> None:
    model = models.build("llama")
    if how == "the model's config":
        model.generation_config.cache_implementation = "paged"
        generate(model, use_cache=False)
    else:
        config = GenerationConfig(
            **OPTIONS, cache_implementation="paged", use_cache=False, pad_token_id=0
        )
        model.generate(**models.prompt("llama"), generation_config=config)
    assert [ASKED in message for message in messages()] == [True]


def test_each_reason_warns(messages: Any) -> None:
    model = models.build("llama")
    generate(model, cache_implementation="paged", use_cache=False)
    generate(model, cache_implementation="paged", **own_cache())
    assert ["use_cache" in message for message in messages()] == [True, False]


def test_a_model_that_prepares_its_cache_itself_warns(messages: Any) -> None:
    model = OwnCache(models.get("llama").config).eval()
    generate(model, cache_implementation="paged")
    (message,) = messages()
    assert message.startswith(
        f"OwnCache {ASKED}: OwnCache prepares its cache itself. Use a model that"
    )


def test_a_cache_that_cannot_be_seen_warns(messages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("llama")
    monkeypatch.setattr(compat, "CACHE_NAMES", ("renamed",))
    assert torch.equal(generate(model, cache_implementation="paged"), generate(models.get("llama")))
    (message,) = messages()
    assert (
        "made no cache that hf_paged recognizes. Install a version of transformers that" in message
    )


@pytest.mark.parametrize("name", ["XLNetLMHeadModel", "RwkvForCausalLM"])
def test_a_model_without_a_dynamic_cache_warns(name: str, messages: Any) -> None:
    model = tiny_model(getattr(transformers, name))
    ids = models.token_ids(2, 5)
    ours, plain = (
        model.generate(ids, **OPTIONS, **options)
        for options in ({"cache_implementation": "paged"}, {})
    )
    assert torch.equal(ours, plain)
    (message,) = messages()
    assert message.startswith(
        f"{name} {ASKED}: the model has a cache of its own. Use a model whose cache is"
    )


def test_a_version_whose_forwards_cannot_be_read_warns_on_import(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renamed(self: Any, input_ids: Any, renamed: Any = None, **kwargs: Any) -> None: ...

    runpy.run_module("hf_paged.compat")
    assert not caplog.records
    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", renamed)
    runpy.run_module("hf_paged.compat")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "has none of the arguments by which hf_paged recognizes a cache" in record.getMessage()


def test_calls_that_did_not_ask_are_silent(messages: Any) -> None:
    model = models.build("llama")
    generate(model)
    generate(model, use_cache=False)
    generate(model, **own_cache())
    generate(model, cache_implementation="static")
    assert messages() == []


@pytest.mark.parametrize("is_models_own", [True, False])
def test_a_keyword_of_none_overrides_a_configuration_that_asks(
    is_models_own: bool, messages: Any
) -> None:
    model = models.build("llama")
    config = GenerationConfig(
        **OPTIONS, cache_implementation="paged", cache_config={"block_size": 8}, pad_token_id=0
    )
    options: dict[str, Any] = {"generation_config": config}
    if is_models_own:
        model.generation_config, options = config, {}
    model.generate(
        **models.prompt("llama"), **options, cache_implementation=None, cache_config=None
    )
    assert messages() == []
    assert hf_paged.last_route(model).road == "plain"


def test_calls_that_got_a_paged_cache_are_silent(messages: Any) -> None:
    model = models.build("llama")
    generate(model, cache_implementation="paged")
    generate(model, cache_implementation="hf_paged")
    generate(
        model,
        cache_implementation="paged",
        **{compat.OUTPUT_CACHE: hf_paged.PagedCache(model.config)},
    )
    assert [message for message in messages() if "did not use the paged cache" in message] == []


def test_paged_by_default_is_silent_where_a_call_names_a_cache(messages: Any) -> None:
    model = models.build("llama")
    hf_paged.install(by_default=True)
    try:
        generate(model, use_cache=False)
        generate(model, **own_cache())
        generate(model, cache_implementation="static")
        assert messages() == []
    finally:
        hf_paged.uninstall()
        hf_paged.install()


def test_generate_without_its_decorators_is_paged() -> None:
    """Callers take it out of `no_grad`; by the keyword "paged", transformers alone would run its
    own batching."""
    model, inner = models.build("llama"), LlamaForCausalLM.generate
    prompt, expected = models.prompt("llama"), generate(models.get("llama"))
    while (inner := getattr(inner, "__wrapped__", None)) is not None:
        assert torch.equal(
            inner(model, **prompt, **OPTIONS, cache_implementation="paged"), expected
        )
        assert hf_paged.last_route(model).road != "plain"
        assert inspect.signature(inner) == inspect.signature(LlamaForCausalLM.generate)


def test_gradients_of_generate_without_its_decorators_are_plain() -> None:
    model, inner = models.build("llama"), LlamaForCausalLM.generate
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    gradients = []
    for options in ({}, {"cache_implementation": "paged"}):
        output = inner(
            model,
            **models.prompt("llama"),
            **OPTIONS,
            **options,
            output_logits=True,
            return_dict_in_generate=True,
        )
        model.zero_grad()
        torch.stack(output.logits).pow(2).mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)
    assert "gradients are recorded" in hf_paged.last_route(model).reason


@pytest.mark.parametrize("how", ["the keyword", "the model's config"])
def test_a_cache_config_alone_warns(how: str, messages: Any) -> None:
    model = models.build("llama")
    given = {"num_blocks": 64}
    if how == "the model's config":
        model.generation_config.cache_config = given
    for warnings in (1, 0):
        generate(model, **({"cache_config": given} if how == "the keyword" else {}))
        alone = "got a `cache_config` without a `cache_implementation`"
        assert [alone in message for message in messages()] == [True] * warnings


@pytest.mark.slow
def test_hf_paged_is_refused_without_the_import() -> None:
    program = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                                     vocab_size=16))
ids = torch.tensor([[1, 2, 3]])
try:
    model.generate(ids, max_new_tokens=2, cache_implementation="hf_paged")
    result = "ran"
except ValueError as error:
    result = str(error)
assert "hf_paged" not in sys.modules
print(json.dumps(result))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    message = json.loads(done.stdout.splitlines()[-1])
    assert "cache_implementation" in message and "hf_paged" in message


@pytest.mark.parametrize("rows", [1, 2])
def test_hidden_states_of_beams_with_an_axis_before_the_rows(rows: int) -> None:
    """Gemma3n's are `(altup_num_inputs, rows, length, width)`; here there are as many inputs as
    rows, or more."""
    model = tiny_model(transformers.Gemma3nForCausalLM, altup_num_inputs=2)
    reports: dict[str, Any] = {
        "return_dict_in_generate": True,
        "output_hidden_states": True,
        "output_attentions": True,
    }
    options = {
        "num_beams": 3,
        "do_sample": False,
        "max_new_tokens": 2,
        "min_new_tokens": 2,
        **reports,
    }
    inputs = models.prompt("llama", rows, 7)
    plain = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, **models.PAGED)
    assert plain.hidden_states[0][0].shape[:2] == (2, 3 * rows)
    route = hf_paged.last_route(model)
    assert route is not None and route.prefills_shared
    assert torch.equal(plain.sequences, ours.sequences)
    for name in ("hidden_states", "attentions"):
        for theirs, mine in zip(getattr(plain, name), getattr(ours, name), strict=True):
            for a, b in zip(theirs, mine, strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("route", ["engine", "hf_loop"])
def test_a_call_that_runs_when_hf_paged_is_uninstalled_ends_as_others(route: str) -> None:
    model, numbers = models.build("llama"), []
    more: dict[str, Any] = {"prefill_chunk_size": 64} if route == "hf_loop" else {}
    options = {**OPTIONS, "max_new_tokens": 8, **more}
    expected = model.generate(**models.prompt("llama"), **options)

    class Uninstalls(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            numbers.append(input_ids.shape[1])
            if len(numbers) == 3:
                hf_paged.uninstall()
            return scores

    try:
        processors = LogitsProcessorList([Uninstalls()])
        found = model.generate(
            **models.prompt("llama"), **options, **models.PAGED, logits_processor=processors
        )
        assert torch.equal(found, expected) and len(numbers) == 8
        assert hf_paged.last_route(model).road == route  # type: ignore[union-attr]
        assert "hf_paged" not in ALL_ATTENTION_FUNCTIONS.valid_keys()
    finally:
        hf_paged.install()
    assert torch.equal(
        model.generate(**models.prompt("llama"), **options, **models.PAGED), expected
    )
