"""Speculation: rows that get several tokens per step have the tokens of runs without drafts,
however good the drafts."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, WatermarkingConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.streamers import BaseStreamer

import hf_paged
from hf_paged import EngineStats, PagedConfig, PagedEngine, RequestResult, compat
from hf_paged.batching.decoding.base import Draft
from hf_paged.batching.factory import empty_cache
from hf_paged.batching.generation import Generation
from hf_paged.batching.request import Sequence
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.memory import PagedMemory
from hf_paged.speculation.assistant import Assistant, AssistantRow
from hf_paged.speculation.sources import (
    MAX_DRAFT_TOKENS,
    MAX_INDEX_NGRAMS,
    CandidateSource,
    DraftLength,
    DrawnDraft,
    NgramIndex,
    Ngrams,
    Source,
    StepCosts,
)
from hf_paged.speculation.speculator import Speculator
from tests.batching.test_packed_families import build
from tests.support import models
from tests.support.checks import in_threads
from tests.support.engine_helpers import (
    MODES,
    Asked,
    assert_drained,
    assert_same_as_lone,
    lone_run,
    prompts,
    run_all,
)
from tests.support.rooms import needs_fingerprints

NGRAM: dict[str, Any] = {"block_size": 8, "speculation": "ngram"}
GREEDY = {"do_sample": False, "max_new_tokens": 30}
ONE_ROW = [
    "greedy",
    "greedy_eos",
    "max_length",
    "penalties",
    "min_new_tokens",
    "sample",
    "sample_warped",
]


def repeating(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Prompts that repeat themselves, so that their n-grams give drafts."""
    return [(prompt * 4)[: len(prompt) * 3 + 2] for prompt in prompts(*lengths, seed=seed)]


class Oracle(Source):
    """Drafts as many correct tokens as planned, then wrong ones; records the accepted ones."""

    def __init__(self, text: list[int], rng: random.Random) -> None:
        self.text, self.rng, self.expected = text, rng, 0
        self.seen: list[tuple[int, int]] = []

    def propose(self, token_ids: list[int], count: int) -> Draft | None:
        right = self.text[len(token_ids) : len(token_ids) + self.rng.randint(0, count)]
        wrong = [
            (token + 1) % models.VOCAB_SIZE for token in self.text[len(token_ids) + len(right) :]
        ]
        tokens = (right + wrong)[: self.rng.randint(1, count)]
        self.expected = min(len(right), len(tokens))
        return Draft(tokens)

    def observe(self, token_ids: list[int], num_accepted: int) -> None:
        self.seen.append((self.expected, num_accepted))
        assert token_ids == self.text[: len(token_ids)]

    def close(self) -> None:
        pass


def with_oracles(engine: PagedEngine, texts: list[list[int]], seed: int = 0) -> list[Oracle]:
    """Makes the engine's unfinished requests draft from these texts, with any length."""
    oracles = []
    sources = drafted_rows(engine)
    for number, row in enumerate(sources):
        sources[row] = oracle = Oracle(texts[number], random.Random(seed + number))
        oracles.append(oracle)
    return oracles


def drafted_rows(engine: PagedEngine) -> dict[Generation, Source]:
    loop = engine._core.loop
    assert loop is not None and isinstance(loop.drafter.instance, Speculator)
    return loop.drafter.instance.rows


# --------------------------------------------------------------------------------------- generate


@pytest.mark.slow_cases(but=["cpu-llama", "cpu-gemma3", "cpu-gpt2", "cuda-*"])
@pytest.mark.parametrize("name", models.DECODER_ONLY)
def test_a_batch_that_speculates_gives_plain_tokens(name: str, device: torch.device) -> None:
    model = models.put(models.get(name), device)
    inputs = models.put(models.padded_prompt(name, (29, 8, 17, 24)), device)
    expected = model.generate(**inputs, **GREEDY)
    for number_of_tokens in (1, 5):
        options = {**GREEDY, "prompt_lookup_num_tokens": number_of_tokens}
        assert torch.equal(model.generate(**inputs, **options, **models.PAGED), expected)
    assert torch.equal(model.generate(**inputs, **GREEDY, **_with(speculation="ngram")), expected)
    route = hf_paged.last_route(model)
    assert route is not None and route.road == "engine"
    hf_paged.check_integrity(model)


def _with(**config: Any) -> dict[str, Any]:
    return {"cache_implementation": "paged", "cache_config": {"block_size": 8, **config}}


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("number_of_tokens", [1, 3, 9])
def test_sixteen_rows_with_assistants(number_of_tokens: int, device: torch.device) -> None:
    """Assistants: one mostly right, one mostly wrong, and early exit of the model itself."""
    model = models.put(models.get("llama"), device)
    inputs = models.put(models.padded_prompt("llama", tuple(range(3, 19))), device)
    expected = model.generate(**inputs, **GREEDY)
    for assistant in (
        models.put(models.get_assistant("llama"), device),
        models.build("llama", seed=5).to(device),
    ):
        assistant.generation_config.num_assistant_tokens = number_of_tokens
        try:
            out = model.generate(**inputs, **GREEDY, **models.PAGED, assistant_model=assistant)
        finally:
            assistant.generation_config.num_assistant_tokens = None
        assert torch.equal(out, expected)
        route = hf_paged.last_route(model)
        assert route is not None and route.road == "engine" and route.num_draft_tokens > 0
        assert 0 <= route.num_accepted_tokens <= route.num_draft_tokens
    out = model.generate(**inputs, **GREEDY, **models.PAGED, assistant_early_exit=1)
    assert torch.equal(out, expected)
    hf_paged.check_integrity(model)


def test_a_good_assistant_saves_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # whatever the step times on this machine
    monkeypatch.setattr(StepCosts, "price", lambda *args: 0.05)
    model, inputs = models.get("llama"), models.padded_prompt("llama", (9, 5, 12))
    model.generate(
        **inputs, **GREEDY, **models.PAGED, assistant_model=models.get_assistant("llama")
    )
    route = hf_paged.last_route(model)
    assert route is not None and route.num_accepted_tokens > 20


def test_a_cache_that_is_returned_holds_what_plain_holds() -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama", (12, 20))
    options = {**GREEDY, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **options)
    paged = model.generate(**inputs, **options, **models.PAGED, prompt_lookup_num_tokens=4)
    assert torch.equal(plain.sequences, paged.sequences)
    assert paged.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
    route = hf_paged.last_route(model)
    assert route is not None and route.road == "engine"
    mask = inputs["attention_mask"][:, :, None].bool()
    keys = [cache.past_key_values.layers[1].keys[:, 0, : mask.shape[1]] for cache in (plain, paged)]
    torch.testing.assert_close(
        keys[0] * mask, torch.as_tensor(keys[1]) * mask, atol=1e-4, rtol=1e-4
    )


@pytest.mark.slow
def test_threads_that_speculate_share_a_loop() -> None:
    model = models.get("llama")
    texts = [models.padded_prompt("llama", (4 + n, 13 - n), seed=n) for n in range(4)]
    expected = [model.generate(**text, **GREEDY) for text in texts]
    assistant = models.get_assistant("llama")
    ways: list[dict[str, Any]] = [
        {"assistant_model": assistant},
        {"prompt_lookup_num_tokens": 4},
        {"assistant_model": assistant},
        {},
    ]

    def run(number: int) -> Callable[[], None]:
        def call() -> None:
            for _ in range(3):
                out = model.generate(**texts[number], **GREEDY, **ways[number], **models.PAGED)
                assert torch.equal(out, expected[number])

        return call

    in_threads(*map(run, range(4)))
    hf_paged.check_integrity(model)


# ----------------------------------------------------------------------------------------- engine


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [{}, {"num_blocks": 30, "preemption": "swap"}, {"max_num_batched_tokens": 12}]
)
def test_requests_of_all_kinds_in_one_batch(config: dict[str, Any]) -> None:
    assert check_all_kinds(models.get("llama"), **config).num_accepted_tokens > 0


def check_all_kinds(model: Any, **config: Any) -> EngineStats:
    """Requests of a single row get drafts, also if sampled with a seed, penalised or ended in the
    middle of a draft."""
    texts = repeating(5, 7, 4, 6, 3, 5, 8, 6, 4, 7, 5)
    with PagedEngine(model, PagedConfig(**{**NGRAM, **config})) as engine:
        asked = Asked(engine)
        for seed, ((mode, options), text) in enumerate(zip(MODES.items(), texts)):
            asked.add(mode, text, options, seed)
        for mode, result in asked.check().items():
            assert not result.num_draft_tokens or mode in ONE_ROW
        return engine.stats()


@pytest.mark.slow_cases(but=["llama"])
@pytest.mark.parametrize("name", models.DECODER_ONLY)
def test_random_accept_lengths(name: str) -> None:
    """Also past a window, and with requests that lose their blocks in mid-draft."""
    check_accept_lengths(models.get(name), prompts(3, 12, 7, 20), (None, None, 26))


@pytest.mark.full
@pytest.mark.slow
def test_ten_thousand_random_accept_lengths() -> None:
    model, count = models.get("llama"), 0
    for n in range(24, 140):
        count += len(check_accept_lengths(model, prompts(3, 12, 7, 20, seed=n), [n] * 4, seed=n))
    assert count > 10_000


def check_accept_lengths(
    model: Any,
    texts: list[list[int]],
    budgets: Iterable[int | None],
    seed: int = 0,
    beside: dict[str, Any] | None = None,
) -> list[tuple[int, int]]:
    """Runs requests that draft once with each number of blocks, `beside` a row of these options;
    returns how many tokens of each draft were right and accepted."""
    seen = []
    full = [text + lone_run(model, text, GREEDY)[0] for text in texts]
    for turn, num_blocks in enumerate(budgets):
        config = PagedConfig(
            **NGRAM, num_blocks=num_blocks, preemption=("swap", "recompute")[turn % 2]
        )
        with PagedEngine(model, config) as engine:
            ids = [engine.add_request(text, GREEDY) for text in texts]
            oracles = with_oracles(engine, full, seed=seed + 10 * turn)
            asked = Asked(engine, texts[1:2] if beside else (), beside or {})
            results = asked.check()
        for request_id, text, whole, oracle in zip(ids, texts, full, oracles):
            assert results[request_id].token_ids == whole[len(text) :], turn
            assert all(accepted <= expected for expected, accepted in oracle.seen)
            assert num_blocks or any(accepted for _, accepted in oracle.seen)
            seen += oracle.seen
    return seen


@needs_fingerprints
def test_rejected_tokens_are_never_served_from_the_prefix_cache() -> None:
    """The second request begins with the first one's text: K/V of wrong drafts would give other
    tokens."""
    model, (text,) = models.get("llama"), prompts(9)
    whole = text + lone_run(model, text, GREEDY)[0]
    with PagedEngine(model, PagedConfig(**NGRAM)) as engine:
        engine.add_request(text, GREEDY)
        with_oracles(engine, [whole])
        run_all(engine)
        (again,) = engine.generate([whole], GREEDY)
        assert again.num_prefix_hit_tokens >= 32
        assert 0 < engine.stats().num_drafts <= engine.stats().num_draft_tokens
    assert again.token_ids == lone_run(model, whole, GREEDY)[0]


def test_outputs_come_token_by_token() -> None:
    """One output per token, with its text; streamers, log-probabilities and stop strings as without
    drafts."""
    model, tokenizer, (text,) = models.get("llama"), models.tokenizer(), prompts(6)
    whole = text + lone_run(model, text, GREEDY)[0]
    seen: list[int] = []

    class Streamer(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            seen.extend(value.flatten().tolist())

        def end(self) -> None:
            seen.append(-1)

    found: dict[bool, tuple[list[Any], RequestResult]] = {}
    for speculates in (False, True):
        config = PagedConfig(block_size=8, speculation="ngram" if speculates else None)
        with PagedEngine(model, config, tokenizer=tokenizer) as engine:
            options = {"return_logprobs": True, "top_logprobs": 2}
            engine.add_request(text, GREEDY, streamer=Streamer(), **options)
            if speculates:
                with_oracles(engine, [whole])
            outputs = [
                output
                for _ in iter(lambda: engine.has_unfinished, False)
                for output in engine.step()
            ]
            assert (engine.stats().num_accepted_tokens > 0) == speculates
            assert (engine.stats().num_steps < 30) == speculates
        result = outputs[-1].result
        assert result is not None
        found[speculates] = [(output.new_tokens, output.text) for output in outputs], result
    (plain, expected), (ours, result) = found[False], found[True]
    assert ours == plain and [list(tokens.values()) for tokens, _ in ours] == [
        [token] for token in expected.token_ids
    ]
    assert (
        result.text == expected.text
        and expected.logprobs is not None
        and result.logprobs is not None
    )
    torch.testing.assert_close(result.logprobs, expected.logprobs, atol=1e-4, rtol=0)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_a_stop_string_in_the_middle_of_a_draft() -> None:
    model, tokenizer, (text,) = models.get("llama"), models.tokenizer(), prompts(6)
    whole = text + lone_run(model, text, GREEDY)[0]
    stop = tokenizer.decode(whole[len(text) + 9 : len(text) + 11])
    options = {**GREEDY, "stop_strings": [stop]}
    expected = lone_run(model, text, options, tokenizer=tokenizer)[0]
    with PagedEngine(model, PagedConfig(**NGRAM), tokenizer=tokenizer) as engine:
        name = engine.add_request(text, options)
        with_oracles(engine, [whole])[0].rng = random.Random(3)
        result = run_all(engine)[name]
        assert_drained(engine)
    assert (
        result.token_ids == expected
        and result.finish_reason == "stop_string"
        and len(expected) < 20
    )


@pytest.mark.slow
def test_processors_with_a_state_see_refused_candidates_as_in_plain_generate() -> None:
    """Guidance has a cache of its own, which then holds them: other tokens than without
    candidates."""
    model, ids = models.get("gpt_oss"), torch.tensor([[38, 82, 50, 72, 15, 9, 54, 82]])
    options = {
        **{"max_new_tokens": 13, "do_sample": False, "guidance_scale": 1.5},
        "watermarking_config": WatermarkingConfig(),
    }
    alone = model.generate(ids, **options)
    plain = model.generate(ids, **options, prompt_lookup_num_tokens=3)
    assert not torch.equal(plain, alone)
    ours = model.generate(ids, **options, prompt_lookup_num_tokens=3, cache_implementation="paged")
    assert torch.equal(ours, plain)
    assert "rejected drafts" in hf_paged.last_route(model).reason


def test_a_callers_processor_sees_what_it_sees_without() -> None:
    """A stateful processor: called once per token, in order, with the tokens of the row at that
    time."""
    model, (text,) = models.get("llama"), repeating(5)

    class Counting(LogitsProcessor):
        def __init__(self) -> None:
            self.lengths: list[int] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.lengths.append(input_ids.shape[1])
            return scores.roll(len(self.lengths) % 3, dims=-1)

    expected = lone_run(model, text, GREEDY, logits_processor=[Counting()])[0]
    processor = Counting()
    with PagedEngine(model, PagedConfig(**NGRAM)) as engine:
        engine.add_request(text, GREEDY, logits_processor=[processor])
        with_oracles(engine, [text + expected])
        (result,) = run_all(engine).values()
    assert result.token_ids == expected
    assert processor.lengths == list(range(len(text), len(text) + 30))


def test_what_others_generated_is_proposed_within_a_salt_alone() -> None:
    model, (text,) = models.get("llama"), prompts(9)
    with PagedEngine(model, PagedConfig(**NGRAM, prefix_caching=False)) as engine:
        first, again, other, salted, last = (
            engine.generate([text], GREEDY, cache_salt=salt)[0]
            for salt in (None, None, "a", "a", "b")
        )
    assert len({tuple(result.token_ids) for result in (first, again, other, salted, last)}) == 1
    assert again.num_accepted_tokens > first.num_accepted_tokens
    assert salted.num_accepted_tokens > other.num_accepted_tokens == last.num_accepted_tokens


# ------------------------------------------------------------------------------------- assistants


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [None, 60, 24])
def test_requests_with_and_without_an_assistant(num_blocks: int | None) -> None:
    """The assistant's blocks come from the engine's memory, and are freed if blocks are short."""
    model, texts = models.get("llama"), prompts(9, 14, 6, 20, 11, 8)
    expected = [lone_run(model, text, GREEDY)[0] for text in texts]
    with PagedEngine(
        model, PagedConfig(block_size=8, num_blocks=num_blocks, prefix_caching=False)
    ) as engine:
        assistants = [models.get_assistant("llama"), None, models.build("llama", seed=5)] * 2
        ids = [
            engine.add_request(text, GREEDY, assistant_model=a)
            for text, a in zip(texts, assistants)
        ]
        results = run_all(engine)
        assert_drained(engine)
        assert all(group.pool.num_used == 0 for group in engine.memory.groups.values())
    assert [results[name].token_ids for name in ids] == expected
    drafts = [results[name].num_draft_tokens for name in ids]
    assert not drafts[1] and not drafts[4] and (num_blocks or (drafts[0] and drafts[3]))


@pytest.mark.slow
def test_no_request_gives_its_blocks_up_for_an_assistant() -> None:
    model, texts = models.get("llama"), prompts(9, 14, 6, 20)
    num_blocks = sum(-(-(len(text) + 29) // 8) for text in texts)  # exactly what the requests need
    config = PagedConfig(block_size=8, num_blocks=num_blocks, prefix_caching=False)
    with PagedEngine(model, config) as engine:
        results = engine.generate(texts, GREEDY, assistant_model=models.get_assistant("llama"))
        assert engine.stats().num_preemptions == 0 and engine.stats().num_draft_tokens > 0
        assert_drained(engine)
    assert [result.token_ids for result in results] == [
        lone_run(model, text, GREEDY)[0] for text in texts
    ]


def test_an_assistant_that_was_not_asked_for_a_while_reads_the_rows_own_tokens() -> None:
    model, (text, other) = models.get("llama"), prompts(9, 30)
    assistant = models.build("llama", seed=5)
    assistant.generation_config.assistant_confidence_threshold = 0.0
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        for _ in range(2):
            engine.add_request(text, GREEDY, assistant_model=assistant)
        first, second = drafted_rows(engine).values()
        first.assistant.propose([(first, Sequence(list(text)), 6)])
        drafts = first.assistant.propose(
            [(row, Sequence(text + other), 6) for row in (first, second)]
        )
        assert (
            drafts[0] is not None and drafts[1] is not None and drafts[0].tokens == drafts[1].tokens
        )


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (BlockManager, "take"),
        (AssistantRow, "move_tail_to_draft"),
        (AssistantRow, "move_draft_back"),
    ],
    ids=["take", "move_tail", "move_back"],
)
def test_an_engine_goes_on_after_an_exception_behind_a_change_of_an_assistant(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    model, assistant, texts = models.get("llama"), models.get_assistant("llama"), prompts(9, 14)
    options = {"do_sample": False, "max_new_tokens": 12}
    expected = [lone_run(model, text, options) for text in texts]
    with PagedEngine(model, PagedConfig(block_size=8, storage="blocks")) as engine:
        for is_faulty in (True, False):
            for number, text in enumerate(texts):
                engine.add_request(text, options, request_id=str(number), assistant_model=assistant)
            with monkeypatch.context() as patch:
                change, has_failed, own = (
                    getattr(owner, name),
                    False,
                    engine._core.get_loop().blocks,
                )

                def changed(
                    self: Any, *args: Any, change: Any = change, own: Any = own, **named: Any
                ) -> Any:
                    nonlocal has_failed
                    result = change(self, *args, **named)
                    if self is not own and not has_failed:
                        has_failed = True
                        raise MemoryError("on purpose")
                    return result

                if is_faulty:
                    patch.setattr(owner, name, changed)
                results = run_all(engine)
                assert has_failed == is_faulty
            for number, tokens in enumerate(expected):
                result = results[str(number)]
                if is_faulty and result.error is not None:
                    assert str(result.error) == "on purpose"
                else:
                    assert_same_as_lone(tokens, result, options, f"request {number}")
            assert_drained(engine)


@pytest.mark.slow
def test_sampled_requests_are_those_of_transformers_for_one_row() -> None:
    """Token for token, with a seed: the assistant draws, accepts and corrects as
    `_assisted_decoding` does."""
    model, texts = models.get("llama"), prompts(9, 14, 6, 20)
    for assistant in (models.get_assistant("llama"), models.build("llama", seed=5)):
        ends = {"eos_token_id": list(range(60, 90)), "min_new_tokens": 9}
        for options in ({"temperature": 0.7}, {"top_p": 0.9, "top_k": 40}, ends):
            # transformers' assistant builds its masks from tokens, so padding inside the text is
            # hidden
            config = {
                "do_sample": True,
                "max_new_tokens": 25,
                "suppress_tokens": [models.PAD],
                **options,
            }
            expected = [
                lone_run(model, x, config, n, assistant_model=assistant)[0]
                for n, x in enumerate(texts)
            ]
            with PagedEngine(model, PagedConfig(block_size=8)) as engine:
                results = engine.generate(
                    texts, config, assistant_model=assistant, seed=list(range(len(texts)))
                )
                assert engine.stats().num_draft_tokens > 20
                assert_drained(engine)
            assert [result.token_ids for result in results] == expected


@pytest.mark.slow
def test_an_assistant_with_other_tokens() -> None:
    """transformers' own generator, which translates by text."""
    model, tokenizer = models.get("llama"), models.tokenizer()
    other = models.build("llama", seed=3, vocab_size=models.VOCAB_SIZE + 8)
    texts = prompts(9, 14)
    with PagedEngine(model, PagedConfig(block_size=8), tokenizer=tokenizer) as engine:
        options: dict[str, Any] = {"assistant_model": other, "assistant_tokenizer": tokenizer}
        results = engine.generate(texts, GREEDY, **options)
        assert_drained(engine)
    assert [result.token_ids for result in results] == [
        lone_run(model, text, GREEDY)[0] for text in texts
    ]
    assert sum(result.num_draft_tokens for result in results) > 0


def test_an_assistant_that_fails_ends_its_requests_alone() -> None:
    model, texts = models.get("llama"), prompts(9, 14)
    broken = models.build("llama", seed=5)
    broken.model.layers[1].forward = lambda *args, **kwargs: (_ for _ in ()).throw(
        RuntimeError("broken")
    )
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        with pytest.raises(ValueError, match="the engine cannot assist"):
            # its forward is tried first
            engine.add_request(texts[0], GREEDY, assistant_model=broken)
        assistant = models.build("llama", seed=5)
        first, second = (
            engine.add_request(texts[0], GREEDY, assistant_model=assistant),
            engine.add_request(texts[1], GREEDY),
        )
        engine.step()
        assistant.lm_head.weight = torch.nn.Parameter(torch.empty(3, 3))
        results = run_all(engine)
        assert_drained(engine)
    assert isinstance(results[first].error, RuntimeError)
    assert results[second].token_ids == lone_run(model, texts[1], GREEDY)[0]


def test_an_assistant_without_memory_leaves_its_requests_without_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(assistant: Assistant, tasks: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory, on purpose")

    model, texts = models.get("llama"), prompts(9, 14)
    monkeypatch.setattr(Assistant, "_draft", fail)
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        results = engine.generate(texts, GREEDY, assistant_model=models.get_assistant("llama"))
        assert_drained(engine)
    for text, result in zip(texts, results):
        assert result.error is None and result.num_draft_tokens == 0
        assert result.token_ids == lone_run(model, text, GREEDY)[0]


def test_a_config_that_asks_for_impossible_drafts_says_so() -> None:
    model, texts = build("dynamic"), repeating(20)
    with PagedEngine(model, PagedConfig(block_size=8, speculation="ngram")) as engine:
        engine.generate(texts, GREEDY)
        assert engine.route is not None and engine.stats().num_drafts == 0
        (reason,) = (reason for reason in engine.route.slowed_by if "speculation" in reason)
        assert reason.startswith("`speculation` has no effect: ")


def test_prompts_that_are_not_drafted_are_named_as_some_requests() -> None:
    pytest.importorskip("hf_paged.media")
    model = models.get("llama")
    embeds = model.get_input_embeddings()(models.token_ids(1, 9)).detach()
    with PagedEngine(model, PagedConfig(block_size=8, speculation="ngram")) as engine:
        engine.add_request(inputs={"inputs_embeds": embeds}, generation_config=GREEDY)
        run_all(engine)
        assert engine.route is not None
        (reason,) = (reason for reason in engine.route.slowed_by if "speculation" in reason)
        assert reason.startswith("`speculation` has no effect for some requests: ")


def test_what_an_engine_cannot_assist_says_so() -> None:
    model, (text,) = models.get("llama"), prompts(9)
    assistant = models.get_assistant("llama")
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"num_beams": 2}, {"assistant_model": assistant}, "leave `assistant_model` out"),
        (
            {"num_return_sequences": 2, "do_sample": True},
            {"assistant_model": assistant},
            "num_return_sequences",
        ),
        (
            {"use_mtp": True},
            {},
            "no multi-token prediction heads" if compat.HAS_MTP else "no `MtpModel`",
        ),
        ({}, {"assistant_model": 3}, "it must be None or a model"),
        ({}, {"assistant_model": models.get("t5")}, "has an encoder"),
        (
            {"assistant_ensemble_weight": 0.5},
            {"assistant_model": assistant},
            "changes which drafts are accepted",
        ),
    ]
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        for config, options, message in cases:
            with pytest.raises(ValueError, match=message):
                engine.add_request(text, {**GREEDY, **config}, **options)
        assert not engine.has_unfinished
        engine.check_integrity()


@pytest.mark.slow
def test_memory_does_not_grow_with_assistants_that_are_gone() -> None:
    model, (text,) = models.get("llama"), prompts(9)
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        counts = []
        for seed in range(4):
            engine.generate([text], GREEDY, assistant_model=models.build("llama", seed=seed))
            gc.collect()
            counts.append(len(engine.memory.groups))
        assert counts[1] == counts[-1]
        assert_drained(engine)


def test_weights_that_change_under_an_assistant(monkeypatch: pytest.MonkeyPatch) -> None:
    # whatever the step times on this machine
    monkeypatch.setattr(StepCosts, "price", lambda *args: 0.05)
    model, (text,) = models.get("llama"), prompts(9)
    assistant = models.build("llama", seed=5)
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        name = engine.add_request(text, GREEDY, assistant_model=assistant)
        engine.step()
        with engine.weights_update():
            assistant.load_state_dict(model.state_dict())
        result = run_all(engine)[name]
    assert result.token_ids == lone_run(model, text, GREEDY)[0]
    assert result.num_accepted_tokens > 10


@pytest.mark.slow
def test_two_models_that_assist_each_other() -> None:
    """In threads: no thread holds its own model while it waits for another's."""
    first, second = models.build("llama"), models.build("llama", seed=5)
    texts = prompts(9, 14, 6, 20)
    pairs = [(first, second), (second, first)]
    expected = [[lone_run(model, text, GREEDY)[0] for text in texts] for model, _ in pairs]

    def run(number: int) -> Callable[[], None]:
        def call() -> None:
            model, assistant = pairs[number]
            with PagedEngine(model, PagedConfig(block_size=8)) as engine:
                for _ in range(8):
                    results = engine.generate(texts, GREEDY, assistant_model=assistant)
                    assert [result.token_ids for result in results] == expected[number]

        return call

    in_threads(run(0), run(1))


@pytest.mark.slow
def test_an_assistant_with_a_window_whose_long_drafts_are_refused() -> None:
    """Tokens that a rejected draft moved out of the window are still there where decoding
    continues."""
    model, texts = models.get("llama"), prompts(9, 14, 6, 20)
    for name in ("mistral", "gemma3"):
        assistant = models.build(name, seed=5)
        assistant.generation_config.num_assistant_tokens = 25
        assistant.generation_config.assistant_confidence_threshold = 0.0
        with PagedEngine(model, PagedConfig(block_size=8)) as engine:
            config = {"do_sample": True, "max_new_tokens": 40, "suppress_tokens": [models.PAD]}
            results = engine.generate(
                texts, config, assistant_model=assistant, seed=list(range(len(texts)))
            )
            assert_drained(engine)
        expected = [
            lone_run(model, x, config, n, assistant_model=assistant)[0] for n, x in enumerate(texts)
        ]
        assert [result.token_ids for result in results] == expected, name


@needs_fingerprints
def test_a_seed_gives_the_same_samples_behind_a_cached_prefix() -> None:
    """All but the last token of the prompt are cached at that point."""
    model, (text,) = models.get("llama"), prompts(17)
    config = {"do_sample": True, "max_new_tokens": 20, "suppress_tokens": [models.PAD]}
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        found = [
            engine.generate([text], config, assistant_model=models.get_assistant("llama"), seed=3)[
                0
            ].token_ids
            for _ in range(3)
        ]
        assert engine.stats().num_prefix_hit_tokens
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_early_exit_draws_by_the_seed() -> None:
    model, texts = models.get("llama"), prompts(9, 14)
    config = {
        "do_sample": True,
        "max_new_tokens": 20,
        "suppress_tokens": [models.PAD],
        "assistant_early_exit": 1,
    }
    expected = [lone_run(model, text, config, n)[0] for n, text in enumerate(texts)]
    for seed in range(2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        with PagedEngine(model, PagedConfig(block_size=8)) as engine:
            results = engine.generate(texts, config, seed=[0, 1])
        assert [result.token_ids for result in results] == expected
        assert torch.equal(torch.get_rng_state(), before)


def test_early_exit_that_fails_leaves_the_model_as_it_was() -> None:
    """transformers removes layers from the config for early exit; this model's cache does not
    support that."""
    model, texts = models.get("gpt_oss"), prompts(9, 14)
    expected = lone_run(model, texts[1], GREEDY)[0]
    with pytest.raises((IndexError, RuntimeError)) as plain:  # which one depends on the version
        models.build("gpt_oss").generate(torch.tensor([texts[0]]), **GREEDY, assistant_early_exit=1)
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        first = engine.add_request(texts[0], {**GREEDY, "assistant_early_exit": 1})
        second = engine.add_request(texts[1], GREEDY)
        results = run_all(engine)
        assert_drained(engine)
    assert type(results[first].error) is plain.type and results[second].token_ids == expected
    assert model.config.num_hidden_layers == 2


def test_caches_that_are_built_while_another_thread_drafts_have_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Early exit lowers the number of layers in the model's config for each draft."""
    model, (text,) = models.build("llama"), prompts(9)
    expected = lone_run(model, text, GREEDY)[0]
    is_drafting, may_go_on = threading.Event(), threading.Event()
    get_candidates = AssistedCandidateGenerator.get_candidates

    def wait(*args: Any, **kwargs: Any) -> Any:
        is_drafting.set()
        assert may_go_on.wait(30)
        return get_candidates(*args, **kwargs)

    def draft() -> list[int]:
        with PagedEngine(model, PagedConfig(block_size=8)) as engine:
            (result,) = engine.generate([text], {**GREEDY, "assistant_early_exit": 1})
        return result.token_ids

    def build_cache() -> int:
        assert is_drafting.wait(30)
        return len(empty_cache(model, PagedMemory(PagedConfig())).layers)

    def call() -> list[int]:
        assert is_drafting.wait(30)
        return lone_run(model, text, GREEDY, **models.PAGED)[0]

    def go_on() -> None:
        assert is_drafting.wait(30)
        time.sleep(0.3)  # caches that wait for no lock are built meanwhile
        may_go_on.set()

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", wait)
    results = in_threads(draft, build_cache, call, go_on)
    assert results == [expected, model.config.num_hidden_layers, expected, None]


def test_a_request_waits_for_the_blocks_of_assistants() -> None:
    """These go back: it is not told that it can never fit."""
    model, (text, other) = models.get("llama"), prompts(20, 60)
    with PagedEngine(
        model, PagedConfig(block_size=8, num_blocks=12, prefix_caching=False)
    ) as engine:
        first = engine.add_request(text, GREEDY, assistant_model=models.get_assistant("llama"))
        for _ in range(3):
            engine.step()
        second = engine.add_request(other, {"do_sample": False, "max_new_tokens": 36})
        results = run_all(engine)
        assert_drained(engine)
    assert results[first].error is None and len(results[second].token_ids) == 36


def test_requests_without_a_prefix_share_no_text() -> None:
    """Those with `prompt_logprobs`, whose blocks are not cached, keep to their salt as well."""
    model, (text,) = models.get("llama"), prompts(9)
    with PagedEngine(model, PagedConfig(**NGRAM)) as engine:
        options: dict[str, Any] = {"prompt_logprobs": True}
        first, other = (
            engine.generate([text], GREEDY, cache_salt=salt, **options)[0] for salt in "ab"
        )
    assert other.num_accepted_tokens == first.num_accepted_tokens


# -------------------------------------------------------------------------------- the parts alone


def test_a_row_that_is_never_right_stops_proposing() -> None:
    length, proposed = DraftLength(), 0
    for right in (False, True):
        left = 2000
        while left > 0:
            count = length.choose(0.1, 16)
            proposed += 0 if right else count
            if count:
                length.observe(count, count if right else 0)
            left -= 1 if count else 1 + length.pause
    assert 0 < proposed < 60 and length.choose(0.1, 16) == 16
    pauses = []
    for _ in range(8):
        length.observe_no_draft()
        pauses.append(length.pause)
    assert pauses == [0, 1, 3, 7, 15, 16, 16, 16]


def test_a_length_is_what_its_price_pays_for() -> None:
    length = DraftLength()
    for _ in range(50):
        length.observe(10, 5)
    dear, cheap = length.choose(0.5, 16), length.choose(0.01, 16)
    assert 0 < dear < cheap <= 16


def test_the_rate_outlasts_a_pause_for_a_high_price() -> None:
    length = DraftLength()
    for _ in range(40):
        length.observe(16, 6)  # six of seven
    assert length.choose(0.9, 16) == 0
    assert length.choose(0.8, 16) == 1


def test_costs_are_a_line_through_steps() -> None:
    costs = StepCosts()
    for number in range(200):
        tokens = 1 + number % 40
        costs.observe(tokens, 0.02 + 0.001 * tokens)
    assert costs.price(num_rows=10) == pytest.approx(0.001 / (0.002 + 0.001), rel=0.05)
    before = costs.price(num_rows=10)
    costs.observe(5, 10.0)  # a step was recorded
    assert costs.price(num_rows=10) == before


def test_an_assistants_time_counts_from_the_first_steps_on() -> None:
    costs = StepCosts()
    for _ in range(4):
        costs.observe(64, 0.1)
    # a draft for all rows takes as long as a step, which an accepted token saves for its row
    assert costs.price(64, draft_seconds=0.1) == pytest.approx(StepCosts.DEFAULT_PRICE + 1)


def test_texts_of_others_are_bounded() -> None:
    index = NgramIndex()
    for number in range(MAX_INDEX_NGRAMS + 100):
        index.add([number, 0, 0, 1], 3, 4)
    assert (
        len(index._continuations) == MAX_INDEX_NGRAMS
        and not index.find([0, 0, 0])
        and index.find([MAX_INDEX_NGRAMS, 0, 0]) == [1]
    )
    # of another namespace, within the same bound
    assert not index.find([MAX_INDEX_NGRAMS, 0, 0], namespace=b"another")


def test_ngrams_propose_what_came_behind() -> None:
    source, text = Ngrams(NgramIndex(), 8), [5, 6, 7, 8, 9, 10, 5, 6, 7]
    draft = source.propose(text, 3)
    assert draft is not None and draft.tokens == [8, 9, 10]
    repeated = Ngrams(NgramIndex(), 8).propose([11, 12, 11, 12, 11, 12], 5)
    assert repeated is not None and repeated.tokens == [11, 12, 11, 12, 11]
    copied, text = Ngrams(NgramIndex(), 8), [3, 4, 5, 6, 7, 8, 9, 10, 3, 4, 5]
    copied.propose(text, 3)
    text += [6, 99]  # another word instead of 7
    copied.observe(text, 1)
    draft = copied.propose(text, 3)
    assert draft is not None and draft.tokens == [8, 9, 10]
    text += [98]
    copied.observe(text, 0)
    assert copied.propose(text, 3) is None
    index = NgramIndex()
    first = Ngrams(index, 2)
    generated = list(range(100, 140))
    first.observe([1, 2, *generated], 0)
    first.close()
    second = Ngrams(index, 4).propose([7, *generated[10:14]], MAX_DRAFT_TOKENS)
    assert second is not None and second.tokens == generated[14 : 14 + MAX_DRAFT_TOKENS]


def test_the_logits_of_drafts_are_on_the_targets_device() -> None:
    """As the probabilities with which they are compared, wherever the assistant is."""
    target = torch.device("meta")
    candidates = torch.tensor([[5, 6, 7]]), torch.zeros(1, 1, 16)
    strategy = SimpleNamespace(get_candidates=lambda ids: candidates)
    row = AssistantRow.__new__(AssistantRow)
    row.sequence, row.num_target_tokens = Sequence([5, 6, 7]), 2
    row.scores, row.device = [torch.zeros(1, 16)], target
    source = CandidateSource(strategy, 4, target, True, None)
    for draft in (source.propose([5, 6], 4), row.draft(4)):
        assert isinstance(draft, DrawnDraft) and draft.tokens == [7]
        assert draft.scores.shape == (1, 16) and draft.scores.device == target


@pytest.mark.slow
def test_speculative_sampling_keeps_the_distribution() -> None:
    """Chi-square over 10^5 first tokens of a vocabulary of 16, with drafts from another
    distribution."""
    generator = torch.Generator().manual_seed(0)
    target, proposal = (torch.randn(1, 16, generator=generator).mul(1.5) for _ in range(2))
    probs, count = target.softmax(-1), 100_000
    drawn = torch.multinomial(
        proposal.softmax(-1)[0], count, replacement=True, generator=generator
    ).tolist()
    levels = torch.rand(count, generator=generator)
    seen = [0] * 16
    for token, level in zip(drawn, levels):
        draft = DrawnDraft([token], proposal)
        draft.uniforms = level[None]
        seen[int(draft.sample(probs, generator))] += 1
    expected = probs[0] * count
    statistic = float(((torch.tensor(seen) - expected) ** 2 / expected).sum())
    assert statistic < 37.7  # 15 degrees of freedom, one test in a thousand
    plain = torch.tensor([drawn.count(token) for token in range(16)])
    assert float(((plain - expected) ** 2 / expected).sum()) > 1000  # of the drafts alone
