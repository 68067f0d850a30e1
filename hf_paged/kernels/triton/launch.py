"""Launches Triton kernels. A kernel that cannot run raises one error, after which the caller
computes the same with PyTorch."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...interrupts import is_interrupt
from ...topics import Topic

logger = logging.getLogger(__name__)

# a kernel's first launch that takes this long has compiled the kernel; others take milliseconds
MIN_COMPILE_SECONDS = 0.05
MIN_LOGGED_SECONDS = 2.0  # of compiling, before the time is logged

_failed: set[Hashable] = set()
"""Kernels that failed, as `_variant`: they would fail again, after a second or two of compiling.
"""

_logged: set[str] = set()
"""Names of kernels whose first error has been logged."""


class LaunchFailedError(RuntimeError):
    """A kernel could not be compiled or launched. It has written nothing."""


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, writes: Sequence[Tensor | None], **kwargs: Any
) -> None:
    """Runs `kernel[grid](*args, **kwargs)` on the device of `writes`, which lists all tensors that
    the kernel writes.

    Raises:
        LaunchFailedError: if the kernel could not be compiled or launched, now or earlier; logged
            once. Errors after which the device cannot be used are raised unchanged.
    """
    written = [tensor for tensor in writes if tensor is not None]
    device = written[0].device
    if _failed and _variant(kernel, args, kwargs, device) in _failed:
        raise LaunchFailedError(f"{kernel.__name__} failed before")
    start = time.perf_counter()
    try:
        with torch.accelerator.device_index(device.index):
            kernel[grid](*args, **kwargs)
    except Exception as error:  # Triton fails in many ways
        if is_interrupt(error):
            raise
        if not has_not_started(error, device):
            raise
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
        if "out of memory" not in reason:  # memory may become free
            _failed.add(_variant(kernel, args, kwargs, device))
        if kernel.__name__ not in _logged:
            _logged.add(kernel.__name__)
            text = "the Triton kernel %s does not run; using PyTorch instead: %s"
            logger.warning(Topic.TRITON(text), kernel.__name__, reason)
        raise LaunchFailedError(f"{kernel.__name__}: {reason}") from error
    seconds = time.perf_counter() - start
    if seconds >= MIN_COMPILE_SECONDS and device.type != "cpu":  # the interpreter compiles nothing
        _compile_log.note(_variant(kernel, args, kwargs, device), seconds)


def has_not_started(error: Exception, device: torch.device) -> bool:
    """Whether a launch that raised `error` has written nothing, and `device` still works."""
    if device.type == "cpu":  # Triton's interpreter: errors in the kernels' own code are raised
        from triton.errors import TritonError
        from triton.runtime.errors import InterpreterError

        return isinstance(error, (TritonError, RuntimeError)) and not isinstance(
            error, InterpreterError
        )
    try:  # raises an earlier kernel's error, and during a capture, which is then abandoned
        torch.accelerator.synchronize(device)
    except Exception:
        return False
    return True


def _variant(
    kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> Hashable:
    """Returns a key of the properties for which a kernel is compiled, except alignments: constants,
    options, and the kinds of other arguments. All constants are keyword arguments."""
    # only constants are annotated
    arguments = set(kernel.arg_names) - set(kernel.fn.__annotations__)
    named = tuple((name, _kind(x) if name in arguments else x) for name, x in kwargs.items())
    return kernel, device, tuple(map(_kind, args)), named


def _kind(argument: Any) -> str:
    return str(argument.dtype) if isinstance(argument, Tensor) else type(argument).__name__


class CompileLog:
    """Logs how long kernels took to compile, each time another `MIN_LOGGED_SECONDS` have
    passed."""

    def __init__(self) -> None:
        self._compiled: set[Hashable] = set()  # later slow launches of these wait for the device
        self._num_kernels, self._seconds = 0, 0.0

    def note(self, variant: Hashable, seconds: float) -> None:
        """Records a launch that took long enough to have compiled `variant`."""
        if variant in self._compiled:
            return
        self._compiled.add(variant)
        self._num_kernels += 1
        self._seconds += seconds
        if self._seconds >= MIN_LOGGED_SECONDS:
            logger.info(
                "compiling kernels: %d in %.1f s; later processes find them in Triton's cache",
                self._num_kernels,
                self._seconds,
            )
            self._num_kernels, self._seconds = 0, 0.0


_compile_log = CompileLog()
