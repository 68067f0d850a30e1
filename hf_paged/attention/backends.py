"""Which implementation of paged attention a call gets: on a GPU the Triton kernels where they apply, on the CPU the C++
kernel, else the portable path, which gathers.

`HF_PAGED_ATTENTION=reference|cpu|native|triton` forces one, to find out where a difference comes from.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..cache.memory import autocast_dtype
from . import cpu, kernels, reference
from .metadata import AttentionMetadata

logger = logging.getLogger(__name__)

VARIABLE = "HF_PAGED_ATTENTION"
BACKENDS = {"reference": reference, "cpu": cpu, "native": native}
NAMES = (*BACKENDS, "triton")  # its module is imported when it is used, since Triton may be missing

obstacles: ContextVar[set[str] | None] = ContextVar("hf_paged_obstacles", default=None)
"""Collects why kernels did not take what they were meant for in this context; a call's report reads it."""


def select(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: AttentionMetadata,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> ModuleType:
    """The module whose `paged_attention` serves this call: the Triton kernels on a GPU, `native` on the CPU, `cpu` on
    either for what these do not take; a call that the Triton kernels do not take is logged, once for each reason.

    Forcing `native` or `triton` raises if it cannot be had; calls outside its range still go to `cpu`.
    """
    forced = _forced()
    if forced in ("reference", "cpu"):
        return BACKENDS[forced]
    if _uses_triton(forced, query):
        from .kernels import dispatch

        obstacle = dispatch.supports(query, key_blocks, value_blocks, metadata, sinks, bias)
        if obstacle is None:
            return dispatch
        log_once(obstacle)
    elif native.supports(query, key_blocks, value_blocks, metadata, sinks, bias):
        if native.is_available():
            return native
    elif metadata.query_len == 1 and query.is_cpu and forced is None:
        found = obstacles.get()
        if found is not None:
            found.add(_not_native(query, key_blocks, value_blocks))
    return cpu


def _not_native(query: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> str:
    kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in (query, key_blocks, value_blocks)]
    return (
        "decode steps gather keys and values on the CPU, as the C++ kernel takes float32, bfloat16 or float16, the "
        f"same for all, in ordinary layouts: queries are {kinds[0]}, keys {kinds[1]}, values {kinds[2]}"
    )


def find_store(
    keys: Tensor, values: Tensor, key_blocks: Tensor, value_blocks: Tensor, slots: Tensor
) -> Callable[..., None] | None:
    """The Triton kernel's `cache.storage.store`, if it serves a call with these arguments."""
    if not _uses_triton(_forced(), key_blocks):
        return None
    from .kernels import store as kernel

    return kernel.store if kernel.supports(keys, values, key_blocks, value_blocks, slots) else None


def uses_triton(tensor: Tensor) -> bool:
    """Whether calls with tensors like this one go to the Triton kernels where these take them."""
    return _uses_triton(_forced(), tensor)


def _uses_triton(forced: str | None, tensor: Tensor) -> bool:
    if forced is None:
        return not tensor.is_cpu and kernels.is_available(tensor.device)
    if forced == "triton" and not kernels.is_available(tensor.device):
        raise RuntimeError(
            f"{VARIABLE}=triton, but the kernels do not run on {tensor.device}: install Triton and use a GPU that it "
            "knows (the log of hf_paged.attention.kernels says what failed), set TRITON_INTERPRET=1 before anything "
            "is imported to run them slowly on the CPU, or unset it"
        )
    return forced == "triton"


@functools.cache
def log_once(obstacle: str) -> None:
    """Says why the Triton kernels do not take a call that they were meant for."""
    logger.warning("Keys and values are gathered before attention, which is slower than reading blocks: %s", obstacle)


def paged_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """
    Arguments and result of `reference.paged_attention`, computed by `select`'s choice; under autocast in its dtype, as
    a model's own attention is.
    """
    features: dict[str, Any] = dict(scale=scale, softcap=softcap, sinks=sinks, bias=bias)
    if autocast_dtype(query.device) is not None:  # a backend sums in float32 for every input dtype
        query = as_autocast(query)
        with torch.autocast(query.device.type, enabled=False):
            return paged_attention(query, key_blocks, value_blocks, metadata, **features)
    backend = select(query, key_blocks, value_blocks, metadata, sinks, bias)
    return backend.paged_attention(query, key_blocks, value_blocks, metadata, **features)


def as_autocast(query: Tensor) -> Tensor:
    """`query` as autocast would give it to a product, which decides the dtype of what attention returns."""
    dtype = autocast_dtype(query.device)
    return query if dtype is None or query.dtype is torch.float64 else query.to(dtype)


def _forced() -> str | None:
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    if name not in NAMES:
        raise ValueError(f"{VARIABLE}={name!r} names no backend: use one of {', '.join(NAMES)}, or unset it")
    if name == "native" and not native.is_available():
        raise RuntimeError(
            f"{VARIABLE}=native, but the kernels could not be built (the log of hf_paged.native says why): "
            "install a C++ compiler, or unset it"
        )
    return name
