"""Kernels that cannot be launched while a step is recorded."""

from __future__ import annotations

from typing import Any

import pytest

from hf_paged import PagedConfig, PagedEngine
from tests.kernels.triton import test_launch
from tests.kernels.triton.test_launch import Launches, errors, slow
from tests.support import models
from tests.support.engine_helpers import assert_same_as_lone, lone_run, prompts
from tests.support.graph_helpers import results, use_fake_graphs

pytestmark = test_launch.pytestmark
launches = test_launch.launches  # a fixture


@pytest.mark.slow_cases("attention_kernel")
@pytest.mark.parametrize("kernel", ["attention_kernel", pytest.param("_store_kernel", marks=slow)])
def test_a_recording_that_fails_leaves_the_step_to_the_engine(
    kernel: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = use_fake_graphs(monkeypatch)
    model = models.build("llama", num_hidden_layers=1)
    is_recording: list[bool] = []
    capture = backend.capture

    def observed(*args: Any) -> Any:
        is_recording.append(True)
        try:
            return capture(*args)
        finally:
            is_recording.pop()

    monkeypatch.setattr(backend, "capture", observed)
    launches.fail = lambda name, number: (
        errors()["resources"] if is_recording and name == kernel else None
    )
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        (result,) = results(engine, [(prompts(5)[0], {"generation_config": options})])
        assert not engine.stats().num_captured_steps and not backend.graphs
    monkeypatch.undo()
    assert_same_as_lone(lone_run(model, prompts(5)[0], options), result, options, kernel)
    assert launches.warnings == [kernel]
