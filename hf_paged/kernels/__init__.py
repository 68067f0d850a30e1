"""Kernels over plain tensors, C++ for the CPU and Triton for GPUs.

`HF_PAGED_ATTENTION=reference|gather|cpp|triton` forces one backend of attention.
"""

from __future__ import annotations

import os

from torch import Tensor

from . import cpp, triton

VARIABLE = "HF_PAGED_ATTENTION"
NAMES = ("reference", "gather", "cpp", "triton")


def forced() -> str | None:
    """The backend that the environment names. Raises `ValueError` for others, `RuntimeError` without a compiler."""
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    if name not in NAMES:
        raise ValueError(f"{VARIABLE}={name!r} names no backend: use one of {', '.join(NAMES)}, or unset it")
    if name == "cpp" and not cpp.is_available():
        raise RuntimeError(
            f"{VARIABLE}=cpp, but the kernels could not be built (the log of hf_paged.kernels.cpp says why): "
            "install a C++ compiler, or unset it"
        )
    return name


def uses_triton(tensor: Tensor) -> bool:
    """Whether calls with tensors like this one go to the Triton kernels where these take them. Raises as `forced`."""
    name = forced()
    if name is None:
        return not tensor.is_cpu and triton.is_available(tensor.device)
    if name == "triton" and not triton.is_available(tensor.device):
        raise RuntimeError(
            f"{VARIABLE}=triton, but the kernels do not run on {tensor.device}: install Triton and use a GPU that it "
            "knows (the log of hf_paged.kernels.triton says what failed), set TRITON_INTERPRET=1 before anything "
            "is imported to run them slowly on the CPU, or unset it"
        )
    return name == "triton"
