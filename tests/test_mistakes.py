"""Mistakes of new users: each error says what was asked, what there is and what to change, before
blocks are taken."""

from __future__ import annotations

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
from transformers import GenerationConfig, TextStreamer, pipeline

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

OPTIONS = {"max_new_tokens": 3, "do_sample": False}
IDS = torch.tensor([[5, 6, 7]])
PAGED = {"cache_implementation": "paged"}


@functools.cache
def model() -> Any:
    return models.build("llama")


@functools.cache
def engine() -> PagedEngine:
    return PagedEngine(model(), tokenizer=models.tokenizer())


@functools.cache
def textless() -> PagedEngine:
    return PagedEngine(model())


def meta() -> Any:
    shared = model()  # made outside of the context, and kept
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(shared.config)


def generate(ids: Any = IDS, **options: Any) -> Any:
    return model().generate(ids, **{**OPTIONS, **PAGED, **options})


def add(prompt: Any = (5, 6, 7), config: Any = OPTIONS, **options: Any) -> Any:
    return textless().add_request(prompt, config, **options)


def one_failed(prompts: Any, config: Any = OPTIONS) -> Any:
    (result,) = textless().generate(prompts, config)
    raise result.error  # type: ignore[misc]


# call; error; what was asked, what there is, what to change
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    # -- making an engine
    "tokenizer as config": (
        lambda: PagedEngine(model(), models.tokenizer()),
        ValueError,
        ("`config` is of type ", "`PagedEngine(model, tokenizer=tokenizer)`"),
    ),
    "option beside the config": (
        lambda: PagedEngine(model(), num_blocks=100),
        TypeError,
        ("no argument `num_blocks`", "PagedEngine(model, PagedConfig(num_blocks=100))"),
    ),
    "typo beside the config": (
        lambda: PagedEngine(model(), num_block=100),
        TypeError,
        ("no argument `num_block`", "did you mean `num_blocks`?", "go into the config"),
    ),
    "generation option of an engine": (
        lambda: PagedEngine(model(), max_new_tokens=64),
        TypeError,
        ("no argument `max_new_tokens`", 'engine.generate(prompts, {"max_new_tokens": 64})'),
    ),
    "name of a model": (
        lambda: PagedEngine("some/model"),
        ValueError,
        ("`model` is 'some/model'", "`PagedEngine.from_pretrained('some/model')`"),
    ),
    "pipeline as model": (
        lambda: PagedEngine(
            pipeline("text-generation", model=model(), tokenizer=models.tokenizer())
        ),
        ValueError,
        ("`model` is ", "pass its `.model`"),
    ),
    "model without head": (
        lambda: PagedEngine(model().model),
        ValueError,
        ("LlamaModel", "pass the model with its head"),
    ),
    "class of a model": (
        lambda: PagedEngine(transformers.LlamaForCausalLM),
        ValueError,
        ("`model` is <class", "it must be a model", "from_pretrained"),
    ),
    "name of a tokenizer": (
        lambda: PagedEngine(model(), tokenizer="some/model"),
        ValueError,
        ("`tokenizer` is 'some/model'", "`AutoTokenizer.from_pretrained`"),
    ),
    "model as tokenizer": (
        lambda: PagedEngine(model(), tokenizer=model()),
        ValueError,
        ("`tokenizer` is Llama", "pass a"),
    ),
    "config as text": (
        lambda: PagedEngine(model(), "paged"),  # type: ignore[arg-type]
        ValueError,
        ("`config` is 'paged'", "`PagedConfig` or a dict", '{"num_blocks": 4096}'),
    ),
    "config of generation": (
        lambda: PagedEngine(model(), GenerationConfig()),  # type: ignore[arg-type]
        ValueError,
        ("`config` is GenerationConfig", "`PagedConfig`"),
    ),
    "engine on meta": (
        lambda: PagedEngine(meta()),
        ValueError,
        ("on the meta device", "`from_pretrained`"),
    ),
    "pretrained with an option": (
        lambda: PagedEngine.from_pretrained("some/model", num_blocks=10),
        TypeError,
        ("no argument `num_blocks`", "PagedConfig(num_blocks=10)"),
    ),
    "pretrained from no folder": (
        lambda: PagedEngine.from_pretrained("./no/folder"),
        FileNotFoundError,
        ("no folder './no/folder'", "pass the folder of a saved model"),
    ),
    "pretrained from a model": (
        lambda: PagedEngine.from_pretrained(model()),
        ValueError,
        ("`name_or_path` is Llama", "`PagedEngine(model)`"),
    ),
    # -- configs
    "typo in the config": (
        lambda: PagedConfig(num_block=3),  # type: ignore[call-arg]
        TypeError,
        ("`PagedConfig` has no option `num_block`", "did you mean `num_blocks`?", "prefix_caching"),
    ),
    "typo in a dict": (
        lambda: PagedEngine(model(), {"num_block": 3}),
        ValueError,
        ("`config` has no option `num_block`", "did you mean `num_blocks`?"),
    ),
    "typo in nested options": (
        lambda: PagedConfig(storage={"page_byte": 4096}),  # type: ignore[arg-type]
        ValueError,
        ("`storage` has no option `page_byte`", "`page_bytes`"),
    ),
    "typo in storage": (
        lambda: VirtualStorage(block_ahead=1),  # type: ignore[call-arg]
        TypeError,
        ("`VirtualStorage` has no option `block_ahead`", "did you mean `blocks_ahead`?"),
    ),
    "an option that was removed": (
        lambda: VirtualStorage(blocks_ahead=1, background=True),  # type: ignore[call-arg]
        TypeError,
        ("`VirtualStorage` has no option `background` any more", "remove it", "`blocks_ahead`"),
    ),
    "an option that was removed, in a dict": (
        lambda: PagedConfig(storage={"blocks_ahead": 1, "background": True}),
        ValueError,
        ("`storage` has no option `background` any more", "remove it"),
    ),
    "typo in tiers": (
        lambda: PrefixTiers(path="folder"),  # type: ignore[call-arg]
        TypeError,
        ("`PrefixTiers` has no option `path`", "disk_path"),
    ),
    "block size as text": (
        lambda: PagedConfig(block_size="big"),
        ValueError,
        ("`block_size` is 'big'", "'auto'"),
    ),
    "dtype of torch": (
        lambda: PagedConfig(kv_dtype=torch.int8),  # type: ignore[arg-type]
        ValueError,
        ("`kv_dtype` is torch.int8", "'int8', 'fp8_e4m3', 'fp8_e5m2'"),
    ),
    "typo in a value": (
        lambda: PagedConfig(storage="virtal"),
        ValueError,
        ("`storage` is 'virtal'", "'blocks', 'virtual' or a `VirtualStorage`"),
    ),
    "auto with a number of blocks": (
        lambda: PagedConfig(block_size="auto", num_blocks=9),
        ValueError,
        ("`num_blocks` is 9", "`block_size` 'auto'", "`memory_fraction` or `hf_paged.budget`"),
    ),
    "budget as text": (
        lambda: hf_paged.budget("8GB"),  # type: ignore[arg-type]
        ValueError,
        ("the budget is '8GB'", "8 << 30"),
    ),
    "budget 0": (lambda: hf_paged.budget(0), ValueError, ("the budget is 0", "bytes, at least 1")),
    # -- requests
    "several texts": (
        lambda: add(["a", "b"]),
        ValueError,
        ("['a', 'b']", "2 prompts", "`engine.generate(prompts)`"),
    ),
    "several rows": (
        lambda: add([[5, 6], [7]]),
        ValueError,
        ("2 prompts", "`engine.generate(prompts)`"),
    ),
    "text without tokenizer": (
        lambda: add("hello"),
        ValueError,
        ("the prompt is text", "`tokenizer=`", "token ids"),
    ),
    "empty prompt": (lambda: add([]), ValueError, ("the prompt is empty", "at least one token id")),
    "id beyond the vocabulary": (
        lambda: add([5, 10**6]),
        ValueError,
        ("token id 1000000 is outside the vocabulary", "from 0 to 127"),
    ),
    "generation option of a request": (
        lambda: add(max_new_tokens=3),
        TypeError,
        ("no argument `max_new_tokens`", '`generation_config`, such as {"max_new_tokens": 64}'),
    ),
    "typo in generation options": (
        lambda: add(config={"max_new_token": 3}),
        ValueError,
        ("no option `max_new_token`", "did you mean `max_new_tokens`?"),
    ),
    "option of the memory in a request": (
        lambda: add(config={**OPTIONS, "num_blocks": 3}),
        ValueError,
        ("no option `num_blocks`", "the engine's config", "PagedConfig(num_blocks=...)"),
    ),
    "argument in generation options": (
        lambda: add(config={**OPTIONS, "seed": 3}),
        ValueError,
        ("no option `seed`", "the argument `seed=`"),
    ),
    "bytes": (lambda: add(b"hello"), ValueError, ("the prompt is b'hello'", "decode it")),
    "generation options as text": (
        lambda: add(config="greedy"),
        ValueError,
        ("is 'greedy'", "`GenerationConfig` or a dict"),
    ),
    "no such adapter": (
        lambda: add(adapter="french"),
        ValueError,
        ("adapter 'french' does not exist", "the model has none", "no such folder"),
    ),
    "folder without an adapter": (
        lambda: add(adapter=str(Path(__file__).parent)),
        ValueError,
        ("tests' has no adapter_config.json", "pass the folder that contains it"),
    ),
    "stop strings without tokenizer": (
        lambda: add(config={**OPTIONS, "stop_strings": ["a"]}),
        ValueError,
        ("`stop_strings` is ['a']", "`tokenizer=`"),
    ),
    "schema without tokenizer": (
        lambda: add(schema={"type": "object"}),
        ValueError,
        ("`schema` constrains text", "`tokenizer=`"),
    ),
    "more sequences than beams": (
        lambda: add(config={"num_beams": 2, "num_return_sequences": 3}),
        ValueError,
        ("`num_return_sequences` (3)", "`num_beams` (2)"),
    ),
    "name of an assistant": (
        lambda: add(assistant_model="gpt2"),
        ValueError,
        ("`assistant_model` is 'gpt2'", "a model"),
    ),
    "tokenizer of no assistant": (
        lambda: add(assistant_tokenizer=models.tokenizer()),
        ValueError,
        ("`assistant_tokenizer` goes with an `assistant_model`", "leave out the tokenizer"),
    ),
    "request of no id": (
        lambda: textless().cancel("lost"),
        ValueError,
        ("the id 'lost'", "unfinished ids: none"),
    ),
    "too few blocks": (
        lambda: PagedEngine(model(), {"num_blocks": 3}).add_request([5], {"max_new_tokens": 500}),
        OutOfBlocksError,
        (
            "needs 32 blocks of 16 tokens",
            "at most 3",
            "raise `num_blocks`",
            "lower `max_new_tokens`",
        ),
    ),
    "one prompt as list": (
        lambda: textless().generate([5, 6, 7], OPTIONS),
        ValueError,
        ("[5, 6, 7] is one prompt", "a list"),
    ),
    "no prompts": (
        lambda: textless().generate(None),
        ValueError,
        ("`prompts` is None", "pass a list"),
    ),  # type: ignore[arg-type]
    "too many configs": (
        lambda: textless().generate([[5], [6]], [OPTIONS] * 3),
        ValueError,
        ("3 generation configs", "2 prompts", "pass one"),
    ),
    "typo in an argument": (
        lambda: textless().generate([[5]], OPTIONS, adaptor="x"),
        TypeError,
        ("no argument `adaptor`", "did you mean `adapter`?"),
    ),
    "pickled engine": (
        lambda: pickle.dumps(textless()),
        TypeError,
        ("`PagedEngine` cannot be pickled", "make an engine in each process"),
    ),
    "copied engine": (
        lambda: copy.deepcopy(textless()),
        TypeError,
        ("pickled or copied", "make an engine in each process"),
    ),
    "memory of a name": (
        lambda: hf_paged.memory_stats("gpt2"),
        ValueError,
        ("`model` is 'gpt2'", "pass a model"),
    ),
    # -- generate
    "capital": (
        lambda: generate(cache_implementation="Paged"),
        ValueError,
        ("is 'Paged'", "did you mean 'paged'?"),
    ),
    "hyphen": (
        lambda: generate(cache_implementation="hf-paged"),
        ValueError,
        ("is 'hf-paged'", "did you mean 'hf_paged'?"),
    ),
    "typo in cache_config": (
        lambda: generate(cache_config={"num_block": 3}),
        ValueError,
        ("`cache_config` has no option `num_block`", "did you mean `num_blocks`?"),
    ),
    "number as cache_config": (
        lambda: generate(cache_config=4096),
        ValueError,
        ("`cache_config` is 4096", '{"num_blocks": 4096}'),
    ),
    "option beside cache_config": (
        lambda: generate(num_blocks=3),
        TypeError,
        ("in its config", 'cache_config={"num_blocks": 3}'),
    ),
    "text": (
        lambda: generate("hello"),
        ValueError,
        ("`input_ids` are 'hello'", "**tokenizer(texts"),
    ),
    "list": (lambda: generate([[5, 6]]), ValueError, ("`input_ids` are [[5, 6]]", "pass a tensor")),
    "inputs not unpacked": (
        lambda: generate(models.tokenizer()(["hello"], return_tensors="pt")),
        ValueError,
        ("`inputs` is a mapping", "`model.generate(**inputs, ...)`"),
    ),
    "one row without rows": (
        lambda: generate(IDS[0]),
        ValueError,
        ("the shape (3,)", "(rows, length)"),
    ),
    "rows without tokens": (
        lambda: generate(IDS[:, :0]),
        ValueError,
        ("the shape (1, 0)", "at least one token"),
    ),
    "mask of another shape": (
        lambda: generate(attention_mask=torch.ones(1, 5, dtype=torch.long)),
        ValueError,
        ("(1, 5)", "(1, 3)", "as the tokenizer returned them"),
    ),
    "dict as generation_config": (
        lambda: generate(generation_config=OPTIONS),
        ValueError,
        ("`generation_config` is {", "`GenerationConfig`, or the options as keyword arguments"),
    ),
    "streamer of several rows": (
        lambda: generate(IDS.repeat(2, 1), streamer=TextStreamer(models.tokenizer())),
        ValueError,
        ("takes one row", "there are 2", "pass a list of streamers"),
    ),
    "name of generate's assistant": (
        lambda: generate(assistant_model="gpt2"),
        ValueError,
        ("`assistant_model` is 'gpt2'", "must be None or a model"),
    ),
    "generate on meta": (
        lambda: meta().generate(IDS, **PAGED),
        ValueError,
        ("on the meta device", "`from_pretrained`"),
    ),
    "no beams": (
        lambda: add(config={"num_beams": 0}),
        ValueError,
        ("`num_beams` is 0", "at least 1"),
    ),
    "name as a cache": (
        lambda: generate(past_key_values="paged"),
        ValueError,
        ("`past_key_values` is 'paged'", "`PagedCache(model.config)`", "`cache_config`"),
    ),
    "config as a cache": (
        lambda: generate(past_key_values=PagedConfig()),
        ValueError,
        ("`past_key_values` is PagedConfig", "options go into `cache_config`"),
    ),
    # -- caches
    "option beside a cache's config": (
        lambda: PagedCache(model().config, num_blocks=3),
        TypeError,
        ("no argument `num_blocks`", 'PagedCache(model.config, {"num_blocks": 3})'),
    ),
    "model as a cache's config": (
        lambda: PagedCache(model()),
        ValueError,
        ("`config` is Llama", "`PagedCache(model.config)`"),
    ),
    "option in install": (
        lambda: hf_paged.install({"num_block": 3}),
        ValueError,
        ("`continuous_batching` has no option `num_block`", "`num_blocks`"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_says_what_was_asked_what_there_is_and_what_to_change(name: str) -> None:
    call, error, parts = MISTAKES[name]
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert len(message) < 500 and "\n" not in message
    assert not textless().has_unfinished and textless().memory.stats().held_bytes == 0
    assert hf_paged.memory_stats(model()).held_bytes == 0


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_new_tokens_of_a_cache_may_have_a_mask_for_all_tokens() -> None:
    mask = torch.ones(1, 5, dtype=torch.int64)
    tokens = []
    for options in ({}, PAGED):
        cache = PagedCache(model().config)
        model().generate(IDS, max_new_tokens=1, do_sample=False, past_key_values=cache)
        ids = torch.tensor([[11, 12]])
        tokens.append(
            model().generate(ids, attention_mask=mask, past_key_values=cache, **OPTIONS, **options)
        )
    hf_paged.free(model())
    assert torch.equal(*tokens)


def test_an_engine_or_a_pipeline_stands_for_its_model() -> None:
    own = models.build("llama")
    pipe = SimpleNamespace(model=own)  # as transformers' pipelines and trainers
    own.generate(IDS, **OPTIONS, **PAGED)
    assert (
        hf_paged.memory_stats(pipe) == hf_paged.memory_stats(own)
        and hf_paged.memory_stats(pipe).held_bytes
    )
    assert hf_paged.last_route(pipe) == hf_paged.last_route(own) is not None
    hf_paged.check_integrity(pipe)
    hf_paged.free(pipe)
    assert not hf_paged.memory_stats(own).held_bytes
    with PagedEngine(own) as made:
        made.generate([[5, 6, 7]], OPTIONS)
        assert hf_paged.memory_stats(made) == made.memory.stats() and made.memory.stats().held_bytes
        assert hf_paged.last_route(made) == made.route
        hf_paged.check_integrity(made)
        hf_paged.free(made)
        assert not made.memory.stats().held_bytes


def test_requests_that_fail_are_told_once(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    results = textless().generate([[5, 10**6], [], [7, -3]], OPTIONS, progress=True)
    assert all(result.error is not None for result in results)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    message = record.getMessage()
    assert (
        "3 of 3 requests failed" in message and "ValueError: token id 1000000 is outside" in message
    )
    assert message.endswith("[troubleshooting.md#failed-requests]")


def test_right_padding_is_told_with_its_remedy(caplog: pytest.LogCaptureFixture) -> None:
    own = models.build("llama")
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    ids = IDS.repeat(2, 1)
    ours = own.generate(ids, attention_mask=mask, **OPTIONS, **PAGED)
    assert torch.equal(ours, own.generate(ids, attention_mask=mask, **OPTIONS))
    told = [
        record.getMessage() for record in caplog.records if "right-padded" in record.getMessage()
    ]
    assert (
        "the batch is right-padded: set `tokenizer.padding_side = 'left'`"
        " [troubleshooting.md#right-padding]" in told[0]
    )
