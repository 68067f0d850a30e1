"""The Triton segmented products of LoRA adapters against those of `kernels.lora` in plain
PyTorch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hf_paged.kernels.lora import LoraWeights, Part, add_portable
from hf_paged.kernels.triton import lora
from tests.support.kernels.device import DEVICE, available

pytestmark = available

DEPTH, WIDTH = 70, 97  # no multiples of the tile
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def parts(ranges: list[tuple[int, int, int]], dtype: torch.dtype) -> list[Part]:
    """Separate weights for each range `(start, end, rank)`, every other one with a bias."""
    found: list[Part] = []
    for number, (start, end, rank) in enumerate(ranges):
        draw = torch.Generator().manual_seed(number)
        sizes = (rank, DEPTH), (WIDTH, rank), (WIDTH,)
        drawn = [torch.randn(size, generator=draw) / 4 for size in sizes]
        a, b, bias = (x.to(dtype).to(DEVICE) for x in drawn)
        found.append((start, end, LoraWeights(a, b, bias if number % 2 else None, 0.5 + number)))
    return found


def add(out: torch.Tensor, x: torch.Tensor, chosen: list[Part]) -> None:
    table = lora.make_table(chosen, x.device)
    assert table is not None and lora.supports(out, x)
    lora.add_deltas(out, x, table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "ranges",
    [[(0, 1, 1), (1, 2, 3)], [(2, 21, 4), (21, 22, 17), (25, 43, 8)]],
    ids=["decodes", "chunks"],
)
def test_adds_plain_products(ranges: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
    """Rows between and after the parts are NaN and stay unchanged; rows are strided in memory."""
    rows, draw = ranges[-1][1] + 3, torch.Generator().manual_seed(7)
    named = torch.zeros(rows, dtype=torch.bool)
    for start, end, _ in ranges:
        named[start:end] = True
    x, found = (
        torch.randn(rows, size + 5, generator=draw).to(dtype).to(DEVICE)[:, :size]
        for size in (DEPTH, WIDTH)
    )
    x[~named] = found[~named] = float("nan")
    before, expected, chosen = found.clone(), found.clone(), parts(ranges, dtype)
    add_portable(expected, x, chosen)
    add(found, x, chosen)
    assert found[~named].isnan().all()
    if len(chosen) > 2:  # a row does not depend on other parts
        alone = before.clone()
        add(alone, x, chosen[:1])
        start, end, _ = chosen[0]
        assert torch.allclose(alone[start:end], found[start:end], rtol=1e-6, atol=0)
        assert torch.equal(alone[end:][named[end:]], before[end:][named[end:]])
    before, expected, found = (x[named].float().cpu() for x in (before, expected, found))
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) <= TOLERANCES[dtype] * scale
    assert float((before - expected).abs().max()) > 0.1 * scale, "nothing was added"


def test_ranges_that_change() -> None:
    """One table serves any assignment of weights, or none, to rows."""
    weights = [each for *_, each in parts([(0, 1, 4), (1, 2, 17), (2, 3, 2)], torch.float32)]
    x = torch.randn(20, DEPTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ranges = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    table = lora.make_range_table(ranges, len(x), list(enumerate(weights)))
    for bounds in ([(0, 3), (3, 20), (0, 0)], [(19, 20), (0, 0), (0, 19)], [(0, 0)] * 3):
        ranges.copy_(torch.tensor(bounds))
        out, expected = (torch.zeros(20, WIDTH, device=DEVICE) for _ in range(2))
        lora.add_deltas(out, x, table)
        chosen = [(*each, weight) for each, weight in zip(bounds, weights) if each != (0, 0)]
        add_portable(expected, x, chosen)
        assert torch.allclose(out, expected, atol=1e-4), bounds


def test_what_the_kernels_do_not_take() -> None:
    (first,), (second,) = parts([(0, 1, 2)], torch.float32), parts([(1, 2, 2)], torch.bfloat16)
    assert lora.make_table([first, second], first[2].a.device) is None
    wide = parts([(0, 1, lora.MAX_RANK + 1)], torch.float32)
    assert lora.make_table(wide, first[2].a.device) is None
