"""Equivalent forms of arguments are accepted, and mappings that are no prompts refused; bad values
are in `test_mistakes.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from hf_paged import PagedEngine
from tests.support import models
from tests.support.checks import assert_paged_is_plain
from tests.support.engine_helpers import (
    MODES,
    assert_drained,
    assert_lone,
    assert_same_as_lone,
    engine_of,
    lone_run,
    prompts,
    results_of,
    run_all,
    steps,
)

GREEDY = MODES["greedy"]
BEAMS = MODES["beams"]


@pytest.mark.parametrize("seed", [np.int64(4), np.uint64(4), 4, -1])
def test_seeds_are_whole_numbers_of_any_kind(seed: Any) -> None:
    (prompt,), options = prompts(9), MODES["sample"]
    with engine_of() as engine:
        result = engine.generate([prompt], options, seed=seed)[0]
    expected = lone_run(engine.model, prompt, options, int(seed))
    assert_same_as_lone(expected, result, options, str(seed))


def test_priorities_as_far_apart_as_they_may_be() -> None:
    with engine_of(max_num_seqs=1) as engine:
        for priority in (2**31 - 1, 2**31 - 2, -(2**31) + 2, -(2**31) + 1):
            options = {"max_new_tokens": 1}
            engine.add_request([5, 6], options, request_id=str(priority), priority=priority)
        ended = [int(output.request_id) for output in steps(engine) if output.finished]
    assert ended == sorted(ended)


@pytest.mark.parametrize("form", ["lists", "pt", "np", "padded lists"])
def test_what_a_tokenizer_returns_is_its_ids_without_padding(form: str) -> None:
    tokenizer, texts = models.tokenizer(), ["the cat sat on the mat", "a", "one two"]
    options: dict[str, Any] = {} if form == "lists" else {"padding": True}
    if form in ("pt", "np"):
        options["return_tensors"] = form
    encoding = tokenizer(texts, return_token_type_ids=False, **options)
    assert isinstance(encoding, BatchEncoding) and "attention_mask" in encoding
    expected = [tokenizer(text)["input_ids"] for text in texts]
    options.pop("padding", None)
    one = tokenizer(texts[0], return_token_type_ids=False, **options)
    with engine_of() as engine:
        results = engine.generate(encoding, GREEDY)
        streamed = [*results_of(engine.stream(dict(encoding), GREEDY)).values()]
        streamed.sort(key=lambda result: expected.index(result.prompt_ids))
        for found in (results, streamed):
            assert [result.prompt_ids for result in found] == expected
            assert_lone(engine, expected, found)
        engine.add_request(one, GREEDY, request_id="a")
        (alone,) = run_all(engine).values()
        several = engine.generate([one, one], GREEDY)
        assert [result.prompt_ids for result in (alone, *several)] == [expected[0]] * 3
        assert_drained(engine)


LENGTHS = (
    "the lengths of the attention mask differ from those of `input_ids`: pass both as the tokenizer"
    " returned them"
)
MAPPINGS: dict[str, dict[str, Any]] = {
    "the mapping of prompts has inputs besides `input_ids` and `attention_mask`, and it is unknown"
    " which of their rows belong to which prompt: pass a list of such mappings, one per prompt,"
    " with `input_ids` of shape (1, length)": {
        "input_ids": [[5, 6]],
        "pixel_values": torch.zeros(1),
        "labels": None,
    },
    "the mapping of prompts has no `input_ids`, only `attention_mask`: tokenize the texts": {
        "attention_mask": [[1, 1]]
    },
    "the attention mask hides tokens inside row 0: it may only hide padding at the ends": {
        "input_ids": [[5, 6, 7]],
        "attention_mask": [[1, 0, 1]],
    },
    LENGTHS: {"input_ids": [[5, 6, 7], [5]], "attention_mask": [[1, 1, 1]]},
    f"{LENGTHS}\n": {"input_ids": [[5, 6, 7]], "attention_mask": [1, 1, 1]},
    "[[5, 6, 7]] is one prompt: pass a list of prompts, or call `add_request`": {
        "input_ids": [5, 6, 7],
        "attention_mask": [1, 1, 1],
    },
    "`input_ids` of the mapping of prompts is 5: pass lists or a tensor": {"input_ids": 5},
}


def test_mappings_that_are_no_prompts() -> None:
    with PagedEngine(models.get("llama")) as engine:
        for message, inputs in MAPPINGS.items():
            for method in (engine.generate, engine.stream, engine.astream):
                with pytest.raises(ValueError) as caught:
                    method(inputs, GREEDY)
                assert str(caught.value) == message.strip()
        with pytest.raises(ValueError):
            engine.generate({"input_ids": [[5, 6]]}, GREEDY, attention_mask=[[1, 1]])
        assert not engine.has_unfinished and not engine.block_map()
        bools = torch.ones(2, 3).bool()
        for batch in (bools, {"input_ids": bools}, [[True], [np.True_]]):
            results = engine.generate(batch, GREEDY)
            assert len(results) == 2
            assert all("pass token ids" in str(result.error) for result in results)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_beams_without_finite_scores_end_in_an_error(value: float) -> None:
    """Plain `generate` returns the beams that it has; so does a paged call."""
    one, other = prompts(9, 7)

    def spoil(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, value) if input_ids.shape[1] >= 12 else scores

    with engine_of() as engine:
        engine.add_request(one, BEAMS, request_id="bad", logits_processor=[spoil])
        engine.add_request(other, BEAMS, request_id="good")
        results = run_all(engine)
        assert_drained(engine)
    error = results["bad"].error
    assert isinstance(error, RuntimeError) and results["bad"].finish_reason == "error"
    message = "no beam could end: the scores contain nan, or too few tokens have a finite score"
    assert str(error) == message
    assert_lone(engine, [other], [results["good"]], BEAMS)
    plain, paged = (
        lone_run(engine.model, one, {**BEAMS, **options}, logits_processor=[spoil])
        for options in ({}, models.PAGED)
    )
    assert plain == paged


@pytest.mark.slow
def test_outputs_that_wait_are_bounded_and_no_result_is_lost() -> None:
    """Requests of `add_request` continue in the steps that `generate` runs."""
    length, count = 70, 250  # together more outputs than the engine keeps
    with engine_of(block_size=128, prefix_caching=False) as engine:
        options = {"max_new_tokens": length, "do_sample": False}
        names = [engine.add_request([5, 6, 7 + i % 100], options) for i in range(count)]
        other = engine.generate([[5, 6]], {**options, "max_new_tokens": length + 9})[0]
        assert len(other.token_ids) == length + 9
        outputs = engine.step()
        assert not engine.has_unfinished
    assert len(outputs) == 16_384 + count < length * count
    results = results_of(outputs)
    assert list(results) == names
    told: dict[str, list[int]] = {name: [] for name in names}
    for output in outputs:
        told[output.request_id].append(output.new_tokens[0])
    for name, result in results.items():
        assert len(result.token_ids) == length
        assert result.token_ids[-len(told[name]) :] == told[name]


@pytest.mark.parametrize("use_cache", [0, None, []])
def test_use_cache_that_is_false_in_another_way(use_cache: Any) -> None:
    """transformers then builds a cache and passes all tokens in every step: the tokens are that
    loop's."""
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    options = {"do_sample": False, "max_new_tokens": 12, "use_cache": use_cache}
    plain = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, **models.PAGED), plain)


@pytest.mark.parametrize("config", [{}, {"speculation": "ngram"}], ids=str)
@pytest.mark.parametrize(
    "limit", [{"max_new_tokens": 8.0}, {"max_new_tokens": 8.5}, {"max_length": 21.0}], ids=str
)
def test_limits_that_are_floats(limit: dict[str, float], config: dict[str, Any]) -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    for more in ({}, {"prefill_chunk_size": 64}):  # the second runs in transformers' own loop
        options = {"do_sample": False, **limit, **more}
        assert_paged_is_plain(model, inputs, options, {**models.PAGED, "cache_config": config})
