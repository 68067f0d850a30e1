"""`cpp.multinomial` against `torch.multinomial`: the same draws and the same final generator
state."""

from __future__ import annotations

import random

import pytest
import torch

from hf_paged.kernels import cpp


@pytest.mark.skipif(not cpp.is_available(), reason="no compiler")
@pytest.mark.parametrize("size", [1, 63, 64, 65, 32000])
def test_draws_are_those_of_torch(size: int) -> None:
    draw = random.Random(size)
    for case in range(30):
        generator = torch.Generator()
        generator.manual_seed(case)
        if case % 3:
            # anywhere within a block of words, an odd number already drawn, a normal variate
            # pending
            torch.rand(draw.randrange(1300), generator=generator)
            torch.randn(1, generator=generator)
        other = generator.clone_state()
        scores = torch.randn(draw.randint(1, 5), size) * draw.choice([0, 1, 5, 30])
        if case % 5 == 0 and size > 5:
            scores[:, torch.randperm(size)[: size // 2]] = float("-inf")
        probs = scores.softmax(dim=-1)
        expected = torch.multinomial(probs, num_samples=1, generator=generator).squeeze(1)
        assert cpp._draw(probs, other).equal(expected)
        assert other.get_state().equal(generator.get_state())


@pytest.mark.skipif(not cpp.is_available(), reason="no compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_check_of_draws_passes_with_any_default_dtype(dtype: torch.dtype) -> None:
    cpp._draws_like_torch.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        assert cpp._draws_like_torch()
    finally:
        torch.set_default_dtype(torch.float32)
        cpp._draws_like_torch.cache_clear()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_what_torch_refuses_raises_and_draws_nothing(value: float) -> None:
    probs = torch.full((2, 100), 0.01)
    probs[1, :] = 0.0
    probs[1, 40] = value
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="probabilit"):
        cpp.multinomial(probs)
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("kind", ["served", "double", "half", "strided", "disagrees"])
def test_others_go_to_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The global generator moves on as torch's."""
    probs = torch.rand(4, 300)
    if kind == "disagrees":
        monkeypatch.setattr(cpp, "_draws_like_torch", lambda: False)
    elif kind == "strided":
        probs = probs.t().contiguous().t()
    elif kind != "served":
        probs = getattr(probs, kind)()
    if kind != "served":
        monkeypatch.setattr(cpp, "_draw", lambda *args: pytest.fail("not the kernel's"))
    torch.manual_seed(5)
    expected = [torch.multinomial(probs, 1).flatten() for _ in range(3)] + [torch.rand(1)]
    torch.manual_seed(5)
    found = [cpp.multinomial(probs) for _ in range(3)] + [torch.rand(1)]
    assert all(map(torch.equal, found, expected))
    assert cpp._draws_like_torch() or kind == "disagrees" or not cpp.is_available()
