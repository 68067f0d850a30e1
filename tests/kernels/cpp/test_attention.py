"""Calls of the C++ kernels, and the path without them; `test_backends.py` tests their results."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from hf_paged import kernels
from hf_paged.attention import backends
from hf_paged.cache.kv_blocks import choose_store
from hf_paged.kernels import cpp, quantized
from hf_paged.kernels.cpp.attention import Attention
from hf_paged.kernels.cpp.blocks import Store
from hf_paged.step import Lengths, StepMetadata
from tests.attention.test_backends import Case, build, check
from tests.support.attention import attend

built = pytest.mark.skipif(not cpp.is_available(), reason="no compiler")


@pytest.mark.slow_cases("True-2")
@built
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("sinks", [False, True])
def test_split_rows_merge(threads: int, sinks: bool) -> None:
    before = torch.get_num_threads()
    case = Case(seq_lens=(3000, 40, 700), queries=2, heads=2, kv_heads=1, sinks=sinks)
    try:
        torch.set_num_threads(threads)
        check(case, "cpp")
        check(replace(case, window=300, bias=(0, 1, 2)), "cpp")
    finally:
        torch.set_num_threads(before)


@built
def test_cpp_refuses_what_would_read_outside_the_pool() -> None:
    call = build(Case())
    step, far = call.step, call.step.block_tables + 100
    for change, message in (
        ({"step": replace(step, seq_lens=(1000,) * 3)}, "too few blocks for seq_lens"),
        ({"step": replace(step, block_tables=far)}, "outside the pool of 16 blocks"),
        ({"options": {**call.options, "bias": torch.zeros(9)}}, "bias covers 9 positions"),
    ):
        with pytest.raises(IndexError, match=message):
            replace(call, **change).run("cpp")


@built
def test_the_reason_against_strides_names_no_sizes() -> None:
    blocks, messages = torch.zeros(4, 2, 8, 16), set()
    for num_tokens in (2, 3):
        query = torch.zeros(num_tokens, 16, 4).transpose(1, 2)
        with pytest.raises(TypeError, match="the last one contiguous") as caught:
            Attention(query, blocks, blocks, scale=1.0)
        messages.add(str(caught.value))
    assert len(messages) == 1


@built
def test_a_bias_that_all_keys_share_counts_where_only_the_device_knows_the_lengths() -> None:
    query, keys, values = torch.randn(2, 4, 16), torch.randn(4, 2, 8, 16), torch.randn(4, 2, 8, 16)
    tables = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    lengths = Lengths(torch.tensor([11, 5]).int(), torch.zeros(2).int())
    step = StepMetadata.rectangle(tables, (), 8, lengths=lengths)
    sinks, bias = torch.randn(4), torch.randn(1, 4, 1, 1)
    kernel = Attention(query, keys, values, scale=0.25, sinks=sinks)
    expected = kernel(query, step, sinks, bias.expand(1, 4, 1, 16).contiguous())
    assert torch.equal(kernel(query, step, sinks, bias), expected)


def test_portable_path_serves_where_the_build_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(cpp.build, "library", lambda: None)
    call, keys = build(Case()), torch.ones(1, 2, 1, 64)
    out = attend(backends, *call.inputs, **call.options)
    torch.testing.assert_close(out.double(), call.expected, atol=2e-5, rtol=2e-5)
    inputs = (keys, keys, call.key_blocks, call.value_blocks, torch.tensor([[3]]))
    choose_store(*inputs)(keys, keys, inputs[-1])
    assert (call.key_blocks[0, :, 3] == 1).all()
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "cpp")
    with pytest.raises(RuntimeError, match="could not be built or loaded"):
        backends.select(build(Case()).made())


def mixed_blocks() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks `(4, 2, 8, 16)`: float32, int8 and float8."""
    tiles = torch.zeros(2, 4, 2, quantized.tile_bytes(8, 16), dtype=torch.uint8)
    codes = (quantized.codes(x, 8, dtype) for x, dtype in zip(tiles, quantized.MAX_CODES))
    return torch.zeros(4, 2, 8, 16), *codes


@built
def test_keys_and_values_in_blocks_of_different_formats_are_not_stored_by_the_kernel() -> None:
    states, slots = torch.randn(1, 2, 3, 16), torch.arange(3)[None]
    for key_blocks, value_blocks in itertools.permutations(mixed_blocks(), 2):
        with pytest.raises(TypeError, match="must be quantized alike"):
            Store(states, states, key_blocks, value_blocks, slots)
        choose_store(states, states, key_blocks, value_blocks, slots)(states, states, slots)
        for blocks in (key_blocks, value_blocks):
            index = torch.zeros(3, dtype=torch.long), slice(None), slots[0]
            found = quantized.read(blocks, index, torch.float32)
            torch.testing.assert_close(found, states[0].transpose(0, 1), atol=0.1, rtol=0.1)
