"""Packed attention against the reference for each sequence alone; slots that must not be read hold
NaN."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from hf_paged import kernels
from hf_paged.attention.interface import paged_attention
from hf_paged.attention.masks import PagedMask, packed_step
from hf_paged.attention.switch import NAME
from hf_paged.cache.handles import PagedTensor
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.kernels.triton.cascade import CascadeCosts, find_cascade
from hf_paged.step import Lengths, NotPackable, StepMetadata
from tests.support.attention import SCALE, Packed
from tests.support.attention import PackedCase as Case

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# takes softcap and sinks
MODULE: Any = SimpleNamespace(config=LlamaConfig(attn_implementation="flash_attention_2"))


DECODES, PROMPTS = ((0, 1), (7, 1), (8, 1), (40, 1)), ((0, 5), (0, 33), (0, 2))
# ones after a chunk are chunks
MIXED = ((19, 1), (3, 1), (0, 21), (17, 9), (16, 40), (0, 1), (5, 1))
# rows of one call
EQUAL = ((4, 1), (0, 9), (0, 9), (12, 9), (3, 9), (0, 20), (0, 20), (0, 20), (70, 30), (8, 30))
CASES = [
    Case(EQUAL),
    Case(EQUAL, window=10, kv_heads=3),
    Case(EQUAL, softcap=4.0, dtype=torch.bfloat16),
    Case(((0, 1),)),
    Case(DECODES),
    Case(PROMPTS),
    Case(((12, 23),)),
    Case(MIXED, block=16, heads=4, kv_heads=4, key_dim=24, value_dim=8, joined=False),
    Case(MIXED, window=7, block=4),
    Case(PROMPTS, window=11),
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
    num_tokens: int, window: int | None = None, chunk: int | None = None, attention_mask: Any = None
) -> Any:
    """The mask that a model's code makes in a packed forward."""
    make = create_causal_mask
    if window or chunk:
        make = create_sliding_window_causal_mask if window else create_chunked_causal_mask
    sizes: Any = dict(sliding_window=window, attention_chunk_size=chunk)
    config = LlamaConfig(attn_implementation=NAME, **sizes)
    return make(config, torch.empty(1, num_tokens, 4), attention_mask, past_key_values=None)


class Built(Packed):
    """A packed step as a model's attention gets it."""

    def __init__(self, case: Case, kept_window: int | None = None) -> None:
        super().__init__(case)
        num_decodes = next((i for i, (_, n) in enumerate(case.rows) if n > 1), len(case.rows))
        num_tokens = len(self.query)
        self.step = replace(
            self.step,
            window=kept_window,
            slots=torch.zeros(1, num_tokens, dtype=torch.long),
            block_ids=self.tables[:num_decodes],
            origins=(case.num_dropped,) * len(case.rows),
        )
        self.kv_blocks, fresh = KVBlocks(self.blocks, *self.blocks), []
        for table, (context, query) in zip(self.tables, case.rows):
            fresh.append([x[:, :, context : context + query] for x in self.whole(table)])
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*fresh))
        self.key = PagedTensor(self.step, self.kv_blocks, False, keys)
        self.value = PagedTensor(self.step, self.kv_blocks, True, values)

    def whole(self, table: list[int]) -> list[torch.Tensor]:
        """K and V of a sequence, `(1, heads, tokens, dim)`."""
        return [x[table].transpose(0, 1).flatten(1, 2)[None] for x in self.blocks]

    @property
    def queries(self) -> torch.Tensor:
        """In a model's memory layout: heads after tokens."""
        return self.query.transpose(0, 1)[None]

    def attend(self, mask: Any, module: Any = MODULE, **options: Any) -> torch.Tensor:
        if module is MODULE:
            options |= {"softcap": self.case.softcap, "s_aux": self.sinks}
        arguments = (self.queries, self.key, self.value, mask)
        output, weights = paged_attention(module, *arguments, scaling=SCALE, **options)
        assert weights is None
        return output

    def check(self, output: torch.Tensor) -> None:
        expected, tolerance = self.expected()[None], TOLERANCE[self.case.dtype]
        assert output.shape == expected.shape and output.dtype == self.case.dtype
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["", "gather", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_each_sequence_as_alone(case: Case, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, backend)
    built = Built(case)
    built.check(built.attend(causal_mask(built.step.num_tokens, case.window, case.chunk)))


@torch.no_grad()
def test_layers_share_a_plan_and_another_mask_gets_its_own() -> None:
    built = Built(Case(MIXED))
    mask, sliding = causal_mask(built.step.num_tokens), causal_mask(built.step.num_tokens, window=5)
    built.check(built.attend(mask))
    plans = dict(built.step._plans)
    built.check(built.attend(mask))
    assert built.step._plans == plans
    assert not torch.allclose(built.attend(sliding), built.attend(mask))
    built.check(built.attend(mask))


def test_masks_of_another_pattern_or_past_what_the_cache_keeps_are_refused() -> None:
    built = Built(Case(MIXED))
    length = built.step.num_tokens
    padded = torch.ones(1, length, dtype=torch.long)
    whole = causal_mask(length, attention_mask=padded.clone())
    padded[0, :2] = 0
    refused = {
        "None": None,
        "dense": torch.ones(1, 1, length, length, dtype=torch.bool),
        f"not made for {length} tokens in one row": causal_mask(length + 1),
        "marks some tokens as padding": causal_mask(length, attention_mask=padded),
    }
    for words, mask in refused.items():
        with pytest.raises(NotPackable, match=words):
            built.attend(mask)
    assert isinstance(whole, PagedMask)
    built.attend(whole)
    built = Built(Case(MIXED), kept_window=6)
    for sizes in ((None, None), (7, None), (None, 7)):
        with pytest.raises(NotPackable, match="the cache keeps 6"):
            built.attend(causal_mask(length, *sizes))
    for sizes in ((6, None), (None, 6)):
        built.attend(causal_mask(length, *sizes))


@torch.no_grad()
def test_a_recorded_step_finds_its_chunks_on_the_device() -> None:
    step = Built(Case(DECODES, chunk=5, num_dropped=24)).step
    seq_lens = torch.tensor(step.seq_lens, dtype=torch.int32)
    lengths = Lengths(seq_lens, torch.zeros_like(seq_lens), origins=torch.full_like(seq_lens, 24))
    recorded = StepMetadata.rectangle(step.block_tables, (), step.block_size, lengths=lengths)
    mask = causal_mask(step.num_tokens, chunk=5)
    found = packed_step(recorded, mask).on_device.starts
    assert found.tolist() == list(packed_step(step, mask).starts)


def test_the_interface_refuses_what_changes_the_numbers() -> None:
    built = Built(Case(MIXED))
    mask = causal_mask(built.step.num_tokens)
    module: Any = SimpleNamespace(config=LlamaConfig(attn_implementation="sdpa"))
    built.check(built.attend(mask, module))
    bias = torch.zeros(1, 6, built.step.num_tokens, built.step.num_tokens)
    given = (built.queries, built.key, built.value, mask)
    for arguments, extra in (
        (given, {"dropout": 0.1}),
        (given, {"position_bias": bias}),
        ((*given[:2], built.value.fresh, mask), {}),
        ((built.queries.expand(2, -1, -1, -1), *given[1:]), {}),
    ):
        with pytest.raises(NotPackable):
            paged_attention(module, *arguments, **extra)


OPERATIONS = {
    "transpose": lambda x: x.transpose(1, 2),
    "index": lambda x: x[:, :, -1:],
    "add": lambda x: x + 1,
    "cat": lambda x: torch.cat([x, x], dim=2),
    "matmul": lambda x: torch.matmul(torch.randn(1, 2, 3, 16), x.mT),
    "clone": lambda x: x.clone(),
    "float": lambda x: x.double(),
    "item": lambda x: x.sum().item(),
    "sdpa": lambda x: F.scaled_dot_product_attention(torch.randn(1, 2, 3, 16), x, x),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_operation_takes_packed_keys_for_one_sequence(operation: str) -> None:
    """Nor can its numbers be taken out."""
    built = Built(Case(MIXED))
    assert built.key.shape == (1, 2, built.step.num_tokens, 16) and built.key.dtype == torch.float32
    outside = operation in ("tolist", "numpy", "deepcopy")
    with pytest.raises(RuntimeError if outside else NotPackable):
        OPERATIONS[operation](built.key)


@torch.no_grad()
def test_a_prompt_whose_first_query_ends_a_chunk_beside_decodes() -> None:
    """The query becomes one more row of one query, whose blocks the host's tables lack."""
    built = Built(Case(((20, 1), (20, 1), (31, 9)), chunk=32, block=16))
    mask = causal_mask(built.step.num_tokens, chunk=32)
    decodes, _ = packed_step(built.step, mask).split(1)
    assert decodes is not None and decodes.seq_lens == (21, 21, 32)
    costs = CascadeCosts(token_bytes=1, state_bytes=0, rows_per_read=1000)
    assert find_cascade(decodes, costs) is None
    built.check(built.attend(mask))
