"""Models with weights quantized by torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

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
from tests.callers.test_callers import BEAMS, GREEDY, SAMPLES, assert_used_pool
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.checks import assert_same_tokens, generate_both
from tests.support.engine_helpers import assert_lone, prompts, results_of, steps
from tests.support.rooms import records_on_cpu

# int4 variant that runs on a CPU: torchao's `Int4WeightOnlyConfig` packs for CUDA and XPU only
SCHEMES: dict[str, Callable[[], Any]] = {
    "int8": Int8WeightOnlyConfig,
    "int4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "int8-activations-int4": lambda: Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    ),
}
LENGTHS = (60, 33, 48, 21)  # enough tokens in all for the prefix cache to be used


def quantized(name: str, scheme: str) -> Any:
    model = models.build(name)
    quantize_(model, SCHEMES[scheme]())
    kinds = {type(parameter.data) for parameter in model.parameters()}
    assert kinds - {torch.Tensor}, "nothing is quantized: the test is void"
    return model


def assert_both(model: Any, inputs: Any, options: Any = GREEDY, what: str = "tokens") -> Any:
    expected, tokens = generate_both(model, inputs, options)
    assert_same_tokens(expected, tokens, what)
    assert hf_paged.last_route(model).road == "engine"
    return expected


@pytest.mark.slow_cases("t5-int8", "t5-int4", "*-activations-*")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_torchao(name: str, scheme: str) -> None:
    """Every call twice: the second one finds cached blocks, if any. An engine, too."""
    model, inputs = quantized(name, scheme), models.padded_prompt(name, LENGTHS)
    for mode in (GREEDY, BEAMS, SAMPLES):
        for _ in range(2):
            assert_both(model, inputs, mode)
            assert_used_pool(model)
    with PagedEngine(model, PagedConfig(block_size=8, max_num_batched_tokens=40)) as engine:
        for _ in range(2):
            texts = prompts(*LENGTHS)
            assert_lone(engine, texts, engine.generate(texts, GREEDY), GREEDY)
            engine.check_integrity()


@pytest.mark.slow_cases("int4 in eights")
@pytest.mark.parametrize("scheme", ["int8", "int4 in eights"])
def test_torchao_where_latents_are_expanded(scheme: str) -> None:
    """The weight that expands cached latents is a tensor subclass: it is no plain matrix to
    absorb."""
    model = tiny_model(DeepseekV3ForCausalLM)
    eights = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(8))
    quantize_(model, SCHEMES["int8"]() if scheme == "int8" else eights)
    assert_both(model, models.padded_prompt("llama", LENGTHS))


@pytest.mark.slow
@pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_decode_steps_are_recorded_and_read_the_weights_again(scheme: str) -> None:
    """Blocks of the float weights must not serve the quantized ones, either."""
    model: Any = models.build("llama")
    inputs, options = models.padded_prompt("llama", LENGTHS), {**GREEDY, "max_new_tokens": 24}
    tokens = [assert_both(model, inputs, options)]
    quantize_(model, SCHEMES[scheme]())
    for change in ("none", "in place", "others"):
        with torch.no_grad():
            weight = model.model.layers[0].mlp.up_proj.weight
            parts = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
            if change == "in place":
                next(part for part in parts if part.is_floating_point()).mul_(-2.0)
            elif change == "others":
                up: Any = models.build("llama", seed=5)
                quantize_(torch.nn.Sequential(up.model.layers[0].mlp.up_proj), SCHEMES[scheme]())
                model.model.layers[0].mlp.up_proj = up.model.layers[0].mlp.up_proj
        for _ in range(2):
            expected = assert_both(model, inputs, options, change)
            route = hf_paged.last_route(model)
            assert route is not None
            assert not records_on_cpu() or route.num_captured_steps > 10, (change, route)
        assert not torch.equal(expected, tokens[-1]), f"{change} changes nothing: void"
        tokens.append(expected)


@pytest.mark.parametrize("change", ["replaced", "swapped"])
def test_other_scales_between_the_steps_of_an_engine(change: str) -> None:
    """The weight stays the same object. No recorded step of the old scales is replayed.
    (The prompt fills no block: before cached blocks are served, the weights are hashed.)"""
    model, (prompt,) = quantized("llama", "int8"), prompts(6)
    weights: list[Any] = [layer.mlp.down_proj.weight for layer in model.model.layers]
    options = {**GREEDY, "max_new_tokens": 40}
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        engine.add_request(prompt, options)
        for _ in range(20):
            engine.step()
        if change == "replaced":
            weights[0].scale = weights[0].scale * -1.5
        else:
            torch.utils.swap_tensors(*weights)
        last = engine.add_request(prompt, options)
        assert_lone(engine, [prompt], [results_of(steps(engine))[last]], options)
