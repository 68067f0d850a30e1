"""Prefix cache of models with states: hits begin at a snapshot, prefill stops to take one."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_paged import PagedConfig, PagedEngine, check_integrity, last_route, memory_stats
from hf_paged.rectangles import preemption
from hf_paged.rectangles.states import StateSpec
from tests.support import models
from tests.support.engine_helpers import (
    MODES,
    Asked,
    assert_drained,
    assert_lone,
    results_of,
    run_all,
)
from tests.support.forwards import build, forwards
from tests.support.rooms import needs_fingerprints
from tests.test_faults import Countdown

CLASSES = [
    "Qwen3NextForCausalLM",  # linear attention
    "BambaForCausalLM",  # Mamba states
    "Lfm2ForCausalLM",  # convolutions
    "FalconH1ForCausalLM",  # a state and K/V in one layer
    "InklingForCausalLM",  # the same, some through a window
    "Mamba2ForCausalLM",  # states alone
]
STATELESS = "GPTNeoForCausalLM"  # rectangular rows for another reason: hits need no snapshot
NEVER = "JambaForCausalLM"  # its layers reset their state in each forward of more than a token
SIZE = 8
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the short prompts of tests worth a snapshot."""
    monkeypatch.setattr(preemption, "SNAPSHOT_TOKENS", 32)
    monkeypatch.setattr(preemption, "FORWARD_TOKENS", 8)


def text(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(20, 100) for _ in range(length)]


def engine_of(model: Any, **config: Any) -> PagedEngine:
    return PagedEngine(model, PagedConfig(block_size=SIZE, **config))


def run(engine: PagedEngine, prompt: list[int], options: Any = GREEDY, **arguments: Any) -> int:
    """Runs one request, which must get plain's tokens. Returns how many tokens it did not
    compute."""
    before = engine.stats().num_prefix_hit_tokens
    asked = Asked(engine)
    asked.add("one", prompt, options, **arguments)
    asked.check()
    return engine.stats().num_prefix_hit_tokens - before


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("name", [*CLASSES, STATELESS, NEVER])
def test_a_prompt_begins_where_a_snapshot_is(name: str, device: torch.device) -> None:
    model, system = models.put(build(name), device), text(44, 1)
    texts = [
        [*system, *text(13, 2)],  # a snapshot after its last full block, 56 tokens
        [*system, *text(13, 2)],
        [*system, *text(9, 3)],  # a snapshot after 40, where the two diverge, and none after 48
        [*system, *text(30, 4)],  # and one after 72
        [*system, *text(30, 4), *text(2, 5)],
        [*system, *text(13, 2), *text(9, 6)],
    ]
    with engine_of(model, num_blocks=100) as engine:
        hits = [run(engine, prompt) for prompt in texts]
        assert engine.route is not None and engine.route.road == "engine"
    expected = {
        NEVER: [0] * 6,
        STATELESS: [0, 56, 40, 40, 72, 56],
        "InklingForCausalLM": [0, 56, 0, 0, 72, 56],  # its window has passed the 40 tokens' blocks
    }
    assert hits == expected.get(name, [0, 56, 0, 40, 72, 56]), hits


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_load_in_any_budget(seed: int) -> None:
    """Prompts from a tree of prefixes arrive and end; the least budget is what the longest needs
    alone."""
    draw, stem = random.Random(seed), text(40, seed)
    texts = [
        [*stem[: draw.randrange(8, 41)], *text(draw.randrange(1, 20), draw.randrange(6))]
        for _ in range(14)
    ]
    longest = -(-(max(map(len, texts)) + 8) // SIZE) + 1
    config = dict(num_blocks=longest + seed * 5, preemption=["swap", "recompute"][seed % 2])
    with engine_of(build(CLASSES[seed % len(CLASSES)]), **config) as engine:
        asked, results = Asked(engine), {}
        for number, prompt in enumerate(texts):
            options = {"do_sample": True, "max_new_tokens": 9}
            asked.add(str(number), prompt, options, number)
            for _ in range(draw.randrange(4)):
                results |= results_of(engine.step())
                engine.check_integrity()
        asked.check(run_all(engine, results))
        assert_drained(engine)


@contextlib.contextmanager
def interrupt(model: Any, call: int) -> Iterator[None]:
    """In the forward of this number, as the last layer is computed."""
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    countdown = Countdown(call, KeyboardInterrupt)

    def forward(*args: Any) -> Any:
        countdown()
        return type(last).forward(last, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(last, "forward", forward)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("place", range(1, 5))
def test_no_snapshot_is_left_by_a_forward_that_was_interrupted(place: int) -> None:
    """An interrupt in the forward up to the stop, after it, or later."""
    model, prompt = build(CLASSES[0]), text(50, 1)
    with engine_of(model) as engine:
        run(engine, text(5, 1))
        asked = Asked(engine, [prompt], GREEDY)
        with interrupt(model, place), pytest.raises(KeyboardInterrupt):
            for _ in range(8):
                engine.step()
        asked.check()
        run(engine, [*text(40, 1), *text(9, 2)])
        assert run(engine, prompt) > 0


@needs_fingerprints
def test_a_request_that_ends_at_a_stop_leaves_no_snapshot() -> None:
    """No step follows that would copy its state."""
    with engine_of(build(CLASSES[0])) as engine:
        name = engine.add_request(text(60, 1), GREEDY)
        engine.step()
        engine.cancel(name)
        run_all(engine)
        assert not engine.memory.group(StateSpec()).pool.kept_ids
        assert [run(engine, text(60, 1)) for _ in range(2)] == [0, 56]


def test_a_snapshot_is_one_row_of_states() -> None:
    """Memory: its state is counted, and keeps no step of other rows alive."""
    with engine_of(build(CLASSES[0])) as engine:
        engine.generate([text(50, seed) for seed in range(4)], GREEDY)
        group = engine.memory.group(StateSpec())
        (holders,) = {len(slots) for slots in group.storage.holders().values()}
        assert holders == 1 and len(group.storage.holders()) == group.pool.num_cached == 4
        assert group.block_bytes > 0 and engine.stats().cached_blocks >= 4 * 7


STEM = text(80, 1)


def from_stem(*lengths: int, tail: int = 9) -> list[list[int]]:
    return [[*STEM[:length], *text(tail, 10 + seed)] for seed, length in enumerate(lengths)]


# prompts, how many tokens each does not compute, and more of the config
ARRIVALS = {
    # they part within a block
    "one": (
        [[*STEM[:44], *text(3 + seed, 10 + seed)] for seed in range(7)],
        [0, *[40] * 6],
        {},
    ),
    # two beginnings in turn, and a prompt of its own
    "two": (
        [
            *([*[STEM[:44], text(29, 2)][n % 2], *text(5 + n, 10 + n)] for n in range(6)),
            text(50, 3),
        ],
        [0, 0, 40, 24, 40, 24, 0],
        {},
    ),
    # the first stops where it is about to end, the second where the last is
    "whole, first shorter": (from_stem(45, 80, 45, 60, tail=0), [0, 40, 40, 56], {}),
    # it stops where the others end, unless that saves too little
    "whole, first longer": (from_stem(80, 40, 41, 60, tail=0), [0, 32, 32, 56], {}),
    "whole, equal": (from_stem(40, 40, 40, tail=0), [0, 32, 32], {}),
    # a stop at 48 would save too little
    "nested": (from_stem(72, 40, 72, 40, 48, 72), [0, 40, 72, 40, 40, 72], {}),
    # they count before there is room for them
    "waiting for one": (from_stem(44, 44, 44, 44), [0, 40, 40, 40], {"max_num_seqs": 1}),
    "waiting for two": (from_stem(44, 44, 44, 44), [0, 40, 40, 40], {"max_num_seqs": 2}),
}
LATER = [case for case in ARRIVALS if case not in ("one", "two")]


@needs_fingerprints
@pytest.mark.slow_cases(but=["*-GPTNeoForCausalLM", "*-Mamba2ForCausalLM", "waiting*"])
@pytest.mark.parametrize(
    ("case", "name"),
    [
        *itertools.product(("one", "two"), (*CLASSES, STATELESS, NEVER)),
        *itertools.product(LATER, CLASSES[:1]),
    ],
)
def test_prompts_that_arrive_together_begin_behind_the_first(case: str, name: str) -> None:
    texts, expected, config = ARRIVALS[case]
    with engine_of(build(name), **config) as engine:
        results = Asked(engine, texts, GREEDY).check()
        assert case != "two" or engine.stats().num_steps <= GREEDY["max_new_tokens"] + 2
    hits = [results[str(number)].num_prefix_hit_tokens for number in range(len(texts))]
    assert hits == ([0] * 7 if name == NEVER else expected), hits


@pytest.mark.slow
def test_what_was_cached_before_counts() -> None:
    """A later batch begins behind the first one's snapshot, and stops only where that saves
    enough."""
    hits = []
    with engine_of(build(CLASSES[0])) as engine:
        for length in (40, 48, 72):
            batch = [[*STEM[:length], *text(9, length + n)] for n in range(3)]
            results = engine.generate(batch, GREEDY)
            hits.append([result.num_prefix_hit_tokens for result in results])
            assert_lone(engine, batch, results, GREEDY)
        assert_drained(engine)
    assert hits == [[0, 40, 40], [40, 40, 40], [40, 72, 72]]


def sampled(model: Any, inputs: Any, options: Any, **paged: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(**inputs, **options, max_new_tokens=12, pad_token_id=0, **paged)


@needs_fingerprints
@pytest.mark.slow_cases(but=["GPTNeoForCausalLM-options0", "GPTNeoForCausalLM-options1"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"num_beams": 2},
        {"do_sample": False},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2},
    ],
)
@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "FalconH1ForCausalLM", STATELESS])
def test_rows_of_a_call_begin_behind_the_first_and_behind_the_call_before(
    name: str, options: dict[str, Any]
) -> None:
    model, lengths = build(name), (9, 4, 12, 9)
    with forwards(model) as shapes:
        for seed in (1, 2):  # the replaced forward is checked in the first call
            rows = [[*text(44, seed), *text(length, place)] for place, length in enumerate(lengths)]
            inputs, counts = models.left_padded(rows), []
            expected = sampled(model, inputs, options)
            for _ in range(2):
                shapes.clear()
                found = sampled(model, inputs, options, **models.PAGED)
                assert torch.equal(found, expected)
                assert last_route(model).road == "engine"
                counts.append(sum(num * columns for num, columns in shapes if columns > 1))
    # the common tokens once; then what is left of each row behind them, or behind its last block
    assert counts[0] <= 40 + 4 * 4 + sum(lengths)
    assert counts[1] == (26 if name == STATELESS else 4 * 4 + sum(lengths))
    check_integrity(model)
    assert memory_stats(model).used_blocks == 0 < memory_stats(model).cached_blocks


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_the_first_may_leave_or_fail_while_others_await_it(fails: bool) -> None:
    model = build(CLASSES[0])
    with engine_of(model) as engine:
        asked = Asked(engine, from_stem(44, 44, 44, 44), GREEDY)
        if fails:
            with interrupt(model, 1), pytest.raises(KeyboardInterrupt):
                engine.step()
        else:
            engine.step()
            assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 3)
            engine.cancel("0")
        results = asked.check(run_all(engine), "0123"[not fails :])
        assert_drained(engine)
    hits = [results[name].num_prefix_hit_tokens for name in "0123"]
    assert hits == ([0, 40, 40, 40] if fails else [0, 0, 40, 40])


@pytest.mark.slow
def test_only_long_prompts_stop_and_others_decode_meanwhile() -> None:
    model, options = build(CLASSES[0]), {"do_sample": False, "max_new_tokens": 3}
    for prompt, config in (
        (text(7, 1), {}),  # less than a block
        (text(31, 1), {}),  # too few tokens before the last block
        (text(60, 1), {"prefix_caching": False}),
    ):
        with forwards(model) as shapes, engine_of(model, **config) as engine:
            engine.generate([text(5, 9)], options)
            shapes.clear()
            engine.generate([prompt], options)
        assert [columns for _, columns in shapes] == [len(prompt), 1, 1]
    with forwards(model) as shapes, engine_of(model) as engine:
        asked = Asked(engine, [text(5, 1)], GREEDY)
        engine.step()
        shapes.clear()
        asked.add("stops", text(60, 2), GREEDY)
        asked.check()
    assert shapes[:5] == [(1, 56), (1, 1), (1, 4), (1, 1), (2, 1)], shapes


@pytest.mark.slow
@pytest.mark.parametrize("preempt", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "FalconH1ForCausalLM", NEVER])
def test_preempted_rows_come_back_with_their_states(name: str, preempt: str) -> None:
    with engine_of(build(name), num_blocks=28, preemption=preempt) as engine:
        asked = Asked(engine)
        for length, mode in zip((20, 25, 9, 31), ("greedy", "samples", "beams", "sample")):
            asked.add(mode, [*text(24, 1), *text(length, length)], MODES[mode], length)
        asked.check()
        assert engine.stats().num_preemptions > 0, "the budget was meant to be short"
        assert (engine.stats().num_swaps > 0) == (preempt == "swap") or preempt == "auto"
