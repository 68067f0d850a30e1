"""AOT cases of the kernels over quantized blocks."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.kernels.triton.attention import decode_attention, prefill_attention
from hf_paged.kernels.triton.store import store
from hf_paged.step import Lengths, StepMetadata
from tests.support.kernels.aot import FAMILIES, LIMITS, AotCase
from tests.support.kernels.prefill_cases import TENSOR_CORES


def _empty(*shape: int, dtype: torch.dtype) -> Any:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _blocks(kv_dtype: str, dim: int, rope_dim: int, dtype: torch.dtype) -> KVBlocks:
    heads = 1 if rope_dim else 8
    keys, values = (
        _empty(1, heads, 0, dim, dtype=dtype),
        _empty(1, heads, 0, rope_dim or dim, dtype=dtype),
    )
    blocks = KVBlocks.allocate(1000, 16, keys, values, kv_dtype=kv_dtype)
    return blocks.latents if rope_dim else blocks


def _store(kv_dtype: str, dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
    blocks, states = _blocks(kv_dtype, dim, 0, dtype), _empty(2, 8, 33, dim, dtype=dtype)
    store(states, states, blocks.keys, blocks.values, _empty(2, 33, dtype=torch.int64))


def _decode(
    kv_dtype: str, dim: int, dtype: torch.dtype = torch.bfloat16, rope_dim: int = 0
) -> None:
    blocks, lengths = (
        _blocks(kv_dtype, dim, rope_dim, dtype),
        Lengths(*[_empty(64, dtype=torch.int32)] * 2),
    )
    step = StepMetadata.rectangle(
        _empty(64, 64, dtype=torch.int32), (), 16, query_len=1, lengths=lengths
    )
    query = _empty(64, 32, dim + rope_dim, dtype=dtype)
    decode_attention(query, blocks.keys, blocks.values, step, scale=0.1)


def _prefill(kv_dtype: str, dim: int, dtype: torch.dtype = torch.bfloat16) -> None:
    blocks = _blocks(kv_dtype, dim, 0, dtype)
    step = StepMetadata(
        block_tables=_empty(2, 64, dtype=torch.int32),
        query_start=(0, 300, 900),
        seq_lens=(1000, 900),
        starts=(0, 0),
        block_size=16,
    )
    prefill_attention(
        _empty(900, 32, dim, dtype=dtype), blocks.keys, blocks.values, step, scale=0.1
    )


def _case(
    function: Any, kv_dtype: str, *args: Any, chips: tuple[str, ...] = FAMILIES, **options: Any
) -> AotCase:
    name = "-".join([kv_dtype, function.__name__[1:], *map(str, args), *map(str, options.values())])
    ops = TENSOR_CORES if function is _prefill else {}
    return AotCase(
        name.replace("torch.", ""),
        functools.partial(function, kv_dtype, *args, **options),
        chips,
        ops,
    )


FLOATS = ("sm_80", "gfx942")
"""Chips for the cases of 8-bit floats, which those before 8.9 lack: the kernels read and write
bytes."""

CASES = [
    *(_case(function, "int8", 128, chips=LIMITS) for function in (_store, _decode)),
    *(_case(_store, kv_dtype, 128, chips=FLOATS) for kv_dtype in ("fp8_e4m3", "fp8_e5m2")),
    *(_case(_decode, kv_dtype, 128, chips=FLOATS) for kv_dtype in ("fp8_e4m3", "fp8_e5m2")),
    _case(_decode, "int8", 64, torch.float16, chips=("sm_90",)),
    _case(_decode, "fp8_e4m3", 512, chips=(*FAMILIES, "gfx942"), rope_dim=64),
    _case(_decode, "int8", 512, chips=("sm_86",)),
    _case(_prefill, "int8", 512, chips=("sm_86",)),
    _case(_prefill, "int8", 128, chips=LIMITS),
    _case(_prefill, "fp8_e4m3", 64, chips=("sm_80", "sm_90")),
]
