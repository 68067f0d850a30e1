"""A CPU stand-in for a device's graphs, and engines with and without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged import PagedEngine, RequestResult
from hf_paged.attention.backends import unsupported_reasons
from hf_paged.fingerprints import read_state
from hf_paged.tape import graph_keys, misses
from hf_paged.tape import graphs as recording
from hf_paged.tape.record import CaptureGuard, HostCreation, HostResultReplay
from tests.batching.test_runner import SIZE, Bench, Row, assert_close, tokens
from tests.support.engine_helpers import assert_same_as_lone, lone_run, prompts
from tests.support.fake_device import record_on_a_device


def graphs_of(memory: Any) -> Any:
    """Graphs of the only model that uses the memory."""
    (graphs,) = memory.recorders.values()
    return graphs


class FakeGraph:
    """Replays by running the recorded function, which may only depend on unchanged buffers and
    addresses."""

    def __init__(self, run: Any) -> None:
        self.run, self.num_replays = run, 0
        self.addresses = self._addresses()

    def _addresses(self) -> list[int]:
        """Addresses of the tensors of the recorded model and of its blocks: not of an assistant's
        in the same memory."""
        owner = self.run.args[0]()
        model = owner._model()
        layers = [blocks for group in owner._groups for blocks in group.storage.layers.values()]
        blocks = (tensor for layer in layers for tensor in layer.data)
        return [x.data_ptr() for x in (*model.parameters(), *model.buffers(), *blocks)]

    def replay(self) -> None:
        """Replays as a device graph would; raises where that would read freed or moved memory."""
        is_same = self.addresses == self._addresses()
        assert is_same, "replayed on other addresses than it was recorded with"
        self.num_replays += 1
        self.run()


class FakeGraphs:
    on_device = True

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []  # all captured ones
        self.fail: Callable[[], None] | None = None  # called in each capture after the dry run
        # whether a capture also fails where it would fail with the model on a device
        self.has_device = False

    def capture(self, run: Any, persistent_storages: Any, prepare: Any) -> FakeGraph:
        """As in `CudaGraphs`."""
        first = CaptureGuard()
        prepare()
        with HostCreation(), first:
            run()
        with HostCreation(), HostResultReplay(first.host_results):
            run()
        if self.has_device:
            owner, inputs, *_ = run.args
            record_on_a_device(owner()._forward.__self__, inputs)
        if self.fail is not None:
            self.fail()
        self.graphs.append(FakeGraph(run))
        return self.graphs[-1]

    def in_order(self) -> Any:
        """As in `CudaGraphs`."""
        return contextlib.nullcontext()

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)


def use_fake_graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    """Graphs on the CPU, captured at the second use of a size, with tables no wider than needed."""
    backend = FakeGraphs()
    monkeypatch.setattr(recording, "graph_backend", lambda device: backend)
    monkeypatch.setattr(misses, "MIN_MISSES", 1)
    monkeypatch.setattr(misses, "MIN_REPLAYS", 0)  # also after the model has changed
    monkeypatch.setattr(graph_keys, "MIN_TABLE_TOKENS", SIZE)
    return backend


class CapturedBench(Bench):
    """A started runner, on a pool that does not grow up to this number of blocks per layer
    group."""

    def __init__(self, model: Any, backend: FakeGraphs, reserved: int = 200, **config: Any) -> None:
        super().__init__(model, **config)
        self.reasons: set[str] = set()  # why steps are not recorded
        self.cache.reserve(reserved, reserved)
        self.begin()

    def begin(self) -> None:
        """As `Core.begin`."""
        self.runner.begin(read_state(self.model))

    def run(self, items: list[tuple[Any, int]]) -> torch.Tensor:
        token = unsupported_reasons.set(self.reasons)
        try:
            return super().run(items)
        finally:
            unsupported_reasons.reset(token)

    def rows(self, *lengths: int) -> list[Row]:
        """Rows of other tokens, of which these many are computed."""
        rows = [Row(tokens(400, seed), self) for seed in range(len(lengths))]
        self.run([row.take(length) for row, length in zip(rows, lengths)])
        return rows

    def decode(self, *rows: Row, times: int = 1) -> torch.Tensor:
        """Decodes one more token of each row, this many times; logits `(rows, vocab)` of the
        last."""
        for _ in range(times):
            logits = self.run([row.take(1) for row in rows])
        return logits

    def check(self, *rows: Row, times: int = 1) -> None:
        """As `decode`; asserts that logits are plain's."""
        for _ in range(times):
            assert_close(self.decode(*rows), [self.plain(row) for row in rows])


def results(
    engine: PagedEngine, jobs: list[tuple[list[int], dict[str, Any]]], later: int = 0
) -> list[RequestResult]:
    """Results of the requests; the last `later` requests arrive a few steps after the others."""
    found: dict[str, RequestResult] = {}
    waiting = list(enumerate(jobs))
    num_steps = 0
    while engine.has_unfinished or waiting:
        ready = len(waiting) - later if num_steps == 0 else int(num_steps % 4 == 3)
        for number, (prompt, options) in waiting[:ready]:
            engine.add_request(prompt, request_id=str(number), **options)
        del waiting[:ready]
        for output in engine.step():
            if output.result is not None:
                found[output.request_id] = output.result
        engine.check_integrity()
        num_steps += 1
    return [found[str(number)] for number in range(len(jobs))]


def job(prompt: int, new: int, seed: int = 0, **options: Any) -> tuple[list[int], dict[str, Any]]:
    """A greedy request of `results`: lengths of its prompt and of its text."""
    config = {"do_sample": False, "eos_token_id": None, "max_new_tokens": new}
    return prompts(prompt, seed=seed)[0], {"generation_config": config, **options}


def assert_as_lone(model: Any, jobs: list[Any], found: list[RequestResult]) -> None:
    """Asserts that results of `job`s are those of lone runs."""
    for (prompt, options), result in zip(jobs, found):
        config = options["generation_config"]
        assert_same_as_lone(lone_run(model, prompt, config), result, config, f"prompt {prompt}")
