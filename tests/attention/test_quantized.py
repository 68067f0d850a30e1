"""Attention over quantized blocks: every backend against the reference on the dequantized blocks in
float32."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from hf_paged.attention import backends
from hf_paged.attention.backends import reference
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.kernels import cpp, quantized
from hf_paged.kernels.cpp.build import batch_invariant
from tests.attention.test_backends import CASES, TOLERANCE, Call, Case, any_case, build
from tests.support.kernels.device import DEVICE, available

BACKENDS = ["reference", "gather", *(["cpp"] if cpp.is_available() else [])]


def quantize(call: Call, kv_dtype: str) -> tuple[AttentionCall, AttentionCall]:
    """The call over quantized blocks, with NaN scales in all slots that must not be read, and over
    float32 blocks of the same numbers."""
    keys, values = call.key_blocks, call.value_blocks
    blocks = KVBlocks.allocate(len(keys), keys.shape[2], keys, values, kv_dtype=kv_dtype)
    if blocks.shares_scales:
        quantized.write(blocks.latents.keys, slice(None), torch.cat((keys, values), -1))
    else:
        quantized.write(blocks.keys, slice(None), keys)
        quantized.write(blocks.values, slice(None), values)
    plain = [quantized.read(x, slice(None), torch.float32) for x in (blocks.keys, blocks.values)]
    made = call.made()
    exact = made._replace(blocks=KVBlocks((), *plain), query=made.query.float())
    return made._replace(blocks=blocks), exact


def to_device(call: AttentionCall) -> AttentionCall:
    """The call with its tensors on `DEVICE`."""
    blocks = call.blocks.like([tensor.to(DEVICE) for tensor in call.blocks.data])
    step = replace(call.step, block_tables=call.step.block_tables.to(DEVICE))
    sinks = None if call.sinks is None else call.sinks.to(DEVICE)
    return call._replace(query=call.query.to(DEVICE), blocks=blocks, step=step, sinks=sinks)


def check(case: Case, backend: str, kv_dtype: str, seed: int = 0) -> None:
    call, plain = quantize(build(case, seed), kv_dtype)
    module, tolerance = getattr(backends, backend), TOLERANCE[case.dtype]
    with torch.no_grad():
        expected = reference.attend(plain)
        if backend == "triton":
            call, tolerance = to_device(call), 4 * tolerance
        if backend in ("cpp", "triton"):
            assert module.unsupported_reason(call) is None
        out = module.attend(call)
    assert out.dtype == case.dtype and out.is_contiguous()
    size = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(out.float().cpu(), expected, atol=size * tolerance, rtol=tolerance)


FLOATS = [case for case in CASES if case.dtype != torch.float64]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FLOATS, ids=str)
def test_matches_the_reference(case: Case, backend: str) -> None:
    check(case, backend, ("int8", "fp8_e4m3", "fp8_e5m2")[FLOATS.index(case) % 3])


@pytest.mark.skipif(not cpp.is_available(), reason="no compiler")
@pytest.mark.parametrize("is_fixed", [False, True])
def test_rows_that_share_blocks(is_fixed: bool) -> None:
    """The C++ kernel attends to these once for all rows."""
    call, plain = quantize(build(Case(seq_lens=(200, 200, 150), block=8)), "int8")
    tables = call.step.block_tables.clone()
    tables[1:, :16] = tables[0, :16]
    step = replace(call.step, block_tables=tables)
    token = batch_invariant.set(is_fixed)
    try:
        with torch.no_grad():
            out = backends.cpp.attend(call._replace(step=step))
    finally:
        batch_invariant.reset(token)
    expected = reference.attend(plain._replace(step=step))
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


HALF, BF16 = torch.float16, torch.bfloat16
KERNEL_CASES = [
    Case((40, 1, 70), heads=4, key_dim=16, value_dim=16),
    Case((40, 3), queries=3, heads=6, key_dim=40, value_dim=40, dtype=HALF),
    Case((33, 50), heads=2, kv_heads=1, key_dim=24, value_dim=24, window=9, dtype=BF16, block=8),
    Case((20, 35), queries=20, heads=2, key_dim=16, value_dim=8, sinks=True, softcap=2.0),
]


@available
@pytest.mark.parametrize("kv_dtype", quantized.DTYPES)
@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_the_triton_kernels(case: Case, kv_dtype: str) -> None:
    check(case, "triton", kv_dtype)


@available
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_latents_through_the_triton_kernels(dtype: torch.dtype) -> None:
    case = Case(seq_lens=(40, 9), heads=4, kv_heads=1, key_dim=24, value_dim=8, dtype=dtype)
    call, _ = quantize(build(case), "int8")
    call = call._replace(query=torch.cat((call.query, call.query[..., :8]), dim=-1))
    latents, moved = call.blocks.latents, to_device(call)
    plain = quantized.read(latents.keys, slice(None), torch.float32)
    exact = call._replace(blocks=KVBlocks((), plain, plain), query=call.query.float())
    with torch.no_grad():
        out = backends.triton.attend(moved._replace(blocks=moved.blocks.latents)).float().cpu()
        tolerance = 4 * TOLERANCE[dtype]
        torch.testing.assert_close(out, reference.attend(exact), atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", quantized.DTYPES)
def test_matches_the_reference_on_any_sizes(kv_dtype: str) -> None:
    for seed, backend in itertools.product(range(13), BACKENDS):
        check(any_case(seed), backend, kv_dtype, seed)
