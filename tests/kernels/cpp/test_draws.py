"""`cpp.multinomial` against `torch.multinomial`: the same draws and the same final generator
state."""

from __future__ import annotations

import random

import pytest
import torch

from hf_paged.kernels import cpp

built = pytest.mark.skipif(not cpp.is_available(), reason="no compiler")


@built
def test_this_build_of_torch_is_served() -> None:
    assert cpp._draws_as_torch()


@built
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000, 32000])
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
        assert torch.randn(3, generator=other).equal(torch.randn(3, generator=generator))


@built
def test_the_global_generator_moves_on() -> None:
    probs = torch.rand(4, 300)
    torch.manual_seed(3)
    expected = [torch.multinomial(probs, num_samples=1).squeeze(1) for _ in range(5)]
    after = torch.rand(1)
    torch.manual_seed(3)
    assert all(cpp.multinomial(probs).equal(row) for row in expected)
    assert torch.rand(1) == after


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_what_torch_refuses_raises_and_draws_nothing(value: float) -> None:
    probs = torch.full((2, 100), 0.01)
    probs[1, :] = 0.0
    probs[1, 40] = value
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="probabilit"):
        cpp.multinomial(probs)
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("kind", ["double", "half", "strided", "disagrees"])
def test_other_tensors_and_other_builds_go_to_torch(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probs = torch.rand(4, 300)
    if kind == "disagrees":
        monkeypatch.setattr(cpp, "_draws_as_torch", lambda: False)
    else:
        probs = {
            "double": probs.double(),
            "half": probs.half(),
            "strided": probs.t().contiguous().t(),
        }[kind]
    monkeypatch.setattr(cpp, "_draw", lambda *args: pytest.fail("the kernel does not serve this"))
    torch.manual_seed(5)
    expected = torch.multinomial(probs, num_samples=1).squeeze(1)
    torch.manual_seed(5)
    assert cpp.multinomial(probs).equal(expected)
