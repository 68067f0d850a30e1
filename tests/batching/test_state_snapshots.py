"""Prefix cache of models with states: hits begin at a snapshot, prefill stops to take one, tokens
equal plain's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_paged import PagedConfig, PagedEngine, check_integrity, last_route, memory_stats
from hf_paged.batching.scheduling import preemption
from hf_paged.cache.groups import StateSpec
from tests.batching.test_rectangles import build, forwards
from tests.support import models
from tests.support.engine_helpers import (
    MODES,
    assert_drained,
    assert_same_as_lone,
    lone_run,
    run_all,
)

CLASSES = [
    "Qwen3NextForCausalLM",  # linear attention
    "BambaForCausalLM",  # Mamba states
    "Lfm2ForCausalLM",  # convolutions
    "FalconH1ForCausalLM",  # a state and K/V in one layer
    "Mamba2ForCausalLM",  # states alone
]
STATELESS = "GPTNeoForCausalLM"  # rectangular rows for another reason: hits need no snapshot
NEVER = "JambaForCausalLM"  # its layers reset their state in each forward of more than a token
SIZE = 8
LONG_MODES = {mode: options for mode, options in MODES.items() if mode != "max_length"}
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the short prompts of tests worth a snapshot."""
    monkeypatch.setattr(preemption, "SNAPSHOT_TOKENS", 32)
    monkeypatch.setattr(preemption, "FORWARD_TOKENS", 8)
    yield


def text(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(20, 100) for _ in range(length)]


def run(
    engine: PagedEngine, prompt: list[int], options: dict[str, Any], **arguments: Any
) -> tuple[Any, int]:
    """The result of one request, and the number of tokens that it did not compute."""
    before = engine.stats().num_prefix_hit_tokens
    name = engine.add_request(prompt, options, **arguments)
    (result,) = run_all(engine).values()
    assert result.request_id == name
    return result, engine.stats().num_prefix_hit_tokens - before


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
    with PagedEngine(model, PagedConfig(block_size=SIZE, num_blocks=100)) as engine:
        found = [run(engine, prompt, GREEDY) for prompt in texts]
        assert_drained(engine)
        assert engine.route is not None and engine.route.road == "engine"
    hits = [tokens for _, tokens in found]
    expected = {NEVER: [0] * 6, STATELESS: [0, 56, 40, 40, 72, 56]}
    assert hits == expected.get(name, [0, 56, 0, 40, 72, 56]), hits
    for prompt, (result, _) in zip(texts, found):
        assert_same_as_lone(lone_run(model, prompt, GREEDY), result, GREEDY, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_all_modes_begin_side_by_side_behind_snapshots(name: str) -> None:
    """Twice: the second time all begin after the first run's snapshots, with equally many tokens
    left or not."""
    model, system = build(name), text(40, 1)
    texts = [[*system, *text(3 + seed % 4, seed)] for seed in range(len(LONG_MODES))]
    with PagedEngine(model, PagedConfig(block_size=SIZE)) as engine:
        run(engine, [*system, *text(10, 99)], GREEDY)
        for _ in range(2):
            before = engine.stats().num_prefix_hit_tokens
            for seed, ((mode, options), prompt) in enumerate(zip(LONG_MODES.items(), texts)):
                engine.add_request(prompt, options, request_id=mode, seed=seed)
            results = run_all(engine)
            hits = engine.stats().num_prefix_hit_tokens - before
            for seed, ((mode, options), prompt) in enumerate(zip(LONG_MODES.items(), texts)):
                assert_same_as_lone(
                    lone_run(model, prompt, options, seed),
                    results[mode],
                    options,
                    f"{name}, {mode}",
                )
        assert hits == 40 * len(LONG_MODES)
        assert_drained(engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "FalconH1ForCausalLM"])
def test_generate_begins_behind_what_the_call_before_left(name: str) -> None:
    model: Any = build(name)
    lengths = (70, 35, 51, 9)
    width = max(lengths)
    rows = [text(length, seed) for seed, length in enumerate(lengths)]
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    paged = dict(cache_implementation="paged", cache_config={"block_size": SIZE})
    modes: list[dict[str, Any]] = [
        dict(do_sample=False, max_new_tokens=20),
        dict(do_sample=True, max_new_tokens=14),
        dict(do_sample=False, num_beams=3, max_new_tokens=10),
        dict(do_sample=True, num_return_sequences=3, max_new_tokens=10),
        dict(do_sample=True, num_beams=2, max_new_tokens=10),
    ]
    model.generate(
        ids, attention_mask=mask, pad_token_id=0, max_new_tokens=4, do_sample=False, **paged
    )
    for options in modes:
        options["pad_token_id"] = 0
        with forwards(model) as shapes:
            torch.manual_seed(5)
            # the replaced forward is checked
            model.generate(ids, attention_mask=mask, **options, **paged)
            shapes.clear()
            torch.manual_seed(5)
            found = model.generate(ids, attention_mask=mask, **options, **paged)
        assert sum(columns for _, columns in shapes if columns > 1) <= 6 + 3 + 3 + 9, (
            f"prompts are computed: {shapes}"
        )
        route = last_route(model)
        assert route is not None and route.road == "engine", route
        torch.manual_seed(5)
        assert torch.equal(model.generate(ids, attention_mask=mask, **options), found), options
    check_integrity(model)
    assert memory_stats(model).used_blocks == 0 and memory_stats(model).cached_blocks > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_short_prompts_are_one_forward(name: str) -> None:
    model, options = build(name), {"do_sample": False, "max_new_tokens": 3}
    for prompt, config in (
        (text(7, 1), {}),  # less than a block
        (text(31, 1), {}),  # too few tokens before the last block
        (text(60, 1), {"prefix_caching": False}),
    ):
        with (
            forwards(model) as shapes,
            PagedEngine(model, PagedConfig(block_size=SIZE, **config)) as engine,
        ):
            run(engine, text(5, 9), options)
            shapes.clear()
            run(engine, prompt, options)
        assert [columns for _, columns in shapes] == [len(prompt), 1, 1]


@pytest.mark.slow
def test_others_decode_beside_a_prompt_that_stops() -> None:
    model = build(CLASSES[0])
    with forwards(model) as shapes, PagedEngine(model, PagedConfig(block_size=SIZE)) as engine:
        engine.add_request(text(5, 1), GREEDY, request_id="a")
        engine.step()
        shapes.clear()
        engine.add_request(text(60, 2), GREEDY, request_id="b")
        engine.step()
        engine.step()
        results = run_all(engine)
    assert shapes[:5] == [(1, 56), (1, 1), (1, 4), (1, 1), (2, 1)], shapes
    for name, prompt in (("a", text(5, 1)), ("b", text(60, 2))):
        assert_same_as_lone(lone_run(model, prompt, GREEDY), results[name], GREEDY, name)


@pytest.mark.slow
@pytest.mark.parametrize("preempt", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "FalconH1ForCausalLM", NEVER])
def test_preempted_rows_come_back_with_their_states(name: str, preempt: str) -> None:
    model, system = build(name), text(24, 1)
    texts = [[*system, *text(length, length)] for length in (20, 25, 9, 31)]
    modes = [MODES["greedy"], MODES["samples"], MODES["beams"], MODES["sample"]]
    with PagedEngine(
        model, PagedConfig(block_size=SIZE, num_blocks=28, preemption=preempt)
    ) as engine:
        for seed, (prompt, options) in enumerate(zip(texts, modes)):
            engine.add_request(prompt, options, request_id=str(seed), seed=seed)
        results = run_all(engine)
        assert engine.stats().num_preemptions > 0, "the budget was meant to be short"
        assert (engine.stats().num_swaps > 0) == (preempt == "swap") or preempt == "auto"
        assert_drained(engine)
    for seed, (prompt, options) in enumerate(zip(texts, modes)):
        assert_same_as_lone(
            lone_run(model, prompt, options, seed), results[str(seed)], options, f"{name}, {seed}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_load_in_any_budget(seed: int) -> None:
    """Prompts from a tree of prefixes arrive and end; the least budget is what the longest needs
    alone."""
    draw = random.Random(seed)
    model = build(CLASSES[seed % len(CLASSES)])
    stem = text(40, seed)
    texts = [
        [*stem[: draw.randrange(8, 41)], *text(draw.randrange(1, 20), draw.randrange(6))]
        for _ in range(14)
    ]
    options = {"do_sample": True, "max_new_tokens": 9}
    longest = -(-(max(map(len, texts)) + 8) // SIZE) + 1
    config = PagedConfig(
        block_size=SIZE, num_blocks=longest + seed * 5, preemption=["swap", "recompute"][seed % 2]
    )
    results: dict[str, Any] = {}
    with PagedEngine(model, config) as engine:
        for number, prompt in enumerate(texts):
            engine.add_request(prompt, options, request_id=str(number), seed=number)
            for _ in range(draw.randrange(4)):
                results |= {
                    output.request_id: output.result for output in engine.step() if output.result
                }
                engine.check_integrity()
        results |= run_all(engine)
        assert_drained(engine)
    for number, prompt in enumerate(texts):
        assert_same_as_lone(
            lone_run(model, prompt, options, number), results[str(number)], options, str(number)
        )


@pytest.mark.slow
def test_a_prompt_that_fits_alone_fits_with_a_snapshot() -> None:
    model, prompt = build(CLASSES[0]), text(50, 1)
    for num_blocks in (8, 9):  # 7 for its tokens, a slot; and one for the snapshot
        with PagedEngine(model, PagedConfig(block_size=SIZE, num_blocks=num_blocks)) as engine:
            results = [run(engine, prompt, {**GREEDY, "max_new_tokens": 7}) for _ in range(3)]
            assert_drained(engine)
        for result, _ in results:
            options = {**GREEDY, "max_new_tokens": 7}
            assert_same_as_lone(lone_run(model, prompt, options), result, options, str(num_blocks))
        assert (results[1][1] > 0) == (num_blocks == 9)


@pytest.mark.slow
def test_snapshots_are_not_served_to_others() -> None:
    """Another salt, other weights."""
    model, prompt = build(CLASSES[0]), text(50, 1)
    weight = model.get_output_embeddings().weight
    with PagedEngine(model, PagedConfig(block_size=SIZE)) as engine:
        hits = [run(engine, prompt, GREEDY, cache_salt=salt)[1] for salt in ("one", "two", "one")]
        with torch.no_grad():
            weight.mul_(-1)
        try:
            result, after = run(engine, prompt, GREEDY, cache_salt="one")
            assert_same_as_lone(lone_run(model, prompt, GREEDY), result, GREEDY, "other weights")
        finally:
            with torch.no_grad():
                weight.mul_(-1)
        assert_drained(engine)
    assert (hits, after) == ([0, 0, 48], 0)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(1, 5))
def test_no_snapshot_is_left_by_a_forward_that_was_interrupted(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt in the forward up to the stop, after it, or later."""
    model, texts = build(CLASSES[0]), [text(50, 1), [*text(40, 1), *text(9, 2)]]
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    calls = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == place:
            raise KeyboardInterrupt
        return type(last).forward(last, *args, **kwargs)

    with PagedEngine(model, PagedConfig(block_size=SIZE)) as engine:
        run(engine, text(5, 1), GREEDY)
        engine.add_request(texts[0], GREEDY, request_id="first")
        monkeypatch.setattr(last, "forward", forward)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(8):
                engine.step()
        monkeypatch.undo()
        results = run_all(engine)
        second, _ = run(engine, texts[1], GREEDY)
        again, hits = run(engine, texts[0], GREEDY)
        assert_drained(engine)
    assert hits > 0
    for prompt, result in ((texts[0], results["first"]), (texts[1], second), (texts[0], again)):
        assert_same_as_lone(lone_run(model, prompt, GREEDY), result, GREEDY, str(place))


def test_a_request_that_ends_at_a_stop_leaves_no_snapshot() -> None:
    """No step follows that would copy its state."""
    model, prompt = build(CLASSES[0]), text(60, 1)
    with PagedEngine(model, PagedConfig(block_size=SIZE)) as engine:
        name = engine.add_request(prompt, GREEDY)
        engine.step()
        engine.cancel(name)
        run_all(engine)
        assert not engine.memory.group(StateSpec()).pool.kept_ids
        for expected in (0, 56):
            result, hits = run(engine, prompt, GREEDY)
            assert hits == expected
            assert_same_as_lone(
                lone_run(model, prompt, GREEDY), result, GREEDY, "after a cancelled request"
            )
        assert_drained(engine)


def test_a_processor_that_fails_leaves_snapshots_whole() -> None:
    class Fails(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise ValueError("on purpose")

    model: Any = build(CLASSES[1])
    ids = torch.tensor([text(60, 1)])
    paged = dict(
        cache_implementation="paged",
        cache_config={"block_size": SIZE},
        max_new_tokens=8,
        do_sample=False,
    )
    with pytest.raises(ValueError, match="on purpose"):
        model.generate(ids, logits_processor=LogitsProcessorList([Fails()]), **paged)
    for _ in range(2):
        found = model.generate(ids, **paged)
        assert torch.equal(found, model.generate(ids, max_new_tokens=8, do_sample=False))
    check_integrity(model)


def test_a_snapshot_is_one_row_of_states() -> None:
    """Memory: its state is counted, and keeps no step of other rows alive."""
    model = build(CLASSES[0])
    with PagedEngine(model, PagedConfig(block_size=SIZE)) as engine:
        for seed in range(4):
            engine.add_request(text(50, seed), GREEDY, request_id=str(seed))
        run_all(engine)
        group = engine.memory.group(StateSpec())
        (holders,) = {len(slots) for slots in group.storage.holders().values()}
        assert holders == 1 and len(group.storage.holders()) == group.pool.num_cached == 4
        assert group.block_bytes > 0 and engine.stats().cached_blocks >= 4 * 7


TOGETHER = pytest.mark.parametrize("name", [*CLASSES, STATELESS, NEVER])


def run_together(
    model: Any, texts: list[list[int]], options: dict[str, Any] = GREEDY, **config: Any
) -> tuple[list[int], Any]:
    """Runs prompts that arrive together, checks their tokens, and returns what each did not
    compute, and the stats."""
    with PagedEngine(model, PagedConfig(block_size=SIZE, **config)) as engine:
        for seed, prompt in enumerate(texts):
            engine.add_request(prompt, options, request_id=str(seed), seed=seed)
        results = run_all(engine)
        stats = engine.stats()
        assert_drained(engine)
    for seed, prompt in enumerate(texts):
        expected = lone_run(model, prompt, options, seed)
        assert_same_as_lone(
            expected, results[str(seed)], options, f"{type(model).__name__}, {seed}"
        )
    return [results[str(seed)].num_prefix_hit_tokens for seed in range(len(texts))], stats


@pytest.mark.slow_cases(but=["GPTNeoForCausalLM", "Mamba2ForCausalLM"])
@TOGETHER
def test_prompts_that_arrive_together_begin_behind_the_first(name: str) -> None:
    """They part within a block."""
    system = text(44, 1)
    hits, _ = run_together(
        build(name), [[*system, *text(3 + seed, 10 + seed)] for seed in range(7)]
    )
    assert hits == [0] * 7 if name == NEVER else hits == [0] + [40] * 6, hits


@pytest.mark.slow_cases(but=["GPTNeoForCausalLM", "Mamba2ForCausalLM"])
@TOGETHER
def test_groups_that_arrive_together_begin_in_one_step(name: str) -> None:
    """Two beginnings in turn, and a prompt of its own."""
    model, systems = build(name), [text(44, 1), text(29, 2)]
    texts = [[*systems[number % 2], *text(5 + number, 10 + number)] for number in range(6)]
    hits, stats = run_together(model, [*texts, text(50, 3)])
    assert hits == [0] * 7 if name == NEVER else hits == [0, 0, 40, 24, 40, 24, 0], hits
    assert stats.num_steps <= GREEDY["max_new_tokens"] + 2


@pytest.mark.slow
def test_one_prompt_is_the_beginning_of_another() -> None:
    model, stem = build(CLASSES[0]), text(80, 1)
    for lengths, expected in (
        # the first stops where it is about to end, the second where the last is
        ((45, 80, 45, 60), [0, 40, 40, 56]),
        # it stops where the others end, unless that saves too little
        ((80, 40, 41, 60), [0, 32, 32, 56]),
        ((40, 40, 40), [0, 32, 32]),
    ):
        hits, _ = run_together(model, [stem[:length] for length in lengths])
        assert hits == expected, lengths


@pytest.mark.slow
def test_a_beginning_within_a_beginning() -> None:
    model, stem = build(CLASSES[0]), text(72, 1)
    texts = [
        [*stem[:length], *text(9, 10 + seed)]
        for seed, length in enumerate((72, 40, 72, 40, 48, 72))
    ]
    hits, _ = run_together(model, texts)
    assert hits == [0, 40, 72, 40, 40, 72], "a stop at 48 would save too little"


@pytest.mark.slow
def test_what_was_cached_before_counts() -> None:
    """A later batch begins behind the first one's snapshot, and stops only where that saves
    enough."""
    model, stem = build(CLASSES[0]), text(72, 1)
    with PagedEngine(model, PagedConfig(block_size=SIZE)) as engine:
        batches = [
            [[*stem[:length], *text(9, length + n)] for n in range(3)] for length in (40, 48, 72)
        ]
        hits = []
        for batch in batches:
            results = engine.generate(batch, GREEDY)
            hits.append([result.num_prefix_hit_tokens for result in results])
            for prompt, result in zip(batch, results):
                assert_same_as_lone(lone_run(model, prompt, GREEDY), result, GREEDY, str(hits))
        assert_drained(engine)
    assert hits == [[0, 40, 40], [40, 40, 40], [40, 72, 72]]


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_waiting_prompts_count_before_there_is_room_for_them(max_num_seqs: int) -> None:
    system = text(44, 1)
    texts = [[*system, *text(9, 10 + seed)] for seed in range(4)]
    hits, _ = run_together(build(CLASSES[0]), texts, max_num_seqs=max_num_seqs)
    assert hits == [0, 40, 40, 40]


@pytest.mark.slow_cases(but=["GPTNeoForCausalLM-recompute"])
@pytest.mark.parametrize("preempt", ["swap", "recompute"])
@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "FalconH1ForCausalLM", STATELESS])
def test_prompts_that_arrive_together_in_a_tight_pool(name: str, preempt: str) -> None:
    model, system = build(name), text(28, 1)
    texts = [[*system, *text(length, length)] for length in (3, 20, 25, 9, 14)]
    options = {"do_sample": True, "max_new_tokens": 20}
    _, stats = run_together(model, texts, options, num_blocks=14, preemption=preempt)
    assert stats.num_preemptions > 0, "the budget was meant to be short"


@pytest.mark.slow_cases("Qwen3NextForCausalLM-*")
@pytest.mark.parametrize(
    "options", [{"do_sample": True}, {"do_sample": False, "num_beams": 2}], ids=str
)
@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", STATELESS])
def test_the_rows_of_a_call_begin_behind_the_first(name: str, options: dict[str, Any]) -> None:
    model: Any = build(name)
    lengths, options = (9, 4, 12, 9), {**options, "max_new_tokens": 12, "pad_token_id": 0}
    paged = dict(cache_implementation="paged", cache_config={"block_size": SIZE})
    with forwards(model) as shapes:
        for system in (text(44, 1), text(44, 2)):
            # the replaced forward is checked in the first call
            rows = [[*system, *text(length, seed)] for seed, length in enumerate(lengths)]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            shapes.clear()
            torch.manual_seed(5)
            found = model.generate(ids, attention_mask=mask, **options, **paged)
            num_tokens = sum(rows * columns for rows, columns in shapes if columns > 1)
            torch.manual_seed(5)
            assert torch.equal(model.generate(ids, attention_mask=mask, **options), found)
    assert num_tokens <= 40 + 4 * 4 + sum(lengths), "the common tokens are computed once"


@pytest.mark.slow
def test_the_first_may_leave_or_fail_while_others_await_it() -> None:
    model, system = build(CLASSES[0]), text(44, 1)
    texts = [[*system, *text(9, 10 + seed)] for seed in range(4)]
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    for breaks in (False, True):
        with PagedEngine(model, PagedConfig(block_size=SIZE)) as engine:
            names = [engine.add_request(prompt, GREEDY) for prompt in texts]
            if breaks:
                with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(last, "forward", fail)
                    engine.step()
            else:
                engine.step()
                assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 3)
                engine.cancel(names[0])
            results = run_all(engine)
            assert_drained(engine)
        for name, prompt in list(zip(names, texts))[not breaks :]:
            assert_same_as_lone(lone_run(model, prompt, GREEDY), results[name], GREEDY, name)
        hits = [results[name].num_prefix_hit_tokens for name in names]
        assert hits == [0, 40, 40, 40] if breaks else hits == [0, 0, 40, 40]
