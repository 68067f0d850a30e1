"""The recording backend for GPUs: captures a step as a CUDA graph, and restores the state if the
capture fails. Leaves which steps are recorded to `graphs.py`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..cache.free_memory import is_out_of_memory
from .record import CaptureGuard, CreatesOnHost, HostResultReplay

capture_stream = functools.cache(torch.cuda.Stream)  # by device
_DEFERRED: list[Any] = []  # graphs deleted during a capture, which must not wait: freed after it


class CudaGraphs:
    """CUDA graphs (ROCm's have the same interface) that share one private memory pool: they replay
    one after another, and no graph reads the intermediate values of another."""

    on_device = True  # replays run on the device while the host does other work

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = capture_stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._done = torch.cuda.Event()

    def capture(
        self,
        run: Callable[[], None],
        persistent_storages: set[int],
        prepare: Callable[[], None],
    ) -> RecordedGraph:
        """Runs `run` once eagerly after `prepare`, then records it. Waits for the device. Raises
        the errors of `run`, and [`NotCapturable`] if it cannot be recorded; streams, random state
        and memory are then restored."""
        with torch.cuda.device(self._device):
            caller_stream = torch.cuda.current_stream()
            self._stream.wait_stream(caller_stream)
            # kernels and library handles are built on first use, which must not be during a capture
            guard = CaptureGuard()
            with torch.cuda.stream(self._stream):
                prepare()
                with CreatesOnHost(), guard:
                    run()
            caller_stream.wait_stream(self._stream)
            torch.cuda.synchronize()

            def run_again() -> None:
                with CreatesOnHost(), HostResultReplay(guard.host_results):
                    run()

            with torch.cuda.stream(self._stream):
                graph = self._capture_graph(run_again)
        while _DEFERRED:
            RecordedGraph(*_DEFERRED.pop())  # its deletion may wait now, and frees the graph
        return RecordedGraph(graph, self._done, guard.host_results)

    def _capture_graph(
        self,
        run: Callable[[], None],
        is_retry: bool = False,
    ) -> torch.cuda.CUDAGraph:
        """Captures `run` as a graph. Neither the graphs' pool nor a capture can use memory that
        torch's allocator caches: if memory runs out, frees the cache and captures again."""
        graph = torch.cuda.CUDAGraph()
        # makes cuBLAS allocate workspaces in the graphs' pool: other code, such as torch.compile's
        # graphs, may free existing workspaces, which the graph does not own
        torch._C._cuda_clearCublasWorkspaces()
        try:
            self._record(graph, run)
            return graph
        except Exception as error:
            if is_retry or not is_out_of_memory(error):
                raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return self._capture_graph(run, is_retry=True)

    def _record(
        self,
        graph: torch.cuda.CUDAGraph,
        run: Callable[[], None],
    ) -> None:
        generator = torch.cuda.default_generators[self._device.index]
        state = generator.clone_state()
        try:
            # "thread_local" lets other threads allocate and wait meanwhile
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        except BaseException:
            try:
                graph.pool()
            except RuntimeError:  # `capture_end` failed before its clean-up: clean up here
                generator.graphsafe_set_state(state)
                for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                    with contextlib.suppress(AttributeError, RuntimeError):
                        clean_up = getattr(torch._C, name)
                        clean_up(self._device.index, self._pool)
            raise

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Orders the device work of the `with` block after that of the previous block, also across
        streams."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)


class RecordedGraph:
    """A CUDA graph that is freed only after its last replay, when `done` is recorded. The graph
    reads `held`."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        done: torch.cuda.Event,
        held: list[Any],
    ) -> None:
        self._graph = graph
        self._done = done
        self._held = held

    def replay(self) -> None:
        self._graph.replay()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at interpreter exit the driver may have shut down
            if torch.cuda.is_current_stream_capturing():
                _DEFERRED.append((self._graph, self._done, self._held))
            else:
                self._done.synchronize()
