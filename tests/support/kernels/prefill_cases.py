"""AOT cases of the prefill and merge kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hf_paged.kernels.triton.attention import prefill_attention
from hf_paged.kernels.triton.merge import merge
from hf_paged.step import StepMetadata
from tests.support.kernels.aot import ALL, FAMILIES, LIMITS, AotCase

HALF, FULL = torch.bfloat16, torch.float32
TENSOR_CORES = {"sm_90": ("HGMMA",), "sm_100": ("UTCHMMA",), "gfx942": ("MFMA",)}
TENSOR_CORES |= dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_120"), ("HMMA",))


def _prefill(
    dim: int,
    dtype: torch.dtype = HALF,
    *,
    value_dim: int | None = None,
    kv_heads: int = 8,
    group: int = 4,
    block_size: int = 16,
    chunk: int = 512,
    with_starts: bool = False,
    window: int | None = None,
    with_sinks: bool = False,
    with_bias: bool = False,
    **options: Any,
) -> None:
    rows, heads = 4, kv_heads * group

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    if value_dim is None:
        keys, values = empty(1000, 2 * kv_heads, block_size, dim).chunk(2, dim=1)
    else:
        keys, values = empty(1000, kv_heads, block_size, dim + value_dim).split(
            [dim, value_dim], dim=3
        )
    if with_sinks:
        options["sinks"] = empty(heads)
    if with_bias:
        options["bias"] = empty(1, heads, 1, 64 * block_size)
    prefill_attention(
        empty(rows * chunk, heads, dim),
        keys,
        values,
        StepMetadata.rectangle(
            empty(rows, 64, dtype=torch.int32),
            (chunk,) * rows,
            block_size,
            query_len=chunk,
            starts=(int(with_starts),) * rows,
            window=window,
        ),
        scale=dim**-0.5,
        **{"num_splits": 1, **options},
    )


def _prefix(dim: int, queries: int) -> None:
    """The shared prefix of a cascade."""
    kv_heads, heads, groups = 8, 32, 2

    def empty(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    keys, values = empty(1000, 2 * kv_heads, 16, dim).chunk(2, dim=1)
    step = StepMetadata.rectangle(
        empty(groups, 64, dtype=torch.int32), (64,) * groups, 16, query_len=queries, causal=False
    )
    index = empty(groups * queries, dtype=torch.int32)
    options = dict(scale=dim**-0.5, query_index=index, num_splits=4, is_merged=False)
    prefill_attention(empty(64, heads, dim), keys, values, step, **options)


def _merge(dim: int, dtype: torch.dtype) -> None:
    def empty(*shape: int, dtype: torch.dtype = FULL) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    out = empty(64, 32, dim, dtype=dtype)
    index = empty(16, dtype=torch.int32)
    merge(empty(4, 16, 32, dim), empty(4, 16, 32), out, tail_lse=empty(64, 32), index=index)


def _case(
    name: str, *args: Any, ops: bool = True, chips: tuple[str, ...] = FAMILIES, **options: Any
) -> AotCase:
    call = functools.partial(_prefill, *args, **options)
    return AotCase(f"prefill-{name}", call, chips, TENSOR_CORES if ops else {})


CASES = [
    _case("d64-bf16", 64, chips=LIMITS),
    _case("d128-bf16", 128, chips=ALL),
    _case(
        "d256-bf16-all",
        256,
        window=1024,
        softcap=50.0,
        with_starts=True,
        with_sinks=True,
        chips=LIMITS,
    ),
    _case("d128-bf16-chunk8", 128, chunk=8),
    _case("d96-bf16", 96, chips=("sm_80", "sm_90")),
    _case("d512-bf16", 512, kv_heads=2, ops=False, chips=LIMITS),
    _case("d512-bf16-split", 512, kv_heads=2, num_splits=4, ops=False, chips=("sm_86",)),
    _case("d256-bf16-split", 256, num_splits=4, chips=("sm_86",)),
    _case("d128-bf16-split", 128, num_splits=4),
    _case("d192_128-bf16", 192, value_dim=128, chips=("sm_80", "sm_90")),
    _case("d192-bf16", 192, chips=("sm_80",)),
    _case("d576_512-bf16", 576, value_dim=512, kv_heads=1, group=16, ops=False, chips=LIMITS),
    _case("d128-fp16-g7-b256", 128, torch.float16, group=7, block_size=256, chips=("sm_90",)),
    _case("d128-bf16-b4", 128, block_size=4, chips=("sm_90",)),
    _case(
        "d64-bf16-split", 64, window=128, with_sinks=True, group=8, num_splits=4, chips=("sm_90",)
    ),
    _case("d128-bf16-bias", 128, with_bias=True, ops=False),
    _case("d112-fp32", 112, FULL, ops=False),
    _case("d512-fp32", 512, FULL, kv_heads=2, ops=False, chips=("sm_80", "sm_86", "gfx942")),
    _case("d80-fp32", 80, FULL, ops=False, chips=("sm_80",)),
    _case("d256-fp32", 256, FULL, ops=False, chips=("sm_90",)),
    AotCase("prefix-d64-bf16-n16", lambda: _prefix(64, 16), instructions=TENSOR_CORES),
    AotCase("merge-d128-bf16", lambda: _merge(128, HALF), ("sm_90", "gfx942")),
    AotCase("merge-d80-fp32", lambda: _merge(80, FULL), ("sm_80",)),
]
