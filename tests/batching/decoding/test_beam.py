"""The step-wise beam search against `model.generate`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria

from hf_paged import compat
from hf_paged.batching.arguments import RequestOptions
from hf_paged.batching.decoding.base import LogitRows
from hf_paged.batching.decoding.beam import BeamDecoding
from hf_paged.batching.decoding.prepare import request_decoding
from hf_paged.batching.decoding.sampler import sample_step
from tests.batching.decoding.driver import drive, generate_by_decoding
from tests.support import models

ONE_EOS, SOME_EOS, MANY_EOS = [70], list(range(4, 128, 17)), list(range(4, 128, 4))
NEW = 12


def both(inputs: dict[str, Any], model_name: str = "llama", **options: Any) -> tuple[Any, Any, Any]:
    """Output of `generate`, the output of a decoding, and that decoding."""
    model = models.get(model_name)
    ours = {name: options.pop(name) for name in ("check", "record_logprobs") if name in options}
    options.setdefault("max_new_tokens", NEW)
    torch.manual_seed(7)
    plain = model.generate(**inputs, **options)
    torch.manual_seed(7)
    with generate_by_decoding(model, **ours) as made:
        by_decoding = model.generate(**inputs, **options)
    return plain, by_decoding, made[0]


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True], ids=["search", "sample"])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
def test_results_are_those_of_generate(
    early_stopping: Any, length_penalty: float, do_sample: bool
) -> None:
    left_early = 0

    def count(decoding: Any, advance: Any) -> None:
        nonlocal left_early
        left_early += len(advance.finished) if decoding.open_rows else 0

    for eos, num_return_sequences in itertools.product((None, ONE_EOS, SOME_EOS, MANY_EOS), (1, 3)):
        plain, ours, decoding = both(
            models.padded_prompt("llama", (13, 4, 9, 6)),
            eos_token_id=eos,
            num_beams=3,
            num_return_sequences=num_return_sequences,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
            do_sample=do_sample,
            check=count,
        )
        assert torch.equal(plain, ours)
        assert len(decoding.finish_reasons) == len(decoding.lengths) == len(ours)
        assert ours.shape[1] == max(decoding.lengths)
        for row, length, reason in zip(ours.tolist(), decoding.lengths, decoding.finish_reasons):
            assert reason == ("eos" if eos and row[length - 1] in eos else "length")
    if early_stopping is True:
        assert left_early  # otherwise nothing above shows whether prompts may leave


def test_a_settled_prompt_leaves_and_its_result_stays() -> None:
    inputs, kept = models.padded_prompt("llama", (13, 4, 9, 6)), {}
    options = dict(num_beams=3, num_return_sequences=3, eos_token_id=MANY_EOS, max_new_tokens=25)
    needed = {}
    for keep_all in (True, False):  # as a dict output needs them
        rows: list[int] = []
        for early_stopping in (False, True):
            _, ours, decoding = both(
                inputs,
                return_dict_in_generate=keep_all,
                early_stopping=early_stopping,
                check=lambda decoding, advance, rows=rows: rows.append(len(advance.rows)),
                **options,
            )
            kept[keep_all, early_stopping] = (
                ours.sequences if keep_all else ours,
                decoding.select_returned(decoding.beam_scores).tolist(),
            )
        needed[keep_all] = sum(rows)
    assert needed[False] < needed[True]
    for early_stopping in (False, True):
        (theirs, their_scores), (ours, our_scores) = (
            kept[keep, early_stopping] for keep in (True, False)
        )
        assert torch.equal(theirs, ours)
        torch.testing.assert_close(their_scores, our_scores)


@pytest.mark.parametrize("do_sample", [False, True], ids=["search", "sample"])
def test_dicts(do_sample: bool) -> None:
    plain, ours, decoding = both(
        models.padded_prompt("llama"),
        eos_token_id=SOME_EOS,
        num_beams=4,
        num_return_sequences=2,
        do_sample=do_sample,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert type(ours) is type(plain) and ours.keys() | {compat.OUTPUT_CACHE} == plain.keys() | {
        compat.OUTPUT_CACHE
    }
    assert torch.equal(plain.sequences, ours.sequences)
    assert (
        torch.equal(plain.beam_indices, ours.beam_indices)
        and plain.beam_indices.dtype == ours.beam_indices.dtype
    )
    torch.testing.assert_close(plain.sequences_scores, ours.sequences_scores, atol=1e-4, rtol=1e-4)
    for theirs, mine in ((plain.scores, ours.scores), (plain.logits, ours.logits)):
        for a, b in zip(theirs, mine, strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    assert decoding.select_returned(decoding.beam_scores).tolist() == ours.sequences_scores.tolist()


def test_a_dict_without_scores() -> None:
    plain, ours, _ = both(models.prompt("llama"), num_beams=2, return_dict_in_generate=True)
    assert torch.equal(plain.sequences, ours.sequences)
    assert (
        ours.sequences_scores is plain.sequences_scores is None
        and ours.scores is ours.logits is None
    )


PROCESSED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat": {"encoder_no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[9], [30, 31]], "suppress_tokens": [5, 6]},
    "min_new_tokens": {"min_new_tokens": 6},
    "forced_eos": {"forced_eos_token_id": 21},
    "renormalize": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "warpers": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "prefix_allowed": {
        "prefix_allowed_tokens_fn": lambda prompt, ids: list(range(4 + prompt, 128, 3))
    },
    "guidance": {"guidance_scale": 1.4},
}


@pytest.mark.parametrize("name", PROCESSED)
@pytest.mark.parametrize("early_stopping", [False, True])
def test_processors(name: str, early_stopping: bool) -> None:
    plain, ours, _ = both(
        models.padded_prompt("llama"),
        eos_token_id=SOME_EOS,
        num_beams=3,
        num_return_sequences=2,
        early_stopping=early_stopping,
        **PROCESSED[name],
    )
    assert torch.equal(plain, ours)


class StopAtTotal(StoppingCriteria):
    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.shapes.append(input_ids.shape)
        return (input_ids[:, -2:].sum(dim=-1) + len(self.shapes)) % 5 == 0


class BiasFromBatch(LogitsProcessor):
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.clone())
        scores[:, int(input_ids[:, -1].sum()) % 128] += 2.0
        return scores


@pytest.mark.parametrize("eos", [None, SOME_EOS], ids=["no_eos", "eos"])
def test_processors_and_criteria_of_the_callers_own(eos: list[int] | None) -> None:
    model, outputs = models.get("llama"), []
    runs = [(BiasFromBatch(), StopAtTotal()) for _ in range(2)]
    for (processor, criterion), by_decoding in zip(runs, (False, True)):
        options: dict[str, Any] = dict(
            logits_processor=LogitsProcessorList([processor]), stopping_criteria=[criterion]
        )
        options |= dict(
            num_beams=3,
            num_return_sequences=2,
            eos_token_id=eos,
            max_new_tokens=NEW,
            early_stopping=True,
        )
        if by_decoding:
            with generate_by_decoding(model) as made:
                outputs.append(model.generate(**models.padded_prompt("llama"), **options))
        else:
            outputs.append(model.generate(**models.padded_prompt("llama"), **options))
    assert torch.equal(*outputs)
    assert runs[0][1].shapes == runs[1][1].shapes
    for theirs, ours in zip(runs[0][0].seen, runs[1][0].seen, strict=True):
        assert torch.equal(theirs, ours)
    assert "criteria" in made[0].finish_reasons


def test_stop_strings() -> None:
    plain, ours, decoding = both(
        models.padded_prompt("llama"),
        num_beams=3,
        num_return_sequences=3,
        stop_strings=["a", "e", "o"],
        tokenizer=models.tokenizer(),
        early_stopping=True,
    )
    assert torch.equal(plain, ours) and "stop_string" in decoding.finish_reasons


@pytest.mark.parametrize("model_name", ["gpt2", "gemma2"])
def test_other_models(model_name: str) -> None:
    inputs = models.padded_prompt(model_name)
    plain, ours, _ = both(
        inputs, model_name, num_beams=4, eos_token_id=SOME_EOS, early_stopping=True
    )
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("seed", range(30))
def test_options_at_random(seed: int) -> None:
    choose = random.Random(seed)
    num_beams = choose.randint(2, 5)
    options = dict(
        num_beams=num_beams,
        num_return_sequences=choose.randint(1, num_beams),
        early_stopping=choose.choice([False, True, "never"]),
        length_penalty=choose.choice([-2.0, -0.3, 0.0, 0.6, 1.0, 1.7]),
        eos_token_id=choose.sample(range(4, 128), choose.randint(1, 40)),
        pad_token_id=choose.choice([0, 3]),
        do_sample=choose.random() < 0.4,
        repetition_penalty=choose.choice([1.0, 1.2]),
        max_new_tokens=choose.randint(1, 20),
    )
    lengths = tuple(choose.randint(1, 13) for _ in range(choose.randint(1, 4)))
    plain, ours, _ = both(models.padded_prompt("llama", (*lengths, 13), seed=seed), **options)
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("do_sample", [False, True], ids=["search", "sample"])
def test_logprobs(do_sample: bool) -> None:
    options = dict(
        num_beams=3,
        num_return_sequences=2,
        eos_token_id=SOME_EOS,
        do_sample=do_sample,
        temperature=0.7,
    )
    plain, _, decoding = both(
        models.padded_prompt("llama"),
        record_logprobs=True,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **options if do_sample else {**options, "temperature": None, "repetition_penalty": 1.3},
    )
    for i, length in enumerate(decoding.lengths):
        assert len(decoding.records[i]) == length - 13
        for step, (pair, _) in enumerate(decoding.records[i]):
            row, token = int(plain.beam_indices[i, step]), int(plain.sequences[i, 13 + step])
            expected = (
                plain.logits[step][row].log_softmax(-1)[token],
                plain.scores[step][row, token],
            )
            torch.testing.assert_close(
                torch.tensor(pair), torch.stack(expected), atol=1e-3, rtol=1e-3
            )


# -- one request ---------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True], ids=["search", "sample"])
def test_a_request_is_generate_on_its_prompt(do_sample: bool) -> None:
    model, prompt = models.get("llama"), models.token_ids(1, 11)
    config = GenerationConfig(
        num_beams=4,
        num_return_sequences=3,
        do_sample=do_sample,
        eos_token_id=SOME_EOS,
        max_new_tokens=NEW,
    )
    torch.manual_seed(5)
    plain = model.generate(prompt, generation_config=config)
    decoding, _ = request_decoding(model, prompt[0].tolist(), config, RequestOptions(seed=5))
    assert (
        isinstance(decoding, BeamDecoding)
        and decoding.num_rows == 4
        and decoding.max_length == 11 + NEW
    )
    assert torch.equal(drive(decoding, model).result(), plain)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": lambda x: torch.rand_like(x),
    "rand": lambda x: torch.rand(x.shape, device=x.device),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "normal": lambda x: torch.normal(torch.zeros_like(x), 1.0),
    "randint": lambda x: torch.randint(3, 9, x.shape, device=x.device),
    "dropout": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "gumbel": lambda x: torch.distributions.Gumbel(torch.zeros_like(x), 1.0).sample(),
}


@pytest.mark.parametrize("name", sorted(DRAWS))
def test_a_seed_decides_draws_of_a_models_own_method(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may choose the continuations of its beams by draws of any kind."""
    model, prompt = models.build("llama"), models.token_ids(1, 11)
    stock = model._get_top_k_continuations

    def own(accumulated_log_probs: torch.Tensor, **given: Any) -> Any:
        return stock(
            accumulated_log_probs=accumulated_log_probs + DRAWS[name](accumulated_log_probs),
            **given,
        )

    monkeypatch.setattr(model, "_get_top_k_continuations", own)
    config = GenerationConfig(
        num_beams=4, do_sample=True, eos_token_id=SOME_EOS, max_new_tokens=NEW
    )
    torch.manual_seed(5)
    plain = model.generate(prompt, generation_config=config)
    before = torch.get_rng_state()
    decoding, _ = request_decoding(model, prompt[0].tolist(), config, RequestOptions(seed=5))
    assert torch.equal(drive(decoding, model).result(), plain)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_models_own_method_that_compares_prompts_sees_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those whose result is final."""
    model = models.build("llama")
    stock = model._get_top_k_continuations

    def own(accumulated_log_probs: torch.Tensor, **given: Any) -> Any:
        shifted = accumulated_log_probs + 0.9 * accumulated_log_probs.roll(1, dims=0).clamp(min=-50)
        return stock(accumulated_log_probs=shifted, **given)

    monkeypatch.setattr(model, "_get_top_k_continuations", own)
    inputs = models.padded_prompt("llama", (13, 4, 9, 6, 11, 3, 8, 12))
    options: dict[str, Any] = {
        "num_beams": 3,
        "do_sample": False,
        "eos_token_id": MANY_EOS,
        "max_new_tokens": 24,
    }
    plain = model.generate(**inputs, **options)
    with generate_by_decoding(model) as made:
        assert torch.equal(model.generate(**inputs, **options), plain)
    assert made


def test_a_failing_beam_request_fails_alone() -> None:
    model = models.get("llama")

    class Fail(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise KeyError("on purpose")

    config = GenerationConfig(num_beams=3, max_new_tokens=4)
    options = (RequestOptions(logits_processor=processors) for processors in ([], [Fail()]))
    decodings = [request_decoding(model, [5, 6], config, each)[0] for each in options]
    first, second = sample_step(
        [(decoding, LogitRows.of(torch.randn(3, 128))) for decoding in decodings]
    )
    assert (
        not isinstance(first, Exception)
        and first.parents is not None
        and isinstance(second, KeyError)
    )


def test_low_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="low_memory"):
        config = GenerationConfig(num_beams=2, low_memory=True, max_new_tokens=2)
        request_decoding(models.get("llama"), [5], config, RequestOptions())
