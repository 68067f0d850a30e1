"""Rows that stay together from start to end, with everything the model's own loop carries:
encoder-decoder models, positions counted by the cache, caches with more than K/V. Tokens equal
plain `generate`'s."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers

from hf_paged import (
    OutOfBlocksError,
    PagedConfig,
    PagedEngine,
    check_integrity,
    last_route,
    memory_stats,
)
from hf_paged.batching.execution.rectangles import Rectangle, RectangleRunner
from hf_paged.batching.scheduling.scheduler import Scheduler
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import make_inputs
from tests.support.engine_helpers import assert_drained, run_all

T5 = "T5ForConditionalGeneration"
ENCODERS = [T5, "BartForConditionalGeneration", "WhisperForConditionalGeneration"]
# positions from the cache's length; indexer keys; padding that is attended to; conv states and
# sliding windows; a forward that prepares its inputs itself
DECODERS = [
    "BartForCausalLM",
    "DeepseekV32ForCausalLM",
    "ProphetNetForCausalLM",
    "InklingForCausalLM",
    "IdeficsForVisionText2Text",
]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.5},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "beam samples": {"num_beams": 2, "do_sample": True},
}
ENDS = list(range(30, 60))  # enough ids that rows end at different steps
NEW = 16
PAGED: dict[str, Any] = {"cache_implementation": "paged", "cache_config": {"block_size": 8}}
# by the model's own forwards, without replays
UNRECORDED: dict[str, Any] = {
    "cache_implementation": "paged",
    "cache_config": {"block_size": 8, "capture": False},
}


@functools.cache
def build(name: str) -> Any:
    model = tiny_model(getattr(transformers, name))
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        config.eos_token_id = None
    return model


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


def tokens(name: str, options: dict[str, Any], paged: dict[str, Any] | None = None) -> torch.Tensor:
    torch.manual_seed(5)
    arguments = {
        key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in inputs_of(name).items()
    }
    options = {
        "max_new_tokens": NEW,
        "eos_token_id": ENDS,
        "pad_token_id": 0,
        **options,
        **(paged or {}),
    }
    found: torch.Tensor = build(name).generate(**arguments, **options)
    return found


def assert_whole(name: str) -> None:
    check_integrity(build(name))
    assert memory_stats(build(name)).used_blocks == 0


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Ids of the preempted requests."""
    found: list[str] = []
    original = Scheduler._preempt

    def preempt(self: Scheduler, request: Any, keeps: bool = True) -> None:
        found.append(request.request_id)
        original(self, request, keeps)

    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    yield found


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
    expected = tokens(name, MODES[mode])
    assert torch.equal(tokens(name, MODES[mode], PAGED), expected)
    route = last_route(build(name))
    assert route is not None and route.road == "engine", route
    assert_whole(name)


@pytest.mark.slow_cases("T5ForConditionalGeneration")
@pytest.mark.parametrize("name", [T5, "BartForCausalLM", "DeepseekV32ForCausalLM"])
def test_rows_leave_when_they_end(name: str) -> None:
    expected = tokens(name, {"do_sample": False})
    model = build(name)
    width = 1 if model.config.is_encoder_decoder else inputs_of(name)["input_ids"].shape[1]
    lengths = [int((row[width:] != 0).sum()) for row in expected]
    assert len(set(lengths)) > 1, f"the rows were meant to end at different steps: {lengths}"
    tokens(name, {"do_sample": False}, UNRECORDED)
    head, original = model.get_output_embeddings(), torch.nn.Linear.forward
    shapes: list[tuple[int, ...]] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self is head:
            shapes.append(tuple(x.shape[:2]))
        return original(self, x)

    torch.nn.Linear.forward = forward  # type: ignore[method-assign]
    try:
        tokens(name, {"do_sample": False}, UNRECORDED)  # the replaced forward is checked
        shapes.clear()
        found = tokens(name, {"do_sample": False}, UNRECORDED)
    finally:
        torch.nn.Linear.forward = original  # type: ignore[method-assign]
    assert torch.equal(expected, found)
    assert len(shapes) == max(lengths) and shapes[0][0] == 4, shapes
    assert sum(rows for rows, _ in shapes[1:]) == sum(lengths) - 4, (
        "rows that ended were computed on"
    )


@pytest.mark.slow_cases("*-beams")
@pytest.mark.parametrize("mode", ["greedy", "beams"])
@pytest.mark.parametrize("name", [T5, "BartForConditionalGeneration", "BartForCausalLM"])
def test_rows_that_lost_their_blocks_are_computed_again(
    name: str, mode: str, preempted: list[str]
) -> None:
    """Prompts that do not fit together start one after another, in the same forwards as in plain
    `generate`."""
    options = {**MODES[mode], "eos_token_id": None, "max_new_tokens": 24}
    expected = tokens(name, options)
    needed = {"greedy": 7, "beams": 12}[mode]  # a request's, at least
    paged = {
        "cache_implementation": "paged",
        "cache_config": {"block_size": 8, "num_blocks": 2 * needed},
    }
    assert torch.equal(tokens(name, options, paged), expected)
    route = last_route(build(name))
    assert route is not None and route.road == "engine", route
    assert preempted, "the budget was meant to be short"
    assert_whole(name)


def test_beams_share_the_keys_and_values_of_their_encoder() -> None:
    model, options = build(T5), {"num_beams": 4, "max_new_tokens": 7, "do_sample": False}
    ids = torch.randint(60, 100, (1, 80))
    expected = model.generate(ids, **options)
    model.generate(ids, **options, **PAGED)
    memory_stats(model, reset=True)
    assert torch.equal(model.generate(ids, **options, **PAGED), expected)
    # blocks for the encoder's 80 tokens, 8 per block; and for each beam, fewer
    assert memory_stats(model).peak_blocks <= 10 + 4 + 1
    assert_whole(T5)


@pytest.mark.slow
def test_an_interrupted_forward_never_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    name = T5
    expected = tokens(name, MODES["sampled"])
    tokens(name, MODES["sampled"], PAGED)
    last = build(name).decoder.block[-1].layer[-1]
    original = type(last).forward
    for after in range(2, 14, 3):
        calls = itertools.count()

        def interrupted(
            self: Any, hidden: torch.Tensor, calls: Any = calls, after: int = after
        ) -> torch.Tensor:
            if self is last and next(calls) == after:
                raise KeyboardInterrupt
            found: torch.Tensor = original(self, hidden)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(type(last), "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                tokens(name, MODES["sampled"], PAGED)
        assert_whole(name)
    assert torch.equal(tokens(name, MODES["sampled"], PAGED), expected)


@pytest.mark.slow_cases("*-its forward writes to its inputs")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("RecurrentGemmaForCausalLM", "states in its modules"),
        (
            "SwitchTransformersForConditionalGeneration",
            "its experts have a capacity for the whole batch",
        ),
        ("MoonshineStreamingForConditionalGeneration", "its forward writes to its inputs"),
    ],
)
def test_rows_that_depend_on_one_another_stay_on_the_loop_of_transformers(
    name: str, why: str
) -> None:
    expected = tokens(name, {"do_sample": False})
    assert torch.equal(tokens(name, {"do_sample": False}, PAGED), expected)
    route = last_route(build(name))
    assert route is not None and route.road == "hf_loop" and why in route.reason, route
    assert_whole(name)


# -- requests of an engine -----------------------------------------------------------------------

LENGTHS = (5, 19, 9, 14, 11)
SMALL = PagedConfig(block_size=8)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(20, 100, (length,), generator=generator).tolist() for length in LENGTHS]


def options_of(mode: str) -> dict[str, Any]:
    return {"max_new_tokens": NEW, "eos_token_id": ENDS, "pad_token_id": 0, **MODES[mode]}


def alone(name: str, seed: int, options: dict[str, Any], **inputs: torch.Tensor) -> list[list[int]]:
    """The new tokens of each sequence, the last of which is one that ends it or the longest."""
    torch.manual_seed(seed)
    # Whisper's `generate` leaves that out
    start = 1 if name != "WhisperForConditionalGeneration" else 0
    rows = build(name).generate(**inputs, **options)[:, start:].tolist()
    last = set(options.get("eos_token_id", ()))
    ends = [next((i for i, token in enumerate(row) if token in last), len(row)) for row in rows]
    return [row[: end + 1] for row, end in zip(rows, ends)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS[:2])
def test_requests_of_an_encoder_decoder_model(name: str) -> None:
    """All modes in one batch; one more request joins in each step."""
    with PagedEngine(build(name), SMALL) as engine:
        results = {}
        for seed, (mode, prompt) in enumerate(zip(MODES, prompts())):
            engine.add_request(prompt, options_of(mode), request_id=mode, seed=seed)
            results |= {
                output.request_id: output.result for output in engine.step() if output.result
            }
        results = run_all(engine, results)
        assert_drained(engine)
    for seed, (mode, prompt) in enumerate(zip(MODES, prompts())):
        expected = alone(name, seed, options_of(mode), input_ids=torch.tensor([prompt]))
        assert [each.token_ids for each in results[mode].sequences] == expected, mode
        assert results[mode].prompt_ids == prompt


@pytest.fixture
def rows_of_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the rows of each rectangular forward."""
    found: list[int] = []
    original = RectangleRunner._forward

    def forward(self: RectangleRunner, rectangle: Rectangle, *args: Any, **kwargs: Any) -> Any:
        found.append(len(rectangle.blocks))
        return original(self, rectangle, *args, **kwargs)

    monkeypatch.setattr(RectangleRunner, "_forward", forward)
    return found


@pytest.mark.slow_cases("*-False")
@pytest.mark.parametrize(
    ("name", "joins_any"), [(T5, True), ("BartForConditionalGeneration", False)]
)
def test_requests_share_forwards(name: str, joins_any: bool, rows_of_forwards: list[int]) -> None:
    """After encoders of different lengths: T5's rows of any length, BART's of one length, which its
    cache counts."""
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    with PagedEngine(build(name), SMALL) as engine:
        for i, prompt in enumerate(prompts()[:4]):
            engine.add_request(prompt, options, request_id=str(i))
            if i % 2:
                engine.step()  # two requests start together each time
            if i == 1:
                rows_of_forwards.clear()
        results = run_all(engine)
        assert engine.route is not None and engine.route.road == "engine", engine.route
        assert_drained(engine)
    for i, prompt in enumerate(prompts()[:4]):
        assert [each.token_ids for each in results[str(i)].sequences] == alone(
            name, 0, options, input_ids=torch.tensor([prompt])
        )
    assert max(rows_of_forwards) == (4 if joins_any else 2), rows_of_forwards
    decodes = rows_of_forwards[2:]  # without the prompts of the latter two
    assert len(decodes) <= (NEW if joins_any else 2 * NEW), decodes


def test_calls_in_threads_share_forwards(rows_of_forwards: list[int]) -> None:
    model, options = build(T5), {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    texts = [torch.tensor([prompt]) for prompt in prompts()]
    expected = [model.generate(ids, **options) for ids in texts]
    model.generate(texts[0], **options, **PAGED)  # with the checks
    rows_of_forwards.clear()
    with ThreadPoolExecutor(len(texts)) as pool:
        found = list(pool.map(lambda ids: model.generate(ids, **options, **PAGED), texts))
    assert all(map(torch.equal, expected, found))
    assert max(rows_of_forwards) > 1, "no two calls shared a forward"
    assert_whole(T5)


@pytest.mark.slow
def test_sound_of_whisper(rows_of_forwards: list[int]) -> None:
    name = "WhisperForConditionalGeneration"
    features = inputs_of(name)["input_features"]
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": ENDS}
    with PagedEngine(build(name), SMALL) as engine:
        for row in range(len(features)):
            engine.add_request(
                None,
                options,
                inputs={"input_features": features[row : row + 1]},
                request_id=str(row),
            )
        rows_of_forwards.clear()
        results = run_all(engine)
        assert rows_of_forwards[0] == len(features) > 1
        assert_drained(engine)
    for row in range(len(features)):
        expected = alone(name, 0, options, input_features=features[row : row + 1])
        assert [each.token_ids for each in results[str(row)].sequences] == expected


@pytest.mark.slow
def test_one_token_of_an_encoder_tells_nothing_of_longer_ones() -> None:
    """Findings of the check on the first request, with sound of one frame, are not applied to
    several lengths."""
    model, generator = (
        copy.deepcopy(build("SpeechT5ForSpeechToText")),
        torch.Generator().manual_seed(4),
    )
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    sounds = [torch.randn((1, length), generator=generator) for length in (400, 4000, 2000, 1200)]
    with PagedEngine(model, SMALL) as engine:
        for i, sound in enumerate(sounds):
            engine.add_request(None, options, inputs={"input_values": sound}, request_id=str(i))
        results = run_all(engine)
        assert_drained(engine)
    for i, sound in enumerate(sounds):
        assert results[str(i)].error is None
        assert model.generate(sound, **options)[0, 1:].tolist() == results[str(i)].token_ids


@pytest.mark.slow
def test_timestamps_are_for_generate_alone() -> None:
    """Whisper's `generate` decodes again from the last timestamp where text was cut off."""
    model = copy.deepcopy(build("WhisperForConditionalGeneration"))
    config = model.generation_config
    config.no_timestamps_token_id, config.max_initial_timestamp_index, config.is_multilingual = (
        90,
        5,
        False,
    )
    config.eos_token_id = model.config.eos_token_id = 45
    features, options = (
        inputs_of("WhisperForConditionalGeneration")["input_features"][:1],
        {"max_new_tokens": 10},
    )
    expected = model.generate(features, return_timestamps=True, **options)
    assert expected.shape[1] > 10, "more than one decoding loop was meant to run"
    assert torch.equal(
        model.generate(features, return_timestamps=True, **options, **PAGED), expected
    )
    config.return_timestamps = True
    with (
        PagedEngine(model, SMALL) as engine,
        pytest.raises(ValueError, match=r"return_timestamps.*generate"),
    ):
        engine.add_request(None, options, inputs={"input_features": features})


@pytest.mark.slow_cases("T5ForConditionalGeneration")
@pytest.mark.parametrize("name", [T5, "BartForCausalLM"])
def test_inputs_that_have_a_graph(name: str) -> None:
    """Embeddings and encoder outputs that a caller computed without `no_grad`."""
    model, found = build(name), inputs_of(name)
    ids, mask = found["input_ids"], found["attention_mask"]
    options = {"max_new_tokens": 6, "do_sample": False}
    given: list[dict[str, Any]] = [{"inputs_embeds": model.get_input_embeddings()(ids)}]
    if model.config.is_encoder_decoder:
        given.append({"encoder_outputs": model.get_encoder()(input_ids=ids, attention_mask=mask)})
    for inputs in given:
        expected = model.generate(**inputs, attention_mask=mask, **options)
        assert torch.equal(
            model.generate(**inputs, attention_mask=mask, **options, **PAGED), expected
        )
        route = last_route(model)
        assert route is not None and route.road == "engine", route
    assert given[0]["inputs_embeds"].requires_grad


@pytest.mark.slow
def test_requests_wait_for_blocks_of_their_encoders() -> None:
    with PagedEngine(build(T5), PagedConfig(block_size=8, num_blocks=15)) as engine:
        for seed, (mode, prompt) in enumerate(zip(MODES, prompts())):
            engine.add_request(prompt, options_of(mode), request_id=mode, seed=seed)
        results = run_all(engine)
        assert engine.stats().num_preemptions > 0, "the budget was meant to be short"
        assert_drained(engine)
        with pytest.raises(OutOfBlocksError, match="at most 15"):
            engine.add_request([5] * 160, options_of("greedy"))
    for seed, (mode, prompt) in enumerate(zip(MODES, prompts())):
        expected = alone(T5, seed, options_of(mode), input_ids=torch.tensor([prompt]))
        assert [each.token_ids for each in results[mode].sequences] == expected, mode


@pytest.mark.slow
def test_a_request_that_fits_waits_while_others_hold_blocks_of_encoders() -> None:
    long, short, options = [5] * 64, [6] * 60, {"max_new_tokens": 24, "do_sample": False}
    expected = alone(T5, 0, options, input_ids=torch.tensor([short]))
    with PagedEngine(build(T5), PagedConfig(block_size=8, num_blocks=15)) as engine:
        engine.add_request(long, options, request_id="first")
        engine.step()  # the first now holds the 8 blocks of its encoder output
        engine.add_request(short, options, request_id="second")  # needs 11
        results = run_all(engine)
        assert_drained(engine)
    assert results["first"].error is None
    assert [each.token_ids for each in results["second"].sequences] == expected


@pytest.mark.slow
def test_new_weights_are_the_encoder_s_too() -> None:
    model, prompt = copy.deepcopy(build(T5)), prompts()[1]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    with PagedEngine(model, SMALL) as engine:
        engine.add_request(prompt, options, request_id="0")
        for _ in range(4):
            engine.step()
        with engine.weights_update("recompute"), torch.no_grad():
            for parameter in model.encoder.parameters():
                parameter.mul_(1.3)
        begun = list(engine._core.requests["0"].request.sequences[0].token_ids)
        result = run_all(engine)["0"]
        assert_drained(engine)
    options["max_new_tokens"] = 13 - len(begun)
    expected = model.generate(
        torch.tensor([prompt]), **options, decoder_input_ids=torch.tensor([begun])
    )
    assert expected[0, 1:].tolist() == result.sequences[0].token_ids


@pytest.mark.slow_cases("*-writes to its inputs")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("MoonshineStreamingForConditionalGeneration", "writes to its inputs"),
        ("T5GemmaForConditionalGeneration", "own"),
    ],
)
def test_encoder_decoders_that_an_engine_cannot_serve(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"{why}.*generate"):
        inputs = next(iter(make_inputs(build(name)).values()))
        with PagedEngine(build(name), SMALL) as engine:
            engine.add_request(
                None,
                {"max_new_tokens": 3},
                inputs={key: value[:1] for key, value in inputs.items()},
            )


@pytest.mark.slow
def test_a_prompt_that_fails_beside_others_fails_alone(rows_of_forwards: list[int]) -> None:
    model, options = build(T5), {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    begins = [[0, 7], [0, 100_000], [0, 9]]  # of the decoder; the second has no embedding
    with PagedEngine(model, SMALL) as engine:
        for i, (prompt, ids) in enumerate(zip(prompts(), begins)):
            engine.add_request(
                prompt,
                options,
                inputs={"decoder_input_ids": torch.tensor([ids])},
                request_id=str(i),
            )
        rows_of_forwards.clear()
        results = run_all(engine)
        assert rows_of_forwards[0] == 3 and isinstance(results["1"].error, IndexError)
        assert_drained(engine)
    for i in (0, 2):
        ids = {
            "input_ids": torch.tensor([prompts()[i]]),
            "decoder_input_ids": torch.tensor([begins[i]]),
        }
        expected = model.generate(**ids, **options)
        assert results[str(i)].token_ids == expected[0, -NEW:].tolist()
