"""Masks that transformers describes: the parsed description, and materialized masks where code
reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils

from hf_paged.attention.masks import MaskPattern, PagedMask, parse_mask, unpadded_columns
from hf_paged.attention.observers import LookAhead

PAD = torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (masking_utils.causal_mask_function, MaskPattern(causal=True)),
        (masking_utils.bidirectional_mask_function, MaskPattern(causal=False)),
        (masking_utils.sliding_window_causal_mask_function(7), MaskPattern(causal=True, window=7)),
        (masking_utils.chunked_causal_mask_function(5, PAD), MaskPattern(causal=True, chunk=5)),
        (masking_utils.sliding_window_bidirectional_mask_function(7), None),
        (
            masking_utils.or_masks(
                masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
            ),
            None,
        ),
        (
            masking_utils.and_masks(
                masking_utils.causal_mask_function, masking_utils.causal_mask_function
            ),
            None,
        ),
        (lambda b, h, q, k: k <= q, None),
    ],
    ids=[
        "causal",
        "bidirectional",
        "window",
        "chunk",
        "window_bidirectional",
        "or",
        "and",
        "lambda",
    ],
)
def test_parse(function: Any, pattern: MaskPattern | None) -> None:
    assert parse_mask(function) == pattern


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["111", "011", "001"], ((0, 1, 2), (3, 3, 3))),
        (["110", "011"], ((0, 1), (2, 3))),
        (["000", "111"], ((0, 0), (0, 3))),
        (["101"], None),
        (["0110", "1101"], None),
    ],
)
def test_unpadded_columns(rows: list[str], expected: Any) -> None:
    mask = torch.tensor([[int(c) for c in row] for row in rows])
    assert unpadded_columns(mask, len(rows), mask.shape[1]) == expected
    assert unpadded_columns(mask.bool(), len(rows), mask.shape[1]) == expected


def test_unpadded_columns_of_no_mask_and_of_a_short_one() -> None:
    assert unpadded_columns(None, 2, 5) == ((0, 0), (5, 5))
    assert unpadded_columns(torch.ones(2, 3), 2, 5) == ((0, 0), (3, 3)), (
        "past its end the mask hides"
    )
    assert unpadded_columns(torch.ones(2, 7), 2, 5) == ((0, 0), (5, 5))


def arguments(**kwargs: Any) -> dict[str, Any]:
    padding = torch.tensor([[False, True, True, True, True], [True, True, True, True, True]])
    return (
        dict(
            batch_size=2,
            q_length=3,
            kv_length=5,
            q_offset=2,
            attention_mask=padding,
            dtype=torch.float32,
        )
        | kwargs
    )


def made(arguments: dict[str, Any], implementation: str) -> PagedMask:
    pattern = parse_mask(arguments.get("mask_function", masking_utils.causal_mask_function))
    assert pattern is not None
    return PagedMask(arguments, implementation, pattern)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_any_operation_sees_what_the_model_s_own_mask_would_be(implementation: str) -> None:
    given = arguments()
    mask = made(given, implementation)
    own = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[implementation](**given)
    assert mask.shape == own.shape and mask.dtype == own.dtype
    assert torch.equal(mask[:, :, -1:], own[:, :, -1:])
    assert torch.equal(torch.cat([mask, mask], 0), torch.cat([own, own], 0))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_slice_of_the_last_queries_keeps_the_pattern(implementation: str) -> None:
    given = arguments(mask_function=masking_utils.sliding_window_causal_mask_function(3))
    mask = made(given, implementation)
    own = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[implementation](**given)
    for first in (0, 1, 2, -1):
        part = mask[:, :, first:, :]
        assert isinstance(part, PagedMask) and part.pattern == mask.pattern
        assert torch.equal(part.dense(), own[:, :, first:, :])
        arguments_of_part = part.arguments["q_length"], part.arguments["q_offset"]
        assert arguments_of_part == (len(range(3)[first:]), 2 + range(3)[first])
    assert isinstance(mask[:, :, -2:][..., :5][:, :, -1:], PagedMask), "of a slice, and all keys"


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(None), slice(0, 2)),
        (slice(None), slice(None), slice(None, None, 2)),
        (slice(None), slice(None), slice(3, None)),
        (slice(None), slice(None), 2),
        (slice(1, None),),
        (slice(None), slice(None), slice(None), slice(1, None)),
        (slice(None), slice(None), torch.tensor([2])),
    ],
    ids=["first queries", "every other", "none", "one", "rows", "keys", "picked"],
)
def test_other_slices_are_dense(index: Any) -> None:
    mask = made(arguments(), "sdpa")
    part = mask[index]
    assert not isinstance(part, PagedMask)
    assert torch.equal(part, masking_utils.sdpa_mask(**arguments())[index])


def test_resolve_keeps_the_skips_of_each_implementation() -> None:
    free = made(arguments(attention_mask=None, q_length=5, q_offset=0), "sdpa")
    assert free.resolve("sdpa") is None, "sdpa takes is_causal instead"
    assert free.resolve("eager") is not None
    assert free.dense().shape == (2, 1, 5, 5)


def test_resolve_distinguishes_the_values_of_options() -> None:
    mask = made(arguments(attention_mask=None, q_length=5, q_offset=0), "sdpa")
    assert mask.resolve("sdpa", allow_is_causal_skip=False) is not None
    assert mask.resolve("sdpa", allow_is_causal_skip=True) is None


def test_positions_that_saw_later_ones() -> None:
    sizes, causal = (2, 6, 6), torch.ones(6, 6, dtype=torch.bool).tril()
    arguments = {
        "batch_size": 2,
        "q_length": 6,
        "kv_length": 6,
        "mask_function": masking_utils.causal_mask_function,
    }
    looks = LookAhead([0, 2], 6)
    looks(sizes, None, True)
    looks(sizes, made(arguments, "sdpa"), False)
    looks((2, 9, 9), None, False)  # as from a vision tower
    found = looks.look_ahead_mask()
    assert looks.num_calls == 2 and found is not None and not found.any()
    mask = causal.expand(2, 1, 6, 6).clone()
    mask[0, :, 1, 3] = True  # 1 sees 3: the mask between may differ for both
    mask[1, :, 0, 5] = True  # padding may see anything
    mask[1, :, 4, 5] = True
    looks(sizes, mask, True)
    expected = [[0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]
    assert looks.look_ahead_mask().int().tolist() == expected
    looks(sizes, torch.zeros(2, 1, 6, 6).masked_fill(~causal, torch.finfo(torch.float32).min), True)
    assert looks.look_ahead_mask().int().tolist() == expected
    looks(sizes, torch.ones(2, 1, 6, 7, dtype=torch.bool), True)
    assert looks.look_ahead_mask() is None
    looks = LookAhead([0], 3)
    looks((1, 3, 3), None, False)
    assert looks.look_ahead_mask().all()
