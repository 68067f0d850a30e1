"""AOT cases of the store and decode kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hf_paged.kernels.triton.attention import decode_attention
from hf_paged.kernels.triton.store import store
from hf_paged.step import Lengths, StepMetadata
from tests.support.kernels.aot import ALL, LIMITS, AotCase


def _store(heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    blocks = torch.empty(100, heads, 16, key_dim + value_dim, dtype=dtype, device="meta")
    states = torch.empty(8, 1, heads, key_dim + value_dim, dtype=dtype, device="meta").transpose(
        1, 2
    )
    slots = torch.empty(8, 1, dtype=torch.int64, device="meta")
    store(
        states[..., :key_dim],
        states[..., key_dim:],
        blocks[..., :key_dim],
        blocks[..., key_dim:],
        slots,
    )


def _decode(
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    group: int = 4,
    kv_heads: int = 8,
    batch: int = 8,
    query_len: int = 1,
    block_size: int = 16,
    value_dim: int | None = None,
    latent: bool = False,
    window: int | None = None,
    sinks: bool = False,
    bias: bool = False,
    **options: Any,
) -> None:
    heads = kv_heads * group

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    if latent:
        keys = values = empty(1000, 1, block_size, dim)
        values = values[..., :value_dim]
    elif value_dim is not None:
        keys, values = empty(1000, kv_heads, block_size, dim + value_dim).split(
            [dim, value_dim], dim=3
        )
    else:
        keys, values = empty(1000, 2 * kv_heads, block_size, dim).chunk(2, dim=1)
    step = StepMetadata.rectangle(
        empty(batch, 64, dtype=torch.int32),
        (),
        block_size,
        query_len=query_len,
        window=window,
        lengths=Lengths(*[empty(batch, dtype=torch.int32)] * 2),
    )
    if sinks:
        options["sinks"] = empty(heads)
    if bias:
        options["bias"] = empty(1, heads, query_len, 64 * block_size, dtype=torch.float32)
    query = empty(batch * query_len, heads, dim)
    decode_attention(query, keys, values, step, scale=dim**-0.5, **options)


ONE = ("sm_90",)  # all cases on all chips take minutes


def _case(name: str, *args: Any, chips: tuple[str, ...] = ONE, **options: Any) -> AotCase:
    return AotCase(f"decode-{name}", functools.partial(_decode, *args, **options), chips)


half, full = torch.bfloat16, torch.float32
CASES = [
    AotCase("store-h8-d128-bf16", lambda: _store(8, 128, 128, half), LIMITS),
    AotCase("store-h1-d512_64-bf16", lambda: _store(1, 512, 64, half)),
    *(
        _case(f"d{dim}-bf16", dim, chips={64: LIMITS, 128: ALL, 256: LIMITS}.get(dim, ONE))
        for dim in (64, 80, 96, 112, 128, 192, 256)
    ),
    _case("d128-fp16-g1-b256", 128, torch.float16, group=1, kv_heads=32, block_size=256),
    _case("d128-bf16-b4", 128, block_size=4),
    _case("d128-bf16-g8-q8", 128, group=8, query_len=8, chips=LIMITS),
    _case(
        "d64-bf16-all",
        64,
        group=8,
        query_len=2,
        window=128,
        sinks=True,
        bias=True,
        softcap=30.0,
        return_lse=True,
    ),
    _case("d512-bf16", 512, kv_heads=2, chips=LIMITS),
    _case("d512-bf16-g8-q8", 512, kv_heads=2, group=8, query_len=8, chips=("sm_86", "sm_120")),
    _case("d192_128-bf16", 192, value_dim=128),
    _case(
        "d576_512-bf16-latent", 576, value_dim=512, latent=True, kv_heads=1, group=16, chips=LIMITS
    ),
    _case(
        "d576_512-bf16-latent-g128",
        576,
        value_dim=512,
        latent=True,
        kv_heads=1,
        group=128,
        chips=LIMITS,
    ),
    _case("d576_576-bf16-latent-g16", 576, latent=True, kv_heads=1, group=16),
    *(
        _case(f"d{dim}-fp32", dim, full, chips=LIMITS if dim == 128 else ONE)
        for dim in (64, 112, 128, 256, 512)
    ),
    _case("d576_512-fp32-latent", 576, full, value_dim=512, latent=True, kv_heads=1, group=16),
]
