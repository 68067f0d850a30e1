"""Recorded steps outlive the memory of an idle pool: the next call records no step again."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.cache import free_memory
from hf_paged.kernels import cpp
from hf_paged.model import registry
from hf_paged.tape import graphs, recorders
from tests.support import models
from tests.support.engine_helpers import run_all
from tests.tape.test_rectangles import fresh, inputs_of
from tests.test_forks import holds_in_child

CLASSES = [
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",
    "MambaForCausalLM",  # states alone
    "Qwen3NextForCausalLM",  # states and blocks
    "BloomForCausalLM",  # reads all keys
]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
CONFIG: dict[str, Any] = {"block_size": models.BLOCK_SIZE, "idle_release_seconds": 0}
PAGED: dict[str, Any] = {"cache_implementation": "paged", "cache_config": CONFIG}

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="addresses outlive their memory on Linux"),
    pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler: nothing is recorded"),
]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets an item for each recording."""
    found: list[Any] = []
    capture = recorders.Tapes.capture

    def counted(self: Any, *args: Any) -> Any:
        found.append(args)
        return capture(self, *args)

    monkeypatch.setattr(recorders.Tapes, "capture", counted)
    return found


def memory_of(model: Any) -> Any:
    return registry._memories[model][1]


def graphs_of(memory: Any) -> graphs.StepGraphs:
    (recorder,) = memory.recorders.values()
    return recorder


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
        yield step.graph._arena._memory  # type: ignore[union-attr]
        yield from step.inputs.state_buffers


def assert_as_plain(model: Any, inputs: Any, **options: Any) -> None:
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, **(options or PAGED)), expected)
    hf_paged.check_integrity(model)


@pytest.mark.parametrize("class_name", CLASSES)
def test_a_call_after_a_release_records_nothing(class_name: str, captures: list[Any]) -> None:
    model, inputs = fresh(class_name), inputs_of(class_name)
    kept = {**PAGED, "cache_config": {**CONFIG, "idle_release_seconds": None}}
    assert_as_plain(model, inputs, **kept)
    assert_as_plain(model, inputs, **kept)  # replays what the checks of the first have allowed
    num_captures, memory = len(captures), memory_of(model)
    num_replays = hf_paged.last_route(model).num_captured_steps  # type: ignore[union-attr]
    assert num_captures and num_replays > 5
    has_pages = class_name != "MambaForCausalLM"  # its tensors may contain no whole page
    assert resident_bytes(tensors_of(memory)) or not has_pages
    for _ in range(2):
        memory.release()
        assert memory.stats().held_bytes == 0 and not resident_bytes(tensors_of(memory))
        assert_as_plain(model, inputs, **kept)
        route = hf_paged.last_route(model)
        assert route is not None and route.num_captured_steps >= num_replays
        assert resident_bytes(tensors_of(memory)) or not has_pages
    assert len(captures) == num_captures


def test_an_engine_that_was_idle_records_nothing(captures: list[Any]) -> None:
    model, prompt = models.build("llama"), models.token_ids(1, 9)[0].tolist()
    config = {**CONFIG, "idle_release_seconds": 0.05}
    with PagedEngine(model, config) as engine:
        expected = engine.generate([prompt], GREEDY)[0].token_ids
        assert len(captures) == 1
        end = time.monotonic() + 10
        while hf_paged.memory_stats(engine).held_bytes and time.monotonic() < end:
            time.sleep(0.01)
        assert not hf_paged.memory_stats(engine).held_bytes
        assert not resident_bytes(tensors_of(engine.memory))
        assert engine.generate([prompt], GREEDY)[0].token_ids == expected
        assert len(captures) == 1
        engine.check_integrity()


def test_a_pool_of_another_size(captures: list[Any]) -> None:
    """A smaller one fits in the addresses of a larger one; the other way it is recorded again."""
    model = models.build("llama")
    counts = []
    for length in (9, 200, 9, 1, 200):
        assert_as_plain(model, models.prompt("llama", 3, length))
        counts.append(len(captures))
    assert counts == [1, 2, 2, 2, 2]


def test_changes_of_the_model_while_its_pool_is_released(captures: list[Any]) -> None:
    model, inputs = models.build("llama"), models.prompt("llama")
    assert_as_plain(model, inputs)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    assert_as_plain(model, inputs)
    assert len(captures) == 1, "a replay reads the weights at their addresses"
    down = model.model.layers[1].mlp.down_proj
    down.weight = torch.nn.Parameter(down.weight.detach() * 1.5)
    assert_as_plain(model, inputs)
    assert len(captures) == 2


def test_pools_that_give_way_to_each_other(captures: list[Any]) -> None:
    """Under a budget that is too small for both."""
    pair = [models.build("llama", seed) for seed in (1, 2)]
    inputs = models.prompt("llama")
    kept = {**PAGED, "cache_config": {**CONFIG, "idle_release_seconds": None}}
    assert_as_plain(pair[0], inputs, **kept)
    try:
        hf_paged.budget(int(1.5 * memory_of(pair[0]).stats().held_bytes))
        for _ in range(2):
            for model, other in (pair, pair[::-1]):
                assert_as_plain(other, inputs, **kept)
                assert not memory_of(model).stats().held_bytes
                assert not resident_bytes(tensors_of(memory_of(model)))
    finally:
        hf_paged.budget(None)
    assert len(captures) == 2


def test_recordings_with_adapters_go_with_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(graphs, "MIN_FIXED_MISSES", 3)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(models.build("llama"), lora, adapter_name="first").eval()
    model.add_adapter("second", lora)
    names = ["__base__", "first", "second"]
    prompt = models.token_ids(1, 9)
    with PagedEngine(model, PagedConfig(**{**CONFIG, "idle_release_seconds": None})) as engine:
        found = []
        for _ in range(2):
            added = [engine.add_request(prompt, GREEDY, adapter=name) for name in names]
            results = run_all(engine)
            found.append([results[request].token_ids for request in added])
            recorder = graphs_of(engine.memory)
            assert any(step.context is not None for step in recorder._graphs.values())
            assert engine.memory.release()
            assert all(step.context is None for step in recorder._graphs.values())
    assert found[0] == found[1] and len({*map(tuple, found[0])}) == 3


@pytest.mark.parametrize("class_name", ["LlamaForCausalLM", "MambaForCausalLM"])
def test_addresses_are_given_back_where_they_are_limited(
    class_name: str, captures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = fresh(class_name), inputs_of(class_name)
    monkeypatch.setattr(free_memory, "address_limit", lambda: 1 << 46)
    for number in (1, 2):
        assert_as_plain(model, inputs)
        assert len(captures) == number
        memory = memory_of(model)
        assert not any(group.storage.released for group in memory.groups.values())
        recorder = graphs_of(memory)
        assert not (recorder._graphs or recorder._outputs._buffers)


@pytest.mark.slow
def test_a_child_process_and_its_parent(captures: list[Any]) -> None:
    model, inputs = models.build("llama"), models.prompt("llama")
    assert_as_plain(model, inputs)

    def records_once() -> bool:
        for _ in range(3):
            assert_as_plain(model, inputs)
        return len(captures) == 2

    assert holds_in_child(records_once)
    assert_as_plain(model, inputs)
    assert len(captures) == 1
