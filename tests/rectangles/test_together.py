"""Rows that stay together from start to end: encoder-decoder models, positions that the cache
counts, caches with more than K/V."""

from __future__ import annotations

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import T5ForConditionalGeneration

from hf_paged import (
    PagedConfig,
    PagedEngine,
    check_integrity,
    last_route,
    memory_stats,
)
from hf_paged.rectangles.rectangle import Rectangle
from hf_paged.rectangles.runner import RectangleRunner
from tests.support.architecture_inputs import make_inputs
from tests.support.engine_helpers import Asked, assert_drained, run_all
from tests.support.forwards import build, prompts
from tests.support.models import PAGED, UNRECORDED

T5 = "T5ForConditionalGeneration"
ENCODERS = [
    T5,
    "BartForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "MoonshineStreamingForConditionalGeneration",  # writes to the encoder's outputs
    "PPFormulaNetForConditionalGeneration",  # attends to the second of the encoder's outputs
]
# positions from the cache's length; indexer keys; padding that is attended to; conv states and
# sliding windows; a forward that prepares its inputs itself
DECODERS = [
    "BartForCausalLM",
    "DeepseekV32ForCausalLM",
    "ProphetNetForCausalLM",
    "InklingForCausalLM",
    "IdeficsForVisionText2Text",
]
MODES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.5},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "beam samples": {"num_beams": 2, "do_sample": True},
}
ENDS = list(range(30, 60))  # enough ids that rows end at different steps
NEW = 16
GREEDY = {"do_sample": False}
ENDING = {"max_new_tokens": NEW, "eos_token_id": ENDS, "pad_token_id": 0}
SMALL = PagedConfig(block_size=8)
TEXTS = prompts(5, 19, 9, 14, 11)
LONG = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}


def inputs_of(name: str) -> dict[str, Any]:
    """Four rows, some of which have padding at the beginning or end of the encoder input."""
    # with images or sound, if the model takes them
    found = next(iter(make_inputs(build(name)).values()))
    return {
        key: torch.cat([value, value.flip(-1) if value.is_floating_point() else value.roll(1, 0)])
        if isinstance(value, torch.Tensor)
        else value
        for key, value in found.items()
    }


def tokens(name: str, options: dict[str, Any], **paged: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return build(name).generate(**inputs_of(name), **ENDING, **options, **paged)


def assert_plain(name: str, options: dict[str, Any], road: str = "engine") -> Any:
    """Returns the route of a paged call, which has plain's tokens."""
    assert torch.equal(tokens(name, options), tokens(name, options, **PAGED))
    route = last_route(build(name))
    assert route.road == road, route
    assert_whole(name)
    return route


def assert_whole(name: str) -> None:
    check_integrity(build(name))
    assert memory_stats(build(name)).used_blocks == 0


@pytest.fixture
def rows_of_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the rows of each rectangular forward."""
    found = []
    original = RectangleRunner._forward

    def forward(self: RectangleRunner, rectangle: Rectangle, *args: Any, **kwargs: Any) -> Any:
        found.append(len(rectangle.blocks))
        return original(self, rectangle, *args, **kwargs)

    monkeypatch.setattr(RectangleRunner, "_forward", forward)
    return found


@pytest.mark.slow_cases(
    "DeepseekV32ForCausalLM-greedy",
    "InklingForCausalLM-greedy",
    "ProphetNetForCausalLM-greedy",
    "WhisperForConditionalGeneration-*",
)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *itertools.product((*ENCODERS, *DECODERS), ("greedy", "beams")),
        *((T5, mode) for mode in list(MODES)[1:]),
    ],
)
def test_tokens_are_those_of_plain_generate(name: str, mode: str) -> None:
    assert_plain(name, MODES[mode])


@pytest.mark.slow_cases("T5ForConditionalGeneration")
@pytest.mark.parametrize(
    "name", [T5, "BartForCausalLM", "DeepseekV32ForCausalLM", "MambaForCausalLM"]
)
def test_rows_leave_when_they_end(name: str, rows_of_forwards: list[int]) -> None:
    expected, model = tokens(name, GREEDY), build(name)
    width = 1 if model.config.is_encoder_decoder else inputs_of(name)["input_ids"].shape[1]
    lengths = [int((row[width:] != 0).sum()) for row in expected]
    assert len(set(lengths)) > 1, f"the rows were meant to end at different steps: {lengths}"
    tokens(name, GREEDY, **UNRECORDED)  # with the checks
    rows_of_forwards.clear()
    assert torch.equal(expected, tokens(name, GREEDY, **UNRECORDED))
    left = [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert rows_of_forwards == left, "rows that ended were computed on"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("RecurrentGemmaForCausalLM", "states in its modules"),
        ("OpenAIGPTLMHeadModel", "its forwards store nothing in the cache"),
        (
            "SwitchTransformersForConditionalGeneration",
            "its experts have a capacity for the whole batch",
        ),
    ],
)
def test_rows_that_stay_on_the_loop_of_transformers(name: str, why: str) -> None:
    assert why in assert_plain(name, GREEDY, road="hf_loop").reason


@pytest.mark.slow_cases("*-False")
@pytest.mark.parametrize(
    ("name", "joins_any"), [(T5, True), ("BartForConditionalGeneration", False)]
)
def test_requests_share_forwards(name: str, joins_any: bool, rows_of_forwards: list[int]) -> None:
    """After encoders of different lengths: T5's rows of any length, BART's of one length, which its
    cache counts."""
    with PagedEngine(build(name), SMALL) as engine:
        asked = Asked(engine)
        for i, prompt in enumerate(TEXTS[:4]):
            asked.add(str(i), prompt, LONG)
            if i % 2:
                engine.step()  # two requests start together each time
            if i == 1:
                rows_of_forwards.clear()
        results = run_all(engine)
        decodes = rows_of_forwards[2:]  # without the prompts of the latter two
        asked.check(results)
        assert engine.route is not None and engine.route.road == "engine", engine.route
        assert_drained(engine)
    assert max(rows_of_forwards) == (4 if joins_any else 2), rows_of_forwards
    assert len(decodes) <= (NEW if joins_any else 2 * NEW), decodes


class Steered(T5ForConditionalGeneration):
    """Prefers a token, as much as an input says."""

    def forward(self, *args: Any, steering: float = 0.0, **inputs: Any) -> Any:
        outputs = super().forward(*args, **inputs)
        outputs.logits[..., 7] += steering
        return outputs


def test_requests_with_other_values_of_an_input_keep_theirs() -> None:
    model, prompt = copy.deepcopy(build(T5)), TEXTS[0]
    model.__class__ = Steered
    with PagedEngine(model, SMALL) as engine:
        names = {}
        for value in (0.0, 1e4, 0.0):
            names[engine.add_request(prompt, LONG, inputs={"steering": value})] = value
        results = run_all(engine)
        for name, value in names.items():
            expected = model.generate(torch.tensor([prompt]), **LONG, steering=value)
            assert results[name].token_ids == expected[0, 1:].tolist()
        assert_drained(engine)


def test_calls_in_threads_share_forwards(rows_of_forwards: list[int]) -> None:
    model, texts = build(T5), [torch.tensor([prompt]) for prompt in TEXTS]
    expected = [model.generate(ids, **LONG) for ids in texts]
    model.generate(texts[0], **LONG, **PAGED)  # with the checks
    rows_of_forwards.clear()
    with ThreadPoolExecutor(len(texts)) as pool:
        found = list(pool.map(lambda ids: model.generate(ids, **LONG, **PAGED), texts))
    assert all(map(torch.equal, expected, found))
    assert max(rows_of_forwards) > 1, "no two calls shared a forward"
    assert_whole(T5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["WhisperForConditionalGeneration", "SpeechT5ForSpeechToText"])
def test_sound(name: str, rows_of_forwards: list[int]) -> None:
    """Of Whisper, all of one length; of the other, findings of the check on the first request, with
    sound of one frame, are not applied to several lengths."""
    # Whisper's `generate` leaves the decoder's first token out
    model, is_whisper, options = copy.deepcopy(build(name)), "Whisper" in name, {**GREEDY}
    options |= {"max_new_tokens": 9, "eos_token_id": ENDS}
    generator = torch.Generator().manual_seed(4)
    sounds = [torch.randn((1, length), generator=generator) for length in (400, 4000, 2000, 1200)]
    key = "input_features" if is_whisper else "input_values"
    if is_whisper:
        sounds = list(inputs_of(name)[key].split(1))
    with PagedEngine(model, SMALL) as engine:
        names = [engine.add_request(None, options, inputs={key: sound}) for sound in sounds]
        rows_of_forwards.clear()
        results = run_all(engine)
        assert not is_whisper or rows_of_forwards[0] == len(sounds) > 1
        assert_drained(engine)
    for sound, name in zip(sounds, names):
        (row,) = model.generate(sound, **options)[:, 0 if is_whisper else 1 :].tolist()
        assert results[name].token_ids == row


@pytest.mark.slow
def test_timestamps_are_for_generate_alone() -> None:
    """Whisper's `generate` decodes again from the last timestamp where text was cut off."""
    model, options = copy.deepcopy(build(ENCODERS[2])), {"max_new_tokens": 10}
    config = model.generation_config
    config.no_timestamps_token_id, config.max_initial_timestamp_index = 90, 5
    config.is_multilingual, config.return_timestamps = False, True
    config.eos_token_id = model.config.eos_token_id = 45
    features = inputs_of(ENCODERS[2])["input_features"][:1]
    expected = model.generate(features, **options)
    assert expected.shape[1] > 10, "more than one decoding loop was meant to run"
    assert torch.equal(model.generate(features, **options, **PAGED), expected)
    refused = pytest.raises(ValueError, match=r"return_timestamps.*generate")
    with PagedEngine(model, SMALL) as engine, refused:
        engine.add_request(None, options, inputs={"input_features": features})


@pytest.mark.slow_cases("T5ForConditionalGeneration")
@pytest.mark.parametrize("name", [T5, "BartForCausalLM"])
def test_inputs_that_have_a_graph(name: str) -> None:
    """Embeddings and encoder outputs that a caller computed without `no_grad`."""
    model, found = build(name), inputs_of(name)
    ids, mask = found["input_ids"], found["attention_mask"]
    options = {"max_new_tokens": 6, "do_sample": False}
    given = [{"inputs_embeds": model.get_input_embeddings()(ids)}]
    if model.config.is_encoder_decoder:
        given.append({"encoder_outputs": model.get_encoder()(input_ids=ids, attention_mask=mask)})
    for inputs in given:
        arguments = {**inputs, "attention_mask": mask, **options}
        expected = model.generate(**arguments)
        assert torch.equal(model.generate(**arguments, **PAGED), expected)
        assert last_route(model).road == "engine"
    assert given[0]["inputs_embeds"].requires_grad


def test_an_encoder_gets_the_mask_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model, masks = copy.deepcopy(build(T5)), list[Any]()
    encode = model.encoder.forward

    def watched(*args: Any, attention_mask: Any = None, **inputs: Any) -> Any:
        masks.append(None if attention_mask is None else attention_mask.tolist())
        return encode(*args, attention_mask=attention_mask, **inputs)

    ids = torch.tensor([[5, 6, 0], [5, 6, 7]])
    options = {"max_new_tokens": 2, **GREEDY}
    with PagedEngine(model, SMALL) as engine:
        monkeypatch.setattr(model.encoder, "forward", watched)
        engine.generate({"input_ids": ids, "attention_mask": (ids > 0).long()}, options)
        engine.generate(ids, options)
    assert masks == [[[1, 1]], [[1, 1, 1]], None, None]


def test_a_request_whose_encoder_fails_after_new_weights_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, (long, short) = copy.deepcopy(build(T5)), (TEXTS[1] * 2, TEXTS[1])
    options = {"max_new_tokens": 12, **GREEDY}
    encode = model.encoder.forward

    def fail(*args: Any, **inputs: Any) -> Any:
        if inputs["input_ids"].shape[1] == len(long):
            raise torch.OutOfMemoryError("on purpose")
        return encode(*args, **inputs)

    with PagedEngine(model, SMALL) as engine:
        names = [engine.add_request(prompt, options) for prompt in (long, short)]
        engine.step()
        with engine.weights_update("recompute"), torch.no_grad():
            model.encoder.final_layer_norm.weight.mul_(-1.0)
            monkeypatch.setattr(model.encoder, "forward", fail)
        monkeypatch.undo()
        begun = list(engine._core.requests[names[1]].request.sequences[0].token_ids)
        results = run_all(engine)
        assert_drained(engine)
    assert isinstance(results[names[0]].error, torch.OutOfMemoryError)
    options["max_new_tokens"] = 13 - len(begun)
    ids = torch.tensor([short])
    expected = model.generate(ids, **options, decoder_input_ids=torch.tensor([begun]))
    assert expected[0, 1:].tolist() == results[names[1]].token_ids


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("T5GemmaForConditionalGeneration", "own"),
        ("RecurrentGemmaForCausalLM", "keeps states in its modules"),
    ],
)
def test_models_that_an_engine_cannot_serve(name: str, why: str) -> None:
    inputs = {key: value[:1] for key, value in inputs_of(name).items()}
    with pytest.raises(ValueError, match=rf"{why}.*generate"):
        with PagedEngine(build(name), SMALL) as engine:
            engine.add_request(None, {"max_new_tokens": 3}, inputs=inputs)
