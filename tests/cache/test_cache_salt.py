"""Tenants that do not share prefixes: `cache_salt`."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import InfNanRemoveLogitsProcessor, LogitsProcessorList

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from tests.support import models
from tests.support.rooms import needs_fingerprints

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
PROMPT = models.token_ids(1, 41, seed=5)[0].tolist()  # five full blocks and one token


def hit(engine: PagedEngine, **options: Any) -> int:
    """Prompt tokens that a new request did not compute; asserts that its tokens are plain's."""
    (result,) = engine.generate([PROMPT], GREEDY, **options)
    assert result.error is None, result.error
    ids = torch.tensor([PROMPT])
    plain = engine.model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert result.token_ids == plain[0, len(PROMPT) :].tolist()
    engine.check_integrity()
    return result.num_prefix_hit_tokens


@needs_fingerprints
@pytest.mark.parametrize("own", [None, "alice"])
def test_requests_with_different_salts_share_no_prefix(own: str | None) -> None:
    """A request's salt comes before the config's. Nor do running requests share blocks."""
    config = PagedConfig(block_size=8, num_blocks=64, cache_salt=own)
    salts: list[dict[str, Any]] = [{}, {"cache_salt": "bob"}, {"cache_salt": "carol"}]
    with PagedEngine(models.get("llama"), config) as engine:
        for expected in (0, 40):
            assert [hit(engine, **salt) for salt in salts] == [expected] * 3
        assert hit(engine, cache_salt="alice") == (0 if own is None else 40)
        for salt, num_shared in (("dave", 0), ("erin", 0), ("erin", 5)):
            engine.add_request(PROMPT, GREEDY, cache_salt=salt)
            engine.step()
            assert engine.stats().shared_blocks == num_shared


@needs_fingerprints
@pytest.mark.slow
def test_salts_and_adapters_combine() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(models.build("llama"), config, adapter_name="first").eval()
    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=64)) as engine:
        kinds: list[dict[str, Any]] = [
            {},
            {"cache_salt": "first"},  # a salt with an adapter's name is no adapter
            {"adapter": "first"},
            {"adapter": "first", "cache_salt": "first"},
            {"adapter": "__base__", "cache_salt": "first"},
        ]
        # the first run with an adapter changes the fingerprint
        hit(engine, adapter="first", cache_salt="other")
        assert [hit(engine, **kind) for kind in kinds] == [0] * 5
        assert [hit(engine, **kind) for kind in kinds] == [40] * 5


@needs_fingerprints
def test_calls_of_generate_with_different_salts_share_no_prefix() -> None:
    model, ids = models.build("llama"), torch.tensor([PROMPT] * 4)
    expected = model.generate(ids, **GREEDY)

    def call(salt: str | None) -> int:
        """Number of cached blocks afterwards: a prompt that was found adds none."""
        config = {"block_size": 8, "num_blocks": 128, "cache_salt": salt}
        paged = {"cache_implementation": "paged", "cache_config": config}
        assert torch.equal(model.generate(ids, **GREEDY, **paged), expected)
        assert hf_paged.last_route(model).road == "engine"
        hf_paged.check_integrity(model)
        return hf_paged.memory_stats(model).cached_blocks

    alone = call("alice")
    assert alone > 0
    assert [call(salt) for salt in ("alice", "bob", "alice", None, "bob", None)] == [
        alone * n for n in (1, 2, 2, 3, 3, 3)
    ]


@needs_fingerprints
def test_a_call_keeps_its_own_salt_while_another_thread_calls_with_another() -> None:
    """Both calls run on the model's only pool, whose config is the later call's."""
    model = models.build("llama")
    ids = torch.tensor([PROMPT] * 4)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **GREEDY}

    def call(salt: str, **options: Any) -> int:
        config = {"block_size": 8, "num_blocks": 128, "cache_salt": salt}
        model.generate(**inputs, cache_implementation="paged", cache_config=config, **options)
        return hf_paged.memory_stats(model).cached_blocks

    class Waits(LogitsProcessorList):
        """Runs the other call from start to end after this one has its cache and before it runs."""

        def __iter__(self) -> Iterator[Any]:
            if not others:
                others.append(threading.Thread(target=call, args=("bob",)))
                others[0].start()
                others[0].join(60)
            return super().__iter__()

    others: list[threading.Thread] = []
    call("alice", logits_processor=Waits([InfNanRemoveLogitsProcessor()]))
    assert others and not others[0].is_alive()
    both = hf_paged.memory_stats(model).cached_blocks
    assert both % 2 == 0 and call("alice") == both and call("bob") == both
    assert call("carol") == both // 2 * 3


@pytest.mark.parametrize("value", ["", 5, b"alice", ["alice"], True], ids=repr)
def test_a_salt_is_text_or_none(value: Any) -> None:
    message = f"`cache_salt` is {value!r}: it must be None or text of at least one character"
    with PagedEngine(models.get("llama")) as engine:
        for call in (
            lambda: PagedConfig(cache_salt=value),
            lambda: engine.add_request(PROMPT, GREEDY, cache_salt=value),
        ):
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                call()
        assert not engine.has_unfinished
