"""Swapping a request's blocks to host memory and back preserves bytes, sharing and reference
counts."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_paged.cache import swap
from hf_paged.cache.group_memory import GroupMemory
from hf_paged.cache.groups import GroupSpec
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.storage import BlockStorage
from hf_paged.cache.swap import BlockSwapper, HostLayer
from hf_paged.config import PagedConfig

SIZE = 8
# (heads, dim, dtype) of K and of V, in the three layouts of `KVBlocks`
LAYOUTS = {
    "one": ((2, 6, torch.bfloat16), (2, 6, torch.bfloat16)),
    "side by side": ((1, 10, torch.float32), (1, 3, torch.float32)),
    "pair": ((2, 4, torch.float32), (3, 5, torch.float16)),
}


def states(
    layout: str, dtype: torch.dtype | None = None, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = (
        torch.empty(1, h, 0, d, dtype=dtype or own, device=device) for h, d, own in LAYOUTS[layout]
    )
    return key, value


def host_bytes() -> int:
    """Bytes of all live copies in host memory."""
    gc.collect()
    layers = [each for each in gc.get_objects() if type(each) is HostLayer]
    return sum(tensor.nbytes for layer in layers for tensor in layer.blocks.data)


@dataclass
class House:
    """A memory of two groups, its live sequences, and a swapper."""

    num_blocks: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.memory = PagedMemory(PagedConfig(block_size=SIZE, num_blocks=self.num_blocks))
        self.manager = self.memory.manager([GroupSpec(), GroupSpec(window=2 * SIZE)])
        self.groups: list[GroupMemory] = list(self.memory.groups.values())
        for group, layouts in zip(self.groups, (("one", "pair"), ("side by side",))):
            for index, layout in enumerate(layouts):
                group.storage.make(index, *states(layout, device=self.device))
        self.swapper = BlockSwapper(self.manager)

    def sequence(self, num_tokens: int, num_dropped: int = 0) -> Any:
        """A sequence with random bytes in its blocks, `num_dropped` window blocks of which were
        freed."""
        blocks = self.manager.new()
        for group, table in zip(self.groups, blocks.tables):
            group.ensure_free(-(-num_tokens // SIZE))
            table.append(num_tokens)
            fill(group.storage, table.block_ids)
        blocks.tables[1].drop_before(num_dropped * SIZE)
        return SimpleNamespace(blocks=blocks, swapped=None)

    def fork(self, sequence: Any) -> Any:
        return SimpleNamespace(blocks=self.manager.fork(sequence.blocks), swapped=None)

    def check(self) -> None:
        self.memory.check_integrity()


def request(*sequences: Any) -> Any:
    return SimpleNamespace(sequences=list(sequences))


def fill(storage: BlockStorage, block_ids: list[int]) -> None:
    """Random bytes, many of which are NaN or infinite as numbers."""
    for layer in storage.layers.values():
        for tensor in layer.data:
            content = torch.randint(
                0, 256, (len(block_ids), *tensor[0].view(torch.uint8).shape), dtype=torch.uint8
            )
            content[:, ..., ::3] |= 0x7F
            tensor.view(torch.uint8)[block_ids] = content.to(tensor.device)


def content(house: House, sequence: Any) -> list[torch.Tensor]:
    """Bytes of K/V in a sequence's blocks, over groups and layers."""
    return [
        tensor[table.block_ids].contiguous().view(torch.uint8).cpu()
        for group, table in zip(house.groups, sequence.blocks.tables)
        for _, layer in sorted(group.storage.layers.items())
        for tensor in (layer.keys, layer.values)
    ]


def counts(sequence: Any) -> list[tuple[int, int]]:
    return [(table.num_tokens, table.num_dropped) for table in sequence.blocks.tables]


def ids(*sequences: Any) -> list[list[int]]:
    return [list(table.block_ids) for sequence in sequences for table in sequence.blocks.tables]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_queued_copies_are_made_first() -> None:
    house = House()
    row = house.sequence(SIZE + 1)
    twin = house.fork(row)
    assert house.manager.append(twin.blocks, 1)  # the copy of its last block is queued
    before = content(house, row)
    assert house.swapper.swap_out(request(twin)) and house.swapper.swap_in(request(twin))
    assert ids(twin)[0] != ids(row)[0] and same(content(house, twin), before)
    house.check()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bytes_come_back_into_other_blocks(device: str) -> None:
    house = House(device=device)
    row = house.sequence(5 * SIZE + 3, num_dropped=2)
    before, was, old = content(house, row), counts(row), ids(row)
    assert house.swapper.swap_out(request(row))
    assert [group.pool.num_used for group in house.groups] == [0, 0] and ids(row) == [[], []]
    assert counts(row) == was
    house.check()
    other = house.sequence(9 * SIZE)  # takes and overwrites the freed blocks
    kept = content(house, other)
    assert house.swapper.num_blocks(request(row)) == 6 + 4
    house.swapper.swap_in(request(row))
    assert row.swapped is None and counts(row) == was
    assert all(not set(new) & set(taken) for new, taken in zip(ids(row), ids(other)))
    assert ids(row) != old
    assert same(content(house, row), before) and same(content(house, other), kept)
    house.check()


@pytest.mark.slow
def test_what_sequences_share_is_copied_once_and_shared_again() -> None:
    house = House()
    first = house.sequence(2 * SIZE + 1)
    second, third = house.fork(first), house.fork(first)
    for row, group in ((second, 0), (third, 1)):
        # separate writes: copy-on-write of the tail, then more
        table = row.blocks.tables[group]
        house.groups[group].ensure_free(3)
        copy = table.append(SIZE + 2)
        assert copy is not None
        house.groups[group].storage.copy_blocks([copy])
        fill(house.groups[group].storage, table.block_ids[-1:])
    rows = (first, second, third)
    before, was, old = (
        [content(house, row) for row in rows],
        [counts(row) for row in rows],
        ids(*rows),
    )
    used = [group.pool.num_used for group in house.groups]
    num_bytes = sum(group.pool.num_used * group.storage.block_bytes for group in house.groups)

    assert house.swapper.swap_out(request(*rows))
    assert host_bytes() == num_bytes
    assert house.swapper.num_blocks(request(*rows)) == sum(used)
    assert [group.pool.num_used for group in house.groups] == [0, 0]
    filler = house.sequence(SIZE)
    house.swapper.swap_in(request(*rows))
    assert host_bytes() == 0
    assert [group.pool.num_used - 1 for group in house.groups] == used
    assert [counts(row) for row in rows] == was
    assert all(map(same, [content(house, row) for row in rows], before))
    for group in (0, 1):  # equal ids before are equal ids after, and only those
        new = [block_id for row in rows for block_id in row.blocks.tables[group].block_ids]
        gone = [block_id for table in old[group::2] for block_id in table]
        assert len(set(zip(gone, new))) == len(set(gone)) == len(set(new))
    house.check()
    for row in (*rows, filler):
        for table in row.blocks.tables:
            table.free()
    assert house.memory.num_used == 0


def test_blocks_that_others_hold_stay_theirs() -> None:
    house = House()
    mine = house.sequence(3 * SIZE)
    others = house.fork(mine)
    before, held = content(house, mine), ids(others)
    assert house.swapper.swap_out(request(mine))
    assert ids(others) == held and same(content(house, others), before)
    assert all(
        table.pool.refcount(b) == 1 for table in others.blocks.tables for b in table.block_ids
    )
    house.swapper.swap_in(request(mine))
    assert same(content(house, mine), before)
    assert all(not set(new) & set(old) for new, old in zip(ids(mine), held))
    house.check()


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 2, 5])
def test_out_of_blocks_changes_nothing(left: int) -> None:
    """With host memory for nothing, for less than the first group needs, and for the first group
    only."""
    house = House(num_blocks=12)
    row = house.sequence(3 * SIZE)
    before = content(house, row)
    assert house.swapper.swap_out(request(row))
    filler = [house.sequence(SIZE) for _ in range((12 - left) // 2)]
    house.groups[0].ensure_free((12 - left) % 2)
    odd = house.groups[0].take((12 - left) % 2)
    state, used, num_bytes = row.swapped, house.memory.num_used, host_bytes()
    assert used == 12 - left
    for _ in range(2):
        assert not house.swapper.swap_in(request(row))
        assert (row.swapped, house.memory.num_used, host_bytes()) == (state, used, num_bytes)
        assert ids(row) == [[], []]
    house.groups[0].pool.release(odd)
    for other in filler:
        for table in other.blocks.tables:
            table.free()
    house.swapper.swap_in(request(row))
    assert same(content(house, row), before)
    house.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("out of memory")], ids=["python", "torch"]
)
def test_no_host_memory_changes_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    row = house.sequence(3 * SIZE)
    before, held, calls = content(house, row), ids(row), []
    copy = swap._to_cpu

    def fail_later(tensor: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
        calls.append(tensor)
        if len(calls) == 3:
            raise error
        return copy(tensor, block_ids)

    monkeypatch.setattr(swap, "_to_cpu", fail_later)
    assert not house.swapper.swap_out(request(row))
    assert row.swapped is None and ids(row) == held and same(content(house, row), before)
    gc.collect()
    assert host_bytes() == 0
    house.check()


def test_a_failing_copy_back_keeps_the_request_swapped_out(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    row = house.sequence(3 * SIZE)
    before = content(house, row)
    assert house.swapper.swap_out(request(row))
    with monkeypatch.context() as patch:
        patch.setattr(
            swap.HostLayer, "put_back", lambda *_: (_ for _ in ()).throw(RuntimeError("device"))
        )
        with pytest.raises(RuntimeError, match="device"):
            house.swapper.swap_in(request(row))
    assert row.swapped is not None and house.memory.num_used == 0
    house.swapper.swap_in(request(row))
    assert same(content(house, row), before)
    house.check()


def test_sequences_that_end_meanwhile_take_no_blocks() -> None:
    house = House()
    first = house.sequence(2 * SIZE)
    second = house.fork(first)
    for group, table in zip(house.groups, second.blocks.tables):
        group.ensure_free(2)
        table.append(2 * SIZE)
        fill(group.storage, table.block_ids[-2:])
    finished = SimpleNamespace(blocks=SimpleNamespace(tables=()), swapped=None)
    whole = request(finished, first, second)
    before = content(house, second)
    assert house.swapper.swap_out(whole)
    assert finished.swapped is None
    assert house.swapper.num_blocks(whole) == 8
    whole.sequences.remove(second)
    assert house.swapper.num_blocks(whole) == 4
    whole.sequences = [second]
    assert house.swapper.num_blocks(whole) == 8
    whole.sequences = [finished, second]
    house.swapper.swap_in(whole)
    assert same(content(house, second), before)
    assert house.memory.num_used == 8
    house.check()


def test_only_the_rest_of_the_rows_is_copied_back() -> None:
    house = House()
    first, second = house.sequence(2 * SIZE), house.sequence(3 * SIZE + 1)
    before = content(house, second)
    assert house.swapper.swap_out(request(first, second))
    house.swapper.swap_in(request(second))
    assert same(content(house, second), before) and house.memory.num_used == 8
    house.check()


@pytest.mark.slow
def test_host_memory_goes_with_the_request() -> None:
    house = House()
    rows = [house.sequence(2 * SIZE) for _ in range(2)]
    for row in rows:
        assert house.swapper.swap_out(request(row))
    each = host_bytes() // 2
    assert each == sum(2 * group.storage.block_bytes for group in house.groups)
    rows[0].swapped = None
    assert host_bytes() == each
    rows.clear()
    del row
    gc.collect()
    assert host_bytes() == 0
    house.check()


@pytest.mark.parametrize("change", ["grown", "made again", "never written"])
def test_storage_that_changed_meanwhile(change: str) -> None:
    house = House()
    row = house.sequence(3 * SIZE)
    before = content(house, row)
    assert house.swapper.swap_out(request(row))
    if change == "grown":
        house.sequence(40 * SIZE)
    else:
        for group in house.groups:
            group.storage.layers = {}
        if change == "made again":
            house.groups[0].storage.make(1, *states("pair"))
    house.swapper.swap_in(request(row))
    assert same(content(house, row), before)
    house.check()


def test_a_wider_dtype_meanwhile_keeps_the_numbers() -> None:
    house = House()
    row = house.sequence(3 * SIZE)
    storage = house.groups[0].storage
    for tensor in (*storage.layers[0].data, *storage.layers[1].data):
        tensor.copy_(torch.randn(tensor.shape))
    expected = [numbers(storage, index, row) for index in (0, 1)]
    assert house.swapper.swap_out(request(row))
    for index, layout in enumerate(("one", "pair")):
        storage.promote(index, *states(layout, torch.float32))
    house.swapper.swap_in(request(row))
    for index in (0, 1):
        assert storage.layers[index].values.dtype is torch.float32
        assert all(map(torch.equal, numbers(storage, index, row), expected[index]))


def numbers(storage: BlockStorage, index: int, row: Any) -> list[torch.Tensor]:
    layer: KVBlocks = storage.layers[index]
    return [tensor[row.blocks.tables[0].block_ids].float() for tensor in (layer.keys, layer.values)]
