"""Engines with parts of a caller's own in place of those that their config asks for."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_paged import PagedConfig, PagedEngine, rooms
from hf_paged.batching.decoding.base import Draft
from hf_paged.batching.generation import Generation
from hf_paged.batching.request import Sequence
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.block_pool import BlockPool
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.memory_stats import TierCounts
from hf_paged.cache.swap import copy_out, put_back
from hf_paged.rooms import RoomMissingError, is_installed
from hf_paged.seams import Drafter, EngineParts
from tests.support import models
from tests.support.engine_helpers import (
    assert_drained,
    lone_run,
    prompts,
    tokens_of,
)
from tests.support.rooms import needs_fingerprints

CONFIG = PagedConfig(block_size=8)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
SHORT = {**GREEDY, "max_new_tokens": 8}


class DictTier(dict[bytes, Any]):
    """Keeps blocks of one layer group, vouched for or not, until the weights change."""

    wants_confirmation = False

    def __init__(self, memory: PagedMemory, blocks: BlockManager) -> None:
        (self.group,) = blocks.groups
        self.num_restored = 0

    def keep(self, group: int, block_id: int, digest: bytes, is_verified: bool) -> None:
        self[digest] = copy_out(self.group, [block_id])

    def path(self, sequence: Sequence) -> list[Any]:
        blocks = sequence.blocks.manager
        most = (sequence.num_tokens - 1) // blocks.node_size
        namespace = sequence.request.namespace
        return blocks.index.find(sequence.keys, namespace, most, lambda _, digest: digest in self)

    def num_restorable_tokens(self, sequence: Sequence) -> int:
        return len(self.path(sequence)) * sequence.blocks.manager.node_size

    def restore(self, sequence: Sequence) -> bool:
        links, blocks = self.path(sequence), sequence.blocks.manager
        (new_ids,) = blocks.take([len(links)]) or [[]]
        node = blocks.index.root(sequence.request.namespace)
        for link, block_id in zip(links, new_ids):  # all blocks that the pool has are new ones
            assert link.node is None
            put_back(self.group, self[link.digest], {0: block_id})
            node = blocks.index.add(node, link.tokens, [block_id], blocks.epochs.current)
        self.group.pool.release(reversed(new_ids))
        self.num_restored += len(new_ids)
        return bool(new_ids)

    def confirm(self) -> None:
        pass

    def discard(self) -> None:
        self.clear()

    def counts(self) -> TierCounts:
        return TierCounts(num_kept=len(self), num_restored=self.num_restored)


@needs_fingerprints
def test_a_toy_tier_keeps_and_restores_what_the_pool_evicts() -> None:
    model, (prompt,) = models.build("llama"), prompts(70)
    tiers: list[DictTier] = []

    def make_tier(model: Any, memory: Any, blocks: Any, *given: Any) -> Any:
        tiers.append(DictTier(memory, blocks))
        return tiers[-1], None

    with PagedEngine(model, {"block_size": 16}, parts=EngineParts(tier=make_tier)) as engine:
        expected = lone_run(model, prompt, SHORT)[0]
        for num_hits in (0, 64):
            (result,) = engine.generate([prompt], SHORT)
            assert result.token_ids == expected and result.num_prefix_hit_tokens == num_hits
            engine.memory.evict_cached()
            assert engine.memory.stats().cached_blocks == 0
        (tier,) = tiers
        stats = engine.memory.stats()
        assert stats.tier_kept_blocks == len(tier) == 4
        assert stats.tier_restored_blocks == tier.num_restored == 4
        assert_drained(engine)


class HalfStorage:
    """A toy `Storage`: float16 blocks, whatever the model computes, in tensors that grow by as many
    blocks as asked."""

    max_bytes, growth_step, is_elastic = None, 0, False

    def __init__(self, config: Any, spec: Any, block_size: int, before_move: Any) -> None:
        self.pool = BlockPool()
        self.layers: dict[int, KVBlocks] = {}
        self.released: dict[int, KVBlocks] = {}
        self.block_size = block_size

    @property
    def block_bytes(self) -> int:
        return sum(layer.block_bytes for layer in self.layers.values())

    @property
    def num_allocated_blocks(self) -> int:
        return min((layer.num_blocks for layer in self.layers.values()), default=0)

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.num_allocated_blocks

    def _blocks(self, num_blocks: int, keys: Tensor, values: Tensor) -> KVBlocks:
        heads, dim = keys.shape[1], keys.shape[3]
        shape = (num_blocks, 2 * heads, self.block_size, dim)
        data = torch.zeros(shape, dtype=torch.float16, device=keys.device)
        return KVBlocks.view((data,), heads, dim, (keys.dtype, values.dtype))

    def reserve(self, reservation: Any, can_drop: bool) -> None:
        """Reserves nothing."""

    def outline(self, keys: Tensor, values: Tensor) -> KVBlocks:
        return self._blocks(1, keys.to("meta"), values.to("meta"))

    def make(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        self.layers[index] = self._blocks(self.pool.num_blocks, keys, values)
        return self.layers[index]

    def promote(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        raise AssertionError("the model's dtype does not change")

    def grow(self, num_blocks: int, max_blocks: int) -> None:
        grown = {index: layer.grown(num_blocks) for index, layer in self.layers.items()}
        self.layers = grown

    def copy_blocks(self, copies: Any) -> None:
        sources, targets = map(list, zip(*copies))
        for layer in self.layers.values():
            layer.put_blocks(targets, layer.select(sources))

    def clear(self) -> None:
        self.layers = {}


def test_a_toy_storage_keeps_float16_blocks_for_a_float32_model() -> None:
    model = models.build("llama")
    assert model.dtype == torch.float32
    texts = [[5, 6, 7, 8] * 6, [5, 6, 7, 8] * 5 + [9]]
    options = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 2}
    tokens, num_bytes = [], []
    for parts in (EngineParts(), EngineParts(storage=HalfStorage)):
        with PagedEngine(model, CONFIG, parts=parts) as engine:
            tokens.append(tokens_of(engine.generate(texts, options, seed=0)))
            num_bytes.append(engine.stats().peak_bytes)
            (group,) = engine.memory.groups.values()
            dtypes = {layer.keys.dtype for layer in group.storage.layers.values()}
            assert_drained(engine)
    assert dtypes == {torch.float16} and num_bytes[1] == num_bytes[0] // 2
    assert tokens[0] == tokens[1]


class Toy(Drafter):
    """Drafts what comes next in one of these texts, moved on by `error` in the vocabulary, and then
    more than a request may have."""

    def __init__(self, texts: list[list[int]], error: int) -> None:
        self.texts = texts
        self.error = error
        self.rows: dict[Generation, list[tuple[int, int]]] = {}  # tokens: drafted, accepted
        self.num_computed = 0

    def attach(self, generation: Generation) -> tuple[bool, Hashable]:
        ((request, _),) = generation.rows
        self.rows[generation] = []
        return False, request.namespace

    def detach(self, generation: Generation) -> None:
        self.rows.pop(generation, None)

    def propose(
        self, num_embeddings: int, num_rows: int
    ) -> Iterator[tuple[Generation, Draft | Exception]]:
        assert num_embeddings == models.VOCAB_SIZE
        for generation in list(self.rows):
            assert generation.is_single
            sequence = generation.sequence_to_draft
            if sequence is not None:
                yield generation, self.draft(sequence.token_ids)

    def draft(self, token_ids: list[int]) -> Draft | Exception:
        length = len(token_ids)
        (text,) = (text for text in self.texts if text[:length] == token_ids)
        ahead = [*text[length:], 0, 0, 0][:3]
        return Draft([(token + self.error) % models.VOCAB_SIZE for token in ahead])

    def note_verified(
        self, generation: Generation, num_draft_tokens: int, num_accepted: int
    ) -> None:
        self.rows[generation].append((num_draft_tokens, num_accepted))

    def note_decode_time(self, num_tokens: int, seconds: float) -> None:
        self.num_computed += num_tokens

    def reclaim(self) -> bool:
        return False

    def handle_weight_change(self) -> None:
        pass


@pytest.mark.parametrize(("name", "width"), [("llama", 14), ("gpt2", 245)])
@pytest.mark.parametrize("error", [0, 1])
def test_a_toy_drafter_changes_steps_and_no_tokens(error: int, name: str, width: int) -> None:
    """Also where a longer draft would exceed the model's table of positions."""
    model, texts = models.get(name), prompts(9, width, 6)
    expected = [lone_run(model, text, GREEDY)[0] for text in texts]
    toy = Toy([a + b for a, b in zip(texts, expected)], error)
    with PagedEngine(model, CONFIG, parts=EngineParts(drafter=lambda *given: toy)) as engine:
        results = engine.generate(texts, GREEDY)
        stats = engine.stats()
        assert_drained(engine)
    assert [result.token_ids for result in results] == expected
    assert not toy.rows and toy.num_computed
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_tokens == (0 if error else stats.num_draft_tokens)
    assert (stats.num_steps < 8) == (not error)
    assert sum(result.num_drafts for result in results) == stats.num_drafts


def add(config: Any = None, options: Any = None, **given: Any) -> None:
    with PagedEngine(models.get("llama"), config) as engine:
        try:
            engine.add_request([5, 6, 7], {**GREEDY, **(options or {})}, **given)
        finally:
            assert not engine.has_unfinished


def test_an_option_of_a_missing_room_names_both_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = ("speculation", "grammar", "tiers")
    monkeypatch.setattr(
        rooms, "is_installed", lambda name: name not in missing and is_installed(name)
    )
    rooms.room.cache_clear()  # rooms that earlier tests imported
    with PagedEngine(models.get("llama")) as engine:
        for option, ask in {
            "speculation": lambda: add({"speculation": "ngram"}),
            "prompt_lookup_num_tokens": lambda: add(options={"prompt_lookup_num_tokens": 3}),
            "use_mtp": lambda: add(options={"use_mtp": True}),
            "assistant_model": lambda: add(assistant_model=models.get("llama")),
            "schema": lambda: add(schema="{}"),
            "prefix_tiers": lambda: add({"prefix_tiers": "folder"}),
            "save_prefix": lambda: engine.save_prefix([1, 2], "prefix"),
        }.items():
            with pytest.raises(RoomMissingError, match=rf"`{option}`.* needs `hf_paged\."):
                ask()
        assert engine.generate([[5, 6, 7]], SHORT)[0].error is None
