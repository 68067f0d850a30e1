"""Recorded steps outlive the memory of an idle pool: the next call records no step again."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

import hf_paged
from hf_paged import PagedEngine
from hf_paged.cache import free_memory
from hf_paged.model import registry
from hf_paged.tape import misses, recorders
from tests.support import models
from tests.support.graph_helpers import graphs_of
from tests.tape.test_rectangles import fresh, inputs_of
from tests.test_forks import holds_in_child

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
AT_ONCE: dict[str, Any] = {"block_size": models.BLOCK_SIZE, "idle_release_seconds": 0}
NEVER = {**AT_ONCE, "idle_release_seconds": None}

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="addresses outlive their memory on Linux"),
    pytest.mark.usefixtures("needs_compiler"),
]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts recordings."""
    own = recorders.Tapes.capture
    counted = create_autospec(own, side_effect=own)
    monkeypatch.setattr(recorders.Tapes, "capture", counted)
    return counted


def memory_of(model: Any) -> Any:
    return registry._memories[model][1]


def resident_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the pages that belong to these tensors' storages alone and take memory."""
    page, total = mmap.PAGESIZE, 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = -(-storage.data_ptr() // page) * page
        num_pages = (storage.data_ptr() + storage.nbytes() - start) // page
        if num_pages > 0:
            vector = (ctypes.c_ubyte * num_pages)()
            size = ctypes.c_size_t(num_pages * page)
            assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(start), size, vector)
            total += sum(flag & 1 for flag in vector) * page
    return total


def tensors_of(memory: Any) -> Iterator[torch.Tensor]:
    """The blocks of the layers, released or not, and what recordings write to."""
    for group in memory.groups.values():
        for layer in (group.storage.layers | group.storage.released).values():
            yield from layer.data
    recorder = graphs_of(memory)
    yield from recorder._outputs._buffers.values()
    for step in recorder._graphs.values():
        yield step.graph._arena._memory
        yield from step.inputs.state_buffers


def assert_released(memory: Any) -> None:
    assert memory.stats().held_bytes == 0 and not resident_bytes(tensors_of(memory))


def assert_as_plain(model: Any, inputs: Any, config: Any = AT_ONCE) -> None:
    expected = model.generate(**inputs, **GREEDY)
    options = {**GREEDY, "cache_implementation": "paged", "cache_config": config}
    assert torch.equal(model.generate(**inputs, **options), expected)
    hf_paged.check_integrity(model)


@pytest.mark.parametrize(
    "class_name",
    [
        "LlamaForCausalLM",
        "T5ForConditionalGeneration",
        "MambaForCausalLM",  # states alone
        "Qwen3NextForCausalLM",  # states and blocks
        "BloomForCausalLM",  # reads all keys
    ],
)
def test_a_call_after_a_release_records_nothing(class_name: str, captures: Any) -> None:
    model, inputs = fresh(class_name), inputs_of(class_name)
    assert_as_plain(model, inputs, NEVER)
    assert_as_plain(model, inputs, NEVER)  # replays what the checks of the first have allowed
    num_captures, memory = captures.call_count, memory_of(model)
    num_replays = hf_paged.last_route(model).num_captured_steps  # type: ignore[union-attr]
    assert num_captures and num_replays > 5
    has_pages = class_name != "MambaForCausalLM"  # its tensors may contain no whole page
    assert resident_bytes(tensors_of(memory)) or not has_pages
    for _ in range(2):
        memory.release()
        assert_released(memory)
        assert_as_plain(model, inputs, NEVER)
        route = hf_paged.last_route(model)
        assert route is not None and route.num_captured_steps >= num_replays
        assert resident_bytes(tensors_of(memory)) or not has_pages
    assert captures.call_count == num_captures


def test_an_engine_that_was_idle_records_nothing(
    captures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although more memory is free each time than the time before."""
    prompts, found = models.token_ids(1, 9).tolist(), []
    free_bytes = itertools.count(2**30, 2**20)
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: next(free_bytes))
    with PagedEngine(models.build("llama"), AT_ONCE) as engine:
        for _ in range(2):
            found += engine.generate(prompts, GREEDY)
            assert_released(engine.memory)
        engine.check_integrity()
    assert found[0].token_ids == found[1].token_ids and captures.call_count == 1


def test_other_sizes_and_weights_between_calls(captures: Any) -> None:
    """A smaller pool fits in the addresses of a larger one; the other way it is recorded again. A
    replay reads the weights at their addresses."""
    model, counts = models.build("llama"), []
    for length in (9, 200, 9, 1, 200):
        assert_as_plain(model, models.prompt("llama", 3, length))
        counts.append(captures.call_count)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    assert_as_plain(model, models.prompt("llama"))
    counts.append(captures.call_count)
    down = model.model.layers[1].mlp.down_proj
    down.weight = torch.nn.Parameter(down.weight.detach() * 1.5)
    assert_as_plain(model, models.prompt("llama"))
    assert [*counts, captures.call_count] == [1, 2, 2, 2, 2, 2, 3]


def test_pools_that_give_way_to_each_other(captures: Any) -> None:
    """Under a budget that is too small for both."""
    pair, inputs = [models.build("llama", seed) for seed in (1, 2)], models.prompt("llama")
    assert_as_plain(pair[0], inputs, NEVER)
    try:
        hf_paged.budget(int(1.5 * memory_of(pair[0]).stats().held_bytes))
        for _ in range(2):
            for model, other in (pair, pair[::-1]):
                assert_as_plain(other, inputs, NEVER)
                assert_released(memory_of(model))
    finally:
        hf_paged.budget(None)
    assert captures.call_count == 2


def test_recordings_with_adapters_go_with_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(misses, "MIN_FIXED_MISSES", 3)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(models.build("llama"), lora, adapter_name="first").eval()
    model.add_adapter("second", lora)
    names, rows = ["__base__", "first", "second"], models.token_ids(1, 9).tolist() * 3
    with PagedEngine(model, NEVER) as engine:
        found = []
        for _ in range(2):
            results = engine.generate(rows, GREEDY, adapter=names)
            found.append([tuple(result.token_ids) for result in results])
            steps = graphs_of(engine.memory)._graphs
            assert any(step.context is not None for step in steps.values())
            assert engine.memory.release()
            assert all(step.context is None for step in steps.values())
    assert found[0] == found[1] and len({*found[0]}) == 3


@pytest.mark.parametrize("class_name", ["LlamaForCausalLM", "MambaForCausalLM"])
def test_addresses_are_given_back_where_they_are_limited(
    class_name: str, captures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = fresh(class_name), inputs_of(class_name)
    monkeypatch.setattr(free_memory, "address_limit", lambda: 1 << 46)
    for number in (1, 2):
        assert_as_plain(model, inputs)
        assert captures.call_count == number
        memory = memory_of(model)
        assert not any(group.storage.released for group in memory.groups.values())
        recorder = graphs_of(memory)
        assert not (recorder._graphs or recorder._outputs._buffers)


@pytest.mark.slow
def test_a_child_process_and_its_parent(captures: Any) -> None:
    model, inputs = models.build("llama"), models.prompt("llama")
    assert_as_plain(model, inputs)

    def records_once() -> bool:
        for _ in range(3):
            assert_as_plain(model, inputs)
        return captures.call_count == 2

    assert holds_in_child(records_once)
    assert_as_plain(model, inputs)
    assert captures.call_count == 1
