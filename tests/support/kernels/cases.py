"""Calls of the launchers of all kernels, with tensors on the meta device, to compile ahead of
time."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.kernels.triton import lora
from hf_paged.kernels.triton.attention import decode_attention, prefill_attention
from hf_paged.kernels.triton.copy import copy_blocks, locate_blocks
from hf_paged.kernels.triton.hash import hash_all
from hf_paged.kernels.triton.merge import merge
from hf_paged.kernels.triton.store import store
from hf_paged.step import Lengths, StepMetadata
from tests.support.kernels.chips import CHIPS

ALL = tuple(CHIPS)
FAMILIES = ("sm_80", "sm_90", "sm_100", "sm_120")
"""Chips with different code. That for 8.6 and 8.9 is compiled as for 8.0, with less shared
memory."""
LIMITS = ("sm_80", "sm_86", "sm_90", "gfx942")
"""One chip for each amount of shared memory per block."""
FLOATS = ("sm_80", "gfx942")
"""Chips for the cases of 8-bit floats, which those before 8.9 lack: the kernels read and write
bytes."""
ONE = ("sm_90",)  # all cases on all chips take minutes

HALF, FULL = torch.bfloat16, torch.float32
DTYPES = {"bf16": HALF, "fp16": torch.float16, "fp32": FULL}
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
    dtype: torch.dtype = HALF,
    kv_heads: int = 8,
    block_size: int = 16,
    value_dim: int | None = None,
    latent: bool = False,
    kv_dtype: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Blocks of K and V, in one tensor as `KVBlocks` allocates them; `latent`: the values are the
    first `value_dim` numbers of the keys, of which a quantized block stores the others apart."""
    values = value_dim or dim
    if kv_dtype is not None:
        sizes = (values, dim - values) if latent else (dim, dim)
        states = [empty(1, kv_heads, 0, size, dtype=dtype) for size in sizes]
        blocks = KVBlocks.allocate(NUM_BLOCKS, block_size, *states, kv_dtype=kv_dtype)
        blocks = blocks.latents if latent else blocks
        return blocks.keys, blocks.values
    if latent:
        keys = empty(NUM_BLOCKS, 1, block_size, dim, dtype=dtype)
        return keys, keys[..., :values]
    if value_dim is not None:
        both = empty(NUM_BLOCKS, kv_heads, block_size, dim + values, dtype=dtype)
        return both.split([dim, values], dim=3)
    return empty(NUM_BLOCKS, 2 * kv_heads, block_size, dim, dtype=dtype).chunk(2, dim=1)


def store_tokens(heads: int, *dims: int) -> None:
    blocks = empty(100, heads, 16, sum(dims))
    states = empty(8, 1, heads, sum(dims)).transpose(1, 2)
    parts = [part for x in (states, blocks) for part in x.split(dims, dim=-1)]
    store(*parts, empty(8, 1, dtype=torch.int64))


def store_codes(dim: int, kv_dtype: str) -> None:
    states = empty(2, 8, 33, dim)
    store(states, states, *keys_and_values(dim, kv_dtype=kv_dtype), empty(2, 33).long())


def attend(
    kernel: str,
    dim: int,
    dtype: torch.dtype = HALF,
    *,
    group: int = 4,
    kv_heads: int = 8,
    rows: int | None = None,
    query_len: int | None = None,
    start: int = 0,
    window: int | None = None,
    block_size: int = 16,
    layout: dict[str, Any],
    sinks: bool = False,
    bias: torch.dtype | None = None,
    step: StepMetadata | None = None,
    **features: Any,
) -> None:
    """Calls the launcher "decode" or "prefill": a step of rows whose lengths are on the device, or
    of chunks, or `step`. `layout`: of the blocks, as in `keys_and_values`."""
    is_decode = kernel == "decode"
    rows, query_len = rows or (8 if is_decode else 4), query_len or (1 if is_decode else 512)
    if step is None:
        lengths, given = (query_len,) * rows, dict(starts=(start,) * rows)
        if is_decode:
            lengths, given = (), dict(lengths=Lengths(*[ints(rows)] * 2))
        given |= dict(query_len=query_len, window=window)
        step = StepMetadata.rectangle(ints(rows, TABLE_WIDTH), lengths, block_size, **given)
    heads, columns = kv_heads * group, TABLE_WIDTH * block_size
    keys, values = keys_and_values(dim, dtype, kv_heads, block_size, **layout)
    if sinks:
        features["sinks"] = empty(heads, dtype=dtype)
    if bias is not None:
        features["bias"] = empty(1, heads, query_len if is_decode else 1, columns, dtype=bias)
    if not is_decode:
        features.setdefault("num_splits", 1)
    query = empty(step.num_tokens, heads, dim, dtype=dtype)
    launch = decode_attention if is_decode else prefill_attention
    launch(query, keys, values, step, scale=dim**-0.5, **features)


def attend_to_prefix(dim: int, queries: int) -> None:
    """The shared prefix of a cascade."""
    heads, groups = 32, 2
    step = StepMetadata.rectangle(
        ints(groups, TABLE_WIDTH), (64,) * groups, 16, query_len=queries, causal=False
    )
    options = dict(scale=dim**-0.5, num_splits=4, is_merged=False)
    options["query_index"] = ints(groups * queries)
    prefill_attention(empty(64, heads, dim), *keys_and_values(dim), step, **options)


def merge_parts(dim: int, dtype: torch.dtype) -> None:
    shapes = (4, 16, 32, dim), (4, 16, 32), (64, 32)
    parts, lse, tail_lse = (empty(*shape, dtype=FULL) for shape in shapes)
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
    name: str, chips: tuple[str, ...], call: Callable[..., None], *args: Any, **options: Any
) -> AotCase:
    """Half-precision chunks must use the tensor cores, but those of large heads or with a bias."""
    is_fast = "pref" in name and not re.search("fp32|d512|d576|bias", name)
    call = functools.partial(call, *args, **options)
    return AotCase(name, call, chips, TENSOR_CORES if is_fast else {})


NUMBERS = {"g": "group", "b": "block_size", "q": "query_len", "chunk": "query_len"}
WORDS: dict[str, dict[str, Any]] = {"split": {"num_splits": 4}, "latent": {}, "all": {}, "bias": {}}


def _attention(name: str, chips: tuple[str, ...] = FAMILIES, **more: Any) -> AotCase:
    """A case of attention, as its name tells: the dimensions of keys and values, dtype, query heads
    of a K/V head, queries of a row, and so on; large heads are few. `more`: what it does not
    tell."""
    kernel, dims, dtype, *parts = name.split("-")
    dim, *value_dims = map(int, dims[1:].split("_"))
    layout = dict(value_dim=value_dims[0] if value_dims else None, latent="latent" in parts)
    options: dict[str, Any] = {"kv_heads": 2 if dim >= 512 else 8, "layout": layout}
    if dim >= 512 and value_dims:
        options |= {"kv_heads": 1, "group": 16}
    for part in parts:
        if part in WORDS:
            options |= WORDS[part]
        else:
            word, number = re.findall(r"\D+|\d+", part)
            options[NUMBERS[word]] = int(number)
    return _case(name, chips, attend, kernel, dim, DTYPES[dtype], **options | more)


ATTENTION: list[tuple[tuple[str, ...], str]] = [
    (ALL, "decode-d128-bf16 prefill-d128-bf16"),
    (
        LIMITS,
        "decode-d64-bf16 decode-d256-bf16 decode-d128-bf16-g8-q8 decode-d512-bf16"
        " decode-d576_512-bf16-latent decode-d576_512-bf16-latent-g128 decode-d128-fp32"
        " prefill-d64-bf16 prefill-d512-bf16 prefill-d576_512-bf16",
    ),
    (FAMILIES, "prefill-d128-bf16-chunk8 prefill-d128-bf16-split prefill-d112-fp32"),
    (
        ONE,
        "decode-d80-bf16 decode-d96-bf16 decode-d112-bf16 decode-d192-bf16"
        " decode-d128-bf16-b4 decode-d192_128-bf16"
        " decode-d576_576-bf16-latent-g16 decode-d64-fp32 decode-d112-fp32 decode-d256-fp32"
        " decode-d576_512-fp32-latent prefill-d128-fp16-g7-b256"
        " prefill-d128-bf16-b4 prefill-d256-fp32",
    ),
    (("sm_80", "sm_90"), "prefill-d96-bf16 prefill-d192_128-bf16"),
    (("sm_80",), "prefill-d192-bf16 prefill-d80-fp32"),
    (("sm_86",), "prefill-d512-bf16-split prefill-d256-bf16-split"),
    (("sm_86", "sm_120"), "decode-d512-bf16-g8-q8"),
    (("sm_80", "sm_86", "gfx942"), "prefill-d512-fp32"),
]
_ALL = dict(group=8, query_len=2, window=128, sinks=True, bias=FULL, softcap=30.0, return_lse=True)


def _quantized(kernel: str, dim: int, chips: tuple[str, ...], kv_dtype: str = "int8") -> AotCase:
    """A case of a kernel over quantized blocks."""
    name = f"{kv_dtype}-{kernel}-{dim}"
    if kernel == "store":
        return _case(name, chips, store_codes, dim, kv_dtype)
    options: dict[str, Any] = {"layout": {"kv_dtype": kv_dtype}, "rows": 64}
    if kernel == "prefill":
        rows = (0, 300, 900), (1000, 900), (0, 0)
        options |= {"step": StepMetadata(ints(2, TABLE_WIDTH), *rows, 16), "num_splits": None}
    return _case(name, chips, attend, kernel, dim, **options)


_LATENT_CODES = {"value_dim": 512, "kv_dtype": "fp8_e4m3", "latent": True}
CASES = [
    _case("store-h8-d128-bf16", LIMITS, store_tokens, 8, 128, 128),
    _case("store-h1-d512_64-bf16", FAMILIES, store_tokens, 1, 512, 64),
    *(_attention(name, chips) for chips, names in ATTENTION for name in names.split()),
    _attention("decode-d64-bf16-all", ONE, **_ALL),
    _attention("decode-d128-fp16-g1-b256", ONE, kv_heads=32),
    _attention("decode-d512-fp32", ONE, kv_heads=8),
    _attention("prefill-d256-bf16-all", LIMITS, window=1024, softcap=50.0, start=1, sinks=True),
    _attention("prefill-d64-bf16-split", ONE, window=128, sinks=True, group=8),
    _attention("prefill-d128-bf16-bias", bias=HALF),
    _case("prefix-d64-bf16-n16", FAMILIES, attend_to_prefix, 64, 16),
    _case("merge-d128-bf16", ("sm_90", "gfx942"), merge_parts, 128, HALF),
    _case("merge-d80-fp32", ("sm_80",), merge_parts, 80, FULL),
    *(_quantized(kernel, 128, LIMITS) for kernel in ("store", "decode", "prefill")),
    *(
        _quantized(kernel, 128, FLOATS, f"fp8_{code}")
        for code in ("e4m3", "e5m2")
        for kernel in ("store", "decode")
    ),
    *(_quantized(kernel, 512, ("sm_86",)) for kernel in ("decode", "prefill")),
    _quantized("prefill", 64, ("sm_80", "sm_90"), "fp8_e4m3"),
    _case(
        *("int8-decode-64-float16", ONE, attend, "decode", 64, torch.float16),
        **dict(rows=64, layout={"kv_dtype": "int8"}),
    ),
    _case(
        *("fp8_e4m3-decode-512-64", (*FAMILIES, "gfx942"), attend, "decode", 576),
        **dict(rows=64, group=32, kv_heads=1, layout=_LATENT_CODES),
    ),
    _case("hash", FAMILIES, hash_tensors),
    _case("copy-words", FAMILIES, copy_between, 128),
    _case("copy-bytes", FAMILIES, copy_between, 3),
    _case("lora rank 16 bfloat16", LIMITS, add_deltas, HALF, 16),
    _case("lora rank 128 bfloat16", LIMITS, add_deltas, HALF, 128),
    _case("lora rank 128 float32", LIMITS, add_deltas, FULL, 128),
]
