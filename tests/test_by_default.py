"""`hf_paged.install(by_default=True)`: calls that name no cache are paged, all others are
unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import hf_paged
from tests.support import models
from tests.support.engine_helpers import Recorder


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    hf_paged.uninstall()
    hf_paged.install()


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "a config": {"generation_config": GenerationConfig(max_new_tokens=9, pad_token_id=0)},
    "assisted": {"assistant": True},
    "lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in CALLS), *(("t5", name) for name in CALLS if name != "assisted")],
)
def test_tokens_are_plain(family: str, name: str) -> None:
    options = {"max_new_tokens": 9, **CALLS[name]}
    if options.pop("assistant", False):
        options["assistant_model"] = models.get_assistant(family)
    takes_loop = name in ("assisted", "lookup") and models.is_encoder_decoder(family)
    # plain allows no more
    inputs = models.prompt(family, batch_size=1 if name in ("assisted", "lookup") else 3)
    if "generation_config" in options:
        del options["max_new_tokens"]
    model = models.get(family)
    torch.manual_seed(0)
    plain = model.generate(**inputs, **options)
    hf_paged.install(by_default=True)
    torch.manual_seed(0)
    ours = model.generate(**inputs, **options)
    assert hf_paged.last_route(model).road == ("hf_loop" if takes_loop else "engine")
    hf_paged.check_integrity(model)
    assert torch.equal(ours, plain)


def test_a_list_of_streamers_is_taken() -> None:
    model, streamers = models.get("llama"), [Recorder(), Recorder()]
    hf_paged.install(by_default=True)
    tokens = model.generate(**models.prompt("llama", 2), max_new_tokens=3, streamer=streamers)
    for streamer, row in zip(streamers, tokens.tolist()):
        assert streamer.values[1:] == [[token] for token in row[-3:]]


def road(**options: Any) -> str | None:
    fresh = models.build("llama")
    fresh.generate(**models.prompt("llama"), max_new_tokens=3, **options)
    route = hf_paged.last_route(fresh)
    return None if route is None else route.road


def test_what_names_a_cache_keeps_it() -> None:
    hf_paged.install(by_default=True)
    assert road() == "engine"
    assert road(cache_implementation="static") == "plain"
    assert road(past_key_values=DynamicCache()) == "plain"
    assert road(use_cache=False) == "plain"


def test_uninstall_ends_it() -> None:
    hf_paged.install(by_default=True)
    hf_paged.install()
    assert road() == "engine"
    hf_paged.uninstall()
    assert road() is None
    hf_paged.install()
    assert road() == "plain"
