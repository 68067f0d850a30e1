"""Cases of `benchmarks.attention`, with the same K/V for every contender, in blocks and padded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import SHAPES, Shape
from hf_paged.attention.backends import reference
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.kernels import quantized
from hf_paged.step import StepMetadata

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
CPU_BYTES, CUDA_BYTES = 1 << 28, 1 << 32  # K/V of all layers, larger than any processor cache
MAX_LAYERS = 256
HEADS = {  # query heads, K/V heads, key dim, value dim
    64: (32, 8, 64, 64),
    80: (32, 32, 80, 80),
    96: (32, 32, 96, 96),
    128: (32, 8, 128, 128),
    192: (16, 16, 192, 128),
    256: (16, 8, 256, 256),
    512: (16, 2, 512, 512),
    576: (16, 1, 576, 512),
}
"""Heads of a model with this key dim, by key dim."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Most that a kernel's numbers may differ from the reference's, absolutely and relatively."""


@dataclass(frozen=True)
class Case:
    """One batch."""

    name: str
    # "decode" (one query per row), "chunk" (queries over a cached context), "prefill" (no context)
    phase: str
    seq_lens: tuple[int, ...]  # tokens of each row, including the queries
    query_len: int = 1  # queries of each row

    @property
    def longest(self) -> int:
        return max(self.seq_lens)

    @property
    def ragged(self) -> bool:
        return len(set(self.seq_lens)) > 1

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs per head."""
        return sum(
            self.query_len * seq_len - self.query_len * (self.query_len - 1) // 2
            for seq_len in self.seq_lens
        )


@dataclass(frozen=True)
class Setting:
    """A case on a model's heads."""

    shape: Shape
    case: Case
    block_size: int
    dtype: str
    device: str

    @property
    def title(self) -> str:
        """What `--only` chooses by."""
        case = self.case
        return f"{self.shape.name} {case.phase} {case.name} {self.block_size} {self.dtype}"

    @property
    def flops(self) -> int:
        """FLOPs of one layer: two matrix products, two operations per pair and element."""
        return 4 * self.shape.heads * self.shape.head_dim * self.case.pairs

    @property
    def num_bytes(self) -> int:
        """Bytes that one layer must move: K/V of every row, queries, output."""
        return self.bytes_with(self.shape.head_dim * DTYPES[self.dtype].itemsize)

    @property
    def quantized_bytes(self) -> int:
        """`num_bytes` with K/V of one byte per number."""
        return self.bytes_with(self.shape.head_dim + quantized.SCALE_BYTES)

    def bytes_with(self, token_bytes: int) -> int:
        """`num_bytes` with `token_bytes` bytes of keys or values per token and head."""
        queries = len(self.case.seq_lens) * self.case.query_len
        states = 2 * queries * self.shape.heads * self.shape.head_dim
        stored = 2 * sum(self.case.seq_lens) * self.shape.kv_heads * token_bytes
        return stored + states * DTYPES[self.dtype].itemsize


def ragged_of(low: int, high: int, rows: int) -> Case:
    """Decodes of rows of different lengths."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    lengths = torch.linspace(low, high, rows).long()[order].tolist()
    return Case(f"{rows} x {low}..{high}", "decode", tuple(lengths))


def even(rows: int, length: int, query_len: int = 1) -> Case:
    """Rows of one length."""
    phase = {1: "decode", length: "prefill"}.get(query_len, "chunk")
    name = f"{rows} x {query_len} of {length}" if phase == "chunk" else f"{rows} x {length}"
    return Case(name, phase, (length,) * rows, query_len)


def settings(device: str, quick: bool) -> list[Setting]:
    """The settings of a run: heads x cases, then block sizes and float32 on one of them."""
    if quick:
        few = ragged_of(20, 90, 4), even(2, 70, 24), even(2, 40, 40)
        return [Setting(SHAPES["llama-tiny"], case, 16, "bf16", device) for case in few]
    if device == "cpu":
        names, sizes = ("qwen2.5-0.5b", "llama-3.2-1b", "llama-3.1-8b"), (8, 32, 64)
        ragged = ragged_of(64, 1024, 32)
        cases = [even(1, 512), even(8, 512), ragged, even(4, 4096)]
        cases += [even(4, 576, 64), even(1, 2048, 256), even(4, 128, 128), even(1, 1024, 1024)]
    else:
        names, sizes = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b"), (32, 64, 128)
        ragged = ragged_of(64, 8192, 32)
        cases = [even(1, 1024), even(1, 32768), even(8, 4096), even(64, 1024), ragged]
        cases += [even(256, 1024), even(64, 8192), even(8, 4096, 512), even(1, 16384, 2048)]
        cases += [even(8, 1024, 1024), even(1, 8192, 8192)]
    found = [Setting(SHAPES[name], case, 16, "bf16", device) for name in names for case in cases]
    found += [Setting(SHAPES[names[0]], ragged, size, "bf16", device) for size in sizes]
    return [*found, *(Setting(SHAPES[names[0]], case, 16, "fp32", device) for case in cases[:3])]


@dataclass(frozen=True)
class Data:
    """Tensors of a setting; `pools` and `padded` hold the same keys and values of each layer."""

    setting: Setting
    query: Tensor  # [batch, heads, query_len, head_dim]
    pools: Tensor  # [layers, num_blocks, 2 * kv_heads, block_size, head_dim]
    padded: Tensor  # [layers, 2, batch, kv_heads, longest, head_dim]
    step: StepMetadata

    @property
    def layers(self) -> int:
        return self.pools.shape[0]

    @property
    def scale(self) -> float:
        return self.setting.shape.head_dim**-0.5

    @cached_property
    def blocks(self) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer in blocks, `[num_blocks, kv_heads, block_size, head_dim]`."""
        kv_heads = self.setting.shape.kv_heads
        return [(pool[:, :kv_heads], pool[:, kv_heads:]) for pool in self.pools]

    @cached_property
    def calls(self) -> list[AttentionCall]:
        """The `AttentionCall` of each layer."""
        blocks = [KVBlocks((pool,), *views) for pool, views in zip(self.pools, self.blocks)]
        return [AttentionCall(self.packed, each, self.step, self.scale) for each in blocks]

    @cached_property
    def packed(self) -> Tensor:
        """The queries of all rows, `[batch * query_len, heads, head_dim]`."""
        return self.query.transpose(1, 2).flatten(0, 1)

    def by_row(self, output: Tensor) -> Tensor:
        """An output of packed queries as `[batch, query_len, heads, head_dim]`."""
        return output.unflatten(0, (-1, self.setting.case.query_len))

    def attend(self, backend: Any, layer: int) -> Tensor:
        """Attention of one layer by `backend`, by row."""
        return self.by_row(backend.attend(self.calls[layer]))

    @cached_property
    def expected(self) -> Tensor:
        """Attention of layer 0 by the reference, by row."""
        return self.attend(reference, 0)

    @cached_property
    def contiguous(self) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer, padded, `[batch, kv_heads, longest, head_dim]`."""
        return [(both[0], both[1]) for both in self.padded]

    def visible(self) -> Tensor:
        """`[batch, 1, query_len, longest]` bool: the padded keys that each query sees."""
        case, device = self.setting.case, self.query.device
        lengths = self.step.on_device.seq_lens.long()[:, None, None]
        queries = torch.arange(case.query_len, device=device)[None, :, None]
        return (torch.arange(case.longest, device=device) <= lengths - case.query_len + queries)[
            :, None
        ]


def make(setting: Setting, quick: bool = False) -> Data:
    """Random K/V, of as many layers as exceed the processor's caches, of two if `quick`. Blocks are
    placed at random, as in a pool after some use."""
    shape, case, device = setting.shape, setting.case, setting.device
    dtype, block_size, batch = DTYPES[setting.dtype], setting.block_size, len(case.seq_lens)
    generator = torch.Generator().manual_seed(0)
    counts = [-(-seq_len // block_size) for seq_len in case.seq_lens]
    order = torch.randperm(sum(counts), generator=generator)
    tables = torch.nn.utils.rnn.pad_sequence(order.split(counts), batch_first=True).int()
    dims = sum(counts), 2 * shape.kv_heads, block_size, shape.head_dim
    layer_bytes = batch * case.longest * 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    budget = CUDA_BYTES if device == "cuda" else CPU_BYTES
    layers = 2 if quick else min(MAX_LAYERS, max(2, budget // layer_bytes))
    # billions of numbers, drawn there
    draw = generator if device == "cpu" else torch.Generator(device).manual_seed(0)
    base = torch.randn(dims, generator=draw, device=device).to(dtype)
    pools = torch.stack([base.roll(layer, dims=0) for layer in range(layers)])
    padded = torch.empty(
        layers, 2, batch, shape.kv_heads, case.longest, shape.head_dim, dtype=dtype, device=device
    )
    index = tables.long().to(device)
    for pool, both in zip(pools, padded):
        # [batch, 2 * kv_heads, longest, dim]
        rows = pool[index].transpose(1, 2).flatten(2, 3)[:, :, : case.longest]
        both.copy_(rows.unflatten(1, (2, -1)).transpose(0, 1))
    step = StepMetadata.rectangle(
        tables.to(device), case.seq_lens, block_size, query_len=case.query_len
    )
    # token-major memory layout, as a projection writes it
    sizes = batch, case.query_len, shape.heads, shape.head_dim
    query = torch.randn(sizes, generator=draw, device=device).to(dtype)
    return Data(setting, query.transpose(1, 2), pools, padded, step)


def random_calls(
    dim: int,
    dtype: torch.dtype,
    load: tuple[int, int, int],
    device: str | torch.device,
    block_size: int = 16,
    layers: int = 1,
) -> list[AttentionCall]:
    """A call of each layer over random K/V in blocks in random order. `dim`: a key of `HEADS`; with
    one K/V head, the values are the first elements of the keys, as with latents. `load`: the rows,
    and the queries and tokens of each."""
    num_heads, kv_heads, key_dim, value_dim = HEADS[dim]
    rows, query_len, seq_len = load
    per_row = -(-seq_len // block_size)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    def blocks() -> KVBlocks:
        count = rows * per_row
        if kv_heads == 1:
            keys = random(count, 1, block_size, key_dim)
            values = keys[..., :value_dim]
        elif key_dim == value_dim:
            keys, values = random(count, 2 * kv_heads, block_size, key_dim).chunk(2, dim=1)
        else:
            both = random(count, kv_heads, block_size, key_dim + value_dim)
            keys, values = both.split([key_dim, value_dim], dim=3)
        return KVBlocks((keys, values), keys, values)

    tables = torch.randperm(rows * per_row, device=device).view(rows, per_row).int()
    step = StepMetadata.rectangle(tables, (seq_len,) * rows, block_size, query_len=query_len)
    query = random(rows * query_len, num_heads, key_dim)
    return [AttentionCall(query, blocks(), step, key_dim**-0.5) for _ in range(layers)]
