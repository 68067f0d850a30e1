"""`generate` never runs on another cache in silence when a paged one was asked for; the two names
that ask for it."""

from __future__ import annotations

import inspect
import logging
import os
import runpy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
)
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_paged
from hf_paged import compat
from hf_paged.rooms import is_installed
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.checks import assert_paged_is_plain, generate_both
from tests.support.rooms import needs_shared_prefill

OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
ASKED = "did not use a paged cache, although one was requested"


class OwnCache(LlamaForCausalLM):
    """Prepares its cache without transformers' `_prepare_cache_for_generation`."""

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, *args: Any
    ) -> None:
        generation_config.cache_implementation = None
        model_kwargs[compat.OUTPUT_CACHE] = DynamicCache(config=self.config)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Any:
    def read() -> list[str]:
        records = [record for record in caplog.records if record.name.startswith("hf_paged")]
        caplog.clear()
        return [record.getMessage() for record in records if record.levelno == logging.WARNING]

    return read


@pytest.fixture(params=[False, True], ids=["asked", "by default"])
def by_default(request: pytest.FixtureRequest) -> Iterator[bool]:
    if request.param:
        hf_paged.install(by_default=True)
    yield request.param
    if request.param:
        hf_paged.uninstall()
        hf_paged.install()


def generate(model: Any, **options: Any) -> torch.Tensor:
    return model.generate(**models.prompt("llama"), **OPTIONS, **options)


def own_cache() -> dict[str, Any]:
    return {compat.OUTPUT_CACHE: DynamicCache()}


@pytest.mark.parametrize("how", ["paged", "hf_paged", "a generation config", "the model's config"])
def test_a_call_that_asked_for_paged_and_got_another_cache_warns_once_for_each_reason(
    how: str, messages: Any
) -> None:
    model, plain = models.build("llama"), models.get("llama")
    asked: dict[str, Any] = {"cache_implementation": how}
    if how == "the model's config":
        model.generation_config.cache_implementation = "paged"
        asked = {}
    elif how == "a generation config":
        config = GenerationConfig(cache_implementation="paged", pad_token_id=0)
        asked = {"generation_config": config}
    for make, words in (
        (lambda: {"use_cache": False}, "use_cache is False. Leave `use_cache=False` out"),
        (own_cache, "the caller's own cache is used. Pass no cache, or a `hf_paged.PagedCache`"),
    ):
        for warnings in (1, 0):
            assert torch.equal(generate(model, **asked, **make()), generate(plain))
            told = [f"LlamaForCausalLM {ASKED}: {words}" in message for message in messages()]
            assert told == [True] * warnings
        assert hf_paged.last_route(model).road == "plain"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OwnCache", "OwnCache prepares its cache itself. Use a model that"),
        ("XLNetLMHeadModel", "the model has a cache of its own. Use a model whose cache is"),
        ("RwkvForCausalLM", "the model has a cache of its own. Use a model whose cache is"),
        (
            "LlamaForCausalLM",
            "no cache that hf_paged recognizes. Install a version of transformers that",
        ),
    ],
)
def test_a_model_whose_cache_cannot_be_paged_warns(
    name: str, words: str, messages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "OwnCache":
        model: Any = OwnCache(models.get("llama").config).eval()
    elif name == "LlamaForCausalLM":
        model = models.build("llama")
        monkeypatch.setattr(compat, "CACHE_NAMES", ("renamed",))
    else:
        model = tiny_model(getattr(transformers, name))
    inputs = {"input_ids": models.token_ids(2, 5)}
    assert torch.equal(*generate_both(model, inputs, OPTIONS))
    (message,) = messages()
    assert message.startswith(f"{name} {ASKED}: ") and words in message


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


def test_calls_that_did_not_ask_or_got_what_they_asked_for_are_silent(
    by_default: bool, messages: Any
) -> None:
    model = models.build("llama")
    for options in (
        {},
        {"use_cache": False},
        own_cache(),
        *({"cache_implementation": name} for name in ("static", "paged", "hf_paged")),
        {**models.PAGED, compat.OUTPUT_CACHE: hf_paged.PagedCache(model.config)},
    ):
        generate(model, **options)
    assert not [message for message in messages() if ASKED in message]


def test_a_keyword_of_none_overrides_a_configuration_that_asks(messages: Any) -> None:
    model = models.build("llama")
    config = GenerationConfig(**OPTIONS, **models.PAGED, pad_token_id=0)
    options: dict[str, Any] = {"cache_implementation": None, "cache_config": None}
    model.generate(**models.prompt("llama"), **options, generation_config=config)
    assert hf_paged.last_route(model).road == "plain"
    model.generation_config = config
    model.generate(**models.prompt("llama"), **options)
    assert hf_paged.last_route(model).road == "plain" and messages() == []


def test_generate_without_its_decorators_is_paged_and_its_gradients_are_plain() -> None:
    """Callers take it out of `no_grad`; by the keyword "paged", transformers alone would run its
    own batching."""
    model, inner = models.build("llama"), LlamaForCausalLM.generate
    prompt, expected = models.prompt("llama"), generate(models.get("llama"))
    paged = {"cache_implementation": "paged"}
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
        assert torch.equal(inner(model, **prompt, **OPTIONS, **paged), expected)
        assert hf_paged.last_route(model).road != "plain"
        assert inspect.signature(inner) == inspect.signature(LlamaForCausalLM.generate)
    gradients, outputs = [], {"output_logits": True, "return_dict_in_generate": True}
    for options in ({}, paged):
        output = inner(model, **prompt, **OPTIONS, **outputs, **options)
        model.zero_grad()
        torch.stack(output.logits).pow(2).mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)
    assert "gradients are recorded" in hf_paged.last_route(model).reason


def test_a_cache_config_alone_warns(messages: Any) -> None:
    given, alone = {"num_blocks": 64}, "got a `cache_config` without a `cache_implementation`"
    for own, options in ((None, {"cache_config": given}), (given, {})):
        model = models.build("llama")
        model.generation_config.cache_config = own
        for warnings in (1, 0):
            generate(model, **options)
            assert [alone in message for message in messages()] == [True] * warnings


KEEPS = "keeps its own options"


def test_a_cache_config_beside_a_passed_cache_warns_if_it_differs(messages: Any) -> None:
    model = models.build("llama")
    name, given = compat.cache_name(model), {"storage": "virtual"}
    cases = [({}, {}, False), ({}, {"block_size": 8}, True)]
    if is_installed("virtual") and hasattr(os, "memfd_create"):
        cases += [(given, given, False)]  # its block size was raised for the cache
    for own, cache_config, differs in cases:
        cache = hf_paged.PagedCache(model.config, own)
        options = {"cache_config": cache_config, name: cache}
        generate(model, cache_implementation="paged", **options)
        assert sum(KEEPS in message for message in messages()) == differs


def test_a_cache_config_with_the_options_of_a_passed_cache_is_silent(
    by_default: bool, messages: Any
) -> None:
    """The last call passes the cache of the first one. The call between them has another salt."""
    model, ids = models.build("llama"), models.token_ids(1, 9)
    options: dict[str, Any] = {**OPTIONS, "return_dict_in_generate": True}
    if not by_default:
        options["cache_implementation"] = "paged"

    def turn(ids: torch.Tensor, salt: str, **cache: Any) -> Any:
        config = {"block_size": 8, "cache_salt": salt}
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, cache_config=config, **options, **cache)

    first = turn(ids, "a")
    turn(ids, "b")
    turn(first.sequences, "a", **{compat.cache_name(model): first[compat.OUTPUT_CACHE]})
    assert not [message for message in messages() if KEEPS in message]


def test_a_function_that_generates_may_go_on_with_its_cache() -> None:
    model, ids = models.get("llama"), models.token_ids(2, 9)
    name = compat.cache_name(model)

    def one_more(model: Any, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        ids = type(model)._sample(model, input_ids, **arguments)
        logits = model(ids[:, -1:], **{name: arguments[name]}).logits[:, -1]
        return torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)

    options = {"max_new_tokens": 5, "do_sample": False, "custom_generate": one_more}
    assert_paged_is_plain(model, {"input_ids": ids}, options)


def test_healed_tokens_of_a_prompt_with_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    def heal(self: Any, input_ids: torch.Tensor, tokenizer: Any) -> torch.Tensor:
        return torch.cat([input_ids[:, :-1], input_ids[:, -1:] + 1], dim=1)

    monkeypatch.setattr(GenerationMixin, "heal_tokens", heal)  # needs a tokenizer with merges
    model, ids = models.get("llama"), models.token_ids(2, 9).clamp_max(90)
    inputs = {"input_ids": ids, "position_ids": 3 + torch.arange(9).repeat(2, 1)}
    options = {"max_new_tokens": 5, "do_sample": False, "token_healing": True}
    options |= {"tokenizer": models.tokenizer()}
    assert assert_paged_is_plain(model, inputs, options).road == "engine"


@needs_shared_prefill
@pytest.mark.parametrize("rows", [1, 2])
def test_hidden_states_of_beams_with_an_axis_before_the_rows(rows: int) -> None:
    """Gemma3n's are `(altup_num_inputs, rows, length, width)`; here there are as many inputs as
    rows, or more."""
    model = tiny_model(transformers.Gemma3nForCausalLM, altup_num_inputs=2)
    options: dict[str, Any] = {"num_beams": 3, "do_sample": False, "max_new_tokens": 2}
    options |= dict.fromkeys(("output_hidden_states", "output_attentions"), True)
    options |= {"return_dict_in_generate": True, "min_new_tokens": 2}
    plain, ours = generate_both(model, models.prompt("llama", rows, 7), options)
    assert plain.hidden_states[0][0].shape[:2] == (2, 3 * rows)
    assert hf_paged.last_route(model).prefills_shared
    assert torch.equal(plain.sequences, ours.sequences)
    for name in ("hidden_states", "attentions"):
        for theirs, mine in zip(getattr(plain, name), getattr(ours, name), strict=True):
            torch.testing.assert_close(theirs, mine, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("route", ["engine", "hf_loop"])
def test_a_call_that_runs_when_hf_paged_is_uninstalled_ends_as_others(route: str) -> None:
    model, inputs, steps = models.build("llama"), models.prompt("llama"), 0
    options = {**OPTIONS, "max_new_tokens": 8}
    if route == "hf_loop":
        options["prefill_chunk_size"] = 64
    expected = model.generate(**inputs, **options)

    def uninstalls(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 3:
            hf_paged.uninstall()
        return scores

    try:
        own = {"logits_processor": LogitsProcessorList([uninstalls])}
        assert torch.equal(model.generate(**inputs, **options, **models.PAGED, **own), expected)
        assert steps == 8 and hf_paged.last_route(model).road == route
        assert "hf_paged" not in ALL_ATTENTION_FUNCTIONS.valid_keys()
    finally:
        hf_paged.install()
    assert_paged_is_plain(model, inputs, options)
