"""Captured decode steps on the CPU, with `FakeGraphs` for the device's graph object."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

import hf_paged
from hf_paged import PagedConfig, PagedEngine, kernels
from hf_paged.cache import free_memory, kv_blocks
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.model import registry
from hf_paged.model.registry import memory_for
from hf_paged.step import NotCapturable
from hf_paged.tape import graph_keys, misses, recorders
from hf_paged.tape import graphs as recording
from hf_paged.tape.graph_keys import GraphKey as Key
from hf_paged.tape.torch_options import torch_options
from tests.batching.test_runner import SIZE, assert_close
from tests.support import models
from tests.support.checks import in_threads
from tests.support.engine_helpers import (
    assert_drained,
    assert_same_as_lone,
    prompts,
    run_all,
)
from tests.support.graph_helpers import (
    CapturedBench,
    FakeGraphs,
    assert_as_lone,
    graphs_of,
    job,
    results,
)
from tests.support.precision import BY_BACKEND, LEGACY, default_precision

CONFIG = PagedConfig(block_size=SIZE, max_num_batched_tokens=40)
GREEDY = {"do_sample": False, "eos_token_id": None}
OF_A_CALL: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60}

pytestmark = pytest.mark.usefixtures("graphs")


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    config = {"block_size": SIZE, **options.pop("cache_config", {})}
    return model.generate(**inputs, **options, cache_implementation="paged", cache_config=config)


def keys(owner: Any) -> list[Key]:
    return list(graphs_of(owner.memory)._graphs)


def test_graphs_are_replayed_while_an_assistant_takes_memory(graphs: FakeGraphs) -> None:
    model, assistant = models.get("llama"), models.get_assistant("llama")
    jobs = [job(9, 24), job(12, 4, 1, assistant_model=assistant)]
    with PagedEngine(model, PagedConfig(block_size=64, num_blocks=8)) as engine:
        names = [engine.add_request(jobs[0][0], **jobs[0][1])]
        for _ in range(8):
            engine.step()
        (graph,), num_replays = graphs.graphs, graphs.num_replays
        names.append(engine.add_request(jobs[1][0], **jobs[1][1]))
        found = run_all(engine)
        assert graph.num_replays > num_replays and len(engine.memory.groups) == 2
    assert_as_lone(model, jobs, [found[name] for name in names])


@pytest.mark.slow
def test_autocast(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay converts the weights: autocast's cached casts do not outlive it."""
    was_cached: list[bool] = []
    graphs.fail = lambda: was_cached.append(torch.is_autocast_cache_enabled())
    bench = CapturedBench(models.build("llama"), graphs)
    (row,) = bench.rows(5)
    if not kernels.triton.is_available(torch.device("cpu")):
        pytest.skip("no Triton, or TRITON_INTERPRET unset")
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "triton")
    bench.begin()
    for step in range(6):
        with torch.autocast("cpu", torch.bfloat16, enabled=step > 2):
            found = bench.decode(row)
            assert torch.is_autocast_cache_enabled()
            assert found.dtype == (torch.bfloat16 if step > 2 else torch.float32)
        assert (found.float() - bench.plain(row)).norm() < 0.05 * found.float().norm()
    assert was_cached == [False, False] and graphs.num_replays == 4
    assert [key.options[0] for key in keys(bench)] == [None, torch.bfloat16]  # type: ignore[index]


def test_the_graph_used_longest_ago_goes_first(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_GRAPHS", 2)
    bench = CapturedBench(models.get("llama"), graphs)
    rows = bench.rows(*[SIZE + 1] * 4)
    for count in (1, 1, 2, 2, 1, 4, 4):
        bench.decode(*rows[:count])
    assert [key.num_decodes for key in keys(bench)] == [1, 4]


@pytest.mark.slow_cases("gemma3*")
@pytest.mark.parametrize(
    ("name", "least", "widths"),
    [("llama", SIZE, [1, 2, 4, 8]), ("llama", 128, [16]), ("gemma3", SIZE, [1, 2, 4, 8])],
)
def test_wider_tables_need_another_graph(
    name: str, least: int, widths: list[int], graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's launches are sized for its tables; a row that outgrows them is not truncated.
    `least`: tokens for which the first tables have room."""
    monkeypatch.setattr(graph_keys, "MIN_TABLE_TOKENS", least)
    bench = CapturedBench(models.get(name), graphs)
    bench.check(*bench.rows(2, 5), times=55)
    full = bench.runner.windows.index(None)
    assert sorted(key.widths[full] for key in keys(bench)) == widths
    if name == "gemma3":  # blocks leave the window
        assert max(key.widths[1 - full] for key in keys(bench)) == 2


def test_a_pool_that_grows(graphs: FakeGraphs) -> None:
    bench = CapturedBench(models.get("llama"), graphs, reserved=0)
    (row,) = bench.rows(2)
    bench.decode(row, times=3)
    held = weakref.ref(bench.groups[0].storage.layers[0])
    bench.rows(299)
    assert held() is None, "nothing holds the blocks before the growth"
    bench.check(row, times=3)
    assert len(graphs.graphs) == 2 and graphs.graphs[1].num_replays == 3  # no wait the second time


cuda, matmul = torch.backends.cuda, torch.backends.cuda.matmul
cudnn, mkldnn, einsum = torch.backends.cudnn, torch.backends.mkldnn, torch.backends.opt_einsum
SWITCHES: list[tuple[Callable[[Any], Any], Any, Any]] = [  # setter, value, default
    *(
        (functools.partial(setattr, owner, name), value, not value)
        for owner, name, value in (
            (matmul, "allow_fp16_reduced_precision_reduction", False),
            (matmul, "allow_bf16_reduced_precision_reduction", False),
            (matmul, "allow_fp16_accumulation", True),
            *((cudnn, name, name != "enabled") for name in ("enabled", "benchmark")),
            *((x, "deterministic", True) for x in (cudnn, mkldnn)),
            (mkldnn, "enabled", False),
            (einsum, "enabled", not einsum.enabled),
        )
    ),
    (cuda.enable_flash_sdp, False, True),
    (cuda.enable_mem_efficient_sdp, False, True),
    (cuda.enable_math_sdp, False, True),
    (cuda.enable_cudnn_sdp, False, True),
    (cuda.allow_fp16_bf16_reduction_math_sdp, True, False),
    (torch.backends.mha.set_fastpath_enabled, False, True),
    (torch.use_deterministic_algorithms, True, False),
    (torch.set_default_dtype, torch.float64, torch.float32),
    (torch.set_num_threads, 2, 1),
]


def test_graphs_are_of_the_kernels_that_torch_chooses(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The precision of products may change while requests run."""
    monkeypatch.setattr(graph_keys, "MIN_TABLE_TOKENS", 128)
    bench = CapturedBench(models.get("llama"), graphs)
    rows = bench.rows(2)
    with default_precision():  # whatever other tests have left
        bench.decode(*rows, times=2)
    for count, name in enumerate(("cuda.matmul", "mkldnn.matmul"), 2):
        with default_precision():
            BY_BACKEND[name]()
            bench.decode(*rows, times=2)
            assert len(keys(bench)) == count
        with default_precision():
            bench.decode(*rows, times=2)
        assert len(keys(bench)) == count
    for change in (
        BY_BACKEND["all"],
        lambda: monkeypatch.setenv(kernels.BACKEND_VARIABLE, "cpp"),
    ):
        bench.begin()
        bench.decode(*rows, times=2)
        assert keys(bench)
        with default_precision():
            change()
            bench.begin()
        assert not keys(bench)


def test_options_of_torch_that_choose_kernels_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch refuses to read the legacy ones, or lacks some."""
    for setter, value, default in SWITCHES:
        before = torch_options()
        setter(value)
        after = torch_options()
        setter(default)
        assert after != before == torch_options(), setter
    setters = BY_BACKEND | LEGACY
    for first, second in itertools.product(setters, setters):
        with default_precision():
            before = torch_options()
            setters[first]()
            after_one = torch_options()
            setters[second]()
            assert before not in (after_one, torch_options()), (first, second)
    before = torch_options()
    monkeypatch.delattr(torch.backends.cuda, "cudnn_sdp_enabled")
    monkeypatch.delattr(type(torch.backends.mkldnn), "matmul")
    now = torch_options()
    assert len(now) == len(before) and sum(x != y for x, y in zip(before, now)) == 2
    assert now.count(None) == before.count(None) + 2


@pytest.mark.parametrize("backend", ["gather", "reference"])
def test_attention_that_needs_lengths_on_the_host(
    backend: str,
    graphs: FakeGraphs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, backend)
    bench = CapturedBench(models.get("gemma3"), graphs)
    bench.check(*bench.rows(4, 4), times=4)
    assert not graphs.graphs
    (reason,) = bench.reasons
    message = "no kernel that reads lengths on the device supports its attention"
    assert reason.endswith(f": {message} [troubleshooting.md#recording]")


def test_a_capture_that_fails(graphs: FakeGraphs) -> None:
    """The step runs eagerly, and no capture is tried before the model changes."""
    attempts, error = [], "CUDA error: operation not permitted when stream is capturing"

    def fail() -> None:
        attempts.append(1)
        try:
            raise RuntimeError(f"{error}\nand more")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error")

    bench = CapturedBench(models.build("llama"), graphs)
    rows = bench.rows(4, 4)
    graphs.fail = fail
    bench.check(*rows, times=4)
    assert attempts == [1] and not keys(bench) and bench.runner.num_captured_steps == 0
    (reason,) = bench.reasons
    assert reason.endswith(f": {error} [troubleshooting.md#recording]")
    graphs.fail = None
    bench.reasons.clear()
    bench.begin()
    bench.decode(*rows)
    assert not keys(bench) and bench.reasons == {reason}, "later steps say so, too"
    bench.model.model.layers[0].self_attn.scaling *= 2.0
    bench.begin()
    bench.check(*bench.rows(4), times=2)
    assert keys(bench)


def test_a_capture_for_which_there_is_no_memory(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Existing graphs stay in use; further attempts come at growing intervals until one
    succeeds."""
    attempts: list[int] = []

    def fail() -> None:
        attempts.append(num_steps)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(graph_keys, "MIN_TABLE_TOKENS", 1024)
    bench = CapturedBench(models.build("llama"), graphs)
    rows = bench.rows(4, 4)
    bench.decode(rows[0], times=3)
    graphs.fail = fail
    for num_steps in range(12):
        if num_steps == 9:
            graphs.fail = None
        bench.check(*rows)
        bench.check(rows[0])
    assert attempts == [1, 5] and graphs_of(bench.memory).unsupported_reason is None
    assert [key.num_decodes for key in keys(bench)] == [2, 1]
    (reason,) = bench.reasons
    assert "there is not enough free memory to record" in reason


def test_no_garbage_is_collected_and_no_other_records_meanwhile(graphs: FakeGraphs) -> None:
    """Two models in two threads: the second, whose step falls within the first's recording, records
    later."""
    first, second = (CapturedBench(models.build("llama"), graphs) for _ in range(2))
    (a,), (b,) = first.rows(4), second.rows(4)
    first.decode(a)
    second.decode(b)
    seen: list[Any] = []

    def other() -> None:
        graphs.fail = None
        second.check(b)
        seen.append((gc.isenabled(), keys(second)))

    graphs.fail = lambda: in_threads(other)
    assert gc.isenabled()
    first.check(a)
    assert gc.isenabled() and seen == [(False, [])] and keys(first)
    second.check(b)
    assert keys(second)


def test_garbage_is_collected_again_after_the_last_recording() -> None:
    """On two devices, which two threads record at once."""
    has_begun, may_end = threading.Event(), threading.Event()

    def record() -> None:
        with recorders.exclusive_recording(torch.device("meta")):
            has_begun.set()
            may_end.wait(60)

    other = threading.Thread(target=record)
    try:
        with recorders.exclusive_recording(torch.device("cpu")):
            other.start()
            assert has_begun.wait(60)
        assert not gc.isenabled()
    finally:
        may_end.set()
        other.join()
    assert gc.isenabled()


def test_a_forward_that_fails_in_a_capture_and_eagerly(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("on purpose")

    model, jobs = models.build("llama"), [job(9, 30)]
    with PagedEngine(model, CONFIG) as engine:
        engine.add_request(jobs[0][0], **jobs[0][1])
        for _ in range(2):  # the prompt, and an eager decode
            engine.step()
        with monkeypatch.context() as patch:
            # a function of a library: no change is noticed
            patch.setattr(modeling_llama, "apply_rotary_pos_emb", fail)
            (output,) = engine.step()
        assert output.result is not None and isinstance(output.result.error, OSError)
        assert_drained(engine)
        assert graphs_of(engine.memory).unsupported_reason == "on purpose"
        assert_as_lone(model, jobs, results(engine, jobs))
        assert_drained(engine)


@pytest.mark.parametrize("failures", [1, 2])
def test_reserved_memory_is_freed_if_a_recording_runs_out(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device the allocator decides when a recording runs out of memory."""
    done: list[str] = []
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("clear"), raising=False
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("free"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    backend = object.__new__(recorders.CudaGraphs)

    def record(graph: Any, run: Any) -> None:
        done.append("record")
        if done.count("record") <= failures:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(backend, "_record", record)
    with contextlib.nullcontext() if failures == 1 else pytest.raises(torch.OutOfMemoryError):
        assert isinstance(backend._capture_graph(lambda: None), SimpleNamespace)
    assert done == ["clear", "record", "clear", "free", "clear", "record", "clear"]


@pytest.mark.slow
def test_free_gives_everything_back(graphs: FakeGraphs) -> None:
    """At once, not with the next garbage collection; nor do graphs keep a model."""
    model: Any
    model, inputs = models.build("llama"), models.prompt("llama")

    def refs(memory: Any) -> list[weakref.ref[Any]]:
        decodes = graphs_of(memory)
        found = [decodes, *decodes._outputs._buffers.values(), *decodes._graphs.values()]
        assert len(found) > 2
        found += [step.inputs._buffer for step in decodes._graphs.values()]
        graphs.graphs.clear()
        return [*map(weakref.ref, found)]

    gc.disable()
    try:
        for is_returned in (False, True):  # a cache that is still held needs no graphs
            found = generate(model, inputs, **OF_A_CALL, return_dict_in_generate=is_returned)
            held = refs(registry._memories[model][1])
            hf_paged.free(model)
            assert not any(ref() for ref in held)
        assert found.past_key_values.get_seq_length() > 50

        engine = PagedEngine(model, CONFIG)
        engine.generate(inputs["input_ids"], {**GREEDY, "max_new_tokens": 9})
        held = refs(engine.memory)
        engine.free()
        assert not any(ref() for ref in held)
    finally:
        gc.enable()
    generate(model, inputs, **OF_A_CALL)
    held = [*refs(registry._memories[model][1]), weakref.ref(model)]
    model = engine = found = None
    gc.collect()
    assert not any(ref() for ref in held)


@pytest.mark.parametrize(
    ("backend", "capture"), [("", True), ("gather", True), ("", False)], ids=str
)
def test_decode_steps_on_the_cpu_are_tapes(
    backend: str, capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the backend has no kernels, or the config turns recordings off."""
    monkeypatch.undo()
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, backend)
    with PagedEngine(models.get("llama"), PagedConfig(block_size=SIZE, capture=capture)) as engine:
        engine.generate(prompts(5), {**GREEDY, "max_new_tokens": 9})
        has_tapes = capture and not backend
        assert engine.stats().num_captured_steps == (8 - misses.MIN_MISSES) * has_tapes
        assert bool(engine.memory.recorders) == has_tapes


@pytest.mark.parametrize("name", ["weight", "order", "unread"])
def test_a_replaced_tensor_drops_the_tapes_that_read_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    model, inputs = models.build("llama"), models.prompt("llama", 1, 9)
    norm: Any = model.model.norm
    forward = type(norm).forward

    def reordering(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return forward(self, hidden).index_select(-1, self.order)

    norm.__class__ = type("ReorderingNorm", (type(norm),), {"forward": reordering})
    norm.order = torch.arange(norm.weight.shape[0])
    norm.unread = norm.order.clone()
    recorded = []
    for _ in range(2):
        expected = model.generate(**inputs, **OF_A_CALL)
        assert torch.equal(generate(model, inputs, **OF_A_CALL), expected)
        (step,) = graphs_of(registry._memories[model][1])._graphs.values()
        recorded.append(step)
        before = getattr(norm, name)
        after = before.flip(0)
        setattr(norm, name, torch.nn.Parameter(-after) if name == "weight" else after)
    assert (recorded[0] is recorded[1]) == (name == "unread")


@pytest.mark.parametrize("changed", ["logits", "states"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_with_other_results_is_refused(dtype: torch.dtype, changed: str) -> None:
    """The states are what the replay makes of those before it."""
    expected, before = torch.randn(3, 50).to(dtype), torch.randn(3, 4, 5).to(dtype)
    logits, states = expected.clone(), before * 2

    def replay(wrong: str = "") -> None:
        logits.copy_(expected * 1.2 + 0.3 if wrong == "logits" else expected)
        states.mul_(2.2 if wrong == "states" else 2)

    given = [logits, states], {dtype}, lambda: states.copy_(before)
    recorders.check_replay(replay, *given)
    with pytest.raises(NotCapturable, match=f"the {changed} of a replay are .* deviations from"):
        recorders.check_replay(lambda: replay(changed), *given)


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device that takes memory on allocation; records the sizes of tensors that replaced smaller
    ones."""
    sizes: list[int] = []
    right = KVBlocks.grown

    def observed(self: KVBlocks, size: int) -> KVBlocks:
        sizes.append(size)
        return right(self, size)

    for module in (free_memory, kv_blocks):
        monkeypatch.setattr(module, "commits_when_touched", lambda device: False)
    monkeypatch.setattr(KVBlocks, "grown", observed)
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("budget", [{}, {"memory_fraction": 0.5}, {"num_blocks": 200}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3"])  # one group; windows and full attention
def test_memory_of_a_device_is_taken_once(
    name: str,
    budget: dict[str, Any],
    graphs: FakeGraphs,
    grown: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = 64 << 20
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: free)
    monkeypatch.setattr(graph_keys, "MIN_TABLE_TOKENS", 1024)
    lengths = [(5, 140), (19, 90), (9, 120), (30, 150)]
    config = {"block_size": SIZE, "prefix_caching": True, **budget}
    with PagedEngine(models.get(name), config) as engine:
        for first in (0, 10):
            # blocks that the first leaves in the prefix cache are evicted before tensors grow
            for seed, each in enumerate(lengths, first):
                prompt, options = job(*each, seed)
                engine.add_request(prompt, **options)
                if not seed:
                    grown.clear()  # from the model's checks, which use separate memory
            while engine.has_unfinished:
                engine.step()
        taken = sum(group.storage.nbytes for group in engine.memory.groups.values())
        assert engine.stats().num_steps > 272 and taken <= 0.5 * free
        assert_drained(engine)
    assert grown == [] and len(graphs.graphs) <= 3, (grown, len(graphs.graphs))


@pytest.mark.slow
def test_a_call_takes_what_it_can_need(graphs: FakeGraphs, grown: list[int]) -> None:
    """Layers with windows need no more than rows see; a longer call grows once, as the first left
    cached blocks."""
    model, config = models.build("gemma3"), {"block_size": SIZE, "max_num_batched_tokens": 16}
    for rows, new in ((2, 60), (3, 160)):
        inputs = models.padded_prompt("gemma3", (26, 14, 20)[:rows])
        options = {**GREEDY, "max_new_tokens": new}
        found = generate(model, inputs, **options, cache_config=config)
        assert torch.equal(found, model.generate(**inputs, **options))
        groups = memory_for(model, PagedConfig(**config)).groups.values()
        taken = [group for group in groups if group.storage.layers]
        sizes = {group.spec.window: group.storage.num_allocated_blocks for group in taken}
        whole = sizes[None]
        assert whole == rows * ((26 + new) // SIZE + 1) > 2 * min(sizes.values()), sizes
        assert set(grown) == {whole} if rows == 3 else max(grown, default=0) < whole
        grown.clear()  # from the model's checks, which use separate memory


def test_scores_are_not_overwritten_by_the_next_step(graphs: FakeGraphs) -> None:
    model, inputs = models.build("llama"), models.prompt("llama", 2)
    names = ("return_dict_in_generate", "output_scores", "output_logits")
    options = {**OF_A_CALL, **dict.fromkeys(names, True)}
    expected, found = model.generate(**inputs, **options), generate(model, inputs, **options)
    assert graphs.num_replays > 40
    for name in ("logits", "scores"):
        assert_close(torch.stack(found[name]), list(expected[name]))


@pytest.mark.slow
def test_every_adapter_has_its_graphs(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and beside others: a graph for their ranges, which the CPU's kernels do not read."""
    pytest.importorskip("peft")
    monkeypatch.setattr(misses, "MIN_FIXED_MISSES", 8)
    from tests.support.peft_models import ADAPTERS, lone_with, lora_model

    model = lora_model()
    names = (*ADAPTERS, "first")
    jobs = [job(12, 16, adapter=name) for name in names]
    prompt, options = jobs[0][0], jobs[0][1]["generation_config"]
    expected = {name: lone_with(model, name, prompt, options) for name in names}
    with PagedEngine(model, CONFIG) as engine:
        for _ in range(4):
            for batch in (*([each] for each in jobs[:3]), jobs):
                for (_, each), result in zip(batch, results(engine, batch)):
                    name = each["adapter"]
                    assert_same_as_lone(expected[name], result, options, name)
            count = len(graphs.graphs)
        variants = {key.variant for key in keys(engine)}
        assert variants > set(ADAPTERS) and any(isinstance(x, tuple) for x in variants)
        stats = engine.stats()
        assert stats.num_captured_steps == graphs.num_replays > stats.num_steps // 2
        results(engine, jobs)
        assert len(graphs.graphs) == count, "kept while the engine is idle"
