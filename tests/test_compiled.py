"""Models that `torch.compile` compiled, as a whole or in parts: same tokens, and our code is not
traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_paged
from hf_paged import PagedEngine
from hf_paged.attention.switch import compiled_modules
from hf_paged.compiled import is_compiled, replaced_forward, running_eagerly, uncompiled
from hf_paged.model.state import fingerprint
from tests.callers.test_callers import assert_used_pool
from tests.support import models
from tests.support.checks import assert_same_tokens, in_threads
from tests.support.rooms import needs_fingerprints

OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}  # enough for recorded steps
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}
PROMPT = models.token_ids(1, 9, seed=3)
COMPILED_FRAMES = 3
"""Frames of a compiled part without a cache beyond plain's: packed steps have batches of one row,
where plain's have as many as prompts, and a check runs both kinds."""

compile_ = functools.partial(torch.compile, backend="eager")


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def num_frames() -> int:
    """Frames that Dynamo has compiled, or tried to, since the last call."""
    total = counters["frames"]["total"]
    counters.clear()
    return total


def generate(model: Any, **options: Any) -> Tensor:
    torch.manual_seed(0)
    tokens: Tensor = model.generate(**models.padded_prompt("llama"), **{**OPTIONS, **options})
    return tokens


def lone(model: Any) -> list[int]:
    return model.generate(PROMPT, **OPTIONS)[0, PROMPT.shape[1] :].tolist()


def engine_tokens(model: Any) -> list[int]:
    with PagedEngine(model, {"block_size": models.BLOCK_SIZE}) as engine:
        result = engine.generate(PROMPT.tolist(), OPTIONS)[0]
    assert result.error is None
    return result.sequences[0].token_ids


def compiled(*names: str, **options: Any) -> Callable[[Any], Any]:
    """Replaces attributes of a model by what `torch.compile` makes of them."""

    def wrap(model: Any) -> Any:
        for name in names:
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            given = {"backend": "eager", **options}
            setattr(module, leaf, torch.compile(getattr(module, leaf), **given))
        return model

    return wrap


def in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def layers_in_place(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


forward = compiled("forward")
layer_forward = compiled("model.layers.0.forward")


def everything(model: Any) -> Any:
    return in_place(forward(layers_in_place(layer_forward(compiled("model")(model)))))


WRAPS: dict[str, Callable[[Any], Any]] = {
    "wrapper": compile_,
    "forward": forward,
    "whole graph": compiled("forward", fullgraph=True),
    "in place": in_place,
    "decoder": compiled("model"),
    "layer": compiled("model.layers.0"),
    "layer's forward": layer_forward,
    "layers in place": layers_in_place,
    "attention": compiled("model.layers.1.self_attn.forward"),
    "everything": everything,
}


@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_tokens_and_frames_in_float32(wrap: Callable[[Any], Any]) -> None:
    plain, model = models.get("llama"), wrap(models.build("llama"))
    inner = getattr(model, "_orig_mod", model)
    for mode, options in MODES.items():
        found = generate(model, **options, **models.PAGED)
        assert_same_tokens(generate(plain, **options), found, mode)
        route = hf_paged.last_route(inner)
        assert route is not None and route.reason.startswith("packed"), route
    assert engine_tokens(model) == lone(plain)
    assert num_frames() == 0
    assert_used_pool(inner)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap", [forward, compiled("forward", backend="inductor"), in_place, layer_forward, everything]
)
def test_tokens_and_frames_in_bfloat16(wrap: Callable[[Any], Any]) -> None:
    """The same kernels run as in a model that is not compiled, so rounding is the same, too."""
    plain, model = models.build("llama").bfloat16(), wrap(models.build("llama").bfloat16())
    expected = generate(plain, num_beams=3, **models.PAGED)
    assert_same_tokens(expected, generate(model, num_beams=3, **models.PAGED), "beams")
    assert engine_tokens(model) == engine_tokens(plain)
    assert num_frames() == 0


@pytest.mark.parametrize(
    ("name", "options", "road"),
    [
        ("t5", {}, "engine"),
        ("gpt2", {}, "engine"),
        pytest.param("qwen3_next", {}, "engine", marks=pytest.mark.slow),
        ("llama", {"output_attentions": True, "return_dict_in_generate": True}, "hf_loop"),
        ("llama", {"has_hook": True}, "hf_loop"),
        ("llama", {"has_assistant": True}, "engine"),
    ],
)
def test_other_architectures_and_routes(name: str, options: dict[str, Any], road: str) -> None:
    model, inputs = forward(models.build(name)), models.prompt(name)
    options = {**OPTIONS, "max_new_tokens": 8, **options}
    if options.pop("has_hook", False):
        model.register_forward_hook(lambda *arguments: None)
    if options.pop("has_assistant", False):
        inputs = models.prompt(name, 1)
        options["assistant_model"] = forward(models.build(name, num_hidden_layers=1))
    expected = models.get(name).generate(**inputs, **OPTIONS | {"max_new_tokens": 8})
    found = model.generate(**inputs, **options, **models.PAGED)
    assert_same_tokens(expected, getattr(found, "sequences", found), name)
    route = hf_paged.last_route(model)
    assert route is not None and route.road == road
    assert num_frames() == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_without_a_cache_stay_compiled(dtype: torch.dtype) -> None:
    plain, model = models.build("llama").to(dtype), models.build("llama").to(dtype)
    model.model.norm.compile(backend="eager")
    assert not compiled_modules(model.modules())
    expected = generate(plain)
    assert_same_tokens(expected, generate(model), "plain")
    count = num_frames()
    torch._dynamo.reset()
    found = generate(model, **models.PAGED)
    assert 0 < num_frames() <= count + COMPILED_FRAMES
    if dtype is torch.float32:
        assert_same_tokens(expected, found, "paged")


@pytest.mark.slow
def test_plain_calls_run_compiled_code_again() -> None:
    model = forward(models.build("llama", num_hidden_layers=1))
    options = {"max_new_tokens": 2}
    expected = generate(model, **options, **models.PAGED)
    assert num_frames() == 0
    assert_same_tokens(expected, generate(model, **options), "plain")
    assert num_frames() > 0


@pytest.mark.slow
def test_generate_called_by_a_compiled_function() -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama")
    expected = generate(model)
    num_frames()
    found = compile_(lambda: model.generate(**inputs, **OPTIONS, **models.PAGED))()
    assert_same_tokens(expected, found, "compiled")
    assert num_frames() < 10  # those of the function, and of the choice of the call


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    names = "forward", "_compiled_call_impl"
    return [{name: vars(x)[name] for name in names if name in vars(x)} for x in model.modules()]


def test_attributes_are_put_back() -> None:
    model = everything(models.build("llama"))
    before = attributes(model)
    layers = compiled_modules(model.modules())
    with running_eagerly(layers):
        assert attributes(model) != before
        with running_eagerly(compiled_modules(model.modules())):
            pass
        assert compiled_modules(model.modules()) == layers, "those that are switched now"
        assert not any(map(is_compiled, model.modules()))
    assert attributes(model) == before


def test_a_forward_compiled_on_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaDecoderLayer, "forward", compile_(LlamaDecoderLayer.forward))
    model = models.build("llama")
    found = generate(model, **models.PAGED)
    assert num_frames() == 0
    assert not any(attributes(model))
    monkeypatch.undo()
    assert_same_tokens(generate(models.get("llama")), found, "paged")


def test_a_forward_that_a_caller_sets_meanwhile_stays() -> None:
    model, own = forward(models.build("llama")), []

    def replaces(input_ids: Tensor, scores: Tensor) -> Tensor:
        if not own:
            model.forward = functools.partial(uncompiled(model.forward))
            own.append(model.forward)
        return scores

    generate(model, logits_processor=[replaces], **models.PAGED)
    assert model.forward is own[0]


@pytest.mark.parametrize("is_there", [False, True], ids=["added", "removed"])
def test_a_hook_of_accelerate_that_comes_or_goes_meanwhile(is_there: bool) -> None:
    model: Any = forward(models.build("llama"))
    own = model.forward
    if is_there:
        add_hook_to_module(model, ModelHook())
    with running_eagerly(compiled_modules(model.modules())):
        if is_there:
            remove_hook_from_module(model)
        else:
            add_hook_to_module(model, ModelHook())
        assert not is_compiled(model)
    assert (model.forward if is_there else model._old_forward) is own


@pytest.mark.slow
def test_overlapping_calls() -> None:
    model, plain = everything(models.build("llama")), models.get("llama")
    before, expected, alone = attributes(model), generate(plain), lone(plain)

    def call(number: int) -> None:
        for _ in range(3):
            if number:
                found = model.generate(**models.padded_prompt("llama"), **OPTIONS, **models.PAGED)
                assert_same_tokens(expected, found, "a call")
            else:
                assert engine_tokens(model) == alone

    in_threads(*(functools.partial(call, number) for number in range(3)))
    assert attributes(model) == before
    assert num_frames() == 0


@needs_fingerprints
def test_a_model_is_the_same_compiled_or_not() -> None:
    """So cached prefixes stay, and no check runs again."""
    model = in_place(forward(layer_forward(models.build("llama"))))
    expected = fingerprint(models.build("llama"))
    assert fingerprint(model) == expected
    with running_eagerly(compiled_modules(model.modules())):
        assert fingerprint(model) == expected
    assert not any(replaced_forward(module) for module in model.modules())
    model.forward = lambda **inputs: type(model).forward(model, **inputs)
    assert replaced_forward(model) is model.forward
    assert fingerprint(model) != expected


def test_wrappers_of_compiled_functions_are_not_unwrapped() -> None:
    """A library may cast the outputs of the compiled forward, as accelerate does."""
    own, module = compile_(models.get("llama").forward), nn.Module()

    @functools.wraps(own)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    module.forward = wrapper
    assert uncompiled(wrapper) is wrapper
    assert uncompiled(own) is not own
    assert is_compiled(module), "its products are left to PyTorch"
