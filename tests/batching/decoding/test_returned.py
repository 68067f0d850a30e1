"""Code of a request that returns something wrong: errors name it, and end its request alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

from hf_paged import PagedEngine
from hf_paged.batching.decoding.returned import check_criterion_result, check_scores
from tests.support import models
from tests.support.checks import assert_paged_is_plain, assert_pool_empty
from tests.support.engine_helpers import MODES, Asked, lone_run, prompts

GREEDY = MODES["greedy"]


class InPlace(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores.mul_(2)


class Returns(StoppingCriteria):
    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return self.value


def double(input_ids: Any, scores: Any) -> Any:
    return scores.mul(2)


def fail(input_ids: Any, scores: Any) -> Any:
    raise AttributeError("on purpose")


def code_of(*functions: Any) -> dict[str, Any]:
    return {"logits_processor": list(functions)}


PROCESSOR = "the logits processor InPlace returned None"
CRITERION = "the stopping criterion Returns returned "
# code, what its error says, and the type of the error
BOTH: list[tuple[dict[str, Any], str, type[Exception]]] = [
    (code_of(InPlace()), rf"{PROCESSOR}: it must return .*, a tensor of shape \(", TypeError),
    (code_of(double, InPlace()), PROCESSOR, TypeError),
    (code_of(InPlace(), double), PROCESSOR, TypeError),
    (code_of(double, fail), "on purpose", AttributeError),  # an error of its own
]
WRONG = {
    "greedy": [
        *BOTH,
        *(
            ({"stopping_criteria": [Returns(value)]}, rf"{CRITERION}{told}.*\(1,\)", TypeError)
            for value, told in (
                (None, "None"),
                ("stop", "an object of type str"),
                (torch.ones(7), r"a tensor of shape \(7"),
            )
        ),
    ],
    "beams": [
        *BOTH,
        ({"stopping_criteria": [Returns(None)]}, f"{CRITERION}an invalid result", TypeError),
    ],
}


@pytest.mark.parametrize("mode", WRONG)
def test_code_that_returns_something_wrong_is_named(mode: str) -> None:
    model, options = models.get("llama"), {**MODES[mode], "max_new_tokens": 4}
    for code, message, error in WRONG[mode]:
        with PagedEngine(model) as engine:
            engine.add_request([5, 6, 7], options, **code, request_id="wrong")
            asked = Asked(engine, [[5, 6, 7]], options)
            results = asked.check()
        with pytest.raises(error, match=message):
            raise results["wrong"].error
        with pytest.raises(error, match=message):
            model.generate(torch.tensor([[5, 6, 7]]), **code, **options, **models.PAGED)


# ------------------------------------------------------------------- other shapes, unknown ids

UNKNOWN = (
    f"token id 200 was chosen, but only ids from 0 to {models.VOCAB_SIZE - 1} have an embedding:"
    " the model's head is wider than its embedding, a logits processor widened the scores, a"
    " stopping criterion wrote the id, or it is `pad_token_id`"
)


class Widens(LogitsProcessor):
    """From a length on, scores have more columns than the model has tokens, and a surplus column is
    the best."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < self.at:
            return scores
        wide = torch.full((len(scores), 256), float("-inf"))
        wide[:, : scores.shape[1]] = scores
        wide[:, 200] = scores.amax(dim=-1) + 1
        return wide


class Writes(StoppingCriteria):
    """Replaces the last token at a given length."""

    def __init__(self, at: int, token: int = 200) -> None:
        self.at, self.token = at, token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] == self.at:
            input_ids[:, -1] = self.token
        return torch.zeros(len(input_ids), dtype=torch.bool)


def repeat(count: int) -> Any:
    """Gives scores of another number of rows."""
    return lambda input_ids, scores: scores.repeat(count, 1)


# code of a request, and the token that it chooses, if any
OTHER: dict[str, tuple[dict[str, Any], int | None]] = {
    "widens": ({"logits_processor": [Widens(15)]}, 200),
    "writes": ({"stopping_criteria": [Writes(15)]}, 200),
    "below zero": ({"stopping_criteria": [Writes(15, -1)]}, -1),
    "beyond any vocabulary": ({"stopping_criteria": [Writes(15, 1 << 40)]}, 1 << 40),
    "no rows": ({"logits_processor": [repeat(0)]}, None),
    "too many rows": ({"logits_processor": [repeat(2)]}, None),
}


# code that widens scores or writes a token meets all modes, except that criteria of beams get a
# copy; each kind of code, a mode on each layout
@pytest.mark.parametrize(
    ("name", "what", "mode"),
    [
        *(("llama", "widens", mode) for mode in ("greedy", "sample", "samples", "beams")),
        *(("llama", "writes", mode) for mode in ("greedy", "sample", "samples")),
        ("llama", "below zero", "greedy"),
        ("llama", "beyond any vocabulary", "sample"),
        ("llama", "no rows", "beams"),
        ("llama", "too many rows", "samples"),
        ("diff_llama", "widens", "greedy"),
        ("diff_llama", "writes", "samples"),
        ("diff_llama", "beyond any vocabulary", "greedy"),
        ("diff_llama", "no rows", "samples"),
        ("diff_llama", "too many rows", "beams"),
    ],
)
def test_wrong_code_raises_as_plain_does_and_ends_its_request_alone(
    name: str, what: str, mode: str
) -> None:
    (code, token), texts = OTHER[what], prompts(9, 12, 7)
    model = models.get(name)
    kinds: Any = RuntimeError if token is None else IndexError
    if mode == "beams" and models.BEFORE_5_18:  # fails one line earlier, where scores get a shape
        kinds = (IndexError, RuntimeError)
    for paged in ({}, models.PAGED):
        with pytest.raises(kinds) as caught:
            lone_run(model, texts[1], MODES[mode], 1, **code, **paged)
    told = UNKNOWN.replace("200", str(token))
    assert token is None or str(caught.value) == told
    assert_pool_empty(model)
    with PagedEngine(model, {"block_size": 8}) as engine:
        asked = Asked(engine, texts, GREEDY)
        own = {"seed": 1, "return_logprobs": True}
        engine.add_request(texts[1], MODES[mode], request_id="bad", **code, **own)
        bad = asked.check()["bad"]
    assert bad.finish_reason == "error"
    if token is None:
        assert bad.token_ids == []
    else:
        assert isinstance(bad.error, IndexError) and str(bad.error) == told


def test_an_unknown_id_of_a_models_own_beam_search_ends_its_request_alone() -> None:
    """Before a forward reads it: on a GPU that would end all."""
    model, own = models.build("llama"), prompts(9)

    class Chooses(type(model)):  # type: ignore[misc]
        def _get_top_k_continuations(self, **given: Any) -> tuple[torch.Tensor, ...]:
            scores, sequences, indices = super()._get_top_k_continuations(**given)
            sequences = sequences.clone()
            sequences[:, :, given["cur_len"]] = 200
            return scores, sequences, indices

    model.__class__ = Chooses
    with PagedEngine(model, {"block_size": 8}) as engine:
        engine.add_request(own[0], MODES["beams"], request_id="beams")
        results = Asked(engine, own, GREEDY).check()
    assert str(results["beams"].error) == UNKNOWN


def test_an_unknown_id_that_ends_its_row_is_no_error() -> None:
    """An EOS token that only a processor knows; no forward gets it."""
    model, prompt = models.get("llama"), prompts(9)[0]
    options = {**GREEDY, "eos_token_id": 200, "pad_token_id": 0}
    code = {"logits_processor": [Widens(14)]}
    expected = lone_run(model, prompt, options, **code)
    assert expected[0][-1] == 200 and len(expected[0]) == 6
    with PagedEngine(model, {"block_size": 8}) as engine:
        (result,) = engine.generate([prompt], options, return_logprobs=True, **code)
    assert result.error is None and result.finish_reason == "eos"
    assert result.token_ids == expected[0]
    assert result.logprobs[-1][0] == float("-inf"), "the model cannot say it"


def test_a_criterion_that_writes_tokens() -> None:
    options = {"max_new_tokens": 9, "stopping_criteria": [Writes(16, 99)]}
    assert_paged_is_plain(models.get("llama"), models.prompt("llama"), options)


def ends_in_column(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
    return input_ids[:, -1:] % 4 == 0


@pytest.mark.parametrize("lengths", [(9,), (5, 9, 3)], ids=str)
def test_a_criterion_that_returns_a_column(lengths: tuple[int, ...]) -> None:
    """In transformers' loop, it broadcasts with the results of other criteria."""
    model, inputs = models.get("llama"), models.padded_prompt("llama", lengths)
    options = {**GREEDY, "max_new_tokens": 30, "stopping_criteria": [ends_in_column]}
    expected = model.generate(**inputs, **options)
    assert expected.shape[1] < inputs["input_ids"].shape[1] + 30, "no criterion ends it"
    assert_paged_is_plain(model, inputs, options)
    with_others = {**options, "stopping_criteria": [ends_in_column, Returns(False)]}
    with_eos = {**options, "eos_token_id": models.VOCAB_SIZE - 1}
    with pytest.raises(RuntimeError):
        model.generate(**inputs, **with_eos)
    if len(lengths) == 1:
        assert_paged_is_plain(model, inputs, with_others)
    for refused in [with_eos, with_others][: len(lengths)]:
        with pytest.raises(TypeError, match="a tensor of shape"):
            model.generate(**inputs, **refused, **models.PAGED)


def test_a_padding_token_without_an_embedding_is_named() -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama", (5, 3))
    eos = model.generate(**inputs, **GREEDY)[0, 6].item()
    options = {**GREEDY, "eos_token_id": eos, "pad_token_id": 200, **code_of(double)}
    for paged in ({}, models.PAGED):
        with pytest.raises(IndexError) as caught:
            model.generate(**inputs, **options, **paged)
    assert str(caught.value) == UNKNOWN


def test_a_criterion_is_not_blamed_for_the_error_of_an_earlier_kernel() -> None:
    """An asynchronous error arises where the host reads the result."""
    for result in (True, torch.tensor(True), torch.ones(1), torch.ones(4, dtype=torch.bool)):
        check_criterion_result(Returns(result), result, 4, RuntimeError("device-side assert"))
    for result in (None, torch.ones(3)):
        with pytest.raises(TypeError, match=CRITERION):
            check_criterion_result(Returns(result), result, 4, RuntimeError("sizes"))


def test_a_processor_that_comes_twice() -> None:
    def drop(input_ids: Any, scores: Any) -> None:
        pass

    logits, ids = torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.long)
    for members, culprits in (
        ([double, InPlace(), double], "InPlace"),
        ([drop, double, InPlace(), double], "function or InPlace"),
    ):
        processors = LogitsProcessorList(members)
        with pytest.raises(AttributeError) as caught:
            processors(ids, logits)
        with pytest.raises(TypeError, match=f"the logits processor {culprits} returned None"):
            check_scores(processors, logits, logits, caught.value)
