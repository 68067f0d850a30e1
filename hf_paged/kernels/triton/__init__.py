"""Triton kernels: attention over paged K/V, stores and copies of blocks, LoRA products and hashes.
Importing this package does not require Triton; importing most of its modules does. If a kernel
cannot be launched, the function that launches it raises `launch.LaunchFailedError` before any
result is written. Only `merge` does not raise: it computes the result with PyTorch."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch

from ...config import MAX_VIRTUAL_BLOCK_SIZE, MIN_BLOCK_SIZE
from ...interrupts import is_interrupt
from ...topics import Topic

logger = logging.getLogger(__name__)

# Limits of the kernels:
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of queries and unquantized K/V
BLOCK_SIZES = tuple(
    1 << n for n in range(MIN_BLOCK_SIZE.bit_length() - 1, MAX_VIRTUAL_BLOCK_SIZE.bit_length())
)
MAX_DIM = 576  # head dim of keys, and of values in decodes
MAX_QUERIES = 16  # queries per row of a decode; they share tiles with the heads of a group
MAX_BATCH = 8192  # rows of a step, since each program of a decode reads the lengths of all rows
MIN_CAPABILITY = (8, 0)  # of the oldest NVIDIA chips for which the kernels are compiled and tested


def is_available(device: torch.device) -> bool:
    """Whether the kernels run on `device`. The first call for a GPU compiles and runs a small
    kernel; if that fails, logs why and returns False from then on."""
    if device.type == "cpu":  # only Triton's interpreter runs kernels on the CPU
        is_interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in (
            "1",
            "true",
            "on",
            "yes",
        )
        return is_interpreted and importlib.util.find_spec("triton") is not None
    return device.type in ("cuda", "xpu") and _runs_on(device)


@functools.cache
def _runs_on(device: torch.device) -> bool:
    try:
        if torch.version.hip is None and device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability < MIN_CAPABILITY:
                raise RuntimeError(
                    f"it has compute capability {capability}, and the kernels need {MIN_CAPABILITY}"
                )
        from .store import store

        blocks = torch.zeros(1, 1, 8, 16, dtype=torch.float16, device=device)
        states = torch.ones_like(blocks[:, :, :1])
        slots = torch.zeros(1, 1, dtype=torch.int64, device=device)
        store(states, states, blocks, blocks, slots)
        if blocks.sum().item() != 16:
            raise RuntimeError("a kernel ran, but stored wrong values")
        return True
    except Exception as error:
        if is_interrupt(error):
            raise
        # Triton fails in many ways: no C compiler for its launcher, no driver, a wrong version
        message = Topic.TRITON("hf_paged runs without its Triton kernels on %s: %s: %s")
        logger.warning(message, device, type(error).__name__, error)
        return False
