"""Swapping a request's blocks to host memory and back."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_paged.cache import swap
from hf_paged.cache.group_memory import GroupMemory
from hf_paged.cache.groups import GroupSpec
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.storage import BlockStorage
from hf_paged.cache.swap import BlockSwapper
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


@pytest.fixture
def host_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns the bytes of all live copies in host memory."""
    copies, copy = list[weakref.ref[torch.Tensor]](), swap._to_cpu

    def copied(*args: Any) -> torch.Tensor:
        result = copy(*args)
        copies.append(weakref.ref(result))
        return result

    monkeypatch.setattr(swap, "_to_cpu", copied)
    return lambda: sum(x.nbytes for ref in copies if (x := ref()) is not None)


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
        found = SimpleNamespace(blocks=self.manager.new(), swapped=None)
        self.append(found, num_tokens)
        found.blocks.tables[1].drop_before(num_dropped * SIZE)
        found.content = content(self, found)
        return found

    def append(self, sequence: Any, num_tokens: int) -> None:
        """Writes random bytes in new blocks."""
        for group, table in zip(self.groups, sequence.blocks.tables):
            old = len(table.block_ids)
            group.ensure_free(1 + -(-num_tokens // SIZE))
            copy = table.append(num_tokens)
            if copy is not None:
                group.storage.copy_blocks([copy])
            fill(group.storage, table.block_ids[old:])
        sequence.content = content(self, sequence)

    def fork(self, sequence: Any) -> Any:
        blocks = sequence.blocks.fork()
        return SimpleNamespace(blocks=blocks, swapped=None, content=sequence.content)

    def check(self, rows: list[Any]) -> None:
        """The rows are not swapped out, and have their contents."""
        self.memory.check_integrity()
        for row in rows:
            assert row.swapped is None and all(map(torch.equal, content(self, row), row.content))


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


def content(house: House, sequence: Any, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The counts of a sequence's tables, and bytes of K/V in its blocks, over groups and layers; or
    their numbers."""
    counts = [(table.num_tokens, table.num_dropped) for table in sequence.blocks.tables]
    found = [torch.tensor(counts)]
    for group, table in zip(house.groups, sequence.blocks.tables):
        for _, layer in sorted(group.storage.layers.items()):
            for tensor in (layer.keys, layer.values):
                blocks = tensor[table.block_ids].contiguous().cpu()
                found.append(blocks.view(torch.uint8) if dtype is None else blocks.to(dtype))
    return found


def num_distinct(rows: list[Any]) -> int:
    groups = zip(*(row.blocks.tables for row in rows))
    return sum(len({i for table in tables for i in table.block_ids}) for tables in groups)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(4))
def test_requests_come_back_with_what_they_share(
    seed: int, device: str, host_bytes: Callable[[], int]
) -> None:
    """Rows that share blocks, some of which others hold, or that end meanwhile; with too few
    blocks nothing changes."""
    draw, house = random.Random(seed), House(num_blocks=60, device=device)
    rows: list[Any] = []
    requests: list[Any] = []
    num_refused = 0
    for _ in range(200):
        what = draw.choice(["begin", "begin", "fork", "append", "end", "out", "in", "in"])
        has_room = house.manager.num_free > 16
        if what == "begin" and has_room:
            rows.append(house.sequence(draw.randrange(SIZE + 1, 5 * SIZE), draw.randrange(2)))
        elif what == "fork" and rows:
            rows.append(house.fork(draw.choice(rows)))
        elif what == "append" and rows and has_room:
            house.append(draw.choice(rows), draw.randrange(1, SIZE + 2))
        elif what == "end" and rows:
            rows.pop().blocks.free()
        elif what == "out" and rows:
            draw.shuffle(rows)
            asked = request(*(rows.pop() for _ in range(min(len(rows), draw.randint(1, 3)))))
            num_blocks, before = num_distinct(asked.sequences), host_bytes()
            assert house.swapper.swap_out(asked)
            assert house.swapper.num_blocks(asked) == num_blocks
            assert bool(num_blocks) == (host_bytes() > before)
            if len(asked.sequences) > 1 and draw.random() < 0.3:
                asked.sequences.pop()  # ends meanwhile
            requests.append(asked)
        elif what == "in" and requests:
            asked = requests.pop(draw.randrange(len(requests)))
            num_blocks = house.swapper.num_blocks(asked)
            fits, used = num_blocks <= house.manager.num_free, house.memory.num_used
            swapped = [row.swapped for row in asked.sequences]
            num_bytes = host_bytes()  # once `swapped` no longer holds copies of the last request
            assert house.swapper.swap_in(asked) == fits
            assert house.memory.num_used == used + num_blocks * fits
            if fits:
                rows += asked.sequences
                assert num_distinct(asked.sequences) == num_blocks, "they share it again"
            else:
                assert [row.swapped for row in asked.sequences] == swapped
                assert host_bytes() == num_bytes
                requests.append(asked)
                num_refused += 1
        house.check(rows)
    assert num_refused
    requests.clear()
    del asked, swapped
    assert host_bytes() == 0
    for row in rows:
        row.blocks.free()
    assert house.memory.num_used == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("out of memory")], ids=["python", "torch"]
)
def test_no_host_memory_changes_nothing(
    error: Exception, host_bytes: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    house, copy, results = House(), swap._to_cpu, iter([None, None, error])
    row = house.sequence(3 * SIZE)

    def fail_later(*args: Any) -> torch.Tensor:
        if (error := next(results)) is not None:
            raise error
        return copy(*args)

    monkeypatch.setattr(swap, "_to_cpu", fail_later)
    assert not house.swapper.swap_out(request(row))
    assert host_bytes() == 0
    house.check([row])


@pytest.mark.parametrize("change", ["grown", "made again", "never written", "wider"])
def test_storage_that_changed_meanwhile(change: str) -> None:
    house = House()
    row, storage = house.sequence(3 * SIZE), house.groups[0].storage
    for layer in storage.layers.values():
        for tensor in layer.data:
            tensor.copy_(torch.randn(tensor.shape))
    before = content(house, row, torch.float32)
    assert house.swapper.swap_out(request(row))
    if change == "grown":
        house.sequence(40 * SIZE)
    elif change == "wider":
        for index, layout in enumerate(("one", "pair")):
            storage.promote(index, *states(layout, torch.float32))
    else:
        for group in house.groups:
            group.storage.layers = {}
        if change == "made again":
            storage.make(1, *states("pair"))
    house.swapper.swap_in(request(row))
    assert (storage.layers[0].keys.dtype is torch.float32) == (change == "wider")
    found = content(house, row, torch.float32)
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(found, before))
