"""Models as libraries set them up: with hooks, replaced forwards, weights kept elsewhere."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator, cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hf_paged
from hf_paged import PagedEngine
from hf_paged.model import capability
from tests.callers.test_callers import BEAMS, GREEDY, SAMPLES, assert_used_pool
from tests.callers.test_mixed_precision import no_accelerator_left  # noqa: F401
from tests.support import models
from tests.support.checks import assert_same_tokens, generate_both
from tests.support.engine_helpers import prompts

CLOSE = {torch.bfloat16: 0.25, torch.float16: 0.05}  # logits have a standard deviation of 3
INPUTS = models.padded_prompt("llama")
PROMPTS = prompts(5, 9, 3)


def route_of(model: PreTrainedModel) -> hf_paged.Route:
    route = hf_paged.last_route(model)
    assert route is not None
    return route


def generate(model: PreTrainedModel, **options: Any) -> Tensor:
    tokens: Tensor = model.generate(**INPUTS, **{**GREEDY, **options})
    return tokens


def assert_both(model: PreTrainedModel, road: str = "engine", **options: Any) -> Tensor:
    """Plain and paged calls give the same tokens, which are returned."""
    expected, tokens = generate_both(model, INPUTS, {**GREEDY, **options})
    assert_same_tokens(expected, tokens)
    assert route_of(model).road == road, route_of(model).reason
    return expected


def assert_as_plain(model: PreTrainedModel, road: str = "engine") -> None:
    """In every mode, by `generate` and by an engine."""
    for mode in (GREEDY, BEAMS, SAMPLES):
        assert_both(model, road, **mode)
    assert_used_pool(model)
    with PagedEngine(model, {"block_size": models.BLOCK_SIZE}) as engine:
        for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
            assert result.error is None, result.error
            expected = model.generate(torch.tensor([prompt]), **GREEDY)
            assert_same_tokens(expected[:, len(prompt) :], torch.tensor([result.token_ids]))
        engine.check_integrity()
        if road == "engine":
            assert engine.route is not None and engine.route.road == "engine", engine.route


# ------------------------------------------------------------------------------------------ hooks


@pytest.mark.slow_cases("enable_grad")
@pytest.mark.parametrize(
    "context", [nullcontext, torch.inference_mode, torch.no_grad, torch.enable_grad]
)
def test_hooks_that_require_gradients(context: Callable[[], Any]) -> None:
    model = models.build("llama").train()
    model.enable_input_require_grads()
    with context():
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


def unwrap(model: Any) -> None:
    """The class's own forward as an attribute."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    assert vars(model)["forward"].__func__ is inspect.unwrap(LlamaForCausalLM.forward)


def replace_norms(model: Any) -> None:
    """Like `kernelize` and Liger, which patch instances: the function is bound to the layer."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)

    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = types.MethodType(forward, module)


def add_device_hooks(model: Any) -> None:
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))


def remove_device_hooks(model: Any) -> None:
    add_device_hooks(model)
    remove_hook_from_module(model, recurse=True)
    assert "forward" in vars(model)


def offload(model: Any) -> None:
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert any(weight.is_meta for weight in model.parameters()), "nothing is elsewhere: void"


@pytest.mark.slow
@pytest.mark.parametrize(
    "set_up", [unwrap, replace_norms, add_device_hooks, remove_device_hooks, offload]
)
def test_set_ups_that_change_no_token(set_up: Callable[[Any], None]) -> None:
    model = models.build("llama")
    expected = generate(model)
    set_up(model)
    assert_same_tokens(expected, generate(model))
    assert_as_plain(model)


@pytest.mark.slow
def test_a_checkpoint_loaded_with_a_device_map(tmp_path: Path) -> None:
    """A layer stays on disk, in the checkpoint's safetensors file, and is read for each forward."""
    plain = models.build("llama")
    plain.save_pretrained(tmp_path)
    on_cpu = ("model.embed_tokens", "model.layers.0", "model.rotary_emb")
    on_disk = ("model.layers.1", "model.norm", "lm_head")
    places: Any = {**dict.fromkeys(on_cpu, "cpu"), **dict.fromkeys(on_disk, "disk")}
    loaded = LlamaForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offload"
    )
    assert sum(weight.is_meta for weight in loaded.parameters()) == 11, "nothing is on disk: void"
    assert_same_tokens(generate(plain), generate(loaded))
    assert_as_plain(loaded)


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
    for name in ("LlamaRMSNorm", "LlamaMLP"):  # put back afterwards
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    monkeypatch.setattr(LlamaForCausalLM, "forward", LlamaForCausalLM.forward)
    model: Any = models.build("llama")
    expected = assert_both(model)  # the check must not rely on this call afterwards
    liger.apply_liger_kernel_to_llama(rope=False, model=model if patches == "instance" else None)
    if patches == "classes":
        model = models.build("llama")
        assert type(model.model.norm).__name__ == "LigerRMSNorm"
    else:
        assert "forward" in vars(model) and "forward" in vars(model.model.norm)
    assert_same_tokens(expected, generate(model))
    assert_as_plain(model)


def replace_mlp(
    model: PreTrainedModel, forward: Callable[[Callable[..., Tensor], Tensor], Tensor]
) -> None:
    mlp: Any = model.model.layers[1].mlp  # type: ignore[union-attr]
    own = type(mlp).forward.__get__(mlp)
    mlp.forward = lambda hidden: forward(own, hidden)


def test_a_forward_that_only_records_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, check = [], capability.packed_check
    monkeypatch.setattr(capability, "packed_check", lambda *args: checks.append(0) or check(*args))
    model, seen = models.build("llama"), []

    def record(own: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        seen.append(hidden.shape)
        return own(hidden) * 0.5

    replace_mlp(model, record)
    for _ in range(3):
        assert_both(model)
    assert len(checks) == 1 and seen


def scale_by_rows(own: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    return own(hidden) * hidden.shape[0]


def refuse_one_row(own: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    if hidden.shape[0] == 1:
        raise ValueError("a batch of one")
    return own(hidden)


@pytest.mark.slow
@pytest.mark.parametrize("forward", [scale_by_rows, refuse_one_row])
def test_a_forward_that_depends_on_the_batch(forward: Callable[..., Tensor]) -> None:
    """Runs the model's own loop, since no other batch gives the same results."""
    model = models.build("llama")
    replace_mlp(model, forward)
    for mode in (GREEDY, BEAMS, SAMPLES):
        assert_both(model, "hf_loop", **mode)


class MeanLess:
    """A callable object as forward: subtracts the batch mean if switched on."""

    def __init__(self, own: Callable[..., Tensor], is_on: int = 0) -> None:
        self.own, self.is_on = own, is_on

    def __call__(self, hidden: Tensor) -> Tensor:
        mean = hidden.mean((0, 1), keepdim=True)
        return self.own(hidden) - (mean if self.is_on else 0)


@pytest.mark.parametrize("kind", ["object", "object's method", "module's method"])
def test_a_switch_of_a_forward_is_checked_again(kind: str) -> None:
    """An attribute now makes it depend on the whole batch; tests/fingerprints has more cases."""
    model = models.build("llama")
    mlp: Any = model.model.layers[1].mlp  # type: ignore[union-attr]
    own = type(mlp).forward.__get__(mlp)
    switch = MeanLess(own)

    def of_module(self: Any, hidden: Tensor) -> Tensor:
        return MeanLess(own, self.is_on)(hidden)

    mlp.forward = {
        "object": switch,
        "object's method": switch.__call__,
        "module's method": types.MethodType(of_module, mlp),
    }[kind]
    tokens = []
    for is_on, road in enumerate(("engine", "hf_loop")):
        switch.is_on = mlp.is_on = is_on
        tokens.append(assert_both(model, road))
    assert not torch.equal(*tokens), "the switch does nothing: the test is void"


# --------------------------------------------------------------------------------------- autocast


def cast_inside(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Like `Accelerator.prepare`, which on the CPU accepts only bfloat16."""
    forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype)(type(model).forward))
    model.forward = types.MethodType(forward, model)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", CLOSE)
def test_autocast_in_the_forward_is_what_the_call_computes_in(dtype: torch.dtype) -> None:
    """Blocks in half precision, read in place; not shared with calls without autocast, or in
    another precision, though nothing outside differs."""
    model = models.build("llama")
    plain = assert_both(model, max_new_tokens=60)
    wide = hf_paged.memory_stats(model, reset=True).peak_bytes
    own = model.forward
    cast_inside(model, dtype)
    assert model.dtype is torch.float32
    logits = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 60}
    expected, outputs = generate_both(model, INPUTS, {**GREEDY, **logits})
    route = route_of(model)
    assert (route.road, route.in_place, route.slowed_by) == ("engine", True, ())
    assert outputs.logits[0].dtype is expected.logits[0].dtype is torch.float32
    for step in (0, 1):
        difference = (outputs.logits[step] - expected.logits[step]).abs().max()
        assert difference < CLOSE[dtype]
    assert (outputs.sequences == expected.sequences).float().mean() > 0.7
    del outputs, expected
    assert hf_paged.memory_stats(model).peak_bytes == wide // 2
    model.forward = own  # restored: blocks in half precision must not serve it
    assert_same_tokens(plain, generate(model, max_new_tokens=60, **models.PAGED))
    hits = []
    with PagedEngine(model) as engine:
        for other in (dtype, dtype, *(x for x in CLOSE if x is not dtype)):
            cast_inside(model, other)
            (result,) = engine.generate(prompts(60), GREEDY)
            hits.append(result.num_prefix_hit_tokens > 0)
    assert hits == [False, True, False]
