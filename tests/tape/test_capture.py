"""The models whose steps are recorded, with a CPU stand-in for a device's graphs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.step import NotCapturable, StepMetadata
from hf_paged.tape.recorders import reason_of
from tests.batching.test_packed_families import build
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import make_inputs
from tests.support.architectures import list_architectures
from tests.support.engine_helpers import lone_run
from tests.support.graph_helpers import (
    FakeGraphs,
    assert_as_lone,
    graphs_of,
    job,
    results,
)

OPTIONS = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": None}

pytestmark = pytest.mark.usefixtures("needs_compiler")


class _Masked(nn.Module):
    """A product that indexes with a mask of all tokens."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.isfinite().all(-1).to(self.dtype)
        return self.inner(x[mask]).view(*x.shape[:-1], -1)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_model_that_indexes_with_a_mask_is_not(
    dtype: torch.dtype, graphs: FakeGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    mlp: Any = model.model.layers[0].mlp
    mlp.down_proj = _Masked(mlp.down_proj, dtype)
    expected = model.generate(**inputs, **OPTIONS)
    reason = f"decode steps are not recorded: {READ} (aten.index.Tensor)"
    slowed_by = (f"{reason} [troubleshooting.md#recording]",)
    for _ in range(2):  # the second call attempts no recording
        assert torch.equal(model.generate(**inputs, **OPTIONS, **models.PAGED), expected)
        route: Any = hf_paged.last_route(model)
        assert route.road == "engine" and not graphs.graphs
        assert route.slowed_by == slowed_by
    (record,) = caplog.records
    assert record.getMessage() == f"LlamaForCausalLM runs slower than it could: {slowed_by[0]}"
    with PagedEngine(model, PagedConfig(block_size=models.BLOCK_SIZE)) as engine:
        for _ in range(2):
            engine.generate([[1, 2, 3]], {**OPTIONS, "max_new_tokens": 9})
            assert engine.route.slowed_by == slowed_by  # type: ignore[union-attr]


def test_the_reason_is_told_for_rows_with_rotary_factors_of_their_own() -> None:
    with PagedEngine(build("longrope")) as engine:
        engine.generate([[*range(5, 75)]], {**OPTIONS, "max_new_tokens": 9})
        assert "its rotary factors depend on the length" in str(engine.route.slowed_by)  # type: ignore[union-attr]


PACKED = "packed forwards under the engine's scheduler"
STEPS = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "num_beams": 1}
# a loop over the selected experts: `nonzero`, in `forward`
READ = "its forward reads the content of a tensor"
NOT_CAPTURED = dict.fromkeys(("DbrxForCausalLM", "LongcatFlashForCausalLM"), READ)
"""Causal architectures that run packed but are not recorded on a device, with the reason."""

# their own attention code gets as many keys as the longest row has
OWN_CODE = {
    "BloomForCausalLM",
    "FalconForCausalLM",
    "GitForCausalLM",  # packed in an engine of text alone
    "GPTNeoXJapaneseForCausalLM",
    "MptForCausalLM",
    "XGLMForCausalLM",
    *(("CodeGenForCausalLM", "GPTJForCausalLM") if models.BEFORE_5_24 else ()),
}
# attention in chunks is laid out on the host
CHUNKED = {"Llama4ForCausalLM", "Llama4ForConditionalGeneration"}
WITHOUT_CHUNKS = OWN_CODE | CHUNKED
"""Of the others, those whose steps with chunks are not recorded."""


def test_a_mask_of_ones_may_be_read_by_tapes_too() -> None:
    """BioGPT's mask, in a plan: the key names the operation that failed."""
    model = tiny_model(transformers.BioGptForCausalLM)
    inputs = make_inputs(model)["text"]
    expected = model.generate(**inputs, **STEPS)
    assert torch.equal(model.generate(**inputs, **STEPS, **models.PAGED), expected)
    assert hf_paged.last_route(model).num_captured_steps > 0  # type: ignore[union-attr]

    def fail(step: Any) -> None:
        raise NotCapturable("on purpose")

    with pytest.raises(NotCapturable) as error:
        StepMetadata.rectangle(torch.zeros(1, 1, dtype=torch.int32), [1], 8).plan(fail)
    assert reason_of(error.value) == "on purpose"


def test_the_reason_is_an_error_of_the_recording() -> None:
    """Not one that the caller was handling, nor one that the recording translated."""
    try:
        raise FileNotFoundError("of the caller")
    except FileNotFoundError as handled:
        with pytest.raises(RuntimeError) as caught:
            try:
                raise NotCapturable("first")
            finally:
                raise RuntimeError("of ending the capture")
        assert reason_of(caught.value, handled) == "first"
        with pytest.raises(NotCapturable) as translated:
            try:
                raise KeyError("name")
            except KeyError as error:
                raise NotCapturable("a translation") from error
        assert reason_of(translated.value, handled) == "a translation"


@pytest.mark.slow_cases(but=["DbrxForCausalLM"])
@pytest.mark.parametrize("name", list_architectures("causal"))
def test_all_but_these_packed_architectures_are_captured(
    name: str, graphs: FakeGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts arrive while another request decodes, with the model on a device. What is made of
    numbers may be read and copied: BioGPT's mask, which we read; frequencies of PhiMoE; a constant
    and its check in Gemma3n."""
    caplog.set_level(logging.INFO, "hf_paged")
    graphs.has_device = True
    jobs = [job(6, number) for number in (24, *[2] * 5)]
    try:
        model: Any = tiny_model(getattr(transformers, name))
        model.generation_config.eos_token_id = None
        lone_run(model, jobs[1][0], jobs[1][1]["generation_config"])
        engine = PagedEngine(model, PagedConfig(block_size=models.BLOCK_SIZE, prefix_caching=False))
    except Exception as error:
        pytest.skip(f"not built, or not served by plain generate: {error!r}"[:100])
    with engine:
        engine.generate([jobs[1][0]], jobs[1][1]["generation_config"])
        if engine.route.reason != PACKED:  # type: ignore[union-attr]
            return
        found = results(engine, jobs, later=5)
        keys = list(graphs_of(engine.memory)._graphs)
    assert_as_lone(model, jobs, found)
    messages = [record.getMessage() for record in caplog.records]
    told = [message for message in messages if "not recorded" in message]
    reason = NOT_CAPTURED.get(name)
    assert any(not key.num_chunks for key in keys) == (reason is None), told
    assert reason is None or any(reason in message for message in told), told
    has_chunks = reason is None and name not in WITHOUT_CHUNKS
    assert any(key.num_chunks for key in keys) == has_chunks, told
