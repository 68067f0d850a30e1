"""The backends that record steps, as tapes on the CPU and as CUDA graphs on GPUs, and the check of
recordings. `graphs.py` decides which steps are recorded."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import forks
from ..attention.backends import cpp, unsupported_reasons
from ..cache.free_memory import discard
from ..cache.memory import autocast_dtype
from ..interrupts import restoring
from ..kernels import forced_backend, uses_triton
from ..model.state import ModelState
from ..model.trial import first_line, significant_difference
from ..model.values import is_user_module
from ..model.writes import Snapshot, Write, notes_of
from ..seams import RecordedContext
from ..step import NotCapturable
from ..switches import NOTHING, Switches, Switching
from ..topics import Topic
from .cuda_graphs import CudaGraphs, RecordedGraph
from .inputs import StaticInputs
from .live import LiveRefused
from .tape import Tape


class Tapes:
    """The backend that records steps on the CPU, as [`Tape`]s. Each tape owns memory for its
    intermediate values."""

    # Replays run on the host, with other kernels than the forward. Steps with chunks are not
    # recorded, since they compute for too long to become much faster. Recordings have no cascades,
    # since the C++ kernel finds the blocks that rows share, and reads them once, in every call.
    on_device = False

    def capture(
        self,
        run: Callable[[], None],
        persistent_storages: set[int],
        prepare: Callable[[], None],
    ) -> Tape:
        """Calls `run` twice, each time after `prepare`, and records the second call.
        `persistent_storages`: addresses of the storages that outlive the tape. Raises the errors of
        `run`, and `NotCapturable` if `run` cannot be recorded."""
        prepare()
        run()  # builds kernels on their first use, and allocates the buffer of the logits
        prepare()

        def is_persistent(tensor: Tensor) -> bool:
            outlives_tape = tensor.untyped_storage().data_ptr() in persistent_storages
            if not outlives_tape and tensor.numel():
                raise NotCapturable(
                    "its forward reads numbers that no recorded operation computed, perhaps because"
                    " another thread computed them"
                )
            return outlives_tape

        return Tape.record(run, is_persistent)

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        return NOTHING


GraphBackend = Tapes | CudaGraphs
Graph = Tape | RecordedGraph


@dataclass
class RecordedStep:
    """A graph and the buffers that it reads and writes."""

    inputs: StaticInputs
    logits: Tensor  # (number of logit rows, vocab_size)
    graph: Graph
    context: RecordedContext | None
    num_replays: int = 0

    def replay(self) -> None:
        """Replays the graph. If a live module returns a result unlike the recorded one, restores
        the states, so that the step can run without a replay, and raises [`LiveRefused`]."""
        if not isinstance(self.graph, Tape) or not self.graph.calls_modules:
            self.graph.replay()
            return
        states = self.inputs.overwritten_buffers
        copies = [state.clone() for state in states]
        try:
            self.graph.replay()
        except LiveRefused:
            for state, copy in zip(states, copies):
                state.copy_(copy)
            raise

    def may_read(self, storages: set[int]) -> bool:
        """Whether the step may read or write one of the storages at these addresses. (What a CUDA
        graph reads is not known.)"""
        if not isinstance(self.graph, Tape):
            return bool(storages)
        return not self.graph.storages.isdisjoint(storages)

    def discard(self) -> bool:
        """Gives the memory of intermediate values, logits and states back to the system until the
        next replay. Returns whether that was possible: `False` for a CUDA graph, and for a step
        with a context, since the context keeps an adapter's weights in memory."""
        if not isinstance(self.graph, Tape) or self.context is not None:
            return False
        states = self.inputs.states
        has_discarded_states = states is None or states.discard()
        return has_discarded_states and discard([self.logits]) and self.graph.discard()


def graph_backend(device: torch.device) -> GraphBackend | None:
    """Returns the backend that records steps on `device`; `None` if there is none, or if the C++
    (CPU) or Triton (GPU) kernels are unavailable or not selected."""
    if device.type == "cpu":
        if not cpp.is_available() or forced_backend() not in (None, "cpp"):
            return None
        return Tapes()
    if device.type != "cuda":
        return None
    if not uses_triton(torch.empty(0, device=device)):
        return None
    return CudaGraphs(device)


def check_replay(
    replay: Callable[[], None],
    results: Sequence[Tensor],
    dtypes: set[torch.dtype | None],
    prepare: Callable[[], None],
) -> None:
    """Raises [`NotCapturable`] unless a replay, after `prepare`, reproduces the `results` of the
    recorded run (logits `(n, vocab_size)`, then states `(n, ...)`), up to rounding in `dtypes`. The
    replay overwrites `results`."""
    expected = [result.clone() for result in results]
    results[0].zero_()
    prepare()
    replay()
    names = itertools.chain(["logits"], itertools.repeat("states"))
    for name, before, after in zip(names, expected, results):
        if torch.equal(before, after):  # a single number has no standard deviation
            continue
        difference = significant_difference(
            before.flatten(1), after.flatten(1), (after.dtype, *dtypes)
        )
        if difference is not None:
            raise NotCapturable(
                f"the {name} of a replay are {difference} from those of the recorded forward"
            )


def reason_of(error: BaseException, handled_error: BaseException | None = None) -> str:
    """Returns the first line of the error that was raised first, since ending a broken capture
    raises more errors. `handled_error`: an error that the caller was already handling when the
    recording began."""
    while error.__context__ not in (None, handled_error) and not error.__suppress_context__:
        error = error.__context__
    return first_line(error)


def _pausing(collector: Any) -> Switching:
    """Returns the functions that disable a garbage collector and restore its state."""
    restore = collector.enable if collector.isenabled() else collector.disable
    return collector.disable, restore


_collectors: Switches[Any] = Switches(_pausing)


@restoring
def exclusive_recording(device: torch.device) -> Iterator[bool]:
    """A context for a recording on `device`. Yields whether this thread may record: `False` while
    another thread does, since a device has one capture stream. Inside the context, garbage
    collection is disabled, since it might run finalizers that wait for the device (pytorch#161037),
    or finalizers of users' objects."""
    is_exclusive = False
    try:
        is_exclusive = _capture_lock(device).acquire(blocking=False)
        with _collectors.switched([gc]):
            yield is_exclusive
    finally:
        if is_exclusive:
            _capture_lock(device).release()


def uncached_autocast(device: torch.device) -> torch.autocast:
    """A context with the active autocast, but without its cache of converted weights, so that a
    graph converts the weights itself: autocast frees the cached copies when it ends."""
    dtype = autocast_dtype(device)
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


@restoring
def undoing_writes(model: nn.Module, state: ModelState | None) -> Iterator[None]:
    """A context for a recording: when it ends, it undoes writes to the model, as far as a
    [`Snapshot`] can. Raises [`NotCapturable`] if Python code changed anything but the content of
    tensors, since a replay would not repeat the change: an attribute of a module, or a value in a
    config, class or global, which `state` reads. One change is allowed: a library's module may
    replace a tensor attribute that no forward reads. (No recorded operation has read that tensor
    either, since `Tapes` refuses such a read.) A user's module may not replace one, since other
    code of the user, such as a processor, may read it."""
    snapshot = Snapshot(model)
    writes: list[Write] = []
    values = None if state is None else state.read_values()
    try:
        yield
    finally:
        snapshot.restore(by_engine=True, writes=writes)
    values_after = None if state is None else state.read_values()
    if values is None or values_after is None or values[1:] != values_after[1:]:
        raise NotCapturable("its forward changes a value that Python code reads")
    write_only = notes_of(model).write_only
    for write in writes:
        is_unread = write.name in write_only.get(write.module, ())
        is_unread &= not is_user_module(type(write.module).__module__)
        if not write.is_in_place and not (is_unread and isinstance(write.after, Tensor)):
            attribute = f"{type(write.module).__name__}.{write.name}"
            raise NotCapturable(f"its forward writes `{attribute}`, which replays would not")


@functools.cache
def _capture_lock(device: torch.device) -> threading.Lock:
    return forks.lock()


def unrecorded(reason: str) -> str:
    """Returns a reason why decode steps run operation by operation."""
    return Topic.RECORDING(f"decode steps are not recorded: {reason}")


def note_unrecorded(reason: str) -> None:
    """Called in a step that runs operation by operation, because it is not recorded or no recording
    can serve it: adds the reason to the call's `unsupported_reasons`."""
    reasons = unsupported_reasons.get()
    if reasons is not None:
        reasons.add(unrecorded(reason))


def storage_addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Returns the addresses of these tensors' storages."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
