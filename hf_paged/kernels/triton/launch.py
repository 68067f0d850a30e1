"""Launches Triton kernels and reports each launch to a recorder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# recorder of launches: gets the kernel, the grid, positional and keyword arguments, and the tensors written
observer: ContextVar[Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any], list[Tensor]], None] | None]
observer = ContextVar("observer", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, writes: Sequence[Tensor | None], **kwargs: Any) -> None:
    """Runs `kernel[grid](*args, **kwargs)` on the device of `writes`, which lists all tensors that it writes."""
    written = [tensor for tensor in writes if tensor is not None]
    note = observer.get()
    # hides the tensor copies of Triton's interpreter, PyTorch operations, from the recorder
    unseen = contextlib.nullcontext() if note is None else _disable_current_modes()
    with torch.accelerator.device_index(written[0].device.index), unseen:
        kernel[grid](*args, **kwargs)
    if note is not None:
        note(kernel, grid, args, kwargs, written)
