"""Bad values raise an error that names them and what is allowed, before any allocation; equivalent
forms are accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, GenerationConfig, TextIteratorStreamer, TextStreamer

import hf_paged
from hf_paged import PagedEngine
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
BEAMS = MODES["beams"]
STREAMER = TextStreamer(models.tokenizer())

# -- arguments of an engine's request, and the message --------------------------------------------

SEEDS = "it must be None or a whole number from -9223372036854775808 to 18446744073709551615"
PRIORITIES = "it must be a whole number from -2147483647 to 2147483647 (lower runs earlier)"
REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "seed too large": ({"seed": 2**70}, f"`seed` is 1180591620717411303424: {SEEDS}"),
    "seed too small": ({"seed": -(2**63) - 1}, f"`seed` is -9223372036854775809: {SEEDS}"),
    "seed a fraction": ({"seed": 1.5}, f"`seed` is 1.5: {SEEDS}"),
    "seed a bool": ({"seed": True}, f"`seed` is True: {SEEDS}"),
    "request id": (
        {"request_id": ["a"]},
        "`request_id` is ['a']: it must be hashable, a string for instance",
    ),
    "adapter": (
        {"adapter": ["a"]},
        "`adapter` is ['a']: it must be None or an adapter's name or folder",
    ),
    "priority": (
        {"priority": 10**400},
        f"`priority` is 100000000000000000...0000000000000000000: {PRIORITIES}",
    ),
    "priority without digits": ({"priority": 10**5000}, f"`priority` is {{}}: {PRIORITIES}"),
    "streamer": ({"streamer": 5}, "`streamer` is 5: it must have the methods `put` and `end`"),
    "streamer of one row": (
        {"streamer": STREAMER, "generation_config": MODES["samples"]},
        (
            "`streamer` is of type TextStreamer, which takes one row, and there are 3: ask for one"
            " sequence per request"
        ),
    ),
    "ids of floats": (
        {"input_ids": torch.tensor([5.0, 6.0])},
        (
            "the prompt is a torch.float32 tensor of shape (2,): pass whole numbers of shape"
            " (length,) or (1, length), one request for each prompt"
        ),
    ),
    "list of floats": (
        {"input_ids": [5.0, 6.0]},
        "the prompt is [5.0, 6.0]: pass token ids, one list of whole numbers for each request",
    ),
    "ids of bools": (
        {"input_ids": torch.tensor([True, True])},
        "the prompt is [True, True]: pass token ids, one list of whole numbers for each request",
    ),
    "no rows": (
        {"input_ids": torch.zeros(0, 20, dtype=torch.long)},
        (
            "the prompt is a torch.int64 tensor of shape (0, 20): pass whole numbers of shape"
            " (length,) or (1, length), one request for each prompt"
        ),
    ),
    "beams a bool": (
        {"generation_config": {"num_beams": True}},
        "`num_beams` is True: it must be a whole number of at least 1",
    ),
    "beams a float": (
        {"generation_config": {"num_beams": 2.0}},
        "`num_beams` is 2.0: it must be a whole number of at least 1",
    ),
    "beams in a config": (
        {"generation_config": GenerationConfig(num_beams=2.0)},
        "`num_beams` is 2.0: it must be a whole number of at least 1",
    ),
    "length as text": (
        {"generation_config": {"max_new_tokens": "3"}},
        "`max_new_tokens` is '3': it must be a whole number (tokens)",
    ),
    "option of another library": (
        {"generation_config": {"max_tokens": 3}},
        "`GenerationConfig` has no option `max_tokens`: did you mean `max_new_tokens`?",
    ),
    "processor": (
        {"logits_processor": [5]},
        "`logits_processor` holds 5 at index 0: it must be callable",
    ),
    "criterion": (
        {"stopping_criteria": [5]},
        "`stopping_criteria` holds 5 at index 0: it must be callable",
    ),
}


@pytest.mark.parametrize("what", REQUESTS)
def test_what_add_request_refuses(what: str) -> None:
    arguments, message = REQUESTS[what]
    with PagedEngine(models.get("llama"), {"block_size": 8}) as engine:
        with pytest.raises(ValueError) as caught:
            engine.add_request(**{"input_ids": [5, 6], "generation_config": GREEDY, **arguments})
        assert str(caught.value) in (
            message,
            message.format("a value of type int"),
            message.format("<int instance>"),
        )
        assert not engine.has_unfinished and not engine.block_map(), "memory was taken for it"
        assert engine.generate([[5, 6]], GREEDY)[0].error is None
        assert_drained(engine)


@pytest.mark.parametrize("seed", [np.int64(4), np.uint64(4), 4, -1])
def test_seeds_are_whole_numbers_of_any_kind(seed: Any) -> None:
    model, prompt, options = models.get("llama"), prompts(9)[0], MODES["sample"]
    with PagedEngine(model, {"block_size": 8}) as engine:
        result = engine.generate([prompt], options, seed=seed)[0]
    assert_same_as_lone(lone_run(model, prompt, options, int(seed)), result, options, str(seed))


def test_priorities_as_far_apart_as_they_may_be() -> None:
    with PagedEngine(models.get("llama"), {"block_size": 8, "max_num_seqs": 1}) as engine:
        for priority in (2**31 - 1, 2**31 - 2, -(2**31) + 2, -(2**31) + 1):
            engine.add_request(
                [5, 6], {"max_new_tokens": 1}, request_id=str(priority), priority=priority
            )
        ended = []
        while engine.has_unfinished:
            ended += [int(output.request_id) for output in engine.step() if output.finished]
    assert ended == sorted(ended)


def test_options_beside_the_config_are_hinted_at() -> None:
    with PagedEngine(models.get("llama")) as engine, pytest.raises(TypeError) as caught:
        engine.generate([[5, 6]], max_tokens=3)
    assert (
        str(caught.value)
        == "there is no argument `max_tokens`: did you mean `max_new_tokens`? Generation options go"
        ' into `generation_config`, such as {"max_new_tokens": 64}'
    )


# -- arguments of `generate` ---------------------------------------------------------------------

IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "ids of floats": (
        {"inputs": IDS.float()},
        "`input_ids` are torch.float32: token ids must be torch.int64 or torch.int32",
    ),
    "ids of bools": (
        {"inputs": IDS.bool()},
        "`input_ids` are torch.bool: token ids must be torch.int64 or torch.int32",
    ),
    "no rows": (
        {"inputs": torch.zeros(0, 20, dtype=torch.long)},
        "`input_ids` have the shape (0, 20): it must be (rows, length), with at least one row",
    ),
    "streamer": ({"streamer": 5}, "`streamer` is 5: it must have the methods `put` and `end`"),
    "streamers": (
        {"streamer": [STREAMER, 5]},
        "`streamer` is 5: it must have the methods `put` and `end`",
    ),
    "streamer of one sample": (
        {
            "inputs": IDS[:1],
            "num_return_sequences": 3,
            "streamer": TextIteratorStreamer(models.tokenizer()),
        },
        (
            "`streamer` is of type TextIteratorStreamer, which takes one row, and there are 3: pass"
            " a list of streamers, one per row"
        ),
    ),
    "beams a float": (
        {"num_beams": 2.0},
        "`num_beams` is 2.0: it must be a whole number of at least 1",
    ),
    "beams in a config": (
        {"generation_config": GenerationConfig(num_beams=2.0)},
        "`num_beams` is 2.0: it must be a whole number of at least 1",
    ),
    "length as text": (
        {"max_new_tokens": "3"},
        "`max_new_tokens` is '3': it must be a whole number (tokens)",
    ),
    "processor": (
        {"logits_processor": [5]},
        "`logits_processor` holds 5 at index 0: it must be callable",
    ),
    "criterion": (
        {"stopping_criteria": [5]},
        "`stopping_criteria` holds 5 at index 0: it must be callable",
    ),
    "option of another library": (
        {"max_tokens": 3},
        (
            "The following `model_kwargs` are not used by the model: ['max_tokens'] (note: typos in"
            " the generate arguments will also show up in this list)"
        ),
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_generate_refuses(what: str) -> None:
    arguments, message = CALLS[what]
    model = models.build("llama")
    with pytest.raises(ValueError) as caught:
        model.generate(
            **{"inputs": IDS, "max_new_tokens": 3, "do_sample": True, **arguments}, **models.PAGED
        )
    assert str(caught.value) == message
    assert hf_paged.memory_stats(model) == hf_paged.MemoryStats(), "memory was taken for it"
    options: dict[str, Any] = {"max_new_tokens": 3, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(
        model.generate(IDS, **options, **models.PAGED), model.generate(IDS, **options)
    )


# -- mappings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["encoding", "dict"])
@pytest.mark.parametrize("form", ["lists", "pt", "np", "padded lists"])
def test_what_a_tokenizer_returns_is_its_ids_without_padding(form: str, kind: str) -> None:
    model, tokenizer, texts = (
        models.get("llama"),
        models.tokenizer(),
        ["the cat sat on the mat", "a", "one two"],
    )
    options: dict[str, Any] = {"padding": True}
    if form != "padded lists":
        options = {} if form == "lists" else {"padding": True, "return_tensors": form}
    encoding = tokenizer(texts, return_token_type_ids=False, **options)
    inputs: Any = encoding if kind == "encoding" else dict(encoding)
    assert isinstance(encoding, BatchEncoding) and "attention_mask" in inputs
    expected = [tokenizer(text)["input_ids"] for text in texts]
    with PagedEngine(model, {"block_size": 8}) as engine:
        results = engine.generate(inputs, GREEDY)
        streamed = [
            output.result for output in engine.stream(inputs, GREEDY) if output.result is not None
        ]
        assert_drained(engine)
    for found in (results, sorted(streamed, key=lambda result: expected.index(result.prompt_ids))):
        assert [result.prompt_ids for result in found] == expected
        for prompt, result in zip(expected, found):
            assert_same_as_lone(lone_run(model, prompt, GREEDY), result, GREEDY, form)


@pytest.mark.parametrize("form", [None, "pt", "np"])
def test_a_mapping_of_one_text_is_a_prompt(form: str | None) -> None:
    tokenizer = models.tokenizer()
    one = tokenizer("the cat", return_token_type_ids=False, return_tensors=form)
    with PagedEngine(models.get("llama"), {"block_size": 8}) as engine:
        engine.add_request(one, GREEDY, request_id="a")
        (result,) = [output.result for output in engine.step() if output.result is not None] or [
            None
        ]
        while result is None:
            result = next(
                (output.result for output in engine.step() if output.result is not None), None
            )
        assert result.prompt_ids == tokenizer("the cat")["input_ids"]
        assert [r.prompt_ids for r in engine.generate([one, one], GREEDY)] == [
            result.prompt_ids
        ] * 2


MAPPINGS: dict[str, tuple[Any, str]] = {
    "other inputs": (
        {"input_ids": [[5, 6]], "pixel_values": torch.zeros(1), "labels": None},
        (
            "the mapping of prompts has inputs besides `input_ids` and `attention_mask`, and it is"
            " unknown which of their rows belong to which prompt: pass a list of such mappings, one"
            " per prompt, with `input_ids` of shape (1, length)"
        ),
    ),
    "no ids": (
        {"attention_mask": [[1, 1]]},
        "the mapping of prompts has no `input_ids`, only `attention_mask`: tokenize the texts",
    ),
    "a hole": (
        {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 0, 1]]},
        "the attention mask hides tokens inside row 0: it may only hide padding at the ends",
    ),
    "another mask": (
        {"input_ids": [[5, 6, 7], [5]], "attention_mask": [[1, 1, 1]]},
        (
            "the lengths of the attention mask differ from those of `input_ids`: pass both as the"
            " tokenizer returned them"
        ),
    ),
    "a flat mask": (
        {"input_ids": [[5, 6, 7]], "attention_mask": [1, 1, 1]},
        (
            "the lengths of the attention mask differ from those of `input_ids`: pass both as the"
            " tokenizer returned them"
        ),
    ),
    "one text": (
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]},
        "[[5, 6, 7]] is one prompt: pass a list of prompts, or call `add_request`",
    ),
    "a number": (
        {"input_ids": 5},
        "`input_ids` of the mapping of prompts is 5: pass lists or a tensor",
    ),
}


@pytest.mark.parametrize("what", MAPPINGS)
def test_mappings_that_are_no_prompts(what: str) -> None:
    inputs, message = MAPPINGS[what]
    with PagedEngine(models.get("llama")) as engine:
        for method in (engine.generate, engine.stream, engine.astream):
            with pytest.raises(ValueError) as caught:
                method(inputs, GREEDY)
            assert str(caught.value) == message
        with pytest.raises(ValueError):
            engine.generate({"input_ids": [[5, 6]]}, GREEDY, attention_mask=[[1, 1]])
        assert not engine.has_unfinished and not engine.block_map()


def test_bools_are_no_ids() -> None:
    with PagedEngine(models.get("llama"), {"block_size": 8}) as engine:
        for batch in (
            torch.ones(2, 3).bool(),
            {"input_ids": torch.ones(2, 3).bool()},
            [[True], [np.True_]],
        ):
            results = engine.generate(batch, GREEDY)
            assert (
                all("pass token ids" in str(result.error) for result in results)
                and len(results) == 2
            )


# -- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_beams_without_finite_scores_end_in_an_error(value: float) -> None:
    """Plain `generate` returns the beams that it has; so does a paged call."""
    model, (one, other) = models.build("llama"), prompts(9, 7)

    def spoil(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, value) if input_ids.shape[1] >= 12 else scores

    with PagedEngine(model, {"block_size": 8}) as engine:
        engine.add_request(one, BEAMS, request_id="bad", logits_processor=[spoil])
        engine.add_request(other, BEAMS, request_id="good")
        results = run_all(engine)
        assert_drained(engine)
    error, reason = results["bad"].error, results["bad"].finish_reason
    assert isinstance(error, RuntimeError) and reason == "error"
    assert (
        str(error)
        == "no beam could end: the scores contain nan, or too few tokens have a finite score"
    )
    assert_same_as_lone(lone_run(model, other, BEAMS), results["good"], BEAMS, "good")
    plain = lone_run(model, one, BEAMS, logits_processor=[spoil])
    assert lone_run(model, one, {**BEAMS, **models.PAGED}, logits_processor=[spoil]) == plain


@pytest.mark.slow
def test_outputs_that_wait_are_bounded_and_no_result_is_lost() -> None:
    """Requests of `add_request` continue in the steps that `generate` runs."""
    length, count = 70, 250  # together more outputs than the engine keeps
    with PagedEngine(models.get("llama"), {"block_size": 128, "prefix_caching": False}) as engine:
        options = {"max_new_tokens": length, "do_sample": False}
        names = [engine.add_request([5, 6, 7 + i % 100], options) for i in range(count)]
        other = engine.generate([[5, 6]], {**options, "max_new_tokens": length + 9})[0]
        assert len(other.token_ids) == length + 9
        outputs = engine.step()
        assert not engine.has_unfinished
        assert len(outputs) == 16_384 + count < length * count
        results = {
            output.request_id: output.result for output in outputs if output.result is not None
        }
        assert list(results) == names
        told: dict[str, list[int]] = {name: [] for name in names}
        for output in outputs:
            told[output.request_id].append(output.new_tokens[0])
        for name, result in results.items():
            assert (
                len(result.token_ids) == length
                and result.token_ids[-len(told[name]) :] == told[name]
            )


@pytest.mark.parametrize("use_cache", [0, None, []])
def test_use_cache_that_is_false_in_another_way(use_cache: Any) -> None:
    """transformers then builds a cache and passes all tokens in every step: the tokens are that
    loop's."""
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    options = {"do_sample": False, "max_new_tokens": 12, "use_cache": use_cache}
    assert torch.equal(
        model.generate(**inputs, **options), model.generate(**inputs, **options, **models.PAGED)
    )
