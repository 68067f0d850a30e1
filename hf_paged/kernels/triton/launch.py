"""Launches Triton kernels. If a kernel cannot run, `launch` raises `LaunchFailedError`, so that the
caller can compute the result with PyTorch."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ...interrupts import is_from_handler, is_interrupt
from ...topics import Topic

logger = logging.getLogger(__name__)

# a first launch that takes this long has compiled the kernel; other launches take milliseconds
MIN_COMPILE_SECONDS = 0.05
MIN_LOGGED_SECONDS = 2.0  # total compile time after which a message is logged

_failed_variants: set[Hashable] = set()
"""The variants (`_variant`) that failed. They are not launched again, since they would fail again
after a second or two of compiling."""

_logged_kernels: set[str] = set()
"""Names of kernels whose first error has been logged."""


class LaunchFailedError(RuntimeError):
    """A kernel could not be compiled or launched, and has written nothing."""


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, writes: Sequence[Tensor | None], **kwargs: Any
) -> None:
    """Runs `kernel[grid](*args, **kwargs)` on the device of the tensors in `writes`, which lists
    all tensors that the kernel writes; `None` entries are ignored.

    Raises:
        LaunchFailedError: if the kernel could not be compiled or launched, in this call or an
            earlier one. A kernel's first error is logged.

    Other errors, after which the device may be unusable, are raised unchanged.
    """
    written_tensors = [tensor for tensor in writes if tensor is not None]
    device = written_tensors[0].device
    if _failed_variants and _variant(kernel, args, kwargs, device) in _failed_variants:
        raise LaunchFailedError(f"{kernel.__name__} failed before")
    start = time.perf_counter()
    try:
        with torch.accelerator.device_index(device.index):
            kernel[grid](*args, **kwargs)
    except Exception as error:  # Triton fails in many ways
        # Triton may raise its own error in place of an interrupt that a signal's handler raised
        interrupt = interrupt_of(error)
        if interrupt is not None:
            raise interrupt from interrupt.__cause__
        if not is_recoverable(error, device):
            raise
        lines = str(error).strip().splitlines() or [""]
        is_out_of_memory = "out of memory" in str(error)  # torch appends advice in further lines
        reason = f"{type(error).__name__}: {lines[0] if is_out_of_memory else lines[-1]}"
        if not is_out_of_memory:  # memory may become free
            _failed_variants.add(_variant(kernel, args, kwargs, device))
        if kernel.__name__ not in _logged_kernels:
            _logged_kernels.add(kernel.__name__)
            message = "the Triton kernel %s does not run; using PyTorch instead: %s"
            logger.warning(Topic.TRITON(message), kernel.__name__, reason)
        raise LaunchFailedError(f"{kernel.__name__}: {reason}") from error
    seconds = time.perf_counter() - start
    if seconds >= MIN_COMPILE_SECONDS and device.type != "cpu":  # the interpreter compiles nothing
        _compile_log.note(_variant(kernel, args, kwargs, device), seconds)


def interrupt_of(error: BaseException) -> BaseException | None:
    """Returns the interrupt behind `error`: `error` itself or an error that it replaced, if that is
    a `KeyboardInterrupt` or was raised by a signal handler. Returns `None` if there is none. Only
    for errors of libraries that replace every error: other code that replaces an interrupt has
    handled it. Errors that a running frame has caught do not count, since `error` was raised later,
    in that frame's handler."""
    running_ids = set[int]()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        running_ids.add(id(frame))
        frame = frame.f_back
    errors, known_ids = [error], {id(error)}
    for later in errors:  # the loop appends causes and contexts
        if isinstance(later, KeyboardInterrupt) or is_from_handler(later):
            return later
        for earlier in (later.__cause__, later.__context__):
            trace = None if earlier is None else earlier.__traceback__
            if earlier is None or trace is None or id(earlier) in known_ids:
                continue
            if id(trace.tb_frame) not in running_ids:
                errors.append(earlier)
                known_ids.add(id(earlier))
    return None


def is_recoverable(error: Exception, device: torch.device) -> bool:
    """Whether a launch that raised `error` has written nothing and left `device` usable. Raises
    interrupts that arrive meanwhile."""
    if device.type == "cpu":  # Triton's interpreter: an `InterpreterError` is a bug in a kernel
        from triton.errors import TritonError
        from triton.runtime.errors import InterpreterError

        return isinstance(error, (TritonError, RuntimeError)) and not isinstance(
            error, InterpreterError
        )
    # raises if an earlier kernel failed; during a capture, always raises and ends the capture
    try:
        torch.accelerator.synchronize(device)
    except Exception as device_error:
        if is_interrupt(device_error):
            raise
        return False
    return True


def _variant(
    kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Hashable:
    """Returns a key of the compiled variant that a launch uses: the kernel, the device, constants,
    options, and the types of other arguments. The key ignores that Triton also specialises on
    alignment and on integers equal to 1. Constants must be passed as keyword arguments."""
    # the kernels annotate constants and nothing else
    non_constants = set(kernel.arg_names) - set(kernel.fn.__annotations__)
    keyword_arguments = tuple(
        (name, _type_name(x) if name in non_constants else x) for name, x in kwargs.items()
    )
    return kernel, device, tuple(map(_type_name, args)), keyword_arguments


def _type_name(argument: Any) -> str:
    return str(argument.dtype) if isinstance(argument, Tensor) else type(argument).__name__


class CompileLog:
    """Logs how long kernels took to compile, whenever they have taken `MIN_LOGGED_SECONDS` since
    the last message."""

    def __init__(self) -> None:
        # compiled variants: a later slow launch of one was waiting for the device, not compiling
        self._compiled_variants: set[Hashable] = set()
        self._num_variants, self._seconds = 0, 0.0

    def note(self, variant: Hashable, seconds: float) -> None:
        """Counts a launch of `seconds`, long enough to have compiled `variant`."""
        if variant in self._compiled_variants:
            return
        self._compiled_variants.add(variant)
        self._num_variants += 1
        self._seconds += seconds
        if self._seconds >= MIN_LOGGED_SECONDS:
            logger.info(
                "compiled kernels in %.1f s (variants: %d); later processes find them in Triton's"
                " cache",
                self._seconds,
                self._num_variants,
            )
            self._num_variants, self._seconds = 0, 0.0


_compile_log = CompileLog()
