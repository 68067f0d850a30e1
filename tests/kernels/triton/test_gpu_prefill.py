"""On a CUDA device, at the sizes of real models: `python -m pytest -m gpu`. The small cases of
`test_prefill.py` and `test_cascade.py` run there too, without the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.step import Lengths, StepMetadata
from tests.kernels.triton import test_cascade as cascades
from tests.kernels.triton import test_prefill as small
from tests.kernels.triton.test_prefill import Case, build, expected, run

pytestmark = pytest.mark.gpu

ROWS = ((1000, 1), (0, 300), (777, 64), (0, 0), (130, 5), (0, 1))
HEADS: dict[str, dict[str, Any]] = {
    "llama-8b": dict(heads=32, kv_heads=8, key_dim=128, value_dim=128),
    "qwen2.5-0.5b": dict(heads=14, kv_heads=2, key_dim=64, value_dim=64),
    "phi-2": dict(heads=8, kv_heads=8, key_dim=80, value_dim=80),
    "phi-3": dict(heads=8, kv_heads=8, key_dim=96, value_dim=96),
    "gemma-2b": dict(heads=8, kv_heads=1, key_dim=256, value_dim=256),
    "deepseek-expanded": dict(heads=8, kv_heads=8, key_dim=192, value_dim=128),
    "deepseek-latent": dict(heads=16, kv_heads=1, key_dim=576, value_dim=512),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": dict(window=100),
    "softcap-sinks": dict(softcap=30.0, sinks=True),
    "starts": dict(starts=(11, 0, 400, 0, 64, 0)),
    "all": dict(causal=False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("splits", [None, 1, 4])
@pytest.mark.parametrize("feature", sorted(FEATURES))
@pytest.mark.parametrize("heads", sorted(HEADS))
def test_prefill(heads: str, feature: str, splits: int | None, dtype: torch.dtype) -> None:
    built = build(Case(ROWS, block=16, dtype=dtype, **HEADS[heads], **FEATURES[feature]))
    small.compare(built, dtype, num_splits=splits)


@pytest.mark.parametrize("block", [8, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_block_sizes(block: int, dtype: torch.dtype) -> None:
    built = build(Case(ROWS, block=block, dtype=dtype, window=333, **HEADS["llama-8b"]))
    tolerance = small.TOLERANCE[dtype]
    torch.testing.assert_close(
        run(built).double().cpu(), expected(built)[0], atol=tolerance, rtol=tolerance
    )


def test_a_captured_launch_follows_lengths_that_change() -> None:
    """The kernel reads rows and tables on the device, so a replay with other lengths is right."""
    cases = [
        Case(((0, 40), (90, 24)), block=16, dtype=torch.bfloat16),
        Case(((70, 24), (8, 40)), block=16, dtype=torch.bfloat16),
    ]
    first, second = (build(case) for case in cases)
    width = max(x.step.block_tables.shape[1] for x in (first, second))

    def inputs_of(x: Any) -> list[torch.Tensor]:
        tables = torch.nn.functional.pad(
            x.step.block_tables, (0, width - x.step.block_tables.shape[1])
        )
        return [tables, *x.step.on_device]

    tables, *lengths = static = [tensor.clone() for tensor in inputs_of(first)]
    step = StepMetadata(tables, first.step.query_start, (), (), 16, lengths=Lengths(*lengths))
    size = max(x.key_blocks.shape[0] for x in (first, second))
    pool = torch.full((size, 4, 16, 16), torch.nan, dtype=torch.bfloat16, device="cuda")
    query = first.query.cuda()

    def load(x: Any) -> None:
        pool[: x.key_blocks.shape[0]] = torch.cat([x.key_blocks, x.value_blocks], dim=1).cuda()
        query.copy_(x.query)
        for target, source in zip(static, inputs_of(x)):
            target.copy_(source)

    from hf_paged.kernels.triton.attention import prefill_attention

    keys, values = pool.chunk(2, dim=1)
    load(first)
    with torch.no_grad():
        prefill_attention(query, keys, values, step, scale=small.SCALE)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = prefill_attention(query, keys, values, step, scale=small.SCALE)
    for x in (first, second):
        load(x)
        graph.replay()
        torch.testing.assert_close(output.double().cpu(), expected(x)[0], atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("splits", [None, 1, 7])
def test_cascade_of_long_prompts(splits: int | None, dtype: torch.dtype) -> None:
    from hf_paged.attention.backends import reference
    from hf_paged.kernels.triton import attention, cascade

    rows = [
        ("a", 60, 5),
        ("b", 35, 1),
        ("a", 60, 170),
        ("", 0, 30),
        ("b", 35, 9),
        *[("a", 60, 3)] * 12,
    ]
    query, keys, values, step = cascades.build(rows, dtype, heads=8, num_blocks=200)
    plan = cascade.find_cascade(step, cascades.FREE)
    assert plan is not None
    with torch.no_grad():
        output = attention.cascade_attention(
            query, keys, values, plan, scale=0.3, num_splits=splits
        )
    wanted = reference.attend(
        cascades.call(query.double(), keys.double(), values.double(), step, scale=0.3)
    )
    tolerance = cascades.TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), wanted, atol=tolerance, rtol=tolerance)
