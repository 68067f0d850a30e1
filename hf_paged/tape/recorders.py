"""The backends that record steps, tapes on the CPU and CUDA graphs, and the check of a recording.
Leaves which steps are recorded to `graphs.py`."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..attention.backends import cpp
from ..interrupts import restoring
from ..kernels import forced, uses_triton
from ..model.trial import excess_of, first_line
from ..step import NotCapturable
from ..switches import NOTHING
from ..topics import Topic
from .cuda_graphs import CudaGraphs, RecordedGraph
from .tape import Tape

logger = logging.getLogger(__name__)


class Tapes:
    """The backend that records steps on the CPU, as [`Tape`]s. Each tape owns memory for its
    intermediate values."""

    # Replays use other kernels than the forward. Only decodes are recorded: a step with chunks
    # computes for too long to gain, and reading shared prefixes once saves no time.
    on_device = False

    def capture(
        self,
        run: Callable[[], None],
        persistent_storages: set[int],
        prepare: Callable[[], None],
    ) -> Tape:
        """Runs `run` twice, each time after `prepare`, and records the second run.
        `persistent_storages`: addresses of the storages that it reads and that outlive the tape.
        Raises the errors of `run`, and `NotCapturable` if it cannot be recorded."""
        prepare()
        run()  # initializes lazily built objects, and allocates the result
        prepare()

        def is_persistent(tensor: Tensor) -> bool:
            outlives_tape = tensor.untyped_storage().data_ptr() in persistent_storages
            if not outlives_tape and tensor.is_floating_point() and tensor.numel():
                raise NotCapturable(
                    "its forward reads numbers that no recorded operation computed, perhaps from"
                    " another thread"
                )
            return outlives_tape

        return Tape.record(run, is_persistent)

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        return NOTHING


GraphBackend = Tapes | CudaGraphs
Graph = Tape | RecordedGraph


def graph_backend(device: torch.device) -> GraphBackend | None:
    """Returns the backend that records steps on `device`; `None` if none does, or if our kernels
    are not used."""
    if device.type == "cpu":
        if not cpp.is_available() or forced() not in (None, "cpp"):
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
    """Raises [`NotCapturable`] unless a replay, after `prepare`, reproduces the recorded run's
    `results`, which were computed in `dtypes`: logits `(n, vocab_size)`, and states `(n, ...)`."""
    expected = [result.clone() for result in results]
    results[0].zero_()
    prepare()
    replay()
    names = itertools.chain(["logits"], itertools.repeat("states"))
    for name, before, after in zip(names, expected, results):
        excess = excess_of(before.flatten(1), after.flatten(1), (after.dtype, *dtypes))
        if excess is not None:
            raise NotCapturable(f"the {name} of a replay are {excess} from those of its forward")


def reason_of(error: BaseException) -> str:
    """Returns the first line of the first error: ending a broken capture raises further errors."""
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)


@restoring
def recording_alone(device: torch.device) -> Iterator[bool]:
    """Yields whether no other thread records on `device`, which has one capture stream. Disables
    garbage collection meanwhile: it may free objects that wait for the device (pytorch#161037), or
    run a caller's code."""
    is_alone = False
    collects = gc.isenabled()
    try:
        is_alone = _capture_lock(device).acquire(blocking=False)
        gc.disable()
        yield is_alone
    finally:
        if collects:
            gc.enable()
        if is_alone:
            _capture_lock(device).release()


@functools.cache
def _capture_lock(device: torch.device) -> threading.Lock:
    return threading.Lock()


@functools.cache
def log_unrecorded(reason: str, level: int) -> None:
    message = Topic.RECORDING(
        "steps are not recorded, and run operation by operation, which is slower: %s"
    )
    logger.log(level, message, reason)
