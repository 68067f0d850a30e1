"""Clean failures: the pool is intact, the model unchanged, the next call correct; errors name bad
input."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

import hf_paged
from hf_paged.attention import backends
from hf_paged.cache import handles
from hf_paged.cache.block_pool import BlockPool
from tests.model import test_positions as tables
from tests.support import models
from tests.support.checks import (
    assert_paged_is_plain,
    assert_pool_empty,
    assert_same_tokens,
    generate_both,
    model_state,
)
from tests.support.engine_helpers import lone_run

NEW_TOKENS = 12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
SAMPLE: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "max_new_tokens": NEW_TOKENS}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sample": SAMPLE,
    "samples": {**SAMPLE, "num_return_sequences": 3},
    "beams": {"num_beams": 3, **GREEDY},
}


class OnPurpose(Exception):
    pass


class Countdown:
    """Raises at its `count`-th call while armed, counting from 1."""

    def __init__(self, count: int, error: type[BaseException]) -> None:
        self.left, self.error, self.is_armed = count, error, True

    def __call__(self) -> None:
        self.left -= self.is_armed
        if self.is_armed and self.left == 0:
            raise self.error("on purpose")


class FailingProcessor(LogitsProcessor):
    def __init__(self, countdown: Countdown) -> None:
        self.countdown = countdown

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.countdown()
        return scores


class FailingCriteria(StoppingCriteria):
    def __init__(self, countdown: Countdown) -> None:
        self.countdown = countdown

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.countdown()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class FailingStreamer(BaseStreamer):
    def __init__(self, countdown: Countdown) -> None:
        self.countdown = countdown

    def put(self, value: torch.Tensor) -> None:
        self.countdown()

    def end(self) -> None:
        pass


@contextlib.contextmanager
def hooked(module: torch.nn.Module, countdown: Countdown) -> Iterator[None]:
    handle = module.register_forward_hook(lambda *_: countdown())
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def replaced_forward(module: torch.nn.Module, countdown: Countdown) -> Iterator[None]:
    """Fails inside the forward without a hook, since a hook could change the road of the call."""
    original = type(module).forward

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is module:
            countdown()
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(module), "forward", forward)
        yield


@contextlib.contextmanager
def failing_allocation(countdown: Countdown) -> Iterator[None]:
    """Fails where blocks are allocated, with no block taken."""
    original = BlockPool.allocate

    def allocate(self: BlockPool, *args: Any, **kwargs: Any) -> list[int]:
        countdown()
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockPool, "allocate", allocate)
        yield


def last_block(model: PreTrainedModel) -> torch.nn.Module:
    """The MLP of the last layer: when it runs, every layer has stored its K/V."""
    decoder = model.get_decoder()
    if hasattr(decoder, "h"):
        return decoder.h[-1].mlp
    if hasattr(decoder, "block"):
        return decoder.block[-1].layer[-1]
    layer = decoder.layers[-1]
    return layer.mlp if hasattr(layer, "mlp") else layer.fc2


def first_norm(model: PreTrainedModel) -> torch.nn.Module:
    """Runs after the step's blocks are planned for no layer, or for the first only."""
    decoder = model.get_decoder()
    if hasattr(decoder, "h"):
        return decoder.h[0].ln_2
    if hasattr(decoder, "block"):
        return decoder.block[0].layer[-1]
    layer = decoder.layers[0]
    return getattr(layer, "post_attention_layernorm", None) or layer.fc1


ARGUMENTS: dict[str, Callable[[Countdown], dict[str, Any]]] = {
    "processor": lambda countdown: {"logits_processor": [FailingProcessor(countdown)]},
    "criteria": lambda countdown: {"stopping_criteria": [FailingCriteria(countdown)]},
    "streamer": lambda countdown: {"streamer": FailingStreamer(countdown)},
}
CONTEXTS: dict[str, Callable[[PreTrainedModel, Countdown], Any]] = {
    "model hook": hooked,
    "layer hook": lambda model, countdown: hooked(last_block(model), countdown),
    "first layer": lambda model, countdown: replaced_forward(first_norm(model), countdown),
    "last layer": lambda model, countdown: replaced_forward(last_block(model), countdown),
}
PLACES = [*CONTEXTS, *ARGUMENTS]


def assert_next_call_is_right(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> None:
    for options in MODES.values():
        assert_paged_is_plain(model, inputs, options)


def failing_call(
    model: PreTrainedModel,
    place: str,
    step: int,
    error: type[BaseException],
    mode: str,
    backend: dict[str, Any],
) -> tuple[BaseException, torch.Tensor]:
    """The call's exception, whose traceback keeps its frames alive, and the final RNG state."""
    inputs = models.padded_prompt("llama" if not model.config.is_encoder_decoder else "t5")
    countdown = Countdown(step, error)
    arguments = ARGUMENTS[place](countdown) if place in ARGUMENTS else {}
    if backend and place.endswith("layer"):  # a replay does not run it
        backend = models.UNRECORDED
    with CONTEXTS.get(place, lambda *_: contextlib.nullcontext())(model, countdown):
        if backend and place.endswith("layer"):
            # short forwards check a changed class first: these pass
            countdown.is_armed = False
            model.generate(**inputs, max_new_tokens=1, do_sample=False, **backend)
            countdown.is_armed = True
        torch.manual_seed(5)
        with pytest.raises(error, match="on purpose") as caught:
            model.generate(**inputs, **MODES[mode], **arguments, **backend)
    return caught.value, torch.get_rng_state()


# Each place in the prompt's step, in the next and in later ones; each mode. A streamer's first call
# is the prompt; beams refuse a streamer.
FAULTS = [
    (place, step, mode, kind)
    for place in PLACES
    for step, mode, kind in (
        (1, "greedy", OnPurpose),
        (2, "samples", OnPurpose),
        (7, "sample", OnPurpose),
        (7, "beams", OnPurpose),
        (4, "greedy", KeyboardInterrupt),
    )
    if not (place == "streamer" and mode == "beams")
]


@pytest.mark.parametrize(("place", "step", "mode", "kind"), FAULTS)
def test_an_exception_leaves_the_model_and_the_pool_whole(
    place: str, step: int, mode: str, kind: type[BaseException]
) -> None:
    model = models.get("llama")
    before = model_state(model)
    _, plain_rng = failing_call(model, place, step, kind, mode, {})
    error, paged_rng = failing_call(model, place, step, kind, mode, models.PAGED)
    # a notebook keeps it, too: the blocks must be freed before
    assert error.__traceback__ is not None
    assert_pool_empty(model)
    assert model_state(model) == before
    assert torch.equal(plain_rng, paged_rng), "the failed call drew other random numbers than plain"
    assert_paged_is_plain(model, models.padded_prompt("llama"), MODES[mode])


@pytest.mark.slow_cases(
    but=["first layer-llama", "processor-gpt2", "processor-llama", "processor-phi3"]
)
@pytest.mark.parametrize("name", [name for name in models.NAMES if name != "whisper"])
@pytest.mark.parametrize("place", ["first layer", "last layer", "processor"])
def test_an_exception_in_every_model(name: str, place: str) -> None:
    model = models.get(name)
    before = model_state(model)
    for mode in ("samples", "beams"):
        error, _ = failing_call(model, place, 9, OnPurpose, mode, models.PAGED)
        assert_pool_empty(model)
        assert model_state(model) == before
        del error
    assert_next_call_is_right(model, models.padded_prompt(name))


def test_train_mode_and_grad_mode_survive() -> None:
    """A successful call, too, restores the mode of each module."""
    model = models.build("llama").train()
    model.model.layers[0].eval()
    before = model_state(model)
    model.generate(**models.prompt("llama"), **GREEDY, **models.PAGED)
    assert model_state(model) == before
    failing_call(model, "processor", 3, OnPurpose, "greedy", models.PAGED)
    assert model_state(model) == before
    with torch.set_grad_enabled(False):
        failing_call(model, "last layer", 3, OnPurpose, "greedy", models.PAGED)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert_pool_empty(model)


@pytest.mark.slow
def test_a_failure_with_an_assistant() -> None:
    model, assistant = models.get("llama"), copy.deepcopy(models.get_assistant("llama"))
    inputs = models.prompt("llama", batch_size=1)
    for failing, count in ((model, 20), (assistant, 16)):
        # after the forwards that check whether rows can be packed
        countdown = Countdown(count, OnPurpose)
        with replaced_forward(last_block(failing), countdown), pytest.raises(OnPurpose) as caught:
            model.generate(**inputs, **GREEDY, assistant_model=assistant, **models.UNRECORDED)
        assert caught.value.__traceback__ is not None
        assert_pool_empty(model)
        assert_pool_empty(assistant)
    paged = {**models.PAGED, "assistant_model": assistant}
    assert_same_tokens(*generate_both(model, inputs, GREEDY, paged), "next")


def test_a_cache_of_the_user_survives_a_failure() -> None:
    """Its blocks belong to the user: they are neither freed nor counted as the call's."""
    model, inputs = models.get("llama"), models.prompt("llama")
    cache = hf_paged.PagedCache(model.config)
    first = model.generate(**inputs, **GREEDY, past_key_values=cache)
    held = cache.get_seq_length()
    options = {**GREEDY, **ARGUMENTS["processor"](Countdown(1, OnPurpose))}
    with pytest.raises(OnPurpose):
        mask = torch.ones_like(first)
        model.generate(first, attention_mask=mask, past_key_values=cache, **options)
    assert cache.get_seq_length() >= held
    cache.reset()
    fresh = model.generate(**inputs, **GREEDY, past_key_values=cache)
    assert_same_tokens(first, fresh, "after a reset")


@pytest.mark.parametrize("door", ["keyword", "generation_config", "model"])
def test_bad_cache_config_is_refused_before_anything_happens(door: str) -> None:
    model, inputs = models.build("llama", num_hidden_layers=1), models.prompt("llama")
    forwards: list[int] = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    paged = {"cache_implementation": "paged", "cache_config": {"block_size": 7}}
    options = {**GREEDY, **(paged if door == "keyword" else {})}
    if door == "generation_config":
        options = {"generation_config": GenerationConfig(**paged, **GREEDY)}
    elif door == "model":
        model.generation_config.cache_implementation = "paged"
        model.generation_config.cache_config = paged["cache_config"]
    with pytest.raises(ValueError, match=r"`block_size` is 7: .*'auto'.*power of two"):
        model.generate(**inputs, **options)
    assert hf_paged.memory_stats(model) == hf_paged.MemoryStats() and not forwards


BUDGET_MODES = {
    "greedy": GREEDY,
    "samples": {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 30},
    "beams": {"num_beams": 6, "do_sample": False, "max_new_tokens": 30},
}


def blocks_of_8(**config: Any) -> dict[str, Any]:
    return {"cache_implementation": "paged", "cache_config": {"block_size": 8, **config}}


@pytest.mark.slow_cases("samples-gemma2", "samples-t5", "beams-t5", "beams-gemma2")
@pytest.mark.parametrize("name", ["llama", "gemma2", "t5"])
@pytest.mark.parametrize("mode", BUDGET_MODES)
def test_a_budget_of_exactly_the_peak_is_enough(name: str, mode: str) -> None:
    """Of 3 blocks it is not, which the error says; it is never raised for blocks that the call does
    not use."""
    model, inputs, options = models.build(name), models.prompt(name, 3, 21), BUDGET_MODES[mode]
    before = model_state(model)
    with pytest.raises(hf_paged.OutOfBlocksError) as caught:
        model.generate(**inputs, **options, **blocks_of_8(num_blocks=3))
    message = str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert re.search(r"\b3\b", message) and re.search("free|available", message), message
    assert "num_blocks" in message, f"the knob is missing: {message}"
    assert len(re.findall(r"\d+", message)) >= 3, f"needed, free and total: {message}"
    assert_pool_empty(model)
    assert model_state(model) == before
    expected, actual = generate_both(model, inputs, options, blocks_of_8())
    assert_same_tokens(expected, actual, "with room")
    peak = hf_paged.memory_stats(model, reset=True).peak_blocks
    for _ in range(2):
        _, actual = generate_both(model, inputs, options, blocks_of_8(num_blocks=peak))
        assert_same_tokens(expected, actual, "the same budget as the peak")
        assert hf_paged.memory_stats(model).peak_blocks <= peak
    _, actual = generate_both(model, inputs, options, blocks_of_8(num_blocks=peak - 1))
    assert actual.shape == expected.shape
    if mode != "samples":  # rows wait, so the order of draws differs
        assert_same_tokens(expected, actual, "one block less than the peak")
    assert hf_paged.memory_stats(model).peak_blocks < peak
    assert_pool_empty(model)


@pytest.mark.slow_cases(
    but=["*-auto-llama", "*-swap-mistral", "greedy-recompute-gemma2", "greedy-recompute-llama"]
)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_a_budget_for_one_row_is_enough(name: str, preemption: str, mode: str) -> None:
    """A pool with room for little more than one prompt gives the same tokens, one prompt after the
    other."""
    model, inputs = models.build(name), models.padded_prompt(name, (21, 30, 9, 25))
    longest = {key: value[1:2] for key, value in inputs.items()}
    paged = blocks_of_8(preemption=preemption, num_blocks=1)
    with pytest.raises(hf_paged.OutOfBlocksError, match=r"needs (\d+) blocks") as caught:
        model.generate(**longest, **BUDGET_MODES[mode], **paged)
    needed = re.search(r"needs (\d+) blocks", str(caught.value))
    assert needed is not None
    paged["cache_config"]["num_blocks"] = int(needed[1])
    assert_paged_is_plain(model, inputs, BUDGET_MODES[mode], paged)


def test_block_size_and_budget_may_change_between_calls() -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama", (13, 4, 30))
    for config in (
        {"block_size": 8},
        {"block_size": 32},
        {"block_size": 8, "num_blocks": 40},
        {"num_blocks": 12},
        {},
        {"block_size": 256, "memory_fraction": 0.01},
        {"block_size": 8},
    ):
        paged = {"cache_implementation": "paged", "cache_config": config}
        assert_paged_is_plain(model, inputs, GREEDY, paged)


# Plain refuses these; paged must refuse with the same type.
PLAIN_REFUSES: dict[str, dict[str, Any]] = {
    "no beams": {"num_beams": 0},
    "negative beams": {"num_beams": -2},
    "more sequences than beams": {"num_beams": 2, "num_return_sequences": 3, "do_sample": False},
    "several greedy sequences": {"num_return_sequences": 2, "do_sample": False},
    "no new tokens": {"max_new_tokens": 0},
    "negative new tokens": {"max_new_tokens": -3},
    "max_length shorter than the prompt": {"max_length": 5, "max_new_tokens": None},
    "temperature of zero": {"do_sample": True, "temperature": 0.0},
    "negative temperature": {"do_sample": True, "temperature": -1.0},
    "negative top_p": {"do_sample": True, "top_p": -0.5},
    "min_p above one": {"do_sample": True, "min_p": 1.5},
    "negative top_k": {"do_sample": True, "top_k": -1},
    "no repetition penalty": {"repetition_penalty": 0.0},
    "unknown argument": {"not_an_argument": 1},
    "streamer with beams": {"num_beams": 2, **ARGUMENTS["streamer"](Countdown(10**6, OnPurpose))},
    "stop strings without a tokenizer": {"stop_strings": ["a"]},
    "mask of three dimensions": {"attention_mask": torch.ones(3, 1, 13, 13)},
    "tuple for a cache": {"past_key_values": ((torch.zeros(1), torch.zeros(1)),)},
    "assistant whose scores of a batch are kept": {
        "prompt_lookup_num_tokens": 2,
        "return_dict_in_generate": True,
        "output_scores": True,
    },
    "assistant without tokens": {"prompt_lookup_num_tokens": -1, "do_sample": False},
    "assistant with several sequences": {
        "prompt_lookup_num_tokens": 2,
        "num_return_sequences": 2,
        "do_sample": True,
    },
    "bad words that are no list": {"bad_words_ids": 5},
    "empty forced words": {"bad_words_ids": []},
    "early stopping of another kind": {"num_beams": 2, "early_stopping": "sometimes"},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "watermark of another type": {"watermarking_config": 7},
    "chunks without a cache": {"prefill_chunk_size": 4, "use_cache": False},
    "assistant without a cache": {"prompt_lookup_num_tokens": 2, "use_cache": False},
}


@pytest.mark.parametrize("case", PLAIN_REFUSES)
def test_what_plain_refuses_is_refused_with_the_same_type(case: str) -> None:
    model = models.get("llama")
    arguments = {**models.prompt("llama"), **GREEDY, **PLAIN_REFUSES[case]}
    errors = []
    for backend in ({}, models.PAGED):
        with pytest.raises(Exception) as caught:
            model.generate(**copy.deepcopy(arguments), **backend)
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1]), f"plain {errors[0]!r}, paged {errors[1]!r}"
    assert_pool_empty(model)


def test_a_cache_that_the_user_passes_beside_the_keyword_is_used() -> None:
    model, inputs = models.get("llama"), models.prompt("llama")
    expected = model.generate(**inputs, **GREEDY)
    for cache in (DynamicCache(config=model.config), hf_paged.PagedCache(model.config)):
        options = {**GREEDY, **models.PAGED, "return_dict_in_generate": True}
        actual = model.generate(**inputs, **options, past_key_values=cache)
        assert_same_tokens(expected, actual.sequences)
        assert actual.past_key_values is cache
        assert cache.get_seq_length() == expected.shape[1] - 1


def test_other_cache_implementations_are_left_alone() -> None:
    model, inputs = models.get("llama"), models.prompt("llama")
    hf_paged.memory_stats(model, reset=True)
    for options in (
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "static", "disable_compile": True},
    ):
        assert_same_tokens(*generate_both(model, inputs, GREEDY, options))
    assert hf_paged.memory_stats(model).peak_blocks == 0
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(**inputs, **GREEDY, cache_implementation="pagedd")


def test_the_first_error_is_the_one_seen_and_nothing_is_gathered_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, attend, numbers = models.build("llama"), backends.attend, itertools.count(1)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) > 3:
            raise RuntimeError("attention ran out of memory")
        return attend(*args, **kwargs)

    def gather(*args: Any) -> Any:
        raise MemoryError("gather")

    monkeypatch.setattr(backends, "attend", fail)
    monkeypatch.setattr(handles, "gather", gather)
    with pytest.raises(RuntimeError, match="attention ran out of memory"):
        model.generate(**models.prompt("llama"), **models.PAGED, max_new_tokens=9)
    assert_pool_empty(model)


# tests/batching/test_engine_faults.py has an engine meet the table of each
@pytest.mark.slow_cases(
    *("gptj_whole_heads-greedy", "codegen-greedy", "big_code-greedy", "biogpt-greedy"),
    *("openai-greedy", "bert-greedy"),
)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "greedy") for name in tables.LEARNED),
        *itertools.product(("gpt2", "bart_decoder"), ("samples", "beams")),
    ],
)
def test_a_row_past_the_table_of_positions_ends_the_call_as_plain_does(
    name: str, mode: str
) -> None:
    model, ids, count = tables.get(name), models.token_ids(1, 20, seed=2), tables.NUM + 1 - 20
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {**MODES[mode], "pad_token_id": models.PAD, "max_new_tokens": count}
    before = model_state(model)
    assert_paged_is_plain(model, inputs, options)
    options["max_new_tokens"] += 1
    with pytest.raises((IndexError, RuntimeError)):
        model.generate(**inputs, **options)
    message = f"table of positions ends after {tables.NUM} .* to {count}, or"
    if name == "openai":  # takes no cache, so that transformers' own loop serves it
        message = "index out of range"
    with pytest.raises(IndexError, match=message):
        model.generate(**inputs, **options, **models.PAGED)
    assert_pool_empty(model)
    assert model_state(model) == before


def test_a_prompt_past_the_table_of_positions_is_refused_before_a_forward() -> None:
    """Its padding takes no positions."""
    model, options = tables.get("gpt2"), {**GREEDY, "max_new_tokens": tables.NUM + 1 - 20}
    ids = models.token_ids(2, tables.NUM + 1, seed=2)
    message = f"takes {tables.NUM + 1} positions.* holds {tables.NUM}: shorten the prompt"
    with pytest.raises(IndexError, match=message):
        model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, **models.PAGED)
    assert_pool_empty(model)
    assert_paged_is_plain(model, models.padded_prompt("gpt2", (20, 4)), options)
    long = models.padded_prompt("gpt2", (4, tables.NUM))
    # more columns than positions
    long = {name: torch.nn.functional.pad(x, (5, 0)) for name, x in long.items()}
    assert_paged_is_plain(model, long, {**GREEDY, "max_new_tokens": 1})


@pytest.mark.slow
def test_whisper_past_its_table_of_positions() -> None:
    """Whisper's own `generate` refuses such lengths: its mixin's is called."""
    model, last = tables.get("whisper"), {"max_new_tokens": tables.NUM}
    given = dict(input_features=torch.randn(1, 8, 32), do_sample=False, eos_token_id=None)
    generate = functools.partial(GenerationMixin.generate, model, **given)
    assert_same_tokens(generate(**last), generate(**last, **models.PAGED))
    with pytest.raises(IndexError, match=f"table of positions ends after {tables.NUM}"):
        generate(max_new_tokens=tables.NUM + 1, **models.PAGED)
    assert_pool_empty(model)


@pytest.mark.slow
def test_a_table_of_positions_that_plain_forwards_make_longer() -> None:
    model, ids = tables.build("xglm"), models.token_ids(1, 20, seed=2)
    text = ids[0].tolist()
    with hf_paged.PagedEngine(tables.build("xglm")) as engine:
        engine.add_request(text[:9], {**GREEDY, "max_new_tokens": 12}, request_id="before")
        engine.step()
        for prompt, count in ((text + text, 40), (text, 20), (text, 70)):
            options = {**GREEDY, "max_new_tokens": count}
            (result,) = engine.generate([prompt], options)
            assert [result.token_ids] == lone_run(tables.build("xglm"), prompt, options)
            assert engine.route is not None and engine.route.road == "engine"
        before = next(output.result for output in engine.step() if output.result is not None)
        options = {**GREEDY, "max_new_tokens": 12}
        assert [before.token_ids] == lone_run(tables.build("xglm"), text[:9], options)
    for count in (tables.NUM + 1 - 20, 40):
        options = {**GREEDY, "max_new_tokens": count, "attention_mask": torch.ones_like(ids)}
        found = model.generate(ids, **options, **models.PAGED)
        assert_same_tokens(tables.build("xglm").generate(ids, **options), found, str(count))
        assert_pool_empty(model)
