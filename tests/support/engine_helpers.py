"""Helpers of the engine's tests: plain `generate` on one prompt as the reference, and invariants at
the end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, MambaConfig, MambaForCausalLM, PreTrainedModel

from hf_paged import EngineStats, PagedConfig, PagedEngine, RequestResult
from hf_paged.rooms import RoomMissingError
from tests.support import models

MANY_ENDS = list(range(20, 36))  # many EOS ids, so that texts end early

# Options of one request. Each is also an argument of plain `generate`.
_GREEDY = {"do_sample": False}
_SAMPLE = {"do_sample": True}
_ENDING = {"eos_token_id": MANY_ENDS}
MODES: dict[str, dict[str, Any]] = {
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
    options: dict[str, Any],
    seed: int | None = None,
    **arguments: Any,
) -> list[list[int]]:
    """New tokens of plain `generate` on one prompt, each row with its trailing padding."""
    ids = torch.tensor([prompt], device=model.device)
    if seed is not None:
        torch.manual_seed(seed)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **arguments)
    # behind the decoder's first token
    first = 1 if model.config.is_encoder_decoder else len(prompt)
    return out[:, first:].tolist()


def assert_same_as_lone(
    expected: list[list[int]], result: RequestResult, options: dict[str, Any], what: str
) -> None:
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


def tokens_of(results: Iterable[RequestResult]) -> list[list[list[int]]]:
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


def add_all(
    engine: PagedEngine, texts: Iterable[Any], modes: Iterable[dict[str, Any]], **given: Any
) -> None:
    """Adds a request for each prompt, with the options in its place; its number is its seed."""
    for number, (text, options) in enumerate(zip(texts, modes)):
        engine.add_request(text, options, request_id=str(number), seed=number, **given)


def assert_all_same_as_lone(
    model: Any,
    texts: Iterable[list[int]],
    modes: Iterable[dict[str, Any]],
    results: dict[str, RequestResult],
    before_lone: Callable[[], object] = lambda: None,
) -> None:
    """Asserts that the results of requests of `add_all` have the lone runs' tokens."""
    for number, (text, options) in enumerate(zip(texts, modes)):
        before_lone()
        expected = lone_run(model, text, options, number)
        assert_same_as_lone(expected, results[str(number)], options, f"request {number}")


def assert_served_as_lone(
    model: Any,
    texts: Sequence[list[int]],
    modes: Sequence[dict[str, Any]],
    before_lone: Callable[[], object] = lambda: None,
    **config: Any,
) -> EngineStats:
    """Asserts that an engine gives all of them the lone runs' tokens; returns its stats."""
    with PagedEngine(model, PagedConfig(block_size=models.BLOCK_SIZE, **config)) as engine:
        add_all(engine, texts, modes)
        results = run_all(engine)
        assert_drained(engine)
        stats = engine.stats()
    assert_all_same_as_lone(model, texts, modes, results, before_lone)
    return stats


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Prompts of words, without special tokens."""
    return [
        models.token_ids(1, length, seed=seed + 31 * i)[0].tolist()
        for i, length in enumerate(lengths)
    ]


# A model whose code splits the cached values of a batch in two: no packed batch.
build_diff_llama = functools.partial(models.build, "diff_llama")


def build_mamba() -> PreTrainedModel:
    """A model whose state is not K/V."""
    sizes = dict(hidden_size=32, state_size=8, num_hidden_layers=2)
    model: Any = MambaForCausalLM(MambaConfig(vocab_size=models.VOCAB_SIZE, **sizes))
    with torch.no_grad():  # spread logits, so that rounding decides no choice
        weight = model.get_input_embeddings().weight
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    model.generation_config = GenerationConfig(
        pad_token_id=models.PAD, bos_token_id=models.BOS, use_cache=True
    )
    return model.float().eval()
