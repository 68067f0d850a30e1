"""On a CUDA device, at the sizes of real models: `python -m pytest -m gpu`. The small cases of the
other files run there too, without the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hf_paged.attention.backends import triton
from hf_paged.kernels.triton import cascade
from hf_paged.kernels.triton.attention import prefill_attention
from hf_paged.step import Lengths, StepMetadata
from tests.attention.test_backends import TOLERANCE, Case, build
from tests.kernels.triton import test_cascade, test_prefill
from tests.kernels.triton.test_prefill import Built
from tests.kernels.triton.test_prefill import Case as Packed
from tests.support.attention import SCALE, attend
from tests.support.kernels.device import on_device

pytestmark = pytest.mark.gpu

HEADS: dict[str, dict[str, Any]] = {
    "llama-8b": dict(heads=32, kv_heads=8, key_dim=128, value_dim=128),
    "qwen2.5-0.5b": dict(heads=14, kv_heads=2, key_dim=64, value_dim=64),
    "phi-2": dict(heads=32, kv_heads=32, key_dim=80, value_dim=80),
    "phi-3": dict(heads=32, kv_heads=32, key_dim=96, value_dim=96),
    "gemma-2b": dict(heads=8, kv_heads=1, key_dim=256, value_dim=256),
    "deepseek-expanded": dict(heads=16, kv_heads=16, key_dim=192, value_dim=128, joined=True),
}
FEATURES = {
    "plain": {},
    "window": dict(window=300, queries=2),
    "softcap": dict(softcap=30.0),
    "sinks": dict(sinks=True, window=128),
    "bias": dict(bias=(0, 1, 2), queries=3),
    "starts": dict(starts=(11, 700, 0, 0, 3), queries=5),
    "full": dict(causal=False, queries=16),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [8, 16, 64, 256])
@pytest.mark.parametrize("feature", sorted(FEATURES))
@pytest.mark.parametrize("heads", sorted(HEADS))
def test_decode(heads: str, feature: str, block: int, dtype: torch.dtype) -> None:
    sizes = {"block": block, "dtype": dtype, **HEADS[heads], **FEATURES[feature]}
    call, tolerance = build(Case(seq_lens=(1000, 777, 0, 1, 64), **sizes)), TOLERANCE[dtype]
    moved = on_device(call)
    with torch.no_grad():
        assert triton.unsupported_reason(moved.made()) is None
        out = attend(triton, *moved.inputs, **moved.options).double().cpu()
    torch.testing.assert_close(out, call.expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("group", [16, 128])
def test_latents(group: int) -> None:
    dims = dict(key_dim=576, value_dim=576, dtype=torch.bfloat16)
    call = build(Case(seq_lens=(900, 3), heads=group, kv_heads=1, **dims))
    call = replace(call, value_blocks=call.key_blocks[..., :512])
    moved = on_device(call)
    out = attend(triton, *moved.inputs, **moved.options).double().cpu()
    query, keys, values = (x.double().nan_to_num(0.0) for x in call.inputs[:3])
    exact = replace(call, query=query, key_blocks=keys, value_blocks=values)
    torch.testing.assert_close(out, exact.run("reference"), atol=2e-2, rtol=2e-2)


ROWS = ((1000, 1), (0, 300), (777, 64), (0, 0), (130, 5), (0, 1))
LATENT = dict(heads=16, kv_heads=1, key_dim=576, value_dim=512)
PREFILL_HEADS = HEADS | {"deepseek-latent": LATENT}
PREFILL_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": dict(window=100),
    "softcap-sinks": dict(softcap=30.0, sinks=True),
    "starts": dict(starts=(11, 0, 400, 0, 64, 0)),
    "all": dict(causal=False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("splits", [None, 1, 4])
@pytest.mark.parametrize("feature", sorted(PREFILL_FEATURES))
@pytest.mark.parametrize("heads", sorted(PREFILL_HEADS))
def test_chunks(heads: str, feature: str, splits: int | None, dtype: torch.dtype) -> None:
    case = Packed(ROWS, block=16, dtype=dtype, **PREFILL_HEADS[heads], **PREFILL_FEATURES[feature])
    test_prefill.compare(Built(case), num_splits=splits)


@pytest.mark.parametrize("block", [8, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_block_sizes(block: int, dtype: torch.dtype) -> None:
    case = Packed(ROWS, block=block, dtype=dtype, window=333, **HEADS["llama-8b"])
    test_prefill.compare(Built(case), num_splits=None)


def test_a_captured_launch_follows_lengths_that_change() -> None:
    """The kernel reads rows and tables on the device, so a replay with other lengths is right."""
    rows = ((0, 40), (90, 24)), ((70, 24), (8, 40))
    first, second = (Built(Packed(x, block=16, dtype=torch.bfloat16)) for x in rows)
    width = max(x.step.block_tables.shape[1] for x in (first, second))

    def inputs_of(x: Built) -> list[torch.Tensor]:
        tables = x.step.block_tables
        tables = torch.nn.functional.pad(tables, (0, width - tables.shape[1]))
        return [tables, *x.step.on_device]

    tables, *lengths = static = [tensor.clone() for tensor in inputs_of(first)]
    step = StepMetadata(tables, first.step.query_start, (), (), 16, lengths=Lengths(*lengths))
    size = max(len(x.blocks[0]) for x in (first, second))
    pool = torch.full((size, 4, 16, 16), torch.nan, dtype=torch.bfloat16, device="cuda")
    query = first.query.cuda()

    def load(x: Built) -> None:
        pool[: len(x.blocks[0])] = torch.cat(x.blocks, dim=1).cuda()
        query.copy_(x.query)
        for target, source in zip(static, inputs_of(x)):
            target.copy_(source)

    keys, values = pool.chunk(2, dim=1)
    load(first)
    with torch.no_grad():
        prefill_attention(query, keys, values, step, scale=SCALE)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = prefill_attention(query, keys, values, step, scale=SCALE)
    for x in (first, second):
        load(x)
        graph.replay()
        torch.testing.assert_close(output.double().cpu(), x.expected(), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("splits", [None, 1, 7])
def test_cascade_of_long_prompts(splits: int | None, dtype: torch.dtype) -> None:
    rows = [("a", 60, 5), ("b", 35, 1), ("a", 60, 170), ("", 0, 30), ("b", 35, 9)]
    rows += [("a", 60, 3)] * 12
    built = test_cascade.build(rows, dtype, heads=8, num_blocks=200)
    plan = cascade.find_cascade(built[-1], test_cascade.FREE)
    assert plan is not None
    test_cascade.check(built, plan, test_cascade.TOLERANCE[dtype], splits)
