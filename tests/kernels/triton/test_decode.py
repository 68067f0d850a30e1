"""The Triton decode kernel against a dense float64 computation; slots that must not be read hold
NaN, block ids that must not be followed are far out of range."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hf_paged.attention.backends.triton import unsupported_reason
from hf_paged.kernels.triton import attention, configs
from tests.attention import test_backends
from tests.attention.test_backends import TOLERANCE, Call, Case, any_case, build
from tests.support.kernels.device import available, on_device

# the interpreter's numpy warns that the dtype's minimum in a mask becomes -inf before an
# exponential
pytestmark = [
    available,
    pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning"),
]

ONE_SPLIT = 256
PROMPT = vars(build(Case((20, 20), queries=20, heads=4, key_dim=16, value_dim=16, block=8)))
CASES = [case for case in test_backends.CASES if case.queries <= 16 and case.dtype != torch.float64]
WIDE = [
    Case(seq_lens=(70, 3), heads=4, key_dim=80, value_dim=96),
    Case((40, 3), heads=4, key_dim=192, value_dim=128, joined=True, dtype=torch.float16),
    Case(seq_lens=(40, 3), heads=4, key_dim=256, value_dim=256, block=8),
    Case(seq_lens=(40, 3), heads=20, kv_heads=1, key_dim=112, value_dim=100, queries=4, block=128),
    # blocks that fill large pages
    Case((515, 3, 512), block=512, heads=3, kv_heads=1, key_dim=24, value_dim=9, window=100),
    Case((1026, 9), (990, 0), block=1024, heads=2, key_dim=16, value_dim=16, dtype=torch.bfloat16),
]


def run(call: Call, split_tokens: int, tile: int = 16, block_m: int = 16, **options: Any) -> Any:
    """The kernel with splits of at least `split_tokens` tokens, on a chip that always has room for
    another program; results on the CPU."""
    call = on_device(call)
    assert unsupported_reason(call.made()) is None
    shape, query = call.query.shape[::2], call.query.transpose(1, 2).flatten(0, 1)
    config = configs.LaunchConfig(tile, block_m, num_warps=4, num_stages=2)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(attention, "MIN_DECODE_SPLIT", split_tokens)
        options = {"config": config, **call.options, **options}
        out = attention.decode_attention(query, *call.inputs[1:], **options)
    if isinstance(out, tuple):
        return tuple(x.unflatten(0, shape).cpu() for x in out)
    return out.unflatten(0, shape).cpu()


def check(case: Case, split_tokens: int, seed: int = 0, **options: Any) -> None:
    call = build(case, seed)
    out = run(call, split_tokens, **options)
    assert out.shape == call.expected.shape and out.is_contiguous() and out.dtype == case.dtype
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.double(), call.expected, atol=tolerance, rtol=tolerance)


@pytest.mark.slow_cases("*-b64-*", "*-h4_4-*", "*-q16-*", "*-q5-*", "L512_5_129-*")
@pytest.mark.parametrize("case", CASES + WIDE, ids=str)
def test_matches_dense_attention(case: Case) -> None:
    check(case, ONE_SPLIT, tile=16 if max(case.seq_lens) < 200 else 64)


@pytest.mark.slow_cases(but=["*-full", "*-h3_1-*", "*-q3-*"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if 60 < max(case.seq_lens) < 400][::2] + WIDE[-2:-1], ids=str
)
def test_split_rows_match_dense_attention(case: Case) -> None:
    check(case, 48)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_matches_dense_attention_on_any_sizes(seed: int) -> None:
    split_tokens, tile = (16, 32, 48)[seed % 3], (16, 32)[seed % 2]
    check(any_case(seed, max_queries=16), split_tokens, seed, tile=tile)


SPLITS = [((90, 1, 0, 17), 1, None), ((16, 33) * 8, 40, 50), ((5,), 7, None), ((90,) * 3, 13, 50)]


@pytest.mark.slow
@pytest.mark.parametrize(("seq_lens", "count", "window"), SPLITS)
def test_every_split_has_an_item(
    seq_lens: tuple[int, ...], count: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any `count` of multiprocessors."""
    monkeypatch.setattr(attention, "num_multiprocessors", lambda device: count)
    check(Case(seq_lens, heads=1, kv_heads=1, key_dim=16, value_dim=16, window=window), 16)


@pytest.mark.slow_cases("split")
@pytest.mark.parametrize("split_tokens", [16, ONE_SPLIT], ids=["split", "whole"])
def test_log_sum_exp(split_tokens: int) -> None:
    sizes = dict(heads=4, key_dim=16, value_dim=16)
    call = build(Case(seq_lens=(70, 0, 21), queries=2, starts=(0, 0, 21), **sizes))
    out, lse = run(call, split_tokens, return_lse=True)
    assert lse.shape == (3, 2, 4) and lse.dtype == torch.float32 and lse.is_contiguous()
    assert (lse[1:] == -math.inf).all() and not out[1:].any()
    # `(tokens, heads, dim)`, K heads repeated over their groups
    tokens, size = torch.arange(70), call.step.block_size
    keys = call.key_blocks[call.step.block_tables[0].long()[tokens // size], :, tokens % size]
    keys = keys.double().repeat_interleave(2, dim=1)
    for i, query in enumerate(call.query[0].double().transpose(0, 1)):
        scores = torch.einsum("hd,thd->ht", query, keys[: 69 + i]) * call.options["scale"]
        expected = scores.logsumexp(-1).float()
        torch.testing.assert_close(lse[0, i], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("rank", "rotary", "all_of_it"), [(512, 64, False), (64, 32, True), (32, 16, True)]
)
def test_latents_are_keys_and_values_in_one(rank: int, rotary: int, all_of_it: bool) -> None:
    dims = dict(key_dim=rank + rotary, value_dim=rank + rotary, dtype=torch.bfloat16)
    call = build(Case(seq_lens=(50, 3), heads=20, kv_heads=1, **dims))
    latents = call.key_blocks
    call = replace(call, value_blocks=latents if all_of_it else latents[..., :rank])
    out = run(call, 16, block_m=32)
    zeroed = (x.nan_to_num(0.0) for x in (latents, call.value_blocks))
    call = replace(call, **dict(zip(("key_blocks", "value_blocks"), zeroed)))
    torch.testing.assert_close(out, call.run("reference"), atol=2e-2, rtol=2e-2)


def test_dtypes_of_queries_and_blocks_may_differ() -> None:
    call = build(Case(seq_lens=(40, 5), key_dim=32, value_dim=32))
    names, blocks = ("key_blocks", "value_blocks"), (call.key_blocks, call.value_blocks)
    half = replace(call, **{name: x.bfloat16() for name, x in zip(names, blocks)})
    exact = replace(call, **{name: x.bfloat16().float() for name, x in zip(names, blocks)})
    torch.testing.assert_close(run(half, 16), exact.run("reference"), atol=2e-5, rtol=2e-5)


STEP, HALF = build(Case()).step, torch.zeros(2, 4, 20, 16, dtype=torch.float16)
SIZES = "block size 48: the kernels support powers of two from 4 to 16384"
UNREPRESENTED = "blocks of a dtype that the queries' torch.float16 cannot represent"
BIAS = "a bias that differs between queries, in rows of more than 16"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"query": torch.zeros(3, 14, 1, 64, dtype=torch.float64)}, "float64"),
    ({"key_blocks": torch.zeros(16, 2, 16, 640)}, "head dims 640 and 64: at most 576"),
    ({"key_blocks": torch.zeros(16, 2, 16, 128)[..., ::2]}, "not contiguous"),
    ({"key_blocks": torch.zeros(16, 1, 16, 64)}, "over 1 K and 2 V heads"),
    ({"query": torch.zeros(3, 14, 1, 64).requires_grad_()}, "requires a gradient"),
    ({"step": replace(STEP, block_size=48)}, SIZES),
    ({"step": replace(STEP, query_start=tuple(range(8194)))}, "8193 rows: at most 8192"),
    # of more queries per row, which the prefill kernel handles
    ({**PROMPT, "query": HALF}, UNREPRESENTED),
    (
        {**PROMPT, "value_blocks": torch.zeros(9, 2, 8, 520)},
        "values of 520 dimensions: at most 512",
    ),
    ({**PROMPT, "options": {"scale": 0.0}}, "a scale of 0.0: it must be positive"),
    ({**PROMPT, "options": {"bias": torch.zeros(2, 4, 20, 1)}}, BIAS),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_says_what_it_does_not_take(change: dict[str, Any], reason: str) -> None:
    found = unsupported_reason(replace(build(Case()), **change).made())
    assert found is not None and reason in found


def test_a_bias_too_short_raises_where_the_host_knows() -> None:
    call = build(Case(seq_lens=(40, 5)))
    with pytest.raises(IndexError, match=r"covers 39 positions, but seq_lens are \(40, 5\)"):
        attention._bias_arguments(torch.zeros(39), 14, 1, call.step)
