"""Our tensors are on the model's device or the host, whatever torch's default device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from tests.support import models
from tests.support.checks import assert_same_tokens
from tests.support.engine_helpers import lone_run

# its tensors have no data: none of ours may be on it
DEFAULT = "meta"
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "max_new_tokens": 12},
    "greedy_eos": {"do_sample": False, "max_new_tokens": 16, "eos_token_id": list(range(20, 40))},
    "samples": {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12},
}


@pytest.mark.slow_cases("diff_llama-*")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "diff_llama"])
def test_a_call_under_another_default_device(name: str, mode: str) -> None:
    model = models.build(name)
    inputs, found = models.padded_prompt("llama", (60, 3, 33, 9)), []
    for options in ({}, models.PAGED, models.PAGED):
        # the second finds cached blocks, where there are any
        torch.manual_seed(0)
        with torch.device(DEFAULT):
            found.append(model.generate(**inputs, **MODES[mode], **options))
    for tokens in found[1:]:
        assert_same_tokens(found[0], tokens)
    route = hf_paged.last_route(model)
    assert route.road == "engine" and ("packed forwards" in route.reason) == (name == "llama")


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("name", ["llama", "diff_llama"])
def test_an_engine_under_another_default_device(name: str, preemption: str) -> None:
    model, streamer = models.build(name), mock.Mock()
    prompts = [models.token_ids(1, length, seed=length)[0].tolist() for length in (30, 9, 22)]
    config = PagedConfig(block_size=8, num_blocks=11, preemption=preemption)
    options = {**MODES["greedy"], "max_new_tokens": 20}
    expected = [lone_run(model, prompt, options)[0] for prompt in prompts]
    with torch.device(DEFAULT), PagedEngine(model, config) as e:
        results = e.generate(prompts, options, return_logprobs=True)
        assert e.stats().num_preemptions
        e.generate(prompts[:1], options, streamer=streamer)
        sampled = e.generate(prompts[:1], {**options, "do_sample": True}, seed=3)
    assert [result.error for result in (*results, *sampled)] == [None] * 4
    assert [result.token_ids for result in results] == expected
    assert {call.args[0].device.type for call in streamer.put.call_args_list} == {"cpu"}
