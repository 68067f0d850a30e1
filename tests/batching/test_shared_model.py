"""Several callers on one model: threads, adapters, autocast, writes to returned caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import PagedEngine
from hf_paged.cache.groups import GroupSpec
from tests.support import models
from tests.support.checks import in_threads

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 25}


@pytest.mark.slow
def test_an_adapter_of_one_engine_is_not_seen_by_other_callers() -> None:
    """The active adapter is state of the model, so one forward runs at a time, for any caller."""
    peft = pytest.importorskip("peft")
    base, ids = models.build("llama"), models.token_ids(1, 40)
    lora = dict(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, peft.LoraConfig(**lora), adapter_name="x").eval()
    model.add_adapter("y", peft.LoraConfig(**lora))
    plain = {}
    for name in ("y", "x"):
        model.set_adapter(name)
        plain[name] = model.generate(input_ids=ids, **GREEDY)[0, 40:].tolist()
    assert plain["x"] != plain["y"]

    def engine(name: str) -> None:
        with PagedEngine(model, {"block_size": 8}) as engine:
            for _ in range(6):
                result = engine.generate([ids[0].tolist()], GREEDY, adapter=name)[0]
                assert result.token_ids == plain[name], name

    def generate() -> None:
        for _ in range(6):
            output = model.generate(input_ids=ids, **GREEDY, **models.PAGED)
            assert output[0, 40:].tolist() == plain["x"]

    in_threads(lambda: engine("y"), lambda: engine("x"), generate)
    assert model.active_adapter == "x"
    generate()


def test_writing_to_a_returned_cache_leaves_the_prefix_cache_alone() -> None:
    """A full block that is cropped and filled again is copied first: the prefix index holds its old
    tokens."""
    model, inputs = models.build("llama"), models.prompt("llama", 2, 40)
    expected = model.generate(**inputs, **GREEDY)
    for _ in range(2):
        output = model.generate(**inputs, **GREEDY, **models.PAGED, return_dict_in_generate=True)
        assert torch.equal(expected, output.sequences)
        cache = output.past_key_values
        cache.crop(-(cache.get_seq_length() - 12))  # into the middle of the second block
        with torch.no_grad():
            model(models.token_ids(2, 9, seed=7), past_key_values=cache)
        hf_paged.check_integrity(model)
        del output, cache
        assert torch.equal(expected, model.generate(**inputs, **GREEDY, **models.PAGED))


@pytest.mark.slow
def test_forwards_compute_as_when_the_request_was_added() -> None:
    """Autocast is per thread: another thread's steps must not mix precisions in one prefix
    cache."""
    model, prompt = models.build("llama"), models.token_ids(1, 40)[0].tolist()
    with PagedEngine(model, {"block_size": 8}) as engine:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.add_request(prompt, GREEDY)
        while engine.has_unfinished:
            engine.step()
        assert engine.memory.groups[GroupSpec()].storage.layers[0].values.dtype == torch.bfloat16
        assert engine.generate([prompt], GREEDY)[0].num_prefix_hit_tokens == 0
        expected = model.generate(torch.tensor([prompt]), **GREEDY)[0, 40:].tolist()
        assert engine.generate([prompt], GREEDY)[0].token_ids == expected


@pytest.mark.parametrize("first", [True, False])
def test_a_request_of_another_precision_does_not_join_unfinished_ones(first: bool) -> None:
    """It would be computed in theirs."""
    model, prompts = models.build("llama"), models.token_ids(2, 9).tolist()
    with PagedEngine(model, {"block_size": 8}) as engine:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
            engine.add_request(prompts[0], GREEDY)
            engine.step()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not first):
            with pytest.raises(ValueError, match="autocast uses"):
                engine.add_request(prompts[1], GREEDY)
            while engine.has_unfinished:
                engine.step()
            assert engine.generate([prompts[1]], GREEDY)[0].error is None
        engine.check_integrity()


@pytest.mark.parametrize("first", [True, False])
def test_a_verdict_under_autocast_is_not_one_outside(first: bool) -> None:
    model, inputs = models.build("llama"), models.prompt("llama")
    for enabled in (first, not first):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            model.generate(**inputs, **GREEDY, **models.PAGED)
        route = hf_paged.last_route(model)
        assert route is not None and route.road == "engine", (enabled, route)


def test_a_value_of_one_request_does_not_round_another_s() -> None:
    """`min_p=1` is an integer, 0.5 is not: batched requests keep their own values."""
    model, prompts = models.get("llama"), models.token_ids(2, 9).tolist()
    configs = [{"do_sample": True, "min_p": value, "max_new_tokens": 30} for value in (1, 0.5)]
    alone = []
    for prompt, config in zip(prompts, configs):
        torch.manual_seed(3)
        alone.append(model.generate(torch.tensor([prompt]), **config)[0, 9:].tolist())
    with PagedEngine(model, {"block_size": 8}) as engine:
        results = engine.generate(prompts, configs, seed=[3, 3])
    assert [result.token_ids for result in results] == alone
