"""Mismatched keys, values, tables and slots raise an error, never touch foreign memory and never
crash."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged import PagedCache
from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.attention import Attention, Store
from hf_paged.step import Lengths, StepMetadata

ROOT = Path(__file__).resolve().parents[2]
built = pytest.mark.skipif(not cpp.is_available(), reason="no compiler")


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ((2, 2, 5, 8), (2, 2, 3, 8)),
        ((2, 2, 5, 8), (1, 2, 5, 8)),
        ((2, 2, 5, 8), (2, 5, 8)),
        ((2, 2, 3, 8), (2, 2, 5, 8)),
    ],
    ids=str,
)
def test_keys_and_values_of_different_tokens_are_refused(
    keys: tuple[int, ...], values: tuple[int, ...]
) -> None:
    cache = PagedCache(paged_config={"block_size": 8})
    first = torch.randn(2, 2, 4, 8)
    for length in (0, 4):
        with pytest.raises(ValueError) as caught:
            cache.update(torch.randn(keys), torch.randn(values), 0)
        assert (
            str(caught.value)
            == f"layer 0 got keys of shape {keys} and values of shape {values}: both need (batch,"
            " heads, tokens, dim), with one batch size and one number of tokens"
        )
        assert cache.get_seq_length() == length
        cache.check_integrity()
        if not length:
            cache.update(first, first, 0)
    assert torch.equal(cache.layers[0].values.clone(), first)


def arguments() -> dict[str, Any]:
    """Arguments of a valid call: 3 rows of one query each, 4 heads over 2, in 6 blocks of 8
    tokens."""
    blocks = torch.randn(6, 4, 8, 16)
    return {
        "query": torch.randn(3, 4, 16),
        "key_blocks": blocks[:, :2],
        "value_blocks": blocks[:, 2:],
        "block_tables": torch.arange(6, dtype=torch.int32).view(3, 2),
        "seq_lens": torch.tensor([3, 16, 9], dtype=torch.int32),
        "starts": torch.zeros(3, dtype=torch.int32),
        "keys": torch.randn(1, 2, 3, 16),
        "values": torch.randn(1, 2, 3, 16),
        "slots": torch.tensor([[3, 47, 9]]),
        "sinks": torch.randn(4),
        "bias": torch.randn(3, 1, 1, 16),
        "query_len": 1,
        "block_size": 8,
        "window": None,
    }


def attend(a: dict[str, Any]) -> torch.Tensor:
    return decode(a, bias=a["bias"])


def decode(a: dict[str, Any], bias: torch.Tensor | None = None) -> torch.Tensor:
    query, query_len = a["query"], a["query_len"]
    kernel = Attention(query, a["key_blocks"], a["value_blocks"], scale=0.3, sinks=a["sinks"])
    lengths = Lengths(a["seq_lens"], a["starts"])
    step = StepMetadata.rectangle(
        a["block_tables"],
        a["seq_lens"].tolist(),
        a["block_size"],
        query_len=query_len,
        window=a["window"],
        lengths=lengths,
    )
    return kernel(query, step, a["sinks"], bias)


def store(a: dict[str, Any]) -> None:
    kernel = Store(a["keys"], a["values"], a["key_blocks"], a["value_blocks"], a["slots"])
    kernel(a["keys"], a["values"], a["slots"])


def store_again(a: dict[str, Any]) -> None:
    slots = torch.tensor([[3, 47, 9]])
    Store(a["keys"], a["values"], a["key_blocks"], a["value_blocks"], slots)(
        a["keys"], a["values"], a["slots"]
    )


@built
@pytest.mark.parametrize(
    ("name", "value", "calls", "error"),
    [
        (
            "block_tables",
            torch.zeros(3, 2, dtype=torch.int64),
            (attend, decode),
            "block_tables is torch.int64 on cpu",
        ),
        (
            "block_tables",
            torch.zeros(3, 2, dtype=torch.int32, device="meta"),
            (attend, decode),
            "int32 on meta",
        ),
        ("key_blocks", torch.randn(6, 0, 8, 16), (attend, decode, store), r"\(6, 0, 8, 16\)"),
        ("value_blocks", torch.randn(6, 0, 8, 16), (attend, decode, store), r"\(6, 0, 8, 16\)"),
        ("query", torch.randn(3, 4, 64), (attend, decode), r"\(6, 2, 8, 16\)"),
        ("value_blocks", torch.randn(2, 2, 8, 16), (attend, decode, store), r"\(2, 2, 8, 16\)"),
        ("seq_lens", torch.ones(2, dtype=torch.int32), (attend, decode), "for 3 rows"),
        ("starts", torch.tensor([0, -99, 0], dtype=torch.int32), (attend, decode), "starts are"),
        ("sinks", torch.randn(1), (attend, decode), "one for each of 4 heads"),
        (
            "keys",
            torch.randn(1, 2, 3, 64),
            (store, store_again),
            r"keys of shape \(1, 2, 3, 64\), .* do not fit",
        ),
        (
            "values",
            torch.randn(1, 2, 1, 16),
            (store, store_again),
            r"values of shape \(1, 2, 1, 16\)",
        ),
        ("slots", torch.zeros(1, 2, dtype=torch.int64), (store, store_again), r"\(1, 2\)"),
        (
            "slots",
            torch.zeros(1, 3, dtype=torch.int32),
            (store, store_again),
            "slots are torch.int32",
        ),
        (
            "slots",
            torch.tensor([[0, 1, 2, 3, 4, 5]])[:, ::2],
            (store, store_again),
            r"strides \(6, 2\)",
        ),
        ("slots", torch.tensor([[5]]).expand(1, 3), (store, store_again), r"strides \(1, 0\)"),
        (
            "slots",
            torch.zeros(1, 3, dtype=torch.int64, device="meta"),
            (store, store_again),
            "int64 on meta",
        ),
        (
            "slots",
            torch.tensor([[0, 48, 1]]),
            (store, store_again),
            "outside the pool of 6 blocks of 8 tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_cpp_entry_points_name_what_does_not_fit(
    name: str, value: Any, calls: Any, error: str
) -> None:
    given = arguments()
    for call in calls:
        call(given)
        before = given["key_blocks"].clone()
        with pytest.raises((TypeError, ValueError, IndexError), match=error):
            call({**given, name: value})
        assert torch.equal(given["key_blocks"], before)


def others(x: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of another dtype, size, layout or device."""
    return [
        x.half(),
        x[..., :8],
        x[:, :1],
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.to("meta"),
    ]


@built
def test_prepared_attention_refuses_what_it_was_not_made_for() -> None:
    a = arguments()
    kernel = Attention(a["query"], a["key_blocks"], a["value_blocks"], scale=0.3, sinks=a["sinks"])
    step = StepMetadata.rectangle(a["block_tables"], a["seq_lens"].tolist(), 8)
    expected = kernel(a["query"], step, a["sinks"])
    for query in others(a["query"]):
        with pytest.raises(ValueError, match="packed for"):
            kernel(query, step, a["sinks"])
    for sinks in (None, a["sinks"].half(), a["sinks"][:1], torch.randn(8)[::2]):
        with pytest.raises(ValueError, match="packed for"):
            kernel(a["query"], step, sinks)
    assert torch.equal(kernel(a["query"].clone(), step, a["sinks"].clone()), expected)


@built
def test_prepared_store_refuses_what_it_was_not_made_for() -> None:
    a = arguments()
    keys, values, slots = a["keys"], a["values"], a["slots"]
    kernel = Store(keys, values, a["key_blocks"], a["value_blocks"], slots)
    before = a["key_blocks"].clone(), a["value_blocks"].clone()
    for other in others(keys[0]):
        for given in ((other[None], values), (keys, other[None])):
            with pytest.raises(ValueError, match="packed for"):
                kernel(*given, slots)
    assert torch.equal(a["key_blocks"], before[0]) and torch.equal(a["value_blocks"], before[1])
    kernel(keys.clone(), values.clone(), slots)
    assert torch.equal(a["key_blocks"][0, :, 3], keys[0, :, 0])


@built
def test_spans_and_draws_that_are_none() -> None:
    for starts, sizes in (([0], [8]), ([64], [-1]), ([64], [])):
        with pytest.raises(ValueError, match=r"no address|sizes"):
            cpp.hash_memory(starts, sizes)
    for probs in (
        torch.zeros(2, 0),
        torch.full((2, 3), float("nan")),
        torch.zeros(3),
        torch.zeros(1, 2, 3),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            cpp.multinomial(probs)
    assert cpp.multinomial(torch.zeros(0, 3)).shape == (0,)


def distort(choose: random.Random, value: Any) -> Any:
    """Another value of about the same kind."""
    if not isinstance(value, torch.Tensor):
        return choose.choice([0, 1, 2, 7, 16, -1, 1 << 40])
    what = choose.randrange(9)
    if what == 0:
        dtypes = [
            torch.int64,
            torch.int32,
            torch.float16,
            torch.float64,
            torch.bfloat16,
            torch.bool,
        ]
        return value.to(choose.choice(dtypes))
    if what == 1:
        return value.transpose(choose.randrange(value.dim()), choose.randrange(value.dim()))
    if what == 2:
        return value.to("meta")
    if what == 3:
        return value.flatten() if choose.random() < 0.5 else value[None]
    if what == 4 and not value.is_floating_point():
        return value + choose.choice([-1000, -1, 1, 1000, 2**30])
    if what == 5:
        return value.new_zeros([0] * value.dim())
    sizes = list(value.shape)
    sizes[choose.randrange(len(sizes))] = choose.choice([0, 1, 2, 3, 5, 33])
    if what == 6:
        return value.flatten()[:1].expand(sizes) if value.numel() else value
    return value.new_zeros(sizes)


def fuzz(seed: int, count: int) -> None:
    """Calls with one to three arguments distorted; prints how many were served and how many
    refused."""
    choose, served, refused = random.Random(seed), 0, 0
    for _ in range(count):
        given = arguments()
        for name in choose.sample(sorted(given), choose.choice([1, 1, 2, 3])):
            given[name] = distort(choose, given[name])
        for call in (attend, decode, store, store_again):
            try:
                call(given)
                served += 1
            except (TypeError, ValueError, IndexError, RuntimeError, NotImplementedError):
                refused += 1
    print(served, refused)


@pytest.mark.slow
@built
def test_no_arguments_crash_the_process() -> None:
    code = "from tests.attention.test_malformed_arguments import fuzz; fuzz(0, 700)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    served, refused = map(int, done.stdout.split())
    assert served > 100 and refused > 1000
