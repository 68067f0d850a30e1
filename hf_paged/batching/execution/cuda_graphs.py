"""CUDA graphs as what records steps."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ...cache.storage import is_out_of_memory
from ...model.capability import first_line
from ...tape.record import HostFirst, KnownAgain, NothingUnrecorded

if TYPE_CHECKING:
    from ...tape.device import DeviceTape

logger = logging.getLogger(__name__)

capture_stream = functools.cache(torch.cuda.Stream)  # by device
_LATER: list[Any] = []  # graphs, with what they need, that went while their thread captured, where it must not wait


class CudaGraphs:
    """CUDA graphs (ROCm's have the same interface) that share one private memory pool: they are replayed one after the
    other, and nothing reads what one of them left there but the graph itself."""

    runs_ahead, decodes_alone, notice = True, False, logging.WARNING

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, capture_stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._done = torch.cuda.Event()

    def capture(
        self, run: Callable[[], None], model: PreTrainedModel, check: Callable[[Callable[[], None]], None]
    ) -> RecordedGraph:
        """Runs `run` once as it is, then records it, in fewer launches where that passes the check. Waits for the
        device. Raises what `run` raised, [`NotCapturable`] if it does what cannot be recorded; streams, random state
        and memory are then as before."""
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            self._stream.wait_stream(before)
            # what is built on first use (kernels, libraries' handles) cannot be while a stream is captured
            first = NothingUnrecorded()
            with torch.cuda.stream(self._stream):
                with HostFirst(), first:
                    run()
                tape = fuse(run, self._device, check)
            before.wait_stream(self._stream)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the pool cannot take it over, nor the allocator free it during the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._stream), contextlib.ExitStack() as stack:
                # cuBLAS takes its workspaces from the graphs' pool: those it has are not the graph's to keep, and
                # others, such as torch.compile's own graphs, free them
                torch._C._cuda_clearCublasWorkspaces()
                stack.callback(torch._C._cuda_clearCublasWorkspaces)
                if tape is not None:
                    try:
                        self._record(graph, tape.replay)
                    except Exception as error:
                        if is_out_of_memory(error):
                            raise
                        logger.info("fused operations could not be recorded: %s", first_line(error))
                        tape, graph = None, torch.cuda.CUDAGraph()
                if tape is None:
                    with HostFirst(), KnownAgain(first.known):
                        self._record(graph, run)
        while _LATER:
            RecordedGraph(*_LATER.pop())  # and goes
        return RecordedGraph(graph, self._done, first.known if tape is None else tape.constants)

    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
        generator = torch.cuda.default_generators[self._device.index]
        state = generator.clone_state()
        try:
            # other threads may go on allocating and waiting
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        except BaseException:
            try:
                graph.pool()
            except RuntimeError:  # what `capture_end` does after the stream's own end was left out
                generator.graphsafe_set_state(state)
                for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                    with contextlib.suppress(AttributeError, RuntimeError):
                        getattr(torch._C, name)(self._device.index, self._pool)
            raise

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Work that begins within it comes after the work of the last such context, whichever stream that was on."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)


def fuse(
    run: Callable[[], None], device: torch.device, check: Callable[[Callable[[], None]], None]
) -> DeviceTape | None:
    """`run` in fewer launches; `None` where that cannot be recorded, fails, or does not pass the check."""
    from ...tape.device import DeviceTape  # needs Triton

    try:
        tape = DeviceTape.record(run, device)
        check(functools.partial(tape.replay, spoils=True))
    except Exception as error:  # a kernel of another library writes unseen; a list of operations may not compile
        logger.info("steps are recorded as they are, without fused operations: %s", first_line(error))
        return None
    return tape


class RecordedGraph:
    """A CUDA graph that is not freed while it runs: `done` comes after its last replay. It reads what is `held`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, done: torch.cuda.Event, held: list[Any]) -> None:
        self._graph, self._done, self._held = graph, done, held

    def replay(self) -> None:
        self._graph.replay()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the driver is gone before the interpreter's last objects are
            if torch.cuda.is_current_stream_capturing():
                _LATER.append((self._graph, self._done, self._held))
            else:
                self._done.synchronize()
