"""Packed steps and whole calls of `generate` through the Triton kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import hf_paged
from hf_paged import kernels
from hf_paged.kernels.triton.cascade import CascadeCosts
from tests.attention.test_packed import MIXED, PROMPTS, TOLERANCE, Built, Case, causal_mask
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.kernels.device import interpreted

pytestmark = interpreted  # on a GPU, tests/test_gpu.py does this

CASES = [
    Case(PROMPTS),
    Case(MIXED, block=16, heads=4, kv_heads=4, key_dim=24, value_dim=8),
    Case(MIXED, window=9, softcap=3.0, sinks=True),
    Case(MIXED, dtype=torch.bfloat16),
]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Forces the kernels, and records which ones are called."""
    from hf_paged.kernels.triton import attention

    calls: list[str] = []

    def spy(module: Any, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, **kwargs: (calls.append(name), function(*args, **kwargs))[1]
        )

    monkeypatch.setenv(kernels.VARIABLE, "triton")
    spy(attention, "decode_attention")
    spy(attention, "prefill_attention")
    spy(attention, "cascade_attention")
    spy(attention, "merge")
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_step_takes_one_launch_for_decodes_and_one_for_chunks(
    case: Case, launches: list[str]
) -> None:
    built = Built(case)
    output = built.attend(causal_mask(built.step.num_tokens, case.window))
    expected = built.expected()
    assert output.shape == expected.shape and output.dtype == case.dtype
    torch.testing.assert_close(
        output, expected, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype]
    )
    wanted = ["decode_attention"] * (case.rows[0][1] == 1) + ["prefill_attention"] * (
        case.rows[-1] != (40, 1)
    )
    assert launches == wanted


@pytest.mark.slow_cases("llama")
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_generate_gives_the_tokens_of_the_plain_call(name: str, launches: list[str]) -> None:
    model = models.get(name)
    inputs = models.padded_prompt(name, (13, 4, 9))
    options = dict(max_new_tokens=3, do_sample=False)
    plain = model.generate(**inputs, **options)
    paged = model.generate(**inputs, **options, **models.PAGED)
    assert torch.equal(plain, paged)
    assert set(launches) == {"prefill_attention", "decode_attention"}
    hf_paged.check_integrity(model)


@pytest.mark.slow_cases("BloomForCausalLM")
@pytest.mark.parametrize(
    "name",
    [
        "BloomForCausalLM",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("DeepseekV3ForCausalLM", "Llama4ForCausalLM")
        ),
    ],
)
def test_kinds_of_attention(name: str, launches: list[str]) -> None:
    model = tiny_model(getattr(transformers, name))
    ids, options = models.token_ids(2, 21), dict(max_new_tokens=3, do_sample=False, pad_token_id=0)
    plain = model.generate(ids, **options)
    paged = model.generate(ids, **options, **models.PAGED)
    assert torch.equal(plain, paged)
    route = hf_paged.last_route(model)
    assert route is not None and route.reason.startswith("packed forwards") and not route.slowed_by
    assert set(launches) == {"prefill_attention", "decode_attention"}


@pytest.mark.slow
def test_samples_read_their_prompt_once(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_paged.kernels.triton import cascade

    free = CascadeCosts(token_bytes=1, state_bytes=0, rows_per_read=1000)
    monkeypatch.setattr(cascade, "default_costs", lambda *tensors: free)
    model = models.build("llama")  # its pool and steps are no other test's
    inputs = models.prompt("llama", 2, 19)
    options = dict(max_new_tokens=3, do_sample=True, num_return_sequences=3)
    torch.manual_seed(3)
    plain = model.generate(**inputs, **options)
    torch.manual_seed(3)
    paged = model.generate(**inputs, **options, **models.PAGED)
    assert torch.equal(plain, paged)
    assert launches.count("cascade_attention") == launches.count("merge") > 0
