"""Captured decode steps on the CPU: all but the device's graph object, which `FakeGraphs`
replaces."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

import hf_paged
from hf_paged import PagedConfig, PagedEngine, kernels
from hf_paged.batching.execution.buckets import bucket
from hf_paged.cache import free_memory, kv_blocks
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.kernels import cpp
from hf_paged.model.registry import memory_for
from hf_paged.model.state import read_state
from hf_paged.step import NotCapturable
from hf_paged.tape import graph_keys, recorders
from hf_paged.tape import graphs as recording
from hf_paged.tape.graph_keys import GraphKey as Key
from hf_paged.tape.graphs import StepGraphs
from hf_paged.tape.record import CaptureGuard
from hf_paged.tape.torch_options import torch_options
from tests.batching.test_runner import SIZE, Row, assert_close, tokens
from tests.support import models
from tests.support.engine_helpers import (
    MODES,
    assert_drained,
    assert_same_as_lone,
    lone_run,
    prompts,
    run_all,
)
from tests.support.graph_helpers import (
    CapturedBench,
    FakeGraphs,
    graphs_of,
    results,
    use_fake_graphs,
)
from tests.support.precision import BY_BACKEND, LEGACY, default_precision

NAMES = ("llama", "gemma3")  # one group; sliding window and full attention
CONFIG = PagedConfig(block_size=SIZE, max_num_batched_tokens=40)
GREEDY = {"do_sample": False, "eos_token_id": None}

pytestmark = pytest.mark.skipif(
    not cpp.is_available(), reason="no C++ compiler: nothing reads lengths from tensors"
)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGraphs]:
    yield use_fake_graphs(monkeypatch)


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    config = {"block_size": SIZE, **options.pop("cache_config", {})}
    return model.generate(**inputs, **options, cache_implementation="paged", cache_config=config)


def decodes_of(owner: Any) -> StepGraphs:
    found: StepGraphs = graphs_of(owner.memory)
    return found


def keys(owner: Any) -> list[Key]:
    return list(decodes_of(owner)._graphs)


def _need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.triton.is_available(torch.device("cpu")):
        pytest.skip("no Triton, or TRITON_INTERPRET unset")
    monkeypatch.setenv(kernels.VARIABLE, "triton")


# ------------------------------------------------------------------------------------------ sizes


def test_buckets() -> None:
    sizes = [bucket(n) for n in range(1, 513)]
    assert sizes[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert sorted(set(sizes[:128])) == [1, 2, 4, *range(8, 129, 8)]
    assert all(n <= size and size - n < max(8, n / 8) for n, size in enumerate(sizes, 1))
    assert len(set(sizes[:256])) == 27 <= recording.MAX_GRAPHS


# ----------------------------------------------------------------------------------------- parity


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_engine_gives_plain_tokens(name: str, graphs: FakeGraphs) -> None:
    """Rows of several lengths end and join, so that sizes change both ways; blocks leave
    windows."""
    model = models.get(name)
    lengths = [(5, 40), (19, 12), (9, 26), (1, 31), (12, 20), (30, 9), (3, 17)]
    jobs: list[Any] = []
    for number, (prompt, new) in enumerate(lengths):
        jobs.append(
            (
                prompts(prompt, seed=number)[0],
                {"generation_config": {**GREEDY, "max_new_tokens": new}},
            )
        )
    with PagedEngine(model, CONFIG) as engine:
        found = results(engine, jobs, later=3)
        stats = engine.stats()
        assert stats.num_captured_steps == graphs.num_replays > stats.num_steps / 2
        assert {key.num_decodes for key in keys(engine)} >= {1, 2, 4}
        assert_drained(engine)
    for (prompt, options), result in zip(jobs, found):
        assert_same_as_lone(
            lone_run(model, prompt, options["generation_config"]), result, GREEDY, name
        )


def test_graphs_are_replayed_while_an_assistant_takes_memory(graphs: FakeGraphs) -> None:
    model, (prompt, other), options = (
        models.get("llama"),
        prompts(9, 12),
        {**GREEDY, "max_new_tokens": 24},
    )
    with PagedEngine(model, PagedConfig(block_size=64, num_blocks=8)) as engine:
        first = engine.add_request(prompt, options)
        for _ in range(8):
            engine.step()
        (graph,), num_replays = graphs.graphs, graphs.num_replays
        engine.add_request(
            other, {**options, "max_new_tokens": 4}, assistant_model=models.get_assistant("llama")
        )
        found = run_all(engine)
        assert graph.num_replays > num_replays and len(engine.memory.groups) == 2
    assert_same_as_lone(lone_run(model, prompt, options), found[first], options, "first")


@pytest.mark.parametrize("mode", ["greedy_eos", "samples", "beams_eos"])
def test_generate_gives_plain_tokens(mode: str, graphs: FakeGraphs) -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama", (26, 4, 17))
    torch.manual_seed(1)
    expected = model.generate(**inputs, **MODES[mode])
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(generate(model, inputs, **MODES[mode]))
        count = len(graphs.graphs)
        route = hf_paged.last_route(model)
        assert route is not None and route.road == "engine" and route.num_captured_steps > 5
    assert torch.equal(found[0], expected) and torch.equal(found[1], expected)
    generate(model, inputs, **MODES["greedy_eos"], cache_config={"prefix_caching": False})
    assert hf_paged.last_route(model).num_captured_steps > 5  # type: ignore[union-attr]
    if mode == "greedy_eos":
        assert len(graphs.graphs) == count, "graphs are kept between calls"
    hf_paged.check_integrity(model)


def test_scores_are_not_overwritten_by_the_next_step(graphs: FakeGraphs) -> None:
    model, inputs = models.build("llama"), models.prompt("llama", 2)
    options: dict[str, Any] = dict(
        do_sample=False,
        max_new_tokens=60,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    expected = model.generate(**inputs, **options)
    found = generate(model, inputs, **options)
    assert graphs.num_replays > 40
    assert_close(torch.stack(found.logits), list(expected.logits))
    assert_close(torch.stack(found.scores), list(expected.scores))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_triton_kernels_read_the_buffers(
    name: str, graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if name == "gemma3" else {}
    bench = CapturedBench(models.build(name, num_hidden_layers=1 + len(layers), **layers), graphs)
    rows = [Row(tokens(60, seed), bench) for seed in range(3)]
    # around the end of the window and of a block
    bench.run([row.take(SIZE - 3 + 4 * n) for n, row in enumerate(rows)])
    _need_triton(monkeypatch)
    bench.begin()
    for _ in range(4):
        assert_close(bench.decode(*rows), [bench.plain(row) for row in rows])
    assert (
        bench.runner.num_captured_steps == 3
        and 0 in graphs.graphs[-1].run.args[1]._groups[0].seq_lens.device
    )  # type: ignore


@pytest.mark.slow
def test_autocast(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay converts the weights: autocast's cached casts do not outlive it."""
    was_cached: list[bool] = []
    graphs.fail = lambda: was_cached.append(torch.is_autocast_cache_enabled())
    bench = CapturedBench(models.build("llama"), graphs)
    row = Row(tokens(60, 0), bench)
    bench.run([row.take(5)])
    _need_triton(monkeypatch)
    bench.begin()
    for step in range(6):
        with torch.autocast("cpu", torch.bfloat16, enabled=step > 2):
            found = bench.decode(row)
            assert torch.is_autocast_cache_enabled()
            assert found.dtype == (torch.bfloat16 if step > 2 else torch.float32)
        assert (found.float() - bench.plain(row)).norm() < 0.05 * found.float().norm()
    assert was_cached == [False, False] and graphs.num_replays == 4
    assert [key.variant[1] for key in keys(bench)] == [None, torch.bfloat16]  # type: ignore[index]


# ------------------------------------------------------------------------------------------- rows


def test_padding_writes_nothing(graphs: FakeGraphs) -> None:
    bench = CapturedBench(models.get("llama"), graphs)
    rows = [Row(tokens(40, seed), bench) for seed in range(7)]
    bench.run([row.take(3) for row in rows])
    for _ in range(2):
        bench.decode(*rows)  # the buffers of all 8 rows hold something
    bench.decode(*rows[:5])
    items = [row.take(1) for row in rows[:5]]
    layers = bench.groups[0].storage.layers.values()
    # unwritten memory may be NaN
    before = [layer.data[0].view(torch.int32).clone() for layer in layers]
    bench.run(items)
    assert graphs.num_replays == 3 and [key.num_decodes for key in keys(bench)] == [8]
    for layer, old in zip(layers, before):
        # [num_blocks, block_size]
        changed = (layer.data[0].view(torch.int32) != old).any(dim=3).any(dim=1)
        assert changed.sum() == 5


def test_a_larger_graph_serves_until_there_is_one_of_the_size(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = CapturedBench(models.get("llama"), graphs)
    rows = [Row(tokens(40, seed), bench) for seed in range(4)]
    bench.run([row.take(SIZE + 1) for row in rows])
    for _ in range(2):
        bench.decode(*rows)
    monkeypatch.setattr(recording, "MIN_USES", 3)
    for number in range(5):
        assert_close(bench.decode(*rows[:2]), [bench.plain(row) for row in rows[:2]])
        assert [graph.num_replays for graph in graphs.graphs] == (
            [1 + number + 1] if number < 3 else [4, number - 2]
        )


def test_the_graph_used_longest_ago_goes_first(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_GRAPHS", 2)
    bench = CapturedBench(models.get("llama"), graphs)
    rows = [Row(tokens(40, seed), bench) for seed in range(4)]
    bench.run([row.take(SIZE + 1) for row in rows])
    for count in (1, 1, 2, 2, 1, 4, 4):
        bench.decode(*rows[:count])
    assert [key.num_decodes for key in keys(bench)] == [1, 4]


# -------------------------------------------------------------------------- what graphs depend on


@pytest.mark.slow_cases("gemma3")
@pytest.mark.parametrize("name", NAMES)
def test_wider_tables_need_another_graph(name: str, graphs: FakeGraphs) -> None:
    """A graph's launches are sized for its tables; a row that outgrows them is not truncated."""
    bench = CapturedBench(models.get(name), graphs)
    row, other = Row(tokens(80, 0), bench), Row(tokens(80, 1), bench)
    bench.run([row.take(2), other.take(5)])
    for _ in range(60):
        assert_close(bench.decode(row, other), [bench.plain(row), bench.plain(other)])
    full = bench.runner.windows.index(None)
    assert sorted(key.widths[full] for key in keys(bench)) == [1, 2, 4, 8, 16][: len(graphs.graphs)]
    assert (
        max(key.widths[full] for key in keys(bench)) >= len(row.blocks.tables[full].block_ids) > 4
    )
    if name == "gemma3":
        # blocks leave the window
        assert max(key.widths[1 - full] for key in keys(bench)) == 2


def test_tables_start_wide_enough_for_short_texts(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_keys, "MIN_TABLE_TOKENS", 128)
    bench = CapturedBench(models.get("llama"), graphs)
    row = Row(tokens(80, 0), bench)
    bench.run([row.take(2)])
    for _ in range(70):
        bench.decode(row)
    assert len(graphs.graphs) == 1 and keys(bench)[0].widths == (16,)


def test_a_pool_that_grows(graphs: FakeGraphs) -> None:
    bench = CapturedBench(models.get("llama"), graphs, reserved=0)
    row = Row(tokens(80, 0), bench)
    bench.run([row.take(2)])
    for _ in range(3):
        bench.decode(row)
    held = weakref.ref(bench.groups[0].storage.layers[0])
    other = Row(tokens(300, 1), bench)
    bench.run([other.take(299)])
    assert held() is None, "nothing holds the blocks before the growth"
    for _ in range(3):
        assert_close(bench.decode(row), [bench.plain(row)])
    assert len(graphs.graphs) == 2 and graphs.graphs[1].num_replays == 3  # no wait the second time


@pytest.mark.slow
def test_weights_changed_in_place_need_no_other_graph(graphs: FakeGraphs) -> None:
    model, inputs = models.build("llama"), models.prompt("llama")
    for _ in range(2):  # by now the pool has its final size
        generate(model, inputs, do_sample=False, max_new_tokens=50)
    count = len(graphs.graphs)
    before = model.generate(**inputs, do_sample=False, max_new_tokens=50)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1)
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=50)
    assert not torch.equal(before, expected)
    assert torch.equal(generate(model, inputs, do_sample=False, max_new_tokens=50), expected)
    assert len(graphs.graphs) == count and graphs.num_replays > 60


def _replace_weight(model: Any) -> None:
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = -weight.data


def _replace_module(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()


def _set_attribute(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2.0


def _replace_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [_replace_weight, _replace_module, _set_attribute, _replace_buffer]
)
def test_another_model_needs_another_graph(change: Any, graphs: FakeGraphs) -> None:
    model, inputs = models.build("llama"), models.prompt("llama")
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=50)
    before = generate(model, inputs, **options)
    old = [weakref.ref(graph) for graph in graphs.graphs]
    graphs.graphs.clear()
    change(model)
    expected = model.generate(**inputs, **options)
    assert not torch.equal(before, expected)
    assert torch.equal(generate(model, inputs, **options), expected)
    assert graphs.num_replays > 30 and all(ref() is None for ref in old)


def test_addresses_of_a_model() -> None:
    model = models.build("llama")

    def now() -> bytes:
        state = read_state(model)
        assert state is not None
        return state.addresses()

    first = now()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert now() == first
    found = {first}
    changes = (
        _replace_weight,
        _replace_module,
        _set_attribute,
        _replace_buffer,
        lambda model: model.model.train(),
    )
    for change in changes:
        change(model)
        found.add(now())
    assert len(found) == 1 + len(changes)


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _switched(setter: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextlib.contextmanager
def _precision(setter: Callable[[], None]) -> Iterator[None]:
    with default_precision():
        setter()
        yield


cuda, matmul = torch.backends.cuda, torch.backends.cuda.matmul
SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    **{
        name: functools.partial(_precision, setter)
        for name, setter in (BY_BACKEND | LEGACY).items()
    },
    "fp16 sums": lambda: _set(matmul, "allow_fp16_reduced_precision_reduction", False),
    "bf16 sums": lambda: _set(matmul, "allow_bf16_reduced_precision_reduction", False),
    "fp16 accumulation": lambda: _set(matmul, "allow_fp16_accumulation", True),
    "flash": lambda: _switched(cuda.enable_flash_sdp, False, True),
    "memory-efficient": lambda: _switched(cuda.enable_mem_efficient_sdp, False, True),
    "math": lambda: _switched(cuda.enable_math_sdp, False, True),
    "cudnn attention": lambda: _switched(cuda.enable_cudnn_sdp, False, True),
    "half math": lambda: _switched(cuda.allow_fp16_bf16_reduction_math_sdp, True, False),
    "cudnn off": lambda: _set(torch.backends.cudnn, "enabled", False),
    "cudnn benchmark": lambda: _set(torch.backends.cudnn, "benchmark", True),
    "cudnn deterministic": lambda: _set(torch.backends.cudnn, "deterministic", True),
    "mkldnn off": lambda: _set(torch.backends.mkldnn, "enabled", False),
    "mkldnn deterministic": lambda: _set(torch.backends.mkldnn, "deterministic", True),
    "mha": lambda: _switched(torch.backends.mha.set_fastpath_enabled, False, True),
    "einsum": lambda: _set(
        torch.backends.opt_einsum, "enabled", not torch.backends.opt_einsum.enabled
    ),
    "deterministic": lambda: _switched(torch.use_deterministic_algorithms, True, False),
    "dtype": lambda: _switched(torch.set_default_dtype, torch.float64, torch.float32),
    "threads": lambda: _switched(
        torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()
    ),
    "kernels": lambda: pytest.MonkeyPatch.context(),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_choose_kernels(name: str, graphs: FakeGraphs) -> None:
    with default_precision():
        bench = CapturedBench(models.get("llama"), graphs)
        row = Row(tokens(40, 0), bench)
        bench.run([row.take(2)])
        for _ in range(2):
            bench.decode(row)
        bench.begin()
        assert len(keys(bench)) == 1
        with SETTINGS[name]() as patch:
            if patch is not None:
                patch.setenv(kernels.VARIABLE, "cpp")
            bench.begin()
        assert not keys(bench)


@pytest.mark.parametrize("second", BY_BACKEND | LEGACY)
def test_every_two_settings_of_precision_are_read(second: str) -> None:
    """Also where torch refuses to read the legacy ones."""
    setters = BY_BACKEND | LEGACY
    for first in setters:
        with default_precision():
            before = torch_options()
            setters[first]()
            after_one = torch_options()
            setters[second]()
            assert before not in (after_one, torch_options()), first


def test_options_that_a_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch_options()
    monkeypatch.delattr(torch.backends.cuda, "cudnn_sdp_enabled")
    monkeypatch.delattr(type(torch.backends.mkldnn), "matmul")
    now = torch_options()
    assert len(now) == len(before) and sum(x != y for x, y in zip(before, now)) == 2
    assert now.count(None) == before.count(None) + 2


def test_a_runner_that_did_not_begin_is_eager(graphs: FakeGraphs) -> None:
    bench = CapturedBench(models.get("llama"), graphs)
    bench.runner.begin(None)
    row = Row(tokens(40, 0), bench)
    bench.run([row.take(2)])
    for _ in range(4):
        bench.decode(row)
    assert not graphs.graphs


@pytest.mark.slow
def test_every_adapter_has_its_graphs(graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and beside others: a graph for every order of adapters and number of rows."""
    pytest.importorskip("peft")
    monkeypatch.setattr(recording, "MIN_FIXED_USES", 8)
    from tests.support.peft_models import ADAPTERS, lone_with, lora_model

    model = lora_model()
    prompt, options = prompts(12)[0], {**GREEDY, "max_new_tokens": 16}
    jobs = [
        (prompt, {"generation_config": options, "adapter": adapter})
        for adapter in (*ADAPTERS, "first")
    ]
    with PagedEngine(model, CONFIG) as engine:
        for _ in range(4):
            for batch in (*([job] for job in jobs[:3]), jobs):
                for (_, job), result in zip(batch, results(engine, batch)):
                    expected = lone_with(model, job["adapter"], prompt, options)
                    assert_same_as_lone(expected, result, options, job["adapter"])
            count = len(graphs.graphs)
        found: Any = [key.variant[0] for key in keys(engine)]  # type: ignore[index]
        assert set(ADAPTERS) == {variant for variant in found if isinstance(variant, str)}
        ranges = next(variant for variant in found if not isinstance(variant, str))
        assert [bounds for _, *bounds in ranges] == [[0, 1], [1, 3], [3, 4]], "whichever came first"
        assert (
            engine.stats().num_captured_steps == graphs.num_replays > engine.stats().num_steps // 2
        )
        results(engine, jobs)
        assert len(graphs.graphs) == count, "kept while the engine is idle"


# --------------------------------------------------------------------------------------- failures


def _waits(self: Any, x: torch.Tensor) -> torch.Tensor:
    assert float(x.abs().max()) > 0
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _branches(self: Any, x: torch.Tensor) -> torch.Tensor:
    rows = (x[0].sum(-1) != 12.5).nonzero()[:, 0]
    return self.down_proj(self.act_fn(self.gate_proj(x[:, rows])) * self.up_proj(x[:, rows]))


def _draws(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x + 0 * torch.rand_like(x)
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.slow
@pytest.mark.parametrize("forward", [_waits, _branches, _draws])
def test_a_forward_that_cannot_be_recorded(
    forward: Any,
    graphs: FakeGraphs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    model, inputs = models.build("llama"), models.prompt("llama")
    options: dict[str, Any] = dict(do_sample=True, max_new_tokens=50)
    torch.manual_seed(3)
    expected = generate(
        model, inputs, **options, cache_config={"capture": False, "prefix_caching": False}
    )
    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "hf_paged"):
        for _ in range(2):
            torch.manual_seed(3)
            assert torch.equal(
                generate(model, inputs, **options, cache_config={"prefix_caching": False}), expected
            )
            assert torch.equal(torch.get_rng_state(), state)
    assert not graphs.graphs
    # a forward that draws random numbers does not run on the engine
    told = [record.getMessage().split("its forward ")[1].split()[0] for record in caplog.records]
    assert told == ([] if forward is _draws else ["waits"])
    assert hf_paged.last_route(model).num_captured_steps == 0  # type: ignore[union-attr]
    hf_paged.check_integrity(model)


@pytest.mark.parametrize("backend", ["gather", "reference"])
def test_attention_that_needs_lengths_on_the_host(
    backend: str,
    graphs: FakeGraphs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(kernels.VARIABLE, backend)
    bench = CapturedBench(models.get("gemma3"), graphs)
    rows = [Row(tokens(60, seed), bench) for seed in range(2)]
    bench.run([row.take(4) for row in rows])
    for _ in range(4):
        assert_close(bench.decode(*rows), [bench.plain(row) for row in rows])
    assert not graphs.graphs
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        "no kernel that reads lengths on the device supports its attention"
        " [troubleshooting.md#recording]"
    ]


def test_a_capture_that_fails(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step runs eagerly, and no capture is tried before the model changes."""
    attempts = []

    def fail() -> None:
        attempts.append(1)
        try:
            raise RuntimeError(
                "CUDA error: operation not permitted when stream is capturing\nand more"
            )
        finally:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )

    bench = CapturedBench(models.build("llama"), graphs)
    rows = [Row(tokens(60, seed), bench) for seed in range(2)]
    bench.run([row.take(4) for row in rows])
    graphs.fail = fail
    with caplog.at_level(logging.WARNING, "hf_paged"):
        for _ in range(4):
            assert_close(bench.decode(*rows), [bench.plain(row) for row in rows])
    assert attempts == [1] and not keys(bench) and bench.runner.num_captured_steps == 0
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        "CUDA error: operation not permitted when stream is capturing"
        " [troubleshooting.md#recording]"
    ]
    graphs.fail = None
    bench.begin()
    bench.decode(*rows)
    assert not keys(bench)
    _set_attribute(bench.model)
    bench.begin()
    row = Row(tokens(60, 7), bench)
    bench.run([row.take(4)])
    for _ in range(2):
        assert_close(bench.decode(row), [bench.plain(row)])
    assert keys(bench)


def test_a_capture_for_which_there_is_no_memory(
    graphs: FakeGraphs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Existing graphs stay in use; further attempts come at growing intervals until one
    succeeds."""
    attempts: list[int] = []

    def fail() -> None:
        attempts.append(num_steps)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(graph_keys, "MIN_TABLE_TOKENS", 1024)
    bench = CapturedBench(models.build("llama"), graphs)
    rows = [Row(tokens(90, seed), bench) for seed in range(2)]
    bench.run([row.take(4) for row in rows])
    for _ in range(3):
        bench.decode(rows[0])
    graphs.fail = fail
    with caplog.at_level(logging.WARNING, "hf_paged"):
        for num_steps in range(12):
            if num_steps == 9:
                graphs.fail = None
            assert_close(bench.decode(*rows), [bench.plain(row) for row in rows])
            assert_close(bench.decode(rows[0]), [bench.plain(rows[0])])
    assert attempts == [1, 5]
    assert [key.num_decodes for key in keys(bench)] == [2, 1] and decodes_of(
        bench
    ).unsupported_reason is None
    assert len(caplog.records) == 1 and "there is no memory for more recordings" in caplog.text


def test_no_garbage_is_collected_and_no_other_records_meanwhile(graphs: FakeGraphs) -> None:
    """Two models in two threads: the second, whose step falls within the first's recording, records
    later."""
    first, second = (CapturedBench(models.build("llama"), graphs) for _ in range(2))
    first.run([(a := Row(tokens(60, 0), first)).take(4)])
    second.run([(b := Row(tokens(60, 1), second)).take(4)])
    for bench, row in ((first, a), (second, b)):
        bench.decode(row)
    seen: list[Any] = []

    def other() -> None:
        graphs.fail = None
        assert_close(second.decode(b), [second.plain(b)])
        seen.append((gc.isenabled(), keys(second)))

    def fail() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    graphs.addresses, graphs.fail = tuple, fail
    assert gc.isenabled()
    assert_close(first.decode(a), [first.plain(a)])
    assert gc.isenabled() and seen == [(False, [])] and keys(first)
    assert_close(second.decode(b), [second.plain(b)])
    assert keys(second)


def test_a_forward_that_fails_in_a_capture_and_eagerly(
    graphs: FakeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("on purpose")

    model, prompt = models.build("llama"), prompts(9)[0]
    options = {**GREEDY, "max_new_tokens": 30}
    with PagedEngine(model, CONFIG) as engine:
        engine.add_request(prompt, options)
        for _ in range(2):  # the prompt, and an eager decode
            engine.step()
        with monkeypatch.context() as patch:
            # a function of a library: no change is noticed
            patch.setattr(modeling_llama, "apply_rotary_pos_emb", fail)
            (output,) = engine.step()
        assert output.result is not None and isinstance(output.result.error, OSError)
        assert_drained(engine)
        assert (
            decodes_of(engine).unsupported_reason == "on purpose"
            and decodes_of(engine)._forward is None
        )
        (result,) = results(engine, [(prompt, {"generation_config": options})])
        assert_same_as_lone(lone_run(model, prompt, options), result, options, "after the error")
        assert_drained(engine)


def test_an_interrupted_capture_leaves_nothing_behind(graphs: FakeGraphs) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    bench = CapturedBench(models.build("llama"), graphs)
    row = Row(tokens(60, 0), bench)
    bench.run([row.take(4)])
    bench.decode(row)
    graphs.fail = interrupt
    item = row.take(1)
    with pytest.raises(KeyboardInterrupt):
        bench.run([item])
    graphs.fail = None
    assert decodes_of(bench)._forward is None and not keys(bench)
    assert_close(bench.run([item]), [bench.plain(row)])
    assert bench.runner.num_captured_steps == 1


class _BrokenGraph:
    """A capture with an invalidated stream, which never ends."""

    def __init__(self, ends: bool) -> None:
        self.ends = ends

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"

    def capture_end(self) -> None:
        if not self.ends:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )

    def pool(self) -> Any:
        if not self.ends:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")


@pytest.mark.parametrize("ends", [True, False])
def test_what_a_broken_capture_left_undone_is_done(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device the same is tested with real graphs."""
    done: list[Any] = []
    generator = SimpleNamespace(clone_state=lambda: "before", graphsafe_set_state=done.append)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(
            torch._C, name, lambda *args, name=name: done.append((name, args)), raising=False
        )
    backend = object.__new__(recorders.CudaGraphs)
    backend._device, backend._pool = torch.device("cuda", 1), (0, 7)

    def run() -> None:
        raise NotCapturable("on purpose")

    with pytest.raises(RuntimeError) as error:
        backend._record(_BrokenGraph(ends), run)  # type: ignore[arg-type]
    assert recorders.reason_of(error.value) == "on purpose"
    repaired = [
        "before",
        ("_cuda_endAllocateToPool", (1, (0, 7))),
        ("_cuda_releasePool", (1, (0, 7))),
    ]
    assert done == ([] if ends else repaired)


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


def test_operations_that_cannot_be_recorded() -> None:
    x = torch.arange(6.0)
    with CaptureGuard():
        y = torch.softmax(x * 2, 0).to(torch.float16)[1:3]
        mask = x > 2
        waits = [
            lambda: x[0].item(),
            lambda: x.unique(),
            lambda: bool(x.sum() > 3),
            lambda: mask.nonzero(),
        ]
        waits += [
            lambda: x[mask],
            lambda: x[mask.byte()],
            lambda: x.masked_select(mask),
            lambda: torch.where(mask),
        ]
        waits += [lambda: x[None, mask], lambda: x.index_put_((mask,), y.float())]
        for wait in waits:
            with pytest.raises(NotCapturable, match="waits for the device"):
                wait()
        indices = torch.tensor([2, 0])
        assert x[indices].tolist() == x[indices.int()].tolist() == [2, 0]
        x[indices] = x[indices] + 0
        x[x > 100] = 7.0  # filled in place, nothing is counted
        with pytest.raises(NotCapturable, match="random"):
            torch.rand(3)
        with pytest.raises(NotCapturable, match="between host and device"):
            x.to("meta")
    assert y.shape == (2,)


# ----------------------------------------------------------------------------------------- memory


def _refs(decodes: StepGraphs) -> list[weakref.ref[Any]]:
    steps = list(decodes._graphs.values())
    assert steps
    inner = [
        part for step in steps for part in (step, step.graph, step.inputs, step.inputs._buffer)
    ]
    return [weakref.ref(part) for part in (*inner, *decodes._outputs.values(), decodes)]


@pytest.mark.slow
def test_free_gives_everything_back(graphs: FakeGraphs) -> None:
    """At once, not with the next garbage collection."""
    model, inputs = models.build("llama"), models.prompt("llama")
    gc.disable()
    try:
        generate(model, inputs, do_sample=False, max_new_tokens=50)
        refs = _refs(graphs_of(hf_paged.model.registry._memories[model][1]))
        graphs.graphs.clear()
        hf_paged.free(model)
        assert [ref() for ref in refs] == [None] * len(refs)

        cached = generate(
            model, inputs, do_sample=False, max_new_tokens=50, return_dict_in_generate=True
        )
        refs = _refs(graphs_of(hf_paged.model.registry._memories[model][1]))
        graphs.graphs.clear()
        hf_paged.free(model)
        assert [ref() for ref in refs] == [None] * len(refs), (
            "a cache that is still held needs no graphs"
        )
        assert cached.past_key_values.get_seq_length() > 50

        engine = PagedEngine(model, CONFIG)
        engine.generate(inputs["input_ids"], {**GREEDY, "max_new_tokens": 9})
        refs = _refs(decodes_of(engine))
        graphs.graphs.clear()
        engine.free()
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


@pytest.mark.slow
def test_graphs_do_not_keep_the_model(graphs: FakeGraphs) -> None:
    model, inputs = models.build("llama"), models.prompt("llama")
    generate(model, inputs, do_sample=False, max_new_tokens=50)
    refs = [*_refs(graphs_of(hf_paged.model.registry._memories[model][1])), weakref.ref(model)]
    graphs.graphs.clear()
    del model
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_capture_can_be_turned_off(graphs: FakeGraphs) -> None:
    model = models.get("llama")
    with PagedEngine(model, PagedConfig(block_size=SIZE, capture=False)) as engine:
        engine.generate(prompts(5, 9), {**GREEDY, "max_new_tokens": 9})
        assert engine.stats().num_captured_steps == 0 and not graphs.graphs
    for value in (1, "yes", None):
        with pytest.raises(ValueError, match=r"`capture` is .*: it must be True or False"):
            PagedConfig(capture=value)  # type: ignore[arg-type]


def test_decode_steps_on_the_cpu_are_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with PagedEngine(models.get("llama"), CONFIG) as engine:
        engine.generate(prompts(5), {**GREEDY, "max_new_tokens": 9})
        assert engine.stats().num_captured_steps == 8 - recording.MIN_USES
    monkeypatch.setenv("HF_PAGED_ATTENTION", "gather")
    assert recording.graph_backend(torch.device("cpu")) is None
    with PagedEngine(models.get("llama"), CONFIG) as engine:
        engine.generate(prompts(5), {**GREEDY, "max_new_tokens": 9})
        assert engine.stats().num_captured_steps == 0 and not engine.memory.recorders


@pytest.mark.parametrize("changed", ["logits", "states"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_with_other_results_is_refused(dtype: torch.dtype, changed: str) -> None:
    """The states are what the replay makes of those before it."""
    logits = torch.randn(3, 50).to(dtype)
    before = torch.randn(3, 4, 5).to(dtype)
    after, expected = before * 2, logits.clone()
    states = after.clone()

    def replay(wrong: str = "") -> None:
        logits.copy_(expected * 1.2 + 0.3 if wrong == "logits" else expected)
        states.mul_(2.2 if wrong == "states" else 2)

    def prepare() -> None:
        states.copy_(before)

    recorders.check_replay(replay, [logits, states], {dtype}, prepare)
    with pytest.raises(NotCapturable, match=f"the {changed} of a replay are .* deviations from"):
        recorders.check_replay(lambda: replay(changed), [logits, states], {dtype}, prepare)


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device that takes memory on allocation; records the sizes of tensors that replaced smaller
    ones."""
    sizes: list[int] = []
    right = KVBlocks.grown
    for module in (free_memory, kv_blocks):
        monkeypatch.setattr(module, "commits_when_touched", lambda device: False)
    monkeypatch.setattr(
        KVBlocks, "grown", lambda self, size: (sizes.append(size), right(self, size))[1]
    )
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget", [{}, {"memory_fraction": 0.5}, {"num_blocks": 200}], ids=lambda budget: str(budget)
)
@pytest.mark.parametrize("name", NAMES)
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
    model = models.get(name)
    lengths = [(5, 140), (19, 90), (9, 120), (30, 150)]
    with PagedEngine(model, {"block_size": SIZE, "prefix_caching": True, **budget}) as engine:
        for turn in range(2):
            # blocks that the first leaves in the prefix cache are evicted before tensors grow
            for number, (prompt, new) in enumerate(lengths):
                config = {**GREEDY, "max_new_tokens": new}
                engine.add_request(
                    prompts(prompt, seed=10 * turn + number)[0], generation_config=config
                )
                if not (turn or number):
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
    model = models.build("gemma3")
    for rows, new in ((2, 60), (3, 160)):
        inputs = models.padded_prompt("gemma3", (26, 14, 20)[:rows])
        options = {**GREEDY, "max_new_tokens": new}
        config = {"max_num_batched_tokens": 16}
        found = generate(model, inputs, **options, cache_config=config)
        assert torch.equal(found, model.generate(**inputs, **options))
        groups = memory_for(model, PagedConfig(block_size=SIZE, **config)).groups.values()
        num_rows = {
            group.spec.window: group.storage.num_rows for group in groups if group.storage.layers
        }
        assert num_rows[None] == rows * ((26 + new) // SIZE + 1) > 2 * min(num_rows.values()), (
            num_rows
        )
        assert (
            grown.count(num_rows[None]) == len(grown)
            if rows == 3
            else max(grown, default=0) < num_rows[None]
        )
        grown.clear()  # from the model's checks, which use separate memory
