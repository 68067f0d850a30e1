"""The Triton kernels as the backend of steps and whole calls, forced by
`HF_PAGED_ATTENTION=triton`."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
import transformers

import hf_paged
from hf_paged import kernels
from hf_paged.attention import backends
from hf_paged.attention.backends import gather
from hf_paged.cache.kv_blocks import KVBlocks, choose_store
from hf_paged.kernels import quantized, triton
from hf_paged.kernels.triton.cascade import CascadeCosts
from tests.attention.test_backends import Case, build
from tests.attention.test_packed import MIXED, PROMPTS, Built, causal_mask
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.attention import PackedCase, attend
from tests.support.kernels.device import DEVICE, available, interpreted, to_device

slow = pytest.mark.slow
PACKED = ["llama", "gpt_oss", "gemma3"]
PACKED += ["BloomForCausalLM", "DeepseekV3ForCausalLM", "Llama4ForCausalLM"]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Forces the kernels, and records which ones are called."""
    from hf_paged.kernels.triton import attention, store

    calls: list[str] = []

    def spy(name: str, own: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return own(*args, **kwargs)

    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "triton")
    names = ("decode_attention", "prefill_attention", "cascade_attention", "merge")
    for module, name in [*((attention, name) for name in names), (store, "store")]:
        monkeypatch.setattr(module, name, functools.partial(spy, name, getattr(module, name)))
    return calls


CASES = [
    PackedCase(PROMPTS),
    PackedCase(MIXED, window=9, softcap=3.0, sinks=True),
    PackedCase(MIXED, block=16, heads=4, kv_heads=4, key_dim=24, dtype=torch.bfloat16),
]


@slow
@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_step_launches_once_for_each_kind_of_row(case: PackedCase, launches: list[str]) -> None:
    built = Built(case)
    built.check(built.attend(causal_mask(built.step.num_tokens, case.window)))
    assert launches == ["decode_attention"] * (case.rows is MIXED) + ["prefill_attention"]


@slow
@available
@pytest.mark.parametrize("name", [*PACKED, "gemma2"])
def test_generate_gives_the_tokens_of_the_plain_call(name: str, launches: list[str]) -> None:
    model = models.build(name) if name in models.NAMES else tiny_model(getattr(transformers, name))
    inputs = models.put(models.padded_prompt("llama", (13, 4, 9)), DEVICE)
    common = dict(max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    plain = model.to(DEVICE).generate(**inputs, **common)
    options = models.PAGED
    if name not in PACKED:  # in `generate`'s own loop
        options = {"past_key_values": hf_paged.PagedCache(model.config, {"block_size": 8})}
    assert torch.equal(plain, model.generate(**inputs, **common, **options))
    layers = model.config.num_hidden_layers
    assert launches.count("decode_attention") >= 2 * layers
    assert launches.count("store") >= 3 * layers
    route = hf_paged.last_route(model)
    if name in PACKED:
        assert route is not None and route.reason.startswith("packed") and not route.slowed_by
    hf_paged.check_integrity(model)


@slow
@interpreted
def test_samples_read_prompts_once(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.kernels.triton import cascade

    free = CascadeCosts(token_bytes=1, state_bytes=0, rows_per_read=1000)
    monkeypatch.setattr(cascade, "default_costs", lambda *tensors: free)
    model = models.build("llama")  # its pool and steps are no other test's
    inputs, found = models.prompt("llama", 2, 19), []
    for options in ({}, models.PAGED):
        torch.manual_seed(3)
        samples = dict(max_new_tokens=3, do_sample=True, num_return_sequences=3)
        found.append(model.generate(**inputs, **samples, **options))
    assert torch.equal(*found)
    assert launches.count("cascade_attention") == launches.count("merge") > 0


@available
def test_what_the_kernels_do_not_take_is_gathered_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "triton")
    backends.log_once.cache_clear()
    call = build(Case(key_dim=600, value_dim=600, heads=2))
    moved = to_device(call)
    with caplog.at_level(logging.WARNING, logger=backends.__name__):
        assert backends.select(moved.made()) is gather
        out = attend(backends, *moved.inputs, **moved.options)
    torch.testing.assert_close(out.double().cpu(), call.expected, atol=2e-5, rtol=2e-5)
    (record,) = caplog.records
    assert "head dims 600 and 600: at most 576" in record.getMessage()


def test_devices_that_the_kernels_do_not_run_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "triton")
    monkeypatch.setattr(triton, "is_available", lambda device: False)
    message = "HF_PAGED_ATTENTION=triton, but the Triton kernels do not run on cpu"
    with pytest.raises(RuntimeError, match=message):
        backends.select(build(Case()).made())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    with caplog.at_level(logging.WARNING, logger=triton.__name__):
        assert not triton._runs_on.__wrapped__(torch.device("cuda", 0))
    assert "compute capability (7, 5)" in caplog.text


def test_cpu_tensors_are_not_interpreted_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.kernels.triton import store

    monkeypatch.delenv(kernels.BACKEND_VARIABLE, raising=False)
    assert backends.select(build(Case()).made()) is not backends.triton
    pool, states, slots = torch.zeros(4, 4, 8, 16), torch.ones(1, 2, 1, 16), torch.tensor([[3]])
    monkeypatch.setattr(store, "store", None)
    choose_store(states, states, pool[:, :2], pool[:, 2:], slots)(states, states, slots)
    assert (pool[0, :, 3] == 1).all()


def test_keys_and_values_in_blocks_of_different_formats_are_not_taken() -> None:
    call = build(Case()).made()
    tiles = torch.zeros(*call.blocks.keys.shape[:2], quantized.tile_bytes(16, 64)).byte()
    codes = quantized.codes(tiles, 16, torch.int8)
    blocks = KVBlocks((codes, call.blocks.values), codes, call.blocks.values)
    assert backends.triton.unsupported_reason(call) is None
    reason = backends.triton.unsupported_reason(call._replace(blocks=blocks))
    assert reason == "key blocks in torch.int8 and value blocks in torch.float32"
