"""Rotary factors that depend on the longest position: each packed token gets those of its
sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from hf_paged.model.rope import LengthRope, find_length_rope
from tests.batching.test_packed_families import build


def rope_of(model: Any) -> LengthRope:
    found = find_length_rope(model, model.modules())
    assert found is not None
    return found


def rotary_of(model: Any) -> Any:
    return next(module for module in model.modules() if hasattr(module, "rope_type"))


def state_of(module: Any) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    tensors = [x for x in module._buffers.values() if x is not None]
    return dict(vars(module)), dict(module._buffers), [x._version for x in tensors]


def test_other_models_have_none() -> None:
    model = build("bloom")
    assert find_length_rope(model, model.modules()) is None
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64, vocab_size=9)
    )
    assert find_length_rope(llama, llama.modules()) is None


def test_what_stands_for_factors() -> None:
    longrope, dynamic, phi3 = (rope_of(build(name)) for name in ("longrope", "dynamic", "phi3"))
    assert [longrope.factors_id(length) for length in (1, 32, 33, 90)] == [0, 0, 33, 33]
    assert [dynamic.factors_id(length) for length in (1, 32, 33, 90)] == [0, 0, 33, 90]
    assert [each.must_recompute for each in (longrope, dynamic, phi3)] == [False, False, True]
    assert dynamic.token_factors(30, 35, 31, 35) == [0, 0, 33, 34, 35], (
        "past tokens keep what they had"
    )
    assert dynamic.token_factors(3, 5, 40, 40) == [40, 40], (
        "a chunk of a prompt has those of the whole"
    )
    assert longrope.token_factors(3, 5, 40, 40) == [33, 33]
    assert phi3.token_factors(3, 5, 8, 32) == [0, 0] and phi3.token_factors(3, 5, 8, 33) == [33, 33]


@pytest.mark.parametrize("name", ["longrope", "dynamic", "phi3"])
@pytest.mark.parametrize("before", [None, 40, 70])
@torch.no_grad()
def test_each_token_gets_the_table_of_its_own_length(name: str, before: int | None) -> None:
    """Whatever state a plain forward has left in the module; leaves none itself."""
    model = build(name)
    rope, rotary = rope_of(model), rotary_of(model)
    hidden = torch.zeros(1, 1, 8)

    def table(length: int, positions: list[int]) -> Any:
        rotary(hidden, torch.tensor([[0]]))  # as fresh
        cosines, sines = rotary(hidden, torch.tensor([[*positions, length - 1]]))
        return cosines[:, :-1], sines[:, :-1]

    rows = [(3, [2]), (50, [49]), (33, [4, 5, 32]), (50, [7]), (34, [33])]  # lengths and positions
    expected = [
        torch.cat(parts, dim=1)
        for parts in zip(*(table(length, positions) for length, positions in rows))
    ]
    rotary(hidden, torch.tensor([[0 if before is None else before]]))
    assert rope.has_short_factors == (before is None or name != "dynamic")
    held = state_of(rotary)
    factors = [rope.factors_id(length) for length, positions in rows for _ in positions]
    with rope.rotating(factors):
        found = rotary(
            hidden, position_ids=torch.tensor([[p for _, positions in rows for p in positions]])
        )
    for table_found, table_expected in zip(found, expected):
        torch.testing.assert_close(table_found, table_expected, rtol=0, atol=0)
    now = state_of(rotary)
    assert all(now[0][key] is held[0][key] for key in held[0]) and now[0].keys() == held[0].keys()
    assert all(now[1][key] is held[1][key] for key in held[1]) and now[2] == held[2]
    rotary(hidden, torch.tensor([[0]]))


def test_a_forward_that_fails_leaves_the_modules_as_they_were() -> None:
    model = build("dynamic")
    rope, rotary = rope_of(model), rotary_of(model)
    held = state_of(rotary)
    with pytest.raises(KeyError), rope.rotating([40]):
        rotary(torch.zeros(1, 1, 8), torch.tensor([[3]]))
        raise KeyError
    now = state_of(rotary)
    assert (
        now[2] == held[2]
        and all(now[1][key] is held[1][key] for key in held[1])
        and not rotary._forward_hooks
    )
