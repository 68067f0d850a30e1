"""Arguments that `PagedEngine` accepts and refuses: misplaced options, padded prompts,
`generate`-only options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig, GenerationConfig
from transformers.generation import configuration_utils

from hf_paged import PagedEngine
from tests.support import models
from tests.support.engine_helpers import (
    MODES,
    Recorder,
    assert_drained,
    assert_lone,
    assert_same_as_lone,
    engine_of,
    lone_run,
    prompts,
    run_all,
)

GREEDY = MODES["greedy"]


# ---------------------------------------------------------------------------- arguments of a call


def test_arguments_beside_the_config() -> None:
    arguments = dict.fromkeys(("streamer", "adapter"))
    arguments |= {"seed": 3, "return_logprobs": True, "priority": 1, "request_id": "one"}
    with engine_of() as engine:
        for method in (engine.generate, engine.stream, engine.astream):
            misplaced = r"no argument `max_new_tokens`.*`generation_config`"
            with pytest.raises(TypeError, match=misplaced):
                method([[5, 6, 7]], max_new_tokens=5)
        (result,) = engine.generate([[5, 6, 7]], GREEDY, **arguments)
        assert result.request_id == "one" and result.error is None
        assert engine.generate([]) == []
        with pytest.raises(ValueError, match="list of prompts"):
            engine.generate("abc")
        for name, value in {"request_id": "a", "streamer": Recorder()}.items():
            told = f"`{name}` is for one request, and there are 2 prompts"
            for method in (engine.generate, engine.stream):
                with pytest.raises(ValueError, match=told):
                    method([[5, 6], [7, 8]], GREEDY, **{name: value})
            assert not engine.has_unfinished
            assert engine.generate([[5, 6]], GREEDY, **{name: value})[0].error is None


def test_values_of_a_wrong_kind_are_refused() -> None:
    whole = [("priority", each) for each in ("high", 1.0, float("nan"), None, True)]
    lists = [("logits_processor", max), ("stopping_criteria", 5)]
    with engine_of() as engine:
        for arguments, message in ((whole, "whole number"), (lists, "pass a list")):
            for name, value in arguments:
                with pytest.raises(ValueError, match=f"`{name}` is .*{message}"):
                    engine.add_request([5, 6], GREEDY, **{name: value})
        assert not engine.has_unfinished


def test_a_grammar_that_is_too_long_is_refused() -> None:
    long = "a" * 70_000
    with engine_of() as engine:
        for name, value in {"regex": long, "grammar": long, "schema": {"enum": [long]}}.items():
            with pytest.raises(ValueError, match=r"has 70\d\d\d characters: .* at most 65536"):
                engine.add_request([5, 6, 7], **{name: value})
        assert not engine.has_unfinished


def test_ids_of_refused_requests() -> None:
    """Each has one of its own, or the one that it was given; no ids are read into text."""
    with engine_of() as engine:
        taken = engine.add_request([5, 6], GREEDY, request_id="prompt-1")
        results = engine.generate([[5, 6], "123", [5, -1]], GREEDY)
        assert len({taken, *(result.request_id for result in results)}) == 4
        assert [result.error is None for result in results] == [True, False, False]
        assert [result.prompt_ids for result in results] == [[5, 6], [], [5, -1]]
        (result,) = engine.generate([[]], GREEDY, request_id="mine")
        assert result.request_id == "mine" and "empty" in str(result.error)
        (result,) = engine.generate([[5, 6]], GREEDY, request_id=["no name"])
        assert isinstance(result.request_id, str) and "hashable" in str(result.error)


# ----------------------------------------------------------------------------- prompts as a batch


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, -1], ids=["left", "right"])
def test_a_padded_batch_with_its_mask(step: int) -> None:
    texts = prompts(4, 11, 7)
    padded = models.left_padded([text[::step] for text in texts])
    ids, mask = padded["input_ids"], padded["attention_mask"]
    if step < 0:
        ids, mask = ids.flip(1), mask.flip(1)
    with engine_of() as engine:
        streamed = engine.stream(ids, GREEDY, attention_mask=mask.bool().tolist())
        outputs = [output.result for output in streamed]
        for results in (engine.generate(ids, GREEDY, attention_mask=mask), outputs):
            assert_lone(engine, texts, filter(None, results))
        as_they_are = engine.generate(ids, GREEDY)
        assert [result.prompt_ids for result in as_they_are] == ids.tolist()
        assert_drained(engine)


def test_a_mask_is_for_a_tensor_and_a_row_that_is_all_padding_is_an_empty_prompt() -> None:
    with engine_of() as engine:
        with pytest.raises(ValueError, match="as a tensor of shape"):
            engine.generate([[5, 6], [7, 8]], GREEDY, attention_mask=torch.ones(2, 2))
        mask = torch.tensor([[1, 1], [0, 0]])
        good, empty = engine.generate(torch.full((2, 2), 5), GREEDY, attention_mask=mask)
        assert good.error is None and "empty" in str(empty.error)


# ----------------------------------------------------------------- what the engine has no use for

NO_OUTPUTS = "`{}` is True: an engine has no such outputs.*`return_logprobs=True`"
NO_CACHE = "`{}` is .*: an engine's `PagedConfig` sets the memory and the forwards of all requests"


@pytest.mark.parametrize("mode", ["sample", "beams"])
def test_what_an_engine_decides_is_refused_in_a_requests_config(mode: str) -> None:
    with engine_of() as engine:
        for name, value, message in [
            ("output_scores", True, NO_OUTPUTS),
            ("output_logits", True, NO_OUTPUTS),
            ("return_dict_in_generate", True, NO_OUTPUTS),
            ("use_cache", False, NO_CACHE),
            ("cache_implementation", "static", NO_CACHE),
            ("cache_config", {"block_size": 8}, NO_CACHE),
            ("prefill_chunk_size", 8, NO_CACHE),
            ("compile_config", CompileConfig(), NO_CACHE),
        ]:
            config = {**MODES[mode], name: value}
            for given in (config, GenerationConfig(**config)):
                with pytest.raises(ValueError, match=message.format(name)):
                    engine.add_request([5, 6], given)
        assert not engine.has_unfinished
        for cache in (None, "paged", "dynamic"):  # what is so anyway is taken
            config = {**MODES[mode], "cache_implementation": cache, "output_scores": False}
            assert engine.generate([[5, 6]], {**config, "use_cache": True})[0].error is None


@pytest.mark.parametrize("mode", ["greedy", "samples", "beams"])
def test_what_the_models_own_config_says_for_generate_is_no_obstacle(mode: str) -> None:
    model, prompt = models.build("llama"), prompts(9)[0]
    expected = lone_run(model, prompt, MODES[mode], 1)
    names = ("scores", "logits", "attentions")
    own = {"return_dict_in_generate": True, **{f"output_{name}": True for name in names}}
    model.generation_config.update(**own, use_cache=False, cache_implementation="static")
    before = model.generation_config.to_dict()
    copied = GenerationConfig(**{**model.generation_config.to_diff_dict(), **MODES[mode]})
    with PagedEngine(model, {"block_size": 8}) as engine:
        for name, config in (("a", MODES[mode]), ("b", copied)):
            engine.add_request(prompt, config, request_id=name, seed=1)
        decodings = [entry.decoding for entry in engine._core.requests.values()]
        for name, result in run_all(engine).items():
            assert_same_as_lone(expected, result, MODES[mode], name)
        kept = [decoding.scores or decoding.raw_logits for decoding in decodings]
        assert not any(kept), "kept without a reader"
    assert model.generation_config.to_dict() == before


OF_THE_MODEL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "samples": ({"do_sample": True}, {"num_return_sequences": 3, "top_p": 0.9}),
    "beams": (
        {"num_beams": 4, "do_sample": False},
        {"num_return_sequences": 3, "length_penalty": 2.0},
    ),
    "fewer": ({"do_sample": True, "num_return_sequences": 3}, {"num_return_sequences": 2}),
}


@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_options_are_validated_with_the_models_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, options = OF_THE_MODEL[name]
    model, prompt = models.build("llama"), prompts(9)[0]
    model.generation_config.update(**own)
    options = {**options, "max_new_tokens": 6}
    expected = lone_run(model, prompt, options, 3)
    warnings: list[str] = []
    monkeypatch.setattr(configuration_utils.logger, "warning_once", warnings.append)
    with PagedEngine(model, {"block_size": 8}) as engine:
        for given in (options, {**GenerationConfig().to_dict(), **options}):
            (result,) = engine.generate([prompt], given, seed=3)
            assert_same_as_lone(expected, result, options, name)
    assert not warnings


def test_options_that_the_models_own_make_invalid_are_refused_as_by_generate() -> None:
    model = models.build("llama")
    model.generation_config.update(do_sample=True, num_return_sequences=3)
    with PagedEngine(model) as engine:
        for options in ({"do_sample": False}, {"num_beams": 2}):
            with pytest.raises(ValueError) as plain:
                model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, **options)
            with pytest.raises(ValueError) as ours:
                engine.add_request([5, 6], {**options, "max_new_tokens": 2})
            assert str(ours.value) == str(plain.value)


def test_none_in_a_dict_is_none_as_a_keyword_of_generate() -> None:
    """... and not the value of the model's config."""
    model: Any = models.build("llama")
    ids = torch.tensor([[5, 6, 7]])
    long: list[int] = model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()
    model.generation_config.update(eos_token_id=long[5], top_k=5, max_length=6)
    none = {"max_new_tokens": 8, "eos_token_id": None}
    options: list[dict[str, Any]] = [
        none,
        {"max_new_tokens": 8, "max_length": None},
        {**none, "do_sample": True, "top_k": None, "temperature": 5.0},
        {**none, "max_new_tokens": None},
    ]
    with PagedEngine(model) as engine:
        for each in options:
            torch.manual_seed(3)
            expected = model.generate(ids, **each)[0, 3:].tolist()
            positions = {"input_ids": ids, "position_ids": torch.arange(3)[None]}
            for result in engine.generate([ids[0], positions], each, seed=[3, 3]):
                assert result.error is None and result.token_ids == expected, each
        for name in ("num_beams", "num_return_sequences", "max_length"):  # plain raises a TypeError
            (result,) = engine.generate([[5, 6]], {name: None})
            assert isinstance(result.error, ValueError) and f"`{name}` is None" in str(result.error)


def test_a_model_with_a_loop_condition_of_its_own_is_refused() -> None:
    model = models.build("llama")
    model._has_unfinished_sequences = lambda *args, **kwargs: False
    told = (
        "LlamaForCausalLM overrides `_has_unfinished_sequences`, which an engine does not"
        ' call: call `model.generate(..., cache_implementation="paged")` instead'
    )
    with PagedEngine(model) as engine, pytest.raises(ValueError) as caught:
        engine.add_request([5, 6], GREEDY)
    assert str(caught.value) == told
