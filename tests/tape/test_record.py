"""Operations allowed in a recorded step: values computed from Python numbers alone may be read and
copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged.step import NotCapturable
from hf_paged.tape.record import CaptureGuard, HostCreation, HostResultReplay, recording
from tests.attention.test_masks import arguments, made, negated


def run_twice(run: Callable[[], Any]) -> tuple[Any, Any, CaptureGuard]:
    """As `CudaGraphs.capture` does."""
    first = CaptureGuard()
    with HostCreation(), first:
        found = run()
    with HostCreation(), HostResultReplay(first.host_results):
        return found, run(), first


WEIGHT = torch.arange(6.0)
MASK = WEIGHT > 2
ROWS = torch.arange(12.0).view(6, 2)


def written_to(x: torch.Tensor, what: torch.Tensor) -> torch.Tensor:
    x[2:4].copy_(what)
    return x


READ: dict[str, Callable[[], Any]] = {
    "of a list": lambda: bool((torch.tensor([0.5, 2.0]) > 0).all()),
    "of a mask": lambda: torch.ones(2, 3, dtype=torch.bool).tril().nonzero().shape,
    "like a weight": lambda: float((torch.ones_like(WEIGHT).cumsum(0) * torch.arange(6)).sum()),
    "written to": lambda: written_to(torch.arange(4.0), torch.tensor(9.0)).max().item(),
}


@pytest.mark.parametrize("name", READ)
def test_constants_are_read(name: str) -> None:
    expected = READ[name]()
    found, again, first = run_twice(READ[name])
    assert found == again == expected and first.host_results


def test_selections_by_constant_masks_read_again() -> None:
    """Of an operation whose constant mask selects elements of a weight, only the size is kept."""

    def select() -> list[float]:
        mask = torch.arange(6) > 3
        return [*weights.pop()[mask].tolist(), *torch.arange(6)[mask].tolist()]

    weights = [WEIGHT * 10, WEIGHT]
    guard = CaptureGuard()
    with HostCreation(), guard:
        assert select() == [4, 5, 4, 5]
    with HostCreation(), HostResultReplay(guard.host_results):
        assert select() == [40, 50, 4, 5]


REFUSED: dict[str, Callable[[], Any]] = {
    "a weight": lambda: WEIGHT.sum().item(),
    "with a weight": lambda: (torch.tensor(2.0) * WEIGHT).sum().item(),
    "that a weight is written to": lambda: written_to(torch.ones(6), WEIGHT[2:4]).sum().item(),
    "that a kernel may have written to": lambda: (
        torch.zeros(6).sum().item() + torch.empty(0).sum().item()
    ),
    "chosen by a weight": lambda: torch.arange(6)[WEIGHT > 2],
    "item": lambda: WEIGHT[0].item(),
    "unique": lambda: WEIGHT.unique(),
    "bool": lambda: bool(WEIGHT.sum() > 3),
    "nonzero": lambda: MASK.nonzero(),
    "mask of bytes": lambda: WEIGHT[MASK.byte()],
    "masked_select": lambda: WEIGHT.masked_select(MASK),
    "where": lambda: torch.where(MASK),
    "mask behind None": lambda: WEIGHT[None, MASK],
    "index_put_": lambda: WEIGHT.clone().index_put_((MASK,), WEIGHT[3:]),
    "index_put_ of rows": lambda: ROWS.clone().index_put_((MASK,), ROWS[3:]),
    "index_put_ with two indices": lambda: ROWS.clone().index_put_(
        (MASK, torch.zeros(3, dtype=torch.int64)), WEIGHT[:3]
    ),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", REFUSED)
def test_all_else_is_not(name: str) -> None:
    with pytest.raises(NotCapturable, match="reads the content"):
        run_twice(REFUSED[name])


def test_operations_of_the_device_are_recorded() -> None:
    x = torch.arange(6.0)
    with CaptureGuard():
        indices = torch.tensor([2, 0])
        assert x[indices].tolist() == x[indices.int()].tolist() == [2, 0]
        x[indices] = x[indices] + 0
        x[x > 100] = 7.0  # filled in place, nothing is counted
        with pytest.raises(NotCapturable, match="random"):
            torch.rand(3)


def test_constants_are_copied_once() -> None:
    """To a device: the second run uses the copies that the first one made there."""
    x = torch.empty(3, device="meta")

    def run() -> list[torch.Tensor]:
        x[0].copy_(torch.tensor(2.0))  # as `x[0] = 2.0` does on CUDA
        made = torch.tensor(0.5, device="meta"), x.new_tensor([1, 2])
        return [*made, (torch.arange(3) * 2).to("meta", torch.half)]

    found, again, first = run_twice(run)
    kept = [each for *_, each in first.host_results]
    assert len(kept) == 4
    for mine, its, copied in zip(again, found, kept[1:]):
        assert mine.device.type == "meta" and (mine.dtype, mine.shape) == (its.dtype, its.shape)
        assert mine is not copied, "the forward may write to them"
    for copy in (lambda: WEIGHT.to("meta"), lambda: torch.empty(6, device="meta").copy_(WEIGHT)):
        with pytest.raises(NotCapturable, match="between host and device"):
            run_twice(copy)


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


@pytest.mark.parametrize("mode", [HostCreation, recording])
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
        with pytest.raises(NotCapturable, match="reads the content"):
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


@pytest.mark.parametrize("function", [_a_view_of_numpy, _memory_of_another, lambda x: repr(x * 2)])
def test_memory_of_constants_is_not_shared(function: Callable[[torch.Tensor], Any]) -> None:
    """No mode notices Python reading values that are written to shared memory later."""
    x = torch.tensor([2.0, 3.0, 4.0])  # no constant: it is older than the recording
    with pytest.raises(NotCapturable, match="reads the content"), recording():
        function(x)


def test_writes_of_operations_that_return_nothing_are_not_dropped() -> None:
    x = torch.ones(3)
    with pytest.raises(NotCapturable, match="returns no tensor"), recording():
        torch._foreach_add_([x + 1, x + 2], 1.0)
    with recording():
        torch._assert_async(x.sum() > 0)


def test_an_operation_may_take_a_mask_by_keyword_alone() -> None:
    mask, own = made(arguments(), "eager")
    with negated() as operation, recording() as operations:
        result = operation(mask=mask)
    assert torch.equal(result, -own) and operations
