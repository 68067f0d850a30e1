"""Decode steps of rectangles, and of positions on axes, as replays."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.inkling.modeling_inkling import InklingRelativeLogits
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention

from hf_paged import PagedConfig, PagedEngine, Route, check_integrity, last_route
from hf_paged.attention.masks import MaskPattern, PagedMask
from hf_paged.rectangles.states import state_tensors
from hf_paged.step import KeysReadError
from hf_paged.tape import encoders, misses, rectangles, step_cache
from hf_paged.tape.static_states import StaticStates
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import make_inputs
from tests.support.checks import generate_both, plain_run
from tests.support.engine_helpers import assert_drained, assert_lone, run_all
from tests.support.forwards import build, fresh
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
    "ZayaForCausalLM",  # the same, through a window
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
    "LEDForConditionalGeneration",  # a single query gets no mask
    "FSMTForConditionalGeneration",  # nor here
    "XmodForCausalLM",  # selects rows by a mask of constants
]
INDEXED = "GlmMoeDsaForCausalLM"  # chooses 4 keys by indexer keys
CLASSES.append(INDEXED)
NUM_TOKENS = 24
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sample": {"do_sample": True, "num_beams": 1},
}


def as_subclass(new_class: Any, name: str) -> Any:
    """The model of this name with the code of a subclass of its own class."""
    stock = build(name)
    model = new_class(stock.config).eval()
    model.load_state_dict(stock.state_dict())
    model.generation_config = stock.generation_config
    return model


def inputs_of(name: str, seed: int = 1) -> dict[str, Any]:
    """Two rows, the second of which is padded."""
    return next(iter(make_inputs(build(name), seed).values()))


def exactly(num_tokens: int) -> dict[str, int]:
    return {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}


def assert_as_plain(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    times: int = 1,
    paged: dict[str, Any] = models.PAGED,
    **options: Any,
) -> torch.Tensor:
    """Asserts that paged calls give the tokens of the plain one, and returns those."""
    options = {**exactly(NUM_TOKENS), **options}
    for _ in range(times):
        expected, found = generate_both(model, inputs, options, paged, seed=5)
        assert torch.equal(found, expected), options
        check_integrity(model)
    return expected


def assert_requests_as_plain(
    model: PreTrainedModel,
    rows: list[dict[str, Any]],
    limits: list[int],
    num_blocks: int = 40,
    num_steps: int = 0,
) -> Any:
    """Asserts that requests of an engine which join, `num_steps` apart, and leave give
    the tokens of plain calls: of each row in turn, with each of these limits. Returns the engine's
    stats."""
    expected = []
    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=num_blocks)) as engine:
        for number, limit in enumerate(limits):
            row, options = rows[number % len(rows)], {**GREEDY, **exactly(limit)}
            expected.append(plain_run(model, row, options, seed=5)[0, -limit:].tolist())
            engine.add_request(row, options, request_id=str(number))
            for _ in range(num_steps):
                engine.step()
        results = run_all(engine)
        assert [results[str(number)].token_ids for number in range(len(limits))] == expected
        stats = engine.stats()
        assert stats.num_captured_steps > 0 or not records_on_cpu()
        assert_drained(engine)
    return stats


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


def assert_unrecorded(model: PreTrainedModel, reason: str) -> None:
    """The route says why."""
    if records_on_cpu():
        (slowed_by,) = route_of(model).slowed_by
        assert slowed_by.startswith(f"decode steps are not recorded: {reason}")
        assert slowed_by.endswith("[troubleshooting.md#recording]")


@pytest.mark.slow_cases(
    but=["*-greedy", "T5*-beams", "Qwen3Next*-beams", "GlmMoeDsa*-beams", "DiffLlama*-sample"]
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CLASSES)
def test_replays_give_the_tokens_of_plain(name: str, mode: str) -> None:
    for seed in range(3):  # other inputs, to the graphs of the first call
        assert_as_plain(build(name), inputs_of(name, seed), **MODES[mode])
    assert_recorded(build(name), NUM_TOKENS - 1)


@pytest.mark.slow_cases("T5*", "Mvp*")
@pytest.mark.parametrize(
    "name",
    [
        *CLASSES[:2],
        "MvpForConditionalGeneration",  # its own code reads keys
        "UdopForConditionalGeneration",  # the encoder's output is longer than the mask
        "T5Gemma2ForConditionalGeneration",  # one attention to encoder and decoder
    ],
)
def test_an_encoder_mask_hides_tokens_from_replays_too(name: str) -> None:
    """The first calls have no padding."""
    model, inputs = build(name), inputs_of(name)
    mask = inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    assert_as_plain(model, inputs, times=2)
    for first, end in ((0, 7), (0, 3), (2, 9), (9, 11)):
        if "pixel_values" in inputs and end < mask.shape[1]:
            end = mask.shape[1]  # tokens of a picture follow
        mask[1] = 0
        mask[1, first:end] = 1
        assert_as_plain(model, inputs, times=2)
        assert_recorded(model, NUM_TOKENS - 1)
    mask[0, 2] = 0  # a hole, which no range of blocks shows
    assert_as_plain(model, inputs)
    assert route_of(model).num_captured_steps == 0


def test_a_mask_of_the_samples_of_a_sound_is_an_input() -> None:
    """The model's own code computes which frames it hides."""
    name = "SpeechT5ForSpeechToText"
    model, inputs = build(name), inputs_of(name)
    for num_samples in (4000, 4000, 2000, 700):
        inputs["attention_mask"][1] = torch.arange(4000) < num_samples
        assert_as_plain(model, inputs)
    assert_recorded(model, NUM_TOKENS - 2)


def test_handles_are_not_read_with_a_mask_that_is_an_input() -> None:
    """Attention by block tables would ignore it."""
    arguments = {"batch_size": 1, "q_length": 1, "kv_length": 4}
    for is_causal, mask in ((False, torch.ones(1, 4)), (True, torch.ones(1, 4)), (False, None)):
        symbolic = PagedMask({**arguments, "attention_mask": mask}, "sdpa", MaskPattern(is_causal))
        is_refused = not is_causal and mask is not None
        with pytest.raises(KeysReadError) if is_refused else contextlib.nullcontext():
            encoders.refuse_masked_handles(symbolic)


@pytest.mark.slow_cases("Lfm2*", "FalconH1*", "Zaya*")
@pytest.mark.parametrize("name", [CLASSES[0], CLASSES[3], *HYBRIDS, INDEXED])
def test_requests_of_an_engine_join_and_leave(name: str) -> None:
    inputs, rows = inputs_of(name), []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"].bool()):
        rows.append({"input_ids": ids[None, mask]})
    assert_requests_as_plain(build(name), rows, [30, 9, 21, 14, 26, 17])


@pytest.mark.parametrize("name", ["RoFormerForCausalLM", INDEXED])
def test_padding_takes_more_columns_than_the_tables_of_its_rows(name: str) -> None:
    """As where the longest row has left; the model's code reads the keys of all columns."""
    inputs = {key: torch.nn.functional.pad(x, (30, 0)) for key, x in inputs_of(name).items()}
    assert_as_plain(build(name), inputs, **exactly(60))


@pytest.mark.slow_cases("FalconH1*", "Zaya*")
@pytest.mark.parametrize("name", [CLASSES[0], *HYBRIDS[2:], INDEXED])
def test_preempted_rows_go_on(name: str) -> None:
    rows = [{"input_ids": inputs_of(name)["input_ids"][:1]}]
    assert assert_requests_as_plain(build(name), rows, [60] * 4, num_blocks=24).num_preemptions


@pytest.mark.slow_cases("Lfm2*", "FalconH1*", "Zaya*")
@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_that_share_a_prefix_start_from_its_states(name: str) -> None:
    """The kept states are copies, which the replays of earlier rows do not change."""
    start = list(range(30, 62))
    prompts = [[*start, *range(70 + 5 * n, 73 + 4 * n)] for n in range(6)]
    options = {**GREEDY, "max_new_tokens": NUM_TOKENS}
    with PagedEngine(build(name), PagedConfig(block_size=8)) as engine:
        for batch in ([start], prompts, prompts[::-1], prompts):
            assert_lone(engine, batch, engine.generate(batch, options), options)
        assert engine.stats().num_captured_steps > 0 or not records_on_cpu()
        engine.check_integrity()


def states_of(seed: int) -> list[LinearAttentionLayer]:
    """A layer with the states of two rows."""
    generator, layer = torch.Generator().manual_seed(seed), LinearAttentionLayer()
    layer.update_conv_state(torch.randn(2, 3, 4, generator=generator))
    layer.update_recurrent_state(torch.randn(2, 5, generator=generator))
    return [layer]


def test_states_stay_in_the_buffers_until_other_rows_use_them() -> None:
    first, second = states_of(0), states_of(1)
    static = StaticStates(first, num_rows=3)
    for layers, step in ((first, 1), (first, 0), (second, -1)):
        static.move_in(layers)
        for buffer in static.buffers:
            buffer += step
        for x, buffer in zip(state_tensors(layers), static.buffers):
            assert x.data_ptr() == buffer.data_ptr()
    for seed, layers, step in ((0, first, 1), (1, second, -1)):
        for x, before in zip(state_tensors(layers), state_tensors(states_of(seed))):
            assert torch.equal(x, before + step)
    first[0].reorder_cache(torch.tensor([1, 0]))
    static.move_in(first)
    assert torch.equal(state_tensors(first)[0], state_tensors(states_of(0))[0][[1, 0]] + 1)
    del layers, second
    static.move_in(states_of(2))


def test_states_that_a_replay_does_not_compute_alike_are_not_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The logits of one step do not show all that a step changes."""
    original = step_cache.store_states

    def store(cache: Any, states: Any) -> None:
        original(cache, states)
        states[0].zero_()

    monkeypatch.setattr(rectangles, "store_states", store)
    model = fresh("Lfm2ForCausalLM")
    assert_as_plain(model, inputs_of("Lfm2ForCausalLM"), times=2)
    assert route_of(model).num_captured_steps == 0
    assert_unrecorded(model, "their results differ by ")


def test_other_weights_are_read_and_other_modules_recorded_again() -> None:
    model, inputs = fresh(CLASSES[0]), inputs_of(CLASSES[0])
    found = [assert_as_plain(model, inputs, times=2)]
    with torch.no_grad():
        model.decoder.block[0].layer[0].SelfAttention.q.weight.mul_(1.5)
    found.append(assert_as_plain(model, inputs))
    assert_recorded(model)
    layer = model.decoder.block[1].layer[-1].DenseReluDense
    layer.wo = torch.nn.Linear(layer.wo.in_features, layer.wo.out_features, bias=False)
    layer.wo.weight.data.normal_(0, 0.2)
    found.append(assert_as_plain(model, inputs, times=2))
    assert_recorded(model)
    assert len({str(x) for x in found}) == 3


def test_a_decoder_that_reads_its_encoder_is_not_recorded() -> None:
    """A forward that no recorded step may stand for: it reads the encoder's output each time."""
    model = fresh("BartForConditionalGeneration")
    decoder = model.model.decoder
    forward = type(decoder).forward

    def reads(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.last_hidden_state += kwargs["encoder_hidden_states"].mean(1, keepdim=True)
        return output

    decoder.__class__ = type("ReadingDecoder", (type(decoder),), {"forward": reads})
    assert_as_plain(model, inputs_of("BartForConditionalGeneration"), times=2)
    assert route_of(model).num_captured_steps == 0


class ReadsBoxes(transformers.UdopForConditionalGeneration):
    """Its decode steps read the content or the size of an input of its encoder, if `reads` says
    so."""

    reads = ""

    def forward(self, *args: Any, bbox: Any = None, visual_bbox: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, bbox=bbox, visual_bbox=visual_bbox, **kwargs)
        if visual_bbox is not None:
            output["boxes"] = visual_bbox
        if self.reads:
            ramp = torch.arange(output.logits.shape[-1]) / 10
            number = bbox.shape[1] if self.reads == "size" else bbox.float().mean()
            output.logits = output.logits + ramp * number
        return output


@pytest.mark.parametrize("reads", ["content", "size"])
def test_steps_are_replayed_unless_they_read_an_input_of_the_encoder(reads: str) -> None:
    name = "UdopForConditionalGeneration"
    model = as_subclass(ReadsBoxes, name)
    inputs = {key: value[:1] for key, value in inputs_of(name).items()}
    passed_on = {"visual_bbox": torch.rand(1, 4, 4)}
    for optional in (passed_on, passed_on, {}, {}):
        assert_as_plain(model, inputs | optional)
        assert_recorded(model)
    model.reads = reads
    for boxes in (inputs["bbox"], inputs["bbox"] * 0):
        assert_as_plain(model, inputs | {"bbox": boxes})
    assert route_of(model).num_captured_steps == 0


@pytest.mark.slow_cases(but=["Qwen2_5*-greedy", "Qwen3_5*-greedy", "Qwen3VL*-greedy"])
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
            assert_as_plain(model, make_inputs(model, seed)[medium], **MODES[mode])
        # the second call's first step has shorter rows than those of the first call's replays
        assert_recorded(model, NUM_TOKENS - 2)


@pytest.mark.parametrize(
    "name", ["HYV4VLForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration"]
)
def test_a_tensor_that_each_call_replaces_and_no_step_reads(name: str) -> None:
    """`rope_deltas`, from which `generate` makes the positions of a call's steps."""
    model = fresh(name)
    for seed in range(3):
        assert_as_plain(model, make_inputs(model, seed)["image"], **GREEDY)
    assert_recorded(model, NUM_TOKENS - 2)


@pytest.mark.parametrize("name", [CLASSES[0], CLASSES[3]])
def test_requests_with_adapters_do_not_get_another_ones_replay(name: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    targets = ["q", "v"] if name == CLASSES[0] else ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(fresh(name), config, adapter_name="first")
    model.add_adapter("second", config)
    model.eval()
    inputs, expected = {"input_ids": inputs_of(name)["input_ids"][:1]}, {}
    for adapter in ("first", "second", "__base__"):
        is_base = adapter == "__base__"
        model.set_adapter("first" if is_base else adapter)
        with model.disable_adapter() if is_base else contextlib.nullcontext():
            expected[adapter] = assert_as_plain(model, inputs)[0, -NUM_TOKENS:].tolist()
    assert len({*map(tuple, expected.values())}) == 3
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        options = {**GREEDY, "max_new_tokens": NUM_TOKENS}
        for _ in range(2):
            names = ("__base__", "first", "second", "first", "__base__")
            added = {engine.add_request(inputs, options, adapter=name): name for name in names}
            for request, result in run_all(engine).items():
                assert result.token_ids == expected[added[request]]


@pytest.mark.parametrize("is_padded_first", [False, True])
def test_a_padded_decoder_prompt_gets_the_bias_of_its_own_positions(is_padded_first: bool) -> None:
    model, inputs = build(CLASSES[0]), inputs_of(CLASSES[0])
    start = model.generation_config.decoder_start_token_id
    inputs["decoder_input_ids"] = torch.tensor([[start, 21, 22, 23, 24], [0, 0, 0, start, 31]])
    whole = {**inputs, "decoder_attention_mask": torch.ones(2, 5, dtype=torch.long)}
    padded = {**inputs, "decoder_attention_mask": torch.tensor([[1] * 5, [0, 0, 0, 1, 1]])}
    for call in (padded, whole) if is_padded_first else (whole, padded, whole):
        assert_as_plain(model, call, times=2)
    assert_recorded(model)


AUDIO = ["Speech2TextForConditionalGeneration", "SeamlessM4TForSpeechToText"]


@pytest.mark.parametrize("name", AUDIO)
def test_a_mask_of_the_encoder_inputs_may_hide_tokens_of_the_decoder(name: str) -> None:
    """In one batch, and in requests that join."""
    model, inputs = build(name), inputs_of(name)
    mask = inputs.pop("attention_mask")
    frames = inputs["input_features"].shape[1]
    for num_hidden in (0, 1, 2, frames // 2, 3 * frames // 4):
        mask[:] = 1
        mask[1, mask.shape[1] - num_hidden :] = 0
        assert_as_plain(model, {**inputs, "attention_mask": mask})
    assert_recorded(model, NUM_TOKENS - 4)
    rows = []
    for row, num_visible in enumerate((frames, frames // 2, frames - 3, frames // 4)):
        audio = {key: x[row % 2][None] for key, x in inputs.items()}
        rows.append({**audio, "attention_mask": (torch.arange(frames) < num_visible).long()[None]})
    assert_requests_as_plain(model, rows, [30, 9, 21, 14, 26, 17], num_steps=1, num_blocks=200)


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
    model, inputs = as_subclass(LateBonus, CLASSES[0]), inputs_of(CLASSES[0])
    tokens = set()
    for scale, is_late in ((0.0, False), (0.0, False), (0.5, False), (0.0, True), (-0.5, True)):
        tokens.add(str(assert_as_plain(model, inputs, scale=scale, is_late=is_late)))
    assert len(tokens) > 2


# their code reads keys through a window, whose first blocks are freed meanwhile
READ_THROUGH_WINDOWS = ("DogeForCausalLM", "GraniteSWAForCausalLM", "Inkling2ForCausalLM")
# their own code makes masks of numbers
DENSE_MASKS = ("Gemma4UnifiedForConditionalGeneration", "Kosmos2ForConditionalGeneration")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *itertools.product(
            (
                "BloomForCausalLM",  # a bias of positions
                "FalconForCausalLM",  # one head of keys
                "GPTNeoXJapaneseForCausalLM",  # baddbmm
                "MptForCausalLM",  # a bias from the end of the keys
                "GPTNeoForCausalLM",  # slices a mask by the number of keys
            ),
            MODES,
        ),
        *((name, "greedy") for name in READ_THROUGH_WINDOWS),
        *itertools.product(DENSE_MASKS, ("greedy", "beams")),
    ],
)
def test_attention_code_of_a_model_is_replayed(name: str, mode: str) -> None:
    for seed in range(2):  # more tokens than the first graph's tables
        assert_as_plain(build(name), inputs_of(name, seed), **MODES[mode], **exactly(90))
    assert_recorded(build(name), 80)


@pytest.mark.parametrize("is_long", [False, True])
def test_keys_of_a_short_window_are_read_without_those_before_it(
    is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded forward that reads keys reads those of all columns: of as many as a step's tables
    have at least, but otherwise only of twice as many as the window's blocks hold."""
    model = fresh("GraniteSWAForCausalLM")
    if is_long:
        monkeypatch.setattr(rectangles, "MIN_TABLE_TOKENS", 32)
    for seed in range(2):
        assert_as_plain(model, inputs_of("GraniteSWAForCausalLM", seed), **GREEDY, **exactly(90))
    if records_on_cpu():
        assert (route_of(model).num_captured_steps < 60) == is_long


def test_lengths_beyond_a_size_of_the_model_are_not_replayed() -> None:
    """The model makes a longer table for them, which a recorded step would not read."""
    name = "M2M100ForConditionalGeneration"
    model, inputs = fresh(name), inputs_of(name)
    lengths = exactly(len(model.model.decoder.embed_positions.weights) + 30)
    expected = plain_run(build(name), inputs, lengths, seed=5)
    for is_longer in (False, True):
        torch.manual_seed(5)
        assert torch.equal(model.generate(**inputs, **lengths, **models.PAGED), expected)
        told = "compares the number of tokens with a size" in str(route_of(model).slowed_by)
        assert told == (records_on_cpu() and not is_longer)
    assert_recorded(model, 20)


# Models whose code depends on the number of columns that it gets, or on values of masks: a replay
# gives plain's tokens, or there is none.

FACTOR = 3.0


def assert_same_samples(model: PreTrainedModel, inputs: dict[str, Any], num_tokens: int) -> None:
    """Compares samples, which a small difference of logits changes, with plain's. Code that changes
    with the number of keys would give prefixes other keys and values, too."""
    paged = {**models.PAGED, "cache_config": {"block_size": 8, "prefix_caching": False}}
    assert_as_plain(model, inputs, paged=paged, do_sample=True, **exactly(num_tokens))


@pytest.mark.slow_cases("40")
@pytest.mark.parametrize("window", [40, 100])  # within the first graph's tables, and the second's
def test_a_window_of_the_models_own_code(window: int) -> None:
    """GPT-Neo takes the window from the end of the keys that it gets."""
    sizes = {"window_size": window, "max_position_embeddings": 300}
    model = tiny_model(transformers.GPTNeoForCausalLM, **sizes)
    assert "local" in model.config.attention_layers
    ids = torch.randint(5, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    inputs = models.left_padded([ids[0].tolist(), ids[1, 5:].tolist()])
    for num_tokens in (20, 20, 140, 140, 20):
        assert_same_samples(model, inputs, num_tokens)


class LongerRoFormer(RoFormerSelfAttention):
    least: int

    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        output, *others = super().forward(hidden_states, attention_mask, **kwargs)
        num_keys = 0 if attention_mask is None else attention_mask.shape[-1]
        return (output * (FACTOR if num_keys > self.least else 1.0), *others)


class LongerBloom(BloomAttention):
    least: int

    def forward(self, hidden_states: Any, residual: Any, alibi: Any, *args: Any, **kw: Any) -> Any:
        output, *others = super().forward(hidden_states, residual, alibi, *args, **kw)
        return (output * (FACTOR if alibi.shape[-1] > self.least else 1.0), *others)


@pytest.mark.slow_cases("*-False")
@pytest.mark.parametrize("is_short_first", [False, True])
@pytest.mark.parametrize(
    ("name", "least"),
    [("BloomForCausalLM", 50), ("BloomForCausalLM", 90), ("RoFormerForCausalLM", 90)],
)
def test_code_that_changes_with_the_number_of_keys(
    name: str, least: int, is_short_first: bool
) -> None:
    """In a packed step and a rectangle, within the first graph's tables and the second's."""
    model = fresh(name)
    new_class: Any = LongerBloom if name.startswith("Bloom") else LongerRoFormer
    for module in model.modules():
        if type(module) in new_class.__mro__[1:2]:
            module.__class__ = new_class
            module.least = least
    rows = torch.randint(5, 100, (2, 60), generator=torch.Generator().manual_seed(0)).tolist()
    lengths = [(60, 50), (60, 50), (10, 50), (10, 90)]
    for width, num_tokens in sorted(lengths) if is_short_first else lengths:
        inputs = models.left_padded([rows[0][:width], rows[1][3:width]])
        assert_same_samples(model, inputs, num_tokens)
        assert route_of(model).road == "engine"


class SoftBart(transformers.BartForConditionalGeneration):
    """Takes weights of its encoder's tokens in place of a mask."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            attention_mask = torch.log(attention_mask.float())[:, None, None, :]
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


def test_a_bias_of_the_encoders_columns_is_not_lost() -> None:
    """Arguments that a subclass passes on are those of its base: BART's decoder counts the cache's
    tokens unless it gets a mask."""
    name = "BartForConditionalGeneration"
    model, inputs = as_subclass(SoftBart, name), inputs_of(name)
    weights = torch.ones(inputs["attention_mask"].shape)
    for number, weight in enumerate((1.0, 1.0, 0.3, 0.05, 0.001)):
        weights[:, ::2] = weight
        assert_same_samples(model, {**inputs, "attention_mask": weights.clone()}, 24)
        if number == 1:
            assert_recorded(model, 20)


class OwnUpdate(transformers.BertLMHeadModel):
    """Overrides the update of a step's inputs, as classes of transformers do."""

    reads_outputs = False

    def _update_model_kwargs_for_generation(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        updated = super()._update_model_kwargs_for_generation(outputs, *args, **kwargs)
        if self.reads_outputs:
            updated["last"] = outputs.logits[:, -1].argmax(-1)
        return updated

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        last = kwargs.pop("last", None)
        prepared = super().prepare_inputs_for_generation(*args, **kwargs)
        if last is not None:
            prepared["input_ids"] = (prepared["input_ids"] + last[:, None]) % 150
        return prepared


class LateWeight(transformers.BertLMHeadModel):
    """Replaces a weight in one step, for which it prepares another constant."""

    def prepare_inputs_for_generation(
        self, input_ids: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        kwargs["attention_mask"] = attention_mask
        prepared = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**prepared, "replaces": input_ids.shape[1] == 20}

    def forward(self, *args: Any, replaces: bool = False, **kwargs: Any) -> Any:
        if replaces:
            head = self.cls.predictions.transform.dense
            head.weight = torch.nn.Parameter(-head.weight.data)
        return super().forward(*args, **kwargs)


class LateNumber(transformers.BertLMHeadModel):
    """Its forward reads a number that its code changes as it prepares a step."""

    sign = 1.0

    def prepare_inputs_for_generation(
        self, input_ids: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        self.sign = -1.0 if input_ids.shape[1] >= 20 else 1.0
        kwargs["attention_mask"] = attention_mask
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.sign
        return output


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (LateWeight, "its modules or tensors were replaced"),
        (LateNumber, "its own `prepare_inputs_for_generation` changes a value"),
    ],
)
def test_code_of_a_step_that_changes_the_model_ends_the_replays(kind: Any, reason: str) -> None:
    """Among replays, one step runs the model, since no recorded step has its constant; or its
    prepared number."""
    inputs, tokens = inputs_of("BertLMHeadModel"), []
    for options in ({}, models.PAGED):
        model = as_subclass(kind, "BertLMHeadModel")
        tokens.append(model.generate(**inputs, **GREEDY, **exactly(NUM_TOKENS), **options))
    assert torch.equal(*tokens)
    assert_recorded(model)
    assert_unrecorded(model, reason)


def without_first(mask: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(mask[:, :4]), mask[:, 4:]], 1)


# a class, and what its own code prepares in later steps
LATE_INPUTS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "token": ("BertLMHeadModel", lambda x: {"input_ids": torch.full_like(x["input_ids"], 7)}),
    "encoder mask": (CLASSES[1], lambda x: {"attention_mask": without_first(x["attention_mask"])}),
}


@pytest.mark.parametrize("name", LATE_INPUTS)
def test_replays_get_what_the_models_own_code_prepares(name: str) -> None:
    class_name, change = LATE_INPUTS[name]
    model = fresh(class_name)
    base: Any = type(model)

    def prepare(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        prepared = base.prepare_inputs_for_generation(self, input_ids, **kwargs)
        return {**prepared, **change(prepared)} if input_ids.shape[1] > 16 else prepared

    model.__class__ = type("Late", (base,), {"prepare_inputs_for_generation": prepare})
    assert_as_plain(model, inputs_of(class_name), times=2)
    assert_recorded(model)


def code_of_transformers(function: Any) -> Any:
    namespace = {**function.__globals__, "__name__": "transformers.models.bert.modeling_bert"}
    copied = types.FunctionType(function.__code__, namespace, closure=function.__closure__)
    return functools.update_wrapper(copied, function)


@pytest.mark.parametrize("is_of_transformers", [True, False])
@pytest.mark.parametrize("reads_outputs", [False, True])
def test_an_update_of_the_models_own_is_replayed_unless_it_reads_outputs(
    is_of_transformers: bool, reads_outputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method of a user may do more than return inputs, so it sees each forward."""
    update = OwnUpdate._update_model_kwargs_for_generation
    if is_of_transformers:
        update = code_of_transformers(update)
    else:  # a wrapper of a user has the module of what it wraps
        monkeypatch.setattr(update, "__module__", "transformers.models.bert.modeling_bert")
    monkeypatch.setattr(OwnUpdate, "_update_model_kwargs_for_generation", update)
    model = as_subclass(OwnUpdate, "BertLMHeadModel")
    model.reads_outputs = reads_outputs
    for seed in range(3):
        assert_as_plain(model, inputs_of("BertLMHeadModel", seed))
    may_replay = is_of_transformers and not reads_outputs
    assert (route_of(model).num_captured_steps > 0) == (may_replay and records_on_cpu())
    method = "`_update_model_kwargs_for_generation`"
    if not is_of_transformers:
        assert_unrecorded(model, f"it overrides {method}")
    elif reads_outputs:
        assert_unrecorded(model, "")  # results differ, as they depend on the outputs
    else:
        assert not route_of(model).slowed_by


def test_token_types_of_new_tokens_are_constants_of_a_replay() -> None:
    name = "PaliGemmaForConditionalGeneration"  # its new tokens have the type 1
    for seed in range(3):
        assert_as_plain(build(name), inputs_of(name, seed))
    if not models.BEFORE_5_24:
        assert_recorded(build(name), 10)


# a cross-attention cache that the model makes; features and their mask, of which the model's own
# update reads the former from outputs
MEDIA = ("BlipForConditionalGeneration", "IdeficsForVisionText2Text")


@pytest.mark.parametrize("name", MEDIA)
def test_tensors_of_media_are_read_by_replays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end at different lengths, so that others go on with their part of the tensors."""
    monkeypatch.setattr(misses, "MIN_FIXED_MISSES", misses.MIN_MISSES)
    model = fresh(name)
    # one row alone, whose mask is a single number
    assert_as_plain(model, {key: x[:1] for key, x in inputs_of(name).items()}, **GREEDY)
    assert_recorded(model, 15)
    for seed in range(2):
        inputs = inputs_of(name, seed)
        tokens = assert_as_plain(model, inputs, **GREEDY)
        assert_recorded(model, 15)
        ended: dict[str, Any] = {
            "eos_token_id": int(tokens[0, -NUM_TOKENS // 2]),
            "min_new_tokens": None,
        }
        if hasattr(model, "text_decoder"):  # its own `generate` takes the token from the config
            model.config.text_config.sep_token_id = ended.pop("eos_token_id")
        assert_as_plain(model, inputs, **GREEDY, **ended)


@pytest.mark.parametrize("name", [INDEXED, "HYV4ForCausalLM"])  # the latter's mask is of floats
def test_replays_choose_among_equal_scores_as_plain_does(name: str) -> None:
    """Later rows also have fewer tokens than the model chooses."""
    model = fresh(name)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.wq_b.weight.zero_()  # all scores are 0
    for prompt_length in (9, 9, 2, 1):
        generator = torch.Generator().manual_seed(prompt_length)
        ids = torch.randint(5, 100, (2, prompt_length), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert_as_plain(model, inputs, **exactly(80))  # the tables of a graph have 64 tokens
        assert_recorded(model, 60)


@pytest.mark.slow_cases(but=["*-greedy", "Qwen4ExpForCausalLM-beams"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name",
    [
        "Glm5NextForConditionalGeneration",  # drops pools of keys that are not full
        "Qwen4ExpForCausalLM",  # groups the keys that a mask shows, with their positions
        "Qwen4ExpForConditionalGeneration",  # the positions of images have several axes
    ],
)
@pytest.mark.skipif(models.BEFORE_5_24, reason="this transformers lacks the classes")
def test_indexers_that_read_content_are_live(name: str, mode: str) -> None:
    for seed in range(2):  # more tokens than the first graph's tables
        assert_as_plain(build(name), inputs_of(name, seed), **MODES[mode], **exactly(90))
    assert_recorded(build(name), 80)
    assert_as_plain(build(name), inputs_of(name, 3), **MODES[mode], **exactly(4))


class WindowLogits(InklingRelativeLogits):
    """Counts keys from the window's first."""

    def forward(self, states: Any, query_positions: Any, key_positions: Any) -> Any:
        return super().forward(states, query_positions, key_positions - key_positions[0])


@pytest.mark.parametrize("ignores_first", [False, True])
def test_a_bias_of_keys_through_a_window(ignores_first: bool) -> None:
    """The recorded step has the keys of the window's blocks, and the model's own fewer."""
    model = fresh("InklingForCausalLM")
    model.config.sliding_window_size = 40
    for module in model.modules():
        if getattr(module, "is_sliding", False):
            module.sliding_window = 40
        if ignores_first and type(module) is InklingRelativeLogits:
            module.__class__ = WindowLogits
            module.rel_extent = 200
            weights = torch.randn(len(module.proj), 200, generator=torch.Generator().manual_seed(0))
            module.proj = torch.nn.Parameter(weights)
    for seed in range(2):
        ids = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(seed))
        assert_as_plain(model, {"input_ids": ids}, **GREEDY, **exactly(90))
    if not ignores_first:
        assert_recorded(model, 80)
