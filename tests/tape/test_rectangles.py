"""Decode steps of rectangles, and of positions on axes, as replays: plain's tokens, and which steps
are none."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from hf_paged import PagedConfig, PagedEngine, Route, check_integrity, last_route
from hf_paged.cache.states import state_tensors
from hf_paged.rooms import is_installed
from hf_paged.tape import rectangles, step_cache
from hf_paged.tape.static_states import StaticStates
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import make_inputs
from tests.support.engine_helpers import assert_drained, run_all
from tests.support.rooms import records_on_cpu

CLASSES = [
    "T5ForConditionalGeneration",  # a bias of positions, shared by layers
    "BartForConditionalGeneration",  # positions count the cache's tokens
    "WhisperForConditionalGeneration",  # the mask is not the decoder's
    "BartForCausalLM",  # left padding, without position ids
    "BertLMHeadModel",  # left padding, with position ids
    "MambaForCausalLM",  # states alone
    "Lfm2ForCausalLM",  # states of convolutions
    "Qwen3NextForCausalLM",  # recurrent states, and attention of other layers
    "FalconH1ForCausalLM",  # states and attention of one layer
]
HYBRIDS = CLASSES[5:]
CLASSES += [
    "DiffLlamaForCausalLM",  # its own code reads keys
    "RoFormerForCausalLM",  # so does this one's, without position ids
    "MvpForConditionalGeneration",  # and that of a model with an encoder
    "M2M100ForConditionalGeneration",  # compares the cache's length with a size
    "MoonshineForConditionalGeneration",  # its encoder returns a mask
    "Pix2StructForConditionalGeneration",  # slices a mask
    "MllamaForCausalLM",  # some layers have no blocks
]
NUM_TOKENS = 24
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sample": {"do_sample": True, "num_beams": 1},
}


@functools.cache
def build(name: str) -> PreTrainedModel:
    model = tiny_model(getattr(transformers, name))
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        config.eos_token_id = None
    return model


def inputs_of(name: str, seed: int = 1) -> dict[str, Any]:
    """Two rows, the second of which is padded."""
    return next(iter(make_inputs(build(name), seed).values()))


def generate(
    model: PreTrainedModel, inputs: dict[str, Any], is_paged: bool, **options: Any
) -> torch.Tensor:
    arguments = {name: x.clone() for name, x in inputs.items()}
    arguments |= {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, **options}
    if is_paged:
        arguments["cache_implementation"] = "paged"
        arguments.setdefault("cache_config", {"block_size": 8})
    torch.manual_seed(5)
    return model.generate(**arguments)


def route_of(model: PreTrainedModel) -> Route:
    route = last_route(model)
    assert route is not None
    return route


# whose own code prepares the inputs of a step in older transformers
UNRECORDED_BEFORE_5_24 = {
    "MambaForCausalLM",
    "MllamaForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
}


def assert_recorded(model: PreTrainedModel, least: int = 1) -> None:
    if models.BEFORE_5_24 and type(model).__name__ in UNRECORDED_BEFORE_5_24:
        return
    assert route_of(model).num_captured_steps >= least or not records_on_cpu()


@pytest.mark.slow_cases(but=["*-greedy", "T5*", "Qwen3Next*", "DiffLlama*"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CLASSES)
def test_replays_give_the_tokens_of_plain(name: str, mode: str) -> None:
    model = build(name)
    for seed in range(3):  # other inputs, to the graphs of the first call
        inputs = inputs_of(name, seed)
        expected = generate(model, inputs, False, **MODES[mode])
        assert torch.equal(generate(model, inputs, True, **MODES[mode]), expected), seed
        check_integrity(model)
    assert_recorded(model, NUM_TOKENS - 1)


@pytest.mark.parametrize("name", CLASSES[:2])
def test_an_encoder_mask_hides_tokens_from_replays_too(name: str) -> None:
    """The first calls have no padding."""
    model = build(name)
    inputs = inputs_of(name)
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    generate(model, inputs, True)
    generate(model, inputs, True)
    for width in (3, 7):
        inputs["attention_mask"][1, width:] = 0
        expected = generate(model, inputs, False)
        assert torch.equal(generate(model, inputs, True), expected), width
    assert_recorded(model, NUM_TOKENS - 1)
    inputs["attention_mask"][0, 2] = 0  # a hole, which no range of blocks shows
    expected = generate(model, inputs, False)
    assert torch.equal(generate(model, inputs, True), expected)
    assert route_of(model).num_captured_steps == 0


@pytest.mark.slow
def test_rows_outgrow_the_graph() -> None:
    """Blocks of more tokens than the first graph's tables have room for."""
    model = build("T5ForConditionalGeneration")
    inputs = inputs_of("T5ForConditionalGeneration")
    lengths = {"max_new_tokens": 1100, "min_new_tokens": 1100}
    expected = generate(model, inputs, False, **lengths)
    assert torch.equal(generate(model, inputs, True, **lengths), expected)
    assert_recorded(model, 1000)


@pytest.mark.parametrize("name", [CLASSES[0], CLASSES[3], *HYBRIDS])
def test_requests_of_an_engine_join_and_leave(name: str) -> None:
    model = build(name)
    inputs = inputs_of(name)
    rows = []
    for row in range(2):
        real = inputs["attention_mask"][row].bool()
        rows.append({"input_ids": inputs["input_ids"][row : row + 1, real]})
    limits = [30, 9, 21, 14, 26, 17]
    expected = []
    for number, limit in enumerate(limits):
        limit_options = {"max_new_tokens": limit, "min_new_tokens": limit}
        output = generate(model, rows[number % 2], False, **limit_options)
        expected.append(output[0, -limit:].tolist())
    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=40)) as engine:
        for number, limit in enumerate(limits):
            options = {**GREEDY, "max_new_tokens": limit}
            engine.add_request(rows[number % 2], options, request_id=str(number))
        results = run_all(engine)
        assert [results[str(number)].token_ids for number in range(len(limits))] == expected
        assert engine.stats().num_captured_steps > 0 or not records_on_cpu()
        assert_drained(engine)


@pytest.mark.parametrize("name", [CLASSES[0], *HYBRIDS[2:]])
def test_preempted_rows_go_on(name: str) -> None:
    model = build(name)
    ids = inputs_of(name)["input_ids"][:1]
    options = {"max_new_tokens": 60, "min_new_tokens": 60}
    expected = generate(model, {"input_ids": ids}, False, **options)[0, -60:].tolist()
    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=24)) as engine:
        for number in range(4):
            engine.add_request({"input_ids": ids}, {**GREEDY, **options}, request_id=str(number))
        results = run_all(engine)
        assert all(result.token_ids == expected for result in results.values())
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert stats.num_captured_steps > 0 or not records_on_cpu()
        assert_drained(engine)


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_that_share_a_prefix_start_from_its_states(name: str) -> None:
    """The kept states are copies, which the replays of earlier rows do not change."""
    model = build(name)
    start = list(range(30, 62))
    prompts = [[*start, *range(70 + 5 * n, 73 + 4 * n)] for n in range(6)]
    options = {**GREEDY, "max_new_tokens": NUM_TOKENS}
    expected = []
    for ids in prompts:
        output = generate(model, {"input_ids": torch.tensor([ids])}, False)
        expected.append(output[0, len(ids) :].tolist())
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        engine.generate([start], options)
        for _ in range(2):
            results = engine.generate(prompts, options)
            assert [result.token_ids for result in results] == expected
            results = engine.generate(prompts[::-1], options)
            assert [result.token_ids for result in results] == expected[::-1]
        assert engine.stats().num_captured_steps > 0 or not records_on_cpu()
        engine.check_integrity()


def layers_of_states(seed: int) -> list[LinearAttentionLayer]:
    """Two layers with the states of two rows."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(2):
        layer = LinearAttentionLayer()
        layer.update_conv_state(torch.randn(2, 3, 4, generator=generator))
        layer.update_recurrent_state(torch.randn(2, 5, generator=generator))
        layers.append(layer)
    return layers


def test_states_stay_in_the_buffers_until_other_rows_use_them() -> None:
    first, second = layers_of_states(0), layers_of_states(1)
    before = [x.clone() for x in state_tensors(first)], [x.clone() for x in state_tensors(second)]
    static = StaticStates(first, num_rows=3)
    static.move_in(first)
    kept = state_tensors(first)
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(kept, static.buffers))
    for buffer in static.buffers:
        buffer += 1  # a step
    static.move_in(first)
    assert all(x is y for x, y in zip(state_tensors(first), kept))
    static.move_in(second)
    for buffer in static.buffers:
        buffer -= 1
    assert all(torch.equal(x, y + 1) for x, y in zip(state_tensors(first), before[0]))
    assert all(torch.equal(x, y - 1) for x, y in zip(state_tensors(second), before[1]))
    first[0].reorder_cache(torch.tensor([1, 0]))
    static.move_in(first)
    assert torch.equal(state_tensors(first)[0], before[0][0][[1, 0]] + 1)
    del second
    static.move_in(layers_of_states(2))


def test_states_that_a_replay_does_not_compute_alike_are_not_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The logits of one step do not show all that a step changes."""
    model = tiny_model(transformers.Lfm2ForCausalLM)
    model.generation_config.eos_token_id = None
    inputs = inputs_of("Lfm2ForCausalLM")
    expected = generate(model, inputs, False)
    original = step_cache.store_states

    def store(cache: Any, states: Any) -> None:
        original(cache, states)
        states[0].zero_()

    monkeypatch.setattr(rectangles, "store_states", store)
    for _ in range(2):
        assert torch.equal(generate(model, inputs, True), expected)
    assert route_of(model).num_captured_steps == 0


def test_other_weights_are_read_and_other_modules_recorded_again() -> None:
    name = "T5ForConditionalGeneration"
    model = tiny_model(transformers.T5ForConditionalGeneration)
    model.generation_config.eos_token_id = None
    inputs = inputs_of(name)
    for _ in range(2):
        generate(model, inputs, True)
    with torch.no_grad():
        model.decoder.block[0].layer[0].SelfAttention.q.weight.mul_(1.5)
    expected = generate(model, inputs, False)
    assert torch.equal(generate(model, inputs, True), expected)
    assert_recorded(model)
    layer = model.decoder.block[1].layer[-1].DenseReluDense
    layer.wo = torch.nn.Linear(layer.wo.in_features, layer.wo.out_features, bias=False)
    layer.wo.weight.data.normal_(0, 0.2)
    expected = generate(model, inputs, False)
    for _ in range(2):
        assert torch.equal(generate(model, inputs, True), expected)
    assert_recorded(model)


def test_a_decoder_that_reads_its_encoder_is_not_recorded() -> None:
    """A forward that no recorded step may stand for: it reads the encoder's output each time."""
    name = "BartForConditionalGeneration"
    model = tiny_model(transformers.BartForConditionalGeneration)
    model.generation_config.eos_token_id = None
    decoder = model.model.decoder
    forward = type(decoder).forward

    def reads(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        encoded = kwargs["encoder_hidden_states"]
        output.last_hidden_state = output.last_hidden_state + encoded.mean(1, keepdim=True)
        return output

    decoder.__class__ = type("ReadingDecoder", (type(decoder),), {"forward": reads})
    inputs = inputs_of(name)
    expected = generate(model, inputs, False)
    for _ in range(2):
        assert torch.equal(generate(model, inputs, True), expected)
    assert route_of(model).num_captured_steps == 0


@pytest.mark.slow_cases(but=["*-greedy", "Qwen3_5*-beams"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name",
    [
        "Qwen2_5_VLForConditionalGeneration",
        "Glm4vForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",  # with states
        "Qwen3VLMoeForConditionalGeneration",  # its masks lack the window of its layers
    ],
)
def test_positions_on_axes_are_replayed(name: str, mode: str) -> None:
    model = build(name)
    for medium in ("image", "text", "image"):
        for seed in range(2):
            inputs = make_inputs(model, seed)[medium]
            expected = generate(model, inputs, False, **MODES[mode])
            assert torch.equal(generate(model, inputs, True, **MODES[mode]), expected), (
                medium,
                seed,
            )
        # the second call's first step has shorter rows than those of the first call's replays
        assert_recorded(model, NUM_TOKENS - 2)


def test_text_joins_requests_whose_positions_are_on_axes() -> None:
    name = "Qwen2_5_VLForConditionalGeneration"
    model = build(name)
    inputs = make_inputs(model)["image"]
    text = [list(range(20, 33)), list(range(40, 47))]
    expected = [generate(model, inputs, False)[:, inputs["input_ids"].shape[1] :].tolist()]
    for ids in text:
        output = generate(model, {"input_ids": torch.tensor([ids])}, False)
        expected.append(output[0, len(ids) :].tolist())
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        options = {**GREEDY, "max_new_tokens": NUM_TOKENS}
        results = engine.generate(text, options)
        assert [result.token_ids for result in results] == expected[1:]
        assert engine.stats().num_captured_steps > 0 or not is_installed("tape")
    assert torch.equal(
        generate(model, inputs, True)[:, inputs["input_ids"].shape[1] :],
        torch.tensor(expected[0]),
    )


@pytest.mark.parametrize("name", [CLASSES[0], CLASSES[3]])
def test_requests_with_adapters_do_not_get_another_ones_replay(name: str) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model(getattr(transformers, name))
    base.generation_config.eos_token_id = None
    torch.manual_seed(0)
    targets = ["q", "v"] if name == CLASSES[0] else ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(base, config, adapter_name="first")
    model.add_adapter("second", config)
    model.eval()
    ids = inputs_of(name)["input_ids"][:1]
    names = [None, "first", "second", "first", None]
    expected = []
    for adapter in names:
        if adapter is not None:
            model.set_adapter(adapter)
        with model.disable_adapter() if adapter is None else contextlib.nullcontext():
            output = generate(model, {"input_ids": ids}, False)
            assert torch.equal(generate(model, {"input_ids": ids}, True), output), adapter
        expected.append(output[0, -NUM_TOKENS:].tolist())
    assert len({*map(tuple, expected)}) == 3
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        options = {**GREEDY, "max_new_tokens": NUM_TOKENS}
        for _ in range(2):
            for number, adapter in enumerate(names):
                engine.add_request(
                    {"input_ids": ids},
                    options,
                    request_id=str(number),
                    adapter=adapter or "__base__",
                )
            results = run_all(engine)
            assert [results[str(number)].token_ids for number in range(len(names))] == expected


@pytest.mark.parametrize("is_padded_first", [False, True])
def test_a_padded_decoder_prompt_gets_the_bias_of_its_own_positions(is_padded_first: bool) -> None:
    name = "T5ForConditionalGeneration"
    model = build(name)
    inputs = inputs_of(name)
    start = model.generation_config.decoder_start_token_id
    inputs["decoder_input_ids"] = torch.tensor([[start, 21, 22, 23, 24], [0, 0, 0, start, 31]])
    whole = {**inputs, "decoder_attention_mask": torch.ones(2, 5, dtype=torch.long)}
    padded = {**inputs, "decoder_attention_mask": torch.tensor([[1] * 5, [0, 0, 0, 1, 1]])}
    calls = [padded, padded, whole] if is_padded_first else [whole, whole, padded, padded, whole]
    for call in calls:
        expected = generate(model, call, False)
        assert torch.equal(generate(model, call, True), expected)
    assert_recorded(model)


AUDIO = ["Speech2TextForConditionalGeneration", "SeamlessM4TForSpeechToText"]


@pytest.mark.parametrize("name", AUDIO)
def test_a_mask_of_the_encoder_inputs_may_hide_tokens_of_the_decoder(name: str) -> None:
    model = build(name)
    inputs = inputs_of(name)
    frames = inputs["attention_mask"].shape[1]
    for num_hidden in (0, 1, 2, frames // 2, 3 * frames // 4):
        mask = torch.ones_like(inputs["attention_mask"])
        mask[1, frames - num_hidden :] = 0
        call = {**inputs, "attention_mask": mask}
        expected = generate(model, call, False)
        assert torch.equal(generate(model, call, True), expected), num_hidden
    assert_recorded(model, NUM_TOKENS - 4)


@pytest.mark.parametrize("name", AUDIO)
def test_rows_with_other_masks_of_their_audio_join(name: str) -> None:
    model = build(name)
    inputs = inputs_of(name)
    del inputs["attention_mask"]
    frames = inputs["input_features"].shape[1]
    rows = []
    for row, num_visible in enumerate((frames, frames // 2, frames - 3, frames // 4)):
        audio = {key: x[row % 2][None] for key, x in inputs.items()}
        mask = (torch.arange(frames) < num_visible).long()[None]
        rows.append({**audio, "attention_mask": mask})
    limits = [30, 9, 21, 14, 26, 17]
    expected = []
    for number, limit in enumerate(limits):
        limit_options = {"max_new_tokens": limit, "min_new_tokens": limit}
        output = generate(model, rows[number % 4], False, **limit_options)
        expected.append(output[0, -limit:].tolist())
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        for number, limit in enumerate(limits):
            options = {**GREEDY, "max_new_tokens": limit}
            engine.add_request(rows[number % 4], options, request_id=str(number))
            engine.step()
        results = run_all(engine)
        assert [results[str(number)].token_ids for number in range(len(limits))] == expected
        assert engine.stats().num_captured_steps > 0 or not records_on_cpu()
        assert_drained(engine)


class LateBonus(transformers.T5ForConditionalGeneration):
    """Reads constants of a call: a number, and a switch whose effect comes late."""

    def forward(self, *args: Any, scale: float = 0.0, is_late: bool = False, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        cache = output.past_key_values if "past_key_values" in output else output.cache
        length = torch.as_tensor(cache.get_seq_length())
        ramp = torch.arange(output.logits.shape[-1]) / 10
        output.logits = output.logits + scale * ramp
        if is_late:
            output.logits = output.logits + ramp * (length > 15)
        return output


def test_a_replay_is_of_the_constants_that_it_was_recorded_with() -> None:
    base = build("T5ForConditionalGeneration")
    model = LateBonus(base.config).eval()
    model.load_state_dict(base.state_dict())
    model.generation_config = base.generation_config
    inputs = inputs_of("T5ForConditionalGeneration")
    tokens = set()
    for scale, is_late in ((0.0, False), (0.0, False), (0.5, False), (0.0, True), (-0.5, True)):
        options = {"scale": scale, "is_late": is_late}
        expected = generate(model, inputs, False, **options)
        assert torch.equal(generate(model, inputs, True, **options), expected), options
        tokens.add(tuple(expected.flatten().tolist()))
    assert len(tokens) > 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name",
    [
        "BloomForCausalLM",  # a bias of positions
        "FalconForCausalLM",  # one head of keys
        "GPTNeoXJapaneseForCausalLM",  # baddbmm
        "MptForCausalLM",  # a bias from the end of the keys
    ],
)
def test_attention_code_of_a_model_in_packed_steps_is_replayed(name: str, mode: str) -> None:
    model = build(name)
    lengths = {"max_new_tokens": 90, "min_new_tokens": 90}  # more than the first graph's tables
    for seed in range(2):
        inputs = inputs_of(name, seed)
        expected = generate(model, inputs, False, **MODES[mode], **lengths)
        assert torch.equal(generate(model, inputs, True, **MODES[mode], **lengths), expected), seed
        check_integrity(model)
    assert_recorded(model, 80)


@pytest.mark.parametrize("name", ["DogeForCausalLM", "GraniteSWAForCausalLM"])
def test_keys_through_a_window_are_read_until_it_is_full(name: str) -> None:
    model = build(name)
    lengths = {"max_new_tokens": 90, "min_new_tokens": 90}
    for seed in range(2):
        inputs = inputs_of(name, seed)
        expected = generate(model, inputs, False, **lengths)
        assert torch.equal(generate(model, inputs, True, **lengths), expected), seed


def test_lengths_beyond_a_size_of_the_model_are_not_replayed() -> None:
    """The model makes a longer table for them, which a recorded step would not read."""
    name = "M2M100ForConditionalGeneration"
    model = build(name)
    inputs = inputs_of(name)
    size = len(model.model.decoder.embed_positions.weights)
    lengths = {"max_new_tokens": size + 30, "min_new_tokens": size + 30}
    expected = generate(model, inputs, False, **lengths)
    model = tiny_model(transformers.M2M100ForConditionalGeneration)
    model.generation_config.eos_token_id = None
    for _ in range(2):
        assert torch.equal(generate(model, inputs, True, **lengths), expected)
    assert_recorded(model, 20)
