"""Which implementation of paged attention a call gets: on a GPU the Triton kernels where they apply, on the CPU the C++
kernel, else the portable path, which gathers. `kernels.VARIABLE` forces one.
"""

from __future__ import annotations

import functools
import logging
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...cache.memory import autocast_dtype
from ...kernels import cpp, forced, uses_triton
from ...step import StepMetadata
from . import gather, reference

logger = logging.getLogger(__name__)

BACKENDS = {"reference": reference, "gather": gather, "cpp": cpp}
"""But for `triton`, which is imported when it is used, since Triton may be missing."""

obstacles: ContextVar[set[str] | None] = ContextVar("hf_paged_obstacles", default=None)
"""Collects why kernels did not take what they were meant for in this context; a call's report reads it."""


def select(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: StepMetadata,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> ModuleType:
    """The module whose `paged_attention` serves this call: the Triton kernels on a GPU, `cpp` on the CPU, `gather` on
    either for what these do not take; a call that the Triton kernels do not take is logged, once for each reason.

    Forcing `cpp` or `triton` raises if it cannot be had; calls outside its range still go to `gather`.
    """
    name = forced()
    if name in ("reference", "gather"):
        return BACKENDS[name]
    if uses_triton(query):
        from . import triton

        obstacle = triton.supports(query, key_blocks, value_blocks, metadata, sinks, bias)
        if obstacle is None:
            return triton
        log_once(obstacle)
    elif cpp.supports(query, key_blocks, value_blocks, metadata, sinks, bias):
        if cpp.is_available():
            return cpp
    elif metadata.query_len == 1 and query.is_cpu and name is None:
        found = obstacles.get()
        if found is not None:
            found.add(_not_cpp(query, key_blocks, value_blocks))
    return gather


def _not_cpp(query: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> str:
    kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in (query, key_blocks, value_blocks)]
    return (
        "decode steps gather keys and values on the CPU, as the C++ kernel takes float32, bfloat16 or float16, the "
        f"same for all, in ordinary layouts: queries are {kinds[0]}, keys {kinds[1]}, values {kinds[2]}"
    )


@functools.cache
def log_once(obstacle: str) -> None:
    """Says why the Triton kernels do not take a call that they were meant for."""
    logger.warning("Keys and values are gathered before attention, which is slower than reading blocks: %s", obstacle)


def paged_attention(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: StepMetadata,
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
