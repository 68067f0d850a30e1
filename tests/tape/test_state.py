"""Looks at a model whose steps are recorded: when a call and an engine's step take one."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_paged import PagedConfig, PagedEngine, last_route
from hf_paged.batching.loop import StepLoop
from hf_paged.fingerprints.state import StateReading
from hf_paged.tape.live import LiveModules
from tests.batching.test_changing_models import AT, SIMPLE, WIDTH, Processor
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.engine_helpers import lone_run, prompts

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30}

pytestmark = pytest.mark.usefixtures("needs_compiler")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often a model was read, and each part of it looked at."""
    counts = collections.Counter[str]()
    for name in ("__init__", "_read_parts", "read_values", "_read_content"):
        method = getattr(StateReading, name)

        def counted(self: Any, *args: Any, name: str = name, method: Any = method) -> Any:
            counts[name] += 1
            return method(self, *args)

        monkeypatch.setattr(StateReading, name, counted)
    return counts


@pytest.mark.parametrize("num_new", [30, 130], ids=["short", "with the prefix cache"])
def test_a_call_that_runs_no_callers_code_is_read_once(
    num_new: int, looks: collections.Counter[str]
) -> None:
    """It looks for moved tensors after each forward of the model, and before no other replay."""
    model, inputs = models.build("llama"), models.prompt("llama", 1, 9)
    options = {**GREEDY, "max_new_tokens": num_new, "eos_token_id": None}
    for _ in range(2):
        looks.clear()
        model.generate(**inputs, **options, **models.PAGED)
    route = last_route(model)
    assert route is not None
    num_eager = max(0, num_new - 1 - route.num_captured_steps)
    assert num_eager < 5
    assert looks["__init__"] == 1 + (num_new > 100)  # what was cached needs a fingerprint
    assert looks["_read_parts"] <= 1 + num_eager and not looks["read_values"]


def test_a_step_after_other_code_looks_once(looks: collections.Counter[str]) -> None:
    """An engine reads its model once for its guard and its recorded steps."""
    with PagedEngine(models.build("llama"), PagedConfig(block_size=8)) as engine:
        engine.add_request(prompts(9)[0], GREEDY, logits_processor=[lambda ids, scores: scores])
        for _ in range(12):
            engine.step()
        assert engine.stats().num_captured_steps and looks["__init__"] == 1
        looks.clear()
        for _ in range(5):
            engine.step()
    assert looks == dict.fromkeys(("_read_parts", "read_values", "_read_content"), 5)


def test_equal_values_set_again_keep_what_was_recorded() -> None:
    model: Any = models.build("llama")
    scaling = model.model.layers[0].self_attn.scaling
    inputs = models.token_ids(1, WIDTH)

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for layer in model.model.layers:
            layer.self_attn.scaling = scaling * 2 / 2
        return scores

    expected = model.generate(inputs, **GREEDY)
    found = model.generate(inputs, **GREEDY, **models.PAGED, logits_processor=[process])
    assert torch.equal(found, expected) and last_route(model).num_captured_steps > 20  # type: ignore[union-attr]


def test_weights_that_another_thread_replaces_between_steps_of_one_engine_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It should have paused the engine; a replay must not read memory that is not the model's."""
    model, (text,) = models.build("llama"), prompts(WIDTH)
    expected = lone_run(
        model, text, GREEDY, logits_processor=[Processor(lambda: SIMPLE["weight"](model))]
    )
    changed: Any = models.build("llama")
    propose, num_steps = StepLoop.propose, itertools.count()

    def between(self: Any, *args: Any) -> None:
        if next(num_steps) == AT + 1:  # a processor sees a token one forward later
            SIMPLE["weight"](changed)
        propose(self, *args)

    with PagedEngine(changed, PagedConfig(block_size=8)) as engine:
        monkeypatch.setattr(StepLoop, "propose", between)
        (result,) = engine.generate([text], GREEDY)
        assert engine.stats().num_captured_steps
    assert [result.token_ids] == expected


class Keeping(nn.Module):
    """Keeps what it computes, for other code."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.kept = inner, torch.zeros(1, 1, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.inner(x)
        return self.kept


def test_a_tensor_that_forwards_set_for_a_processor_is_set_in_each_step() -> None:
    model: Any = models.build("llama")
    layer = model.model.layers[1]
    layer.mlp = Keeping(layer.mlp).eval()

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + layer.mlp.kept[0, -1:].repeat(1, 2)

    inputs, options = models.token_ids(1, WIDTH), {**GREEDY, "logits_processor": [process]}
    expected = model.generate(inputs, **options)
    assert torch.equal(model.generate(inputs, **options, **models.PAGED), expected)
    assert "its forward writes `Keeping.kept`" in str(last_route(model))


def test_a_model_whose_steps_cannot_be_recorded_is_seldom_read(
    looks: collections.Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LiveModules, "learn", lambda *error: False)
    model = tiny_model(transformers.DbrxForCausalLM)  # its forward reads the content of a tensor
    reads = []
    for _ in range(10):
        model.generate(torch.arange(8)[None] + 1, **GREEDY, cache_implementation="paged")
        reads.append(looks.pop("__init__", 0))
    # the first call finds out; then the first, second, fourth and eighth call look again
    assert reads == [1, 1, 1, 0, 1, 0, 0, 0, 1, 0]
