"""Prompts beyond token ids: images, embeddings, explicit positions."""

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
from hf_paged.batching.execution.prompt_inputs import _digest
from hf_paged.batching.execution.prompts import Prompts, prompts_of
from hf_paged.cache.block_manager import BlockManager
from hf_paged.kernels import cpp
from hf_paged.kernels.hashing import hash_tensors
from hf_paged.model.layout import PromptsVerdict
from tests.kernels.test_hashing import scramble
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


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}, {}]
)
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
    assert (
        prompts.paddings == (inputs["attention_mask"] == 0).sum(-1).tolist()
        and prompts.length == LENGTH
    )
    assert vars(model.generation_config) == before
    assert model.generate(**inputs, max_new_tokens=5).shape == (2, LENGTH + 5)  # as ever behind it


def test_a_captured_call_raises_as_generate() -> None:
    model = models.get("llama")
    with pytest.raises(ValueError, match="max_new_tokens"):
        captured_call(model, **text(model), max_new_tokens=0)


def test_forwards_of_whole_prompts_count_as_the_models_own() -> None:
    model = tiny_model(transformers.LlavaForConditionalGeneration)
    inputs = dict(media_inputs(model)["image"])
    with hf_paged.PagedEngine(model) as engine:
        row = {name: x[:1] for name, x in inputs.items()}
        engine.add_request(row.pop("input_ids"), {"max_new_tokens": 2}, inputs=row)
        engine.step()
        executor = engine._core.loop.executor
        assert executor.runner.num_forwards == 1  # so that its writes are accepted as its own


LLAVA, QWEN, GEMMA = (f"{name}ForConditionalGeneration" for name in ("Llava", "Qwen2VL", "Gemma3"))
# models whose own forward may begin behind cached text; older ones of Gemma3 get no
# `token_type_ids` then
BEHIND_TEXT = [LLAVA, QWEN] if models.BEFORE_5_24 else [LLAVA, QWEN, GEMMA]
MODES = [
    {},
    {"do_sample": True, "num_return_sequences": 2},
    {"num_beams": 3, "num_return_sequences": 2},
]


@functools.cache
def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return tiny_model(
        getattr(transformers, name), **({"sliding_window": 64} if name == GEMMA else {})
    )


def pictures(name: str, seed: int = 1) -> dict[str, Any]:
    """Two rows with different pictures, left-padded, for `generate`."""
    torch.manual_seed(seed)
    return dict(media_inputs(model_of(name))["image"])


def with_question(inputs: dict[str, Any], seed: int = 1) -> dict[str, Any]:
    """The same with 13 tokens of text after it."""
    torch.manual_seed(seed)
    rows, length = inputs["input_ids"].shape
    behind = {
        "input_ids": torch.randint(5, 100, (rows, 13)),
        "attention_mask": torch.ones(rows, 13, dtype=torch.long),
    }
    longer = {
        name: torch.cat([x, behind.get(name, torch.zeros(rows, 13, dtype=x.dtype))], 1)
        for name, x in inputs.items()
        if x.shape == (rows, length)
    }
    return {**inputs, **longer}


def other_pictures(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "pixel_values": inputs["pixel_values"].flip(-1) * 2 - 0.5}


def same(
    model: Any,
    inputs: dict[str, Any],
    options: dict[str, Any],
    config: dict[str, Any] | None = None,
) -> Any:
    """Asserts that plain and paged `generate` agree; returns the route of the paged call."""
    outputs = []
    for paged in (
        {},
        {"cache_implementation": "paged", "cache_config": {"block_size": 8, **(config or {})}},
    ):
        torch.manual_seed(3)
        outputs.append(
            model.generate(
                **inputs, **{"max_new_tokens": 13, "do_sample": False, **options}, **paged
            )
        )
    assert torch.equal(*outputs)
    hf_paged.check_integrity(model)
    return hf_paged.last_route(model)


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the tokens that each prefix cache look-up found."""
    found, match = list[int](), BlockManager.match

    def watched(*args: Any, **kwargs: Any) -> int:
        found.append(match(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(BlockManager, "match", watched)
    return found


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the rows stored by each prefill forward."""
    found, forward = list[int](), Prompts.forward

    def watched(self: Prompts, model: Any, cache: Any, rows: dict[int, Any], *args: Any) -> Any:
        found.append(len(rows))
        return forward(self, model, cache, rows, *args)

    monkeypatch.setattr(Prompts, "forward", watched)
    return found


@pytest.mark.parametrize("options", MODES, ids=["greedy", "sampled", "beams"])
@pytest.mark.parametrize("name", [LLAVA, QWEN, GEMMA])
def test_pictures_are_computed_by_the_model_and_decoded_packed(
    name: str, options: dict[str, Any], device: torch.device
) -> None:
    route = same(models.put(model_of(name), device), models.put(pictures(name), device), options)
    assert route.road == "engine" and route.reason.startswith("packed")


@pytest.mark.slow
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
    assert (
        torch.equal(plain.sequences, paged.sequences)
        and hf_paged.last_route(model).road == "engine"
    )
    assert plain.past_key_values.get_seq_length() == paged.past_key_values.get_seq_length()
    keys, shown = plain.past_key_values.layers[0].keys, paged.past_key_values.layers[0].keys.dense()
    torch.testing.assert_close(shown[0], keys[0])


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [GEMMA, "PaliGemmaForConditionalGeneration"])
def test_tokens_that_see_later_ones_are_not_served_to_other_prompts(
    name: str, hits: list[int]
) -> None:
    model, inputs, options = model_of(name), with_question(pictures(name)), {"max_new_tokens": 60}
    hf_paged.free(model)
    same(model, inputs, options)
    same(model, with_question(inputs), options)
    same(model, with_question(pictures(name), seed=2), options)
    same(model, other_pictures(inputs), options)
    same(model, text(model), options)
    assert any(hits) == (name == GEMMA)  # there the question does not see later tokens


@pytest.mark.slow
def test_no_block_gets_a_name_that_hides_what_its_tokens_saw(
    hits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, options = model_of(GEMMA), with_question(pictures(GEMMA)), {"max_new_tokens": 60}
    hf_paged.free(model)
    monkeypatch.setattr(
        Prompts, "content", lambda self, config: torch.zeros_like(self.input_ids, dtype=torch.bool)
    )
    monkeypatch.setattr(
        "hf_paged.model.capability.Capability.check_prompts",
        lambda *args: PromptsVerdict(None, True),
    )
    for _ in range(2):
        same(model, inputs, options)
        same(model, other_pictures(inputs), options)
    assert hits and not any(hits)


def colliding_pictures(picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two float32 pictures that the fingerprint's hash (`hash.cpp`) does not tell apart, made with
    its public keys: in each block of 4 KiB two words are such that the first sum does not depend on
    their partners, which are then chosen for equal second sums."""
    # numbers of pairs of words for which all four pixels are between -50 and 50
    first, second = 219, 395
    keys = [scramble((number + 1) * 0x9E3779B97F4A7C15 % 2**64) for number in range(513)]
    low, high = [key % 2**32 for key in keys], [key >> 32 for key in keys]
    factors = {pair: (high[pair + 1] - high[pair]) % 2**32 for pair in (first, second)}
    contents = []
    for chosen, other in ((first, second), (second, first)):
        words = picture.flatten().clone().view(torch.int32)
        for block in range(0, len(words), 1024):
            for pair, factor in ((chosen, factors[other]), (other, 0)):
                at = block + pair // 32 * 64 + pair % 32
                for place, word in ((at, factor - low[pair + 1]), (at + 32, -high[pair])):
                    words[place] = (word + 2**31) % 2**32 - 2**31
        contents.append(words.view(torch.float32).view_as(picture))
    return contents[0], contents[1]


def turned_pictures(picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A square picture and its mirror image in the same memory."""
    return picture, picture.mT


@pytest.mark.parametrize("make", [colliding_pictures, turned_pictures])
def test_a_picture_with_the_hash_of_another_is_not_served_in_its_place(make: Any) -> None:
    model = model_of(LLAVA)
    inputs = of_row(with_question(pictures(LLAVA)), 0, LLAVA)
    crafted, honest = make(inputs["pixel_values"])
    assert not torch.equal(crafted, honest)
    if cpp.is_available():
        assert hash_tensors([crafted]) == hash_tensors([honest])
    options = {"max_new_tokens": 12, "do_sample": False}
    calls = [{**inputs, "pixel_values": pixels} for pixels in (crafted, honest)]
    length = inputs["input_ids"].shape[1]
    expected = [model.generate(**call, **options)[0, length:].tolist() for call in calls]
    assert expected[0] != expected[1]
    with hf_paged.PagedEngine(model, {"block_size": 8}) as engine:
        results = [engine.generate([call], options)[0] for call in (*calls, *calls)]
        assert [result.token_ids for result in results] == expected * 2
        hits = [result.num_prefix_hit_tokens for result in results]
        assert not any(hits[:2]) and all(hits[2:])


def test_inputs_of_other_names_kinds_and_shapes_have_other_digests() -> None:
    zeros, halves = torch.zeros(2, 3), torch.zeros(2, 6, dtype=torch.float16)
    different = [
        {"x": zeros},
        {"y": zeros},
        {"x": zeros.view(3, 2)},
        {"x": zeros.view(torch.int32)},
        {"x": halves},
        {"x": halves.view(2, 3, 2)},
        {"x": zeros[:1], "y": zeros[:1]},
        {"x": [zeros[0], zeros[1]]},
        {"x": [zeros[0], [zeros[1]]]},
        {"x": {0: zeros}},
        {"x": {"0": zeros}},
        {"x": ("tensor", "torch.float32", (2, 3))},
        {"x": zeros - 0.0, "y": None},
        {"x": -zeros},
        {"x": torch.arange(4).view(2, 2)},
        {"x": torch.arange(4).view(2, 2).T},
        {"x": zeros[:0]},
        {"x": 0},
        {"x": 0.0},
        {"x": False},
        {"x": "0"},
    ]
    assert len({_digest(value) for value in different}) == len(different)
    turned = torch.arange(6).view(2, 3).T
    assert _digest({"x": turned}) == _digest({"x": turned.contiguous()})
    complex_numbers = torch.randn(3, dtype=torch.complex64)
    assert _digest(complex_numbers.conj()) == _digest(complex_numbers.conj().resolve_conj())
    # its scale is not in its bytes
    quantized = torch.quantize_per_tensor(torch.zeros(1), 0.1, 0, torch.qint8)
    for value in (zeros.to_sparse(), quantized, object(), torch.zeros(1).numpy()):
        with pytest.raises(TypeError, match="cannot hash a model input"):
            _digest({"x": value})


@pytest.mark.slow
def test_rows_whose_decode_steps_need_more_are_not_packed() -> None:
    model = model_of("Kosmos2ForConditionalGeneration")
    route = same(model, pictures("Kosmos2ForConditionalGeneration"), {})
    assert (
        route.road == "engine"
        and "image_embeds" in route.reason
        and not route.reason.startswith("packed")
    )


@pytest.mark.slow
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
        found[place] = model.generate(
            **calls[place], max_new_tokens=30, do_sample=False, **models.PAGED
        )

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


def of_row(inputs: dict[str, Any], row: int, name: str) -> dict[str, Any]:
    """One of two prompts, as a processor returns it."""
    keep = inputs["attention_mask"][row] != 0
    found = {
        key: x[row : row + 1, keep]
        for key, x in inputs.items()
        if x.shape == inputs["attention_mask"].shape
    }
    rest = {key: x for key, x in inputs.items() if key not in found}
    if "image_grid_thw" in rest:
        sizes = rest["image_grid_thw"].prod(-1).tolist()
        rest = {
            "image_grid_thw": rest["image_grid_thw"][row : row + 1],
            "pixel_values": rest["pixel_values"].split(sizes)[row],
        }
    else:
        rest = {key: x[row : row + 1] for key, x in rest.items()}
    return {**found, **rest}


@pytest.mark.slow_cases(but=["LlavaForConditionalGeneration"])
@pytest.mark.parametrize("name", [LLAVA, QWEN, GEMMA])
def test_an_engine_takes_what_a_processor_gives(name: str) -> None:
    model, inputs = model_of(name), with_question(pictures(name))
    rows = [of_row(inputs, row, name) for row in range(2)]
    others = [of_row(other_pictures(inputs), row, name) for row in range(2)]
    words = [7, 8, 9, 10, 11]
    options = {"max_new_tokens": 12, "do_sample": False}
    calls = [*rows, *others, {"input_ids": torch.tensor([words])}]
    expected = [
        model.generate(**call, **options)[0, call["input_ids"].shape[1] :].tolist()
        for call in calls
    ]
    with hf_paged.PagedEngine(model, {"block_size": 8}) as engine:
        assert [r.token_ids for r in engine.generate([*rows, *others, words], options)] == expected
        assert engine.route.road == "engine" and engine.route.reason.startswith("packed")
        before = engine.stats().num_prefix_hit_tokens
        again = engine.generate([*rows, words], options)
        assert [r.token_ids for r in again] == [*expected[:2], expected[4]]
        assert engine.stats().num_prefix_hit_tokens > before and all(
            r.num_prefix_hit_tokens for r in again[:2]
        )
        engine.check_integrity()
        given = {key: x for key, x in rows[0].items() if key not in ("input_ids", "attention_mask")}
        beams = {"num_beams": 2, **options}
        names = [
            engine.add_request(rows[0]["input_ids"], options, inputs=given),
            engine.add_request(rows[1], beams),
            engine.add_request(
                rows[1], {**options, "do_sample": True, "num_return_sequences": 2}, seed=5
            ),
            engine.add_request(words, options),
        ]
        found: dict[str, Any] = {}
        while engine.has_unfinished:
            found.update(
                {output.request_id: output.result for output in engine.step() if output.finished}
            )
        assert found[names[0]].token_ids == expected[0] and found[names[3]].token_ids == expected[4]
        length = rows[1]["input_ids"].shape[1]
        assert found[names[1]].token_ids == model.generate(**rows[1], **beams)[0, length:].tolist()
        torch.manual_seed(5)
        samples = model.generate(
            **rows[1], max_new_tokens=12, do_sample=True, num_return_sequences=2
        )[:, length:]
        assert [each.token_ids for each in found[names[2]].sequences] == samples.tolist()
        engine.check_integrity()


@pytest.mark.slow
def test_an_engine_recomputes_pictures_and_isolates_those_that_fail() -> None:
    model, inputs = model_of(QWEN), pictures(QWEN)
    rows = [of_row(inputs, row, QWEN) for row in range(2)] * 2
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = [
        model.generate(**call, **options)[0, call["input_ids"].shape[1] :].tolist() for call in rows
    ]
    config = {"block_size": 8, "num_blocks": 9, "preemption": "recompute", "prefix_caching": False}
    with hf_paged.PagedEngine(model, config) as engine:
        results = engine.generate(rows, options)
        assert [r.token_ids for r in results] == expected and sum(
            r.num_preemptions for r in results
        )
        wrong = {
            **rows[0],
            "input_ids": torch.where(rows[0]["input_ids"] == 159, 7, rows[0]["input_ids"]),
        }
        results = engine.generate([rows[0], wrong, rows[1]], options)
        assert [r.token_ids for r in results[::2]] == expected[:2] and isinstance(
            results[1].error, ValueError
        )
        engine.check_integrity()
        assert engine.stats().used_blocks == 0


@pytest.mark.slow_cases("*-Gemma3ForConditionalGeneration")
@pytest.mark.parametrize("name", [QWEN, GEMMA])
@pytest.mark.parametrize(
    "config", [{"num_blocks": 13, "preemption": "swap"}, {"max_num_batched_tokens": 8}]
)
def test_pictures_in_small_budgets(name: str, config: dict[str, Any]) -> None:
    model, inputs = model_of(name), pictures(name)
    rows = [of_row(inputs, row, name) for row in range(2)]
    words = [list(range(5, 5 + count)) for count in (21, 3)]
    options = {"max_new_tokens": 24, "do_sample": False}
    calls = [*rows, *({"input_ids": torch.tensor([ids])} for ids in words), *rows]
    expected = [
        model.generate(**call, **options)[0, call["input_ids"].shape[1] :].tolist()
        for call in calls
    ]
    with hf_paged.PagedEngine(
        model, {"block_size": 8, "prefix_caching": False, **config}
    ) as engine:
        results = engine.generate([*rows, *words, *rows], options)
        assert [r.token_ids for r in results] == expected
        assert bool(engine.stats().num_swaps) == ("preemption" in config)
        engine.check_integrity()


def test_an_engine_takes_embeddings_and_weights_change() -> None:
    model = models.build("llama")
    ids = torch.randint(5, 100, (1, 9), generator=torch.Generator().manual_seed(0))
    embeds = model.get_input_embeddings()(ids).detach().flip(-1)
    options = {"max_new_tokens": 12, "do_sample": False}
    with hf_paged.PagedEngine(model, {"block_size": 8}) as engine:
        plain = model.generate(inputs_embeds=embeds, **options)[0].tolist()
        name = engine.add_request(inputs={"inputs_embeds": embeds}, generation_config=options)
        found = {}
        while engine.has_unfinished:
            found.update(
                {output.request_id: output.result for output in engine.step() if output.finished}
            )
        assert found[name].token_ids == plain
        for policy in ("recompute", "keep"):
            engine.add_request(inputs={"inputs_embeds": embeds}, generation_config=options)
            engine.step()
            with engine.weights_update(policy):
                pass
            while engine.has_unfinished:
                for output in engine.step():
                    if output.finished:
                        assert output.result.token_ids == plain


@pytest.mark.parametrize(
    "prompt, inputs, message",
    [
        ([5, 6], {"max_new_tokens": 3}, "only model inputs besides token ids"),
        ([5, 6], {"input_ids": torch.ones(1, 2)}, "only model inputs besides token ids"),
        ([5, 6], [1], "pass a dict"),
        (
            {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[0, 1]]), "x": 1},
            None,
            "without padding",
        ),
        ([5, 6], {"pixels": torch.ones(1)}, "pixels"),
    ],
)
def test_inputs_that_an_engine_refuses(prompt: Any, inputs: Any, message: str) -> None:
    with hf_paged.PagedEngine(model_of(LLAVA), {"block_size": 8}) as engine:
        with pytest.raises(ValueError, match=message):
            engine.add_request(prompt, {"max_new_tokens": 3}, inputs=inputs)
        assert engine.stats().peak_blocks == 0 and not engine.has_unfinished


def test_pictures_that_move_to_other_rows_are_other_content(hits: list[int]) -> None:
    """The tensors are equal, and so are the token ids of the middle row, which has another
    picture."""
    model, inputs = model_of(LLAVA), with_question(pictures(LLAVA))
    words = torch.randint(
        5, 100, inputs["input_ids"][:1].shape, generator=torch.Generator().manual_seed(0)
    )
    picture = inputs["input_ids"][inputs["attention_mask"].all(-1)][:1]
    mask = torch.ones(3, words.shape[1], dtype=torch.long)
    options = {"max_new_tokens": 60}
    for rows in ([picture, picture, words], [words, picture, picture], [words, picture, picture]):
        hits.clear()
        same(model, {**inputs, "input_ids": torch.cat(rows), "attention_mask": mask}, options)
    assert min(hits) > 0


def test_rows_without_a_known_placeholder_are_known_by_all_inputs() -> None:
    model, inputs = model_of(LLAVA), pictures(LLAVA)
    ids = inputs["input_ids"].clone()
    ids[1] = 7
    for others in (inputs, other_pictures(inputs)):
        first, other = (
            Prompts(
                ids, {"pixel_values": x["pixel_values"], "sound": x["pixel_values"]}, [0, 0]
            ).keys(model.config)
            for x in (inputs, others)
        )
        assert first is not None and other is not None
        assert (first == other) == (others is inputs) and (first[1][0][0] == other[1][0][0]) == (
            others is inputs
        )


@pytest.mark.slow
def test_generated_tokens_are_known_by_their_positions(hits: list[int]) -> None:
    model = models.get("llama")
    ids = torch.randint(5, 100, (1, 20), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(20)[None] * 3 + 1
    found = model.generate(
        ids, position_ids=positions, max_new_tokens=120, do_sample=False, **models.PAGED
    )[:, :100]
    mask, options = torch.ones_like(found), {"max_new_tokens": 60}
    for first, expected in ((positions[0, -1] + 1, 96), (20, 16)):
        # positions with which it continued, and others
        behind = torch.arange(first, first + 80)[None]
        hits.clear()
        given = {
            "input_ids": found,
            "attention_mask": mask,
            "position_ids": torch.cat([positions, behind], 1),
        }
        assert same(model, given, options).road == "engine" and hits == [expected]


@pytest.mark.slow
def test_an_answer_about_a_picture_is_served_in_the_next_turn(hits: list[int]) -> None:
    model, inputs = model_of(QWEN), of_row(with_question(pictures(QWEN)), 0, QWEN)
    length = inputs["input_ids"].shape[1]
    answer = model.generate(**inputs, max_new_tokens=100, do_sample=False, **models.PAGED)[
        :, length:
    ]
    more = {
        name: torch.cat([x, torch.zeros_like(answer)], 1)
        for name, x in inputs.items()
        if x.shape == (1, length)
    }
    more |= {"input_ids": torch.cat([inputs["input_ids"], answer], 1)}
    if "attention_mask" in more:
        more["attention_mask"] = torch.ones_like(more["input_ids"])
    hits.clear()
    same(model, {**inputs, **more}, {"max_new_tokens": 60})
    assert hits[0] > length + 80


def answers(model: Any, calls: list[dict[str, Any]], options: dict[str, Any]) -> list[list[int]]:
    """Output of plain `generate` for each call alone."""
    return [
        model.generate(**call, **options)[0, call["input_ids"].shape[1] :].tolist()
        for call in calls
    ]


def of_lengths(name: str, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Prompts with one picture each, all of one size, followed by texts of these `lengths`."""
    torch.manual_seed(4)
    row, calls = of_row(pictures(name), 0, name), []
    for number, length in enumerate(lengths):
        call = {**row, "pixel_values": torch.randn_like(row["pixel_values"])}
        for key, x in row.items():
            if x.shape == row["input_ids"].shape:
                more = (
                    torch.full((1, length), 20 + number)
                    if key == "input_ids"
                    else x[:, :1].expand(-1, length)
                )
                call[key] = torch.cat([x, more], dim=1)
        calls.append(call)
    return calls


@pytest.mark.slow_cases("Gemma3ForConditionalGeneration")
@pytest.mark.parametrize("name", [LLAVA, QWEN, GEMMA])
def test_prompts_of_several_requests_begin_in_one_forward(name: str, forwards: list[int]) -> None:
    model, calls = model_of(name), of_lengths(name, (3, 9, 1, 6))
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = answers(model, calls, options)
    with hf_paged.PagedEngine(model, {"block_size": 8}) as engine:
        engine.generate(calls[:1], options)  # with the checks
        forwards.clear()
        assert [r.token_ids for r in engine.generate(calls[1:], options)] == expected[
            1:
        ] and forwards == [3]
        again = engine.generate(calls, options)
        assert [r.token_ids for r in again] == expected and any(
            r.num_prefix_hit_tokens for r in again[1:]
        )
        engine.check_integrity()
    small = {
        "block_size": 8,
        "prefix_caching": False,
        "max_num_batched_tokens": 2 * calls[1]["input_ids"].shape[1],
    }
    with hf_paged.PagedEngine(model, small) as engine:
        forwards.clear()
        assert [r.token_ids for r in engine.generate(calls, options)] == expected
        assert max(forwards) == 2, forwards


def test_positions_may_be_floats() -> None:
    """As those of Qwen3-Omni are."""
    ids = torch.tensor([[5, 6, 7]])
    positions = torch.tensor([[[0.0, 0.0, 1.0]]] * 3)
    prompts = Prompts(ids, {"position_ids": positions}, [0])
    assert prompts.positions(0, 2, 5) == [[1, 2, 3]] * 3
    assert prompts.keys_after(0, [8, 9]) == [(8, (2, 2, 2), None), (9, (3, 3, 3), None)]


def test_prompts_that_differ_in_more_than_floats_begin_alone(forwards: list[int]) -> None:
    """A grid of another shape has other positions; surplus tokens in one prompt would offset
    missing ones in another."""
    model, options = model_of(QWEN), {"max_new_tokens": 8, "do_sample": False}
    first, second = of_lengths(QWEN, (3, 5))
    grid = first["image_grid_thw"].tolist()[0]
    turned = {**second, "image_grid_thw": torch.tensor([[grid[0], grid[1] * grid[2] // 2, 2]])}
    assert grid[2] != 2
    token = 159
    many = torch.where(first["input_ids"] == 20, token, first["input_ids"])
    few = second["input_ids"].clone()
    few[0, (few[0] == token).nonzero()[:3, 0]] = 7
    wrong = [{**first, "input_ids": many}, {**second, "input_ids": few}]
    expected = answers(model, [first, turned], options)
    with hf_paged.PagedEngine(model, {"block_size": 8, "prefix_caching": False}) as engine:
        engine.generate([first], options)
        forwards.clear()
        assert [
            r.token_ids for r in engine.generate([first, turned], options)
        ] == expected and forwards == [1, 1]
        results = engine.generate([*wrong, first], options)
        assert [type(r.error) for r in results] == [ValueError, ValueError, type(None)]
        assert results[2].token_ids == expected[0]
        engine.check_integrity()


def test_a_prompt_that_fails_beside_others_fails_alone(
    monkeypatch: pytest.MonkeyPatch, forwards: list[int]
) -> None:
    model, calls = model_of(QWEN), of_lengths(QWEN, (3, 9, 6))
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = answers(model, calls, options)
    visual, bad = model.model.get_image_features, calls[1]["pixel_values"][0, 0]

    def refuse(pixel_values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if bool((pixel_values == bad).any()):
            raise RuntimeError("a picture that cannot be read")
        return visual(pixel_values, *args, **kwargs)

    monkeypatch.setattr(model.model, "get_image_features", refuse)
    with hf_paged.PagedEngine(model, {"block_size": 8, "prefix_caching": False}) as engine:
        results = engine.generate(calls, options)
        assert "cannot be read" in str(results[1].error)
        assert [r.token_ids for r in results[::2]] == expected[::2]
        # all, the one that fails, the others in the next step
        assert forwards[-3:] == [3, 1, 2], forwards
        engine.check_integrity()
        assert engine.stats().used_blocks == 0


@pytest.mark.parametrize("name", [LLAVA, "LlavaNextForConditionalGeneration"])
def test_a_model_that_has_never_seen_a_picture(name: str) -> None:
    """transformers adds hooks to a vision tower in its first forward, which may be one of a
    check."""
    torch.manual_seed(0)
    fresh, call = tiny_model(getattr(transformers, name)), of_row(pictures(name), 1, name)
    options = {"max_new_tokens": 6, "do_sample": False}
    with hf_paged.PagedEngine(fresh, {"block_size": 8}) as engine:
        (result,) = engine.generate([call], options)
    assert [result.token_ids] == answers(fresh, [call], options)


def test_black_pictures_begin_alone() -> None:
    """SmolVLM drops empty pictures, so a surplus picture in another prompt would offset a missing
    one."""
    name, options = "SmolVLMForConditionalGeneration", {"max_new_tokens": 6, "do_sample": False}
    model, row = model_of(name), of_row(pictures(name), 0, name)
    del row["pixel_attention_mask"]
    places = (row["input_ids"][0] == model.config.image_token_id).nonzero()[:, 0]
    keep = torch.ones(row["input_ids"].shape[1], dtype=torch.bool)
    keep[places[len(places) // 2 :]] = False  # the tokens of one of two pictures
    row = {key: x[:, keep] if x.shape == row["input_ids"].shape else x for key, x in row.items()}
    torch.manual_seed(2)
    calls = [{**row, "pixel_values": torch.randn_like(row["pixel_values"])} for _ in range(4)]
    for call in (calls[0], calls[3]):
        call["pixel_values"][:, 1] = 0
    calls[2]["pixel_values"].zero_()
    expected = answers(model, [calls[0], *calls[2:]], options)
    try:
        (with_both,) = answers(model, calls[1:2], options)
    except ValueError:  # in newer versions of transformers
        with_both = []
    with hf_paged.PagedEngine(model, {"block_size": 8}) as engine:
        results = engine.generate(calls, options)
        assert (
            results[1].token_ids == with_both
            if with_both
            else isinstance(results[1].error, ValueError)
        )
        assert [r.token_ids for r in (results[0], *results[2:])] == expected
        assert [r.token_ids for r in engine.generate([calls[0], calls[3]], options)] == [
            expected[0],
            expected[2],
        ]


def test_hooks_and_modes_that_change_while_requests_run_are_seen() -> None:
    model, (first, second) = model_of(LLAVA), of_lengths(LLAVA, (3, 5))
    options = {"max_new_tokens": 6, "do_sample": False}
    with hf_paged.PagedEngine(model, {"block_size": 8}) as engine:
        engine.add_request(first, options)
        handle = model.model.language_model.layers[0].register_forward_hook(lambda *_: None)
        try:
            with pytest.raises(ValueError, match="forward hooks"):
                engine.add_request(second, options)
        finally:
            handle.remove()
        engine.add_request(second, options)


def test_two_pictures_that_do_not_fit_into_memory_at_once(
    monkeypatch: pytest.MonkeyPatch, forwards: list[int]
) -> None:
    model, calls = model_of(QWEN), of_lengths(QWEN, (3, 9, 6))
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = answers(model, calls, options)
    visual = model.model.get_image_features

    def encode(
        pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if len(image_grid_thw) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return visual(pixel_values, image_grid_thw, *args, **kwargs)

    monkeypatch.setattr(model.model, "get_image_features", encode)
    with hf_paged.PagedEngine(model, {"block_size": 8, "prefix_caching": False}) as engine:
        assert [r.token_ids for r in engine.generate(calls, options)] == expected
        assert forwards[-3:] == [1, 1, 1]


def test_a_hole_in_the_mask_is_looked_at_by_itself() -> None:
    model, (first, second) = model_of(LLAVA), of_lengths(LLAVA, (3, 5))
    length, mask = first["input_ids"].shape[1], torch.ones_like(second["input_ids"])
    mask[0, -3] = 0
    with hf_paged.PagedEngine(model, {"block_size": 8}) as engine:
        ids = [call["input_ids"] for call in (first, second)]
        engine.add_request(
            ids[0],
            inputs={
                "pixel_values": first["pixel_values"],
                "position_ids": torch.arange(length)[None],
            },
        )
        with pytest.raises(ValueError, match="an engine cannot serve these `inputs`"):
            engine.add_request(
                ids[1], inputs={"pixel_values": second["pixel_values"], "attention_mask": mask}
            )


@pytest.mark.slow
def test_a_picture_that_fails_beside_others_in_rectangles() -> None:
    name, options = "Lfm2VlForConditionalGeneration", {"max_new_tokens": 6, "do_sample": False}
    model, row = model_of(name), of_row(pictures(name), 0, name)
    bad = {**row, "pixel_values": row["pixel_values"][:, :1]}
    expected = answers(model, [row], options)
    with hf_paged.PagedEngine(model, {"block_size": 8}) as engine:
        results = engine.generate([row, bad, row], options)
        assert [r.token_ids for r in results[::2]] == expected * 2 and results[1].error is not None


def hits_behind(model: Any, calls: list[dict[str, Any]]) -> list[int]:
    """Hits of these prompts, one after the other, in an engine whose tokens are those of plain
    `generate`. Raises the error of a request that fails."""
    options = {"max_new_tokens": 6, "do_sample": False}
    with hf_paged.PagedEngine(model, {"block_size": 8, "num_blocks": 128}) as engine:
        results = [engine.generate([call], options)[0] for call in calls]
        engine.check_integrity()
    if results[0].error is not None:
        raise results[0].error
    assert [result.token_ids for result in results] == answers(model, calls, options)
    return [result.num_prefix_hit_tokens for result in results]


def with_system_text(call: dict[str, Any], length: int = 26, seed: int = 5) -> dict[str, Any]:
    """The prompt of one row behind a longer text."""
    ids = torch.randint(5, 100, (1, length), generator=torch.Generator().manual_seed(seed))
    fronts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    shape = call["input_ids"].shape
    longer = {
        name: torch.cat([fronts.get(name, torch.zeros_like(ids)), x], 1)
        for name, x in call.items()
        if getattr(x, "shape", None) == shape
    }
    return {**call, **longer}


def rows_of_two_sizes(name: str) -> list[dict[str, Any]]:
    """Two prompts with pictures of different grids, if the model takes such, behind the same
    text."""
    inputs = with_question(pictures(name))
    return [with_system_text(of_row(inputs, row, name)) for row in range(2)]


@pytest.mark.slow_cases("Qwen3VLForConditionalGeneration")
@pytest.mark.parametrize("name", [QWEN, "Qwen3VLForConditionalGeneration", LLAVA])
def test_a_picture_of_another_grid_drops_no_prefix(name: str) -> None:
    first, second = rows_of_two_sizes(name)
    length = first["input_ids"].shape[1]
    hits = hits_behind(model_of(name), [first, second, first, second])
    assert hits[2] >= length - 8 and hits[3] >= second["input_ids"].shape[1] - 8


@pytest.mark.slow
@pytest.mark.parametrize("name", BEHIND_TEXT)
def test_a_new_picture_behind_a_known_text(name: str, forwards: list[int]) -> None:
    first, second = rows_of_two_sizes(name)
    model = model_of(name)
    third = other_pictures(first)
    hits = hits_behind(model, [first, second, third, first, third])
    assert hits[:3] == [0, 24, 32] and min(hits[3:]) >= first["input_ids"].shape[1] - 8
    for options in MODES:
        hf_paged.free(model)
        for call in (first, second, third, third):
            assert same(model, call, {**options, "max_new_tokens": 40}).road == "engine"
    assert hits_behind(model, [first, with_system_text(second, seed=6)])[1] == 0


@pytest.mark.slow_cases("Gemma3ForConditionalGeneration")
@pytest.mark.parametrize("name", BEHIND_TEXT)
def test_text_alone_shares_the_text_before_a_picture(name: str) -> None:
    model, (first, second) = model_of(name), rows_of_two_sizes(name)
    words = {"input_ids": torch.cat([first["input_ids"][:, :26], second["input_ids"][:, -13:]], 1)}
    words["attention_mask"] = torch.ones_like(words["input_ids"])
    assert hits_behind(model, [words, first, second, words]) == [0, 24, 24, 32]
    assert hits_behind(model, [first, words]) == [0, 24]


@pytest.mark.slow_cases("Gemma3ForConditionalGeneration")
@pytest.mark.parametrize("name", BEHIND_TEXT)
def test_a_generate_call_begins_behind_a_known_text(name: str, hits: list[int]) -> None:
    first, second = rows_of_two_sizes(name)
    model, options = (
        model_of(name),
        {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 20},
    )
    hf_paged.free(model)
    for call in (first, second):
        hits.clear()
        same(model, call, options)
    assert max(hits) == 24


@pytest.mark.slow
def test_a_text_that_sees_the_picture_behind_it_is_not_shared() -> None:
    """All of PaliGemma's prompt sees all of it."""
    name = "PaliGemmaForConditionalGeneration"
    first, second = rows_of_two_sizes(name)
    assert not any(hits_behind(model_of(name), [first, second, other_pictures(first), first]))


@pytest.mark.slow
@pytest.mark.parametrize("name", BEHIND_TEXT)
def test_requests_behind_a_known_text_run_beside_others_and_are_preempted(name: str) -> None:
    model, (first, second) = model_of(name), rows_of_two_sizes(name)
    calls = [
        first,
        second,
        other_pictures(first),
        with_system_text(second, seed=6),
        other_pictures(second),
    ]
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = answers(model, calls, options)
    for config in (
        {},
        {"num_blocks": 30, "preemption": "recompute"},
        {"num_blocks": 30, "preemption": "swap"},
    ):
        with hf_paged.PagedEngine(model, {"block_size": 8, **config}) as engine:
            engine.generate(calls[:1], options)
            results = engine.generate([*calls, [7, 8, 9]], options)
            assert [result.token_ids for result in results[:-1]] == expected
            assert results[1].num_prefix_hit_tokens == 24
            engine.check_integrity()
