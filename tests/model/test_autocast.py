"""Calls under `torch.autocast`: float32 weights, products in half precision, as
`Trainer(bf16=True)` runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged import PagedEngine, check_integrity, last_route
from hf_paged.attention.backends import cpp as backend
from hf_paged.kernels import cpp
from tests.support import models

STEPS = 10
LENGTHS = (13, 4, 13, 9)  # rows of equal length that are not adjacent
CLOSE = {torch.bfloat16: 0.25, torch.float16: 0.05}  # logits have a standard deviation of 3


def outputs(model: Any, inputs: dict[str, Any], dtype: torch.dtype, **options: Any) -> Any:
    with torch.autocast("cpu", dtype):
        return model.generate(
            **inputs,
            max_new_tokens=STEPS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )


# Eager attention rounds its scores and weights, ours does not: beams may resolve near ties
# differently.
CASES = [
    ("llama", 1),
    ("llama", 2),
    ("t5", 1),
    ("t5", 2),
    ("bart", 2),
    ("gpt_oss", 1),
    ("gemma2", 1),
]


@pytest.mark.parametrize(("name", "beams"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_ragged_batches(name: str, beams: int, dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("backend", ["reference", "gather", "cpp"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_every_backend(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_ATTENTION", backend)
    model, inputs = models.get(name), models.padded_prompt(name, LENGTHS)
    plain = outputs(model, inputs, torch.bfloat16)
    paged = outputs(model, inputs, torch.bfloat16, **models.PAGED)
    assert torch.equal(paged.sequences, plain.sequences)


@pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")
def test_the_kernel_is_checked_without_autocast() -> None:
    """A first call under autocast disabled the kernel for the process: PyTorch's products were in
    bfloat16."""
    backend._agrees.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert backend.is_available()


def test_an_engine_gives_the_tokens_of_the_same_autocast() -> None:
    model = models.get("llama")
    prompts = [models.token_ids(1, length, seed=length)[0].tolist() for length in LENGTHS]
    with (
        torch.autocast("cpu", torch.bfloat16),
        PagedEngine(model, {"block_size": models.BLOCK_SIZE}) as engine,
    ):
        results = engine.generate(prompts, {"max_new_tokens": STEPS, "do_sample": False})
        engine.check_integrity()
    for prompt, result in zip(prompts, results):
        plain = outputs(model, {"input_ids": torch.tensor([prompt])}, torch.bfloat16)
        assert result.token_ids == plain.sequences[0, len(prompt) :].tolist()


def test_a_call_without_autocast_after_one_with() -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama", LENGTHS)
    outputs(model, inputs, torch.bfloat16, **models.PAGED)
    options = dict(max_new_tokens=STEPS, do_sample=False)
    assert torch.equal(
        model.generate(**inputs, **options, **models.PAGED), model.generate(**inputs, **options)
    )
