"""Backend calls for rows with equally many queries, and packed steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_paged.attention.backends import reference
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


SCALE = 0.3


@dataclass(frozen=True)
class PackedCase:
    """One packed step: (context_len, query_len) of each sequence."""

    rows: tuple[tuple[int, int], ...]
    block: int = 8
    heads: int = 6
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    window: int | None = None
    chunk: int | None = None
    num_dropped: int = 0  # tokens freed from each table, not counted in the context
    causal: bool = True
    softcap: float | None = None
    sinks: bool = False
    bias: bool = False  # of heads and keys
    starts: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    joined: bool = True  # K and V in one tensor, as the storage has them

    def __str__(self) -> str:
        name = "_".join(f"{context}+{query}" for context, query in self.rows)
        name += f"-b{self.block}-h{self.heads}_{self.kv_heads}"
        name += f"-d{self.key_dim}_{self.value_dim}-{str(self.dtype)[6:]}"
        names = ("window", "chunk", "num_dropped", "softcap", "sinks", "bias", "starts")
        name += "".join(f"-{feature}" for feature in names if getattr(self, feature))
        return name if self.causal else name + "-all"


class Packed:
    """A packed step with its blocks. Slots that must not be read hold NaN."""

    def __init__(self, case: PackedCase, seed: int = 0, unused: int = 0) -> None:
        """`unused`: block ids that must not be followed."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype)

        self.case, size = case, case.block
        lens = [context + query for context, query in case.rows]
        counts = [-(-length // size) for length in lens]
        num_blocks = sum(counts) + 3
        ids = torch.randperm(num_blocks, generator=generator).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.starts = case.starts or (0,) * len(lens)
        dims = case.key_dim, case.value_dim
        if case.joined and dims[0] == dims[1]:
            pool = torch.full((num_blocks, 2 * case.kv_heads, size, dims[0]), torch.nan)
            self.blocks = pool.to(case.dtype).chunk(2, dim=1)
        else:
            pool = torch.full((num_blocks, case.kv_heads, size, sum(dims)), torch.nan)
            self.blocks = pool.to(case.dtype).split(dims, dim=3)
            if not case.joined:
                self.blocks = tuple(x.contiguous() for x in self.blocks)
        for table, start, (context, query) in zip(self.tables, self.starts, case.rows):
            if case.window is not None and case.causal:
                start = max(start, context - case.window + 1)
            # rows without queries are not read at all
            for t in range(start, context + query if query else 0):
                for states in self.blocks:
                    slot = states[table[t // size], :, t % size]
                    slot.copy_(random(*slot.shape))
        self.query = random(sum(query for _, query in case.rows), case.heads, case.key_dim)
        self.sinks = random(case.heads) if case.sinks else None
        self.bias = random(1, case.heads, 1, max(lens)).float() if case.bias else None
        width = max(counts) + 1
        self.step = StepMetadata(
            torch.tensor([x + [unused] * (width - len(x)) for x in self.tables]).int(),
            tuple(itertools.accumulate((query for _, query in case.rows), initial=0)),
            tuple(lens),
            self.starts,
            size,
            causal=case.causal,
            window=case.window,
        )

    def alone(self) -> Iterator[tuple[Tensor, StepMetadata]]:
        """Queries `(1, heads, n, dim)` and the step of each sequence; of each query, as each may be
        in a separate chunk, if there are chunks."""
        case, first = self.case, 0
        for table, start, (context, query) in zip(self.tables, self.starts, case.rows):
            for count in [1] * query if case.chunk else [query] * (query > 0):
                context += count
                if case.chunk:
                    seen = case.num_dropped + context - 1
                    start = max(0, seen // case.chunk * case.chunk - case.num_dropped)
                step = StepMetadata.rectangle(
                    torch.tensor([table], dtype=torch.int32),
                    (context,),
                    case.block,
                    query_len=count,
                    starts=(start,),
                    causal=case.causal,
                    window=case.window,
                )
                yield self.query[first : first + count].transpose(0, 1)[None], step
                first += count

    def expected(self) -> Tensor:
        """The reference's output `(num_tokens, heads, value_dim)` for each sequence alone, in
        float64."""
        keys, values = (x.double() for x in self.blocks)
        sinks = None if self.sinks is None else self.sinks.double()
        options = dict(scale=SCALE, softcap=self.case.softcap, sinks=sinks, bias=self.bias)
        outputs = [
            attend(reference, query.double(), keys, values, step, **options)[0]
            for query, step in self.alone()
        ]
        return torch.cat(outputs)
