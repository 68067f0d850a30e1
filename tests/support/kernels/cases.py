"""Calls of the launchers of all kernels, with tensors on the meta device, to compile ahead of
time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.chips import CHIPS
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.kernels.triton import lora
from hf_paged.kernels.triton.attention import decode_attention, prefill_attention
from hf_paged.kernels.triton.copy import copy_blocks, locate_blocks
from hf_paged.kernels.triton.hash import hash_all
from hf_paged.kernels.triton.merge import merge
from hf_paged.kernels.triton.store import store
from hf_paged.step import Lengths, StepMetadata

ALL = tuple(CHIPS)
FAMILIES = ("sm_80", "sm_90", "sm_100", "sm_120")
"""Chips with different code. That for 8.6 and 8.9 is compiled as for 8.0, with less shared
memory."""
LIMITS = ("sm_80", "sm_86", "sm_90", "gfx942")
"""One chip for each amount of shared memory per block. `benchmarks/results/compiled.json` has the
others."""
FLOATS = ("sm_80", "gfx942")
"""Chips for the cases of 8-bit floats, which those before 8.9 lack: the kernels read and write
bytes."""
ONE = ("sm_90",)  # all cases on all chips take minutes

HALF, FULL = torch.bfloat16, torch.float32
TENSOR_CORES = {"sm_90": ("HGMMA",), "sm_100": ("UTCHMMA",), "gfx942": ("MFMA",)}
TENSOR_CORES |= dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_120"), ("HMMA",))
NUM_BLOCKS, TABLE_WIDTH = 1000, 64


class AotCase(NamedTuple):
    name: str  # kernel first, then the distinctive part
    call: Callable[[], Any]  # calls a launcher with tensors on the meta device
    chips: tuple[str, ...] = FAMILIES  # names in `CHIPS`
    # that the code for a chip must contain, such as `HGMMA`
    instructions: dict[str, tuple[str, ...]] = {}


def empty(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int32)


def keys_and_values(
    dim: int,
    dtype: torch.dtype,
    kv_heads: int,
    block_size: int = 16,
    value_dim: int | None = None,
    latent: bool = False,
    kv_dtype: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Blocks of K and V, in one tensor as `KVBlocks` allocates them; `latent`: the values are the
    first `value_dim` numbers of the keys, of which a quantized block stores the others apart."""
    if kv_dtype is not None:
        rest = dim - value_dim if latent and value_dim is not None else 0
        states = [empty(1, kv_heads, 0, size, dtype=dtype) for size in (dim - rest, rest or dim)]
        blocks = KVBlocks.allocate(NUM_BLOCKS, block_size, *states, kv_dtype=kv_dtype)
        blocks = blocks.latents if latent else blocks
        return blocks.keys, blocks.values
    if latent:
        keys = empty(NUM_BLOCKS, 1, block_size, dim, dtype=dtype)
        return keys, keys[..., :value_dim]
    if value_dim is not None:
        both = empty(NUM_BLOCKS, kv_heads, block_size, dim + value_dim, dtype=dtype)
        keys, values = both.split([dim, value_dim], dim=3)
    else:
        keys, values = empty(NUM_BLOCKS, 2 * kv_heads, block_size, dim, dtype=dtype).chunk(2, dim=1)
    return keys, values


def store_tokens(heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    blocks = empty(100, heads, 16, key_dim + value_dim, dtype=dtype)
    states = empty(8, 1, heads, key_dim + value_dim, dtype=dtype).transpose(1, 2)
    slots = empty(8, 1, dtype=torch.int64)
    parts = [x.split([key_dim, value_dim], dim=-1) for x in (states, blocks)]
    store(*parts[0], *parts[1], slots)


def store_codes(dim: int, kv_dtype: str) -> None:
    states = empty(2, 8, 33, dim)
    store(states, states, *keys_and_values(dim, HALF, 8, kv_dtype=kv_dtype), empty(2, 33).long())


def attend(
    launch: Callable[..., Any],
    dim: int,
    dtype: torch.dtype,
    step: StepMetadata,
    *,
    group: int = 4,
    kv_heads: int = 8,
    sinks: bool = False,
    bias: tuple[torch.dtype, int] | None = None,
    features: dict[str, Any],
    **layout: Any,
) -> None:
    """`bias`: its dtype and queries; `features`: other options of the launch; `layout`: of the
    blocks, as in `keys_and_values`."""
    heads, columns = kv_heads * group, TABLE_WIDTH * step.block_size
    keys, values = keys_and_values(dim, dtype, kv_heads, step.block_size, **layout)
    if sinks:
        features["sinks"] = empty(heads, dtype=dtype)
    if bias is not None:
        features["bias"] = empty(1, heads, bias[1], columns, dtype=bias[0])
    query = empty(step.num_tokens, heads, dim, dtype=dtype)
    launch(query, keys, values, step, scale=dim**-0.5, **features)


def decode(
    dim: int,
    dtype: torch.dtype = HALF,
    *,
    batch: int = 8,
    query_len: int = 1,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    **options: Any,
) -> None:
    rows = dict(query_len=query_len, window=window, lengths=Lengths(*[ints(batch)] * 2))
    step = StepMetadata.rectangle(ints(batch, TABLE_WIDTH), (), block_size, **rows)
    features = dict(softcap=softcap, return_lse=return_lse)
    attend(decode_attention, dim, dtype, step, features=features, **options)


def prefill(
    dim: int,
    dtype: torch.dtype = HALF,
    *,
    chunk: int = 512,
    start: int = 0,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = 1,
    step: StepMetadata | None = None,
    **options: Any,
) -> None:
    """Four chunks, or the rows of `step`."""
    rows = dict(query_len=chunk, starts=(start,) * 4, window=window)
    tables = ints(4, TABLE_WIDTH)
    step = step or StepMetadata.rectangle(tables, (chunk,) * 4, block_size, **rows)
    features = dict(softcap=softcap, num_splits=num_splits)
    attend(prefill_attention, dim, dtype, step, features=features, **options)


def attend_to_prefix(dim: int, queries: int) -> None:
    """The shared prefix of a cascade."""
    heads, groups = 32, 2
    keys, values = keys_and_values(dim, HALF, 8)
    step = StepMetadata.rectangle(
        ints(groups, TABLE_WIDTH), (64,) * groups, 16, query_len=queries, causal=False
    )
    index = ints(groups * queries)
    options = dict(scale=dim**-0.5, query_index=index, num_splits=4, is_merged=False)
    prefill_attention(empty(64, heads, dim), keys, values, step, **options)


def merge_parts(dim: int, dtype: torch.dtype) -> None:
    parts, lse, tail_lse = (
        empty(*shape, dtype=FULL) for shape in ((4, 16, 32, dim), (4, 16, 32), (64, 32))
    )
    merge(parts, lse, empty(64, 32, dim, dtype=dtype), tail_lse=tail_lse, index=ints(16))


def add_deltas(dtype: torch.dtype, rank: int) -> None:
    x, out = (empty(32, 4096, dtype=dtype) for _ in range(2))
    numbers, ranges = (empty(8, width, dtype=torch.int64) for width in (5, 2))
    scales = empty(8, dtype=FULL)
    lora.add_deltas(out, x, lora.LoraTable(numbers, ranges, scales, dtype, rank, max_rows=4))


def hash_tensors() -> None:
    hash_all([empty(size) for size in (4096 * 4096, 4097)])


def copy_between(dim: int) -> None:
    places = locate_blocks([empty(100, 3, 5, dim, dtype=torch.int8)] * 3)
    table, pairs = empty(2, 3, 2, dtype=torch.int64)
    copy_blocks(places, table, pairs)


def _case(
    name: str,
    call: Callable[..., None],
    *args: Any,
    chips: tuple[str, ...] = FAMILIES,
    ops: bool = False,
    **options: Any,
) -> AotCase:
    """`ops`: its code must use the tensor cores."""
    return AotCase(
        name, functools.partial(call, *args, **options), chips, TENSOR_CORES if ops else {}
    )


def _decode(name: str, *args: Any, chips: tuple[str, ...] = ONE, **options: Any) -> AotCase:
    return _case(f"decode-{name}", decode, *args, chips=chips, **options)


def _prefill(name: str, *args: Any, ops: bool = True, **options: Any) -> AotCase:
    return _case(f"prefill-{name}", prefill, *args, ops=ops, **options)


LATENT = {"latent": True, "kv_heads": 1}
DECODE = [
    *(
        _decode(f"d{dim}-bf16", dim, chips={64: LIMITS, 128: ALL, 256: LIMITS}.get(dim, ONE))
        for dim in (64, 80, 96, 112, 128, 192, 256)
    ),
    _decode("d128-fp16-g1-b256", 128, torch.float16, group=1, kv_heads=32, block_size=256),
    _decode("d128-bf16-b4", 128, block_size=4),
    _decode("d128-bf16-g8-q8", 128, group=8, query_len=8, chips=LIMITS),
    _decode(
        "d64-bf16-all",
        64,
        **dict(group=8, query_len=2, window=128, sinks=True, bias=(FULL, 2), softcap=30.0),
        return_lse=True,
    ),
    _decode("d512-bf16", 512, kv_heads=2, chips=LIMITS),
    _decode("d512-bf16-g8-q8", 512, kv_heads=2, group=8, query_len=8, chips=("sm_86", "sm_120")),
    _decode("d192_128-bf16", 192, value_dim=128),
    _decode("d576_512-bf16-latent", 576, value_dim=512, group=16, chips=LIMITS, **LATENT),
    _decode("d576_512-bf16-latent-g128", 576, value_dim=512, group=128, chips=LIMITS, **LATENT),
    _decode("d576_576-bf16-latent-g16", 576, group=16, **LATENT),
    *(
        _decode(f"d{dim}-fp32", dim, FULL, chips=LIMITS if dim == 128 else ONE)
        for dim in (64, 112, 128, 256, 512)
    ),
    _decode("d576_512-fp32-latent", 576, FULL, value_dim=512, group=16, **LATENT),
]
PREFILL = [
    _prefill("d64-bf16", 64, chips=LIMITS),
    _prefill("d128-bf16", 128, chips=ALL),
    _prefill(
        "d256-bf16-all",
        256,
        **dict(window=1024, softcap=50.0, start=1, sinks=True, chips=LIMITS),
    ),
    _prefill("d128-bf16-chunk8", 128, chunk=8),
    _prefill("d96-bf16", 96, chips=("sm_80", "sm_90")),
    _prefill("d512-bf16", 512, kv_heads=2, ops=False, chips=LIMITS),
    _prefill("d512-bf16-split", 512, kv_heads=2, num_splits=4, ops=False, chips=("sm_86",)),
    _prefill("d256-bf16-split", 256, num_splits=4, chips=("sm_86",)),
    _prefill("d128-bf16-split", 128, num_splits=4),
    _prefill("d192_128-bf16", 192, value_dim=128, chips=("sm_80", "sm_90")),
    _prefill("d192-bf16", 192, chips=("sm_80",)),
    _prefill("d576_512-bf16", 576, value_dim=512, kv_heads=1, group=16, ops=False, chips=LIMITS),
    _prefill("d128-fp16-g7-b256", 128, torch.float16, group=7, block_size=256, chips=ONE),
    _prefill("d128-bf16-b4", 128, block_size=4, chips=ONE),
    _prefill("d64-bf16-split", 64, window=128, sinks=True, group=8, num_splits=4, chips=ONE),
    _prefill("d128-bf16-bias", 128, bias=(HALF, 1), ops=False),
    _prefill("d112-fp32", 112, FULL, ops=False),
    _prefill("d512-fp32", 512, FULL, kv_heads=2, ops=False, chips=("sm_80", "sm_86", "gfx942")),
    _prefill("d80-fp32", 80, FULL, ops=False, chips=("sm_80",)),
    _prefill("d256-fp32", 256, FULL, ops=False, chips=ONE),
]


def _quantized(
    kv_dtype: str, kernel: str, dim: int, chips: tuple[str, ...], dtype: torch.dtype = HALF
) -> AotCase:
    """A case of a kernel over quantized blocks."""
    name = f"{kv_dtype}-{kernel}-{dim}" + ("-float16" if dtype is torch.float16 else "")
    if kernel == "store":
        return _case(name, store_codes, dim, kv_dtype, chips=chips)
    if kernel == "decode":
        return _case(name, decode, dim, dtype, batch=64, kv_dtype=kv_dtype, chips=chips)
    rows = (0, 300, 900), (1000, 900), (0, 0)
    step = StepMetadata(ints(2, TABLE_WIDTH), *rows, 16)
    options = dict(kv_dtype=kv_dtype, step=step, num_splits=None)
    return _case(name, prefill, dim, dtype, chips=chips, ops=True, **options)


QUANTIZED = [
    *(_quantized("int8", kernel, 128, LIMITS) for kernel in ("store", "decode", "prefill")),
    *(
        _quantized(kv_dtype, kernel, 128, FLOATS)
        for kv_dtype in ("fp8_e4m3", "fp8_e5m2")
        for kernel in ("store", "decode")
    ),
    _quantized("int8", "decode", 64, ONE, torch.float16),
    _case(
        "fp8_e4m3-decode-512-64",
        decode,
        576,
        chips=(*FAMILIES, "gfx942"),
        **dict(batch=64, value_dim=512, group=32, kv_dtype="fp8_e4m3", **LATENT),
    ),
    _quantized("int8", "decode", 512, ("sm_86",)),
    _quantized("int8", "prefill", 512, ("sm_86",)),
    _quantized("fp8_e4m3", "prefill", 64, ("sm_80", "sm_90")),
]
CASES = [
    _case("store-h8-d128-bf16", store_tokens, 8, 128, 128, HALF, chips=LIMITS),
    _case("store-h1-d512_64-bf16", store_tokens, 1, 512, 64, HALF),
    *DECODE,
    *PREFILL,
    _case("prefix-d64-bf16-n16", attend_to_prefix, 64, 16, ops=True),
    _case("merge-d128-bf16", merge_parts, 128, HALF, chips=("sm_90", "gfx942")),
    _case("merge-d80-fp32", merge_parts, 80, FULL, chips=("sm_80",)),
    *QUANTIZED,
    _case("hash", hash_tensors),
    _case("copy-words", copy_between, 128),
    _case("copy-bytes", copy_between, 3),
    _case("lora rank 16 bfloat16", add_deltas, HALF, 16, chips=LIMITS),
    _case("lora rank 128 bfloat16", add_deltas, HALF, 128, chips=LIMITS),
    _case("lora rank 128 float32", add_deltas, FULL, 128, chips=LIMITS),
]
