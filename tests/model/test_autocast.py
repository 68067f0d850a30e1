"""Calls under `torch.autocast`: float32 weights, products in half precision, as
`Trainer(bf16=True)` runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_paged import PagedEngine, check_integrity, last_route
from hf_paged.attention.backends import cpp as backend
from hf_paged.kernels import cpp
from tests.support import models
from tests.support.checks import assert_paged_is_plain
from tests.support.engine_helpers import assert_lone

GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
LENGTHS = (13, 4, 13, 9)  # rows of equal length that are not adjacent
CLOSE = {torch.bfloat16: 0.25, torch.float16: 0.05}  # logits have a standard deviation of 3


def outputs(model: Any, inputs: dict[str, Any], dtype: torch.dtype, **options: Any) -> Any:
    with torch.autocast("cpu", dtype):
        given = {**inputs, **GREEDY, "return_dict_in_generate": True, "output_logits": True}
        return model.generate(**given, **options)


# Eager attention rounds its scores and weights, ours does not: beams may resolve near ties
# differently.
CASES = [("llama", 1), ("llama", 2), ("t5", 1), ("t5", 2), ("bart", 2), ("gpt_oss", 1)]
CASES += [("gemma2", 1)]


def check(name: str, beams: int, dtype: torch.dtype) -> None:
    model, inputs = models.get(name), models.padded_prompt(name, LENGTHS)
    plain = outputs(model, inputs, dtype, num_beams=beams)
    paged = outputs(model, inputs, dtype, num_beams=beams, **models.PAGED)
    assert last_route(model).road == ("hf_loop" if models.is_encoder_decoder(name) else "engine")
    assert torch.equal(paged.sequences, plain.sequences)
    if beams == 1:  # reordered beams leave rows of logits from which no token is drawn
        for ours, expected in zip(paged.logits, plain.logits, strict=True):
            assert ours.dtype == expected.dtype
            torch.testing.assert_close(ours, expected, rtol=0, atol=CLOSE[dtype])
    check_integrity(model)


@pytest.mark.parametrize(("name", "beams"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_ragged_batches(name: str, beams: int, dtype: torch.dtype) -> None:
    check(name, beams, dtype)
    if name == "llama":  # and a call without autocast after it
        inputs = models.padded_prompt(name, LENGTHS)
        assert_paged_is_plain(models.get(name), inputs, GREEDY)


@pytest.mark.parametrize("backend", ["reference", "gather"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_other_backends(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_ATTENTION", backend)
    check(name, 1, torch.bfloat16)


@pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize(
    "mode",
    [lambda: torch.autocast("cpu", torch.bfloat16), FakeTensorMode],
    ids=["autocast", "fake tensors"],
)
def test_the_kernel_is_checked_without_the_callers_modes(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first call under autocast disabled the kernel for the process: PyTorch's products were in
    bfloat16."""
    monkeypatch.setattr(backend, "_agreements", {})
    with mode():
        assert backend.is_available()


def test_an_engine_gives_the_tokens_of_the_same_autocast() -> None:
    model = models.get("llama")
    texts = [models.token_ids(1, length, seed=length)[0].tolist() for length in LENGTHS]
    with torch.autocast("cpu", torch.bfloat16), PagedEngine(model, {"block_size": 8}) as engine:
        results = engine.generate(texts, GREEDY)
        engine.check_integrity()
        assert_lone(engine, texts, results, GREEDY)
