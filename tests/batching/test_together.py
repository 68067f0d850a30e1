"""Rows that stay with those that they began with, and with all that the model's own loop carries: encoder-decoder
models, positions that a cache counts, caches with more than keys and values. Tokens are plain `generate`'s."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from hf_paged import check_integrity, last_route, memory_stats
from hf_paged.batching.scheduling.scheduler import Scheduler
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import make_inputs

T5 = "T5ForConditionalGeneration"
ENCODERS = [T5, "BartForConditionalGeneration", "WhisperForConditionalGeneration"]
# positions from the cache's length; indexer keys; padding that is attended to; conv states beside sliding windows;
# a forward that prepares its own inputs
DECODERS = [
    "BartForCausalLM",
    "DeepseekV32ForCausalLM",
    "ProphetNetForCausalLM",
    "InklingForCausalLM",
    "IdeficsForVisionText2Text",
]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.5},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "beam samples": {"num_beams": 2, "do_sample": True},
}
ENDS = list(range(30, 60))  # enough ids that rows end at different steps
NEW = 16
PAGED: dict[str, Any] = {"cache_implementation": "paged", "cache_config": {"block_size": 8}}


@functools.cache
def build(name: str) -> Any:
    model = tiny_model(getattr(transformers, name))
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        config.eos_token_id = None
    return model


def inputs_of(name: str) -> dict[str, Any]:
    """Four rows, of which some begin with padding or end with it in front of the encoder."""
    found = make_inputs(build(name))
    return {
        key: torch.cat([value, value.flip(-1) if value.is_floating_point() else value.roll(1, 0)])
        if isinstance(value, torch.Tensor)
        else value
        for key, value in found.items()
    }


def tokens(name: str, options: dict[str, Any], paged: dict[str, Any] | None = None) -> torch.Tensor:
    torch.manual_seed(5)
    arguments = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in inputs_of(name).items()}
    options = {"max_new_tokens": NEW, "eos_token_id": ENDS, "pad_token_id": 0, **options, **(paged or {})}
    found: torch.Tensor = build(name).generate(**arguments, **options)
    return found


def assert_whole(name: str) -> None:
    check_integrity(build(name))
    assert memory_stats(build(name)).used_blocks == 0


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Ids of the requests that lost their blocks."""
    found: list[str] = []
    original = Scheduler._preempt

    def preempt(self: Scheduler, request: Any, keeps: bool = True) -> None:
        found.append(request.request_id)
        original(self, request, keeps)

    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    yield found


@pytest.mark.parametrize(
    ("name", "mode"),
    [*itertools.product((*ENCODERS, *DECODERS), ("greedy", "beams")), *((T5, mode) for mode in list(MODES)[1:])],
)
def test_tokens_are_those_of_plain_generate(name: str, mode: str) -> None:
    expected = tokens(name, MODES[mode])
    assert torch.equal(tokens(name, MODES[mode], PAGED), expected)
    route = last_route(build(name))
    assert route is not None and route.road == "engine", route
    assert_whole(name)


@pytest.mark.parametrize("name", [T5, "BartForCausalLM", "DeepseekV32ForCausalLM"])
def test_rows_leave_when_they_end(name: str) -> None:
    expected = tokens(name, {"do_sample": False})
    model = build(name)
    width = 1 if model.config.is_encoder_decoder else inputs_of(name)["input_ids"].shape[1]
    lengths = [int((row[width:] != 0).sum()) for row in expected]
    assert len(set(lengths)) > 1, f"the rows were meant to end at different steps: {lengths}"
    tokens(name, {"do_sample": False}, PAGED)
    head, original = model.get_output_embeddings(), torch.nn.Linear.forward
    shapes: list[tuple[int, ...]] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self is head:
            shapes.append(tuple(x.shape[:2]))
        return original(self, x)

    torch.nn.Linear.forward = forward  # type: ignore[method-assign]
    try:
        tokens(name, {"do_sample": False}, PAGED)  # the replaced forward is checked
        shapes.clear()
        found = tokens(name, {"do_sample": False}, PAGED)
    finally:
        torch.nn.Linear.forward = original  # type: ignore[method-assign]
    assert torch.equal(expected, found)
    assert len(shapes) == max(lengths) and shapes[0][0] == 4, shapes
    assert sum(rows for rows, _ in shapes[1:]) == sum(lengths) - 4, "rows that ended were computed on"


@pytest.mark.parametrize("mode", ["greedy", "beams"])
@pytest.mark.parametrize("name", [T5, "BartForConditionalGeneration", "BartForCausalLM"])
def test_rows_that_lost_their_blocks_are_computed_again(name: str, mode: str, preempted: list[str]) -> None:
    """Prompts that do not fit together begin one after another, in the forward that plain gives them."""
    options = {**MODES[mode], "eos_token_id": None, "max_new_tokens": 24}
    expected = tokens(name, options)
    needed = {"greedy": 8, "beams": 16}[mode]  # a request's, at least
    paged = {"cache_implementation": "paged", "cache_config": {"block_size": 8, "num_blocks": 2 * needed}}
    assert torch.equal(tokens(name, options, paged), expected)
    route = last_route(build(name))
    assert route is not None and route.road == "engine", route
    assert preempted, "the budget was meant to be short"
    assert_whole(name)


def test_beams_share_the_keys_and_values_of_their_encoder() -> None:
    model, options = build(T5), {"num_beams": 4, "max_new_tokens": 7, "do_sample": False}
    ids = torch.randint(60, 100, (1, 80))
    expected = model.generate(ids, **options)
    model.generate(ids, **options, **PAGED)
    memory_stats(model, reset=True)
    assert torch.equal(model.generate(ids, **options, **PAGED), expected)
    # of the encoder's 80 tokens, 8 a block; of each beam's, which are less; a state's slot for each
    assert memory_stats(model).peak_blocks <= 10 + 4 + 4 + 1
    assert_whole(T5)


def test_an_interrupted_forward_never_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    name = T5
    expected = tokens(name, MODES["sampled"])
    tokens(name, MODES["sampled"], PAGED)
    last = build(name).decoder.block[-1].layer[-1]
    original = type(last).forward
    for after in range(2, 14, 3):
        calls = itertools.count()

        def interrupted(self: Any, hidden: torch.Tensor, calls: Any = calls, after: int = after) -> torch.Tensor:
            if self is last and next(calls) == after:
                raise KeyboardInterrupt
            found: torch.Tensor = original(self, hidden)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(type(last), "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                tokens(name, MODES["sampled"], PAGED)
        assert_whole(name)
    assert torch.equal(tokens(name, MODES["sampled"], PAGED), expected)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("RecurrentGemmaForCausalLM", "without all rows of its batch"),  # states in its modules
        ("SwitchTransformersForConditionalGeneration", "its experts have a capacity for the whole batch"),
        ("MoonshineStreamingForConditionalGeneration", "its forward writes to its inputs"),
    ],
)
def test_rows_that_depend_on_one_another_stay_on_the_loop_of_transformers(name: str, why: str) -> None:
    expected = tokens(name, {"do_sample": False})
    assert torch.equal(tokens(name, {"do_sample": False}, PAGED), expected)
    route = last_route(build(name))
    assert route is not None and route.road == "hf_loop" and why in route.reason, route
    assert_whole(name)
