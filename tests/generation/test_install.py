"""`generate` never runs on another cache in silence when a paged one was asked for; the two names
that ask for it."""

from __future__ import annotations

import inspect
import logging
import os
import runpy
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
    LogitsProcessorList,
    TextStreamer,
)
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_paged
from hf_paged import compat
from hf_paged.rooms import is_installed
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.checks import assert_paged_is_plain, assert_pool_empty, generate_both
from tests.support.engine_helpers import Recorder
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


@pytest.mark.parametrize("asked", [{}, {"cache_implementation": "paged"}], ids=str)
def test_a_cache_config_beside_a_passed_cache_warns_if_it_differs(
    asked: dict[str, Any], messages: Any
) -> None:
    model = models.build("llama")
    name, given = compat.cache_name(model), {"storage": "virtual"}
    cases = [({}, {}, False), ({}, {"block_size": 8}, True)]
    if is_installed("virtual") and hasattr(os, "memfd_create"):
        cases += [(given, given, False)]  # its block size was raised for the cache
    for own, cache_config, differs in cases:
        cache = hf_paged.PagedCache(model.config, own)
        options = {"cache_config": cache_config, name: cache}
        generate(model, **asked, **options)
        assert [KEEPS in message for message in messages()] == [True] * differs


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


class OwnLoop(LlamaForCausalLM):
    """Goes on with the cache after transformers' loop."""

    def _sample(self, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        return one_more(super(), self, input_ids, **arguments)


class OwnGenerate(LlamaForCausalLM):
    """As `OwnLoop`, and passes its own generation config, not a copy."""

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        own: Any = self
        config = own.generation_config
        own._prepare_special_tokens(config, device=input_ids.device)
        config.max_length = input_ids.shape[1] + 5
        arguments: Any = {"use_cache": True}
        own._prepare_cache_for_generation(config, arguments, None, len(input_ids), 64)
        arguments["stopping_criteria"] = own._get_stopping_criteria(config, [])
        arguments |= {"logits_processor": LogitsProcessorList(), "generation_config": config}
        with torch.no_grad():
            return one_more(super(), own, input_ids, **arguments)


def one_more(loops: Any, model: Any, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    ids = loops._sample(input_ids, **arguments)
    name = compat.cache_name(model)
    logits = model(ids[:, -1:], **{name: arguments[name]}).logits[:, -1]
    return torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)


def custom_loop(model: Any, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return one_more(model, model, input_ids, **arguments)


@pytest.mark.parametrize("how", ["keyword", "position", "OwnLoop", "OwnGenerate"])
def test_code_that_calls_the_loop_may_go_on_with_the_cache(how: str) -> None:
    model, ids = models.build("llama"), models.token_ids(2, 9)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    arguments: tuple[Any, ...] = (ids,)
    if how == "keyword":
        options["custom_generate"] = custom_loop
    elif how == "position":
        arguments = (ids, *[None] * 9, custom_loop)
    else:
        model.__class__ = OwnLoop if how == "OwnLoop" else OwnGenerate
    expected = model.generate(*arguments, **options)
    model.generation_config.cache_implementation = "paged"
    for _ in range(2):
        assert torch.equal(model.generate(*arguments, **options), expected)
        assert hf_paged.last_route(model).road == "hf_loop"


class OwnForwards(LlamaForCausalLM):
    """Generates one token, without transformers' loop."""

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        own, config, arguments = self, self.generation_config, dict[str, Any](use_cache=True)
        own._prepare_cache_for_generation(config, arguments, None, len(input_ids), 64)
        with torch.no_grad():
            return own(input_ids, **arguments).logits[:, -1].argmax(-1)


def test_a_loop_of_the_models_own_keeps_no_blocks_after_its_end() -> None:
    model, ids = models.build("llama"), models.token_ids(2, 9)
    expected = model.generate(ids, max_new_tokens=1, do_sample=False)[:, -1]
    model.__class__ = OwnForwards
    model.generation_config.cache_implementation = "paged"
    assert torch.equal(model.generate(ids), expected)
    assert_pool_empty(model)


def test_code_in_a_folder_that_generates_is_paged(tmp_path: Path, messages: Any) -> None:
    """Like that of repositories on the Hub (`custom_generate="owner/name"`)."""
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(
        "def generate(model, *args, **options): return model.generate(*args, **options)"
    )
    model = models.build("llama")
    options = {**OPTIONS, "custom_generate": str(tmp_path), "trust_remote_code": True}
    assert assert_paged_is_plain(model, models.prompt("llama"), options).road == "engine"
    assert messages() == []


@pytest.mark.parametrize("road", ["engine", "hf_loop", "plain", "a passed cache"])
def test_the_streamer_of_a_row_ends_with_the_row(road: str) -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": models.PAD}
    end = options["eos_token_id"] = int(model.generate(**inputs, **options)[1, -9])
    expected = model.generate(**inputs, **options)
    if road == "hf_loop":
        options["prefill_chunk_size"] = 64
    elif road == "plain":
        options["use_cache"] = False
    elif road == "a passed cache":
        options[compat.cache_name(model)] = hf_paged.PagedCache(model.config)
    streamers = [Recorder() for _ in expected]
    output = model.generate(**inputs, **options, **models.PAGED, streamer=streamers)
    assert torch.equal(output, expected)
    for streamer, row, mask in zip(streamers, expected, inputs["attention_mask"]):
        prompt, *tokens = [torch.tensor(value).flatten().tolist() for value in streamer.values]
        new_tokens = row[len(mask) :].tolist()
        if end in new_tokens:
            del new_tokens[new_tokens.index(end) + 1 :]
        assert prompt == row[: len(mask)][mask.bool()].tolist() and streamer.ended == 1
        assert [token for part in tokens for token in part] == new_tokens


def test_a_text_streamer_that_takes_rows_is_served() -> None:
    class Rows(Recorder, TextStreamer):
        """A subclass with a `put` of its own."""

    model, inputs = models.get("llama"), models.padded_prompt("llama")
    plain, paged = Rows(), Rows()
    expected = model.generate(**inputs, **OPTIONS, streamer=plain)
    output = model.generate(**inputs, **OPTIONS, **models.PAGED, streamer=paged)
    assert torch.equal(output, expected) and paged.values == plain.values


def test_streamers_of_rows_of_an_encoder_decoder_get_the_decoders_prompts() -> None:
    """These are as long as the encoder's, with the token at which T5's decoder starts."""
    model, ids = models.get("t5"), models.token_ids(2, 7)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, 1:]}
    streamers = [Recorder(), Recorder()]
    output = model.generate(**inputs, **OPTIONS, **models.PAGED, streamer=streamers)
    prompts = [streamer.values[0][0] for streamer in streamers]
    assert prompts == output[:, : -OPTIONS["max_new_tokens"]].tolist()


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prefill_chunk_size": 64}], ids=str)
def test_compilation_that_does_not_happen_is_told_as_by_plain(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, told = models.build("llama"), []
    monitored = logging.getLogger("transformers")
    monitored.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING, logger="transformers"):
            for paged in ({}, models.PAGED):
                transformers.utils.logging.warning_once.cache_clear()
                caplog.clear()
                generate(model, compile_config=transformers.CompileConfig(), **options, **paged)
                told.append([r.getMessage() for r in caplog.records if "compil" in r.getMessage()])
    finally:
        monitored.removeHandler(caplog.handler)
    assert told[0] == told[1]


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
