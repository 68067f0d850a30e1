"""Speculation: rows that get several tokens per step have the tokens of runs without drafts,
however good the drafts."""

from __future__ import annotations

import functools
import gc
import random
import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, WatermarkingConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

import hf_paged
from hf_paged import PagedConfig, PagedEngine, RequestResult, compat
from hf_paged.batching.decoding.base import Draft
from hf_paged.batching.factory import empty_cache
from hf_paged.batching.generation import Generation
from hf_paged.batching.request import Sequence
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.memory import PagedMemory
from hf_paged.seams import EngineParts
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
    Asked,
    Recorder,
    assert_drained,
    assert_same_as_lone,
    engine_of,
    lone_run,
    prompts,
    run_all,
    steps,
)
from tests.support.rooms import needs_fingerprints

NGRAM: dict[str, Any] = {"block_size": 8, "speculation": "ngram"}
GREEDY = {"do_sample": False, "max_new_tokens": 30}
DRAWN = {"do_sample": True, "max_new_tokens": 20, "suppress_tokens": [models.PAD]}


def repeating(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Prompts that repeat themselves, so that their n-grams give drafts."""
    return [(prompt * 4)[: len(prompt) * 3 + 2] for prompt in prompts(*lengths, seed=seed)]


def lone(text: list[int], options: dict[str, Any] = GREEDY, **more: Any) -> list[int]:
    """The new tokens of plain `generate`."""
    (row,) = lone_run(models.get("llama"), text, options, **more)
    return row


class Oracle(Source):
    """Drafts as many correct tokens as planned, then wrong ones; records the accepted ones."""

    def __init__(self, text: list[int], rng: random.Random) -> None:
        self.text, self.rng, self.expected = text, rng, 0
        self.seen: list[tuple[int, int]] = []

    def propose(self, token_ids: list[int], count: int) -> Draft | None:
        right = self.text[len(token_ids) : len(token_ids) + self.rng.randint(0, count)]
        later = self.text[len(token_ids) + len(right) :]
        wrong = [(token + 1) % models.VOCAB_SIZE for token in later]
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


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes drafts worthwhile whatever the step times on this machine."""
    monkeypatch.setattr(StepCosts, "price", lambda *args: 0.05)


# --------------------------------------------------------------------------------------- generate


@pytest.mark.slow_cases(but=["cpu-llama", "cpu-gemma3", "cpu-gpt2", "cuda-*"])
@pytest.mark.parametrize("name", models.DECODER_ONLY)
def test_a_batch_that_speculates_gives_plain_tokens(name: str, device: torch.device) -> None:
    model = models.put(models.get(name), device)
    inputs = models.put(models.padded_prompt(name, (29, 8, 17, 24)), device)
    expected = model.generate(**inputs, **GREEDY)
    by_ngrams = {"cache_implementation": "paged", "cache_config": NGRAM}
    for options in (
        {**models.PAGED, "prompt_lookup_num_tokens": 1},
        {**models.PAGED, "prompt_lookup_num_tokens": 5},
        by_ngrams,
    ):
        assert torch.equal(model.generate(**inputs, **GREEDY, **options), expected)
    route = hf_paged.last_route(model)
    assert route is not None and route.road == "engine"
    hf_paged.check_integrity(model)


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("number_of_tokens", [1, 3, 9])
def test_sixteen_rows_with_assistants(number_of_tokens: int, device: torch.device) -> None:
    """Assistants: one mostly right, one mostly wrong, and early exit of the model itself."""
    model = models.put(models.get("llama"), device)
    inputs = models.put(models.padded_prompt("llama", tuple(range(3, 19))), device)
    expected = model.generate(**inputs, **GREEDY)
    good = models.put(models.get_assistant("llama"), device)
    for assistant in (good, models.build("llama", seed=5).to(device)):
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


def test_a_returned_cache_holds_what_plain_holds() -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama", (12, 20))
    options = {**GREEDY, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **options)
    paged = model.generate(**inputs, **options, **models.PAGED, prompt_lookup_num_tokens=4)
    assert torch.equal(plain.sequences, paged.sequences)
    stock, cache = plain.past_key_values, paged.past_key_values
    assert cache.get_seq_length() == stock.get_seq_length()
    mask = inputs["attention_mask"][:, :, None].bool()
    keys = [x.layers[1].keys[:, 0, : mask.shape[1]] * mask for x in (cache, stock)]
    torch.testing.assert_close(*keys, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_threads_that_speculate_share_a_loop() -> None:
    model, assistant = models.get("llama"), models.get_assistant("llama")
    texts = [models.padded_prompt("llama", (4 + n, 13 - n), seed=n) for n in range(4)]
    expected = [model.generate(**text, **GREEDY) for text in texts]
    assisted = {"assistant_model": assistant}
    ways: list[dict[str, Any]] = [assisted, {"prompt_lookup_num_tokens": 4}, assisted, {}]

    def call(number: int) -> None:
        for _ in range(3):
            out = model.generate(**texts[number], **GREEDY, **ways[number], **models.PAGED)
            assert torch.equal(out, expected[number])

    in_threads(*(functools.partial(call, number) for number in range(4)))
    hf_paged.check_integrity(model)


# ----------------------------------------------------------------------------------------- engine


@pytest.mark.slow_cases(but=["llama"])
@pytest.mark.parametrize("name", models.DECODER_ONLY)
def test_random_accept_lengths(name: str) -> None:
    """Also past a window, and with requests that lose their blocks in mid-draft."""
    check_accept_lengths(models.get(name), prompts(3, 12, 7, 20), (None, None, 26))


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
        preemption = ("swap", "recompute")[turn % 2]
        config = PagedConfig(**NGRAM, num_blocks=num_blocks, preemption=preemption)
        with PagedEngine(model, config) as engine:
            ids = [engine.add_request(text, GREEDY) for text in texts]
            oracles = with_oracles(engine, full, seed=seed + 10 * turn)
            results = Asked(engine, texts[1:2] if beside else (), beside or {}).check()
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
    (text,) = prompts(9)
    whole = text + lone(text)
    with engine_of(**NGRAM) as engine:
        engine.add_request(text, GREEDY)
        with_oracles(engine, [whole])
        run_all(engine)
        (again,) = engine.generate([whole], GREEDY)
        assert again.num_prefix_hit_tokens >= 32
        assert 0 < engine.stats().num_drafts <= engine.stats().num_draft_tokens
    assert again.token_ids == lone(whole)


def test_outputs_come_token_by_token() -> None:
    """One output per token, with its text; streamers, log-probabilities and stop strings as without
    drafts."""
    tokenizer, (text,) = models.tokenizer(), prompts(6)
    whole, streamer = text + lone(text), Recorder()
    found: dict[bool, tuple[list[Any], RequestResult]] = {}
    for speculates in (False, True):
        with engine_of(tokenizer=tokenizer, **(NGRAM if speculates else {})) as engine:
            options = {"return_logprobs": True, "top_logprobs": 2}
            engine.add_request(text, GREEDY, streamer=streamer, **options)
            if speculates:
                with_oracles(engine, [whole])
            outputs = steps(engine)
            assert (engine.stats().num_accepted_tokens > 0) == speculates
            assert (engine.stats().num_steps < 30) == speculates
        result = outputs[-1].result
        assert result is not None
        found[speculates] = [(output.new_tokens, output.text) for output in outputs], result
    (plain, expected), (ours, result) = found[False], found[True]
    tokens = [list(new.values()) for new, _ in ours]
    assert ours == plain and tokens == [[token] for token in expected.token_ids]
    assert result.text == expected.text
    assert expected.logprobs is not None and result.logprobs is not None
    torch.testing.assert_close(result.logprobs, expected.logprobs, atol=1e-4, rtol=0)
    half = len(streamer.values) // 2
    assert streamer.values[:half] == streamer.values[half:] and streamer.ended == 2

    stop = tokenizer.decode(whole[len(text) + 9 : len(text) + 11])
    stopped = {**GREEDY, "stop_strings": [stop]}
    with engine_of(tokenizer=tokenizer, **NGRAM) as engine:
        name = engine.add_request(text, stopped)
        with_oracles(engine, [whole])[0].rng = random.Random(3)
        result = run_all(engine)[name]
        assert_drained(engine)
    assert result.finish_reason == "stop_string" and len(result.token_ids) < 20
    assert result.token_ids == lone(text, stopped, tokenizer=tokenizer)


@pytest.mark.slow
def test_processors_with_a_state_see_refused_candidates_as_in_plain_generate() -> None:
    """Guidance has a cache of its own, which then holds them: other tokens than without
    candidates."""
    model, ids = models.get("gpt_oss"), torch.tensor([[38, 82, 50, 72, 15, 9, 54, 82]])
    options: dict[str, Any] = {"max_new_tokens": 13, "do_sample": False, "guidance_scale": 1.5}
    options["watermarking_config"] = WatermarkingConfig()
    alone = model.generate(ids, **options)
    plain = model.generate(ids, **options, prompt_lookup_num_tokens=3)
    assert not torch.equal(plain, alone)
    ours = model.generate(ids, **options, prompt_lookup_num_tokens=3, cache_implementation="paged")
    assert torch.equal(ours, plain)
    assert "rejected drafts" in hf_paged.last_route(model).reason


class EndsAt(StoppingCriteria):
    def __init__(self, *token_ids: int) -> None:
        self.token_ids = torch.tensor(token_ids)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.token_ids)


@pytest.mark.parametrize("kind", ["criterion", "EOS", "length", "strings"])
def test_a_single_row_ends_after_a_draft_in_which_a_criterion_holds_as_in_plain_generate(
    kind: str,
) -> None:
    model, ids = models.get("llama"), 4 + models.token_ids(1, 40) % 4
    few_words = [0, *range(8, models.VOCAB_SIZE)]
    lookup: dict[str, Any] = {**GREEDY, "suppress_tokens": few_words, "pad_token_id": models.PAD}
    lookup["prompt_lookup_num_tokens"] = 5
    options = {
        "criterion": {"stopping_criteria": [EndsAt(7)]},
        "EOS": {"stopping_criteria": [EosTokenCriteria(7)]},
        "length": {"stopping_criteria": [MaxLengthCriteria(58)]},
        "strings": {
            "stop_strings": models.tokenizer().convert_ids_to_tokens(7),
            "tokenizer": models.tokenizer(),
        },
    }[kind]
    plain = model.generate(ids, **lookup, **options)
    assert torch.equal(model.generate(ids, **lookup, **options, **models.PAGED), plain)
    assert "only after each draft" in hf_paged.last_route(model).reason
    # without drafts it ends earlier, as rows of the engine do
    del lookup["prompt_lookup_num_tokens"]
    assert model.generate(ids, **lookup, **options).shape[1] < plain.shape[1]


def test_a_callers_processor_sees_what_it_sees_without() -> None:
    """A stateful processor: called once per token, in order, with the tokens of the row at that
    time."""
    (text,) = repeating(5)

    class Counting(LogitsProcessor):
        def __init__(self) -> None:
            self.lengths: list[int] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.lengths.append(input_ids.shape[1])
            return scores.roll(len(self.lengths) % 3, dims=-1)

    expected, processor = lone(text, logits_processor=[Counting()]), Counting()
    with engine_of(**NGRAM) as engine:
        engine.add_request(text, GREEDY, logits_processor=[processor])
        with_oracles(engine, [text + expected])
        (result,) = run_all(engine).values()
    assert result.token_ids == expected
    assert processor.lengths == list(range(len(text), len(text) + 30))


def test_what_others_generated_is_proposed_within_a_salt_alone() -> None:
    """Also by requests with `prompt_logprobs`, whose blocks are not cached."""
    (text,) = prompts(9)

    def ask(engine: PagedEngine, salt: str | None, **options: Any) -> RequestResult:
        (result,) = engine.generate([text], GREEDY, cache_salt=salt, **options)
        assert result.token_ids == lone(text)
        return result

    with engine_of(**NGRAM, prefix_caching=False) as engine:
        results = [ask(engine, salt) for salt in (None, None, "a", "a", "b")]
    first, again, other, salted, last = (result.num_accepted_tokens for result in results)
    assert again > first and salted > other == last
    with engine_of(**NGRAM) as engine:
        results = [ask(engine, salt, prompt_logprobs=True) for salt in "ab"]
    assert results[0].num_accepted_tokens == results[1].num_accepted_tokens


@pytest.mark.parametrize("name", ["speculation", "parts.drafter"])
def test_drafts_that_have_no_effect_are_named(name: str) -> None:
    config, parts = PagedConfig(**NGRAM), EngineParts()
    if name == "parts.drafter":
        config, parts = PagedConfig(), EngineParts(drafter=lambda *given: pytest.fail("was made"))
    pytest.importorskip("hf_paged.media")
    model = models.get("llama")
    embeds = model.get_input_embeddings()(models.token_ids(1, 9)).detach()
    for target, asks, effect in (
        (build("dynamic"), {"input_ids": repeating(20)[0]}, "no effect: "),
        (model, {"inputs": {"inputs_embeds": embeds}}, "no effect for some requests: "),
    ):
        with PagedEngine(target, config, parts=parts) as engine:
            engine.add_request(generation_config=GREEDY, **asks)
            run_all(engine)
            assert engine.route is not None and engine.stats().num_drafts == 0
            (reason,) = (reason for reason in engine.route.slowed_by if "no effect" in reason)
            assert reason.startswith(f"`{name}` has {effect}")


# ------------------------------------------------------------------------------------- assistants


def test_good_drafts_save_steps_and_are_told_by_the_timeline(cheap: None) -> None:
    from hf_paged.tools.timeline import Activity

    with engine_of() as engine:
        texts, assistant = prompts(9, 5, 12), models.get_assistant("llama")
        results = engine.generate(texts, GREEDY, assistant_model=assistant)
        told, intervals = engine.timeline.verifications(), engine.timeline.intervals()
        assert engine.stats().num_accepted_tokens > 20
    for number, result in enumerate(results):
        own = [each for each in told if each.number == number]
        assert len({each.step for each in own}) == len(own) == result.num_drafts
        assert sum(each.num_draft_tokens for each in own) == result.num_draft_tokens
        assert sum(each.num_accepted_tokens for each in own) == result.num_accepted_tokens
        parts = [each for each in intervals if each.number == number]
        (decode,) = (each for each in parts if each.activity is Activity.DECODE)
        for each in own:
            assert decode.first_step <= each.step < decode.end_step
            assert decode.start <= each.start <= each.end <= decode.end


@pytest.mark.slow
def test_no_request_gives_its_blocks_up_for_an_assistant() -> None:
    texts = prompts(9, 14, 6, 20)
    num_blocks = sum(-(-(len(text) + 29) // 8) for text in texts)  # exactly what the requests need
    with engine_of(num_blocks=num_blocks, prefix_caching=False) as engine:
        Asked(engine, texts, GREEDY, assistant_model=models.get_assistant("llama")).check()
        assert engine.stats().num_preemptions == 0 and engine.stats().num_draft_tokens > 0


def test_a_request_waits_for_the_blocks_of_assistants() -> None:
    """These go back: it is not told that it can never fit."""
    text, other = prompts(20, 60)
    with engine_of(num_blocks=12, prefix_caching=False) as engine:
        first = engine.add_request(text, GREEDY, assistant_model=models.get_assistant("llama"))
        for _ in range(3):
            engine.step()
        second = engine.add_request(other, {"do_sample": False, "max_new_tokens": 36})
        results = run_all(engine)
        assert_drained(engine)
        assert all(group.pool.num_used == 0 for group in engine.memory.groups.values())
    assert results[first].error is None and len(results[second].token_ids) == 36


def test_an_assistant_that_was_not_asked_for_a_while_reads_the_rows_own_tokens() -> None:
    text, other = prompts(9, 30)
    assistant = models.build("llama", seed=5)
    assistant.generation_config.assistant_confidence_threshold = 0.0
    with engine_of() as engine:
        for _ in range(2):
            engine.add_request(text, GREEDY, assistant_model=assistant)
        first, second = drafted_rows(engine).values()
        first.assistant.propose([(first, Sequence(list(text)), 6)])
        asked = [(row, Sequence(text + other), 6) for row in (first, second)]
        drafts = first.assistant.propose(asked)
        assert None not in drafts and drafts[0].tokens == drafts[1].tokens


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
    assistant, texts = models.get_assistant("llama"), prompts(9, 14)
    options = {"do_sample": False, "max_new_tokens": 12}
    failures = []
    with engine_of(storage="blocks") as engine:
        change, own = getattr(owner, name), engine._core.get_loop().blocks

        def changed(self: Any, *args: Any, **named: Any) -> Any:
            result = change(self, *args, **named)
            if self is not own and not failures:
                failures.append(MemoryError("on purpose"))
                raise failures[0]
            return result

        for is_faulty in (True, False):
            asked = Asked(engine, texts, options, assistant_model=assistant)
            with monkeypatch.context() as patch:
                if is_faulty:
                    patch.setattr(owner, name, changed)
                results = run_all(engine)
            assert len(failures) == 1
            errors = {name for name, result in results.items() if result.error is not None}
            assert all(str(results[name].error) == "on purpose" for name in errors)
            asked.check(results, only=results.keys() - (errors if is_faulty else set()))
            assert_drained(engine)


ENDING = {"eos_token_id": list(range(60, 90)), "min_new_tokens": 9}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["good", "bad", "mistral", "gemma3", "early exit"])
def test_sampled_requests_are_those_of_transformers_for_one_row(name: str) -> None:
    """Token for token, with a seed: the assistant draws, accepts and corrects as
    `_assisted_decoding` does. Tokens that a rejected draft moved out of an assistant's window are
    still there where decoding continues."""
    texts = prompts(9, 14, 6, 20)
    options = [{"temperature": 0.7}, {"top_p": 0.9, "top_k": 40}, ENDING]
    assisted: dict[str, Any] = {"assistant_model": models.get_assistant("llama")}
    if name == "bad":
        assisted = {"assistant_model": models.build("llama", seed=5)}
    elif name == "early exit":
        assisted, options = {}, [{"assistant_early_exit": 1}]
    elif name != "good":
        assisted = {"assistant_model": models.build(name, seed=5)}
        config = assisted["assistant_model"].generation_config
        config.num_assistant_tokens, config.assistant_confidence_threshold = 25, 0.0
        options = [{"max_new_tokens": 40}]
    for own in options:
        # transformers' assistant builds its masks from tokens, so padding inside the text is
        # hidden
        given = {**DRAWN, **own}
        expected = [lone(text, given, seed=n, **assisted) for n, text in enumerate(texts)]
        before = torch.get_rng_state()
        with engine_of() as engine:
            results = engine.generate(texts, given, seed=list(range(len(texts))), **assisted)
            assert engine.stats().num_draft_tokens > 20
            assert_drained(engine)
        assert [result.token_ids for result in results] == expected
        assert torch.equal(torch.get_rng_state(), before)


@needs_fingerprints
def test_a_seed_gives_the_same_samples_behind_a_cached_prefix() -> None:
    """All but the last token of the prompt are cached at that point."""
    texts, assistant = prompts(17), models.get_assistant("llama")
    with engine_of() as engine:
        found = [engine.generate(texts, DRAWN, assistant_model=assistant, seed=3) for _ in range(3)]
        assert engine.stats().num_prefix_hit_tokens
    assert len({tuple(result.token_ids) for (result,) in found}) == 1


@pytest.mark.slow
def test_an_assistant_with_other_tokens() -> None:
    """transformers' own generator, which translates by text."""
    tokenizer = models.tokenizer()
    other = models.build("llama", seed=3, vocab_size=models.VOCAB_SIZE + 8)
    given: dict[str, Any] = {"assistant_model": other, "assistant_tokenizer": tokenizer}
    with engine_of(tokenizer=tokenizer) as engine:
        Asked(engine, prompts(9, 14), GREEDY, **given).check()
        assert engine.stats().num_draft_tokens > 0


def test_an_assistant_may_be_wrapped() -> None:
    assistant = torch.compile(models.get_assistant("llama"), backend="eager")
    with engine_of() as engine:
        Asked(engine, prompts(9), GREEDY, assistant_model=assistant).check()


def test_the_next_call_goes_on_with_the_number_of_tokens_of_a_heuristic_schedule() -> None:
    """The engine pauses after rejections, so the number need not be the one that plain leaves."""
    model, assistant = models.get("llama"), models.build("llama", seed=3)
    config = assistant.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 5, "heuristic"
    inputs = models.prompt("llama", batch_size=1)
    model.generate(**inputs, **GREEDY, assistant_model=assistant, **models.PAGED)
    assert config.num_assistant_tokens < 5, "drafts were rejected"


def test_an_assistant_that_fails_ends_its_requests_alone() -> None:
    texts, broken = prompts(9, 14), models.build("llama", seed=5)
    broken.lm_head.weight = torch.nn.Parameter(torch.empty(3, 3))
    with engine_of() as engine:
        with pytest.raises(ValueError, match="the engine cannot assist"):
            # its forward is tried first
            engine.add_request(texts[0], GREEDY, assistant_model=broken)
        assistant = models.build("llama", seed=5)
        first = engine.add_request(texts[0], GREEDY, assistant_model=assistant)
        second = engine.add_request(texts[1], GREEDY)
        engine.step()
        assistant.lm_head.weight = torch.nn.Parameter(torch.empty(3, 3))
        results = run_all(engine)
        assert_drained(engine)
    assert isinstance(results[first].error, RuntimeError)
    assert results[second].token_ids == lone(texts[1])


def test_an_assistant_without_memory_drafts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(assistant: Assistant, tasks: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory, on purpose")

    monkeypatch.setattr(Assistant, "_draft", fail)
    with engine_of() as engine:
        Asked(engine, prompts(9, 14), GREEDY, assistant_model=models.get_assistant("llama")).check()
        assert engine.stats().num_draft_tokens == 0


def test_what_an_engine_cannot_assist_says_so() -> None:
    (text,) = prompts(9)
    assisted: dict[str, Any] = {"assistant_model": models.get_assistant("llama")}
    no_heads = "no multi-token prediction heads" if compat.HAS_MTP else "no `MtpModel`"
    samples, ensemble = {"num_return_sequences": 2, "do_sample": True}, "assistant_ensemble_weight"
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"num_beams": 2}, assisted, "leave `assistant_model` out"),
        (samples, assisted, "num_return_sequences"),
        ({"use_mtp": True}, {}, no_heads),
        ({}, {"assistant_model": 3}, "it must be None or a model"),
        ({}, {"assistant_model": models.get("t5")}, "has an encoder"),
        ({ensemble: 0.5}, assisted, "changes which drafts are accepted"),
    ]
    with engine_of() as engine:
        for config, options, message in cases:
            with pytest.raises(ValueError, match=message):
                engine.add_request(text, {**GREEDY, **config}, **options)
        assert not engine.has_unfinished
        engine.check_integrity()


@pytest.mark.slow
def test_memory_does_not_grow_with_assistants_that_are_gone() -> None:
    counts = []
    with engine_of() as engine:
        for seed in range(4):
            assistant = models.build("llama", seed=seed)
            engine.generate(prompts(9), GREEDY, assistant_model=assistant)
            del assistant
            gc.collect()
            counts.append(len(engine.memory.groups))
        assert_drained(engine)
    assert counts[1] == counts[-1]


def test_weights_that_change_under_an_assistant(cheap: None) -> None:
    (text,), assistant = prompts(9), models.build("llama", seed=5)
    with engine_of() as engine:
        name = engine.add_request(text, GREEDY, assistant_model=assistant)
        engine.step()
        with engine.weights_update():
            assistant.load_state_dict(engine.model.state_dict())
        result = run_all(engine)[name]
    assert result.token_ids == lone(text) and result.num_accepted_tokens > 10


@pytest.mark.slow
def test_two_models_that_assist_each_other() -> None:
    """In threads: no thread holds its own model while it waits for another's."""
    first, second = models.build("llama"), models.build("llama", seed=5)
    texts = prompts(9, 14, 6, 20)

    def serve(model: Any, assistant: Any) -> None:
        expected = [lone_run(model, text, GREEDY)[0] for text in texts]
        with PagedEngine(model, PagedConfig(block_size=8)) as engine:
            for _ in range(8):
                results = engine.generate(texts, GREEDY, assistant_model=assistant)
                assert [result.token_ids for result in results] == expected

    in_threads(lambda: serve(first, second), lambda: serve(second, first))


def test_early_exit_that_fails_leaves_the_model_as_it_was() -> None:
    """transformers removes layers from the config for early exit; this model's cache does not
    support that."""
    model, texts = models.get("gpt_oss"), prompts(9, 14)
    with pytest.raises((IndexError, RuntimeError)) as plain:  # which one depends on the version
        models.build("gpt_oss").generate(torch.tensor([texts[0]]), **GREEDY, assistant_early_exit=1)
    with engine_of("gpt_oss") as engine:
        first = engine.add_request(texts[0], {**GREEDY, "assistant_early_exit": 1})
        second = engine.add_request(texts[1], GREEDY)
        results = run_all(engine)
        assert_drained(engine)
    assert type(results[first].error) is plain.type and model.config.num_hidden_layers == 2
    assert_same_as_lone(lone_run(model, texts[1], GREEDY), results[second], GREEDY, "the other")


def test_caches_that_are_built_while_another_thread_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
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

    def meanwhile(function: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            assert is_drafting.wait(30)
            return function()

        return call

    def go_on() -> None:
        time.sleep(0.3)  # caches that wait for no lock are built meanwhile
        may_go_on.set()

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", wait)
    results = in_threads(
        draft,
        meanwhile(lambda: len(empty_cache(model, PagedMemory(PagedConfig())).layers)),
        meanwhile(lambda: lone_run(model, text, GREEDY, **models.PAGED)[0]),
        meanwhile(go_on),
    )
    assert results == [expected, model.config.num_hidden_layers, expected, None]


# -------------------------------------------------------------------------------- the parts alone


def test_lengths_of_drafts_follow_what_was_right_and_their_price() -> None:
    length, proposed = DraftLength(), 0
    for right in (False, True):  # a row that is never right stops proposing
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
    length = DraftLength()
    for _ in range(50):
        length.observe(10, 5)
    assert 0 < length.choose(0.5, 16) < length.choose(0.01, 16) <= 16
    length = DraftLength()
    for _ in range(40):
        length.observe(16, 6)  # six of seven
    assert length.choose(0.9, 16) == 0
    assert length.choose(0.8, 16) == 1, "the rate outlasts a pause for a high price"


def test_costs_are_a_line_through_steps() -> None:
    costs = StepCosts()
    for number in range(200):
        tokens = 1 + number % 40
        costs.observe(tokens, 0.02 + 0.001 * tokens)
    assert costs.price(num_rows=10) == pytest.approx(0.001 / (0.002 + 0.001), rel=0.05)
    before = costs.price(num_rows=10)
    costs.observe(5, 10.0)  # a step was recorded
    assert costs.price(num_rows=10) == before
    costs = StepCosts()
    for _ in range(4):
        costs.observe(64, 0.1)
    # a draft for all rows takes as long as a step, which an accepted token saves for its row
    assert costs.price(64, draft_seconds=0.1) == pytest.approx(StepCosts.DEFAULT_PRICE + 1)


def test_ngrams_propose_what_came_behind() -> None:
    def proposed(source: Ngrams, text: list[int], count: int) -> list[int] | None:
        draft = source.propose(text, count)
        return None if draft is None else draft.tokens

    assert proposed(Ngrams(NgramIndex(), 8), [5, 6, 7, 8, 9, 10, 5, 6, 7], 3) == [8, 9, 10]
    repeated = proposed(Ngrams(NgramIndex(), 8), [11, 12, 11, 12, 11, 12], 5)
    assert repeated == [11, 12, 11, 12, 11]
    copied, text = Ngrams(NgramIndex(), 8), [3, 4, 5, 6, 7, 8, 9, 10, 3, 4, 5]
    copied.propose(text, 3)
    text += [6, 99]  # another word instead of 7
    copied.observe(text, 1)
    assert proposed(copied, text, 3) == [8, 9, 10]
    text += [98]
    copied.observe(text, 0)
    assert copied.propose(text, 3) is None
    index, generated = NgramIndex(), list(range(100, 140))
    first = Ngrams(index, 2)
    first.observe([1, 2, *generated], 0)
    first.close()
    for end in (4, 14):  # from the first tokens on
        second = proposed(Ngrams(index, 4), [7, *generated[end - 4 : end]], MAX_DRAFT_TOKENS)
        assert second == generated[end : end + MAX_DRAFT_TOKENS]


def test_texts_of_others_are_bounded() -> None:
    index = NgramIndex()
    for number in range(MAX_INDEX_NGRAMS + 100):
        index.add([number, 0, 0, 1], 3, 4)
    last = [MAX_INDEX_NGRAMS, 0, 0]
    assert len(index._continuations) == MAX_INDEX_NGRAMS
    assert not index.find([0, 0, 0]) and index.find(last) == [1]
    # of another namespace, within the same bound
    assert not index.find(last, namespace=b"another")


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
