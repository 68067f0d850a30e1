"""What records a step to run it again: tapes on the CPU, CUDA graphs; and the check of what was
recorded."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterator

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
    """[`Tape`]s, on the CPU, as the backend that records steps. Each has memory for its
    intermediate values."""

    # Replays compute with other kernels than the forward. Only decodes are recorded: steps with
    # chunks compute for long, and reading shared prefixes once gains nothing.
    on_device = False

    def capture(
        self,
        run: Callable[[], None],
        kept: set[int],
    ) -> Tape:
        """Runs `run` twice and records it. `kept`: addresses of the storages that it reads and that
        outlive the tape. Raises what `run` raises, and `NotCapturable` if it cannot be recorded."""
        run()  # initializes lazily built objects, and allocates the result

        def is_kept(tensor: Tensor) -> bool:
            is_known = tensor.untyped_storage().data_ptr() in kept
            if not is_known and tensor.is_floating_point() and tensor.numel():
                raise NotCapturable(
                    "its forward takes numbers that no recorded operation made, perhaps in a thread"
                )
            return is_known

        return Tape.record(run, is_kept)

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        return NOTHING


GraphBackend = Tapes | CudaGraphs
Graph = Tape | RecordedGraph


def graph_backend(device: torch.device) -> GraphBackend | None:
    """The backend that records steps on `device`; `None` if there is none, or our kernels are not
    used."""
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
    logits: Tensor,
    dtypes: set[torch.dtype | None],
) -> None:
    """Raises [`NotCapturable`] unless a replay gives the logits `(n, vocab_size)` of the recorded
    run, computed in `dtypes`."""
    expected = logits.clone()
    logits.zero_()
    replay()
    excess = excess_of(expected, logits, (logits.dtype, *dtypes))
    if excess is not None:
        raise NotCapturable(f"what was recorded gives logits that are {excess} from its own")


def reason_of(error: BaseException) -> str:
    """The first line of the first error: ending a broken capture raises further ones."""
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)


@restoring
def recording_alone(device: torch.device) -> Iterator[bool]:
    """Yields whether no other thread records on `device`, which has one capture stream. Turns off
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
def log_unrecorded(obstacle: str, level: int) -> None:
    message = Topic.RECORDING(
        "steps are not recorded, and run operation by operation, which is slower: %s"
    )
    logger.log(level, message, obstacle)
