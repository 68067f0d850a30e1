"""Helpers of the engine's tests: plain `generate` on one prompt as the reference, and invariants at
the end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from hf_paged import EngineStats, PagedConfig, PagedEngine, RequestOutput, RequestResult
from hf_paged.rooms import RoomMissingError
from tests.support import models
from tests.support.checks import plain_run
from tests.support.forwards import build, fresh
from tests.support.models import Options, Rows

MANY_ENDS = list(range(20, 36))  # many EOS ids, so that texts end early

HALF = "\N{REPLACEMENT CHARACTER}"

# Options of one request. Each is also an argument of plain `generate`.
_GREEDY = {"do_sample": False}
_SAMPLE = {"do_sample": True}
_ENDING = {"eos_token_id": MANY_ENDS}
MODES: dict[str, Options] = {
    "greedy": {**_GREEDY, "max_new_tokens": 20},
    "greedy_eos": {**_GREEDY, **_ENDING, "max_new_tokens": 30},
    "max_length": {**_GREEDY, "max_length": 40},
    "penalties": {
        **dict(**_GREEDY, max_new_tokens=18, repetition_penalty=1.4, no_repeat_ngram_size=2),
        **dict(suppress_tokens=[5, 6], bad_words_ids=[[7], [9, 11]]),
        **dict(forced_eos_token_id=2, eos_token_id=2),
    },
    "min_new_tokens": {**_GREEDY, **_ENDING, "max_new_tokens": 16, "min_new_tokens": 9},
    "sample": {**_SAMPLE, "max_new_tokens": 20},
    "sample_warped": dict(**_SAMPLE, max_new_tokens=20, temperature=1.3, top_k=20, top_p=0.9),
    "samples": {**_SAMPLE, **_ENDING, "max_new_tokens": 14, "num_return_sequences": 3},
    "beams": {**_GREEDY, "max_new_tokens": 14, "num_beams": 3},
    "beams_eos": {
        **dict(**_GREEDY, max_new_tokens=20, num_beams=4, num_return_sequences=2),
        **dict(**_ENDING, length_penalty=0.7, early_stopping=True),
    },
    "beam_sample": {
        **dict(**_SAMPLE, max_new_tokens=12, num_beams=3, num_return_sequences=3, top_k=30),
    },
}


def lone_run(
    model: Any,
    prompt: list[int],
    options: Options,
    seed: int | None = None,
    **arguments: Any,
) -> Rows:
    """New tokens of plain `generate` on one prompt, each row with its trailing padding."""
    ids = torch.tensor([prompt], device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    out = plain_run(model, inputs, {**options, **arguments}, seed)
    # behind the decoder's first token
    first = 1 if model.config.is_encoder_decoder else len(prompt)
    return out[:, first:].tolist()


def assert_same_as_lone(expected: Rows, result: RequestResult, options: Options, what: str) -> None:
    """Asserts that the result has the lone run's tokens, and only padding after the end of each
    row."""
    raise_if_missing(result)
    assert result.error is None, f"{what}: {result.error!r}"
    assert len(result.sequences) == len(expected), f"{what}: {len(result.sequences)} sequences"
    ends = options.get("eos_token_id") or []
    ends = ends if isinstance(ends, list) else [ends]
    for row, sequence in zip(expected, result.sequences):
        count = len(sequence.token_ids)
        shown = f"{what}, {sequence.finish_reason}\nplain  {row}\nengine {sequence.token_ids}"
        assert sequence.token_ids == row[:count], shown
        # beam search pads with the first EOS id where padding is token 0
        assert set(row[count:]) <= {models.PAD, *ends[:1]}, shown
        assert count == len(row) or sequence.finish_reason != "length", shown
        if sequence.finish_reason == "eos":
            assert sequence.token_ids[-1] in ends, what


def engine_of(name: str = "llama", tokenizer: Any = None, **config: Any) -> PagedEngine:
    config = {"block_size": 8, **config}
    return PagedEngine(models.get(name), PagedConfig(**config), tokenizer=tokenizer)


def assert_lone(
    engine: PagedEngine,
    prompts: Iterable[list[int]],
    results: Iterable[RequestResult | None],
    options: Options = MODES["greedy"],
) -> None:
    """Asserts that each prompt's result is plain `generate`'s."""
    for prompt, result in zip(prompts, results, strict=True):
        assert result is not None
        expected = lone_run(engine.model, prompt, options)
        assert_same_as_lone(expected, result, options, f"{len(prompt)} tokens")


class Asked:
    """Requests of an engine, by name, each of which must get plain `generate`'s tokens. Those of
    `prompts` are named by their numbers, which are their seeds; `options` are those of all, or one
    after another."""

    def __init__(
        self,
        engine: PagedEngine,
        prompts: Iterable[list[int]] = (),
        options: Options | Iterable[Options] = MODES["greedy"],
        **arguments: Any,
    ) -> None:
        self.engine = engine
        self.asked: dict[str, tuple[list[int], Options, int | None]] = {}
        modes = itertools.repeat(options) if isinstance(options, dict) else options
        for number, (prompt, own) in enumerate(zip(prompts, modes)):
            self.add(str(number), prompt, own, number, **arguments)

    def add(
        self,
        name: str,
        prompt: list[int],
        options: Options = MODES["greedy"],
        seed: int | None = None,
        **arguments: Any,
    ) -> None:
        self.engine.add_request(prompt, options, request_id=name, seed=seed, **arguments)
        self.asked[name] = prompt, options, seed

    def check(
        self,
        results: dict[str, RequestResult] | None = None,
        only: Collection[str] | None = None,
        before_lone: Callable[[], object] = lambda: None,
    ) -> dict[str, RequestResult]:
        """Compares the results, those of running to the end if none are given."""
        if results is None:
            results = run_all(self.engine)
            assert_drained(self.engine)
        for name, (prompt, options, seed) in self.asked.items():
            if only is None or name in only:
                before_lone()
                expected = lone_run(self.engine.model, prompt, options, seed)
                assert_same_as_lone(expected, results[name], options, name)
        return results


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[list[Any]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


class Spelled:
    """A tokenizer whose tokens are words of their numbers, or halves of characters; `before` sees
    what is decoded, and may raise."""

    def __init__(
        self,
        halves: Container[int] = (),
        before: Callable[[list[int]], object] = lambda token_ids: None,
    ) -> None:
        self.halves, self.before = halves, before

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        self.before(token_ids)
        words = (HALF if token in self.halves else f" {token}" for token in token_ids)
        return "".join(words)


def told_by(outputs: Iterable[RequestOutput]) -> dict[str, dict[int, list[int]]]:
    """The tokens that outputs tell of each request's rows."""
    told: dict[str, dict[int, list[int]]] = {}
    for output in outputs:
        rows = told.setdefault(output.request_id, {})
        for row, token in output.new_tokens.items():
            rows.setdefault(row, []).append(token)
    return told


def results_of(outputs: Iterable[RequestOutput]) -> dict[str, RequestResult]:
    return {output.request_id: output.result for output in outputs if output.result is not None}


def steps(engine: PagedEngine) -> list[RequestOutput]:
    """The outputs of all steps until every request has ended."""
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


def tokens_of(results: Iterable[RequestResult]) -> list[Rows]:
    """New tokens of the results' sequences. Raises the first error of a request."""
    found = []
    for result in results:
        if result.error is not None:
            raise result.error
        found.append([sequence.token_ids for sequence in result.sequences])
    return found


def assert_drained(engine: PagedEngine) -> None:
    """Asserts that only cached prefix blocks are left of any request."""
    engine.check_integrity()
    stats = engine.stats()
    assert not engine.has_unfinished
    left = (stats.num_running, stats.num_waiting, stats.used_blocks, stats.shared_blocks)
    assert not any(left), stats
    assert all(state <= 0 for states in engine.block_map().values() for state in states)


def raise_if_missing(result: RequestResult) -> None:
    """Raises the error of a request that asks for a missing room: its test is then skipped."""
    if isinstance(result.error, RoomMissingError):
        raise result.error


def run_all(
    engine: PagedEngine, results: dict[str, RequestResult] | None = None
) -> dict[str, RequestResult]:
    """Steps until every request has ended; checks integrity after each step."""
    results = {} if results is None else results
    while engine.has_unfinished:
        for output in engine.step():
            if output.result is not None:
                assert output.request_id not in results, "a request ended twice"
                raise_if_missing(output.result)
                results[output.request_id] = output.result
        engine.check_integrity()
    return results


def assert_served_as_lone(
    model: Any,
    prompts: Iterable[list[int]],
    options: Options | Iterable[Options] = MODES["greedy"],
    before_lone: Callable[[], object] = lambda: None,
    **config: Any,
) -> EngineStats:
    """Asserts that an engine gives all of them the lone runs' tokens; returns its stats."""
    with PagedEngine(model, PagedConfig(block_size=models.BLOCK_SIZE, **config)) as engine:
        asked = Asked(engine, prompts, options)
        results = run_all(engine)
        assert_drained(engine)
        stats = engine.stats()
    asked.check(results, before_lone=before_lone)
    return stats


def prompts(*lengths: int, seed: int = 0) -> Rows:
    """Prompts of words, without special tokens."""
    return [
        models.token_ids(1, length, seed=seed + 31 * i)[0].tolist()
        for i, length in enumerate(lengths)
    ]


# A model whose code splits the cached values of a batch in two: no packed batch.
build_diff_llama = functools.partial(models.build, "diff_llama")
# A model whose state is not K/V; the session's shared one must not be changed.
build_mamba = functools.partial(fresh, "MambaForCausalLM")
get_mamba = functools.partial(build, "MambaForCausalLM")
