"""`PagedEngine` from the outside: each request gets plain `generate`'s tokens, whatever runs beside
it."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import random
import sys
import time
import types
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel, WordPiece
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

from hf_paged import PagedConfig, PagedEngine, RequestOutput
from hf_paged.batching import engine_core, streams
from tests.support import models
from tests.support.checks import in_threads
from tests.support.engine_helpers import (
    MANY_ENDS,
    MODES,
    assert_drained,
    assert_same_as_lone,
    build_diff_llama,
    build_mamba,
    lone_run,
    prompts,
    run_all,
)

SMALL = PagedConfig(block_size=8)
GREEDY = MODES["greedy"]


def engine_of(name: str = "llama", **options: Any) -> PagedEngine:
    return PagedEngine(models.get(name), PagedConfig(**{"block_size": 8, **options}))


# ----------------------------------------------------------------------------------------- tokens


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("name", models.DECODER_ONLY)
def test_all_modes_in_one_batch(name: str, device: torch.device) -> None:
    model = models.put(models.get(name), device)
    texts = prompts(*(random.Random(1).randint(1, 30) for _ in MODES))
    with PagedEngine(model, PagedConfig(block_size=8, max_num_batched_tokens=24)) as engine:
        for seed, ((mode, options), prompt) in enumerate(zip(MODES.items(), texts)):
            config = GenerationConfig(**options) if seed % 2 else options  # both forms
            engine.add_request(prompt, config, request_id=mode, seed=seed)
        results = run_all(engine)
        assert sorted(results) == sorted(MODES)
        assert_drained(engine)
    reasons = set()
    for seed, ((mode, options), prompt) in enumerate(zip(MODES.items(), texts)):
        assert_same_as_lone(
            lone_run(model, prompt, options, seed), results[mode], options, f"{name}, {mode}"
        )
        reasons |= {sequence.finish_reason for sequence in results[mode].sequences}
    assert {"length", "eos"} <= reasons, f"the batch was meant to end in several ways: {reasons}"


@pytest.mark.parametrize("mode", MODES)
def test_one_mode_over_several_prompts(mode: str) -> None:
    options, texts = MODES[mode], prompts(1, 9, 17, 26)
    with engine_of() as engine:
        for i, prompt in enumerate(texts):
            engine.add_request(prompt, options, request_id=str(i), seed=i)
        results = run_all(engine)
        assert_drained(engine)
    for i, prompt in enumerate(texts):
        assert_same_as_lone(
            lone_run(models.get("llama"), prompt, options, i),
            results[str(i)],
            options,
            f"{mode}, {i}",
        )


@pytest.mark.parametrize("mode", ["sample", "samples", "beam_sample"])
def test_alone_it_draws_from_the_global_random_numbers_as_generate_does(mode: str) -> None:
    prompt = prompts(12)[0]
    with engine_of() as engine:
        torch.manual_seed(11)
        result = engine.generate([prompt], MODES[mode])[0]
        state = torch.get_rng_state()
    assert_same_as_lone(
        lone_run(models.get("llama"), prompt, MODES[mode], 11), result, MODES[mode], mode
    )
    assert torch.equal(state, torch.get_rng_state()), (
        "the engine drew more or fewer numbers than plain"
    )


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_mamba, build_diff_llama], ids=["mamba", "diff_llama"])
def test_models_that_cannot_run_packed(build: Any) -> None:
    model = build()
    texts = prompts(*(3 + 2 * i for i in range(len(MODES))))
    with PagedEngine(model, SMALL) as engine:
        for seed, ((mode, options), prompt) in enumerate(zip(MODES.items(), texts)):
            engine.add_request(prompt, options, request_id=mode, seed=seed)
        assert engine._core.loop is not None and engine._core.layout.unsupported_reason, (
            "the model was meant to be one that cannot run packed"
        )
        results = run_all(engine)
        assert_drained(engine)
    for seed, ((mode, options), prompt) in enumerate(zip(MODES.items(), texts)):
        assert_same_as_lone(lone_run(model, prompt, options, seed), results[mode], options, mode)


@pytest.mark.slow
def test_row_layout_under_a_small_budget() -> None:
    model, texts = build_diff_llama(), prompts(20, 25, 9, 31)
    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=8)) as engine:
        results = engine.generate(texts, GREEDY)
        assert engine.stats().num_preemptions > 0
        assert_drained(engine)
    for prompt, result in zip(texts, results):
        assert_same_as_lone(lone_run(model, prompt, GREEDY), result, GREEDY, "diff_llama")


class Forbid(LogitsProcessor):
    """Forbids a token wherever the text has an even number of tokens; records the shapes of its
    inputs."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(input_ids.shape))
        if input_ids.shape[1] % 2 == 0:
            scores[:, self.token] = -torch.inf
        return scores


class StopAt(StoppingCriteria):
    """Ends a row once it has a given number of distinct tokens."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([len(set(row)) >= self.count for row in input_ids.tolist()])


def test_processors_and_criteria_of_the_callers_own() -> None:
    model, texts = models.get("llama"), prompts(6, 15, 10)
    modes = {"greedy": GREEDY, "samples": MODES["samples"], "beams": MODES["beams"]}
    processors = {mode: Forbid(40 + i) for i, mode in enumerate(modes)}
    with engine_of() as engine:
        for i, (prompt, (mode, options)) in enumerate(zip(texts, modes.items())):
            own = {
                "logits_processor": [processors[mode]],
                "stopping_criteria": [StopAt(len(prompt) + 5)],
            }
            engine.add_request(prompt, options, request_id=mode, seed=i, **own)
        engine.add_request(texts[0], GREEDY, request_id="none")
        results = run_all(engine)
    for i, (prompt, (mode, options)) in enumerate(zip(texts, modes.items())):
        plain = Forbid(40 + i)
        own = {
            "logits_processor": LogitsProcessorList([plain]),
            "stopping_criteria": StoppingCriteriaList([StopAt(len(prompt) + 5)]),
        }
        expected = lone_run(model, prompt, options, i, **own)
        assert_same_as_lone(expected, results[mode], options, mode)
        assert processors[mode].seen == plain.seen, mode
    assert results["greedy"].finish_reason == "criteria"
    assert_same_as_lone(lone_run(model, texts[0], GREEDY), results["none"], GREEDY, "without any")


def test_the_models_own_generation_config_counts() -> None:
    model = models.build("llama")
    model.generation_config.max_new_tokens = 7
    model.generation_config.repetition_penalty = 1.5
    before = model.generation_config.to_dict()
    prompt = prompts(9)[0]
    with PagedEngine(model, SMALL) as engine:
        own, over = engine.generate(
            [prompt, prompt], [None, {"repetition_penalty": 1.0, "do_sample": False}]
        )
    assert_same_as_lone(lone_run(model, prompt, {}), own, {}, "own")
    assert_same_as_lone(lone_run(model, prompt, {"repetition_penalty": 1.0}), over, {}, "over")
    assert own.token_ids != over.token_ids, "the penalty changes nothing: the test is void"
    assert len(own.token_ids) == 7
    assert model.generation_config.to_dict() == before


# ---------------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize("mode", ["greedy", "greedy_eos", "penalties", "sample_warped", "samples"])
def test_logprobs(mode: str) -> None:
    """Raw log-probabilities equal a plain forward's; processed ones equal plain `generate`'s
    scores."""
    model, prompt, options = models.get("llama"), prompts(11)[0], MODES[mode]
    with engine_of() as engine:
        for i in range(3):  # with others in the batch
            engine.add_request(prompt[: 4 + i], MODES["sample"], seed=i, return_logprobs=True)
        engine.add_request(prompt, options, request_id="r", seed=3, return_logprobs=True)
        result = run_all(engine)["r"]
    ids = torch.tensor([prompt])
    torch.manual_seed(3)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **options,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for row, sequence in enumerate(result.sequences):
        assert sequence.logprobs is not None and len(sequence.logprobs) == len(sequence.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sequence.token_ids])).logits[
                0, len(prompt) - 1 : -1
            ]
        raw = logits.log_softmax(-1).gather(1, torch.tensor(sequence.token_ids)[:, None])[:, 0]
        scores = torch.stack(out.scores)[: len(sequence.token_ids), row].log_softmax(-1)
        processed = scores.gather(1, torch.tensor(sequence.token_ids)[:, None])[:, 0]
        got = torch.tensor(sequence.logprobs)
        torch.testing.assert_close(got[:, 0], raw, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got[:, 1], processed, atol=1e-4, rtol=1e-4)


def test_logprobs_and_scores_of_beams() -> None:
    model, prompt, options = models.get("llama"), prompts(11)[0], MODES["beams_eos"]
    with engine_of() as engine:
        result = engine.generate([prompt], options, return_logprobs=True)[0]
    ids = torch.tensor([prompt])
    out = model.generate(ids, **options, return_dict_in_generate=True, output_scores=True)
    torch.testing.assert_close(
        torch.tensor([s.score for s in result.sequences]), out.sequences_scores
    )
    transitions = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    for row, sequence in enumerate(result.sequences):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sequence.token_ids])).logits[
                0, len(prompt) - 1 : -1
            ]
        raw = logits.log_softmax(-1).gather(1, torch.tensor(sequence.token_ids)[:, None])[:, 0]
        got = torch.tensor(sequence.logprobs)
        torch.testing.assert_close(got[:, 0], raw, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            got[:, 1], transitions[row, : len(sequence.token_ids)], atol=1e-4, rtol=1e-4
        )


def test_a_request_is_queued_until_its_first_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[float] = []
    with engine_of() as engine:
        engine.add_request(prompts(9)[0], GREEDY, request_id="a")
        added = engine._core.requests["a"]._added_at
        runner = engine._core.loop.executor.runner
        run = runner.run

        def timed(*args: Any) -> Any:
            begun.append(time.perf_counter())
            return run(*args)

        monkeypatch.setattr(runner, "run", timed)
        timings = run_all(engine)["a"].timings
    assert 0 <= timings.queued <= begun[0] - added < timings.first_token


def test_fields_of_a_result() -> None:
    prompt = prompts(21)[0]
    with engine_of() as engine:
        first = engine.add_request(prompt, MODES["samples"], seed=1)
        engine.add_request(torch.tensor(prompt), GREEDY, request_id="tensor")
        engine.add_request(torch.tensor([prompt]), GREEDY, request_id="matrix")
        results = run_all(engine)
        assert results["tensor"].token_ids == results["matrix"].token_ids
        result = results[first]
        assert result.request_id == first and result.prompt_ids == prompt and result.error is None
        assert len(result.sequences) == 3
        one = result.sequences[0]
        assert (result.token_ids, result.text, result.finish_reason) == (
            one.token_ids,
            None,
            one.finish_reason,
        )
        assert result.logprobs is None and one.score is None
        timings = result.timings
        assert None not in (timings.queued, timings.first_token, timings.total)
        assert 0 <= timings.queued <= timings.first_token <= timings.total
        # the second and third used the first one's blocks
        assert results["matrix"].num_prefix_hit_tokens == 16
        again = engine.generate([prompt], GREEDY)[0]
        assert again.num_prefix_hit_tokens == 16 and again.token_ids == results["tensor"].token_ids
        assert again.num_preemptions == 0


def test_outputs_of_the_steps_add_up_to_the_results() -> None:
    texts, results = prompts(5, 12, 20), {}
    tokens: dict[str, dict[int, list[int]]] = {}
    with engine_of() as engine:
        for i, (prompt, mode) in enumerate(zip(texts, ("greedy_eos", "samples", "beams"))):
            engine.add_request(prompt, MODES[mode], request_id=mode, seed=i)
        while engine.has_unfinished:
            for output in engine.step():
                for row, token in output.new_tokens.items():
                    tokens.setdefault(output.request_id, {}).setdefault(row, []).append(token)
                assert output.finished == (output.result is not None)
                if output.result is not None:
                    results[output.request_id] = output.result
    assert "beams" not in tokens, "beams are not settled before the end"
    for mode in ("greedy_eos", "samples"):
        assert tokens[mode] == {
            row: s.token_ids for row, s in enumerate(results[mode].sequences)
        }, mode


def test_stats_and_block_map() -> None:
    texts = prompts(20, 33, 8)
    engine = engine_of(num_blocks=64)
    assert engine.block_map() == {} and engine.stats().num_steps == 0
    for prompt in texts:
        engine.add_request(prompt, GREEDY)
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
    assert stats.num_finished == 3 and stats.num_generated_tokens == 60 and stats.num_steps == 20
    assert stats.num_prompt_tokens == 61 and stats.num_prefix_hit_tokens == 0
    assert stats.seconds > 0 and stats.tokens_per_second == pytest.approx(60 / stats.seconds)
    assert stats.peak_blocks >= 9 and stats.peak_bytes >= stats.used_bytes == 0
    assert 0 <= stats.waste_percent < 100
    engine.generate([texts[1]], GREEDY)
    assert engine.stats().num_prefix_hit_tokens == 32
    engine.reset_prefix_cache()
    assert engine.stats().cached_blocks == 0
    assert engine.generate([texts[1]], GREEDY)[0].num_prefix_hit_tokens == 0
    assert_drained(engine)
    engine.free()
    assert engine.block_map() == {} and engine.stats().cached_blocks == 0
    assert "PagedEngine(LlamaForCausalLM" in repr(engine)


def test_samples_and_beams_share_the_blocks_of_the_prompt() -> None:
    prompt = prompts(40)[0]
    for options in (
        {"do_sample": True, "num_return_sequences": 8},
        {"num_beams": 8, "do_sample": False},
    ):
        with engine_of(prefix_caching=False) as engine:
            engine.add_request(prompt, {**options, "max_new_tokens": 4})
            for _ in range(3):
                engine.step()
            stats = engine.stats()
            assert stats.shared_blocks >= 5 and stats.used_blocks <= 5 + 8, stats


# ------------------------------------------------------------------------------ many ways to wait


def test_generate_keeps_the_order_and_takes_a_config_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = prompts(30, 2, 11, 25)
    options = [{"do_sample": False, "max_new_tokens": count} for count in (3, 15, 1, 8)]
    with engine_of(max_num_seqs=2) as engine:
        results = engine.generate(texts, options, progress=True)
        with pytest.raises(ValueError, match="2 generation configs were passed for 4 prompts"):
            engine.generate(texts, options[:2])
        with pytest.raises(ValueError, match="list of prompts"):
            engine.generate("abc")
        assert engine.generate([]) == []
    assert "4/4" in capsys.readouterr().err
    for prompt, each, result in zip(texts, options, results):
        assert result.prompt_ids == prompt
        assert_same_as_lone(lone_run(models.get("llama"), prompt, each), result, each, "ordered")


@pytest.mark.parametrize(
    ("progress", "has_viewer", "seconds", "is_shown"),
    [
        (None, True, 0, True),
        (None, True, 1e9, False),
        (None, False, 0, False),
        (False, True, 0, False),
        (True, False, 1e9, True),
    ],
)
def test_a_long_call_shows_its_progress(
    progress: bool | None,
    has_viewer: bool,
    seconds: float,
    is_shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(streams, "_is_interactive", lambda: has_viewer)
    monkeypatch.setattr(streams, "SLOW_SECONDS", seconds)
    with engine_of() as engine:
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


def collect(outputs: list[RequestOutput]) -> dict[str, tuple[list[int], Any]]:
    found: dict[str, tuple[list[int], Any]] = {}
    for output in outputs:
        tokens, result = found.get(output.request_id, ([], None))
        tokens += [output.new_tokens[0]] if output.new_tokens else []
        found[output.request_id] = (tokens, output.result or result)
    return found


def test_stream() -> None:
    texts = prompts(14, 3, 22)
    with engine_of() as engine:
        found = collect(list(engine.stream(texts, MODES["greedy_eos"])))
        assert_drained(engine)
        assert len(found) == 3
        for prompt, (tokens, result) in zip(texts, found.values()):  # ids in prompt order
            assert result.prompt_ids == prompt and result.token_ids == tokens
            expected = lone_run(models.get("llama"), prompt, MODES["greedy_eos"])
            assert_same_as_lone(expected, result, MODES["greedy_eos"], "stream")
        stream = engine.stream(texts, GREEDY)
        next(stream)
        assert engine.has_unfinished
        stream.close()
        assert_drained(engine)


def test_two_streams_and_steps_beside_them_get_only_their_own() -> None:
    texts = prompts(10, 17, 5, 8)
    with engine_of() as engine:
        engine.add_request(texts[3], GREEDY, request_id="by steps")
        left, right = engine.stream(texts[:2], GREEDY), engine.stream(texts[2:3], GREEDY)
        outputs: tuple[list[RequestOutput], list[RequestOutput]] = ([], [])
        streams = [left, right]
        while streams:
            for stream in list(streams):
                output = next(stream, None)
                if output is None:
                    streams.remove(stream)
                else:
                    outputs[stream is right].append(output)
        stepped = engine.step()
        while engine.has_unfinished:
            stepped += engine.step()
        assert_drained(engine)
    found = [
        *collect(outputs[0]).values(),
        *collect(outputs[1]).values(),
        *collect(stepped).values(),
    ]
    assert [len(collect(part)) for part in (*outputs, stepped)] == [2, 1, 1]
    for prompt, (tokens, result) in zip(texts, found):
        assert_same_as_lone(
            lone_run(models.get("llama"), prompt, GREEDY), result, GREEDY, "two streams"
        )
        assert tokens == result.token_ids


def test_astream() -> None:
    texts = prompts(14, 3, 22, 9)

    async def read(engine: PagedEngine, part: list[list[int]]) -> list[RequestOutput]:
        return [output async for output in engine.astream(part, GREEDY)]

    async def main(engine: PagedEngine) -> list[list[RequestOutput]]:
        return await asyncio.gather(read(engine, texts[:2]), read(engine, texts[2:]))

    async def leave_early(engine: PagedEngine) -> None:
        stream = engine.astream(texts, GREEDY)
        async for _ in stream:
            break
        await stream.aclose()

    with engine_of() as engine:
        found = [
            value for outputs in asyncio.run(main(engine)) for value in collect(outputs).values()
        ]
        assert_drained(engine)
        asyncio.run(leave_early(engine))
        assert_drained(engine)
    for prompt, (tokens, result) in zip(texts, found):
        assert_same_as_lone(
            lone_run(models.get("llama"), prompt, GREEDY), result, GREEDY, "astream"
        )
        assert tokens == result.token_ids


@pytest.mark.slow
def test_readers_share_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers in one event loop take turns: a step serves all of them, and its outputs need no
    thread each."""
    hops: list[Any] = []

    async def to_thread(function: Any, *args: Any) -> Any:
        hops.append(function)
        return await asyncio.get_running_loop().run_in_executor(
            None, functools.partial(function, *args)
        )

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    texts = prompts(*(3 + i % 7 for i in range(40)))
    options = {"do_sample": False, "max_new_tokens": 24}

    async def read(engine: PagedEngine, prompt: list[int]) -> list[RequestOutput]:
        return [output async for output in engine.astream([prompt], options)]

    async def main(engine: PagedEngine) -> list[list[RequestOutput]]:
        return await asyncio.gather(*(read(engine, prompt) for prompt in texts))

    async def cancelled(engine: PagedEngine) -> None:
        readers = [asyncio.ensure_future(read(engine, prompt)) for prompt in texts[:8]]
        while engine.stats().num_running < 8:
            await asyncio.sleep(0.001)
        for reader in readers[1:]:  # one of them runs a step, the others wait
            reader.cancel()
        assert collect(await readers[0])
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert sum(isinstance(end, asyncio.CancelledError) for end in ends) == 7

    with engine_of() as engine:
        found = asyncio.run(main(engine))
        num_steps = engine.stats().num_steps
        assert num_steps <= 24 + 12, "each reader took steps of its own"
        # they begin and end
        assert len(hops) <= num_steps + 2 * len(texts), "each reader waited for each step"
        assert_drained(engine)
        asyncio.run(cancelled(engine))
        assert_drained(engine)
        gc.collect()
        assert not engine._core.reader_locks, "an event loop that has ended is kept"
    for prompt, outputs in zip(texts, found):
        [(tokens, result)] = collect(outputs).values()
        assert_same_as_lone(
            lone_run(models.get("llama"), prompt, options), result, options, "readers"
        )
        assert tokens == result.token_ids


@pytest.mark.slow
def test_an_option_each() -> None:
    """Seeds and priorities of a call, one per prompt."""
    texts, options = prompts(9, 9, 9, 4), MODES["samples"]
    with engine_of(max_num_seqs=3) as engine:
        outputs = [
            o
            for o in engine.stream(texts, options, seed=[5, None, 6, 5], priority=(3, 2, 1, 0))
            if o.finished
        ]
        ids = [f"request-{place}" for place in range(4)]
        assert [output.request_id for output in outputs] == ids[::-1]
        results = engine.generate(texts, options, seed=[5, 2**70, 6, 5])
        counted = engine.generate(texts, options, seed=np.int64(5))
        streamed = [o.result for o in engine.stream(texts, options, seed=5) if o.result is not None]
        with pytest.raises(ValueError, match="2 values of `seed` were passed for 4 prompts"):
            engine.generate(texts, options, seed=[5, 6])
        assert_drained(engine)
    assert isinstance(results[1].error, ValueError) and "`seed`" in str(results[1].error)
    for place, seed in ((0, 5), (2, 6), (3, 5)):
        expected = lone_run(models.get("llama"), texts[place], options, seed)
        assert_same_as_lone(expected, results[place], options, f"seed {seed}")
    for place, text in enumerate(texts):  # one seed: prompt number i draws with `seed + i`
        expected = lone_run(models.get("llama"), text, options, 5 + place)
        (of_stream,) = (result for result in streamed if result.prompt_ids == text)
        for result in (counted[place], of_stream):
            assert_same_as_lone(expected, result, options, f"place {place}")


def test_the_seed_after_the_largest_is_the_first() -> None:
    text, options = prompts(9)[0], MODES["samples"]
    with engine_of() as engine:
        results = engine.generate([text] * 3, options, seed=2**64 - 2)
        refused = [
            engine.generate([text] * 2, options, seed=seed) for seed in (2**64, -(2**63) - 1)
        ]
    for result, seed in zip(results, (2**64 - 2, 2**64 - 1, 0)):
        assert_same_as_lone(
            lone_run(models.get("llama"), text, options, seed), result, options, f"seed {seed}"
        )
    assert all("`seed`" in str(result.error) for pair in refused for result in pair)


@pytest.mark.slow
def test_threads() -> None:
    texts = prompts(*range(3, 27, 2))
    expected = [lone_run(models.get("llama"), prompt, GREEDY) for prompt in texts]
    with engine_of(num_blocks=40) as engine:
        results = in_threads(
            *(functools.partial(engine.generate, texts[first::4], GREEDY) for first in range(4))
        )
        assert_drained(engine)
    for first in range(4):
        for lone, result in zip(expected[first::4], results[first]):
            assert_same_as_lone(lone, result, GREEDY, f"thread {first}")


def test_priorities() -> None:
    """Requests with a lower priority number start first, in any order of arrival."""
    texts = prompts(10, 11, 12, 13)
    with engine_of(max_num_seqs=1) as engine:
        for i, (prompt, priority) in enumerate(zip(texts, (0, 2, -1, 1))):
            engine.add_request(
                prompt,
                {"max_new_tokens": 4, "do_sample": False},
                request_id=str(i),
                priority=priority,
            )
        ends = [o.request_id for _ in range(40) for o in engine.step() if o.finished]
    assert ends == ["2", "0", "3", "1"]


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[list[Any]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamer() -> None:
    prompt = prompts(13)[0]
    ours, plain = Recorder(), Recorder()
    with engine_of() as engine:
        engine.add_request(prompts(6)[0], GREEDY)
        engine.add_request(prompt, MODES["greedy_eos"], streamer=ours)
        run_all(engine)
    lone_run(models.get("llama"), prompt, MODES["greedy_eos"], streamer=plain)
    assert ours.values == plain.values and ours.ended == plain.ended == 1


@pytest.mark.parametrize("mode", ["greedy", "samples", "beams"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_cancel_at_any_point(mode: str, steps: int) -> None:
    """Before the first step, within a chunked prompt, while decoding: other requests are
    unaffected."""
    texts = prompts(20, 21, 9)
    with engine_of(max_num_batched_tokens=16) as engine:
        for i, prompt in enumerate(texts):
            engine.add_request(prompt, MODES[mode], request_id=str(i), seed=i)
        results: dict[str, Any] = {}
        for _ in range(steps):
            results |= {o.request_id: o.result for o in engine.step() if o.finished}
        engine.cancel("1")
        engine.check_integrity()
        with pytest.raises(ValueError, match="'1'"):
            engine.cancel("1")
        engine.add_request(texts[1], MODES[mode], request_id="1 again", seed=1)
        results |= run_all(engine)
        assert_drained(engine)
    cancelled = results.pop("1")
    lone = [lone_run(models.get("llama"), prompt, MODES[mode], i) for i, prompt in enumerate(texts)]
    assert {sequence.finish_reason for sequence in cancelled.sequences} == {"cancelled"}
    assert cancelled.error is None
    if mode == "greedy":
        assert cancelled.token_ids == lone[1][0][: len(cancelled.token_ids)]
    assert sorted(results) == ["0", "1 again", "2"]
    for name, result in results.items():
        assert_same_as_lone(lone[int(name[0])], result, MODES[mode], f"{mode}, {name}")


def test_free_and_context_manager() -> None:
    texts = prompts(12, 30)
    with engine_of() as engine:
        engine.add_request(texts[0], GREEDY, request_id="a")
        engine.step()
        engine.free()
        assert engine.has_unfinished, "the end of the request is still to be reported"
        assert [(o.request_id, o.result.finish_reason) for o in engine.step() if o.result] == [
            ("a", "cancelled")
        ]
        assert engine.stats().used_bytes == 0
        result = engine.generate(texts, GREEDY)[1]
        assert_same_as_lone(
            lone_run(models.get("llama"), texts[1], GREEDY), result, GREEDY, "after free"
        )
        engine.add_request(texts[0], GREEDY)
        engine.step()
    assert len(engine.step()) == 1 and engine.stats().used_blocks == 0
    engine.check_integrity()


# ------------------------------------------------------------------------------------------- text

TEXTS = [models.corpus()[0], models.corpus()[1][:9], models.corpus()[2][:23]]


@pytest.mark.parametrize("mode", ["greedy", "greedy_eos", "samples", "beams"])
def test_text(mode: str) -> None:
    tokenizer, options = models.tokenizer(), MODES[mode]
    with PagedEngine(models.get("llama"), SMALL, tokenizer=tokenizer) as engine:
        outputs = list(engine.stream(TEXTS, options))
        results = {o.request_id: o.result for o in outputs if o.result is not None}
        for text, result in zip(TEXTS, (results[name] for name in sorted(results))):
            assert result.prompt_ids == tokenizer(text)["input_ids"]
            for sequence in result.sequences:
                assert sequence.text == tokenizer.decode(
                    sequence.token_ids, skip_special_tokens=True
                )
            pieces = [
                o.text for o in outputs if o.request_id == result.request_id and o.text is not None
            ]
            if mode != "beams":
                assert "".join(pieces) == result.text
                assert len(pieces) > 3, "nothing came piece by piece"


def test_stop_strings() -> None:
    tokenizer, model = models.tokenizer(), models.get("llama")
    plain = tokenizer.decode(lone_run(model, tokenizer(TEXTS[0])["input_ids"], GREEDY)[0])
    options = {**GREEDY, "stop_strings": [plain[9:12], "never said"]}
    with PagedEngine(model, SMALL, tokenizer=tokenizer) as engine:
        engine.add_request(TEXTS[1], GREEDY)
        engine.add_request(TEXTS[0], options, request_id="stops")
        result = run_all(engine)["stops"]
    assert result.finish_reason == "stop_string" and plain[9:12] in result.text
    expected = lone_run(model, tokenizer(TEXTS[0])["input_ids"], options, tokenizer=tokenizer)
    assert_same_as_lone(expected, result, options, "stop strings")
    assert len(result.token_ids) < 20


class Bytes:
    """A tokenizer whose tokens are single bytes of UTF-8."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def test_streamed_text_never_holds_half_a_character() -> None:
    from hf_paged.batching.results import TextTracker

    text = "na\u00efve \u2713 \U0001f600\U0001f1e9\U0001f1ea e\u0301 \ufffd end"
    data = list(text.encode())
    for cut in range(1, len(data)):
        tracker = TextTracker(Bytes())
        pieces = [tracker.add([token], is_last=i == cut - 1) for i, token in enumerate(data[:cut])]
        assert "".join(pieces) == bytes(data[:cut]).decode("utf-8", errors="replace"), cut


WORDS = ["it", "n", "'", "t", "n't", "'s", "v", "'v", "e", "ve", ".", ",", "do", "", "' ", "re"]
MARKS = ["a", " ", " '", "'", "n", " n", "'t", "t", "v", " 'v", "e", "s", " s", ".", " .", " ' "]
PARTS = ["it", "n", "##n", "'", "##'", "t", "##t", "s", "v", "##e", ".", "##.", "do", "not", "##s"]


@pytest.mark.parametrize("kind", ["words", "bytes", "parts"])
def test_streamed_text_is_that_of_a_tokenizer_that_cleans_up(kind: str) -> None:
    """Spaces before, and around, such marks are dropped once they are complete."""
    from hf_paged.batching.results import TextTracker

    tokens = {"words": WORDS, "bytes": [x.replace(" ", "\u0120") for x in MARKS], "parts": PARTS}[
        kind
    ]
    vocabulary = {token: number for number, token in enumerate(["<s>", *tokens])}
    if kind == "parts":
        backend = Tokenizer(WordPiece(vocabulary, unk_token="<s>"))
        backend.decoder = decoders.WordPiece(cleanup=True)
    else:
        backend = Tokenizer(WordLevel(vocabulary, unk_token="<s>"))
        if kind == "bytes":
            backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", clean_up_tokenization_spaces=True
    )
    draw = random.Random(0)
    num_shown = 0
    for _ in range(1000):
        ids = [draw.randrange(len(vocabulary)) for _ in range(draw.randint(1, 12))]
        tracker = TextTracker(tokenizer)
        pieces = [tracker.add([token]) for token in ids]
        num_shown += sum(map(bool, pieces))
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join([*pieces, tracker.flush()]) == text, [*vocabulary][ids[0]]
    assert num_shown > 3000


class Halves:
    """A tokenizer all of whose tokens are halves of characters."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "\N{REPLACEMENT CHARACTER}" * len(token_ids)


def test_the_end_of_a_request_streams_the_text_that_was_held_back() -> None:
    with PagedEngine(models.get("llama"), SMALL, tokenizer=Halves()) as engine:
        for name in ("done", "cancelled"):
            engine.add_request(prompts(9)[0], GREEDY, request_id=name)
        outputs = [output for _ in range(3) for output in engine.step()]
        engine.cancel("cancelled")
        while engine.has_unfinished:
            outputs += engine.step()
    for name in ("done", "cancelled"):
        own = [output for output in outputs if output.request_id == name]
        assert own[-1].result is not None and own[-1].result.text
        assert "".join(output.text or "" for output in own) == own[-1].result.text


def test_streamer_of_transformers_gives_the_same_text() -> None:
    tokenizer = models.tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with PagedEngine(models.get("llama"), SMALL, tokenizer=tokenizer) as engine:
        engine.add_request(TEXTS[0], GREEDY, request_id="a", streamer=streamer)
        result = run_all(engine)["a"]
    assert "".join(streamer).strip() == result.text.strip()


def test_ids() -> None:
    with engine_of() as engine:
        names = [engine.add_request([5, 6, 7], GREEDY) for _ in range(3)]
        assert len(set(names)) == 3
        engine.add_request([5, 6], GREEDY, request_id="mine")
        with pytest.raises(ValueError, match="'mine' is in use"):
            engine.add_request([5, 6], GREEDY, request_id="mine")
        results = run_all(engine)
        assert sorted(results) == sorted([*names, "mine"])
        engine.add_request([5, 6], GREEDY, request_id="mine")  # free again
        assert run_all(engine)["mine"].token_ids == results["mine"].token_ids


def test_made_up_ids_avoid_those_in_use() -> None:
    with engine_of() as engine:
        taken = "request-1"
        engine.add_request([5, 6], GREEDY, request_id=taken)
        names = [engine.add_request([7, 8], GREEDY) for _ in range(3)]
        assert len({taken, *names}) == 4
        assert len(run_all(engine)) == 4


def test_eos_ids_are_those_of_the_test() -> None:
    """The shared options do end texts early; otherwise the tests above would show little."""
    rows = [
        lone_run(models.get("llama"), prompt, MODES["greedy_eos"])[0]
        for prompt in prompts(1, 9, 17, 26)
    ]
    assert any(len(row) < 30 and row[-1] in MANY_ENDS for row in rows)


def test_a_call_that_reads_results_alone_is_told_no_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One output a request, however many tokens; `stream` beside it gets each of its own."""
    made: list[RequestOutput] = []

    class Noted(RequestOutput):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(engine_core, "RequestOutput", Noted)
    prompts = [[5, 6, 7], [8, 9], [10]]
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    with PagedEngine(models.get("llama"), tokenizer=models.tokenizer()) as engine:
        results = engine.generate(prompts, options)
        assert [output.result for output in made] == results
        assert all(len(result.token_ids) == 9 and result.text is not None for result in results)
        assert all(result.timings.first_token is not None for result in results)
        made.clear()
        streamed = list(engine.stream(prompts, options))
    assert streamed == made and len(streamed) == 27
