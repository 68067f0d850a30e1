"""CUDA graphs as the backend that records steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..cache.free_memory import is_out_of_memory
from .record import HostFirst, KnownAgain, NothingUnrecorded

capture_stream = functools.cache(torch.cuda.Stream)  # by device
_LATER: list[Any] = []  # graphs deleted during a capture, when waiting is forbidden: freed after it


class CudaGraphs:
    """CUDA graphs (ROCm's have the same interface) that share one private memory pool: they are
    replayed one after another, and only the graph itself reads what it left there."""

    on_device = True  # replays run while the host does something else

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = capture_stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._done = torch.cuda.Event()

    def capture(
        self,
        run: Callable[[], None],
        kept: set[int],
    ) -> RecordedGraph:
        """Runs `run` once as it is, then records it. Waits for the device. Raises what `run`
        raises, and [`NotCapturable`] if it cannot be recorded; streams, random state and memory are
        then as before."""
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            self._stream.wait_stream(before)
            # kernels and library handles are built on first use, which must not be during a capture
            first = NothingUnrecorded()
            with torch.cuda.stream(self._stream):
                with HostFirst(), first:
                    run()
            before.wait_stream(self._stream)
            torch.cuda.synchronize()

            def run_again() -> None:
                with HostFirst(), KnownAgain(first.known):
                    run()

            with torch.cuda.stream(self._stream):
                graph = self._recorded(run_again)
        while _LATER:
            RecordedGraph(*_LATER.pop())  # deleted at once, which now waits and frees
        return RecordedGraph(graph, self._done, first.known)

    def _recorded(
        self,
        run: Callable[[], None],
        is_again: bool = False,
    ) -> torch.cuda.CUDAGraph:
        """A graph of `run`. Neither the graphs' pool nor a capture can use what torch's allocator
        holds in reserve: if memory runs out, that is freed, and `run` recorded again."""
        graph = torch.cuda.CUDAGraph()
        # makes cuBLAS allocate workspaces in the graphs' pool: the graph does not own existing
        # ones, and other code, such as torch.compile's graphs, frees them
        torch._C._cuda_clearCublasWorkspaces()
        try:
            self._record(graph, run)
            return graph
        except Exception as error:
            if is_again or not is_out_of_memory(error):
                raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return self._recorded(run, is_again=True)

    def _record(
        self,
        graph: torch.cuda.CUDAGraph,
        run: Callable[[], None],
    ) -> None:
        generator = torch.cuda.default_generators[self._device.index]
        state = generator.clone_state()
        try:
            # "thread_local": other threads may still allocate and wait
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        except BaseException:
            try:
                graph.pool()
            except RuntimeError:  # `capture_end` failed before its clean-up, which is done here
                generator.graphsafe_set_state(state)
                for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                    with contextlib.suppress(AttributeError, RuntimeError):
                        clean_up = getattr(torch._C, name)
                        clean_up(self._device.index, self._pool)
            raise

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Orders the device work within it after that of the last such context, also across
        streams."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)


class RecordedGraph:
    """A CUDA graph that is not freed while it runs: `done` is recorded after its last replay. It
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
        with contextlib.suppress(Exception):  # at interpreter exit the driver may be gone already
            if torch.cuda.is_current_stream_capturing():
                _LATER.append((self._graph, self._done, self._held))
            else:
                self._done.synchronize()
