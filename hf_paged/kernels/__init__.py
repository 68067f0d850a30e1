"""Kernels on plain tensors, in C++ for the CPU and in Triton for GPUs. This module says which
attention backend a process prefers; `attention.backends` chooses one per call.

`HF_PAGED_ATTENTION=reference|gather|cpp|triton` forces a backend.
"""

from __future__ import annotations

import os

from torch import Tensor

from . import cpp, triton

VARIABLE = "HF_PAGED_ATTENTION"
BACKEND_NAMES = ("reference", "gather", "cpp", "triton")


def forced() -> str | None:
    """Returns the attention backend that `HF_PAGED_ATTENTION` names, or `None` if it is unset.
    Raises `ValueError` for unknown names, and `RuntimeError` for `cpp` if the C++ kernels are not
    available."""
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    if name not in BACKEND_NAMES:
        raise ValueError(
            f"{VARIABLE}={name!r} names no backend: use one of {', '.join(BACKEND_NAMES)}, or unset"
            " the variable"
        )
    if name == "cpp" and not cpp.is_available():
        raise RuntimeError(
            f"{VARIABLE}=cpp, but the kernels could not be built (the log of hf_paged.kernels.cpp"
            " says why): install a C++ compiler, or unset the variable"
        )
    return name


def preferred(tensor: Tensor) -> str:
    """Returns the attention backend to try first for tensors on the device of `tensor`. Raises the
    errors of `forced` and `uses_triton`."""
    if uses_triton(tensor):
        return "triton"
    name = forced()
    if name:
        return name
    if tensor.is_cpu and cpp.is_available():
        return "cpp"
    return "gather"


def uses_triton(tensor: Tensor) -> bool:
    """Whether calls with tensors on the device of `tensor` go to the Triton kernels, if these
    support the call. Raises the errors of `forced`, and `RuntimeError` if `triton` is forced but
    does not run on the device."""
    name = forced()
    if name is None:
        return not tensor.is_cpu and triton.is_available(tensor.device)
    if name == "triton" and not triton.is_available(tensor.device):
        raise RuntimeError(
            f"{VARIABLE}=triton, but the kernels do not run on {tensor.device}: install Triton and"
            " use a GPU that it supports (the log of hf_paged.kernels.triton says what failed), set"
            " TRITON_INTERPRET=1 before importing anything, to run the kernels slowly on the CPU,"
            " or unset the variable"
        )
    return name == "triton"
