"""The Triton kernels as the backend of whole calls, forced by `HF_PAGED_ATTENTION=triton`."""

from __future__ import annotations

import logging
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import kernels
from hf_paged.attention import backends
from hf_paged.attention.backends import gather
from hf_paged.cache.store import choose_store
from hf_paged.kernels import triton
from tests.attention.test_backends import Case, build
from tests.support import models
from tests.support.attention import attend
from tests.support.kernels.device import DEVICE, available, to_device


@pytest.mark.slow
@available
@pytest.mark.parametrize(
    ("name", "road", "tokens"),
    [("llama", "engine", 8), ("gpt_oss", "engine", 3), ("gemma2", "loop", 3)],
    ids=["llama-engine", "gpt_oss-engine", "gemma2-loop"],
)
def test_generate_through_the_kernels(
    name: str, road: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_paged.kernels.triton import attention, store

    model = models.build(name).to(DEVICE)
    inputs = {key: value[:2].to(DEVICE) for key, value in models.prompt(name).items()}
    options = dict(max_new_tokens=tokens, eos_token_id=None, do_sample=False)
    plain = model.generate(**inputs, **options)
    calls: Counter[str] = Counter()

    def count(module: ModuleType, function: str) -> None:
        original = getattr(module, function)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[function] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, function, counted)

    count(attention, "decode_attention")
    count(store, "store")
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    if road == "loop":
        options["past_key_values"] = hf_paged.PagedCache(model.config, {"block_size": 8})
    else:
        options.update(cache_implementation="paged", cache_config={"block_size": 8})
    paged = model.generate(**inputs, **options)
    assert torch.equal(plain, paged)
    layers = model.config.num_hidden_layers
    assert calls["decode_attention"] >= layers * (tokens - 1) and calls["store"] >= layers * tokens


@available
def test_prompts_too() -> None:
    call = build(
        Case(seq_lens=(33, 60), queries=20, heads=4, window=30, softcap=2.0, starts=(0, 7))
    )
    moved = to_device(call)
    assert backends.triton.unsupported_reason(moved.made()) is None
    torch.testing.assert_close(
        moved.run("triton").double().cpu(), call.expected, atol=2e-5, rtol=2e-5
    )


@available
def test_what_the_kernels_do_not_take_is_gathered_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    backends.log_once.cache_clear()
    call = build(Case(key_dim=600, value_dim=600, heads=2))
    moved = to_device(call)
    with caplog.at_level(logging.WARNING, logger=backends.__name__):
        assert backends.select(moved.made()) is gather
        out = attend(backends, *moved.inputs, **moved.options)
    torch.testing.assert_close(out.double().cpu(), call.expected, atol=2e-5, rtol=2e-5)
    (record,) = caplog.records
    assert "head dims 600 and 600: at most 576" in record.getMessage()


def test_forced_without_a_device_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    monkeypatch.setattr(triton, "is_available", lambda device: False)
    call = build(Case())
    with pytest.raises(
        RuntimeError, match="HF_PAGED_ATTENTION=triton, but the kernels do not run on cpu"
    ):
        backends.select(call.made())


def test_a_gpu_that_the_kernels_do_not_run_on_takes_the_portable_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    with caplog.at_level(logging.WARNING, logger=triton.__name__):
        assert not triton._runs_on.__wrapped__(torch.device("cuda", 0))
    assert "compute capability (7, 5)" in caplog.text


def test_cpu_tensors_are_not_interpreted_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    from hf_paged.kernels.triton import store

    call = build(Case())
    chosen = backends.select(call.made())
    assert chosen is not backends.triton
    pool, states = torch.zeros(4, 4, 8, 16), torch.ones(1, 2, 1, 16)
    monkeypatch.setattr(store, "store", None)
    slots = torch.tensor([[3]])
    choose_store(states, states, pool[:, :2], pool[:, 2:], slots)(states, states, slots)
    assert (pool[0, :, 3] == 1).all()
