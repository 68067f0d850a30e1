"""Sampling and greedy rows of paged `generate` and of requests that share steps, against plain
`generate`; choices from scores."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, WatermarkingConfig
from transformers.generation import logits_process as known

from hf_paged import PagedEngine
from hf_paged.batching.arguments import RequestOptions
from hf_paged.batching.decoding import sampler
from hf_paged.batching.decoding.base import LogitRows
from hf_paged.batching.decoding.prepare import request_decoding
from hf_paged.batching.decoding.sampler import sample_step
from hf_paged.batching.decoding.scores import (
    BatchableProcessors,
    are_row_wise,
    argmax,
    for_rows,
    process_together,
)
from tests.support import models
from tests.support.checks import assert_paged_is_plain
from tests.support.engine_helpers import (
    add_all,
    assert_all_same_as_lone,
    lone_run,
    prompts,
    run_all,
)

SOME_EOS = list(range(4, 128, 9))  # rows end at different lengths
NEW = 14
SAMPLE = {"do_sample": True, "top_k": 0}

ROW_WISE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_repetition": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat": {"encoder_no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[9], [30, 31], [77]]},
    "sequence_bias": {"sequence_bias": [[[11], 2.0], [[40, 41], -3.0]]},
    "min_new_tokens": {"min_new_tokens": 6},
    "min_length": {"min_length": 17},
    "forced_eos": {"forced_eos_token_id": 13},
    "decay": {"exponential_decay_length_penalty": (3, 1.2)},
    "suppress": {"suppress_tokens": [5, 6, 7, 8, 50], "begin_suppress_tokens": [20, 21]},
    "renormalize": {"renormalize_logits": True, "remove_invalid_values": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "temperature": {**SAMPLE, "temperature": 0.6},
    "top_k": {**SAMPLE, "top_k": 7},
    "top_p": {**SAMPLE, "top_p": 0.8},
    "top_h": {**SAMPLE, "top_h": 0.5},
    "min_p": {**SAMPLE, "min_p": 0.1},
    "typical": {**SAMPLE, "typical_p": 0.7},
    "epsilon": {**SAMPLE, "epsilon_cutoff": 0.02},
    "eta": {**SAMPLE, "eta_cutoff": 0.02},
    "everything": {
        **SAMPLE,
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[9], [30, 31]],
    },
}


@pytest.mark.parametrize("name", [name for name in ROW_WISE if not ROW_WISE[name].get("do_sample")])
def test_rows_that_advance_one_by_one_end_as_they_would_together(name: str) -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama", (13, 4, 9, 6))
    options = {**ROW_WISE[name], "eos_token_id": SOME_EOS, "max_new_tokens": NEW}
    config = {"block_size": 8, "num_blocks": 9, "prefix_caching": False}
    paged = {**models.PAGED, "cache_config": config}
    assert assert_paged_is_plain(model, inputs, options, paged).road == "engine"


def test_rows_that_may_end_need_padding() -> None:
    class OwnEos(StoppingCriteria):
        eos_token_id = 5

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return input_ids[:, -1] == 5

    model, inputs = models.build("llama"), models.prompt("llama")
    model.generation_config.pad_token_id = None
    with pytest.raises(ValueError, match="set `pad_token_id` to pad them"):
        model.generate(**inputs, stopping_criteria=[OwnEos()], max_new_tokens=3, **models.PAGED)


def test_rows_that_depend_on_one_another_are_not_split() -> None:
    config = GenerationConfig(guidance_scale=1.5, max_new_tokens=NEW)
    decoding: Any = request_decoding(models.get("llama"), [5], config, RequestOptions())[0]
    with pytest.raises(ValueError, match="depend on one another"):
        decoding.split()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"low_memory": True}, "low_memory"),
        ({"prompt_lookup_num_tokens": 3}, "leave the assistant out"),
    ],
)
def test_options_that_beams_cannot_have(option: dict[str, Any], message: str) -> None:
    with PagedEngine(models.get("llama")) as engine, pytest.raises(ValueError, match=message):
        engine.add_request([5], {"num_beams": 2, **option})


# -- many requests at once -----------------------------------------------------------------------

LENGTHS = (11, 3, 7, 5, 9, 4)
MIXED: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"eos_token_id": SOME_EOS}] * 6,
    "lengths": [{"max_new_tokens": n} for n in (1, 2, 5, 9, 14, 3)],
    "temperatures": [{**SAMPLE, "temperature": t} for t in (0.5, 0.7, 0.7, 1.0, 1.3, 2.0)],
    "top_k": [{"do_sample": True, "top_k": k} for k in (1, 5, 50, 500, 7, 7)],
    "top_p": [{**SAMPLE, "top_p": p} for p in (0.1, 0.5, 0.9, 0.95, 0.99, 0.3)],
    "min_p": [{**SAMPLE, "min_p": p} for p in (0.01, 0.05, 0.1, 0.2, 0.4, 0.05)],
    "stack": [
        {"do_sample": True, "top_k": 30, "top_p": 0.9, "temperature": t, "min_p": 0.01}
        for t in (0.5, 1.5)
    ]
    * 3,
    "others": [
        {**SAMPLE, **extra} for extra in ({"typical_p": 0.5}, {"eta_cutoff": 0.02}, {"top_h": 0.4})
    ]
    * 2,
    "min_new": [{"min_new_tokens": n, "eos_token_id": SOME_EOS} for n in (1, 2, 4, 6, 8, 12)],
    "repetition": [
        {
            "do_sample": True,
            "repetition_penalty": p,
            "top_p": 0.9,
            "min_new_tokens": 3,
            "eos_token_id": SOME_EOS,
        }
        for p in (1.1, 1.1, 1.5, 0.8, 2.0, 1.3)
    ],
    "modes": [
        {},
        {"do_sample": True},
        {"num_beams": 3, "eos_token_id": SOME_EOS},
        {"do_sample": True, "num_return_sequences": 3, "eos_token_id": SOME_EOS},
        {"repetition_penalty": 1.3},
        {"num_beams": 2, "do_sample": True},
    ],
    "each": [{"do_sample": False, "eos_token_id": [7, 60], **own} for own in ROW_WISE.values()],
}


@pytest.mark.parametrize("name", MIXED)
def test_requests_that_share_steps_stay_what_they_are_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    monkeypatch.setattr(
        sampler,
        "process_together",
        lambda scores, members: batches.append(len(members)) or process_together(scores, members),
    )
    modes = [{"max_new_tokens": NEW, **options} for options in MIXED[name]]
    texts = [text for text, _ in zip(prompts(*LENGTHS * 4), modes)]
    with PagedEngine(models.get("llama"), {"block_size": 8}) as engine:
        add_all(engine, texts, copy.deepcopy(modes), return_logprobs=True)
        results = run_all(engine)
        assert_all_same_as_lone(engine.model, texts, modes, results)
    assert name in ("modes", "each") or max(batches) > 1  # some forwards were shared


def test_stop_strings_of_many_requests() -> None:
    model, tokenizer, texts = models.get("llama"), models.tokenizer(), prompts(*LENGTHS)
    options = {"max_new_tokens": NEW, "do_sample": False}
    said = [tokenizer.decode(lone_run(model, text, options)[0]) for text in texts]
    stops = [
        [said[0][5:7]],
        [said[0][5:7]],
        [said[2][4:7]],
        [said[3][9:12], 40 * "q"],
        ["zz"],
        [said[5][2]],
    ]
    modes = [{**options, "stop_strings": strings} for strings in stops]
    with PagedEngine(model, {"block_size": 8}, tokenizer=tokenizer) as engine:
        add_all(engine, texts, modes)
        results = run_all(engine)
    alone = [{**mode, "tokenizer": tokenizer} for mode in modes]
    assert_all_same_as_lone(model, texts, alone, results)
    assert sum(result.finish_reason == "stop_string" for result in results.values()) >= 4


def test_scores_that_cannot_come_to_the_host_fail_alone() -> None:
    texts = prompts(*LENGTHS)
    with PagedEngine(models.get("llama")) as engine:
        for number, text in enumerate(texts):
            own = [lambda _, scores: scores.to("meta")] if number in (1, 4) else []
            mode = {"do_sample": number > 2, "max_new_tokens": 3}
            engine.add_request(text, mode, request_id=number, logits_processor=own)
        results = run_all(engine)
    failed = {number for number, result in results.items() if result.error is not None}
    assert failed == {1, 4} and isinstance(results[1].error, NotImplementedError)


# -- choices from scores -------------------------------------------------------------------------


@pytest.mark.slow
def test_draws_without_a_generator_follow_the_probabilities() -> None:
    # 4,000 draws: counts stay within five standard deviations, and tokens without probability are
    # never drawn
    probs = torch.zeros(1000)
    probs[[3, 200, 201, 700, 999]] = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    model, config = models.get("llama"), GenerationConfig(**SAMPLE, max_new_tokens=NEW)
    decodings = [request_decoding(model, [5], config, RequestOptions())[0] for _ in range(4000)]
    results = sample_step([(decoding, LogitRows.of(probs.log()[None])) for decoding in decodings])
    assert all(isinstance(token, int) for token in results)
    counts = torch.tensor(results).bincount(minlength=1000)
    assert ((counts - 4000 * probs).abs() <= 5 * (4000 * probs * (1 - probs)).sqrt()).all()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (known.TemperatureLogitsWarper, (0.1, 0.7, 1.0, 3.0)),
        (known.TopKLogitsWarper, (1, 2, 50, 4000)),
        (known.TopPLogitsWarper, (0.0, 0.2, 0.9, 0.999)),
        (known.MinPLogitsWarper, (0.0, 0.001, 0.3, 1.0)),
    ],
)
@pytest.mark.parametrize("vocab", [37, 1031])
def test_one_number_a_row_is_transformers_formula(
    kind: Any, values: tuple[Any, ...], vocab: int
) -> None:
    scores = torch.randn(4, vocab) * 3
    scores[2, ::3] = float("-inf")
    scores[3, 5:20] = scores[3, 4]
    processors = [LogitsProcessorList([kind(value)]) for value in values]
    shareables = [BatchableProcessors.of(own, torch.zeros((1, 0))) for own in processors]
    members = [shareable for shareable in shareables if shareable is not None]
    assert len({member.key for member in members}) == 1
    expected = torch.cat([own(None, row) for own, row in zip(processors, scores.split(1))])
    assert torch.equal(process_together(scores, members), expected)


def test_processors_that_hold_a_value_for_each_row() -> None:
    ids, scores = models.token_ids(6, 10), torch.randn(6, 128)
    processors = LogitsProcessorList(
        [
            known.EncoderRepetitionPenaltyLogitsProcessor(1.5, models.token_ids(6, 8, seed=1)),
            known.EncoderNoRepeatNGramLogitsProcessor(1, models.token_ids(2, 8, seed=2)),
        ]
    )
    try:
        processors.append(
            known.RepetitionPenaltyLogitsProcessor(1.5, torch.tensor([0, 2, 4, 6, 8, 9]))
        )
    except ValueError:
        pass  # older transformers accept only one number for all rows
    rows = [4, 1, 3]
    assert are_row_wise(processors, 6) and not are_row_wise(processors, 12)
    assert torch.equal(
        for_rows(processors, rows, 6)(ids[rows], scores[rows]), processors(ids, scores)[rows]
    )


@pytest.mark.parametrize("vocab", [5, 1024, 1025, 3000, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_first_of_equals(vocab: int, dtype: torch.dtype) -> None:
    scores = torch.randn(9, vocab).to(dtype)
    scores[1] = float("-inf")
    scores[2, [2, vocab - 1]] = 100
    scores[3, vocab - 1] = 100
    scores[4, [1, vocab // 2]] = float("nan")
    scores[5] = 3.0
    assert torch.equal(argmax(scores), scores.argmax(dim=-1))
