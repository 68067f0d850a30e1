"""Packed attention against the reference for each sequence alone; slots that must not be read hold
NaN."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from hf_paged import kernels
from hf_paged.attention.backends import reference
from hf_paged.attention.interface import paged_attention
from hf_paged.attention.masks import PagedMask, packed_step
from hf_paged.attention.switch import NAME
from hf_paged.cache.handles import PagedTensor
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.cache.store import choose_store
from hf_paged.step import Lengths, NotPackable, StepMetadata
from tests.support.attention import attend

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# takes softcap and sinks
MODULE: Any = SimpleNamespace(config=LlamaConfig(attn_implementation="flash_attention_2"))


@dataclass(frozen=True)
class Case:
    """One step: (context_len, query_len) of each sequence, decodes first."""

    rows: tuple[tuple[int, int], ...]
    block: int = 8
    heads: int = 6
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    window: int | None = None  # of the mask
    chunk: int | None = None  # of the mask
    num_dropped: int = 0  # tokens freed from each table, not counted in the context
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        name = "_".join(f"{context}+{query}" for context, query in self.rows)
        name += f"-b{self.block}-h{self.heads}_{self.kv_heads}"
        name += f"-d{self.key_dim}_{self.value_dim}-{str(self.dtype)[6:]}"
        return name + "".join(
            f"-{f}"
            for f in ("window", "chunk", "num_dropped", "softcap", "sinks")
            if getattr(self, f)
        )


DECODES, PROMPTS = ((0, 1), (7, 1), (8, 1), (40, 1)), ((0, 5), (0, 33), (0, 2))
# ones after a chunk are chunks
MIXED = ((19, 1), (3, 1), (0, 21), (17, 9), (16, 40), (0, 1), (5, 1))
# rows of one call
EQUAL = ((4, 1), (0, 9), (0, 9), (12, 9), (3, 9), (0, 20), (0, 20), (0, 20), (70, 30), (8, 30))
CASES = [
    Case(EQUAL),
    Case(EQUAL, window=10, kv_heads=3),
    Case(EQUAL, softcap=4.0, dtype=torch.bfloat16),
    Case(EQUAL, dtype=torch.bfloat16),
    Case(((0, 1),)),
    Case(DECODES),
    Case(PROMPTS),
    Case(MIXED),
    Case(((12, 23),)),
    Case(MIXED, block=16, heads=4, kv_heads=4, key_dim=24, value_dim=8),
    Case(MIXED, window=7),
    Case(MIXED, window=7, block=4),
    Case(PROMPTS, window=11),
    Case(MIXED, softcap=5.0),
    Case(MIXED, sinks=True),
    Case(MIXED, window=9, softcap=3.0, sinks=True),
    Case(MIXED, heads=5, kv_heads=1),
    Case(MIXED, dtype=torch.bfloat16),
    Case(DECODES, chunk=7),
    Case(DECODES, chunk=5, num_dropped=24),
    Case(MIXED, chunk=11),
    Case(MIXED, chunk=16, num_dropped=8),
    Case(PROMPTS, chunk=100),
]


def causal_mask(
    num_tokens: int, window: int | None = None, chunk: int | None = None, **kwargs: Any
) -> Any:
    """The mask that a model's code makes in a packed forward."""
    config = LlamaConfig(
        sliding_window=window, attention_chunk_size=chunk, attn_implementation=NAME
    )
    make = (
        create_sliding_window_causal_mask
        if window
        else create_chunked_causal_mask
        if chunk
        else create_causal_mask
    )
    embeds = torch.empty(1, num_tokens, 4)
    return make(config, embeds, kwargs.get("attention_mask"), past_key_values=None)


class Built:
    """A step with its blocks, and the expected output of each sequence alone."""

    def __init__(self, case: Case, kept_window: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype)

        self.case, size = case, case.block
        counts = [-(-(context + query) // size) for context, query in case.rows]
        ids = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        blocks = sum(counts) + 3
        self.key_blocks = torch.full(
            (blocks, case.kv_heads, size, case.key_dim), torch.nan, dtype=case.dtype
        )
        self.value_blocks = torch.full(
            (blocks, case.kv_heads, size, case.value_dim), torch.nan, dtype=case.dtype
        )
        fresh = []
        for (context, query), table in zip(case.rows, self.tables):
            slots = torch.tensor(
                [[table[t // size] * size + t % size for t in range(context + query)]]
            )
            states = (
                random(1, case.kv_heads, context + query, case.key_dim),
                random(1, case.kv_heads, context + query, case.value_dim),
            )
            choose_store(*states, self.key_blocks, self.value_blocks, slots)(*states, slots)
            fresh.append([x[:, :, context:] for x in states])
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*fresh))
        num_tokens = keys.shape[2]
        # a model's memory layout: heads after tokens
        self.query = random(1, num_tokens, case.heads, case.key_dim).transpose(1, 2)
        self.sinks = random(case.heads) if case.sinks else None
        num_decodes = next(
            (i for i, (_, query) in enumerate(case.rows) if query > 1), len(case.rows)
        )
        width = max(map(len, self.tables))
        rows = [[*table, *([0] * (width - len(table)))] for table in self.tables]
        self.step = StepMetadata(
            torch.tensor(rows, dtype=torch.int32),
            query_start=tuple(itertools.accumulate((query for _, query in case.rows), initial=0)),
            seq_lens=tuple(context + query for context, query in case.rows),
            starts=(0,) * len(rows),
            block_size=size,
            window=kept_window,
            slots=torch.zeros(1, num_tokens, dtype=torch.long),
            block_ids=self.tables[:num_decodes],
            origins=(case.num_dropped,) * len(rows),
        )
        self.blocks = KVBlocks(
            (self.key_blocks, self.value_blocks), self.key_blocks, self.value_blocks
        )
        self.key = PagedTensor(self.step, self.blocks, False, keys)
        self.value = PagedTensor(self.step, self.blocks, True, values)

    def attend(self, mask: Any) -> torch.Tensor:
        case = self.case
        kwargs = {"scaling": 0.3, "softcap": case.softcap, "s_aux": self.sinks}
        return paged_attention(MODULE, self.query, self.key, self.value, mask, **kwargs)[0]

    def expected(self) -> torch.Tensor:
        case, parts, first = self.case, [], 0
        for (context, query), table in zip(case.rows, self.tables):
            chunk, dropped = case.chunk or 1 << 20, case.num_dropped
            features = dict(scale=0.3, softcap=case.softcap, sinks=self.sinks)
            for i in range(query):  # one by one, as each may be in a separate chunk
                end = context + i + 1
                start = max(0, (dropped + end - 1) // chunk * chunk - dropped)
                step = StepMetadata.rectangle(
                    torch.tensor([table], dtype=torch.int32),
                    (end,),
                    case.block,
                    starts=(start,),
                    window=case.window,
                )
                part = self.query[:, :, first + i : first + i + 1]
                parts.append(
                    attend(reference, part, self.key_blocks, self.value_blocks, step, **features)
                )
            first += query
        return torch.cat(parts, dim=1)


@pytest.mark.parametrize("backend", ["", "gather", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_each_sequence_gets_what_it_gets_alone(
    case: Case, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.VARIABLE, backend)
    built = Built(case)
    output = built.attend(causal_mask(built.step.num_tokens, case.window, case.chunk))
    expected = built.expected()
    assert output.shape == expected.shape and output.dtype == case.dtype
    torch.testing.assert_close(
        output, expected, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype]
    )


@torch.no_grad()
def test_layers_share_a_plan_and_another_mask_gets_its_own() -> None:
    built = Built(Case(MIXED))
    mask, sliding = causal_mask(built.step.num_tokens), causal_mask(built.step.num_tokens, window=5)
    first = built.attend(mask)
    plans = dict(built.step._plans)
    assert torch.equal(built.attend(mask), first) and built.step._plans == plans
    assert not torch.allclose(built.attend(sliding), first)
    assert torch.equal(built.attend(mask), first)


def test_what_is_not_causal_in_one_sequence_is_refused() -> None:
    built = Built(Case(MIXED))
    length = built.step.num_tokens
    padded = torch.ones(1, length, dtype=torch.long)
    padded[0, :2] = 0
    refused = {
        "None": None,
        "dense": torch.ones(1, 1, length, length, dtype=torch.bool),
        "other sizes": causal_mask(length + 1),
        "hides tokens": causal_mask(length, attention_mask=padded),
    }
    for words, mask in refused.items():
        with pytest.raises(NotPackable, match=words):
            built.attend(mask)
    assert isinstance(causal_mask(length, attention_mask=torch.ones_like(padded)), PagedMask)
    built.attend(causal_mask(length, attention_mask=torch.ones_like(padded)))


def test_a_mask_that_looks_past_what_the_cache_keeps_is_refused() -> None:
    built = Built(Case(MIXED), kept_window=6)
    for window in (None, 7):
        with pytest.raises(NotPackable, match="the cache keeps 6"):
            built.attend(causal_mask(built.step.num_tokens, window))
    with pytest.raises(NotPackable, match="the cache keeps 6"):
        built.attend(causal_mask(built.step.num_tokens, chunk=7))
    built.attend(causal_mask(built.step.num_tokens, 6))
    built.attend(causal_mask(built.step.num_tokens, chunk=6))


@torch.no_grad()
def test_a_recorded_step_finds_its_chunks_on_the_device() -> None:
    case = Case(DECODES, chunk=5, num_dropped=24)
    built = Built(case)
    seq_lens = torch.tensor(built.step.seq_lens, dtype=torch.int32)
    lengths = Lengths(seq_lens, torch.zeros_like(seq_lens), origins=torch.full_like(seq_lens, 24))
    recorded = StepMetadata.rectangle(built.step.block_tables, (), case.block, lengths=lengths)
    mask = causal_mask(built.step.num_tokens, chunk=5)
    assert packed_step(recorded, mask).on_device.starts.tolist() == list(
        packed_step(built.step, mask).starts
    )


def test_the_interface_refuses_what_changes_the_numbers() -> None:
    built = Built(Case(MIXED))
    mask = causal_mask(built.step.num_tokens)
    module: Any = SimpleNamespace(config=LlamaConfig(attn_implementation="sdpa"))
    output, weights = paged_attention(
        module, built.query, built.key, built.value, mask, scaling=0.3
    )
    assert weights is None
    torch.testing.assert_close(output, built.expected(), atol=2e-5, rtol=2e-5)
    bias = torch.zeros(1, 6, built.step.num_tokens, built.step.num_tokens)
    for extra in ({"dropout": 0.1}, {"position_bias": bias}):
        with pytest.raises(NotPackable):
            paged_attention(module, built.query, built.key, built.value, mask, **extra)
    with pytest.raises(NotPackable):
        paged_attention(module, built.query, built.key, built.value.fresh, mask)
    with pytest.raises(NotPackable):
        paged_attention(module, built.query.expand(2, -1, -1, -1), built.key, built.value, mask)


OPERATIONS = {
    "transpose": lambda x: x.transpose(1, 2),
    "index": lambda x: x[:, :, -1:],
    "add": lambda x: x + 1,
    "cat": lambda x: torch.cat([x, x], dim=2),
    "matmul": lambda x: torch.matmul(torch.randn(1, 2, 3, 16), x.mT),
    "clone": lambda x: x.clone(),
    "float": lambda x: x.double(),
    "item": lambda x: x.sum().item(),
    "sdpa": lambda x: torch.nn.functional.scaled_dot_product_attention(
        torch.randn(1, 2, 3, 16), x, x
    ),
}


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_no_operation_takes_packed_keys_for_one_sequence(operation: str) -> None:
    built = Built(Case(MIXED))
    assert built.key.shape == (1, 2, built.step.num_tokens, 16) and built.key.dtype == torch.float32
    with pytest.raises(NotPackable):
        OPERATIONS[operation](built.key)


def test_its_numbers_cannot_be_taken_out() -> None:
    key = Built(Case(MIXED)).key
    for take in (key.tolist, key.numpy, lambda: copy.deepcopy(key)):
        with pytest.raises(RuntimeError):
            take()
