"""Which of PyTorch's operations do not mix rows."""

from typing import Any

import pytest
import torch

from hf_paged.tape.exact import is_exact

aten = torch.ops.aten
X = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (aten.sort.default, (X,), {}, True),
        (aten.sort.default, (X, 0), {}, False),
        (aten.sort.stable, (X,), {"stable": True}, True),
        (aten.sort.stable, (X,), {"stable": True, "dim": -1}, True),
        (aten.sort.stable, (X,), {"stable": True, "dim": 0}, False),
        (aten.cumsum.default, (X, 0), {}, False),
        (aten.amax.default, (X, [1]), {}, True),
        (aten.amax.default, (X,), {}, False),
        (aten.mm.default, (X, X.t()), {}, False),
    ],
)
def test_axis_of_an_operation(function: Any, args: Any, kwargs: Any, expected: bool) -> None:
    assert is_exact(function, args, kwargs) == expected
