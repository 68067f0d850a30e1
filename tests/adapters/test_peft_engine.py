"""PEFT models in `generate` and in the engine: every request runs with its adapter and does not
affect the others."""

from __future__ import annotations

import pytest
import torch

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from tests.support import models
from tests.support.engine_helpers import (
    MODES,
    assert_drained,
    assert_same_as_lone,
    lone_run,
    prompts,
)
from tests.support.peft_models import ADAPTERS, active, lone_with, lora, lora_model

peft = pytest.importorskip("peft")

GREEDY = MODES["greedy"]
CONFIG = PagedConfig(block_size=8, max_num_batched_tokens=30)


def test_the_adapters_differ() -> None:
    model, prompt = lora_model(), prompts(12)[0]
    texts = {str(lone_with(model, adapter, prompt, GREEDY)) for adapter in ADAPTERS}
    assert len(texts) == 3, "the tests below would show nothing"


# --------------------------------------------------------------------------------------- generate


@pytest.mark.slow_cases(but=["*-__base__-*", "*-greedy", "cuda-*"])
@pytest.mark.parametrize("mode", ["greedy", "samples", "beams_eos"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_generate(mode: str, adapter: str, device: torch.device) -> None:
    model, inputs = (
        lora_model().to(device),
        models.put(models.padded_prompt("llama", (26, 4, 17)), device),
    )
    with active(model, adapter):
        for _ in range(2):  # again with cached blocks
            torch.manual_seed(1)
            expected = model.generate(**inputs, **MODES[mode])
            torch.manual_seed(1)
            assert torch.equal(expected, model.generate(**inputs, **MODES[mode], **models.PAGED))
            assert hf_paged.last_route(model).road == "engine"
    hf_paged.check_integrity(model)


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("mode", ["greedy", "samples", "beams"])
def test_adapter_names_in_a_batch(mode: str, device: torch.device) -> None:
    model = lora_model().to(device)
    inputs = models.put(models.padded_prompt("llama", (26, 4, 17, 17)), device)
    names = ["first", "__base__", "second", "first"]
    options = dict(MODES[mode])
    if mode == "samples":  # PEFT repeats the names for beams only
        options.pop("num_return_sequences")
    for _ in range(2):
        torch.manual_seed(1)
        expected = model.generate(**inputs, adapter_names=list(names), **options)
        torch.manual_seed(1)
        actual = model.generate(**inputs, adapter_names=list(names), **options, **models.PAGED)
        assert torch.equal(expected, actual)
        # rows keep their prompts and swap adapters: no cached block may be reused
        names = names[::-1]
    # afterwards the model is as before, and its cache clean
    torch.manual_seed(1)
    expected = model.generate(**inputs, **options)
    torch.manual_seed(1)
    assert torch.equal(expected, model.generate(**inputs, **options, **models.PAGED))
    hf_paged.check_integrity(model)


@pytest.mark.slow
def test_prefix_tuning() -> None:
    torch.manual_seed(0)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = peft.get_peft_model(models.build("llama"), config).eval()
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter.normal_(std=0.5)
    base = models.build("llama")
    for inputs in (models.prompt("llama"), models.padded_prompt("llama")):
        for mode in ("greedy", "greedy_eos", "sample"):
            # PEFT makes a prefix for every prompt, not for every row
            torch.manual_seed(1)
            expected = model.generate(**inputs, **MODES[mode])
            torch.manual_seed(1)
            assert torch.equal(expected, model.generate(**inputs, **MODES[mode], **models.PAGED)), (
                mode
            )
    assert not torch.equal(model.generate(**inputs, **GREEDY), base.generate(**inputs, **GREEDY)), (
        "no prefix: void"
    )
    with pytest.raises(
        ValueError, match=r"'default' is prompt learning \(PrefixTuningConfig\).*generate"
    ):
        PagedEngine(model)


# ----------------------------------------------------------------------------------------- engine


@pytest.mark.slow
def test_adapters_that_come_and_go_later() -> None:
    model, prompt = lora_model(), prompts(12)[0]
    with PagedEngine(model, CONFIG) as engine:
        with pytest.raises(ValueError, match="'third' does not exist: the model has first, second"):
            engine.add_request(prompt, GREEDY, adapter="third")
        model.add_adapter("third", lora(r=8))
        result = engine.generate([prompt], GREEDY, adapter="third")[0]
        assert_same_as_lone(lone_with(model, "third", prompt, GREEDY), result, GREEDY, "third")
        model.delete_adapter("third")
        with pytest.raises(ValueError, match="'third' does not exist"):
            engine.add_request(prompt, GREEDY, adapter="third")
        model.merge_adapter()
        with pytest.raises(ValueError, match="merged"):
            engine.add_request(prompt, GREEDY, adapter="second")
        result = engine.generate([prompt], GREEDY)[0]
        assert_same_as_lone(lone_run(model, prompt, GREEDY), result, GREEDY, "merged")
        model.unmerge_adapter()
        result = engine.generate([prompt], GREEDY, adapter="second")[0]
        assert_same_as_lone(lone_with(model, "second", prompt, GREEDY), result, GREEDY, "unmerged")
        assert_drained(engine)
