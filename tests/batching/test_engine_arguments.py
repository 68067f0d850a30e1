"""Arguments that `PagedEngine` accepts and refuses: misplaced options, padded prompts,
`generate`-only options."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import CompileConfig, GenerationConfig
from transformers.generation import configuration_utils

from hf_paged import PagedEngine
from tests.batching.test_engine import Recorder, engine_of
from tests.support import models
from tests.support.engine_helpers import (
    MODES,
    assert_drained,
    assert_same_as_lone,
    lone_run,
    prompts,
    run_all,
)

GREEDY = MODES["greedy"]


# ---------------------------------------------------------------------------- arguments of a call


@pytest.mark.parametrize("method", ["generate", "stream", "astream"])
def test_generation_options_beside_the_config_are_a_type_error_at_once(method: str) -> None:
    with engine_of() as engine:
        with pytest.raises(TypeError, match=r"no argument `max_new_tokens`.*`generation_config`"):
            getattr(engine, method)([[5, 6, 7]], max_new_tokens=5)
        assert not engine.has_unfinished
        options = {
            "seed": 3,
            "return_logprobs": True,
            "priority": 1,
            "logits_processor": [],
            "stopping_criteria": [],
        }
        (result,) = engine.generate(
            [[5, 6, 7]], GREEDY, request_id="one", streamer=None, adapter=None, **options
        )
        assert result.request_id == "one" and result.error is None


@pytest.mark.parametrize("argument", [{"request_id": "a"}, {"streamer": Recorder()}])
def test_what_is_one_requests_cannot_be_passed_for_several(argument: dict[str, Any]) -> None:
    (name,) = argument
    with engine_of() as engine:
        for method in (engine.generate, engine.stream):
            with pytest.raises(
                ValueError, match=f"`{name}` is for one request, and there are 2 prompts"
            ):
                method([[5, 6], [7, 8]], GREEDY, **argument)
        assert not engine.has_unfinished
        assert engine.generate([[5, 6]], GREEDY, **argument)[0].error is None


@pytest.mark.parametrize("priority", ["high", 1.0, float("nan"), None, True])
def test_priorities_are_whole_numbers(priority: Any) -> None:
    with engine_of() as engine:
        with pytest.raises(ValueError, match=r"`priority` is .*whole number"):
            engine.add_request([5, 6], GREEDY, priority=priority)
        assert not engine.has_unfinished


@pytest.mark.parametrize("name", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("value", [lambda ids, scores: scores, 5], ids=["function", "number"])
def test_processors_and_criteria_come_in_lists(name: str, value: Any) -> None:
    with engine_of() as engine:
        with pytest.raises(ValueError, match=f"`{name}` is .*pass a list"):
            engine.add_request([5, 6], GREEDY, **{name: value})
        assert not engine.has_unfinished


def test_refused_prompts_have_ids_of_their_own_and_no_ids_read_into_text() -> None:
    with engine_of() as engine:
        taken = engine.add_request([5, 6], GREEDY, request_id="prompt-1")
        results = engine.generate([[5, 6], "123", [5, -1]], GREEDY)
        names = [taken, *(result.request_id for result in results)]
        assert len(set(names)) == 4
        assert [result.error is None for result in results] == [True, False, False]
        assert [result.prompt_ids for result in results] == [[5, 6], [], [5, -1]]


def test_a_refused_request_keeps_the_id_that_it_was_given() -> None:
    with engine_of() as engine:
        (result,) = engine.generate([[]], GREEDY, request_id="mine")
        assert result.request_id == "mine" and "empty" in str(result.error)
        (result,) = engine.generate([[5, 6]], GREEDY, request_id=["no name"])
        assert isinstance(result.request_id, str) and "hashable" in str(result.error)


# ----------------------------------------------------------------------------- prompts as a batch


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_with_its_mask(side: str) -> None:
    texts = prompts(4, 11, 7)
    ids = torch.full((3, 11), models.PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(texts):
        places = slice(11 - len(prompt), None) if side == "left" else slice(len(prompt))
        ids[row, places], mask[row, places] = torch.tensor(prompt), 1

    async def read(engine: PagedEngine) -> list[Any]:
        outputs = [output async for output in engine.astream(ids, GREEDY, attention_mask=mask)]
        return [output.result for output in outputs if output.result is not None]

    with engine_of() as engine:
        results = engine.generate(ids, GREEDY, attention_mask=mask)
        streamed = [
            o.result
            for o in engine.stream(ids, GREEDY, attention_mask=mask.bool().tolist())
            if o.finished
        ]
        awaited = asyncio.run(read(engine))
        as_they_are = engine.generate(ids, GREEDY)
        assert_drained(engine)
    for prompt, row, *found, padded in zip(
        texts, ids.tolist(), results, streamed, awaited, as_they_are
    ):
        for result in found:
            assert result.prompt_ids == prompt
            assert_same_as_lone(lone_run(models.get("llama"), prompt, GREEDY), result, GREEDY, side)
        assert padded.prompt_ids == row


@pytest.mark.parametrize(
    ("batch", "mask", "message"),
    [
        (torch.full((2, 3), 5), torch.ones(2, 4), "differ from those of `input_ids`"),
        (
            torch.full((2, 3), 5),
            torch.tensor([[1, 1, 1], [1, 0, 1]]),
            "hides tokens inside row 1",
        ),
        ([[5, 6], [7, 8]], torch.ones(2, 2), "as a tensor of shape"),
    ],
)
def test_masks_that_do_not_fit(batch: Any, mask: Any, message: str) -> None:
    with engine_of() as engine, pytest.raises(ValueError, match=message):
        engine.generate(batch, GREEDY, attention_mask=mask)


def test_a_row_that_is_all_padding_is_an_empty_prompt() -> None:
    with engine_of() as engine:
        ids, mask = torch.full((2, 3), 5), torch.tensor([[1, 1, 1], [0, 0, 0]])
        good, empty = engine.generate(ids, GREEDY, attention_mask=mask)
    assert good.error is None and "empty" in str(empty.error)


# ----------------------------------------------------------------- what the engine has no use for


@pytest.mark.parametrize("mode", ["sample", "beams"])
@pytest.mark.parametrize("name", ["output_scores", "output_logits", "return_dict_in_generate"])
def test_outputs_of_generate_are_refused_in_a_requests_config(name: str, mode: str) -> None:
    with engine_of() as engine:
        for config in (
            {**MODES[mode], name: True},
            GenerationConfig(**MODES[mode], **{name: True}),
        ):
            with pytest.raises(
                ValueError,
                match=f"`{name}` is True: an engine has no such outputs.*`return_logprobs=True`",
            ):
                engine.add_request([5, 6], config)
        assert engine.generate([[5, 6]], {**MODES[mode], name: False})[0].error is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_cache", False),
        ("cache_implementation", "static"),
        ("cache_config", {"block_size": 8}),
        ("prefill_chunk_size", 8),
        ("compile_config", CompileConfig()),
    ],
)
def test_caches_and_forwards_are_the_engines_to_decide(name: str, value: Any) -> None:
    with engine_of() as engine:
        with pytest.raises(ValueError, match=f"`{name}` is .*`PagedConfig` says"):
            engine.add_request([5, 6], {**GREEDY, name: value})
        assert not engine.has_unfinished


@pytest.mark.parametrize("cache", [None, "paged", "dynamic"])
def test_configs_that_say_what_is_so_anyway_are_taken(cache: str | None) -> None:
    with engine_of() as engine:
        assert (
            engine.generate([[5, 6]], {**GREEDY, "cache_implementation": cache, "use_cache": True})[
                0
            ].error
            is None
        )


@pytest.mark.parametrize("mode", ["greedy", "samples", "beams"])
def test_what_the_models_own_config_says_for_generate_is_no_obstacle(mode: str) -> None:
    model, prompt = models.build("llama"), prompts(9)[0]
    expected = lone_run(model, prompt, MODES[mode], 1)
    own = {
        "output_scores": True,
        "output_logits": True,
        "output_attentions": True,
        "return_dict_in_generate": True,
    }
    model.generation_config.update(**own, use_cache=False, cache_implementation="static")
    with PagedEngine(model, {"block_size": 8}) as engine:
        engine.add_request(prompt, MODES[mode], request_id="a", seed=1)
        copied = GenerationConfig(**{**model.generation_config.to_diff_dict(), **MODES[mode]})
        engine.add_request(prompt, copied, request_id="b", seed=1)
        decodings = [entry.decoding for entry in engine._core.requests.values()]
        for name, result in run_all(engine).items():
            assert_same_as_lone(expected, result, MODES[mode], name)
        assert not any(decoding.scores or decoding.raw_logits for decoding in decodings), (
            "kept without a reader"
        )
    assert all(getattr(model.generation_config, name) for name in own)


OF_THE_MODEL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "samples": ({"do_sample": True}, {"num_return_sequences": 3, "top_p": 0.9}),
    "beams": (
        {"num_beams": 4, "do_sample": False},
        {"num_return_sequences": 3, "length_penalty": 2.0},
    ),
    "fewer": ({"do_sample": True, "num_return_sequences": 3}, {"num_return_sequences": 2}),
}


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_options_are_validated_with_the_models_own(
    name: str, is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, options = OF_THE_MODEL[name]
    model, prompt = models.build("llama"), prompts(9)[0]
    model.generation_config.update(**own)
    options = {**options, "max_new_tokens": 6}
    expected = lone_run(model, prompt, options, 3)
    given = {**GenerationConfig().to_dict(), **options} if is_saved else options
    warnings: list[str] = []
    monkeypatch.setattr(configuration_utils.logger, "warning_once", warnings.append)
    with PagedEngine(model, {"block_size": 8}) as engine:
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
    options: list[dict[str, Any]] = [
        {"max_new_tokens": 8, "eos_token_id": None},
        {"max_new_tokens": 8, "max_length": None},
        {
            "max_new_tokens": 8,
            "eos_token_id": None,
            "do_sample": True,
            "top_k": None,
            "temperature": 5.0,
        },
        {"max_new_tokens": None, "eos_token_id": None},
    ]
    with PagedEngine(model) as engine:
        for each in options:
            torch.manual_seed(3)
            expected = model.generate(ids, **each)[0, 3:].tolist()
            for prompt in (
                ids[0].tolist(),
                {"input_ids": ids, "position_ids": torch.arange(3)[None]},
            ):
                (result,) = engine.generate([prompt], each, seed=3)
                assert result.error is None and result.sequences[0].token_ids == expected, each
        for name in ("num_beams", "num_return_sequences", "max_length"):  # plain raises a TypeError
            (result,) = engine.generate([[5, 6]], {name: None})
            assert isinstance(result.error, ValueError) and f"`{name}` is None" in str(result.error)


@pytest.mark.parametrize(
    "options",
    [{"regex": "a" * 70_000}, {"grammar": "a" * 70_000}, {"schema": {"enum": ["a" * 70_000]}}],
    ids=lambda options: next(iter(options)),
)
def test_a_grammar_that_is_too_long_is_refused(options: dict[str, Any]) -> None:
    with PagedEngine(models.get("llama")) as engine:
        with pytest.raises(ValueError, match=r"has 70\d\d\d characters: .* at most 65536"):
            engine.add_request([5, 6, 7], **options)
        assert not engine.has_unfinished
