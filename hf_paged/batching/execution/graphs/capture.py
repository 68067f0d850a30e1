"""What records a forward on a device to run it again without the host: CUDA graphs (ROCm's have the same interface)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .... import kernels
from ....step import NotCapturable

_COPIES = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default})
_READS_AT = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten.index.Tensor_out})
_WRITES_AT = frozenset({torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default})


class NothingUnrecorded(TorchDispatchMode):
    """
    Raises [`NotCapturable`] before an operation that waits for the device, copies to or from it, or draws random
    numbers: in this thread alone, unlike torch's sync debug mode.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = getattr(func, "tags", ())
        waits = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        if func in _READS_AT:  # the tag is for masks: the host has to know how many elements they choose
            waits = _has_mask(args[1])
        elif func in _WRITES_AT:
            waits = _has_mask(args[1]) and args[2].numel() > 1
        if waits:
            raise NotCapturable(f"its forward waits for the device ({func})")
        if torch.Tag.nondeterministic_seeded in tags:
            raise NotCapturable(f"its forward draws random numbers ({func})")
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func in _COPIES:
            tensors = [x for x in (found, *args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            if len({tensor.device.type for tensor in tensors}) > 1:
                raise NotCapturable(f"its forward copies between host and device ({func})")
        return found


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def graph_backend(device: torch.device) -> CudaGraphs | None:
    """What records steps on `device`; `None` where there are no graphs or the Triton kernels do not serve."""
    if device.type != "cuda" or not kernels.uses_triton(torch.empty(0, device=device)):
        return None
    return CudaGraphs(device)


class CudaGraphs:
    """
    CUDA graphs that share one private memory pool: they are replayed one after the other, and nothing reads what one of
    them left there but the graph itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _capture_stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._done = torch.cuda.Event()

    def capture(self, run: Callable[[], None]) -> RecordedGraph:
        """
        Runs `run` once as it is, then records it. Waits for the device. Raises what `run` raised, [`NotCapturable`] if
        it does what cannot be recorded; streams, random state and memory are then as before.
        """
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            self._stream.wait_stream(before)
            # what is built on first use (kernels, libraries' handles) cannot be while a stream is captured
            with torch.cuda.stream(self._stream), NothingUnrecorded():
                run()
            before.wait_stream(self._stream)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the pool cannot take it over, nor the allocator free it during the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._stream), contextlib.ExitStack() as stack:
                # cuBLAS takes its workspaces from the graphs' pool: those it has are not the graph's to keep, and
                # others, such as torch.compile's own graphs, free them
                torch._C._cuda_clearCublasWorkspaces()
                stack.callback(torch._C._cuda_clearCublasWorkspaces)
                self._record(graph, run)
        return RecordedGraph(graph, self._done)

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


class RecordedGraph:
    """A CUDA graph that is not freed while it runs: `done` comes after its last replay."""

    def __init__(self, graph: torch.cuda.CUDAGraph, done: torch.cuda.Event) -> None:
        self._graph, self._done = graph, done

    def replay(self) -> None:
        """Does on the device again what was recorded, and does not wait for it."""
        self._graph.replay()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the driver is gone before the interpreter's last objects are
            self._done.synchronize()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
