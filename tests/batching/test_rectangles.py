"""Models that cannot be packed run as rectangular batches: number of forwards, and tokens of each
row alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from hf_paged import PagedConfig, PagedEngine, check_integrity, last_route, memory_stats
from hf_paged.cache.groups import StateSpec
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.engine_helpers import (
    MODES,
    assert_drained,
    assert_same_as_lone,
    lone_run,
    run_all,
)
from tests.support.models import BEFORE_5_18

CLASSES = [
    "Qwen3NextForCausalLM",  # linear and full attention
    "BambaForCausalLM",  # Mamba states and full attention
    "DogeForCausalLM",  # a bias from the cached values
    "MambaForCausalLM",  # states only
]
SMALL = PagedConfig(block_size=8)
LENGTHS = (5, 19, 9, 14)
ENDS = list(range(30, 60))  # enough ids that rows end at different steps


@functools.cache
def build(name: str) -> Any:
    model = tiny_model(getattr(transformers, name))
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        config.eos_token_id = None
    return model


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(20, 100, (length,), generator=generator).tolist() for length in lengths]


@contextmanager
def forwards(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Records the shape of the token ids in each forward."""
    shapes: list[tuple[int, int]] = []
    cls, original = type(model), type(model).forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids", args[0] if args else None)
        shapes.append(tuple(ids.shape))
        return original(self, *args, **kwargs)

    cls.forward = forward  # type: ignore[method-assign]
    try:
        yield shapes
    finally:
        cls.forward = original  # type: ignore[method-assign]


def skip_where_plain_is_broken(name: str) -> None:
    if name == "DogeForCausalLM" and BEFORE_5_18:
        pytest.skip("before 5.18, tokens of plain Doge see later ones unless its prompt is padded")


@pytest.mark.slow_cases("BambaForCausalLM", "DogeForCausalLM")
@pytest.mark.parametrize("name", CLASSES)
def test_requests_that_come_and_go_share_forwards(name: str) -> None:
    skip_where_plain_is_broken(name)
    model = build(name)
    counts = (12, 6, 9, 8)
    texts = prompts(*LENGTHS)
    options = [{"do_sample": False, "max_new_tokens": n, "min_new_tokens": n} for n in counts]
    with forwards(model) as shapes, PagedEngine(model, SMALL) as engine:
        engine.add_request(texts[0], options[0], request_id="0")
        engine.step()
        shapes.clear()  # from the one-time checks of a model
        results = {}
        for i in range(1, 4):  # one more joins in each step
            engine.add_request(texts[i], options[i], request_id=str(i))
            results |= {
                output.request_id: output.result for output in engine.step() if output.result
            }
        results |= run_all(engine)
        assert_drained(engine)
        assert engine.route is not None and engine.route.road == "engine"
    assert len(shapes) <= (max(counts) - 1) + 3, f"{len(shapes)} forwards: {shapes}"
    assert (4, 1) in shapes, f"four rows were meant to decode side by side: {shapes}"
    for i, prompt in enumerate(texts):
        assert_same_as_lone(
            lone_run(model, prompt, options[i]), results[str(i)], options[i], f"{name}, {i}"
        )


@pytest.mark.slow_cases(but=["MambaForCausalLM"])
@pytest.mark.parametrize("name", CLASSES)
def test_rows_of_a_generate_call_leave_one_by_one(name: str) -> None:
    model, texts = build(name), prompts(*LENGTHS)
    width = max(LENGTHS)
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    options: dict[str, Any] = dict(
        do_sample=False, max_new_tokens=24, eos_token_id=ENDS, pad_token_id=0
    )
    expected = model.generate(ids, attention_mask=mask, **options)
    lengths = [int((row[width:] != 0).sum()) for row in expected]
    assert len(set(lengths)) > 1, f"the rows were meant to end at different steps: {lengths}"
    config = {"block_size": 8, "capture": False}  # a replay calls no forward
    paged = dict(cache_implementation="paged", cache_config=config)
    model.generate(ids, attention_mask=mask, **options, **paged)
    with forwards(model) as shapes:
        # the replaced forward is checked
        model.generate(ids, attention_mask=mask, **options, **paged)
        shapes.clear()
        found = model.generate(ids, attention_mask=mask, **options, **paged)
    assert torch.equal(expected, found)
    route = last_route(model)
    assert route is not None and route.road == "engine", route
    assert len(shapes) == max(lengths) and shapes[0] == (4, width), shapes
    assert sum(rows for rows, _ in shapes[1:]) == sum(lengths) - 4, (
        "rows that ended were computed on"
    )
    check_integrity(model)
    assert memory_stats(model).used_blocks == 0


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("name", CLASSES)
def test_all_modes_in_one_batch(name: str, device: torch.device) -> None:
    skip_where_plain_is_broken(name)
    model = models.put(build(name), device)
    texts = prompts(*range(4, 4 + 3 * len(MODES), 3))
    with PagedEngine(model, SMALL) as engine:
        for seed, ((mode, options), prompt) in enumerate(zip(MODES.items(), texts)):
            engine.add_request(prompt, options, request_id=mode, seed=seed)
        results = run_all(engine)
        assert_drained(engine)
    for seed, ((mode, options), prompt) in enumerate(zip(MODES.items(), texts)):
        assert_same_as_lone(
            lone_run(model, prompt, options, seed), results[mode], options, f"{name}, {mode}"
        )


@pytest.mark.slow_cases(but=["RobertaForCausalLM-beams", "RobertaForCausalLM-samples"])
@pytest.mark.parametrize("mode", ["greedy", "beams", "samples"])
@pytest.mark.parametrize(
    "name", ["Zamba2ForCausalLM", "RobertaForCausalLM", "ProphetNetForCausalLM"]
)
def test_rows_are_computed_again_as_they_were(name: str, mode: str) -> None:
    """Their logits after a prompt differ from those after its tokens one by one."""
    model, texts, options = build(name), prompts(20, 25, 1, 31), MODES[mode]
    with PagedEngine(model, SMALL) as engine:
        for seed, prompt in enumerate(texts):
            engine.add_request(prompt, options, request_id=str(seed), seed=seed)
        steps = [engine.step() for _ in range(6)]
        results = {
            output.request_id: output.result
            for outputs in steps
            for output in outputs
            if output.result
        }
        with engine.weights_update("recompute"):
            pass  # as after a preemption
        results = run_all(engine, results)
        assert engine.stats().num_preemptions > 0
        assert_drained(engine)
    for seed, prompt in enumerate(texts):
        assert_same_as_lone(
            lone_run(model, prompt, options, seed), results[str(seed)], options, f"{name}, {seed}"
        )


@pytest.mark.slow_cases("Qwen3NextForCausalLM")
@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "DiffLlamaForCausalLM"])
def test_preempted_rows_are_computed_again(name: str) -> None:
    model, texts = build(name), prompts(20, 25, 9, 31)
    modes = [MODES["greedy"], MODES["samples"], MODES["beams"], MODES["sample"]]
    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=19)) as engine:
        for seed, (prompt, options) in enumerate(zip(texts, modes)):
            engine.add_request(prompt, options, request_id=str(seed), seed=seed)
        results = run_all(engine)
        assert engine.stats().num_preemptions > 0, "the budget was meant to be short"
        assert_drained(engine)
    for seed, (prompt, options) in enumerate(zip(texts, modes)):
        assert_same_as_lone(
            lone_run(model, prompt, options, seed), results[str(seed)], options, f"{name}, {seed}"
        )


@pytest.mark.slow_cases("Qwen3NextForCausalLM")
@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "DiffLlamaForCausalLM"])
def test_a_step_that_is_interrupted_never_happened(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States that layers updated before the interrupt are computed again."""
    model, texts = build(name), prompts(*LENGTHS)
    last = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.LayerNorm | torch.nn.Linear)
    ][-1]
    calls = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return type(last).forward(last, *args, **kwargs)

    with PagedEngine(model, SMALL) as engine:
        for i, prompt in enumerate(texts):
            engine.add_request(prompt, MODES["greedy"], request_id=str(i))
        engine.step()
        monkeypatch.setattr(last, "forward", forward)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(8):
                engine.step()
        monkeypatch.undo()
        results = run_all(engine)
        assert_drained(engine)
    for i, prompt in enumerate(texts):
        assert_same_as_lone(
            lone_run(model, prompt, MODES["greedy"]),
            results[str(i)],
            MODES["greedy"],
            f"{name}, {i}",
        )


@pytest.mark.parametrize("ends", ["cancel", "stream"])
def test_states_go_with_the_last_request(ends: str) -> None:
    """However it ends."""
    model = build("Qwen3NextForCausalLM")
    with PagedEngine(model, SMALL) as engine:
        if ends == "stream":
            stream = engine.stream(prompts(9, 9), MODES["greedy"])
            next(stream)
        else:
            names = [engine.add_request(prompt, MODES["greedy"]) for prompt in prompts(9, 5)]
            engine.step()
        states = engine.memory.group(StateSpec()).storage
        assert states.holders()
        if ends == "stream":
            stream.close()
        else:
            for name in names:
                engine.cancel(name)
        assert not [ref for ref, _ in states._rows.values() if ref() is not None]
        run_all(engine)
        assert_drained(engine)


def test_a_model_with_states_in_its_modules_is_refused() -> None:
    """Its rows would read each other's states; `generate` serves it."""
    model: Any = tiny_model(transformers.RecurrentGemmaForCausalLM)
    with pytest.raises(ValueError, match="keeps states in its modules"):
        PagedEngine(model)
    ids = torch.tensor([prompts(9)[0]])
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=6)
    found = model.generate(ids, **options, cache_implementation="paged")
    assert torch.equal(found, model.generate(ids, **options))


class Cacheless(transformers.LlamaForCausalLM):
    """Passes no cache on, as custom code does that knows the cache by a name of another version of
    transformers."""

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, attention_mask: Any = None, **inputs: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": True}

    def forward(self, **inputs: Any) -> Any:  # takes no positions by name, so it is not packed
        return super().forward(**inputs)


@pytest.mark.parametrize("mode", ["greedy", "beams", "samples"])
def test_a_model_that_ignores_its_cache_gives_its_own_tokens(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Cacheless(models.config("llama")).eval()
    models.init_weights(model, 0)
    inputs, results = models.prompt("llama"), []
    for options in ({}, models.PAGED):
        torch.manual_seed(0)
        results.append(model.generate(**inputs, **MODES[mode], pad_token_id=0, **options))
    assert torch.equal(*results)
    assert ["ignores the cache" in message for message in caplog.messages].count(True) == 1
    check_integrity(model)
