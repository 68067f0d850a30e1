"""Operations allowed in a recorded step: values computed from Python numbers alone may be read and
copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged.step import NotCapturable
from hf_paged.tape.record import CaptureGuard, CreatesOnHost, HostResultReplay, recording


def run_twice(run: Callable[[], Any]) -> tuple[Any, Any, CaptureGuard]:
    """As `CudaGraphs.capture` does."""
    first = CaptureGuard()
    with CreatesOnHost(), first:
        found = run()
    with CreatesOnHost(), HostResultReplay(first.host_results):
        return found, run(), first


WEIGHT = torch.arange(6.0)


def _of_a_list() -> bool:
    return bool((torch.tensor([0.5, 2.0]) > 0).all())


def _of_a_mask() -> list[list[int]]:
    mask = torch.ones(2, 3, dtype=torch.bool).tril()
    return [mask.nonzero().shape, mask.sum().item()]  # type: ignore[list-item]


def _like_a_weight() -> float:
    return float((torch.ones_like(WEIGHT).cumsum(0) * torch.arange(6)).sum())


def _written_to() -> float:
    x = torch.arange(4.0)
    x[1:] += torch.tensor(1.0)
    return x.max().item()


@pytest.mark.parametrize("run", [_of_a_list, _of_a_mask, _like_a_weight, _written_to])
def test_constants_are_read(run: Callable[[], Any]) -> None:
    expected = run()
    found, again, first = run_twice(run)
    assert found == again == expected and first.host_results


def _a_weight() -> float:
    return WEIGHT.sum().item()


def _with_a_weight() -> float:
    return (torch.tensor(2.0) * WEIGHT).sum().item()


def _that_a_weight_is_written_to() -> float:
    x = torch.ones(6)
    x[2:4].copy_(WEIGHT[2:4])
    return x.sum().item()


def _that_a_kernel_may_have_written_to() -> float:
    return torch.zeros(6).sum().item() + torch.empty(0).sum().item()


def _chosen_by_a_weight() -> torch.Tensor:
    return torch.arange(6)[WEIGHT > 2]


@pytest.mark.parametrize(
    "run",
    [
        _a_weight,
        _with_a_weight,
        _that_a_weight_is_written_to,
        _that_a_kernel_may_have_written_to,
        _chosen_by_a_weight,
    ],
)
def test_all_else_is_not(run: Callable[[], Any]) -> None:
    with pytest.raises(NotCapturable, match="waits for the device"):
        run_twice(run)


def test_constants_are_copied_once() -> None:
    """To a device: the second run uses the copies that the first one made there."""
    x = torch.empty(3, device="meta")

    def run() -> list[torch.Tensor]:
        x[0].copy_(torch.tensor(2.0))  # as `x[0] = 2.0` does on CUDA
        return [
            torch.tensor(0.5, device="meta"),
            x.new_tensor([1, 2]),
            (torch.arange(3) * 2).to("meta", torch.half),
        ]

    found, again, first = run_twice(run)
    assert len(first.host_results) == 4
    assert all(y.device.type == "meta" for y in again)
    assert [(y.dtype, y.shape) for y in found] == [(y.dtype, y.shape) for y in again]
    assert all(y is not kept for y, (_, _, kept) in zip(again, first.host_results[1:])), (
        "the forward may write to them"
    )


def test_weights_are_not_copied() -> None:
    for run in (lambda: WEIGHT.to("meta"), lambda: torch.empty(6, device="meta").copy_(WEIGHT)):
        with pytest.raises(NotCapturable, match="between host and device"):
            run_twice(run)


def test_numbers_that_change_from_run_to_run() -> None:
    runs = [0]

    def counts() -> torch.Tensor:
        runs[0] += 1
        return torch.tensor(runs[0]).to("meta")

    with pytest.raises(NotCapturable, match="differs when it runs again"):
        run_twice(counts)
    runs[0] = 0
    with pytest.raises(NotCapturable, match="differs when it runs again"):
        run_twice(lambda: [torch.tensor(1.0).item() for _ in range(counts().dim() + runs[0])])


@pytest.mark.parametrize("mode", [CreatesOnHost, recording])
def test_a_tensor_of_a_list_of_tensors_is_read_where_no_mode_sees_it(mode: Any) -> None:
    for make in (torch.tensor, torch.as_tensor, WEIGHT.new_tensor):
        with pytest.raises(NotCapturable, match="reads the content"), mode():
            make([WEIGHT[2], 1.0])
    with pytest.raises(NotCapturable, match="reads the content"), mode():
        torch.asarray(obj=[WEIGHT[2], 1.0])
    with mode():
        assert torch.asarray(obj=WEIGHT) is WEIGHT
        assert torch.as_tensor(WEIGHT) is WEIGHT
        assert torch.tensor(data=[1, 2]).shape == (2,)


def test_one_number_is_filled_in_where_the_host_has_it() -> None:
    with CaptureGuard():
        x = WEIGHT.clone()
        x[x > 2] = 0.0
        on_device = torch.empty(6, device="meta")
        with pytest.raises(NotCapturable, match="waits"):
            on_device[on_device > 2] = torch.empty((), device="meta")
    assert x.tolist() == [0, 1, 2, 0, 0, 0]


def _a_view_of_numpy(x: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(3)
    seen = ones.numpy()
    ones.mul_(x)
    return x * float(seen[0])


def _memory_of_another(x: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(3)
    ones.set_(x.untyped_storage(), 0, (3,), (1,))
    return x * ones.tolist()[0]


def _its_text(x: torch.Tensor) -> torch.Tensor:
    return x * float(repr(x[0] * 2).split("(")[1].rstrip(")"))


@pytest.mark.parametrize("function", [_a_view_of_numpy, _memory_of_another, _its_text])
def test_memory_of_constants_is_not_shared(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """No mode notices Python reading values that are written to shared memory later."""
    x = torch.tensor([2.0, 3.0, 4.0])
    with pytest.raises(NotCapturable, match="reads the content"), recording():
        function(x)
