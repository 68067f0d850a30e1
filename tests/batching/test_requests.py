"""Options and user code of a single request: the answer is plain's, or an error of that request
alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import hf_paged
from hf_paged import PagedEngine
from tests.support import models
from tests.support.engine_helpers import (
    MODES,
    assert_drained,
    assert_same_as_lone,
    build_diff_llama,
    lone_run,
    prompts,
    run_all,
)

GREEDY = MODES["greedy"]
SOME_EOS = list(range(20, 50))
UNKNOWN = (
    f"token id 200 was chosen, but only ids from 0 to {models.VOCAB_SIZE - 1} have an embedding:"
    " the model's head is wider than its embedding, a logits processor widened the scores, or a"
    " stopping criterion wrote the id"
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


# -- chosen ids that have no embedding -----------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "diff_llama"])
@pytest.mark.parametrize(
    ("how", "mode"),
    [
        *(("logits_processor", mode) for mode in ("greedy", "sample", "samples", "beams")),
        # criteria of beams get a copy
        *(("stopping_criteria", mode) for mode in ("greedy", "sample", "samples")),
    ],
)
def test_an_unknown_id_ends_the_request_that_chose_it_alone(how: str, mode: str, name: str) -> None:
    model = models.get("llama") if name == "llama" else build_diff_llama()
    texts = prompts(9, 12, 7)
    code = (
        {"logits_processor": [Widens(15)]}
        if how == "logits_processor"
        else {"stopping_criteria": [Writes(15)]}
    )
    with PagedEngine(model, {"block_size": 8}) as engine:
        options: list[dict[str, Any]] = [{}, {**code, "return_logprobs": True}, {}]
        for i, (text, option) in enumerate(zip(texts, options)):
            engine.add_request(
                text, MODES["greedy" if i != 1 else mode], request_id=str(i), seed=i, **option
            )
        results: dict[str, Any] = {}
        while engine.has_unfinished:
            results |= {
                output.request_id: output.result
                for output in engine.step()
                if output.result is not None
            }
            engine.check_integrity()
        assert_drained(engine)
    for i in (0, 2):
        assert_same_as_lone(lone_run(model, texts[i], GREEDY), results[str(i)], GREEDY, str(i))
    error = results["1"].error
    assert isinstance(error, IndexError) and str(error) == UNKNOWN
    assert results["1"].finish_reason == "error"


def test_an_unknown_id_of_a_models_own_beam_search_ends_its_request_alone() -> None:
    """Before a forward reads it: on a GPU that would end all."""
    model, own = models.build("llama"), prompts(9)[0]

    class Chooses(type(model)):  # type: ignore[misc]
        def _get_top_k_continuations(self, **given: Any) -> tuple[torch.Tensor, ...]:
            scores, sequences, indices = super()._get_top_k_continuations(**given)
            sequences = sequences.clone()
            sequences[:, :, given["cur_len"]] = 200
            return scores, sequences, indices

    model.__class__ = Chooses
    with PagedEngine(model, {"block_size": 8}) as engine:
        engine.add_request(own, MODES["beams"], request_id="beams")
        engine.add_request(own, GREEDY, request_id="greedy")
        results = run_all(engine)
        assert_drained(engine)
    assert str(results["beams"].error) == UNKNOWN
    assert_same_as_lone(lone_run(model, own, GREEDY), results["greedy"], GREEDY, "greedy")


@pytest.mark.parametrize("token", [-1, 1 << 40])
def test_ids_below_zero_and_beyond_any_vocabulary(token: int) -> None:
    with PagedEngine(models.get("llama"), {"block_size": 8}) as engine:
        result, other = engine.generate(
            [[5, 6], [7, 8]], GREEDY, stopping_criteria=[Writes(5, token)]
        )
        assert str(result.error) == str(other.error) == UNKNOWN.replace("200", str(token))
        assert_drained(engine)


@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_generate_raises_as_plain_does_and_the_pool_is_whole(mode: str) -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    at = inputs["input_ids"].shape[1] + 3
    # older versions fail one line earlier, where scores of beams get their shape
    errors = (IndexError, RuntimeError) if mode == "beams" and models.BEFORE_5_18 else IndexError
    for options in ({}, models.PAGED):
        with pytest.raises(errors) as caught:
            model.generate(**inputs, **MODES[mode], logits_processor=[Widens(at)], **options)
    assert str(caught.value) == UNKNOWN
    hf_paged.check_integrity(model)
    assert hf_paged.memory_stats(model).used_blocks == 0
    assert torch.equal(
        model.generate(**inputs, **GREEDY, **models.PAGED), model.generate(**inputs, **GREEDY)
    )


@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("mode", ["greedy", "sample", "beams"])
def test_scores_of_another_number_of_rows(mode: str, copies: int) -> None:
    def repeat(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.repeat(copies, 1)

    model, (text, other) = models.get("llama"), prompts(9, 12)
    for paged in ({}, models.PAGED):
        with pytest.raises(RuntimeError):
            model.generate(torch.tensor([text]), **MODES[mode], logits_processor=[repeat], **paged)
    with PagedEngine(model, {"block_size": 8}) as engine:
        engine.add_request(text, MODES[mode], request_id="bad", logits_processor=[repeat])
        engine.add_request(other, GREEDY, request_id="good")
        results: dict[str, Any] = {}
        while engine.has_unfinished:
            results |= {
                output.request_id: output.result
                for output in engine.step()
                if output.result is not None
            }
        assert_drained(engine)
    assert results["bad"].error is not None and results["bad"].token_ids == []
    assert_same_as_lone(lone_run(model, other, GREEDY), results["good"], GREEDY, "good")


def test_an_unknown_id_that_ends_its_row_is_no_error() -> None:
    """An EOS token that only a processor knows; no forward gets it."""
    model, prompt = models.get("llama"), prompts(9)[0]
    options = {**GREEDY, "eos_token_id": 200, "pad_token_id": 0}
    expected = lone_run(model, prompt, options, logits_processor=[Widens(14)])
    assert expected[0][-1] == 200 and len(expected[0]) == 6
    with PagedEngine(model, {"block_size": 8}) as engine:
        result = engine.generate(
            [prompt], options, logits_processor=[Widens(14)], return_logprobs=True
        )[0]
    assert (
        result.error is None and result.token_ids == expected[0] and result.finish_reason == "eos"
    )
    assert result.logprobs is not None and result.logprobs[-1][0] == float("-inf"), (
        "the model cannot say it"
    )


# -- fidelity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_ids_of_32_bits_come_back_as_plain_returns_them(mode: str) -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama")
    inputs["input_ids"] = inputs["input_ids"].int()
    outputs = []
    for options in ({}, models.PAGED):
        torch.manual_seed(3)
        outputs.append(model.generate(**inputs, **MODES[mode], **options))
    assert hf_paged.last_route(model).road == "engine"
    assert outputs[0].dtype == outputs[1].dtype == torch.int64 and torch.equal(*outputs)


@pytest.mark.parametrize("num_blocks", [None, 14])
@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_and_logits_of_rows_that_have_ended_are_plains(
    do_sample: bool, num_blocks: int | None
) -> None:
    """Also with few blocks, so that rows wait for one another."""
    model, inputs = models.get("llama"), models.padded_prompt("llama", (13, 4, 9, 6))
    options: dict[str, Any] = {
        "eos_token_id": SOME_EOS,
        "max_new_tokens": 20,
        "do_sample": do_sample,
    }
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    paged = {
        "cache_implementation": "paged",
        "cache_config": {"block_size": 8, "num_blocks": num_blocks},
    }
    outputs = []
    for kind in ({}, paged):
        torch.manual_seed(3)
        outputs.append(model.generate(**inputs, **options, **kind))
    plain, ours = outputs
    assert hf_paged.last_route(model).road == "engine"
    assert num_blocks is None or hf_paged.memory_stats(model).peak_blocks <= num_blocks
    assert torch.equal(plain.sequences, ours.sequences)
    ends = [int((row[13:] != models.PAD).sum()) for row in plain.sequences]
    assert len(set(ends)) > 1, "rows must end at different times"
    for theirs, mine in zip(
        (*plain.scores, *plain.logits), (*ours.scores, *ours.logits), strict=True
    ):
        torch.testing.assert_close(theirs, mine, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("where", ["class", "instance"])
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_a_models_own_loop_condition_is_asked(mode: str, where: str) -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    left = 0

    def few(self: Any, *args: Any, **kwargs: Any) -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    if where == "class":
        model.__class__ = type("Own", (type(model),), {"_has_unfinished_sequences": few})
    else:
        model._has_unfinished_sequences = few.__get__(model)
    outputs = []
    for options in ({}, models.PAGED):
        left = 5
        outputs.append(model.generate(**inputs, **MODES[mode], **options))
    plain, ours = outputs
    assert torch.equal(plain, ours)
    if mode == "greedy":
        assert ours.shape[1] == inputs["input_ids"].shape[1] + 5
    route = hf_paged.last_route(model)
    assert route.road == "hf_loop" and "it overrides `_has_unfinished_sequences`" in route.reason
    with PagedEngine(model) as engine, pytest.raises(ValueError) as caught:
        engine.add_request([5, 6], GREEDY)
    assert (
        str(caught.value)
        == f"{type(model).__name__} overrides `_has_unfinished_sequences`, which an engine does not"
        ' call: call `model.generate(..., cache_implementation="paged")` instead'
    )
