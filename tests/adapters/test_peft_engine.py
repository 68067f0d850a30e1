"""PEFT models in `generate` and in the engine: every request runs with its adapter and does not
affect the others."""

from __future__ import annotations

from typing import Any

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
    run_all,
)
from tests.support.peft_models import ADAPTERS, active, lone_with, lora, lora_model, peft_state
from tests.test_faults import Countdown, OnPurpose, last_block, replaced_forward

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


def test_prompt_tuning_is_refused_too() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="PromptTuningConfig"):
        PagedEngine(peft.get_peft_model(models.build("llama"), config))


# ----------------------------------------------------------------------------------------- engine


@pytest.mark.slow_cases("llama")
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_every_request_with_its_own_adapter(name: str) -> None:
    """The same prompts with each adapter in one batch: adapters share no cached blocks."""
    model = lora_model(name)
    before = peft_state(model)
    texts, modes = prompts(20, 9), ("greedy", "samples", "beams_eos")
    cases = [(a, m, i) for i in range(2) for m in modes for a in (*ADAPTERS, None)]
    for _ in range(2):  # again with cached blocks
        with PagedEngine(model, CONFIG) as engine:
            for adapter, mode, i in cases:
                engine.add_request(
                    texts[i],
                    MODES[mode],
                    request_id=f"{adapter} {mode} {i}",
                    adapter=adapter,
                    seed=i,
                )
            results: dict[str, Any] = {}
            while engine.has_unfinished:
                results |= {o.request_id: o.result for o in engine.step() if o.finished}
                engine.check_integrity()
                assert peft_state(model) == before, "between steps the model is as it was"
            again = {a: engine.generate([texts[0]], GREEDY, adapter=a)[0] for a in ADAPTERS}
            assert_drained(engine)
    for adapter, mode, i in cases:
        expected = lone_with(model, adapter or "first", texts[i], MODES[mode], i)
        assert_same_as_lone(
            expected, results[f"{adapter} {mode} {i}"], MODES[mode], f"{adapter}, {mode}, {i}"
        )
    for adapter, result in again.items():
        if name == "llama":  # blocks outside a window may be freed
            assert result.num_prefix_hit_tokens == 16, "kept by adapter"
        assert_same_as_lone(
            lone_with(model, adapter, texts[0], GREEDY), result, GREEDY, f"{adapter} again"
        )


@pytest.mark.slow
def test_adapters_in_a_small_pool() -> None:
    model, texts = lora_model(), prompts(20, 25, 18)
    for preemption in ("swap", "recompute"):
        config = PagedConfig(block_size=8, num_blocks=12, preemption=preemption)
        with PagedEngine(model, config) as engine:
            for i, prompt in enumerate(texts):
                for adapter in ADAPTERS:
                    engine.add_request(prompt, GREEDY, request_id=f"{i} {adapter}", adapter=adapter)
            results = run_all(engine)
            assert engine.stats().num_preemptions > 0
            assert_drained(engine)
        for i, prompt in enumerate(texts):
            for adapter in ADAPTERS:
                expected = lone_with(model, adapter, prompt, GREEDY)
                assert_same_as_lone(
                    expected, results[f"{i} {adapter}"], GREEDY, f"{preemption} {i} {adapter}"
                )


@pytest.mark.slow
def test_modules_to_save_go_with_their_adapter() -> None:
    """An adapter may contain whole modules."""
    own = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    model, prompt = lora_model(second=own, **own), prompts(12)[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save.second" in name:
                parameter.copy_(parameter.flip(0))
    with PagedEngine(model, CONFIG) as engine:
        for adapter in ADAPTERS:
            engine.add_request(prompt, GREEDY, request_id=adapter, adapter=adapter)
        results = run_all(engine)
    for adapter in ADAPTERS:
        assert_same_as_lone(
            lone_with(model, adapter, prompt, GREEDY), results[adapter], GREEDY, adapter
        )


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


@pytest.mark.slow
def test_a_model_with_the_adapters_of_transformers_own() -> None:
    """`model.add_adapter` without a surrounding PeftModel."""
    model, prompt = models.build("llama"), prompts(12)[0]
    bare = lone_run(model, prompt, GREEDY)
    torch.manual_seed(0)
    # as `model.add_adapter` of transformers does
    peft.inject_adapter_in_model(lora(), model, adapter_name="own")
    model.eval()
    with PagedEngine(model, CONFIG) as engine:
        results = {
            name: engine.generate([prompt], GREEDY, adapter=name)[0]
            for name in ("own", "__base__", None)
        }
    expected = lone_run(model, prompt, GREEDY)
    assert expected != bare
    assert_same_as_lone(bare, results["__base__"], GREEDY, "base")
    assert_same_as_lone(expected, results["own"], GREEDY, "own")
    assert_same_as_lone(expected, results[None], GREEDY, "active")


@pytest.mark.slow
@pytest.mark.parametrize("error", [OnPurpose, KeyboardInterrupt])
# nine forwards check, with this layer, whether packing works
@pytest.mark.parametrize("forward", [11, 13])
def test_a_forward_of_one_adapter_that_raises(error: type[BaseException], forward: int) -> None:
    """A step with three adapters is one forward; if it fails once, the step of all requests is
    undone and repeated."""
    model, texts = lora_model(), prompts(20, 11)
    before = peft_state(model)
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        engine.generate(
            [texts[0]] * 3, {**GREEDY, "max_new_tokens": 2}, adapter=list(ADAPTERS)
        )  # the check of that runs first
        results: dict[str, Any] = {}
        for attempt in range(2):
            for i, prompt in enumerate(texts):
                for adapter in ADAPTERS:
                    engine.add_request(
                        prompt, GREEDY, request_id=f"{attempt} {i} {adapter}", adapter=adapter
                    )
            if attempt:
                results |= run_all(engine)
                continue
            countdown = Countdown(forward, error)
            with replaced_forward(last_block(model.get_base_model()), countdown):
                if error is KeyboardInterrupt:
                    with pytest.raises(KeyboardInterrupt):
                        run_all(engine, results)
                assert countdown.left > 0 or error is not OnPurpose
                run_all(engine, results)
            assert countdown.left <= 0
            assert peft_state(model) == before
        assert_drained(engine)
    assert all(result.error is None for result in results.values())
    for i, prompt in enumerate(texts):
        for adapter in ADAPTERS:
            expected = lone_with(model, adapter, prompt, GREEDY)
            for name in (f"0 {i} {adapter}", f"1 {i} {adapter}"):
                assert_same_as_lone(expected, results[name], GREEDY, name)
