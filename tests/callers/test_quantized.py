"""Models with weights quantized by torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DeepseekV3ForCausalLM, PreTrainedModel

pytest.importorskip("torchao")

from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.kernels import cpp
from tests.callers.test_callers import BEAMS, GREEDY, assert_used_pool
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.checks import assert_same_tokens
from tests.support.rooms import records_on_cpu

# int4 variant that runs on a CPU: torchao's `Int4WeightOnlyConfig` packs for CUDA and XPU only
SCHEMES: dict[str, Callable[[], Any]] = {
    "int8": Int8WeightOnlyConfig,
    "int4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "int8-activations-int4": lambda: Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    ),
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "beams": BEAMS,
    "samples": {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12},
}
LENGTHS = (60, 33, 48, 21)  # enough tokens in all for the prefix cache to be used


def quantized(name: str, scheme: str) -> PreTrainedModel:
    model = models.build(name)
    quantize_(model, SCHEMES[scheme]())
    kinds = {type(parameter.data) for parameter in model.parameters()}
    assert kinds - {torch.Tensor}, "nothing is quantized: the test is void"
    return model


@pytest.mark.slow_cases(
    "*-activations-*",
    "t5-*-beams",
    "t5-*-samples",
    "t5-int4-*",
    "llama-int8-samples",
    "llama-int4-beams",
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_torchao(name: str, scheme: str, mode: str) -> None:
    """Every call twice: the second one finds cached blocks, if any."""
    model, inputs = quantized(name, scheme), models.padded_prompt(name, LENGTHS)
    for _ in range(2):
        torch.manual_seed(0)
        expected = model.generate(**inputs, **MODES[mode])
        torch.manual_seed(0)
        assert_same_tokens(expected, model.generate(**inputs, **MODES[mode], **models.PAGED))
        assert_used_pool(model)
    assert hf_paged.last_route(model).road == "engine"


@pytest.mark.slow_cases("int4 in eights")
@pytest.mark.parametrize("scheme", ["int8", "int4 in eights"])
def test_torchao_where_latents_are_expanded(scheme: str) -> None:
    """The weight that expands cached latents is a tensor subclass: it is no plain matrix to
    absorb."""
    model = tiny_model(DeepseekV3ForCausalLM)
    eights = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(8))
    quantize_(model, SCHEMES["int8"]() if scheme == "int8" else eights)
    inputs = models.padded_prompt("llama", LENGTHS)
    expected = model.generate(**inputs, **GREEDY)
    assert_same_tokens(expected, model.generate(**inputs, **GREEDY, **models.PAGED))
    assert hf_paged.last_route(model).road == "engine"


@pytest.mark.slow_cases(but=["int8"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_torchao_on_an_engine(scheme: str) -> None:
    model = quantized("llama", scheme)
    prompts = [models.token_ids(1, length, seed=length)[0].tolist() for length in LENGTHS]
    with PagedEngine(model, PagedConfig(block_size=8, max_num_batched_tokens=40)) as engine:
        for _ in range(2):
            for prompt, result in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
                assert result.error is None, result.error
                ids = torch.tensor([prompt])
                expected = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
                assert_same_tokens(expected[:, len(prompt) :], torch.tensor([result.token_ids]))
            engine.check_integrity()


@pytest.mark.slow
@pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_decode_steps_are_recorded_and_read_the_weights_again(scheme: str) -> None:
    model, inputs = quantized("llama", scheme), models.padded_prompt("llama", LENGTHS)
    options = {**GREEDY, "max_new_tokens": 24}
    for change in (None, "in place", "others"):
        with torch.no_grad():
            weight = model.model.layers[0].mlp.up_proj.weight
            names, _ = weight.__tensor_flatten__()
            scale = next(
                x for x in (getattr(weight, name) for name in names) if x.is_floating_point()
            )
            if change == "in place":
                scale.mul_(-2.0)
            elif change == "others":
                up = models.build("llama", seed=5).model.layers[0].mlp.up_proj
                quantize_(torch.nn.Sequential(up), SCHEMES[scheme]())
                model.model.layers[0].mlp.up_proj = up
        expected = model.generate(**inputs, **options)
        for _ in range(2):
            assert_same_tokens(
                expected, model.generate(**inputs, **options, **models.PAGED), str(change)
            )
            route = hf_paged.last_route(model)
            assert route is not None
            assert not records_on_cpu() or route.num_captured_steps > 10, (change, route)


@pytest.mark.parametrize("change", ["replaced", "swapped"])
def test_other_scales_between_the_steps_of_an_engine(change: str) -> None:
    """The weight stays the same object. No recorded step of the old scales is replayed.
    (The prompt fills no block: before cached blocks are served, the weights are hashed.)"""
    model, prompt = quantized("llama", "int8"), models.token_ids(1, 6, seed=1)
    weights: list[Any] = [layer.mlp.down_proj.weight for layer in model.model.layers]
    options = {**GREEDY, "max_new_tokens": 40}
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        engine.add_request(prompt[0].tolist(), options)
        for _ in range(20):
            engine.step()
        if change == "replaced":
            weights[0].scale = weights[0].scale * -1.5
        else:
            torch.utils.swap_tensors(*weights)
        last = engine.add_request(prompt[0].tolist(), options)
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        (result,) = (x.result for x in outputs if x.result and x.request_id == last)
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert_same_tokens(expected[:, 6:], torch.tensor([result.token_ids]))


@pytest.mark.slow
def test_torchao_quantizes_between_two_calls() -> None:
    """Blocks of the float weights must not serve the quantized ones."""
    model, inputs = models.build("llama"), models.padded_prompt("llama", LENGTHS)
    before = model.generate(**inputs, **GREEDY)
    assert_same_tokens(before, model.generate(**inputs, **GREEDY, **models.PAGED), "float")
    quantize_(model, SCHEMES["int4"]())
    expected = model.generate(**inputs, **GREEDY)
    assert not torch.equal(before, expected), "quantizing changes nothing: the test is void"
    assert_same_tokens(expected, model.generate(**inputs, **GREEDY, **models.PAGED), "quantized")
