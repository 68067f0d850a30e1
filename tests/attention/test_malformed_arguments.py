"""Mismatched keys, values, tables and slots raise an error, never touch foreign memory and never
crash."""

from __future__ import annotations

import contextlib
import re
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
from tests.support.kernel_fuzz import Draws

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
    cache, first = PagedCache(paged_config={"block_size": 8}), torch.randn(2, 2, 4, 8)
    message = (
        f"layer 0 got keys of shape {keys} and values of shape {values}: both must be (batch,"
        " heads, tokens, dim), with the same batch size and number of tokens"
    )
    for length in (0, 4):
        with pytest.raises(ValueError, match=re.escape(message)):
            cache.update(torch.randn(keys), torch.randn(values), 0)
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
    kernel = Attention(a["query"], a["key_blocks"], a["value_blocks"], scale=0.3, sinks=a["sinks"])
    step = StepMetadata.rectangle(
        a["block_tables"],
        a["seq_lens"].tolist(),
        a["block_size"],
        query_len=a["query_len"],
        window=a["window"],
        lengths=Lengths(a["seq_lens"], a["starts"]),
    )
    return kernel(a.get("other_query", a["query"]), step, a.get("other_sinks", a["sinks"]), bias)


def store(a: dict[str, Any]) -> None:
    """`made_for`: arguments of the valid call, for which a kernel is prepared."""
    made = a.get("made_for", a)
    states = made["keys"], made["values"]
    kernel = Store(*states, a["key_blocks"], a["value_blocks"], made["slots"])
    kernel(a["keys"], a["values"], a["slots"])


def store_again(a: dict[str, Any]) -> None:
    store({**a, "made_for": arguments()})


ATTENDS, STORES, ALL = (attend, decode), (store, store_again), (attend, decode, store)
INT64 = torch.zeros(1, 3, dtype=torch.int64)


@built
@pytest.mark.parametrize(
    ("name", "value", "calls", "error"),
    [
        ("block_tables", INT64.new_zeros(3, 2), ATTENDS, "block_tables is torch.int64 on cpu"),
        ("block_tables", torch.zeros(3, 2, device="meta").int(), ATTENDS, "int32 on meta"),
        ("key_blocks", torch.randn(6, 0, 8, 16), ALL, r"\(6, 0, 8, 16\)"),
        ("value_blocks", torch.randn(6, 0, 8, 16), ALL, r"\(6, 0, 8, 16\)"),
        ("query", torch.randn(3, 4, 64), ATTENDS, r"\(6, 2, 8, 16\)"),
        ("other_query", torch.randn(3, 4, 16).half(), ATTENDS, "packed for"),
        ("other_sinks", None, ATTENDS, "packed for"),
        ("value_blocks", torch.randn(2, 2, 8, 16), ALL, r"\(2, 2, 8, 16\)"),
        ("seq_lens", torch.ones(2, dtype=torch.int32), ATTENDS, "for 3 rows"),
        ("starts", torch.tensor([0, -99, 0], dtype=torch.int32), ATTENDS, "starts are"),
        ("sinks", torch.randn(1), ATTENDS, "one for each of 4 heads"),
        (
            "keys",
            torch.randn(1, 2, 3, 64),
            (store,),
            r"keys of shape \(1, 2, 3, 64\), .* do not fit",
        ),
        ("keys", torch.randn(1, 2, 3, 64), (store_again,), "packed for"),
        ("values", torch.randn(1, 2, 1, 16), (store,), r"values of shape \(1, 2, 1, 16\)"),
        ("slots", INT64[:, :2], STORES, r"\(1, 2\)"),
        ("slots", INT64.int(), STORES, "slots are torch.int32"),
        ("slots", torch.arange(6)[None, ::2], STORES, r"strides \(6, 2\)"),
        ("slots", torch.tensor([[5]]).expand(1, 3), STORES, r"strides \(1, 0\)"),
        ("slots", INT64.to("meta"), STORES, "int64 on meta"),
        ("slots", INT64 + 48, STORES, "outside the pool of 6 blocks of 8 tokens"),
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


def fuzz(count: int) -> None:
    """Calls with one to three arguments distorted; prints how many were served and how many
    refused."""
    served = 0
    for number in range(count):
        given, draws = arguments(), Draws(str(number))
        for name in draws.sample(sorted(given), draws.one(1, 1, 2, 3)):
            value = given[name]
            if isinstance(value, torch.Tensor):
                given[name] = draws.one(
                    *(draws.other(value), value.long(), value[:0], value[None], value.flatten()),
                    *(value.transpose(0, -1), value[:1].expand_as(value)),
                    value + draws.one(-1000, -1, 1, 1000, 2**30),
                )
            else:
                given[name] = draws.one(0, 1, 2, 7, 16, -1, 1 << 40)
        for call in (attend, decode, store, store_again):
            with contextlib.suppress(TypeError, ValueError, IndexError, RuntimeError):
                call(given)
                served += 1
    print(served, 4 * count - served)


@pytest.mark.slow
@built
def test_no_arguments_crash_the_process() -> None:
    code = "from tests.attention.test_malformed_arguments import fuzz; fuzz(700)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    served, refused = map(int, done.stdout.split())
    assert served > 100 and refused > 1000
