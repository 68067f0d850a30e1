"""The Triton segmented products of LoRA adapters against those of `kernels.lora` in plain
PyTorch."""

from __future__ import annotations

import pytest
import torch

from hf_paged.kernels.lora import LoraWeights, Part, add_portable
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
        a, b, bias = (
            (torch.randn(size, generator=draw) / 4).to(dtype).to(DEVICE) for size in sizes
        )
        found.append((start, end, LoraWeights(a, b, bias if number % 2 else None, 0.5 + number)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "ranges",
    [[(0, 1, 1), (1, 2, 3)], [(2, 21, 4), (21, 22, 17), (25, 43, 8)]],
    ids=["decodes", "chunks"],
)
def test_adds_what_plain_products_add(
    ranges: list[tuple[int, int, int]], dtype: torch.dtype
) -> None:
    """Rows between and after the parts are NaN and stay unchanged; rows are strided in memory."""
    from hf_paged.kernels.triton import lora

    rows, draw = ranges[-1][1] + 3, torch.Generator().manual_seed(7)
    x = torch.randn(rows, DEPTH + 5, generator=draw).to(dtype).to(DEVICE)[:, :DEPTH]
    before = torch.randn(rows, WIDTH + 3, generator=draw).to(dtype).to(DEVICE)[:, :WIDTH]
    named = sorted({row for start, end, _ in ranges for row in range(start, end)})
    others = [row for row in range(rows) if row not in named]
    for tensor in (x, before):
        tensor[others] = float("nan")
    chosen = parts(ranges, dtype)
    table = lora.make_table(chosen, before.device)
    assert table is not None and lora.supports(before, x)
    expected, found = before.clone(), before.clone()
    add_portable(expected, x, chosen)
    lora.add_deltas(found, x, table)
    assert found[others].isnan().all()
    scale = float(expected[named].float().abs().max())
    assert (
        float((found[named].float() - expected[named].float()).abs().max())
        <= TOLERANCES[dtype] * scale
    )
    assert float((before[named] - expected[named]).abs().max()) > 0.1 * scale, "nothing was added"


def test_a_row_does_not_depend_on_other_parts() -> None:
    from hf_paged.kernels.triton import lora

    chosen = parts([(0, 3, 4), (3, 5, 17)], torch.float32)
    x = torch.randn(5, DEPTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    both, one = torch.zeros(5, WIDTH, device=DEVICE), torch.zeros(5, WIDTH, device=DEVICE)
    for out, given in ((both, chosen), (one, chosen[:1])):
        table = lora.make_table(given, x.device)
        assert table is not None
        lora.add_deltas(out, x, table)
    assert torch.allclose(both[:3], one[:3], rtol=1e-6, atol=0)
    assert not one[3:].any()


def test_ranges_that_change() -> None:
    """One table serves any assignment of weights, or none, to rows."""
    from hf_paged.kernels.triton import lora

    weights = [each for *_, each in parts([(0, 1, 4), (1, 2, 17), (2, 3, 2)], torch.float32)]
    x = torch.randn(20, DEPTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ranges = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    table = lora.make_range_table(ranges, len(x), list(enumerate(weights)))
    for bounds in ([(0, 3), (3, 20), (0, 0)], [(19, 20), (0, 0), (0, 19)], [(0, 0)] * 3):
        ranges.copy_(torch.tensor(bounds))
        out, expected = torch.zeros(20, WIDTH, device=DEVICE), torch.zeros(20, WIDTH, device=DEVICE)
        lora.add_deltas(out, x, table)
        add_portable(
            expected,
            x,
            [
                (*each, lora_weights)
                for each, lora_weights in zip(bounds, weights)
                if each != (0, 0)
            ],
        )
        assert torch.allclose(out, expected, atol=1e-4), bounds


def test_what_the_kernels_do_not_take() -> None:
    from hf_paged.kernels.triton import lora

    (first,), (second,) = parts([(0, 1, 2)], torch.float32), parts([(1, 2, 2)], torch.bfloat16)
    assert lora.make_table([first, second], first[2].a.device) is None
    assert (
        lora.make_table(parts([(0, 1, lora.MAX_RANK + 1)], torch.float32), first[2].a.device)
        is None
    )
