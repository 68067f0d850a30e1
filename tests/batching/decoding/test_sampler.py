"""Sampling and greedy rows of paged `generate` and of requests that share steps, against plain
`generate`; choices from scores."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, WatermarkingConfig
from transformers.generation import logits_process as stock
from transformers.generation.stopping_criteria import EosTokenCriteria

import hf_paged
from hf_paged import PagedEngine
from hf_paged.batching.arguments import RequestOptions
from hf_paged.batching.decoding import sampler
from hf_paged.batching.decoding.prepare import request_decoding
from hf_paged.batching.decoding.scores import (
    BatchableProcessors,
    argmax,
    process_together,
)
from tests.support import models
from tests.support.checks import assert_paged_is_plain, generate_both
from tests.support.engine_helpers import (
    MODES,
    Asked,
    assert_same_as_lone,
    lone_run,
    prompts,
    run_all,
)
from tests.test_parity_matrix import PROCESSORS

SOME_EOS = list(range(4, 128, 9))  # rows end at different lengths
NEW = 14
SAMPLE = {"do_sample": True, "top_k": 0}

ROW_WISE: dict[str, dict[str, Any]] = {
    **{
        name: own
        for name, own in PROCESSORS.items()
        if not own.keys() & {"output_scores", "num_beams"}
    },
    "renormalize": {"renormalize_logits": True, "remove_invalid_values": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
}


@pytest.mark.parametrize("name", [name for name in ROW_WISE if not ROW_WISE[name].get("do_sample")])
def test_rows_that_advance_one_by_one_end_as_they_would_together(name: str) -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama", (13, 4, 9, 6))
    options = {"eos_token_id": SOME_EOS, "max_new_tokens": NEW, **ROW_WISE[name]}
    config = {"block_size": 8, "num_blocks": 9, "prefix_caching": False}
    paged = {**models.PAGED, "cache_config": config}
    assert assert_paged_is_plain(model, inputs, options, paged).road == "engine"


@pytest.mark.parametrize("eos", [5, torch.tensor(5)])
def test_rows_that_may_end_need_padding(eos: Any) -> None:
    model, inputs = models.build("llama"), models.prompt("llama")
    model.generation_config.pad_token_id = None
    options = {"stopping_criteria": [EosTokenCriteria(eos)], "max_new_tokens": 3}
    with pytest.raises(ValueError, match="set `pad_token_id` to pad them"):
        model.generate(**inputs, **options, **models.PAGED)


def test_rows_that_depend_on_one_another_are_not_split() -> None:
    config = GenerationConfig(guidance_scale=1.5, max_new_tokens=NEW)
    decoding: Any = request_decoding(models.get("llama"), [5], config, RequestOptions())[0]
    with pytest.raises(ValueError, match="depend on one another"):
        decoding.split()


# -- many requests at once -----------------------------------------------------------------------

LENGTHS = (11, 3, 7, 5, 9, 4)
ENDING = {"eos_token_id": SOME_EOS}


def each(name: str, *values: Any, **options: Any) -> list[dict[str, Any]]:
    """Options of requests that differ in one."""
    return [{**options, name: value} for value in values]


MIXED: dict[str, list[dict[str, Any]]] = {
    "greedy": [ENDING] * 6,
    "lengths": each("max_new_tokens", 1, 2, 5, 9, 14, 3),
    "temperatures": each("temperature", 0.5, 0.7, 0.7, 1.0, 1.3, 2.0, **SAMPLE),
    "top_k": each("top_k", 1, 5, 50, 500, 7, 7, do_sample=True),
    "top_p": each("top_p", 0.1, 0.5, 0.9, 0.95, 0.99, 0.3, **SAMPLE),
    "min_p": each("min_p", 0.01, 0.05, 0.5, 0.2, 1, 0.05, **SAMPLE),
    "stack": each("temperature", 0.5, 1.5, 0.5, do_sample=True, top_k=30, top_p=0.9, min_p=0.01),
    "others": [
        {**SAMPLE, **extra} for extra in ({"typical_p": 0.5}, {"eta_cutoff": 0.02}, {"top_h": 0.4})
    ]
    * 2,
    "min_new": each("min_new_tokens", 1, 2, 4, 6, 8, 12, **ENDING),
    "repetition": each(
        *("repetition_penalty", 1.1, 1.1, 1.5, 0.8, 2.0, 1.3),
        **dict(do_sample=True, top_p=0.9, min_new_tokens=3, **ENDING),
    ),
    "stop strings": each("stop_strings", *(["a"], ["a"], ["e", 40 * "q"], ["zz"], ["o"], ["iu"])),
    "modes": [
        {},
        {"do_sample": True},
        {"num_beams": 3, "eos_token_id": SOME_EOS},
        {"do_sample": True, "num_return_sequences": 3, "eos_token_id": SOME_EOS},
        {"repetition_penalty": 1.3},
        {"num_beams": 2, "do_sample": True},
    ],
    "each": [{"eos_token_id": [7, 60], **own} for own in ROW_WISE.values()],
}


@pytest.mark.parametrize("default_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_that_divide_by_different_numbers_get_the_scores_that_each_gets_alone(
    device: torch.device, default_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 5 * torch.randn(4, 4096, generator=generator).to(device)
    input_ids = torch.randint(4096, (4, 900), generator=generator).to(device)
    lists, members = [], []
    for row, number in enumerate((0.7, 1.1, 1.3, 3.0)):
        penalty = stock.RepetitionPenaltyLogitsProcessor(number)
        lists.append(LogitsProcessorList([penalty, stock.TemperatureLogitsWarper(number)]))
        members.append(BatchableProcessors.of(lists[row], input_ids[row : row + 1]))
    torch.set_default_dtype(default_dtype)
    try:
        together = process_together(scores, members)
    finally:
        torch.set_default_dtype(torch.float32)
    for row, processors in enumerate(lists):
        rows = slice(row, row + 1)
        assert torch.equal(together[rows], processors(input_ids[rows], scores[rows].clone()))


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
    texts = [text for text, _ in zip(prompts(*LENGTHS * 5), modes)]
    tokenizer = models.tokenizer()
    with PagedEngine(models.get("llama"), {"block_size": 8}, tokenizer=tokenizer) as engine:
        Asked(engine, texts, copy.deepcopy(modes), return_logprobs=True)
        results = run_all(engine)
    for number, (text, mode) in enumerate(zip(texts, modes)):
        expected = lone_run(models.get("llama"), text, mode, number, tokenizer=tokenizer)
        assert_same_as_lone(expected, results[str(number)], mode, f"request {number}")
    assert name == "modes" or max(batches) > 1  # some forwards were shared


# -- choices from scores -------------------------------------------------------------------------


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"do_sample": True}, {"num_beams": 3}], ids=["sample", "beams"]
)
def test_the_default_dtype_changes_no_scores(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama", (11, 4, 9))
    torch.set_default_dtype(dtype)
    try:
        ended = {**options, "eos_token_id": SOME_EOS, "max_new_tokens": NEW}
        assert assert_paged_is_plain(model, inputs, ended).road == "engine"
    finally:
        torch.set_default_dtype(torch.float32)


# -- what a call returns ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_ids_of_32_bits_come_back_as_plain_returns_them(mode: str) -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama")
    inputs["input_ids"] = inputs["input_ids"].int()
    plain, ours = generate_both(model, inputs, MODES[mode])
    assert hf_paged.last_route(model).road == "engine"
    assert plain.dtype == ours.dtype == torch.int64 and torch.equal(plain, ours)


@pytest.mark.parametrize("num_blocks", [None, 14])
@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_and_logits_of_rows_that_have_ended_are_plains(
    do_sample: bool, num_blocks: int | None
) -> None:
    """Also with few blocks, so that rows wait for one another."""
    model, inputs = models.get("llama"), models.padded_prompt("llama", (13, 4, 9, 6))
    options = {"eos_token_id": SOME_EOS, "max_new_tokens": 20, "do_sample": do_sample}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    paged = {**models.PAGED, "cache_config": {"block_size": 8, "num_blocks": num_blocks}}
    plain, ours = generate_both(model, inputs, options, paged)
    assert hf_paged.last_route(model).road == "engine"
    assert num_blocks is None or hf_paged.memory_stats(model).peak_blocks <= num_blocks
    assert torch.equal(plain.sequences, ours.sequences)
    ends = [int((row[13:] != models.PAD).sum()) for row in plain.sequences]
    assert len(set(ends)) > 1, "rows must end at different times"
    for name in ("scores", "logits"):
        for theirs, mine in zip(plain[name], ours[name], strict=True):
            torch.testing.assert_close(theirs, mine, atol=1e-4, rtol=1e-4)
