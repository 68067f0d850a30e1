"""Bytes that calls take, beside those of plain's cache; which cached blocks stay."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.cache import group_memory
from hf_paged.model.own_loop import cache_parts
from tests.support import models
from tests.support.engine_helpers import prompts

GREEDY = {"do_sample": False, "max_new_tokens": 8}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}
# transformers' own loop on a paged cache; rows that advance by several tokens
OTHER_LOOPS = {"chunks": {"prefill_chunk_size": 5}, "lookup": {"prompt_lookup_num_tokens": 3}}


def plain_cache_bytes(model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> int:
    """Bytes of the cache of a plain call."""
    output = model.generate(**inputs, **options, return_dict_in_generate=True)
    # the name up to transformers 5.23
    cache = output.cache if "cache" in output else output.past_key_values
    layers = [layer for part in cache_parts(cache) for layer in part.layers]
    return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))


def call(model: Any, inputs: Any, options: dict[str, Any], **config: Any) -> hf_paged.MemoryStats:
    paged = {**models.PAGED, "cache_config": {**models.PAGED["cache_config"], **config}}
    model.generate(**inputs, **options, **paged)
    return hf_paged.memory_stats(model)


@pytest.mark.slow_cases("gemma2-*")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(["llama", "gemma2", "gemma3", "t5"], CALLS),
        *(("gemma3", kind) for kind in OTHER_LOOPS),
    ],
)
def test_plain_bytes_are_those_of_a_plain_call(name: str, kind: str) -> None:
    """With padding, sliding windows that are full, an encoder, and EOS that ends some rows
    earlier."""
    model, inputs = models.get(name), models.padded_prompt(name)
    options = {"do_sample": False, "max_new_tokens": 9, **(CALLS | OTHER_LOOPS)[kind]}
    if kind in CALLS:
        options["eos_token_id"] = list(range(4, 16))
    else:
        inputs = models.prompt(name, batch_size=1)
    torch.manual_seed(0)
    expected = plain_cache_bytes(model, inputs, options)
    torch.manual_seed(0)
    stats = call(model, inputs, options)
    assert stats.plain_bytes == expected
    assert 0 < stats.call_bytes <= stats.peak_bytes


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
    inputs = [models.prompt("llama", *size) for size in ((1, 5), (3, 30), (2, 9))]

    def waits(ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        begun.set()
        assert ended.wait(60)
        return torch.zeros(len(ids), dtype=torch.bool)

    lone = call(model, inputs[0], options)
    overlapping = {**options, "stopping_criteria": [waits]}
    thread = threading.Thread(target=call, args=(model, inputs[1], overlapping))
    thread.start()
    assert begun.wait(60)
    inner = call(model, inputs[2], options)
    ended.set()
    thread.join()
    outer = hf_paged.memory_stats(model)
    assert lone.call_bytes == inner.call_bytes == outer.call_bytes < outer.peak_bytes
    assert lone.plain_bytes == inner.plain_bytes == outer.plain_bytes
    assert call(model, inputs[2], options).plain_bytes > lone.plain_bytes


def talk(engine: hf_paged.PagedEngine, chats: int, at_once: int) -> list[int]:
    """Four turns of each chat, `at_once` chats together; returns each turn's tokens that were
    cached."""
    texts, hits = [prompts(60 + 10 * chat, seed=chat)[0] for chat in range(chats)], []
    for turn in range(4):
        for first in range(0, chats, at_once):
            several = texts[first : first + at_once]
            for chat, result in zip(several, engine.generate(several, GREEDY)):
                hits.append(result.num_prefix_hit_tokens)
                chat += [*result.token_ids, *prompts(12, seed=90 + turn)[0]]
            for group in engine.memory.groups.values():
                has_limit = engine.memory.config.num_blocks is not None
                assert has_limit or group.pool.num_blocks <= 3 * group.pool.peak_used
    return hits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(("chats", "at_once"), [(1, 1), (3, 1), (6, 2), (3, 3)])
def test_chats_find_their_earlier_turns_without_a_limit(
    chats: int, at_once: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another, and in turn: as many as with a limit that never binds. A pool grows to
    three blocks for each of its peak."""
    monkeypatch.setattr(group_memory, "GROWTH_STEP", 0)  # blocks beyond those that are missing
    model = models.build(name)
    with hf_paged.PagedEngine(model, {"num_blocks": 4096}) as engine:
        expected = talk(engine, chats, at_once)
    assert all(hit >= 48 for hit in expected[chats:]), expected
    with hf_paged.PagedEngine(model) as engine:
        assert talk(engine, chats, at_once) == expected
        engine.check_integrity()
        engine.free()
        assert (engine.stats().cached_blocks, engine.memory.stats().held_bytes) == (0, 0)


def test_cached_blocks_give_way_before_a_pool_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a call, and in an engine where memory is short."""
    model = models.build("llama")
    for seed in range(4):
        call(model, {"input_ids": models.token_ids(1, 70, seed)}, GREEDY)
        stats = hf_paged.memory_stats(model)
        assert stats.held_bytes == stats.peak_bytes
    monkeypatch.setattr(group_memory, "free_bytes", lambda device: 0)
    with hf_paged.PagedEngine(model) as engine:
        for seed in range(4):
            engine.generate(prompts(70, seed=seed), GREEDY)
        stats = engine.memory.stats()
        assert stats.held_bytes == stats.peak_bytes and stats.cached_blocks == 4


def test_a_reset_of_the_peaks_is_no_progress() -> None:
    """A call that waits for blocks gives up once nobody progresses, also while a caller polls."""
    with hf_paged.PagedEngine(models.build("llama"), {"block_size": 8}) as engine:
        engine.generate(prompts(70), GREEDY)
        engine.add_request(prompts(20, seed=1)[0], GREEDY)
        engine.step()
        progress_count = engine.memory.progress_count
        peak = hf_paged.memory_stats(engine, reset=True).peak_blocks
        stats = hf_paged.memory_stats(engine, reset=True)
        assert engine.memory.progress_count == progress_count > 0
        assert stats.peak_blocks == stats.used_blocks < peak and 0 < stats.peak_bytes
        engine.step()
        assert engine.memory.progress_count > progress_count


@pytest.mark.parametrize(
    ("method", "operation"),
    [("release", "__delitem__"), ("release", "__setitem__"), ("evict_cached", "__setitem__")],
)
def test_an_interrupted_release_loses_no_block(method: str, operation: str, tmp_path: Path) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    config = {"block_size": models.BLOCK_SIZE, "prefix_tiers": tmp_path}
    with hf_paged.PagedEngine(models.build("llama"), config) as engine:
        expected = [result.token_ids for result in engine.generate(prompts(70, 20), GREEDY)]
        memory = engine.memory
        (group,) = memory.groups.values()
        assert group.pool.num_cached
        interrupted_dict = type("InterruptedDict", (OrderedDict,), {})
        group.pool._free = interrupted_dict(group.pool._free)
        setattr(interrupted_dict, operation, interrupt)
        with pytest.raises(KeyboardInterrupt):
            getattr(memory, method)()
        memory.check_integrity()
        assert memory.release() and not group.pool.num_blocks
        results = engine.generate(prompts(70, 20), GREEDY)
        assert [result.token_ids for result in results] == expected
        engine.check_integrity()
