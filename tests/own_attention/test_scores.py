"""A model's custom attention code over packed K/V, against the same code over each sequence
alone. `tests/tape/test_rectangles.py` runs models that have some."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_paged import kernels
from hf_paged.attention import backends
from hf_paged.own_attention import row_tensors, with_key_len
from hf_paged.step import Lengths, NotCapturable, NotPackable, StepMetadata
from tests.attention.test_packed import DECODES, MIXED, PROMPTS, Built
from tests.support.attention import PackedCase as Case

LOWEST = torch.finfo(torch.float32).min


class Mine:
    """Inputs of a model's attention code: one sequence, or all sequences of a packed step."""

    def __init__(self, query: Tensor, key: Any, value: Any, positions: Tensor) -> None:
        self.query, self.key, self.value = query, key, value
        length = key.shape[-2]
        self.sees = torch.arange(length) <= positions[:, None]  # (T, key_len)
        self.mask = torch.where(self.sees, 0.0, LOWEST)[None, None]
        heads = torch.arange(1, query.shape[1] + 1)[:, None, None]
        self.alibi = 0.3**heads * torch.arange(length)

    @property
    def scores(self) -> Any:
        return self.query @ self.key.transpose(-1, -2)

    def sdpa(self, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(self.query, self.key, self.value, **options)


def beta_0(x: Mine) -> Tensor:
    """The first argument of `baddbmm` does not count."""
    heads, queries, dim = x.query.shape[1:]
    empty = torch.full((heads, queries, x.key.shape[-2]), math.nan)
    key = x.key.reshape(heads, -1, dim).transpose(-1, -2)
    scores = torch.baddbmm(empty, x.query[0], key, beta=0, alpha=0.4)
    return F.softmax(scores.view(1, heads, queries, -1) + x.mask, dim=-1) @ x.value


def falcon(x: Mine) -> Tensor:
    scores = x.scores
    scores += x.alibi[None]
    scores /= math.sqrt(7)
    return F.softmax(scores + x.mask, dim=-1) @ x.value


def biased_mask(x: Mine) -> Tensor:
    return x.sdpa(attn_mask=torch.masked_fill(x.alibi[None], ~x.sees, LOWEST))


def boolean_mask(x: Mine) -> Tensor:
    mask = x.sees[None, None] & (torch.arange(x.key.shape[-2]) % 5 != 3)
    return x.sdpa(attn_mask=mask, scale=0.2)


def gptj(x: Mine) -> Tensor:
    scores = torch.matmul(x.query.to(torch.float32), x.key.to(torch.float32).permute(0, 1, 3, 2))
    scores = torch.max(x.mask + scores / torch.tensor(4.0), torch.tensor(LOWEST))
    return torch.matmul(torch.nn.Softmax(dim=-1)(scores).type_as(x.value), x.value)


def in_place(x: Mine) -> Tensor:
    """Statements whose results are not used, on the scores or on a view of them."""
    scores = x.scores
    view = scores.view(scores.shape[1:])
    view.mul_(0.4).add_(x.alibi)
    scores.div_(1.5)
    scores.masked_fill_(~x.sees, LOWEST).clamp_min_(LOWEST)
    return F.softmax(view.view(scores.shape), -1) @ x.value


def copies_in_place(x: Mine) -> Tensor:
    """Copies of the scores change, which the scores do not."""
    scores = x.scores
    for copy in (
        scores + x.mask,
        scores.masked_fill(~x.sees, LOWEST),
        scores.clamp_min(LOWEST),
        scores.to(torch.float64),
        scores.to(scores.dtype, copy=True),
    ):
        copy += x.alibi[None].to(copy.dtype)
        copy *= 3
    masked = scores + x.mask
    weights = F.softmax(masked, dim=-1)
    masked.mul_(2)
    return weights @ x.value


def keys_of(x: Mine) -> Tensor:
    return x.key.view(x.key.shape[1:]).transpose(-1, -2)


WORDS = [beta_0, falcon, biased_mask, boolean_mask, gptj, in_place, copies_in_place]


def packed(case: Case) -> tuple[Built, Mine]:
    built = Built(case)
    step = with_key_len(built.step)
    sides = row_tensors(step, built.kv_blocks, (case.dtype, case.dtype))
    positions = torch.cat([torch.arange(context, context + query) for context, query in case.rows])
    return built, Mine(built.queries, *sides, positions)


def assert_as_alone(case: Case, attend: Callable[[Mine], Tensor]) -> None:
    """Asserts that the code computes for packed rows what it does for each sequence alone."""
    built, mine = packed(case)
    outputs, first = [], 0
    for (context, query), table in zip(case.rows, built.tables):
        length = context + query
        states = (x[:, :, :length] for x in built.whole(table))
        queries = built.queries[:, :, first : first + query]
        outputs.append(attend(Mine(queries, *states, torch.arange(context, length))))
        first += query
    output, expected = attend(mine), torch.cat(outputs, dim=2)
    assert type(output) is Tensor and output.shape == expected.shape
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", ["", "gather", "reference"])
@pytest.mark.parametrize("rows", [DECODES, PROMPTS, MIXED, ((0, 70), (3, 66)), ((0, 1),)], ids=str)
@pytest.mark.parametrize("words", WORDS)
@torch.no_grad()
def test_own_words_over_packed_rows(
    words: Any, rows: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, backend)
    assert_as_alone(Case(rows, heads=4, kv_heads=4), words)


@torch.no_grad()
def test_one_head_of_keys_for_all_queries() -> None:
    assert_as_alone(Case(MIXED, heads=4, kv_heads=1), falcon)


REFUSED: dict[str, Callable[[Mine], Any]] = {
    "read": lambda x: x.key.sum(),
    "indexed": lambda x: x.key[:, :, -1:],
    "concatenated": lambda x: torch.cat([x.key, x.key], dim=2),
    "values first": lambda x: x.query @ x.value,
    "no softmax": lambda x: x.scores @ x.value,
    "two softmaxes": lambda x: x.scores.softmax(-1).softmax(-1) @ x.value,
    "another axis": lambda x: x.scores.softmax(1) @ x.value,
    "weights plus": lambda x: (x.scores.softmax(-1) + x.mask) @ x.value,
    "negative scale": lambda x: x.scores * -1,
    "scores times scores": lambda x: x.scores * x.mask,
    "filled with zeros": lambda x: x.scores.masked_fill(x.sees, 0.0),
    "dropout": lambda x: F.dropout(x.scores.softmax(-1), 0.1, training=True),
    "tanh": lambda x: torch.tanh(x.scores),
    "weights taken out": lambda x: x.scores.softmax(-1).tolist(),
    "fewer queries": lambda x: x.query[:, :, 1:] @ x.key.transpose(-1, -2),
    "shape": lambda x: x.key.reshape(1, -1, 2 * x.key.shape[-1]),
    "heads last": lambda x: x.key.transpose(1, 2),
    "integers": lambda x: x.key.to(torch.int64),
    "no mask": lambda x: x.sdpa(),
    "causal by index": lambda x: x.sdpa(is_causal=True),
    "divided by scores": lambda x: torch.tensor(2.0) / x.scores,
    "transposed by name": lambda x: x.key.transpose(dim0=-1, dim1=-2),
    "permuted by name": lambda x: x.key.permute(dims=(0, 1, 3, 2)),
    "memory format": lambda x: x.key.contiguous(memory_format=torch.contiguous_format),
    "maximum by name": lambda x: x.scores.max(dim=-1, keepdim=True),
    "scaled bias": lambda x: torch.add(x.scores, x.mask, alpha=2),
    "rounded": lambda x: torch.div(x.scores, 2.0, rounding_mode="floor"),
    "written elsewhere": lambda x: torch.softmax(x.scores, -1, out=torch.empty(0)),
    "keys in place": lambda x: x.key.transpose_(-1, -2),
    "weights in place": lambda x: x.scores.softmax(-1).mul_(2),
    "scores into a mask": lambda x: x.mask.clone().add_(x.scores),
    "scores into a buffer": lambda x: torch.empty(4, 8, 8).baddbmm_(
        x.query[0], x.key.reshape(x.key.shape[1:]).transpose(1, 2)
    ),
    "products into scores": lambda x: (x.query[0] @ keys_of(x)).baddbmm_(
        x.query[0] * 2, keys_of(x), beta=0
    ),
    "copied": lambda x: x.query.to(x.key, copy=True),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
@torch.no_grad()
def test_nothing_else_is_done_with_packed_rows(what: str) -> None:
    _, mine = packed(Case(MIXED, heads=4, kv_heads=4))
    with pytest.raises(NotPackable):
        REFUSED[what](mine)


@pytest.mark.parametrize("attend", [gptj, falcon], ids=["matmul", "operator"])
@torch.no_grad()
def test_a_type_error_of_the_backends_is_not_hidden(
    attend: Callable[[Mine], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by `@`, for which torch takes a `TypeError` for `NotImplemented`."""

    def fail(*args: Any) -> None:
        raise TypeError("a fault of ours")

    _, mine = packed(Case(MIXED, heads=4, kv_heads=4))
    monkeypatch.setattr(backends, "attend", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        attend(mine)


@torch.no_grad()
def test_softmax_takes_the_dtype_by_position_and_by_name() -> None:
    _, x = packed(Case(MIXED, heads=4, kv_heads=4, dtype=torch.bfloat16))
    assert torch.softmax(x.scores, -1).dtype is torch.bfloat16
    for found in (
        torch.softmax(x.scores, -1, torch.float32),
        torch.softmax(x.scores, -1, dtype=torch.float32),
        F.softmax(x.scores, -1, 3, torch.float32),
    ):
        assert found.dtype is torch.float32


def test_steps_that_show_no_rows() -> None:
    tables = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(NotPackable, match="window"):
        with_key_len(StepMetadata.rectangle(tables, (3, 4), 8, window=5))
    lengths = Lengths(torch.ones(2), torch.zeros(2))
    with pytest.raises(NotCapturable, match="several queries"):
        with_key_len(StepMetadata.rectangle(tables, (), 8, query_len=2, lengths=lengths))
    decodes = StepMetadata.rectangle(tables, (), 8, lengths=lengths)
    assert with_key_len(decodes).key_len == 8  # what the tables have room for
