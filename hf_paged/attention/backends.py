"""Which implementation of paged attention a call gets: the C++ kernel where it applies, else the portable path.

`HF_PAGED_ATTENTION=reference|cpu|native` forces one, to find out where a difference comes from.
"""

from __future__ import annotations

import os
from types import ModuleType

from torch import Tensor

from .. import native
from . import cpu, reference
from .metadata import AttentionMetadata

VARIABLE = "HF_PAGED_ATTENTION"
BACKENDS = {"reference": reference, "cpu": cpu, "native": native}


def select(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    metadata: AttentionMetadata,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> ModuleType:
    """The module whose `paged_attention` serves this call: `native` if it supports it, else `cpu`, on any device.

    Forcing `native` raises if it cannot be built; calls outside its range, such as long prefills, still go to `cpu`.
    """
    forced = _forced()
    if forced is not None and forced is not native:
        return forced
    if native.supports(query, key_blocks, value_blocks, metadata, sinks, bias) and native.is_available():
        return native
    return cpu


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
    """Arguments and result of `reference.paged_attention`, computed by `select`'s choice."""
    backend = select(query, key_blocks, value_blocks, metadata, sinks, bias)
    return backend.paged_attention(
        query, key_blocks, value_blocks, metadata, scale=scale, softcap=softcap, sinks=sinks, bias=bias
    )


def _forced() -> ModuleType | None:
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    if name not in BACKENDS:
        raise ValueError(f"{VARIABLE}={name!r} names no backend: use one of {', '.join(BACKENDS)}, or unset it")
    if name == "native" and not native.is_available():
        raise RuntimeError(
            f"{VARIABLE}=native, but the kernels could not be built (the log of hf_paged.native says why): "
            "install a C++ compiler, or unset it"
        )
    return BACKENDS[name]
