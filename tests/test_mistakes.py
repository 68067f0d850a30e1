"""Mistakes of new users: each error says what was asked, what there is and what to change, before
blocks are taken."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig, TextIteratorStreamer, TextStreamer, pipeline

import hf_paged
from hf_paged import (
    OutOfBlocksError,
    PagedCache,
    PagedConfig,
    PagedEngine,
    PrefixTiers,
    VirtualStorage,
)
from tests.support import models
from tests.support.engine_helpers import assert_drained

OPTIONS = {"max_new_tokens": 3, "do_sample": False}
IDS = torch.tensor([[5, 6, 7]])
PAGED = {"cache_implementation": "paged"}
STREAMER = TextStreamer(models.tokenizer())
FOLDER = str(Path(__file__).parent)


@functools.cache
def model() -> Any:
    return models.build("llama")


@functools.cache
def engine() -> PagedEngine:
    """Without a tokenizer."""
    return PagedEngine(model())


def made(*arguments: Any, **options: Any) -> PagedEngine:
    return PagedEngine(model(), *arguments, **options)


def meta() -> Any:
    shared = model()  # made outside of the context, and kept
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(shared.config)


def generate(ids: Any = IDS, **options: Any) -> Any:
    return model().generate(ids, **{**OPTIONS, **PAGED, **options})


def add(prompt: Any = (5, 6, 7), config: Any = OPTIONS, **options: Any) -> Any:
    return engine().add_request(prompt, config, **options)


SEEDS = "it must be None or a whole number from -9223372036854775808 to 18446744073709551615"
PRIORITIES = "it must be a whole number from -2147483647 to 2147483647 (lower runs earlier)"
TOKEN_IDS = "pass token ids, one list of whole numbers for each request"
ONE_EACH = "pass whole numbers of shape (length,) or (1, length), one request for each prompt"
DTYPES = "token ids must be torch.int64 or torch.int32"
TOKENS = "it must be a whole number (tokens)"
COUNT = "it must be a whole number of at least 1"
METHODS = "it must have the methods `put` and `end`"
CALLABLE = "holds 5 at index 0: it must be callable"

# What an error says, whole or in parts between "…", and what is passed.
PROMPTS: dict[str, Any] = {
    "['a', 'b']…2 prompts…`engine.generate(prompts)`": ["a", "b"],
    "2 prompts…`engine.generate(prompts)`": [[5, 6], [7]],
    "the prompt is text…`tokenizer=`…token ids": "hello",
    "the prompt is empty…at least one token id": [],
    "token id 1000000 is outside the vocabulary…from 0 to 127": [5, 10**6],
    "the prompt is b'hello'…decode it": b"hello",
    f"the prompt is a torch.float32 tensor of shape (2,): {ONE_EACH}": torch.tensor([5.0, 6.0]),
    f"the prompt is [5.0, 6.0]: {TOKEN_IDS}": [5.0, 6.0],
    f"the prompt is [True, True]: {TOKEN_IDS}": torch.tensor([True, True]),
    f"the prompt is a torch.int64 tensor of shape (0, 20): {ONE_EACH}": torch.zeros(0, 20).long(),
}
REQUESTS: dict[str, dict[str, Any]] = {
    "is 'greedy'…`GenerationConfig` or a dict": {"config": "greedy"},
    "adapter 'french' does not exist…the model has none…no such folder": {"adapter": "french"},
    "tests' has no adapter_config.json…pass the folder that contains it": {"adapter": FOLDER},
    "`adapter` is ['a']: it must be None or an adapter's name or folder": {"adapter": ["a"]},
    "`schema` constrains text…`tokenizer=`": {"schema": {"type": "object"}},
    f"`num_beams` is 2.0: {COUNT}": {"config": GenerationConfig(num_beams=2.0)},
    "`assistant_model` is 'gpt2'…a model": {"assistant_model": "gpt2"},
    "`assistant_tokenizer` goes with an `assistant_model`…leave out the tokenizer": {
        "assistant_tokenizer": models.tokenizer()
    },
    f"`seed` is 1180591620717411303424: {SEEDS}": {"seed": 2**70},
    f"`seed` is -9223372036854775809: {SEEDS}": {"seed": -(2**63) - 1},
    f"`seed` is 1.5: {SEEDS}": {"seed": 1.5},
    f"`seed` is True: {SEEDS}": {"seed": True},
    "`request_id` is ['a']: it must be hashable, a string for instance": {"request_id": ["a"]},
    f"`priority` is 100000000000000000...0000000000000000000: {PRIORITIES}": {"priority": 10**400},
    f"`priority` is …: {PRIORITIES}": {"priority": 10**5000},  # without digits
    f"`streamer` is 5: {METHODS}": {"streamer": 5},
    "`streamer` is of type TextStreamer, which takes one row, and there are 3: ask for one sequence"
    " per request": {
        "config": {"do_sample": True, "num_return_sequences": 3},
        "streamer": STREAMER,
    },
    f"`logits_processor` {CALLABLE}": {"logits_processor": [5]},
    f"`stopping_criteria` {CALLABLE}": {"stopping_criteria": [5]},
}
GENERATION: dict[str, dict[str, Any]] = {
    "no option `max_new_token`…did you mean `max_new_tokens`?": {"max_new_token": 3},
    "no option `num_blocks`…the engine's config…PagedConfig(num_blocks=...)": {"num_blocks": 3},
    "no option `seed`…the argument `seed=`": {"seed": 3},
    "`GenerationConfig` has no option `max_tokens`: did you mean `max_new_tokens`?": {
        "max_tokens": 3
    },
    "`stop_strings` is ['a']…`tokenizer=`": {"stop_strings": ["a"]},
    "`num_return_sequences` (3)…`num_beams` (2)": {"num_beams": 2, "num_return_sequences": 3},
    "`num_beams` is 0…at least 1": {"num_beams": 0},
    f"`num_beams` is True: {COUNT}": {"num_beams": True},
    f"`num_beams` is 2.0: {COUNT}": {"num_beams": 2.0},
    f"`max_new_tokens` is '3': {TOKENS}": {"max_new_tokens": "3"},
}
TWO_ROWS = IDS.repeat(2, 1)
CALLS: dict[str, dict[str, Any]] = {
    "is 'Paged'…did you mean 'paged'?": {"cache_implementation": "Paged"},
    "is 'hf-paged'…did you mean 'hf_paged'?": {"cache_implementation": "hf-paged"},
    "`cache_config` has no option `num_block`…did you mean `num_blocks`?": {
        "cache_config": {"num_block": 3}
    },
    '`cache_config` is 4096…{"num_blocks": 4096}': {"cache_config": 4096},
    "`input_ids` are 'hello'…**tokenizer(texts": {"ids": "hello"},
    "`input_ids` are [[5, 6]]…pass a tensor": {"ids": [[5, 6]]},
    "`inputs` is a mapping…`model.generate(**inputs, ...)`": {
        "ids": models.tokenizer()(["hello"], return_tensors="pt")
    },
    "the shape (3,)…(rows, length)": {"ids": IDS[0]},
    "the shape (1, 0)…at least one token": {"ids": IDS[:, :0]},
    "`input_ids` have the shape (0, 20): it must be (rows, length), with at least one row": {
        "ids": torch.zeros(0, 20, dtype=torch.long)
    },
    f"`input_ids` are torch.float32: {DTYPES}": {"ids": IDS.float()},
    f"`input_ids` are torch.bool: {DTYPES}": {"ids": IDS.bool()},
    "(1, 5)…(1, 3)…as the tokenizer returned them": {"attention_mask": torch.ones(1, 5).long()},
    "`generation_config` is {…`GenerationConfig`, or the options as keyword arguments": {
        "generation_config": OPTIONS
    },
    "takes one row…there are 2…pass a list of streamers": {"ids": TWO_ROWS, "streamer": STREAMER},
    "`streamer` is of type TextIteratorStreamer, which takes one row, and there are 3: pass a list"
    " of streamers, one per row": {
        **{"do_sample": True, "num_return_sequences": 3},
        "streamer": TextIteratorStreamer(models.tokenizer()),
    },
    f"`streamer` is 5: {METHODS}": {"ids": TWO_ROWS, "streamer": [STREAMER, 5]},
    f"`num_beams` is 2.0: {COUNT}": {"generation_config": GenerationConfig(num_beams=2.0)},
    f"`max_new_tokens` is '3': {TOKENS}": {"max_new_tokens": "3"},
    f"`logits_processor` {CALLABLE}": {"logits_processor": [5]},
    f"`stopping_criteria` {CALLABLE}": {"stopping_criteria": [5]},
    "The following `model_kwargs` are not used by the model: ['max_tokens'] (note: typos in the"
    " generate arguments will also show up in this list)": {"max_tokens": 3},
    "`assistant_model` is 'gpt2'…must be None or a model": {"assistant_model": "gpt2"},
    "`past_key_values` is 'paged'…`PagedCache(model.config)`…`cache_config`": {
        "past_key_values": "paged"
    },
    "`past_key_values` is PagedConfig…options go into `cache_config`": {
        "past_key_values": PagedConfig()
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "`storage` has no option `page_byte`…`page_bytes`": {"storage": {"page_byte": 4096}},
    "`storage` has no option `background` any more…remove it": {
        "storage": {"blocks_ahead": 1, "background": True}
    },
    "`block_size` is 'big'…'auto'": {"block_size": "big"},
    "`kv_dtype` is torch.int8…'int8', 'fp8_e4m3', 'fp8_e5m2'": {"kv_dtype": torch.int8},
    "`storage` is 'virtal'…'blocks', 'virtual' or a `VirtualStorage`": {"storage": "virtal"},
    "`num_blocks` is 9…`block_size` 'auto'…`memory_fraction` or `hf_paged.budget`": {
        "block_size": "auto",
        "num_blocks": 9,
    },
}
OTHER_VALUES: dict[str, Callable[[], Any]] = {
    "`config` is of type …`PagedEngine(model, tokenizer=tokenizer)`": lambda: made(
        models.tokenizer()
    ),
    "`model` is 'some/model'…`PagedEngine.from_pretrained('some/model')`": lambda: PagedEngine(
        "some/model"
    ),
    "`model` is …pass its `.model`": lambda: PagedEngine(
        pipeline("text-generation", model=model(), tokenizer=models.tokenizer())
    ),
    "LlamaModel…pass the model with its head": lambda: PagedEngine(model().model),
    "`model` is <class…it must be a model…from_pretrained": lambda: PagedEngine(type(model())),
    "`tokenizer` is 'some/model'…`AutoTokenizer.from_pretrained`": lambda: made(
        tokenizer="some/model"
    ),
    "`tokenizer` is Llama…pass a": lambda: made(tokenizer=model()),
    "`config` is 'paged'…`PagedConfig` or a dict…{\"num_blocks\": 4096}": lambda: made("paged"),
    "`config` is GenerationConfig…`PagedConfig`": lambda: made(GenerationConfig()),
    "`config` has no option `num_block`…did you mean `num_blocks`?": lambda: made({"num_block": 3}),
    "on the meta device…`from_pretrained`": lambda: PagedEngine(meta()),
    "on the meta device…`from_pretrained`…": lambda: meta().generate(IDS, **PAGED),
    "`name_or_path` is Llama…`PagedEngine(model)`": lambda: PagedEngine.from_pretrained(model()),
    "the budget is '8GB'…8 << 30": lambda: hf_paged.budget("8GB"),
    "the budget is 0…bytes, at least 1": lambda: hf_paged.budget(0),
    "the id 'lost'…unfinished ids: none": lambda: engine().cancel("lost"),
    "[5, 6, 7] is one prompt…a list": lambda: engine().generate([5, 6, 7], OPTIONS),
    "`prompts` is None…pass a list": lambda: engine().generate(None),
    "3 generation configs…2 prompts…pass one": lambda: engine().generate([[5], [6]], [OPTIONS] * 3),
    "`model` is 'gpt2'…pass a model": lambda: hf_paged.memory_stats("gpt2"),
    f"`streamer` is 5: {METHODS}": lambda: generate(streamer=5),
    f"`num_beams` is 2.0: {COUNT}": lambda: generate(num_beams=2.0),
    "`config` is Llama…`PagedCache(model.config)`": lambda: PagedCache(model()),
    "`continuous_batching` has no option `num_block`…`num_blocks`": lambda: hf_paged.install(
        {"num_block": 3}
    ),
}

TYPES: dict[str, Callable[[], Any]] = {
    "no argument `num_blocks`…PagedEngine(model, PagedConfig(num_blocks=100))": lambda: made(
        num_blocks=100
    ),
    "no argument `num_block`…did you mean `num_blocks`?…go into the config": lambda: made(
        num_block=100
    ),
    'no argument `max_new_tokens`…engine.generate(prompts, {"max_new_tokens": 64})': lambda: made(
        max_new_tokens=64
    ),
    "no argument `num_blocks`…PagedConfig(num_blocks=10)": lambda: PagedEngine.from_pretrained(
        "some/model", num_blocks=10
    ),
    "`PagedConfig` has no option `num_block`…did you mean `num_blocks`?…prefix_caching": (
        lambda: PagedConfig(num_block=3)
    ),
    "`VirtualStorage` has no option `block_ahead`…did you mean `blocks_ahead`?": (
        lambda: VirtualStorage(block_ahead=1)
    ),
    "`VirtualStorage` has no option `background` any more…remove it…`blocks_ahead`": (
        lambda: VirtualStorage(blocks_ahead=1, background=True)
    ),
    "`PrefixTiers` has no option `path`…disk_path": lambda: PrefixTiers(path="folder"),
    'no argument `max_new_tokens`…`generation_config`, such as {"max_new_tokens": 64}': (
        lambda: add(max_new_tokens=3)
    ),
    "there is no argument `max_tokens`: did you mean `max_new_tokens`? Generation options go into"
    ' `generation_config`, such as {"max_new_tokens": 64}': lambda: engine().generate(
        [[5, 6]], max_tokens=3
    ),
    "no argument `adaptor`…did you mean `adapter`?": lambda: engine().generate(
        [[5]], OPTIONS, adaptor="x"
    ),
    "`PagedEngine` cannot be pickled…make an engine in each process": lambda: pickle.dumps(
        engine()
    ),
    "pickled or copied…make an engine in each process": lambda: copy.deepcopy(engine()),
    'in its config…cache_config={"num_blocks": 3}': lambda: generate(num_blocks=3),
    'no argument `num_blocks`…PagedCache(model.config, {"num_blocks": 3})': lambda: PagedCache(
        model().config, num_blocks=3
    ),
}

VALUES: list[tuple[str, Callable[[], Any]]] = [
    *OTHER_VALUES.items(),
    *((said, functools.partial(PagedConfig, **options)) for said, options in CONFIGS.items()),
    *((said, functools.partial(add, prompt)) for said, prompt in PROMPTS.items()),
    *((said, functools.partial(add, **given)) for said, given in REQUESTS.items()),
    *((said, functools.partial(add, config=config)) for said, config in GENERATION.items()),
    *((said, functools.partial(generate, **given)) for said, given in CALLS.items()),
]
MISTAKES = [
    *((ValueError, *row) for row in VALUES),
    *((TypeError, *row) for row in TYPES.items()),
    (
        FileNotFoundError,
        "no folder './no/folder'…pass the folder of a saved model",
        lambda: PagedEngine.from_pretrained("./no/folder"),
    ),
    (
        OutOfBlocksError,
        "needs 32 blocks of 16 tokens…at most 3…raise `num_blocks`…lower `max_new_tokens`",
        lambda: made({"num_blocks": 3}).add_request([5], {"max_new_tokens": 500}),
    ),
]


@pytest.mark.parametrize(("error", "said", "call"), MISTAKES)
def test_an_error_says_what_was_asked_what_there_is_and_what_to_change(
    error: type[Exception], said: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(error) as caught:
        call()
    message, parts = str(caught.value), said.split("…")
    assert all(part in message for part in parts) if parts[1:] else message == said, message
    assert len(message) < 500 and "\n" not in message
    assert not engine().has_unfinished and engine().memory.stats().held_bytes == 0
    assert hf_paged.memory_stats(model()).held_bytes == 0


def test_an_engine_and_a_model_serve_after_all_mistakes() -> None:
    for error, _, call in MISTAKES:
        with contextlib.suppress(error):
            call()
    expected = model().generate(IDS, **OPTIONS)
    assert torch.equal(generate(attention_mask=torch.ones_like(IDS)), expected)
    (result,) = engine().generate(IDS.tolist(), OPTIONS)
    assert result.prompt_ids + result.token_ids == expected[0].tolist()
    assert_drained(engine())
    engine().free()
    hf_paged.free(model())


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_new_tokens_of_a_cache_may_have_a_mask_for_all_tokens() -> None:
    mask = torch.ones(1, 5, dtype=torch.int64)
    tokens = []
    for options in ({}, PAGED):
        cache = PagedCache(model().config)
        model().generate(IDS, max_new_tokens=1, do_sample=False, past_key_values=cache)
        ids = torch.tensor([[11, 12]])
        given = dict(attention_mask=mask, past_key_values=cache, **OPTIONS, **options)
        tokens.append(model().generate(ids, **given))
    hf_paged.free(model())
    assert torch.equal(*tokens)


def test_an_engine_or_a_pipeline_stands_for_its_model() -> None:
    own = models.build("llama")
    pipe = SimpleNamespace(model=own)  # as transformers' pipelines and trainers
    own.generate(IDS, **OPTIONS, **PAGED)
    assert hf_paged.memory_stats(pipe) == hf_paged.memory_stats(own)
    assert hf_paged.memory_stats(pipe).held_bytes
    assert hf_paged.last_route(pipe) == hf_paged.last_route(own) is not None
    hf_paged.check_integrity(pipe)
    hf_paged.free(pipe)
    assert not hf_paged.memory_stats(own).held_bytes
    with PagedEngine(own) as serving:
        serving.generate([[5, 6, 7]], OPTIONS)
        assert hf_paged.memory_stats(serving) == serving.memory.stats()
        assert serving.memory.stats().held_bytes
        assert hf_paged.last_route(serving) == serving.route
        hf_paged.check_integrity(serving)
        hf_paged.free(serving)
        assert not serving.memory.stats().held_bytes


def test_requests_that_fail_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    results = engine().generate([[5, 10**6], [], [7, -3]], OPTIONS, progress=True)
    assert all(result.error is not None for result in results)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    message = record.getMessage()
    assert "3 of 3 requests failed" in message
    assert "ValueError: token id 1000000 is outside" in message
    assert message.endswith("[troubleshooting.md#failed-requests]")


def test_right_padding_is_told_with_its_remedy(caplog: pytest.LogCaptureFixture) -> None:
    own, ids = models.build("llama"), IDS.repeat(2, 1)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    ours = own.generate(ids, attention_mask=mask, **OPTIONS, **PAGED)
    assert torch.equal(ours, own.generate(ids, attention_mask=mask, **OPTIONS))
    told = [message for message in caplog.messages if "right-padded" in message]
    assert (
        "the batch is right-padded: set `tokenizer.padding_side = 'left'`"
        " [troubleshooting.md#right-padding]" in told[0]
    )
