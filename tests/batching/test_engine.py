"""`PagedEngine` from the outside: each request gets plain `generate`'s tokens, whatever runs beside
it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import sys
import time
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel, WordPiece
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from hf_paged import PagedConfig, PagedEngine, RequestOutput
from hf_paged.batching import streams
from hf_paged.batching.results import TextTracker
from tests.support import models
from tests.support.engine_helpers import (
    MODES,
    Asked,
    Spelled,
    assert_drained,
    assert_lone,
    assert_same_as_lone,
    engine_of,
    get_mamba,
    lone_run,
    prompts,
    results_of,
    run_all,
    steps,
    told_by,
)
from tests.support.rooms import needs_fingerprints

GREEDY = MODES["greedy"]


def counted(num_tokens: int) -> dict[str, Any]:
    return {"do_sample": False, "max_new_tokens": num_tokens}


# ----------------------------------------------------------------------------------------- tokens


UNPACKED = ("mamba", "diff_llama")


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("name", [*models.DECODER_ONLY, *UNPACKED])
def test_all_modes_in_one_batch(name: str, device: torch.device) -> None:
    model = models.put(get_mamba() if name == "mamba" else models.get(name), device)
    texts = prompts(*(random.Random(1).randint(1, 30) for _ in MODES))
    with PagedEngine(model, PagedConfig(block_size=8, max_num_batched_tokens=24)) as engine:
        asked = Asked(engine)
        for seed, ((mode, options), prompt) in enumerate(zip(MODES.items(), texts)):
            config = GenerationConfig(**options) if seed % 2 else options  # both forms
            engine.add_request(prompt, config, request_id=mode, seed=seed)
            asked.asked[mode] = prompt, options, seed
        assert bool(engine._core.layout.unsupported_reason) == (name in UNPACKED)
        results = asked.check()
    reasons = {each.finish_reason for result in results.values() for each in result.sequences}
    assert {"length", "eos"} <= reasons, f"the batch was meant to end in several ways: {reasons}"


@pytest.mark.parametrize("mode", MODES)
def test_one_mode_over_several_prompts(mode: str) -> None:
    with engine_of() as engine:
        Asked(engine, prompts(1, 9, 17, 26), MODES[mode]).check()


@pytest.mark.parametrize("mode", ["sample", "samples", "beam_sample"])
def test_alone_it_draws_from_the_global_random_numbers_as_generate_does(mode: str) -> None:
    prompt = prompts(12)[0]
    with engine_of() as engine:
        torch.manual_seed(11)
        result = engine.generate([prompt], MODES[mode])[0]
        state = torch.get_rng_state()
        expected = lone_run(engine.model, prompt, MODES[mode], 11)
    assert_same_as_lone(expected, result, MODES[mode], mode)
    assert torch.equal(state, torch.get_rng_state()), "as many numbers as plain draws"


# ---------------------------------------------------------------------------------------- outputs


def test_a_request_is_queued_until_its_first_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    with engine_of() as engine:
        name = engine.add_request(prompts(9)[0], GREEDY)
        added = engine._core.requests[name]._added_at
        runner = engine._core.loop.executor.runner
        run = runner.run

        def timed(*args: Any) -> Any:
            begun.append(time.perf_counter())
            return run(*args)

        monkeypatch.setattr(runner, "run", timed)
        timings = run_all(engine)[name].timings
    assert 0 <= timings.queued <= begun[0] - added < timings.first_token <= timings.total


@needs_fingerprints
def test_fields_of_a_result() -> None:
    ids = prompts(21)[0]
    forms = [np.array(ids), torch.tensor(ids, dtype=torch.int32), torch.tensor([ids]), tuple(ids)]
    with engine_of() as engine:
        first = engine.add_request([*map(np.int32, ids)], MODES["samples"], seed=1)
        result = run_all(engine)[first]
        others = engine.generate(forms, GREEDY)
        assert_lone(engine, [ids] * len(forms), others)
    for other in others:
        # of the first one's blocks
        assert other.prompt_ids == ids and other.num_prefix_hit_tokens == 16
        assert other.num_preemptions == 0
    assert result.request_id == first and result.prompt_ids == ids and result.error is None
    assert len(result.sequences) == 3
    one = result.sequences[0]
    assert (result.token_ids, result.finish_reason) == (one.token_ids, one.finish_reason)
    assert result.text is result.logprobs is one.score is None


@needs_fingerprints
def test_stats_and_block_map() -> None:
    texts, engine = prompts(20, 33, 8), engine_of(num_blocks=64)
    assert engine.block_map() == {} and engine.stats().num_steps == 0
    for prompt in texts:
        engine.add_request(prompt, GREEDY)
    engine.cancel(engine.add_request(prompts(50)[0], GREEDY))  # its prompt does not count
    assert engine.stats().num_waiting == 3
    engine.step()
    stats, (states,) = engine.stats(), engine.block_map().values()
    assert (stats.num_blocks, stats.num_running, stats.num_waiting) == (64, 3, 0)
    assert stats.used_blocks == sum(state > 0 for state in states) == 3 + 5 + 1
    assert stats.shared_blocks == sum(state > 1 for state in states) == 0
    # tokens, K and V, layers, heads, head size, bytes
    assert stats.used_bytes == 9 * 8 * 2 * 2 * 2 * 16 * 4
    run_all(engine)
    stats, (states,) = engine.stats(), engine.block_map().values()
    assert stats.cached_blocks == sum(state == -1 for state in states) > 0
    assert stats.num_finished == 4 and stats.num_generated_tokens == 60 and stats.num_steps == 20
    assert stats.num_prompt_tokens == 61 and stats.num_prefix_hit_tokens == 0
    assert stats.seconds > 0 and stats.tokens_per_second == pytest.approx(60 / stats.seconds)
    assert stats.peak_blocks >= 9 and stats.peak_bytes >= stats.used_bytes == 0
    assert 0 <= stats.waste_percent < 100
    engine.generate(texts[1:2], GREEDY)
    assert engine.stats().num_prefix_hit_tokens == 32
    engine.reset_prefix_cache()
    assert engine.stats().cached_blocks == 0
    engine.free()
    assert engine.block_map() == {} and "PagedEngine(LlamaForCausalLM" in repr(engine)


# ------------------------------------------------------------------------------ many ways to wait


def test_a_long_call_shows_its_progress_to_a_viewer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine_of() as engine:
        for progress, has_viewer, seconds, is_shown in [
            (None, True, 0, True),
            (None, True, 1e9, False),
            (None, False, 0, False),
            (False, True, 0, False),
            (True, False, 1e9, True),
        ]:
            monkeypatch.setattr(streams, "_is_interactive", lambda viewer=has_viewer: viewer)
            monkeypatch.setattr(streams, "SLOW_SECONDS", seconds)
            engine.generate(prompts(3, 5), {"max_new_tokens": 2}, progress=progress)
            assert ("2/2" in capsys.readouterr().err) == is_shown


def test_a_terminal_has_a_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not streams._is_interactive()
    main, terminal = os.openpty()
    with open(main, "wb"), open(terminal, "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        assert streams._is_interactive()
    # closed; without a console on Windows; replaced by an object that sends lines to a log
    for no_terminal in (file, None, types.SimpleNamespace(write=str, flush=str)):
        monkeypatch.setattr(sys, "stderr", no_terminal)
        assert not streams._is_interactive()


def ended(outputs: Iterable[RequestOutput]) -> list[Any]:
    """Results in the order of their ids, which outputs told token by token."""
    outputs = list(outputs)
    results, told = results_of(outputs), told_by(outputs)
    for name, result in results.items():
        assert told[name] == {0: result.token_ids}
    return [results[name] for name in sorted(results)]


def test_streams_and_steps_beside_them_get_only_their_own() -> None:
    texts = prompts(10, 17, 5, 8)
    with engine_of() as engine:
        engine.add_request(texts[3], GREEDY, request_id="by steps")
        both = engine.stream(texts[:2], GREEDY), engine.stream(texts[2:3], GREEDY)
        taken = zip(*itertools.zip_longest(*both))  # in turn
        found = [ended(filter(None, outputs)) for outputs in taken]
        found.append(ended(engine.step() + steps(engine)))
        assert_drained(engine)
        assert_lone(engine, texts, itertools.chain(*found))  # ids in prompt order
        stream = engine.stream(texts, GREEDY)
        next(stream)
        assert engine.has_unfinished
        stream.close()
        assert_drained(engine)
    assert list(map(len, found)) == [2, 1, 1]


async def read(engine: PagedEngine, part: list[list[int]], options: Any = GREEDY) -> list[Any]:
    return ended([output async for output in engine.astream(part, options)])


@pytest.mark.slow
def test_readers_share_steps() -> None:
    """Readers in one event loop take turns: a step serves all of them."""
    texts, options = prompts(*(3 + i % 7 for i in range(40))), counted(24)

    async def main(engine: PagedEngine) -> list[list[Any]]:
        return await asyncio.gather(*(read(engine, [prompt], options) for prompt in texts))

    async def cancelled(engine: PagedEngine) -> None:
        readers = [asyncio.ensure_future(read(engine, [prompt], options)) for prompt in texts[:8]]
        while engine.stats().num_running < 8:
            await asyncio.sleep(0.001)
        for reader in readers[1:]:  # one of them runs a step, the others wait
            reader.cancel()
        assert await readers[0]
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert sum(isinstance(end, asyncio.CancelledError) for end in ends) == 7

    with engine_of() as engine:
        found = asyncio.run(main(engine))
        assert engine.stats().num_steps <= 24 + 12, "each reader took steps of its own"
        assert_drained(engine)
        asyncio.run(cancelled(engine))
        assert_drained(engine)
        gc.collect()
        assert not engine._core.reader_locks, "an event loop that has ended is kept"
        assert_lone(engine, texts, itertools.chain(*found), options)


SEEDS = [
    ([5, 6, 5], [5, 6, 5]),
    (np.int64(5), [5, 6, 7]),  # one seed: prompt number i draws with `seed + i`
    (2**64 - 2, [2**64 - 2, 2**64 - 1, 0]),  # after the largest comes the first
]


@pytest.mark.slow_cases("each", "one")
@pytest.mark.parametrize(("seed", "expected"), SEEDS, ids=["each", "one", "largest"])
def test_seeds(seed: Any, expected: list[int]) -> None:
    texts, options, rng = prompts(9, 9, 4), MODES["samples"], torch.get_rng_state()
    with engine_of() as engine:
        streamed = results_of(engine.stream(texts, options, seed=seed))
        results = engine.generate(texts, options, seed=seed)
        assert torch.equal(torch.get_rng_state(), rng), "seeded requests drew global numbers"
        for text, own, *found in zip(texts, expected, results, map(streamed.get, sorted(streamed))):
            for result in found:
                plain = lone_run(engine.model, text, options, own)
                assert_same_as_lone(plain, result, options, f"seed {own}")


def test_seeds_that_are_refused() -> None:
    texts = prompts(9, 4)
    with engine_of() as engine:
        with pytest.raises(ValueError, match="3 values of `seed` were passed for 2 prompts"):
            engine.generate(texts, GREEDY, seed=[5, 6, 7])
        good, bad = engine.generate(texts, GREEDY, seed=[None, 2**70])
        assert good.error is None and "`seed`" in str(bad.error)
        for result in engine.generate(texts, GREEDY, seed=2**64):
            assert isinstance(result.error, ValueError) and "`seed`" in str(result.error)


def test_requests_of_a_lower_priority_number_start_first() -> None:
    texts = prompts(10, 11, 12, 13)
    with engine_of(max_num_seqs=1) as engine:
        outputs = list(engine.stream(texts, counted(4), priority=(0, 2, -1, 1)))
    assert list(results_of(outputs)) == [f"request-{place}" for place in (2, 0, 3, 1)]


@pytest.mark.parametrize("mode", ["greedy", "samples", "beams"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 7])
def test_cancel_at_any_point(mode: str, num_steps: int) -> None:
    """Before the first step, within a chunked prompt, while decoding: other requests are
    unaffected."""
    texts = prompts(20, 21, 9)
    with engine_of(max_num_batched_tokens=16) as engine:
        asked = Asked(engine, texts, MODES[mode])
        results = results_of(output for _ in range(num_steps) for output in engine.step())
        engine.cancel("1")
        engine.check_integrity()
        with pytest.raises(ValueError, match="no unfinished request has the id '1'"):
            engine.cancel("1")
        asked.add("again", texts[1], MODES[mode], 1)
        results |= run_all(engine)
        assert_drained(engine)
        asked.check(results, {"0", "2", "again"})
    cancelled, again = results["1"], results["again"]
    assert {sequence.finish_reason for sequence in cancelled.sequences} == {"cancelled"}
    assert cancelled.error is None and len(results) == 4
    if mode == "greedy":
        assert cancelled.token_ids == again.token_ids[: len(cancelled.token_ids)]


def test_free_and_context_manager() -> None:
    texts = prompts(12, 30)
    with engine_of() as engine:
        engine.add_request(texts[0], GREEDY, request_id="a")
        engine.step()
        engine.free()
        assert engine.has_unfinished, "the end of the request is still to be reported"
        (result,) = results_of(engine.step()).values()
        assert (result.request_id, result.finish_reason) == ("a", "cancelled")
        assert engine.stats().used_bytes == 0
        assert_lone(engine, texts, engine.generate(texts, GREEDY))
        engine.add_request(texts[0], GREEDY)
        engine.step()
    assert len(engine.step()) == 1 and engine.stats().used_blocks == 0
    engine.check_integrity()


def test_ids() -> None:
    with engine_of() as engine:
        for mine in ("mine", "request-1"):  # the latter would be made up, too
            engine.add_request([5, 6], GREEDY, request_id=mine)
        with pytest.raises(ValueError, match="'mine' is in use"):
            engine.add_request([5, 6], GREEDY, request_id="mine")
        names = [engine.add_request([5, 6, 7], GREEDY) for _ in range(3)]
        results = run_all(engine)
        assert len(results) == 5 and results.keys() == {*names, "mine", "request-1"}
        engine.add_request([5, 6], GREEDY, request_id="mine")  # free again
        assert run_all(engine)["mine"].token_ids == results["mine"].token_ids


# ------------------------------------------------------------------------------------------- text

TEXTS = [models.corpus()[0], models.corpus()[1][:9], models.corpus()[2][:23]]


@pytest.mark.parametrize("mode", ["greedy", "greedy_eos", "samples", "beams"])
def test_text(mode: str) -> None:
    tokenizer = models.tokenizer()
    with engine_of(tokenizer=tokenizer) as engine:
        outputs = list(engine.stream(TEXTS, MODES[mode], seed=6))
    results = results_of(outputs)
    for text, name in zip(TEXTS, sorted(results)):
        assert results[name].prompt_ids == tokenizer(text)["input_ids"]
        for each in results[name].sequences:
            assert each.text == tokenizer.decode(each.token_ids, skip_special_tokens=True)
        pieces = [o.text for o in outputs if o.request_id == name and o.text is not None]
        if mode != "beams":
            assert "".join(pieces) == results[name].text
            assert len(pieces) > 3, "nothing came piece by piece"


class Bytes:
    """A tokenizer whose tokens are single bytes of UTF-8."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def test_streamed_text_never_holds_half_a_character() -> None:
    data = "na\u00efve \u2713 \U0001f600\U0001f1e9\U0001f1ea e\u0301 \ufffd end".encode()
    for cut in range(1, len(data)):
        tracker = TextTracker(Bytes())
        pieces = [tracker.add([token], is_last=i == cut - 1) for i, token in enumerate(data[:cut])]
        assert "".join(pieces) == data[:cut].decode("utf-8", errors="replace"), cut


WORDS = [*"it n ' t n't 's v 'v e ve . , do re".split(), "", "' "]
MARKS = "a _ _' ' n _n 't t v _'v e s _s . _. _'_".replace("_", "\u0120").split()
PARTS = "it n ##n ' ##' t ##t s v ##e . ##. do not ##s".split()


@pytest.mark.parametrize(
    ("tokens", "model", "decoder"),
    [
        (WORDS, WordLevel, None),
        (MARKS, WordLevel, decoders.ByteLevel()),
        (PARTS, WordPiece, decoders.WordPiece(cleanup=True)),
    ],
    ids=["words", "bytes", "parts"],
)
def test_streamed_text_is_that_of_a_tokenizer_that_cleans_up(
    tokens: list[str], model: Any, decoder: Any
) -> None:
    """Spaces before, and around, such marks are dropped once they are complete."""
    vocabulary = {token: number for number, token in enumerate(["<s>", *tokens])}
    backend = Tokenizer(model(vocabulary, unk_token="<s>"))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", clean_up_tokenization_spaces=True
    )
    draw, num_shown = random.Random(0), 0
    for _ in range(1000):
        ids = [draw.randrange(len(vocabulary)) for _ in range(draw.randint(1, 12))]
        tracker = TextTracker(tokenizer)
        pieces = [tracker.add([token]) for token in ids]
        num_shown += sum(map(bool, pieces))
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join([*pieces, tracker.flush()]) == text, [*vocabulary][ids[0]]
    assert num_shown > 3000


def test_the_end_of_a_request_streams_the_text_that_was_held_back() -> None:
    with engine_of(tokenizer=Spelled(range(models.VOCAB_SIZE))) as engine:
        for name in ("done", "cancelled"):
            engine.add_request(prompts(9)[0], GREEDY, request_id=name)
        outputs = [output for _ in range(3) for output in engine.step()]
        engine.cancel("cancelled")
        outputs += steps(engine)
    for name, result in results_of(outputs).items():
        told = "".join(output.text or "" for output in outputs if output.request_id == name)
        assert told == result.text != ""
