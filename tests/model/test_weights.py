"""Weights that change at any time, with or without unfinished requests, are never combined with
older cached K/V. An engine follows a config whose windows change."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel, TextStreamer

import hf_paged
from hf_paged import PagedEngine
from hf_paged.model import weights as weights_module
from tests.support import models
from tests.support.checks import assert_paged_is_plain
from tests.support.engine_helpers import run_all
from tests.support.rooms import KEEPS_PREFIXES, needs_fingerprints
from tests.test_weights import data_add, value_projection

PROMPT = models.token_ids(1, 34)[0].tolist()
OTHER = models.token_ids(1, 21, seed=9)[0].tolist()
HITS = 32 * KEEPS_PREFIXES  # tokens of PROMPT in full blocks of 8, short of the last
NEW = 8


def greedy(new: int = NEW) -> dict[str, Any]:
    return {"do_sample": False, "eos_token_id": None, "max_new_tokens": new}


def plain(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    return model.generate(torch.tensor([prompt]), **greedy(new))[0, len(prompt) :].tolist()


def engine_of(model: Any, **config: Any) -> PagedEngine:
    return PagedEngine(model, {"block_size": 8, **config})


def finish(engine: PagedEngine) -> dict[str, Any]:
    """The results of all unfinished requests, by id."""
    results = run_all(engine)
    assert all(result.error is None for result in results.values())
    return results


def expect(engine: PagedEngine, model: Any, hits: int) -> list[int]:
    """Runs PROMPT beside unfinished requests: tokens are plain's, `hits` of them from the cache."""
    expected = plain(model, PROMPT)
    name = engine.add_request(PROMPT, greedy())
    while True:
        for output in engine.step():
            if output.request_id == name and output.result is not None:
                assert output.result.error is None, output.result.error
                assert output.result.token_ids == expected
                assert output.result.num_prefix_hit_tokens == hits
                return expected


class Meter:
    calls = 0


class Counted(nn.Module):
    meter = Meter()  # of all layers

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.calls += 1
        return self.inner(x)


@needs_fingerprints
def test_prefixes_of_a_model_that_its_forwards_change(caplog: pytest.LogCaptureFixture) -> None:
    model = models.build("llama")
    for layer in model.model.layers:
        layer.mlp = Counted(layer.mlp).eval()
    caplog.set_level(logging.DEBUG, "hf_paged")
    with engine_of(model) as engine:
        for _ in range(2):
            assert "the cached prefixes of LlamaForCausalLM are dropped" not in caplog.text
            (result,) = engine.generate([PROMPT], greedy())
    assert result.num_prefix_hit_tokens == 0
    assert "the cached prefixes of LlamaForCausalLM are dropped" in caplog.text


# ------------------------------------------------------------------------------- kinds of changes


def by_numpy(model: PreTrainedModel) -> None:
    value_projection(model).detach().numpy()[:] *= -1.0


def other_weights(model: PreTrainedModel) -> None:
    model.load_state_dict(models.build("llama", seed=5).state_dict(), assign=True)


def attention_of_another_model(model: PreTrainedModel) -> None:
    """Its config is another object, which names this layer's attention."""
    model.get_decoder().layers[1] = models.build("llama", seed=5).get_decoder().layers[1]


CHANGES = [data_add, by_numpy, other_weights, attention_of_another_model]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_beside_unfinished_requests(change: Callable[[PreTrainedModel], None]) -> None:
    model = models.build("llama")
    with engine_of(model) as engine:
        engine.add_request(OTHER, greedy(60))
        before = expect(engine, model, 0)
        expect(engine, model, HITS)
        change(model)
        after = expect(engine, model, 0)
        assert after != before, "the change does nothing: the test is void"
        expect(engine, model, HITS)
        assert engine.has_unfinished, "nothing was unfinished: the test is void"
        finish(engine)
        # while nothing is unfinished
        (data_add if change is attention_of_another_model else attention_of_another_model)(model)
        expect(engine, model, 0)


def test_a_change_between_two_calls_of_generate() -> None:
    """Fill, change, the same prompt, directly; then with a call in between that hits nothing."""

    def rows(prompt: list[int], count: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor([prompt] * count)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    model, inputs, other = models.build("llama"), rows(PROMPT, 4), rows(OTHER, 5)
    before = model.generate(**inputs, **greedy())
    assert_paged_is_plain(model, inputs, greedy())
    data_add(model)
    assert_paged_is_plain(model, inputs, greedy())
    assert not torch.equal(model.generate(**inputs, **greedy()), before)
    data_add(model := models.build("llama"))
    kept = copy.deepcopy(model.state_dict())
    model.generate(**inputs, **greedy(), **models.PAGED)
    by_numpy(model)
    model.generate(**other, **greedy(), **models.PAGED)
    model.load_state_dict(kept)
    for call in (other, inputs):
        assert_paged_is_plain(model, call, greedy())


def test_what_was_filled_before_and_after_a_change_is_not_served() -> None:
    """A request computed half by one model, half by another, leaves no cached blocks."""
    model = models.build("llama")
    long = models.token_ids(1, 80, seed=3)[0].tolist()
    with engine_of(model, max_num_batched_tokens=16) as engine:
        engine.add_request(long, greedy(30))
        for _ in range(3):
            engine.step()
        data_add(model)
        finish(engine)
        (result,) = engine.generate([long], greedy())
        assert result.token_ids == plain(model, long) and result.num_prefix_hit_tokens == 0


@pytest.mark.parametrize("how", ["swap", "lora"])
def test_a_change_that_is_undone(how: str) -> None:
    """A -> B, a step or two that fill blocks, B -> A; then a request with these blocks as prefix
    joins."""
    model: Any = models.build("llama")
    if how == "lora":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config).eval()
    average = [tensor.clone().mul_(-1) for tensor in model.parameters()]

    def swap() -> None:
        for tensor, other in zip(model.parameters(), average):
            kept = tensor.data.clone()
            tensor.data.copy_(other)
            other.copy_(kept)

    there, back = (swap, swap) if how == "swap" else (model.merge_adapter, model.unmerge_adapter)
    with engine_of(model) as engine:
        engine.add_request(OTHER, greedy(60))
        engine.step()
        there()
        engine.add_request(PROMPT, greedy(2))
        engine.step()
        engine.step()
        back()
        expect(engine, model, 0)
        expect(engine, model, HITS)
        assert engine.has_unfinished, "nothing was unfinished: the test is void"
        finish(engine)


# -------------------------------------------------------------------------------- unfinished ones


def mixed(
    before: PreTrainedModel, after: PreTrainedModel, prompt: list[int], steps: int, new: int
) -> list[int]:
    """Greedy tokens: the first `steps` by `before`, the others by `after` on the former's K/V."""
    cache, ids, found = DynamicCache(config=before.config), torch.tensor([prompt]), []
    for step in range(new):
        model = before if step < steps else after
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        ids = logits[:, -1:].argmax(-1)
        found.append(int(ids))
    return found


@pytest.mark.slow_cases("None")
@pytest.mark.parametrize("policy", ["recompute", "keep", None])
def test_what_becomes_of_unfinished_requests(policy: str | None) -> None:
    model, steps, new = models.build("llama"), 4, 20
    before, after = models.build("llama"), models.build("llama", seed=5)
    with engine_of(model) as engine:
        name = engine.add_request(PROMPT, greedy(new))
        for _ in range(steps):
            engine.step()
        with engine.weights_update(policy) if policy is not None else contextlib.nullcontext():
            model.load_state_dict(after.state_dict())
        found = finish(engine)[name].token_ids
        kept = mixed(before, after, PROMPT, steps, new)
        first = plain(before, PROMPT, steps)
        computed = first + plain(after, PROMPT + first, new - steps)
        assert kept != computed, "the two are the same: the test is void"
        assert found == (computed if policy == "recompute" else kept)
        model.load_state_dict(after.state_dict())
        (result,) = engine.generate([PROMPT + first], greedy())
        assert result.token_ids == plain(after, PROMPT + first)
        # mixed keys and values are not served
        assert (result.num_prefix_hit_tokens > 0) == (HITS > 0 and policy == "recompute")


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "beams": ({"num_beams": 3}, {}),
    "samples": ({"do_sample": True, "num_return_sequences": 3}, {}),
    "swapped": ({}, {"num_blocks": 10, "preemption": "swap"}),
    "row by row": ({}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_recompute_of_every_kind_of_request(kind: str) -> None:
    """All rows of a request are recomputed, including swapped ones and those of models that run row
    by row."""
    model, after = models.build("llama"), models.build("llama")
    options, config = KINDS[kind]
    if kind == "row by row":
        for each in (model, after):
            each.model.register_forward_hook(lambda *args: None)
    by_numpy(after)
    with engine_of(model, **config) as engine:
        given = {**greedy(24), **options}
        requests = [engine.add_request(prompt, given, seed=3) for prompt in (PROMPT, OTHER)]
        for _ in range(9):
            engine.step()
        with engine.weights_update():
            by_numpy(model)
        assert set(finish(engine)) == set(requests)
        engine.check_integrity()
        expect(engine, after, 0 if kind == "row by row" else HITS)


# ------------------------------------------------------------------------------- pause and errors


def test_updates_that_are_wrong_or_fail_leave_the_engine_running() -> None:
    model = models.build("llama")
    with engine_of(model) as engine:
        policy = r"^`policy` is 'drop': it must be one of 'recompute', 'keep'$"
        with pytest.raises(ValueError, match=policy), engine.weights_update("drop"):
            pass
        engine.add_request(PROMPT, greedy(20))
        engine.step()
        with pytest.raises(KeyError), engine.weights_update():
            data_add(model)
            raise KeyError("half done")
        finish(engine)
        expect(engine, model, HITS)
        paused = r"^the engine is not paused: every `resume` needs a `pause` before it$"
        with pytest.raises(RuntimeError, match=paused):
            engine.resume()


@pytest.mark.slow
def test_no_thread_takes_a_step_in_a_pause() -> None:
    model = models.build("llama")
    found: list[Any] = []
    with engine_of(model) as engine:
        engine.pause()
        engine.add_request(OTHER, greedy())
        for call in (engine.step, lambda: engine.generate([PROMPT], greedy())):
            with pytest.raises(RuntimeError, match="paused by this thread"):
                call()
        thread = threading.Thread(target=lambda: found.extend(engine.generate([PROMPT], greedy())))
        thread.start()
        with engine.weights_update():
            data_add(model)
        thread.join(0.3)
        # a pause goes on after one inside it
        assert thread.is_alive() and engine.stats().num_steps == 0
        engine.resume()
        thread.join(60)
        assert found[0].token_ids == plain(model, PROMPT)
        finish(engine)


# ------------------------------------------------------------------------------------------ costs


class Told:
    """A streamer that counts all tokens."""

    count = 0

    def put(self, value: torch.Tensor) -> None:
        Told.count += value.dim() == 1 and len(value) == 1

    def end(self) -> None:
        pass


@pytest.fixture
def fingerprints(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tokens that streamers got when each full fingerprint was taken."""
    taken, original = list[int](), weights_module.fingerprint

    def fingerprint(*args: Any) -> Any:
        taken.append(Told.count)
        return original(*args)

    monkeypatch.setattr(Told, "count", 0)
    monkeypatch.setattr(weights_module, "fingerprint", fingerprint)
    return taken


@needs_fingerprints
@pytest.mark.parametrize("is_known", [True, False], ids=["transformers' streamer", "another's"])
def test_the_first_token_waits_for_a_fingerprint_only_where_something_is_cached(
    is_known: bool, fingerprints: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextStreamer, "put", Told.put)
    monkeypatch.setattr(TextStreamer, "end", Told.end)
    streamer: Any = TextStreamer(models.tokenizer()) if is_known else Told()
    model = models.build("llama")
    first, second = (models.token_ids(1, 130, seed=seed) for seed in (0, 1))
    with engine_of(model) as engine:
        for prompt, expected in (
            (first, [is_known]),
            (first, [0]),
            (second, [is_known]),
            (PROMPT, [is_known]),
            (PROMPT, [0]),
        ):
            if prompt is PROMPT:
                engine.generate([PROMPT], greedy(), streamer=streamer)
            else:
                model.generate(prompt, **greedy(), streamer=streamer, **models.PAGED)
            assert fingerprints == expected
            fingerprints.clear()
            Told.count = 0


@needs_fingerprints
def test_steps_of_decodes_take_no_fingerprint(fingerprints: list[int]) -> None:
    with engine_of(models.build("llama")) as engine:
        engine.add_request(PROMPT, greedy(30))
        for _ in engine.stream([OTHER], greedy(20)):
            pass
        finish(engine)
        assert len(fingerprints) == 1
        engine.generate([PROMPT, PROMPT, OTHER], greedy())
        assert len(fingerprints) == 2


# ---------------------------------------------------------------------------------------- windows


@pytest.mark.slow_cases("gemma3")
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_an_engine_follows_a_config_whose_windows_change(name: str) -> None:
    model = models.build(name)
    with engine_of(model) as engine:
        before = plain(model, PROMPT, 20)
        assert engine.generate([PROMPT], greedy(20))[0].token_ids == before
        engine.add_request(PROMPT, greedy(20))
        engine.step()
        if name == "mistral":
            model.config.sliding_window = 17
        else:
            model.config.layer_types = ["sliding_attention", "full_attention", "full_attention"]
        with pytest.raises(ValueError, match=r"unfinished requests began with \[.*8.*\]: change"):
            engine.add_request(OTHER, greedy())
        engine.free()
        after = plain(model, PROMPT, 20)
        assert after != before, "the change does nothing: the test is void"
        for _ in range(2):
            assert engine.generate([PROMPT], greedy(20))[0].token_ids == after
        engine.check_integrity()


def test_a_call_without_the_prefix_cache_does_not_end_it() -> None:
    """The manager of the blocks outlives the call; one call's config does not affect the next."""
    model, ids = models.build("llama"), models.token_ids(2, 100)
    options = {**greedy(40), "cache_implementation": "paged"}
    model.generate(ids, **options, cache_config={"prefix_caching": False})
    assert hf_paged.memory_stats(model).cached_blocks == 0
    model.generate(ids, **options)
    assert hf_paged.memory_stats(model).cached_blocks > 0
