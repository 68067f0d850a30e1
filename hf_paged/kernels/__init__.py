"""Kernels on plain tensors, in C++ for the CPU and in Triton for GPUs. This module determines which
attention backend a process prefers (`attention.backends` chooses one per call), and whether other
kernels run in Triton.

`HF_PAGED_ATTENTION=reference|gather|cpp|triton` forces a backend.
"""

from __future__ import annotations

import os

from torch import Tensor

from . import cpp, triton

BACKEND_VARIABLE = "HF_PAGED_ATTENTION"
BACKEND_NAMES = ("reference", "gather", "cpp", "triton")


def forced_backend() -> str | None:
    """Returns the attention backend that `HF_PAGED_ATTENTION` names, or `None` if it is unset or
    empty. Raises `ValueError` for unknown names, and `RuntimeError` for `cpp` if the C++ kernels
    are not available."""
    name = os.environ.get(BACKEND_VARIABLE)
    if not name:
        return None
    if name not in BACKEND_NAMES:
        raise ValueError(
            f"{BACKEND_VARIABLE}={name!r} names no backend: use one of {', '.join(BACKEND_NAMES)},"
            " or unset the variable"
        )
    if name == "cpp" and not cpp.is_available():
        raise RuntimeError(
            f"{BACKEND_VARIABLE}=cpp, but the C++ kernels are disabled by HF_PAGED_CPP=0, or could"
            " not be built or loaded (the log of hf_paged.kernels.cpp says which): unset"
            f" HF_PAGED_CPP, install a C++ compiler, or unset {BACKEND_VARIABLE}"
        )
    return name


def preferred_backend(tensor: Tensor) -> str:
    """Returns the attention backend to try first for tensors on the device of `tensor`. Raises the
    errors of `forced_backend` and `uses_triton`."""
    if uses_triton(tensor):
        return "triton"
    name = forced_backend()
    if name:
        return name
    if tensor.is_cpu and cpp.is_available():
        return "cpp"
    return "gather"


def uses_triton(tensor: Tensor) -> bool:
    """Whether calls with tensors on the device of `tensor` go to the Triton kernels, if these
    support the call. Raises the errors of `forced_backend`, and `RuntimeError` if `triton` is
    forced but does not run on the device."""
    name = forced_backend()
    if name is None:
        return not tensor.is_cpu and triton.is_available(tensor.device)
    if name == "triton" and not triton.is_available(tensor.device):
        raise RuntimeError(
            f"{BACKEND_VARIABLE}=triton, but the Triton kernels do not run on {tensor.device} (the"
            " log of hf_paged.kernels.triton says what failed): install Triton and use a GPU that"
            " it supports, set TRITON_INTERPRET=1 before importing anything, to run the kernels"
            f" slowly on the CPU, or unset {BACKEND_VARIABLE}"
        )
    return name == "triton"
