"""Engines with parts of a caller's own (`hf_paged.seams.EngineParts`)."""

from __future__ import annotations

from typing import Any

import pytest

from hf_paged import PagedEngine, rooms
from hf_paged.batching.request import Sequence
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.swap import copy_out, put_back
from hf_paged.rooms import RoomMissingError
from hf_paged.seams import EngineParts, TierCounts
from tests.support import models
from tests.support.engine_helpers import assert_drained, lone_run, prompts

GREEDY = {"do_sample": False, "max_new_tokens": 8}


class DictTier(dict[bytes, Any]):
    """Keeps blocks of one layer group, vouched for or not, until the weights change."""

    wants_confirmation = False

    def __init__(self, memory: PagedMemory, blocks: BlockManager) -> None:
        (self.group,) = memory.groups_of(blocks)
        self.num_restored = 0

    def keep(self, group: int, block_id: int, digest: bytes, is_vouched_for: bool) -> None:
        self[digest] = copy_out(self.group, [block_id])

    def path(self, blocks: BlockManager, sequence: Sequence) -> list[Any]:
        most = (sequence.num_tokens - 1) // blocks.unit
        namespace = sequence.request.namespace
        return blocks.index.reach(sequence.keys, namespace, most, lambda _, digest: digest in self)

    def reach(self, blocks: BlockManager, sequence: Sequence) -> int:
        return len(self.path(blocks, sequence)) * blocks.unit

    def restore(self, blocks: BlockManager, sequence: Sequence) -> bool:
        links = self.path(blocks, sequence)
        (new_ids,) = blocks.take([len(links)]) or [[]]
        node = blocks.index.root(sequence.request.namespace)
        for link, block_id in zip(links, new_ids):  # all blocks that the pool has are new ones
            assert link.node is None
            put_back(self.group, self[link.digest], {0: block_id})
            node = blocks.index.add(node, link.tokens, [block_id], blocks.epoch)
        self.group.pool.release(reversed(new_ids))
        self.num_restored += len(new_ids)
        return bool(new_ids)

    def confirm(self) -> None:
        pass

    def discard(self) -> None:
        self.clear()

    def counts(self) -> TierCounts:
        return TierCounts(num_kept=len(self), num_restored=self.num_restored)


def test_a_toy_tier_keeps_and_restores_what_the_pool_evicts() -> None:
    model, (prompt,) = models.build("llama"), prompts(70)
    tiers: list[DictTier] = []

    def make_tier(model: Any, memory: Any, blocks: Any, config: Any, layout: Any) -> Any:
        tiers.append(DictTier(memory, blocks))
        return tiers[-1], None

    with PagedEngine(model, {"block_size": 16}, parts=EngineParts(tier=make_tier)) as engine:
        expected = lone_run(model, prompt, GREEDY)[0]
        for num_hits in (0, 64):
            (result,) = engine.generate([prompt], GREEDY)
            assert result.token_ids == expected and result.num_prefix_hit_tokens == num_hits
            engine.memory.give_up_cached()
            assert engine.memory.stats().cached_blocks == 0
        (tier,) = tiers
        stats = engine.memory.stats()
        assert stats.tier_kept_blocks == len(tier) == 4
        assert stats.tier_restored_blocks == tier.num_restored == 4
        assert_drained(engine)


def test_without_the_room_of_tiers_only_calls_that_need_it_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models.build("llama")
    rooms.room.cache_clear()
    monkeypatch.setattr(rooms, "is_installed", lambda name: name != "tiers")
    with PagedEngine(model) as engine:
        (result,) = engine.generate([[1, 2, 3]], {"max_new_tokens": 2})
        assert result.error is None
        with pytest.raises(RoomMissingError, match=r"`save_prefix` needs `hf_paged\.tiers`"):
            engine.save_prefix([1, 2, 3], "prefix")
    with pytest.raises(RoomMissingError, match=r"`prefix_tiers` needs `hf_paged\.tiers`"):
        PagedEngine(model, {"prefix_tiers": "folder"})
