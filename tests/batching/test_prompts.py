"""Prompts that are more than token ids: images, embeddings, positions of their own."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

import hf_paged
from hf_paged.batching.decoding.prepare import captured_call
from hf_paged.batching.execution.prompts import Prompts, prompts_of
from hf_paged.cache.block_manager import BlockManager
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import decoder_text
from tests.support.architecture_media import media_inputs

LENGTH = 11  # tokens of the longer of two prompts


def text(model: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    return decoder_text(model.config)


def test_positions_with_several_axes_that_count_are_packed() -> None:
    model = tiny_model(transformers.Qwen2VLForConditionalGeneration)
    inputs = text(model)
    options = {**inputs, "do_sample": False, "max_new_tokens": 9}
    plain, paged = model.generate(**options), model.generate(**options, **models.PAGED)
    assert torch.equal(plain, paged)
    assert hf_paged.last_route(model).road == "engine"
    counted = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0).expand(3, -1, -1).clone()
    plain = model.generate(**options, position_ids=counted)
    assert torch.equal(plain, model.generate(**options, position_ids=counted, **models.PAGED))
    assert hf_paged.last_route(model).road == "engine"


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}, {}])
def test_a_captured_call_has_each_prompt_once(options: dict[str, Any]) -> None:
    model = models.get("llama")
    inputs = text(model)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    before = dict(vars(model.generation_config))
    call = captured_call(model, **inputs, inputs_embeds=embeds, max_new_tokens=5, **options)
    rows = max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
    assert call.method == ("_beam_search" if "num_beams" in options else "_sample")
    assert call.arguments["input_ids"].shape == (2 * rows, LENGTH)
    assert call.unexpanded is not None
    prompts = prompts_of(call.unexpanded, call.arguments["model_kwargs"], is_decoder=False)
    assert torch.equal(prompts.input_ids, inputs["input_ids"])
    assert prompts.model_kwargs["inputs_embeds"] is embeds and prompts.model_kwargs["use_cache"]
    assert "past_key_values" not in prompts.model_kwargs
    assert prompts.paddings == (inputs["attention_mask"] == 0).sum(-1).tolist() and prompts.length == LENGTH
    assert vars(model.generation_config) == before
    assert model.generate(**inputs, max_new_tokens=5).shape == (2, LENGTH + 5)  # as ever behind it


def test_a_captured_call_raises_as_generate() -> None:
    model = models.get("llama")
    with pytest.raises(ValueError, match="max_new_tokens"):
        captured_call(model, **text(model), max_new_tokens=0)


LLAVA, QWEN, GEMMA = (f"{name}ForConditionalGeneration" for name in ("Llava", "Qwen2VL", "Gemma3"))
MODES = [{}, {"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3, "num_return_sequences": 2}]


@functools.cache
def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return tiny_model(getattr(transformers, name), **({"sliding_window": 64} if name == GEMMA else {}))


def pictures(name: str, seed: int = 1) -> dict[str, Any]:
    """Two rows with different pictures, padded on the left, for `generate`."""
    torch.manual_seed(seed)
    return dict(media_inputs(model_of(name))["image"])


def with_question(inputs: dict[str, Any], seed: int = 1) -> dict[str, Any]:
    """The same with 13 tokens of text behind."""
    torch.manual_seed(seed)
    rows, length = inputs["input_ids"].shape
    behind = {"input_ids": torch.randint(5, 100, (rows, 13)), "attention_mask": torch.ones(rows, 13, dtype=torch.long)}
    longer = {
        name: torch.cat([x, behind.get(name, torch.zeros(rows, 13, dtype=x.dtype))], 1)
        for name, x in inputs.items()
        if x.shape == (rows, length)
    }
    return {**inputs, **longer}


def other_pictures(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "pixel_values": inputs["pixel_values"].flip(-1) * 2 - 0.5}


def same(model: Any, inputs: dict[str, Any], options: dict[str, Any], config: dict[str, Any] | None = None) -> Any:
    """Plain and paged `generate` agree; returns how the latter went."""
    outputs = []
    for paged in ({}, {"cache_implementation": "paged", "cache_config": {"block_size": 8, **(config or {})}}):
        torch.manual_seed(3)
        outputs.append(model.generate(**inputs, **{"max_new_tokens": 13, "do_sample": False, **options}, **paged))
    assert torch.equal(*outputs)
    hf_paged.check_integrity(model)
    return hf_paged.last_route(model)


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that each look-up in the prefix cache found."""
    found, match = list[int](), BlockManager.match

    def watched(*args: Any, **kwargs: Any) -> int:
        found.append(match(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(BlockManager, "match", watched)
    return found


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each forward of prompts stores."""
    found, forward = list[int](), Prompts.forward

    def watched(self: Prompts, model: Any, cache: Any, rows: dict[int, Any]) -> Any:
        found.append(len(rows))
        return forward(self, model, cache, rows)

    monkeypatch.setattr(Prompts, "forward", watched)
    return found


@pytest.mark.parametrize("options", MODES, ids=["greedy", "sampled", "beams"])
@pytest.mark.parametrize("name", [LLAVA, QWEN, GEMMA])
def test_pictures_are_computed_by_the_model_and_decoded_packed(name: str, options: dict[str, Any]) -> None:
    route = same(model_of(name), pictures(name), options)
    assert route.road == "engine" and route.reason.startswith("packed")


@pytest.mark.parametrize("name", [LLAVA, QWEN])
def test_preempted_rows_are_computed_again(name: str, forwards: list[int]) -> None:
    model, inputs = model_of(name), pictures(name)
    same(model, inputs, {})  # with the check
    for options, num_blocks in (({}, 9), ({"num_beams": 2}, 13)):
        forwards.clear()
        hf_paged.free(model)
        tight = {"num_blocks": num_blocks, "prefix_caching": False, "preemption": "recompute"}
        assert same(model, inputs, {**options, "max_new_tokens": 40}, tight).road == "engine"
        assert len(forwards) > 1, "nothing was computed again"


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("options", MODES, ids=["greedy", "sampled", "beams"])
def test_embeddings(with_ids: bool, options: dict[str, Any]) -> None:
    model = models.get("llama")
    inputs = text(model)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach().flip(-1)
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    if with_ids:
        given["input_ids"] = inputs["input_ids"]
    assert same(model, given, options).road == "engine"
    tight = {"num_blocks": 12 if options else 5, "prefix_caching": False}
    assert same(model, given, options, tight).road == "engine"
    if not options:
        assert same(model, given, {"max_new_tokens": 70}).road == "engine"


def test_a_cache_that_is_returned() -> None:
    model = models.get("llama")
    inputs = text(model)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    options = {
        "max_new_tokens": 9,
        "return_dict_in_generate": True,
        "do_sample": False,
        "eos_token_id": 5,
        "pad_token_id": 0,
    }
    plain = model.generate(**given, **options)
    paged = model.generate(**given, **options, **models.PAGED)
    assert torch.equal(plain.sequences, paged.sequences) and hf_paged.last_route(model).road == "engine"
    assert plain.past_key_values.get_seq_length() == paged.past_key_values.get_seq_length()
    keys, shown = plain.past_key_values.layers[0].keys, paged.past_key_values.layers[0].keys.dense()
    torch.testing.assert_close(shown[0], keys[0])


def test_positions_of_a_callers_own(hits: list[int]) -> None:
    model = models.get("llama")
    inputs = text(model)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0) * 3 + 1
    options = {"max_new_tokens": 60}
    assert same(model, {**inputs, "position_ids": positions}, options).road == "engine"
    hits.clear()
    same(model, {**inputs, "position_ids": positions}, options)
    assert max(hits) > 0
    hits.clear()
    same(model, {**inputs, "position_ids": positions + 1}, options)
    same(model, inputs, options)
    assert max(hits) == 0


@pytest.mark.parametrize("name", [GEMMA, "PaliGemmaForConditionalGeneration"])
def test_tokens_that_see_later_ones_are_not_served_to_other_prompts(name: str, hits: list[int]) -> None:
    model, inputs, options = model_of(name), with_question(pictures(name)), {"max_new_tokens": 60}
    hf_paged.free(model)
    same(model, inputs, options)
    same(model, with_question(inputs), options)
    same(model, with_question(pictures(name), seed=2), options)
    same(model, other_pictures(inputs), options)
    same(model, text(model), options)
    assert any(hits) == (name == GEMMA)  # there the question sees nothing behind


def test_rows_whose_decode_steps_need_more_are_not_packed() -> None:
    model = model_of("Kosmos2ForConditionalGeneration")
    route = same(model, pictures("Kosmos2ForConditionalGeneration"), {})
    assert route.road == "engine" and "image_embeds" in route.reason and not route.reason.startswith("packed")


def test_streamers_and_threads() -> None:
    class Words(BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            pass

    model, inputs = model_of(QWEN), pictures(QWEN)
    row = {**inputs, "streamer": [Words(), Words()]}
    plain = model.generate(**inputs, max_new_tokens=9, do_sample=False)
    model.generate(**row, max_new_tokens=9, do_sample=False, **models.PAGED)
    assert [words.seen[-9:] for words in row["streamer"]] == plain[:, -9:].tolist()

    calls = [inputs, other_pictures(inputs), inputs, other_pictures(inputs)]
    expected = [model.generate(**call, max_new_tokens=30, do_sample=False) for call in calls]
    found: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        found[place] = model.generate(**calls[place], max_new_tokens=30, do_sample=False, **models.PAGED)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
    hf_paged.check_integrity(model)


def test_inputs_that_do_not_fit_raise_what_plain_raises() -> None:
    model, inputs = model_of(LLAVA), pictures(LLAVA)
    wrong = {**inputs, "pixel_values": inputs["pixel_values"][:1]}
    with pytest.raises(ValueError) as plain:
        model.generate(**wrong, max_new_tokens=3)
    with pytest.raises(ValueError) as paged:
        model.generate(**wrong, max_new_tokens=3, **models.PAGED)
    assert str(plain.value) == str(paged.value)
    hf_paged.check_integrity(model)
    same(model, inputs, {})
