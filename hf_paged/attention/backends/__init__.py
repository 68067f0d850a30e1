"""Selects the implementation of paged attention: the Triton kernels on a GPU, the C++ kernel on the
CPU, or, where these are unavailable or do not support a call, the portable path, which gathers keys
and values. The environment variable `HF_PAGED_ATTENTION` forces a backend.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor

from ...cache.memory import autocast_dtype
from ...kernels import forced_backend, preferred_backend
from ...kernels.triton.launch import LaunchFailedError
from ...step import NotCapturable, StepMetadata
from ...topics import Topic
from . import cpp, gather, reference, triton
from .reference import AttentionCall

# Each module has an `attend` with the argument and result of `reference.attend`.
BACKENDS: dict[str, ModuleType] = {
    "reference": reference,
    "gather": gather,
    "cpp": cpp,
    "triton": triton,
}

unsupported_reasons: ContextVar[set[str] | None] = ContextVar(
    "hf_paged_unsupported_reasons", default=None
)
"""The set of the reasons why decode steps in this context are slow, for the report of a call's
route: `select` adds why they gather keys and values, and `tape.recorders` why they are not
recorded. `None`: reasons are not collected. `select` logs why `triton` does not support calls, but
does not add it to the set."""

log_once = functools.cache(logging.getLogger(__name__).warning)


def select(call: AttentionCall) -> ModuleType:
    """Returns the backend for a call: the forced one, else `triton` on a GPU and `cpp` on the CPU;
    `gather` if that backend is unavailable or does not support the call. Logs, once, each reason
    why `triton` does not support calls; adds other reasons to `unsupported_reasons`, if the step
    begins with a decode and no backend is forced. Raises the errors of `kernels.preferred_backend`.
    """
    backend = BACKENDS[call.step.plan(_preferred_name)]
    is_cpu = call.query.is_cpu
    if backend is reference:
        return backend
    if backend is not gather:
        reason = backend.unsupported_reason(call)
        if reason is None:
            return backend
    elif is_cpu:
        reason = (
            "the C++ kernel is unavailable: HF_PAGED_CPP=0 is set, or the kernel could not be built"
            " or loaded, or its results differ from PyTorch's. The log says which"
        )
    else:
        reason = (
            "the Triton kernels do not run on this device. If it is a CUDA or XPU device, the log"
            " says why"
        )
    if backend is triton:
        log_once(
            Topic.GATHERED(
                "keys and values are gathered, which is slower than reading blocks in place: %s"
            ),
            reason,
        )
        return gather
    reasons = unsupported_reasons.get()
    is_decode = call.step.query_start[:2] == (0, 1)
    if reasons is not None and is_decode and not forced_backend():
        device = "the CPU" if is_cpu else call.query.device
        reasons.add(Topic.GATHERED(f"decode steps gather keys and values on {device}: {reason}"))
    return gather


def _preferred_name(step: StepMetadata) -> str:
    """Returns the name of the backend that a step's calls try first, in every layer. Reads the
    environment variable, and raises the errors of `kernels.preferred_backend`."""
    name = preferred_backend(step.block_tables)
    if name == "cpp" and not forced_backend() and not cpp.is_available():
        return "gather"
    return name


def attend(call: AttentionCall) -> Tensor:
    """Computes the result of `reference.attend` with the selected backend. Under autocast, queries
    that are not float64 are cast to the autocast dtype, as in a model's own attention. Gathers keys
    and values if a Triton kernel cannot be launched. Raises the errors of
    `kernels.preferred_backend`, and `NotCapturable` if the step is captured and no kernel that
    reads lengths on the device supports the call.
    """
    dtype = autocast_dtype(call.query.device)
    if dtype is not None:  # backends choose the dtype of their sums, so they run without autocast
        query = call.query
        if query.dtype is not torch.float64:
            query = query.to(dtype)
        with torch.autocast(query.device.type, enabled=False):
            return attend(call._replace(query=query))
    if call.step.plan(_preferred_name) == "cpp":
        output = cpp.attend_prepared(call)
        if output is not None:
            return output
    backend = select(call)
    if backend is triton:
        with contextlib.suppress(LaunchFailedError):
            return triton.attend(call)
        backend = gather
    if call.step.lengths is not None and backend in (gather, reference):
        raise NotCapturable("no kernel that reads lengths on the device supports its attention")
    return backend.attend(call)
