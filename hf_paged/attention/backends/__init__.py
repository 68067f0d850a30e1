"""Selects the implementation of paged attention: the Triton kernels on a GPU, the C++ kernel on the
CPU, and for calls that these do not support the portable path, which gathers keys and values. The
environment variable `kernels.VARIABLE` forces a backend.
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
"""The set that collects why kernels did not serve calls in this context, for the route of a call;
`None`: not collected."""

log_once = functools.cache(logging.getLogger(__name__).warning)


def select(call: AttentionCall) -> ModuleType:
    """Returns the backend for a call: `triton` on a GPU, `cpp` on the CPU, or the forced one;
    `gather` if that backend is unavailable or does not support the call; logs each reason against
    Triton once. Raises the errors of `kernels.preferred_backend`.
    """
    backend = BACKENDS[call.step.plan(_preferred)]
    is_cpu = call.query.is_cpu
    if backend is reference:
        return backend
    if backend is not gather:
        reason = backend.unsupported_reason(call)
        if reason is None:
            return backend
    elif is_cpu:
        reason = (
            "the C++ kernel is unavailable: HF_PAGED_CPP=0 is set, or it could not be built or"
            " loaded, or its results differ from PyTorch's. The log says which"
        )
    else:
        reason = "the Triton kernels do not run on this device. The log says why"
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


def _preferred(step: StepMetadata) -> str:
    """Returns the name of the backend that a step's calls try first, in every layer. Reads the
    environment variable, and raises as `kernels.preferred_backend` does."""
    name = preferred_backend(step.block_tables)
    if name == "cpp" and not forced_backend() and not cpp.is_available():
        return "gather"
    return name


def attend(call: AttentionCall) -> Tensor:
    """Computes the result of `reference.attend` with the selected backend; under autocast in the
    autocast dtype, except for float64, as a model's own attention does. Gathers keys and values if
    a Triton kernel cannot be launched.

    Raises:
        NotCapturable: if the step's lengths are only on the device, and no kernel that reads them
            there supports the call.
    """
    dtype = autocast_dtype(call.query.device)
    if dtype is not None:  # a backend sums in float32 for every input dtype
        query = call.query
        if query.dtype is not torch.float64:
            query = query.to(dtype)
        with torch.autocast(query.device.type, enabled=False):
            return attend(call._replace(query=query))
    if call.step.plan(_preferred) == "cpp":
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
