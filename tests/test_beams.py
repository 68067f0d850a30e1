"""Beam search of paged `generate` and of requests against plain `generate`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged import PagedEngine
from tests.support import models
from tests.support.checks import assert_paged_is_plain, generate_both
from tests.support.engine_helpers import assert_served_as_lone, lone_run
from tests.support.forwards import shapes_of
from tests.test_parity_matrix import PROCESSORS

SOME_EOS, MANY_EOS = list(range(4, 128, 17)), list(range(4, 128, 4))


@pytest.mark.slow_cases("1?", "2?")
@pytest.mark.parametrize("seed", range(30))
def test_options_at_random(seed: int) -> None:
    choose = random.Random(seed)
    num_beams = choose.randint(2, 5)
    options: dict[str, Any] = dict(
        num_beams=num_beams,
        num_return_sequences=choose.randint(1, num_beams),
        early_stopping=choose.choice([False, True, "never"]),
        length_penalty=choose.choice([-2.0, -0.3, 0.0, 0.6, 1.0, 1.7]),
        eos_token_id=choose.sample(range(4, 128), choose.randint(1, 40)),
        pad_token_id=choose.choice([0, 3]),
        do_sample=choose.random() < 0.4,
        repetition_penalty=choose.choice([1.0, 1.2]),
        max_new_tokens=choose.randint(1, 20),
        return_dict_in_generate=choose.random() < 0.5,
    )
    lengths = tuple(choose.randint(1, 13) for _ in range(choose.randint(1, 4)))
    inputs = models.padded_prompt("llama", (*lengths, 13), seed=seed)
    plain, ours = generate_both(models.get("llama"), inputs, options)
    if options.pop("return_dict_in_generate"):
        assert ours.sequences_scores is plain.sequences_scores is None
        assert ours.scores is ours.logits is None
        plain, ours = plain.sequences, ours.sequences
    assert torch.equal(plain, ours)
    del options["pad_token_id"]
    texts = [row[row != models.PAD].tolist() for row in inputs["input_ids"]]
    assert_served_as_lone(models.get("llama"), texts, options)


def test_a_settled_prompt_leaves_and_its_result_stays() -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama", (13, 4, 9, 6))
    options = dict(num_beams=3, num_return_sequences=3, eos_token_id=MANY_EOS, max_new_tokens=25)
    sequences, num_computed = [], []
    for keep_all in (True, False):  # as a dict output needs them
        given = {**options, "early_stopping": True, "return_dict_in_generate": keep_all}
        output, shapes = shapes_of(model, inputs, given)
        sequences.append(output.sequences if keep_all else output)
        num_computed.append(sum(rows * width for rows, width in shapes))
    assert torch.equal(*sequences) and num_computed[1] < num_computed[0]


PROCESSED: dict[str, dict[str, Any]] = {
    **{name: own for name, own in PROCESSORS.items() if "do_sample" not in own},
    "warpers": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "prefix_allowed": {
        "prefix_allowed_tokens_fn": lambda prompt, ids: list(range(4 + prompt, 128, 3))
    },
    "guidance": {"guidance_scale": 1.4},
    "stop strings": {"stop_strings": ["a", "e", "o"], "tokenizer": models.tokenizer()},
}


@pytest.mark.parametrize("name", PROCESSED)
def test_processors(name: str) -> None:
    options = {"eos_token_id": SOME_EOS, "num_beams": 3, "num_return_sequences": 2}
    options |= {"early_stopping": True, "max_new_tokens": 12, **PROCESSED[name]}
    inputs = models.padded_prompt("llama")
    assert assert_paged_is_plain(models.get("llama"), inputs, options).road == "engine"


def overwrite(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Replaces the last token of each row."""
    input_ids[:, -1] = 7
    return scores


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"num_beams": 2, "do_sample": True}])
def test_a_processor_that_writes_to_the_ids(mode: dict[str, Any]) -> None:
    options = {"max_new_tokens": 6, "logits_processor": [overwrite], **mode}
    inputs = models.padded_prompt("llama")
    prompts = inputs["input_ids"].clone()
    sequences = []
    for paged in ({}, models.PAGED):
        given = {**inputs, "input_ids": prompts.clone()}  # greedy search writes to the prompts
        torch.manual_seed(0)
        sequences.append(models.get("llama").generate(**given, **options, **paged))
    assert torch.equal(*sequences) and (sequences[1][:, prompts.shape[1] : -1] == 7).all()


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": lambda x: torch.rand_like(x),
    "rand": lambda x: torch.rand(x.shape, device=x.device),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "normal": lambda x: torch.normal(torch.zeros_like(x), 1.0),
    "randint": lambda x: torch.randint(3, 9, x.shape, device=x.device),
    "dropout": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "gumbel": lambda x: torch.distributions.Gumbel(torch.zeros_like(x), 1.0).sample(),
    # prompts are compared, also those whose result is final
    "none": lambda x: 0.9 * x.roll(1, dims=0).clamp(min=-50),
}


@pytest.mark.slow_cases("rand", "exponential", "dropout")
@pytest.mark.parametrize("name", DRAWS)
def test_a_models_own_method_sees_all_prompts_and_a_seed_decides_its_draws(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may choose the continuations of its beams by draws of any kind."""
    model = models.build("llama")
    stock = model._get_top_k_continuations

    def choose(accumulated_log_probs: torch.Tensor, **given: Any) -> Any:
        shifted = accumulated_log_probs + DRAWS[name](accumulated_log_probs)
        return stock(accumulated_log_probs=shifted, **given)

    monkeypatch.setattr(model, "_get_top_k_continuations", choose)
    inputs = models.padded_prompt("llama", (13, 4, 9, 6, 11, 3, 8, 12))
    options = {"num_beams": 3, "do_sample": name != "none", "max_new_tokens": 24}
    options["eos_token_id"] = MANY_EOS
    assert_paged_is_plain(model, inputs, options)
    (prompt,) = models.token_ids(1, 11).tolist()
    before = torch.get_rng_state()
    with PagedEngine(model) as engine:
        (result,) = engine.generate([prompt], options, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert [result.token_ids] == lone_run(model, prompt, options, 5)
