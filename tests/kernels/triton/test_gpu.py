"""On a CUDA device, at the sizes of real models: `python -m pytest -m gpu`. The small cases of
`test_decode.py` and `test_store.py` run there too, without the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_paged.attention.backends import triton
from tests.attention.test_backends import TOLERANCE, Case, build
from tests.support.attention import attend
from tests.support.kernels.device import on_device

pytestmark = pytest.mark.gpu

HEADS = {
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
    case = Case(
        seq_lens=(1000, 777, 0, 1, 64),
        block=block,
        dtype=dtype,
        **HEADS[heads],
        **FEATURES[feature],
    )
    call = build(case)
    moved = on_device(call)
    with torch.no_grad():
        assert triton.unsupported_reason(moved.made()) is None
        out = attend(triton, *moved.inputs, **moved.options)
    torch.testing.assert_close(
        out.double().cpu(), call.expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("group", [16, 128])
def test_latents(group: int) -> None:
    call = build(
        Case(
            seq_lens=(900, 3),
            heads=group,
            kv_heads=1,
            key_dim=576,
            value_dim=576,
            dtype=torch.bfloat16,
        )
    )
    call = replace(call, value_blocks=call.key_blocks[..., :512])
    moved = on_device(call)
    out = attend(triton, *moved.inputs, **moved.options)
    zeroed = replace(
        call,
        query=call.query.double(),
        key_blocks=call.key_blocks.double().nan_to_num(0.0),
        value_blocks=call.value_blocks.double().nan_to_num(0.0),
    )
    torch.testing.assert_close(out.double().cpu(), zeroed.run("reference"), atol=2e-2, rtol=2e-2)


def test_a_captured_launch_is_right_for_other_lengths() -> None:
    case = Case(seq_lens=(600, 1, 300), heads=8, kv_heads=2, dtype=torch.float16)
    call = build(case)
    moved = on_device(call)
    assert moved.step.lengths is not None
    seq_lens = moved.step.lengths.seq_lens
    tables, lengths = moved.step.block_tables.clone(), seq_lens.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        seq_lens.fill_(1)  # captured with lengths other than the replay's
        attend(triton, *moved.inputs, **moved.options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(triton, *moved.inputs, **moved.options)
    seq_lens.copy_(lengths)
    moved.step.block_tables.copy_(tables)
    graph.replay()
    torch.testing.assert_close(out.double().cpu(), call.expected, atol=3e-3, rtol=3e-3)
