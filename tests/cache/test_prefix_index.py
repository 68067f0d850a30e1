"""The prefix index against a dict, over any order of fills, look-ups, evictions and undone
steps."""

from __future__ import annotations

import dataclasses
import itertools
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.prefix_index import Link, Node, PrefixIndex

SIZE, MAX_BLOCKS = 2, 3
NAMESPACES = ("one", "two")
BLOCKS = ((5, 5), (5, 6))
PATHS = [
    path for length in range(1, MAX_BLOCKS + 1) for path in itertools.product(BLOCKS, repeat=length)
]
Key = tuple[str, tuple[tuple[int, int], ...]]


@dataclasses.dataclass
class Entry:
    block_ids: list[int | None]
    epoch: int = sys.maxsize


def nodes_of(links: list[Link]) -> list[Node]:
    return [link.node for link in links if link.node is not None]


class PrefixIndexMachine(RuleBasedStateMachine):
    """A namespace's path of blocks is known while the first group, with full attention, has all of
    it."""

    @initialize(window=st.sampled_from([None, 1, 2, 3, 4]), num_blocks=st.integers(MAX_BLOCKS, 12))
    def start(self, window: int | None, num_blocks: int) -> None:
        self.windows = [None, window]
        self.pools = [BlockPool(num_blocks) for _ in self.windows]
        self.index = PrefixIndex(self.pools, self.windows, SIZE)
        self.index.begin_step()
        self.entries: dict[Key, Entry] = {}
        self.step: list[tuple[Key, int, int]] | None = []  # `None` between steps
        self.held: list[list[list[int]]] = []  # block ids of each sequence, by group
        self.epoch = 0

    def forget(self, namespace: str, path: tuple[tuple[int, int], ...]) -> None:
        for key in list(self.entries):
            if key[0] == namespace and key[1][: len(path)] == path:
                del self.entries[key]

    def unname(self, key: Key, group: int) -> None:
        self.entries[key].block_ids[group] = None
        if self.windows[group] is None:
            self.forget(*key)

    def allocate(self, group: int, num_blocks: int) -> list[int]:
        taken = self.pools[group].allocate(num_blocks)
        for key, entry in list(self.entries.items()):
            if key in self.entries and entry.block_ids[group] in taken:
                self.unname(key, group)
        return taken

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        path=st.sampled_from(PATHS),
        num_dropped=st.integers(0, MAX_BLOCKS),
        is_new_epoch=st.booleans(),
    )
    def fill(
        self,
        namespace: str,
        path: tuple[tuple[int, int], ...],
        num_dropped: int,
        is_new_epoch: bool,
    ) -> None:
        """A sequence whose window group, if it slides, has freed its first blocks."""
        self.epoch += is_new_epoch
        dropped = [0 if window is None else min(num_dropped, len(path)) for window in self.windows]
        if any(pool.num_available < len(path) - gone for pool, gone in zip(self.pools, dropped)):
            return
        block_ids = [self.allocate(group, len(path) - gone) for group, gone in enumerate(dropped)]
        node = self.index.root(namespace)
        for number, tokens in enumerate(path):
            named = [
                ids[number - gone] if number >= gone else None
                for ids, gone in zip(block_ids, dropped)
            ]
            node = self.index.add(node, tokens, named, self.epoch)
            key = (namespace, path[: number + 1])
            entry = self.entries.setdefault(key, Entry([None] * len(self.pools)))
            for group, gone in enumerate(dropped):
                if entry.block_ids[group] is None and number >= gone:
                    entry.block_ids[group] = block_ids[group][number - gone]
                    entry.epoch = min(entry.epoch, self.epoch)
                    if self.step is not None:
                        self.step.append((key, group, block_ids[group][number - gone]))
        self.held.append(block_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        for pool, ids in zip(
            self.pools, self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        ):
            pool.release(reversed(ids))

    @rule(namespace=st.sampled_from(NAMESPACES), path=st.sampled_from(PATHS))
    def attach(self, namespace: str, path: tuple[tuple[int, int], ...]) -> None:
        """Adds a sequence that begins with the cached prefix."""
        nodes = nodes_of(self.index.find(list(itertools.chain(*path)), namespace, MAX_BLOCKS))
        ids = [
            [i for node in nodes if (i := node.block_ids[group]) is not None]
            for group in range(len(self.pools))
        ]
        for pool, block_ids in zip(self.pools, ids):
            pool.acquire(block_ids)
        self.held.append(ids)

    @rule()
    def begin_step(self) -> None:
        self.index.begin_step()
        self.step = []

    @rule()
    def undo_step(self) -> None:
        self.index.undo_step()
        for key, group, block_id in self.step or ():
            if key in self.entries and self.entries[key].block_ids[group] == block_id:
                self.unname(key, group)
        self.step = None

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.entries.clear()

    @rule(age=st.integers(0, 2))
    def forget_before(self, age: int) -> None:
        self.index.remove_before(self.epoch - age)
        for key, entry in list(self.entries.items()):
            if entry.epoch < self.epoch - age:
                self.forget(*key)

    def expected(self, namespace: str, path: tuple[tuple[int, int], ...]) -> list[list[int | None]]:
        """Block ids of the longest prefix for which each group has all blocks that the next token
        sees."""
        known = [self.entries.get((namespace, path[:length])) for length in range(1, len(path) + 1)]
        found = list(itertools.takewhile(lambda entry: entry is not None, known))
        for length in range(len(found), 0, -1):
            end = length * SIZE
            if all(
                found[position // SIZE].block_ids[group] is not None
                for group, window in enumerate(self.windows)
                for position in range(end)
                if window is None or end - position < window
            ):
                return [entry.block_ids for entry in found[:length]]
        return []

    @invariant()
    def finds_what_is_there(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_integrity()
        for group, pool in enumerate(self.pools):
            pool.check_integrity(ids[group] for ids in self.held)
        assert set(self.index._roots) == {namespace for namespace, _ in self.entries}
        for namespace, path in itertools.product(
            NAMESPACES, itertools.product(BLOCKS, repeat=MAX_BLOCKS)
        ):
            for max_blocks in (1, MAX_BLOCKS):
                found = self.index.find(list(itertools.chain(*path, (5,))), namespace, max_blocks)
                assert [node.block_ids for node in nodes_of(found)] == self.expected(
                    namespace, path[:max_blocks]
                )


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=100, stateful_step_count=30)
TestPrefixIndex = pytest.mark.slow(TestPrefixIndex)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("window", [None, *range(1, 12)])
def test_needed_is_what_the_next_token_sees(window: int | None, ratio: int) -> None:
    """A block of the group ends at each `ratio`-th node."""
    index = PrefixIndex([BlockPool()], [window], 4, [ratio])
    for num_nodes in range(0, 17, ratio):
        seen = {
            p // (4 * ratio)
            for p in range(4 * num_nodes)
            if window is None or 4 * num_nodes - p < window
        }
        assert list(index.needed_nodes(0, num_nodes)) == [
            block * ratio + ratio - 1 for block in sorted(seen)
        ]


def test_of_two_blocks_with_the_same_content_the_first_has_the_name() -> None:
    pool = BlockPool(2)
    index = PrefixIndex([pool], [None], SIZE)
    first, second = pool.allocate(2)
    for block_id in (first, second):
        index.add(index.root(None), (5, 6), [block_id])
    assert [node.block_ids for node in nodes_of(index.find([5, 6], None, 1))] == [[first]]
    assert not pool.is_kept(second)


def fill(
    index: PrefixIndex, pools: list[BlockPool], path: tuple, num_dropped: int, epoch: int
) -> None:
    """Fills a sequence of this path whose table in the second group begins after `num_dropped`
    blocks."""
    gone = (0, num_dropped)
    held = [
        [None] * dropped + pool.allocate(len(path) - dropped) for pool, dropped in zip(pools, gone)
    ]
    node = index.root(None)
    for tokens, *block_ids in zip(path, *held):
        node = index.add(node, tokens, block_ids, epoch)


def test_a_hole_in_a_window_is_not_stepped_over() -> None:
    pools = [BlockPool(9), BlockPool(9)]
    index = PrefixIndex(pools, [None, 4], SIZE)
    path = ((5, 5), (5, 6), (6, 5))
    fill(index, pools, path, num_dropped=2, epoch=0)
    # the window group has the first block and the third
    fill(index, pools, path[:1], num_dropped=0, epoch=0)
    assert len(index.find([5, 5, 5, 6, 6, 5], None, 3)) == 1
    fill(index, pools, path, num_dropped=1, epoch=0)
    assert len(index.find([5, 5, 5, 6, 6, 5], None, 3)) == 3


def test_a_node_is_as_old_as_its_oldest_block() -> None:
    pools = [BlockPool(9), BlockPool(9)]
    index = PrefixIndex(pools, [None, 3], SIZE)
    fill(index, pools, ((5, 5),), num_dropped=1, epoch=1)
    # indexes the block that the window group lacked
    fill(index, pools, ((5, 5),), num_dropped=0, epoch=2)
    assert len(index.find([5, 5], None, 1)) == 1
    index.remove_before(2)
    assert index.find([5, 5], None, 1) == []


def test_check_integrity_sees_a_name_that_no_node_has() -> None:
    pool = BlockPool(1)
    index = PrefixIndex([pool], [None], SIZE)
    node = index.add(index.root(None), (5, 6), pool.allocate(1))
    index.check_integrity()
    node.block_ids[0] = None
    with pytest.raises(AssertionError, match="lacks its block in group 0"):
        index.check_integrity()


def test_what_goes_is_told_of_while_it_is_there_and_only_if_it_is_computed() -> None:
    pool = BlockPool(4)
    index = PrefixIndex([pool], [None], 2)
    told: list[tuple[int, int, bytes]] = []
    index.offload_to(lambda group, block_id, digest: told.append((group, block_id, digest)))
    first, second, third = pool.allocate(3)
    index.begin_step()
    node = index.add(index.root("a"), (1, 2), [first])
    index.end_step()
    index.begin_step()
    node = index.add(node, (3, 4), [second])
    pool.release([first])
    pool.evict(1)
    assert [block_id for _, block_id, _ in told] == [first], "the second is computed in this step"
    index.undo_step()
    told.clear()
    node = index.add(index.add(index.root("a"), (1, 2), [second]), (3, 4), [third])
    index.end_step()
    digests = [
        link.digest for link in index.find([1, 2, 3, 4], "a", 2, lambda group, digest: False)
    ]
    assert node.parent is not None and [index.digest(node.parent), index.digest(node)] == digests
    index.undo_step()
    assert not told, "what was dropped is not told of"
    pool.release([second])
    pool.evict(1)
    assert [(block_id, digest) for _, block_id, digest in told] == list(
        zip([second, third], digests)
    )
    index.check_integrity()


def test_blocks_registered_after_a_step_was_undone_are_computed() -> None:
    """A loaded prefix, for example."""
    pool = BlockPool(2)
    index = PrefixIndex([pool], [None], 2)
    told: list[int] = []
    index.offload_to(lambda group, block_id, digest: told.append(block_id))
    index.begin_step()
    index.undo_step()
    (block_id,) = pool.allocate(1)
    index.add(index.root("a"), (1, 2), [block_id])
    index.undo_step()
    assert len(index.find([1, 2], "a", 1)) == 1
    pool.release([block_id])
    pool.evict(1)
    assert told == [block_id]
