"""Models as libraries set them up: with hooks, replaced forwards, weights kept elsewhere."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator, cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hf_paged
from hf_paged import PagedEngine
from hf_paged.model import capability
from tests.callers.test_callers import assert_used_pool
from tests.callers.test_mixed_precision import no_accelerator_left  # noqa: F401
from tests.model.test_autocast import CLOSE
from tests.support import models
from tests.support.checks import assert_same_tokens

OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10}
MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}
PROMPTS = [models.token_ids(1, length, seed=length)[0].tolist() for length in (5, 9, 3)]


def route_of(model: PreTrainedModel) -> hf_paged.Route:
    route = hf_paged.last_route(model)
    assert route is not None
    return route


def generate(model: PreTrainedModel, **options: Any) -> Tensor:
    torch.manual_seed(0)
    tokens: Tensor = model.generate(**models.padded_prompt("llama"), **{**OPTIONS, **options})
    return tokens


def assert_as_plain(model: PreTrainedModel, road: str = "engine") -> None:
    """In every mode, by `generate` and by an engine."""
    for mode, options in MODES.items():
        expected = generate(model, **options)
        assert_same_tokens(expected, generate(model, **options, **models.PAGED), mode)
        assert route_of(model).road == road, route_of(model).reason
    assert_used_pool(model)
    with PagedEngine(model, {"block_size": models.BLOCK_SIZE}) as engine:
        results = engine.generate(PROMPTS, OPTIONS)
        engine.check_integrity()
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.error is None, result.error
        plain = model.generate(torch.tensor([prompt]), **OPTIONS)
        assert_same_tokens(plain[:, len(prompt) :], torch.tensor([result.token_ids]))


# ------------------------------------------------------------------------------------------ hooks


def test_hooks_that_require_gradients() -> None:
    model = models.build("llama")
    model.enable_input_require_grads()
    assert_as_plain(model)


@pytest.mark.slow
def test_gradient_checkpointing() -> None:
    """While active, layers do not cache before 5.24, and plain's tokens are those of a model
    without a past."""
    model = models.build("llama")
    usual = generate(model)
    enable, disable = "activation_checkpointing_enable", "activation_checkpointing_disable"
    if models.BEFORE_5_18:
        enable, disable = "gradient_checkpointing_enable", "gradient_checkpointing_disable"
    getattr(model, enable)()
    model.enable_input_require_grads()
    assert_as_plain(model)
    model.train()
    assert torch.equal(generate(model), usual) != models.BEFORE_5_24
    assert_as_plain(model, road="hf_loop" if models.BEFORE_5_24 else "engine")
    getattr(model, disable)()
    assert_as_plain(model)


@pytest.mark.slow_cases("enable_grad")
@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_gradient_modes(context: Callable[[], Any]) -> None:
    model = models.build("llama").train()
    model.enable_input_require_grads()
    with context():
        assert_as_plain(model)


def test_a_hook_of_the_users_own_sees_what_plain_shows_it() -> None:
    """A hook that steers, and records its inputs."""
    model, seen = models.build("llama"), []
    steering = torch.randn(64, generator=torch.Generator().manual_seed(3))
    usual = generate(model, **models.PAGED)

    def steer(module: Any, args: Any, output: Tensor) -> Tensor:
        seen.append(output.shape)
        return output + steering

    handle = model.model.layers[0].mlp.register_forward_hook(steer)  # type: ignore[union-attr]
    expected = generate(model)
    assert not torch.equal(expected, usual), "the hook changes nothing: the test is void"
    shapes, seen[:] = list(seen), []
    assert_same_tokens(expected, generate(model, **models.PAGED))
    assert route_of(model).reason.endswith(
        "there are forward hooks on model.layers.0.mlp [troubleshooting.md#hooks]"
    )
    assert seen == shapes
    handle.remove()
    assert_same_tokens(usual, generate(model, **models.PAGED))
    assert route_of(model).road == "engine"


# --------------------------------------------------------------------------------------- forwards


@pytest.mark.slow
def test_the_classes_own_forward_as_an_attribute() -> None:
    """Like accelerate's `unwrap_model`."""
    model = models.build("llama")
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    assert vars(model)["forward"].__func__ is inspect.unwrap(LlamaForCausalLM.forward)
    assert_as_plain(model)


@pytest.mark.slow
def test_layers_with_the_forward_of_another_class() -> None:
    """Like `kernelize` and Liger, which patch instances: the function is bound to the layer."""

    class Norm:
        def forward(self: Any, hidden_states: Tensor) -> Tensor:
            wide = hidden_states.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * wide.to(hidden_states.dtype)

    model = models.build("llama")
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = types.MethodType(Norm.forward, module)
    assert_as_plain(model)


class _RMSNorm:
    @staticmethod
    def apply(hidden: Tensor, weight: Tensor, eps: float, *options: Any) -> Tensor:
        return weight * (hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps))


class _SiLUMul:
    @staticmethod
    def apply(gate: Tensor, up: Tensor, *factors: float) -> Tensor:
        return F.silu(gate) * up


@pytest.mark.slow
@pytest.mark.parametrize("patches", ["instance", "classes"])
def test_liger_kernels(patches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's Triton kernels do not run on a CPU: its patches are real, the maths of two layers is
    ours."""
    liger = pytest.importorskip("liger_kernel.transformers")
    monkeypatch.setattr("liger_kernel.transformers.rms_norm.LigerRMSNormFunction", _RMSNorm)
    monkeypatch.setattr("liger_kernel.transformers.swiglu.LigerSiLUMulFunction", _SiLUMul)
    names = ("LlamaRMSNorm", "LlamaMLP")
    for name in names:  # put back afterwards
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    monkeypatch.setattr(LlamaForCausalLM, "forward", LlamaForCausalLM.forward)
    model = models.build("llama")
    expected = generate(model)
    if patches == "instance":
        # the check must not rely on this afterwards
        assert_same_tokens(expected, generate(model, **models.PAGED))
    liger.apply_liger_kernel_to_llama(rope=False, model=model if patches == "instance" else None)
    if patches == "classes":
        model = models.build("llama")
        assert type(model.model.norm).__name__ == "LigerRMSNorm"  # type: ignore[union-attr]
    else:
        assert "forward" in vars(model) and "forward" in vars(model.model.norm)  # type: ignore[arg-type]
    assert_same_tokens(expected, generate(model))
    assert_as_plain(model)


def replace_mlp(
    model: PreTrainedModel, forward: Callable[[Callable[..., Tensor], Tensor], Tensor]
) -> Any:
    mlp: Any = model.model.layers[1].mlp  # type: ignore[union-attr]
    own = type(mlp).forward.__get__(mlp)
    mlp.forward = lambda hidden: forward(own, hidden)
    return mlp


@pytest.mark.slow
def test_a_forward_that_only_looks_at_shapes() -> None:
    model, seen = models.build("llama"), []

    def noting(own: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        seen.append(hidden.shape)
        return own(hidden) * 0.5

    replace_mlp(model, noting)
    assert_as_plain(model)
    assert seen


@pytest.mark.slow
def test_a_forward_that_depends_on_the_batch() -> None:
    """Runs the model's own loop if no other batch gives the same results."""
    model = models.build("llama")
    replace_mlp(model, lambda own, hidden: own(hidden) * hidden.shape[0])
    for options in MODES.values():
        assert_same_tokens(generate(model, **options), generate(model, **options, **models.PAGED))
        assert route_of(model).road == "hf_loop"
    needs_rows = models.build("llama")

    def raising(own: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        if hidden.shape[0] == 1:
            raise ValueError("a batch of one")
        return own(hidden)

    replace_mlp(needs_rows, raising)
    assert_same_tokens(generate(needs_rows), generate(needs_rows, **models.PAGED))
    assert route_of(needs_rows).road == "hf_loop"


class MeanLess:
    """A callable object as forward: subtracts the batch mean if switched on."""

    def __init__(self, mlp: Any, is_on: int) -> None:
        self.own, self.is_on = type(mlp).forward.__get__(mlp), is_on

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.apply(hidden)

    def apply(self, hidden: Tensor) -> Tensor:
        mean = hidden.mean((0, 1), keepdim=True)
        return self.own(hidden) - (mean if self.is_on else 0)


def of_method(own: Any, module: Any) -> Callable[..., Tensor]:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        return own(hidden) - (hidden.mean((0, 1), keepdim=True) if self.is_on else 0)

    return types.MethodType(forward, module)


def of_number(own: Any, is_on: int) -> Callable[..., Tensor]:
    return lambda hidden: own(hidden) - (hidden.mean((0, 1), keepdim=True) if is_on else 0)


def of_options(own: Any, options: dict[str, int]) -> Callable[..., Tensor]:
    return lambda hidden: (
        own(hidden) - (hidden.mean((0, 1), keepdim=True) if options["is_on"] else 0)
    )


class Around:
    """A callable object as forward, around another."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __call__(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.wrapped(hidden)
        return found


@pytest.mark.parametrize(
    "kind",
    [
        "object",
        "object's object",
        "object's method",
        "number",
        "dict",
        "module's method",
        "first an object",
    ],
)
def test_a_switch_of_a_forward_is_checked_again(kind: str) -> None:
    """A variable in its closure or an attribute now makes it depend on the whole batch."""
    model = models.build("llama")
    mlp: Any = model.model.layers[1].mlp  # type: ignore[union-attr]
    own, options = type(mlp).forward.__get__(mlp), {"is_on": 0}
    found = MeanLess(mlp, 0)
    mlp.is_on = 0

    def put(is_on: int) -> None:
        options["is_on"] = found.is_on = mlp.is_on = is_on
        forwards: dict[str, Any] = {
            "object": found,
            "object's object": Around(found),
            "object's method": found.apply,
            "number": of_number(own, is_on),
            "dict": of_options(own, options),
            "module's method": of_method(own, mlp),
        }
        mlp.forward = forwards.get(kind, found if is_on else own)

    tokens = []
    for is_on, road in enumerate(("engine", "hf_loop")):
        put(is_on)
        tokens.append(generate(model))
        assert_same_tokens(tokens[-1], generate(model, **models.PAGED))
        assert route_of(model).road == road, route_of(model).reason
    assert not torch.equal(*tokens), "the switch does nothing: the test is void"


def test_a_forward_that_only_records_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, check = [], capability.packed_check
    monkeypatch.setattr(capability, "packed_check", lambda *args: checks.append(0) or check(*args))
    model, seen = models.build("llama"), []
    replace_mlp(model, lambda own, hidden: seen.append(hidden.shape) or own(hidden))  # type: ignore[func-returns-value]
    for _ in range(3):
        generate(model, **models.PAGED)
    assert len(checks) == 1 and seen


@pytest.mark.slow
@pytest.mark.parametrize("replaced", ["layer", "model"])
def test_blocks_of_another_forward_are_not_served(replaced: str) -> None:
    model = models.build("llama")
    inputs = {"input_ids": models.token_ids(1, 40), **OPTIONS, "max_new_tokens": 100}

    def check() -> Tensor:
        expected = model.generate(**inputs)
        for _ in range(2):
            assert_same_tokens(expected, model.generate(**inputs, **models.PAGED))
            assert route_of(model).road == "engine"
        return expected

    before = check()
    if replaced == "layer":
        replace_mlp(model, lambda own, hidden: own(hidden) * 0.5)
        halved = check()
        replace_mlp(model, lambda own, hidden: own(hidden) * 0.25)
    else:
        hidden = model.model.layers[0].mlp  # type: ignore[union-attr]
        own = type(model).forward.__get__(model)

        def scaled(factor: float) -> Callable[..., Any]:
            @functools.wraps(own)
            def forward(*args: Any, **kwargs: Any) -> Any:
                weight = hidden.down_proj.weight
                kept, weight.data = weight.data, weight.data * factor
                try:
                    return own(*args, **kwargs)
                finally:
                    weight.data = kept

            return forward

        model.forward = scaled(0.5)
        halved = check()
        model.forward = scaled(0.25)
    assert not torch.equal(before, halved) and not torch.equal(halved, check()), (
        "nothing changes: the test is void"
    )


# --------------------------------------------------------------------------------------- autocast


def cast_inside(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Like `Accelerator.prepare`, which on the CPU accepts only bfloat16."""
    forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype)(type(model).forward))
    model.forward = types.MethodType(forward, model)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_in_the_forward_is_what_the_call_computes_in(dtype: torch.dtype) -> None:
    """Blocks in half precision, read in place; not shared with calls without autocast, though
    nothing outside differs."""
    model = models.build("llama")
    plain = generate(model, max_new_tokens=60)
    assert_same_tokens(plain, generate(model, max_new_tokens=60, **models.PAGED))
    wide = hf_paged.memory_stats(model, reset=True).peak_bytes
    own = model.forward
    cast_inside(model, dtype)
    assert model.dtype is torch.float32
    logits = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 60}
    expected, outputs = (generate(model, **logits, **options) for options in ({}, models.PAGED))
    route = route_of(model)
    assert (route.road, route.in_place, route.slowed_by) == ("engine", True, ())
    assert outputs.logits[0].dtype is expected.logits[0].dtype is torch.float32
    for step in (0, 1):
        difference = (outputs.logits[step] - expected.logits[step]).abs().max()
        assert 0 <= difference < CLOSE[dtype]
    assert (outputs.sequences == expected.sequences).float().mean() > 0.7
    del outputs, expected
    assert hf_paged.memory_stats(model).peak_bytes == wide // 2
    model.forward = own  # restored: blocks in half precision must not serve it
    assert_same_tokens(plain, generate(model, max_new_tokens=60, **models.PAGED))


@pytest.mark.slow
def test_autocast_to_another_dtype_gets_blocks_of_its_own() -> None:
    model, hits = models.build("llama"), []
    prompt = models.token_ids(1, 60)[0].tolist()
    with PagedEngine(model) as engine:
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, torch.float16):
            cast_inside(model, dtype)
            hits.append(engine.generate([prompt], OPTIONS)[0].num_prefix_hit_tokens > 0)
    assert hits == [False, True, False, True]


# ---------------------------------------------------------------------------------------- weights


def on_one_device(model: PreTrainedModel, folder: Path) -> None:
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))


def offloaded(model: PreTrainedModel, folder: Path) -> None:
    cpu_offload(model, execution_device=torch.device("cpu"))


def on_disk(model: PreTrainedModel, folder: Path) -> None:
    disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def partly_on_disk(model: PreTrainedModel, folder: Path) -> None:
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.rotary_emb"), "cpu")
    places |= dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), "disk")
    dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("place", [on_one_device, offloaded, on_disk, partly_on_disk])
def test_weights_that_accelerate_places(
    place: Callable[[PreTrainedModel, Path], None], tmp_path: Path
) -> None:
    model = models.build("llama")
    expected = generate(copy.deepcopy(model))
    place(model, tmp_path)
    if place is not on_one_device:
        assert any(weight.is_meta for weight in model.parameters()), (
            "nothing is elsewhere: the test is void"
        )
    assert_same_tokens(expected, generate(model))
    assert_as_plain(model)
    remove_hook_from_module(model, recurse=True)
    if place is on_one_device:
        assert "forward" in vars(model)
        assert_as_plain(model)


@pytest.mark.slow
def test_a_checkpoint_loaded_with_a_device_map(tmp_path: Path) -> None:
    """A layer stays on disk, in the checkpoint's safetensors file, and is read for each forward."""
    plain = models.build("llama")
    plain.save_pretrained(tmp_path)
    places: dict[str, Any] = dict.fromkeys(
        ("model.embed_tokens", "model.layers.0", "model.rotary_emb"), "cpu"
    )
    places |= dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), "disk")
    loaded = LlamaForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offload"
    )
    assert sum(weight.is_meta for weight in loaded.parameters()) == 11, (
        "nothing is on disk: the test is void"
    )
    expected = generate(plain)
    assert_same_tokens(expected, generate(loaded))
    assert_as_plain(loaded)
    with PagedEngine(loaded, {"block_size": models.BLOCK_SIZE}) as engine:
        engine.generate(PROMPTS, OPTIONS)
        assert engine.route is not None and engine.route.road == "engine", engine.route
