"""Bytes that a call's keys and values took, beside those of plain's cache for that call; which
cached blocks stay."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.cache import group_memory
from hf_paged.model.own_loop import cache_parts
from tests.support import models

CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}


def plain_cache_bytes(model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> int:
    """Bytes of the cache of a plain call."""
    output = model.generate(**inputs, **options, return_dict_in_generate=True)
    # the name up to transformers 5.23
    cache = output.cache if "cache" in output else output.past_key_values
    layers = [layer for part in cache_parts(cache) for layer in part.layers]
    return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))


def call(
    model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any], **config: Any
) -> hf_paged.MemoryStats:
    cache_config = {**models.PAGED["cache_config"], **config}
    model.generate(**inputs, **options, cache_implementation="paged", cache_config=cache_config)
    return hf_paged.memory_stats(model)


@pytest.mark.parametrize("kind", list(CALLS))
@pytest.mark.parametrize(
    "name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow), "gemma3", "t5"]
)
def test_plain_bytes_are_those_of_a_plain_call(name: str, kind: str) -> None:
    """With padding, sliding windows that are full, an encoder, and EOS that ends some rows
    earlier."""
    model, inputs = models.get(name), models.padded_prompt(name)
    options = {
        "do_sample": False,
        "max_new_tokens": 9,
        "eos_token_id": list(range(4, 16)),
        **CALLS[kind],
    }
    torch.manual_seed(0)
    expected = plain_cache_bytes(model, inputs, options)
    torch.manual_seed(0)
    stats = call(model, inputs, options)
    assert stats.plain_bytes == expected
    assert 0 < stats.call_bytes <= stats.peak_bytes


@pytest.mark.parametrize(
    "options", [{"prefill_chunk_size": 5}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_plain_bytes_of_calls_in_other_loops(options: dict[str, Any]) -> None:
    """transformers' own loop on a paged cache; rows that advance by several tokens."""
    model, inputs = models.get("gemma3"), models.prompt("gemma3", batch_size=1)
    options = {"do_sample": False, "max_new_tokens": 9, **options}
    assert call(model, inputs, options).plain_bytes == plain_cache_bytes(model, inputs, options)


def test_bytes_of_a_call_are_those_of_the_last_one() -> None:
    """... in the dtype that plain's cache has, also where blocks are quantized."""
    model, options = models.build("llama"), {"do_sample": False, "max_new_tokens": 4}
    token_bytes = 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, dim, bytes
    large = call(model, models.prompt("llama", 3, 30), options)
    assert large.call_bytes == large.peak_bytes == 3 * 5 * 8 * token_bytes
    small = call(model, models.prompt("llama", 1, 5), options)
    assert (small.call_bytes, small.plain_bytes) == (8 * token_bytes, 8 * token_bytes)
    assert small.peak_bytes == large.peak_bytes
    quantized = call(model, models.prompt("llama", 1, 5), options, kv_dtype="int8")
    assert (
        quantized.plain_bytes == small.plain_bytes and quantized.call_bytes < small.call_bytes / 2
    )
    with pytest.raises(hf_paged.OutOfBlocksError):
        call(model, models.prompt("llama", 3, 30), options, kv_dtype="int8", num_blocks=2)
    assert hf_paged.MemoryStats().plain_bytes == 0


def test_calls_that_overlap_leave_the_bytes_of_the_last_lone_call() -> None:
    model, options = models.build("llama"), {"do_sample": False, "max_new_tokens": 4}
    begun, ended = threading.Event(), threading.Event()

    def waits(ids: torch.Tensor, scores: Any, **inputs: Any) -> torch.Tensor:
        begun.set()
        assert ended.wait(60)
        return torch.zeros(len(ids), dtype=torch.bool)

    lone = call(model, models.prompt("llama", 1, 5), options)
    overlapping = {**options, "stopping_criteria": [waits]}
    thread = threading.Thread(target=call, args=(model, models.prompt("llama", 3, 30), overlapping))
    thread.start()
    assert begun.wait(60)
    inner = call(model, models.prompt("llama", 2, 9), options)
    ended.set()
    thread.join()
    outer = hf_paged.memory_stats(model)
    assert lone.call_bytes == inner.call_bytes == outer.call_bytes < outer.peak_bytes
    assert lone.plain_bytes == inner.plain_bytes == outer.plain_bytes
    assert call(model, models.prompt("llama", 2, 9), options).plain_bytes > lone.plain_bytes


GREEDY = {"do_sample": False, "max_new_tokens": 8}


def text(length: int, seed: int) -> list[int]:
    return models.token_ids(1, length, seed=seed)[0].tolist()


def talk(engine: hf_paged.PagedEngine, chats: int, at_once: int) -> list[int]:
    """Four turns of each chat, `at_once` chats together; returns each turn's tokens that were
    cached."""
    texts, hits = [text(60 + 10 * chat, chat) for chat in range(chats)], []
    for turn in range(4):
        for first in range(0, chats, at_once):
            several = texts[first : first + at_once]
            for chat, result in zip(several, engine.generate(several, GREEDY)):
                hits.append(result.num_prefix_hit_tokens)
                chat += [*result.token_ids, *text(12, 90 + turn)]
            stats = engine.stats()
            assert stats.cached_blocks <= 3 * stats.peak_blocks
    return hits


@pytest.mark.slow
@pytest.mark.parametrize(("chats", "at_once"), [(1, 1), (3, 1), (6, 2), (3, 3)])
def test_chats_find_their_earlier_turns_without_a_limit(chats: int, at_once: int) -> None:
    """One after another, and in turn: as many as with a limit that never binds."""
    model = models.build("llama")
    with hf_paged.PagedEngine(model, {"num_blocks": 4096}) as engine:
        expected = talk(engine, chats, at_once)
    assert all(hit >= 48 for hit in expected[chats:]), expected
    with hf_paged.PagedEngine(model) as engine:
        assert talk(engine, chats, at_once) == expected
        engine.check_integrity()
        assert engine.memory.stats().held_bytes > 0
        engine.free()
        assert (engine.stats().cached_blocks, engine.memory.stats().held_bytes) == (0, 0)
    with hf_paged.PagedEngine(model, {"idle_release_seconds": 0}) as engine:
        talk(engine, chats, at_once)
        assert (engine.stats().cached_blocks, engine.memory.stats().held_bytes) == (0, 0)


@pytest.mark.slow_cases("gemma3")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_engines_pool_grows_to_three_blocks_for_each_of_its_peak(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit, while requests come and go; of each layer group, with sliding windows,
    too."""
    monkeypatch.setattr(group_memory, "GROWTH_STEP", 0)  # blocks beyond those that are missing
    draw, num_reached = random.Random(0), 0
    with hf_paged.PagedEngine(models.build(name), {"block_size": 8}) as engine:
        for seed in range(12):
            engine.add_request(
                text(draw.randrange(8, 50), seed),
                {**GREEDY, "max_new_tokens": draw.randrange(1, 9)},
            )
            for _ in range(draw.randrange(10)):
                engine.step()
                pools = [group.pool for group in engine.memory.groups.values()]
                assert all(pool.num_blocks <= 3 * pool.peak_used for pool in pools)
                num_reached += any(pool.num_blocks > 2.5 * pool.peak_used for pool in pools)
                engine.check_integrity()
        peak_used = sum(pool.peak_used for pool in pools)
        assert engine.stats().peak_blocks <= peak_used <= engine.stats().peak_blocks + len(pools)
    assert num_reached, "the pools were meant to come near the bound"


def test_cached_blocks_give_way_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_memory, "free_bytes", lambda device: 0)
    with hf_paged.PagedEngine(models.build("llama")) as engine:
        for seed in range(4):
            engine.generate([text(70, seed)], GREEDY)
        stats = engine.memory.stats()
        assert stats.held_bytes == stats.peak_bytes and stats.cached_blocks == 4


def test_a_call_evicts_before_its_pool_grows() -> None:
    model = models.build("llama")
    for seed in range(4):
        ids = torch.tensor([text(70, seed)])
        model.generate(ids, **GREEDY, cache_implementation="paged")
        stats = hf_paged.memory_stats(model)
        assert stats.held_bytes == stats.peak_bytes


def test_a_reset_of_the_peaks_is_no_progress() -> None:
    """A call that waits for blocks gives up once nobody progresses, also while a caller polls."""
    with hf_paged.PagedEngine(models.build("llama"), {"block_size": 8}) as engine:
        engine.generate([text(70, 0)], GREEDY)
        engine.add_request(text(20, 1), GREEDY)
        engine.step()
        progress_count = engine.memory.progress_count
        peak = hf_paged.memory_stats(engine, reset=True).peak_blocks
        stats = hf_paged.memory_stats(engine, reset=True)
        assert engine.memory.progress_count == progress_count > 0
        assert stats.peak_blocks == stats.used_blocks < peak and 0 < stats.peak_bytes
        engine.step()
        assert engine.memory.progress_count > progress_count
