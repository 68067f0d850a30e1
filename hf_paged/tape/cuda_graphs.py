"""The backend that records steps on GPUs: captures them as CUDA graphs, and restores streams,
random state and memory if a capture fails. `graphs.py` decides which steps are recorded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..cache.free_memory import is_out_of_memory
from ..interrupts import is_interrupt
from .record import CaptureGuard, HostCreation, HostResultReplay, HostResults

capture_stream = functools.cache(torch.cuda.Stream)  # by device
# arguments of `RecordedGraph`s that were deleted during a capture: freeing a graph waits for the
# device, which a capture does not allow
_DEFERRED: list[Any] = []


class CudaGraphs:
    """The backend that records CUDA graphs (ROCm's have the same interface). The graphs can share
    one private memory pool, since they replay one after another, and none reads the intermediate
    values of another."""

    on_device = True  # replays run on the device while the host does other work

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = capture_stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._done = torch.cuda.Event()  # after the last step's device work

    def capture(
        self,
        run: Callable[[], None],
        persistent_storages: set[int],
        prepare: Callable[[], None],
    ) -> RecordedGraph:
        """Calls `prepare`, calls `run` eagerly, then records `run`. Waits for the device. Raises
        the errors of `run`, and [`NotCapturable`] if `run` cannot be recorded, after restoring
        streams, random state and memory. Ignores `persistent_storages`."""
        with torch.cuda.device(self._device):
            caller_stream = torch.cuda.current_stream()
            self._stream.wait_stream(caller_stream)
            # first eagerly, since kernels and library handles cannot be created during a capture
            guard = CaptureGuard()
            with torch.cuda.stream(self._stream):
                prepare()
                with HostCreation(), guard:
                    run()
            caller_stream.wait_stream(self._stream)
            torch.cuda.synchronize()

            def run_again() -> None:
                with HostCreation(), HostResultReplay(guard.host_results):
                    run()

            with torch.cuda.stream(self._stream):
                graph = self._capture_graph(run_again)
        while _DEFERRED:
            RecordedGraph(*_DEFERRED.pop())  # deleted at once, which waits, then frees the graph
        return RecordedGraph(graph, self._done, guard.host_results)

    def _capture_graph(
        self,
        run: Callable[[], None],
        is_retry: bool = False,
    ) -> torch.cuda.CUDAGraph:
        """Captures `run` as a graph. A capture allocates from the graphs' pool, and cannot use
        memory that torch's allocator has cached. So if memory runs out, frees the cached memory and
        captures again."""
        graph = torch.cuda.CUDAGraph()
        # makes cuBLAS allocate new workspaces, in the graphs' pool: the graph would not own the
        # existing ones, so other code, such as torch.compile's graphs, could free them
        torch._C._cuda_clearCublasWorkspaces()
        try:
            self._record(graph, run)
            return graph
        except Exception as error:
            if is_retry or is_interrupt(error) or not is_out_of_memory(error):
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
            # "thread_local": other threads may allocate and synchronize meanwhile
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
        """A context that orders its device work after that of the previous such context, even
        across streams."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)


class RecordedGraph:
    """A CUDA graph that is freed only after its last replay has ended. `done`: an event recorded
    after every replay. `host_results`: results of reads and copies that the graph uses; this
    object keeps them alive."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        done: torch.cuda.Event,
        host_results: HostResults,
    ) -> None:
        self._graph = graph
        self._done = done
        self._host_results = host_results

    def replay(self) -> None:
        self._graph.replay()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at interpreter exit the driver may have shut down
            if torch.cuda.is_current_stream_capturing():
                _DEFERRED.append((self._graph, self._done, self._host_results))
            else:
                self._done.synchronize()
