"""Mismatched keys, values, tables and slots raise an error and never touch foreign memory.
`tests.support.kernel_fuzz` draws more of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_paged import PagedCache
from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.attention import Attention
from hf_paged.kernels.cpp.blocks import Gather, Store
from hf_paged.step import Lengths, StepMetadata

built = pytest.mark.skipif(not cpp.is_available(), reason="no compiler")


SHAPES = [((2, 2, 5, 8), values) for values in ((2, 2, 3, 8), (1, 2, 5, 8), (2, 5, 8))]


@pytest.mark.parametrize(("keys", "values"), [*SHAPES, ((2, 2, 3, 8), (2, 2, 5, 8))], ids=str)
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
    }


def attend(a: dict[str, Any]) -> torch.Tensor:
    return decode(a, bias=a["bias"])


def decode(a: dict[str, Any], bias: torch.Tensor | None = None) -> torch.Tensor:
    kernel = Attention(a["query"], a["key_blocks"], a["value_blocks"], scale=0.3, sinks=a["sinks"])
    lens, lengths = a["seq_lens"].tolist(), Lengths(a["seq_lens"], a["starts"])
    step = StepMetadata.rectangle(a["block_tables"], lens, 8, query_len=1, lengths=lengths)
    return kernel(a["query"], step, a["sinks"], bias)


def store(a: dict[str, Any]) -> None:
    states = a["keys"], a["values"]
    Store(*states, a["key_blocks"], a["value_blocks"], a["slots"])(*states, a["slots"])


ATTENDS, ALL = (attend, decode), (attend, decode, store)
INT64 = torch.zeros(1, 3, dtype=torch.int64)


MISFITS = [
    ("block_tables", INT64.new_zeros(3, 2), ATTENDS, "block_tables is torch.int64 on cpu"),
    ("block_tables", torch.zeros(3, 2, device="meta").int(), ATTENDS, "int32 on meta"),
    ("key_blocks", torch.randn(6, 0, 8, 16), ALL, r"\(6, 0, 8, 16\)"),
    ("value_blocks", torch.randn(6, 0, 8, 16), ALL, r"\(6, 0, 8, 16\)"),
    ("query", torch.randn(3, 4, 64), ATTENDS, r"\(6, 2, 8, 16\)"),
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
    ("values", torch.randn(1, 2, 1, 16), (store,), r"values of shape \(1, 2, 1, 16\)"),
    ("slots", torch.arange(6)[None, ::2], (store,), r"strides \(6, 2\)"),
    ("slots", torch.tensor([[5]]).expand(1, 3), (store,), r"strides \(1, 0\)"),
    ("slots", INT64.to("meta"), (store,), "int64 on meta"),
]


@built
@pytest.mark.parametrize(("name", "value", "calls", "error"), MISFITS)
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


GATHERED = {
    "block_tables": [[0, 1]],
    "columns": range(0, 10),
    "origins": (0,),
    "blocks": torch.zeros(4, 1, 8, 2),
}


def gathered(**changes: Any) -> torch.Tensor:
    a = {**GATHERED, **changes}
    ids = torch.tensor(a["block_tables"], dtype=torch.int32).view(1, -1)
    step = StepMetadata.rectangle(ids, (10,), 8, columns=a["columns"], origins=(0,))
    return Gather(a["blocks"])(replace(step, columns=a["columns"], origins=a["origins"]))


@built
def test_gathers_name_what_does_not_fit() -> None:
    assert gathered().shape == (1, 1, 10, 2)
    # the second block is not read
    assert gathered(block_tables=[[0, 9]], columns=range(0, 8)).shape == (1, 1, 8, 2)
    for tables in ([[0, 4]], [[0, -1]], [[0]]):
        with pytest.raises(IndexError, match="too few blocks for columns range"):
            gathered(block_tables=tables)
    with pytest.raises(ValueError, match="the step has 8 tokens per block, but the blocks have 4"):
        gathered(blocks=torch.zeros(4, 1, 4, 2))
    others = torch.zeros(4, 1, 8, 4)[..., ::2], torch.zeros(4, 8, 2)
    for blocks in (*others, torch.zeros(4, 1, 8, 2, device="meta")):
        with pytest.raises(ValueError, match=r"blocks are torch\.float32"):
            gathered(blocks=blocks)
    for wrong in ({"origins": ()}, {"columns": None}):
        with pytest.raises(ValueError, match="one origin and one table for each of 1 rows"):
            gathered(**wrong)
