"""The choice of a block size from sequence lengths and the kernel's time at each size."""

from __future__ import annotations

import pytest

from hf_paged.cache.block_sizes import (
    DEFAULT_BLOCK_SIZE,
    MIN_GAIN,
    BlockSizes,
    Costs,
    Occupancy,
    choose,
)
from hf_paged.cache.groups import FULL_ATTENTION, GroupSpec

SLOWER_IF_SMALL = Costs({4: 1.4, 8: 1.2, 16: 1.1, 32: 1.05, 64: 1.02, 128: 1.0}, "made up")
FLAT = Costs(dict.fromkeys((4, 8, 16, 32), 2.0), "made up")
WINDOW = GroupSpec(window=32)


def test_half_a_block_of_a_row_is_lost_and_a_whole_one_behind_its_window() -> None:
    times = {8: 1.25, 16: 1.0}
    assert Occupancy.of([24, 40]).losses(16, times) == (16 / 80, 0.0)
    assert Occupancy.of([24, 40]).losses(8, times) == (8 / 72, pytest.approx(0.2))
    assert Occupancy.of([24, 40], window=32).losses(16, times) == (24 / (24 + 32 + 24), 0.0)


@pytest.mark.parametrize(
    ("length", "size"), [(10, 4), (30, 8), (100, 16), (400, 32), (1500, 64), (10_000, 128)]
)
def test_the_size_grows_with_the_lengths(length: int, size: int) -> None:
    choice = choose([length] * 3, SLOWER_IF_SMALL)
    assert choice.block_size == size
    assert f"with 3 sequences of {length} tokens on average; made up" in choice.reason
    memory, time = Occupancy.of([length]).losses(size, SLOWER_IF_SMALL.times)
    assert f"{memory:.1%} of memory and {time:.1%} of attention time" in choice.reason
    assert choose([length], FLAT).block_size == 4, (
        "where all sizes are as fast the smallest wastes least"
    )


def test_without_lengths_or_times_it_is_the_default() -> None:
    assert choose([], SLOWER_IF_SMALL) == choose((), FLAT)
    assert (choose([], FLAT).block_size, choose([], FLAT).reason) == (
        DEFAULT_BLOCK_SIZE,
        "no sequence had ended when the pool was created",
    )
    nothing = choose([5], Costs({}, "why there are none"))
    assert (nothing.block_size, nothing.reason) == (DEFAULT_BLOCK_SIZE, "why there are none")


def test_sizes_stay_until_others_are_clearly_better() -> None:
    sizes = BlockSizes(SLOWER_IF_SMALL, expected=[1500])
    assert sizes.of(FULL_ATTENTION) == 64 and sizes.better_sizes() is None, "nothing has ended"
    for _ in range(20):
        sizes.note(400)
    assert choose(sizes.lengths, SLOWER_IF_SMALL).block_size == 32
    lost = {size: sum(Occupancy.of([400]).losses(size, SLOWER_IF_SMALL.times)) for size in (64, 32)}
    assert 0 < lost[64] - lost[32] < MIN_GAIN and sizes.better_sizes() is None
    for _ in range(200):
        sizes.note(10)
    later = sizes.better_sizes()
    assert later is not None and later.of(FULL_ATTENTION) < 64 == sizes.of(FULL_ATTENTION)
    assert (len(later.lengths), later.num_ended, sizes.num_ended) == (220, 0, 220)
    assert later.better_sizes() is None
