"""Backend calls for rows with equally many queries."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.step import StepMetadata


def rectangle(
    query: Tensor, keys: Tensor, values: Tensor, step: StepMetadata, **features: Any
) -> AttentionCall:
    """A call with queries `(n, heads, query_len, head_dim)` and blocks `(num_blocks, kv_heads,
    block_size, dim)`."""
    packed = query.transpose(1, 2).flatten(0, 1)
    return AttentionCall(
        packed, KVBlocks((keys, values), keys, values), step, **{"scale": 1.0, **features}
    )


def attend(
    backend: Any, query: Tensor, keys: Tensor, values: Tensor, step: StepMetadata, **features: Any
) -> Tensor:
    """Output of a backend for `rectangle`: `(n, query_len, heads, value_dim)`."""
    output: Tensor = backend.attend(rectangle(query, keys, values, step, **features))
    return output.unflatten(0, (query.shape[0], query.shape[2]))
