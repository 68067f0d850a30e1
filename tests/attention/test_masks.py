"""Masks that transformers describes: the parsed description, and materialized masks where code
reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import masking_utils

from hf_paged.attention.masks import MaskPattern, PagedMask, parse_mask, unpadded_columns

PAD = torch.zeros(2, dtype=torch.long)
CAUSAL, ALL = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
WINDOW = masking_utils.sliding_window_causal_mask_function


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (CAUSAL, MaskPattern(causal=True)),
        (ALL, MaskPattern(causal=False)),
        (WINDOW(7), MaskPattern(causal=True, window=7)),
        (masking_utils.chunked_causal_mask_function(5, PAD), MaskPattern(causal=True, chunk=5)),
        (masking_utils.sliding_window_bidirectional_mask_function(7), None),
        (masking_utils.or_masks(CAUSAL, ALL), None),
        (masking_utils.and_masks(CAUSAL, CAUSAL), None),
        (lambda b, h, q, k: k <= q, None),
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
    for each in (mask, mask.bool()):
        assert unpadded_columns(each, len(rows), mask.shape[1]) == expected
    assert unpadded_columns(None, 2, 5) == ((0, 0), (5, 5))
    for columns, seen in ((3, 3), (7, 5)):  # past its end a mask hides
        assert unpadded_columns(torch.ones(2, columns), 2, 5) == ((0, 0), (seen, seen))


def arguments(**kwargs: Any) -> dict[str, Any]:
    padding = torch.ones(2, 5, dtype=torch.bool)
    padding[0, 0] = False
    sizes = dict(batch_size=2, q_length=3, kv_length=5, q_offset=2)
    return {**sizes, "attention_mask": padding, "dtype": torch.float32, **kwargs}


def made(arguments: dict[str, Any], implementation: str) -> tuple[PagedMask, Any]:
    """Our mask, and the model's own."""
    pattern = parse_mask(arguments.get("mask_function", CAUSAL))
    assert pattern is not None
    own = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[implementation](**arguments)
    return PagedMask(arguments, implementation, pattern), own


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_any_operation_sees_what_the_model_s_own_mask_would_be(implementation: str) -> None:
    mask, own = made(arguments(), implementation)
    assert mask.shape == own.shape and mask.dtype == own.dtype
    assert torch.equal(torch.cat([mask, mask], 0), torch.cat([own, own], 0))
    everything = slice(None)
    for index in (
        (everything, everything, slice(0, 2)),
        (everything, everything, slice(None, None, 2)),
        (everything, everything, slice(3, None)),
        (everything, everything, 2),
        (slice(1, None),),
        (everything, everything, everything, slice(1, None)),
        (everything, everything, torch.tensor([2])),
    ):
        assert not isinstance(mask[index], PagedMask) and torch.equal(mask[index], own[index])
    with negated() as operation:
        if implementation == "eager":  # sdpa masks are booleans
            assert torch.equal(operation(mask=mask), -own)
    flash = PagedMask(arguments(), "flash_attention_2", MaskPattern(causal=True))
    assert flash.dtype == flash.dense().dtype


@contextmanager
def negated() -> Iterator[Callable[..., torch.Tensor]]:
    """An operation that takes its tensor by keyword alone."""
    with torch.library._scoped_library("hf_paged_test", "FRAGMENT") as library:
        library.define("negated(*, Tensor mask) -> Tensor")
        library.impl("negated", lambda mask: -mask, "CompositeExplicitAutograd")
        yield torch.ops.hf_paged_test.negated


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_slice_of_the_last_queries_keeps_the_pattern(implementation: str) -> None:
    mask, own = made(arguments(mask_function=WINDOW(3)), implementation)
    for first in (0, 1, 2, -1):
        part = mask[:, :, first:, :]
        assert isinstance(part, PagedMask) and part.pattern == mask.pattern
        assert torch.equal(part.dense(), own[:, :, first:, :])
        left = range(3)[first:]
        assert part.arguments["q_length"] == len(left)
        assert part.arguments["q_offset"] == 2 + left.start
    assert isinstance(mask[:, :, -2:][..., :5][:, :, -1:], PagedMask), "of a slice, and all keys"


def test_resolve_keeps_the_skips_of_each_implementation() -> None:
    free, _ = made(arguments(attention_mask=None, q_length=5, q_offset=0), "sdpa")
    assert free.resolve("sdpa") is None, "sdpa takes is_causal instead"
    assert free.resolve("eager") is not None
    assert free.dense().shape == (2, 1, 5, 5)
    eager, _ = made(arguments(attention_mask=None, q_length=5, q_offset=0), "eager")
    with_options = eager.resolve("eager", allow_is_causal_skip=False)
    assert eager.resolve("eager") is with_options, "it never skips, and is made once"
    for skips in (False, True, False):  # it distinguishes the values of options
        mask = free.resolve("sdpa", allow_is_causal_skip=skips)
        assert (mask is None) == skips
