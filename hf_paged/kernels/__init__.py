"""Kernels on plain tensors: C++ for the CPU, Triton for GPUs. Here: which attention backend a
process prefers; `attention.backends` chooses one per call.

`HF_PAGED_ATTENTION=reference|gather|cpp|triton` forces a backend.
"""

from __future__ import annotations

import os

from torch import Tensor

from . import cpp, triton

VARIABLE = "HF_PAGED_ATTENTION"
NAMES = ("reference", "gather", "cpp", "triton")


def forced() -> str | None:
    """Returns the attention backend that `HF_PAGED_ATTENTION` names, or `None`. Raises `ValueError`
    for unknown names, and `RuntimeError` for `cpp` if the kernels could not be built."""
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    if name not in NAMES:
        raise ValueError(
            f"{VARIABLE}={name!r} names no backend: use one of {', '.join(NAMES)}, or unset it"
        )
    if name == "cpp" and not cpp.is_available():
        raise RuntimeError(
            f"{VARIABLE}=cpp, but the kernels could not be built (the log of hf_paged.kernels.cpp"
            " says why): install a C++ compiler, or unset it"
        )
    return name


def preferred(tensor: Tensor) -> str:
    """Returns the attention backend to try first for tensors like this one. Raises the errors of
    `forced` and `uses_triton`."""
    if uses_triton(tensor):
        return "triton"
    name = forced()
    if name:
        return name
    if tensor.is_cpu and cpp.is_available():
        return "cpp"
    return "gather"


def uses_triton(tensor: Tensor) -> bool:
    """Whether calls with tensors like this one go to the Triton kernels if those support them.
    Raises the errors of `forced`, and `RuntimeError` if `triton` is forced on a device without
    it."""
    name = forced()
    if name is None:
        return not tensor.is_cpu and triton.is_available(tensor.device)
    if name == "triton" and not triton.is_available(tensor.device):
        raise RuntimeError(
            f"{VARIABLE}=triton, but the kernels do not run on {tensor.device}: install Triton and"
            " use a GPU that it supports (the log of hf_paged.kernels.triton says what failed), set"
            " TRITON_INTERPRET=1 before anything is imported to run them slowly on the CPU, or"
            " unset it"
        )
    return name == "triton"
