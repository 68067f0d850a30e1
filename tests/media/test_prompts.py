"""Prompts beyond token ids: images, embeddings, explicit positions."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
import transformers

import hf_paged
from hf_paged import PagedEngine, compat
from hf_paged.batching.arguments import ServedByGenerateError
from hf_paged.cache.sequence_blocks import SequenceBlocks
from hf_paged.generation import batch_call
from hf_paged.kernels import cpp
from hf_paged.kernels.hashing import hash_tensors
from hf_paged.media import checks
from hf_paged.media.prompts import MediaPrompts, digest_of
from tests.kernels.test_hashing import scramble
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import decoder_text
from tests.support.architecture_media import media_inputs, media_rows
from tests.support.checks import assert_paged_is_plain, assert_pool_empty, in_threads
from tests.support.engine_helpers import Recorder, run_all
from tests.support.rooms import needs_fingerprints

LLAVA, QWEN, GEMMA = (f"{name}ForConditionalGeneration" for name in ("Llava", "Qwen2VL", "Gemma3"))
PALI = "PaliGemmaForConditionalGeneration"
# models whose own forward may begin behind cached text; older ones of Gemma3 get no
# `token_type_ids` then
BEHIND_TEXT = [LLAVA, QWEN] if models.BEFORE_5_24 else [LLAVA, QWEN, GEMMA]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
SMALL = {"block_size": 8}
UNCACHED = {**SMALL, "prefix_caching": False}


@functools.cache
def model_of(name: str) -> Any:
    torch.manual_seed(0)
    sizes = {"sliding_window": 64} if name == GEMMA else {}
    return tiny_model(getattr(transformers, name), **sizes)


def text(model: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    return decoder_text(model.config)


def pictures(name: str, seed: int = 1) -> dict[str, Any]:
    """Two rows with different pictures, left-padded, for `generate`."""
    torch.manual_seed(seed)
    return dict(media_inputs(model_of(name))["image"])


def joined(call: dict[str, Any], ids: torch.Tensor, at_front: bool = False) -> dict[str, Any]:
    """The same prompts with more text behind or before them."""
    more = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    shape, longer = call["input_ids"].shape, {}
    for name, x in call.items():
        if getattr(x, "shape", None) == shape:
            parts = [x, more.get(name, torch.zeros_like(ids, dtype=x.dtype))]
            longer[name] = torch.cat(parts[::-1] if at_front else parts, dim=1)
    return {**call, **longer}


def with_question(inputs: dict[str, Any], seed: int = 1) -> dict[str, Any]:
    """The same with 13 tokens of text after it."""
    torch.manual_seed(seed)
    return joined(inputs, torch.randint(5, 100, (len(inputs["input_ids"]), 13)))


def with_system_text(call: dict[str, Any], seed: int = 5) -> dict[str, Any]:
    """The prompt of one row behind a text of 26 tokens."""
    ids = torch.randint(5, 100, (1, 26), generator=torch.Generator().manual_seed(seed))
    return joined(call, ids, at_front=True)


def other_pictures(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "pixel_values": inputs["pixel_values"].flip(-1) * 2 - 0.5}


def rows_of(name: str) -> list[dict[str, Any]]:
    """Two prompts with a picture each, as a processor returns them."""
    torch.manual_seed(1)
    return media_rows(model_of(name))["image"][:2]


def questions(name: str) -> list[dict[str, Any]]:
    return [with_question(row, seed) for seed, row in enumerate(rows_of(name))]


def behind_a_text(name: str) -> list[dict[str, Any]]:
    """Two prompts with pictures of different grids, if the model takes such, behind the same
    text."""
    return [with_system_text(row) for row in questions(name)]


def of_lengths(name: str, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Prompts with one picture each, all of one size, followed by texts of these `lengths`."""
    torch.manual_seed(4)
    row = rows_of(name)[0]
    calls = [
        joined(row, torch.full((1, length), 20 + number)) for number, length in enumerate(lengths)
    ]
    return [{**call, "pixel_values": torch.randn_like(row["pixel_values"])} for call in calls]


def same(
    model: Any, inputs: dict[str, Any], config: dict[str, Any] | None = None, **options: Any
) -> hf_paged.Route:
    """Asserts that plain and paged `generate` agree; returns the route of the paged call."""
    paged = {**models.PAGED, "cache_config": {**SMALL, **(config or {})}}
    return assert_paged_is_plain(model, inputs, {**GREEDY, "max_new_tokens": 13, **options}, paged)


def answer(model: Any, call: Any, **options: Any) -> list[int] | Exception:
    """Output of plain `generate`, or its error."""
    call = call if isinstance(call, dict) else {"input_ids": torch.tensor([call])}
    try:
        output = model.generate(**call, **{**GREEDY, **options})
    except (ValueError, RuntimeError) as error:
        return error
    tokens: list[int] = output[0, call["input_ids"].shape[1] :].tolist()
    return tokens


def ask(engine: PagedEngine, calls: list[Any], **options: Any) -> list[Any]:
    """The engine's results, which are those of plain `generate`: tokens, or an error."""
    expected = [answer(engine.model, call, **options) for call in calls]
    results = engine.generate(calls, {**GREEDY, **options})
    for result, plain in zip(results, expected, strict=True):
        assert type(result.error) is (type(plain) if isinstance(plain, Exception) else type(None))
        assert result.error is not None or result.token_ids == plain
    engine.check_integrity()
    return results


def hits_behind(model: Any, calls: list[dict[str, Any]]) -> list[int]:
    """Hits of these prompts, one after the other, in an engine whose tokens are those of plain
    `generate`. Raises the error of a request that fails."""
    options = {**GREEDY, "max_new_tokens": 6}
    with PagedEngine(model, {**SMALL, "num_blocks": 128}) as engine:
        results = [engine.generate([call], options)[0] for call in calls]
        engine.check_integrity()
    if results[0].error is not None:
        raise results[0].error
    assert [result.token_ids for result in results] == [answer(model, c, **options) for c in calls]
    return [result.num_prefix_hit_tokens for result in results]


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the tokens that each prefix cache look-up found."""
    found, match = list[int](), SequenceBlocks.match

    def watched(*args: Any, **kwargs: Any) -> int:
        found.append(match(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(SequenceBlocks, "match", watched)
    return found


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the rows stored by each prefill forward."""
    found, forward = list[int](), MediaPrompts.forward

    def watched(self: Any, model: Any, cache: Any, rows: dict[int, Any], *args: Any) -> Any:
        found.append(len(rows))
        return forward(self, model, cache, rows, *args)

    monkeypatch.setattr(MediaPrompts, "forward", watched)
    return found


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of the checks of prompts that run."""
    names = list[str]()

    def watched(name: str, check: Any, trial: Any) -> Any:
        names.append(name)
        return check(trial)

    for name in ("prompts_check", "inputs_check"):
        check = functools.partial(watched, name, getattr(checks, name))
        monkeypatch.setattr(checks, name, check)
    return names


# -- calls of generate ----------------------------------------------------------------------------


def test_forwards_of_whole_prompts_count_as_the_models_own() -> None:
    with PagedEngine(model_of(LLAVA), SMALL) as engine:
        engine.add_request(rows_of(LLAVA)[0], {"max_new_tokens": 2})
        engine.step()
        # so that its writes are accepted as its own
        assert engine._core.loop.executor.runner.num_forwards == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [LLAVA, QWEN, GEMMA])
def test_pictures_are_decoded_packed(name: str, mode: str, device: torch.device) -> None:
    model, inputs = models.put(model_of(name), device), models.put(pictures(name), device)
    route = same(model, inputs, **MODES[mode])
    assert route.road == "engine" and route.reason.startswith("packed")


@pytest.mark.parametrize("mode", MODES)
def test_embeddings_in_few_blocks(mode: str) -> None:
    model, options = models.get("llama"), MODES[mode]
    inputs = text(model)
    inputs["inputs_embeds"] = (
        model.get_input_embeddings()(inputs.pop("input_ids")).detach().flip(-1)
    )
    tight = {"num_blocks": 12 if options else 5, "prefix_caching": False}
    assert same(model, inputs, tight, **options).road == "engine"


def test_positions_and_an_input_that_is_false_count() -> None:
    """Positions with several axes that count are packed; with `is_causal=False` each token of a
    prompt sees the later ones."""
    model = model_of(QWEN)
    inputs = text(model)
    counted = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0).expand(3, -1, -1).clone()
    for given in (inputs, {**inputs, "position_ids": counted}):
        assert same(model, given).road == "engine"
    model = models.get("llama")
    hf_paged.free(model)
    inputs = {**text(model), "is_causal": False}
    for call in (inputs, with_question(inputs), with_question(inputs, seed=2), text(model)):
        same(model, call, max_new_tokens=60)


def test_inputs_that_do_not_fit_raise_what_plain_raises() -> None:
    model, inputs = model_of(LLAVA), pictures(LLAVA)
    wrong, told = {**inputs, "pixel_values": inputs["pixel_values"][:1]}, []
    for paged in ({}, models.PAGED):
        with pytest.raises(ValueError) as caught:
            model.generate(**wrong, **GREEDY, **paged)
        told.append(str(caught.value))
    assert told[0] == told[1]
    same(model, inputs)


@pytest.mark.parametrize("name", [LLAVA, QWEN])
def test_other_pictures_are_checked_once(name: str, checked: list[str]) -> None:
    model = tiny_model(getattr(transformers, name))
    torch.manual_seed(1)
    rows = media_rows(model)["image"]
    for call in (*rows, other_pictures(rows[0])):
        assert same(model, call).reason.startswith("packed")
    assert sorted(checked) == sorted({*checked}) and "prompts_check" in checked


# -- inputs that no forward of transformers takes --------------------------------------------------

STOCK = inspect.signature(transformers.LlamaForCausalLM.forward)


def signature_with(*names: str) -> inspect.Signature:
    """The signature of Llama's forward with more inputs."""
    parameters = list(STOCK.parameters.values())
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    return STOCK.replace(parameters=[*parameters[:-1], *more, parameters[-1]])


class Steered(transformers.LlamaForCausalLM):
    """Adds `alpha` and ten thousand times a token's type to the logit of token 7 and, in the first
    forward alone, `start` to that of token 8; bounds the logits by `cap`, and allows only the
    tokens that `allowed` `(vocab_size,)` does not mark with 0."""

    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(
        self,
        *args: Any,
        alpha: Any = None,
        start: Any = None,
        cap: Any = None,
        allowed: Any = None,
        token_type_ids: Any = None,
        own_token_type_ids: Any = None,
        **kwargs: Any,
    ) -> Any:
        cache = kwargs.get(compat.OUTPUT_CACHE)
        is_first = cache is None or cache.get_seq_length() == 0
        outputs = super().forward(*args, **kwargs)
        logits = outputs.logits.clone()
        if alpha is not None:
            logits[..., 7] += float(alpha)
        if start is not None and is_first:
            logits[..., 8] += float(start)
        for types in (token_type_ids, own_token_type_ids):
            if types is not None:
                logits[..., 7] += 1e4 * types[:, -logits.shape[1] :]
        if cap is not None:
            logits = logits.clamp(max=cap)
        if allowed is not None:
            logits = logits.masked_fill(allowed == 0, float("-inf"))
        outputs.logits = logits
        return outputs

    forward.__signature__ = signature_with(  # type: ignore[attr-defined]
        *("alpha", "start", "cap", "allowed", "token_type_ids", "own_token_type_ids")
    )


class Shifted(transformers.LlamaForCausalLM):
    """Adds `shift` to the embeddings of a prompt."""

    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(
        self, *args: Any, shift: Any = None, token_type_ids: Any = None, **kwargs: Any
    ) -> Any:
        ids = kwargs["input_ids"]
        if shift is not None and ids.shape[1] > 1:
            embeds = self.model.embed_tokens(ids) + shift
            kwargs = {**kwargs, "input_ids": None, "inputs_embeds": embeds}
        return super().forward(*args, **kwargs)

    forward.__signature__ = signature_with("shift", "token_type_ids")  # type: ignore[attr-defined]


def with_inputs(kind: type[Any]) -> Any:
    model = kind(models.config("llama")).eval()
    models.init_weights(model, 0)
    model.generation_config = models.build("llama").generation_config
    return model


@pytest.mark.parametrize("kind", [torch.tensor, float, str], ids=["tensor", "float", "str"])
def test_inputs_of_decode_steps_keep_their_effect(kind: Any, checked: list[str]) -> None:
    """In later calls: the first value has none."""
    model, ids = with_inputs(Steered), models.token_ids(2, 12)
    for alpha in (0.0, 1e4, 0.0, -1e4, 3.0):
        route = same(model, {"input_ids": ids, "alpha": kind(alpha)}, max_new_tokens=24)
        assert route.road == "engine" and not route.reason.startswith("packed")
    assert checked == (["prompts_check", "inputs_check"] if kind is torch.tensor else [])
    with PagedEngine(model, SMALL) as engine:
        for alpha in (0.0, 1e4):
            with pytest.raises(ServedByGenerateError, match="decode steps"):
                engine.add_request(ids[:1], GREEDY, inputs={"alpha": kind(alpha)})


ONLY_7 = torch.arange(models.VOCAB_SIZE) == 7
LAST = torch.arange(12).expand(2, 12) == 11
FEW_VALUES = [
    (name, values, dtype)
    for dtype in (torch.float, torch.bfloat16, torch.int64)
    for name, values in (
        ("allowed", [torch.ones_like(ONLY_7), ONLY_7]),
        ("cap", [torch.tensor(1000), torch.tensor(-1000)]),
    )
]
# transformers repeats the former for the tokens that follow, and passes on the latter
FEW_VALUES += [("token_type_ids", [~LAST & LAST, LAST], torch.int64)]
FEW_VALUES += [("own_token_type_ids", [~LAST & LAST, LAST], torch.int64)]


FEW_IDS = [f"{name}-{dtype}" for name, _, dtype in FEW_VALUES]


@pytest.mark.parametrize(("name", "values", "dtype"), FEW_VALUES, ids=FEW_IDS)
def test_inputs_that_have_an_effect_with_few_values_keep_it(
    name: str, values: list[torch.Tensor], dtype: torch.dtype
) -> None:
    """The first value has none, and neither has one more than it."""
    model, ids = with_inputs(Steered), models.token_ids(2, 12)
    for value in values:
        same(model, {"input_ids": ids, name: value.to(dtype)})


def test_inputs_that_decode_steps_ignore_are_checked_once(checked: list[str]) -> None:
    model, ids = with_inputs(Steered), models.token_ids(2, 12)
    for start in (0.0, 1e4, -1e4):
        route = same(model, {"input_ids": ids, "start": torch.tensor(start)})
        assert route.reason.startswith("packed")
    assert checked == ["prompts_check", "inputs_check"]


@needs_fingerprints
@pytest.mark.slow_cases("torch.float32-True", "torch.int64-False")
@pytest.mark.parametrize("is_text_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float, torch.int64], ids=str)
def test_inputs_that_act_in_prompts_alone(dtype: torch.dtype, is_text_first: bool) -> None:
    """The first value has no effect. The last prompt has the text, the placeholder and the inputs
    of the shifted one, and ends with other tokens."""
    model, ids = with_inputs(Shifted), models.token_ids(2, 61)
    generator = torch.Generator().manual_seed(0)
    shift = (5 * torch.randn(model.config.hidden_size, generator=generator)).to(dtype)
    types = torch.zeros(1, 61, dtype=torch.long)
    types[0, 40] = 1

    def prompt(ids: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input_ids": ids, "shift": shift, "token_type_ids": types}

    text, shifted = {"input_ids": ids[:1]}, prompt(ids[:1], shift)
    first, last = prompt(ids[1:], 0 * shift), prompt(ids[:1].clone(), shift)
    last["input_ids"][0, 50:] = ids[1, 50:]
    calls = [first, *([text, shifted] if is_text_first else [shifted, text]), last]
    with PagedEngine(model, SMALL) as engine:
        for call in calls:
            ask(engine, [call])
    for call in calls:
        same(model, call, max_new_tokens=batch_call.MIN_CACHED_TOKENS - 61)


# -- which content is which ------------------------------------------------------------------------


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


@needs_fingerprints
@pytest.mark.parametrize("make", [colliding_pictures, turned_pictures])
def test_a_picture_with_the_hash_of_another_is_not_served_in_its_place(make: Any) -> None:
    model, inputs = model_of(LLAVA), with_question(rows_of(LLAVA)[0])
    crafted, honest = make(inputs["pixel_values"])
    assert not torch.equal(crafted, honest)
    if cpp.is_available():
        assert hash_tensors([crafted]) == hash_tensors([honest])
    calls = [{**inputs, "pixel_values": pixels} for pixels in (crafted, honest)]
    assert answer(model, calls[0]) != answer(model, calls[1])
    hits = hits_behind(model, calls * 2)
    assert not any(hits[:2]) and all(hits[2:])


def test_inputs_of_other_names_kinds_and_shapes_have_other_digests() -> None:
    zeros, numbers = torch.zeros(2, 3), torch.arange(4).view(2, 2)
    values = [
        *(zeros, zeros.view(3, 2), zeros.view(torch.int32), zeros.half(), -zeros, zeros[:0]),
        *(numbers, numbers.T, [zeros[0], zeros[1]], [zeros[0], [zeros[1]]]),
        *({0: zeros}, {"0": zeros}, ("tensor", "torch.float32", (2, 3)), 0, 0.0, False, "0"),
    ]
    different = [*({"x": value} for value in values), {"y": zeros}, {"x": zeros, "y": None}]
    assert len({digest_of(value) for value in different}) == len(different)
    turned = torch.arange(6).view(2, 3).T
    assert digest_of({"x": turned}) == digest_of({"x": turned.contiguous()})
    # its scale is not in its bytes
    quantized = torch.quantize_per_tensor(torch.zeros(1), 0.1, 0, torch.qint8)
    for value in (zeros.to_sparse(), quantized, object(), torch.zeros(1).numpy()):
        with pytest.raises(TypeError, match="cannot hash a model input"):
            digest_of({"x": value})


@needs_fingerprints
def test_pictures_that_move_to_other_rows_are_other_content(hits: list[int]) -> None:
    """The tensors are equal, and so are the token ids of the middle row, which has another
    picture."""
    model, inputs = model_of(LLAVA), with_question(pictures(LLAVA))
    picture = inputs["input_ids"][inputs["attention_mask"].all(-1)][:1]
    words = torch.randint(5, 100, picture.shape, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, words.shape[1], dtype=torch.long)
    for rows in ([picture, picture, words], [words, picture, picture], [words, picture, picture]):
        hits.clear()
        call = {**inputs, "input_ids": torch.cat(rows), "attention_mask": mask}
        same(model, call, max_new_tokens=60)
    assert min(hits) > 0


def test_rows_without_a_known_placeholder_are_known_by_all_inputs() -> None:
    model, inputs = model_of(LLAVA), pictures(LLAVA)
    ids = inputs["input_ids"].clone()
    ids[1] = 7
    keys = []
    for x in (inputs, inputs, other_pictures(inputs)):
        media = {"pixel_values": x["pixel_values"], "sound": x["pixel_values"]}
        keys.append(MediaPrompts(ids, media, [0, 0]).keys(model.config))
    first, equal, other = keys
    assert first is not None and first == equal and first[1][0][0] != other[1][0][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [GEMMA, PALI])
def test_tokens_that_see_later_ones_are_not_shared(name: str, hits: list[int]) -> None:
    """All of PaliGemma's prompt sees all of it; of Gemma's the question does not see later
    tokens."""
    model, inputs = model_of(name), with_question(pictures(name))
    hf_paged.free(model)
    others = [with_question(inputs), with_question(pictures(name), seed=2), other_pictures(inputs)]
    for call in (inputs, *others, text(model)):
        same(model, call, max_new_tokens=60)
    assert any(hits) == (name == GEMMA)
    if name == PALI:
        first, second = behind_a_text(name)
        assert not any(hits_behind(model, [first, second, other_pictures(first), first]))


@pytest.mark.slow
def test_generated_tokens_are_known_by_their_positions(hits: list[int]) -> None:
    model = models.get("llama")
    ids = torch.randint(5, 100, (1, 20), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(20)[None] * 3 + 1
    options = {"max_new_tokens": 120, "do_sample": False}
    tokens = model.generate(ids, position_ids=positions, **options, **models.PAGED)[:, :100]
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    for first, expected in ((positions[0, -1] + 1, 96), (20, 16)):
        # positions with which it continued, and others
        behind = torch.arange(first, first + 80)[None]
        hits.clear()
        given["position_ids"] = torch.cat([positions, behind], 1)
        assert same(model, given, max_new_tokens=60).road == "engine" and hits == [expected]
    del given["position_ids"]
    hits.clear()
    same(model, given, max_new_tokens=60)
    assert not any(hits)


@pytest.mark.slow
def test_an_answer_about_a_picture_is_served_in_the_next_turn(hits: list[int]) -> None:
    model, inputs = model_of(QWEN), questions(QWEN)[0]
    length = inputs["input_ids"].shape[1]
    # a placeholder in the answer would be text now and content in the next turn
    placeholders = [model.config.image_token_id, model.config.video_token_id]
    options = {**GREEDY, "max_new_tokens": 100, "suppress_tokens": placeholders}
    said = model.generate(**inputs, **options, **models.PAGED)[:, length:]
    hits.clear()
    same(model, joined(inputs, said), max_new_tokens=60)
    assert hits[0] > length + 80


# -- engines ---------------------------------------------------------------------------------------


@needs_fingerprints
@pytest.mark.slow_cases(but=["LlavaForConditionalGeneration"])
@pytest.mark.parametrize("name", [LLAVA, QWEN, GEMMA])
def test_an_engine_takes_what_a_processor_gives(name: str) -> None:
    model, rows, words = model_of(name), questions(name), [7, 8, 9, 10, 11]
    with PagedEngine(model, SMALL) as engine:
        ask(engine, [*rows, *map(other_pictures, rows), words])
        assert engine.route.road == "engine" and engine.route.reason.startswith("packed")
        assert all(r.num_prefix_hit_tokens for r in ask(engine, [*rows, words])[:2])
        given = {key: x for key, x in rows[0].items() if key not in ("input_ids", "attention_mask")}
        engine.add_request(rows[0]["input_ids"], GREEDY, inputs=given, request_id="ids")
        for mode in ("beams", "sampled"):
            engine.add_request(rows[1], {**GREEDY, **MODES[mode]}, request_id=mode, seed=5)
        results = run_all(engine)
    assert results["ids"].token_ids == answer(model, rows[0])
    for mode in ("beams", "sampled"):
        torch.manual_seed(5)
        plain = model.generate(**rows[1], **{**GREEDY, **MODES[mode]})
        tokens = [sequence.token_ids for sequence in results[mode].sequences]
        assert tokens == plain[:, rows[1]["input_ids"].shape[1] :].tolist()


BUDGETS = {
    "swap": {"num_blocks": 13, "preemption": "swap"},
    "recompute": {"num_blocks": 13, "preemption": "recompute"},
    "chunks": {"max_num_batched_tokens": 8},
}


@pytest.mark.slow_cases("*-Gemma3ForConditionalGeneration", "recompute-*")
@pytest.mark.parametrize("name", [QWEN, GEMMA])
@pytest.mark.parametrize("budget", BUDGETS)
def test_pictures_in_small_budgets(name: str, budget: str) -> None:
    words = [list(range(5, 5 + count)) for count in (21, 3)]
    with PagedEngine(model_of(name), {**UNCACHED, **BUDGETS[budget]}) as engine:
        ask(engine, [*rows_of(name), *words, *rows_of(name)], max_new_tokens=24)
        stats = engine.stats()
    assert bool(stats.num_preemptions) == (budget != "chunks")
    assert bool(stats.num_swaps) == (budget == "swap")


def test_an_engine_takes_embeddings_and_weights_change() -> None:
    model = models.build("llama")
    ids = torch.randint(5, 100, (1, 9), generator=torch.Generator().manual_seed(0))
    embeds = model.get_input_embeddings()(ids).detach().flip(-1)
    plain = model.generate(inputs_embeds=embeds, **GREEDY)[0].tolist()
    with PagedEngine(model, SMALL) as engine:
        for policy in (None, "recompute", "keep"):
            name = engine.add_request(inputs={"inputs_embeds": embeds}, generation_config=GREEDY)
            if policy is not None:
                engine.step()
                with engine.weights_update(policy):
                    pass
            assert run_all(engine)[name].token_ids == plain


TWO_ROWS = {
    "input_ids": torch.ones(2, 2).long(),
    "token_type_ids": torch.zeros(2, 2).long(),
}
PADDED = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[0, 1]]), "x": 1}


@pytest.mark.parametrize(
    "prompt, inputs, message",
    [
        ([5, 6], {"max_new_tokens": 3}, "the prompt's inputs have max_new_tokens"),
        ([5, 6], {"input_ids": torch.ones(1, 2)}, "only model inputs besides token ids"),
        ([5, 6], [1], "pass a dict"),
        (TWO_ROWS, None, "a request takes one prompt, but `token_type_ids` has 2 rows$"),
        (PADDED, None, "without padding"),
        ([5, 6], {"pixels": torch.ones(1)}, "pixels"),
    ],
)
def test_inputs_that_an_engine_refuses(prompt: Any, inputs: Any, message: str) -> None:
    with PagedEngine(model_of(LLAVA), SMALL) as engine:
        with pytest.raises(ValueError, match=message):
            engine.add_request(prompt, {"max_new_tokens": 3}, inputs=inputs)
        assert engine.stats().peak_blocks == 0 and not engine.has_unfinished


@needs_fingerprints
@pytest.mark.slow_cases("Gemma3ForConditionalGeneration")
@pytest.mark.parametrize("name", [LLAVA, QWEN, GEMMA])
def test_prompts_of_several_requests_begin_in_one_forward(name: str, forwards: list[int]) -> None:
    model, calls = model_of(name), of_lengths(name, (3, 9, 1, 6))
    with PagedEngine(model, SMALL) as engine:
        ask(engine, calls[:1])  # with the checks
        forwards.clear()
        ask(engine, calls[1:])
        assert forwards == [3]
        assert any(r.num_prefix_hit_tokens for r in ask(engine, calls)[1:])
    two = 2 * calls[1]["input_ids"].shape[1]
    with PagedEngine(model, {**UNCACHED, "max_num_batched_tokens": two}) as engine:
        forwards.clear()
        ask(engine, calls)
        assert max(forwards) == 2, forwards


def test_prompts_that_differ_in_more_than_floats_begin_alone(forwards: list[int]) -> None:
    """A grid of another shape has other positions; surplus tokens in one prompt would offset
    missing ones in another."""
    first, second = of_lengths(QWEN, (3, 5))
    grid = first["image_grid_thw"].tolist()[0]
    turned = {**second, "image_grid_thw": torch.tensor([[grid[0], grid[1] * grid[2] // 2, 2]])}
    assert grid[2] != 2
    token = 159
    many = torch.where(first["input_ids"] == 20, token, first["input_ids"])
    few = second["input_ids"].clone()
    few[0, (few[0] == token).nonzero()[:3, 0]] = 7
    wrong = [{**first, "input_ids": many}, {**second, "input_ids": few}]
    with PagedEngine(model_of(QWEN), UNCACHED) as engine:
        ask(engine, [first])
        forwards.clear()
        ask(engine, [first, turned])
        assert forwards == [1, 1]
        results = ask(engine, [*wrong, first])
    assert [type(r.error) for r in results] == [ValueError, ValueError, type(None)]


# all, the one that fails, the others in the next step
@pytest.mark.parametrize(("kind", "steps"), [("bad", [3, 1, 2]), ("memory", [1, 1, 1])])
def test_prompts_that_fail_beside_others_begin_alone(
    kind: str, steps: list[int], monkeypatch: pytest.MonkeyPatch, forwards: list[int]
) -> None:
    model, calls = model_of(QWEN), of_lengths(QWEN, (3, 9, 6))
    visual, bad = model.model.get_image_features, calls[1]["pixel_values"][0, 0]

    def encode(pixel_values: Any, image_grid_thw: Any, *args: Any, **kwargs: Any) -> Any:
        if kind == "bad" and bool((pixel_values == bad).any()):
            raise RuntimeError("a picture that cannot be read")
        if kind == "memory" and len(image_grid_thw) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return visual(pixel_values, image_grid_thw, *args, **kwargs)

    monkeypatch.setattr(model.model, "get_image_features", encode)
    with PagedEngine(model, UNCACHED) as engine:
        results = ask(engine, calls)
        assert [r.error is not None for r in results] == [False, kind == "bad", False]
        assert forwards[-3:] == steps, forwards
        assert engine.stats().used_blocks == 0


@pytest.mark.parametrize("name", [LLAVA, "LlavaNextForConditionalGeneration"])
def test_a_model_that_has_never_seen_a_picture(name: str) -> None:
    """transformers adds hooks to a vision tower in its first forward, which may be one of a
    check."""
    torch.manual_seed(0)
    fresh, call = tiny_model(getattr(transformers, name)), rows_of(name)[1]
    with PagedEngine(fresh, SMALL) as engine:
        (result,) = engine.generate([call], GREEDY)
    assert result.token_ids == answer(fresh, call)


def test_black_pictures_begin_alone() -> None:
    """SmolVLM drops empty pictures, so a surplus picture in another prompt would offset a missing
    one."""
    name = "SmolVLMForConditionalGeneration"
    model, row = model_of(name), rows_of(name)[0]
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
    with PagedEngine(model, SMALL) as engine:
        ask(engine, calls)  # newer versions of transformers refuse the one with both pictures
        ask(engine, [calls[0], calls[3]])


def test_hooks_that_change_and_masks_with_holes_are_seen() -> None:
    """While requests run; and after a call that a mask without a hole has let in."""
    model, (first, second) = model_of(LLAVA), of_lengths(LLAVA, (3, 5))
    ids, pixels = first["input_ids"], first["pixel_values"]
    hole = torch.ones_like(ids)
    hole[0, -3] = 0
    with PagedEngine(model, SMALL) as engine:
        engine.add_request(first, GREEDY)
        handle = model.model.language_model.layers[0].register_forward_hook(lambda *_: None)
        try:
            with pytest.raises(ValueError, match="forward hooks"):
                engine.add_request(second, GREEDY)
        finally:
            handle.remove()
        engine.add_request(second, GREEDY)
        positions = torch.arange(ids.shape[1])[None]
        engine.add_request(ids, inputs={"pixel_values": pixels, "position_ids": positions})
        with pytest.raises(ValueError, match="an engine cannot serve these `inputs`"):
            engine.add_request(ids, inputs={"pixel_values": pixels, "attention_mask": hole})


@pytest.mark.parametrize("name", [LLAVA, "UdopForConditionalGeneration"])
def test_a_mask_reaches_the_model_as_given(name: str) -> None:
    """Without a mask of ones, Llava's prompts would hide pad tokens, and UDOP's encoder would hide
    a picture; an encoder's mask may also hide tokens."""
    model = model_of(name)
    has_encoder = model.config.is_encoder_decoder
    batch = pictures(name)
    calls = [{key: x[row : row + 1] for key, x in batch.items()} for row in range(2)]
    if not has_encoder:
        calls = rows_of(name)
        calls[0]["input_ids"][0, -2] = 7
    mask = calls[0]["attention_mask"]
    assert mask.all() and not (has_encoder and calls[1]["attention_mask"].all())
    options = {**GREEDY, "min_new_tokens": 8, "pad_token_id": 7}
    expected = [model.generate(**call, **options)[0].tolist() for call in calls]
    ids = {"input_ids": calls[0]["input_ids"][0].tolist(), "attention_mask": mask[0].tolist()}
    others = {key: x for key, x in calls[0].items() if key not in ids}
    with PagedEngine(model, SMALL) as engine:
        engine.add_request(ids, options, inputs=others, request_id="tokenized")
        results = [run_all(engine)["tokenized"], *engine.generate(calls, options)]
    for result, plain in zip(results, [expected[0], *expected], strict=True):
        assert result.token_ids == plain[-GREEDY["max_new_tokens"] :]


# -- text before a picture -------------------------------------------------------------------------


@needs_fingerprints
@pytest.mark.slow_cases(GEMMA, "Qwen3VLForConditionalGeneration")
@pytest.mark.parametrize("name", [*BEHIND_TEXT, "Qwen3VLForConditionalGeneration"])
def test_a_new_picture_behind_a_known_text(name: str) -> None:
    """Pictures of two grids: none drops what is known."""
    model, (first, second) = model_of(name), behind_a_text(name)
    calls = [first, second, other_pictures(first)]
    hits = hits_behind(model, calls * 2)
    if name in BEHIND_TEXT:
        assert hits[:3] == [0, 24, 32]
        assert hits_behind(model, [first, with_system_text(second, seed=6)])[1] == 0
        # text alone shares the text before a picture
        words = [first["input_ids"][0, :26], second["input_ids"][0, -13:]]
        text = {"input_ids": torch.cat(words)[None]}
        assert hits_behind(model, [text, first, second, text]) == [0, 24, 24, 32]
        assert hits_behind(model, [first, text]) == [0, 24]
    for hit, call in zip(hits[3:], calls, strict=True):
        assert hit >= call["input_ids"].shape[1] - 8


@needs_fingerprints
@pytest.mark.parametrize(
    "config", [{}, {"preemption": "swap", "max_num_batched_tokens": 48}], ids=str
)
def test_a_picture_behind_a_text_of_the_same_step(config: dict[str, Any]) -> None:
    """In the second engine the picture waits for the next step."""
    model, (first, second) = model_of(LLAVA), behind_a_text(LLAVA)
    words = [first["input_ids"][0, :26], second["input_ids"][0, -13:]]
    with PagedEngine(model, {"block_size": 8, **config}) as engine:
        ask(engine, [{"input_ids": torch.cat(words)[None]}, first])
        ask(engine, [first])


@needs_fingerprints
def test_a_prompt_in_the_blocks_that_another_computes_in_the_same_unpacked_step() -> None:
    model, prompt = models.build("llama"), models.token_ids(1, 33)
    model.model.norm.register_forward_hook(lambda *args: None)
    with PagedEngine(model, SMALL) as engine:
        ask(engine, [prompt[0].tolist()] * 2)


def test_a_buffer_of_pictures_may_be_reused() -> None:
    model, first = model_of(LLAVA), behind_a_text(LLAVA)[0]
    frame = first["pixel_values"].clone()
    calls, names = [first, other_pictures(first)], []
    with PagedEngine(model, SMALL) as engine:
        for call in calls:
            frame.copy_(call["pixel_values"])
            names.append(engine.add_request({**call, "pixel_values": frame}, GREEDY))
        results = run_all(engine)
        found = [results[name].token_ids for name in names]
        assert found == [answer(model, call, **GREEDY) for call in calls]
        ask(engine, calls)


@needs_fingerprints
@pytest.mark.slow_cases("Gemma3ForConditionalGeneration")
@pytest.mark.parametrize("name", BEHIND_TEXT)
def test_a_generate_call_begins_behind_a_known_text(
    name: str, hits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_call, "MIN_CACHED_TOKENS", 0)  # also short calls keep theirs
    model, (first, second) = model_of(name), behind_a_text(name)
    ample = {"num_blocks": 128}
    for options in MODES.values():
        hf_paged.free(model)
        for call, num_known in ((first, 0), (second, 24), (other_pictures(first), 32)):
            hits.clear()
            route = same(model, call, ample, **options)
            assert route.road == "engine" and max(hits) == num_known


@pytest.mark.slow
@pytest.mark.parametrize("name", BEHIND_TEXT)
def test_requests_behind_a_known_text_run_beside_others_and_are_preempted(name: str) -> None:
    first, second = behind_a_text(name)
    other = with_system_text(second, seed=6)
    calls = [first, second, other_pictures(first), other, other_pictures(second), [7, 8, 9]]
    tight = {"num_blocks": 30}
    for config in ({}, {**tight, "preemption": "recompute"}, {**tight, "preemption": "swap"}):
        with PagedEngine(model_of(name), {**SMALL, **config}) as engine:
            engine.generate(calls[:1], GREEDY)
            results = ask(engine, calls, max_new_tokens=20)
            assert results[1].num_prefix_hit_tokens == 24


@pytest.mark.slow
def test_streamers_and_threads() -> None:
    model, inputs = model_of(QWEN), pictures(QWEN)
    streamers = [Recorder(), Recorder()]
    tokens = model.generate(**inputs, **GREEDY, **models.PAGED, streamer=streamers)
    assert torch.equal(tokens, model.generate(**inputs, **GREEDY))
    for streamer, row in zip(streamers, tokens.tolist()):
        assert streamer.values[1:] == [[token] for token in row[-8:]]
    calls = [inputs, other_pictures(inputs)] * 2
    options = {**GREEDY, "max_new_tokens": 30}
    expected = [model.generate(**call, **options) for call in calls]
    jobs = [functools.partial(model.generate, **call, **options, **models.PAGED) for call in calls]
    assert all(map(torch.equal, expected, in_threads(*jobs)))
    assert_pool_empty(model)
