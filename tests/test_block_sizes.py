"""`block_size="auto"` from the outside: plain `generate`'s tokens, and sizes per layer group that
follow the lengths."""

from __future__ import annotations

import gc
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.cache.block_sizes import MIN_ENDED_WITHOUT_HIT
from hf_paged.kernels import costs
from tests.support import models
from tests.support.checks import assert_paged_is_plain, assert_same_tokens
from tests.support.engine_helpers import assert_lone, steps

pytestmark = pytest.mark.slow

AUTO = {"block_size": "auto"}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
TIMES = {"4": 1.4, "8": 1.2, "16": 1.1, "32": 1.05, "64": 1.02, "128": 1.0}
FULL = "full attention"
TWO_SIZES = {FULL: 32, f"window of {models.WINDOW} tokens": 4}


def auto(**config: Any) -> dict[str, Any]:
    return {"cache_implementation": "paged", "cache_config": AUTO | config}


PAGED = auto()
UNCACHED = auto(prefix_caching=False)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A made-up table: larger blocks are faster."""
    folder = tmp_path / "tables"
    folder.mkdir()
    kernels = ("cpp", "gather", "triton", "reference")
    found = {costs.entry_name(kernel, "float32"): TIMES for kernel in kernels}
    file = folder / f"{costs.machine_name(torch.device('cpu'))}.json"
    file.write_text(json.dumps({"costs": found}))
    monkeypatch.setattr(costs, "FOLDER", folder)
    yield
    gc.collect()


def sizes(stats: Any) -> dict[str, int]:
    return {name: choice.block_size for name, choice in stats.block_sizes.items()}


def empty(name: str) -> Iterator[Any]:
    model = models.get(name)
    hf_paged.free(model)
    yield model
    hf_paged.check_integrity(model)
    hf_paged.free(model)


@pytest.fixture
def llama() -> Iterator[Any]:
    yield from empty("llama")


@pytest.fixture
def gemma3() -> Iterator[Any]:
    yield from empty("gemma3")


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "mistral", "qwen3_next", "t5"])
def test_tokens_are_those_of_plain_generate(name: str, options: dict[str, Any]) -> None:
    for model in empty(name):
        for lengths in ((37, 4, 65), (3, 5), (37, 4, 65)):
            inputs = models.padded_prompt(name, lengths)
            assert_paged_is_plain(model, inputs, GREEDY | options, PAGED)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_groups_have_sizes_of_their_own(name: str) -> None:
    """The window of 8 tokens wastes slots that full attention does not."""
    for model in empty(name):
        inputs = models.padded_prompt(name, (150, 90))
        for _ in range(2):  # the second run begins with the first run's prefixes
            assert_paged_is_plain(model, inputs, GREEDY, PAGED)
            stats = hf_paged.memory_stats(model)
            assert sizes(stats) == TWO_SIZES
            reason = stats.block_sizes[FULL].reason
            assert "2 sequences of 161 tokens on average; times of" in reason
            assert stats.cached_blocks > 0
        with hf_paged.PagedEngine(model, AUTO) as engine:
            engine._core.memory.sizes.note(300)
            prompts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values())]
            for _ in range(2):
                assert_lone(engine, prompts, engine.generate(prompts, GREEDY), GREEDY)
            assert sizes(engine.stats()) == TWO_SIZES
            shared = engine.stats().num_prefix_hit_tokens
            assert shared == 128 + 64, "prefixes are shared in steps of the largest size"
            engine.check_integrity()


def test_sizes_follow_the_lengths(llama: Any) -> None:
    def call(length: int, num_rows: int = 1) -> int:
        llama.generate(**models.prompt("llama", num_rows, length), **GREEDY, **UNCACHED)
        return sizes(hf_paged.memory_stats(llama))[FULL]

    assert call(5) == 8, "by the length that the first call may get"
    assert call(900) == 8, "a call runs with the sizes of its beginning"
    assert call(900) == 32, "all that have ended count"
    assert [call(5, 40), call(5)] == [32, 16]


def test_what_is_cached_keeps_the_pool(llama: Any) -> None:
    def call(length: int, first: int = 5, num_rows: int = 1) -> int:
        ids = torch.arange(num_rows * length).view(num_rows, length) % 97 + first
        llama.generate(ids, **GREEDY | {"max_new_tokens": 1}, **PAGED)
        return sizes(hf_paged.memory_stats(llama))[FULL]

    assert call(6) == 4
    assert [call(200), call(200)] == [4, 4], "the second begins with what the first left"
    assert call(200, num_rows=70) == 4 and call(200) == 4, "what has served is worth more"
    memory = hf_paged.model.registry._memories[llama][1]
    assert memory.release(), "as an idle pool is given back"
    assert call(6) == 32


def test_what_no_prompt_began_with_does_not(llama: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def call(length: int, num_rows: int = 1) -> int:
        ids = torch.randint(5, 100, (num_rows, length), generator=generator)
        llama.generate(ids, **GREEDY | {"max_new_tokens": 1}, **PAGED)
        return sizes(hf_paged.memory_stats(llama))[FULL]

    assert [call(6), call(300, 62), call(300)] == [4, 4, 4]
    assert call(300) == 32


def test_blocks_in_use_keep_the_pool(llama: Any) -> None:
    def call(length: int) -> Any:
        options = GREEDY | UNCACHED | {"return_dict_in_generate": True}
        return llama.generate(**models.prompt("llama", 1, length), **options)

    held = call(5).past_key_values
    for _ in range(2):
        call(300)
    assert held.stats().used_blocks and sizes(hf_paged.memory_stats(llama)) == {FULL: 8}
    held.reset()
    call(300)
    assert sizes(hf_paged.memory_stats(llama)) == {FULL: 32}


def test_an_engine_changes_between_requests(llama: Any) -> None:
    prompts = [list(range(5, 5 + n)) for n in (20, 9)]
    with hf_paged.PagedEngine(llama, AUTO | {"prefix_caching": False}) as engine:
        assert_lone(engine, prompts, engine.generate(prompts, GREEDY), GREEDY)
        assert sizes(engine.stats()) == {FULL: 16}
        assert (
            engine.stats().block_sizes[FULL].reason
            == "no sequence had ended when the pool was created"
        )
        engine.add_request(prompts[0], GREEDY)
        engine.step()
        assert sizes(engine.stats()) == {FULL: 8}
        for _ in range(3):
            engine.add_request(list(range(5, 105)) * 9, {"max_new_tokens": 1})
        steps(engine)
        assert sizes(engine.stats()) == {FULL: 8}, "not while a request is unfinished"
        assert_lone(engine, prompts, engine.generate(prompts, GREEDY), GREEDY)
        assert sizes(engine.stats()) == {FULL: 32}
        assert engine.stats().num_finished == 8


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"prefix_tiers": {"disk_bytes": 0}}, "other lengths"),
        ({"batch_invariant": True}, "same bits"),
    ],
    ids=["prefix_tiers", "batch_invariant"],
)
def test_where_others_need_the_same_blocks_it_is_the_default(
    llama: Any, config: dict[str, Any], reason: str
) -> None:
    for _ in range(2):
        llama.generate(**models.prompt("llama"), **GREEDY, **auto(**config))
        (choice,) = hf_paged.memory_stats(llama).block_sizes.values()
        assert choice.block_size == 16 and reason in choice.reason


def test_a_limit_in_bytes_holds_over_groups_of_other_sizes(gemma3: Any) -> None:
    inputs = models.padded_prompt("gemma3", (150, 90, 133))
    gemma3.generate(**inputs, **GREEDY, **PAGED)
    limit = hf_paged.memory_stats(gemma3).peak_bytes * 3 // 4
    hf_paged.free(gemma3)
    try:
        hf_paged.budget(limit)
        assert_paged_is_plain(gemma3, inputs, GREEDY, PAGED)
        stats = hf_paged.memory_stats(gemma3)
        assert len(set(sizes(stats).values())) == 2 and stats.held_bytes <= limit
    finally:
        hf_paged.free(gemma3)
        hf_paged.budget(None)


def test_a_prefix_is_saved_over_groups_of_other_sizes(gemma3: Any, tmp_path: Path) -> None:
    prompt, file = list(range(5, 105)), tmp_path / "prefix"
    first, second, other = (hf_paged.PagedEngine(gemma3, AUTO) for _ in range(3))
    for engine in (first, second):
        engine._core.memory.sizes.note(300)
    results = [first.generate([prompt], GREEDY)[0].token_ids]
    assert first.save_prefix(prompt, file) == second.load_prefix(file) == 96
    for _ in range(MIN_ENDED_WITHOUT_HIT):
        # smaller blocks would suit these, but the loaded ones must serve
        second._core.memory.sizes.note(9)
    results.append(second.generate([prompt], GREEDY)[0].token_ids)
    assert second.stats().num_prefix_hit_tokens == 96 and results[0] == results[1]
    with pytest.raises(ValueError, match="`block_size`"):
        other.load_prefix(file)
    for engine in (first, second, other):
        engine.free()


def test_a_cache_is_pickled_with_its_sizes(gemma3: Any) -> None:
    first = gemma3.generate(
        **models.prompt("gemma3", 1, 90), **GREEDY, **PAGED, return_dict_in_generate=True
    )
    own = sizes(first.past_key_values.stats())
    twin = pickle.loads(pickle.dumps(first.past_key_values))
    assert sizes(twin.stats()) == own and len(set(own.values())) == 2
    inputs = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    again, plain = (
        gemma3.generate(**inputs, **GREEDY, past_key_values=cache) for cache in (twin, None)
    )
    assert_same_tokens(plain, again, "from a pickle")
    del first, twin


@pytest.mark.skipif(sys.platform != "linux", reason="pages of memory files are Linux's")
def test_virtual_blocks_have_whole_pages(llama: Any) -> None:
    assert_paged_is_plain(llama, models.prompt("llama"), GREEDY, auto(storage="virtual"))
    stats = hf_paged.memory_stats(llama)
    assert stats.block_size % 64 == 0 and not stats.block_sizes
