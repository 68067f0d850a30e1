"""The Triton prefill kernel against the reference, row by row."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hf_paged.attention.backends import reference
from hf_paged.kernels.triton import attention, configs
from tests.support.attention import SCALE, Packed, PackedCase, attend
from tests.support.kernels.device import DEVICE, available

pytestmark = available

STARTS = (3, 0, 17, 0, 8, 0)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case(PackedCase):
    splits: int = 1
    config: tuple[int, int] = (32, 16)  # block_m and tile

    def __str__(self) -> str:
        name = f"{super().__str__()}-m{self.config[0]}n{self.config[1]}"
        return name + (f"-s{self.splits}" if self.splits > 1 else "")


MIXED = ((19, 1), (0, 18), (17, 9), (0, 0), (20, 21), (0, 1))
CASES = [
    Case(((0, 1),)),
    Case(((0, 40),)),
    Case(((12, 23),)),
    Case(((0, 0), (4, 0), (3, 5))),
    Case(MIXED, config=(16, 16)),
    Case(MIXED, heads=14, kv_heads=2, block=64, config=(32, 16)),
    Case(MIXED, block=256, config=(16, 32)),
    Case(MIXED, block=4, config=(16, 32)),
    Case(((509, 8), (0, 3)), block=512, heads=3, kv_heads=1, window=60, config=(16, 32), splits=2),
    Case(MIXED, dtype=torch.bfloat16),
    Case(MIXED, dtype=torch.float16, config=(64, 32)),
    Case(MIXED, key_dim=80, value_dim=96),
    Case(MIXED, sinks=True, bias=True, starts=STARTS, splits=2),
    Case(((130, 5), (0, 3)), heads=4, splits=4),
    Case(((70, 3),), heads=2, kv_heads=1, key_dim=576, value_dim=512, dtype=torch.bfloat16),
]


class Built(Packed):
    """Block ids that must not be followed are far out of range."""

    def __init__(self, case: PackedCase, seed: int = 0) -> None:
        super().__init__(case, seed, unused=2**30)
        self.step = replace(self.step, block_tables=self.step.block_tables.to(DEVICE))


def expected_lse(built: Built) -> torch.Tensor:
    """The reference's log-sum-exp of each query and head, in float64."""
    # A sink, one more logit of 0, takes the share 1 / (1 + exp(lse)); taken from a sink and values
    # of one.
    keys, ones = built.blocks[0].double(), torch.ones_like(built.blocks[0][..., :1]).double()
    options = dict(scale=SCALE, softcap=built.case.softcap, bias=built.bias)
    zero, shares = torch.zeros(built.case.heads, dtype=torch.float64), []
    for query, step in built.alone():
        share = attend(reference, query.double(), keys, ones, step, sinks=zero, **options)
        shares.append(share[0, ..., 0])
    lse = torch.logit(torch.cat(shares))
    return lse if built.sinks is None else torch.logaddexp(lse, built.sinks.double())


def run(built: Built, config: tuple[int, int] | None = None, **options: Any) -> Any:
    # keeps a view of the pool a view: `.to` keeps strides only of dense tensors
    pools = [
        torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)
        for x in built.blocks
    ]
    query, sinks, bias = (
        x if x is None else x.to(DEVICE) for x in (built.query, built.sinks, built.bias)
    )
    options |= dict(scale=SCALE, softcap=built.case.softcap, sinks=sinks, bias=bias)
    if config is not None:
        options["config"] = configs.LaunchConfig(*config[::-1], num_warps=4, num_stages=2)
    with torch.no_grad():
        return attention.prefill_attention(query, *pools, built.step, **options)


def compare(built: Built, config: tuple[int, int] | None = None, **options: Any) -> None:
    """The output, and the partial results that are merged into it."""
    output = run(built, config, **options)
    parts, lse = run(built, config, is_merged=False, **options)
    assert output.dtype == built.case.dtype and parts.dtype == lse.dtype == torch.float32
    weights = lse.double().softmax(0).nan_to_num(0.0)[..., None]
    merged = torch.where(weights > 0, weights * parts, 0.0).sum(0)
    tolerance, wanted = TOLERANCE[built.case.dtype], built.expected()
    lse = lse.double().logsumexp(0)
    for found, its in ((output, wanted), (merged, wanted), (lse, expected_lse(built))):
        torch.testing.assert_close(found.double().cpu(), its, atol=tolerance, rtol=tolerance)


def check(case: Case, seed: int = 0) -> None:
    compare(Built(case, seed), case.config, num_splits=case.splits)


@pytest.mark.slow_cases("*-s4", "0+40-*", "19+1_0+18_17+9_0+0_20+21_0+1-*")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_row_gets_what_the_reference_gives_it(case: Case) -> None:
    check(case)


FEATURES: dict[str, Any] = {
    "block": (4, 8, 16, 32),
    "key_dim": (8, 16, 24),
    "value_dim": (8, 16, 40),
    "window": (None, None, 1, 5, 16, 33),
    "causal": (True, True, True, False),
    "softcap": (None, None, 2.0),
    "sinks": (False, True),
    "bias": (False, False, False, True),
    "splits": (1, 1, 2, 3),
    "config": ((16, 16), (16, 32), (32, 16)),
    "joined": (False, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_any_combination_gives_what_the_reference_gives(seed: int) -> None:
    draw = random.Random(seed)
    rows = [(draw.randint(0, 30), draw.randint(0, 20)) for _ in range(draw.randint(1, 3))]
    rows.append((9, 1))
    starts = tuple(draw.randint(0, context) for context, _ in rows)
    kv_heads = draw.randint(1, 3)
    features = {name: draw.choice(choices) for name, choices in FEATURES.items()}
    features |= dict(kv_heads=kv_heads, heads=kv_heads * draw.randint(1, 5))
    check(Case(tuple(rows), starts=starts if seed % 4 == 0 else None, **features), seed)


@pytest.mark.slow
def test_more_rows_than_one_load_and_default_tiles_and_splits() -> None:
    check(Case(rows=tuple((row % 3, row % 2) for row in range(260)), heads=1, kv_heads=1))
    compare(Built(Case(((700, 20), (0, 90)), block=16)), num_splits=None)
